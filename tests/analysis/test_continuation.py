"""A continuation is what a loop of full passes gives, and says what the model said before each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.analysis import continue_text
from t2lens.analysis.continuation import new_tokens
from t2lens.config import Attention, ModelConfig
from tests.systems import tiny

SYSTEMS = ["standard", "attnres-full", "ddl-tc-ec", "hyper-connections", "muddformer", "dca"]
EDIT = {"target": "atom", "site": "1.attn", "operation": "scale", "value": -2.0}


def naive(model: Any, ids: list[int], n: int, temperature: float, top_k: int | None, seed: int) -> list[int]:
    """Full passes, one after another."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(ids)
    for _ in range(n):
        with torch.no_grad():
            last = model(torch.tensor([ids]))[0, -1].float()
        if temperature == 0:
            ids.append(int(last.argmax()))
            continue
        p = last / temperature
        if top_k is not None:
            p[p < p.sort(descending=True).values[top_k - 1]] = -torch.inf
        ids.append(int(torch.multinomial(p.softmax(-1)[None], 1, generator=generator)))
    return ids


def prompt(model: Any, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, model.cfg.d_vocab, int(rng.integers(2, 7))).tolist()


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, None), (0.9, None), (1.4, 4)])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_continuation_is_a_loop_of_full_passes(
    system: str, temperature: float, top_k: int | None, use_cache: bool
) -> None:
    model = tiny(system, 3).double()
    ids, seed = prompt(model, 5), 11
    found = continue_text(model, ids, n=6, temperature=temperature, top_k=top_k, seed=seed, use_cache=use_cache).dataset
    assert [*ids, *found["id"].values] == naive(model, ids, 6, temperature, top_k, seed)
    generated = model.generate(torch.tensor([ids]), 6, temperature=temperature, top_k=top_k, seed=seed)
    assert [*ids, *found["id"].values] == generated[0].tolist()


def test_numbers_are_those_of_the_prediction_before_each_token() -> None:
    model = tiny("attnres-full", 2).double()
    ids = prompt(model, 1)
    found = continue_text(model, ids, n=7, temperature=1.3, top_k=5, seed=4, top=3).dataset
    whole = [*ids, *found["id"].values.tolist()]
    with torch.no_grad():
        p = model(torch.tensor([whole]))[0].softmax(-1).numpy()
    for i, row in enumerate(p[len(ids) - 1 : -1]):
        token = whole[len(ids) + i]
        assert found["probability"][i] == pytest.approx(row[token], rel=1e-9)
        assert int(found["rank"][i]) == 1 + int((row > row[token]).sum())
        assert found["entropy"][i] == pytest.approx(-(row * np.log(row)).sum(), rel=1e-9)
        order = np.argsort(-row)[:3]
        assert found["top_id"][i].values.tolist() == order.tolist()
        assert found["top_probability"][i].values == pytest.approx(row[order])
        sharp = row ** (1 / 1.3)
        sharp[np.argsort(-row)[5:]] = 0
        assert found["drawn_from"][i] == pytest.approx(sharp[token] / sharp.sum(), rel=1e-9)
    assert found["pos"].values.tolist() == list(range(len(ids), len(ids) + 7))


def test_it_stops_where_the_context_is_full() -> None:
    model = tiny("standard", 0)
    ids = [1] * (model.cfg.n_ctx - 3)
    finding = continue_text(model, ids, n=20)
    assert finding.dataset.sizes["new"] == 3
    assert any("ends at the context" in note for note in finding.notes)
    with pytest.raises(ValueError, match="fills the context"):
        continue_text(model, [1] * model.cfg.n_ctx)


def test_tokens_come_one_at_a_time() -> None:
    model = tiny("ddl-tc-ec", 0)
    passes = 0

    def count(x: Any, *, hook: Any) -> None:
        nonlocal passes
        passes += 1

    with model.hooks(fwd_hooks=[("hook_embed", count)]):
        steps = new_tokens(model, [0, 3], 5)
        next(steps)
        assert passes == 1
        next(steps)
        assert passes == 2


def test_edits_act_on_every_new_token() -> None:
    model = tiny("attnres-full", 6).double()
    ids = prompt(model, 2)
    with t2lens.edited(model, EDIT):
        found = continue_text(model, ids, n=6).dataset
        expected = naive(model, ids, 6, 0.0, None, 0)
    assert [*ids, *found["id"].values] == expected
    assert expected != naive(model, ids, 6, 0.0, None, 0)


def test_an_edit_counted_from_the_end_acts_at_the_end_of_the_text_so_far() -> None:
    model = tiny("standard", 6).double()
    last = {**EDIT, "positions": [-1]}
    ids = prompt(model, 3)
    with t2lens.edited(model, last):
        with pytest.raises(ValueError, match="its end moves"):
            continue_text(model, ids, n=3)
        found = continue_text(model, ids, n=5, use_cache=False).dataset
        assert [*ids, *found["id"].values] == naive(model, ids, 5, 0.0, None, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 0}, "n must be"),
        ({"n": True}, "n must be"),
        ({"top": 0}, "top must be"),
        ({"temperature": -1.0}, "temperature >= 0"),
        ({"temperature": float("nan")}, "temperature >= 0"),
        ({"top_k": 0, "temperature": 1.0}, "top_k >= 1"),
    ],
)
def test_what_cannot_be_is_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        continue_text(tiny("standard", 0), [1, 2], **options)


def test_one_text_and_a_model_that_can_go_on() -> None:
    with pytest.raises(ValueError, match="One text"):
        continue_text(tiny("standard", 0), [[1, 2], [3, 4]])
    both_ways = t2lens.build(
        ModelConfig(
            d_vocab=20,
            n_ctx=16,
            d_model=8,
            n_layers=1,
            attention=Attention(n_heads=2, n_kv_heads=2, d_head=4, causal=False),
        )
    )
    with pytest.raises(ValueError, match="bidirectional"):
        continue_text(both_ways, [1, 2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_predictions_that_are_not_finite_are_refused(temperature: float) -> None:
    model = tiny("standard", 0)
    model.embed.weight.data[2] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        continue_text(model, [1, 2], temperature=temperature)

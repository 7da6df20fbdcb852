"""Variants of a pass as rows, intervals over sequences, rank correlation."""

import random
from typing import Any

import numpy as np
import pytest
import torch

import t2lens.analysis
from t2lens.analysis import variants
from t2lens.analysis.inputs import read_batch
from t2lens.analysis.statistics import interval_of_mean, pearson, spearman
from t2lens.analysis.variants import EMBEDDING, Variant, effects_of, layer_of, run_variants
from tests.systems import random_tokens, tiny


def _scale(factor: float) -> Any:
    return lambda x: x * factor


def _made(model: Any, plans: list[dict[str, float]]) -> list[Variant]:
    return [
        Variant(layer=min(layer_of(model, n) for n in plan), edits={n: _scale(f) for n, f in plan.items()})
        for plan in plans
    ]


NAMES = ["hook_embed", "blocks.0.hook_mlp_out", "blocks.2.hook_depth_attn_attn", "hook_read_final"]
PLANS = [{name: 0.5} for name in NAMES] + [{NAMES[1]: 0.1, NAMES[3]: 2.0}, {NAMES[0]: 0.3, NAMES[2]: 0.2}]


@pytest.mark.parametrize("budget", [1, 2**27])
def test_every_variant_is_run_once_however_small_the_passes(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_BUDGET", budget)
    model, tokens = tiny("attnres-full", seed=1), random_tokens(5)[:1]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[-1, 2] = False
    made = _made(model, PLANS)
    assert [v.layer for v in made] == [EMBEDDING, 0, 2, 3, 0, EMBEDDING]
    seen = {}
    for which, logits in run_variants(model, model.record(tokens, mask), made):
        assert len(which) == 1 or budget > 1
        for i, out in zip(which.tolist(), logits, strict=True):
            assert i not in seen
            seen[i] = out
    assert len(seen) == len(PLANS)
    for i, plan in enumerate(PLANS):
        hooks = [(name, lambda x, hook, f=factor: x * f) for name, factor in plan.items()]
        with torch.no_grad():
            alone = model.run_with_hooks(tokens, mask, fwd_hooks=hooks)
        assert (seen[i] - alone[0])[mask[0]].abs().max() < 1e-10


@pytest.mark.parametrize("side", ["right", "left", "middle"])
def test_effects_are_those_of_naive_passes_over_each_sequence_with_any_padding(side: str) -> None:
    model, tokens = tiny("attnres-full", seed=2, local=True), random_tokens(2)
    tokens = torch.cat([tokens, tokens.flip(1)])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, {"right": slice(-2, None), "left": slice(0, 2), "middle": slice(1, 2)}[side]] = False
    batch = read_batch(model, tokens, mask)
    found = effects_of(model, batch, _made(model, PLANS), token=7)
    known = mask[:, :-1] & mask[:, 1:]
    assert torch.equal(found.counts, known.sum(dim=-1))
    ids = tokens[:, 1:, None]
    with torch.no_grad():
        base = model(tokens, mask)[:, :-1]
        p = base.log_softmax(-1)
        for i, plan in enumerate(PLANS):
            hooks = [(name, lambda x, hook, f=factor: x * f) for name, factor in plan.items()]
            other = model.run_with_hooks(tokens, mask, fwd_hooks=hooks)[:, :-1]
            q = other.log_softmax(-1)
            expected = {
                "loss": (p - q).gather(-1, ids)[..., 0],
                "kl": (p.exp() * (p - q)).sum(-1),
                "logit": (other - base)[..., 7],
                "probability": (q.exp() - p.exp()).gather(-1, ids)[..., 0],
                "hits": ((q.argmax(-1) == ids[..., 0]).double() - (p.argmax(-1) == ids[..., 0]).double()),
            }
            for name, values in expected.items():
                assert (getattr(found, name)[i] - (values * known).sum(-1)).abs().max() < 1e-10, name
        assert (found.base_loss + (p.gather(-1, ids)[..., 0] * known).sum(-1)).abs().max() < 1e-10


def test_without_next_tokens_there_is_the_divergence_alone() -> None:
    model = tiny("standard", seed=2)
    made = [Variant(layer=1, edits={"blocks.1.hook_mlp_out": torch.zeros_like})]
    found = effects_of(model, read_batch(model, [[3], [4]]), made)
    assert (found.kl > 0).all()
    assert found.counts.tolist() == [1, 1]
    for name in ("loss", "logit", "probability", "hits", "base_loss"):
        assert getattr(found, name).isnan().all()
    some = effects_of(model, read_batch(model, [[3, 4], [4, 0]], [[1, 1], [1, 0]]), made)
    assert some.counts.tolist() == [1, 0]
    assert some.kl[0, 1] == 0


@pytest.mark.parametrize(
    ("name", "system", "more"),
    [
        ("measure_effects", "attnres-full", {}),
        ("measure_effects", "standard", {"fast": True}),
        ("ablate_families", "attnres-full", {}),
        ("ablate_streams", "mhc", {}),
        ("patch_activations", "standard", {"other": [3, 2, 1]}),
        ("attribution_patching", "standard", {"other": [3, 2, 1]}),
        ("routing_advantage", "attnres-full", {}),
        ("content_dependence", "attnres-full", {}),
    ],
)
def test_numbers_that_are_not_finite_are_a_sentence(name: str, system: str, more: dict[str, Any]) -> None:
    model = tiny(system, seed=1)
    model.blocks[1].mlp.output.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="3 of 3 tokens are NaN or infinite"):
        getattr(t2lens.analysis, name)(model, [1, 2, 3], **more)


def test_intervals_are_the_quantiles_of_resampled_means() -> None:
    dice = np.random.default_rng(random.randrange(1000))
    sums, counts = dice.normal(size=(3, 6)), dice.integers(1, 9, size=6)
    low, high = interval_of_mean(sums, counts, seed=3, draws=200, level=0.8)
    drawn = np.random.default_rng(3).integers(6, size=(200, 6))
    for k in range(3):
        means = np.array([float(sum(sums[k, b] for b in row)) / float(sum(counts[b] for b in row)) for row in drawn])
        assert low[k] == pytest.approx(np.quantile(means, 0.1))
        assert high[k] == pytest.approx(np.quantile(means, 0.9))
    again, other = interval_of_mean(sums, counts, seed=3), interval_of_mean(sums, counts, seed=4)
    assert np.array_equal(again[0], interval_of_mean(sums, counts, seed=3)[0])
    assert not np.array_equal(again[0], other[0])


def test_sequences_without_a_token_that_counts_are_not_drawn() -> None:
    low, high = interval_of_mean([[1.0, 0.0, 3.0]], [1, 0, 1])
    assert (low[0], high[0]) == (1.0, 3.0)
    assert np.isnan(interval_of_mean([[1.0, 0.0]], [1, 0])).all()


def test_ranks_share_their_places_and_what_does_not_exist_is_left_out() -> None:
    assert spearman([1, 2, 2, 5, np.nan], [2, 4, 4, 9, 0]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert np.isnan(spearman([1, 2], [1, 2]))
    assert np.isnan(pearson([1, 1, 1], [1, 2, 3]))
    x, y = np.random.default_rng(0).normal(size=(2, 20))
    assert pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])

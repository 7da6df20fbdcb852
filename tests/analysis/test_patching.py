"""Activation patching against one pass per patch, attribution patching against small steps."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import t2lens
from t2lens.analysis import attribution_patching, patch_activations
from t2lens.analysis.places import PLACES, activation_places, align
from t2lens.cli import app
from t2lens.config import Norm
from tests.systems import SYSTEMS, tiny

METRICS = ("logit_diff", "loss", "probability", "kl")


def _prompts(seed: int, n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(50, (n,), generator=generator)
    corrupted = clean.clone()
    corrupted[1] = (corrupted[1] + 7) % 50
    return clean, corrupted


def _metric(logits: torch.Tensor, clean: torch.Tensor, metric: str, answer: int, wrong: int) -> float:
    """Of the last position of logits [1, pos, V]."""
    last, reference = logits[0, -1], clean[0, -1].log_softmax(-1)
    if metric == "logit_diff":
        return float(last[answer] - last[wrong])
    p = last.log_softmax(-1)
    if metric == "loss":
        return float(-p[answer])
    return float(p[answer].exp()) if metric == "probability" else float((reference.exp() * (reference - p)).sum())


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_entry_is_what_one_pass_with_that_patch_gives(system: str) -> None:
    seed = random.randrange(1000)
    model = tiny(system, seed=seed)
    clean, corrupted = _prompts(seed)
    metric = METRICS[seed % 4]
    with torch.no_grad():
        plain, cache = model.run_with_cache(clean[None])
        ends = [_metric(model(x[None]), plain, metric, 3, 4) for x in (corrupted, clean)]
    for what in ("atom", *random.sample(PLACES[1:], 2)):
        try:
            found = patch_activations(model, clean, corrupted, what=what, metric=metric, answer=3, wrong=4)
        except ValueError as error:
            assert what in ("depth_weight", "stream")
            assert "what=" in str(error)
            continue
        places = activation_places(model, what)
        part_of = {"head": "head", "stream": "stream"}.get(what)
        parts = found.dataset.sizes.get(part_of, 0)
        for label, hook in places.items():
            pos, part = random.randrange(4), random.randrange(parts) if parts else None

            def patch(x: torch.Tensor, *, hook: Any, pos: int = pos, part: int | None = part) -> torch.Tensor:
                x = x.clone()
                at = (0, pos) if part is None else (0, pos, part)
                x[at] = cache[hook.name][at]
                return x

            with torch.no_grad():
                logits = model.run_with_hooks(corrupted[None], fwd_hooks=[(hook, patch)])
            value = _metric(logits, plain, metric, 3, 4)
            at = {found["metric"].dims[0]: label, "pos": pos} | (
                {part_of: str(found[part_of].values[part])} if parts else {}
            )
            assert abs(float(found["metric"].sel(at)) - value) < 1e-10, (seed, what, label)
            recovered = float(found["recovered"].sel(at)) * (ends[1] - ends[0])
            assert abs(recovered - (value - ends[0])) < 1e-10 or ends[0] == ends[1]


@pytest.mark.parametrize("system", SYSTEMS)
def test_patching_everything_gives_the_clean_metric_and_a_prompt_with_itself_nothing(system: str) -> None:
    seed = random.randrange(1000)
    model = tiny(system, seed=seed)
    clean, corrupted = _prompts(seed)
    whole = patch_activations(model, clean, corrupted, positions="all", metric=METRICS[seed % 4])
    assert abs(float(whole["metric"].sel(atom="embed") - whole["clean_metric"])) < 1e-10
    if float(whole["clean_metric"]) != float(whole["corrupted_metric"]):
        assert abs(float(whole["recovered"].sel(atom="embed")) - 1) < 1e-6
    for what in random.sample(("atom", "read", "head"), 1):
        same = patch_activations(model, clean, clean, what=what)
        assert np.nanmax(np.abs(same["metric"].values - float(same["clean_metric"]))) < 1e-10
        assert np.isnan(same["recovered"].values).all()
        assert any("nothing to recover" in note for note in same.notes)


@pytest.mark.parametrize("system", ["standard", "ddl", "deepnet", "highway"])
def test_a_single_stream_is_all_there_is(system: str) -> None:
    model = tiny(system, seed=3)
    found = patch_activations(model, *_prompts(3), what="stream", positions="all")
    assert np.abs(found["recovered"].values - 1).max() < 1e-8
    last = patch_activations(model, *_prompts(3), what="stream")["recovered"].sel(boundary="readout").values
    assert np.abs(last - [0, 0, 0, 1]).max() < 1e-8  # there only the position that predicts counts


def test_what_comes_after_the_measured_position_recovers_nothing() -> None:
    found = patch_activations(tiny("attnres-full", seed=1), *_prompts(1), position=2)
    assert np.abs(found["recovered"].values[:, 3]).max() < 1e-12
    assert np.abs(found["recovered"].values[:, 0]).max() < 1e-12  # the prompts are one up to there


def test_prompts_of_different_lengths_are_matched_as_said_and_never_by_themselves() -> None:
    model = tiny("attnres-full", seed=2)
    clean, corrupted = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([9, 4, 5])
    with pytest.raises(ValueError, match='have 5 and 3 tokens; give alignment="left"'):
        patch_activations(model, clean, corrupted)
    for alignment, pairs in (
        ("left", {0: 0, 1: 1, 2: 2}),
        ("right", {0: 2, 1: 3, 2: 4}),
        ([(3, 1), (-1, -1)], {1: 3, 2: 4}),
        ("3:1 4:2", {1: 3, 2: 4}),
    ):
        found = patch_activations(model, clean, corrupted, alignment=alignment)
        partner = found.dataset["clean_pos"].values
        assert {b: int(a) for b, a in enumerate(partner) if np.isfinite(a)} == pairs
        there = np.isfinite(found["metric"].values).all(axis=0)
        assert there.tolist() == [b in pairs for b in range(3)]
        with torch.no_grad():
            _, cache = model.run_with_cache(clean[None])

            def patch(
                x: torch.Tensor, *, hook: Any, new: torch.Tensor = cache["blocks.1.hook_mlp_out"]
            ) -> torch.Tensor:
                x = x.clone()
                x[:, 1] = new[:, pairs[1]]  # noqa: B023
                return x

            logits = model.run_with_hooks(corrupted[None], fwd_hooks=[("blocks.1.hook_mlp_out", patch)])
        expected = _metric(logits, logits, "loss", 7, 0)
        loss = patch_activations(model, clean, corrupted, alignment=alignment, metric="loss", answer=7)
        assert abs(float(loss["metric"].sel(atom="1.mlp", pos=1)) - expected) < 1e-10


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("middle", 'must be "left", "right" or pairs'),
        ([], 'must be "left", "right" or pairs'),
        ([(0, 1, 2)], 'must be "left", "right" or pairs'),
        ([(0, 3)], "position 3 of the corrupted prompt, which has 0..2"),
        ([(5, 0)], "position 5 of the clean prompt, which has 0..4"),
        ([(0, 1), (2, 1)], "gives position 1 of the corrupted prompt two partners"),
        ("0:2 1:-1", "gives position 2 of the corrupted prompt two partners"),
    ],
)
def test_a_bad_alignment_is_one_sentence(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        align(5, 3, given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"what": "layer"}, "what must be one of atom, read"),
        ({"metric": "accuracy"}, "metric must be one of logit_diff"),
        ({"positions": "some"}, 'positions must be "each" or "all"'),
        ({"other": None}, "needs a second prompt"),
        ({"other": [[1, 2, 3, 4], [1, 2, 3, 4]]}, "the second holds 2 sequences"),
        ({"position": 4}, "has no position 4"),
        ({"answer": 50}, "Token id 50 is outside the vocabulary"),
        ({"what": "depth_weight"}, "no depth weights to patch"),
    ],
)
def test_bad_arguments_are_one_sentence(changes: dict[str, Any], words: str) -> None:
    clean, corrupted = _prompts(0)
    with pytest.raises(ValueError, match=words):
        patch_activations(tiny("standard"), clean, **({"other": corrupted} | changes))


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "dca-drop"])  # reads exactly nothing at times
def test_an_estimate_is_the_slope_of_a_small_patch(system: str) -> None:
    seed = random.randrange(1000)
    model = tiny(system, seed=seed)
    clean, corrupted = _prompts(seed)
    with torch.no_grad():
        plain, cache = model.run_with_cache(clean[None])
        ends = [_metric(model(x[None]), plain, "loss", 3, 4) for x in (corrupted, clean)]
    for what in random.sample(PLACES, 3):
        try:
            found = attribution_patching(model, clean, corrupted, what=what, metric="loss", answer=3)
        except ValueError:
            continue
        part_of = {"head": "head", "stream": "stream"}.get(what)
        parts = found.dataset.sizes.get(part_of, 0)
        for label, hook in random.sample(sorted(activation_places(model, what).items()), 1):
            pos, part = random.randrange(1, 4), random.randrange(parts) if parts else None
            at = {found["estimate"].dims[0]: label, "pos": pos} | (
                {part_of: str(found[part_of].values[part])} if parts else {}
            )
            estimate = float(found["estimate"].sel(at)) * (ends[1] - ends[0])

            def loss(step: float, name: str = hook, place: Any = (0, pos) if part is None else (0, pos, part)) -> float:
                def nudge(x: torch.Tensor, *, hook: Any) -> torch.Tensor:
                    x = x.clone()
                    x[place] += step * (cache[name][place] - x[place])
                    return x

                with torch.no_grad():
                    logits = model.run_with_hooks(corrupted[None], fwd_hooks=[(name, nudge)])
                return _metric(logits, plain, "loss", 3, 4)

            # near a read of nothing a norm is steep, and the step must be small
            slopes = [(loss(step) - loss(-step)) / (2 * step) for step in (1e-5, 1e-7, 1e-8)]
            close = [abs(estimate - slope) < 1e-6 + 1e-3 * abs(slope) for slope in slopes]
            assert any(close) or ends[0] == ends[1], (seed, what, label, estimate, slopes)


def test_estimates_are_exact_where_the_metric_is_linear() -> None:
    model = tiny("standard", seed=8, final_norm=Norm(kind="none"))
    found = attribution_patching(model, *_prompts(8), what="read", compare=True)
    for name in ("estimate", "recovered"):
        assert np.abs(found[name].sel(read="out").values - [0, 0, 0, 1]).max() < 1e-10
    assert -1 <= float(found["spearman"]) <= 1
    assert any("Measured against patching: correlation" in note for note in found.notes)


@pytest.mark.parametrize("system", ["attnres-full", "denseformer", "mhc", "ddl"])
def test_estimates_do_not_depend_on_whether_parameters_are_frozen(system: str) -> None:
    model = tiny(system, seed=5)
    what = "atom" if system == "ddl" else "depth_weight"
    free = attribution_patching(model, *_prompts(5), what=what)
    frozen = tiny(system, seed=5).requires_grad_(False)
    with torch.no_grad():
        again = attribution_patching(frozen, *_prompts(5), what=what)
    assert np.abs(free["estimate"].values - again["estimate"].values).max() < 1e-10
    assert all(p.grad is None for p in model.parameters())


def test_half_precision_stays_finite() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = attribution_patching(
            tiny("mhc", dtype=dtype), *_prompts(2), what="stream", compare=True, answer=1, wrong=2
        )
        assert np.isfinite(found["estimate"].values).all()
        assert np.isfinite(found["recovered"].values).all()


def test_runs_that_hardly_differ_in_the_metric_are_said_to() -> None:
    model, far = t2lens.load("attnres-full"), "times as far as the runs are apart"
    pair = ("And the king said unto the queen", "And the lord said unto the queen")
    near = patch_activations(model, *pair)
    assert np.nanmax(np.abs(near["recovered"].values)) > 3
    assert any(far in note for note in near.notes)
    apart = patch_activations(model, "And the king", "In the beginning God", alignment="right", metric="kl")
    assert np.nanmax(np.abs(apart["recovered"].values)) < 3
    assert not any(far in note for note in apart.notes)


def test_tokens_are_texts_or_ids_and_default_to_what_each_run_predicts() -> None:
    model = t2lens.load("attnres-block")
    pair = ("And God said unto Moses", "And God said unto Aaron")
    ids = [int(model(text)[0, -1].argmax()) for text in pair]
    found = patch_activations(model, *pair, positions="all")
    given = patch_activations(model, *pair, positions="all", answer=ids[0], wrong=ids[1] if ids[1] != ids[0] else None)
    assert np.array_equal(found["metric"].values, given["metric"].values)
    word = model.to_str_tokens(torch.tensor([ids[0]]))[0]
    assert any(repr(word) in note for note in found.notes)
    by_text = patch_activations(model, *pair, positions="all", metric="loss", answer=word)
    by_id = patch_activations(model, *pair, positions="all", metric="loss", answer=ids[0])
    assert np.array_equal(by_text["metric"].values, by_id["metric"].values)


@pytest.mark.parametrize("key", ["patch", "attribution-patch"])
def test_the_command_line_writes_every_number(key: str, tmp_path: Path) -> None:
    out = tmp_path / "patch.json"
    prompts = ["And God said unto Moses", "--other", "And God said unto Aaron"]
    arguments = ["analyze", key, *prompts, "--what", "depth_weight", "--model", "attnres-block"]
    run = CliRunner().invoke(app, [*arguments, "--metric", "kl", "--json", str(out)])
    assert run.exit_code == 0, run.output
    data = json.loads(out.read_text())
    assert data["variables"]["recovered" if key == "patch" else "estimate"]["dims"] == ["read", "pos"]
    alone = CliRunner().invoke(app, ["analyze", key, "And God said", "--model", "attnres-block"])
    assert alone.exit_code == 2
    assert "second prompt" in alone.output

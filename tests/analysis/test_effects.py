"""Effects of routes against naive passes, one per route; masses and gradients against their definitions."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import t2lens
from t2lens.analysis import Finding, measure_effects
from t2lens.analysis.sweep import point_of, routes_of, source_parts
from t2lens.analysis.variants import recorded, sequences
from t2lens.cli import app
from tests.systems import SYSTEMS, random_tokens, tiny

WEIGHED = [name for name in SYSTEMS if routes_of(tiny(name), "source")]


def _cases(systems: Iterable[str]) -> list[tuple[str, str]]:
    """Every system over its atoms, and over its sources where it has depth weights of its own."""
    return [(name, over) for name in systems for over in ("source", "atom") if over == "atom" or name in WEIGHED]


def _input(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with padding on both sides."""
    tokens = random_tokens(seed)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    if len(tokens) > 1:
        mask[0, -1], mask[1, 0] = False, False
    return tokens, mask


def _without(model: Any, tokens: Any, mask: Any, read: Any, over: str, removed: list[int], fill: bool = False) -> Any:
    """Logits of a whole pass in which these routes are out, by loops and hooks of its own."""
    if over == "source":

        def edit(w: torch.Tensor, *, hook: object) -> torch.Tensor:
            out = w.clone()
            out[..., removed] = 0
            scale = w.sum(-1, keepdim=True) / out.sum(-1, keepdim=True)  # 1 / 0 where sparse weights leave nothing
            return out * torch.nan_to_num(scale, posinf=0.0) if fill else out
    else:
        parts = t2lens.contributions(model, tokens, mask, read=read.name)[:, :, : read.site.seen + 1]

        def edit(w: torch.Tensor, *, hook: object) -> torch.Tensor:
            if len(removed) == parts.shape[2]:  # of nothing not even rounding: DDL would divide by its size
                return torch.zeros_like(w)
            for i in removed:
                w = w - parts[:, :, i]
            return w

    with torch.no_grad():
        return model.run_with_hooks(tokens, mask, fwd_hooks=[(point_of(read, over), edit)])  # type: ignore[arg-type]


def _measures(plain: Any, other: Any, tokens: Any, mask: Any, token: int | None = None) -> tuple[float, float, float]:
    """Change of the loss, KL and change of the logit, position by position."""
    loss, kl, logit = [], [], []
    for b in range(len(tokens)):
        for t in range(tokens.shape[1] - 1):
            if mask[b, t] and mask[b, t + 1]:
                p, q = plain[b, t].softmax(-1), other[b, t].softmax(-1)
                true = int(tokens[b, t + 1])
                loss.append(float(p[true].log() - q[true].log()))
                kl.append(float((p * (p / q).log()).sum()))
                at = true if token is None else token
                logit.append(float(other[b, t, at] - plain[b, t, at]))
    return float(np.mean(loss)), float(np.mean(kl)), float(np.mean(logit))


@pytest.mark.parametrize(("system", "over"), _cases(SYSTEMS))
def test_batched_effects_are_those_of_one_pass_per_route(system: str, over: str) -> None:
    seed = random.randrange(1000)
    model, (tokens, mask) = tiny(system, seed=seed), _input(seed)
    found = measure_effects(model, tokens, over=over, attention_mask=mask)  # type: ignore[arg-type]
    with torch.no_grad():
        plain = model(tokens, mask)
    routes = routes_of(model, over)  # type: ignore[arg-type]
    dice = random.Random(seed)
    for read in dice.sample(list(routes), min(3, len(routes))):
        names = routes[read]
        i = dice.randrange(len(names))
        row = found.dataset.sel({"read": read.name, over: names[i]})
        logits = _without(model, tokens, mask, read, over, [i])
        wanted = _measures(plain, logits, tokens, mask)
        got = [float(row[name]) for name in ("loss", "kl", "logit")]
        assert np.allclose(got, wanted, rtol=0, atol=1e-10), (seed, read.name, names[i])
        every = list(range(len(names)))
        none = _measures(plain, _without(model, tokens, mask, read, over, every), tokens, mask)
        only = _without(model, tokens, mask, read, over, [j for j in every if j != i])
        alone = _measures(plain, only, tokens, mask)
        for name, k in (("rescue", 0), ("rescue_kl", 1)):
            if abs(none[k]) > 0.01:
                assert abs(float(row[name]) - (none[k] - alone[k]) / none[k]) < 1e-10 / abs(none[k]), (seed, read.name)
            else:
                assert np.isnan(row[name])
        if over == "source" and len(names) > 1 and not np.isnan(row["loss_renormalised"]):
            logits = _without(model, tokens, mask, read, over, [i], fill=True)
            got = [float(row[f"{name}_renormalised"]) for name in ("loss", "kl", "logit")]
            assert np.allclose(got, _measures(plain, logits, tokens, mask), rtol=0, atol=1e-10), (seed, read.name)


@pytest.mark.parametrize("system", WEIGHED)
def test_masses_and_parts_of_sources_are_what_the_pass_shows(system: str) -> None:
    seed = random.randrange(1000)
    model, (tokens, mask) = tiny(system, seed=seed), _input(seed)
    found = measure_effects(model, tokens, attention_mask=mask, fast=True)
    assert "kl" not in found.dataset
    routes = routes_of(model, "source")
    cache = model.run_with_cache(tokens, mask)[1]
    for read, names in routes.items():
        weights = cache[point_of(read, "source")][mask].detach()
        row = found.dataset.sel(read=read.name, source=list(names))
        assert np.allclose(row["weight"].values, weights.mean(0), rtol=0, atol=1e-10)
        assert np.allclose(row["mass"].values, weights.abs().mean(0), rtol=0, atol=1e-10)
        some = float((weights != 0).any(-1).double().mean())  # positions that read something
        assert np.isclose(row["share"].values.sum(), some, rtol=0, atol=1e-10)
        if model.residual.weights_sum_to_one:
            assert abs(row["mass"].values.sum() - 1) < 1e-10
    one = next(iter(sequences(t2lens.analysis.inputs.read_batch(model, tokens, mask))))
    record, _ = recorded(model, one)
    for read, names in random.Random(seed).sample(list(routes.items()), min(3, len(routes))):
        parts = source_parts(model, record, read)
        if system.startswith("muddformer-"):  # mixtures are normed, by a scale that stays as it was, and added
            before = (model.cfg.n_layers if read.site.layer is None else read.site.layer) - 1
            newest = model.run_with_cache(one.tokens, one.mask)[1][f"blocks.{before}.hook_resid_post"]
            assert (parts.sum(0) + newest[0] - record.reads[read.name][0]).abs().max() < 1e-9
            continue
        seen = []

        def look(hook_reads: dict[str, torch.Tensor], keep: int | None, read: Any = read) -> torch.Tensor:
            def edit(w: torch.Tensor, *, hook: object) -> torch.Tensor:
                out = torch.zeros_like(w)
                if keep is not None:
                    out[..., keep] = w[..., keep]
                return out

            again = t2lens.mixing.ForwardRecord()
            with torch.no_grad(), model.hooks([(point_of(read, "source"), edit)]):
                model(one.tokens, one.mask, record=again)
            return again.reads[read.name][0]

        nothing = look({}, None)
        for i in range(len(names)):
            seen.append(look({}, i) - nothing)
        assert (torch.stack(seen) - parts).abs().max() < 1e-10 * max(1, float(parts.abs().max())), (seed, read.name)


@pytest.mark.parametrize(
    ("system", "over"), _cases(["attnres-full", "denseformer", "muddformer", "hyper-connections", "ddl-cc", "dca"])
)
def test_the_gradient_is_the_slope_of_the_loss(system: str, over: str) -> None:
    seed = random.randrange(1000)
    model, (tokens, mask) = tiny(system, seed=seed), _input(seed)
    found = measure_effects(model, tokens, over=over, attention_mask=mask, fast=True)  # type: ignore[arg-type]
    with torch.no_grad():
        plain = model(tokens, mask)
    routes = routes_of(model, over)  # type: ignore[arg-type]
    for read in random.Random(seed).sample(list(routes), 3):
        i = random.Random(seed).randrange(len(routes[read]))
        parts = t2lens.contributions(model, tokens, mask, read=read.name) if over == "atom" else None
        losses = []
        for step in (1e-5, -1e-5):

            def edit(w: torch.Tensor, *, hook: object, step: float = step, i: int = i, parts: Any = parts) -> Any:
                if parts is not None:
                    return w - step * parts[:, :, i]
                out = w.clone()
                out[..., i] *= 1 - step
                return out

            with torch.no_grad():
                logits = model.run_with_hooks(tokens, mask, fwd_hooks=[(point_of(read, over), edit)])  # type: ignore[arg-type]
            losses.append(_measures(plain, logits, tokens, mask)[0])
        slope = (losses[0] - losses[1]) / 2e-5
        got = float(found["gradient"].sel({"read": read.name, over: routes[read][i]}))
        assert abs(got - slope) < 1e-5 * max(1, abs(slope)), (seed, read.name)


def test_ranks_and_correlations_are_those_of_their_definition() -> None:
    model, (tokens, mask) = tiny("attnres-full", seed=4), _input(7)
    found = measure_effects(model, tokens, attention_mask=mask)

    def rank(x: list[float], i: int) -> float:
        return sum(y < x[i] for y in x) + (sum(y == x[i] for y in x) + 1) / 2

    kept = found.dataset.isel(read=slice(1, None))  # 0.attn has one source
    columns = {}
    for name in ("mass", "share", "gradient", "loss", "kl", "logit"):
        columns[name] = [x for x in kept[name].values.ravel() if not np.isnan(x)]
    n = len(columns["kl"])
    assert n == found.dataset.attrs["n_routes"] == len(found.rows) == 27
    for p in ("mass", "share", "gradient"):
        for m in ("loss", "kl", "logit"):
            columns["x"] = [abs(x) for x in columns[p]] if m == "kl" else columns[p]
            x, y = ([rank(columns[name], i) for i in range(n)] for name in ("x", m))
            wanted = np.corrcoef(x, y)[0, 1]
            assert abs(float(found["spearman"].sel(predictor=p, measure=m)) - wanted) < 1e-12
            assert found.dataset.attrs[f"spearman_{p}_{m}"] == float(found["spearman"].sel(predictor=p, measure=m))
    assert abs(float(found["pearson"]) - np.corrcoef(columns["gradient"], columns["loss"])[0, 1]) < 1e-12
    apart = [abs(row[-2] - row[-1]) for row in found.rows]  # type: ignore[operator]
    assert apart == sorted(apart, reverse=True)
    read, source = found.rows[0][:2]
    mass = found["mass"].sel(read=read, source=source).item()
    assert found.rows[0][-2] == n + 1 - rank(columns["mass"], columns["mass"].index(mass))
    assert abs(abs(found["disagreement"].sel(read=read, source=source).item()) - apart[0] / (n - 1)) < 1e-12


def test_a_route_with_mass_and_nothing_in_it_does_nothing() -> None:
    model = tiny("attnres-full", seed=3)
    torch.nn.init.zeros_(model.blocks[0].mlp.output.weight)
    found = measure_effects(model, random_tokens(2))
    row = found.dataset.sel(source="0.mlp", read=["1.attn", "1.mlp", "2.attn", "2.mlp", "out"])
    assert (row["mass"].values > 0.01).all()
    for name in ("share", "gradient", "loss", "kl", "logit", "norm_mass"):
        assert np.abs(row[name].values).max() < 1e-10, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_among_effects_of_nothing_is_not_ranked(dtype: torch.dtype) -> None:
    model = tiny("attnres-full", seed=3, dtype=dtype)
    for layer in (0, 1):
        torch.nn.init.zeros_(model.blocks[layer].mlp.output.weight)
    found = measure_effects(model, random_tokens(2))
    ranks = {row[-1] for row in found.rows if row[1] in ("0.mlp", "1.mlp")}
    assert len(ranks) == 1
    assert max(row[-1] for row in found.rows) == ranks.pop()  # the last place, which they share
    assert found.dataset.attrs["floor_kl"] >= 1e-6
    assert any("are ties" in note for note in found.notes)


def test_a_read_of_one_source_is_all_that_there_is_of_it() -> None:
    found = measure_effects(tiny("attnres-full", seed=5), random_tokens(3), reads="0.attn")
    row = found.dataset.sel(read="0.attn", source="embed")
    assert abs(float(row["mass"]) - 1) < 1e-12
    assert float(row["loss"]) == float(row["damage"]) != 0
    assert float(row["kl"]) == float(row["damage_kl"])
    assert abs(float(row["rescue"]) - 1) < 1e-10
    assert np.isnan(row["loss_renormalised"])
    assert np.isnan(row["disagreement"])
    assert found.rows == ()
    assert any("0.attn" in note for note in found.notes)


def test_padding_and_other_sequences_change_nothing() -> None:
    model = tiny("muddformer", seed=8)
    a, b = torch.randint(50, (5,)), torch.randint(50, (8,))
    both, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.bool)
    both[0, 3:8], both[1, :8] = a, b
    mask[0, 3:8], mask[1, :8] = True, True
    joined = measure_effects(model, both, attention_mask=mask)
    alone = [measure_effects(model, x) for x in (a, b)]
    for name in ("loss", "kl", "logit", "gradient", "damage"):
        mean = (4 * alone[0][name] + 7 * alone[1][name]) / 11
        assert np.abs((joined[name] - mean).values[~np.isnan(mean.values)]).max() < 1e-10
    mean = (5 * alone[0]["mass"] + 8 * alone[1]["mass"]) / 13
    assert np.nanmax(np.abs((joined["mass"] - mean).values)) < 1e-10
    assert "11 positions" in joined.notes[0]


def test_estimates_of_a_read_that_a_norm_follows_sum_to_zero() -> None:
    found = measure_effects(tiny("attnres-full", seed=9), random_tokens(9), fast=True)
    estimates = found["gradient"].isel(read=slice(1, None))  # 0.attn has one source, and so no turns to take
    assert (abs(estimates.sum("source")) < 1e-3 * abs(estimates).sum("source")).all()
    assert (abs(estimates).sum("source") > 1e-3).all()


def test_masses_that_are_all_the_same_say_nothing() -> None:
    found = measure_effects(tiny("standard"), random_tokens(3))
    assert (found["mass"].values[~np.isnan(found["mass"].values)] == 1).all()
    assert np.isnan(found.dataset.attrs["spearman_mass_kl"])
    assert any("mass is the same in every route" in note for note in found.notes)


def test_a_token_can_be_followed() -> None:
    model, tokens = tiny("denseformer", seed=2), random_tokens(4)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    found = measure_effects(model, tokens, token=7, over="source")
    with torch.no_grad():
        plain = model(tokens)
    read = list(routes_of(model, "source"))[-1]
    logits = _without(model, tokens, mask, read, "source", [1])
    wanted = _measures(plain, logits, tokens, mask, token=7)[2]
    assert abs(found["logit"].sel(read=read.name).values[1] - wanted) < 1e-10


@pytest.mark.parametrize("system", ["attnres-full", "ddl", "muddformer", "mhc"])
def test_lower_precision_is_finite_and_near(system: str) -> None:
    tokens = random_tokens(6)
    exact = measure_effects(tiny(system, seed=6), tokens)
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 0.5), (torch.float16, 0.1)):
        found = measure_effects(tiny(system, seed=6, dtype=dtype), tokens)
        for name in ("mass", "share", "gradient", "loss", "kl", "logit", "damage"):
            a, b = exact[name].values, found[name].values
            assert (np.isnan(a) == np.isnan(b)).all(), (dtype, name)
            if name in ("mass", "share", "kl"):
                assert np.nanmax(np.abs(a - b)) < limit * np.nanmax(np.abs(a)), (dtype, name)


def test_frozen_parameters_and_inference_mode_are_no_hindrance() -> None:
    model, tokens = tiny("attnres-block", seed=1), random_tokens(1)
    wanted = measure_effects(tiny("attnres-block", seed=1), tokens)
    model.requires_grad_(False)
    with torch.inference_mode():
        found = measure_effects(model, tokens.clone())
    for name in ("gradient", "kl"):
        assert np.nanmax(np.abs((wanted[name] - found[name]).values)) < 1e-12


def test_signed_weights_are_not_renormalised() -> None:
    model, tokens = tiny("denseformer", seed=1), random_tokens(1)
    found = measure_effects(model, tokens)
    assert np.isnan(found["kl_renormalised"].values).all()
    assert any("signs" in note for note in found.notes)
    with pytest.raises(ValueError, match="have signs here, so there is no total to renormalise to; leave"):
        measure_effects(model, tokens, renormalise=True)
    assert "loss renormalised" not in found.columns
    off = measure_effects(tiny("attnres-full"), tokens, renormalise=False)
    assert np.isnan(off["kl_renormalised"].values).all()


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match='Standard residual has no depth weights of its own; use over="atom"'):
        measure_effects(tiny("standard"), [1, 2, 3], over="source")
    with pytest.raises(ValueError, match=r"no read '1\.atn' .* did you mean '1.attn'"):
        measure_effects(tiny("attnres-full"), [1, 2, 3], reads=["1.atn"])
    with pytest.raises(ValueError, match='over must be "source" or "atom"'):
        measure_effects(tiny("attnres-full"), [1, 2, 3], over="mass")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least two tokens"):
        measure_effects(tiny("attnres-full"), [1])


def test_one_call_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    got = CliRunner().invoke(app, ["analyze", "effects", "the lord", "--reads", "1.mlp", "--json", str(out)])
    assert got.exit_code == 0, got.output
    assert "mass rank" in got.output
    plain = json.loads(out.read_text())
    assert plain["columns"][:3] == ["read", "source", "mass"]
    assert len(plain["rows"]) == 4
    assert {row[0] for row in plain["rows"]} == {"1.mlp"}


def test_charts_and_tables_are_drawn() -> None:
    found = measure_effects(tiny("hyper-connections"), [1, 2, 3])
    assert isinstance(found, Finding)
    for i in range(len(found.charts)):
        assert found.plot(i).data
    assert "stream0" in repr(found)

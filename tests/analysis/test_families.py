"""Source-family routing ablation against one pass per ablation, and on models where the answer is known."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from t2lens.analysis import ablate_families
from t2lens.analysis.families import FAMILIES, family_of
from t2lens.cli import app
from t2lens.config import Norm
from t2lens.residual import HyperConnections, Source
from tests.systems import SYSTEMS, random_tokens, tiny

WITHOUT = ("standard", "ddl", "rezero", "highway", "deepnet", "x0", "laurel")
WEIGHED = [name for name in SYSTEMS if not name.startswith(WITHOUT) and not isinstance(SYSTEMS[name], HyperConnections)]


def _naive_family(sources: tuple[Source, ...], j: int) -> str:
    if sources[j].atoms == ("embed",):
        return "embedding"
    later = sum(source.atoms != ("embed",) for source in sources[j + 1 :])
    return ("current", "previous", "older")[min(later, 2)]


def _naive_edit(weights: torch.Tensor, out: list[int], renormalise: bool) -> torch.Tensor:
    weights = weights.clone()
    if len(out) == weights.shape[-1]:
        return weights
    for row in weights.view(-1, weights.shape[-1]):
        total, rest = float(row.sum()), sum(float(w) for j, w in enumerate(row) if j not in out)
        if renormalise and not rest > 1e-300:
            continue
        row[out] = 0
        if renormalise:
            row *= total / rest
    return weights


def _random_case(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(50, (2, 6), generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, 4:] = False
    return tokens, mask if seed % 2 else mask.flip(-1)  # padding on either side


def _cells(model: Any) -> dict[str, list[tuple[str, Any]]]:
    cells: dict[str, list[tuple[str, Any]]] = {}
    for read in model.reads:
        way = f"_{read.way}" if read.way else ""
        layer, kind = read.site.layer, read.site.kind
        hook = f"hook_depth_attn_final{way}" if layer is None else f"blocks.{layer}.hook_depth_attn_{kind}{way}"
        if hook in model.hook_dict:
            third = "" if layer is None else ("early", "middle", "late")[layer * 3 // model.cfg.n_layers]
            name = "readout" if layer is None else f"{third} {'carried' if read.way == 'r' else kind}"
            cells.setdefault(name, []).append((hook, model.residual.sources(read.site)))
    return cells


@pytest.mark.parametrize("system", WEIGHED)
def test_every_entry_is_what_one_pass_with_that_ablation_gives(system: str) -> None:
    seed = random.randrange(1000)
    model = tiny(system, seed=seed)
    tokens, mask = _random_case(seed)
    found = ablate_families(model, tokens, attention_mask=mask)
    where = mask[:, :-1] & mask[:, 1:]
    with torch.no_grad():
        base = model(tokens, mask)[:, :-1][where].log_softmax(-1)
    truth = tokens[:, 1:][where]
    cells = _cells(model)
    assert list(found.dataset["cell"].values) == list(cells)
    n_entries = 0
    for cell, reads in cells.items():
        for family in FAMILIES:
            hooks, there = [], False
            for name, sources in reads:
                out = [j for j in range(len(sources)) if _naive_family(sources, j) == family]
                there |= 0 < len(out) < len(sources)

                def hook(x: torch.Tensor, *, hook: Any, out: list[int] = out) -> torch.Tensor:
                    return _naive_edit(x, out, model.residual.weights_sum_to_one)

                hooks.append((name, hook))
            got = found.dataset.sel(cell=cell, family=family)
            if not there:
                assert np.isnan(got["loss_change"])
                continue
            n_entries += 1
            with torch.no_grad():
                after = model.run_with_hooks(tokens, mask, fwd_hooks=hooks)[:, :-1][where].log_softmax(-1)
            at = torch.arange(len(truth)), truth
            expected = {
                "loss_change": (base[at] - after[at]).mean(),
                "kl": (base.exp() * (base - after)).sum(-1).mean(),
                "probability_change": (after[at].exp() - base[at].exp()).mean(),
                "accuracy_change": ((after.argmax(-1) == truth).double() - (base.argmax(-1) == truth).double()).mean(),
            }
            for name, value in expected.items():
                assert abs(float(got[name]) - float(value)) < 1e-10, (seed, cell, family, name)
            assert got["low"] - 1e-9 <= got["high"]
    assert n_entries == len(found.rows) > 0
    mass = found["mass"].sum("family").values
    assert np.abs(mass - 1).max() < 1e-10


@pytest.mark.parametrize("system", WEIGHED)
def test_families_exclude_each_other_and_cover_every_source(system: str) -> None:
    model = tiny(system)
    for site in model.sites:
        sources = model.residual.sources(site)
        assert family_of(sources) == tuple(_naive_family(sources, j) for j in range(len(sources)))


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name not in WEIGHED])
def test_systems_without_such_routing_are_refused_with_what_to_use_instead(system: str) -> None:
    words = "ablate_streams" if isinstance(SYSTEMS[system], HyperConnections) else "patch_activations"
    with pytest.raises(ValueError, match=words):
        ablate_families(tiny(system), [1, 2, 3])


@pytest.mark.parametrize("seed", range(3))
def test_a_source_that_holds_nothing_has_mass_and_no_effect(seed: int) -> None:
    model = tiny("attnres-full", seed=random.randrange(1000), norm=Norm(eps=1e-14))
    layer = seed  # whose MLP is silent: the source `current` of the attention after it, or of the readout
    model.blocks[layer].mlp.output.weight.data.zero_()
    if model.blocks[layer].mlp.output.bias is not None:
        model.blocks[layer].mlp.output.bias.data.zero_()
    for parameter in model.residual.parameters():
        parameter.data.mul_(0.3)  # no depth weight near 0 or 1
    found = ablate_families(model, random_tokens(seed + 5))
    cell = "readout" if layer == 2 else f"{('middle', 'late')[layer]} attn"
    idle = found.dataset.sel(cell=cell, family="current")
    assert idle["mass"] > 0.1
    assert max(abs(idle["loss_change"]), idle["kl"]) < 1e-9  # the mixture is scaled, and a norm follows
    assert found["kl"].sel(cell=cell, family="embedding") > 1e-6  # a mean change of the loss could cancel


def test_padding_and_batches_only_change_how_sequences_are_weighed() -> None:
    model = tiny("attnres-block", seed=7)
    tokens, mask = _random_case(1)
    both = ablate_families(model, tokens, attention_mask=mask)
    alone = [ablate_families(model, row[keep]) for row, keep in zip(tokens, mask, strict=True)]
    n = mask.sum(-1).double().numpy()
    for name, weights in (("loss_change", n - 1), ("kl", n - 1), ("mass", n)):
        expected = sum(w * each[name].values for w, each in zip(weights / weights.sum(), alone, strict=True))
        assert np.nanmax(np.abs(both[name].values - expected)) < 1e-10
    assert np.isnan(alone[0]["low"].values).all()
    assert any("One sequence gives no interval" in note for note in alone[0].notes)
    assert (both["pairs"].values == sum(each["pairs"].values for each in alone))[~np.isnan(both["pairs"].values)].all()


def test_a_position_where_nothing_else_is_left_keeps_its_weights_and_is_counted() -> None:
    model = tiny("attnres-window", seed=3)  # sparsemax
    found = ablate_families(model, random_tokens(6))
    n = found["pairs"].values + found["left"].values
    there = ~np.isnan(n)
    assert (n[there] > 0).all()
    assert (found["left"].values[there] >= 0).all()
    first = found.dataset.sel(cell="early attn", family="embedding")  # one source alone
    assert (float(first["mass"]), float(first["pairs"])) == (1.0, 0.0)
    assert np.isnan(first["loss_change"])


def test_signed_weights_are_zeroed_and_cannot_be_renormalised() -> None:
    found = ablate_families(tiny("muddformer"), random_tokens(1))
    assert any("no total to keep" in note for note in found.notes)
    with pytest.raises(ValueError, match="have signs"):
        ablate_families(tiny("muddformer"), random_tokens(1), renormalise=True)


def test_intervals_are_seeded() -> None:
    model, tokens = tiny("attnres-full", seed=2), torch.randint(50, (8, 4))
    one, same, other = (ablate_families(model, tokens, seed=seed)["low"].values for seed in (0, 0, 1))
    assert np.array_equal(one, same, equal_nan=True)
    assert not np.array_equal(one, other, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_stays_finite(dtype: torch.dtype) -> None:
    found = ablate_families(tiny("attnres-full", dtype=dtype), random_tokens(2))
    assert len(found.rows) > 10
    assert all(np.isfinite(row[2:4]).all() for row in found.rows)


def test_the_command_line_writes_every_number(tmp_path: Path) -> None:
    out = tmp_path / "families.json"
    run = CliRunner().invoke(
        app, ["analyze", "families", "In the beginning", "--model", "attnres-block", "--json", str(out)]
    )
    assert run.exit_code == 0, run.output
    assert "most mass is the one with most effect" in run.output
    data = json.loads(out.read_text())
    assert data["coords"]["family"] == list(FAMILIES)
    refused = CliRunner().invoke(app, ["analyze", "families", "In the beginning", "--model", "mhc"])
    assert refused.exit_code == 2
    assert "ablate_streams" in refused.output

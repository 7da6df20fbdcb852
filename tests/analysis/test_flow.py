"""Two-axis rollout: masses known by hand, naive recursion, conservation on every system."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import t2lens
from t2lens.analysis import flow, rollout, sizes
from t2lens.analysis.flow import Flow, site_masses, start_of
from t2lens.analysis.frozen import Frozen, value_read
from t2lens.analysis.inputs import read_batch
from t2lens.cli import app
from t2lens.config import MLP, Attention, BucketAttention, Canon, KVShift, ModelConfig, Norm, ShortConv, ValueResidual
from t2lens.mixing import contributions_of_parts
from t2lens.residual import Standard
from tests.analysis.test_frozen import SUBLAYERS
from tests.systems import SYSTEMS, random_tokens, tiny

TIGHT = 1e-12
HEADS = Attention(n_heads=4, n_kv_heads=2, d_head=8)


def by_hand(c: float, s: float, *, bias: bool = False) -> Any:
    """One layer, no norms. Token i is a unit vector of its own plus one that all have; attention of any token looks at
    token 0 alone and writes c times its embedding; the MLP writes s times what it reads."""
    heads = Attention(n_heads=1, n_kv_heads=1, d_head=8, rope=None, bias=bias)
    cfg = ModelConfig(
        d_vocab=6,
        n_ctx=8,
        d_model=8,
        n_layers=1,
        attention=heads,
        mlp=MLP(d_mlp=8, bias=True),
        residual=Standard(),
        norm=Norm(kind="none", weight=False),
    )
    model: Any = t2lens.build(cfg).double().requires_grad_(False)
    attn, mlp, one = model.blocks[0].attn, model.blocks[0].mlp, torch.eye(8, dtype=torch.float64)
    for p in model.parameters():
        p.zero_()
    model.embed.weight[:, :6] = torch.eye(6, dtype=torch.float64)
    model.embed.weight[:, 7] = 1.0
    attn.query.weight[0, 7] = attn.key.weight[0, 0] = 200.0
    attn.value.weight[:], attn.output.weight[:] = one, c * one
    mlp.gate.bias.fill_(2.0)
    mlp.input.weight[:], mlp.output.weight[:] = one, s * one / torch.nn.functional.silu(torch.tensor(2.0).double())
    return model


@pytest.mark.parametrize(("c", "s"), [(0.5, 0.25), (2.0, 1.0)])
def test_masses_known_by_hand(c, s):
    found = rollout(by_hand(c, s), [0, 3, 4])
    # x_t + c x_0 + s (x_t + c x_0), with |x| = sqrt 2 and <x_t, x_0> = 1
    x, attn, mlp = math.sqrt(2), c * math.sqrt(2), s * math.sqrt(2 + 2 * c * c + 2 * c)
    total = x + attn + mlp
    through_attn = attn / total + mlp / total * c / (1 + c)  # the MLP's read is x_t and c x_0
    assert found["atom_mass"].sel(atom="0.mlp").values == pytest.approx([0, 0, mlp / total], abs=TIGHT)
    assert found["atom_mass"].sel(atom="0.attn").values == pytest.approx([0, 0, through_attn], abs=TIGHT)
    assert found["mass"].sel(site="out").values == pytest.approx([0, 0, 1], abs=TIGHT)
    assert found["mass"].sel(site="0.mlp").values == pytest.approx([0, 0, mlp / total], abs=TIGHT)
    assert found["mass"].sel(site="0.attn").values == pytest.approx([through_attn, 0, 0], abs=TIGHT)
    assert found["absorbed"].values == pytest.approx([through_attn, 0, 1 - through_attn], abs=TIGHT)
    assert found["absorbed"].values == pytest.approx(found["atom_mass"].sel(atom="embed").values, abs=0)
    assert [row[:2] for row in found.rows][-1] == (1, "3")


def test_projections_leave_out_what_points_the_other_way():
    c = -0.25
    found = rollout(by_hand(c, 0.0), [0, 3, 4], by="projection")  # <c x_0, x_t + c x_0> < 0
    assert found["absorbed"].values == pytest.approx([0, 0, 1], abs=TIGHT)
    found = rollout(by_hand(0.5, 0.0), [0, 3, 4], by="projection")
    along = 2 + 0.5, 0.5 * 1 + 0.25 * 2  # of x_t and of x_0 / 2
    assert found["absorbed"].values == pytest.approx([along[1] / sum(along), 0, along[0] / sum(along)], abs=TIGHT)


def test_mass_that_a_bias_wrote_is_stuck_and_said_to_be():
    model = by_hand(1.0, 0.0, bias=True)
    model.blocks[0].attn.value.weight.zero_()
    model.blocks[0].attn.output.bias[3] = 1.0
    found = rollout(model, [0, 3, 4])
    share = 1 / (1 + math.sqrt(2))
    assert found["stuck"].sel(site="0.attn").values == pytest.approx([0, 0, share], abs=TIGHT)
    assert found["absorbed"].values == pytest.approx([0, 0, 1 - share], abs=TIGHT)
    assert float(found["error"]) < TIGHT
    assert "0.414 found nothing to follow" in found.notes[0]


def naive(model: Any, tokens: torch.Tensor, site: str, at: int, by: str) -> dict[str, np.ndarray]:
    """Every node visited once per route: depth from `contributions`, attention from its weights."""
    _, cache = model.run_with_cache(tokens)
    n, sites = tokens.shape[1], {s.name: s for s in model.sites}
    masses = {name: np.zeros(n) for name in (*sites, *(f"wrote {a}" for a in model.atoms))}
    reads = {name: value_read(model.residual, s).name for name, s in sites.items()}
    parts = {read: t2lens.contributions(model, tokens, read=read)[0] for read in reads.values()}  # [T, A, D]
    outs = dict(zip(model.atoms, (x[0] for x in model.record(tokens).atoms), strict=True))

    def size(part: Any, whole: torch.Tensor) -> float:
        return float(part.norm()) if by == "norm" else max(0.0, float(part @ whole))

    def visit(name: str, t: int, m: float) -> None:
        masses[name][t] += m
        each = parts[reads[name]][t]
        weights = [size(part, each.sum(dim=0)) for part in each]
        for atom, weight in zip(model.atoms, weights, strict=True):
            share = m * weight / sum(weights)
            if share == 0:
                continue
            masses[f"wrote {atom}"][t] += share
            if atom.endswith("mlp"):
                visit(atom, t, share)
            elif atom != "embed":
                for s, weight in enumerate(looks := [look(atom, t, s) for s in range(n)]):
                    if weight:
                        visit(atom, s, share * weight / sum(looks))

    def look(atom: str, t: int, s: int) -> float:
        layer, kind = atom.split(".")
        attention = getattr(model.blocks[int(layer)], kind)
        pattern = cache[f"blocks.{layer}.{kind}.hook_pattern"][0, :, t, s]
        values = cache[f"blocks.{layer}.{kind}.hook_v"][0, s]
        values = values.repeat_interleave(attention.cfg.n_heads // len(values), dim=0)
        return size(sum(a * (v @ w) for a, v, w in zip(pattern, values, attention.W_O, strict=True)), outs[atom][t])

    with torch.no_grad():
        visit(site, at, 1.0)
    return masses


@pytest.mark.parametrize("by", ["norm", "projection"])
@pytest.mark.parametrize("system", ["standard", "attnres-block", "muddformer", "dca", "mhc", "ddl-cc", "depth-swa"])
def test_masses_agree_with_a_naive_recursion(system, by):
    model = tiny(system, 2, n_layers=1 + (system in ("muddformer", "dca")), local=system == "standard")
    tokens = random_tokens(2)[:1, :3]
    site, at = ("1.attn", 2) if system == "dca" else ("out", 1 if system == "mhc" else 2)
    found = rollout(model, tokens, pos=at, site=site, by=by)
    expected = naive(model, tokens, site, at, by)
    for name in found["site"].values.tolist():
        assert np.abs(found["mass"].sel(site=name).values - expected[name]).max() < TIGHT
    for name in found["atom"].values.tolist():
        assert np.abs(found["atom_mass"].sel(atom=name).values - expected[f"wrote {name}"]).max() < TIGHT


@pytest.mark.parametrize("system", SYSTEMS)
def test_mass_is_conserved_on_every_system_and_padding_gets_none(system):
    model, tokens = tiny(system, 1, local=True), random_tokens(3)[:1]
    n = tokens.shape[1]
    padded = torch.cat([torch.full((1, 2), 1), tokens, torch.full((1, 1), 1)], dim=1)
    mask = torch.tensor([[False] * 2 + [True] * n + [False]])
    for form in model.residual.forms:
        plain = rollout(model, tokens, pos=-2, form=form)
        assert abs(float(plain["absorbed"].sum()) - 1) < TIGHT
        assert float(plain["error"]) < TIGHT and float(plain["stuck"].sum()) == 0
        # what comes later has no part in it
        assert float(plain["mass"][:, -1].max()) == 0 and float(plain["atom_mass"][:, -1].max()) == 0
        assert float(plain["mass"].max()) <= 1 + TIGHT
        other = rollout(model, padded, attention_mask=mask, pos=-2, form=form)
        assert other.title == plain.title and {row[:2] for row in other.rows} == {row[:2] for row in plain.rows}
        for name in ("mass", "atom_mass", "absorbed"):
            assert np.isnan(other[name].values[..., [0, 1, -1]]).all()
            assert np.abs(other[name].values[..., 2:-1] - plain[name].values).max() < 1e-10
        along = rollout(model, tokens, by="projection", form=form)
        assert abs(float(along["absorbed"].sum() + along["stuck"].sum()) - 1) < TIGHT


def every_pair(found):
    """[T, P]: the sizes, each row from a weight at one position alone; checked against their sums."""
    n_pos = found.sizes.shape[-1]
    rows = torch.stack([found.back(one) for one in torch.eye(n_pos, dtype=torch.float64)])
    assert (rows.sum(dim=-1) - found.totals()).abs().max() < 1e-10
    assert (found.back(torch.ones(n_pos, dtype=torch.float64)) - rows.sum(dim=0)).abs().max() < 1e-10
    return rows


@pytest.mark.parametrize("name", SUBLAYERS)
def test_sizes_over_positions_are_those_of_each_position_by_itself(name):
    model, tokens = tiny("standard", 5, **SUBLAYERS[name], n_layers=2), random_tokens(5)[:1]
    tokens = torch.cat([tokens, tokens + 1], dim=1)[:, :11]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 0] = False
    watch = [f"blocks.{i}.attn.hook_{x}" for i in range(2) for x in sizes.WATCHED]
    frozen = Frozen(model, tokens, mask, watch=watch)
    for site in model.sites[:-1]:
        for by in ("norm", "projection"):
            with torch.no_grad():
                alone = {read: each.sizes for read, each in sizes._by_position(frozen, site, by)}
                ours = {read: every_pair(each) for read, each in sizes.sequence_sizes(frozen, site, by)}
            assert alone.keys() == ours.keys()
            for read in ours:
                assert (alone[read] - ours[read])[mask[0]].abs().max() < 1e-10
                assert bool((ours[read] > 0).any())


def test_mass_follows_values_that_a_convolution_took_from_earlier_tokens():
    """Attention that sees its own place alone, and a shift that takes the previous token's values there."""
    heads = Attention(n_heads=1, n_kv_heads=1, d_head=8, rope=None, window=1, kv_shift=KVShift(on="v"))
    model = tiny("standard", 1, n_layers=1, attention=heads)
    model.blocks[0].attn.shifts["v"].own.data.zero_()
    found = rollout(model, [3, 5, 7, 9], pos=2, site="0.mlp")
    assert float(found["mass"].sel(site="0.attn")[1]) == float(found["atom_mass"].sel(atom="0.attn")[2]) > 0
    assert found["mass"].sel(site="0.attn").values[[0, 2, 3]].tolist() == [0, 0, 0]


def test_value_residuals_pass_mass_to_the_first_attention_read():
    heads = replace(HEADS, value_residual=ValueResidual(first=1.0, own=0.0, learned=False))
    model = tiny("attnres-full", 1, n_layers=2, attention=heads)
    found = rollout(model, [3, 5, 7])
    assert float(found["atom_mass"].sel(atom="1.attn").sum()) > 0
    assert float(found["mass"].sel(site="1.attn").sum()) == 0  # none of its own values is used
    arrived = found["atom_mass"].sel(atom=["0.attn", "1.attn"]).sum()
    assert float(found["mass"].sel(site="0.attn").sum()) == pytest.approx(float(arrived), abs=TIGHT)


@pytest.mark.parametrize("system", ["ddl-tc-ec", "ddl-cc-ec"])
def test_reads_that_look_back_give_mass_to_the_position_that_wrote(system):
    model, tokens = tiny(system, 4, n_layers=1), random_tokens(4)[:1]
    n = tokens.shape[1]
    assert model.residual.looks_back == {"ddl-tc-ec": 5, "ddl-cc-ec": 3}[system]
    record = model.record(tokens)
    alone = torch.eye(n, dtype=torch.float64)[:, None, :, None]
    parts = {atom: x * alone for atom, x in zip(model.atoms, record.atoms, strict=True)}  # [P, B, T, D]
    out = dict(contributions_of_parts(model.residual, record, "out", parts))
    size = torch.stack([out[atom][:, 0, n - 2].norm(dim=-1) for atom in model.atoms])  # [A, P]
    expected = (size / size.sum()).numpy()
    found = rollout(model, tokens, pos=n - 2)
    # the last sublayer's atom is read by the readout alone
    assert np.abs(found["atom_mass"].sel(atom="0.mlp").values - expected[2]).max() < TIGHT
    assert (expected[0] > 0).sum() > 1
    if system == "ddl-tc-ec":
        assert (expected[2] > 0).sum() > 1


def test_parallel_blocks_bidirectional_models_and_ways():
    parallel = rollout(tiny("muddformer", 3, block="parallel", local=True), random_tokens(3)[:1])
    assert abs(float(parallel["absorbed"].sum()) - 1) < TIGHT
    heads = BucketAttention(n_heads=2, n_kv_heads=2, d_head=8, causal=False, output="gated")
    both = rollout(tiny("elc-normalized", 3, attention=heads), random_tokens(3)[:1], pos=0)
    assert float(both["absorbed"][-1]) > 0 and abs(float(both["absorbed"].sum()) - 1) < TIGHT
    mixed = rollout(tiny("muddformer", 3, canon=Canon()), random_tokens(3)[:1])  # one convolution over q, k and v
    assert abs(float(mixed["absorbed"].sum()) - 1) < TIGHT
    model, tokens = tiny("dca", 3), random_tokens(3)[:1]
    ways = {way: rollout(model, tokens, site="2.attn", way=way) for way in ("q", "k", "v")}
    assert abs(ways["q"]["absorbed"] - ways["v"]["absorbed"]).max() > 1e-3
    assert (rollout(model, tokens, site="2.attn")["mass"] == ways["v"]["mass"]).all()
    for found in ways.values():
        assert float(found["mass"].sel(site="2.attn")[-1]) == 1
        assert abs(float(found["absorbed"].sum()) - 1) < TIGHT
    first = rollout(model, tokens, site="0.attn")
    assert first["absorbed"].values.tolist() == [0.0] * (tokens.shape[1] - 1) + [1.0]


def test_a_head_that_a_hook_silences_passes_no_mass():
    model, tokens = tiny("standard", 6, n_layers=1), random_tokens(6)[:1]
    keep = torch.tensor([1.0, 0.0])[:, None]
    with model.hooks([("blocks.0.attn.hook_z", lambda z, hook: z * keep)]):
        edited = rollout(model, tokens, site="0.mlp")
    other = tiny("standard", 6, n_layers=1)
    other.blocks[0].attn.output.weight.data[:, 8:] = 0.0  # the second head has nothing to say
    assert abs(edited["absorbed"] - rollout(other, tokens, site="0.mlp")["absorbed"]).max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_mass_is_conserved_in_other_precisions(dtype):
    canon = {"canon": Canon(), "attention": replace(HEADS, short_conv=ShortConv())}
    for system, changes in (("attnres-full", {}), ("ddl-tc-ec", {}), ("standard", canon)):
        found = rollout(tiny(system, 1, dtype=dtype, **changes), random_tokens(1)[:1])
        assert abs(float(found["absorbed"].sum() + found["stuck"].sum()) - 1) < 1e-12


def test_bad_input_is_said_in_a_sentence():
    model, tokens = tiny("muddformer", 1), random_tokens(1)[:1]
    for bad, words in (
        ({"site": "1.atn"}, "No site '1.atn'; did you mean '1.attn'"),
        ({"site": "zzz"}, "No site 'zzz'; there are 0.attn"),
        ({"site": "1.attn", "way": "x"}, "does not read in the way 'x'; it has 'q', 'k', 'v', 'r'"),
        ({"site": "1.mlp", "way": "q"}, "one way only"),
        ({"by": "size"}, "by must be norm or projection, not 'size'"),
        ({"pos": 99}, "pos must lie in"),
    ):
        with pytest.raises(ValueError, match=words):
            rollout(model, tokens, **bad)
    with pytest.raises(ValueError, match="follows one sequence, and 3 were given"):
        rollout(model, tokens.repeat(3, 1))


def test_the_command_line_writes_every_node(tmp_path):
    file = tmp_path / "rollout.json"
    words = ["analyze", "rollout", "The cat sat on the", "--model", "muddformer", "--site", "3.attn", "--way", "q"]
    result = CliRunner().invoke(app, [*words, "--json", str(file)])
    assert result.exit_code == 0, result.output
    saved = json.loads(file.read_text())
    assert saved["columns"] == ["pos", "token", "absorbed", "largest write here"]
    assert abs(sum(saved["variables"]["absorbed"]["values"]) - 1) < 1e-9
    assert saved["coords"]["site"][-1] == "3.attn"
    found = rollout(t2lens.load("standard"), "The cat sat on the")
    assert all(found.plot(i).data for i in range(len(found.charts)))


@pytest.mark.parametrize("system", ["dca", "ddl-tc-ec", "attnres-full"])
def test_depth_shares_are_the_same_for_any_number_of_atoms_at_a_time(system, monkeypatch):
    model, tokens = tiny(system, 1), random_tokens(3)[:1]
    whole = rollout(model, tokens)
    monkeypatch.setattr(flow, "_BUDGET", 1)
    assert abs(rollout(model, tokens)["mass"] - whole["mass"]).max() < TIGHT


def test_one_flow_follows_every_read_of_its_pass_back():
    seed = random.randrange(1000)
    dice = random.Random(seed)
    for system in dice.sample(sorted(SYSTEMS), 6):
        model, ids = tiny(system, seed), random_tokens(seed)[0]
        flow = Flow(model, read_batch(model, ids))
        for _ in range(3):
            site, pos = dice.choice(model.sites), dice.randrange(len(ids))
            start = start_of(model, site.name, dice.choice(model.residual.ways(site)))
            found = flow.back(start, pos)
            alone = rollout(model, ids, pos=pos, site=site.name, way=start.way)
            np.testing.assert_array_equal(site_masses(model, start, found), alone["mass"].values)
            np.testing.assert_array_equal(found.atom_mass[0], alone["absorbed"].values)

"""Paths of a logit: sums on every system, brute force, planted paths."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import t2lens
from t2lens.analysis import top_paths
from t2lens.cli import app
from t2lens.config import MLP, BucketAttention, Norm, ValueResidual
from t2lens.config import Attention as AttentionConfig
from t2lens.zoo.known_truths import KnownTruth, cancelling_paths, planted_path
from tests.systems import SYSTEMS, random_tokens, tiny

TIGHT = 1e-10
ALL = {"n": 10**6, "max_expansions": 10**6}  # every path there is


@pytest.mark.parametrize("system", SYSTEMS)
def test_leaves_sum_to_the_logit_after_any_number_of_expansions(system):
    model, tokens = tiny(system, 1, local=True), random_tokens(3)[:1]
    padded = torch.cat([torch.full((1, 2), 1), tokens, torch.full((1, 1), 1)], dim=1)
    mask = torch.tensor([[False] * 2 + [True] * tokens.shape[1] + [False]])
    logits = model(padded, mask).detach()[0]
    for form in model.residual.forms:
        for steps, by_position in ((0, True), (9, False), (5, True)):
            kwargs: dict[str, Any] = {"max_expansions": steps, "by_position": by_position, "form": form, "n": 10**6}
            found = top_paths(model, padded, attention_mask=mask, pos=2, token=5, against=7, **kwargs)
            expected = float(logits[4, 5] - logits[4, 7])
            assert abs(float(found["logit"]) - expected) < TIGHT
            assert abs(float(found["error"])) < TIGHT
            assert abs(float(found["value"].sum()) - expected) < TIGHT  # n is large: all leaves are listed
            assert "constant" not in found["ends"].values  # there are no biases here
            # the sweep: all paths end in an embedding
            assert float(abs(found["constant"][1:]).max()) < TIGHT
            through = found["through"]
            assert abs(float(through.sel(atom="embed").sum()) - expected) < TIGHT
            assert through.isnull().values.all(axis=0).tolist() == (~mask[0]).tolist()
            assert abs(float(found["edge"].sel(read="out").sum()) - expected) < TIGHT
            difference = found["edge"].sum("read") - through.sum("pos")
            assert float(abs(difference).max()) < TIGHT


def frozen_maps(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """L [T, S, D, D] of every sublayer written out: out_t = sum_s read_s L_ts. One head, SwiGLU, RMSNorm."""
    _, cache = model.run_with_cache(tokens)
    maps = {}
    for site in model.sites[:-1]:
        block = model.blocks[site.layer]
        norm = block.ln1 if site.kind == "attn" else block.ln2
        scale = cache[f"blocks.{site.layer}.ln{1 if site.kind == 'attn' else 2}.hook_scale"][0]  # [T, 1]
        normed = norm.w / scale  # [T, D]
        n = len(scale)
        if site.kind == "attn":
            pattern = cache[f"blocks.{site.layer}.attn.hook_pattern"][0]
            ov = torch.einsum("hdk,hke->hde", block.attn.W_V, block.attn.W_O)
            maps[site.name] = torch.einsum("hts,sd,hde->tsde", pattern, normed, ov)
        else:
            gate = torch.nn.functional.silu(cache[f"blocks.{site.layer}.mlp.hook_pre"][0])
            local = torch.einsum("td,dm,tm,me->tde", normed, block.mlp.W_in, gate, block.mlp.W_out)
            maps[site.name] = torch.zeros(n, n, *local.shape[1:], dtype=local.dtype)
            maps[site.name][range(n), range(n)] = local
    return maps


def brute_force(model: Any, tokens: torch.Tensor, token: int) -> dict[str, float]:
    """Every path by name, from the mixing matrix and the maps above."""
    mixing = t2lens.mixing_matrix(model, tokens)[0]  # [read, T, atom]
    embed, maps, n = model.record(tokens).atoms[0][0], frozen_maps(model, tokens), tokens.shape[1]
    reads = [read.name for read in model.reads]
    scale = model.ln_final.scale(model.record(tokens).read("out"))[0, -1]
    paths: dict[str, float] = {}

    def follow(name: str, read: str, t: int, g: torch.Tensor) -> None:
        for a, atom in enumerate(model.atoms[: reads.index(read) + 1]):
            h, path = mixing[reads.index(read), t, a] * g, f"{name} <- {atom}@{t}"
            if atom == "embed":
                paths[path] = float(h @ embed[t])
                continue
            for s in range(n):
                follow(path, atom, s, maps[atom][t, s] @ h)

    with torch.no_grad():
        follow("logit", "out", n - 1, model.ln_final.w / scale * model.W_U[:, token])
    # several routes from one atom at t to the next have names that differ in its position alone
    return {name: value for name, value in paths.items() if value != 0}


@pytest.mark.parametrize("system", ["standard", "attnres-full", "denseformer", "elc-base", "hyper-connections"])
def test_every_path_agrees_with_brute_force(system):
    attention = AttentionConfig(n_heads=2, n_kv_heads=2, d_head=8)
    model = tiny(system, 2, n_layers=2 if system == "attnres-full" else 1, attention=attention)
    tokens = random_tokens(2)[:1, :3]
    expected = brute_force(model, tokens, 9)
    found = top_paths(model, tokens, token=9, **ALL)
    listed = dict(zip(found["path"].values.tolist(), found["value"].values.tolist(), strict=True))
    assert set(found["ends"].values.tolist()) == {"embedding"}
    assert len(listed) >= 4
    assert listed.keys() == expected.keys()
    assert max(abs(listed[name] - expected[name]) for name in listed) < TIGHT
    sizes = np.abs(found["value"].values)
    assert (sizes[:-1] >= sizes[1:]).all()
    # the sweep is the sum of them, by embedding and through every atom
    for atom in model.atoms:
        for pos in range(tokens.shape[1]):
            through = sum(v for name, v in expected.items() if f"{atom}@{pos}" in name.split(" <- "))
            assert abs(float(found["through"].sel(atom=atom)[pos]) - through) < TIGHT
    edge = sum(v for name, v in expected.items() if " <- 0.mlp@2 <- 0.attn@" in name)
    if system == "standard":
        assert abs(float(found["edge"].sel(read="0.mlp", atom="0.attn")) - edge) < TIGHT


def test_merged_positions_are_the_sums_of_their_paths():
    model, tokens = tiny("attnres-block", 4, n_layers=2), random_tokens(4)[:1, :4]
    apart = top_paths(model, tokens, token=3, **ALL)
    merged = top_paths(model, tokens, token=3, by_position=False, **ALL)
    sums: dict[str, float] = {}
    for name, value in zip(apart["path"].values.tolist(), apart["value"].values.tolist(), strict=True):
        short = " <- ".join(node.split("@")[0] for node in name.split(" <- "))
        sums[short] = sums.get(short, 0.0) + value
    listed = dict(zip(merged["path"].values.tolist(), merged["value"].values.tolist(), strict=True))
    assert listed.keys() == sums.keys()
    assert max(abs(listed[name] - sums[name]) for name in sums) < TIGHT
    assert (merged["start"] == -1).all()
    assert "merged" in " ".join(merged.notes)


@pytest.fixture(scope="module")  # made before the test: these models are wired between passes of their own
def planted() -> list[KnownTruth]:
    return [planted_path(seed) for seed in range(6)]


@pytest.fixture(scope="module")
def cancelling() -> KnownTruth:
    return cancelling_paths(1)


@pytest.mark.parametrize("seed", range(6))
def test_a_planted_path_comes_first_and_holds_the_logit(planted, seed):
    known = planted[seed]
    for tokens in (known.tokens[:1], known.draw(seed)[:1]):
        (marked,) = torch.isin(tokens[0], torch.tensor(known.truth["markers"])).nonzero()[:, 0].tolist()
        embed, first, across, last = known.truth["path"]
        at = tokens.shape[1] - 1
        found = top_paths(known.model, tokens, token=known.truth["token"], n=1, max_expansions=10)
        (name,) = found["path"].values.tolist()
        assert name == f"logit <- {last}@{at} <- {across}@{at} <- {first}@{marked} <- {embed}@{marked}"
        assert abs(float(found["share"].sum()) - 1) < 1e-8
        assert found.rows[0][1] == str(int(tokens[0, marked]))


def test_paths_that_cancel_are_both_found(cancelling):
    known = cancelling
    tokens = known.draw(3)[:1]
    has = torch.isin(tokens[0], torch.tensor(known.truth["classes"]["with"])).nonzero()[:, 0]
    found = top_paths(known.model, tokens, pos=int(has[0]), token=known.truth["token"], by_position=False, n=2)
    shares = {name.split(" <- ")[1]: value for name, _, value, *_ in found.rows}
    assert abs(shares[known.truth["plus"]] - known.truth["share"]) < TIGHT
    assert abs(shares[known.truth["minus"]] + known.truth["share"]) < TIGHT


def test_biases_end_paths_as_constants():
    model = tiny("standard", 1, n_layers=1, mlp=MLP(d_mlp=20, bias=True), norm=Norm(bias=True), head_bias=True)
    tokens = random_tokens(1)[:1]
    found = top_paths(model, tokens, token=4, **ALL)
    paths = dict(zip(found["path"].values.tolist(), found["value"].values.tolist(), strict=True))
    assert abs(paths["logit <- constant"] - float(model.logit_bias[4].detach())) < TIGHT
    assert abs(float(found["bias"]) - paths["logit <- constant"]) < TIGHT
    at = tokens.shape[1] - 1
    _, cache = model.run_with_cache(tokens)
    mlp, norm = model.blocks[0].mlp, model.blocks[0].ln2
    gate = torch.nn.functional.silu(cache["blocks.0.mlp.hook_pre"][0, -1])
    constant = mlp.W_out.T @ (gate * (mlp.W_in.T @ norm.b + mlp.input.bias)) + mlp.b_out
    share = (constant * model.ln_final.w / cache["ln_final.hook_scale"][0, -1]) @ model.W_U[:, 4]
    assert abs(paths[f"logit <- 0.mlp@{at} <- constant"] - float(share.detach())) < TIGHT
    assert abs(float(found["constant"].sel(atom="0.mlp")) - float(share.detach())) < TIGHT
    whole = float(found["through"].sel(atom="embed").sum() + found["constant"][1:].sum() + found["bias"])
    assert abs(whole - float(found["logit"])) < TIGHT


def test_few_vectors_are_kept_and_the_largest_leaves_are_expanded_first():
    model, tokens = tiny("denseformer", 7, n_layers=3), random_tokens(7)[:1]
    sizes = []
    for steps in (0, 3, 9, 40):
        found = top_paths(model, tokens, token=2, n=10**6, max_expansions=steps)
        still = found["value"].values[found["ends"].values == "open"]
        sizes.append(float(np.abs(still).max()))
        assert abs(float(found["value"].sum()) - float(found["logit"])) < TIGHT
    assert sizes[0] > sizes[2] > sizes[3]


def test_it_ends_early_when_the_listed_paths_are_complete(planted):
    known = planted[0]
    found = top_paths(known.model, known.tokens[:1], token=known.truth["token"], n=1, max_expansions=500)
    n = int(found.notes[0].split(" expansions")[0].split()[-1])
    assert n == 3
    assert set(found["ends"].values.tolist()) == {"embedding"}


def test_what_is_rounding_beside_the_largest_path_is_counted_and_not_listed():
    known = planted_path(0)
    found = top_paths(known.model, known.tokens[:1], token=known.truth["token"], n=20)
    sizes = np.abs(found["value"].values)
    assert 0 < len(sizes) < 20 and sizes.min() > 1e-9 * sizes.max()
    hidden = int(found.notes[1].split("Left out of the list: ")[1].split(" paths")[0])
    every = int(found.notes[0].split("All ")[1].split(" paths")[0])
    assert 0 < hidden < every


def test_padding_on_the_left_changes_no_name():
    model, tokens = tiny("attnres-full", 3), random_tokens(3)[:1]
    padded = torch.cat([torch.full((1, 3), 7), tokens], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * tokens.shape[1]])
    alone, same = top_paths(model, tokens), top_paths(model, padded, attention_mask=mask)
    assert same.title == alone.title
    assert same["path"].values.tolist() == alone["path"].values.tolist()
    assert (same["start"].values - alone["start"].values == 3).all()
    assert [row[1] for row in same.rows] == [row[1] for row in alone.rows]


def test_hooks_that_are_attached_are_part_of_the_pass():
    model, tokens = tiny("attnres-full", 3), random_tokens(3)[:1]
    silent = [("blocks.1.attn.hook_z", lambda z, hook: z * torch.tensor([0.0, 1.0])[:, None])]
    with model.hooks(silent):
        found = top_paths(model, tokens, token=1, n=10**6)
        expected = float(model(tokens)[0, -1, 1].detach())
    assert abs(float(found["logit"]) - expected) < TIGHT
    assert float(abs(found["constant"][1:]).max()) < TIGHT
    with model.hooks([("blocks.1.hook_attn_out", lambda x, hook: torch.ones_like(x))]):
        patched = top_paths(model, tokens, token=1, **ALL)
    names = patched["path"].values.tolist()
    assert not any("1.attn" in name and "constant" not in name for name in names)
    assert abs(float(patched["value"].sum() - patched["logit"])) < TIGHT


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_precisions_stay_finite(dtype):
    model = tiny("muddformer", 1, dtype=dtype)
    found = top_paths(model, random_tokens(1)[:1])
    assert np.isfinite(found["value"].values).all()
    assert abs(float(found["error"])) < 1e-9
    if dtype == torch.float32:
        assert float(abs(found["constant"][1:]).max()) < 1e-3


def test_bidirectional_models_and_value_residuals_have_paths():
    attention = BucketAttention(n_heads=2, n_kv_heads=2, d_head=8, causal=False, output="gated", bias=False)
    found = top_paths(tiny("elc-normalized", 2, attention=attention), random_tokens(2)[:1], pos=0, token=3)
    assert float(found["through"].sel(atom="embed")[-1]) != 0
    heads = AttentionConfig(n_heads=2, n_kv_heads=1, d_head=8, value_residual=ValueResidual())
    model, tokens = tiny("standard", 3, attention=heads, n_layers=2), random_tokens(3)[:1, :3]
    found = top_paths(model, tokens, token=3, **ALL)
    assert abs(float(found["value"].sum() - found["logit"])) < TIGHT
    assert float(abs(found["constant"][1:]).max()) < TIGHT


def test_bad_input_is_said_in_a_sentence():
    model, tokens = tiny("standard", 1), random_tokens(1)[:1]
    n = tokens.shape[1]
    for bad, words in (
        ({"pos": n}, f"pos must lie in -{n}..{n - 1}, not {n}"),
        ({"n": 0}, "n must be at least 1"),
        ({"max_expansions": -1}, "max_expansions at least 0"),
        ({"token": 50}, "outside the vocabulary 0..49"),
        ({"form": "operator"}, "no form 'operator'"),
    ):
        with pytest.raises(ValueError, match=words):
            top_paths(model, tokens, **bad)
    with pytest.raises(ValueError, match="follows one sequence, and 2 were given"):
        top_paths(model, tokens.repeat(2, 1))
    bert = BucketAttention(n_heads=2, n_kv_heads=2, d_head=8, causal=False)
    with pytest.raises(ValueError, match="masked-language-model head"):
        top_paths(tiny("standard", 1, attention=bert, head="mlm"), tokens)


def test_the_command_line_writes_the_paths(tmp_path):
    file = tmp_path / "paths.json"
    words = ["analyze", "paths", "The cat sat on the", "--model", "ddl-tc-ec", "--n", "5", "--json", str(file)]
    result = CliRunner().invoke(app, [*words, "--no-by-position", "--max-expansions", "9"])
    assert result.exit_code == 0, result.output
    assert "logit <- " in result.output
    saved = json.loads(file.read_text())
    assert saved["columns"] == ["path", "token", "value (logits)", "share", "ends"]
    assert len(saved["variables"]["value"]["values"]) == 5
    found = top_paths(t2lens.load("attnres-full"), "The cat sat on the", n=3)
    assert all(found.plot(i).data for i in range(len(found.charts)))
    assert found.rows[0][1] is not None

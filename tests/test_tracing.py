"""Traces: numbers known by hand, honest gaps, checks that fail when something is wrong, files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import t2lens
from t2lens.analysis.quantities import grid
from t2lens.analysis.sequence_quantities import averaged_heads
from t2lens.files import write_arrays
from t2lens.hooks import ActivationCache
from t2lens.residual import AttnRes, OpenAttnRes
from tests.systems import SYSTEMS, random_tokens, tiny, tiny_config


def test_the_plain_model_is_the_cumulative_baseline():
    data = t2lens.trace(tiny("standard"), [0, 7, 3]).dataset
    for variable, axis in (("depth_weight", "source"), ("mixing", "atom")):
        grid = data[variable].isel(pos=1)
        for i, read in enumerate(data["read"].values):
            row = grid.sel(read=read).values
            assert (row[: i + 1] == 1).all() and np.isnan(row[i + 1 :]).all()
        assert list(data[axis].values) == ["embed", "0.attn", "0.mlp", "1.attn", "1.mlp", "2.attn", "2.mlp"]


def test_uniform_attention_residuals_by_hand():
    """At init full AttnRes weighs S sources 1/S; block AttnRes gives every sublayer of a block its block's weight."""
    full = t2lens.trace(t2lens.build(tiny_config("attnres-full")).double(), [0, 7, 3]).dataset
    assert np.allclose(full["mixing"].sel(read="out", pos=2), 1 / 7, atol=1e-12)
    block = t2lens.build(tiny_config("standard", residual=AttnRes(block_size=4))).double()
    row = t2lens.trace(block, [0, 7, 3]).dataset["mixing"].sel(read="2.mlp", pos=2).values
    assert np.allclose(row[:6], 1 / 3, atol=1e-12) and np.isnan(row[6])  # embed, block1 (4 atoms), partial (1 atom)


@pytest.mark.parametrize("system", SYSTEMS)
def test_numbers_are_those_of_the_cache(system):
    model, ids = tiny(system, 3, local=True), random_tokens(3)[0]
    data = t2lens.trace(model, ids).dataset
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids)
    assert isinstance(cache, ActivationCache)
    for read in model.reads:
        if (name := read.site.hook("read", read.way)) in cache:  # a carried way has none
            assert np.array_equal(data["residual_norm"].sel(read=read.name), cache[name][0].norm(dim=-1))
        if (name := read.site.hook("depth_attn", read.way)) in cache:
            weights = data["depth_weight"].sel(read=read.name).dropna("source", how="all")
            assert np.array_equal(weights, cache[name][0])
            assert list(weights["source"].values) == model.sources()[read.name]
    seen = np.nan_to_num(data["sequence_attention"].values)
    assert np.array_equal(seen[1], np.tril(cache["blocks.1.attn.hook_pattern"][0]))
    assert np.array_equal(
        np.nan_to_num(data["local_attention"].values)[2], np.tril(cache["blocks.2.local.hook_pattern"][0])
    )
    if "gate" in data and "blocks.2.ddl_mlp.hook_beta" in cache:
        assert np.array_equal(data["gate"].sel(write="2.mlp"), cache["blocks.2.ddl_mlp.hook_beta"][0, :, 0])
    loss = model(ids, return_type="loss").detach()
    assert float(data["loss"].mean()) == pytest.approx(float(loss), abs=1e-6) and np.isnan(data["loss"][0])
    best = logits[0].argmax(-1)
    assert [int(x) for x in data["next_token"].values[:, 0]] == best.tolist()
    assert np.allclose(data["next_logprob"].values[:, 0], logits[0].log_softmax(-1).max(-1).values, atol=1e-12)


@pytest.mark.parametrize("system", SYSTEMS)
def test_contribution_norms_match_the_contributions(system):
    model, ids = tiny(system, 4), random_tokens(4)[0]
    for form in model.residual.forms:
        norms = t2lens.trace(model, ids, form=form).dataset["contribution_norm"]
        for read in (r.name for r in model.reads if r.site.name in ("1.attn", "out")):
            vectors = t2lens.contributions(model, ids, read=read, form=form)[0].detach()
            there = norms.sel(read=read).notnull().values.all(axis=0)
            assert there.sum() == model.atoms.index("2.mlp" if read == "out" else "0.mlp") + 1
            assert np.allclose(
                norms.sel(read=read).values[:, there], vectors.norm(dim=-1).numpy()[:, there], atol=1e-10
            )


def test_bad_prompts_get_one_sentence():
    model = tiny("standard")
    for prompt, words in (
        ("", "empty"),
        ("  \n", "empty"),
        ([], "at least one token"),
        ([[0, 1], [2, 3]], "one sequence"),
        ([0, 99], "outside the vocabulary"),
        ("text", "no tokenizer"),
    ):
        with pytest.raises(ValueError, match=words):
            t2lens.trace(model, prompt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no form 'x'"):
        t2lens.trace(model, [0, 1], form="x")
    assert not any(point.active for point in model.hook_dict.values())


def test_a_long_prompt_is_cut_with_a_notice():
    trace = t2lens.trace(tiny("standard"), [3] * 40)
    assert len(trace.tokens) == 32
    assert trace.notices == ["The prompt has 40 tokens; the last 8 are cut off (context 32)."]


@pytest.mark.parametrize("n", [1, 2, 32])
def test_short_and_full_prompts(n):
    for system in SYSTEMS:
        trace = t2lens.trace(tiny(system), [5] * n)
        assert trace.verify().passed and len(trace.tokens) == n


def broken_weights(model):
    """Depth weights are captured, then changed before the read."""
    original = model.residual.read

    def read(state, site, gates):
        return original(state, site, gates) * (1.5 if site.name == "1.mlp" and state.done[0].ndim == 3 else 1)

    model.residual.read = read


def broken_sum(model):
    original = model.residual.read_gates
    model.residual.read_gates = lambda state, site: {"weights": original(state, site)["weights"] * 1.1}


def broken_gate(model):
    model.add_hook("blocks.1.ddl_mlp.hook_beta", lambda beta, hook: beta + 3)


def broken_edit(model):
    """The hook point is bypassed: what it returns is thrown away."""
    point = model.residual.hook_points["blocks.2.hook_depth_attn_mlp"]
    model.residual.hook_points["blocks.2.hook_depth_attn_mlp"] = lambda x: (point(x), x)[1]


def broken_number(model):
    model.blocks[1].mlp.output.weight.data[0, 0] = float("nan")


@pytest.mark.parametrize(
    "system, break_it, check",
    [
        ("attnres-full", broken_weights, "recombination"),
        ("attnres-full", broken_weights, "mixing"),
        ("attnres-full", broken_sum, "depth weights sum to 1"),
        ("attnres-full", broken_sum, "captured = used"),
        ("attnres-full", broken_edit, "edits reach the logits"),
        ("ddl", broken_gate, "gate range"),
        ("standard", broken_number, "finite"),
    ],
)
def test_verify_names_what_is_broken(system, break_it, check):
    model = tiny(system, 5)
    assert t2lens.verify(model).passed
    break_it(model)
    report = t2lens.verify(model)
    assert not report.passed and not report[check].passed, str(report)
    with pytest.raises(KeyError, match="the checks are"):
        report["nothing"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_verify_passes_on_fresh_models_whose_new_parts_still_multiply_by_zero(system):
    report = t2lens.verify(t2lens.build(tiny_config(system, local=True)))
    assert report.passed, str(report)


@pytest.mark.parametrize("normaliser", ["top_k", "sparsemax", "entmax"])
def test_verify_takes_reads_of_one_source_and_writes_that_nobody_reads_for_what_they_are(normaliser):
    residual = AttnRes(normaliser=normaliser, top_k=1 if normaliser == "top_k" else None)
    for seed in (0, 1):
        model = tiny("attnres-full", seed, residual=residual)
        weights = model.record([0, 7, 3, 7]).steps[-1].gates["weights"]
        assert (weights == 0).any()
        report = t2lens.verify(model, [0, 7, 3, 7])
        assert report.passed, str(report)
        broken_edit(model)
        assert not t2lens.verify(model, [0, 7, 3, 7])["edits reach the logits"].passed


def test_a_model_too_short_for_a_read_that_mixes_is_traced_and_verified():
    residual = OpenAttnRes(dialect="C", mode="first_layer")
    model = tiny("attnres-full", n_layers=1, residual=residual)
    assert t2lens.trace(model, [0, 7, 3]).verify().passed
    assert t2lens.verify(model, [0, 7, 3]).passed


def test_verify_leaves_the_users_hooks_alone():
    model = tiny("attnres-full")
    model.add_hook("blocks.0.hook_mlp_out", lambda x, hook: x * 1.0)
    t2lens.verify(model)
    assert list(model.list_hooks()) == ["blocks.0.hook_mlp_out"]


def test_a_folder_and_a_damaged_header_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        t2lens.trace(tiny("ddl"), [0, 7, 3]).save(tmp_path)
    for words in ({}, dict.fromkeys(("dims", "words", "variable_attrs", "coords", "meta"), "{")):
        path = write_arrays(tmp_path / "damaged", {"a": np.zeros(1)}, {"format": "t2lens trace 1", **words})
        with pytest.raises(ValueError, match="damaged t2lens trace"):
            t2lens.load_trace(path)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_files_are_complete_or_refused(tmp_path):
    trace = t2lens.trace(tiny("ddl-cc"), [0, 7, 3])
    path = trace.save(tmp_path / "a.safetensors")
    data = path.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for content in (data[: len(data) // 2], b"not a safetensors file", b""):
        cut.write_bytes(content)
        with pytest.raises(ValueError, match="not a readable safetensors file"):
            t2lens.load_trace(cut)
    with pytest.raises(ValueError, match="There is no file"):
        t2lens.load_trace(tmp_path / "missing")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, cut)
    with pytest.raises(ValueError, match="not a t2lens trace"):
        t2lens.load_trace(cut)
    with pytest.raises(ValueError, match="does not exist"):
        trace.save(tmp_path / "no" / "folder" / "a.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "cut.safetensors"]


def test_one_way_of_several_is_a_trace_with_one_read_per_site():
    trace = t2lens.trace(tiny("muddformer"), [0, 7, 3, 7])
    assert trace.ways == ("q", "k", "v", "r") and "1.attn.v" in trace.dataset["read"].values
    values = trace.of_way("v")
    assert list(values.dataset["read"].values) == ["0.attn", "0.mlp", "1.attn", "1.mlp", "2.attn", "2.mlp", "out"]
    for name in ("mixing", "depth_weight", "residual_norm"):
        expected = trace.dataset[name].sel(read="1.attn.v").values
        np.testing.assert_array_equal(values.dataset[name].sel(read="1.attn").values, expected)
    assert values.source_atoms["1.attn"] == trace.source_atoms["1.attn.v"]
    assert values.of_way().dataset.identical(values.dataset)
    with pytest.raises(ValueError, match="the ways are q, k, v, r"):
        trace.of_way("z")
    standard = t2lens.trace(tiny("standard"), [0, 7])
    assert standard.ways == ("",) and standard.of_way() is standard


def test_a_name_in_place_of_a_model_and_several_texts_are_sentences() -> None:
    with pytest.raises(TypeError, match=r"takes a model, not its name: t2lens.trace\(t2lens.load\('ddl'\), ...\)"):
        t2lens.trace("ddl", "the king")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of one sequence; 2 texts were given"):
        t2lens.trace(tiny("standard"), ["a", "b"])  # type: ignore[arg-type]


@pytest.mark.parametrize("system", ["standard", "muddformer", "ddl"])
def test_the_mean_over_heads_alone(system, tmp_path):
    model, ids = tiny(system, 5, local=True), random_tokens(5)[0]
    every, mean = (t2lens.trace(model, ids, heads=heads) for heads in ("each", "mean"))
    assert averaged_heads(every) == {}
    for kind, variable, head in (
        ("attn", "sequence_attention", "head"),
        ("local", "local_attention", "local_head"),
    ):
        if variable not in every.dataset:
            continue
        head = head if head in every.dataset[variable].dims else "head"
        n = every.dataset[variable].sizes[head]
        assert averaged_heads(mean)[kind] == n
        kept = mean.dataset[variable]
        assert kept.shape[1] == 1
        np.testing.assert_allclose(kept.values[:, 0], every.dataset[variable].mean(head).values, atol=1e-6)
    again = t2lens.load_trace(mean.save(tmp_path / "t.safetensors"))
    assert averaged_heads(again) == averaged_heads(mean)
    look = [grid(each, "sequence_lookback").values for each in (every, again)]
    np.testing.assert_allclose(look[0], look[1], atol=1e-5)
    assert "mean over attention heads" in grid(again, "sequence_entropy").absent
    with pytest.raises(ValueError, match="'each' or 'mean'"):
        t2lens.trace(model, ids, heads="max")  # pyright: ignore[reportArgumentType]

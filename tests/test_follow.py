"""Traces that follow a token: lens and shares of its logit against the cache, energies of writes, effects of edits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import t2lens
from t2lens.analysis import audit_ddl
from t2lens.analysis.export import to_csv, to_json
from t2lens.config import Attention
from tests.edits.make import edits_of
from tests.systems import SYSTEMS, random_tokens, tiny, tiny_config

FOLLOWED = ("lens_logprob", "lens_rank", "lens_kl", "lens_top", "lens_top_logprob", "logit_share", "logit", "followed")


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_lens_is_the_readout_of_every_read_of_the_cache(system: str) -> None:
    seed = random.randrange(1000)
    model, ids = tiny(system, seed, local=True), random_tokens(seed)[0]
    data = t2lens.trace(model, ids, follow="next").dataset
    with torch.no_grad():
        followed = [*ids[1:].tolist(), int(model(ids)[0, -1].argmax())]
        assert data["followed_id"].values.tolist() == followed
        _, cache = model.run_with_cache(ids)
        final = model(ids)[0].log_softmax(dim=-1)
        for read in model.reads:
            hook = read.site.hook("read", read.way)
            if hook not in cache:  # a carried way has no hook point of its own
                continue
            x = cache[hook][0]
            normed = torch.stack([model.ln_final(x[None, t : t + 1])[0, 0] for t in range(len(ids))])
            own = (normed @ model.W_U + model.b_U).log_softmax(dim=-1)
            row = data.sel(read=read.name)
            for t in range(len(ids)):
                kl = float((final[t].exp() * (final[t] - own[t])).sum())
                assert abs(float(row["lens_kl"][t]) - kl) < 1e-10, (seed, read.name, t)
                best = own[t].argsort(descending=True)
                words = row["word"].values[row["lens_top"].values[t]]
                assert words.tolist() == [str(int(i)) for i in best[:5]]
                assert np.allclose(row["lens_top_logprob"].values[t], own[t][best[:5]], atol=1e-10)
                assert abs(float(row["lens_logprob"][t]) - float(own[t, followed[t]])) < 1e-10
                assert int(row["lens_rank"][t]) == 1 + best.tolist().index(followed[t])
    assert data["lens_kl"].sel(read="out").max() == 0 and data["lens_rank"].sel(read="out")[-1] == 1


@pytest.mark.parametrize("ids", [[5], [5, 3, 8]])
def test_the_last_position_has_the_likeliest_token_of_the_edited_pass_or_the_one_that_is_given(ids: list[int]) -> None:
    model = tiny("attnres-full", 6)
    edit = {"target": "atom", "operation": "scale", "site": "0.mlp", "value": -8}
    with torch.no_grad():
        plain = int(model([ids])[0, -1].argmax())
        with t2lens.edited(model, edit):
            best = int(model([ids])[0, -1].argmax())
    assert best != plain
    trace = t2lens.trace(model, ids, follow="next", edits=edit)
    assert trace.dataset["followed_id"].values.tolist() == [*ids[1:], best]
    assert trace.follow == "the true next token; at the last position the likeliest"
    given = t2lens.trace(model, ids, follow="next", last=7)
    assert given.dataset["followed_id"].values.tolist() == [*ids[1:], 7]
    assert given.follow == "the true next token; at the last position '7'"
    with pytest.raises(ValueError, match="outside the vocabulary"):
        t2lens.trace(model, ids, follow="next", last=50)


def test_where_logits_are_not_finite_no_token_is_likeliest() -> None:
    model = tiny("attnres-full", 1)
    with torch.no_grad():
        model.blocks[1].mlp.output.weight[0, 0] = torch.nan
    data = t2lens.trace(model, [0, 7, 3], follow="next").dataset
    assert data["followed_id"].values.tolist() == [7, 3, -1] and data["followed"].values[-1] == ""
    assert (
        np.isnan(data["lens_logprob"][:, -1]).all() and np.isfinite(data["lens_logprob"].sel(read="0.attn")[:2]).all()
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_shares_and_bias_sum_to_the_logit_of_the_followed_token(system: str) -> None:
    seed = random.randrange(1000)
    model, ids = tiny(system, seed), random_tokens(seed)[0]
    with torch.no_grad():
        logits = model(ids)[0]
    token = random.randrange(50)
    for form in model.residual.forms:
        data = t2lens.trace(model, ids, follow=token, form=form).dataset
        assert np.allclose(data["logit"], logits[:, token], atol=1e-12)
        whole = data["logit_share"].sum("atom", skipna=False) + data["logit_bias"]
        assert float(abs(whole - data["logit"]).max()) < 1e-10, seed
        vectors = t2lens.contributions(model, ids, read="out", form=form)[0]  # [pos, atom, d_model]
        scale = model.ln_final.scale(vectors.sum(dim=1))
        by_hand = vectors.movedim(1, 0) / scale * (1 if model.ln_final.w is None else model.ln_final.w)
        assert model.ln_final.cfg.kind == "rms"
        assert np.allclose(data["logit_share"], (by_hand @ model.W_U[:, token]).detach(), atol=1e-9), seed


def test_nothing_is_followed_unless_it_is_asked_for() -> None:
    trace = t2lens.trace(tiny("ddl"), [0, 7, 3])
    assert trace.follow is None and not set(FOLLOWED) & set(map(str, trace.dataset.variables))
    assert "edit_effect" not in trace.dataset


@pytest.mark.parametrize("system", SYSTEMS)
def test_edited_passes_keep_the_sum_or_claim_none(system: str) -> None:
    seed = random.randrange(1000)
    dice, model, ids = random.Random(seed), tiny(system, seed), random_tokens(seed)[0]
    for edit in dice.sample(list(edits_of(model, dice).values()), 3):
        trace = t2lens.trace(model, ids, edits=[edit], follow=5)
        data, lost = trace.dataset, "stream" in " ".join(trace.notices)
        whole = data["logit_share"].sum("atom", skipna=False) + data["logit_bias"]
        if np.isnan(data["mixing"].sel(read="out")).all():
            assert lost and np.isnan(whole).all(), (seed, edit)
        elif edit.target != "hook":
            assert float(abs(whole - data["logit"]).max()) < 1e-9, (seed, edit)
        with torch.no_grad():
            clean = model.record(ids)
            with t2lens.edited(model, [edit]):
                record = model.record(ids)
        for read in model.reads:
            off = (record.reads[read.name] - clean.reads[read.name])[0].norm(dim=-1)
            size = clean.reads[read.name][0].norm(dim=-1)
            effect = torch.where(off == 0, 0.0, off / size)  # of nothing too
            assert np.allclose(data["edit_effect"].sel(read=read.name), effect, atol=1e-10)


def test_an_edit_of_the_readout_leaves_the_shares_out_and_the_lens_plain() -> None:
    model, ids = tiny("attnres-full", 4), random_tokens(4)[0]
    edit = {"target": "hook", "operation": "scale", "name": "ln_final.hook_normalized", "value": 2}
    data, plain = (t2lens.trace(model, ids, edits=e, follow=3).dataset for e in ([edit], []))
    assert np.isnan(data["logit_share"]).all() and np.isnan(data["logit_bias"]).all()
    assert np.array_equal(data["lens_logprob"], plain["lens_logprob"])
    assert data["lens_kl"].sel(read="out").max() > 0  # the prediction is the edited one, the lens is not


def test_a_bidirectional_model_follows_the_token_that_stands_there() -> None:
    config = tiny_config("elc-base", attention=Attention(n_heads=2, n_kv_heads=1, d_head=8, causal=False))
    model = t2lens.build(config, seed=3).double()
    trace = t2lens.trace(model, [0, 7, 3], follow="next")
    assert trace.dataset["followed_id"].values.tolist() == [0, 7, 3] and "each position" in (trace.follow or "")
    assert np.isfinite(trace.dataset["lens_logprob"]).all()


def test_a_head_that_is_not_linear_has_a_lens_and_no_shares() -> None:
    model = t2lens.build(replace(tiny_config("standard"), head="mlm"), seed=3).double()
    data = t2lens.trace(model, [0, 7, 3], follow=4).dataset
    assert "logit_share" not in data and "logit" not in data
    assert np.isfinite(data["lens_kl"]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_models_are_followed_too(dtype: torch.dtype) -> None:
    seed = random.randrange(1000)
    for system in ("attnres-full", "ddl", "muddformer"):
        model = t2lens.build(tiny_config(system), seed=seed).to(dtype)
        data = t2lens.trace(model, random_tokens(seed)[0], follow=4).dataset
        whole = (data["logit_share"].sum("atom", skipna=False) + data["logit_bias"]).values
        assert data["lens_logprob"].dtype == np.float32 and data["lens_kl"].values.min() >= 0
        assert np.allclose(whole, data["logit"], atol=3e-2 * max(1.0, float(abs(data["logit"]).max())))


def test_energies_are_those_of_the_states_before_and_after() -> None:
    for system in [name for name in SYSTEMS if name.startswith("ddl")]:
        seed = random.randrange(1000)
        model, ids = tiny(system, seed), random_tokens(seed)[0]
        data = t2lens.trace(model, ids).dataset
        audit = audit_ddl(model, ids.tolist())
        for name in ("erased", "written"):
            mean = data[f"{name}_energy"].mean("pos").values
            assert np.allclose(mean, audit[name].values, rtol=1e-8), (system, seed, name)
        with torch.no_grad():
            _, cache = model.run_with_cache(ids)
        beta, k = (cache[f"blocks.1.ddl_mlp.hook_{x}"][0] for x in ("beta", "dir"))
        v = cache["blocks.1.ddl_mlp.hook_value"][0]
        put = [float((beta[t] * torch.outer(k[t], v[t])).square().sum()) for t in range(len(ids))]
        assert np.allclose(data["written_energy"].sel(write="1.mlp"), put, rtol=1e-10)
        if system == "ddl-write-only":
            assert (data["erased_energy"] == 0).all()
            continue
        held = cache["blocks.1.ddl_mlp.hook_proj"][0]
        gone = [float((beta[t] * torch.outer(k[t], held[t])).square().sum()) for t in range(len(ids))]
        assert np.allclose(data["erased_energy"].sel(write="1.mlp"), gone, rtol=1e-10)
    assert "erased_energy" not in t2lens.trace(tiny("attnres-full"), [0, 7, 3]).dataset


def test_files_and_tables_keep_what_was_followed(tmp_path: Path) -> None:
    edit = {"target": "atom", "operation": "zero", "site": "1.mlp"}
    trace = t2lens.trace(tiny("ddl", 6), [0, 7, 3, 7], follow="next", edits=edit)
    again = t2lens.load_trace(trace.save(tmp_path / "t.safetensors"))
    assert again.follow == trace.follow == "the true next token; at the last position the likeliest"
    for name in (*FOLLOWED, "edit_effect", "erased_energy", "logit_bias"):
        one, other = trace.dataset[name], again.dataset[name]
        assert one.dims == other.dims and one.equals(other), name
    assert again.dataset["word"].values.tolist() == trace.dataset["word"].values.tolist()
    assert b"lens_logprob" in to_csv([again]) and b"logit_share" in to_json([again])
    way = t2lens.trace(tiny("muddformer", 6), [0, 7, 3], follow=1).of_way("v").dataset
    assert way["lens_kl"].sizes == {"read": 7, "pos": 3}


def test_what_is_no_token_is_refused_before_anything_runs() -> None:
    model = t2lens.load("attnres-full")
    with pytest.raises(ValueError, match="not one token"):
        t2lens.trace(model, "the king", follow="kingly and more")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        t2lens.trace(model, "the king", follow=10**6)
    with pytest.raises(TypeError, match="not bool"):
        t2lens.trace(model, "the king", follow=True)
    trace = t2lens.trace(model, "the king", follow=" king")
    assert trace.follow == "' king'" and set(trace.dataset["followed"].values) == {" king"}

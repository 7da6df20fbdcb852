"""MUDDFormer: its equation in a naive loop, the plain residual at the start, what each way does, and its sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import t2lens
from t2lens.config import MLP
from t2lens.model import Transformer
from t2lens.residual import MUDDFormer, Standard
from t2lens.residual.muddformer import reallocated_widths
from t2lens.sublayers import Places
from tests.systems import random_tokens, tiny, tiny_config

VARIANTS = ["muddformer", "muddformer-prepost", "muddformer-static"]


def fresh(cfg, seed=0) -> Any:  # not Transformer: tests reach into parts that only some systems have
    return t2lens.build(cfg, seed=seed)


def rms(x, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def naive(model, tokens):
    """Logits straight from the equations, one source and one way at a time, and the weights of every module."""
    res, cfg, n_layers = model.residual, model.cfg.residual, model.cfg.n_layers
    pre, parallel = cfg.pre_post_norm != "none", model.cfg.block == "parallel"
    places = Places.of(tokens, None, None)
    states, sources, all_weights = [], [], []

    def aggregate(i):
        """Every way of the module after block i."""
        x, ways = states[i], 4 if i < n_layers else 1
        weights = res.static[i - 1].expand(*x.shape[:2], ways, i + 1)
        if cfg.weights == "dynamic":
            u = rms(x) * (res.generator_norm[i - 1] if pre else 1.0)
            hidden = u @ res.generator_in[i - 1].T
            if cfg.act == "gelu":
                hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
            else:
                hidden = 0.5 * hidden * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
            rows = hidden @ res.generator_out[i - 1].T
            weights = weights + torch.stack([rows[..., c * (i + 1) : (c + 1) * (i + 1)] for c in range(ways)], dim=-2)
        all_weights.append(weights)
        out = []
        for c in range(ways):
            y = torch.zeros_like(x)
            for j in range(i + 1):
                y = y + weights[..., c, j, None] * sources[j]
            last = c == ways - 1
            if cfg.pre_post_norm == "paper":
                y = rms(y) * res.post_norm[i - 1][c]
            elif cfg.pre_post_norm == "code" and last:
                y = rms(y) * res.post_norm[i - 1][0]
            out.append(x + y if pre else y)
        return out

    def keep(x):
        states.append(x)
        sources.append(rms(x) * res.source_norm[len(states) - 1] if pre else x)

    keep(model.embed(tokens))
    for i, block in enumerate(model.blocks):
        if i == 0:
            q = k = v = r = states[0]
            norms = (block.ln1,) * 3
        else:
            q, k, v, r = aggregate(i)
            norms = (block.ln1_q, block.ln1_k, block.ln1_v)
        h = r + block.attn(norms[0](q), norms[1](k), norms[2](v), places)
        keep(h + block.mlp(block.ln2(r if parallel else h)))
    (read,) = aggregate(n_layers)
    return model.unembed(model.ln_final(read)), all_weights


@pytest.mark.parametrize("block", ["sequential", "parallel"])
@pytest.mark.parametrize("system", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_the_equation(system, block, seed):
    model, tokens = tiny(system, seed, block=block), random_tokens(seed)
    expected, weights = naive(model, tokens)
    with torch.enable_grad():
        assert (model(tokens) - expected).abs().max() < 1e-10
    with torch.no_grad():  # where the sources lie in one block
        assert (model(tokens) - expected).abs().max() < 1e-10
    record = model.record(tokens)
    for i, wanted in enumerate(weights, start=1):
        site = [s for s in model.sites if s.opens][i]
        step = next(s for s in record.steps if s.site == site)
        ours = t2lens.residual.by_way(model.residual.depth_weights(site, step.gates))
        assert list(ours) == (["q", "k", "v", "r"] if i < 3 else [""])
        assert (torch.stack(list(ours.values()), dim=2) - wanted).abs().max() < 1e-10


@pytest.mark.parametrize("block", ["sequential", "parallel"])
@pytest.mark.parametrize("local", [False, True], ids=["", "with ShortSWA"])
@pytest.mark.parametrize("pre_post_norm", ["none", "paper", "code"])
def test_a_fresh_model_is_the_plain_residual_to_the_last_bit(pre_post_norm, local, block):
    cfg = tiny_config("muddformer", local=local, block=block)
    cfg = replace(cfg, residual=MUDDFormer(pre_post_norm=pre_post_norm, hidden_round=64))
    model, twin = fresh(cfg, seed=3), Transformer(replace(cfg, residual=Standard())).eval()
    if local:  # which starts at zero: wake it, so that the ways must carry what it writes
        for i, b in enumerate(model.blocks):
            b.local.output.weight.data.normal_(generator=torch.Generator().manual_seed(i))
    weights = {n: p for n, p in model.state_dict().items() if not n.startswith("residual.")}
    for i in range(1, 3):  # the three norms of attention start equal, and the twin has one
        norms = [weights.pop(f"blocks.{i}.ln1_{way}.w") for way in "qkv"]
        assert all(torch.equal(n, torch.ones_like(n)) for n in norms)
        weights[f"blocks.{i}.ln1.w"] = norms[0]
    twin.load_state_dict(weights)
    tokens = random_tokens(5)
    with torch.no_grad():
        assert torch.equal(model(tokens), twin(tokens))
    assert torch.equal(model(tokens), twin(tokens))


def test_a_way_changes_what_is_made_of_it_and_nothing_else():
    model, tokens = tiny("muddformer", 1), random_tokens(1)
    plain = model.run_with_cache(tokens)[1]
    parts = {"q": "attn.hook_q", "k": "attn.hook_k", "v": "attn.hook_v", "r": "hook_resid_pre"}
    for way in parts:

        def double(w, *, hook):
            return 2 * w

        with model.hooks(fwd_hooks=[(f"blocks.1.hook_depth_attn_attn_{way}", double)]):
            cache = model.run_with_cache(tokens)[1]
        for other, name in parts.items():
            assert torch.equal(cache[f"blocks.1.{name}"], plain[f"blocks.1.{name}"]) == (other != way)


def test_the_stream_is_r_and_the_sources_are_what_blocks_put_out():
    model, tokens = tiny("muddformer", 2), random_tokens(2)
    _, cache = model.run_with_cache(tokens)
    record = model.record(tokens)
    states = [record.embed, *(cache[f"blocks.{i}.hook_resid_post"] for i in range(3))]
    for i in range(3):
        pre, mid = cache[f"blocks.{i}.hook_resid_pre"], cache[f"blocks.{i}.hook_resid_mid"]
        assert torch.allclose(mid, pre + cache[f"blocks.{i}.hook_attn_out"])
        assert torch.allclose(states[i + 1], mid + cache[f"blocks.{i}.hook_mlp_out"])
        if i:
            weights = cache[f"blocks.{i}.hook_depth_attn_attn_r"]
            assert torch.allclose(pre, torch.stack([weights[..., j, None] * states[j] for j in range(i + 1)]).sum(0))
        names = [s.name for s in model.residual.sources(model.sites[2 * i])]
        assert names == ["embed", "block1", "block2"][: i + 1]


def test_an_edit_of_what_a_block_puts_out_reaches_later_reads_as_a_source():
    model, tokens = tiny("muddformer", 2), random_tokens(2)

    def last_read(names):
        def nothing(x, *, hook):
            return torch.zeros_like(x)

        with model.hooks(fwd_hooks=[(name, nothing) for name in names]):
            return model.run_with_cache(tokens)[1]["hook_read_final"]

    posts = [f"blocks.{i}.hook_resid_post" for i in range(3)]
    assert not torch.equal(last_read([]), last_read(posts[:1]))
    assert not last_read(["hook_embed", *posts]).any()


def test_edits_in_place_of_the_first_stream_leave_the_embedding_alone():
    model, tokens = tiny("muddformer", 2), random_tokens(2)

    def edit(x, *, hook):
        return x.mul_(0.5)

    embed = model.record(tokens).embed
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled), model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", edit)]):
            assert torch.equal(model.record(tokens).embed, embed)


@pytest.mark.parametrize("static", [False, True])
def test_static_weights_are_the_same_for_every_token(static):
    model = tiny("muddformer-static" if static else "muddformer", 0)
    step = model.record(random_tokens(0)).steps[-1]
    weights = step.gates["weights_"]
    assert torch.equal(weights, weights[:1, :1].expand_as(weights)) == static


def test_the_generator_is_as_wide_as_paper_and_code_have_it():
    assert MUDDFormer().hidden(4 * 5, last=False) == 20
    code = MUDDFormer(hidden_round=64, hidden_expand_last=4)
    # the released 32 layers: 64 up to module 13 (counted from 0), then 128, then 192
    widths = [code.hidden((4 if i < 31 else 1) * (i + 2), last=i == 31) for i in range(32)]
    assert widths == [64] * 14 + [128] * 16 + [192] * 2
    assert code.hidden(64, last=False) == 128  # rounding always adds


def test_widths_grow_from_half_to_three_halves():
    # halves round to even: 2.5 * 128 becomes 256
    assert reallocated_widths(256, 4) == (128, 256, 256, 384)
    widths = reallocated_widths(6912, 32)
    assert (widths[0], widths[-1]) == (3456, 10368) and sorted(widths) == list(widths)
    assert reallocated_widths(100, 1, multiple=10) == (100,)
    model = fresh(tiny_config("muddformer", mlp=MLP(d_mlp=reallocated_widths(32, 3, multiple=16))))
    assert [b.mlp.W_in.shape[1] for b in model.blocks] == [16, 32, 48]
    with pytest.raises(ValueError, match="at least 1"):
        reallocated_widths(100, 8)


@pytest.mark.parametrize(
    "wrong",
    [{"weights": "none"}, {"pre_post_norm": "jax"}, {"act": "relu"}, {"hidden_round": 0}, {"hidden_expand_last": 1.5}],
)
def test_a_bad_value_is_told_what_is_allowed(wrong):
    with pytest.raises(ValueError, match=r"MUDDFormer\.\w+ must be .*\.$"):
        MUDDFormer(**wrong)


def test_the_draw_of_the_generator_is_as_in_the_paper():
    model = fresh(replace(tiny_config("muddformer"), d_model=64, residual=MUDDFormer(hidden_round=512)))
    drawn = torch.cat([w.flatten() for w in model.residual.generator_in]).detach()
    assert abs(float(drawn.std()) - 64**-0.5) < 0.002
    assert not any(w.any() for w in model.residual.generator_out)


def test_gelu_is_the_one_that_is_asked_for():
    a, b = (replace(tiny_config("muddformer"), residual=MUDDFormer(act=act)) for act in ("gelu", "gelu_tanh"))
    models = [fresh(cfg, seed=1).double() for cfg in (a, b)]
    for model in models:
        for w in model.residual.generator_out:
            torch.nn.init.normal_(w, generator=torch.Generator().manual_seed(0))
    tokens = random_tokens(1)
    assert 0 < float((models[0](tokens) - models[1](tokens)).detach().abs().max()) < 0.1
    assert F.gelu(torch.tensor(1.0)) != F.gelu(torch.tensor(1.0), approximate="tanh")

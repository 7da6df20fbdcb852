"""The frozen pass: exact on every system and sublayer, with the values of the plain pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from t2lens.analysis.frozen import Frozen, value_read
from t2lens.config import (
    MLP,
    Attention,
    BucketAttention,
    Canon,
    KVShift,
    Norm,
    ShortConv,
    ValueResidual,
)
from t2lens.mixing import walk
from tests.systems import SYSTEMS, random_tokens, tiny

TIGHT = 1e-10
HEADS = Attention(n_heads=4, n_kv_heads=2, d_head=8)
BUCKETS = BucketAttention(n_heads=2, n_kv_heads=2, d_head=8, causal=False, bias=False)
BARE = Norm(kind="layer", bias=False, weight=False)

# no biases: all of what a sublayer writes comes from its read
SUBLAYERS: dict[str, dict[str, Any]] = {
    "canon": {"canon": Canon()},
    "canon-silu": {"canon": Canon(act="silu", residual=False)},
    "canon-silu-residual": {"canon": Canon(act="silu", kernel=3, sites="BD")},
    "short-conv": {"attention": replace(HEADS, short_conv=ShortConv(act="silu"))},
    "short-conv-linear": {"attention": replace(HEADS, short_conv=ShortConv(act="none", shift_keys=True))},
    "kv-shift": {"attention": replace(HEADS, kv_shift=KVShift())},
    "kv-shift-tokens": {"attention": replace(HEADS, kv_shift=KVShift(kind="tokens"))},
    "value-residual": {"attention": replace(HEADS, value_residual=ValueResidual())},
    "everything": {
        "attention": replace(HEADS, value_residual=ValueResidual(), kv_shift=KVShift(), short_conv=ShortConv()),
        "canon": Canon(sites="ABC"),
    },
    "ungated-gelu": {"mlp": MLP(d_mlp=20, gated=False, act="gelu")},
    "ungated-relu2-normed": {"mlp": MLP(d_mlp=20, gated=False, act="relu2", mid_norm=BARE)},
    "gated-tanh-normed": {"mlp": MLP(d_mlp=20, act="gelu_tanh", mid_norm=BARE)},
    "layer-norm": {"norm": Norm(kind="layer")},
    "no-norm": {"norm": Norm(kind="none", weight=False)},
    "buckets": {"attention": BUCKETS},
    "buckets-gated": {"attention": replace(BUCKETS, output="gated")},
}


def padded(tokens: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(len(tokens), n + tokens.shape[1], dtype=torch.bool)
    mask[:, :n] = False
    return torch.nn.functional.pad(tokens, (n, 0)), mask


def loss_of_one_step(frozen: Frozen, seed: int) -> tuple[float, float]:
    """Largest error of <g, atom> = sum <L^T g, read> over sites, and of <h, read> = sum <C^T h, atom> over reads."""
    generator = torch.Generator().manual_seed(seed)

    def like(x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)

    sublayers, depth = [0.0], [0.0]
    for site in frozen.model.sites[:-1]:
        out = frozen.outs[site.index].detach()
        g = like(out)
        back = frozen.to_reads(site, g)
        arrived = sum(float((x * frozen.leaves[name].detach()).sum()) for name, x in back.items())
        sublayers.append(abs(float((g * out).sum()) - arrived))
    for name, read in frozen.record.reads.items():
        h = like(read)
        atoms = zip(frozen.to_atoms({name: h}), frozen.atoms, strict=True)
        arrived = sum(float((x * atom.detach()).sum()) for x, atom in atoms if x is not None)
        depth.append(abs(float((h * read).sum()) - arrived))
    return max(sublayers), max(depth)


@pytest.mark.parametrize("system", SYSTEMS)
def test_both_steps_are_exact_on_every_system(system):
    model = tiny(system, 3, local=True)
    tokens, mask = padded(random_tokens(3), 2)
    for form in model.residual.forms:
        frozen = Frozen(model, tokens, mask, form=form)
        assert (frozen.logits - model(tokens, mask)).abs().max() < TIGHT
        assert max(loss_of_one_step(frozen, 3)) < TIGHT


@pytest.mark.parametrize("name", SUBLAYERS)
def test_every_sublayer_without_biases_is_linear_in_its_reads(name):
    for system, seed in (("standard", 1), ("attnres-full", 2)):
        model, tokens = tiny(system, seed, **SUBLAYERS[name]), random_tokens(seed)
        if isinstance(model.cfg.attention, BucketAttention) and model.cfg.attention.output == "post_norm":
            for block in model.blocks:  # a LayerNorm whose bias is its only constant
                block.attn.post_norm.b.data.zero_()
        frozen = Frozen(model, tokens)
        assert (frozen.logits - model(tokens)).abs().max() < TIGHT
        assert max(loss_of_one_step(frozen, seed)) < TIGHT


def test_values_of_the_first_layer_are_a_read_of_later_attention():
    model, tokens = tiny("muddformer", 1, attention=replace(HEADS, value_residual=ValueResidual())), random_tokens(1)
    frozen = Frozen(model, tokens)
    back = frozen.to_reads(next(s for s in model.sites if s.name == "2.attn"), torch.ones_like(frozen.atoms[0]))
    assert set(back) == {"2.attn.v", "0.attn"}
    assert all(bool((x != 0).any()) for x in back.values())


def test_what_is_pushed_forward_is_what_the_transposed_map_brings_back():
    model, tokens = tiny("standard", 4, **SUBLAYERS["everything"]), random_tokens(4)
    frozen = Frozen(model, tokens)
    generator = torch.Generator().manual_seed(0)
    for site in model.sites[:-1]:
        out = frozen.outs[site.index]
        x = torch.randn(3, *out.shape, generator=generator, dtype=out.dtype)
        g = torch.randn(out.shape, generator=generator, dtype=out.dtype)
        back = frozen.to_reads(site, g)
        pushed = dict(frozen.push(site, out, lambda _, x=x: x))
        assert pushed.keys() == back.keys()
        for name, y in pushed.items():
            assert ((y * g).sum((1, 2, 3)) - (x * back[name]).sum((1, 2, 3))).abs().max() < TIGHT


def test_biases_and_what_a_hook_puts_in_are_no_part_of_the_linear_map():
    changes: dict[str, Any] = {
        "norm": Norm(kind="layer", bias=True),
        "attention": replace(HEADS, bias=True),
        "mlp": MLP(d_mlp=20, gated=False, act="gelu", bias=True),
    }
    model, tokens = tiny("standard", 1, **changes), random_tokens(1)
    site = model.sites[1]
    frozen = Frozen(model, tokens)
    g = torch.ones_like(frozen.atoms[0])
    linear = sum(float((x * frozen.leaves[n].detach()).sum()) for n, x in frozen.to_reads(site, g).items())
    mlp, norm = model.blocks[0].mlp, model.blocks[0].ln2
    read = frozen.leaves["0.mlp"].detach()
    pre = mlp.input(norm(read))
    secant = torch.nn.functional.gelu(pre) / pre
    by_hand = mlp.output.weight @ (secant * ((norm(read) - norm.b) @ mlp.input.weight.T)).unsqueeze(-1)
    assert abs(linear - float(by_hand.sum().detach())) < TIGHT

    model = tiny("standard", 1)  # the same without biases, and one neuron switched off
    with model.hooks([("blocks.0.mlp.hook_post", lambda x, hook: x * (torch.arange(20) != 3))]):
        edited = Frozen(model, tokens)
        assert (edited.logits - model(tokens)).abs().max() < TIGHT
        assert max(loss_of_one_step(edited, 1)) < TIGHT
    with model.hooks([("blocks.0.hook_mlp_out", lambda x, hook: torch.ones_like(x))]):
        patched = Frozen(model, tokens)
    assert patched.to_reads(site, g) == {}


@pytest.mark.parametrize("gated", [True, False])
def test_a_neuron_that_a_hook_switches_off_passes_nothing(gated):
    model, tokens = tiny("standard", 2, mlp=MLP(d_mlp=20, gated=gated)), random_tokens(2)
    with model.hooks([("blocks.1.mlp.hook_post", lambda x, hook: x * 0)]):
        frozen = Frozen(model, tokens)
    back = frozen.to_reads(next(s for s in model.sites if s.name == "1.mlp"), torch.ones_like(frozen.atoms[0]))
    assert all(bool((x == 0).all()) for x in back.values())


def test_the_walk_over_the_linear_code_gives_the_recorded_reads():
    model, tokens = tiny("dca", 5, block="sequential"), random_tokens(5)
    record = model.record(tokens)
    for read, x in walk(model.residual, record, record.atoms[0], lambda step: record.atoms[step.site.index + 1]):
        assert (x - record.reads[read.name]).abs().max() < TIGHT
    assert [value_read(model.residual, s).name for s in model.sites][:3] == ["0.attn.v", "0.mlp", "1.attn.v"]


def test_parallel_blocks_and_inference_mode():
    model, tokens = tiny("muddformer", 6, block="parallel", local=True), random_tokens(6)
    with torch.inference_mode():
        frozen = Frozen(model, tokens)
    assert max(loss_of_one_step(frozen, 6)) < TIGHT

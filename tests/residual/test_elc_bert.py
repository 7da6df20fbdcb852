"""ELC-BERT and Vertical Attention (a reconstruction) against their equations, token by token, and their starts."""

from __future__ import annotations

import math

import pytest
import torch

import t2lens
from t2lens.config import Norm
from t2lens.residual import ELCBert, VerticalAttention
from tests.systems import random_tokens, tiny, tiny_config

VARIANTS = {
    variant: ELCBert(variant=variant)  # type: ignore[arg-type]
    for variant in ("base", "zero", "normalized", "weighted_output")
} | {"normalized, rms": ELCBert(variant="normalized", output_norm="rms")}
VERTICAL = {
    "default": VerticalAttention(),
    "l2": VerticalAttention(source_norm="l2", output_aggregation=True),
    "none, no residual": VerticalAttention(source_norm="none", keep_internal_residual=False),
    "aggregated": VerticalAttention(output_aggregation=True, init="last_biased"),
}


def ragged(flat: torch.Tensor) -> list[torch.Tensor]:
    """The vectors p_1, p_2, ... of 1, 2, ... entries."""
    rows, start = [], 0
    while start < len(flat):
        rows.append(flat[start : start + len(rows) + 1])
        start += len(rows[-1])
    assert start == len(flat)
    return rows


def run(model, tokens, combine, mlp_reads, finish, mixed_output, readout):
    """The reads in order, from the sublayers themselves: combine(p, sources) is what a block reads."""
    embed = model.embed(tokens)
    p, sources, reads = ragged(model.residual.weights), [embed], {}
    for i, block in enumerate(model.blocks):
        h = combine(p[i], sources)
        places = t2lens.sublayers.Places.of(tokens, None, None)
        reads[f"{i}.attn"] = h
        x = block.ln1(h)
        a = block.attn(x, x, x, places)
        reads[f"{i}.mlp"] = mlp_reads(h, a)
        f = block.mlp(block.ln2(mlp_reads(h, a)))
        sources.append(finish(h, a, f))
    reads["out"] = combine(p[-1], sources) if mixed_output else readout(sources[-1])
    return reads


def mean_of(p, sources):
    return sum(w * x for w, x in zip(p.softmax(0), sources, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1])
@torch.no_grad()
def test_reads_follow_the_equation(name, seed):
    cfg = VARIANTS[name]
    model, tokens = tiny("standard", seed, residual=cfg), random_tokens(seed)
    eps = model.cfg.norm.eps

    def normed(x):
        x = x - x.mean(-1, keepdim=True) if cfg.output_norm == "layer" else x
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    expected = run(
        model,
        tokens,
        mean_of,
        mlp_reads=lambda h, a: a if cfg.variant == "base" else h + a,
        finish=lambda h, a, f: normed(a + f) if cfg.variant == "normalized" else a + f,
        mixed_output=cfg.variant == "weighted_output",
        readout=lambda x: x,
    )
    got = model.record(tokens).reads
    assert got.keys() == expected.keys()
    for read, value in expected.items():
        assert float((got[read] - value).abs().max()) < 1e-10, read


@pytest.mark.parametrize("name", VERTICAL)
@torch.no_grad()
def test_the_reconstruction_of_vertical_attention_follows_its_equation(name):
    cfg = VERTICAL[name]
    model, tokens = tiny("standard", 2, residual=cfg), random_tokens(2)
    eps = model.cfg.norm.eps

    def normed(x):
        if cfg.source_norm == "rms":
            return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        return x / x.norm(dim=-1, keepdim=True) * math.sqrt(x.shape[-1]) if cfg.source_norm == "l2" else x

    expected = run(
        model,
        tokens,
        lambda p, sources: mean_of(p, [normed(x) for x in sources]),
        mlp_reads=lambda h, a: h + a,
        finish=lambda h, a, f: h + a + f if cfg.keep_internal_residual else a + f,
        mixed_output=cfg.output_aggregation,
        readout=lambda x: x,
    )
    got = model.record(tokens).reads
    for read, value in expected.items():
        assert float((got[read] - value).abs().max()) < 1e-10, read


@pytest.mark.parametrize("cfg", [*VARIANTS.values(), *VERTICAL.values()], ids=[*VARIANTS, *VERTICAL])
def test_starts_as_the_paper_says(cfg):
    """Means, or e / (e + n - 1) on the newest of n sources; never the plain residual."""
    model = t2lens.build(tiny_config("standard", residual=cfg), seed=0)
    biased = cfg.variant == "base" if isinstance(cfg, ELCBert) else cfg.init == "last_biased"
    for step in model.record(random_tokens(1)).steps:
        if "weights" not in step.gates:
            continue
        row, n = step.gates["weights"][0, 0], step.gates["weights"].shape[-1]
        newest = math.e / (math.e + n - 1) if biased else 1 / n
        assert float(row[-1].detach()) == pytest.approx(newest, abs=1e-6)
        assert torch.allclose(row[:-1], row.new_full((n - 1,), (1 - newest) / max(n - 1, 1)), atol=1e-6)


@pytest.mark.parametrize(("variant", "n"), [("base", 78), ("weighted_output", 78 + 13)])
def test_twelve_layers_have_the_published_number_of_weights(variant, n):
    model = t2lens.build(tiny_config("standard", residual=ELCBert(variant=variant), n_layers=12), seed=0)
    assert sum(p.numel() for p in model.residual.parameters()) == n


def test_sources_are_what_blocks_wrote_or_states():
    base = tiny("elc-base")
    assert base.sources()["2.attn"] == ["embed", "block1", "block2"]
    assert base.sources()["1.mlp"] == ["partial"] and base.sources()["out"] == ["block3"]
    held = {s.name: s.atoms for s in base.residual.sources(base.sites[4])}
    assert held["block2"] == ("1.attn", "1.mlp")
    vertical = tiny("vertical-attention")
    held = {s.name: s.atoms for s in vertical.residual.sources(vertical.sites[4])}
    assert held["block2"] == ("embed", "0.attn", "0.mlp", "1.attn", "1.mlp")


def test_one_hot_weights_read_that_source():
    model, tokens = tiny("elc-base", 3), random_tokens(3)
    record = model.record(tokens)
    block1 = record.steps[0].out + record.steps[1].out

    def one_hot(weights, hook):
        weights.zero_()[..., 1] = 1.0

    seen = {}
    hooks = [
        ("blocks.2.hook_depth_attn_attn", one_hot),
        ("blocks.2.hook_read_attn", lambda x, hook: seen.update(read=x.clone())),
    ]
    model.run_with_hooks(tokens, fwd_hooks=hooks)
    assert torch.equal(seen["read"], block1)


def test_nothing_of_the_base_variants_average_reaches_the_mlp_but_through_attention():
    model, tokens = tiny("elc-base", 4), random_tokens(4)
    matrix = t2lens.mixing_matrix(model, tokens)  # [batch, read, pos, atom]
    reads = [read.name for read in model.reads]
    row = matrix[0, reads.index("2.mlp"), 0].detach()
    assert row.tolist() == [0, 0, 0, 0, 0, 1, 0]
    zero = tiny("standard", 4, residual=ELCBert(variant="zero"))
    row = t2lens.mixing_matrix(zero, tokens)[0, reads.index("2.mlp"), 0].detach()
    w = [step.gates["weights"][0, 0] for step in zero.record(tokens).steps if "weights" in step.gates][2].detach()
    assert torch.allclose(row, torch.stack([w[0], w[1], w[1], w[2], w[2], torch.ones_like(w[0]), 0 * w[0]]))


@pytest.mark.parametrize("system", ["elc-normalized", "elc-normalized-rms", "vertical-attention"])
def test_an_edit_of_a_source_scale_reaches_every_later_read(system):
    model, tokens = tiny(system, 5), random_tokens(5)
    name = "blocks.1.hook_source_scale_attn"
    assert name in model.hook_dict
    plain = model.record(tokens)
    edited: dict[str, torch.Tensor] = {}
    keep = [(f"blocks.{i}.hook_read_attn", lambda x, hook: edited.update({hook.name: x.clone()})) for i in range(3)]
    model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: 2 * x), *keep])
    assert torch.equal(edited["blocks.0.hook_read_attn"], plain.reads["0.attn"])
    for i in (1, 2):
        assert not torch.allclose(edited[f"blocks.{i}.hook_read_attn"], plain.reads[f"{i}.attn"], atol=1e-3)


def test_the_stream_of_vertical_attention_can_be_edited_where_it_has_one():
    model, tokens = tiny("vertical-attention", 6), random_tokens(6)
    plain = model(tokens)
    for where in ("pre", "mid", "post"):
        name = f"blocks.1.hook_resid_{where}"
        edited = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x + torch.linspace(-1, 1, 16))])
        assert not torch.allclose(edited, plain, atol=1e-3)
    assert not any("resid" in name for name in tiny("vertical-attention-open").hook_dict)
    assert not any("resid" in name for name in tiny("elc-base").hook_dict)


def test_it_is_called_a_reconstruction():
    cfg = VerticalAttention()
    assert "reconstruct" in cfg.kind and "reconstruction" in cfg.describe()
    assert "reconstruction" in (VerticalAttention.__doc__ or "")


def test_layer_norm_models_work_too():
    norm = Norm(kind="layer", weight=False, eps=1e-7)
    model = tiny("elc-normalized", 7, norm=norm, embed_norm=norm)
    report = t2lens.verify(model, random_tokens(7)[0])
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ELCBert(variant="weighted"), "must be one of base, zero"),  # type: ignore[arg-type]
        (lambda: ELCBert(output_norm="l2"), "must be one of layer, rms"),  # type: ignore[arg-type]
        (lambda: VerticalAttention(source_norm="layer"), "must be one of rms, l2"),  # type: ignore[arg-type]
        (lambda: VerticalAttention(init="ones"), "must be one of zeros"),  # type: ignore[arg-type]
        (lambda: t2lens.build(tiny_config("elc-base", block="parallel")), "not defined for parallel blocks"),
    ],
)
def test_a_bad_config_says_what_is_wrong(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()

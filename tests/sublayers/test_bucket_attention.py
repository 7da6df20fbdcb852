"""LTG-BERT's attention against its equation, and what must hold of it in both directions."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import t2lens
from t2lens.config import MLP, BucketAttention, ModelConfig, Norm
from t2lens.hooks import ActivationCache
from t2lens.mixing import contributions_by_read
from t2lens.residual import ELCBert
from t2lens.sublayers import DecodingCache
from t2lens.sublayers.bucket_attention import buckets
from tests.systems import random_tokens, tiny

CAUSAL = {"causal": True, "output": "gated"}
BOTH_WAYS = {"causal": False, "output": "post_norm"}
plain_norm = Norm(kind="layer", weight=False, eps=1e-7)


def ltg(seed=0, residual=None, dtype=torch.float64, **attention):
    """A small LTG-BERT (64 positions, of which buckets of 8 cover 4 one by one) with random weights."""
    changes: dict = {
        "n_ctx": 24,
        "norm": plain_norm,
        "embed_norm": plain_norm,
        "attention": BucketAttention(n_heads=2, n_kv_heads=2, d_head=8, n_buckets=8, **attention),
        "mlp": MLP(d_mlp=20, act="gelu_tanh", mid_norm=plain_norm),
    }
    return tiny("standard", seed, dtype=dtype, residual=residual or ELCBert(variant="zero"), **changes)


@pytest.mark.parametrize(("n_ctx", "n"), [(64, 16), (512, 32), (9, 8), (5, 32)])
def test_buckets_are_the_distance_up_to_half_and_log_spaced_beyond(n_ctx, n):
    table = buckets(n_ctx, n)
    for s in range(0, n_ctx, 3):
        for t in range(0, n_ctx, 5):
            r = s - t
            if abs(r) <= n // 2:
                bucket = r
            else:
                place = math.log(abs(r) / (n / 2)) / math.log((n_ctx - 1) / (n / 2)) * (n / 2 - 1)
                bucket = int(math.copysign(math.ceil(place) + n // 2, r))
            assert int(table[s, t]) == n - 1 + bucket
    assert int(table.min()) >= 0 and int(table.max()) <= 2 * n - 2
    if n_ctx > n:
        assert int(table[-1, 0]) == 2 * n - 2  # the farthest pair is in the last bucket


def layer_norm(x, eps=1e-7):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("options", [CAUSAL, BOTH_WAYS, {"causal": False, "output": "gated"}])
@pytest.mark.parametrize("seed", [0, 3])
def test_the_output_is_the_equation_pair_by_pair(options, seed):
    model = ltg(seed, **options)
    attn, table, d = model.blocks[1].attn, model.relative, 8
    record = model.record(random_tokens(seed))
    x = layer_norm(record.reads["1.attn"], model.cfg.norm.eps)
    out = record.steps[2].out
    rows = layer_norm(table.weight) * table.w + table.b
    q, k, v = attn.query(x), attn.key(x), attn.value(x)
    rel_q, rel_k = attn.query(rows), attn.key(rows)
    n_pos = x.shape[1]
    mixed = torch.zeros_like(q)
    for h in range(2):
        part = slice(h * d, (h + 1) * d)
        for s in range(n_pos):
            seen = range(s + 1 if options["causal"] else n_pos)
            scores = []
            for t in seen:
                r = int(table.position_indices[s, t])
                score = q[:, s, part] * k[:, t, part] + q[:, s, part] * rel_k[r, part] + rel_q[r, part] * k[:, t, part]
                scores.append(score.sum(-1) / math.sqrt(3 * d))
            weights = torch.stack(scores, -1).softmax(-1)
            mixed[:, s, part] = torch.einsum("bt,btd->bd", weights, v[:, list(seen), part])
    if options["output"] == "gated":
        expected = attn.output(layer_norm(mixed * torch.nn.functional.gelu(attn.gate(x))))
    else:
        expected = layer_norm(attn.output(mixed)) * attn.post_norm.w + attn.post_norm.b
    assert torch.allclose(out, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("options", [CAUSAL, BOTH_WAYS])
def test_padding_on_either_side_changes_nothing(options):
    model, tokens = ltg(1, **options), random_tokens(1)
    gap, flags = torch.ones(len(tokens), 3, dtype=torch.long), torch.zeros(len(tokens), 3, dtype=torch.bool)
    real = torch.ones_like(tokens, dtype=torch.bool)
    left = model(torch.cat([gap, tokens], 1), torch.cat([flags, real], 1))[:, 3:]
    right = model(torch.cat([tokens, gap], 1), torch.cat([real, flags], 1))[:, :-3]
    assert float((left - model(tokens)).detach().abs().max()) < 1e-10
    assert float((right - model(tokens)).detach().abs().max()) < 1e-10


@pytest.mark.parametrize("output", ["gated", "post_norm"])
@pytest.mark.parametrize("n_pad", [0, 2])
def test_decoding_equals_the_full_pass(output, n_pad):
    model, tokens = ltg(2, causal=True, output=output), random_tokens(2)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    tokens = torch.cat([torch.ones(len(tokens), n_pad, dtype=torch.long), tokens], 1)
    mask = torch.cat([torch.zeros(len(mask), n_pad, dtype=torch.bool), mask], 1)
    with torch.no_grad():
        full, cache = model(tokens, mask), DecodingCache()
        parts = [model(tokens[:, : n_pad + 1], mask[:, : n_pad + 1], cache=cache)]
        parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(n_pad + 1, tokens.shape[1])]
    assert float((torch.cat(parts, 1) - full)[:, n_pad:].abs().max()) < 1e-10


def test_direction_is_a_value():
    tokens = random_tokens(4)
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % 50
    causal, both = ltg(4, **CAUSAL), ltg(4, causal=False, output="gated")
    assert torch.allclose(causal(other)[:, :-1], causal(tokens)[:, :-1], atol=1e-12, rtol=0)
    assert not torch.allclose(both(other)[:, 0], both(tokens)[:, 0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("options", [CAUSAL, BOTH_WAYS])
def test_verify_contributions_and_hooks(options):
    model, tokens = ltg(6, **options), random_tokens(6)
    report = t2lens.verify(model, tokens[0])
    assert report.passed, str(report)
    record = model.record(tokens)
    for read, share in contributions_by_read(model.residual, record):
        assert float((share.sum(0) - record.reads[read.name]).detach().abs().max()) < 1e-10
    _, cache = model.run_with_cache(tokens)
    assert isinstance(cache, ActivationCache)
    assert torch.allclose(cache["blocks.0.attn.hook_pattern"].sum(-1), torch.ones((), dtype=torch.float64))
    if options["output"] == "gated":
        edited = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_gate", lambda x, hook: x * 0)])
        assert not torch.allclose(edited, model(tokens), atol=1e-3, rtol=0)


def test_the_table_has_one_name_and_every_parameter_a_gradient():
    model = ltg(7, **CAUSAL)
    assert [name for name in model.state_dict() if "relative" in name] == [
        "relative.weight",
        "relative.w",
        "relative.b",
        "relative.position_indices",
    ]
    model(random_tokens(7), return_type="loss").backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.relative.weight.add_(torch.randn(copied.relative.weight.shape))
    assert not torch.equal(copied(random_tokens(7)), model(random_tokens(7)))  # the copy's layers use the copy's table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [CAUSAL, BOTH_WAYS])
def test_half_precision_is_finite(dtype, options):
    model = ltg(8, dtype=dtype, **options)
    assert model(random_tokens(8)).isfinite().all()


def test_a_bidirectional_model_says_what_it_cannot_do():
    model, tokens = ltg(9, **BOTH_WAYS), random_tokens(9)
    with pytest.raises(ValueError, match="cannot continue a text"):
        model.generate(tokens, 2)
    for return_type in ("loss", "both"):
        with pytest.raises(ValueError, match="no next-token loss"):
            model(tokens, return_type=return_type)
    with pytest.raises(ValueError, match="no decoding cache"):
        model(tokens, cache=DecodingCache())
    report = t2lens.verify(model, tokens[0])
    assert "skip  causality and decode = full: a bidirectional model" in str(report)
    assert {"causality", "decode = full"}.isdisjoint(check.name for check in report)


def test_a_trace_of_a_bidirectional_model_shows_both_directions():
    model, tokens = ltg(10, **BOTH_WAYS), random_tokens(10)
    trace = t2lens.trace(model, tokens[0])
    pattern = trace.dataset["sequence_attention"]
    assert not pattern.isnull().any() and torch.allclose(
        torch.from_numpy(pattern.sum("key").values), torch.ones((), dtype=torch.float64)
    )
    assert trace.dataset["loss"].isnull().all()
    assert trace.notices == ["A bidirectional model: every position sees all tokens, so there is no next-token loss."]
    assert "token here" in repr(trace)
    assert trace._repr_html_()  # drawn without the maps of the past


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"n_buckets": 7}, "must be even"),
        ({"output": "plain"}, "must be one of post_norm, gated"),
        ({"window": 4}, "no RoPE, QK norm or window"),
        ({"qk_norm": "head"}, "no RoPE, QK norm or window"),
        ({"n_kv_heads": 2}, "must equal n_heads"),
    ],
)
def test_a_bad_config_says_what_is_wrong(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        BucketAttention(**change)


def test_the_config_makes_the_round_trip():
    cfg = ltg(0, **BOTH_WAYS).cfg
    assert ModelConfig.from_dict(cfg.to_dict()) == cfg
    assert isinstance(ModelConfig.from_dict(cfg.to_dict()).attention, BucketAttention)

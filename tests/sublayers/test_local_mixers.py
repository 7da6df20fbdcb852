"""Canon, ShortConv, KV shift and the value residual: against loops, and the invariants of the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import t2lens
from t2lens.config import MLP, Attention, Canon, KVShift, ModelConfig, Norm, ShortConv, ValueResidual
from t2lens.model import Transformer
from t2lens.residual import DeepDelta, Standard
from t2lens.sublayers import DecodingCache
from t2lens.sublayers.short_conv import causal_conv
from tests.systems import random_tokens, tiny

HEADS = Attention(n_heads=2, n_kv_heads=1, d_head=8, qk_norm="head")
MIXERS: dict[str, dict[str, Any]] = {
    "canon": {"canon": Canon()},
    "canon-bare": {"canon": Canon(sites="DB", kernel=2, bias=True, act="silu", residual=False)},
    "canon-plain-mlp": {"canon": Canon(sites="CD", kernel=3), "mlp": MLP(d_mlp=20, gated=False, act="gelu")},
    "short-conv": {"attention": replace(HEADS, short_conv=ShortConv(shift_keys=True, bias=True))},
    "short-conv-v": {"attention": replace(HEADS, short_conv=ShortConv(on="v", kernel=2, act="none"))},
    "kv-shift-heads": {"attention": replace(HEADS, kv_shift=KVShift())},
    "kv-shift-tokens": {"attention": replace(HEADS, kv_shift=KVShift(kind="tokens", on="k"), bias=True)},
    "value-residual": {"attention": replace(HEADS, value_residual=ValueResidual())},
    "all": {
        "attention": replace(HEADS, kv_shift=KVShift(), short_conv=ShortConv(), value_residual=ValueResidual()),
        "canon": Canon(sites="ABD"),
        "norm": Norm(kind="layer", bias=True),
    },
}
mixers = pytest.mark.parametrize("mixer", MIXERS)


def model_with(mixer: str, seed: int = 0, system: str = "standard", **changes: Any) -> Any:
    return tiny(system, seed, **MIXERS[mixer], **changes)


def close(a, b, limit=1e-10):
    assert float((a - b).detach().abs().max()) < limit


def padded(tokens: torch.Tensor, n: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    gap = torch.full((tokens.shape[0], n), 1)
    real, flags = torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(gap, dtype=torch.bool)
    order = (gap, tokens), (flags, real)
    first, second = order if side == "left" else (order[0][::-1], order[1][::-1])
    return torch.cat(first, 1), torch.cat(second, 1)


# --- the whole model ----------------------------------------------------------------------------------------------


@mixers
def test_decoding_equals_the_full_pass_from_the_first_token_on(mixer):
    model, tokens = model_with(mixer, 1, local=mixer == "all"), random_tokens(1)
    tokens, mask = padded(tokens, 2, "left")
    with torch.no_grad():
        full = model(tokens, mask)[:, 2:]
        for first in (2, 3, tokens.shape[1] - 1):
            cache = DecodingCache()
            parts = [model(tokens[:, :first], mask[:, :first], cache=cache)]
            parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(first, tokens.shape[1])]
            close(torch.cat(parts, dim=1)[:, 2:], full)
    prompt = torch.tensor([[0, 7, 3, 7], [0, 9, 9, 2]])
    cached = model.generate(prompt, 5, temperature=0.0)
    assert torch.equal(cached, model.generate(prompt, 5, temperature=0.0, use_cache=False))


@mixers
def test_padding_changes_nothing_at_real_tokens(mixer):
    """Even where a bias gives padding a projection other than zero."""
    model, tokens = model_with(mixer, 2), random_tokens(2)
    for side, real in (("left", slice(3, None)), ("right", slice(None, -3))):
        close(model(*padded(tokens, 3, side))[:, real], model(tokens))


@mixers
def test_no_position_sees_the_future(mixer):
    model, tokens = model_with(mixer, 3), random_tokens(3)
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % 50
    close(model(other)[:, :-1], model(tokens)[:, :-1], 1e-12)


@pytest.mark.parametrize("mixer, system", [*((name, "standard") for name in MIXERS), ("all", "ddl-tc-ec")])
def test_contributions_gradients_and_verification(mixer, system):
    model, tokens = model_with(mixer, 4, system, tied=False), random_tokens(4)
    record = model.record(tokens)
    for name in ("1.mlp", "out"):
        close(t2lens.contributions(model, tokens, read=name).sum(dim=-2), record.reads[name])
    assert (report := t2lens.verify(model, tokens[0].tolist())).passed, str(report)
    model(tokens, return_type="loss").backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []


@mixers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_and_near(mixer, dtype):
    model, tokens = model_with(mixer, 5, dtype=torch.float32), random_tokens(5)
    exact, half = model(tokens), model.to(dtype)
    logits = half(*padded(tokens, 2, "left"))[:, 2:]
    assert logits.dtype == dtype and logits.isfinite().all()
    assert float((logits.float() - exact).detach().abs().max()) < 0.1 * float(exact.detach().abs().max())


@mixers
def test_every_hook_point_fires_once_and_its_edit_changes_the_logits(mixer):
    model, tokens = model_with(mixer, 6), random_tokens(6)
    plain, fired = model(tokens), []
    names = [n for n in model.hook_dict if any(w in n for w in ("canon", "convs", "shifts", "value_residual"))]
    assert names

    def count(tensor, *, hook):
        fired.append(hook.name)

    model.run_with_hooks(tokens, fwd_hooks=[(name, count) for name in names])
    assert sorted(fired) == sorted(names)
    for name in names:
        edited = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda tensor, *, hook: tensor + 0.5)])
        assert not torch.equal(edited, plain), name


@mixers
def test_config_round_trip_and_same_seed_same_weights(mixer):
    cfg = model_with(mixer).cfg
    assert ModelConfig.from_dict(cfg.to_dict()) == cfg
    a, b = (t2lens.build(cfg, seed=3) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert all(p.detach().any() for n, p in a.named_parameters() if any(w in n for w in ("canon", "convs", "shifts")))


# --- each mixer against its equation -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel, shift", [(1, 0), (3, 0), (4, 1)])
def test_causal_conv_equals_a_loop(kernel, shift):
    generator = torch.Generator().manual_seed(kernel)
    x = torch.randn(2, 7, 3, 5, dtype=torch.float64, generator=generator)
    weight = torch.randn(3, 5, kernel, dtype=torch.float64, generator=generator)
    expected = torch.zeros_like(x)
    for t in range(7):
        for tau in range(kernel):
            if (s := t - (kernel - 1) - shift + tau) >= 0:
                expected[:, t] += weight[..., tau] * x[:, s]
    close(causal_conv(x, weight, shift=shift), expected, 1e-12)
    close(causal_conv(x[..., :1, :], weight, shift=shift), causal_conv(x[..., :1, :].expand_as(x), weight, shift=shift))


def test_the_delta_rules_embedding_convolution_is_the_same_function():
    model: Any = tiny("ddl", 1, residual=DeepDelta(value_channels=2, compress_kernel=2, embed_conv=3))
    e = torch.randn(2, 6, 16, dtype=torch.float64)
    kernel = model.residual.embed_kernel
    theirs = F.conv1d(F.pad(e.transpose(1, 2), (2, 0)), kernel.reshape(32, 1, 3), groups=16)
    close(model.residual.begin(e), theirs.unflatten(1, (16, 2)).permute(0, 3, 2, 1), 1e-12)


def naive_canon(h: torch.Tensor, conv: Any) -> torch.Tensor:
    """h_t + sum_i w_i * h_{t-i}, with torch's own convolution."""
    kernel = conv.weight.shape[-1]
    y = F.conv1d(F.pad(h.transpose(1, 2), (kernel - 1, 0)), conv.weight, groups=h.shape[-1])
    return h + y.transpose(1, 2)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * weight / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def test_canon_at_all_four_sites_against_a_forward_written_out():
    """A after the norm, B on joined q, k, v after QK norm and before RoPE, C, D on joined gate and up."""
    model, tokens = model_with("canon", 7), random_tokens(7)
    x = model.embed(tokens)
    b, t, _ = x.shape
    place = torch.arange(t, dtype=torch.float64)
    angle = place[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]  # [T, 1, 4]

    def turn(y):
        left, right = y.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    for block in model.blocks:
        a = block.attn
        h = naive_canon(rms(x, block.ln1.w), block.canon_a)
        q = rms(a.query(h).view(b, t, 2, 8), a.query_norm).flatten(-2)
        k = rms(a.key(h).view(b, t, 1, 8), a.key_norm).flatten(-2)
        joined = naive_canon(torch.cat([q, k, a.value(h)], dim=-1), a.canon_b)
        q, k, v = joined[..., :16].view(b, t, 2, 8), joined[..., 16:24].view(b, t, 1, 8), joined[..., 24:]
        scores = torch.einsum("bqhd,bkhd->bhqk", turn(q), turn(k).expand(b, t, 2, 8)) / 8**0.5
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        z = torch.einsum("bhqk,bkd->bqhd", scores.softmax(-1), v).flatten(-2)
        x = x + z @ a.output.weight.T
        h = naive_canon(rms(x, block.ln2.w), block.canon_c)
        joined = naive_canon(torch.cat([block.mlp.gate(h), block.mlp.input(h)], dim=-1), block.mlp.canon_d)
        gate, up = joined.chunk(2, dim=-1)
        x = x + block.mlp.output(F.silu(gate) * up)
    close(rms(x, model.ln_final.w) @ model.embed.weight.T, model(tokens))


def values_of(model: Any, tokens: torch.Tensor) -> tuple[Any, Any]:
    _, cache = model.run_with_cache(tokens)
    return model.blocks[1].attn, lambda name: cache[f"blocks.1.{name}"]


def test_kv_shift_of_heads_mixes_with_the_previous_token():
    model, tokens = model_with("kv-shift-heads", 8), random_tokens(8)
    attn, get = values_of(model, tokens)
    read = get("ln1.hook_normalized") * model.blocks[1].ln1.w
    for way, projection, ours in (("k", attn.key, get("attn.hook_k")), ("v", attn.value, get("attn.hook_v"))):
        y, shift = projection(read), attn.shifts[way]
        expected = shift.own * y
        expected[:, 1:] += shift.previous * y[:, :-1]
        close(ours.flatten(-2), expected)
    fresh: Any = t2lens.build(model.cfg, seed=1)
    for block in fresh.blocks:
        for shift in block.attn.shifts.values():
            assert torch.equal(shift.own + shift.previous, torch.ones(1)) and 0 <= float(shift.own.detach()) <= 1


def test_kv_shift_of_tokens_gates_by_the_read():
    """y_t <- a_t y_{t-1} + (1 - a_t) y_t with a_t = sigmoid(W x_t)."""
    model, tokens = model_with("kv-shift-tokens", 9), random_tokens(9)
    attn, get = values_of(model, tokens)
    read = get("ln1.hook_normalized") * model.blocks[1].ln1.w
    y, a = attn.key(read), (read @ attn.shifts["k"].gate.weight.T).sigmoid()
    expected = torch.zeros_like(y)
    for t in range(tokens.shape[1]):
        expected[:, t] = (1 - a[:, t]) * y[:, t] + (a[:, t] * y[:, t - 1] if t else 0)
    close(get("attn.hook_k").flatten(-2), expected)
    close(get("attn.hook_v").flatten(-2), attn.value(read))


def test_short_conv_on_queries_keys_and_values_and_keys_that_see_the_past_only():
    model, tokens = model_with("short-conv", 10), random_tokens(10)
    attn, get = values_of(model, tokens)
    read = get("ln1.hook_normalized") * model.blocks[1].ln1.w
    for way, projection in (("q", attn.query), ("k", attn.key), ("v", attn.value)):
        y, conv = projection(read), attn.convs[way]
        y = F.pad(y, (0, 0, 1, 0))[:, :-1] if way == "k" else y
        expected = F.silu(naive_canon(y, conv) - y + conv.bias)
        close(get(f"attn.hook_{way}").flatten(-2), expected)


@pytest.mark.parametrize("learned", [True, False])
def test_value_residual_adds_the_first_layers_values(learned):
    rule = ValueResidual(first=0.3, own=0.8, learned=learned)
    model: Any = tiny("standard", 11, attention=replace(HEADS, value_residual=rule))
    tokens = random_tokens(11)
    _, cache = model.run_with_cache(tokens)
    assert not hasattr(model.blocks[0].attn.value_residual, "weights")
    for layer in (1, 2):
        block = model.blocks[layer]
        read = cache[f"blocks.{layer}.ln1.hook_normalized"] * block.ln1.w
        first, own = block.attn.value_residual.weights if learned else (0.3, 0.8)
        expected = first * cache["blocks.0.attn.hook_v"] + own * block.attn.value(read).unflatten(-1, (1, 8))
        close(cache[f"blocks.{layer}.attn.hook_v"], expected)


def test_nothing_but_the_value_is_there_at_its_limits():
    """Zero taps, (1, 0) shifts and (0, 1) value weights: the model without the mixer."""
    plain: Any = tiny("standard", 12)
    tokens = random_tokens(12)
    for mixer in ("canon", "kv-shift-heads", "value-residual"):
        model: Any = Transformer(replace(plain.cfg, **MIXERS[mixer])).double().eval()
        missing = model.load_state_dict(plain.state_dict(), strict=False)
        assert missing.missing_keys and not missing.unexpected_keys
        for name, p in model.named_parameters():
            if name in missing.missing_keys:
                p.data = p.data.new_tensor([0.0, 1.0]) if "value_residual" in name else p.data
                assert "canon" not in name or not p.any()
        assert torch.equal(model(tokens), plain(tokens))


def test_bad_values_say_what_is_wrong():
    for make, words in (
        (lambda: Canon(sites="ABE"), "letters ABCD"),
        (lambda: Canon(sites="AA"), "letters ABCD"),
        (lambda: Canon(kernel=0), "at least 1"),
        (lambda: ShortConv(on=""), "letters qkv"),
        (lambda: ShortConv(on="qv", shift_keys=True), "convolution on the keys"),
        (lambda: KVShift(kind="all"), "heads, tokens"),  # type: ignore[arg-type]
        (lambda: Attention(causal=False, kv_shift=KVShift()), "causal"),
        (lambda: replace(tiny("standard").cfg, attention=Attention(causal=False), canon=Canon()), "causal"),
        (lambda: replace(tiny("standard").cfg, canon=Standard()), "must be a Canon or None"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    assert (
        tiny("standard", **MIXERS["all"])
        .cfg.describe()
        .endswith("with Canon layers ABD and ShortConv on q, k, v and KV shift and value residual")
    )

"""The one operator: fast path and explicit path agree, with every option, against a loop written out."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from t2lens.ordered_attention import ordered_attention, ordered_pattern, reach


def by_hand(q, k, v, window=None, valid=None, scale=None, sink=None):
    """softmax over the visible places of each query, in plain loops."""
    n_batch, n_heads, n_query, d = q.shape
    n_groups, n_place = k.shape[1:3]
    scale = 1 / math.sqrt(d) if scale is None else scale
    z = torch.zeros(n_batch, n_heads, n_query, v.shape[-1], dtype=q.dtype)
    pattern = torch.zeros(n_batch, n_heads, n_query, n_place, dtype=q.dtype)
    for b in range(n_batch):
        for h in range(n_heads):
            g = h // (n_heads // n_groups)
            for i in range(n_query):
                at = n_place - n_query + i
                first = 0 if window is None else max(0, at - window + 1)
                seen = [j for j in range(first, at + 1) if valid is None or valid[b, j] or j == at]
                logits = [float(q[b, h, i] @ k[b, g, j]) * scale for j in seen]
                extra = [] if sink is None else [float(sink[h])]
                total = sum(math.exp(x) for x in logits + extra)
                for j, x in zip(seen, logits, strict=True):
                    pattern[b, h, i, j] = math.exp(x) / total
                    z[b, h, i] += pattern[b, h, i, j] * v[b, g, j]
    return z, pattern


def draw(seed: int, dtype=torch.float64):
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    groups = dice.randint(1, 2)
    heads, n_place = groups * dice.randint(1, 3), dice.randint(1, 7)
    n_query, d, e = dice.randint(1, n_place), 2 * dice.randint(1, 3), dice.randint(1, 5)
    shapes = ((2, heads, n_query, d), (2, groups, n_place, d), (2, groups, n_place, e))
    q, k, v = (torch.randn(s, generator=generator, dtype=dtype) for s in shapes)
    options = {
        "window": dice.choice([None, 1, 2, 3]),
        "valid": dice.choice([None, torch.rand(2, n_place, generator=generator) > 0.4]),
        "scale": dice.choice([None, 0.3]),
        "sink": dice.choice([None, torch.randn(heads, generator=generator, dtype=dtype)]),
    }
    return (q, k, v), options


class Look:
    """An observer that keeps what it sees and changes nothing."""

    def __init__(self):
        self.seen = {}

    def scores(self, x):
        self.seen["scores"] = x
        return x

    def pattern(self, x):
        self.seen["pattern"] = x
        return x


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_loop(seed):
    (q, k, v), options = draw(seed)
    z, pattern = by_hand(q, k, v, **options)
    look = Look()
    torch.testing.assert_close(ordered_attention(q, k, v, **options), z, atol=1e-12, rtol=0)
    torch.testing.assert_close(ordered_pattern(q, k, **options), pattern, atol=1e-12, rtol=0)
    watched = ordered_attention(q, k, v, **options, observer=look)
    assert torch.equal(watched, ordered_attention(q, k, v, **options))  # looking changes no bit
    torch.testing.assert_close(look.seen["pattern"], pattern, atol=1e-12, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_watched_gradients_are_those_of_the_pattern(seed):
    (q, k, v), options = draw(seed)
    options["sink"] = None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    look = Look()
    z = ordered_attention(*leaves, **options, observer=look)
    assert torch.equal(z, ordered_attention(q, k, v, **options))
    weight = torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(seed))
    look.seen["pattern"].retain_grad()
    (z * weight).sum().backward()
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    (ordered_attention(*plain, **options) * weight).sum().backward()
    for ours, fast in zip(leaves, plain, strict=True):
        torch.testing.assert_close(ours.grad, fast.grad, atol=1e-10, rtol=0)
    groups = q.shape[1] // k.shape[1]
    expected = weight @ v.repeat_interleave(groups, dim=1).transpose(-1, -2)
    torch.testing.assert_close(look.seen["pattern"].grad, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("mode", ["new tensor", "in place", "in place, inference"])
def test_an_edited_pattern_is_used(mode):
    (q, k, v), _ = draw(3)
    groups = q.shape[1] // k.shape[1]

    def first(x):
        if mode == "new tensor":
            x = torch.zeros_like(x)
        x.zero_()[..., 0] = 1.0
        return x

    observer: Any = SimpleNamespace(scores=lambda x: x, pattern=first)
    with torch.inference_mode("inference" in mode):
        z = ordered_attention(q, k, v, observer=observer)
    assert torch.equal(z, v.repeat_interleave(groups, dim=1)[:, :, :1].expand_as(z))


def test_single_precision_paths_agree():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 64, 32, generator=generator) for _ in range(3))
    observer: Any = SimpleNamespace(scores=lambda x: x.clone(), pattern=lambda x: x)  # a clone counts as an edit
    explicit = ordered_attention(q, k, v, observer=observer)
    torch.testing.assert_close(explicit, ordered_attention(q, k, v), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_finite(dtype):
    (q, k, v), _ = draw(7, torch.float32)
    z = ordered_attention(q.to(dtype) * 30, k.to(dtype) * 30, v.to(dtype), window=2, scale=0.3)
    assert z.dtype == dtype and z.isfinite().all()


def test_reach_counts_from_the_end():
    assert reach(2, 4, 2).tolist() == [[False, True, True, False], [False, False, True, True]]
    assert reach(1, 3, None).tolist() == [[True, True, True]]

"""Attention over an ordered axis: the one operator of both axes (arXiv 2603.16039, section 2).

    z_i = sum_j softmax_j(q_i . k_j * scale) v_j ,   0 <= i - j < window

The axis is any ordered one. Sequence attention and ShortSWA call it with positions, the depth read of `DepthSWA` with
the states of one token in layer order; transposing the state tensor turns one into the other. Attention Residuals and
the static systems are in the same design space but are NOT literally this operator: their query is a constant of the
reader (or their weights are constants), values are raw, and there is no 1/sqrt(d).

Shapes: `...` any leading axes, H query heads, G key/value heads (G divides H), Q queries, S places on the axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Observer", "ordered_attention", "ordered_pattern", "reach"]


class Observer(Protocol):
    """What may look at (and edit) the scores and the pattern on their way: two hook points, in practice."""

    @property
    def scores(self) -> Callable[[Tensor], Tensor]: ...
    @property
    def pattern(self) -> Callable[[Tensor], Tensor]: ...


def reach(n_query: int, n_place: int, window: int | None, device: torch.device | None = None) -> Tensor:
    """[Q, S] bool: which places each query may see. The queries are the LAST Q of the S places."""
    query = torch.arange(n_place - n_query, n_place, device=device)[:, None]
    distance = query - torch.arange(n_place, device=device)[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def ordered_pattern(
    q: Tensor,
    k: Tensor,
    *,
    window: int | None = None,
    causal: bool = True,
    valid: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """The weights of `ordered_attention` (same arguments): [..., H, Q, S], rows summing to 1 (less with a sink)."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mask = _mask(q.shape[-2], k.shape[-2], window, valid, q.device, causal)
    return _explicit_pattern(q, k, mask, scale, bias, sink, observer)[0]


def ordered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    causal: bool = True,
    valid: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """Attention over an ordered axis, causal and windowed where asked for.

    Args:
        q: [..., H, Q, d]. The Q queries are the last Q of the S places (Q == S without a decoding cache).
        k: [..., G, S, d];  v: [..., G, S, e].
        window: a query sees itself and the window-1 places before it; None sees the whole past.
        causal: False lets every query see every place (no window then).
        valid: [..., S] bool, places that exist (False: padding). A query always sees its own place, so that a row
            over padding alone stays finite; such rows are padding themselves.
        scale: factor on q.k, 1/sqrt(d) when None.
        bias: [..., H, Q, S] added to the scaled scores (relative positions).
        sink: [H] learned logits of an extra place with value zero (its share is missing from the row sums).
        observer: given, the scores [..., H, Q, S] and the pattern [..., H, Q, S] pass through it. An observer that
            changes nothing changes no bit of the result; one that edits is honoured, and gradients reach the pattern.

    Returns:
        z: [..., H, Q, e] in the dtype of v.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mask = _mask(q.shape[-2], k.shape[-2], window, valid, q.device, causal)
    if observer is None:
        return _fast(q, k, v, mask, scale, bias, sink)
    pattern, edited = _explicit_pattern(q, k, mask, scale, bias, sink, observer)
    if not edited and not (torch.is_grad_enabled() and pattern.requires_grad):
        return _fast(q, k, v, mask, scale, bias, sink)
    explicit = pattern.to(v.dtype) @ _per_head(v, q)
    if edited:
        return explicit
    # Nothing was edited, but someone may ask for the gradient of the pattern: keep the value of the fast path to the
    # last bit and take the gradient through the explicit one (its difference from itself is exactly zero).
    with torch.no_grad():
        fast = _fast(q, k, v, mask, scale, bias, sink)
    return fast + (explicit - explicit.detach())


def _mask(
    n_query: int, n_place: int, window: int | None, valid: Tensor | None, device: torch.device, causal: bool
) -> Tensor | None:
    """[..., Q, S] bool, or None where plain causality says it all."""
    if causal and valid is None and n_query == n_place and (window is None or window >= n_place):
        return None
    mask = reach(n_query, n_place, window, device)
    mask = mask if causal else torch.ones_like(mask)
    if valid is None:
        return mask
    return mask & valid[..., None, None, :] | reach(n_query, n_place, 1, device)


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [..., G, S, d] repeated to one per query head."""
    groups = q.shape[-3] // x.shape[-3]
    return x.repeat_interleave(groups, dim=-3) if groups > 1 else x


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is True, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _with_sink(logits: Tensor, sink: Tensor) -> Tensor:
    return torch.cat([logits, sink.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)], dim=-1)


def _fast(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, bias: Tensor | None, sink: Tensor | None
) -> Tensor:
    is_causal = mask is None and q.shape[-2] > 1
    if sink is not None or bias is not None:
        mask = reach(q.shape[-2], k.shape[-2], None, q.device) if mask is None else mask
        mask, is_causal = _bias(mask, q.dtype), False
        if bias is not None:
            mask = mask + bias
    if sink is not None:
        mask = _with_sink(mask.expand(*q.shape[:-1], k.shape[-2]), sink)  # type: ignore[union-attr]
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    grouped = q.shape[-3] != k.shape[-3]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def _explicit_pattern(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scale: float,
    bias: Tensor | None,
    sink: Tensor | None,
    observer: Observer | None,
) -> tuple[Tensor, bool]:
    """(pattern, whether the observer edited it or the scores)."""
    mask = reach(q.shape[-2], k.shape[-2], None, q.device) if mask is None else mask
    scores = (q * scale) @ _per_head(k, q).transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    scores += _bias(mask, scores.dtype)  # in place: nobody has seen it yet, and these are the largest tensors here
    scores, touched = _watch(observer.scores if observer else None, scores)
    logits = scores.float() if q.dtype in (torch.float16, torch.bfloat16) else scores
    logits = logits if sink is None else _with_sink(logits, sink)
    pattern = logits.softmax(dim=-1)[..., : k.shape[-2]].to(q.dtype)
    pattern, edited = _watch(observer.pattern if observer else None, pattern)
    return pattern, touched or edited


def _watch(look: Callable[[Tensor], Tensor] | None, x: Tensor) -> tuple[Tensor, bool]:
    """(what came back, whether it was edited): another tensor, or the same one written to in place."""
    if look is None:
        return x, False
    if x.is_inference():  # inference tensors keep no version count
        before = x.clone() if getattr(look, "may_edit", True) else None
        seen = look(x)
        return seen, seen is not x or (before is not None and not torch.equal(before, seen))
    version = x._version
    seen = look(x)
    return seen, seen is not x or seen._version != version

"""The one causal depthwise convolution over time, and the local mixers made of it: ShortConv and Canon layers.

    y[t] = sum_tau W[:, tau] * x[t - (K - 1) - shift + tau]        per channel; the past before the text is zero

The last tap sees the current token (with shift 1, as keys of ShortConv may have it, the previous one).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from t2lens.sublayers.positions import DecodingCache, Places

__all__ = ["causal_conv"]


def causal_conv(x: Tensor, weight: Tensor, places: Places | None = None, name: str = "", shift: int = 0) -> Tensor:
    """x [..., T, *C] with weight [*C, K], one kernel per channel -> [..., T, *C].

    A channel axis of x of length 1 is spread over the weight's. With a decoding cache behind `places` the inputs
    before x come from what it keeps under `name`; the caller sees to it that padding holds zeros.
    """
    *channels, kernel = weight.shape
    n, past = x.shape[-1 - len(channels)], kernel - 1 + shift
    line = _with_past(x, past, -1 - len(channels), None if places is None else places.cache, name)
    taps = weight.movedim(-1, 0).contiguous()  # [K, *C]: a product with a strided weight takes twice as long
    y = line.narrow(-1 - len(channels), 0, n) * taps[0]
    for tau in range(1, kernel):
        y += line.narrow(-1 - len(channels), tau, n) * taps[tau]
    return y


def _with_past(x: Tensor, past: int, axis: int, cache: DecodingCache | None, name: str) -> Tensor:
    """x after the `past` places before it, which become the last of x for the next call."""
    if cache is not None and name in cache.memory:
        line = torch.cat([cache.memory[name], x], dim=axis)
    else:
        line = F.pad(x, (0, 0) * (-1 - axis) + (past, 0))
    if cache is not None:
        cache.memory[name] = line.narrow(axis, line.shape[axis] - past, past)
    return line

"""The one causal depthwise convolution over time, and the local mixer made of it: ShortConv and Canon layers.

    conv(x)[t] = sum_tau W[:, tau] * x[t - (K - 1) - shift + tau]       per channel; before the text there is nothing
    ShortConv    act(conv(x))        on queries, keys, values (shift 1: an option for keys in DDL's code)
    Canon        x + conv(x)         arXiv 2512.17351; on the normed read, and inside attention and MLP

The last tap sees the current token (with shift 1 the previous one). Deep Delta Learning's embedding convolution and its
compression over time are the same function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from t2lens.config import Canon
from t2lens.hooks import HookPoint
from t2lens.sublayers.positions import DecodingCache, Places

__all__ = ["LocalConv", "LocalMixer", "causal_conv", "with_past"]


def causal_conv(x: Tensor, weight: Tensor, places: Places | None = None, name: str = "", shift: int = 0) -> Tensor:
    """x [..., T, *C] with weight [*C, K], one kernel per channel -> [..., T, *C].

    A channel axis of x of length 1 is spread over the weight's. With a decoding cache behind `places` the inputs
    before x come from what it keeps under `name`; the caller sees to it that padding holds zeros.
    """
    *channels, kernel = weight.shape
    axis = -1 - len(channels)
    line = with_past(x, kernel - 1 + shift, axis, places, name)
    taps = weight.movedim(-1, 0).contiguous()  # [K, *C]: a product with a strided weight takes twice as long
    y = line.narrow(axis, 0, x.shape[axis]) * taps[0]
    for tau in range(1, kernel):
        y += line.narrow(axis, tau, x.shape[axis]) * taps[tau]
    return y


def with_past(x: Tensor, past: int, axis: int, places: Places | None, name: str) -> Tensor:
    """x after the `past` places before it, zeros where there is no text; while decoding they come from the cache,
    which keeps the last ones under `name` for the next call."""
    cache: DecodingCache | None = None if places is None else places.cache
    if cache is not None and name in cache.memory:
        line = torch.cat([cache.memory[name], x], dim=axis)
    else:
        line = F.pad(x, (0, 0) * (-1 - axis) + (past, 0))
    if cache is not None:
        cache.memory[name] = line.narrow(axis, line.shape[axis] - past, past)
    return line


class LocalMixer(nn.Module):
    """What mixes neighbouring tokens and draws its own start."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        raise NotImplementedError


class LocalConv(LocalMixer):
    """[B, T, C] -> [B, T, C]: the convolution with an optional bias, SiLU, and x itself (a Canon layer's residual).

    name: under which a decoding cache keeps its past. what: its input in words. Starts at U(-1, 1) / sqrt(K).
    weight: [C, 1, K], as torch's Conv1d has it, which also keeps it apart from the matrices that an optimiser like Muon
    orthogonalises.
    """

    def __init__(
        self,
        channels: int,
        name: str,
        what: str,
        *,
        kernel: int = 4,
        bias: bool = False,
        act: str = "none",
        residual: bool = False,
        shift: int = 0,
    ) -> None:
        super().__init__()
        self.name, self.act, self.residual, self.shift = name, act, residual, shift
        self.weight = nn.Parameter(torch.zeros(channels, 1, kernel))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.hook_in = HookPoint(shape="batch pos channel", meaning=f"{what}, before its short convolution")
        self.hook_out = HookPoint(shape="batch pos channel", meaning=f"{what}, after its short convolution")

    @classmethod
    def canon(cls, cfg: Canon, channels: int, name: str, what: str) -> LocalConv:
        return cls(channels, name, what, kernel=cfg.kernel, bias=cfg.bias, act=cfg.act, residual=cfg.residual)

    def reset_parameters(self, generator: torch.Generator) -> None:
        bound = self.weight.shape[-1] ** -0.5
        self.weight.data.uniform_(-bound, bound, generator=generator)
        if self.bias is not None:
            self.bias.data.uniform_(-bound, bound, generator=generator)

    def forward(self, x: Tensor, places: Places) -> Tensor:
        x = self.hook_in(places.without_padding(x))
        y = causal_conv(x, self.weight[:, 0], places, self.name, self.shift)
        if self.bias is not None:
            y = y + self.bias
        if self.act == "silu":
            y = F.silu(y)
        return self.hook_out(x + y if self.residual else y)

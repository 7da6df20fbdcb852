"""Norms, with transformer-lens's two hook points inside.

rms     w * x / sqrt(mean(x^2) + eps) + b
layer   the same of x - mean(x)
none    w * x + b
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from t2lens.config import Norm as NormConfig
from t2lens.hooks import HookPoint

__all__ = ["Norm", "centred", "rms_scale", "wide"]


def wide(x: Tensor) -> Tensor:
    """x in at least float32: where half precision would lose the sum, and float64 stays float64."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """sqrt(mean(x^2) + eps) over the last axis, kept as an axis of length 1, in at least float32."""
    return (wide(x).square().mean(dim=-1, keepdim=True) + eps).sqrt()


def centred(x: Tensor) -> Tensor:
    """x - mean(x) over the last axis, in at least float32."""
    x = wide(x)
    return x - x.mean(dim=-1, keepdim=True)


class Norm(nn.Module):
    """[..., d] -> [..., d]. `hook_scale` [..., 1] is the scale, `hook_normalized` [..., d] is (centred) x / scale."""

    w: Tensor | None
    b: Tensor | None

    def __init__(self, cfg: NormConfig, d: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.w = nn.Parameter(torch.ones(d)) if cfg.weight else None
        self.b = nn.Parameter(torch.zeros(d)) if cfg.bias else None
        self.hook_scale = HookPoint(shape="batch pos 1", meaning="root mean square of the read", unit="stream")
        self.hook_normalized = HookPoint(shape="batch pos d_model", meaning="the read divided by its scale")

    def forward(self, x: Tensor) -> Tensor:
        scale = self.hook_scale(self.scale(x))
        out = self.hook_normalized((self._centred(x) / scale).to(x.dtype))
        out = out if self.w is None else out * self.w
        return out if self.b is None else out + self.b

    def scale(self, x: Tensor) -> Tensor:
        """[..., 1]: what x is divided by, in at least float32."""
        if self.cfg.kind == "none":
            return wide(x).new_ones(*x.shape[:-1], 1)
        return rms_scale(self._centred(x), self.cfg.eps)

    def share(self, part: Tensor, scale: Tensor) -> Tensor:
        """What a part of the input adds to the output at a recorded `scale`, less the bias: linear in `part`."""
        out = self._centred(part) / scale
        return out if self.w is None else out * self.w.to(out.dtype)

    def _centred(self, x: Tensor) -> Tensor:
        return centred(x) if self.cfg.kind == "layer" else x

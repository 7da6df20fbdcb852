"""RMSNorm(x; w, eps) = w * x / sqrt(mean(x^2) + eps), with transformer-lens's two hook points inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from t2lens.hooks import HookPoint

__all__ = ["RMSNorm", "rms_scale", "wide"]


def wide(x: Tensor) -> Tensor:
    """x in at least float32: where half precision would lose the sum, and float64 stays float64."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """sqrt(mean(x^2) + eps) over the last axis, kept as an axis of length 1, in at least float32."""
    return (wide(x).square().mean(dim=-1, keepdim=True) + eps).sqrt()


class RMSNorm(nn.Module):
    """[..., d] -> [..., d]. `hook_scale` [..., 1] is the root mean square, `hook_normalized` [..., d] is x / scale."""

    def __init__(self, d: int, eps: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(d))
        self.eps = eps
        self.hook_scale = HookPoint(shape="batch pos 1", meaning="root mean square of the read", unit="stream")
        self.hook_normalized = HookPoint(shape="batch pos d_model", meaning="the read divided by its scale")

    def forward(self, x: Tensor) -> Tensor:
        scale = self.hook_scale(rms_scale(x, self.eps))
        return self.hook_normalized((x / scale).to(x.dtype)) * self.w

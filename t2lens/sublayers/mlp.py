"""SwiGLU: W_out (silu(W_gate x) * W_in x)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from t2lens.config import SwiGLU as SwiGLUConfig
from t2lens.hooks import HookPoint

__all__ = ["SwiGLU"]


class SwiGLU(nn.Module):
    """[B, T, D] -> [B, T, D], bias-free; hook names and meanings as transformer-lens's gated MLP has them."""

    def __init__(self, cfg: SwiGLUConfig, d_model: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, cfg.d_mlp, bias=False)
        self.input = nn.Linear(d_model, cfg.d_mlp, bias=False)
        self.output = nn.Linear(cfg.d_mlp, d_model, bias=False)
        self.hook_pre = HookPoint(shape="batch pos d_mlp", meaning="gate branch before silu")
        self.hook_pre_linear = HookPoint(shape="batch pos d_mlp", meaning="linear branch")
        self.hook_post = HookPoint(shape="batch pos d_mlp", meaning="neurons: silu(pre) * pre_linear")

    def forward(self, read: Tensor) -> Tensor:
        return self.output(
            self.hook_post(F.silu(self.hook_pre(self.gate(read))) * self.hook_pre_linear(self.input(read)))
        )

    @property
    def W_gate(self) -> Tensor:
        """[d_model, d_mlp]"""
        return self.gate.weight.T

    @property
    def W_in(self) -> Tensor:
        """[d_model, d_mlp]"""
        return self.input.weight.T

    @property
    def W_out(self) -> Tensor:
        """[d_mlp, d_model]"""
        return self.output.weight.T

    @property
    def b_out(self) -> Tensor:
        """[d_model], zero: the projections have no bias."""
        return self.output.weight.new_zeros(self.output.out_features)

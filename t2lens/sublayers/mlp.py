"""MLP: W_out act(W_in x), or gated W_out (act(W_gate x) * W_in x), with or without a norm on the neurons."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from t2lens.config import MLP as MLPConfig
from t2lens.config import Canon
from t2lens.hooks import HookPoint
from t2lens.sublayers.norms import Norm
from t2lens.sublayers.positions import Places
from t2lens.sublayers.short_conv import LocalConv

__all__ = ["ACTIVATIONS", "MLP"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class MLP(nn.Module):
    """[B, T, D] -> [B, T, D]; hook names and meanings as transformer-lens's (gated) MLP has them."""

    def __init__(self, cfg: MLPConfig, d_model: int, layer: int, canon: Canon | None = None) -> None:
        super().__init__()
        d_mlp = cfg.width(layer)
        self.act = ACTIVATIONS[cfg.act]
        self.gate = nn.Linear(d_model, d_mlp, bias=cfg.bias) if cfg.gated else None
        self.input = nn.Linear(d_model, d_mlp, bias=cfg.bias)
        self.mid_norm = Norm(cfg.mid_norm, d_mlp) if cfg.mid_norm else None
        self.output = nn.Linear(d_mlp, d_model, bias=cfg.bias)
        self.canon_d = None
        if canon is not None and "D" in canon.sites:
            what = "gate and linear branch, joined" if cfg.gated else "neurons"
            self.canon_d = LocalConv.canon(canon, d_mlp * (2 if cfg.gated else 1), f"{layer}.canon_d", what)
        neurons, branch = "batch pos d_mlp", "gate branch" if cfg.gated else "neurons"
        self.hook_pre = HookPoint(shape=neurons, meaning=f"{branch} before {cfg.act}")
        if cfg.gated:
            self.hook_pre_linear = HookPoint(shape=neurons, meaning="linear branch")
        meaning = f"neurons: {cfg.act}(pre)" + " * pre_linear" * cfg.gated + ", normed" * (cfg.mid_norm is not None)
        self.hook_post = HookPoint(shape=neurons, meaning=meaning)

    def forward(self, read: Tensor, places: Places | None = None) -> Tensor:
        """`places` are needed by Canon D only."""
        pre = [self.input(read)] if self.gate is None else [self.gate(read), self.input(read)]
        if self.canon_d is not None:
            assert places is not None
            pre = [*self.canon_d(torch.cat(pre, dim=-1), places).chunk(len(pre), dim=-1)]
        neurons = self.act(self.hook_pre(pre[0]))
        if self.gate is not None:
            neurons = neurons * self.hook_pre_linear(pre[1])
        return self.output(self.hook_post(neurons if self.mid_norm is None else self.mid_norm(neurons)))

    @property
    def W_gate(self) -> Tensor | None:
        """[d_model, d_mlp], or None where the MLP has no gate."""
        return None if self.gate is None else self.gate.weight.T

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
        """[d_model]"""
        bias = self.output.bias
        return self.output.weight.new_zeros(self.output.out_features) if bias is None else bias

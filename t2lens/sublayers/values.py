"""What happens to keys and values between their projections and the heads: KV shift and the value residual.

KV shift        y_t <- w_t y_t + p_t y_{t-1}, with y the projected keys or values and y_{-1} = 0
    heads       w and p: free scalars per head (arXiv 2411.19574), w ~ U(0, 1) and p = 1 - w at the start
    tokens      p_t = sigmoid(W x_t) per token and head, w_t = 1 - p_t (the code of Deep Delta Learning). That code
                forgets y_{t-1} when it is given one token; here decoding equals the full pass
Value residual  v <- a v_first + b v, with v_first those of the first layer (ResFormer, arXiv 2410.17897)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from t2lens.config import KVShift as KVShiftConfig
from t2lens.config import ValueResidual as ValueResidualConfig
from t2lens.hooks import HookPoint
from t2lens.sublayers.norms import wide
from t2lens.sublayers.positions import Places
from t2lens.sublayers.short_conv import LocalMixer, with_past

__all__ = ["KVShift", "ValueResidual"]


class KVShift(LocalMixer):
    """Projected keys or values [B, T, G * K] of the (normed) read [B, T, D] -> the same shape."""

    def __init__(self, cfg: KVShiftConfig, d_model: int, n_heads: int, name: str, what: str) -> None:
        super().__init__()
        self.name, self.n_heads = name, n_heads
        self.gate = nn.Linear(d_model, n_heads, bias=False) if cfg.kind == "tokens" else None
        if cfg.kind == "heads":
            self.own = nn.Parameter(torch.ones(n_heads))
            self.previous = nn.Parameter(torch.zeros(n_heads))
        meaning = f"weights of this token's {what} and of the previous token's"
        self.hook_weights = HookPoint(shape="batch pos kv_head 2", meaning=meaning, unit="weight")

    def reset_parameters(self, generator: torch.Generator) -> None:
        if self.gate is None:  # the other's matrix is drawn as every matrix
            self.own.data.uniform_(0.0, 1.0, generator=generator)
            self.previous.data = 1 - self.own.data

    def forward(self, y: Tensor, read: Tensor, places: Places) -> Tensor:
        if self.gate is None:
            weights = torch.stack([self.own, self.previous], dim=-1).expand(*y.shape[:2], -1, -1)
        else:
            previous = wide(self.gate(read)).sigmoid()
            weights = torch.stack([1 - previous, previous], dim=-1)
        weights = self.hook_weights(weights).to(y.dtype)
        y = places.without_padding(y)
        before = with_past(y, 1, -2, places, self.name)[:, :-1]
        y, before = (x.unflatten(-1, (self.n_heads, -1)) for x in (y, before))
        return (weights[..., :1] * y + weights[..., 1:] * before).flatten(-2)


class ValueResidual(nn.Module):
    """Values [B, T, G, K] and those of the first layer -> the same shape."""

    def __init__(self, cfg: ValueResidualConfig) -> None:
        super().__init__()
        self.cfg = cfg
        if cfg.learned:
            self.weights = nn.Parameter(torch.tensor([cfg.first, cfg.own]))
        meaning = "weights of the first layer's values and of this layer's"
        self.hook_weights = HookPoint(shape="batch pos 2", meaning=meaning, unit="weight")

    def forward(self, v: Tensor, first: Tensor) -> Tensor:
        weights = self.weights if self.cfg.learned else v.new_tensor([self.cfg.first, self.cfg.own])
        weights = self.hook_weights(weights.expand(*v.shape[:2], 2))[..., None, None]
        return weights[:, :, 0] * first + weights[:, :, 1] * v

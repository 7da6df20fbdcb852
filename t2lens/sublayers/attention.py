"""Self-attention over positions: what mixes along the sequence axis. ShortSWA is the same module with a window."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from t2lens.config import Attention as AttentionConfig
from t2lens.hooks import HookPoint
from t2lens.ordered_attention import ordered_attention
from t2lens.sublayers.norms import rms_scale
from t2lens.sublayers.positions import Places, rotate

__all__ = ["Attention"]


class _Observer(NamedTuple):
    scores: HookPoint
    pattern: HookPoint


class Attention(nn.Module):
    """q, k, v from the (normed) reads; QK norm and RoPE; GQA; z back to d_model.

    B batch, T position, H query heads, G key/value heads, K d_head, D d_model.
    """

    def __init__(self, cfg: AttentionConfig, d_model: int, norm_eps: float, site: str) -> None:
        super().__init__()
        self.cfg, self.site, self.norm_eps = cfg, site, norm_eps
        self.query = nn.Linear(d_model, cfg.n_heads * cfg.d_head, bias=cfg.bias)
        self.key = nn.Linear(d_model, cfg.n_kv_heads * cfg.d_head, bias=cfg.bias)
        self.value = nn.Linear(d_model, cfg.n_kv_heads * cfg.d_head, bias=cfg.bias)
        self.output = nn.Linear(cfg.n_heads * cfg.d_head, d_model, bias=cfg.bias)
        if cfg.qk_norm != "none":
            joined = cfg.qk_norm == "joined"
            self.query_norm = nn.Parameter(torch.ones(cfg.d_head * (cfg.n_heads if joined else 1)))
            self.key_norm = nn.Parameter(torch.ones(cfg.d_head * (cfg.n_kv_heads if joined else 1)))
        heads, groups = "batch pos head d_head", "batch pos kv_head d_head"
        self.hook_q = HookPoint(shape=heads, meaning="queries before QK norm and RoPE")
        self.hook_k = HookPoint(shape=groups, meaning="keys before QK norm and RoPE")
        self.hook_v = HookPoint(shape=groups, meaning="values")
        self.hook_rot_q = HookPoint(shape=heads, meaning="queries after QK norm and RoPE")
        self.hook_rot_k = HookPoint(shape=groups, meaning="keys after QK norm and RoPE")
        grid = "batch head query_pos key_pos"
        self.hook_attn_scores = HookPoint(shape=grid, meaning="scores, masked places at -inf", unit="logit")
        self.hook_pattern = HookPoint(shape=grid, meaning="where each head reads in the sequence", unit="probability")
        self.hook_z = HookPoint(shape=heads, meaning="mixed values per head, before the output projection")

    def forward(self, q_read: Tensor, k_read: Tensor, v_read: Tensor, places: Places) -> Tensor:
        """Three normed reads [B, T, D] (the same one where the residual system has one way) -> [B, T, D]."""
        q = self.hook_q(self.query(q_read).unflatten(-1, (-1, self.cfg.d_head)))  # [B, T, H, K]
        k = self.hook_k(self.key(k_read).unflatten(-1, (-1, self.cfg.d_head)))  # [B, T, G, K]
        v = self.hook_v(self.value(v_read).unflatten(-1, (-1, self.cfg.d_head)))
        q, k = self._place(q, k, places)
        k, v, valid = places.extend(self.site, k, v.transpose(1, 2), self.cfg.window)
        watched = self.hook_attn_scores.active or self.hook_pattern.active
        observer = _Observer(self.hook_attn_scores, self.hook_pattern) if watched else None
        z = ordered_attention(
            q, k, v, window=self.cfg.window, causal=self.cfg.causal, valid=valid, observer=observer
        )  # [B, H, T, K]
        return self.output(self.hook_z(z.transpose(1, 2)).flatten(-2))

    def _place(self, q: Tensor, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """QK norm and RoPE, in the order of the config: [B, T, H, K] -> [B, H, T, K], the same for G."""
        if self.cfg.qk_norm in ("head", "joined"):
            q, k = self._normed(q, self.query_norm), self._normed(k, self.key_norm)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if self.cfg.rope is not None:
            cos, sin = places.rope(self.cfg.rope, self.cfg.d_head, q.dtype)
            q, k = rotate(q, cos, sin, self.cfg.rope.layout), rotate(k, cos, sin, self.cfg.rope.layout)
        if self.cfg.qk_norm == "head_after_rope":
            q, k = self._normed(q, self.query_norm), self._normed(k, self.key_norm)
        q = self.hook_rot_q(q.transpose(1, 2)).transpose(1, 2)
        k = self.hook_rot_k(k.transpose(1, 2)).transpose(1, 2)
        return q, k

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of x [..., heads, K] per head, or of all heads joined."""
        flat = x.flatten(-2) if self.cfg.qk_norm == "joined" else x
        return ((flat / rms_scale(flat, self.norm_eps)).to(x.dtype) * weight).view_as(x)

    # transformer-lens's names for the same weights
    @property
    def W_Q(self) -> Tensor:
        """[H, D, K]"""
        return self.query.weight.unflatten(0, (self.cfg.n_heads, -1)).transpose(1, 2)

    @property
    def W_K(self) -> Tensor:
        """[G, D, K]"""
        return self.key.weight.unflatten(0, (self.cfg.n_kv_heads, -1)).transpose(1, 2)

    @property
    def W_V(self) -> Tensor:
        """[G, D, K]"""
        return self.value.weight.unflatten(0, (self.cfg.n_kv_heads, -1)).transpose(1, 2)

    @property
    def W_O(self) -> Tensor:
        """[H, K, D]"""
        return self.output.weight.T.unflatten(0, (self.cfg.n_heads, -1))

    @property
    def b_O(self) -> Tensor:
        """[D]"""
        bias = self.output.bias
        return self.output.weight.new_zeros(self.output.out_features) if bias is None else bias

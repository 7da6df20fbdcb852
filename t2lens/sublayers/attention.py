"""Self-attention over positions: what mixes along the sequence axis. ShortSWA is the same module with a window."""

from __future__ import annotations

from typing import NamedTuple

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
    """q, k, v from the (normed) reads; QK norm per head, then RoPE; GQA; z back to d_model. Bias-free.

    B batch, T position, H query heads, G key/value heads, K d_head, D d_model.
    """

    def __init__(self, cfg: AttentionConfig, d_model: int, norm_eps: float, site: str) -> None:
        super().__init__()
        self.cfg, self.site, self.norm_eps = cfg, site, norm_eps
        self.query = nn.Linear(d_model, cfg.n_heads * cfg.d_head, bias=False)
        self.key = nn.Linear(d_model, cfg.n_kv_heads * cfg.d_head, bias=False)
        self.value = nn.Linear(d_model, cfg.n_kv_heads * cfg.d_head, bias=False)
        self.output = nn.Linear(cfg.n_heads * cfg.d_head, d_model, bias=False)
        if cfg.qk_norm:
            self.query_norm = nn.Parameter(self.query.weight.new_ones(cfg.d_head))
            self.key_norm = nn.Parameter(self.query.weight.new_ones(cfg.d_head))
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
        if self.cfg.qk_norm:
            q = (q / rms_scale(q, self.norm_eps)).to(q.dtype) * self.query_norm
            k = (k / rms_scale(k, self.norm_eps)).to(k.dtype) * self.key_norm
        cos, sin = places.rope(self.cfg.rope_base, self.cfg.d_head, q.dtype)
        q = self.hook_rot_q(rotate(q.transpose(1, 2), cos, sin).transpose(1, 2)).transpose(1, 2)  # [B, H, T, K]
        k = self.hook_rot_k(rotate(k.transpose(1, 2), cos, sin).transpose(1, 2)).transpose(1, 2)
        k, v, valid = places.extend(self.site, k, v.transpose(1, 2), self.cfg.window)
        watched = self.hook_attn_scores.active or self.hook_pattern.active
        observer = _Observer(self.hook_attn_scores, self.hook_pattern) if watched else None
        z = ordered_attention(q, k, v, window=self.cfg.window, valid=valid, observer=observer)  # [B, H, T, K]
        return self.output(self.hook_z(z.transpose(1, 2)).flatten(-2))

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
        """[D], zero: the projections have no bias."""
        return self.output.weight.new_zeros(self.output.out_features)

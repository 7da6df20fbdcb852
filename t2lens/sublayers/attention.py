"""Self-attention over positions: what mixes along the sequence axis. ShortSWA is the same module with a window."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from t2lens.config import Attention as AttentionConfig
from t2lens.config import Canon
from t2lens.hooks import HookPoint
from t2lens.ordered_attention import ordered_attention
from t2lens.sublayers.norms import rms_scale, wide
from t2lens.sublayers.positions import Places, rotate
from t2lens.sublayers.short_conv import LocalConv
from t2lens.sublayers.values import KVShift, ValueResidual

__all__ = ["Attention"]


class _Observer(NamedTuple):
    scores: HookPoint
    pattern: HookPoint


class Attention(nn.Module):
    """q, k, v from the (normed) reads; QK norm and RoPE; GQA; z back to d_model.

    B batch, T position, H query heads, G key/value heads, K d_head, D d_model.
    """

    scale: float | None = None  # of the scores; None: 1/sqrt(K)

    def __init__(
        self, cfg: AttentionConfig, d_model: int, norm_eps: float, site: str, canon: Canon | None = None
    ) -> None:
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
        self.rope_frequencies = None
        if cfg.rope is not None and cfg.rope.frequencies == "learned":
            n_dims = cfg.rope.n_dims or cfg.d_head
            self.rope_frequencies = nn.Parameter(cfg.rope.base ** (-torch.arange(0, n_dims, 2) / n_dims))
        self._add_mixers(d_model, canon)
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

    def _add_mixers(self, d_model: int, canon: Canon | None) -> None:
        """What mixes neighbouring tokens or layers in the projections: each a module only where the config has it."""
        cfg, names = self.cfg, {"q": "queries", "k": "keys", "v": "values"}
        widths = {"q": cfg.n_heads * cfg.d_head, "k": cfg.n_kv_heads * cfg.d_head, "v": cfg.n_kv_heads * cfg.d_head}
        self.shifts, self.convs = nn.ModuleDict(), nn.ModuleDict()
        if (shift := cfg.kv_shift) is not None:
            for way in shift.on:
                name = f"{self.site}.shift_{way}"
                self.shifts[way] = KVShift(shift, d_model, cfg.n_kv_heads, name, names[way])
        if (conv := cfg.short_conv) is not None:
            for way in conv.on:
                self.convs[way] = LocalConv(
                    widths[way],
                    f"{self.site}.conv_{way}",
                    names[way],
                    kernel=conv.kernel,
                    bias=conv.bias,
                    act=conv.act,
                    shift=int(conv.shift_keys and way == "k"),
                )
        self.canon_b = None
        if canon is not None and "B" in canon.sites:
            what = "queries, keys and values, joined"
            self.canon_b = LocalConv.canon(canon, sum(widths.values()), f"{self.site}.canon_b", what)
        self.value_residual = None
        layer, self.kind = self.site.split(".")
        if cfg.value_residual is not None and layer != "0":  # the first layer's values are what is added
            self.value_residual = ValueResidual(cfg.value_residual)

    def forward(self, q_read: Tensor, k_read: Tensor, v_read: Tensor, places: Places) -> Tensor:
        """Three normed reads [B, T, D] (the same one where the residual system has one way) -> [B, T, D]."""
        reads, made = {"q": q_read, "k": k_read, "v": v_read}, {}
        for way, projection in (("q", self.query), ("k", self.key), ("v", self.value)):
            x = projection(reads[way])
            x = self.shifts[way](x, reads[way], places) if way in self.shifts else x
            x = self.convs[way](x, places) if way in self.convs else x
            made[way] = x.unflatten(-1, (-1, self.cfg.d_head))
        q, k = self.hook_q(made["q"]), self.hook_k(made["k"])  # [B, T, H, K], [B, T, G, K]
        q, k, v = self._before_rope(q, k, made["v"], places)
        v = self.hook_v(v)
        if self.cfg.value_residual is not None:
            places.first_values.setdefault(self.kind, v)
        q, k = self._place(q, k, places)
        k, v, valid = places.extend(self.site, k, v.transpose(1, 2), self.cfg.window)
        watched = self.hook_attn_scores.active or self.hook_pattern.active
        observer = _Observer(self.hook_attn_scores, self.hook_pattern) if watched else None
        z = ordered_attention(
            q,
            k,
            v,
            window=self.cfg.window,
            causal=self.cfg.causal,
            valid=valid,
            scale=self.scale,
            bias=self._bias(q, k, places),
            observer=observer,
        )  # [B, H, T, K]
        return self._write(self.hook_z(z.transpose(1, 2)), v_read)

    def _bias(self, q: Tensor, k: Tensor, places: Places) -> Tensor | None:  # noqa: ARG002
        """[B, H, T, S] added to the scores of q [B, H, T, K] against the keys k [B, G, S, K], cached ones too."""
        return None

    def _write(self, z: Tensor, v_read: Tensor) -> Tensor:  # noqa: ARG002
        """[B, T, D] from the heads z [B, T, H, K]."""
        return self.output(z.flatten(-2))

    def by_head(self, z: Tensor, gate: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """[H + 1, B, T, D]: what each head wrote, and what is constant, of a pass with these z [B, T, H, K] (and this
        gate, where there is one); they sum to the output. In at least float32."""
        heads = torch.einsum("bthk,hkd->hbtd", wide(z), wide(self.W_O))
        return torch.cat([heads, wide(self.output_bias).expand_as(heads[:1])])

    @property
    def output_bias(self) -> Tensor:
        """[D]: the bias of the output projection."""
        bias = self.output.bias
        return self.output.weight.new_zeros(self.output.out_features) if bias is None else bias

    def _before_rope(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        """QK norm where it stands before RoPE, Canon B, and the value residual."""
        if self.cfg.qk_norm in ("head", "joined"):
            q, k = self._normed(q, self.query_norm), self._normed(k, self.key_norm)
        if self.canon_b is not None:
            joined = torch.cat([x.flatten(-2) for x in (q, k, v)], dim=-1)
            mixed = self.canon_b(joined, places).unflatten(-1, (-1, self.cfg.d_head))
            q, k, v = mixed.split([x.shape[-2] for x in (q, k, v)], dim=-2)
        if self.value_residual is not None:
            v = self.value_residual(v, places.first_values[self.kind])
        return q, k, v

    def _place(self, q: Tensor, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """RoPE, and QK norm where it stands after it: [B, T, H, K] -> [B, H, T, K], the same for G."""
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if self.cfg.rope is not None:
            cos, sin = places.rope(self.cfg.rope, self.cfg.d_head, q.dtype, self.rope_frequencies)
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
        return self.output_bias

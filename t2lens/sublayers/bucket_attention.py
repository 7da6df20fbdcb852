"""LTG-BERT's attention (Samuel et al., arXiv 2303.09859, after DeBERTa's disentangled scores).

    score(s, t) = (q_s . k_t + q_s . k'_r + q'_r . k_t) / sqrt(3 K)        r = bucket(s - t)

The positions' own keys k' and queries q' are made of the rows of one table (with a LayerNorm) by the projections of
the tokens. bucket(x) = x while |x| <= n/2, and beyond

    sign(x) (ceil( log(2|x|/n) / log(2(n_ctx - 1)/n) * (n/2 - 1) ) + n/2)

so that n_ctx - 1 falls into the last of the 2n - 1 buckets. Published files carry the buckets as a table over pairs of
positions, which is loaded and not computed again. s and t count real tokens only, so left padding changes nothing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from t2lens.config import BucketAttention as BucketAttentionConfig
from t2lens.config import Norm as NormConfig
from t2lens.hooks import HookPoint
from t2lens.sublayers.attention import Attention
from t2lens.sublayers.norms import Norm, centred, rms_scale, wide
from t2lens.sublayers.positions import Places

__all__ = ["BucketAttention", "RelativeTable", "buckets"]


def buckets(n_ctx: int, n_buckets: int) -> Tensor:
    """[n_ctx, n_ctx] int64: row of the table for every pair (s, t), n_buckets - 1 + bucket(s - t)."""
    half = n_buckets // 2
    distance = torch.arange(n_ctx, dtype=torch.float64)[:, None] - torch.arange(n_ctx, dtype=torch.float64)[None]
    far = distance.abs().clamp(min=half)
    log_range = math.log(max(n_ctx - 1, half + 1) / half)
    place = ((far / half).log() / log_range * (half - 1)).ceil() + half
    bucket = torch.where(distance.abs() <= half, distance, distance.sign() * place)
    return n_buckets - 1 + bucket.long()


class RelativeTable(nn.Module):
    """The rows of relative positions [2n - 1, D] with their LayerNorm, and which pair of positions uses which row.

    One per model. The attention of every layer refers to it without owning it, so its weights have one name.
    """

    position_indices: Tensor

    def __init__(self, cfg: BucketAttentionConfig, n_ctx: int, d_model: int, norm_eps: float) -> None:
        super().__init__()
        self.norm_eps = norm_eps
        self.weight = nn.Parameter(torch.zeros(2 * cfg.n_buckets - 1, d_model))
        self.w, self.b = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))
        self.register_buffer("position_indices", buckets(n_ctx, cfg.n_buckets))

    def rows(self, places: Places) -> Tensor:
        """[2n - 1, D]: the normed rows, made once per pass."""
        return places.once("relative rows", self._normed)

    def _normed(self) -> Tensor:
        x = centred(self.weight)
        return (x / rms_scale(x, self.norm_eps)).to(self.weight.dtype) * self.w + self.b

    def pairs(self, places: Places) -> Tensor:
        """[B or 1, 1, T, S]: the row for each new place against each cached or new one, made once per pass."""
        return places.once("relative pairs", lambda: self._pairs(places.all_indices, places.index.shape[1]))

    def _pairs(self, index: Tensor, n_new: int) -> Tensor:
        return self.position_indices[index[:, -n_new:, None], index[:, None, :]].unsqueeze(1)


class BucketAttention(Attention):
    """Hook points as in `Attention` (hook_rot_q and hook_rot_k are q and k again), and of the gate where there is one.

    B batch, T new places, S places, H heads, K d_head, D d_model.
    """

    cfg: BucketAttentionConfig

    def __init__(
        self, cfg: BucketAttentionConfig, d_model: int, norm_eps: float, site: str, relative: RelativeTable
    ) -> None:
        super().__init__(cfg, d_model, norm_eps, site)
        self._relative = (relative,)  # in a tuple, so that the table keeps one name
        self.scale = 1 / math.sqrt(3 * cfg.d_head)
        if cfg.output == "gated":
            width = cfg.n_heads * cfg.d_head
            self.gate = nn.Linear(d_model, width, bias=cfg.bias)
            self.hook_gate = HookPoint(shape="batch pos head d_head", meaning="gelu gate that multiplies z")
            self.mid_norm = Norm(NormConfig(kind="layer", weight=False, eps=norm_eps), width)
        else:
            self.post_norm = Norm(NormConfig(kind="layer", bias=True, eps=norm_eps), d_model)

    def _bias(self, q: Tensor, k: Tensor, places: Places) -> Tensor:
        """(q_s . k'_r + q'_r . k_t) / sqrt(3 K) for all pairs."""
        (relative,) = self._relative
        rows, pairs = relative.rows(places), relative.pairs(places)
        row_q = self.query(rows).unflatten(-1, (self.cfg.n_heads, -1)).transpose(0, 1)  # [H, 2n - 1, K]
        row_k = self.key(rows).unflatten(-1, (self.cfg.n_heads, -1)).transpose(0, 1)
        pairs = pairs.expand(q.shape[0], q.shape[1], -1, -1)  # [B, H, T, S]
        of_query = (q @ row_k.transpose(-1, -2)).gather(-1, pairs)
        of_key = (k @ row_q.transpose(-1, -2)).gather(-1, pairs.transpose(-1, -2)).transpose(-1, -2)
        return (of_query + of_key) * self.scale

    def _write(self, z: Tensor, v_read: Tensor) -> Tensor:
        if self.cfg.output == "post_norm":
            return self.post_norm(super()._write(z, v_read))
        gate = self.hook_gate(F.gelu(self.gate(v_read)).view_as(z))
        return self.output(self.mid_norm((z * gate).flatten(-2)))

    def by_head(self, z: Tensor, gate: Tensor | None = None) -> Tensor:
        """As in `Attention`: the norm at the output is linear at the scale of this pass."""
        if self.cfg.output == "post_norm":
            parts = super().by_head(z)
            parts = self.post_norm.share(parts, self.post_norm.scale(parts.sum(dim=0)))
            bias = self.post_norm.b
            return parts if bias is None else torch.cat([parts[:-1], parts[-1:] + bias])
        assert gate is not None
        mixed = wide(z) * wide(gate)
        one_head = torch.eye(self.cfg.n_heads, device=z.device, dtype=mixed.dtype)[:, None, None, :, None]
        alone = self.mid_norm.share((mixed * one_head).flatten(-2), self.mid_norm.scale(mixed.flatten(-2)))
        heads = alone @ self.output.weight.T.to(alone.dtype)  # of all heads' z: the norm's mean runs over them
        return torch.cat([heads, wide(self.output_bias).expand_as(heads[:1])])

    @property
    def b_O(self) -> Tensor:
        """[D]: the constant part of what is written."""
        if self.cfg.output == "gated":
            return super().b_O
        assert self.post_norm.b is not None
        return self.post_norm.b

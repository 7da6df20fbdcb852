"""What sublayers need to know about the sequence: positions, padding, RoPE tables, and what decoding remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from t2lens.config import Rope
from t2lens.sublayers.norms import wide

__all__ = ["DecodingCache", "Places", "rotate"]

T = TypeVar("T")


@dataclass
class DecodingCache:
    """What generation keeps between calls. The depth axis needs nothing of earlier tokens but what `memory` holds."""

    valid: Tensor | None = None  # [B, S] bool: False where the place is padding
    keys_values: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # site -> k, v [B, G, S, d_head]
    memory: dict[str, Tensor] = field(default_factory=dict)  # tails of convolutions over time

    @property
    def n_seen(self) -> int:
        return 0 if self.valid is None else self.valid.shape[1]


@dataclass
class Places:
    """The T new places of a forward pass, after n_seen cached ones.

    index [B, T]: position of each token, counted over real tokens only, so that left padding changes nothing.
    valid [B, S] bool over cached and new places, or None when nothing is padding.
    first_values: kind of attention -> values [B, T, G, K] of the first layer, for value residuals of later ones.
    """

    index: Tensor
    valid: Tensor | None
    cache: DecodingCache | None
    first_values: dict[str, Tensor] = field(default_factory=dict)
    _tables: dict[tuple[Rope, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _once: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tokens: Tensor, attention_mask: Tensor | None, cache: DecodingCache | None) -> Places:
        """Positions of `tokens` [B, T] under `attention_mask` [B, T] (None: all real), after what `cache` has seen."""
        mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        seen = cache.valid if cache is not None and cache.valid is not None else mask[:, :0]
        if len(seen) != len(mask):
            raise ValueError(
                f"The decoding cache has seen a batch of {len(seen)}; these tokens are a batch of {len(mask)}."
            )
        every = torch.cat([seen, mask], dim=1)
        index = (every.cumsum(dim=1) - 1).clamp(min=0)[:, seen.shape[1] :]
        if cache is not None:
            cache.valid = every
        padded = attention_mask is not None or bool(seen.numel() and not seen.all())
        return cls(index=index, valid=every if padded and not bool(every.all()) else None, cache=cache)

    def without_padding(self, x: Tensor) -> Tensor:
        """x [B, T, D] with zeros at padding, so that nothing there reaches the depth axis."""
        if self.valid is None:
            return x
        return x * self.valid[:, -x.shape[1] :].unsqueeze(-1).to(x.dtype)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What every layer of a pass needs, made by the first that asks."""
        if name not in self._once:
            self._once[name] = make()
        return self._once[name]

    @property
    def all_indices(self) -> Tensor:
        """[B or 1, S]: positions of cached and new places, as `index` counts them."""
        if self.valid is not None:
            return (self.valid.cumsum(dim=1) - 1).clamp(min=0)
        n = self.index.shape[1] if self.cache is None else self.cache.n_seen  # which counts the new ones too
        return torch.arange(n, device=self.index.device)[None]

    def rope(
        self, cfg: Rope, d_head: int, dtype: torch.dtype, frequencies: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin [B, 1, T, n_dims / 2] of index * base^(-2i / n_dims), computed once per pass in float64; or of
        index * `frequencies` [n_dims / 2], those that a layer has learned."""
        if frequencies is not None:
            angle = self.index[:, None, :, None] * wide(frequencies)
            return self._rounded(angle.cos(), cfg).to(dtype), self._rounded(angle.sin(), cfg).to(dtype)
        n_dims = cfg.n_dims or d_head
        key = (cfg, n_dims)
        if key not in self._tables:
            i = torch.arange(0, n_dims, 2, device=self.index.device, dtype=torch.float64)
            angle = self.index[:, None, :, None].double() * cfg.base ** (-i / n_dims)
            cos, sin = angle.cos(), angle.sin()
            if cfg.table != "exact":
                # as the published code: angles in float32, then tables of the given precision
                angle = self.index[:, None, :, None].float() * (1.0 / cfg.base ** (i.float() / n_dims))
                cos, sin = self._rounded(angle.cos(), cfg), self._rounded(angle.sin(), cfg)
            self._tables[key] = (cos.to(dtype), sin.to(dtype))
        return self._tables[key]

    @staticmethod
    def _rounded(x: Tensor, cfg: Rope) -> Tensor:
        return x if cfg.table == "exact" else x.to(getattr(torch, cfg.table))

    def extend(self, site: str, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values [B, G, S', d] with what the cache holds for `site`, and the validity of those S' places."""
        if self.cache is None:
            return k, v, self.valid
        if site in self.cache.keys_values:
            old_k, old_v = self.cache.keys_values[site]
            k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        keep = slice(None) if window is None else slice(max(0, k.shape[2] - (window - 1)), None)
        self.cache.keys_values[site] = (k[:, :, keep], v[:, :, keep])
        return k, v, None if self.valid is None else self.valid[:, -k.shape[2] :]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """RoPE on the first entries of the last axis, twice as many as `cos` has; the rest stays as it is."""
    n_dims = 2 * cos.shape[-1]
    turned, rest = x[..., :n_dims], x[..., n_dims:]
    if layout == "half":
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return turned if not rest.shape[-1] else torch.cat([turned, rest], dim=-1)

"""Standard residual: x_{l+1} = x_l + f_l, every read is x_l. The baseline that all others replace.

Its depth weights are exactly 1 on everything written so far; there is nothing to learn and nothing to hook, so the
neutral reference of a comparison is the cumulative map (each read holds all earlier atoms with weight 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from t2lens.config import ModelConfig, ResidualConfig
from t2lens.residual.base import Gates, ResidualSystem, Site, Source
from t2lens.sublayers.positions import Places

__all__ = ["Standard", "StandardResidual"]


@dataclass(frozen=True, kw_only=True)
class Standard(ResidualConfig):
    """Plain pre-norm residual: x + out."""

    kind: ClassVar[str] = "standard"

    def describe(self) -> str:
        return "standard residual"


class StandardResidual(ResidualSystem):
    is_additive = True
    stream_is_whole = True
    in_parallel_blocks = True

    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        super().__init__(cfg, sites)
        self.single_stream_hooks()

    def begin(self, embed: Tensor, places: Places | None = None) -> Tensor:
        return embed

    def read(self, state: Tensor, site: Site, gates: Gates) -> Tensor:
        return state

    def write(self, state: Tensor, site: Site, atom: Tensor, gates: Gates) -> Tensor:
        return state + atom

    def sources(self, site: Site) -> tuple[Source, ...]:
        return tuple(Source(a, (a,)) for a in self.atoms[: site.seen + 1])

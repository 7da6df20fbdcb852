"""One quantity of a trace as a grid of both axes, and what every maker of such grids needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

__all__ = ["NOT_READ", "OFF", "Grid", "Quantity", "entropy", "nothing", "of_reads", "sites_of"]

OFF = 1e-2
"""How far from 1 the sum of weights may lie and still be called a distribution: wide enough for bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What a grid shows. `scale`: what its colours mean (diverging: signed, centred at 0)."""

    key: str
    label: str
    unit: str
    meaning: str
    scale: Literal["sequential", "diverging"] = "sequential"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One quantity of one trace.

    Attributes:
        values: [site, pos], in the dtype of the trace; NaN where there is no value.
        sites: names of the rows, `embed`, the sublayers in reading order, `out`.
        missing: site -> why that whole row has no value.
        absent: why the trace has no such quantity at all, or "".
        blank: position -> why that whole column has no value.
        limits: the range that the values cannot leave (None: no bound), as far as it is known.
    """

    quantity: Quantity
    values: np.ndarray
    sites: tuple[str, ...]
    missing: dict[str, str] = field(default_factory=dict)
    absent: str = ""
    blank: dict[int, str] = field(default_factory=dict)
    limits: tuple[float | None, float | None] = (0.0, None)

    def why(self, site: str, pos: int | None = None) -> str:
        """Why there is no value at `site` (or at a position of it), or ""."""
        return self.absent or self.missing.get(site, "") or ("" if pos is None else self.blank.get(pos, ""))


def sites_of(trace: Any) -> tuple[str, ...]:
    return ("embed", *(str(site) for site in trace.dataset["read"].values))


NOT_READ = {"embed": "the embedding is written, not read"}


def of_reads(trace: Any, about: Quantity, rows: np.ndarray, **more: Any) -> Grid:
    """A grid from [read, pos]: the embedding is not read."""
    blank = np.full((1, rows.shape[1]), np.nan, rows.dtype)
    missing = {**NOT_READ, **more.pop("missing", {})}
    return Grid(quantity=about, values=np.concatenate([blank, rows]), sites=sites_of(trace), missing=missing, **more)


def nothing(trace: Any, about: Quantity, why: str) -> Grid:
    sites = sites_of(trace)
    values = np.full((len(sites), trace.dataset.sizes["pos"]), np.nan, np.float32)
    return Grid(quantity=about, values=values, sites=sites, absent=why)


def entropy(p: np.ndarray) -> np.ndarray:
    """Shannon entropy in nats over the last axis; NaN entries are no part of it, and 0 log 0 is 0.

    Below 1e-12 it is rounding of a single source, and 0.
    """
    there = np.isfinite(p) & (p > 0)
    entropy = np.where(there, -p * np.log(np.where(there, p, 1)), 0).sum(-1)
    return np.where(np.abs(entropy) < 1e-12, 0, entropy)

"""Regimes of Deep Delta Learning's gate, by the eigenvalue 1 - beta that its step has along k (arXiv 2601.00417)."""

from __future__ import annotations

import numpy as np

__all__ = ["EDGES", "REGIMES", "SIZES", "regime_of"]

EDGES = (0.1, 0.9, 1.1, 1.5)
REGIMES = ("skip", "partial", "overwrite", "over-relax", "reflect")
SIZES = ("below 0.1", "0.1 to 0.9", "0.9 to 1.1", "1.1 to 1.5", "above 1.5")
"""The same, of a gate that erases nothing."""


def regime_of(beta: np.ndarray) -> np.ndarray:
    """The regime of each gate, as an index into REGIMES: each holds its lower edge, but for the open ends above 1.1 and
    1.5.

    >>> [REGIMES[i] for i in regime_of(np.array([0.05, 0.1, 1.1, 1.11, 2.0]))]
    ['skip', 'partial', 'overwrite', 'over-relax', 'reflect']
    """
    skip, partial, overwrite, over_relax = EDGES
    return (beta >= skip).astype(int) + (beta >= partial) + (beta > overwrite) + (beta > over_relax)

"""Small statistics that several analyses share: intervals over sequences, rank correlation."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["draws_of", "interval_of_mean", "pearson", "ranks", "spearman"]

_DRAWS = 1000


def interval_of_mean(
    sums: Any, counts: Any, *, seed: int = 0, level: float = 0.95, draws: int = _DRAWS
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bootstrap interval over sequences of the mean per token, sum_b sums[..., b] / sum_b counts[b].

    Sequences are drawn with replacement, the same draws for every leading entry; where `sums` are differences between
    two runs of the same sequences, the interval is paired. ([...], [...]): low and high, NaN with fewer than two
    sequences that count.

    Args:
        sums: [..., B] sum over the tokens of each sequence. counts: [B] how many tokens that is.

    Example:
        >>> low, high = interval_of_mean([[1.0, 3.0, 2.0, 2.0]], [1, 1, 1, 1])
        >>> bool(low[0] < 2 < high[0])
        True
    """
    sums, counts = np.asarray(sums, float), np.asarray(counts, float)
    counted = counts > 0
    sums, counts = sums[..., counted], counts[counted]
    if len(counts) < 2:
        nothing = np.full(sums.shape[:-1], np.nan)
        return nothing, nothing.copy()
    times = draws_of(len(counts), draws, seed)
    means = (sums @ times.T) / (times @ counts)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=-1)
    return low, high


def draws_of(n: int, draws: int, seed: int) -> np.ndarray:
    """[draws, n]: how often each of n sequences is drawn, n with replacement.

    Example:
        >>> draws_of(3, 2, seed=0).sum(axis=1).tolist()
        [3, 3]
    """
    drawn = np.random.default_rng(seed).integers(n, size=(draws, n))
    return np.stack([np.bincount(row, minlength=n) for row in drawn])


def pearson(x: Any, y: Any) -> float:
    """Correlation of two arrays over the entries where both are finite; NaN with fewer than three or no spread.

    Example:
        >>> round(pearson([1, 2, 3, float("nan")], [2, 4, 6, 0]), 6)
        1.0
    """
    x, y = np.asarray(x, float).ravel(), np.asarray(y, float).ravel()
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    if len(x) < 3:
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    spread = float(np.sqrt((x * x).sum()) * np.sqrt((y * y).sum()))
    return float((x * y).sum()) / spread if spread > 0 else float("nan")


def spearman(x: Any, y: Any) -> float:
    """The same of ranks, ties sharing the mean of theirs.

    Example:
        >>> round(spearman([1, 2, 3], [1, 8, 27]), 6)
        1.0
    """
    x, y = np.asarray(x, float).ravel(), np.asarray(y, float).ravel()
    both = np.isfinite(x) & np.isfinite(y)
    return pearson(ranks(x[both]), ranks(y[both]))


def ranks(x: np.ndarray) -> np.ndarray:
    """Rank of each entry, 1 the smallest; ties share the mean of theirs.

    Example:
        >>> ranks(np.array([0.5, 0.1, 0.5])).tolist()
        [2.5, 1.0, 2.5]
    """
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place.ravel()]

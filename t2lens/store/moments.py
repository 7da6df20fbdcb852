"""Statistics of many columns that are never all in memory: they grow by rows and by one another.

Counts, means and sums of squared deviations are merged as Chan, Golub and LeVeque (1979) do, so that what many workers
found is what one would have found, but for rounding of the last digits. Histograms are of whole counts and merge
exactly; what is read from them is near the true quantile, see `Histogram`.
"""

from __future__ import annotations

import numpy as np

__all__ = ["Histogram", "Moments"]


class Moments:
    """Of C columns in each of G groups of rows: n [G], mean and m2, the sum of squared deviations from it, [G, C]."""

    def __init__(self, n_groups: int, n_columns: int) -> None:
        self.n = np.zeros(n_groups, dtype=np.int64)
        self.mean = np.zeros((n_groups, n_columns))
        self.m2 = np.zeros((n_groups, n_columns))

    def add(self, values: np.ndarray, groups: np.ndarray | None = None) -> None:
        """Rows [N, C], each of its group [N] (None: all of group 0)."""
        if not len(values):
            return
        shift = values[0]  # so that a column of equal numbers has no variance, not even by rounding
        z = values - shift
        if groups is None:
            mean = z.mean(axis=0, keepdims=True)
            self._merge(np.array([0]), np.array([len(z)]), shift + mean, ((z - mean) ** 2).sum(axis=0, keepdims=True))
            return
        order = np.argsort(groups, kind="stable")
        which, starts, n = np.unique(groups[order], return_index=True, return_counts=True)
        z = z[order]
        mean = np.add.reduceat(z, starts, axis=0) / n[:, None]
        m2 = np.add.reduceat((z - np.repeat(mean, n, axis=0)) ** 2, starts, axis=0)
        self._merge(which, n, shift + mean, m2)

    def merge(self, other: Moments) -> None:
        """Take in what another found of other rows."""
        which = np.flatnonzero(other.n)
        self._merge(which, other.n[which], other.mean[which], other.m2[which])

    def joined(self, groups: np.ndarray) -> Moments:
        """Of groups of groups: `groups` [G] says which of the new ones each of ours belongs to."""
        out = Moments(int(groups.max()) + 1, self.mean.shape[1])
        for ours in np.flatnonzero(self.n):  # one after the other: several may belong to one
            own = slice(ours, ours + 1)
            out._merge(groups[own], self.n[own], self.mean[own], self.m2[own])
        return out

    def _merge(self, which: np.ndarray, n: np.ndarray, mean: np.ndarray, m2: np.ndarray) -> None:
        before, whole = self.n[which], self.n[which] + n
        change = mean - self.mean[which]
        self.m2[which] += m2 + change**2 * (before * n / whole)[:, None]
        self.mean[which] += change * (n / whole)[:, None]
        self.n[which] = whole

    def means(self) -> np.ndarray:
        """[G, C]; NaN for groups without rows."""
        return np.where(self.n[:, None] > 0, self.mean, np.nan)

    def std(self) -> np.ndarray:
        """[G, C]: standard deviation, of the rows themselves (divided by n)."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self.m2 / self.n[:, None])

    def sums_around(self, centre: np.ndarray) -> np.ndarray:
        """[G, C]: sums of y - centre [C] over the rows of each group."""
        return self.n[:, None] * (self.mean - centre)


class Histogram:
    """Counts of the values of C columns in buckets whose width follows the value: 64 in each power of two.

    A quantile read from it is within 0.8% (1/128) of a value of the column that has exactly that rank; values below
    2^-30 in magnitude count as 0. Two histograms merge without any loss.
    """

    error = 1 / 128
    _BITS = 6  # of the mantissa that a bucket keeps
    _ZERO = (127 - 30) << _BITS  # buckets of smaller magnitudes are one

    def __init__(self, n_columns: int) -> None:
        self.low = 0  # the bucket of the first column of counts
        self.counts = np.zeros((n_columns, 1), dtype=np.int64)

    def add(self, values: np.ndarray) -> None:
        """Rows [N, C], all finite."""
        if not len(values):
            return
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.int32)
        size = ((bits & 0x7FFFFFFF) >> (23 - self._BITS)) - self._ZERO
        buckets = np.where(bits < 0, -1, 1) * np.maximum(size, 0)
        self._reach(int(buckets.min()), int(buckets.max()) + 1)
        width = self.counts.shape[1]
        flat = (buckets - self.low) + np.arange(values.shape[1]) * width
        self.counts += np.bincount(flat.ravel(), minlength=self.counts.size).reshape(self.counts.shape)

    def merge(self, other: Histogram) -> None:
        end = other.low + other.counts.shape[1]
        self._reach(other.low, end)
        self.counts[:, other.low - self.low : end - self.low] += other.counts

    def _reach(self, low: int, end: int) -> None:
        before, after = max(0, self.low - low), max(0, end - self.low - self.counts.shape[1])
        if before or after:
            self.counts = np.pad(self.counts, ((0, 0), (before, after)))
            self.low -= before

    def quantile(self, q: float) -> np.ndarray:
        """[C]: the middle of the bucket that holds the value of rank ceil(q n); NaN without rows."""
        total = self.counts.sum(axis=1)
        rank = np.maximum(np.ceil(q * total), 1)
        at = (self.counts.cumsum(axis=1) < rank[:, None]).sum(axis=1)
        bucket = np.minimum(at, self.counts.shape[1] - 1) + self.low
        bits = ((np.abs(bucket) + self._ZERO) << (23 - self._BITS)) + (1 << (22 - self._BITS))
        middle = np.where(bucket == 0, 0.0, np.sign(bucket) * bits.astype(np.int32).view(np.float32).astype(float))
        return np.where(total > 0, middle, np.nan)

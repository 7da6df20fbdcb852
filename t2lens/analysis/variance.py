"""How much of an array of weights is a fixed profile, how much follows the token, its position, or neither.

For each column y of n weights, around a reference r (the mean of all columns, 1/S where weights sum to 1):

    sum (y - r)^2  =  n (mean y - r)^2            site: what holds at every token alike
                   +  SS(token)                   between tokens: means of each token identity around the mean
                   +  SS(position | token)        what positions explain of the rest (additive, least squares)
                   +  SS(rest)                    what neither explains: the context

Sequential sums of squares (token before position), so they add up whatever the design. Small groups explain noise too:
k means of pure noise of variance s^2 have an expected sum of squares of (their degrees of freedom) s^2. The adjusted
sums subtract that, with s^2 = SS(rest) / its degrees of freedom, and give it to the rest (as epsilon squared does,
Kelley 1935): they add up to the same total, and are around 0, on either side of it, where there is nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["PARTS", "Explained", "Groups", "explain"]

PARTS = ("site", "token", "position", "rest")


@dataclass(frozen=True)
class Explained:
    """Sums of squares of every column, [S, 4] over PARTS, which sum to `total` [S].

    raw: as they are. adjusted: less what chance gives (NaN where nothing is left to estimate that from).
    freedom [4]: degrees of freedom (expected sums under pure noise of variance 1). mean [S]: of every column.
    """

    raw: np.ndarray
    adjusted: np.ndarray
    total: np.ndarray
    freedom: np.ndarray
    mean: np.ndarray

    def shares(self, columns: slice | None = None, *, adjusted: bool = True) -> np.ndarray:
        """[4]: shares of the total of these columns together (default: all); NaN where the total is 0."""
        which = slice(None) if columns is None else columns
        sums = (self.adjusted if adjusted else self.raw)[which].sum(axis=0)
        total = self.total[which].sum()
        return sums / total if total > 0 else np.full(len(PARTS), np.nan)


class Design:
    """How the rows lie on tokens and positions, and what sums over them explain: all that the decomposition needs.

    count [tokens, positions]: how many rows have both (every token and position at least one). square: the sum of the
    squares of how often each row counts, where rows count more than once.
    """

    def __init__(self, count: np.ndarray, square: np.ndarray | None = None) -> None:
        self.count = count = np.asarray(count, float)
        square = count if square is None else square
        self.of_token = count.sum(axis=1)
        # positions, less what tokens explain of them: D' W D of position columns D made orthogonal to the tokens
        part = count / self.of_token[:, None]
        inner = np.diag(count.sum(axis=0)) - count.T @ part
        values, vectors = np.linalg.eigh(inner)
        kept = values > 1e-9 * max(float(values.max()), 1.0)
        self.axes = vectors[:, kept] / np.sqrt(values[kept])
        cross = square.T @ part
        spread = np.diag(square.sum(axis=0)) - cross - cross.T + part.T @ (square.sum(axis=1)[:, None] * part)
        self.whole = whole = count.sum()
        ones = square.sum() / whole
        tokens = (square.sum(axis=1) / self.of_token).sum() - ones
        places = float((self.axes * (spread @ self.axes)).sum())
        rest = whole - ones - tokens - places
        self.freedom = np.array([ones, tokens, places, rest if rest > 1e-6 * whole else 0.0])

    def of_sums(
        self,
        mean: np.ndarray,
        within: np.ndarray,
        tokens: np.ndarray,
        places: np.ndarray,
        reference: np.ndarray | float | None = None,
    ) -> Explained:
        """The decomposition of S columns from sums over their rows, which may come from anywhere.

        Args:
            mean [S]; within [S]: sum of (y - mean)^2; tokens [tokens, S] and places [positions, S]: sums of y - mean.
            reference: r, [S] or one number (default: the mean of all columns).
        """
        r = mean.mean() if reference is None else reference
        left = places - self.count.T @ (tokens / self.of_token[:, None])
        ss_token = (tokens**2 / self.of_token[:, None]).sum(axis=0)
        ss_place = ((self.axes.T @ left) ** 2).sum(axis=0)
        ss_rest = np.maximum(within - ss_token - ss_place, 0.0)
        ss_rest[ss_rest < 1e-12 * within] = 0.0  # what subtraction leaves of nothing
        site = self.whole * (mean - r) ** 2
        raw = np.stack([site, ss_token, ss_place, ss_rest], axis=1)
        noise = np.full(len(mean), np.nan)
        if self.freedom[3] > 0:
            noise = ss_rest / self.freedom[3]
        noise = np.where(within > 0, noise, 0.0)
        by_chance = noise[:, None] * self.freedom[None, :3]
        adjusted = np.concatenate([raw[:, :3] - by_chance, (ss_rest + by_chance.sum(axis=1))[:, None]], axis=1)
        return Explained(raw, adjusted, raw.sum(axis=1), self.freedom, mean)


class Groups(Design):
    """The design: which token and which position each of the n rows has, and how often it counts.

    times [n]: how often each row was drawn (a bootstrap); expectations under noise then count a row that was drawn
    twice as one observation of double weight, and not as two.
    """

    def __init__(self, token_ids: np.ndarray, positions: np.ndarray, times: np.ndarray | None = None) -> None:
        w = np.ones(len(token_ids)) if times is None else np.asarray(times, float)
        self.rows = np.flatnonzero(w > 0)
        self.w = w = w[self.rows]
        _, token = np.unique(np.asarray(token_ids)[self.rows], return_inverse=True)
        _, place = np.unique(np.asarray(positions)[self.rows], return_inverse=True)
        n_tokens, n_places = int(token.max()) + 1, int(place.max()) + 1
        self.by_token, self.by_place = np.argsort(token, kind="stable"), np.argsort(place, kind="stable")
        self.token_starts = np.searchsorted(token[self.by_token], np.arange(n_tokens))
        self.place_starts = np.searchsorted(place[self.by_place], np.arange(n_places))
        flat = token * n_places + place
        grid = (n_tokens, n_places)
        count = np.bincount(flat, w, n_tokens * n_places).reshape(grid)
        super().__init__(count, np.bincount(flat, w * w, n_tokens * n_places).reshape(grid))

    def explain(self, weights: np.ndarray, reference: np.ndarray | float | None = None) -> Explained:
        """The decomposition of every column of `weights` [n, S]; reference: r, [S] or one number (default: the mean of
        all columns)."""
        y = np.asarray(weights, float)
        shift = y[0]  # so that a column of equal numbers has no variance, not even by rounding
        z = y[self.rows] - shift
        w = self.w[:, None]
        middle = (w * z).sum(axis=0) / self.w.sum()
        z = z - middle
        weighed = w * z
        tokens = np.add.reduceat(weighed[self.by_token], self.token_starts, axis=0)
        places = np.add.reduceat(weighed[self.by_place], self.place_starts, axis=0)
        return self.of_sums(shift + middle, (weighed * z).sum(axis=0), tokens, places, reference)


def explain(weights: np.ndarray, token_ids: np.ndarray, positions: np.ndarray) -> Explained:
    """Sums of squares of weights [n, S] by site, token identity [n], position [n] and rest; see the module docstring.

    ValueError unless the three have the same, nonzero, number of rows.

    Example:
        >>> import numpy as np
        >>> token = np.arange(200) % 4
        >>> weights = np.stack([token == 0, token != 0], axis=1)  # the token decides
        >>> explain(weights, token, np.arange(200) // 20).shares().round(3).tolist()  # site, token, position, rest
        [0.25, 0.75, 0.0, 0.0]
    """
    n = len(weights)
    if np.ndim(weights) != 2 or n == 0 or len(token_ids) != n or len(positions) != n:
        raise ValueError(
            f"explain needs weights [n, S] with n token ids and n positions, n at least 1; the shapes are "
            f"{list(np.shape(weights))}, {list(np.shape(token_ids))} and {list(np.shape(positions))}."
        )
    return Groups(token_ids, positions).explain(weights)

"""Paired timing: A and B in turn, the ratio pair by pair, so that a drifting machine cancels out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Ratio", "paired"]


@dataclass(frozen=True)
class Ratio:
    """What was compared, the median of A / B over the pairs with its quartiles, and the bound it should keep."""

    name: str
    median: float
    low: float  # first quartile
    high: float  # third quartile
    bound: float | None
    seconds: float  # median of A
    shown: str = ""  # in place of the seconds, where something else was measured

    @property
    def passed(self) -> bool | None:
        return None if self.bound is None else self.median <= self.bound


def paired(
    name: str,
    a: Callable[[], object],
    b: Callable[[], object],
    *,
    pairs: int = 40,
    bound: float | None = None,
    warm_ups: int = 2,
    times_b: float = 1.0,
) -> Ratio:
    """Time `a` and `b` alternately (each first in every other pair) after warm-up calls.

    times_b: what `a` is compared with is so many times `b`.
    """
    for _ in range(warm_ups):
        a()
        b()
    ratios, times = [], []
    for i in range(pairs):
        spent = {}
        for which in ("ab", "ba")[i % 2]:
            start = time.perf_counter()
            (a if which == "a" else b)()
            spent[which] = time.perf_counter() - start
        ratios.append(spent["a"] / (spent["b"] * times_b))
        times.append(spent["a"])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")  # of two, none lies outside them
    return Ratio(name, median, low, high, bound, statistics.median(times))

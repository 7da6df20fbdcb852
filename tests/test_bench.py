"""The benchmarks run: what they measure is real code, and a bound is judged by the median."""

from __future__ import annotations

from itertools import islice

import pytest

from t2lens.bench import SUITES, Ratio


@pytest.mark.parametrize("suite", SUITES)
def test_suites_run(suite):
    ratios = list(islice(SUITES[suite](pairs=2), 3))
    assert len({ratio.name for ratio in ratios}) == 3
    assert all(0 < ratio.low <= ratio.median <= ratio.high and ratio.seconds > 0 for ratio in ratios)


def test_a_bound_is_kept_or_not():
    assert Ratio("a / b", 1.04, 1.0, 1.2, 1.05, 0.1).passed is True
    assert Ratio("a / b", 1.06, 1.0, 1.2, 1.05, 0.1).passed is False
    assert Ratio("a / b", 1.06, 1.0, 1.2, None, 0.1).passed is None

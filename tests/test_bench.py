"""The benchmarks run: what they measure is real code, and a bound is judged by the median."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice

import pytest

from t2lens.bench import SUITES, Ratio, timing

_SMALLER = {"effects": {"n_layers": 2}, "store": {"n_sequences": 8, "d_model": 32}}  # where a ratio takes seconds


@pytest.mark.parametrize("suite", SUITES)
def test_suites_run(suite):
    def run():
        with closing(SUITES[suite](pairs=2, **_SMALLER.get(suite, {}))) as running:
            return list(islice(running, 3))

    with ThreadPoolExecutor(1) as thread:  # of its own: a browser of other tests may be open in this one
        ratios = thread.submit(run).result()
    assert len({ratio.name for ratio in ratios}) == 3
    assert all(0 < ratio.low <= ratio.median <= ratio.high and ratio.seconds > 0 for ratio in ratios)


def test_the_store_is_also_measured_against_a_loop_and_a_plain_read():
    names = [ratio.name for ratio in SUITES["store"](pairs=2, **_SMALLER["store"])]
    assert len(names) == 5
    assert names[3].endswith("run_with_cache and torch.save")
    assert names[4].endswith("/ pread")


def test_a_part_can_stand_for_the_whole(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def passes(seconds):
        clock[0] += seconds

    ratio = timing.paired("all / a quarter", lambda: passes(3.0), lambda: passes(2.0), pairs=4, times_b=4.0)
    assert ratio.low == ratio.median == ratio.high == 3 / 8


def test_a_bound_is_kept_or_not():
    assert Ratio("a / b", 1.04, 1.0, 1.2, 1.05, 0.1).passed is True
    assert Ratio("a / b", 1.06, 1.0, 1.2, 1.05, 0.1).passed is False
    assert Ratio("a / b", 1.06, 1.0, 1.2, None, 0.1).passed is None

"""What the hooks may cost, as a share of a plain forward pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMITS = {"idle, width 64": 1.05, "idle, width 256": 1.05, "everything": 1.5, "weights, gates and norms": 1.1}


@pytest.mark.slow
@pytest.mark.timing
def test_hooks_cost_no_more_than_they_may():
    """Best of up to three measurements: a machine that is busy makes one of them worse, a real cost all of them."""
    # The allocator keeps its pages: a cache of everything holds much memory, and what a fresh page costs differs
    # tenfold between machines and says nothing about our code.
    memory = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
    best: dict[tuple[str, str], float] = {}
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-m", "tests.hooks.cost", "12"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **memory},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        for system, costs in json.loads(done.stdout).items():
            for what, ratio in costs.items():
                best[system, what] = min(ratio, best.get((system, what), float("inf")))
        if all(ratio <= LIMITS[what] for (_, what), ratio in best.items()):
            return
    too_much = {key: round(ratio, 3) for key, ratio in best.items() if ratio > LIMITS[key[1]]}
    assert not too_much, f"ratios to a plain pass over their limits: {too_much}"

"""Benchmarks: `t2lens bench`. Ratios of two things measured in turn in one run, never absolute claims."""

from t2lens.bench.hooks import bench_hooks as bench_hooks
from t2lens.bench.reads import bench_reads as bench_reads
from t2lens.bench.timing import Ratio as Ratio

SUITES = {"hooks": bench_hooks, "reads": bench_reads}

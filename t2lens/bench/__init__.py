"""Benchmarks: `t2lens bench`. Ratios of two things measured in turn in one run, never absolute claims."""

from t2lens.bench.app import bench_app as bench_app
from t2lens.bench.effects import bench_effects as bench_effects
from t2lens.bench.hooks import bench_hooks as bench_hooks
from t2lens.bench.store import bench_store as bench_store
from t2lens.bench.systems import bench_systems as bench_systems
from t2lens.bench.timing import Ratio as Ratio

SUITES = {
    "hooks": bench_hooks,
    "systems": bench_systems,
    "effects": bench_effects,
    "store": bench_store,
    "app": bench_app,
}

"""Captures: chosen tensors of many sequences, in memory or on disk. FORMAT.md describes what lies on disk."""

from t2lens.store.bundled import corpus_statistics as corpus_statistics
from t2lens.store.memory import Captured as Captured
from t2lens.store.memory import capture as capture
from t2lens.store.memory import capture_size as capture_size
from t2lens.store.packing import make_run as make_run
from t2lens.store.plan import read_plan as read_plan
from t2lens.store.reader import Store as Store
from t2lens.store.statistics import statistics as statistics
from t2lens.store.tallies import make_statistics_run as make_statistics_run
from t2lens.store.tallies import read_statistics as read_statistics
from t2lens.store.upkeep import examine as examine
from t2lens.store.upkeep import repair_run as repair_run
from t2lens.store.worker import collect as collect
from t2lens.store.worker import run_shards as run_shards

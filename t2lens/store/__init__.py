"""Captures: chosen tensors of many sequences, in memory."""

from t2lens.store.memory import Captured as Captured
from t2lens.store.memory import capture as capture
from t2lens.store.memory import capture_size as capture_size

"""Models and traces of the dashboard, loaded once and shared between sessions.

A model is one object for everyone, so a forward pass runs under a lock: hooks are attached to it meanwhile.
Both caches are bounded, and keyed by the content of the weights, never by the model object.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

import t2lens
from t2lens.analysis.catalog import analysis
from t2lens.zoo.registry import BUNDLED, WEIGHTS
from t2lens.zoo.text import sample_texts

__all__ = ["Loaded", "add", "added", "analyse", "load", "model_names", "trace"]

_LOCK = threading.Lock()
_ADDED: dict[str, str] = {}  # name -> what `t2lens.load` takes, beside the bundled models


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model with the hash of its weights."""

    name: str
    weights_hash: str
    model: Any


def model_names() -> list[str]:
    """The bundled models, in the order in which the package lists them, then those that were added."""
    return [*(info.name for info in t2lens.list_models()), *_ADDED]


def add(name_or_path: str) -> str:
    """Offer another model, whatever `t2lens.load` takes, and return the name that it gets.

    ValueError: it cannot be loaded, takes no text, or has the name of one that is there.
    """
    name = Path(name_or_path).absolute().name
    if name_or_path in model_names():
        return name_or_path
    if name in model_names():
        raise ValueError(f"The dashboard has a model {name!r} already; rename the folder {name_or_path!r}.")
    _ADDED[name] = name_or_path
    try:
        if load(name).model.tokenizer is None:
            raise ValueError(f"The model {name_or_path!r} has no tokenizer, and the dashboard shows texts.")
    except ValueError:
        del _ADDED[name]
        raise
    return name


def added() -> list[str]:
    """The names of the models that were added."""
    return list(_ADDED)


def load(name: str) -> Loaded:
    """A model of `model_names`; at most four stay in memory. ValueError (one sentence) when its files are damaged."""
    return _load(name, _weights_hash(name))


def trace(loaded: Loaded, prompt: str, edits: str = "") -> Any:
    """The trace of a prompt, under edits in JSON where there are any; the last 24 of the server are kept. ValueError,
    TypeError or KeyError, one sentence each, for edits that the model cannot do."""
    return _trace(loaded.name, loaded.weights_hash, prompt, edits.strip(), _model=loaded.model)


def analyse(loaded: Loaded, key: str, given: str | int, options: dict[str, Any]) -> Any:
    """The finding of an analysis of the catalog on a prompt, or on so many bundled passages; the last 16 are kept."""
    return _analyse(loaded.name, loaded.weights_hash, key, given, tuple(sorted(options.items())), _model=loaded.model)


def _weights_hash(name: str) -> str:
    """sha256 of the weights as they lie on disk now, so that retrained weights are another model."""
    if name in _ADDED:  # may be large: what its files look like from outside
        path = Path(_ADDED[name])
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
        marks = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        return hashlib.sha256(repr((_ADDED[name], marks)).encode()).hexdigest()
    file = BUNDLED / name / WEIGHTS
    return _sha256(file, file.stat().st_mtime_ns, file.stat().st_size)


@functools.lru_cache(maxsize=64)
def _sha256(file: Path, mtime_ns: int, size: int) -> str:  # noqa: ARG001 - what changes when the file does
    return hashlib.sha256(file.read_bytes()).hexdigest()


@st.cache_resource(max_entries=4, show_spinner=False)
def _load(name: str, weights_hash: str) -> Loaded:
    with _LOCK:
        return Loaded(name=name, weights_hash=weights_hash, model=t2lens.load(_ADDED.get(name, name)))


@st.cache_resource(max_entries=24, show_spinner=False)
def _trace(name: str, weights_hash: str, prompt: str, edits: str, *, _model: Any) -> Any:  # noqa: ARG001 - for the key
    with _LOCK:
        return t2lens.trace(_model, prompt, name=f"{name}, edited" if edits else name, edits=edits or ())


@st.cache_resource(max_entries=16, show_spinner=False)
def _analyse(
    name: str,  # noqa: ARG001 - part of the key
    weights_hash: str,  # noqa: ARG001
    key: str,
    given: str | int,
    options: tuple[tuple[str, Any], ...],
    *,
    _model: Any,
) -> Any:
    with _LOCK:
        return analysis(key).run(_model, sample_texts(given) if isinstance(given, int) else given, **dict(options))

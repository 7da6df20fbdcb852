"""Models and traces of the dashboard, loaded once and shared between sessions.

A model is one object for everyone, so a forward pass runs under a lock: hooks are attached to it meanwhile.
Both caches are bounded, and keyed by the content of the weights, never by the model object.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import streamlit as st

import t2lens

__all__ = ["Loaded", "load", "model_names", "trace"]

_LOCK = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model with the hash of its weights."""

    name: str
    weights_hash: str
    model: Any


def model_names() -> list[str]:
    """The bundled models, in the order in which the package lists them."""
    return [info.name for info in t2lens.list_models()]


@st.cache_resource(max_entries=4, show_spinner=False)
def load(name: str) -> Loaded:
    """A bundled model; at most four stay in memory."""
    with _LOCK:
        model = t2lens.load(name)
    return Loaded(name=name, weights_hash=weights_hash(model), model=model)


def weights_hash(model: Any) -> str:
    """sha256 over names, shapes and bytes of the weights, shortened."""
    import hashlib

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().float().numpy().tobytes())
    return digest.hexdigest()[:16]


def trace(loaded: Loaded, prompt: str) -> Any:
    """The trace of a prompt; the last 24 of the server are kept."""
    return _trace(loaded.name, loaded.weights_hash, prompt, _model=loaded.model)


@st.cache_resource(max_entries=24, show_spinner=False)
def _trace(name: str, weights_hash: str, prompt: str, *, _model: Any) -> Any:  # noqa: ARG001 - the cache key
    with _LOCK:
        return t2lens.trace(_model, prompt)

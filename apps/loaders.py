"""Models, traces and findings of the dashboard, loaded once and shared between sessions.

Every run borrows a twin of the model: hook points of its own, the same weights. So nothing that one session attaches or
edits can reach another, and nobody waits for a long analysis of somebody else. All caches are bounded, and keyed by the
content of the weights, never by the model object.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

import t2lens
from t2lens import analysis as analyses
from t2lens.analysis.catalog import analysis
from t2lens.analysis.finding import Finding
from t2lens.analysis.under_edits import check_under_edits
from t2lens.apps.memory import Memory
from t2lens.apps.state import CLEAN, NO_MODEL
from t2lens.apps.uploads import Folder
from t2lens.checks import Verification
from t2lens.edits import edited, read_edits
from t2lens.model import Transformer
from t2lens.readout import NEXT
from t2lens.zoo.registry import BUNDLED, WEIGHTS
from t2lens.zoo.text import sample_texts

__all__ = [
    "OWN_AT_ONCE",
    "Loaded",
    "add",
    "added",
    "address",
    "analyse",
    "bring",
    "drop",
    "edit_change",
    "forget",
    "is_verified",
    "load",
    "model_names",
    "own_models",
    "trace",
    "verification",
]

HEADS_BYTES = 200e6
"""Bytes of the attention of one trace up to which each head of it is kept, and not the mean over heads alone."""

_TRACES = Memory(limit=1.5e9, size=lambda trace: trace.dataset.nbytes)
_FINDINGS = Memory(limit=0.3e9, size=lambda finding: finding.dataset.nbytes + 100 * len(finding.rows))
_LOADING = threading.Lock()
_ADDED: dict[str, str] = {}  # name -> what `t2lens.load` takes, beside the bundled models
_VERIFIED: dict[str, Verification] = {}  # by the hash of the weights: a fact about them, which outlives what is kept

OWN_AT_ONCE = 3
"""Models that one visitor may bring."""


@dataclass(frozen=True, kw_only=True)
class Own:
    """A model that one visitor brought: what `t2lens.load` takes, and the folder that goes with it, if it is ours."""

    address: str
    folder: Folder | None = None


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model with the hash of its weights. Read from `model` what you like, but run a `twin`."""

    name: str
    weights_hash: str
    model: Transformer
    _idle: list[Transformer] = field(default_factory=list, repr=False, compare=False)

    @contextmanager
    def twin(self) -> Iterator[Transformer]:
        """The model with hook points of its own and the same weights, for one run; kept for the next one."""
        model = self._idle.pop() if self._idle else self._another()
        yield model  # after an error its hooks may be in doubt, and it is dropped
        self._idle.append(model)

    def _another(self) -> Transformer:
        shared = [*self.model.parameters(), *self.model.buffers(), self.model.tokenizer]
        return copy.deepcopy(self.model, {id(each): each for each in shared})


def model_names() -> list[str]:
    """The bundled models, in the order in which the package lists them, then those that were added, for all visitors
    and by this one."""
    return [*(info.name for info in t2lens.list_models()), *_ADDED, *own_models()]


def own_models() -> dict[str, Own]:
    """What this visitor brought, by name; nobody else sees it."""
    return {} if get_script_run_ctx(suppress_warning=True) is None else st.session_state.get("own_models", {})


def bring(name: str, address: str, folder: Folder | None = None) -> str:
    """Offer a model to this visitor alone, and return its name. ValueError as `add`, or when there are too many."""
    mine = own_models()
    if len(mine) >= OWN_AT_ONCE:
        raise ValueError(f"You have brought {len(mine)} models, and {OWN_AT_ONCE} are kept: drop one first.")
    if name in (*model_names(), CLEAN, NO_MODEL):
        raise ValueError(f"The dashboard has a model {name!r} already; rename the folder {address!r}.")
    st.session_state["own_models"] = {**mine, name: Own(address=address, folder=folder)}
    try:
        _check_texts(name, address)
    except Exception:
        st.session_state["own_models"] = mine
        raise
    return name


def drop(name: str) -> None:
    """Take back what this visitor brought, and remove its folder where it is ours."""
    mine = own_models()
    if (gone := mine.get(name)) is not None and gone.folder is not None:
        gone.folder.remove()
    st.session_state["own_models"] = {key: own for key, own in mine.items() if key != name}


def _check_texts(name: str, address: str) -> None:
    model = load(name).model
    if model.tokenizer is None:
        raise ValueError(f"The model {address!r} has no tokenizer, and the dashboard shows texts.")
    if not len(model.tokenizer.encode("the king")):
        raise ValueError(f"The tokenizer of the model {address!r} makes no tokens of a text.")


def add(name_or_path: str) -> str:
    """Offer another model, whatever `t2lens.load` takes, and return the name that it gets.

    ValueError: it cannot be loaded, takes no text, or has the name of one that is there.
    """
    name = Path(name_or_path).absolute().name
    if name_or_path in model_names():
        return name_or_path
    if name in (*model_names(), CLEAN, NO_MODEL):
        raise ValueError(f"The dashboard has a model {name!r} already; rename the folder {name_or_path!r}.")
    _ADDED[name] = name_or_path
    try:
        _check_texts(name, name_or_path)
    except Exception:
        del _ADDED[name]
        raise
    return name


def added() -> list[str]:
    """The names of the models that were added."""
    return list(_ADDED)


def address(name: str) -> str:
    """What `t2lens.load` takes for a model of `model_names`."""
    mine = own_models()
    return mine[name].address if name in mine else _ADDED.get(name, name)


def load(name: str) -> Loaded:
    """A model of `model_names`; at most four stay in memory. ValueError (one sentence) when its files are damaged, or
    go while they are read."""
    try:
        return _load(name, _weights_hash(name), _address=address(name))
    except OSError as error:
        raise ValueError(f"The files of the model {name!r} cannot be read: {error}.") from error


def trace(
    loaded: Loaded, prompt: str, edits: str = "", follow: str | int = NEXT, last: int | None = None
) -> t2lens.Trace:
    """The trace of a prompt, under edits in JSON where there are any, that follows a token as `t2lens.trace` does.
    ValueError, TypeError or KeyError, one sentence each, for edits that the model cannot do, and for no token of it."""
    edits = edits.strip()

    def run() -> t2lens.Trace:
        with loaded.twin() as model:
            name = f"{loaded.name}, edited" if edits else loaded.name
            n_pos, cfg = len(model.to_tokens(prompt)[0]), model.cfg
            every = 4 * cfg.n_layers * cfg.attention.n_heads * min(n_pos, cfg.n_ctx) ** 2
            heads = "each" if every <= HEADS_BYTES else "mean"
            return t2lens.trace(model, prompt, name=name, edits=edits or (), follow=follow, last=last, heads=heads)

    return _TRACES.get((loaded.name, loaded.weights_hash, prompt, edits, follow, last), run)


def analyse(loaded: Loaded, key: str, given: str | int, options: dict[str, Any], edits: str = "") -> Finding:
    """The finding of an analysis of the catalog on a prompt, or on so many bundled passages, within the edited model
    where there are edits."""
    edits = edits.strip()

    def run() -> Finding:
        input = sample_texts(given) if isinstance(given, int) else given
        with loaded.twin() as model:
            wanted = read_edits(edits or ())
            check_under_edits(model, wanted, key, options, texts=isinstance(given, int))
            with edited(model, wanted):
                return analysis(key).run(model, input, **options)

    chosen = json.dumps(options, sort_keys=True)
    return _FINDINGS.get((loaded.name, loaded.weights_hash, key, given, chosen, edits), run)


def verification(loaded: Loaded) -> Verification:
    """`t2lens.verify` of a model, once for these weights."""
    if (known := _VERIFIED.get(loaded.weights_hash)) is not None:
        return known
    with loaded.twin() as model:
        found = t2lens.verify(model)
    while len(_VERIFIED) >= 64:
        _VERIFIED.pop(next(iter(_VERIFIED)), None)
    return _VERIFIED.setdefault(loaded.weights_hash, found)


def is_verified(loaded: Loaded) -> bool:
    """Whether `verification` is known for these weights."""
    return loaded.weights_hash in _VERIFIED


def edit_change(loaded: Loaded, prompt: str, edits: str, pos: int) -> Finding:
    """`t2lens.analysis.edit_change` of a prompt after position `pos`."""

    def run() -> Finding:
        with loaded.twin() as model:
            return analyses.edit_change(model, prompt, edits or (), pos=pos)

    return _FINDINGS.get((loaded.name, loaded.weights_hash, "edit-change", prompt, pos, edits), run)


def forget() -> None:
    """Drop everything that is kept, models too."""
    _TRACES.clear()
    _FINDINGS.clear()
    _load.clear()


def _weights_hash(name: str) -> str:
    """sha256 of the weights as they lie on disk now, so that retrained weights are another model."""
    if (given := address(name)) != name or name in _ADDED:  # may be large: what its files look like from outside
        path = Path(given)
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
        marks = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        return hashlib.sha256(repr((given, marks)).encode()).hexdigest()
    file = BUNDLED / name / WEIGHTS
    return _sha256(file, file.stat().st_mtime_ns, file.stat().st_size)


@functools.lru_cache(maxsize=64)
def _sha256(file: Path, mtime_ns: int, size: int) -> str:  # noqa: ARG001 - what changes when the file does
    return hashlib.sha256(file.read_bytes()).hexdigest()


@st.cache_resource(max_entries=4, show_spinner=False)
def _load(name: str, weights_hash: str, *, _address: str) -> Loaded:
    with _LOADING:  # one at a time: two would need twice the memory
        return Loaded(name=name, weights_hash=weights_hash, model=t2lens.load(_address))

"""The form in which an edit is built without typing JSON: every field offers only what the model has.

What is filled in, as far as it is not what the form begins with, is a draft: JSON that a link keeps, so that it opens
with the same form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from t2lens.apps.state import Cell, Parameter, quote
from t2lens.edits import Edit
from t2lens.edits.choices import (
    gate_names,
    heads_at,
    hook_names,
    operations_on,
    sites_of,
    sources_at,
    targets_of,
    ways_at,
)
from t2lens.edits.files import read_json
from t2lens.model import Transformer
from t2lens.text import is_text
from t2lens.viz.labels import glyphs

__all__ = ["DRAFT", "build", "draft_told", "from_node", "refill"]

TARGETS = {
    "depth_weight": "depth weights of a read",
    "depth_score": "depth scores of a read",
    "gate": "a gate",
    "atom": "what a sublayer writes",
    "stream": "the carried stream",
    "read": "what is read",
    "head": "attention heads",
    "pattern": "an attention pattern",
    "hook": "the tensor at a hook point",
}
OPERATIONS = {
    "set": "set to",
    "scale": "multiply by",
    "add": "add",
    "zero": "set to zero",
    "freeze_mean": "replace by its mean",
    "patch": "replace by its value in another prompt",
    "zero_renormalise": "remove, and scale the rest up",
    "swap": "swap two",
    "one": "read only this",
    "plain_sum": "replace by the plain sum",
    "window": "narrow to a window of",
}
EVERY = {"*": "every site"}

DRAFT_LIMIT = 3000
"""Characters of a draft that a link keeps."""

VALUED = {"set": "0", "scale": "0.5", "add": "0.5"}
"""Operations with a value -> what it begins with; each has a field of its own."""

_TEXT, _NUMBER, _WORDS, _NUMBERS = "a text", "a whole number", "a list of words", "a list of whole numbers"
FIELDS: dict[str, tuple[str, str]] = {
    "target": ("build_target", _TEXT),
    "hook": ("build_hook", _TEXT),
    "site": ("build_site", _TEXT),
    "gate": ("build_gate", _TEXT),
    "way": ("build_way", _TEXT),
    "operation": ("build_operation", _TEXT),
    "value": ("build_value", _TEXT),
    "places": ("build_window", _NUMBER),
    "sources": ("build_sources", _WORDS),
    "heads": ("build_heads", _NUMBERS),
    "positions": ("build_positions", _NUMBERS),
    "keys": ("build_keys", _NUMBERS),
    "prompt": ("build_prompt", _TEXT),
    "there": ("build_there", _TEXT),
}
"""A field of the form -> the key of its widget, and what its value is."""


def _is(value: Any, what: str) -> bool:
    if what in (_WORDS, _NUMBERS):
        return isinstance(value, list) and all(_is(each, _TEXT if what == _WORDS else _NUMBER) for each in value)
    return (isinstance(value, str) and is_text(value)) if what == _TEXT else type(value) is int


def _read_draft(given: str) -> str:
    """A draft as it is; ValueError for what is none."""
    if not given:
        return ""
    if len(given) > DRAFT_LIMIT:
        raise ValueError(f"which has {len(given)} characters; {DRAFT_LIMIT} are allowed")
    try:
        read = read_json(given)
    except ValueError:
        raise ValueError("which is no JSON that can be read") from None
    if not isinstance(read, dict) or not read.keys() <= FIELDS.keys():
        raise ValueError(f"which is no object with fields of the form ({', '.join(FIELDS)})")
    for name, value in read.items():
        if not _is(value, FIELDS[name][1]):
            raise ValueError(f"in which {name} is not {FIELDS[name][1]}")
    return given


DRAFT = Parameter(key="edits_draft", default="", read=_read_draft)
"""The form half filled."""


def refill(draft: str) -> None:
    """The form as a draft says, and elsewhere as it begins; before its widgets are drawn."""
    given, state = json.loads(draft or "{}"), st.session_state
    for name, (begin, _) in FIELDS.items():
        for key in [f"{begin}_{each}" for each in VALUED] if name == "value" else [begin]:
            state.pop(key, None)
            if name in given:
                state[key] = given[name]
    state["build_refilled"] = given


def draft_told() -> list[str]:
    """A sentence on what the form could not take of the draft that it was last filled from; after it was drawn."""
    state = st.session_state
    asked, kept = state.pop("build_refilled", {}), state["build_kept"]
    gone = [name for name, value in asked.items() if kept.get(name) != value]
    if not gone:
        return []
    told = ", ".join(f"{name} = {quote(asked[name])}" for name in gone[:4])
    more = f" and {len(gone) - 4} more" if len(gone) > 4 else ""
    return [f"The link's draft of an edit asks for {told}{more}, which the form does not offer here; it falls back."]


class _Form:
    """The fields as they are drawn. kept: all their values; draft: those that are not what the field begins with."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.draft: dict[str, Any] = {}

    def _keep(self, name: str, value: Any, start: Any) -> Any:
        self.kept[name] = value
        if value != start:
            self.draft[name] = value
        return value

    def choice(
        self,
        name: str,
        label: str,
        options: Sequence[str],
        words: Mapping[str, str] | None = None,
        first: str | None = None,
    ) -> str:
        """One of the options; what was chosen before stays where it is still offered."""
        key, start = FIELDS[name][0], first if first in options else options[0]
        if st.session_state.get(key) not in options:
            st.session_state[key] = start
        told = {option: (words or {}).get(option, option) for option in options}
        return self._keep(name, st.selectbox(label, options, key=key, format_func=told.__getitem__), start)

    def several(self, name: str, label: str, options: Sequence[Any], words: Sequence[str] = ()) -> list[Any]:
        """Any of the options; none of them stands for all."""
        key = FIELDS[name][0]
        st.session_state[key] = [each for each in dict.fromkeys(st.session_state.get(key, [])) if each in options]
        told = words.__getitem__ if words else str
        return self._keep(
            name, st.multiselect(label, options, key=key, placeholder="all of them", format_func=told), []
        )

    def places(self, name: str, label: str, tokens: Sequence[str]) -> list[int]:
        words = [f"{i} {glyphs(token)}" for i, token in enumerate(tokens)]
        return self.several(name, label, range(len(tokens)), words)

    def text(self, name: str, label: str, start: str, most: int, *, key: str = "", **look: Any) -> str:
        key = key or FIELDS[name][0]
        st.session_state[key] = str(st.session_state.get(key, start))[:most]
        return self._keep(name, st.text_input(label, key=key, max_chars=most, **look), start)

    def number(self, name: str, label: str, low: int, high: int) -> int:
        key = FIELDS[name][0]
        st.session_state[key] = min(max(st.session_state.get(key, low), low), high)
        return self._keep(name, st.number_input(label, low, high, key=key), low)


def from_node(cell: Cell | None) -> None:
    """The chosen node becomes the site and the position of the next edit."""
    if cell is not None:
        st.session_state["build_site"], st.session_state["build_positions"] = cell.site, [cell.pos]


def build(model: Transformer, tokens: Sequence[str], cell: Cell) -> Edit:
    """Draw the fields, which begin at the site of `cell`, and return the edit that they describe; the draft is kept for
    the link.

    ValueError, TypeError or KeyError, one sentence each, where it is none yet."""
    form = _Form()
    given = _fields(form, model, tokens, cell)
    state = st.session_state
    state["build_kept"] = form.kept
    written = json.dumps(form.draft, separators=(",", ":")) if form.draft else ""
    state[DRAFT.key] = written if len(written) <= DRAFT_LIMIT else ""
    if len(written) > DRAFT_LIMIT:
        st.caption(f"This draft takes {len(written)} characters; a link keeps {DRAFT_LIMIT}, and leaves it out.")
    if isinstance(text := given.get("value"), str):
        given["value"] = _numbers(text)
    if there := given.pop("there", "").strip():
        given["prompt_positions"] = [int(each) for each in _numbers(there, whole=True)]
    return Edit.from_dict({key: value for key, value in given.items() if value not in (None, "", [])})


def _fields(form: _Form, model: Transformer, tokens: Sequence[str], cell: Cell) -> dict[str, Any]:
    """What the fields hold, as an edit names it; numbers are still text."""
    given: dict[str, Any] = {}
    one, two, three = st.columns([1.5, 1.2, 1.3])
    with one:
        target = form.choice("target", "What", targets_of(model), TARGETS, first="atom")
    name, site = None, ""
    if target == "hook":
        with two:
            name = form.choice("hook", "Hook point", hook_names(model))
    else:
        with two:
            site = form.choice("site", "Where", sites_of(model, target), EVERY, first=cell.site)
        if target == "gate":
            with three:
                name = form.choice("gate", "Gate", gate_names(model, site), first="beta")
    way = None
    if ways := ways_at(model, target, site, name):
        with three if target != "gate" else one:
            way = form.choice("way", "Way", ["", *ways], {"": "all ways"}) or None
    one, two, three = st.columns([1.5, 1.2, 1.3])
    with one:
        operation = form.choice(
            "operation", "How", operations_on(model, target, site, name, way), OPERATIONS, first="zero"
        )
    with two:
        if operation in VALUED:
            key, words = f"build_value_{operation}", "A number, or numbers with commas."
            given["value"] = form.text("value", "Value", VALUED[operation], 2000, key=key, help=words)
        elif operation == "window":
            given["value"] = form.number("places", "Places", 1, len(tokens))
    with three:
        if (sources := sources_at(model, target, site, name, way)) and operation != "plain_sum":
            given["sources"] = form.several("sources", "Sources", sources)
        elif n := heads_at(model, target, site):
            given["heads"] = form.several("heads", "Heads", range(n))
    one, two = st.columns([2.7, 1.3])
    with one:
        given["positions"] = form.places("positions", "Positions", tokens)
    with two:
        if target == "pattern" and operation != "window":
            given["keys"] = form.places("keys", "Keys", tokens)
    if operation in ("patch", "freeze_mean"):
        given |= _prompt(form, operation, given)
    return {"target": target, "operation": operation, "site": site, "name": name, "way": way, **given}


def _prompt(form: _Form, operation: str, given: Mapping[str, Any]) -> dict[str, str]:
    one, two = st.columns([2.7, 1.3])
    words = "Prompt that the values come from" + (" (empty: this pass)" if operation == "freeze_mean" else "")
    with one:
        prompt = form.text("prompt", words, "", 2000)
    if operation != "patch" or not given["positions"]:
        return {"prompt": prompt if prompt.strip() else ""}
    with two:
        there = form.text("there", "Positions there", "", 200, placeholder="the same", help="As 2, -1.")
    return {"prompt": prompt if prompt.strip() else "", "there": there}


def _numbers(text: str, *, whole: bool = False) -> Any:
    """A number, or a list of them. ValueError for anything else."""
    parts = [each.strip() for each in text.replace(";", ",").split(",") if each.strip()]
    try:
        numbers = [int(each) if whole else float(each) for each in parts]
    except ValueError:
        kind = "whole number" if whole else "number"
        raise ValueError(f"{text!r} is no {kind}; several stand with commas between them.") from None
    if not numbers:
        raise ValueError("A value is missing: type a number.")
    return numbers if whole or len(numbers) > 1 else numbers[0]

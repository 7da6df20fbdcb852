"""The form in which an edit is built without typing JSON: every field offers only what the model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from t2lens.apps.state import Cell
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
from t2lens.model import Transformer
from t2lens.viz.labels import glyphs

__all__ = ["build", "from_node"]

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


def from_node(cell: Cell | None) -> None:
    """The chosen node becomes the site and the position of the next edit."""
    if cell is not None:
        st.session_state["build_site"], st.session_state["build_positions"] = cell.site, [cell.pos]


def build(model: Transformer, tokens: Sequence[str], cell: Cell) -> Edit:
    """Draw the fields, which begin at the site of `cell`, and return the edit that they describe.

    ValueError, TypeError or KeyError, one sentence each, where it is none yet."""
    given: dict[str, Any] = {}
    one, two, three = st.columns([1.5, 1.2, 1.3])
    with one:
        target = _choice("What", targets_of(model), "build_target", TARGETS, first="atom")
    name, site = None, ""
    if target == "hook":
        with two:
            name = _choice("Hook point", hook_names(model), "build_hook")
    else:
        with two:
            site = _choice("Where", sites_of(model, target), "build_site", EVERY, first=cell.site)
        if target == "gate":
            with three:
                name = _choice("Gate", gate_names(model, site), "build_gate", first="beta")
    way = None
    if ways := ways_at(model, target, site, name):
        with three if target != "gate" else one:
            way = _choice("Way", ["", *ways], "build_way", {"": "all ways"}) or None
    one, two, three = st.columns([1.5, 1.2, 1.3])
    with one:
        operation = _choice(
            "How", operations_on(model, target, site, name, way), "build_operation", OPERATIONS, first="zero"
        )
    with two:
        if operation in ("set", "scale", "add"):
            start = "0" if operation == "set" else "0.5"
            given["value"] = _numbers(
                st.text_input("Value", start, key=f"build_value_{operation}", help="A number, or numbers with commas.")
            )
        elif operation == "window":
            given["value"] = st.number_input("Places", 1, len(tokens), 1, key="build_window")
    with three:
        if (sources := sources_at(model, target, site, name, way)) and operation != "plain_sum":
            given["sources"] = _several("Sources", sources, "build_sources", "all of them")
        elif n := heads_at(model, target, site):
            given["heads"] = _several("Heads", list(range(n)), "build_heads", "all of them")
    one, two = st.columns([2.7, 1.3])
    with one:
        given["positions"] = _places("Positions", tokens, "build_positions")
    with two:
        if target == "pattern" and operation != "window":
            given["keys"] = _places("Keys", tokens, "build_keys")
    if operation in ("patch", "freeze_mean"):
        given["prompt"] = _prompt(operation, given)
    data = {"target": target, "operation": operation, "site": site, "name": name, "way": way, **given}
    return Edit.from_dict({key: value for key, value in data.items() if value not in (None, "", [])})


def _prompt(operation: str, given: dict[str, Any]) -> str:
    one, two = st.columns([2.7, 1.3])
    words = "Prompt that the values come from" + (" (empty: this pass)" if operation == "freeze_mean" else "")
    prompt = one.text_input(words, key="build_prompt", max_chars=2000)
    if operation == "patch" and given["positions"]:
        there = two.text_input("Positions there", key="build_there", placeholder="the same", help="As 2, -1.")
        if there.strip():
            given["prompt_positions"] = [int(each) for each in _numbers(there, whole=True)]
    return prompt if prompt.strip() else ""


def _choice(
    label: str, options: Sequence[str], key: str, words: dict[str, str] | None = None, first: str | None = None
) -> str:
    """One of the options; what was chosen before stays where it is still offered."""
    if st.session_state.get(key) not in options:
        st.session_state[key] = first if first in options else options[0]
    told = {option: (words or {}).get(option, option) for option in options}
    return st.selectbox(label, options, key=key, format_func=told.__getitem__)


def _several(label: str, options: Sequence[Any], key: str, none: str) -> list[Any]:
    st.session_state[key] = [each for each in st.session_state.get(key, []) if each in options]
    return st.multiselect(label, options, key=key, placeholder=none)


def _places(label: str, tokens: Sequence[str], key: str) -> list[int]:
    every = range(len(tokens))
    st.session_state[key] = [each for each in st.session_state.get(key, []) if each in every]
    words = [f"{i} {glyphs(token)}" for i, token in enumerate(tokens)]
    return st.multiselect(label, every, key=key, placeholder="all of them", format_func=words.__getitem__)


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

"""Edits as the dashboard keeps them: the JSON list of `t2lens.Edit`, in which a muted edit stays in the list.

The text under `st.session_state["edits"]` is the one source; `put` changes it and remembers what it was, for `undo`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from t2lens.apps.state import PROMPT_LIMIT
from t2lens.edits import Edit
from t2lens.edits.files import read_json
from t2lens.text import is_text

__all__ = [
    "Entries",
    "act",
    "acting",
    "active",
    "can_undo",
    "changed",
    "edit_of",
    "entries",
    "listed_now",
    "muted",
    "put",
    "refused",
    "sentence",
    "toggle",
    "undo",
    "written",
]

Entries = list[dict[str, Any]]
_PAST = 20  # states of the list that can be gone back to
MUTED = "muted"


def entries(text: str) -> Entries:
    """The listed edits, each an object that may say `"muted": true`.

    ValueError in one sentence for what is no list of objects; whether each is an edit is said by `edit_of`.

    >>> entries('{"target": "atom"}')
    [{'target': 'atom'}]
    """
    listed = read_json(text or "[]")
    if isinstance(listed, dict):
        listed = listed["edits"] if "format" in listed and "edits" in listed else [listed]
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ValueError("The edits are a list of objects, each with a target and an operation.")
    if not is_text(json.dumps(listed, ensure_ascii=False)):
        raise ValueError("The edits hold half a character (a surrogate without its other half), which is no text.")
    return listed


def written(listed: Sequence[Mapping[str, Any]]) -> str:
    """The JSON of a list; nothing of none.

    ValueError where it is longer than a link can hold.
    """
    text = json.dumps([{k: v for k, v in each.items() if k != MUTED or v} for each in listed]) if listed else ""
    if len(text) > PROMPT_LIMIT:
        raise ValueError(f"These edits take {len(text)} characters; a link holds {PROMPT_LIMIT}.")
    return text


def muted(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get(MUTED))


def acting(listed: Entries) -> int:
    """How many of the list act."""
    return sum(not muted(each) for each in listed)


def active(text: str) -> str:
    """The JSON of the edits that act: those that are not muted. Text that is no list is returned as it is: what it
    means, or lacks, is said where it is read."""
    try:
        acting = [_plain(each) for each in entries(text) if not muted(each)]
    except ValueError:
        return text.strip()
    return json.dumps(acting) if acting else ""


def _plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != MUTED}


def edit_of(entry: Mapping[str, Any]) -> Edit:
    """ValueError or TypeError, one sentence, where it is no edit."""
    return Edit.from_dict(_plain(entry))


def sentence(entry: Mapping[str, Any]) -> str:
    """What an edit does, or why it is none."""
    try:
        return edit_of(entry).describe()
    except (ValueError, TypeError) as error:
        return f"No edit: {error}"


def changed(listed: Sequence[dict[str, Any]], what: str, i: int = 0, value: Any = None) -> Entries:
    """The list after one change: add (value), remove, double, up, down, or mute (value) of number i; mute_all (value).

    >>> changed([{"a": 1}, {"a": 2}], "up", 1)
    [{'a': 2}, {'a': 1}]
    """
    new = [dict(each) for each in listed]
    if what == "add":
        return [*new, dict(value)]
    if what == "mute_all":
        return [{**_plain(each), **({MUTED: True} if value else {})} for each in new]
    if not 0 <= i < len(new):
        return new
    if what == "remove":
        del new[i]
    elif what == "double":
        new.insert(i + 1, dict(new[i]))
    elif what == "mute":
        new[i] = {**_plain(new[i]), **({MUTED: True} if value else {})}
    else:
        j = i - 1 if what == "up" else i + 1
        if 0 <= j < len(new):
            new[i], new[j] = new[j], new[i]
    return new


# --- in the session --------------------------------------------------------------------------------------------------


def put(text: str) -> None:
    """Take other edits, and remember those there were."""
    state = st.session_state
    if text == state["edits"]:
        return
    state["edits_past"] = [*state.get("edits_past", []), state["edits"]][-_PAST:]
    state["edits"] = text


def listed_now() -> Entries:
    """The list of the session, empty where the text is none."""
    try:
        return entries(st.session_state["edits"])
    except ValueError:
        return []


def act(what: str, i: int = 0, value: Any = None) -> None:
    """A callback: one change of the list, as `changed` takes it; why it cannot be is kept for `refused`."""
    try:
        put(written(changed(listed_now(), what, i, value)))
    except ValueError as error:
        st.session_state["edits_refused"] = str(error)


def toggle(i: int, key: str) -> None:
    """A callback of the box `key`, which says whether edit number i acts."""
    act("mute", i, not st.session_state[key])


def refused() -> list[str]:
    """Why the last change could not be, said once."""
    said = st.session_state.pop("edits_refused", "")
    return [said] if said else []


def can_undo() -> bool:
    return bool(st.session_state.get("edits_past"))


def undo() -> None:
    state = st.session_state
    if past := state.get("edits_past", []):
        state["edits_past"], state["edits"] = past[:-1], past[-1]

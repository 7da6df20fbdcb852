"""What the header says of models and edits on every page: the badge of a model, and the short list of edits."""

from __future__ import annotations

import streamlit as st

from t2lens.apps import loaders
from t2lens.apps.edits import changed, entries, put, sentence, written
from t2lens.apps.state import CLEAN, NO_MODEL
from t2lens.checks import Verification

__all__ = ["badge", "checks_in_words", "edits_label", "plain", "short_list"]


def plain(text: str) -> str:
    """Text for a place that reads Markdown, where it is to stay text."""
    return "".join(f"\\{each}" if each in "\\`*_{}[]()#+-.!|<>$~:&" else each for each in text)


def badge(name: str) -> tuple[str, str | None]:
    """(Markdown that says how the checks of a model came out, the checks for a tooltip); nothing where it is no model
    or cannot be loaded (which the page says)."""
    if name in (CLEAN, NO_MODEL):
        return "", None
    try:
        found = loaders.verification(loaders.load(name))
    except (ValueError, OSError):
        return "", None
    good = sum(check.passed for check in found)
    color, word = ("green", "verified") if found.passed else ("red", "FAILS")
    return f" :{color}-badge[{word} {good}/{len(found)}]", checks_in_words(name, found)


def checks_in_words(name: str, found: Verification) -> str:
    """The checks of `t2lens.verify`, as a Markdown list."""
    lines = [
        f"- {'pass' if check.passed else '**FAIL**'} {plain(check.name)} {check.value:.1e} "
        f"({'at least' if check.at_least else 'at most'} {check.limit:.0e})"
        for check in found
    ]
    skipped = [f"- skipped: {plain(each)}" for each in found.skipped]
    return "\n".join([f"t2lens.verify of {plain(name)}, on a sentence of its own:", "", *lines, *skipped])


def edits_label() -> str:
    """What the button says that opens the short list."""
    try:
        listed = entries(st.session_state["edits"])
    except ValueError:
        return "Edits (?)"
    acting = sum(not each.get("muted") for each in listed)
    if not listed:
        return "Edits"
    return f"Edits {acting}" if acting == len(listed) else f"Edits {acting}/{len(listed)}"


def short_list() -> None:
    """The edits of A in sentences, each with a box that mutes it, and the way to the page where they are built."""
    try:
        listed = entries(st.session_state["edits"])
    except ValueError as error:
        st.text(str(error))
        listed = []
    if not listed:
        st.caption("No edits of A yet.")
    for i, each in enumerate(listed):
        box, words = st.columns([1, 12], vertical_alignment="center")
        key = f"short-acts-{i}"
        st.session_state[key] = not each.get("muted")
        box.checkbox("acts", key=key, label_visibility="collapsed", on_change=_toggled, args=(i, key))
        words.text(sentence(each))
    page = next((page for page in st.session_state["pages"] if page.url_path == "edits"), None)
    if page is not None:
        st.page_link(page, label="Build and reorder")
    st.caption("As model B, \u201cA without its edits\u201d shows both.")


def _toggled(i: int, key: str) -> None:
    listed = entries(st.session_state["edits"])
    put(written(changed(listed, "mute", i, not st.session_state[key])))

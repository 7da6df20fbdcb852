"""What stands on top of every page: the name, the pages, and what is chosen for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from t2lens.apps import loaders
from t2lens.apps.edits import acting, entries, muted, sentence, toggle
from t2lens.apps.state import ALIGN, CLEAN, NO_MODEL
from t2lens.apps.words import plain
from t2lens.checks import Verification

__all__ = ["controls", "header", "verdict"]

STYLE = """<style>
.stMainBlockContainer, [data-testid="stMainBlockContainer"] {padding: 0.5rem 2rem 2rem; max-width: 1680px;}
[data-testid="stHeader"] {display: none;}
[data-testid="stVerticalBlock"] {gap: 0.45rem;}
[data-testid="stForm"] {padding: 0; border: 0;}
[data-testid="stTextAreaRootElement"], [data-testid="stTextAreaRootElement"] textarea
{min-height: 2.6rem; height: 2.6rem;}
.st-key-prompt [data-testid="stTextAreaRootElement"], .st-key-prompt textarea
{height: auto !important; max-height: 5.4rem; field-sizing: content;}
.st-key-prompt [data-testid="stTextAreaRootElement"], .st-key-prompt textarea {min-height: 2.36rem;}
.st-key-prompt textarea {padding-block: 0.29rem;}
.st-key-prompt label {min-height: 0; margin-bottom: 0.1rem;}
[data-testid="stPopoverBody"] [data-testid="stPageLink-NavLink"]:not(:hover) {background: none;}
[data-testid="stPopoverBody"] [data-testid="stPageLink-NavLink"] p {font-weight: 600;}
[data-testid="stPopoverBody"] [data-testid="stTextAreaRootElement"], [data-testid="stPopoverBody"] textarea
{height: 9rem; font-family: monospace; font-size: 0.85rem;}
[data-testid="stPageLink-NavLink"] {padding: 0.1rem 0.5rem;}
.st-key-pages p {font-size: 0.9rem;}
.st-key-top {row-gap: 0.2rem;}
.st-key-tools button {min-height: 1.9rem; padding: 0 0.6rem;}
.st-key-tools button p {font-size: 0.85rem;}
[class*="st-key-label-model"] {margin-bottom: -0.35rem;}
[class*="st-key-label-model"] p {white-space: nowrap; font-size: 0.875rem; line-height: 1.4;}
[class*="st-key-label-model"] .stMarkdownBadge {font-size: 0.72rem;}
.st-key-presets button, .st-key-edit-list button {min-height: 1.7rem; padding: 0 0.5rem;}
.st-key-edit-list [class*="st-key-moves"] button {padding: 0 0.2rem;}
.st-key-finding [data-testid="stText"] {font-weight: 600; font-size: 1.05rem; margin-top: 0.6rem;}
</style>"""

WORDS_USED = {
    "position, depth": "the two axes: tokens from left to right, layers from the embedding up to the readout.",
    "site": "a place of the forward pass that reads and writes: 3.attn, 3.mlp, and out, the readout.",
    "write, atom": "the vector that one site adds (or the embedding): what all later reads are made of.",
    "read": "the vector that a site takes in. In a standard model the sum of all writes below; in others a mixture.",
    "depth attention": "a read that weighs what was written below it, as attention weighs earlier tokens.",
    "source": "what a read weighs: an atom, the sum of a block, or a carried stream that holds several.",
    "depth weights": "the model's own weights of a read over its sources.",
    "mixing matrix": "how often each atom is in a read in the end, through all that carried it.",
    "contribution": "the vector that an atom adds to a read; its norm, or its share of the summed norms, is shown.",
    "mass, effect": "how much a route carries, and what becomes of the prediction without it. They need not agree.",
    "look-back": "how far below (in layers) or before (in positions) a read takes its content from, on average.",
    "effective atoms": "over how many atoms a read is spread: the exponential of the entropy of their shares.",
    "gate, beta": "Deep Delta Learning: 0 keeps what is there, 1 overwrites it along one direction, 2 reflects it.",
}
"""The words of the pages, for the menu of the header."""

PASTE_LIMIT = 1_000_000
"""A browser drops a longer text without a word; what is over the limit of a prompt is cut, and that is said."""

SHORT = 8
"""Edits that the short list shows."""

WORDS = {NO_MODEL: "no model B", CLEAN: "A without its edits"}


def header() -> Any:
    """Name and pages; returns the place at their right for what a page offers."""
    st.html(STYLE)
    top = st.container(key="top", horizontal=True, horizontal_alignment="distribute", vertical_alignment="center")
    with top.container(key="pages", horizontal=True, gap="xsmall", vertical_alignment="center", width="content"):
        st.markdown("**t2lens**", width="content")
        for page in st.session_state["pages"]:
            st.page_link(page)
    tools = top.container(key="tools", horizontal=True, horizontal_alignment="right", gap="xsmall", width="content")
    with tools.popover("Words", help="What the words on these pages mean"):
        for word, meaning in WORDS_USED.items():
            st.markdown(f"**{word}**: {meaning}")
    return tools


def controls(names: list[str]) -> Callable[[], None]:
    """Models, edits and prompts, under the keys of the selection. Returns what puts up the badges that are unknown yet:
    the checks of a model take seconds, and the page comes first."""
    state, unknown = st.session_state, []
    a, b, edits, rest = st.columns([2.3, 2.3, 1.35, 7.7], vertical_alignment="bottom")
    for place, letter, offered in ((a, "A", names), (b, "B", [*names, CLEAN, NO_MODEL])):
        key, label = f"model_{letter.lower()}", f"Model {letter}"
        spot = place.container(key=f"label-{key}", horizontal=True, gap="xsmall").empty()
        if _is_checked(state[key]):
            _badge(spot, label, state[key])
        else:
            spot.markdown(label, width="content")
            unknown.append((spot, label, state[key]))
        # named once more for those who hear the page
        place.selectbox(label, offered, key=key, format_func=_named, label_visibility="collapsed")
    with edits.popover(_edits_label(), width="stretch"):
        _short_list()
    with rest.form("prompt-form", border=False):
        text, own, button = st.columns([7.4, 1.7, 1.3], vertical_alignment="bottom")
        text.text_area("Prompt", key="prompt", height=68, max_chars=PASTE_LIMIT)
        said = "B: own" if state["prompt_b"].strip() else "B: same"
        with own.popover(said, width="stretch", help="Whether B reads this prompt or one of its own"):
            st.text_area("Prompt of B (empty: the same)", key="prompt_b", height=68, max_chars=PASTE_LIMIT)
            st.radio(
                "Prompts of different lengths stand beside each other",
                ALIGN,
                key="align",
                format_func={"left": "from the first token", "right": "from the last token"}.__getitem__,
            )
        button.form_submit_button("Run", type="primary", width="stretch")

    def check() -> None:
        for each in unknown:
            _badge(*each)

    return check


def _named(model: str) -> str:
    return WORDS.get(model, model)


# --- what it says of models and of edits ---------------------------------------------------------------------------


def _is_checked(name: str) -> bool:
    """Whether there is nothing to wait for: the checks of this model are known, or it has none."""
    try:
        return name in (CLEAN, NO_MODEL) or loaders.is_verified(loaders.load(name))
    except _NO_MODEL:
        return True


def _badge(spot: Any, label: str, name: str) -> None:
    """The label of a model with how its checks came out, and the checks as a tooltip; the label alone where it is no
    model or cannot be loaded (which the page says)."""
    try:
        found = None if name in (CLEAN, NO_MODEL) else loaders.verification(loaders.load(name))
    except _NO_MODEL:
        found = None
    if found is None:
        spot.markdown(label, width="content")
    else:
        spot.markdown(f"{label} {verdict(found)}", width="content", help=_checks(name, found))


_NO_MODEL = (ValueError, OSError, TypeError, RuntimeError)


def verdict(found: Verification) -> str:
    """How checks came out, as a Markdown badge."""
    good = sum(check.passed for check in found)
    color, word = ("green", "verified") if found.passed else ("red", "FAILS")
    return f":{color}-badge[{word} {good}/{len(found)}]"


def _checks(name: str, found: Verification) -> str:
    """The checks of `t2lens.verify`, as a Markdown list."""
    lines = [
        f"- {'pass' if check.passed else '**FAIL**'} {plain(check.name)} {check.value:.1e} "
        f"({'at least' if check.at_least else 'at most'} {check.limit:.0e})"
        for check in found
    ]
    skipped = [f"- skipped: {plain(each)}" for each in found.skipped]
    return "\n".join([f"t2lens.verify of {plain(name)}, on a sentence of its own:", "", *lines, *skipped])


def _edits_label() -> str:
    """What the button says that opens the short list."""
    try:
        listed = entries(st.session_state["edits"])
    except ValueError:
        return "Edits (?)"
    if not listed:
        return "Edits"
    n = acting(listed)
    return f"Edits {n}" if n == len(listed) else f"Edits {n}/{len(listed)}"


def _short_list() -> None:
    """The edits of A in sentences, each with a box that mutes it, and the way to the page where they are built."""
    try:
        listed = entries(st.session_state["edits"])
    except ValueError as error:
        st.text(str(error))
        listed = []
    if not listed:
        st.caption("No edits of A yet.")
    for i, each in enumerate(listed[:SHORT]):
        box, words = st.columns([1, 12], vertical_alignment="center")
        key = f"short-acts-{i}"
        st.session_state[key] = not muted(each)
        box.checkbox("acts", key=key, label_visibility="collapsed", on_change=toggle, args=(i, key))
        words.text(sentence(each))
    if len(listed) > SHORT:
        st.caption(f"And {len(listed) - SHORT} more, which hold too: they stand on the page of edits.")
    page = next((page for page in st.session_state["pages"] if page.url_path == "edits"), None)
    if page is not None:
        st.page_link(page, label="Build and reorder")
    st.caption("As model B, \u201cA without its edits\u201d shows both.")

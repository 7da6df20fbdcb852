"""Six views to start from. Each is a link: what it shows can be walked on from, and shared."""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

__all__ = ["GALLERY", "PROMPT", "VIEW", "View", "gallery", "look"]

PROMPT = "And the king said unto the queen, What wilt thou, O queen? And the king"

VIEW = "view"
"""Marks, in a link's parameters, that it restores a view within an open session; it is never written."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A page with everything chosen. look: one sentence on what to look at."""

    key: str
    title: str
    look: str
    page: str
    params: dict[str, str]


def _view(key: str, title: str, look: str, page: str = "two-axes", **params: str) -> View:
    return View(key=key, title=title, look=look, page=page, params={"prompt": PROMPT, **params})


_ZERO = '[{"target": "atom", "site": "0.mlp", "operation": "zero"}]'

GALLERY = (
    _view(
        "axes",
        "One token, both axes",
        "The cross of a node: left, where it looks in the sequence; down, what it reads of all that is written below.",
        a="attnres-full",
        b="ddl-cc-ec",
        quantity="effective_atoms",
        depth="share",
        node="A:17:5.attn",
    ),
    _view(
        "known",
        "When is the next word known?",
        "After \u201cwilt\u201d comes \u201cthou\u201d. Where writes add up, it is there early and stays; "
        "where reads choose, one read has it and the next has not.",
        a="standard",
        b="attnres-full",
        quantity="lens_probability",
        depth="contribution",
        node="A:10:out",
    ),
    _view(
        "without",
        "One write taken away",
        "Without what 0.mlp writes, the probability of \u201cthou\u201d falls from 0.98 to 0.10. B is A as it was.",
        a="standard",
        b="clean",
        edits=_ZERO,
        quantity="lens_probability",
        depth="contribution",
        node="A:10:out",
    ),
    _view(
        "windows",
        "The same window on two axes",
        "A looks back a few layers in depth, B a few positions in the sequence: one operator, transposed.",
        a="depth-swa",
        b="standard-swa",
        quantity="depth_lookback",
        depth="weights",
        node="A:12:6.attn",
    ),
    _view(
        "gates",
        "Gates that erase and reflect",
        "Beta 0 skips, 1 overwrites, 2 reflects: which tokens does a sublayer treat how, and what if it did not?",
        page="gates",
        a="ddl",
        b="ddl-cc-ec",
        node="A:10:1.mlp",
    ),
    _view(
        "mass",
        "Mass is not effect",
        "What a read takes most of need not matter most: its weights, beside what the prediction is without them.",
        page="depth-routing",
        a="attnres-full",
        b="denseformer",
        node="A:10:6.attn",
    ),
)


def look(key: str, **chosen: str) -> str:
    """What to look at in a view, as long as its models and its prompt are chosen; nothing where it is no view.

    >>> look("axes", a="attnres-full", b="ddl-cc-ec", prompt=PROMPT)[:27]
    'The cross of a node: left, '
    >>> look("axes", a="attnres-full", b="ddl", prompt=PROMPT)
    ''
    """
    found = [view for view in GALLERY if view.key == key]
    return next((view.look for view in found if chosen.items() <= view.params.items()), "")


def gallery() -> None:
    """A menu of the views, for the header."""
    pages = {page.url_path or "two-axes": page for page in st.session_state["pages"]}
    if VIEW in st.query_params:  # one was chosen
        st.session_state["examples"] = False
    with st.popover("Examples", key="examples", on_change="rerun"):
        for view in GALLERY:
            if view.page in pages:
                st.page_link(pages[view.page], label=view.title, query_params={**view.params, VIEW: view.key})
                st.caption(view.look)

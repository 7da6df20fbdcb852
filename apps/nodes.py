"""The chosen node on a page: brought inside the prompts, where it stands in A and in B, moved by clicks on pictures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import streamlit as st

from t2lens.apps.state import Cell, fit_cell, read_pick
from t2lens.apps.words import tell
from t2lens.viz.maps_between import beside
from t2lens.viz.payload import alignment

if TYPE_CHECKING:
    from t2lens.apps.frame import Frame, Side

__all__ = ["fit", "move", "nearest", "picked", "places"]


def fit(frame: Frame) -> Cell:
    """The node, inside the prompts and models that are shown. After a new prompt, moving it into that needs no word."""
    tokens, sites = [len(side.tokens) for side in frame.sides], [side.sites for side in frame.sides]
    st.session_state["cell"], moved = fit_cell(st.session_state["cell"], tokens, sites)
    tell(moved if frame.first else [])
    return st.session_state["cell"]


def places(frame: Frame) -> list[int | None]:
    """The position of the node in each prompt, by the rule of the header that it states; None where there is none."""
    cell, both = fit(frame), alignment([side.tokens for side in frame.sides], frame.selection.align)
    shift = both["shift"] if both else 0
    tell([both["text"]] if both and both["text"] else [])
    return beside([len(side.tokens) for side in frame.sides], shift, cell.panel, cell.pos)


def nearest(frame: Frame, side: Side) -> int:
    """The position of a side that is nearest to a node which has none beside it there."""
    return 0 if frame.selection.align == "right" else len(side.tokens) - 1


def move(**changes: Any) -> None:
    """Choose another node; panel, pos or site that are not given stay."""
    cell = st.session_state["cell"] or Cell(panel=0, pos=0, site="out")
    st.session_state["cell"], st.session_state["walk"] = replace(cell, **changes), ""


def picked(key: str, panel: int | None) -> None:
    """A click on a mark of the picture `key`, of A (0), of B (1) or of the one whose node it was (None), chooses the
    node that the mark stands for; a picture of both says itself whose it is."""
    found = read_pick(st.session_state[key].get("pick"))
    if found:
        move(**({} if panel is None else {"panel": panel}) | found)

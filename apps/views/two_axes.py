"""The home page: two models, one prompt, both axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st

from t2lens.analysis.quantities import QUANTITIES, attention_of
from t2lens.apps.components.maps import maps
from t2lens.apps.frame import Frame, Page
from t2lens.apps.generation import continue_prompt
from t2lens.apps.header import tell
from t2lens.apps.state import Cell, fit_cell, one_of, read_cell
from t2lens.viz.payload import MODES, maps_payload

__all__ = ["TWO_AXES"]

WAYS = ("", "q", "k", "v", "r")
"""With what attention reads from depth, where a system mixes queries, keys, values and the carried stream apart; a
model without that way shows its first."""

HEADS = ("mean", *map(str, range(64)))
"""What the choice of an attention head can be; a site without that head shows its mean."""

HEADS_UP_TO = 128
"""Tokens of a prompt up to which every attention head crosses to the browser (some 1.4 MB a model at that length)."""


def two_axes(frame: Frame) -> None:
    state = st.session_state
    with st.spinner("Running the models ..."):
        traces = [side.trace() for side in frame.sides]
    notices = list(dict.fromkeys(notice for trace in traces for notice in trace.notices))
    tokens = [len(trace.tokens) for trace in traces]
    sites = [["embed", *map(str, trace.of_way().dataset["read"].values)] for trace in traces]
    state["cell"], moved = fit_cell(state["cell"], tokens, sites)
    notices += _fit_head(traces)
    tell([*notices, *(moved if frame.first else [])])  # after a new prompt, moving the node into it needs no word
    identity = tuple((side.name, side.loaded.weights_hash, side.prompt, side.edits) for side in frame.sides)
    continue_prompt(frame)
    maps(_payload(identity, traces), key="maps", on_change=_chosen)


def _fit_head(traces: list[Any]) -> list[str]:
    """The mean in place of an attention head that no model shown has, and a notice."""
    n_heads = max((len(pattern) for trace in traces for pattern in attention_of(trace).values()), default=0)
    head = st.session_state["head"]
    if head == "mean" or int(head) < n_heads:
        return []
    st.session_state["head"] = "mean"
    return [f"There is no attention head {head} here (0..{n_heads - 1}); showing the mean of all."]


def _payload(identity: tuple[Any, ...], traces: list[Any]) -> dict[str, Any]:
    """The payload of these traces. It keeps the view that it was made with: later choices live in the browser
    and in the URL, so a click sends nothing but itself."""
    state = st.session_state
    if "payload" not in state or state["payload"][0] != identity:
        cell: Cell = state["cell"]
        payload = maps_payload(
            traces,
            quantity=state["quantity"],
            depth=state["depth"],
            head=state["head"],
            way=state["way"],
            heads=max(len(trace.tokens) for trace in traces) <= HEADS_UP_TO,
            cell=(cell.panel, cell.pos, cell.site),
            hint=_hint(traces, cell) if state.pop("newcomer", False) else "",
            notes=_notes(traces),
        )
        state["payload"] = (identity, payload)
    return state["payload"][1]


def _hint(traces: list[Any], cell: Cell) -> str:
    """What to look at first, in one sentence; its numbers are those of the traces."""
    seen = []
    for letter, trace in zip("AB", traces, strict=False):
        pattern = attention_of(trace).get(cell.site)
        norms = trace.of_way().dataset["contribution_norm"].sel(read=cell.site, pos=cell.pos)
        most = int(np.nanargmax(norms.values))
        part = f"reads most from {norms.atom.values[most]} ({norms.values[most] / np.nansum(norms.values):.2f})"
        if pattern is not None:
            weights = pattern.mean(axis=0)[cell.pos, : cell.pos + 1]
            word = trace.tokens[int(weights.argmax())].strip()
            part = f"looks back most to \u201c{word}\u201d ({float(weights.max()):.2f}) and {part}"
        seen.append(f"in {letter} it {part}")
    word = traces[0].tokens[cell.pos].strip()
    return (
        f"Look at the framed node, {cell.site} at \u201c{word}\u201d: {'; '.join(seen)}. "
        "Choose any cell, or move with the arrow keys."
    )


def _notes(traces: list[Any]) -> list[str]:
    first, longest = traces[0].tokens[0], max(len(trace.tokens) for trace in traces)
    notes = [f"Position 0 is {first}, the start token that every training text began with; it is not typed."]
    if longest > HEADS_UP_TO:
        notes.append(f"Single attention heads are shown for prompts of up to {HEADS_UP_TO} tokens.")
    return notes


def _chosen() -> None:
    """The browser reports a choice: keep it."""
    state = st.session_state
    reported = state["maps"]
    seen = state.get("seen", {})
    state["seen"] = {key: reported.get(key) for key in ("cell", "show")}
    # a value that was here before is an old choice, perhaps of another prompt
    cell, show = (None if seen.get(key) == value else value for key, value in state["seen"].items())
    if (chosen := read_cell(cell)) is not None:
        state["cell"] = chosen
    if isinstance(show, dict):
        if show.get("quantity") in QUANTITIES:
            state["quantity"] = show["quantity"]
        if show.get("depth") in MODES:
            state["depth"] = show["depth"]
        if show.get("head") in HEADS:
            state["head"] = show["head"]
        if show.get("way") in WAYS:
            state["way"] = show["way"]


TWO_AXES = Page(
    path="two-axes",
    title="Two axes",
    draw=two_axes,
    default=True,
    parameters=(
        one_of("quantity", list(QUANTITIES), "effective_atoms"),
        one_of("depth", MODES, "share"),
        one_of("head", HEADS, "mean"),
        one_of("way", WAYS, ""),
    ),
)

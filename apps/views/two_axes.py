"""The home page: two models, one prompt, both axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import streamlit as st

from t2lens.analysis.quantities import QUANTITIES, attention_of
from t2lens.apps.answers import answer
from t2lens.apps.components.maps import answers, maps, packed
from t2lens.apps.export import maps_export
from t2lens.apps.frame import Frame, Page, Side
from t2lens.apps.generation import continue_prompt
from t2lens.apps.nodes import fit
from t2lens.apps.state import Cell, one_of, read_cell, text
from t2lens.apps.walk import WALK, fit_walk, write_walk
from t2lens.apps.words import tell
from t2lens.readout import NEXT, token_id
from t2lens.viz.fitting import fitted_payload
from t2lens.viz.payload import MODES

__all__ = ["PAGE"]

WAYS = ("", "q", "k", "v", "r")
"""With what attention reads from depth, where a system mixes queries, keys, values and the carried stream apart; a
model without that way shows its first."""

HEADS = ("mean", "max", *map(str, range(64)))
"""What the choice of an attention head can be; a site without that head shows its mean."""

LAYERS, COMPARE = ("cross", "rollout"), ("both", "difference")
"""What is drawn over the maps, and which of them."""


SHOWN: dict[str, tuple[str, ...]] = {
    "quantity": tuple(QUANTITIES),
    "depth": MODES,
    "head": HEADS,
    "way": WAYS,
    "layer": LAYERS,
    "compare": COMPARE,
}
"""What the maps report as shown, and what it can be."""

TOKEN_LIMIT = 60


def two_axes(frame: Frame) -> None:
    state = st.session_state
    _follow_control(frame)
    with st.spinner("Running the models ..."):
        follow, untold = _followed(frame.sides, state["follow"])
        traces = [side.trace(token) for side, token in zip(frame.sides, follow, strict=True)]
    notices = untold + list(dict.fromkeys(notice for trace in traces for notice in trace.notices))
    tell([*notices, *_fit_head(traces)])
    fit(frame)
    each = tuple((side.name, side.loaded.weights_hash, side.prompt, side.edits) for side in frame.sides)
    continue_prompt(frame)
    if frame.first:  # another page may have moved the node
        state.pop("payload", None)
    payload, sent = _payload((each, tuple(follow), frame.selection.align), frame, traces)
    maps(sent, key="maps", on_change=_chosen)
    maps_export(frame.tools, frame.sides, traces, follow)
    answers(payload["rev"], _answers(payload["rev"], frame.sides, traces), key="answers")


def _follow_control(frame: Frame) -> None:
    with frame.tools, st.popover("Follow"):
        st.text_input("Token to follow", key="follow", max_chars=TOKEN_LIMIT, placeholder="the true next token")
        st.caption(
            "Lens probability, rank and shares of the logit are those of this token. Left empty, they are of the true "
            "next token at each position; at the last one, which has none, of the token that the model finds likeliest "
            "there, and in B, on the prompt of A, of A's."
        )


def _followed(sides: Sequence[Side], wanted: str) -> tuple[list[str | int], list[str]]:
    """What the trace of each side follows, and a sentence where the token that is wanted is none of its model: a word
    may stand within a text, with a space before it."""
    found: list[str | int] = []
    notices = []
    for side in sides:
        found.append(NEXT)
        if not wanted.strip():
            continue
        try:
            found[-1] = token_id(side.loaded.model, wanted)
        except ValueError as error:
            try:
                found[-1] = token_id(side.loaded.model, f" {wanted.strip()}")
            except ValueError:
                notices.append(f"{side.letter} follows the true next token: {error}")
    return found, notices


def _answers(rev: str, sides: Sequence[Side], traces: Sequence[Any]) -> list[dict[str, Any]]:
    """The answers to what the maps asked last, as long as they show what they were asked of."""
    state = st.session_state
    wants = state.pop("asked", None)
    if wants is not None:
        state["answered"] = (rev, answer(wants, list(zip(sides, traces, strict=True))))
    of, found = state.get("answered", (rev, []))
    return found if of == rev else []


def _fit_head(traces: list[Any]) -> list[str]:
    """The mean in place of an attention head that no model shown has, and a notice."""
    n_heads = max((len(pattern) for trace in traces for pattern in attention_of(trace).values()), default=0)
    head = st.session_state["head"]
    if head in ("mean", "max") or int(head) < n_heads:
        return []
    st.session_state["head"] = "mean"
    return [f"There is no attention head {head} here (0..{n_heads - 1}); showing the mean of all."]


def _payload(identity: tuple[Any, ...], frame: Frame, traces: list[Any]) -> tuple[dict[str, Any], bytes]:
    """The payload of these traces, and the bytes of it that are sent. It keeps the view that it was made with: later
    choices live in the browser and in the URL, so a click sends nothing but itself."""
    state = st.session_state
    if "payload" not in state or state["payload"][0] != identity:
        cell: Cell = state["cell"]
        if "payload" in state:  # a walk is one of its prompt and models
            state["walk"] = ""
        payload = fitted_payload(
            traces,
            quantity=state["quantity"],
            depth=state["depth"],
            head=state["head"],
            way=state["way"],
            layer=state["layer"],
            compare=state["compare"],
            align=frame.selection.align,
            cell=(cell.panel, cell.pos, cell.site),
            trail=_trail(frame, cell),
            hint=_hint(traces, cell) if state.pop("newcomer", False) else "",
            notes=_notes(traces),
        )
        state["payload"] = (identity, payload, packed(payload))
    return state["payload"][1:]


def _trail(frame: Frame, cell: Cell) -> list[dict[str, Any]]:
    state, sides = st.session_state, frame.sides
    try:
        return fit_walk(state["walk"], cell, [len(side.tokens) for side in sides], [side.sites for side in sides])
    except ValueError as error:
        tell([str(error)])
        state["walk"] = ""
        return []


def _hint(traces: list[Any], cell: Cell) -> str:
    """What to look at first, for those who see such maps for the first time; its numbers are those of the traces."""
    looks, takes = [], []
    for letter, trace in zip("AB", traces, strict=False):
        pattern = attention_of(trace).get(cell.site)
        norms = trace.of_way().dataset["contribution_norm"].sel(read=cell.site, pos=cell.pos)
        most = int(np.nanargmax(norms.values))
        takes.append(f"{letter} {norms.atom.values[most]}, {norms.values[most] / np.nansum(norms.values):.2f}")
        if pattern is not None:
            weights = pattern.mean(axis=0)[cell.pos, : cell.pos + 1]
            word = trace.tokens[int(weights.argmax())].strip()
            looks.append(f"{letter} \u201c{word}\u201d, {float(weights.max()):.2f}")
    word = traces[0].tokens[cell.pos].strip()
    left = f"to the left earlier words (most: {'; '.join(looks)}), " if looks else ""
    return (
        f"A column is a word, a row a depth. The framed node, {cell.site} at \u201c{word}\u201d, reads along both: "
        f"{left}downwards what lower layers wrote (most: {'; '.join(takes)}). Click a cell to see what it reads."
    )


def _notes(traces: list[Any]) -> list[str]:
    first = traces[0].tokens[0]
    return [f"Position 0 is {first}, the start token that every training text began with; it is not typed."]


def _chosen() -> None:
    """The browser reports a choice: keep it."""
    state = st.session_state
    reported = state["maps"]
    seen = state.get("seen", {})
    state["seen"] = {key: reported.get(key) for key in ("cell", "show", "ask")}
    # a value that was here before is an old choice, perhaps of another prompt
    cell, show, ask = (None if seen.get(key) == value else value for key, value in state["seen"].items())
    if isinstance(cell, dict) and (chosen := read_cell(cell)) is not None:
        state["cell"], state["walk"] = chosen, write_walk(cell.get("trail"))
    if isinstance(show, dict):
        for key, allowed in SHOWN.items():
            if show.get(key) in allowed:
                state[key] = show[key]
    if isinstance(ask, dict):
        state["asked"] = ask.get("wants")


PAGE = Page(
    path="two-axes",
    title="Two axes",
    draw=two_axes,
    default=True,
    parameters=(
        one_of("quantity", list(QUANTITIES), "effective_atoms"),
        one_of("depth", MODES, "share"),
        one_of("head", HEADS, "mean"),
        one_of("way", WAYS, ""),
        one_of("layer", LAYERS, "cross"),
        one_of("compare", COMPARE, "both"),
        text("follow", "", TOKEN_LIMIT),
        WALK,
    ),
)

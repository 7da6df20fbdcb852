"""The home page: two models, one prompt, both axes."""

from __future__ import annotations

from typing import Any

import streamlit as st

from t2lens.analysis.quantities import QUANTITIES
from t2lens.apps import loaders
from t2lens.apps.components.maps import maps
from t2lens.apps.state import (
    NO_MODEL,
    PROMPT_LIMIT,
    Cell,
    Selection,
    fit_cell,
    format_url,
    limit_prompt,
    parse_url,
    read_cell,
)
from t2lens.viz.payload import DEPTH, maps_payload

__all__ = ["two_axes"]

PRESET_PROMPT = "And the king said unto the queen, What wilt thou, O queen? And the king"
HINT = (
    "Each cell is a node: position across, depth upwards. The framed node reads along its warm arms: downwards from "
    "earlier layers, to the left from earlier words. Choose any cell, or move with the arrow keys."
)
STYLE = """<style>
.stMainBlockContainer, [data-testid="stMainBlockContainer"] {padding: 1.1rem 2rem 2rem; max-width: 1680px;}
[data-testid="stHeader"] {display: none;}
[data-testid="stVerticalBlock"] {gap: 0.6rem;}
[data-testid="stForm"] {padding: 0; border: 0;}
[data-testid="stTextAreaRootElement"], [data-testid="stTextAreaRootElement"] textarea {min-height: 2.6rem; height: 2.6rem;}
</style>"""


def two_axes() -> None:
    st.html(STYLE)
    names = loaders.model_names()
    notices = _first_visit(names)
    _controls(names)
    state = st.session_state
    prompt, cut = limit_prompt(state["prompt"])
    notices += cut
    if not prompt.strip():
        _tell([*notices, "The prompt is empty: type a few words and press Run."])
        return
    chosen = [state["model_a"], *([state["model_b"]] if state["model_b"] != NO_MODEL else [])]
    with st.spinner("Running the models ...", show_time=False):
        traces = [loaders.trace(loaders.load(name), prompt) for name in chosen]
    notices += _trace_notices(traces)
    tokens = [len(trace.tokens) for trace in traces]
    sites = [["embed", *map(str, trace.dataset["read"].values)] for trace in traces]
    cell, moved = fit_cell(state["cell"], tokens, sites)
    state["cell"] = cell
    _tell([*notices, *moved])
    payload = _payload((tuple(chosen), prompt), traces, cell)
    maps(payload, key="maps", on_change=_chosen)
    _write_url()


def _default(names: list[str]) -> Selection:
    a = "attnres-full" if "attnres-full" in names else names[0]
    b = "ddl-cc-ec" if "ddl-cc-ec" in names else names[-1]
    return Selection(
        model_a=a,
        model_b=b,
        prompt=PRESET_PROMPT,
        quantity="depth_entropy",
        depth="mixing",
        cell=Cell(panel=0, pos=9, site="5.attn"),
    )


def _first_visit(names: list[str]) -> list[str]:
    """On the first run of a session: take the state from the URL. Returns what the URL asked for in vain."""
    state = st.session_state
    if "prompt" in state:
        return []
    asked = {key: st.query_params[key] for key in st.query_params}
    selection, notices = parse_url(
        asked, _default(names), models=names, quantities=list(QUANTITIES), depths=list(DEPTH)
    )
    for key in ("model_a", "model_b", "prompt", "quantity", "depth", "cell"):
        state[key] = getattr(selection, key)
    state["hint"] = "" if asked else HINT
    return notices


def _controls(names: list[str]) -> None:
    mark, a, b, rest = st.columns([1.1, 2, 2, 8.5], vertical_alignment="bottom")
    mark.markdown("#### t2lens")
    a.selectbox("Model A", names, key="model_a")
    b.selectbox("Model B", [*names, NO_MODEL], key="model_b")
    with rest.form("prompt-form", border=False):
        text, run = st.columns([9, 1.2], vertical_alignment="bottom")
        text.text_area("Prompt", key="prompt", height=68, max_chars=PROMPT_LIMIT)
        run.form_submit_button("Run", type="primary", width="stretch")


def _tell(notices: list[str]) -> None:
    for notice in notices:
        st.text(notice)


def _trace_notices(traces: list[Any]) -> list[str]:
    return []


def _payload(identity: tuple[Any, ...], traces: list[Any], cell: Cell) -> dict[str, Any]:
    """The payload of these traces. It keeps the view that it was made with: later choices live in the browser and
    in the URL, so a click sends nothing but itself."""
    state = st.session_state
    kept = state.get("payload")
    if kept is None or kept[0] != identity:
        payload = maps_payload(
            traces,
            quantity=state["quantity"],
            depth=state["depth"],
            cell=(cell.panel, cell.pos, cell.site),
            hint=state["hint"],
        )
        state["payload"] = kept = (identity, payload)
    return kept[1]


def _chosen() -> None:
    """The browser reports a choice: keep it and put it into the URL."""
    state = st.session_state
    reported = state["maps"]
    cell, show = read_cell(reported.get("cell")), reported.get("show")
    if cell is not None:
        state["cell"] = cell
    if isinstance(show, dict):
        if show.get("quantity") in QUANTITIES:
            state["quantity"] = show["quantity"]
        if show.get("depth") in DEPTH:
            state["depth"] = show["depth"]


def _write_url() -> None:
    state = st.session_state
    selection = Selection(
        **{key: state[key] for key in ("model_a", "model_b", "prompt", "quantity", "depth", "cell")}
    )
    wanted = format_url(selection)
    if {key: st.query_params[key] for key in st.query_params} != wanted:
        st.query_params.from_dict(wanted)

"""The home page: two models, one prompt, both axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import streamlit as st

from t2lens.analysis.quantities import QUANTITIES, attention_of
from t2lens.apps import loaders
from t2lens.apps.components.maps import maps
from t2lens.apps.header import header, tell
from t2lens.apps.state import (
    HEADS,
    NO_MODEL,
    PROMPT_LIMIT,
    WAYS,
    Cell,
    Selection,
    fit_cell,
    format_url,
    limit_prompt,
    parse_url,
    read_cell,
)
from t2lens.viz.payload import MODES, maps_payload

__all__ = ["preset", "two_axes"]

PRESET_PROMPT = "And the king said unto the queen, What wilt thou, O queen? And the king"
PRESET_CELL = Cell(panel=0, pos=9, site="5.attn")
SELECTED = ("model_a", "model_b", "prompt", "edits", "quantity", "depth", "head", "way", "cell")
EXAMPLE = '{"target": "atom", "site": "3.attn", "operation": "zero"}'
HEADS_UP_TO = 128
"""Tokens of a prompt up to which every attention head crosses to the browser (some 1.4 MB a model at that length)."""


def two_axes() -> None:
    header()
    names = loaders.model_names()
    if not names:
        tell(["No trained model is bundled with this installation: train one with t2lens train."])
        return
    state = st.session_state
    first = "quantity" not in state
    notices = _read_url(names) if first else []
    _controls(names)
    prompt, cut = limit_prompt(state["prompt"])
    notices += cut
    if not prompt.strip():
        tell([*notices, "The prompt is empty: type a few words and press Run."])
        _write_url()
        return
    chosen = [state["model_a"], *([state["model_b"]] if state["model_b"] != NO_MODEL else [])]
    try:
        with st.spinner("Running the models ..."):
            loaded = [loaders.load(name) for name in chosen]
            edits = [state["edits"], ""][: len(loaded)]  # of A alone: B, if it is the same model, shows it without
            traces = [loaders.trace(one, prompt, text) for one, text in zip(loaded, edits, strict=True)]
    except (ValueError, TypeError, KeyError) as error:
        # a sentence for the reader: damaged weights, a prompt that cannot be traced, edits that this model cannot do
        tell([*notices, str(error.args[0])])
        _write_url()
        return
    notices += dict.fromkeys(notice for trace in traces for notice in trace.notices)
    tokens = [len(trace.tokens) for trace in traces]
    sites = [["embed", *map(str, trace.of_way().dataset["read"].values)] for trace in traces]
    state["cell"], moved = fit_cell(state["cell"], tokens, sites)
    notices += _fit_head(traces)
    tell([*notices, *(moved if first else [])])  # after a new prompt, moving the node into it needs no word
    identity = (*chosen, *(one.weights_hash for one in loaded), prompt, state["edits"])
    maps(_payload(identity, traces), key="maps", on_change=_chosen)
    _write_url()


def preset(names: list[str]) -> Selection:
    """What a first visit shows."""
    a = [*loaders.added(), *(name for name in names if name == "attnres-full"), *names][0]
    b = "ddl-cc-ec" if "ddl-cc-ec" in names else names[-1]
    return Selection(
        model_a=a,
        model_b=b,
        prompt=PRESET_PROMPT,
        quantity="effective_atoms",
        depth="share",
        cell=PRESET_CELL,
    )


def _read_url(names: list[str]) -> list[str]:
    """The first run of a session on this page takes its state from the URL, then from what other pages chose. Returns a
    notice for what the URL asked in vain."""
    state, default = st.session_state, preset(names)
    asked = {key: st.query_params[key] for key in st.query_params}
    if "prompt" in state:
        cell = default.cell if state["prompt"] == default.prompt else None
        default = replace(default, model_a=state.get("model", default.model_a), prompt=state["prompt"], cell=cell)
    selection, notices = parse_url(asked, default, models=names, quantities=list(QUANTITIES), depths=MODES)
    for key in SELECTED:
        state[key] = getattr(selection, key)
    state["newcomer"] = not asked
    return notices


def _controls(names: list[str]) -> None:
    a, b, edits, rest = st.columns([2, 2, 1.1, 8.5], vertical_alignment="bottom")
    a.selectbox("Model A", names, key="model_a")
    b.selectbox("Model B", [*names, NO_MODEL], key="model_b")
    with edits.popover("Edits of A" if st.session_state["edits"].strip() else "Edits", width="stretch"):
        st.text_area("Edits of model A, as JSON", key="edits", height=150, max_chars=PROMPT_LIMIT, placeholder=EXAMPLE)
        st.caption("Choose the same model as B to see it without them. `t2lens.Edit` says what an edit can be.")
    with rest.form("prompt-form", border=False):
        text, run = st.columns([9, 1.2], vertical_alignment="bottom")
        text.text_area("Prompt", key="prompt", height=68, max_chars=PROMPT_LIMIT)
        run.form_submit_button("Run", type="primary", width="stretch")


def _fit_head(traces: list[Any]) -> list[str]:
    """The mean in place of an attention head that no model shown has, and a notice."""
    n_heads = max((len(pattern) for trace in traces for pattern in attention_of(trace).values()), default=0)
    head = st.session_state["head"]
    if head == "mean" or int(head) < n_heads:
        return []
    st.session_state["head"] = "mean"
    return [f"There is no attention head {head} here (0..{n_heads - 1}); showing the mean of all."]


def _payload(identity: tuple[str, ...], traces: list[Any]) -> dict[str, Any]:
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


def _write_url() -> None:
    state = st.session_state
    selection = Selection(**{key: state[key] for key in SELECTED})
    wanted = format_url(selection)
    if {key: st.query_params[key] for key in st.query_params} != wanted:
        st.query_params.from_dict(wanted)

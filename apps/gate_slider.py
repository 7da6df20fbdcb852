"""The slider of the page of gates: another value of the gate of one sublayer, and what becomes of the prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import streamlit as st

from t2lens.analysis.finding import Finding
from t2lens.apps.edits import act
from t2lens.apps.export import theme
from t2lens.apps.frame import Refusal
from t2lens.apps.gate_focus import EVERY, Focus, beside, show, span, stream_words
from t2lens.apps.state import Parameter, one_of
from t2lens.apps.words import tell
from t2lens.viz import gates as draw
from t2lens.viz.labels import fmt

__all__ = ["PARAMETERS", "chosen", "curve_of", "curve_options", "curve_picture", "slider"]

AT = {"all": "all positions", "position": "the chosen position"}
STEPS = 20
"""Steps of the slider, which are those of the curve: so a slider along it runs nothing."""
_MOST = 1000.0  # of a value in a link: no gate goes so far


def _read(given: str) -> float | None:
    if given == "":
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.inf
    if not abs(value) <= _MOST:
        raise ValueError("which is no number that a gate can be set to")
    return value


PARAMETERS = (
    one_of("gates_at", list(AT), "all"),
    Parameter(key="gates_value", default=None, read=_read, write=lambda value: "" if value is None else f"{value:.3g}"),
)
"""at: where the gate is set. value: to what; None: nothing was chosen, and the slider stands where the model is."""


@st.fragment
def slider(alike: Sequence[Focus], width: int) -> None:
    """The slider, for the sides whose gates are of one kind, and what it does to the prediction at the chosen
    position."""
    first, state = alike[0], st.session_state
    value = _control(alike)
    at = str(state["gates_at"])
    try:
        with st.spinner("Running other gates ...", show_time=True):
            curves = [curve_of(each, at, alike).dataset for each in alike]
    except Refusal as error:  # what a fragment raises does not reach the frame
        tell([str(error)])
        return
    most = max(float(max(c["plain_probability"].max(), c["probability"].max())) for c in curves) * 1.02

    def each_side(each: Focus) -> None:
        data = curves[alike.index(each)]
        look: dict[str, Any] = {"theme": theme(), "width": width}
        title = f"{each.head}: the next token after {each.here}"
        svg = draw.next_tokens(data, value, most=most, title=title, plain=each.plain, **look)
        show(each.side, "gate-tokens", svg)
        st.caption(draw.kl_words(data, value))
        show(each.side, "gate-curve", curve_picture(each, at, alike, value, **look))

    beside(alike, each_side)
    if first.side.letter == "A":
        where: dict[str, Any] = {"positions": [first.pos]} if at == "position" else {}
        where |= {"sources": [first.stream]} if first.stream else {}
        edit = {"target": "gate", "name": first.gate.name, "site": first.site, "operation": "set", "value": value}
        if st.button("Keep this as an edit of A", key="gates_keep", on_click=act, args=("add", 0, edit | where)):
            st.rerun()


def _control(alike: Sequence[Focus]) -> float:
    """The value that is set. Until one is chosen it is where the model is, rounded to a step."""
    state, first, (low, high) = st.session_state, alike[0], span(alike)
    step = (high - low) / STEPS
    a, b = st.columns([3, 2], vertical_alignment="bottom") if len(alike) > 1 else (st.container(), st.container())
    b.segmented_control(
        "at", list(AT), format_func=AT.__getitem__, key="gates_at", required=True, label_visibility="collapsed"
    )
    wanted = chosen(first, str(state["gates_at"]))
    value = low + round((min(max(wanted, low), high) - low) / step) * step
    state["gates_slider"] = value = round(value, 9)

    def moved() -> None:
        state["gates_value"] = state["gates_slider"]

    what = f"{'the ' if first.gate.streams else ''}{first.gate.label} of {first.site}"
    what += f" to {stream_words(first.stream) or 'every stream'}" if first.gate.streams else ""
    form = "%.1f" if abs(step * 10 - round(step * 10)) < 1e-9 else "%.2f"
    a.slider(f"Set {what} to", low, high, step=step, key="gates_slider", format=form, on_change=moved)
    with a.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.caption(" ".join(_told(each, alone=len(alike) == 1) for each in alike))
        if state["gates_value"] is not None:
            st.button(f"Back to {'A' if first.side.letter == 'A' else 'B'} {first.plain}", key="gates_back",
                      on_click=_back, type="tertiary")  # fmt: skip
    for each in PARAMETERS:  # a run of this part alone does not reach the frame
        said = each.write(state[each.key])
        if said and st.query_params.get(each.key) != said:
            st.query_params[each.key] = said
        elif not said and each.key in st.query_params:
            del st.query_params[each.key]
    return float(value)


def chosen(focus: Focus, at: str) -> float:
    """The value that was chosen, or else where the model is: at the position, or on average over the prompt."""
    value = st.session_state["gates_value"]
    if value is not None:
        return float(value)
    own = focus.here_and_there
    return float(own[focus.pos] if at == "position" else own.mean())


def _told(focus: Focus, *, alone: bool) -> str:
    """Where the model is: what the slider starts from."""
    own = focus.here_and_there
    who = focus.plain[:1].upper() + focus.plain[1:] if alone else f"{focus.side.letter} {focus.plain}"
    return (
        f"{who}: mean {fmt(float(own.mean()), 3)} over the prompt, {fmt(float(own.min()), 3)} to "
        f"{fmt(float(own.max()), 3)}; {fmt(float(own[focus.pos]), 3)} at position {focus.pos}."
    )


def curve_picture(focus: Focus, at: str, alike: Sequence[Focus], value: float, **look: Any) -> str:
    """What becomes of the prediction over the values of the gate, with this one marked."""
    where = "" if at == "all" else f" at position {focus.pos} alone"
    title = f"{focus.head}: what if {focus.site} had another {focus.gate.label}{where}?"
    limits = draw.curve_limits([curve_of(each, at, alike).dataset for each in alike])
    data = curve_of(focus, at, alike).dataset
    return draw.curve(data, value, limits=limits, title=title, plain=focus.plain, **look)


def curve_of(focus: Focus, at: str, alike: Sequence[Focus]) -> Finding:
    return focus.side.analyse("gates-curve", curve_options(focus, at, alike))


def curve_options(focus: Focus, at: str, alike: Sequence[Focus]) -> dict[str, Any]:
    low, high = span(alike)
    options: dict[str, Any] = {"site": focus.site, "pos": focus.pos, "at": at, "steps": STEPS}
    options |= {} if focus.gate.limits == (low, high) else {"low": low, "high": high}
    return options | ({} if focus.stream == EVERY else {"stream": focus.stream})


def _back() -> None:
    st.session_state["gates_value"] = None

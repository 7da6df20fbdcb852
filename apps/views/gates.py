"""The page of gates: what every write is multiplied by, sublayer by sublayer and token by token, and what another gate
does. Deep Delta Learning's beta, the streams of Hyper-Connections, and any gate on writes that a trace has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import streamlit as st

from t2lens.analysis.gates import write_gate
from t2lens.apps import beta_gates, write_gates
from t2lens.apps.beta_gates import STYLE, spectrum_of
from t2lens.apps.export import Download, export_menu, figures, stem, theme
from t2lens.apps.frame import Frame, Page, Refusal, Side
from t2lens.apps.gate_focus import EVERY, Focus, beside, found_of, show, stream_words
from t2lens.apps.gate_slider import PARAMETERS, chosen, curve_of, curve_options, curve_picture, slider
from t2lens.apps.nodes import move, nearest, places
from t2lens.apps.snippets import analysis_code
from t2lens.apps.state import OVER, one_of, passages, text
from t2lens.apps.words import tell
from t2lens.viz.colors import ThemeName
from t2lens.viz.ddl_report import report
from t2lens.viz.labels import clip, glyphs

__all__ = ["PAGE"]

BY = ("beta", "regime")
_SHOWN = ("ddl-cc-ec", "mhc")
"""Models with gates, for who has chosen none."""


def gates(frame: Frame) -> None:
    st.html(STYLE)
    able = [side for side in frame.sides if write_gate(side.loaded.model) is not None]
    if not able:
        _without(frame)
        return
    found, notices = {}, []
    with st.spinner("Reading the gates ..."):
        for side in able:
            try:
                found[side.letter] = found_of(side)
            except Refusal as error:  # the other side may have them
                notices.append(str(error))
    tell([*notices, *(_said(side) for side in frame.sides if side not in able)])
    if not found:
        return
    focused = _choices(frame, _focused(frame, found))
    if len(focused) == 1:
        row = st.container(horizontal=True, gap="medium")
        left, middle, right = (row.container(width=430, key=f"gates-{i}") for i in range(3))
        with left:
            _map(frame, focused[0], focused, 430)
        with right:
            slider(focused, 430)
        with middle:
            _sublayer(frame, focused[0], focused, 430)
    elif len(_alike(focused[0], focused)) > 1:
        beside(focused, lambda each: _map(frame, each, focused, 560))
        slider(focused, 560)
        beside(focused, lambda each: _sublayer(frame, each, focused, 560))
    else:
        beside(focused, lambda each: _apart(frame, each, focused))
    _export(frame, focused)


def _alike(focus: Focus, focused: Sequence[Focus]) -> list[Focus]:
    """The sides whose gates are of the same kind, which share their scales."""
    return [each for each in focused if each.gate.label == focus.gate.label]


# --- what is chosen --------------------------------------------------------------------------------------------------


def _focused(frame: Frame, found: dict[str, Any]) -> list[Focus]:
    """The chosen node in every side: the same sublayer, or the one at the same relative depth; the position as the two
    prompts are aligned."""
    at, cell = places(frame), frame.state["cell"]
    focused, notices = [], []
    for side, pos in zip(frame.sides, at, strict=True):
        gate = write_gate(side.loaded.model)
        if side.letter not in found or gate is None:
            continue
        if pos is None:
            pos = nearest(frame, side)
            notices.append(f"{side.letter} has no such position in its prompt; showing {pos}.")
        site = _write_near(cell.site, frame.sides[cell.panel].sites, side.sites)
        focused.append(Focus(side=side, gate=gate, tokens=found[side.letter], site=site, pos=pos))
    tell(notices)
    return focused


def _write_near(site: str, own: list[str], others: list[str]) -> str:
    """The sublayer of the name in `others`, or the one at the same relative depth; all from "embed" to "out"."""
    writes = others[1:-1]
    if site in writes:
        return site
    depth = (own.index(site) - 1) / max(len(own) - 3, 1)
    return writes[min(max(round(depth * (len(writes) - 1)), 0), len(writes) - 1)]


def _choices(frame: Frame, focused: list[Focus]) -> list[Focus]:
    """The node and what is shown of it, also without a pointer; the sides with the stream that is looked at."""
    state, first = frame.state, focused[0]
    writes = [str(site) for site in first.tokens["site"].values]
    words = [clip(glyphs(str(token)), 14) for token in first.tokens["token"].values]
    streams = list(dict.fromkeys(name for each in focused for name in each.gate.streams))
    state["gates_site"], state["gates_pos"] = first.site, first.pos
    if state["gates_stream"] not in streams:
        state["gates_stream"] = EVERY

    def moved() -> None:
        move(panel=first.side.panel, pos=state["gates_pos"], site=state["gates_site"])

    a, b, c, d, e, _ = st.columns([1.2, 1.8, 1.8, 1.8, 1.8, 2.5], vertical_alignment="bottom")
    a.selectbox("Sublayer", writes, key="gates_site", on_change=moved)
    b.selectbox(
        "Position",
        range(len(words)),
        format_func=lambda i: f"{i} {words[i]}",
        key="gates_pos",
        on_change=moved,
    )
    beside_ = {key: words if key == "prompt" else f"the prompt, {words}" for key, words in OVER.items()}
    c.selectbox("Histogram over", list(OVER), format_func=beside_.__getitem__, key="gates_over")
    if any(each.erases for each in focused):
        d.segmented_control("Colour of the map", BY, key="gates_by", required=True)
        d = e
    if streams:
        said = {EVERY: "all, on average"} | {name: stream_words(name) for name in streams}
        d.selectbox("Written to", list(said), format_func=said.__getitem__, key="gates_stream")
    stream = str(state["gates_stream"])
    return [replace(each, stream=stream if stream in each.gate.streams else EVERY) for each in focused]


# --- the map and the chosen sublayer ---------------------------------------------------------------------------------


def _map(frame: Frame, focus: Focus, focused: list[Focus], width: int) -> None:
    part = beta_gates if focus.erases else write_gates
    part.left(focus, _pictures(focus, focused, frame.state["gates_by"]), width)


def _pictures(focus: Focus, focused: list[Focus], by: str) -> dict[str, Callable[..., str]]:
    """Pictures of a side by name, as they are shown and as they are taken home."""
    alike = _alike(focus, focused)
    return beta_gates.pictures(focus, alike, by) if focus.erases else write_gates.pictures(focus, alike)


def _sublayer(frame: Frame, focus: Focus, focused: list[Focus], width: int) -> None:
    """Histogram of the chosen sublayer, and what is known of the chosen token; ranges are shared between sides."""
    place, n, alike = st.empty(), passages(frame.state["gates_over"]), _alike(focus, focused)
    for what, draw in _pictures(focus, focused, frame.state["gates_by"]).items():
        if what in ("spectrum", "streams"):
            show(focus.side, f"gate-{what}", draw(width=width))
    with place.container():  # last, as the passages may take a while
        over: list[Any] = [None] * len(alike)
        if n:
            with st.spinner(f"Running {n} passages ...", show_time=True):
                over = [found_of(each.side, passages=n).dataset for each in alike]
        part = beta_gates if focus.erases else write_gates
        part.histogram(focus, over[alike.index(focus)], list(zip(alike, over, strict=True)), width)


def _apart(frame: Frame, focus: Focus, focused: list[Focus]) -> None:
    """A side whose gates are of another kind than the other's: a column of its own, and the slider is A's."""
    _map(frame, focus, focused, 560)
    if focus is focused[0]:
        slider([focus], 560)
    else:
        first, own = focused[0], focus.gate.label
        which = f"{first.gate.label} of {first.side.letter}"
        tell([f"The slider sets the {which}; to set the {own}, choose this model as A."])
    _sublayer(frame, focus, focused, 560)


# --- systems without gates, and what can be taken home ---------------------------------------------------------------


def _without(frame: Frame) -> None:
    which = "neither model here has any" if len(frame.sides) > 1 else "this model has none"
    st.text(
        "A gate says how much of what a sublayer puts out is written, token by token: beta of Deep Delta Learning, the "
        f"write weights of Hyper-Connections, the transform gates of Highway; {which}."
    )
    tell([_said(side) for side in frame.sides])

    def switch(name: str) -> None:
        st.session_state["model_a"] = name

    with st.container(horizontal=True, vertical_alignment="center"):
        for i, name in enumerate(_SHOWN):
            kind: Any = "secondary" if i else "primary"
            st.button(f"Show {name} as A", key=f"gates_switch_{name}", on_click=switch, args=(name,), type=kind)
        pages = st.session_state.get("pages", ())
        for page in pages:
            if page.url_path == "depth-routing" and any(_weighs(side) for side in frame.sides):
                st.page_link(page, label="To the weights of its reads: Depth routing")


def _said(side: Side) -> str:
    """What a side is that has no gates on its writes, and where to look."""
    head = f"{side.letter}, {side.name}: {side.loaded.model.cfg.residual.describe()}."
    if _weighs(side):
        return (
            f"{head} It has no gates on its writes: each read chooses among earlier ones by weights of its own, which "
            "Depth routing shows."
        )
    return (
        f"{head} It has no gates: every write is added to the stream as it is, and every read is the whole sum; what "
        "each write then contributes is on Depth routing."
    )


def _weighs(side: Side) -> bool:
    """Whether its reads have weights of their own."""
    return any("hook_depth_attn" in name for name in side.loaded.model.hook_dict)


def _export(frame: Frame, focused: list[Focus]) -> None:
    """Pictures as they are shown, every number of them, and the audit of each side as a page of its own."""
    state = frame.state
    n, at = passages(state["gates_over"]) or 8, str(state["gates_at"])
    found: list[Download] = []
    for each in focused:
        alike = _alike(each, focused)
        name = stem("gates", each.side.letter.lower() if len(focused) > 1 else "", each.side.name)
        of = f"{each.side.letter} " if len(focused) > 1 else ""
        drawn = _pictures(each, focused, state["gates_by"])
        numbers = ["tokens", *(["spectrum"] if each.erases else [])]
        if each in _alike(focused[0], focused):
            drawn["curve"] = functools.partial(_curve, each, at, alike, theme())
            numbers.append("curve")
        for what, make in drawn.items():
            found += figures(f"{of}{what}", f"{name}-{what}", make)
        for what in numbers:
            make = functools.partial(_numbers_of, each, what, at, alike)
            found.append(Download(f"{of}{what} (JSON)", f"{name}-{what}.json", make))
        if each.erases:
            make = functools.partial(_audit_of, each.side, n)
            found.append(Download(f"{of}audit, {n} passages (HTML)", f"{name}-audit.html", make))
    options = curve_options(focused[0], at, _alike(focused[0], focused))
    code = analysis_code(focused[0].side, "gates-curve", options)
    with frame.tools:
        export_menu(found, code=code, key="gates-export")


def _curve(each: Focus, at: str, alike: list[Focus], look: ThemeName) -> str:
    """At the value that is chosen when it is asked for: the slider runs without the page."""
    return curve_picture(each, at, alike, chosen(alike[0], at), theme=look)


def _numbers_of(each: Focus, what: str, at: str, alike: list[Focus]) -> bytes:
    make = {"tokens": lambda: each.tokens, "spectrum": lambda: spectrum_of(each)}
    return make.get(what, lambda: curve_of(each, at, alike))().to_json()


def _audit_of(side: Side, n: int) -> bytes:
    return report(side.analyse("ddl", passages=n)).encode()


PAGE = Page(
    path="gates",
    title="Gates",
    draw=gates,
    parameters=(
        one_of("gates_by", BY, "beta"),
        one_of("gates_over", list(OVER), "8"),
        text("gates_stream"),
        *PARAMETERS,
    ),
)

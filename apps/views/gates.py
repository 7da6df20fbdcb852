"""The page of gates: Deep Delta Learning's beta, sublayer by sublayer and token by token, and what another one does."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import streamlit as st
import xarray as xr

from t2lens.analysis.finding import Chart, Finding
from t2lens.apps.components.picture import picture
from t2lens.apps.edits import changed, entries, put, written
from t2lens.apps.export import Download, export_menu, figures, stem, theme
from t2lens.apps.frame import Frame, Page, Refusal, Side
from t2lens.apps.nodes import move, nearest, places
from t2lens.apps.snippets import analysis_code
from t2lens.apps.state import OVER, Parameter, one_of, passages
from t2lens.apps.words import tell
from t2lens.viz import gates as draw
from t2lens.viz.colors import ThemeName, regimes
from t2lens.viz.ddl_report import report
from t2lens.viz.labels import clip, fmt, glyphs
from t2lens.viz.pictures import picture as chart_picture

__all__ = ["PAGE"]

BY = ("beta", "regime")
AT = {"all": "all positions", "position": "the chosen position"}
STEPS = 20
"""Steps of the slider from 0 to 2, which are those of the curve: so a slider along it runs nothing."""

_MODEL = "ddl-cc-ec"
_STYLE = """<style>
.t2-regimes {border-collapse: collapse; width: 100%; font-size: 0.8rem; font-variant-numeric: tabular-nums;}
.t2-regimes th {font-weight: 400; opacity: 0.7; border-bottom: 1px solid rgb(128 128 128 / 0.4);}
.t2-regimes th, .t2-regimes td {text-align: right; padding: 2px 6px; white-space: nowrap;}
.t2-regimes th:first-child, .t2-regimes td:first-child, .t2-regimes th:last-child, .t2-regimes td:last-child
{text-align: left;}
.t2-regimes td:last-child {overflow: hidden; text-overflow: ellipsis; max-width: 11rem; unicode-bidi: plaintext;}
.t2-regimes i {display: inline-block; width: 9px; height: 9px; margin-right: 6px;}
</style>"""


@dataclass(frozen=True, kw_only=True)
class Focus:
    """A side with gates, and the node that is looked at in it. tokens: the finding of its prompt."""

    side: Side
    tokens: Finding
    site: str
    pos: int

    @property
    def head(self) -> str:
        return self.side.head

    @property
    def here(self) -> str:
        return f"position {self.pos}, {glyphs(str(self.tokens['token'].values[self.pos]))}"


def gates(frame: Frame) -> None:
    st.html(_STYLE)
    others = [side for side in frame.sides if not _has_beta(side)]
    if len(others) == len(frame.sides):
        _for_others(frame)
        return
    found, notices = {}, []
    with st.spinner("Reading the gates ..."):
        for side in frame.sides:
            if side not in others:
                try:
                    found[side.letter] = _gates_of(side)
                except Refusal as error:  # the other side may have them
                    notices.append(str(error))
    tell([*notices, *(_said(side) for side in others)])
    if not found:
        return
    focused = _focused(frame, [side for side in frame.sides if side.letter in found], found)
    _choices(frame, focused[0])
    width = 430 if len(focused) == 1 else 560
    if len(focused) == 1:
        row = st.container(horizontal=True, gap="medium")
        left, middle, right = (row.container(width=width, key=f"gates-{i}") for i in range(3))
        with left:
            _map(frame, focused[0], width)
        with right:
            _other(focused, width)
        with middle:
            _sublayer(frame, focused[0], focused, width)
    else:
        _beside(focused, lambda each: _map(frame, each, width))
        _other(focused, width)
        _beside(focused, lambda each: _sublayer(frame, each, focused, width))
    for side in others:
        _gate_of(side)
    _export(frame, focused)


def _gates_of(side: Side) -> Finding:
    """The gates of every token of the prompt. Refusal: there are none that can be drawn."""
    finding = side.analyse("gates-tokens")
    if broken := int((~np.isfinite(finding["beta"].values)).sum()):
        raise side.refusal(f"{broken} of its gates are NaN or infinite, so nothing that is made of them is shown.")
    return finding


def _has_beta(side: Side) -> bool:
    return side.loaded.model.cfg.residual.kind == "ddl"


def _beside(focused: list[Focus], show: Callable[[Focus], None]) -> None:
    """What `show` draws of every side with gates, side by side."""
    for each, place in zip(focused, st.columns(len(focused), gap="medium"), strict=True):
        with place:
            show(each)


# --- what is chosen --------------------------------------------------------------------------------------------------


def _focused(frame: Frame, able: list[Side], found: dict[str, Finding]) -> list[Focus]:
    """The chosen node in every side: the same sublayer, or the one at the same relative depth; the position as the two
    prompts are aligned."""
    at, cell = places(frame), frame.state["cell"]
    focused, notices = [], []
    for side, pos in zip(frame.sides, at, strict=True):
        if side not in able:
            continue
        if pos is None:
            pos = nearest(frame, side)
            notices.append(f"{side.letter} has no such position in its prompt; showing {pos}.")
        site = _write_near(cell.site, frame.sides[cell.panel].sites, side.sites)
        focused.append(Focus(side=side, tokens=found[side.letter], site=site, pos=pos))
    tell(notices)
    return focused


def _write_near(site: str, own: list[str], others: list[str]) -> str:
    """The sublayer of the name in `others`, or the one at the same relative depth; all from "embed" to "out"."""
    writes = others[1:-1]
    if site in writes:
        return site
    depth = (own.index(site) - 1) / max(len(own) - 3, 1)
    return writes[min(max(round(depth * (len(writes) - 1)), 0), len(writes) - 1)]


def _choices(frame: Frame, focus: Focus) -> None:
    """The node and what is shown of it, also without a pointer."""
    state = frame.state
    writes = [str(site) for site in focus.tokens["site"].values]
    words = [clip(glyphs(str(token)), 14) for token in focus.tokens["token"].values]
    state["gates_site"], state["gates_pos"] = focus.site, focus.pos

    def moved() -> None:
        move(panel=focus.side.panel, pos=state["gates_pos"], site=state["gates_site"])

    a, b, c, d, _ = st.columns([1.2, 1.8, 1.9, 1.8, 4], vertical_alignment="bottom")
    a.selectbox("Sublayer", writes, key="gates_site", on_change=moved)
    b.selectbox(
        "Position",
        range(len(words)),
        format_func=lambda i: f"{i} {words[i]}",
        key="gates_pos",
        on_change=moved,
    )
    c.segmented_control("Colour of the map", BY, key="gates_by", required=True)
    beside = {key: words if key == "prompt" else f"the prompt, {words}" for key, words in OVER.items()}
    d.selectbox("Histogram over", list(OVER), format_func=beside.__getitem__, key="gates_over")


def _draw(side: Side, name: str, svg: str) -> None:
    picture(svg, key=f"{name}-{side.letter}", panel=side.panel)


# --- the map and the chosen sublayer ---------------------------------------------------------------------------------


def _map(frame: Frame, focus: Focus, width: int) -> None:
    data = focus.tokens.dataset
    title = f"{focus.head}: beta of every write{'' if data.attrs['erases'] else ', which is its size'}"
    look: dict[str, Any] = {"site": focus.site, "pos": focus.pos, "theme": theme(), "width": width}
    _draw(focus.side, "gate-map", draw.gate_map(data, by=frame.state["gates_by"], title=title, **look))
    _draw(focus.side, "gate-strip", draw.strip(data, title=f"The prompt at {focus.site}", **look))
    st.html(_table(focus))
    tell(list(focus.tokens.notes[1:]))  # the first says what the table shows


def _table(focus: Focus) -> str:
    """Tokens of the chosen sublayer by regime: how many, and means over them."""
    names, colors = focus.tokens.columns, regimes(theme())
    rows = [dict(zip(names, row, strict=True)) for row in focus.tokens.rows if row[0] == focus.site]
    shown = ["tokens", *(name for name in ("beta", "erased", "written", "alignment") if name in names)]
    first = "regime" if focus.tokens.dataset.attrs["erases"] else "beta"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in (first, *shown, "commonest"))
    body = []
    for row, color in zip(rows, colors, strict=True):
        cells = [f'<td><i style="background:{color}"></i>{html.escape(str(row["regime"]))}</td>']
        cells += [f"<td>{_number(row[name])}</td>" for name in shown]
        common = " ".join(glyphs(token) for token in str(row["commonest"]).split(" | "))
        cells.append(f"<td>{html.escape(common) if row['tokens'] else ''}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table class="t2-regimes"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def _number(value: Any) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else fmt(float(value), 3)


def _sublayer(frame: Frame, focus: Focus, focused: list[Focus], width: int) -> None:
    """Histogram of the chosen sublayer, and the spectrum at the chosen token; ranges are shared between sides."""
    at = focused.index(focus)
    place, n = st.empty(), passages(frame.state["gates_over"])
    spectra = [_spectrum(each).dataset for each in focused]
    look: dict[str, Any] = {"site": focus.site, "theme": theme(), "width": width}
    title = f"{focus.head}: steps at {focus.here}"
    limits = draw.spectrum_limits(spectra)
    _draw(focus.side, "gate-spectrum", draw.spectrum(spectra[at], limits=limits, title=title, **look))
    with place.container():  # last, as the passages may take a while
        over: list[Any] = [None] * len(focused)
        if n:
            with st.spinner(f"Running {n} passages ...", show_time=True):
                over = [each.side.analyse("gates-tokens", passages=n).dataset for each in focused]
        most = max(draw.most_in_a_bin(each.tokens.dataset, o, each.site) for each, o in zip(focused, over, strict=True))
        svg = draw.histogram(
            focus.tokens.dataset, over[at], limits=most, title=f"{focus.head}: beta of {focus.site}", **look
        )
        _draw(focus.side, "gate-histogram", svg)


# --- another beta ----------------------------------------------------------------------------------------------------


@st.fragment
def _other(focused: list[Focus], width: int) -> None:
    """The slider, and what it does to the prediction at the chosen position."""
    first = focused[0]
    beta, at = _slider(first, beside=len(focused) > 1)
    try:
        with st.spinner("Running other gates ...", show_time=True):
            curves = [_curve(each, at).dataset for each in focused]
    except Refusal as error:  # what a fragment raises does not reach the frame
        tell([str(error)])
        return
    limits = draw.curve_limits(curves)
    most = max(float(max(c["plain_probability"].max(), c["probability"].max())) for c in curves) * 1.02

    def show(each: Focus) -> None:
        data = curves[focused.index(each)]
        look: dict[str, Any] = {"theme": theme(), "width": width}
        title = f"{each.head}: next token after {each.here}"
        _draw(each.side, "gate-tokens", draw.next_tokens(data, beta, most=most, title=title, **look))
        st.caption(draw.kl_words(data, beta))
        title = f"{each.head}: beta of {each.site} at {AT[at]}"
        _draw(each.side, "gate-curve", draw.curve(data, beta, limits=limits, title=title, **look))

    _beside(focused, show)
    if first.side.letter == "A":
        where = {"positions": [first.pos]} if at == "position" else {}
        edit = {"target": "gate", "name": "beta", "site": first.site, "operation": "set", "value": beta, **where}
        if st.button("Keep this as an edit of A", key="gates_keep", on_click=_keep, args=(edit,)):
            st.rerun()
    tell([st.session_state.pop("gates_said")] if "gates_said" in st.session_state else [])


def _slider(focus: Focus, *, beside: bool) -> tuple[float, str]:
    """The chosen beta and where it is set."""
    state = st.session_state
    a, b = st.columns([3, 2], vertical_alignment="bottom") if beside else (st.container(), st.container())
    beta = a.slider(f"Set beta of {focus.site} to", 0.0, 2.0, step=2 / STEPS, key="gates_beta", format="%.1f")
    at = b.segmented_control(
        "at", list(AT), format_func=AT.__getitem__, key="gates_at", required=True, label_visibility="collapsed"
    )
    for name in ("gates_beta", "gates_at"):  # a run of this part alone does not reach the frame
        written = _PARAMETERS[name].write(state[name])
        if st.query_params.get(name, written) != written:
            st.query_params[name] = written
    return float(beta), str(at)


def _curve(focus: Focus, at: str) -> Finding:
    return focus.side.analyse("gates-curve", _curve_options(focus, at))


def _curve_options(focus: Focus, at: str) -> dict[str, Any]:
    return {"site": focus.site, "pos": focus.pos, "at": at, "steps": STEPS}


def _spectrum(focus: Focus) -> Finding:
    return focus.side.analyse("gates-spectrum", {"pos": focus.pos})


def _keep(edit: dict[str, Any]) -> None:
    state = st.session_state
    try:
        put(written(changed(entries(state["edits"]), "add", value=edit)))
    except ValueError as error:
        state["gates_said"] = str(error)


# --- other systems, and what can be taken home -----------------------------------------------------------------------


def _for_others(frame: Frame) -> None:
    st.text(
        "This page is for models of Deep Delta Learning, whose gate beta says how much of the state every write "
        "replaces; neither model here has it."
        if len(frame.sides) > 1
        else "This page is for models of Deep Delta Learning, whose gate beta says how much of the state every write "
        "replaces; this one has none."
    )

    def switch() -> None:
        st.session_state["model_a"] = _MODEL

    st.button(f"Show {_MODEL} as A", key="gates_switch", on_click=switch, type="primary")
    tell([_said(side) for side in frame.sides])
    for side in frame.sides:
        _gate_of(side)


def _said(side: Side) -> str:
    """What a side is that has no beta."""
    label, system = _other_gate(side), side.loaded.model.cfg.residual.describe()
    what = f"Its {label} is shown below." if label else "It has no gates on its writes."
    return f"{side.letter}, {side.name}: {system}. {what}"


def _other_gate(side: Side) -> str:
    """The name of another gate that the trace of a side has, or nothing."""
    data = side.trace().dataset
    return data["gate"].attrs.get("label") or "gate" if "gate" in data else ""


def _gate_of(side: Side) -> None:
    """The other gate over the prompt: its map and its histogram."""
    data, label = side.trace().dataset, _other_gate(side)
    if not label:
        return
    gate = data["gate"].rename(write="site").transpose("site", "pos")
    finding = _of_trace(gate, data["token"].values if "token" in data else None, label)
    for i, place in enumerate(st.columns(2, gap="medium")):
        with place:
            svg = chart_picture(finding, i, theme=theme(), width=560, title=f"{side.head}: {label}")
            _draw(side, f"gate-other-{i}", svg)


def _of_trace(gate: Any, tokens: Any, label: str) -> Finding:
    """Any gate of a trace, as a map and as a histogram over its whole range."""
    values = gate.values
    low, high = gate.attrs.get("range") or (float(np.nanmin(values)), float(np.nanmax(values)))
    edges = np.linspace(low, high if high > low else low + 1, 41)
    dataset = xr.Dataset(
        {
            "gate": (("site", "pos"), values, {"meaning": label, "unit": ""}),
            "count": ("bin", np.histogram(values, edges)[0], {"meaning": f"writes by {label}", "unit": "writes"}),
        },
        coords={
            "site": gate["site"].values,
            "pos": np.arange(values.shape[1]),
            "bin": np.round((edges[:-1] + edges[1:]) / 2, 6),
        },
    )
    if tokens is not None:
        dataset = dataset.assign_coords(token=("pos", tokens))
    charts = (
        Chart(kind="heat", variable="gate", x="pos", y="site"),
        Chart(kind="bars", variable="count", x="bin"),
    )
    return Finding(title=label, dataset=dataset, columns=(), rows=(), charts=charts)


def _export(frame: Frame, focused: list[Focus]) -> None:
    """Pictures as they are shown, every number of them, and the audit of each side as a page of its own."""
    state, look = frame.state, theme()
    n, at = passages(state["gates_over"]) or 8, state["gates_at"]
    chosen = {"by": state["gates_by"], "at": at, "beta": state["gates_beta"], "look": look}
    found: list[Download] = []
    for each in focused:
        name = stem("gates", each.side.letter.lower() if len(focused) > 1 else "", each.side.name)
        of = f"{each.side.letter} " if len(focused) > 1 else ""
        for what in ("map", "tokens", "spectrum", "curve"):
            found += figures(f"{of}{what}", f"{name}-{what}", functools.partial(_picture_of, each, what, **chosen))
        for what in ("tokens", "spectrum", "curve"):
            make = functools.partial(_numbers_of, each, what, at)
            found.append(Download(f"{of}{what} (JSON)", f"{name}-{what}.json", make))
        make = functools.partial(_audit_of, each.side, n)
        found.append(Download(f"{of}audit, {n} passages (HTML)", f"{name}-audit.html", make))
    code = analysis_code(focused[0].side, "gates-curve", _curve_options(focused[0], at))
    with frame.tools:
        export_menu(found, code=code, key="gates-export")


def _picture_of(each: Focus, what: str, *, by: str, at: str, beta: float, look: ThemeName) -> str:
    data: dict[str, Any] = {"site": each.site, "theme": look}
    if what == "map":
        return draw.gate_map(each.tokens.dataset, pos=each.pos, by=by, title=f"{each.head}: beta", **data)
    if what == "tokens":
        return draw.strip(each.tokens.dataset, pos=each.pos, title=f"{each.head}: {each.site}", **data)
    if what == "spectrum":
        return draw.spectrum(_spectrum(each).dataset, title=f"{each.head}: steps at {each.here}", **data)
    title = f"{each.head}: beta of {each.site} at {AT[at]}"
    return draw.curve(_curve(each, at).dataset, beta, title=title, theme=look)


def _numbers_of(each: Focus, what: str, at: str) -> bytes:
    return {"tokens": lambda: each.tokens, "spectrum": lambda: _spectrum(each), "curve": lambda: _curve(each, at)}[
        what
    ]().to_json()


def _audit_of(side: Side, passages: int) -> bytes:
    return report(side.analyse("ddl", passages=passages)).encode()


def _read_beta(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise ValueError("which is no number from 0 to 2")
    return round(value * STEPS / 2) * 2 / STEPS


_PARAMETERS = {
    each.key: each
    for each in (
        one_of("gates_by", BY, "beta"),
        one_of("gates_over", list(OVER), "8"),
        one_of("gates_at", list(AT), "all"),
        Parameter(key="gates_beta", default=0.0, read=_read_beta, write=lambda value: f"{value:.3g}"),
    )
}

PAGE = Page(path="gates", title="Gates", draw=gates, parameters=tuple(_PARAMETERS.values()))

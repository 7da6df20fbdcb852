"""What the page of gates draws of Deep Delta Learning's beta: map, tokens by regime, histogram, spectrum."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import streamlit as st

from t2lens.analysis.finding import Finding
from t2lens.apps.export import theme
from t2lens.apps.gate_focus import Focus, show
from t2lens.apps.words import plain, tell
from t2lens.viz import gates as draw
from t2lens.viz.colors import THEMES, regimes
from t2lens.viz.labels import fmt, glyphs

__all__ = ["STYLE", "histogram", "left", "pictures", "spectrum_of"]

STYLE = """<style>
.t2-regimes {border-collapse: collapse; width: 100%; font-size: 0.8rem; font-variant-numeric: tabular-nums;}
.t2-regimes th {font-weight: 400; opacity: 0.7; border-bottom: 1px solid rgb(128 128 128 / 0.4);}
.t2-regimes th, .t2-regimes td {text-align: right; padding: 2px 6px; white-space: nowrap;}
.t2-regimes th:first-child, .t2-regimes td:first-child, .t2-regimes th:last-child, .t2-regimes td:last-child
{text-align: left;}
.t2-regimes td:last-child {overflow: hidden; text-overflow: ellipsis; max-width: 11rem; unicode-bidi: plaintext;}
.st-key-gates_by button {min-height: 2.5rem;}
.t2-regimes i {display: inline-block; box-sizing: border-box; width: 10px; height: 10px; margin-right: 6px;}
</style>"""


def pictures(focus: Focus, alike: Sequence[Focus], by: str) -> dict[str, Callable[..., str]]:
    """Name -> what draws it, as wide as it is told. alike: the sides that share its scales; by: colour of the map."""
    data, head = focus.tokens.dataset, focus.head
    look: dict[str, Any] = {"site": focus.site, "theme": theme()}
    node = look | {"pos": focus.pos}
    what = "replaces" if data.attrs["erases"] else "adds"

    def spectrum(**size: Any) -> str:
        limits = draw.spectrum_limits([spectrum_of(each).dataset for each in alike])
        title = f"{head}: what the writes keep at {focus.here}"
        return draw.spectrum(spectrum_of(focus).dataset, limits=limits, title=title, **look, **size)

    return {
        "map": partial(draw.gate_map, data, by=by, title=f"{head}: how much each write {what} (beta)", **node),
        "tokens": partial(draw.strip, data, title=f"{head}: what {focus.site} does to each token", **node),
        "spectrum": spectrum,
    }


def left(focus: Focus, made: Mapping[str, Callable[..., str]], width: int) -> None:
    """The map of all writes, and the prompt at the chosen sublayer. made: of `pictures`."""
    show(focus.side, "gate-map", made["map"](width=width))
    st.caption(f"Beta: {focus.gate.meaning}")
    show(focus.side, "gate-strip", made["tokens"](width=width))
    st.caption(_here(focus))
    st.html(_table(focus))
    tell(list(focus.tokens.notes[1:]))  # the first says what the table shows


def _here(focus: Focus) -> str:
    """What the chosen sublayer does at the chosen token, in numbers."""
    data = focus.tokens.dataset
    here = data.sel(site=focus.site).isel(pos=focus.pos)
    beta, erased, written = (fmt(float(here[name]), 3) for name in ("beta", "erased", "written"))
    does = f"it erases {erased} and writes" if data.attrs["erases"] else "it erases nothing and writes"
    return plain(f"{focus.site} at {focus.here}: beta {beta}; {does} {written} (squared length in the state).")


def _table(focus: Focus) -> str:
    """Tokens of the chosen sublayer by regime: how many, and means over them."""
    erases = bool(focus.tokens.dataset.attrs["erases"])
    names, colors = focus.tokens.columns, regimes(theme(), erases=erases)
    rows = [dict(zip(names, row, strict=True)) for row in focus.tokens.rows if row[0] == focus.site]
    shown = ["tokens", *(name for name in ("beta", "erased", "written", "alignment") if name in names)]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("regime" if erases else "beta", *shown, "commonest"))
    body, line = [], THEMES[theme()].mute
    for row, color in zip(rows, colors, strict=True):
        square = f'<i style="background:{color};border:0.7px solid {line}"></i>'
        cells = [f"<td>{square}{html.escape(str(row['regime']))}</td>"]
        cells += [f"<td>{_number(row[name])}</td>" for name in shown]
        common = " ".join(glyphs(token) for token in str(row["commonest"]).split(" | "))
        cells.append(f"<td>{html.escape(common) if row['tokens'] else ''}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table class="t2-regimes"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def _number(value: Any) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else fmt(float(value), 3)


def histogram(focus: Focus, over: Any | None, alike: Sequence[tuple[Focus, Any]], width: int) -> None:
    """Beta of the chosen sublayer over tokens. alike: the sides that share its scale, with their passages or None."""
    most = max(draw.most_in_a_bin(each.tokens.dataset, o, each.site) for each, o in alike)
    title = f"{focus.head}: beta of {focus.site} over tokens"
    svg = draw.histogram(
        focus.tokens.dataset, over, site=focus.site, limits=most, title=title, theme=theme(), width=width
    )
    show(focus.side, "gate-histogram", svg)


def spectrum_of(focus: Focus) -> Finding:
    """Eigenvalues of the steps at the chosen token, and singular values of their products."""
    return focus.side.analyse("gates-spectrum", {"pos": focus.pos})

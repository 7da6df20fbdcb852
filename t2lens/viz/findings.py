"""Findings as plotly figures, as HTML and as text. What does not exist (NaN) is blank, never a zero."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go

from t2lens.viz.charts import palette
from t2lens.viz.colors import FONT, THEMES, ramp
from t2lens.viz.labels import fmt, markup_safe, one_line
from t2lens.viz.series import Axis, Series, series

__all__ = ["cell", "figure", "fragment", "text"]

LIGHT = THEMES["light"]
SERIES = LIGHT.series
TABLE_ROWS = 40
ROUNDING = 1e-12  # of the largest number of a column


def figure(finding: Any, chart: int = 0) -> go.Figure:
    """A plotly figure of one of the charts of a finding. IndexError where there is no such chart."""
    made = series(finding, chart)
    return {"heat": _heat, "scatter": _scatter}.get(made.kind, _marks)(go.Figure(layout=_layout(made)), made)


def _layout(made: Series) -> dict[str, Any]:
    axis = {"showgrid": False, "zeroline": False, "linecolor": LIGHT.hair, "ticks": "outside", "tickcolor": LIGHT.hair}
    return {
        "title": {"text": markup_safe(made.title), "font": {"size": 14}, "x": 0, "xref": "paper"},
        "font": {"family": FONT, "color": LIGHT.ink, "size": 11},
        "paper_bgcolor": LIGHT.paper,
        "plot_bgcolor": LIGHT.paper,
        "margin": {"l": 80, "r": 30, "t": 44, "b": 60},
        "height": 380,
        "xaxis": axis,
        "yaxis": axis,
        "hoverlabel": {
            "bgcolor": LIGHT.paper,
            "bordercolor": LIGHT.hair,
            "font": {"size": 12, "color": LIGHT.ink},
        },
        "legend": {"y": 1, "yanchor": "top", "x": 1.01, "xanchor": "left"},
        "showlegend": any(made.names),
    }


def _ticks(axis: Axis, room: int = 64) -> dict[str, Any]:
    step = max(1, -(-len(axis) // room))
    words = [markup_safe(word) for word in axis.words]
    return {"title": axis.label, "tickvals": list(range(0, len(words), step)), "ticktext": words[::step]}


def _across(plain: go.Figure, axis: Axis) -> None:
    plain.update_xaxes(tickangle=-60 if max(map(len, axis.words), default=0) > 3 else 0, **_ticks(axis))


def _spelled(made: Series, *index: int) -> str:
    return "<br>".join(markup_safe(line) for line in made.tip(*index).split("\n"))


def _heat(plain: go.Figure, made: Series) -> go.Figure:
    assert made.y is not None
    values = made.values.astype(float)
    finite = values[np.isfinite(values)]
    most = float(np.abs(finite).max()) if finite.size else 1.0
    low = -most if made.signed else float(min(finite.min(), 0.0)) if finite.size else 0.0
    colors = ramp("both" if made.signed else "cool")
    n_rows, n_columns = len(made.y), len(made.x)
    plain.add_heatmap(
        z=values,
        colorscale=[(i / (len(colors) - 1), color) for i, color in enumerate(colors)],
        zmin=low,
        zmax=most if most > low else low + 1,
        customdata=[[_spelled(made, r, c) for c in range(n_columns)] for r in range(n_rows)],
        hovertemplate="%{customdata}<extra></extra>",
        colorbar={
            "title": {"text": markup_safe(made.label), "side": "right"},
            "thickness": 10,
            "outlinewidth": 0,
        },
        hoverongaps=False,
        xgap=0.5,
        ygap=0.5,
    )
    _across(plain, made.x)
    plain.update_yaxes(**_ticks(made.y, 48))
    return plain.update_layout(height=max(260, min(760, 130 + 15 * n_rows)), plot_bgcolor=LIGHT.blank)


def _scatter(plain: go.Figure, made: Series) -> go.Figure:
    assert made.across is not None and made.group is not None
    colors = palette(made.names, "light", made.by)
    for i, name in enumerate(made.names):
        mine = np.flatnonzero(made.group == i)
        plain.add_scatter(
            x=made.across[mine],
            y=made.values[mine],
            mode="markers",
            name=markup_safe(name),
            marker={"size": 6, "color": colors[i], "opacity": 0.7},
            customdata=[_spelled(made, k) for k in mine.tolist()],
            hovertemplate="%{customdata}<extra></extra>",
        )
    plain.update_xaxes(title=markup_safe(made.x.label))
    plain.update_yaxes(title=markup_safe(made.label))
    return plain.add_hline(y=0, line_width=1, line_color=LIGHT.hair)


def _marks(plain: go.Figure, made: Series) -> go.Figure:
    """Bars, stacked bars or lines over one axis."""
    for i, name in enumerate(made.names):
        line = {
            "x": list(range(len(made.x))),
            "y": made.values[i],
            "name": markup_safe(name),
            "customdata": [_spelled(made, i, k) for k in range(len(made.x))],
            "hovertemplate": "%{customdata}<extra></extra>",
            "marker_color": SERIES[i % len(SERIES)],
        }
        if made.kind == "lines":
            plain.add_scatter(mode="lines+markers", **line)
        else:
            plain.add_bar(**line)
    if made.kind == "stack":
        plain.update_layout(barmode="stack", bargap=0.15)
    _across(plain, made.x)
    plain.update_yaxes(title=markup_safe(made.label))
    return plain.add_hline(y=0, line_width=1, line_color=LIGHT.hair)


# --- as HTML and as text -----------------------------------------------------------------------------


def cell(value: Any, largest: float = 0.0) -> str:
    """An entry of a table: numbers to four digits, and ~0 where one is rounding beside the `largest` of its column;
    tokens on one line with a sign for what is unseen; nothing for what does not exist."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float | np.floating):
        return "~0" if 0 < abs(value) < ROUNDING * largest else fmt(float(value))
    if not isinstance(value, str):
        return str(value)
    return one_line(value) if value else ""


def _cells(finding: Any, n_rows: int) -> list[list[str]]:
    """The first rows of the table as they are shown."""
    largest = []
    for i in range(len(finding.columns)):
        numbers = [abs(row[i]) for row in finding.rows if isinstance(row[i], float)]
        largest.append(max((x for x in numbers if np.isfinite(x)), default=0.0))
    return [[cell(value, most) for value, most in zip(row, largest, strict=True)] for row in finding.rows[:n_rows]]


def fragment(finding: Any) -> str:
    """Title, verdict, table and notes as HTML, for notebooks and reports."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in finding.columns)
    shown = _cells(finding, TABLE_ROWS)
    rows = ["".join(map(_td, row, words)) for row, words in zip(finding.rows, shown, strict=False)]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    more = len(finding.rows) - len(rows)
    notes = [*([f"{more} more rows."] if more > 0 else []), *finding.notes]
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    verdict = "" if finding.passed is None else f" \u2014 {'passed' if finding.passed else 'FAILED'}"
    return (
        f"<div style='font-family:{FONT};color:{LIGHT.ink};font-size:13px'>"
        f"<p><b>{html.escape(finding.title)}{verdict}</b></p>"
        f"<table style='border-collapse:collapse'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<ul style='color:{LIGHT.mute};font-size:12px;padding-left:1.2em'>{listed}</ul></div>"
    )


def _td(value: Any, shown: str) -> str:
    side = "right" if isinstance(value, int | float) and not isinstance(value, bool) else "left"
    return f"<td style='text-align:{side};padding:1px 10px 1px 0'>{html.escape(shown)}</td>"


def text(finding: Any, n_rows: int = TABLE_ROWS) -> str:
    """Title, verdict, table and notes as plain text in columns."""
    shown = _cells(finding, n_rows)
    numeric = [
        bool(finding.rows) and all(r[i] is None or isinstance(r[i], int | float) for r in finding.rows)
        for i in range(len(finding.columns))
    ]
    widths = [max(len(name), *(len(row[i]) for row in shown), 0) for i, name in enumerate(finding.columns)]

    def line(row: Any) -> str:
        words = (w.rjust(n) if right else w.ljust(n) for w, n, right in zip(row, widths, numeric, strict=True))
        return "  ".join(words).rstrip()

    more = len(finding.rows) - len(shown)
    verdict = "" if finding.passed is None else f": {'passed' if finding.passed else 'FAILED'}"
    lines = [finding.title + verdict, "", line(finding.columns), line(["-" * n for n in widths]), *map(line, shown)]
    lines += [f"({more} more rows)"] if more > 0 else []
    return "\n".join([*lines, *(["", *(f"- {note}" for note in finding.notes)] if finding.notes else [])])

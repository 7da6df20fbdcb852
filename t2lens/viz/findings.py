"""Findings as figures, as HTML and as text: one rule for every analysis.

A coordinate `pos` with token strings beside it (`token(pos)`) is labelled with them, on a numeric axis, so that
repeated tokens stay apart. What does not exist (NaN) is blank, never a zero.
"""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go

from t2lens.viz.colors import FONT, THEMES, ramp
from t2lens.viz.labels import clip, fmt, glyphs, markup_safe

__all__ = ["cell", "figure", "fragment", "text"]

LIGHT = THEMES["light"]
SERIES = LIGHT.series
TABLE_ROWS = 40
ROUNDING = 1e-12  # of the largest number of a column
_LABEL, _TITLE = 14, 80  # characters of an axis label, and of a title made of what a variable means


def figure(finding: Any, chart: int = 0) -> go.Figure:
    """A plotly figure of one of the charts of a finding. IndexError where there is no such chart."""
    if not 0 <= chart < len(finding.charts):
        raise IndexError(f"This finding has {len(finding.charts)} chart(s); there is no chart {chart}.")
    spec = finding.charts[chart]
    plain = go.Figure(layout=_layout(spec, finding))
    return {"heat": _heat, "scatter": _scatter, "bars": _bars, "stack": _stack, "lines": _lines}[spec.kind](
        plain, finding.dataset, spec
    )


def _layout(spec: Any, finding: Any) -> dict[str, Any]:
    meaning = clip(finding.dataset[spec.variable].attrs.get("meaning", ""), _TITLE)
    title = spec.title or meaning[:1].upper() + meaning[1:] or finding.title
    axis = {"showgrid": False, "zeroline": False, "linecolor": LIGHT.hair, "ticks": "outside", "tickcolor": LIGHT.hair}
    return {
        "title": {"text": markup_safe(title), "font": {"size": 14}, "x": 0, "xref": "paper"},
        "font": {"family": FONT, "color": LIGHT.ink, "size": 11},
        "paper_bgcolor": LIGHT.paper,
        "plot_bgcolor": LIGHT.paper,
        "margin": {"l": 80, "r": 30, "t": 44, "b": 60},
        "height": 380,
        "xaxis": axis,
        "yaxis": axis,
        "hoverlabel": {"bgcolor": LIGHT.paper, "bordercolor": LIGHT.hair, "font": {"size": 12, "color": LIGHT.ink}},
        "legend": {"y": 1, "yanchor": "top", "x": 1.01, "xanchor": "left"},
        "showlegend": bool(spec.by),
    }


def _chosen(data: Any, spec: Any, *keep: str) -> Any:
    """The variable with the axes `keep`, in that order, any other axis at the index that the chart names."""
    array, at = data[spec.variable], dict(spec.at)
    array = array.isel({dim: at.get(str(dim), -1) for dim in array.dims if str(dim) not in keep})
    return array.transpose(*keep)


def _words(data: Any, axis: str) -> list[str]:
    """What stands at each place of an axis."""
    source = "token" if axis in ("pos", "query", "key") and "token" in data.coords else axis
    if source not in data.coords or data[source].ndim != 1:
        return [str(i) for i in range(data.sizes[axis])]
    values = data[source].values
    if values.dtype.kind == "f":
        return [fmt(float(value)) for value in values]
    return [markup_safe(clip(glyphs(str(word)), _LABEL)) for word in values]


def _named(spec: Any, variable: Any) -> str:
    name, unit = spec.variable.replace("_", " "), variable.attrs.get("unit", "")
    return markup_safe(spec.label or (f"{name} ({unit})" if unit and unit not in name else name))


def _ticks(words: list[str], room: int = 64) -> dict[str, Any]:
    step = max(1, -(-len(words) // room))
    return {"tickvals": list(range(0, len(words), step)), "ticktext": words[::step]}


def _heat(plain: go.Figure, data: Any, spec: Any) -> go.Figure:
    array = _chosen(data, spec, spec.y, spec.x)
    values = array.values.astype(float)
    finite = values[np.isfinite(values)]
    most = float(np.abs(finite).max()) if finite.size else 1.0
    low = -most if spec.signed else float(min(finite.min(), 0.0)) if finite.size else 0.0
    colors = ramp("both" if spec.signed else "cool")
    columns, rows = _words(data, spec.x), _words(data, spec.y)
    spelled = [[f"{spec.y} {row}<br>{spec.x} {i} {word}" for i, word in enumerate(columns)] for row in rows]
    plain.add_heatmap(
        z=values,
        colorscale=[(i / (len(colors) - 1), color) for i, color in enumerate(colors)],
        zmin=low,
        zmax=most if most > low else low + 1,
        customdata=spelled,
        hovertemplate="%{customdata}<br>%{z:.4g}<extra></extra>",
        colorbar={"title": {"text": _named(spec, array), "side": "right"}, "thickness": 10, "outlinewidth": 0},
        hoverongaps=False,
        xgap=0.5,
        ygap=0.5,
    )
    plain.update_xaxes(title=spec.x, tickangle=-60 if max(map(len, columns), default=0) > 3 else 0, **_ticks(columns))
    plain.update_yaxes(title=spec.y, **_ticks(rows, 48))
    return plain.update_layout(height=max(260, min(760, 130 + 15 * len(rows))), plot_bgcolor=LIGHT.blank)


def _scatter(plain: go.Figure, data: Any, spec: Any) -> go.Figure:
    y, x = data[spec.variable], data[spec.x]
    points = x.transpose(*y.dims).values.ravel()
    labels = [", ".join(f"{d} {w}" for d, w in zip(y.dims, place, strict=True)) for place in _places(data, y.dims)]
    group = (
        np.broadcast_to(data[spec.by].values.reshape([-1 if str(d) == spec.by else 1 for d in y.dims]), y.shape)
        if (spec.by)
        else np.zeros(y.shape, int)
    )
    for i, name in enumerate(dict.fromkeys(group.ravel().tolist())):
        mine = group.ravel() == name
        plain.add_scatter(
            x=points[mine],
            y=y.values.ravel()[mine],
            mode="markers",
            name=str(name),
            marker={"size": 6, "color": SERIES[i % len(SERIES)], "opacity": 0.7},
            customdata=[label for label, is_mine in zip(labels, mine, strict=True) if is_mine],
            hovertemplate="%{customdata}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
        )
    unit = x.attrs.get("unit", "")
    plain.update_xaxes(title=markup_safe(f"{spec.x.replace('_', ' ')}{f' ({unit})' if unit else ''}"))
    plain.update_yaxes(title=_named(spec, y))
    return plain.add_hline(y=0, line_width=1, line_color=LIGHT.hair)


def _places(data: Any, dims: Any) -> list[tuple[str, ...]]:
    words = [_words(data, str(dim)) for dim in dims]
    shape = tuple(len(each) for each in words)
    return [tuple(each[i] for each, i in zip(words, place, strict=True)) for place in np.ndindex(shape)]


def _series(plain: go.Figure, data: Any, spec: Any, add: Any) -> go.Figure:
    array = _chosen(data, spec, *([spec.by] if spec.by else []), spec.x)
    names = _words(data, spec.by) if spec.by else [""]
    values = array.values if spec.by else array.values[None]
    words = _words(data, spec.x)
    for i, name in enumerate(names):
        add(
            x=list(range(len(words))),
            y=values[i],
            name=name,
            customdata=words,
            hovertemplate=f"%{{customdata}}<br>%{{y:.4g}}<extra>{name}</extra>",
            marker_color=SERIES[i % len(SERIES)],
        )
    plain.update_xaxes(title=spec.x, tickangle=-60 if max(map(len, words), default=0) > 3 else 0, **_ticks(words))
    plain.update_yaxes(title=_named(spec, array))
    return plain.add_hline(y=0, line_width=1, line_color=LIGHT.hair)


def _bars(plain: go.Figure, data: Any, spec: Any) -> go.Figure:
    return _series(plain, data, spec, plain.add_bar)


def _stack(plain: go.Figure, data: Any, spec: Any) -> go.Figure:
    return _bars(plain, data, spec).update_layout(barmode="stack", bargap=0.15)


def _lines(plain: go.Figure, data: Any, spec: Any) -> go.Figure:
    def add(**line: Any) -> None:
        plain.add_scatter(mode="lines+markers", **line)

    return _series(plain, data, spec, add)


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
    inner = value.strip(" ")
    before = len(value) - len(value.lstrip(" ")) if inner else 0
    words = " ".join(map(glyphs, inner.split(" "))) if inner else ""
    return "\u00b7" * before + words + "\u00b7" * (len(value) - before - len(inner))


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

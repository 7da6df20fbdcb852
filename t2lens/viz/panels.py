"""Drawing of `figures`: panels of cells with a shared colour scale and a caption, as one plotly figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from t2lens.viz.colors import FONT, THEMES, shade
from t2lens.viz.labels import clip, fmt, markup_safe

__all__ = ["MASKED", "NO_SOURCE", "Panel", "Scale", "draw"]

NO_SOURCE, MASKED = 1, 2

LIGHT = THEMES["light"]

STOPS = 32  # steps of a colour scale
MARKS = 6000  # single marks on exact zeros; above that the caption only counts them
SPELLED = 128  # columns or rows up to which hovering spells out both labels of a cell
LINE = 15  # pixels of a line of the caption
GAP, LEFT, TOP, BAR = 86, 74, 40, 92  # pixels between panels, left of them, above them, and for a colour bar


@dataclass(kw_only=True)
class Panel:
    """One map: values [row, column] and, of each cell, whether it is a value (0), NO_SOURCE or MASKED."""

    name: str
    z: np.ndarray
    kind: np.ndarray
    x: list[str]
    y: list[str]
    hover_x: list[str]
    hover_y: list[str]
    note: str = ""
    empty: str = ""  # why there is nothing to draw
    down: bool = False  # rows run downwards
    square: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Pixels of the drawing area."""
        columns = self.z.shape[1]
        return max(110, round(self.cell * columns)) if self.square else max(170, min(720, 26 * columns))

    @property
    def height(self) -> int:
        rows = self.z.shape[0]
        return round(self.cell * rows) if self.square else round(min(16, 640 / rows) * rows)

    @property
    def cell(self) -> float:
        return max(1.5, min(20.0, 380 / max(self.z.shape)))

    @property
    def level(self) -> bool:
        """Whether the column labels fit side by side."""
        return max(len(clip(word, 14)) for word in self.x) * 6.0 < self.width / len(self.x)

    @property
    def room(self) -> int:
        """Pixels that the column labels need."""
        return 14 if self.level else 4 + round(5.4 * max(len(clip(word, 14)) for word in self.x))


# fractions of the ramp at which the bar of a scale is labelled; of the range where it is signed
_TICKS = {"linear": (0, 0.25, 0.5, 0.75, 1), "root": (0, 0.224, 0.5, 1), "log": (0, 0.6, 0.8, 1)}
_SIGNED_TICKS = ((0, 0.25, 0.5, 0.75, 1), (0, 0.375, 0.5, 0.625, 1))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A colour scale. Signed: diverging around 0. Colour goes with the value, its square root or its logarithm."""

    label: str
    lo: float
    hi: float
    signed: bool = False
    above: int = 0
    warp: Literal["linear", "root", "log"] = "linear"

    @property
    def range(self) -> tuple[float, float]:
        low = -self.hi if self.signed else self.lo
        return low, (self.hi if self.hi > low else low + 1)

    def axis(self, x: float, height: int) -> dict[str, Any]:
        """A plotly coloraxis with its bar at x (a fraction of the drawing area)."""
        ramp = "both" if self.signed else "warm" if self.warp == "root" else "cool"
        low, high = self.range
        stops = [(self._place(i / STOPS), shade(ramp, i / STOPS)) for i in range(STOPS + 1)]
        part = _SIGNED_TICKS[self.warp == "root"] if self.signed else [self._place(f) for f in _TICKS[self.warp]]
        ticks = [low + f * (high - low) for f in part]
        ticks = [low, *(float(f"{t:.2g}") if abs(t) > 1e-9 * high else 0.0 for t in ticks[1:-1]), high]
        text = [fmt(t, 3) for t in ticks]
        text[-1] += " or more" if self.above else ""
        bar = {
            "title": {"text": self.label + ("" if self.warp == "linear" else f", {self.warp} scale"), "side": "right"},
            "tickvals": ticks,
            "ticktext": text,
            "tickfont": {"size": 10, "color": LIGHT.mute},
            "x": x,
            "xanchor": "left",
            "xpad": 0,
            "ypad": 0,
            "thickness": 10,
            "outlinewidth": 0,
            "ticks": "outside",
            "ticklen": 3,
            "tickcolor": LIGHT.mute,
            "lenmode": "pixels",
            "len": height,
            "y": 1,
            "yanchor": "top",
        }
        return {"colorscale": stops, "cmin": low, "cmax": high, "colorbar": bar}

    def _place(self, f: float) -> float:
        """Where on the range, as a fraction, the colour at fraction `f` of the ramp stands."""
        if self.warp == "log":
            low, high = self.range
            return low * ((high / low) ** f - 1) / (high - low) if 0 < f < 1 else f
        if self.warp == "root":
            return (1 + (2 * f - 1) * abs(2 * f - 1)) / 2 if self.signed else f * f
        return f


def draw(
    panels: list[Panel],
    scale: Scale,
    traces: Sequence[Any],
    *,
    axes: tuple[str, str],
    about: str,
    hover: tuple[str, str, str],
    difference: bool,
) -> go.Figure:
    """One figure: the panels on `scale`, B - A on its own scale where asked for, and the caption.

    axes: what columns and rows are; about: the first line of the caption; hover: the words before the column,
    the row and the value of the hovered cell.

    Raises ValueError where there is nothing to subtract.
    """
    shown = [*panels, _difference(panels, axes)] if difference else panels
    figure = go.Figure()
    tall = max(panel.height for panel in shown)
    lefts, x = [], 0
    for i, panel in enumerate(shown):
        x += (BAR if difference and i == len(panels) else 0) + (GAP if i else 0)
        lefts.append(x)
        x += panel.width
    inner = x
    for i, panel in enumerate(shown):
        suffix = str(i + 1) if i else ""
        domain = [lefts[i] / inner, (lefts[i] + panel.width) / inner]
        name = markup_safe(panel.name)
        if len(panels) > 1 and i < 2:
            name = f"<b>{'AB'[i]}</b>  {name}"
        figure.add_annotation(
            text=name,
            x=domain[0],
            y=1,
            xref="paper",
            yref="paper",
            xanchor="left",
            yanchor="bottom",
            yshift=6,
            showarrow=False,
            font={"size": 13, "color": LIGHT.ink},
        )
        color = "coloraxis2" if difference and i == len(panels) else "coloraxis"
        top = _top_of(panel, scale) if i < len(panels) else None
        _cells(figure, panel, (f"x{suffix}", f"y{suffix}"), color, hover, axes, top)
        _axes(figure, panel, suffix, domain, panel.height / tall, axes, first=i == 0)
    after = (lefts[len(panels) - 1] + shown[len(panels) - 1].width + 14) / inner
    figure.update_layout(coloraxis=scale.axis(after, tall))
    if difference:
        finite = np.abs(shown[-1].z[np.isfinite(shown[-1].z)])
        most = float(finite.max()) if finite.size else 0.0
        own = Scale(
            label="B \u2212 A",
            lo=0.0,
            hi=most or 1.0,
            signed=True,
            warp=scale.warp if scale.warp == "root" else "linear",
        )
        figure.update_layout(coloraxis2=own.axis(1 + 14 / inner, tall))
    lines = _caption(panels, scale, traces, about, difference, max(64, (inner + BAR) // 6))
    below = max(panel.room for panel in shown) + 30
    figure.add_annotation(
        text="<br>".join(lines),
        x=0,
        y=0,
        xref="paper",
        yref="paper",
        xanchor="left",
        yanchor="top",
        yshift=-below,
        xshift=-LEFT + 10,
        align="left",
        showarrow=False,
        font={"size": 11, "color": LIGHT.mute},
    )
    bottom = below + LINE * len(lines) + 16
    figure.update_layout(
        width=LEFT + inner + BAR,
        height=TOP + tall + bottom,
        margin={"l": LEFT, "r": BAR, "t": TOP, "b": bottom},
        paper_bgcolor=LIGHT.paper,
        plot_bgcolor=LIGHT.paper,
        font={"family": FONT, "color": LIGHT.ink, "size": 11},
        hoverlabel={
            "bgcolor": LIGHT.paper,
            "bordercolor": LIGHT.hair,
            "font": {"size": 12, "color": LIGHT.ink},
            "align": "left",
        },
        showlegend=False,
        dragmode=False,
    )
    return figure


def _top_of(panel: Panel, scale: Scale) -> float | None:
    """The value above which a cell is marked, where cells may lie above the range."""
    return float(np.nextafter(panel.z.dtype.type(scale.hi), panel.z.dtype.type(np.inf))) if scale.above else None


def _cells(
    figure: go.Figure,
    panel: Panel,
    at: tuple[str, str],
    color: str,
    hover: tuple[str, str, str],
    axes: tuple[str, str],
    top: float | None,
) -> None:
    rows, columns = panel.z.shape
    z = panel.z.astype(np.float32) if panel.z.dtype == np.float16 else panel.z
    value = panel.kind == 0
    finite = np.isfinite(z) & value
    place = {"x": np.arange(columns), "y": np.arange(rows), "xaxis": at[0], "yaxis": at[1]}
    place |= {"xgap": 1 if panel.width >= 6 * columns else 0, "ygap": 1 if panel.height >= 6 * rows else 0}
    across, upward, what = hover
    text = custom = None
    template = f"{upward} %{{text}}<br>{across} %{{customdata}}<br>{what} %{{z:.6g}}<extra></extra>"
    if min(rows, columns) <= SPELLED:
        text = np.repeat(np.array([[markup_safe(y)] for y in panel.hover_y], dtype=object), columns, axis=1)
        custom = np.repeat(np.array([[markup_safe(x) for x in panel.hover_x]], dtype=object), rows, axis=0)
    else:
        template = f"{axes[1]} %{{y}}<br>{axes[0]} %{{x}}<br>{what} %{{z:.6g}}<extra></extra>"
    figure.add_trace(
        go.Heatmap(
            z=np.where(finite, z, np.nan),
            coloraxis=color,
            text=text,
            customdata=custom,
            hovertemplate=template,
            hoverongaps=False,
            **place,
        )
    )
    if (panel.kind == MASKED).any():
        masked = np.where(panel.kind == MASKED, np.float32(1), np.float32(np.nan))
        flat = {"colorscale": [[0, LIGHT.mask], [1, LIGHT.mask]], "showscale": False, "hoverinfo": "skip"}
        figure.add_trace(go.Heatmap(z=masked, **flat, **place))
    odd, zero = value & ~np.isfinite(z), finite & (z == 0)
    above = finite & (z >= top) if top is not None else np.zeros_like(finite)
    panel.counts = {
        "blank: no such source, or no value": int((panel.kind == NO_SOURCE).sum()),
        "grey: masked, a later position": int((panel.kind == MASKED).sum()),
        "cross: not a finite number": int(odd.sum()),
        "dot: exactly zero": int(zero.sum()),
        "triangle: above the range": int(above.sum()),
    }
    for cells, symbol, size, ink in (
        (odd, "x-thin", 7, LIGHT.mute),
        (zero, "circle", 2.5, LIGHT.mute),
        (above, "triangle-up", 6, LIGHT.paper),
    ):
        if 0 < cells.sum() <= MARKS:
            r, c = np.nonzero(cells)
            marker = {"symbol": symbol, "size": size, "color": ink, "line": {"width": 1, "color": ink}}
            figure.add_trace(
                go.Scatter(
                    x=c,
                    y=r,
                    xaxis=at[0],
                    yaxis=at[1],
                    mode="markers",
                    marker=marker,
                    hoverinfo="skip",
                    showlegend=False,
                )
            )
    if panel.empty:
        figure.add_annotation(
            text="<br>".join(_wrap(markup_safe(panel.empty), 34)),
            x=(columns - 1) / 2,
            y=(rows - 1) / 2,
            xref=at[0],
            yref=at[1],
            showarrow=False,
            font={"size": 12, "color": LIGHT.mute},
        )


def _axes(
    figure: go.Figure,
    panel: Panel,
    suffix: str,
    domain: list[float],
    share: float,
    axes: tuple[str, str],
    *,
    first: bool,
) -> None:
    rows, columns = panel.z.shape
    look = {"tickfont": {"size": 10, "color": LIGHT.mute}, "showgrid": False, "zeroline": False, "ticks": ""}
    look |= {"showline": True, "linecolor": LIGHT.hair, "mirror": True, "fixedrange": True}

    def ticks(n: int, pixels: int, words: list[str], most: int) -> dict[str, Any]:
        at = np.arange(0, n, max(1, -(-12 * n // pixels)))
        return {"tickvals": at, "ticktext": [markup_safe(clip(words[i], most)) for i in at]}

    def title(text: str) -> dict[str, Any]:
        return {"text": text, "font": {"size": 11, "color": LIGHT.mute}, "standoff": 5}

    figure.layout[f"xaxis{suffix}"] = {
        **look,
        **ticks(columns, columns * 99 if panel.level else panel.width, panel.x, 14),
        "tickangle": 0 if panel.level else -90,
        "range": [-0.5, columns - 0.5],
        "domain": domain,
        "anchor": f"y{suffix}",
        "title": title(axes[0]),
    }
    figure.layout[f"yaxis{suffix}"] = {
        **look,
        **ticks(rows, panel.height, panel.y, 10),
        "range": [rows - 0.5, -0.5] if panel.down else [-0.5, rows - 0.5],
        "domain": [1 - share, 1],
        "anchor": f"x{suffix}",
        "title": title(axes[1] if first else ""),
    }


def _difference(panels: list[Panel], axes: tuple[str, str]) -> Panel:
    if len(panels) != 2:
        raise ValueError("A difference B - A needs two traces.")
    a, b = panels
    for axis, ours, theirs in ((axes[1], a.y, b.y), (axes[0], a.x, b.x)):
        if ours != theirs:
            raise ValueError(f"The two traces do not share the axis {axis!r}, so B - A has no meaning there.")
    if a.empty or b.empty:
        raise ValueError(f"There is nothing to subtract: {a.empty or b.empty}.")
    z = np.subtract(b.z, a.z, dtype=np.result_type(a.z, b.z, np.float32))
    return Panel(
        name="B \u2212 A",
        z=z,
        kind=np.maximum(a.kind, b.kind),
        x=a.x,
        y=a.y,
        hover_x=a.hover_x,
        hover_y=a.hover_y,
        down=a.down,
        square=a.square,
    )


def _caption(
    panels: list[Panel], scale: Scale, traces: Sequence[Any], about: str, difference: bool, width: int
) -> list[str]:
    """What is shown, n, what is left out, the range, notices of the traces and how their checks came out."""
    two = len(panels) > 1
    low, high = scale.range
    n_values = " and ".join(str(int((panel.kind == 0).sum())) for panel in panels)
    count = {state: sum(panel.counts[state] for panel in panels) for state in panels[0].counts}
    states = [f"{state} ({n})" for state, n in count.items() if n]
    line = f"n = {n_values} values; {'one range for A and B' if two else 'range'} {fmt(low, 3)} to {fmt(high, 3)}"
    lines = [about, "; ".join([line, *states]) + "."]
    if difference:
        lines.append("B \u2212 A has a range of its own, centred at 0.")
    lines += _told([f"{panel.note}." if panel.note else "" for panel in panels])
    lines += _told([" ".join(trace.notices) for trace in traces])
    lines += _told([_checked(trace) for trace in traces])
    return [
        f'<span style="color:{LIGHT.bad}"><b>{part}</b></span>' if "FAILED" in line else part
        for line in lines
        for part in map(markup_safe, _wrap(line, width))
    ]


def _checked(trace: Any) -> str:
    checks = trace.verify()
    failed = [check.name for check in checks if not check.passed]
    return f"FAILED: {', '.join(failed)}. Do not trust this picture." if failed else f"verified, {len(checks)} checks."


def _told(words: list[str]) -> list[str]:
    """One line per trace, with its letter where there are two, or one line where both say the same."""
    if len(words) == 1 or words[0] == words[1]:
        letter = "A and B: " if len(words) > 1 else ""
        return [letter + words[0]] if words[0] else []
    return [f"{letter}: {text}" for letter, text in zip("AB", words, strict=True) if text]


def _wrap(text: str, width: int) -> list[str]:
    lines: list[str] = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines

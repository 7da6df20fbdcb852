"""Scatter plots: axes on which what is small is not one heap, and a few dots named at the end of leader lines.

Which dots are named is a rule that can be said (those of the largest sizes on either axis), and a name never lies on
another one, nor on a named dot: what finds no room keeps its name for the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from t2lens.viz.colors import THEMES, ThemeName
from t2lens.viz.depth_map import KINDS, kind_of
from t2lens.viz.labels import clip, fmt
from t2lens.viz.svg import TEXT, Plot, mark, round_ticks, say, text_width

__all__ = ["NAMED", "Bend", "Cloud", "Range", "bend", "draw_cloud", "family_of", "largest", "limits_for", "scale_of"]

Range = tuple[float, float]
Bend = Literal["linear", "root", "log"]

NAMED = 6
"""Dots that have a name beside them, at most."""

_SAID = {"linear": "", "root": "square-root scale", "log": "log scale"}
_ROOM = 0.03  # of an axis, at either end
_DIRECTIONS = np.linspace(0, 2 * math.pi, 16, endpoint=False)
_AWAY = (12, 18, 26, 36, 50, 68, 90, 120)  # pixels from a dot to its name
_SIZE = 10.0


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """Finite dots. x, y: [dot]; names, tips, nodes (as `mark` takes it), colors: of each; ringed: [dot], bool.

    floor: where y is logarithmic, the value below which there is nothing but rounding: such dots lie at it.
    """

    x: np.ndarray
    y: np.ndarray
    names: Sequence[str]
    tips: Sequence[str]
    nodes: Sequence[dict[str, Any]]
    colors: Sequence[str]
    ringed: np.ndarray
    floor: float = 0.0

    @property
    def drawn_y(self) -> np.ndarray:
        return np.maximum(self.y, self.floor) if self.floor else self.y


def bend(values: Any, kind: Bend) -> np.ndarray:
    """Values as they lie on an axis: "root" is the square root of the size, with the sign; "log" needs what is above 0.

    >>> bend([-4, 0, 9], "root").tolist(), bend(100, "log").tolist()
    ([-2.0, 0.0, 3.0], 2.0)
    """
    values = np.asarray(values, float)
    if kind == "root":
        return np.copysign(np.sqrt(np.abs(values)), values)
    return np.log10(values) if kind == "log" else values


def scale_of(*values: np.ndarray) -> Bend:
    """ "root" where half of the values lie within a fifth of the largest size around 0, else "linear"."""
    sizes = np.abs(np.concatenate([each[np.isfinite(each)] for each in values] or [np.zeros(0)]).astype(float))
    return "root" if sizes.size >= 8 and sizes.max() > 0 and np.median(sizes) < 0.2 * sizes.max() else "linear"


def limits_for(values: np.ndarray, kind: Bend = "linear") -> Range:
    """The range of values, which holds 0 where they are near it and the scale has one."""
    finite = values[np.isfinite(values)].astype(float)
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if kind == "root" or (kind == "linear" and 0 < low < 0.5 * high):
        low, high = min(low, 0.0), max(high, 0.0)
    return low, high


def family_of(name: str, held: Sequence[str] = ()) -> str:
    """Of what kind a source is, in words; held: the atoms in it at each read.

    >>> family_of("3.attn"), family_of("stream2"), family_of("anything")
    ('attention write', 'parallel stream', 'anything')
    """
    kind = kind_of(name, held or [name])
    return KINDS.get(kind, name)


def largest(x: np.ndarray, y: np.ndarray, n: int = NAMED) -> list[int]:
    """The dots of the largest sizes, those on y and those on x by turns, the largest first."""
    orders = [np.argsort(-np.abs(each), kind="stable").tolist() for each in (y, x)]
    both = (i for pair in zip(*orders, strict=True) for i in pair)
    return list(dict.fromkeys(both))[:n]


def draw_cloud(
    cloud: Cloud,
    *,
    bends: tuple[Bend, Bend],
    limits: tuple[Range, Range],
    labels: tuple[str, str],
    theme: ThemeName,
    size: tuple[int, int],
    title: str = "",
    top: int = 22,
    right: int = 12,
) -> tuple[Plot, list[int]]:
    """The dots of a cloud on their axes, and which have a name beside them. bends, limits (in values), labels: of x and
    y; size: pixels of the whole plot."""
    (xlow, xhigh), (ylow, yhigh) = (_bent(each, kind) for each, kind in zip(limits, bends, strict=True))
    xlabel, ylabel = (
        f"{label}, {_SAID[kind]}" if _SAID[kind] else label for label, kind in zip(labels, bends, strict=True)
    )
    inner_h = size[1] - top - 38
    yticks = _ticks(limits[1], bends[1], (ylow, yhigh), inner_h, 26)
    left = round(max((text_width(fmt(v, 3), TEXT) for v in yticks), default=0) + 27)
    look = THEMES[theme]
    plot = Plot(
        *size,
        (xlow, xhigh),
        (ylow, yhigh),
        title=title,
        top=top,
        left=left,
        right=right,
        bottom=38,
        theme=theme,
        xlabel=xlabel,
        ylabel=clip(ylabel, max(20, int(inner_h / 5))),
    )
    base, grid = plot.top + plot.inner_h, f'stroke="{look.hair}" stroke-width=".6" stroke-dasharray="1 3"'
    for value in yticks:
        at = plot.y(float(bend(value, bends[1])))
        plot.marks.append(f'<path d="M{plot.left} {at:.1f}h{plot.inner_w}" {grid}/>')
        plot.text(plot.left - 5, at + 3.5, fmt(value, 3), anchor="end")
    for value in _ticks(limits[0], bends[0], (xlow, xhigh), plot.inner_w, 44):
        at = plot.x(float(bend(value, bends[0])))
        plot.marks.append(f'<path d="M{at:.1f} {plot.top}v{plot.inner_h}" {grid}/>')
        plot.text(at, base + 15, fmt(value, 3), anchor="middle")
    for across, kind, (low, high) in ((True, bends[1], limits[1]), (False, bends[0], limits[0])):
        if kind != "log" and low < 0 < high:
            plot.line_at(0, across=across, color=look.mute)
    if not len(cloud.x):
        return plot.instead("no dot has both values"), []
    xs = np.array([plot.x(float(v)) for v in bend(cloud.x, bends[0])])
    ys = np.array([plot.y(float(v)) for v in bend(cloud.drawn_y, bends[1])])
    radius = 3.0 if len(xs) <= 200 else 2.4
    named = largest(cloud.x, cloud.drawn_y)
    leaders, kept = _names(plot, cloud, xs, ys, named, radius)
    last: list[int] = np.argsort(cloud.ringed, kind="stable").tolist()
    for i in last:
        place: dict[str, Any] = {"cx": float(xs[i]), "cy": float(ys[i]), "r": radius, "fill": cloud.colors[i]}
        edge = {"stroke": look.ink, "stroke_width": 1.3} if cloud.ringed[i] else {"stroke": look.paper}
        place |= {"fill_opacity": 0.85, **({"stroke_width": 0.5} | edge)}
        plot.marks.append(mark("circle", cloud.tips[i], cloud.nodes[i], **place))
    plot.marks += leaders
    return plot, kept


def _bent(limits: Range, kind: Bend) -> Range:
    """A range as it lies on its axis, with room at its ends."""
    low, high = bend(limits, kind).tolist()
    if high <= low:
        low, high = low - 0.5, high + 0.5
    return low - _ROOM * (high - low), high + _ROOM * (high - low)


def _ticks(limits: Range, kind: Bend, bent: Range, pixels: float, gap: float) -> list[float]:
    """Round values in a range, no two of them nearer to each other than `gap` pixels."""
    if kind == "log":
        return round_ticks(*bend(limits, "log").tolist(), log=True)
    low, high = limits
    if kind == "linear":
        return round_ticks(low, high, log=False) if high > low else [low]
    top = max(abs(low), abs(high)) or 1.0
    exponents = range(math.floor(math.log10(top)), math.floor(math.log10(top)) - 6, -1)
    sizes = [m * 10.0**e for e in exponents for m in (5, 3, 2, 1)]
    kept: list[float] = []
    per_pixel = (bent[1] - bent[0]) / pixels
    for value in [0.0, *(s * v for v in sizes for s in (1, -1))]:
        at = float(bend(value, "root"))
        far = all(abs(at - float(bend(other, "root"))) >= gap * per_pixel for other in kept)
        if low <= value <= high and far:
            kept.append(float(f"{value:.3g}"))
    return sorted(kept)


# --- names


def _names(
    plot: Plot, cloud: Cloud, xs: np.ndarray, ys: np.ndarray, named: list[int], radius: float
) -> tuple[list[str], list[int]]:
    """Elements of names and their leader lines, and the dots that got one."""
    out: list[str] = []
    kept: list[int] = []
    boxes: list[tuple[float, float, float, float]] = []
    lines: list[tuple[float, float, float, float]] = []
    for i in named:
        word = clip(cloud.names[i], 30)
        wide = text_width(word, _SIZE)
        best: tuple[float, Any, Any] | None = None
        for away in _AWAY:
            for angle in _DIRECTIONS:
                end = xs[i] + away * math.cos(angle), ys[i] + away * math.sin(angle)
                box = _box(*end, wide, angle)
                if not _inside(box, plot) or any(_meet(box, other, 3) for other in boxes):
                    continue
                line = (float(xs[i]), float(ys[i]), *end)
                if any(_crossed(box, each) for each in lines) or any(_crossed(other, line) for other in boxes):
                    continue
                cost = away + 30 * _under(box, xs, ys, radius) + 6 * _near(line, xs, ys, radius, i)
                cost += 200 * _under(box, xs[named], ys[named], radius + 2)
                cost += 150 * sum(_cross(line, other) for other in lines)
                if best is None or cost < best[0]:
                    best = cost, box, line
        if best is None or best[0] >= 150:
            continue
        _, box, line = best
        boxes.append(box)
        lines.append(line)
        kept.append(i)
        length = math.hypot(line[2] - line[0], line[3] - line[1])
        start = [line[k] + (line[k + 2] - line[k]) * radius / length for k in (0, 1)]
        path = f"M{start[0]:.1f} {start[1]:.1f}L{line[2]:.1f} {line[3]:.1f}"
        out.append(f'<path d="{path}" stroke="{plot.look.mute}" stroke-width=".8" pointer-events="none"/>')
        out.append(
            f'<text x="{box[0]:.1f}" y="{box[3] - 3:.1f}" font-size="{_SIZE:g}" fill="{plot.look.ink}" '
            f'stroke="{plot.look.paper}" stroke-width="3" stroke-linejoin="round" paint-order="stroke" '
            f'pointer-events="none">{say(word)}</text>'
        )
    return out, kept


def _box(x: float, y: float, wide: float, angle: float) -> tuple[float, float, float, float]:
    """x0, y0, x1, y1 of a name whose nearest edge is at the end of its leader line."""
    across, down = math.cos(angle), math.sin(angle)
    if abs(across) > 0.35:
        x0 = x + 2 if across > 0 else x - 2 - wide
        return x0, y - 6, x0 + wide, y + 6
    y0 = y + 1 if down > 0 else y - 13
    return x - wide / 2, y0, x + wide / 2, y0 + 12


def _inside(box: tuple[float, float, float, float], plot: Plot) -> bool:
    x0, y0, x1, y1 = box
    return (
        x0 >= plot.left + 3
        and x1 <= plot.left + plot.inner_w + 2
        and y0 >= plot.top
        and y1 <= plot.top + plot.inner_h - 2
    )


def _meet(a: tuple[float, ...], b: tuple[float, ...], room: float) -> bool:
    return a[0] < b[2] + room and b[0] < a[2] + room and a[1] < b[3] + room and b[1] < a[3] + room


def _under(box: tuple[float, ...], xs: np.ndarray, ys: np.ndarray, radius: float) -> int:
    """Dots that a box covers."""
    x0, y0, x1, y1 = box
    return int(((xs > x0 - radius) & (xs < x1 + radius) & (ys > y0 - radius) & (ys < y1 + radius)).sum())


def _near(line: tuple[float, ...], xs: np.ndarray, ys: np.ndarray, radius: float, own: int) -> int:
    """Dots that a line runs over, but its own."""
    x0, y0, x1, y1 = line
    dx, dy = x1 - x0, y1 - y0
    along = np.clip(((xs - x0) * dx + (ys - y0) * dy) / (dx * dx + dy * dy), 0, 1)
    over = np.hypot(xs - x0 - along * dx, ys - y0 - along * dy) < radius
    over[own] = False
    return int(over.sum())


def _cross(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    def side(p: tuple[float, ...], x: float, y: float) -> float:
        return (p[2] - p[0]) * (y - p[1]) - (p[3] - p[1]) * (x - p[0])

    return side(a, b[0], b[1]) * side(a, b[2], b[3]) < 0 and side(b, a[0], a[1]) * side(b, a[2], a[3]) < 0


def _crossed(box: tuple[float, ...], line: tuple[float, ...]) -> bool:
    """Whether a line runs through a box."""
    x0, y0, x1, y1 = box
    corners = ((x0, y0, x1, y1), (x0, y1, x1, y0))
    return any(_cross(each, line) for each in corners) or (x0 < line[2] < x1 and y0 < line[3] < y1)

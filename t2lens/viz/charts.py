"""Drawing of `pictures`: one chart as SVG, with axes, legend or colour bar beside it and notes below it."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from t2lens.analysis.statistics import spearman
from t2lens.viz.colors import THEMES, ThemeName, lut, regimes, shade
from t2lens.viz.depth_map import KINDS
from t2lens.viz.dots import Bend, Cloud, Range, draw_cloud, limits_for, scale_of
from t2lens.viz.labels import clip, fmt
from t2lens.viz.raster import image
from t2lens.viz.series import Axis, Series
from t2lens.viz.svg import HEAD, TEXT, Plot, keys, mark, paragraph, round_ticks, say, text_width, words, wrap

__all__ = ["Drawing", "Look", "cell_data", "draw", "limits_of"]

CELLS = 700  # cells of a heat map up to which each is an element of its own
BAR = 10  # width of a colour bar
LONG = 6  # characters of labels from which bars lie on their sides
_RIGHT = 14


@dataclass(frozen=True, kw_only=True)
class Look:
    """theme and width (pixels) of a chart, and what two charts share: limits of the values, of the other axis of a
    scatter (across) and its scales (bends, of x and y), and a colour for every name of a legend."""

    theme: ThemeName = "light"
    width: int = 560
    limits: Range | None = None
    across: Range | None = None
    bends: tuple[Bend, Bend] | None = None
    palette: tuple[str, ...] = ()


@dataclass
class Drawing:
    """The marks of one chart and the pixels that they take."""

    body: str
    width: float
    height: float
    about: str = ""
    notes: list[str] = field(default_factory=list)


def draw(made: Series, look: Look, *, title: str, notes: Sequence[str] = ()) -> Drawing:
    """One chart. The notes stand below it, after what must be said of the drawing itself."""
    theme = THEMES[look.theme]
    heads = wrap(title, look.width - 8, HEAD, bold=True)
    top = 8 + 17 * len(heads) + 8
    kind = {"heat": _heat, "scatter": _scatter, "lines": _lines}.get(made.kind, _bars)
    out = kind(made, look, top)
    above = [words(4, 20 + 17 * i, line, theme.ink, size=HEAD, bold=True) for i, line in enumerate(heads)]
    notes = [note for note in (*out.notes, *notes) if note]
    below, y = paragraph(notes, out.height - 2, look.width, look.theme)
    height = y + 14 if notes else out.height + 6
    about = f"{title}. {made.label}, {made.kind}. {' '.join(notes)}"
    return Drawing("".join([*above, out.body, below]), look.width, height, about)


def limits_of(made: Series) -> Range:
    """The range of the values that a chart shows by itself: heat maps and bars hold 0, signed maps are symmetric."""
    values = made.values.astype(float)
    if made.kind == "stack":
        whole = np.nan_to_num(np.where(np.isfinite(values), values, 0.0))
        values = np.stack([np.maximum(whole, 0).sum(axis=0), np.minimum(whole, 0).sum(axis=0)])
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if made.kind == "heat" and made.signed:
        return -max(-low, high), max(-low, high)
    if made.kind in ("heat", "bars", "stack") or 0 < low < 0.5 * high:
        low, high = min(low, 0.0), max(high, 0.0)
    return low, high


def _padded(limits: Range, share: float = 0.05) -> Range:
    low, high = limits
    room = (high - low) * share or abs(high) * share or 1.0
    return (low - room if low < 0 or low > 0 else low), high + room if high else high


# --- axes ----------------------------------------------------------------------------------------------


def _named_ticks(plot: Plot, axis: Axis, at: Sequence[float], *, turned: bool) -> None:
    """Labels below an area at the places `at`, thinned so that none touch another."""
    base = plot.top + plot.inner_h
    pitch = abs(plot.x(at[1]) - plot.x(at[0])) if len(at) > 1 else plot.inner_w
    room = TEXT + 1.5 if turned else max(text_width(word, TEXT) for word in axis.words) + 8
    step = max(1, math.ceil(room / max(pitch, 1e-9)))
    for i in range(0, len(axis), step):
        x = plot.x(at[i])
        plot.marks.append(f'<path d="M{x:.1f} {base:.1f}v3" stroke="{plot.look.hair}"/>')
        if turned:
            plot.marks.append(words(x + 3.6, base + 6, axis.words[i], plot.look.mute, anchor="end", upright=True))
        else:
            plot.text(x, base + 15, axis.words[i], anchor="middle")


def _row_ticks(plot: Plot, axis: Axis, at: Sequence[float]) -> None:
    pitch = abs(plot.y(at[1]) - plot.y(at[0])) if len(at) > 1 else plot.inner_h
    step = max(1, math.ceil((TEXT + 1) / max(pitch, 1e-9)))
    for i in range(0, len(axis), step):
        plot.text(plot.left - 6, plot.y(at[i]) + 3.6, axis.words[i], anchor="end")


def _turned(axis: Axis, width: float) -> bool:
    """Whether labels stand upright: words that do not fit side by side. Numbers are thinned instead."""
    widest = max((text_width(word, TEXT) for word in axis.words), default=0)
    numeric = all(word.replace(".", "").replace("-", "").isdigit() for word in axis.words)
    return not numeric and widest + 6 > width / max(len(axis), 1)


def _below(axis: Axis, turned: bool) -> int:
    """Pixels below an area: labels and the name of the axis."""
    widest = max((text_width(word, TEXT) for word in axis.words), default=0)
    return round(widest + 28 if turned else 38)


def _side(words: Sequence[str]) -> int:
    """Pixels at the left of an area: labels and the name of the axis."""
    return round(max((text_width(word, TEXT) for word in words), default=0) + 26)


def _value_words(low: float, high: float) -> list[str]:
    return [fmt(value, 3) for value in round_ticks(low, high, log=False)]


def _value_axis(plot: Plot, limits: Range) -> None:
    plot.yticks(round_ticks(*limits, log=False))
    if limits[0] < 0 < limits[1]:
        plot.line_at(0, color=plot.look.mute)


def _value_axis_below(plot: Plot, limits: Range) -> None:
    base, last = plot.top + plot.inner_h, -math.inf
    for value in round_ticks(*limits, log=False):
        x, half = plot.x(value), text_width(fmt(value, 3), TEXT) / 2
        plot.marks.append(
            f'<path d="M{x:.1f} {plot.top}v{plot.inner_h}" stroke="{plot.look.hair}" stroke-width=".6" '
            'stroke-dasharray="1 3"/>'
        )
        if x - half > last + 6:
            plot.text(x, base + 15, fmt(value, 3), anchor="middle")
            last = x + half
    if limits[0] < 0 < limits[1]:
        plot.line_at(0, across=False, color=plot.look.mute)


def _legend(made: Series, look: Look, x: float, y: float, *, line: bool = False) -> tuple[str, float]:
    """The names with their colours, and the y where they end; those of a stack in its order, the top one first."""
    theme, parts = THEMES[look.theme], []
    order = range(len(made.names))[::-1] if made.kind == "stack" else range(len(made.names))
    if made.by is not None:
        parts.append(words(x, y + 9, made.by.label, theme.mute))
        y += 17
    for i in order:
        key = (
            f'<path d="M{x:.1f} {y + 5:.1f}h12" stroke="{look.palette[i]}" stroke-width="2"/>'
            if line
            else f'<rect x="{x:.1f}" y="{y:.1f}" width="10" height="10" fill="{look.palette[i]}"/>'
        )
        parts.append(key + words(x + 17, y + 9, clip(made.names[i], 22), theme.ink))
        y += 16
    return "".join(parts), y


def _legend_width(made: Series) -> int:
    if made.names == ("",):
        return 0
    return round(max(text_width(clip(name, 22), TEXT) for name in made.names) + 34)


def palette(names: Sequence[str], theme: ThemeName, by: Axis | None = None) -> tuple[str, ...]:
    """A colour for each name: those of series; of regimes and of kinds of sources their own; steps of a ramp
    where the names are numbers, or more than there are colours."""
    colors = THEMES[theme].series
    if set(names) <= set(KINDS.values()):
        return tuple(colors[[*KINDS.values()].index(name)] for name in names)
    if by is not None and by.name == "regime" and len(names) == len(regimes(theme)):
        return regimes(theme)
    if len(names) <= len(colors) and (by is None or by.numbers is None or len(names) == 1):
        return colors[: len(names)]
    return tuple(shade("cool", 0.2 + 0.8 * i / (len(names) - 1), theme) for i in range(len(names)))


# --- kinds -----------------------------------------------------------------------------------------------


def _heat(made: Series, look: Look, top: int) -> Drawing:
    assert made.y is not None
    theme, (n_rows, n_columns) = THEMES[look.theme], made.values.shape
    low, high = look.limits or limits_of(made)
    high = high if high > low else low + 1
    bar_words = [fmt(low, 3), fmt(high, 3), *_value_words(low, high)]
    right = round(16 + BAR + 6 + max(text_width(word, TEXT) for word in bar_words) + 22)
    left = _side(made.y.words)
    inner_w = min(look.width - left - right, 84 * n_columns)
    inner_h = max(110.0, min(22.0, max(2.0, 400 / n_rows)) * n_rows)
    turned = _turned(made.x, inner_w)
    bottom = _below(made.x, turned)
    plot = Plot(
        left + inner_w + right,
        round(top + inner_h + bottom),
        (0, n_columns),
        (0, n_rows),
        top=top,
        left=left,
        right=right,
        bottom=bottom,
        theme=look.theme,
        ylabel=made.y.label,
        xlabel=made.x.label,
    )
    plot.marks.pop()  # a frame in place of two lines
    values = made.values.astype(float)
    ramp = "both" if made.signed else "cool"
    finite = np.isfinite(values)
    steps = np.clip(np.round(255 * (np.where(finite, values, low) - low) / (high - low)), 0, 255).astype(int)
    w, h = plot.inner_w / n_columns, plot.inner_h / n_rows
    if values.size <= CELLS and min(w, h) >= 4:
        colors = ["#" + bytes(row).hex() for row in lut(ramp, look.theme)]
        gap = 0.6 if min(w, h) >= 7 else 0.0
        for r, c in np.ndindex(values.shape):
            fill = colors[steps[r, c]] if finite[r, c] else "none"
            at = {"x": plot.left + c * w, "y": plot.y(r + 1), "width": w - gap, "height": h - gap}
            extra = {} if finite[r, c] else {"pointer_events": "all"}
            plot.marks.append(mark("rect", made.tip(r, c), made.node(r, c), **at, fill=fill, **extra))
        states = ((finite & (values == 0), "zero"), (~finite & ~np.isnan(values), "odd"))
        for cells, state in states:
            for r, c in zip(*np.nonzero(cells), strict=True):
                plot.marks.append(sign(state, plot.x(c + 0.5), plot.y(r + 0.5), theme.mute))
    else:
        table = np.concatenate([lut(ramp, look.theme), np.full((256, 1), 255, np.uint8)], axis=1)
        pixels = np.where(finite[..., None], table[steps], np.zeros(4, np.uint8)).astype(np.uint8)[::-1]
        place = (plot.left, plot.top, plot.inner_w, plot.inner_h)
        plot.marks.append(image(pixels, *place, data=cell_data(made)))
    plot.marks.append(
        f'<rect x="{plot.left}" y="{plot.top}" width="{plot.inner_w}" height="{plot.inner_h}" fill="none" '
        f'stroke="{theme.hair}" stroke-width=".8" pointer-events="none"/>'
    )
    _named_ticks(plot, made.x, [i + 0.5 for i in range(n_columns)], turned=turned)
    _row_ticks(plot, made.y, [i + 0.5 for i in range(n_rows)])
    plot.marks.append(_color_bar(plot, look, ramp, (low, high), made.label))
    notes = []
    missing, odd, zero = int(np.isnan(values).sum()), int((~finite & ~np.isnan(values)).sum()), int((values == 0).sum())
    over = int((finite & ((values > high) | (values < low))).sum())
    if missing:
        notes.append(f"blank: no value ({missing})")
    if odd:
        notes.append(f"cross: infinite ({odd})")
    if zero and values.size <= CELLS:
        notes.append(f"dot: exactly zero ({zero})")
    if over:
        notes.append(f"beyond the range, in its last colour ({over})")
    said = [f"{'; '.join(notes)[:1].upper()}{'; '.join(notes)[1:]}."] if notes else []
    return Drawing("".join(plot.marks), look.width, plot.height, notes=said)


def turned_labels(plot: Plot, names: Sequence[str], pitch: float, base: float) -> float:
    """Words below the places of an area, `pitch` pixels apart, upright where they do not fit; returns their depth."""
    widest = max(text_width(name, TEXT) for name in names)
    upright = widest + 4 > pitch
    step = max(1, math.ceil((TEXT + 0.5) / pitch)) if upright else 1
    for i in range(0, len(names), step):
        x = plot.left + (i + 0.5) * pitch
        if upright:
            plot.marks.append(words(x + 3.6, base + 5, names[i], plot.look.mute, anchor="end", upright=True))
        else:
            plot.text(x, base + 13, names[i], anchor="middle")
    return widest + 6 if upright else 14


def sign(state: str, x: float, y: float, color: str) -> str:
    if state == "zero":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.1" fill="{color}" pointer-events="none"/>'
    return f'<path d="M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6" stroke="{color}" pointer-events="none"/>'


def cell_data(made: Series) -> str:
    """What a script needs to say where the pointer is on a map of many cells, and its exact value."""
    assert made.y is not None
    whole = made.values.dtype.kind in "iu"
    values = np.ascontiguousarray(made.values[::-1], "<f4" if made.values.dtype == np.float32 else "<f8")
    words = {
        "rows": [f"{made.y.name} {word}" for word in made.y.full[::-1]],
        "columns": [f"{made.x.name} {word}" for word in made.x.full],
        "rowNodes": made.y.nodes[::-1],
        "columnNodes": made.x.nodes,
        "label": made.label,
        "unit": "" if made.unit in made.label else made.unit,
        "dtype": values.dtype.str[1:],
        "whole": whole,
    }
    data = base64.b64encode(values.tobytes()).decode()
    return f' data-cells="{say(json.dumps(words))}" data-values="{data}"'


def _color_bar(plot: Plot, look: Look, ramp: str, limits: Range, label: str) -> str:
    theme, (low, high) = THEMES[look.theme], limits
    x, y, h = plot.left + plot.inner_w + 16, plot.top, plot.inner_h
    pixels = lut("both" if ramp == "both" else "cool", look.theme)[::-1, None]
    parts = [image(np.ascontiguousarray(pixels), x, y, BAR, h)]
    ends = {low: y + h, high: y}
    between = {v: y + h * (high - v) / (high - low) for v in round_ticks(low, high, log=False)}
    kept = {v: at for v, at in between.items() if min(abs(at - end) for end in ends.values()) > TEXT + 6}
    ticks = {**kept, **ends}
    for value, at in ticks.items():
        parts.append(f'<path d="M{x + BAR} {at:.1f}h3" stroke="{theme.mute}" stroke-width=".8"/>')
        parts.append(words(x + BAR + 6, at + 3.6, fmt(value, 3), theme.mute))
    across = x + BAR + 6 + max(text_width(fmt(v, 3), TEXT) for v in ticks) + 13
    label = clip(label, max(12, int(h / 5.2)))
    parts.append(words(across, y + h / 2, label, theme.mute, anchor="middle", upright=True))
    return "".join(parts)


def _area(made: Series, look: Look, top: int, limits: Range, height: int) -> tuple[Plot, bool]:
    """An area with a value axis at the left and the places of made.x below; and whether their labels stand upright."""
    left, legend = _side(_value_words(*limits)), _legend_width(made)
    right = _RIGHT + legend
    turned = _turned(made.x, look.width - left - right)
    bottom = _below(made.x, turned)
    plot = Plot(
        look.width,
        top + height + bottom,
        (0, max(len(made.x), 1)),
        limits,
        top=top,
        left=left,
        right=right,
        bottom=bottom,
        theme=look.theme,
        ylabel=made.label,
        xlabel=made.x.label,
    )
    return plot, turned


def _bars(made: Series, look: Look, top: int) -> Drawing:
    look = look if look.palette else replace(look, palette=palette(made.names, look.theme, made.by))
    limits = _padded(look.limits or limits_of(made))
    limits = limits if limits[1] > limits[0] else (limits[0], limits[0] + 1)
    longest = max(map(len, made.x.words), default=0)
    if made.kind == "bars" and made.names == ("",) and made.x.name != "pos" and longest >= LONG and len(made.x) <= 60:
        return _bars_aside(made, look, top, limits)
    plot, turned = _area(made, look, top, limits, 210)
    _value_axis(plot, limits)
    n, base = len(made.names), [0.0] * len(made.x)
    below = list(base)
    for i in range(n):
        for k in range(len(made.x)):
            value = float(made.values[i, k])
            if not np.isfinite(value):
                continue
            wide = 0.8 if made.kind == "stack" else 0.8 / n
            x0 = k + 0.1 + (0 if made.kind == "stack" else i * wide)
            start = 0.0
            if made.kind == "stack":
                row = base if value >= 0 else below
                start, row[k] = row[k], row[k] + value
            ends = sorted((plot.y(start), plot.y(start + value)))
            at = {"x": plot.x(x0), "width": max(plot.x(x0 + wide) - plot.x(x0) - (0.4 if n > 1 else 0), 0.3)}
            at |= {"y": ends[0], "height": max(ends[1] - ends[0], 0.8)}
            plot.marks.append(mark("rect", made.tip(i, k), made.node(i, k), **at, fill=look.palette[i]))
    _named_ticks(plot, made.x, [k + 0.5 for k in range(len(made.x))], turned=turned)
    return _with_legend(made, look, plot)


def _bars_aside(made: Series, look: Look, top: int, limits: Range) -> Drawing:
    """Bars that lie on their sides, the first place at the bottom, where labels are long."""
    n, theme = len(made.x), THEMES[look.theme]
    made = replace(made, x=replace(made.x, words=tuple(clip(word, look.width // 14) for word in made.x.full)))
    pitch = max(11.5, min(20.0, 380 / n))
    inner_h = round(pitch * n)
    plot = Plot(
        look.width,
        top + inner_h + 38,
        limits,
        (0, n),
        top=top,
        left=_side(made.x.words),
        right=_RIGHT + 8,
        bottom=38,
        theme=look.theme,
        ylabel=made.x.label,
        xlabel=made.label,
    )
    _value_axis_below(plot, limits)
    for k in range(n):
        value = float(made.values[0, k])
        if not np.isfinite(value):
            plot.text(plot.x(max(limits[0], 0.0)) + 5, plot.y(k + 0.5) + 3.6, "no value", size=TEXT - 1)
            continue
        ends = sorted((plot.x(0.0), plot.x(value)))
        at = {"x": ends[0], "width": max(ends[1] - ends[0], 0.8), "y": plot.y(k + 0.85), "height": pitch * 0.7}
        plot.marks.append(mark("rect", made.tip(0, k), made.node(0, k), **at, fill=theme.series[0]))
    _row_ticks(plot, made.x, [k + 0.5 for k in range(n)])
    return Drawing("".join(plot.marks), look.width, plot.height)


def _lines(made: Series, look: Look, top: int) -> Drawing:
    look = look if look.palette else replace(look, palette=palette(made.names, look.theme, made.by))
    limits = _padded(look.limits or limits_of(made))
    plot, turned = _area(made, look, top, limits, 230)
    _value_axis(plot, limits)
    places = [k + 0.5 for k in range(len(made.x))]
    radius = 2.4 if len(made.x) * len(made.names) <= 400 else 1.4
    for i in range(len(made.names)):
        values = made.values[i].astype(float)
        there = np.isfinite(values)
        starts = np.flatnonzero(there & ~np.concatenate([[False], there[:-1]]))
        ends = np.flatnonzero(there & ~np.concatenate([there[1:], [False]]))
        for start, end in zip(starts, ends, strict=True):  # a line ends where there is no value
            plot.line(places[start : end + 1], values[start : end + 1], look.palette[i], width=1.5)
        for k in np.flatnonzero(there).tolist():
            at = {"cx": plot.x(places[k]), "cy": plot.y(values[k]), "r": radius}
            plot.marks.append(mark("circle", made.tip(i, k), made.node(i, k), **at, fill=look.palette[i]))
    _named_ticks(plot, made.x, places, turned=turned)
    return _with_legend(made, look, plot, line=True)


def _scatter(made: Series, look: Look, top: int) -> Drawing:
    assert made.across is not None and made.group is not None
    look = look if look.palette else replace(look, palette=palette(made.names, look.theme, made.by))
    drawn = np.flatnonzero(np.isfinite(made.across) & np.isfinite(made.values)).tolist()
    x, y = made.across[drawn].astype(float), made.values[drawn].astype(float)
    cloud = Cloud(
        x=x,
        y=y,
        names=[made.called(k) for k in drawn],
        tips=[made.tip(k) for k in drawn],
        nodes=[made.node(k) for k in drawn],
        colors=[look.palette[int(made.group[k])] for k in drawn],
        ringed=np.zeros(len(drawn), bool),
    )
    bends = look.bends or (scale_of(x), scale_of(y))
    plot, named = draw_cloud(
        cloud,
        bends=bends,
        limits=(look.across or limits_for(x, bends[0]), look.limits or limits_for(y, bends[1])),
        labels=(made.x.label, made.label),
        theme=look.theme,
        size=(look.width, top + 300),
        top=top,
        right=_RIGHT + (_legend_width(made) if made.by is not None else 0),
    )
    left_out = made.values.size - len(drawn)
    notes = [f"{_agreement(x, y)}{f'; {left_out} without a value are not drawn' if left_out else ''}."]
    notes += [f"Named: the {len(named)} of the largest sizes on either axis."] if named else []
    if made.by is not None or made.names == ("",):
        return _with_legend(made, look, plot, notes=notes)
    pairs = list(zip(look.palette, made.names, strict=True))
    listed, y_last = keys(pairs, plot.left, plot.height + 6, look.width, THEMES[look.theme].ink)
    return Drawing("".join([*plot.marks, listed]), look.width, y_last + 12, notes=notes)


def _agreement(x: np.ndarray, y: np.ndarray) -> str:
    """How far two axes rank dots alike."""
    rank = spearman(x, y) if len(x) > 2 else math.nan
    return (
        f"Spearman's rank correlation of the two axes: {fmt(rank, 2)}, n = {len(x)} dots"
        if math.isfinite(rank)
        else f"{len(x)} dots"
    )


def _with_legend(made: Series, look: Look, plot: Plot, *, line: bool = False, notes: Sequence[str] = ()) -> Drawing:
    height: float = plot.height
    if made.names != ("",):
        words, end = _legend(made, look, plot.left + plot.inner_w + _RIGHT + 2, plot.top, line=line)
        plot.marks.append(words)
        height = max(height, end + 4)
    return Drawing("".join(plot.marks), look.width, height, notes=list(notes))

"""A map of the picture of the maps: its numbers and their scale, and how it is drawn, with names and a colour bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from t2lens.viz.charts import CELLS, sign, turned_labels
from t2lens.viz.colors import THEMES, RampName, ThemeName, lut
from t2lens.viz.labels import clip, fmt
from t2lens.viz.raster import image
from t2lens.viz.svg import TEXT, Plot, mark, say, text_width, wrap

__all__ = ["HEAD", "LEFT", "Map", "Scale", "bar", "cells", "instead", "labels", "plot_of", "size", "small", "words_at"]

LEFT, HEAD = 58, 24
"""Pixels beside a map, for the names of its rows, and above it, for its own."""

_TICKS = 14  # characters of a token below a map


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A range and how colour goes with it. above: whether values lie beyond its top."""

    label: str
    low: float
    high: float
    ramp: RampName
    warp: str = "linear"
    above: int = 0

    def steps(self, values: np.ndarray) -> np.ndarray:
        """The step of the ramp, 0..255, of every finite value."""
        span = self.high - self.low or 1.0
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.warp == "log":
                part = np.log(values / self.low) / np.log(self.high / self.low)
            elif self.warp == "root":
                root = np.sign(values) * np.sqrt(np.abs(values) / (self.high or 1.0))
                part = (root + 1) / 2 if self.low < 0 else root
            else:
                part = (values - self.low) / span
        return np.clip(np.round(255 * np.nan_to_num(part)), 0, 255).astype(int)

    def at(self, part: float) -> float:
        """The value that stands at a fraction of the ramp."""
        if self.warp == "log":
            return self.low * (self.high / self.low) ** part
        if self.warp == "root":
            signed = 2 * part - 1 if self.low < 0 else part
            return self.high * signed * abs(signed)
        return self.low + part * (self.high - self.low)


@dataclass(frozen=True, kw_only=True)
class Map:
    """values[row, column], rows from the bottom; blank: where nothing exists. tip, node: of a cell."""

    name: str
    values: np.ndarray
    blank: np.ndarray
    rows: list[str]
    columns: list[str]
    tip: Callable[[int, int], str]
    node: Callable[[int, int], dict[str, Any]]
    scale: Scale
    down: bool = False
    instead: str = ""


def plot_of(x: float, y: float, width: float, height: float, drawn: Map, theme: ThemeName) -> Plot:
    rows, columns = drawn.values.shape
    ylim = (rows, 0) if drawn.down else (0, rows)
    plot = Plot(round(x + width), round(y + height), (0, columns), (0, rows), theme=theme)
    plot.left, plot.top, plot.inner_w, plot.inner_h, plot.marks = round(x), round(y), round(width), round(height), []
    plot.ylim = ylim
    return plot


def _y(plot: Plot, drawn: Map, r: float) -> float:
    rows = drawn.values.shape[0]
    return plot.top + plot.inner_h * (r / rows if drawn.down else 1 - r / rows)


def small(
    drawn: Map, x: float, y: float, size: tuple[float, float], words: tuple[str, str], theme: ThemeName
) -> tuple[float, str]:
    """A map without a cross, below its name: the pixels that the names of its columns take, and its SVG."""
    plot = plot_of(x + LEFT, y + HEAD, *size, drawn, theme)
    name = words_at(x, y + 13, clip(drawn.name, int(size[0] / 5.4)), 12, THEMES[theme].ink, bold=True)
    cells(plot, drawn, theme)
    instead(plot, drawn)
    return labels(plot, drawn, *words), name + "".join(plot.marks)


def size(plot: Plot, drawn: Map) -> tuple[float, float]:
    """Width and height of a cell, in pixels."""
    rows, columns = drawn.values.shape
    return plot.inner_w / columns, plot.inner_h / rows


def _place(plot: Plot, drawn: Map, r: int, c: int) -> tuple[float, float, float, float]:
    w, h = size(plot, drawn)
    return plot.left + c * w, min(_y(plot, drawn, r), _y(plot, drawn, r + 1)), w, h


def cells(plot: Plot, drawn: Map, theme: ThemeName) -> None:
    look, values = THEMES[theme], drawn.values.astype(float)
    finite = np.isfinite(values) & ~drawn.blank
    steps = drawn.scale.steps(values)
    table = lut(drawn.scale.ramp, theme)
    _, _, w, h = _place(plot, drawn, 0, 0)
    if values.size <= CELLS and min(w, h) >= 3:
        gap = 0.7 if min(w, h) >= 7 else 0.0
        for r, c in zip(*np.nonzero(~drawn.blank), strict=True):
            x, y, _, _ = _place(plot, drawn, int(r), int(c))
            fill = "#" + table[steps[r, c]].tobytes().hex() if finite[r, c] else look.paper
            at = {"x": x, "y": y, "width": w - gap, "height": h - gap}
            tip, node = drawn.tip(int(r), int(c)), drawn.node(int(r), int(c))
            plot.marks.append(mark("rect", tip, node, **at, fill=fill))
            if finite[r, c] and values[r, c] == 0 and min(w, h) >= 7:
                plot.marks.append(sign("zero", x + w / 2, y + h / 2, look.mute))
            if not finite[r, c]:
                plot.marks.append(sign("odd", x + w / 2, y + h / 2, look.mute))
    elif not drawn.blank.all():
        pixels = np.concatenate([table[steps], np.full((*values.shape, 1), 255, np.uint8)], axis=-1)
        pixels[~finite] = 0
        plot.marks.append(
            image(pixels if drawn.down else pixels[::-1], plot.left, plot.top, plot.inner_w, plot.inner_h)
        )
    plot.marks.append(
        f'<rect x="{plot.left}" y="{plot.top}" width="{plot.inner_w}" height="{plot.inner_h}" fill="none" '
        f'stroke="{look.hair}" stroke-width=".8"/>'
    )


def instead(plot: Plot, drawn: Map) -> None:
    """Why there is nothing to draw, where arms of a cross leave it legible."""
    for i, line in enumerate(wrap(drawn.instead, plot.inner_w - 16, 11)):
        at = f'x="{plot.left + plot.inner_w / 2:.1f}" y="{plot.top + plot.inner_h * 0.2 + 14 * i:.1f}"'
        look = f'fill="{plot.look.mute}" stroke="{plot.look.paper}" stroke-width="4" paint-order="stroke"'
        plot.marks.append(f'<text {at} font-size="11" text-anchor="middle" {look}>{say(line)}</text>')


def labels(plot: Plot, drawn: Map, across: str, upward: str) -> float:
    """Names of rows and columns; returns the pixels that the columns' take."""
    rows, columns = drawn.values.shape
    if drawn.instead and (rows, columns) == (1, 1):
        return 0.0
    _, _, w, h = _place(plot, drawn, 0, 0)
    for r in range(0, rows, max(1, int(np.ceil((TEXT + 1) / h)))):
        plot.text(plot.left - 6, _y(plot, drawn, r + 0.5) + 3.6, clip(drawn.rows[r], 8), anchor="end", size=TEXT)
    words = [clip(word, _TICKS) for word in drawn.columns]
    deep = turned_labels(plot, words, w, plot.top + plot.inner_h)
    plot.text(plot.left + plot.inner_w / 2, plot.top + plot.inner_h + deep + 14, across, anchor="middle", size=TEXT)
    middle = plot.top + plot.inner_h / 2
    plot.marks.append(
        f'<text transform="translate({plot.left - LEFT + 10} {middle:.1f}) rotate(-90)" text-anchor="middle" '
        f'font-size="{TEXT}" fill="{plot.look.mute}">{upward}</text>'
    )
    return deep + 14


def bar(scale: Scale, x: float, y: float, height: float, theme: ThemeName) -> str:
    look = THEMES[theme]
    parts = [image(np.ascontiguousarray(lut(scale.ramp, theme)[::-1, None]), x, y, 10, height)]
    steps = (0, 0.25, 0.5, 0.75, 1)
    words = [fmt(scale.at(part), 3) + (" or more" if part == 1 and scale.above else "") for part in steps]
    for part, word in zip(steps, words, strict=True):
        at = y + height * (1 - part)
        parts.append(f'<path d="M{x + 10:.1f} {at:.1f}h3" stroke="{look.mute}" stroke-width=".8"/>')
        parts.append(words_at(x + 16, at + 3.6, word, TEXT, look.mute))
    label = scale.label + (f", {scale.warp} scale" if scale.warp == "log" else "")
    side = x + 20 + max(text_width(word, TEXT) for word in words) + 8
    turned = f'transform="translate({side:.1f} {y + height / 2:.1f}) rotate(-90)" text-anchor="middle"'
    parts.append(f'<text {turned} font-size="{TEXT}" fill="{look.mute}">{say(clip(label, int(height / 5)))}</text>')
    return "".join(parts)


def words_at(x: float, y: float, words: str, size: float, color: str, *, bold: bool = False, anchor: str = "") -> str:
    weight = ' font-weight="600"' if bold else ""
    end = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"{weight}{end}>{say(words)}</text>'

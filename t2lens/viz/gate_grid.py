"""What pictures of any gate share: the map sublayer x position, the histogram over tokens, the tokens in their colours.

What stands in a cell, how it is coloured and what is said of it is up to the caller: `t2lens.viz.gates` for Deep Delta
Learning's beta, `t2lens.viz.write_gates` for the gates of other systems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from t2lens.viz.charts import CELLS, cell_data
from t2lens.viz.colors import THEMES, ThemeName, ink_on
from t2lens.viz.labels import clip, glyphs
from t2lens.viz.raster import image
from t2lens.viz.series import Series, axis
from t2lens.viz.svg import Plot, document, heading, mark, round_ticks, text_width, words

__all__ = ["BAR", "OUTLINE", "bars", "edge", "grid", "scale", "shares", "tokens"]

SIZE = 11.0  # of labels
BAR = 10  # width of a colour bar
OUTLINE = 0.7  # of marks whose colour may be nearly that of the paper
_CELL = 22  # largest side of a cell of the map


def edge(theme: ThemeName) -> dict[str, Any]:
    """The outline of a mark whose colour may be nearly that of the paper."""
    return {"stroke": THEMES[theme].mute, "stroke_width": OUTLINE}


def grid(
    data: Any,
    values: np.ndarray,
    *,
    site: str,
    pos: int,
    fill: Callable[[int, int], str],
    tip: Callable[[int, int], str],
    legend: Callable[[float, float, float], str],
    legend_width: int,
    label: str,
    unit: str,
    title: str,
    about: str,
    theme: ThemeName,
    width: int,
) -> str:
    """values [site, pos], the lowest sublayer at the bottom, the chosen node framed. fill, tip: of (row, column);
    legend: of (x, y, height), drawn at the right."""
    look = THEMES[theme]
    sites, n_rows, n_columns = [str(s) for s in data["site"].values], *values.shape
    names = [glyphs(str(t)) for t in data["token"].values]
    left = 54
    w = min(_CELL, (width - left - legend_width) / n_columns)
    h = min(_CELL, max(3.0, 330 / n_rows))
    top, below = 30, 64 if w >= 9 else 30
    body = [heading(title, theme)]
    many = n_rows * n_columns > CELLS
    for r in range(n_rows):
        y = top + (n_rows - 1 - r) * h
        if h >= 10 or r % math.ceil(11 / h) == 0:
            bold = sites[r] == site
            color = look.ink if bold else look.mute
            body.append(words(left - 6, y + h / 2 + 3.8, sites[r], color, size=SIZE, anchor="end", bold=bold))
        for c in range(0 if many else n_columns):
            gap = 0.6 if min(w, h) >= 7 else 0.0
            at = {"x": left + c * w, "y": y, "width": w - gap, "height": h - gap}
            said = f"{sites[r]}, position {c} {names[c]}\n{tip(r, c)}"
            body.append(mark("rect", said, {"site": sites[r], "pos": c}, **at, fill=fill(r, c)))
    if many:
        colors = [[[*bytes.fromhex(fill(r, c)[1:]), 255] for c in range(n_columns)] for r in range(n_rows)]
        made = Series(kind="heat", title=title, label=label, unit=unit, signed=False, values=values,
                      x=axis(data, "pos"), y=axis(data, "site"))  # fmt: skip
        pixels = np.array(colors, np.uint8)[::-1]
        body.append(image(pixels, left, top, n_columns * w, n_rows * h, data=cell_data(made)))
    base = top + n_rows * h
    for c in range(n_columns):
        x = left + (c + 0.5) * w
        if w >= 9:
            color, place = look.ink if c == pos else look.mute, {"size": SIZE - 1, "anchor": "end", "upright": True}
            body.append(words(x + 3.6, base + 6, clip(names[c], 9), color, bold=c == pos, **place))
        elif c % max(1, math.ceil(30 / w)) == 0:
            body.append(words(x, base + 15, str(c), look.mute, anchor="middle"))
    if site in sites:
        y = top + (n_rows - 1 - sites.index(site)) * h
        frame = {"fill": "none", "stroke": look.ink, "pointer_events": "none"}
        at = {"x": left - 0.8, "y": y - 0.8, "width": n_columns * w + 1, "height": h + 1}
        body.append(mark("rect", "", None, **at, **frame, stroke_width=0.8))
        at = {"x": left + pos * w - 1.2, "y": y - 1.2, "width": w + 1.8, "height": h + 1.8}
        body.append(mark("rect", "", None, **at, **frame, stroke_width=2.2))
    body.append(legend(left + n_columns * w + 14, top, min(n_rows * h, 190)))
    return document("".join(body), width, base + below, about, theme)


def scale(
    color: Callable[[float], str],
    limits: tuple[float, float],
    marks: Sequence[tuple[float, str, str]],
    x: float,
    y: float,
    height: float,
    theme: ThemeName,
) -> str:
    """A colour bar that stands upright. marks: (value, its number, a word on it), the ends among them."""
    look, steps, (low, high), parts = THEMES[theme], 60, limits, []
    for i in range(steps):
        at = {"x": x, "y": y + height * (steps - 1 - i) / steps, "width": float(BAR), "height": height / steps + 0.4}
        parts.append(mark("rect", "", None, **at, fill=color(low + (high - low) * (i + 0.5) / steps)))
    parts.append(mark("rect", "", None, x=x, y=y, width=float(BAR), height=height, fill="none", **edge(theme)))
    for value, number, word in marks:
        at, top, bottom = y + height * (high - value) / (high - low), value == high, value == low
        parts.append(f'<path d="M{x + BAR:.1f} {at:.1f}h3" stroke="{look.mute}" stroke-width=".8"/>')
        parts.append(words(x + BAR + 6, at + (9 if top else 0 if bottom else 3.8), number, look.ink))
        parts.append(words(x + BAR + 6, at + (21 if top else -12 if bottom else 16), word, look.mute, size=9.5))
    return "".join(parts)


def shares(values: Sequence[np.ndarray], limits: tuple[float, float], bins: int) -> list[np.ndarray]:
    """[bin] of each: shares of tokens."""
    return [np.histogram(each, bins, limits)[0] / len(each) for each in values]


def bars(
    mine: np.ndarray,
    others: np.ndarray | None,
    n_passages: int,
    *,
    limits: tuple[float, float],
    top: float,
    bins: int,
    color: Callable[[float], str],
    word: Callable[[float], str],
    label: str,
    theme: ThemeName,
    width: int,
) -> Plot:
    """Bars over the tokens of the prompt [token], an outline over those of the passages. color, word: of the middle of
    a bin. limits: of the axis; top: the largest share."""
    look, edges = THEMES[theme], np.linspace(*limits, bins + 1)
    counted = shares([mine, *([] if others is None else [others])], limits, bins)
    said = f"{label}; bars: {len(mine):,} tokens of the prompt"
    if others is not None:
        said += f"; line: {len(others):,} of {n_passages} passages"
    plot = Plot(width, 236, limits, (0, top), top=46, bottom=36, left=46, right=12, theme=theme,
                xlabel=said, ylabel="share of tokens")  # fmt: skip
    plot.yticks(round_ticks(0, top, log=False))
    for i, count in enumerate(counted[0]):
        if count:
            middle, n = (edges[i] + edges[i + 1]) / 2, round(float(count) * len(mine))
            tip = f"{label} {edges[i]:.2f} to {edges[i + 1]:.2f}{word(middle)}\n{n} of {len(mine)} tokens of the prompt"
            at = {"x": plot.x(edges[i]) + 0.4, "width": plot.x(edges[i + 1]) - plot.x(edges[i]) - 0.8}
            at |= {"y": plot.y(float(count)), "height": plot.y(0) - plot.y(float(count))}
            plot.marks.append(mark("rect", tip, None, **at, fill=color(middle), **edge(theme)))
    if len(counted) > 1:
        points = [f"M{plot.x(limits[0]):.1f} {plot.y(0):.1f}"]
        for i, count in enumerate(counted[1]):
            points.append(f"V{plot.y(float(count)):.1f}H{plot.x(edges[i + 1]):.1f}")
        plot.marks.append(f'<path d="{"".join(points)}V{plot.y(0):.1f}" fill="none" stroke="{look.ink}"/>')
    return plot


def tokens(
    data: Any,
    *,
    site: str,
    pos: int,
    fill: Callable[[int], str],
    tip: Callable[[int], str],
    y: float,
    theme: ThemeName,
    width: int,
) -> tuple[str, float]:
    """The text from y on, every token in its colour, the chosen one framed; and the y of its last line."""
    look, body, x, high = THEMES[theme], [], 2.0, 20.0
    for c, token in enumerate(data["token"].values):
        word, color = clip(glyphs(str(token)), 24), fill(c)
        wide = text_width(word, 12) + 8
        if x + wide > width - 2 and x > 2:
            x, y = 2.0, y + high + 3
        frame = {"stroke": look.ink, "stroke_width": 2.0} if c == pos else edge(theme)
        body.append(mark("rect", f"position {c} {word}\n{tip(c)}", {"site": site, "pos": c}, x=x, y=y, width=wide,
                         height=high, rx=3.0, fill=color, **frame))  # fmt: skip
        body.append(words(x + 4, y + 14.2, word, ink_on(color), size=12, idle=True))
        x += wide + 3
    return "".join(body), y + high

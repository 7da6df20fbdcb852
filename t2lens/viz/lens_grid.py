"""The logit lens as pictures: site by position with the token that each read would predict, and one position by depth.

Findings of `t2lens.analysis.logit_lens`. Marks carry `data-tip` and the node of the maps that they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from t2lens.viz.colors import THEMES, RampName, ThemeName, ink_on, shade
from t2lens.viz.labels import fmt, glyphs
from t2lens.viz.series import node_of
from t2lens.viz.svg import TEXT, Plot, color_bar, document, fit, heading, mark, text_width, words

__all__ = ["LENS", "Shade", "by_depth", "lens_grid", "stream_grid", "values_of", "window"]

CELL = 47
_LEFT, _TOP, _BAR = 58, 34, 150


@dataclass(frozen=True, kw_only=True)
class Shade:
    """How a quantity of the lens is coloured. variable: of the finding, also with "stream_" in front. most: the least
    value is the deepest colour. log: on a scale of powers."""

    label: str
    variable: str
    ramp: RampName = "cool"
    most: bool = False
    log: bool = False


LENS: dict[str, Shade] = {
    "probability": Shade(label="probability of the followed token", variable="probability", ramp="warm"),
    "rank": Shade(label="rank of the followed token", variable="rank", ramp="warm", most=True, log=True),
    "kl": Shade(label="KL to the final prediction (nats)", variable="kl"),
    "entropy": Shade(label="entropy of the prediction (nats)", variable="entropy"),
    "top": Shade(label="probability of the token shown", variable="top_probability", ramp="warm"),
}
"""What can colour the cells."""


def window(pos: int, n: int, room: int) -> range:
    """At most `room` of n positions, with `pos` among them, in the middle where there is enough on both sides.

    >>> window(1, 20, 5), window(10, 20, 5), window(19, 20, 5), window(2, 3, 5)
    (range(0, 5), range(8, 13), range(15, 20), range(0, 3))
    """
    first = min(max(pos - room // 2, 0), max(n - room, 0))
    return range(first, min(first + room, n))


def values_of(finding: Any, name: str, positions: Sequence[int]) -> np.ndarray:
    """[read, position]: the quantity of `LENS` at these positions."""
    values = finding.dataset[LENS[name].variable]
    values = values.isel(k=0) if "k" in values.dims else values
    return values.isel(pos=list(positions)).transpose("read", "pos").values.astype(float)


def range_of(name: str, tables: Sequence[np.ndarray]) -> tuple[float, float]:
    """The range of colours that all these tables share; it begins at 0, a rank at 1."""
    every = np.concatenate([table.ravel() for table in tables])
    every = every[np.isfinite(every)]
    low = 1.0 if LENS[name].log else 0.0
    high = float(every.max()) if every.size else low
    return low, high if high > low else low + 1.0


def lens_grid(
    finding: Any,
    *,
    title: str,
    quantity: str,
    pos: int,
    positions: Sequence[int],
    limits: tuple[float, float],
    theme: ThemeName = "light",
) -> str:
    """Site by position as an SVG document: in each cell the likeliest token of that read there, coloured by a quantity
    of `LENS`; bold where it is the token that is followed. The columns are `positions`, `pos` is framed."""
    look, how, data = THEMES[theme], LENS[quantity], finding.dataset
    table = values_of(finding, quantity, positions)
    reads, tokens = [str(read) for read in data["read"].values][::-1], [str(token) for token in data["token"].values]
    height = 17 if len(reads) <= 26 else 15
    likeliest = data["top_token"].isel(k=0, pos=list(positions)).values[::-1]
    chances = data["top_probability"].isel(k=0, pos=list(positions)).values[::-1]
    followed = data["rank"].isel(pos=list(positions)).values[::-1] == 1
    table, bottom = table[::-1], _TOP + height * len(reads)
    parts = [heading(title, theme)]
    for r, read in enumerate(reads):
        y = _TOP + r * height
        parts.append(words(_LEFT - 6, y + height / 2 + 3.6, read, look.mute, anchor="end"))
        for c, at in enumerate(positions):
            value, x = table[r, c], _LEFT + c * CELL
            there = math.isfinite(value)
            color = _color(how, value, limits, theme) if there else look.blank
            tip = (
                f"{read} at position {at}, after {glyphs(tokens[at])}\npredicts {glyphs(str(likeliest[r, c]))} with "
                f"probability {fmt(float(chances[r, c]))}\n{how.label}: {fmt(float(value)) if there else 'none'}"
            )
            parts.append(
                mark("rect", tip, {**node_of(read), "pos": at}, x=x, y=y, width=CELL - 1, height=height - 1, fill=color)
            )
            ink = ink_on(color) if there else look.mute
            bold = bool(followed[r, c])
            word = fit(glyphs(str(likeliest[r, c])), CELL - 6, TEXT - 0.5, bold=bold)
            parts.append(words(x + 3, y + height / 2 + 3.2, word, ink, bold=bold, size=TEXT - 0.5, idle=True))
    for c, at in enumerate(positions):
        x, chosen = _LEFT + c * CELL + 3, at == pos
        word = fit(glyphs(tokens[at]), CELL - 6, TEXT, bold=chosen)
        parts.append(words(x, bottom + 13, word, look.ink, bold=chosen))
        parts.append(words(x, bottom + 26, str(at), look.mute, bold=chosen))
        if chosen:
            frame = f'x="{_LEFT + c * CELL - 1}" y="{_TOP - 1}" width="{CELL + 1}" height="{height * len(reads) + 1}"'
            parts.append(f'<rect {frame} fill="none" stroke="{look.ink}" stroke-width="1.4" pointer-events="none"/>')
    width = _LEFT + CELL * len(positions) + 4
    parts.append(_scale(how, limits, theme, _LEFT, bottom + 38))
    about = f"{title}: the likeliest token of every read, coloured by {how.label}."
    return document("".join(parts), max(width, _LEFT + _BAR + 240), bottom + 58, about, theme)


def stream_grid(
    finding: Any, *, title: str, quantity: str, pos: int, limits: tuple[float, float], theme: ThemeName = "light"
) -> str:
    """Block by stream at one position, for systems that carry streams: numbers in the colours of the grid."""
    look, how, data = THEMES[theme], LENS[quantity], finding.dataset
    table = data[f"stream_{how.variable}"].isel(pos=pos).transpose("stream", "block").values.astype(float)
    streams, n = [str(name) for name in data["stream"].values], data.sizes["block"]
    height, wide, parts = 17, 52, [heading(title, theme)]
    for r, stream in enumerate(streams):
        y = _TOP + r * height
        parts.append(words(_LEFT - 6, y + height / 2 + 3.6, stream, look.mute, anchor="end"))
        for c in range(n):
            value, x = table[r, c], _LEFT + c * wide
            color = _color(how, value, limits, theme) if math.isfinite(value) else look.blank
            tip = f"{stream} after block {c}, at position {pos}\n{how.label}: {fmt(value)}"
            parts.append(mark("rect", tip, None, x=x, y=y, width=wide - 1, height=height - 1, fill=color))
            number = fmt(value, 3) if math.isfinite(value) else ""
            parts.append(words(x + wide - 5, y + height / 2 + 3.6, number, ink_on(color), anchor="end", idle=True))
    bottom = _TOP + height * len(streams)
    parts += [words(_LEFT + wide * (c + 0.5), bottom + 13, str(c), look.mute, anchor="middle") for c in range(n)]
    parts.append(words(_LEFT + wide * n / 2, bottom + 27, "after block", look.mute, anchor="middle"))
    about = f"{title}: {how.label} of every stream after every block."
    return document("".join(parts), _LEFT + wide * n + 4, bottom + 34, about, theme)


def by_depth(
    findings: Sequence[Any],
    positions: Sequence[int],
    names: Sequence[str],
    *,
    log: bool,
    title: str,
    width: int = 680,
    theme: ThemeName = "light",
) -> str:
    """The probability of the followed token over depth, one position of each finding, all in one plot.

    The axis is depth from the first read to `out`. Where a site reads in several ways the line goes through the last
    of them (what is carried on), and hollow dots are the others.
    """
    look, lines = THEMES[theme], []
    for finding, pos in zip(findings, positions, strict=True):
        data = finding.dataset
        sites: dict[str, list[tuple[str, float]]] = {}
        for read, p in zip(data["read"].values, data["probability"].isel(pos=pos).values, strict=True):
            sites.setdefault(node_of(str(read))["site"], []).append((str(read), float(p)))
        lines.append(sites)
    known = np.array([p for sites in lines for reads in sites.values() for _, p in reads])
    known = known[np.isfinite(known) & ((known > 0) | (not log))]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.01, 1.0)
    limits = (10 ** math.floor(math.log10(low)), 1.0) if log else (0.0, high * 1.08 or 1.0)
    plot = Plot(
        width, 250, (0, 1), limits, ylabel="probability", log=log, bottom=66, left=64, top=_TOP, right=16, theme=theme
    )
    plot.yticks(_decades(*limits) if log else None)
    longest = max(lines, key=len)
    spelled = list(longest)
    plot.xticks(list(np.linspace(0, 1, len(spelled))), spelled, turned=True)
    for i, (sites, pos) in enumerate(zip(lines, positions, strict=True)):
        color = look.series[i]
        xs = np.linspace(0, 1, len(sites))
        plot.line(xs, [reads[-1][1] or np.nan if log else reads[-1][1] for reads in sites.values()], color)
        for x, reads in zip(xs, sites.values(), strict=True):
            for j, (read, p) in enumerate(reads):
                if not math.isfinite(p) or (log and p <= 0):
                    continue
                last = j == len(reads) - 1
                tip = f"{names[i]}, {read} at position {pos}\nprobability {fmt(p)}"
                look_of = {"fill": color if last else look.paper, "stroke": color, "stroke_width": 1.2}
                dot = {"cx": plot.x(x), "cy": plot.y(p), "r": 3.0 if last else 2.2, **look_of}
                plot.marks.append(mark("circle", tip, {**node_of(read), "pos": pos, "panel": i}, **dot))
    parts, x = [heading(title, theme), *plot.marks], 64.0
    for i, name in enumerate(names):
        parts.append(f'<path d="M{x:.1f} 242h16" stroke="{look.series[i]}" stroke-width="2"/>')
        parts.append(words(x + 21, 246, name, look.ink))
        x += 44 + text_width(name, TEXT)
    about = f"{title}, over depth, of {' and '.join(names)}."
    return document("".join(parts), width, 254, about, theme)


# --- pieces ----------------------------------------------------------------------------------------------------------


def _decades(low: float, high: float, room: int = 6) -> list[float]:
    """Powers of ten within a range, at even steps and with its upper end."""
    first, last = round(math.log10(low)), round(math.log10(high))
    return [10.0**e for e in range(last, first - 1, -max(1, math.ceil((last - first) / room)))]


def _color(how: Shade, value: float, limits: tuple[float, float], theme: ThemeName) -> str:
    low, high = (math.log(each) for each in limits) if how.log else limits
    share = ((math.log(max(value, 1.0)) if how.log else value) - low) / (high - low)
    return shade(how.ramp, 1 - share if how.most else share, theme)


def _scale(how: Shade, limits: tuple[float, float], theme: ThemeName, x: float, y: float) -> str:
    """The colour bar with its range, and what it means."""
    bar = color_bar(lambda share: shade(how.ramp, 1 - share if how.most else share, theme), x, y, _BAR, 9)
    said = f"{fmt(limits[0], 3)} to {fmt(limits[1], 3)}{' (log scale)' if how.log else ''}: {how.label}"
    return bar + words(x + _BAR + 8, y + 8.5, said, THEMES[theme].mute)

"""Plain SVG figures: axes, bands, bars, dots and maps drawn from numpy, with no script and no library.

A `Plot` is one drawing area with its axes; `row` sets several beside each other. Marks carry their numbers as SVG
titles, which browsers show when hovered; `mark` makes marks that a script can read. What does not exist (NaN) is not
drawn. Text of any origin goes through `say`.
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t2lens.viz.colors import FONT, THEMES, ThemeName, shade
from t2lens.viz.labels import fmt

__all__ = [
    "HEAD",
    "TEXT",
    "Plot",
    "color_bar",
    "document",
    "fit",
    "heading",
    "heat",
    "keys",
    "mark",
    "paragraph",
    "round_ticks",
    "row",
    "say",
    "text_width",
    "words",
    "wrap",
]

LEFT, RIGHT, TOP, BOTTOM = 46, 10, 22, 34
TEXT, HEAD = 10.5, 13.0  # pixels of labels, and of titles


# advance widths of printable ASCII in Helvetica and its equals (Arial, Liberation Sans), in thousandths of the size
_WIDTHS = {
    191: "'",
    222: "ijl",
    260: "|",
    278: " !,./:;I[\\]ft",
    333: "()-`r",
    334: "{}",
    355: '"',
    389: "*",
    469: "^",
    500: "Jcksvxyz",
    556: "#$0123456789?L_abdeghnopqu",
    584: "+<=>~",
    611: "FTZ",
    667: "&ABEKPSVXY",
    722: "CDHNRUw",
    778: "GOQ",
    833: "Mm",
    889: "%",
    944: "W",
    1015: "@",
}
_WIDTH = {sign: width for width, signs in _WIDTHS.items() for sign in signs} | {"\u00b7": 278, "\u2026": 1000}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def say(text: Any) -> str:
    """Any text, safe between tags and inside a quoted attribute; what XML cannot hold becomes a sign."""
    return html.escape(_NOT_XML.sub("\ufffd", str(text))).replace("\n", "&#10;")


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Pixels that a text takes, about: by the widths of Helvetica, and a whole size for wide signs and unknown ones."""
    wide = sum(_WIDTH.get(c) or (1000 if unicodedata.east_asian_width(c) in "WF" else 600) for c in text)
    return wide / 1000 * size * (1.07 if bold else 1.0)


def fit(text: str, width: float, size: float, *, bold: bool = False) -> str:
    """The text, or so much of its beginning, with an ellipsis, as fits into so many pixels."""
    if text_width(text, size, bold=bold) <= width:
        return text
    while text and text_width(text + "\u2026", size, bold=bold) > width:
        text = text[:-1]
    return text + "\u2026"


def wrap(text: str, width: float, size: float, *, bold: bool = False) -> list[str]:
    """The lines of a text no wider than so many pixels."""
    lines: list[str] = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and text_width(longer, size, bold=bold) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return [line for line in lines if line]


def words(
    x: float,
    y: float,
    text: str,
    color: str,
    *,
    size: float = TEXT,
    anchor: str = "start",
    bold: bool = False,
    upright: bool = False,
    idle: bool = False,
) -> str:
    """A text element. upright: it reads from below; idle: the pointer reaches the mark under it."""
    place = f'transform="translate({x:.1f} {y:.1f}) rotate(-90)"' if upright else f'x="{x:.1f}" y="{y:.1f}"'
    more = f' text-anchor="{anchor}"' if anchor != "start" else ""
    more += ' font-weight="600"' if bold else ""
    more += ' pointer-events="none"' if idle else ""
    return f'<text {place} font-size="{size:g}" fill="{color}"{more}>{say(text)}</text>'


def heading(title: str, theme: ThemeName) -> str:
    """The title of a picture, on the first 24 pixels."""
    return words(4, 18, title, THEMES[theme].ink, size=HEAD, bold=True) if title else ""


def keys(
    pairs: Sequence[tuple[str, str]],
    x0: float,
    y: float,
    width: float,
    ink: str,
    size: float = TEXT,
    outline: Mapping[str, Any] | None = None,
) -> tuple[str, float]:
    """(colour, what it means) of each, in lines no wider than `width`, and the y of the last line. outline: attributes
    of the squares, where a colour may be nearly that of the paper."""
    out, x = [], x0
    for color, meaning in pairs:
        wide = text_width(meaning, size) + 26
        if x + wide > width and x > x0:
            x, y = x0, y + 16
        out.append(mark("rect", x=x, y=y, width=9.0, height=9.0, fill=color, **(outline or {})))
        out.append(words(x + 13, y + 8.4, meaning, ink, size=size))
        x += wide
    return "".join(out), y


def paragraph(
    notes: Sequence[str], y: float, width: float, theme: ThemeName, size: float = TEXT, x: float = 4
) -> tuple[str, float]:
    """Notes below a picture, each from a line of its own, wrapped to `width`, and the y of the last line."""
    lines = [line for note in notes for line in wrap(note, width - 2 * x, size)]
    step = round(size * 1.32)
    out = [words(x, y + step * (i + 1), line, THEMES[theme].mute, size=size) for i, line in enumerate(lines)]
    return "".join(out), y + step * len(lines)


def color_bar(color: Callable[[float], str], x: float, y: float, width: float, height: float = 8.0) -> str:
    """The colours of fractions from 0 at the left to 1."""
    n = 40
    return "".join(
        mark("rect", x=x + i * width / n, y=y, width=width / n + 0.4, height=height, fill=color((i + 0.5) / n))
        for i in range(n)
    )


def mark(tag: str, tip: str = "", node: Mapping[str, Any] | None = None, **attributes: Any) -> str:
    """An element with its tip (lines of text) and the node of the maps it stands for, as data attributes."""
    data = {"tip": tip, **(node or {})} if tip else dict(node or {})
    own = "".join(f' {name.replace("_", "-")}="{_number(value)}"' for name, value in attributes.items())
    return f"<{tag}{own}{''.join(f' data-{name}={chr(34)}{say(value)}{chr(34)}' for name, value in data.items())}/>"


def _number(value: Any) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else say(value)


def document(body: str, width: float, height: float, about: str, theme: ThemeName = "light") -> str:
    """A complete SVG file on its paper; about: what a screen reader says of it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="{FONT}" style="font-variant-numeric:tabular-nums" direction="ltr" '
        f'role="img" aria-label="{say(about)}">'
        f'<rect class="paper" width="100%" height="100%" fill="{THEMES[theme].paper}"/>{body}</svg>'
    )


class Plot:
    """A drawing area of width x height pixels over xlim x ylim; y may be logarithmic (then limits are positive)."""

    def __init__(
        self,
        width: int,
        height: int,
        xlim: tuple[float, float],
        ylim: tuple[float, float],
        *,
        title: str = "",
        ylabel: str = "",
        xlabel: str = "",
        log: bool = False,
        bottom: int = BOTTOM,
        left: int = LEFT,
        top: int = TOP,
        right: int = RIGHT,
        theme: ThemeName = "light",
    ) -> None:
        self.inner_w, self.inner_h, self.top = width - left - right, height - top - bottom, top
        self.look = THEMES[theme]
        self.width, self.height, self.left, self.xlim, self.log = width, height, left, xlim, log
        low, high = (math.log10(v) for v in ylim) if log else ylim
        self.ylim = (low, high if high > low else low + 1)
        self.marks: list[str] = []
        self._words(title, xlabel, ylabel)

    # --- coordinates
    def x(self, value: float) -> float:
        low, high = self.xlim
        return self.left + (value - low) / (high - low) * self.inner_w

    def y(self, value: float) -> float:
        value = math.log10(max(value, 1e-300)) if self.log else value
        low, high = self.ylim
        return self.top + (1 - min(max((value - low) / (high - low), 0.0), 1.0)) * self.inner_h

    # --- axes
    def _words(self, title: str, xlabel: str, ylabel: str) -> None:
        if title:
            self.text(self.left, self.top - 8, title, size=11.5, color=self.look.ink, bold=True)
        middle = self.top + self.inner_h / 2
        if ylabel:
            self.marks.append(words(11, middle, ylabel, self.look.mute, anchor="middle", upright=True))
        if xlabel:
            self.text(self.left + self.inner_w / 2, self.height - 3, xlabel, anchor="middle")
        base = self.top + self.inner_h
        self.marks.append(
            f'<path d="M{self.left} {self.top}V{base}H{self.left + self.inner_w}" fill="none" '
            f'stroke="{self.look.hair}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = TEXT,
        color: str = "",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        self.marks.append(words(x, y, text, color or self.look.mute, size=size, anchor=anchor, bold=bold))

    def yticks(self, values: Sequence[float] | None = None) -> Plot:
        """Ticks at round values (or at those given), with hairlines across."""
        for value in round_ticks(*self.ylim, log=self.log) if values is None else values:
            at = self.y(value)
            self.marks.append(
                f'<path d="M{self.left} {at:.1f}h{self.inner_w}" stroke="{self.look.hair}" stroke-width=".6" '
                'stroke-dasharray="1 3"/>'
            )
            self.text(self.left - 5, at + 3.5, fmt(value, 3), anchor="end")
        return self

    def xticks(self, values: Sequence[float], names: Sequence[str] | None = None, *, turned: bool = False) -> Plot:
        base = self.top + self.inner_h
        step = max(1, math.ceil(len(values) * 13 / max(self.inner_w, 1))) if turned else 1
        for value, word in list(zip(values, names or [fmt(v, 3) for v in values], strict=True))[::step]:
            at = self.x(value)
            self.marks.append(f'<path d="M{at:.1f} {base}v3" stroke="{self.look.hair}"/>')
            if turned:
                place = {"size": TEXT - 1, "anchor": "end", "upright": True}
                self.marks.append(words(at + 3.5, base + 6, word, self.look.mute, **place))
            else:
                self.text(at, base + 14, word, anchor="middle")
        return self

    # --- marks
    def line_at(self, value: float, *, across: bool = True, color: str = "", dash: str = "") -> Plot:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        path = (
            f"M{self.left} {self.y(value):.1f}h{self.inner_w}"
            if across
            else f"M{self.x(value):.1f} {self.top}v{self.inner_h}"
        )
        self.marks.append(f'<path d="{path}" stroke="{color or self.look.mute}" stroke-width=".8"{dashes}/>')
        return self

    def band(self, xs: Any, low: Any, high: Any, color: str, opacity: float = 0.25) -> Plot:
        """The area between two lines."""
        ends = [(x, a, b) for x, a, b in zip(xs, low, high, strict=True) if np.isfinite(a) and np.isfinite(b)]
        if ends:
            there = " ".join(f"{self.x(x):.1f},{self.y(b):.1f}" for x, _, b in ends)
            back = " ".join(f"{self.x(x):.1f},{self.y(a):.1f}" for x, a, _ in reversed(ends))
            self.marks.append(f'<polygon points="{there} {back}" fill="{color}" fill-opacity="{opacity}"/>')
        return self

    def line(self, xs: Any, ys: Any, color: str, *, width: float = 1.6) -> Plot:
        points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in zip(xs, ys, strict=True) if np.isfinite(y))
        self.marks.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"/>')
        return self

    def dots(self, xs: Any, ys: Any, color: str, names: Sequence[str] | None = None, *, radius: float = 2.8) -> Plot:
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            if np.isfinite(y):
                hover = f"<title>{say(f'{names[i]}: ' if names else '')}{say(fmt(float(y)))}</title>"
                self.marks.append(
                    f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{radius}" fill="{color}">{hover}</circle>'
                )
        return self

    def whiskers(self, xs: Any, low: Any, high: Any, color: str) -> Plot:
        for x, a, b in zip(xs, low, high, strict=True):
            if np.isfinite(a) and np.isfinite(b):
                self.marks.append(f'<path d="M{self.x(x):.1f} {self.y(a):.1f}V{self.y(b):.1f}" stroke="{color}"/>')
        return self

    def bar(
        self,
        x0: float,
        x1: float,
        y0: float,
        y1: float,
        color: str,
        hover: str = "",
        opacity: float = 1.0,
        outline: str = "",
    ) -> Plot:
        """A rectangle between two places. outline: a colour."""
        if not np.isfinite([x0, x1, y0, y1]).all():
            return self
        left, right, top, base = self.x(x0), self.x(x1), self.y(y1), self.y(y0)
        title = f"<title>{say(hover)}</title>" if hover else ""
        line = f' stroke="{outline}" stroke-width=".6"' if outline else ""
        self.marks.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 0.1):.1f}" '
            f'height="{max(base - top, 0):.1f}" '
            f'fill="{color}"{f" fill-opacity={chr(34)}{opacity}{chr(34)}" if opacity < 1 else ""}'
            f"{line}>{title}</rect>"
        )
        return self

    def instead(self, why: str) -> Plot:
        """Why there is nothing to draw."""
        self.text(self.left + self.inner_w / 2, self.top + self.inner_h / 2, why, anchor="middle")
        return self


def heat(values: np.ndarray, names: Sequence[str], title: str, *, size: int = 330, most: float | None = None) -> Plot:
    """A square map of values[row, column] >= 0 in the cool ramp, with its scale at the right; the diagonal is blank."""
    n = len(names)
    plot = Plot(size + 60, size, (0, n + n * 60 / max(size - LEFT - RIGHT, 1)), (0, n), title=title, bottom=46)
    plot.marks.pop()  # no axis lines: the cells end there
    off = ~np.eye(n, dtype=bool) & np.isfinite(values)
    top = most if most is not None else float(values[off].max()) if off.any() else 1.0
    for i, j in zip(*np.nonzero(off), strict=True):
        color = shade("cool", float(values[i, j]) / max(top, 1e-30))
        plot.bar(j, j + 0.97, i, i + 0.97, color, f"{names[i]}, {names[j]}: {fmt(float(values[i, j]), 3)}")
    centres = [i + 0.5 for i in range(n)]
    step = max(1, math.ceil(n / 24))
    for i in range(0, n, step):
        plot.text(plot.left - 5, plot.y(centres[i]) + 3.5, names[i], anchor="end", size=TEXT - 1)
    plot.xticks(centres, names, turned=True)
    x0 = n * 1.05
    for i in range(40):
        plot.bar(x0, x0 + n * 0.03, n * i / 40, n * (i + 1.1) / 40, shade("cool", (i + 0.5) / 40))
    for part in (0, 0.5, 1):
        plot.text(plot.x(x0 + n * 0.045), plot.y(n * part) + 3.5, fmt(top * part, 2), size=TEXT - 1)
    return plot


def row(*plots: Plot, gap: int = 18) -> str:
    """Plots side by side as one <svg>."""
    width, height = sum(p.width for p in plots) + gap * (len(plots) - 1), max(p.height for p in plots)
    parts, x = [], 0
    for plot in plots:
        parts.append(f'<g transform="translate({x} 0)">{"".join(plot.marks)}</g>')
        x += plot.width + gap
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{FONT}" role="img">{"".join(parts)}</svg>'
    )


def round_ticks(low: float, high: float, *, log: bool) -> list[float]:
    if log:
        decades = range(math.floor(low), math.ceil(high) + 1)
        every = [m * 10.0**e for e in decades for m in ((1, 2, 5) if high - low <= 2 else (1,))]
        return [v for v in every if 10 ** (low - 1e-9) <= v <= 10 ** (high + 1e-9)]
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 5)
    return [round(i * step, 10) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]

"""Pictures of depth routing as SVG: maps of reads over sources, mass against effect, what weights follow, look-back.

Each is one complete document (`t2lens.viz.svg.document`) whose marks carry `data-tip` and the node that they stand for.
Reads go upwards in depth, as in the maps of the home page; a small colour says of what kind a source or a reader is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from t2lens.viz.colors import THEMES, ThemeName, shade
from t2lens.viz.depth_map import KINDS, DepthMap
from t2lens.viz.depth_map import limits as limits_of
from t2lens.viz.labels import fmt
from t2lens.viz.svg import HEAD, color_bar, document, keys, mark, paragraph, text_width, words, wrap

__all__ = ["SIZE", "kind_colors", "map_picture"]

SIZE, LINE, GAP, STRIP = 10.0, 13, 14, 4  # pixels: labels, lines of notes, between maps, strips of kinds


def kind_colors(theme: ThemeName = "light") -> dict[str, str]:
    """kind of a source -> its colour."""
    return dict(zip(KINDS, THEMES[theme].series, strict=True))


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Colours of values from low to high; root: steps of the square root, which tell small values apart."""

    low: float
    high: float
    root: bool
    theme: ThemeName

    @property
    def signed(self) -> bool:
        return self.low < 0

    def color(self, value: float) -> str:
        part = min(abs(value) / self.high, 1.0) if self.high > 0 else 0.0
        part = math.sqrt(part) if self.root else part
        if not self.signed:
            return shade("warm", part, self.theme)
        return shade("both", 0.5 + math.copysign(part, value) / 2, self.theme)

    def at(self, fraction: float) -> float:
        """The value at a fraction of the bar."""
        part = 2 * fraction - 1 if self.signed else fraction
        return math.copysign(part * part if self.root else abs(part), part) * self.high


def map_picture(
    shown: DepthMap,
    *,
    theme: ThemeName = "light",
    width: int = 560,
    limits: tuple[float, float] | None = None,
    root: bool = False,
    chosen: str = "",
    title: str = "",
) -> str:
    """A map as SVG: one panel for each way in which sites read, on one scale.

    Args:
        limits: of the colours (default: the map's own); from 0, or symmetric around it. root: colours go with the
            square root of values. chosen: a site, whose row is framed.
    """
    low, high = limits or limits_of([shown])
    scale = _Scale(low=low, high=high, root=root, theme=theme)
    ways = sorted(dict.fromkeys(shown.ways), key=lambda way: way == "")
    ways = [way for way in ways if any(shown.own[i] for i in _rows(shown, way))] or ways
    per_row = 1 if len(ways) == 1 else min(len(ways), 4 if width >= 760 else 2)
    look, parts, y = THEMES[theme], [], 8.0
    for line in wrap(title, width - 8, HEAD, bold=True):
        y += 14
        parts.append(words(4, y, line, look.ink, size=HEAD, bold=True))
    y += 6
    each = (width - GAP * (per_row - 1)) / per_row
    for first in range(0, len(ways), per_row):
        panels = [_panel(shown, way, scale, each, chosen, len(ways) > 1) for way in ways[first : first + per_row]]
        for i, (body, _) in enumerate(panels):
            parts.append(f'<g transform="translate({i * (each + GAP):.1f} {y:.1f})">{body}</g>')
        y += max(height for _, height in panels) + 6
    body, y = _legend(shown, scale, width, y)
    parts.append(body)
    told, y = paragraph(_notes(shown, ways), y, width, theme, SIZE)
    parts.append(told)
    about = f"{title}. {shown.label}: reads over sources, {shown.counted}."
    return document("".join(parts), width, y + 8, about, theme)


def _rows(shown: DepthMap, way: str) -> list[int]:
    return [i for i, own in enumerate(shown.ways) if own == way]


def _drawn(shown: DepthMap, way: str, several: bool) -> list[int]:
    """The rows of a panel; of several, reads with nothing to choose are told in the notes instead."""
    rows = _rows(shown, way)
    return [i for i in rows if several and _chooses(shown, i)] or rows


def _columns(shown: DepthMap, rows: Sequence[int]) -> list[int]:
    """Those that some of these reads have."""
    return np.flatnonzero(shown.exists[list(rows)].any(axis=0)).tolist()


def _panel(shown: DepthMap, way: str, scale: _Scale, width: float, chosen: str, several: bool) -> tuple[str, float]:
    """One map and its height: reads of one way, upwards in depth."""
    look, colors = THEMES[scale.theme], kind_colors(scale.theme)
    rows, out = _drawn(shown, way, several), []
    columns = _columns(shown, rows)
    left = max(text_width(shown.sites[i], SIZE, bold=True) for i in rows) + STRIP + 9
    cw = (width - left - 2) / max(len(columns), 1)
    cw = min(cw, 64)
    ch = min(max(0.72 * cw, 9.0), 19.0) if len(rows) <= 30 else max(5.0, min(0.72 * cw, 9.0))
    top = 16.0 if several else 2.0
    if several:
        head = f"way {way}" if way else ", ".join(dict.fromkeys(_sort(shown.sites[i]) for i in rows))
        out.append(words(left, 10, head, look.ink, size=SIZE, bold=True))
    height = ch * len(rows)
    edge = f'stroke="{look.hair}" stroke-width=".5"'
    step = max(1, math.ceil((SIZE + 1) / ch))
    for k, i in enumerate(rows):
        y = top + height - (k + 1) * ch
        color = colors.get(_sort(shown.sites[i]), look.mute)
        out.append(
            f'<rect x="{left - STRIP - 1:.1f}" y="{y + 0.5:.1f}" width="{STRIP}" height="{ch - 1:.1f}" fill="{color}"/>'
        )
        if (len(rows) - 1 - k) % step == 0:
            bold = shown.sites[i] == chosen
            color = look.ink if bold else look.mute
            place = {"size": SIZE, "anchor": "end", "bold": bold}
            out.append(words(left - STRIP - 5, y + ch / 2 + 3.4, shown.sites[i], color, **place))
        for m, j in enumerate(columns):
            if not shown.exists[i, j]:
                continue
            x, value = left + m * cw, float(shown.values[i, j])
            node = {"site": shown.sites[i], "way": way} if way else {"site": shown.sites[i]}
            fill = scale.color(value) if np.isfinite(value) and _chooses(shown, i) else look.mask
            tip = "\n".join(shown.lines(i, j))
            out.append(
                mark("rect", tip, node, x=x, y=y, width=cw, height=ch, fill=fill, stroke=look.paper, stroke_width=0.6)
            )
    base = top + height
    out.append(_frames(shown, rows, columns, left, top, cw, ch, look.mute))
    if chosen in [shown.sites[i] for i in rows]:
        k = [shown.sites[i] for i in rows].index(chosen)
        there = [m for m, j in enumerate(columns) if shown.exists[rows[k], j]]
        x0, x1 = left + min(there) * cw, left + (max(there) + 1) * cw
        out.append(
            f'<rect x="{x0:.1f}" y="{base - (k + 1) * ch:.1f}" width="{x1 - x0:.1f}" height="{ch:.1f}" fill="none" '
            f'stroke="{look.ink}" stroke-width="1.4" pointer-events="none"/>'
        )
    out.append(f'<path d="M{left:.1f} {base + 0.5:.1f}h{cw * len(columns):.1f}" {edge}/>')
    longest = 0.0
    step = max(1, math.ceil((SIZE + 1) / cw))
    turned = any(text_width(shown.columns[j], SIZE) > cw - 3 for j in columns)
    for m, j in enumerate(columns):
        x, kind = left + m * cw, shown.kinds[j]
        place = f'x="{x + 0.5:.1f}" y="{base + 2:.1f}" width="{max(cw - 1, 1):.1f}"'
        out.append(f'<rect {place} height="{STRIP}" fill="{colors[kind]}"/>')
        if m % step:
            continue
        name, middle = shown.columns[j], x + cw / 2
        if turned:
            out.append(words(middle + 3.4, base + STRIP + 6, name, look.mute, size=SIZE, anchor="end", upright=True))
        else:
            out.append(words(middle, base + STRIP + 14, name, look.mute, size=SIZE, anchor="middle"))
        longest = max(longest, text_width(name, SIZE) if turned else SIZE)
    return "".join(out), base + STRIP + 10 + longest


def _chooses(shown: DepthMap, i: int) -> bool:
    """Whether the values of a read are no plain ones of a system that has nothing to weigh there."""
    return bool(shown.own[i]) or shown.what != "weights" or "B" in shown.more


def _sort(site: str) -> str:
    """What kind of reader a site is: attn, mlp, local or out."""
    return site.rpartition(".")[2]


def _frames(
    shown: DepthMap, rows: list[int], columns: list[int], left: float, top: float, cw: float, ch: float, color: str
) -> str:
    """Hairlines where a block of the transformer begins, and dashed ones where a block of the system's sources ends."""
    out, base, layers = [], top + ch * len(rows), shown.layers
    thin = f'stroke="{color}" stroke-width=".6" opacity=".55" pointer-events="none"'
    for k in range(1, len(rows)):
        if layers[rows[k]] != layers[rows[k - 1]]:
            wide = int(shown.exists[rows[k]][columns].nonzero()[0].max()) + 1
            out.append(f'<path d="M{left:.1f} {base - k * ch:.1f}h{wide * cw:.1f}" {thin}/>')
    written = [_block_of(shown, j) for j in columns]
    for m in range(1, len(columns)):
        if written[m] != written[m - 1] and None not in (written[m], written[m - 1]):
            first = next((k for k, i in enumerate(rows) if shown.exists[i, columns[m]]), 0)
            out.append(f'<path d="M{left + m * cw:.1f} {top:.1f}v{base - first * ch - top:.1f}" {thin}/>')
    own = [j for j in columns if shown.kinds[j] == "block"]
    there = [int(shown.exists[i, own].sum()) if own else 0 for i in rows]
    for k in range(1, len(rows)):
        if own and there[k] > there[k - 1]:
            wide = int(shown.exists[rows[k]][columns].nonzero()[0].max()) + 1
            dash = f'stroke="{color}" stroke-width="1.2" stroke-dasharray="3 2" pointer-events="none"'
            out.append(f'<path d="M{left:.1f} {base - k * ch:.1f}h{wide * cw:.1f}" {dash}/>')
    return "".join(out)


def _block_of(shown: DepthMap, j: int) -> int | None:
    """The transformer block that wrote last into a source; None where that changes."""
    if shown.kinds[j] in ("running", "stream"):
        return None
    held = next((str(each) for each in shown.held[:, j] if each), "embed")
    last = held.split()[-1]
    return int(last.split(".")[0]) if "." in last else -1


def _legend(shown: DepthMap, scale: _Scale, width: float, y: float) -> tuple[str, float]:
    """Colour bar with its range, and the kinds of sources."""
    look, colors, out = THEMES[scale.theme], kind_colors(scale.theme), []
    bar, x0 = min(170.0, width * 0.4), 4.0
    out.append(color_bar(lambda share: scale.color(scale.at(share)), x0, y + 4, bar))
    for fraction, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        number = fmt(scale.at(fraction), 3)
        out.append(words(x0 + bar * fraction, y + 23, number, look.mute, size=SIZE, anchor=anchor))
    label = f"{shown.label}{', square-root scale' if scale.root else ''}"
    for k, line in enumerate(wrap(label, width - bar - 20, SIZE)[:2]):
        out.append(words(x0 + bar + 10, y + 12 + LINE * k, line, look.ink, size=SIZE))
    used = {*shown.kinds, *(_sort(site) for site in shown.sites)}
    kinds = [(colors[kind], said) for kind, said in KINDS.items() if kind in used]
    listed, y = keys(kinds, x0, y + 32, width, look.ink, SIZE)
    out.append(listed)
    return "".join(out), y + 12


def _notes(shown: DepthMap, ways: list[str]) -> list[str]:
    notes = [
        f"{shown.counted[:1].upper() if shown.counted[0] != 'n' else 'n'}{shown.counted[1:]}. Blank: no such source."
    ]
    drawn = {i for way in ways for i in _drawn(shown, way, len(ways) > 1)}
    if not all(_chooses(shown, i) for i in drawn):
        notes[0] += " Grey: weight exactly 1, nothing to choose."
    if any(kind == "block" for kind in shown.kinds):
        notes[0] += " Dashed: where a block of sources ends."
    if shown.what == "weights":
        if not shown.own.any():
            one = (shown.exists.sum(axis=1) == 1).all()
            why = "every read takes the one carried state" if one else "every earlier write counts once"
            notes.append(f"This system has no depth weights of its own: {why}, with weight exactly 1.")
        else:
            left = dict.fromkeys(shown.sites[i] for i in range(len(shown.reads)) if i not in drawn)
            if left:
                notes.append(f"Not drawn, as one carried stream is read with weight 1: {', '.join(left)}.")
    return notes

"""What the picture of the maps draws over a grid: the cross of the chosen node, or all that feeds it. Where it lies and
how large it is go by the rules of the page (draw.js, layers.js)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from t2lens.viz.charts import sign
from t2lens.viz.colors import THEMES, ThemeName, lut
from t2lens.viz.labels import fmt, glyphs
from t2lens.viz.maps_drawing import Map, Scale, size
from t2lens.viz.series import exact
from t2lens.viz.svg import Plot, mark, say

__all__ = ["cross", "ends", "feeding", "framed", "layer_words", "rollout_of", "shares"]

_NEAR, _WIDE = 9, 26  # pixels between two numbers, up and across, below which the second is left out


def rollout_of(found: Any, n_rows: int) -> np.ndarray:
    """[row, pos] of a rollout (`t2lens.analysis.rollout`): row 0 is what each embedding absorbs, above it the mass that
    passes each site; NaN above the site that it starts from."""
    data = getattr(found, "dataset", {})
    if "mass" not in data:
        raise TypeError(f"A rollout is what t2lens.analysis.rollout finds, not {type(found).__name__}.")
    mass = data["mass"].transpose("site", "pos").values
    values = np.full((n_rows, mass.shape[1]), np.nan)
    values[0], values[1 : 1 + len(mass)] = data["absorbed"].values, mass
    return values


def ends(tokens: Sequence[str], absorbed: np.ndarray, stuck: float) -> list[str]:
    """Where a rollout ends, in sentences. absorbed: by the embedding of each position; stuck: by none."""
    order = np.argsort(-absorbed, kind="stable")[:3]
    most = ", ".join(f"{glyphs(str(tokens[i]))}@{i} {absorbed[i]:.0%}" for i in order.tolist() if absorbed[i] >= 0.005)
    said = [f"Most ends in the embeddings of {most}."] if most else []
    if stuck >= 0.005:
        said.append(f"{stuck:.0%} found nothing to follow (a zero read, or a bias alone).")
    return [*said, "Sizes of contributions with gates and patterns held; no causal claim."]


def feeding(drawn: Map, values: np.ndarray, pos: int, site: str, scale: Scale) -> Map:
    """The map of how much each earlier node feeds the chosen one, on the cells of its grid. values[row, pos]."""
    row = drawn.rows.index(site)
    blank = np.isnan(values)
    blank[row + 1 :], blank[:, pos + 1 :], blank[row, pos] = True, True, True
    node = f"{site}@{pos}"

    def tip(r: int, c: int) -> str:
        words = f"site {drawn.rows[r]}\npos {c} {drawn.columns[c]}"
        return f"{words}\nshare of {node} that passes here: {exact(values[r, c])}"

    return replace(drawn, values=values, blank=blank, tip=tip, scale=scale, instead="")


def shares(plot: Plot, fed: Map, pos: int, site: str, theme: ThemeName) -> None:
    """The frame around what feeds a node, and its largest shares in numbers."""
    look, row = THEMES[theme], fed.rows.index(site)
    cw, ch = size(plot, fed)
    x, y = plot.left, _level(plot, fed, row)
    plot.marks.append(_outline(x, y, (pos + 1) * cw, (row + 1) * ch, look.ink))
    if ch < 9:
        return
    there = [(float(fed.values[r, c]), int(c), int(r)) for r, c in zip(*np.nonzero(~fed.blank), strict=True)]
    placed: list[tuple[float, float]] = []
    for v, c, r in sorted((each for each in there if each[0] >= 0.1), key=lambda each: -each[0]):
        at = (max(plot.left + 11, plot.left + (c + 0.5) * cw), _level(plot, fed, r) + ch / 2)
        if len(placed) < 6 and not any(abs(a - at[0]) < 28 and abs(b - at[1]) < 11 for a, b in placed):
            placed.append(at)
            plot.marks.append(_number(f"{v:.2f}", *at, "middle", look))


def cross(
    plot: Plot, drawn: Map, place: tuple[int, str], maps: tuple[Map, Map], holds: Mapping[str, Any], window: int | None,
    theme: ThemeName,
) -> None:  # fmt: skip
    """The arms of a node in the colours of what they show: left, where it looks; down, what it reads from depth.

    place: its position and site. maps: the sequence map and the depth map of its panel. holds: of each source of its
    read the atoms in it, where they are not the one of its name: a bracket spans them. window: positions that it sees.
    """
    (pos, site), (looks, reads), look = place, maps, THEMES[theme]
    row, (cw, ch) = drawn.rows.index(site), size(plot, drawn)
    # narrower than the cells where there is room, so that what the cells themselves show stays in sight
    wide = max(cw, 11.0) if cw < 18 else float(round(0.56 * cw))
    tall = ch if ch < 12 else float(round(0.56 * ch))
    notes: list[tuple[str, float, float, str]] = []
    if not looks.instead:
        y, first = _level(plot, drawn, row) + round((ch - tall) / 2), max(0, pos + 1 - (window or pos + 1))
        plot.marks += _frame(plot.left + first * cw - 0.5, y - 0.5, (pos + 1 - first) * cw + 1, tall + 1, look)
        for key in range(first, pos + 1):
            _cell(plot, looks, (pos, key), (plot.left + key * cw, y, cw, tall), {"site": site, "pos": key}, theme)
        best = sorted(range(first, pos), key=lambda key: -np.nan_to_num(looks.values[pos, key], nan=-1.0))[:4]
        notes += [
            (f"{v:.2f}", max(plot.left + 11, plot.left + (key + 0.5) * cw), _level(plot, drawn, row) - 7, "middle")
            for key in best
            if (v := float(looks.values[pos, key])) >= 0.08
        ]
    if not reads.instead and site in reads.rows:
        notes = [*_down(plot, drawn, (pos, site), reads, holds, wide, theme), *notes]
    placed: list[tuple[str, float, float, str]] = []
    for note in notes:
        if not any(abs(note[2] - each[2]) < _NEAR and abs(note[1] - each[1]) < _WIDE for each in placed):
            placed.append(note)
    plot.marks += [_number(words, x, y, anchor, look) for words, x, y, anchor in placed]


def framed(plot: Plot, drawn: Map, pos: int, site: str, theme: ThemeName) -> None:
    """The frame of the chosen node."""
    look, (cw, ch) = THEMES[theme], size(plot, drawn)
    x, y = plot.left + pos * cw, _level(plot, drawn, drawn.rows.index(site))
    box = (x - max(0.0, 8 - cw) / 2, y - max(0.0, 8 - ch) / 2, max(cw, 8.0), max(ch, 8.0))
    plot.marks += [_outline(*box, look.paper, 4), _outline(*box, look.ink, 2)]


def layer_words(
    layer: str,
    ones: Sequence[Any],
    rollouts: Sequence[Any],
    places: Sequence[int | None],
    sites: Sequence[str],
    fed: Mapping[int, Any],
) -> list[str]:
    """What is drawn over the grids, in sentences."""
    if layer == "cross":
        return [
            "Arms of the cross: left, where the node looks in the sequence (none: it reads only its own position); "
            "down, what it reads from depth."
        ]
    lines = []
    for i, one in enumerate(ones):
        node, letter = f"{sites[i]}@{places[i]}", f"{'AB'[i]}: " if len(ones) > 1 else ""
        if i in fed:
            data = rollouts[i].dataset
            where = ends(one.tokens, data["absorbed"].values, float(np.nansum(data["stuck"].values)))
            lines.append(f"{letter}how much of {node} passes through each earlier node. {' '.join(where)}")
        elif places[i] is not None:
            lines.append(f"{letter}the rollout of {node} is not here.")
    return lines


# --- parts ----------------------------------------------------------------------------------------------------------


def _down(
    plot: Plot, drawn: Map, node: tuple[int, str], reads: Map, holds: Mapping[str, Any], wide: float,
    theme: ThemeName,
) -> list[tuple[str, float, float, str]]:  # fmt: skip
    """The arm downwards: a source that is one atom on its cell, one that holds several a bracket beside them. Returns
    the numbers to write, the largest first."""
    (pos, site), look, (cw, ch) = node, THEMES[theme], size(plot, drawn)
    read, where = reads.rows.index(site), {name: i for i, name in enumerate(drawn.rows)}
    columns = [c for c in range(len(reads.columns)) if not reads.blank[read, c]]
    spans = []
    for c in columns:
        at = [where[atom] for atom in holds.get(reads.columns[c]) or [reads.columns[c]] if atom in where]
        if at:
            spans.append((c, min(at), max(at), len(at) > 1))
    several = [(c, low, high) for c, low, high, many in spans if many]
    nested = any(c != d and low <= at <= high for c, low, high in several for d, at, _ in several)
    left, side = round(plot.left + (pos + 0.5) * cw - wide / 2), -1 if pos * cw > plot.inner_w - 70 else 1
    lanes: list[list[tuple[int, int]]] = []  # brackets that overlap lie side by side
    notes = []
    for c, low, high, many in sorted(spans, key=lambda span: -span[2]):
        y, h = _level(plot, drawn, high), (high - low + 1) * ch
        lane = next((i for i, used in enumerate(lanes) if all(u < low or high < d for d, u in used)), len(lanes))
        if many:
            lanes[lane:] = lanes[lane:] or [[]]
            lanes[lane].append((low, high))
        x = float(left) if not many else left + wide + 3 + 9 * lane if side > 0 else left - 9 - 9 * lane
        a = 6.0 if many else wide
        plot.marks += _frame(x - 0.5, y + 0.5, a + 1, h - 1, look)
        _cell(plot, reads, (read, c), (x, y + 1, a, h - 2), {"site": drawn.rows[high], "pos": pos}, theme)
        if many:
            start, end = (left + 1, x) if side > 0 else (x + a, left + wide)
            ticks = "".join(f"M{start:.1f} {e:.1f}H{end:.1f}" for e in (y + 1, y + h - 1))
            plot.marks.append(f'<path d="{ticks}" stroke="{look.ink}" stroke-width="1"/>')
        anchor = "start" if side > 0 else "end"
        at = (x + a + 4 if side > 0 else x - 4, y + (ch if nested else h) / 2)
        notes.append((float(reads.values[read, c]), *at, anchor))
    every = [float(reads.values[read, c]) for c in columns]
    even, most = len(every) > 1 and len(set(every)) == 1, max((abs(v) for v in every), default=0.0)
    ranked = sorted((note for note in notes if abs(note[0]) >= 0.02 * most), key=lambda note: -abs(note[0]))
    each = f" each ({len(every)})" if even else ""
    return [(fmt(v, 2) + each, x, y, anchor) for v, x, y, anchor in ranked[: 1 if even else 4]]


def _cell(plot: Plot, source: Map, at: tuple[int, int], box: Sequence[float], node: Any, theme: ThemeName) -> None:
    value, look, (x, y, w, h) = float(source.values[at]), THEMES[theme], box
    step = source.scale.steps(np.array([value]))[0]
    fill = "#" + lut(source.scale.ramp, theme)[step].tobytes().hex() if np.isfinite(value) else look.paper
    plot.marks.append(mark("rect", source.tip(*at), node, x=float(x), y=float(y), width=float(w), height=h, fill=fill))
    if not np.isfinite(value):
        plot.marks.append(sign("odd", x + w / 2, y + h / 2, look.mute))


def _level(plot: Plot, drawn: Map, row: int) -> float:
    """The upper edge of a row."""
    return plot.top + (len(drawn.rows) - 1 - row) * size(plot, drawn)[1]


def _frame(x: float, y: float, w: float, h: float, look: Any) -> list[str]:
    return [_outline(x, y, w, h, look.paper, 3), _outline(x, y, w, h, look.ink)]


def _outline(x: float, y: float, w: float, h: float, color: str, line: float = 1) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
    return f'<rect {at} fill="none" stroke="{color}" stroke-width="{line}"/>'


def _number(words: str, x: float, y: float, anchor: str, look: Any) -> str:
    halo = f'stroke="{look.paper}" stroke-width="3" stroke-linejoin="round" paint-order="stroke" pointer-events="none"'
    at = f'x="{x:.1f}" y="{y + 3.5:.1f}" font-size="10" font-weight="600" text-anchor="{anchor}" fill="{look.ink}"'
    return f"<text {at} {halo}>{say(words)}</text>"

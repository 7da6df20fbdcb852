"""Shares of a logit as bars with their sum, and its largest paths as strips.

Findings of `t2lens.analysis.attribute_logits` and `top_paths`. Marks carry `data-tip` and the node that wrote a share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from t2lens.viz.colors import THEMES, ThemeName, shade
from t2lens.viz.labels import fmt, glyphs
from t2lens.viz.svg import TEXT, document, fit, heading, mark, round_ticks, words

__all__ = ["Sum", "path_strips", "share_bars", "shares_of"]


@dataclass(frozen=True, kw_only=True)
class Sum:
    """Shares and what they sum to. names, atoms, shares [part], the bias last; whole: what the model gives itself."""

    names: tuple[str, ...]
    atoms: tuple[str, ...]
    shares: np.ndarray
    whole: float
    pos: int
    what: str

    @property
    def error(self) -> float:
        return float(self.shares.sum()) - self.whole

    @property
    def line(self) -> str:
        """The sum and the model's own number, in words."""
        total, off = fmt(float(self.shares.sum())), f"{abs(self.error):.0e}" if self.error else "0"
        return f"sum = {total}, {self.what} = {fmt(self.whole)}, off by {off}"


def shares_of(finding: Any, *, above_mean: bool = False) -> Sum:
    """The shares of a finding of `attribute_logits`; above_mean: each less its mean over all tokens."""
    data = finding.dataset
    against = "against" in data.coords
    above_mean = above_mean and not against
    return Sum(
        names=tuple(map(str, data["part"].values)),
        atoms=tuple(map(str, data["atom"].values)),
        shares=data["share_above_mean" if above_mean else "share"].values.astype(float),
        whole=float(finding.rows[0][2]) if above_mean else float(data["logit"]),
        pos=int(data["column"]),
        what="logit less its mean over tokens"
        if above_mean
        else f"{'difference of logits' if against else 'logit'} of the model",
    )


def share_bars(
    made: Sum,
    *,
    title: str,
    by_size: bool,
    limits: tuple[float, float],
    width: int = 680,
    theme: ThemeName = "light",
) -> str:
    """Signed bars of the parts, from the embedding up or the largest first, the bias, and the line of their sum."""
    look, height, top = THEMES[theme], 16, 34
    order = list(range(len(made.names) - 1))
    order = sorted(order, key=lambda i: -abs(made.shares[i])) if by_size else order[::-1]
    if made.shares[-1]:
        order.append(len(made.names) - 1)
    left, right = 84, 78
    room, (low, high) = width - left - right, limits

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * room

    bottom = top + height * len(order)
    parts = [heading(title, theme)]
    for tick in round_ticks(low, high, log=False):
        parts.append(
            f'<path d="M{x(tick):.1f} {top - 2}V{bottom + 2}" stroke="{look.hair}" stroke-width=".6" '
            'stroke-dasharray="1 3"/>'
        )
        parts.append(words(x(tick), bottom + 14, fmt(tick, 3), look.mute, anchor="middle"))
    for row, i in enumerate(order):
        y, value = top + row * height, float(made.shares[i])
        node = {"site": made.atoms[i], "way": "", "pos": made.pos} if made.atoms[i] else None
        share = f", {value / made.whole:.1%} of the whole" if made.whole else ""
        tip = f"{made.names[i]}: {fmt(value)} logits{share}"
        bar = {"x": min(x(0), x(value)), "y": y + 2, "width": max(abs(x(value) - x(0)), 0.6), "height": height - 4}
        parts.append(mark("rect", tip, node, **bar, fill=shade("both", 0.86 if value > 0 else 0.14, theme)))
        wide = {"x": 0, "y": y, "width": width, "height": height, "fill": look.ink, "fill_opacity": 0}
        parts.append(mark("rect", tip, node, **wide))
        parts.append(words(left - 8, y + 11.5, made.names[i], look.ink, anchor="end", idle=True))
        parts.append(words(width - 8, y + 11.5, _signed(value), look.ink, anchor="end", idle=True))
    parts.append(f'<path d="M{x(0):.1f} {top - 2}V{bottom + 2}" stroke="{look.mute}" stroke-width=".9"/>')
    line = bottom + 22
    parts.append(f'<path d="M0 {line}H{width - 8}" stroke="{look.ink}" stroke-width=".9"/>')
    total = words(4, line + 16, made.line, look.ink, bold=True, size=TEXT + 1)
    about = f"{title}: {made.line}."
    return document("".join([*parts, total]), width, line + 26, about, theme)


# --- paths -----------------------------------------------------------------------------------------------------------

_NODE = re.compile(r"(?P<atom>[^@]+)(?:@(?P<pos>\d+))?")


def path_strips(finding: Any, *, title: str, width: int = 680, theme: ThemeName = "light") -> str:
    """The paths of a finding of `top_paths`, one a line from its beginning to the logit, with value, share and the sum
    so far; below, how much of the logit they are."""
    look, data, tokens = THEMES[theme], finding.dataset, [str(token) for token in finding.dataset["token"].values]
    values, whole = data["value"].values.astype(float), float(data["logit"])
    paths = [_steps(str(name)) for name in data["path"].values]
    numbers, row, top = 208, 34, 50
    longest = max((len(path) for path in paths), default=1)
    box = min(86.0, (width - numbers - 48) / longest - 12)
    most, running = float(np.abs(values).max()) if values.size else 1.0, 0.0
    parts = [heading(title, theme)]
    columns = {"value": width - 130, "share": width - 78, "sum so far": width - 8}
    parts += [words(x, top - 8, name, look.mute, anchor="end") for name, x in columns.items()]
    for i, (path, value) in enumerate(zip(paths, values, strict=True)):
        y = top + i * row
        running += value
        color = shade("both", 0.86 if value > 0 else 0.14, theme)
        x = width - numbers - 40 - (box + 12) * len(path)
        for name, pos in path:
            parts.append(_box(name, pos, tokens, x, y, box, color, theme))
            parts.append(_arrow(x + box, y + 13, look.mute))
            x += box + 12
        parts.append(words(x + 2, y + 16.5, "logit", look.ink))
        parts.append(
            f'<rect x="{width - numbers + 2}" y="{y + 22}" width="{72 * abs(value) / most:.1f}" height="3" '
            f'fill="{color}"/>'
        )
        share = f"{value / whole:.0%}".replace("-", "\u2212") if whole else ""
        for number, at in zip((_signed(value), share, _signed(running)), columns.values(), strict=True):
            parts.append(words(at, y + 16.5, number, look.ink, anchor="end"))
    y = top + row * len(paths) + 6
    parts.append(f'<path d="M0 {y}H{width - 8}" stroke="{look.ink}" stroke-width=".9"/>')
    off = abs(float(data["error"]))
    part = f" ({float(values.sum()) / whole:.0%})" if whole else ""
    said = (
        f"these {len(paths)} = {fmt(float(values.sum()))}{part}, all paths = {fmt(float(data['total']))}, "
        f"logit of the model = {fmt(whole)}, off by {f'{off:.0e}' if off else '0'}"
    )
    parts.append(words(4, y + 17, said, look.ink, bold=True, size=TEXT + 1))
    return document("".join(parts), width, y + 28, f"{title}: {said}.", theme)


def _steps(name: str) -> list[tuple[str, int | None]]:
    """(atom, position) of a path's name, from its beginning to the readout; an end that is no atom has no position."""
    steps: list[tuple[str, int | None]] = []
    for word in reversed(name.split(" <- ")[1:]):
        found = _NODE.fullmatch(word)
        assert found is not None, name
        steps.append((found["atom"], None if found["pos"] is None else int(found["pos"])))
    return steps


def _box(
    name: str, pos: int | None, tokens: Sequence[str], x: float, y: float, box: float, color: str, theme: ThemeName
) -> str:
    look = THEMES[theme]
    if name == "...":
        return words(x + box / 2, y + 16.5, "\u2026", look.mute, anchor="middle")
    node = {"site": name, "way": "", "pos": pos} if pos is not None else None
    said = f"{name} at position {pos}, {glyphs(tokens[pos])}" if pos is not None else f"{name} of the next sublayer"
    shape = {"x": x, "y": y, "width": box, "height": 27, "rx": 3, "fill": look.blank, "stroke": color}
    first = words(x + box / 2, y + 11.5, fit(name, box - 6, TEXT), look.ink, anchor="middle", idle=True)
    if pos is None:
        return mark("rect", said, node, **shape) + first
    under = fit(f"{glyphs(tokens[pos])} {pos}", box - 6, TEXT - 1)
    return (
        mark("rect", said, node, **shape)
        + first
        + words(x + box / 2, y + 22.5, under, look.mute, anchor="middle", size=TEXT - 1, idle=True)
    )


def _arrow(x: float, y: float, color: str) -> str:
    return f'<path d="M{x + 1.5:.1f} {y}h7m-3 -2.5l3 2.5l-3 2.5" fill="none" stroke="{color}"/>'


def _signed(value: float) -> str:
    """Three digits after the point, so that columns align."""
    return f"{value:+.3f}".replace("-", "\u2212") if math.isfinite(value) else ""

"""Shares of a logit as bars with their sum, beside the effects of writes, and its largest paths as strips.

Findings of `t2lens.analysis.attribute_logits`, `ablate_writes` and `top_paths`. Marks carry `data-tip` and the
node that wrote a share.
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

__all__ = [
    "EFFECTS",
    "Sum",
    "effects_in",
    "path_strips",
    "range_of_bars",
    "share_and_effect",
    "share_bars",
    "shares_of",
]

_ROW, _TOP = 16, 34


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
    order = _order(made.shares[:-1], by_size=by_size)
    if made.shares[-1]:
        order.append(len(made.names) - 1)
    rows = []
    for i in order:
        node = {"site": made.atoms[i], "way": "", "pos": made.pos} if made.atoms[i] else None
        share = f", {made.shares[i] / made.whole:.1%} of the whole" if made.whole else ""
        rows.append(_Row(made.names[i], f"{made.names[i]}: {fmt(float(made.shares[i]))} logits{share}", node))
    bars = _Bars(made.shares[order], limits, 84, width - 78, width - 8)
    return _table(title, rows, [bars], made.line, _TOP, width, theme)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """An effect of `ablate_writes`, in words. lost: shown is what is less without the write, so that what a write adds
    is positive, like its share."""

    label: str
    unit: str
    lost: bool


EFFECTS = {
    "kl": Effect(label="shift of the prediction without it", unit="KL, nats", lost=False),
    "logit": Effect(label="logit lost without it", unit="logits", lost=True),
    "probability": Effect(label="probability lost without it", unit="probability", lost=True),
}
"""What can stand beside the shares."""


def effects_in(finding: Any, effect: str) -> np.ndarray:
    """[write]: an effect of `EFFECTS` of one sequence, as it is shown."""
    values = finding.dataset[effect].values.astype(float)
    return 0.0 - values if EFFECTS[effect].lost else values  # no minus before zero


def range_of_bars(tables: Sequence[np.ndarray]) -> tuple[float, float]:
    """The range of bars from zero that all of these share, with some room at its ends."""
    every = np.concatenate([[0.0], *tables])
    every = every[np.isfinite(every)]
    low, high, room = float(every.min()), float(every.max()), 0.04 * float(np.ptp(every))
    return low - room * (low < 0), high + room or 1.0


def share_and_effect(
    finding: Any,
    *,
    title: str,
    effect: str,
    by_size: bool,
    share_limits: tuple[float, float],
    effect_limits: tuple[float, float],
    width: int = 680,
    theme: ThemeName = "light",
) -> str:
    """What each write adds to the logit itself, and beside it an effect of `EFFECTS` of taking it away: a finding of
    `ablate_writes` on one sequence. The order is that of `share_bars`; below, the rank correlation of both sizes."""
    look, how, data = THEMES[theme], EFFECTS[effect], finding.dataset
    shares, effects = data["share"].values.astype(float), effects_in(finding, effect)
    order, rows = _order(shares if np.isfinite(shares).any() else effects, by_size=by_size), []
    for name in data["write"].values[order]:
        at = data.sel(write=name)
        change = 0.0 - float(at[effect]) if how.lost else float(at[effect])
        tip = f"{name}: adds {fmt(float(at['share']))} logits itself\n{how.label}: {fmt(change)} ({how.unit})"
        rows.append(_Row(str(name), tip, {"site": str(name), "way": "", "pos": int(data["column"])}))
    middle = 84 + (width - 84) // 2
    left = _Bars(shares[order], share_limits, 84, middle - 78, middle - 18)
    right = _Bars(effects[order], effect_limits, middle + 8, width - 78, width - 8, signed=how.lost)
    agree = float(data["spearman"].sel(measure=effect))
    line = (
        f"rank correlation of the two, by size, over {len(rows)} writes = {fmt(agree, 2)} (1: the same order)"
        if math.isfinite(agree)
        else "no rank correlation: one of the two does not differ between writes"
    )
    heads = [(84, "what it adds to the logit itself (logits)"), (middle + 8, f"{how.label} ({how.unit})")]
    above = "".join(words(x, _TOP + 2, fit(text, width - x, TEXT), look.mute) for x, text in heads)
    return _table(title, rows, [left, right], line, _TOP + 12, width, theme, above)


def _order(values: np.ndarray, *, by_size: bool) -> list[int]:
    """The largest first, or what comes last in depth first."""
    order = list(range(len(values)))
    return sorted(order, key=lambda i: -abs(values[i])) if by_size else order[::-1]


@dataclass(frozen=True)
class _Row:
    name: str
    tip: str
    node: dict[str, Any] | None


@dataclass(frozen=True)
class _Bars:
    """A column of bars: a value of each row (NaN: none), from left to right, and where their numbers end."""

    values: np.ndarray
    limits: tuple[float, float]
    left: float
    right: float
    numbers: float
    signed: bool = True

    def x(self, value: float) -> float:
        low, high = self.limits
        return self.left + (value - low) / (high - low) * (self.right - self.left)


def _table(
    title: str,
    rows: Sequence[_Row],
    columns: Sequence[_Bars],
    line: str,
    top: float,
    width: int,
    theme: ThemeName,
    above: str = "",
) -> str:
    """Rows with their names and columns of signed bars, and a line below."""
    look, bottom, parts = THEMES[theme], top + _ROW * len(rows), [heading(title, theme), above]
    for bars in columns:
        for tick in round_ticks(*bars.limits, log=False):
            parts.append(
                f'<path d="M{bars.x(tick):.1f} {top - 2}V{bottom + 2}" stroke="{look.hair}" stroke-width=".6" '
                'stroke-dasharray="1 3"/>'
            )
            parts.append(words(bars.x(tick), bottom + 14, fmt(tick, 3), look.mute, anchor="middle"))
    for i, row in enumerate(rows):
        y = top + i * _ROW
        for bars in columns:
            value = float(bars.values[i])
            if math.isfinite(value):
                x = min(bars.x(0), bars.x(value))
                bar = {"x": x, "y": y + 2, "width": max(abs(bars.x(value) - bars.x(0)), 0.6), "height": _ROW - 4}
                fill = shade("both", 0.86 if value > 0 else 0.14, theme)
                parts.append(mark("rect", row.tip, row.node, **bar, fill=fill))
        wide = {"x": 0, "y": y, "width": width, "height": _ROW, "fill": look.ink, "fill_opacity": 0}
        parts.append(mark("rect", row.tip, row.node, **wide))
        parts.append(words(76, y + 11.5, row.name, look.ink, anchor="end", idle=True))
        for bars in columns:
            number = _signed(float(bars.values[i]), "+" if bars.signed else "")
            parts.append(words(bars.numbers, y + 11.5, number, look.ink, anchor="end", idle=True))
    for bars in columns:
        parts.append(f'<path d="M{bars.x(0):.1f} {top - 2}V{bottom + 2}" stroke="{look.mute}" stroke-width=".9"/>')
    end = bottom + 22
    parts.append(f'<path d="M0 {end}H{width - 8}" stroke="{look.ink}" stroke-width=".9"/>')
    parts.append(words(4, end + 16, line, look.ink, bold=True, size=TEXT + 1))
    return document("".join(parts), width, end + 26, f"{title}: {line}.", theme)


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


def _signed(value: float, sign: str = "+") -> str:
    """Three digits after the point, so that columns align."""
    return f"{value:{sign}.3f}".replace("-", "\u2212") if math.isfinite(value) else ""

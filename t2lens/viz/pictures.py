"""Findings as SVG pictures: the same numbers as their plotly figures, drawn for a page, a paper or a slide.

A picture is one complete SVG document, with no script and nothing to load. Every mark carries `data-tip` (lines of text
with exact values) and, where its coordinates name a node of the maps, `data-site`, `data-way` and `data-pos`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from t2lens.viz.charts import Drawing, Look, draw, limits_of, palette
from t2lens.viz.colors import ThemeName
from t2lens.viz.dots import Range, limits_for, scale_of
from t2lens.viz.series import Series, series
from t2lens.viz.svg import document

__all__ = ["no_difference", "pair", "picture", "picture_of"]


def picture(
    finding: Any,
    chart: int = 0,
    *,
    theme: ThemeName = "light",
    width: int = 560,
    limits: Range | None = None,
    title: str | None = None,
) -> str:
    """One chart of a finding as an SVG document.

    Args:
        chart: its index. width: pixels. limits: the range of the values (colours, or the value axis), by default their
            own; signed colour scales are symmetric around 0. title: in place of the chart's own.

    Raises:
        IndexError: there is no such chart.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import logit_lens
        >>> from t2lens.viz.pictures import picture
        >>> finding = logit_lens(t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=1)), [0, 7])
        >>> picture(finding)[:4]
        '<svg'
    """
    made = series(finding, chart)
    look = Look(theme=theme, width=width, limits=limits)
    drawn = draw(made, look, title=title or made.title, notes=_counted(finding))
    return document(drawn.body, drawn.width, drawn.height, drawn.about, theme)


def pair(
    findings: Sequence[Any],
    chart: int = 0,
    names: Sequence[str] = ("", ""),
    *,
    difference: bool = False,
    shared: bool = True,
    theme: ThemeName = "light",
    width: int = 1120,
) -> str:
    """The same chart of two findings side by side on one shared scale; `difference` adds B - A on a scale of its own.

    names: what A and B are, for their titles. shared False: each on a scale of its own. ValueError where the two have
    no common scale, or nothing can be subtracted.
    """
    a, b = (series(each, chart) for each in findings)
    if shared and (a.kind, a.label) != (b.kind, b.label):
        raise ValueError(f"A draws {a.label} ({a.kind}) and B draws {b.label} ({b.kind}): they have no common scale.")
    shown = [a, b, *([_subtract(a, b)] if difference else [])]
    look = Look(theme=theme, width=(width - 20 * (len(shown) - 1)) // len(shown))
    if shared:
        look = replace(look, limits=_union([limits_of(a), limits_of(b)]))
        if a.across is not None and b.across is not None:
            bends = scale_of(a.across, b.across), scale_of(a.values, b.values)
            across = _union([limits_for(each, bends[0]) for each in (a.across, b.across)])
            limits = _union([limits_for(each, bends[1]) for each in (a.values, b.values)])
            look = replace(look, across=across, limits=limits, bends=bends)
    known = list(dict.fromkeys([*a.names, *b.names]))
    colors = dict(zip(known, palette(known, theme, a.by), strict=True))
    drawings = []
    for i, made in enumerate(shown):
        own = replace(look, palette=tuple(colors[name] for name in made.names))
        if i == 2:
            own, title = replace(own, limits=None), f"B \u2212 A: {made.title}"
            notes = ["B \u2212 A has a scale of its own, centred at 0."]
        else:
            title, notes = f"{'AB'[i]}{' ' if names[i] else ''}{names[i]}: {made.title}", _counted(findings[i])
        drawings.append(draw(made, own, title=title, notes=notes))
    return _beside(drawings, look.width + 20, theme)


def picture_of(
    findings: Sequence[Any],
    chart: int = 0,
    names: Sequence[str] = ("", ""),
    *,
    difference: bool = False,
    theme: ThemeName = "light",
    width: int = 560,
) -> str:
    """A chart of one finding, or of two beside each other: on one scale where they have one, with B - A where asked for
    and where it has a meaning. width: of each picture."""
    if len(findings) == 1 or not all(chart < len(each.charts) for each in findings):
        return picture(next(each for each in findings if chart < len(each.charts)), chart, theme=theme, width=width)
    more = difference and not no_difference(findings[0], findings[1], chart)
    look: dict[str, Any] = {"difference": more, "theme": theme, "width": width * 2 + 20}
    try:
        return pair(findings, chart, names, **look)
    except ValueError:
        return pair(findings, chart, names, shared=False, **{**look, "difference": False})


def no_difference(a: Any, b: Any, chart: int = 0) -> str:
    """Why B - A of one chart has no meaning, in a sentence, or "" where it has one."""
    try:
        _subtract(series(a, chart), series(b, chart))
    except ValueError as error:
        return str(error)
    return ""


def _beside(drawings: Sequence[Drawing], step: int, theme: ThemeName) -> str:
    parts = [f'<g transform="translate({step * i} 0)">{each.body}</g>' for i, each in enumerate(drawings)]
    width = step * (len(drawings) - 1) + drawings[-1].width
    about = " ".join(each.about for each in drawings)
    return document("".join(parts), width, max(each.height for each in drawings), about, theme)


def _subtract(a: Series, b: Series) -> Series:
    if a.kind == "scatter":
        raise ValueError("A dot has no counterpart in the other model, so B \u2212 A has no meaning here.")
    for name, ours, theirs in (("x", a.x, b.x), ("rows", a.y or a.by, b.y or b.by)):
        if (ours and (ours.name, ours.full)) != (theirs and (theirs.name, theirs.full)):
            axis = ours.label if ours else name
            raise ValueError(f"A and B do not have the same places on the axis {axis!r}, so B \u2212 A has no meaning.")
    with np.errstate(invalid="ignore"):  # infinite in both: no difference
        values = np.subtract(b.values, a.values, dtype=np.result_type(a.values, b.values, np.float32))
    return replace(
        a, values=values, signed=True, label=f"B \u2212 A, {a.label}", kind=a.kind if a.kind != "stack" else "bars"
    )


def _union(ranges: Sequence[Any]) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


_COUNT = re.compile(r"\bn = \d|\b[Oo]ver \d|\bof \d+ (?:tokens|texts|positions|sequences)")


def _counted(finding: Any) -> list[str]:
    """What the notes of a finding say about how many were averaged: the first such sentence."""
    sentences = (part for note in finding.notes for part in re.split(r"(?<=[.;]) ", note))
    return [next((s.rstrip(";.") + "." for s in sentences if _COUNT.search(s)), "")]

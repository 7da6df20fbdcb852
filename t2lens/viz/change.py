"""What edits change, as pictures: the next tokens clean and edited, and where along the prompt predictions move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from t2lens.viz.colors import THEMES, ThemeName
from t2lens.viz.labels import clip, fmt, glyphs
from t2lens.viz.svg import document, fit, heading, mark, words

__all__ = ["before_after", "kl_strip", "next_tokens"]

_ROW, _HALF = 22, 68  # pixels of a line, and of the tokens in the middle from there to either side
_SMALL = 5e-4  # a change of a probability that does not show in three digits


def before_after(
    tokens: Sequence[str],
    before: np.ndarray,
    after: np.ndarray,
    *,
    names: tuple[str, str],
    title: str,
    n: int = 10,
    most: float | None = None,
    theme: ThemeName = "light",
    width: int = 560,
) -> str:
    """The n tokens that are likeliest in either of two predictions, the one to the left and the other to the right, on
    one scale from 0 to `most` (default: the largest), with arrows; below, all others together.

    tokens, before, after: [token]. names: of the two predictions.
    """
    look, shown = THEMES[theme], [glyphs(str(each)) for each in tokens]
    order = np.argsort(-np.maximum(before, after), kind="stable")[:n]
    order = order[np.argsort(-before[order], kind="stable")]
    top = most or max(float(np.maximum(before, after).max()), 1e-9)
    left, right, room = width / 2 - _HALF, width / 2 + _HALF, width / 2 - _HALF - 48
    body = [
        heading(title, theme),
        words(left, 38, names[0], look.mute, anchor="end"),
        words(right, 38, names[1], look.mute),
    ]
    for row, j in enumerate(order):
        y, p, q = 46.0 + _ROW * row, float(before[j]), float(after[j])
        still = abs(q - p) < _SMALL
        color = look.mute if still else look.series[1 if q > p else 0]
        tip = f"{shown[j]}\n{names[0]} {p:.6g}, {names[1]} {q:.6g}: {q - p:+.6g}"
        a, b = room * min(p / top, 1.0), room * min(q / top, 1.0)
        body.append(mark("rect", tip, x=left - a, y=y, width=max(a, 0.5), height=15.0, fill=look.mute))
        body.append(mark("rect", tip, x=right, y=y, width=max(b, 0.5), height=15.0, fill=color))
        arrow = "" if still else " \u2191" if q > p else " \u2193"
        body.append(words(left - a - 5, y + 11.5, f"{p:.3f}", look.ink, anchor="end"))
        body.append(words(right + b + 5, y + 11.5, f"{q:.3f}{arrow}", look.ink))
        body.append(words(width / 2, y + 12, fit(shown[j], 2 * _HALF - 8, 12), look.ink, anchor="middle", size=12))
    y = 46.0 + _ROW * len(order) + 12
    for x, anchor, rest in ((left - 5, "end", before), (right + 5, "start", after)):
        body.append(words(x, y, f"{max(1 - float(rest[order].sum()), 0.0):.3f}", look.mute, anchor=anchor))
    body.append(words(width / 2, y, "all others", look.mute, anchor="middle"))
    return document("".join(body), width, y + 10, f"Likeliest next tokens, {names[0]} and {names[1]}. {title}.", theme)


def next_tokens(finding: Any, *, theme: ThemeName = "light", width: int = 560) -> str:
    """The likeliest next tokens after the position, clean and edited. finding: of `t2lens.analysis.edit_change`."""
    data = finding.dataset
    at = data.attrs["position"]
    title = f"Probability of the next token after {glyphs(str(data['token'].values[at]))} (position {at})"
    clean, edited = data["probability"].values
    names = ("clean", "edited")
    return before_after(data["word"].values, clean, edited, names=names, title=title, theme=theme, width=width)


def kl_strip(finding: Any, *, theme: ThemeName = "light", width: int = 560, height: int = 96) -> str:
    """KL(clean || edited) of every position as bars over the prompt, with the chosen position told apart."""
    look, data = THEMES[theme], finding.dataset
    kl, tokens, at = data["kl"].values, [glyphs(str(each)) for each in data["token"].values], data.attrs["position"]
    left, top, n = 2.0, 30.0, len(kl)
    step = (width - 2 * left) / n
    most = float(np.nanmax(kl)) if n else 0.0
    body = [heading(f"How far the edits move each prediction: KL(clean || edited), 0 to {fmt(most, 3)} nats", theme)]
    floor = top + height
    for i, value in enumerate(kl.tolist()):
        tall = height * value / most if most > 0 else 0.0
        tip = f"{tokens[i]} (position {i})\nKL {value:.6g} nats"
        node = {"pos": i}
        body.append(mark("rect", "", None, x=left + step * i, y=top, width=step, height=height, fill="none"))
        color = look.ink if i == at else look.series[0]
        wide = max(step - (1.5 if step > 4 else 0), 0.5)
        body.append(
            mark("rect", tip, node, x=left + step * i, y=floor - tall, width=wide, height=max(tall, 0.8), fill=color)
        )
    body.append(mark("line", x1=left, x2=width - left, y1=floor + 0.5, y2=floor + 0.5, stroke=look.hair))
    every = max(1, int(np.ceil(n * 9.0 / (width - 2 * left))))
    shown = [i for i in range(0, n, every) if i == at or abs(i - at) >= every]
    for i in dict.fromkeys([*shown, at]):
        x, color = left + step * (i + 0.5) + 3.5, look.ink if i == at else look.mute
        name = clip(tokens[i], 10)
        body.append(words(x, floor + 6, name, color, size=10, anchor="end", bold=i == at, upright=True))
    return document("".join(body), width, floor + 66, "KL between clean and edited prediction by position.", theme)

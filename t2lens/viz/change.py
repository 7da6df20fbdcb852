"""What edits change, as pictures: the next tokens clean and edited, and where along the prompt predictions move."""

from __future__ import annotations

from typing import Any

import numpy as np

from t2lens.viz.colors import THEMES, ThemeName
from t2lens.viz.labels import clip, fmt, glyphs
from t2lens.viz.svg import document, mark, say

__all__ = ["kl_strip", "next_tokens"]

_SIZE = 11.0
_ROW = 22
_SMALL = 5e-4  # a change of a probability that does not show in three digits


def _text(
    x: float, y: float, words: str, color: str, anchor: str = "start", size: float = _SIZE, weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{color}" style="font-variant-numeric:tabular-nums">{say(words)}</text>'
    )


def next_tokens(finding: Any, *, theme: ThemeName = "light", width: int = 560, n: int = 10) -> str:
    """The likeliest next tokens after the position, clean to the left and edited to the right, on one scale from 0.

    finding: of `t2lens.analysis.edit_change`. The n tokens that are likeliest in either pass are shown.
    """
    look, data = THEMES[theme], finding.dataset
    clean, edited = data["probability"].values
    words = [glyphs(str(each)) for each in data["word"].values]
    order = np.argsort(-np.maximum(clean, edited), kind="stable")[:n]
    order = order[np.argsort(-clean[order], kind="stable")]
    top = max(float(np.maximum(clean, edited).max()), 1e-9)
    middle, half = width / 2, 70
    room = middle - half - 48
    token = glyphs(str(data["token"].values[data.attrs["position"]]))
    body = [
        _text(2, 16, f"Next token after {token} (position {data.attrs['position']})", look.ink, size=12.5, weight=600),
        _text(middle - half, 36, "clean", look.mute, "end"),
        _text(middle + half, 36, "edited", look.mute),
    ]
    for row, j in enumerate(order):
        y, p, q = 44.0 + _ROW * row, float(clean[j]), float(edited[j])
        still = abs(q - p) < _SMALL
        color = look.mute if still else look.series[1 if q > p else 0]
        tip = f"{words[j]}\nclean {p:.6g}, edited {q:.6g}: {q - p:+.6g}"
        a, b = room * p / top, room * q / top
        body.append(mark("rect", tip, x=middle - half - a, y=y, width=max(a, 0.5), height=15.0, fill=look.mute))
        body.append(mark("rect", tip, x=middle + half, y=y, width=max(b, 0.5), height=15.0, fill=color))
        arrow = "" if still else " \u2191" if q > p else " \u2193"
        body.append(_text(middle - half - a - 5, y + 11.5, f"{p:.3f}", look.ink, "end"))
        body.append(_text(middle + half + b + 5, y + 11.5, f"{q:.3f}{arrow}", look.ink))
        body.append(_text(middle, y + 12, clip(words[j], 17), look.ink, "middle", 12.0))
    y = 44.0 + _ROW * len(order) + 12
    for x, anchor, rest in ((middle - half - 5, "end", clean), (middle + half + 5, "start", edited)):
        body.append(_text(x, y, f"{max(1 - float(rest[order].sum()), 0.0):.3f}", look.mute, anchor))
    body.append(_text(middle, y, "all others", look.mute, "middle"))
    return document("".join(body), width, y + 10, f"Likeliest next tokens after {token}, clean and edited.", theme)


def kl_strip(finding: Any, *, theme: ThemeName = "light", width: int = 560, height: int = 96) -> str:
    """KL(clean || edited) of every position as bars over the prompt, with the chosen position told apart."""
    look, data = THEMES[theme], finding.dataset
    kl, tokens, at = data["kl"].values, [glyphs(str(each)) for each in data["token"].values], data.attrs["position"]
    left, top, n = 2.0, 30.0, len(kl)
    step = (width - 2 * left) / n
    most = float(np.nanmax(kl)) if n else 0.0
    body = [_text(2, 16, f"KL(clean || edited) by position, 0 to {fmt(most, 3)} nats", look.ink, size=12.5, weight=600)]
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
        x, color = left + step * (i + 0.5), look.ink if i == at else look.mute
        weight = 600 if i == at else 400
        body.append(
            f'<text transform="translate({x + 3.5:.1f} {floor + 6:.1f}) rotate(-90)" font-size="10" text-anchor="end" '
            f'font-weight="{weight}" fill="{color}">{say(clip(tokens[i], 10))}</text>'
        )
    return document("".join(body), width, floor + 66, "KL between clean and edited prediction by position.", theme)

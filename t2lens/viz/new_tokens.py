"""A continuation as a picture: the text with its new tokens, and what else each of them might have been.

Findings of `t2lens.analysis.continue_text`. Marks carry `data-tip` and the node of the maps that predicted the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from t2lens.viz.colors import THEMES, ThemeName, ink_on, shade
from t2lens.viz.labels import fmt, glyphs
from t2lens.viz.svg import HEAD, TEXT, color_bar, document, fit, heading, mark, text_width, words

__all__ = ["first_difference", "new_tokens_picture"]

_BEFORE = 12  # tokens of the prompt that are shown before the new ones
_COLUMN, _LINE, _TOP = 94, 15, 34


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two lists of tokens first differ, or None where they do not as far as both go.

    >>> first_difference([1, 2, 3], [1, 5, 3]), first_difference([1, 2], [1, 2, 3])
    (1, None)
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def new_tokens_picture(
    finding: Any,
    *,
    title: str,
    before: Sequence[str] = (),
    differs: int | None = None,
    width: int = 680,
    theme: ThemeName = "light",
) -> str:
    """The end of the prompt (`before`, token strings) with the new tokens, coloured by their probability, and for each
    its alternatives. differs: the new token at which another continuation goes its own way, which is marked."""
    look, data = THEMES[theme], finding.dataset
    new = [glyphs(str(token)) for token in data["token"].values]
    chances = data["probability"].values.astype(float)
    parts = [heading(fit(title, width - 8, HEAD, bold=True), theme)]
    parts_of_text, y = _running_text(finding, new, chances, before, differs, width, theme)
    parts += parts_of_text
    per_row, k = max(1, (width - 8) // _COLUMN), data.sizes["k"]
    high = 20 + _LINE * k + 34
    for i, word in enumerate(new):
        left, top = 4 + (i % per_row) * _COLUMN, y + 16 + (i // per_row) * high
        if i == differs:
            parts.append(f'<path d="M{left - 3} {top - 2}v{high - 14}" stroke="{look.bad}" stroke-width="1.6"/>')
        pos = int(data["pos"][i])
        tip = _tip(finding, i, word)
        box = {"x": left, "y": top - 3, "width": _COLUMN - 10, "height": high - 14, "fill": look.ink}
        parts.append(mark("rect", tip, _node(pos), **box, fill_opacity=0))
        parts.append(words(left, top + 8, fit(word, _COLUMN - 34, TEXT + 1, bold=True), look.ink, bold=True, idle=True))
        parts.append(words(left + _COLUMN - 14, top + 8, str(pos), look.mute, anchor="end", size=TEXT - 1, idle=True))
        own = int(data["id"][i])
        for j in range(k):
            p, line = float(data["top_probability"][i, j]), top + 14 + j * _LINE
            mine = int(data["top_id"][i, j]) == own
            bar = f'width="{max(p * (_COLUMN - 14), 0.5):.1f}" height="{_LINE - 2}"'
            color = shade("cool", 0.55 if mine else 0.18, theme)
            parts.append(f'<rect x="{left}" y="{line}" {bar} fill="{color}" pointer-events="none"/>')
            other = fit(glyphs(str(data["top_token"].values[i, j])), _COLUMN - 46, TEXT - 0.5, bold=mine)
            ink = ink_on(color) if mine and p * (_COLUMN - 14) > text_width(other, TEXT) + 6 else look.ink
            parts.append(words(left + 3, line + 10, other, ink, bold=mine, size=TEXT - 0.5, idle=True))
            at = left + _COLUMN - 14
            number = ink_on(color) if p > 0.93 and mine else look.ink
            parts.append(words(at - 2, line + 10, f"{p:.2f}", number, anchor="end", size=TEXT - 0.5, idle=True))
        rank = int(data["rank"][i])
        line = top + 14 + k * _LINE + 10
        said = f"H {float(data['entropy'][i]):.2f}" + (f", #{rank}: {chances[i]:.3f}" if rank > 1 else "")
        parts.append(words(left, line, said, look.mute, size=TEXT - 0.5, idle=True))
    rows = -(-len(new) // per_row)
    bottom = y + 16 + rows * high
    legend = "H: entropy in nats. #: rank and probability of a new token that is not the likeliest."
    parts.append(_scale(bottom, theme))
    parts.append(words(4, bottom + 16, legend, look.mute))
    return document("".join(parts), width, bottom + 26, f"{title}: {' '.join(new)}", theme)


def _running_text(
    finding: Any,
    new: list[str],
    chances: np.ndarray,
    before: Sequence[str],
    differs: int | None,
    width: int,
    theme: ThemeName,
) -> tuple[list[str], int]:
    """The text in lines, and the y where it ends."""
    look, size = THEMES[theme], 13.0
    x, y, parts = 4.0, _TOP, []
    shown = [glyphs(token) for token in before][-_BEFORE:]
    lead = ["\u2026"] if len(before) > _BEFORE else []
    for i, word in enumerate([*lead, *shown, *new], start=-len(lead) - len(shown)):
        wide = text_width(word, size) + (4 if i >= 0 else 1)
        if x + wide > width - 8:
            x, y = 4.0, y + 22
        if i < 0:
            parts.append(words(x, y + 14, word, look.mute, size=size))
        else:
            color = shade("cool", 0.9 * float(chances[i]), theme)
            box = {"x": x, "y": y, "width": wide, "height": 18, "rx": 2, "fill": color}
            parts.append(mark("rect", _tip(finding, i, word), _node(int(finding.dataset["pos"][i])), **box))
            parts.append(words(x + 2, y + 14, word, ink_on(color), size=size, idle=True))
        if i == differs and differs is not None:
            parts.append(f'<path d="M{x - 1:.1f} {y - 3}v24" stroke="{look.bad}" stroke-width="1.8"/>')
        x += wide + (1.5 if i >= 0 else 0)
    return parts, y + 26


def _scale(y: float, theme: ThemeName) -> str:
    """What the colours of the new tokens mean."""
    look, wide, x = THEMES[theme], 60, 168
    said = words(4, y, "new tokens, by probability:", look.mute) + words(x - 6, y, "0", look.mute, anchor="end")
    bar = color_bar(lambda share: shade("cool", 0.9 * share, theme), x, y - 8, wide)
    return said + bar + words(x + wide + 6, y, "1; red: where the other text goes its own way", look.mute)


def _tip(finding: Any, i: int, word: str) -> str:
    data = finding.dataset
    p, entropy = float(data["probability"][i]), float(data["entropy"][i])
    drawn = float(data["drawn_from"][i])
    others = "  ".join(
        f"{glyphs(str(token))} {fmt(float(chance), 3)}"
        for token, chance in zip(data["top_token"].values[i], data["top_probability"].values[i], strict=True)
    )
    sampled = "" if drawn == 1 else f"\ndrawn with probability {fmt(drawn)}"
    return (
        f"{word} at position {int(data['pos'][i])}\nprobability {fmt(p)}, rank {int(data['rank'][i])}, "
        f"entropy {fmt(entropy)} nats{sampled}\nlikeliest: {others}"
    )


def _node(pos: int) -> dict[str, Any]:
    """The node that predicted the token at `pos`."""
    return {"site": "out", "way": "", "pos": pos - 1}

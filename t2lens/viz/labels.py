"""Tokens and numbers as one visible line of text, the same in pictures, tables and terminals."""

from __future__ import annotations

import html
import math
import re
import unicodedata

__all__ = ["clip", "fmt", "glyphs", "markup_safe", "one_line"]

_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060\u2066-\u206f\ufeff]")
_STYLED = "\ufe0f\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"  # how the emoji before it looks


def glyphs(token: str) -> str:
    """A token as one visible line: spaces, line ends and control characters get a sign of their own, marks that would
    stand on the sign before them a circle; a joiner inside an emoji stays. The maps do the same in the browser.

    >>> print(glyphs(" queen").encode("ascii", "backslashreplace").decode())
    \\xb7queen
    """
    line = token.replace(" ", "\u00b7").replace("\n", "\u21b5").replace("\t", "\u21e5")
    line = _UNSEEN.sub(lambda found: found[0] if _joins(found) else f"\\u{ord(found[0]):04x}", line) or "\u2205"
    return f"\u25cc{line}" if unicodedata.category(line[0]).startswith("M") else line


def _joins(found: re.Match[str]) -> bool:
    """Whether a character is the joiner between two parts of an emoji."""
    before, after = found.string[: found.start()].rstrip(_STYLED)[-1:], found.string[found.end() : found.end() + 1]
    return found[0] == "\u200d" and all(part and unicodedata.category(part) == "So" for part in (before, after))


def one_line(text: str) -> str:
    """Words on one line with a sign for what is unseen; of spaces only those at the ends need one.

    >>> print(one_line(" no erasure").encode("ascii", "backslashreplace").decode())
    \\xb7no erasure
    """
    inner = text.strip(" ")
    before = len(text) - len(text.lstrip(" ")) if inner else 0
    words = " ".join(glyphs(word) if word else "" for word in inner.split(" "))
    return ("\u00b7" * before + words + "\u00b7" * (len(text) - before - len(inner))) or glyphs(text)


def clip(text: str, n: int) -> str:
    """At most n characters, with an ellipsis where some are missing."""
    return text if len(text) <= n else text[: n - 1] + "\u2026"


def markup_safe(text: str) -> str:
    """Text for plotly, which reads <b> and <a href> in labels as markup."""
    return html.escape(text, quote=False)


def fmt(value: float, digits: int = 4) -> str:
    """A number to `digits` significant digits; powers of ten only where they are shorter to read.

    >>> fmt(0.123456), fmt(2.0), fmt(1234.5, 3), fmt(float("nan")), fmt(1.5e-7, 3)
    ('0.1235', '2', '1230', 'nan', '1.5e-7')
    """
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else str(float(value))
    if not 1e-4 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{float(f'{value:.{digits}g}'):.10g}"

"""The one table of colours: ramps of the maps, colours of series, ink and paper, each for light and for dark.

A ramp goes through OKLab in even steps of lightness, so that it also prints in grey: "cool" and "warm" for magnitudes
(the maps draw quantities in the one and reads in the other), "both" for signed values, with 0 in the middle. On light
paper more is darker, on dark paper lighter. Colours of series stay apart under the three common colour blindnesses.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = [
    "FONT",
    "RAMPS",
    "THEMES",
    "RampName",
    "Theme",
    "ThemeName",
    "beta_shade",
    "ink_on",
    "lut",
    "luts_js",
    "ramp",
    "regimes",
    "shade",
]

ThemeName = Literal["light", "dark"]
RampName = Literal["cool", "warm", "both"]

FONT = "Helvetica Neue, Helvetica, Arial, sans-serif"

# an anchor is (lightness, chroma, hue in degrees) of OKLCH
RAMPS: dict[str, dict[str, list[tuple[float, float, float]]]] = {
    "light": {
        "cool": [(0.975, 0.012, 170), (0.84, 0.065, 195), (0.68, 0.095, 225), (0.51, 0.115, 255), (0.32, 0.095, 278)],
        "warm": [(0.98, 0.012, 95), (0.88, 0.085, 82), (0.745, 0.15, 58), (0.58, 0.185, 38), (0.4, 0.14, 25)],
        "both": [(0.4, 0.13, 262), (0.69, 0.1, 245), (0.975, 0.004, 90), (0.72, 0.15, 55), (0.42, 0.15, 28)],
    },
    "dark": {
        "cool": [(0.27, 0.02, 265), (0.41, 0.09, 268), (0.57, 0.11, 245), (0.74, 0.1, 205), (0.92, 0.06, 165)],
        "warm": [(0.27, 0.02, 40), (0.4, 0.1, 30), (0.57, 0.16, 42), (0.745, 0.15, 62), (0.93, 0.08, 95)],
        "both": [(0.8, 0.1, 235), (0.55, 0.12, 255), (0.27, 0.006, 90), (0.58, 0.15, 42), (0.85, 0.12, 75)],
    },
}


@dataclass(frozen=True, kw_only=True)
class Theme:
    """paper; ink: text and marks; mute: lesser text; hair: lines of axes; mask: hidden cells; blank: where
    there is no value; bad, good: verdicts; series: colours of categories, the first ones furthest apart."""

    paper: str
    ink: str
    mute: str
    hair: str
    mask: str
    blank: str
    bad: str
    good: str
    series: tuple[str, ...]


THEMES: dict[str, Theme] = {
    "light": Theme(
        paper="#ffffff",
        ink="#1b1f24",
        mute="#5b6168",
        hair="#c9ccd0",
        mask="#e6e7ea",
        blank="#f4f4f2",
        bad="#b3261e",
        good="#1a7f46",
        series=("#3467a6", "#d0440b", "#53996f", "#613273", "#c39f15", "#48b1df", "#55131b", "#f370aa"),
    ),
    "dark": Theme(
        paper="#15181c",
        ink="#e6e8eb",
        mute="#9da3aa",
        hair="#40464d",
        mask="#2b3036",
        blank="#1c2025",
        bad="#ff8a7a",
        good="#57c98a",
        series=("#6aa9e6", "#e66e25", "#5be0a7", "#886ab4", "#d8c33f", "#b8eef8", "#aa565a", "#cc899d"),
    ),
}

# OKLab (Ottosson) to the cube roots of cone responses, and these to linear sRGB
_TO_LMS = np.array(
    [[1.0, 0.3963377774, 0.2158037573], [1.0, -0.1055613458, -0.0638541728], [1.0, -0.0894841775, -1.291485548]]
)
_TO_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.707614701],
    ]
)


_STOPS = 33  # a ramp is straight in sRGB between so many stops, which the renderer can follow to the last bit


def _stops(name: str, theme: str) -> np.ndarray:
    """[stop, 3]: whole sRGB values at even steps of a ramp."""
    lightness, chroma, hue = np.array(RAMPS[theme][name]).T
    anchors = np.stack([lightness, chroma * np.cos(np.radians(hue)), chroma * np.sin(np.radians(hue))])
    places = np.linspace(0, anchors.shape[1] - 1, _STOPS)
    lab = np.stack([np.interp(places, np.arange(anchors.shape[1]), part) for part in anchors], axis=-1)
    linear = np.clip((lab @ _TO_LMS.T) ** 3 @ _TO_RGB.T, 0.0, 1.0)
    return np.round(255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055))


@functools.cache
def _at(name: str, theme: str, n: int) -> np.ndarray:
    """uint8 [n, 3]: n colours at even steps of a ramp."""
    stops = _stops(name, theme)
    places = np.arange(n) * (_STOPS - 1) / (n - 1)
    k = np.minimum(places.astype(int), _STOPS - 2)
    mixed = stops[k] + (places - k)[:, None] * (stops[k + 1] - stops[k])
    return np.floor(mixed + 0.5).astype(np.uint8)


def lut(name: RampName, theme: ThemeName = "light") -> np.ndarray:
    """uint8 [256, 3]: the ramp in 256 steps, as the maps look it up.

    >>> lut("cool").shape, lut("both")[128].tolist()
    ((256, 3), [248, 246, 243])
    """
    return _at(name, theme, 256).copy()


def shade(name: RampName, fraction: float, theme: ThemeName = "light") -> str:
    """The colour at a fraction of a ramp, as #rrggbb; outside 0..1 its end."""
    return "#" + _at(name, theme, 1025)[round(1024 * min(max(fraction, 0.0), 1.0))].tobytes().hex()


def ramp(name: RampName, theme: ThemeName = "light", n: int = 9) -> list[str]:
    """n colours of a ramp at even steps, as #rrggbb."""
    return [shade(name, i / (n - 1), theme) for i in range(n)]


def ink_on(color: str) -> str:
    """Black or white, whichever stands out more on #rrggbb."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    light = 0.2126 * r + 0.7152 * g + 0.0722 * b
    return "#ffffff" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "#000000"


_REGIMES = (0.05, 0.5, 1.0, 1.35, 1.75)  # a gate inside each regime, skip .. reflect


def beta_shade(beta: float, theme: ThemeName = "light", *, erases: bool = True) -> str:
    """The colour of a gate beta, 0 to 2: on the ramp of signed values with 1, which overwrites, in its middle; of a
    gate that only writes, and so has no middle, on that of magnitudes."""
    return shade("both" if erases else "cool", beta / 2, theme)


def regimes(theme: ThemeName = "light", *, erases: bool = True) -> tuple[str, ...]:
    """Colours of the regimes of a gate, skip, partial, overwrite, over-relax, reflect: each that of a beta inside it,
    so that a map of beta and one of regimes say the same. What overwrites has nearly the colour of the paper: marks of
    regimes have an outline."""
    return tuple(beta_shade(beta, theme, erases=erases) for beta in _REGIMES)


@functools.cache
def luts_js() -> str:
    """The ramps for the renderer, as one statement: RAMPS[theme][name] = "rrggbb..." of the stops between which the
    256 steps are straight."""
    tables = {
        theme: {name: _stops(name, theme).astype(np.uint8).tobytes().hex() for name in names}
        for theme, names in RAMPS.items()
    }
    return f"const RAMPS = {json.dumps(tables)};"

"""Tests of the table of colours."""

import itertools

import numpy as np
import pytest

from t2lens.analysis.regimes import regime_of
from t2lens.viz.colors import RAMPS, THEMES, beta_shade, lut, luts_js, ramp, regimes, shade

# Simulation of colour blindness in linear sRGB (Machado, Oliveira and Fernandes 2009, severity 1)
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
OKLAB = np.array(
    [
        [0.2104542553, 0.793617785, -0.0040720468],
        [1.9779984951, -2.428592205, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.808675766],
    ]
)


def linear(color: str) -> np.ndarray:
    coded = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    return OKLAB @ np.cbrt(CONES @ np.clip(rgb, 0, 1))


def contrast(a: str, b: str) -> float:
    low, high = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["cool", "warm", "both"])
def test_a_ramp_is_even_in_lightness_through_its_anchors(theme, name):
    table = lut(name, theme)
    assert table.shape == (256, 3) and table.dtype == np.uint8
    lightness = np.array([oklab(linear("#" + bytes(row).hex()))[0] for row in table])
    anchors = RAMPS[theme][name]
    at = np.linspace(0, len(anchors) - 1, 256)
    assert np.abs(lightness - np.interp(at, range(len(anchors)), [a[0] for a in anchors])).max() < 0.02
    if name != "both":
        assert (np.diff(lightness) * (-1 if theme == "light" else 1) > -2e-3).all()
    assert ramp(name, theme, 3) == [shade(name, f, theme) for f in (0, 0.5, 1)]
    assert (
        shade(name, -3, theme) == "#" + bytes(table[0]).hex() and shade(name, 7, theme) == "#" + bytes(table[-1]).hex()
    )
    assert bytes(table[0]).hex() in luts_js() and bytes(table[-1]).hex() in luts_js()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("seen", BLINDNESS)
def test_colours_of_series_stay_apart(theme, seen):
    simulate = np.array(BLINDNESS[seen])
    places = [oklab(simulate @ linear(color)) for color in THEMES[theme].series]
    for a, b in itertools.combinations(range(len(places)), 2):
        assert np.linalg.norm(places[a] - places[b]) > 0.09, (seen, a, b)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_are_legible(theme):
    look = THEMES[theme]
    assert contrast(look.ink, look.paper) > 12 and contrast(look.mute, look.paper) > 4.5
    assert contrast(look.bad, look.paper) > 4.5 and contrast(look.good, look.paper) > 4.5
    assert all(contrast(color, look.paper) > 2.2 for color in look.series)


@pytest.mark.parametrize("erases", [True, False])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_regimes_have_the_colours_of_betas_inside_them_and_stay_apart(theme, erases):
    on_ramp = [beta_shade(beta, theme, erases=erases) for beta in np.linspace(0, 2, 2001)]
    colors = regimes(theme, erases=erases)
    for i, color in enumerate(colors):
        betas = [beta for beta, each in zip(np.linspace(0, 2, 2001), on_ramp, strict=True) if each == color]
        assert i in {int(regime_of(np.array(beta))) for beta in betas}
    for simulate in BLINDNESS.values():
        places = [oklab(np.array(simulate) @ linear(color)) for color in colors]
        for a, b in itertools.combinations(range(5), 2):
            assert np.linalg.norm(places[a] - places[b]) > 0.09, (a, b)

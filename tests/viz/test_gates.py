"""Pictures of gates: well-formed whatever the tokens are, legible on every regime, and marked where they should be."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

from t2lens.analysis import gate_curve, gate_spectrum, gate_tokens, write_gates
from t2lens.viz import gates
from t2lens.viz import write_gates as others
from t2lens.viz.colors import ink_on, regimes
from tests.systems import tiny

HOSTILE = ["<b>", "&amp;", '"', "\n", "\u202eabc", "\u05e9", "\x00"]
THEMES: tuple[Any, ...] = ("light", "dark")


def found() -> Any:
    data = gate_tokens(tiny("ddl-cc-ec", 3), list(range(len(HOSTILE)))).dataset
    return data.assign_coords(token=("pos", np.array(HOSTILE, dtype=object)))


def luminance(color: str) -> float:
    """Relative, as WCAG 2 defines it for sRGB."""
    parts = np.frombuffer(bytes.fromhex(color[1:]), np.uint8) / 255
    return float(np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722])


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_every_picture_is_well_formed_with_any_tokens(theme: Any) -> None:
    data, model = found(), tiny("ddl-cc-ec", 3)
    curve = gate_curve(model, [0, 1, 2], site="1.attn", steps=4).dataset
    words = [HOSTILE[i % len(HOSTILE)] for i in range(curve.sizes["candidate"])]
    curve = curve.assign_coords(candidate=np.array(words, dtype=object))
    drawn = [
        *(gates.gate_map(data, site="1.attn", pos=2, by=by, theme=theme, title="<i>") for by in ("beta", "regime")),
        gates.strip(data, site="1.attn", pos=2, theme=theme),
        gates.histogram(data, None, site="1.attn", theme=theme),
        gates.spectrum(gate_spectrum(model, [0, 1, 2]).dataset, site="1.attn", theme=theme),
        gates.curve(curve, 0.5, theme=theme),
        gates.next_tokens(curve, 0.5, theme=theme),
    ]
    for svg in drawn:
        assert ET.fromstring(svg).tag.endswith("svg")
        assert "<b>" not in svg and "<i>" not in svg and "nan" not in svg.lower().replace("nance", "")


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("system", ["mhc", "hyper-connections", "highway"])
def test_pictures_of_other_gates_are_well_formed_and_hold_every_number(system: str, theme: Any) -> None:
    model = tiny(system, 4)
    data = write_gates(model, list(range(len(HOSTILE)))).dataset
    data = data.assign_coords(token=("pos", np.array(HOSTILE, dtype=object)))
    stream = "stream1" if "stream" in data.dims else ""
    shown: dict[str, Any] = {"site": "1.attn", "theme": theme, "stream": stream}
    limits = (float(min(data["gate"].min(), 0)), float(data["gate"].max()) + 0.1)
    top = others.most_in_a_bin(data, None, "1.attn", limits, stream)
    drawn = {
        "map": others.gate_map(data, pos=2, limits=limits, title="<i>", **shown),
        "strip": others.strip(data, pos=2, limits=limits, **shown),
        "histogram": others.histogram(data, None, limits=limits, most=top, **shown),
    }
    if stream:
        drawn["streams"] = others.streams(data, site="1.attn", pos=2, theme=theme)
        for name in ("read", "gate"):
            for value in data[name].isel(pos=2).values.ravel():
                assert f"weight {value:.6g}" in drawn["streams"]
        for value in data["mix"].isel(pos=2).sel(site="1.attn").values.ravel():
            assert f"takes {value:.6g} of" in drawn["streams"]
    for svg in drawn.values():
        assert ET.fromstring(svg).tag.endswith("svg")
        assert "<b>" not in svg and "<i>" not in svg and "nan" not in svg.lower().replace("nance", "")
    for value in others.values_of(data, stream).ravel():
        assert f" {value:.6g}" in drawn["map"]
    assert sum(int(n) for n in re.findall(r"(\d+) of 7 tokens of the prompt", drawn["histogram"])) == 7


@pytest.mark.parametrize("theme", THEMES)
def test_tokens_are_legible_on_every_regime(theme: Any) -> None:
    for color in regimes(theme):
        assert contrast(color, ink_on(color)) >= 4.5


def test_marks_stand_for_their_nodes() -> None:
    data = found()
    svg = gates.gate_map(data, site="1.attn", pos=2)
    cells = re.findall(r'<rect [^>]*data-tip="[^"]*beta ([^:"]*): [^"]*" data-site="([\w.]+)" data-pos="(\d+)"', svg)
    assert len(cells) == data["beta"].size
    for beta, site, pos in cells:
        assert float(beta) == pytest.approx(float(data["beta"].sel(site=site)[int(pos)]), rel=1e-5)


def test_bars_and_bounds_of_a_histogram_say_how_many() -> None:
    data = found()
    svg = gates.histogram(data, None, site="0.mlp", bins=40)
    counts = [int(n) for n in re.findall(r"(\d+) of 7 tokens of the prompt", svg)]
    assert sum(counts) == 7

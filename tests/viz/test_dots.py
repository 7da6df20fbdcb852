"""Scatter plots: where dots lie on a bent axis, whose names are written, and that no name lies on another."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
import xarray as xr

from t2lens.analysis.finding import Chart, Finding
from t2lens.viz.colors import THEMES
from t2lens.viz.dots import NAMED, Cloud, draw_cloud, limits_for, scale_of
from t2lens.viz.pictures import pair, picture
from t2lens.viz.svg import text_width


def cloud(seed: int, n: int = 120) -> Cloud:
    dice = np.random.default_rng(seed)
    x, y = dice.lognormal(-3, 1.5, n), dice.normal(0, 1, n) ** 3
    names = [f"{i}.mlp \u2192 {i}.attn" for i in range(n)]
    return Cloud(
        x=x, y=y, names=names, tips=names, nodes=[{}] * n, colors=["#123456"] * n, ringed=np.zeros(n, bool)
    )  # fmt: skip


def drawn(made: Cloud, width: int = 420) -> tuple[ET.Element, list[int], Any]:
    bends: Any = scale_of(made.x), scale_of(made.y)
    limits = limits_for(made.x, bends[0]), limits_for(made.y, bends[1])
    look: dict[str, Any] = {"labels": ("mass", "effect"), "theme": "light", "size": (width, 300)}
    plot, named = draw_cloud(made, bends=bends, limits=limits, **look)
    return ET.fromstring(f"<svg>{''.join(plot.marks)}</svg>"), named, plot


@pytest.mark.parametrize("seed", range(6))
def test_a_few_names_stand_apart_and_are_those_of_the_largest(seed: int) -> None:
    made = cloud(seed)
    svg, named, plot = drawn(made)
    assert 3 <= len(named) <= NAMED
    top = [set(np.argsort(-np.abs(each))[:NAMED].tolist()) for each in (made.x, made.y)]
    assert set(named) <= top[0] | top[1]
    words = [each for each in svg.iter("text") if "\u2192" in (each.text or "")]
    assert {each.text for each in words} == {made.names[i] for i in named}
    boxes = []
    for each in words:
        x, y = float(each.attrib["x"]), float(each.attrib["y"])
        boxes.append((x, y - 9, x + text_width(str(each.text), 10.0), y + 3))
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    assert all(x0 > plot.left and x1 < plot.left + plot.inner_w + 3 for x0, _, x1, _ in boxes)
    leaders = [each for each in svg.iter("path") if re.fullmatch(r"M[\d. ]+L[\d. ]+", each.attrib["d"])]
    assert len(leaders) == len(named)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_crowded_axis_goes_with_the_root_and_says_so(seed: int) -> None:
    made = cloud(seed)
    svg, _, _ = drawn(made)
    dots = {each.attrib["data-tip"]: each for each in svg.iter("circle")}
    at = np.array([[float(dots[name].attrib[key]) for key in ("cx", "cy")] for name in made.names])
    for places, values, sign in ((at[:, 0], made.x, 1), (at[:, 1], made.y, -1)):
        root = np.sign(values) * np.abs(values) ** 0.5
        slope, start = np.polyfit(root, places, 1)
        assert slope * sign > 0 and np.abs(slope * root + start - places).max() < 0.02
    said = [each.text for each in svg.iter("text")]
    assert "mass, square-root scale" in said and "effect, square-root scale" in said
    even = np.linspace(-1, 1, 50)
    assert scale_of(even) == "linear" and scale_of(even**9) == "root" and scale_of(np.zeros(50)) == "linear"


def scatter(seed: int, n: int = 9) -> Finding:
    dice = np.random.default_rng(seed)
    atoms = np.array(["embed", *(f"{i // 2}.{'attn' if i % 2 == 0 else 'mlp'}" for i in range(n - 1))], dtype=object)
    data = xr.Dataset(
        {"kl": ("write", dice.lognormal(-2, 1, n)), "size": ("write", dice.lognormal(-1, 1, n))},
        coords={"write": atoms},
    )
    chart = Chart(kind="scatter", variable="kl", x="size", title="Effect against size", xlabel="size (logit)")
    return Finding(title="t", dataset=data, columns=(), rows=(), charts=(chart,))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_dots_have_the_colour_of_their_kind_and_the_correlation_is_said_with_its_n(theme: Any) -> None:
    made = scatter(3)
    root = ET.fromstring(picture(made, theme=theme))
    kinds: list[str] = ["embed", "attn", "mlp"]
    colors = dict(zip(kinds, THEMES[theme].series, strict=False))
    for dot in root.iter("{http://www.w3.org/2000/svg}circle"):
        write = dot.attrib["data-tip"].splitlines()[0].removeprefix("write ")
        assert dot.attrib["fill"] == colors[write.rpartition(".")[2]]
    a, b = (np.argsort(np.argsort(made.dataset[name].values)) for name in ("size", "kl"))
    said = " ".join(each.text or "" for each in root.iter())
    assert f"{np.corrcoef(a, b)[0, 1]:.2g}" in said and "n = 9 dots" in said and "size (logit)" in said


def test_two_scatters_beside_each_other_have_one_scale() -> None:
    a, b = scatter(1), scatter(2)
    ticks = re.findall(r">([\d.]+)</text>", pair([a, b]))
    assert len(ticks) % 2 == 0 and ticks[: len(ticks) // 2] == ticks[len(ticks) // 2 :]

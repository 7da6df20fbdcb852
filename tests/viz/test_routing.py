"""Maps of depth routing: what exists is drawn with its number, what does not is blank, and ranges are shared."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import t2lens
from t2lens.analysis import content_dependence, depth_profile, measure_effects
from t2lens.viz.depth_map import KINDS, DepthMap, difference, kind_of, limits, of_profile, of_trace
from t2lens.viz.routing import kind_colors, map_picture
from t2lens.viz.routing_charts import Dots, content_picture, effects_picture, profile_picture
from tests.systems import SYSTEMS, tiny

TOKENS = [1, 2, 3, 2, 4]


def marks(svg: str) -> list[ET.Element]:
    """Elements with a tip, of SVG that is well formed."""
    return [each for each in ET.fromstring(svg).iter() if "data-tip" in each.attrib]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("what", ["weights", "share"])
def test_every_entry_that_exists_is_a_mark_with_its_number(system: str, what: str) -> None:
    model = tiny(system)
    shown = of_trace(t2lens.trace(model, TOKENS), what, 3)
    found = depth_profile(model, TOKENS, n_boot=0)
    assert (shown.exists == of_profile(found, what).exists).all()
    read, column = {"weights": ("holds", "source"), "share": ("share_mean", "atom")}[what]
    there = found[read].values != "" if what == "weights" else np.isfinite(found[read].values)
    assert shown.exists.sum() == there.sum() and set(shown.columns) == set(found[column].values)
    drawn = marks(map_picture(shown, chosen="1.mlp"))
    several = len(set(shown.ways)) > 1 and what == "weights"
    assert len(drawn) == (shown.exists[shown.own].sum() if several and shown.own.any() else shown.exists.sum())
    for mark in drawn:
        assert mark.get("data-site") in shown.sites
        assert "no number" not in str(mark.get("data-tip"))


def test_zero_and_no_such_source_are_not_the_same() -> None:
    shown = of_trace(t2lens.trace(tiny("attnres-full"), TOKENS), "weights", 2)
    values = shown.values.copy()
    values[2, 1] = 0.0
    changed = replace(shown, values=values)
    assert len(marks(map_picture(changed))) == len(marks(map_picture(shown))) == int(shown.exists.sum())
    tips = [str(mark.get("data-tip")) for mark in marks(map_picture(changed))]
    assert any(f"{shown.reads[2]} reads {shown.columns[1]}\nown depth weights: 0\n" in tip for tip in tips)


def test_ranges_are_shared_and_symmetric_where_a_sign_means_something() -> None:
    plain, signed = (of_trace(t2lens.trace(tiny(s), TOKENS), "weights", 2) for s in ("attnres-full", "denseformer"))
    signed = replace(signed, values=np.where(signed.exists, signed.values - 0.5, np.nan), signed=True)
    assert limits([plain])[0] == 0
    low, high = limits([plain, signed])
    assert low == -high and high == max(np.nanmax(plain.values), np.nanmax(np.abs(signed.values)))


def test_b_minus_a_needs_the_same_sources() -> None:
    a, b = (of_trace(t2lens.trace(tiny("attnres-full", seed), TOKENS), "weights", 2) for seed in (0, 1))
    minus = difference(a, b)
    assert minus.signed and np.allclose(minus.values[a.exists], (b.values - a.values)[a.exists])
    other = of_trace(t2lens.trace(tiny("attnres-block"), TOKENS), "weights", 2)
    with pytest.raises(ValueError, match="do not have the same sources"):
        difference(a, other)


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("attnres-block", {"embed": "embed", "block1": "block", "partial": "running"}),
        ("denseformer", {"embed": "embed", "block1": "output", "stream": "running"}),
        ("hyper-connections", {"stream0": "stream"}),
        ("ddl", {"state": "running"}),
        ("attnres-full", {"embed": "embed", "0.attn": "attn", "0.mlp": "mlp"}),
    ],
)
def test_a_source_says_of_what_kind_it_is(system: str, expected: dict[str, str]) -> None:
    shown: DepthMap = of_trace(t2lens.trace(tiny(system), TOKENS), "weights", 2)
    kinds = dict(zip(shown.columns, shown.kinds, strict=True))
    assert {name: kinds[name] for name in expected} == expected
    colors: Any = kind_colors()
    assert all(colors[kind] in map_picture(shown) for kind in set(kinds.values()))
    assert kind_of("stream2", ["embed", "embed 0.attn"]) == "stream"


@pytest.mark.parametrize("system", ["attnres-full", "muddformer", "ddl-cc"])
def test_charts_beside_the_maps_hold_every_route_and_read(system: str) -> None:
    model = tiny(system)
    dots = Dots(measure_effects(model, TOKENS))
    assert len(marks(effects_picture(dots, chosen="1.mlp"))) == len(dots.routes)
    assert ">A mine<" in effects_picture(dots, whose="A mine") and "A mine" not in effects_picture(dots)
    ahead = int(np.argmax(dots.apart))  # more mass than effect: ahead by mass, behind by effect
    assert (dots.x > dots.x[ahead]).sum() <= (dots.y > dots.y[ahead]).sum()
    assert f"n = {len(dots.routes)} routes" in effects_picture(dots) and set(dots.kinds) <= set(KINDS.values())
    content = content_dependence(model, [TOKENS, TOKENS[::-1]], n_boot=0)
    tips = "\n".join(str(mark.get("data-tip")) for mark in marks(content_picture(content, theme="dark")))
    for read, share in zip(content["read"].values, content["share"].values, strict=True):
        assert f"{read}: " in tips or not (share > 0).any()
    profile = depth_profile(model, [TOKENS, TOKENS[::-1]])
    drawn = "\n".join(str(mark.get("data-tip")) for mark in marks(profile_picture(profile)))
    assert all(f"{site} looks back: " in drawn for site in profile["site"].values)

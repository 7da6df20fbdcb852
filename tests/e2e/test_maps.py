"""The renderer alone, in a page without a server: what is missing looks like no number, tokens stay text."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import t2lens
from t2lens.config import MLP, Attention, ModelConfig, ShortSWA
from t2lens.residual import AttnRes, DeepDelta
from t2lens.viz.payload import maps_payload

from .driver import Maps

pytestmark = pytest.mark.e2e

BASE = ModelConfig(
    d_vocab=50,
    n_ctx=32,
    d_model=16,
    n_layers=3,
    attention=Attention(n_heads=2, n_kv_heads=1, d_head=8),
    mlp=MLP(d_mlp=20),
)
IDS = [0, 7, 3, 7, 9, 7, 2, 11]
WORDS = ["<bos>", "</script><b>x", "&amp;", " the", "\n", " the", "\u202e", ""]


class Edited(t2lens.Trace):
    """A trace with a dataset and tokens of our own."""

    tokens: list[str] = WORDS

    def __init__(self, base: t2lens.Trace, **values: np.ndarray) -> None:
        data = base.dataset.copy(deep=True)
        for name, array in values.items():
            data[name].values[...] = array
        super().__init__(data, copy.deepcopy(base._meta))


def trace(**parts: Any) -> t2lens.Trace:
    return t2lens.trace(t2lens.build(replace(BASE, **parts), seed=1), IDS)


def test_tokens_are_text_wherever_they_appear(show: Callable[..., Maps]) -> None:
    maps = show(maps_payload([Edited(trace(residual=AttnRes()))], cell=(0, 7, "1.attn")))
    assert maps.page.locator(".t2l b, .t2l script").count() == 0
    shown = [row[0] for row in maps.table("A", "sequence")]
    assert "</script><b>x" in shown or "\u00b7the" in shown
    heads = [maps.hover("grid-A", c, 2)[0] for c in range(8)]
    assert [line.split("   ")[1] for line in heads] == [f"position {c}" for c in range(8)]
    assert heads[1].endswith("</script><b>x") and heads[3].endswith("\u00b7the") and heads[5].endswith("\u00b7the")
    assert heads[4].endswith("\u21b5") and heads[6].endswith("\\u202e") and heads[7].endswith("\u2205")


@pytest.mark.parametrize("dark", [False, True])
def test_zero_missing_masked_and_not_finite_look_different(show: Callable[..., Maps], dark: bool) -> None:
    base = trace(residual=AttnRes())
    weight = base.dataset["depth_weight"].values.copy()
    weight[4, 5, 1] = 0.0
    weight[4, 5, 2] = np.nan
    norm = base.dataset["residual_norm"].values.copy()
    norm[2, 3], norm[2, 4] = np.nan, np.inf
    maps = show(maps_payload([Edited(base, depth_weight=weight, residual_norm=norm)], cell=(0, 5, "out")), dark)
    blank = maps.pixel("depth-A", 6, 0)
    zero, number = maps.pixel("depth-A", 1, 4), maps.pixel("depth-A", 0, 4)
    assert len({blank, zero, number}) == 3
    assert "no such source" in maps.hover("depth-A", 6, 0)[1]
    assert maps.hover("depth-A", 1, 4)[1].split()[1] == "0"
    assert maps.hover("depth-A", 2, 4)[1].split()[1] == "\u2013"
    ink = {patch(maps, "depth-A", c, 4) for c in (0, 2)} | {patch(maps, "depth-A", 6, 0)}
    assert len(ink) == 3  # one colour, a hatch, nothing at all
    assert patch(maps, "grid-A", 3, 3) != patch(maps, "grid-A", 3, 0)  # hatched against blank
    assert maps.hover("grid-A", 4, 3)[1].endswith("inf") and maps.hover("grid-A", 3, 3)[1].endswith("\u2013")
    assert "written, not read" in maps.hover("grid-A", 3, 0)[1]


def patch(maps: Maps, name: str, column: int, row: int, part: float = 0.7) -> str:
    """All pixels of the inner part of a cell, as one value."""
    g = maps.geometry(name)
    x, y = maps.at(name, column, row)
    box = [x - g["cw"] * part / 2, y - g["ch"] * part / 2, g["cw"] * part, g["ch"] * part]
    return maps.canvas(name).evaluate(
        "(c, b) => c.getContext('2d').getImageData(...b.map(Math.round)).data.join()", box
    )


def test_a_window_is_masked_not_zero(show: Callable[..., Maps]) -> None:
    maps = show(
        maps_payload([trace(local=ShortSWA(window=3, n_heads=1, n_kv_heads=1, d_head=8))], cell=(0, 6, "1.local"))
    )
    assert "outside the window of 3" in maps.hover("sequence-A", 3, 6)[1]
    assert float(maps.hover("sequence-A", 4, 6)[1].split()[-1]) > 0
    assert "later position" in maps.hover("sequence-A", 7, 6)[1]
    assert len(maps.table("A", "sequence")) == 3


def test_values_far_above_the_rest_are_marked_and_counted(show: Callable[..., Maps]) -> None:
    base = trace(residual=AttnRes())
    norm = np.ones_like(base.dataset["residual_norm"].values)
    norm[3, 0], norm[0, 1] = 1000.0, 0.0  # a zero: no logarithmic scale
    payload = maps_payload([Edited(base, residual_norm=norm)], cell=(0, 5, "out"))
    assert payload["quantities"][0]["above"] == 1 and payload["quantities"][0]["hi"] == 1.0
    maps = show(payload)
    assert "1 above" in maps.page.locator(".t2l .bar span").first.text_content()
    assert maps.hover("grid-A", 0, 4)[1].endswith("1000")
    assert patch(maps, "grid-A", 1, 4) == patch(maps, "grid-A", 0, 4)  # the same top colour ...
    assert patch(maps, "grid-A", 1, 4, 0.94) != patch(maps, "grid-A", 0, 4, 0.94)  # ... and a marked corner


def test_colours_follow_the_values_on_one_scale(show: Callable[..., Maps]) -> None:
    low, high = trace(residual=AttnRes()), trace(residual=DeepDelta())
    norm = np.linspace(1.0, 2.0, 8 * 7).reshape(7, 8)
    maps = show(
        maps_payload([Edited(low, residual_norm=norm), Edited(high, residual_norm=norm + 1)], cell=(0, 0, "embed"))
    )
    same = [(maps.pixel("grid-A", 7, 7), maps.pixel("grid-B", 0, 1))]  # both are 2.0
    assert all(a == b for a, b in same)
    lightness = [sum(maps.pixel("grid-A", c, 4)) for c in range(8)]
    assert lightness == sorted(lightness, reverse=True) and len(set(lightness)) == 8


def test_sites_of_models_of_other_depth_meet_at_the_same_relative_depth(show: Callable[..., Maps]) -> None:
    maps = show(maps_payload([trace(), trace(n_layers=5)], cell=(0, 6, "2.mlp")))
    assert maps.canvas("grid-B").get_attribute("data-site") == "4.mlp"
    assert "shown: 4.mlp" in maps.page.locator('[data-node="B"] h3').text_content()
    maps.click("grid-B", 3, 1)
    assert maps.cell() == {"panel": 1, "pos": 3, "site": "0.attn"}
    assert maps.canvas("grid-A").get_attribute("data-site") == "0.attn"


def test_choices_are_heard_and_the_same_revision_keeps_them(show: Callable[..., Maps]) -> None:
    payload = maps_payload([trace(residual=AttnRes())], cell=(0, 6, "out"))
    maps = show(payload)
    maps.click("depth-A", 2, 3)  # a row of the depth map is a read
    assert maps.cell() == {"panel": 0, "pos": 6, "site": "1.mlp"}
    maps.click("sequence-A", 1, 4)  # a row of the sequence map is a query of the attention below
    assert maps.cell() == {"panel": 0, "pos": 4, "site": "1.attn"}
    maps.page.locator('[data-node="A"] [data-table="weights"] button').first.click()
    cell = maps.cell()
    assert cell["pos"] == 4 and cell["site"] in ("embed", "0.attn", "0.mlp")
    maps.page.locator(".t2l select").nth(1).select_option("contribution")
    maps.page.wait_for_function("heard.length === 4")
    heard = maps.page.evaluate("heard")
    assert [key for key, _ in heard] == ["cell", "cell", "cell", "show"]
    assert heard[2][1] == {**cell, "trail": [{"panel": 0, "pos": 4, "site": "1.attn"}]}
    assert heard[3][1] == {
        "quantity": "residual_norm",
        "depth": "contribution",
        "head": "mean",
        "way": "",
        "layer": "cross",
        "compare": "both",
    }
    maps.page.evaluate("p => again(p)", payload)
    assert maps.cell() == cell
    for before in ((4, "1.attn"), (6, "1.mlp"), (6, "out")):
        maps.page.get_by_role("button", name="Back").click()
        assert maps.cell() == dict(zip(("panel", "pos", "site"), (0, *before), strict=True))
    maps.page.evaluate("p => again(p)", {**payload, "rev": "other"})
    assert maps.cell() == {"panel": 0, "pos": 6, "site": "out"}
    assert maps.page.locator(".t2l").count() == 1


def test_narrow_pages_do_not_overflow(show: Callable[..., Maps]) -> None:
    for width in (1024, 700):
        maps = show(maps_payload([trace(residual=AttnRes()), trace(residual=DeepDelta())]), width=width)
        assert not maps.page.evaluate("document.documentElement.scrollWidth > innerWidth")
        maps.page.get_by_label("panels").select_option("difference")
        assert not maps.page.evaluate("document.documentElement.scrollWidth > innerWidth")

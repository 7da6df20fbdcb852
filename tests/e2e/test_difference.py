"""A against B in the maps: their difference, positions and sites that meet, and what only one of them has."""

from __future__ import annotations

import numpy as np
import pytest

from t2lens.residual import AttnRes, DeepDelta
from t2lens.viz.payload import maps_payload

from .driver import IDS, Maps, Show, same, trace

pytestmark = pytest.mark.e2e


def compare(maps: Maps) -> None:
    maps.page.get_by_label("panels").select_option("difference")


def test_a_difference_is_b_minus_a(show: Show) -> None:
    a, b = trace(residual=AttnRes(), seed=3), trace(residual=DeepDelta(), seed=4)
    payload = maps_payload([a, b], quantity="residual_norm", depth="mixing", cell=(0, 6, "1.attn"))
    maps = show(payload)
    assert not maps.canvas("grid-difference").is_visible()
    compare(maps)
    norms = [t.dataset["residual_norm"].values for t in (a, b)]
    apart = norms[1] - norms[0]
    for column, row in ((0, 1), (5, 4), (7, 7)):
        line = maps.hover("grid-difference", column, row)[-1]
        assert line.startswith("B \u2212 A") and same(line, apart[row - 1, column])
    bar = maps.page.locator("section.between .bar").first
    assert "residual norm" in bar.text_content()
    high, low = np.unravel_index(apart.argmax(), apart.shape), np.unravel_index(apart.argmin(), apart.shape)
    red, _, blue = maps.pixel("grid-difference", int(high[1]), int(high[0]) + 1)
    assert (red > blue) == (apart.max() > 0)
    red, _, blue = maps.pixel("grid-difference", int(low[1]), int(low[0]) + 1)
    assert (red < blue) == (apart.min() < 0)

    mixing = [t.dataset["mixing"].transpose("read", "pos", "atom").values for t in (a, b)]
    for column, row in ((0, 2), (2, 6)):
        assert same(
            maps.hover("depth-difference", column, row)[-1], mixing[1][row, 6, column] - mixing[0][row, 6, column]
        )
    looks = [t.dataset["sequence_attention"].sel(layer=1).mean("head").values for t in (a, b)]
    assert same(maps.hover("sequence-difference", 2, 5)[-1], looks[1][5, 2] - looks[0][5, 2])
    maps.page.get_by_label("reads from depth").select_option("weights")
    assert "No difference" in maps.said("depth-difference")  # one has a state, the other atoms
    maps.page.get_by_label("colour of the grid").select_option("gate")
    assert "No difference: in A" in maps.said("grid-difference")
    assert not maps.canvas("grid-difference").is_visible()


def test_positions_meet_by_the_alignment(show: Show) -> None:
    a, b = trace(IDS, seed=3), trace([0, 5, 5, *IDS[1:]], seed=4)
    payload = maps_payload([a, b], quantity="residual_norm", cell=(0, 6, "1.attn"))
    words = "Positions are aligned from the right."
    payload |= {"alignment": {"rule": "right", "shift": 2, "text": words}}
    maps = show(payload)
    compare(maps)
    assert maps.canvas("grid-B").get_attribute("data-pos") == "8"
    assert words in maps.page.locator(".t2l").text_content()
    norms = [t.dataset["residual_norm"].values for t in (a, b)]
    lines = maps.hover("grid-difference", 4, 3)
    assert same(lines[-1], norms[1][2, 6] - norms[0][2, 4]) and "position 6" in "".join(lines)
    looks = [t.dataset["sequence_attention"].sel(layer=1).mean("head").values for t in (a, b)]
    assert same(maps.hover("sequence-difference", 1, 5)[-1], looks[1][7, 3] - looks[0][5, 1])
    maps.click("grid-B", 1, 3)  # stands beside nothing
    assert "No position of A stands beside position 1 of B" in maps.said("grid-A")
    assert "No position of A" in maps.page.locator('[data-node="A"]').text_content()
    assert "no such position" in "".join(maps.hover("grid-B", 0, 3))
    maps.click("grid-B", 9, 3)
    assert maps.canvas("grid-A").get_attribute("data-pos") == "7"


def test_sites_of_other_depth_meet_and_the_caption_says_how(show: Show) -> None:
    a, b = trace(seed=3), trace(seed=4, n_layers=5)
    maps = show(maps_payload([a, b], quantity="residual_norm", cell=(0, 6, "2.mlp")))
    compare(maps)
    norms = [t.dataset["residual_norm"].sel(pos=5) for t in (a, b)]
    for row, (low, high) in {1: ("0.attn", "0.attn"), 4: ("1.mlp", "2.mlp"), 6: ("2.mlp", "4.mlp")}.items():
        value = float(norms[1].sel(read=high)) - float(norms[0].sel(read=low))
        assert same(maps.hover("grid-difference", 5, row)[-1], value)
    assert "same relative depth (1.mlp of A, 2.mlp of B)" in maps.said("grid-difference")
    assert "differ in depth" in maps.said("depth-difference")


def test_no_difference_is_offered_where_nothing_is_shared(show: Show) -> None:
    payload = maps_payload([trace(), trace(seed=2)])
    payload |= {"alignment": {"rule": "none", "shift": 0, "text": "The prompts share no position."}}
    maps = show(payload)
    assert maps.page.get_by_label("panels").locator("option").nth(1).is_disabled()
    assert maps.page.get_by_text("The prompts share no position.").first.is_visible()


def test_the_largest_head_and_ranks_are_those_of_the_trace(show: Show) -> None:
    one = trace(seed=5)
    maps = show(maps_payload([one], heads=True, cell=(0, 6, "1.attn")))
    maps.page.get_by_label("attention head").select_option("max")
    most = one.dataset["sequence_attention"].sel(layer=1).values.max(axis=0)
    lines = maps.hover("sequence-A", 2, 6)
    assert same(lines[1], most[6, 2])
    rank = 1 + int((most[6, :7] > most[6, 2]).sum())
    assert lines[2].strip() == f"rank {rank} of 7 in its row"
    assert "largest of 2 heads" in maps.page.locator(".t2l").text_content()
    maps.page.get_by_role("button", name="head 1 of A").click()
    assert maps.page.get_by_label("attention head", exact=True).input_value() == "1"
    assert same(maps.hover("sequence-A", 2, 6)[1], one.dataset["sequence_attention"].sel(layer=1).values[1, 6, 2])
    norms = one.dataset["residual_norm"].values[3]
    lines = maps.hover("grid-A", 5, 4)
    assert f"rank {1 + int((norms > norms[5]).sum())} of 8 in its row" in "".join(lines)

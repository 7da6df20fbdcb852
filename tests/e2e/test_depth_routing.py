"""The page Depth routing in a real browser: from the maps and back, clicks on cells, choices, files to take home."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

import t2lens
from t2lens.analysis import depth_profile

from .driver import Maps, new_page

pytestmark = pytest.mark.e2e

PROMPT = "the king saw the king <b>& said"
WAIT = 120_000
MAP = 'svg[aria-label*="reads over sources"]'


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page, errors = new_page(browser)
    yield page
    page.close()
    assert errors == []


def settled(page: Any) -> None:
    page.wait_for_timeout(300)
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=WAIT)


def url(page: Any) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(page.url).query).items()}


def open_routing(page: Any, server: str, **params: str) -> None:
    """By way of the home page, as a person goes."""
    page.goto(f"{server}/?{urlencode({'a': 'attnres-full', 'b': 'muddformer', 'prompt': PROMPT, **params})}")
    Maps(page)
    page.get_by_role("link", name="Depth routing", exact=True).click()
    page.wait_for_selector(MAP, timeout=WAIT)
    settled(page)


def test_a_click_on_a_cell_chooses_its_node_on_every_page(page: Any, server: str, screenshots: Path) -> None:
    open_routing(page, server, node="A:4:5.attn")
    assert page.locator(MAP).count() == 2
    cell = page.locator(MAP).first.locator('rect[data-site="3.mlp"]').first
    cell.hover()
    lines = cell.get_attribute("data-tip").split("\n")
    assert lines[0] == "3.mlp reads embed" and lines[1].startswith("contribution share: ")
    cell.click()
    page.get_by_text("Chosen: 3.mlp at position 4").wait_for(timeout=WAIT)
    settled(page)
    assert url(page)["node"] == "A:4:3.mlp"
    page.locator(MAP).nth(1).locator('rect[data-site="6.attn"][data-way="k"]').first.click()
    page.get_by_text("Chosen: 6.attn at position 4").wait_for(timeout=WAIT)
    settled(page)
    assert url(page)["node"] == "B:4:6.attn"
    page.screenshot(path=screenshots / "depth-routing-1440.png", full_page=True)
    page.get_by_role("link", name="See it on both axes").click()
    assert Maps(page).cell()["site"] == "6.attn"


def test_choices_change_the_maps_and_the_link_gives_them_back(page: Any, server: str) -> None:
    open_routing(page, server, b="none", node="A:4:5.attn")
    share = page.locator(MAP).first.locator('rect[data-site="out"]').first.get_attribute("data-tip")
    page.get_by_role("combobox", name="What").click()
    page.get_by_role("option", name="own depth weights").click()
    page.wait_for_selector('svg[aria-label*="own depth weights: reads"]', timeout=WAIT)
    settled(page)
    tip = page.locator(MAP).first.locator('rect[data-site="out"]').first.get_attribute("data-tip")
    assert tip != share and "own depth weights: " in tip
    page.get_by_text("measured by ablation").click()
    page.wait_for_selector(
        'svg[aria-label*="Mass against effect"] circle[data-tip*="KL without the route"]', timeout=WAIT
    )
    settled(page)
    asked = url(page)
    assert (asked["routing_what"], asked["routing_effect"]) == ("weights", "measured")
    page.goto(f"{server}/?{urlencode({**asked, 'depth': 'share'})}")
    Maps(page)


def test_numbers_and_figures_go_home(page: Any, server: str, tmp_path: Path) -> None:
    open_routing(page, server, b="none")
    page.get_by_role("button", name="Export").click()
    with page.expect_download() as started:
        page.get_by_role("button", name="Numbers of A (CSV)").click()
    started.value.save_as(tmp_path / "numbers.csv")
    with (tmp_path / "numbers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = depth_profile(t2lens.load("attnres-full"), PROMPT)["share_mean"]
    assert len(rows) == int(found.notnull().sum())
    for row in rows:
        assert float(row["value"]) == float(found.sel(read=row["read"], atom=row["source"]))
    with page.expect_download() as started:
        page.get_by_role("button", name="SVG: map A").click()
    started.value.save_as(tmp_path / "map.svg")
    assert (tmp_path / "map.svg").read_text().startswith("<svg")

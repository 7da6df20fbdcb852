"""The page Lens and the control Continue in a real browser: clicks, and maps that follow what is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

import t2lens

from .driver import Maps, new_page

pytestmark = pytest.mark.e2e

PROMPT = "And the king said unto the <b>& people"
WAIT = 120_000


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page, errors = new_page(browser)
    yield page
    page.close()
    assert errors == []


def settled(page: Any) -> None:
    page.wait_for_timeout(300)
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=WAIT)


def node(page: Any) -> str:
    return parse_qs(urlsplit(page.url).query)["node"][0]


def test_a_click_on_a_share_is_the_node_on_the_maps(page: Any, server: str, screenshots: Path) -> None:
    page.goto(f"{server}/?{urlencode({'a': 'standard', 'b': 'attnres-full', 'prompt': PROMPT, 'node': 'A:4:2.mlp'})}")
    Maps(page)
    page.get_by_role("link", name="Lens").click()
    page.wait_for_selector('svg[aria-label*="sum = "]', timeout=WAIT)
    settled(page)
    bars = page.locator('svg[aria-label*="sum = "]').nth(1)
    bars.locator('[data-site="3.mlp"]').last.click()
    page.wait_for_url(re.compile("node=B%3A4%3A3.mlp"), timeout=WAIT)
    settled(page)
    page.locator('svg[aria-label*="likeliest token of every read"]').first.locator(
        '[data-site="2.attn"][data-pos="2"]'
    ).click()
    page.wait_for_url(re.compile("node=A%3A2%3A2.attn"), timeout=WAIT)
    settled(page)
    assert page.get_by_role("spinbutton", name="After position").input_value() == "2"
    page.screenshot(path=screenshots / "lens-1440.png", full_page=True)
    page.get_by_role("link", name="Two axes").click()
    Maps(page)
    settled(page)
    assert node(page) == "A:2:2.attn"


def test_the_maps_follow_what_is_written(page: Any, server: str) -> None:
    page.goto(f"{server}/?{urlencode({'a': 'standard', 'b': 'none', 'prompt': PROMPT})}")
    Maps(page)
    settled(page)
    page.get_by_role("button", name="Continue").click()
    page.get_by_label("New tokens").fill("3")
    page.get_by_label("New tokens").press("Tab")
    settled(page)
    page.get_by_role("button", name="Write", exact=True).click()
    page.get_by_text("wrote 3 of 3").wait_for(timeout=WAIT)
    settled(page)
    model = t2lens.load("standard")
    text = model.generate(PROMPT, 3, temperature=0)
    assert page.get_by_label("Prompt").input_value() == text
    n = len(model.to_tokens(text)[0])
    page.wait_for_selector(f'[data-map="grid-A"][data-geom*=\'"cols":{n},\']', timeout=WAIT)
    assert node(page) == f"A:{n - 1}:out"


def test_writing_can_be_stopped(page: Any, server: str) -> None:
    page.goto(f"{server}/?{urlencode({'a': 'standard', 'b': 'none', 'prompt': PROMPT})}")
    Maps(page)
    settled(page)
    page.get_by_role("button", name="Continue").click()
    page.get_by_label("New tokens").fill("64")
    page.get_by_label("New tokens").press("Tab")
    settled(page)
    page.get_by_role("button", name="Write", exact=True).click()
    page.get_by_role("button", name="Stop").click(timeout=WAIT)
    page.get_by_role("button", name="Continue").wait_for(timeout=WAIT)
    settled(page)
    said = page.get_by_text(re.compile(r"wrote \d+ of 64")).inner_text()
    written = page.get_by_label("Prompt").input_value()
    count = int(re.search(r"wrote (\d+) of", said)[1])  # type: ignore[index]
    assert count < 64
    assert written == t2lens.load("standard").generate(PROMPT, count, temperature=0)

"""The pages of analyses in a real browser: walk there and back, change options, take the numbers home."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

import t2lens
from t2lens.analysis import attribute_logits

from .driver import Maps, new_page

pytestmark = pytest.mark.e2e

PROMPT = "the king saw the king <b>& said"
WAIT = 120_000


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page, errors = new_page(browser)
    yield page
    page.close()
    assert errors == []


def settled(page: Any) -> None:
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=WAIT)


def shown(page: Any) -> None:
    """Wait for a finding: its table and its pictures."""
    settled(page)
    page.wait_for_selector('[data-testid="stDataFrame"]', timeout=WAIT)
    page.wait_for_selector(".picture svg", timeout=WAIT)


def test_from_the_maps_to_an_analysis_and_back(page: Any, server: str, screenshots: Path, tmp_path: Path) -> None:
    page.goto(f"{server}/?{urlencode({'a': 'standard', 'b': 'none', 'prompt': PROMPT})}")
    Maps(page)
    page.get_by_role("link", name="Analyses").click()
    shown(page)
    assert page.get_by_label("Prompt", exact=True).input_value() == PROMPT  # what was chosen goes along
    assert parse_qs(urlsplit(page.url).query)["a"] == ["standard"]
    finding = attribute_logits(t2lens.load("standard"), PROMPT)
    assert page.get_by_text(finding.title, exact=True).first.is_visible()
    page.screenshot(path=screenshots / "analyses-1440.png", full_page=True)

    page.get_by_role("button", name="Export").click()
    with page.expect_download() as started:
        page.get_by_role("button", name="Numbers (JSON)").click()
    started.value.save_as(tmp_path / "numbers.json")
    assert json.loads((tmp_path / "numbers.json").read_bytes()) == json.loads(finding.to_json())
    page.keyboard.press("Escape")

    page.get_by_role("link", name="Two axes").click()
    Maps(page)
    assert page.get_by_label("Prompt", exact=True).input_value() == PROMPT


def test_a_bar_leads_to_the_node_that_wrote_it(page: Any, server: str) -> None:
    page.goto(f"{server}/?{urlencode({'a': 'standard', 'b': 'none', 'prompt': PROMPT})}")
    Maps(page)
    page.get_by_role("link", name="Analyses").click()
    shown(page)
    assert parse_qs(urlsplit(page.url).query)["analysis"] == ["logits"]
    mark = page.locator('.picture svg [data-site="3.mlp"]').first
    mark.scroll_into_view_if_needed()
    mark.click(force=True)
    page.wait_for_url("**3.mlp**", timeout=WAIT)
    page.get_by_role("link", name="Two axes").click()
    assert Maps(page).cell()["site"] == "3.mlp"


def test_a_link_opens_its_analysis_and_fits_a_small_screen(browser: Any, server: str, screenshots: Path) -> None:
    page, errors = new_page(browser, 1024, 768)
    refused: list[str] = []
    page.on("response", lambda response: refused.append(response.url) if response.status >= 400 else None)
    page.goto(f"{server}/analyses?{urlencode({'a': 'ddl', 'b': 'none', 'prompt': PROMPT, 'analysis': 'lens'})}")
    shown(page)
    assert page.get_by_text("Page not found").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.screenshot(path=screenshots / "analyses-1024.png", full_page=True)
    page.close()
    # Streamlit looks for its server below the page's own path first, and the browser counts that as an error
    assert [url for url in refused if "/analyses/_stcore/" not in url] == []
    assert [error for error in errors if "404" not in error] == []

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
    """Wait for a finding: its table and its charts."""
    settled(page)
    page.wait_for_selector('[data-testid="stDataFrame"]', timeout=WAIT)
    page.wait_for_selector('[data-testid="stPlotlyChart"] .main-svg', timeout=WAIT)


def test_from_the_maps_to_an_analysis_and_back(page: Any, server: str, screenshots: Path, tmp_path: Path) -> None:
    page.goto(f"{server}/?{urlencode({'a': 'standard', 'b': 'none', 'prompt': PROMPT})}")
    Maps(page)
    page.get_by_role("link", name="Attribution").click()
    shown(page)
    assert page.get_by_label("Prompt").input_value() == PROMPT  # what was chosen goes along
    assert parse_qs(urlsplit(page.url).query)["a"] == ["standard"]
    finding = attribute_logits(t2lens.load("standard"), PROMPT)
    assert page.get_by_text(finding.title, exact=True).first.is_visible()
    page.screenshot(path=screenshots / "attribution-1440.png", full_page=True)

    page.get_by_text("In Python and as data").click()
    with page.expect_download() as started:
        page.get_by_role("button", name="All numbers (JSON)").click()
    started.value.save_as(tmp_path / "numbers.json")
    plain = json.loads((tmp_path / "numbers.json").read_bytes())
    assert plain == json.loads(finding.to_json())

    page.get_by_role("link", name="Two axes").click()
    Maps(page)
    assert page.get_by_label("Prompt").input_value() == PROMPT


def test_a_link_opens_its_analysis_and_fits_a_small_screen(browser: Any, server: str, screenshots: Path) -> None:
    page, errors = new_page(browser, 1024, 768)
    refused: list[str] = []
    page.on("response", lambda response: refused.append(response.url) if response.status >= 400 else None)
    page.goto(f"{server}/attribution?{urlencode({'a': 'ddl', 'prompt': PROMPT, 'analysis': 'lens'})}")
    shown(page)
    assert page.get_by_text("Page not found").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.screenshot(path=screenshots / "lens-1024.png", full_page=True)
    page.close()
    # Streamlit looks for its server below the page's own path first, and the browser counts that as an error
    assert [url for url in refused if "/attribution/_stcore/" not in url] == []
    assert [error for error in errors if "404" not in error] == []

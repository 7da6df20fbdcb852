"""The page of gates in a real browser: choose a node on the map, slide beta, keep it as an edit, take numbers home."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

import t2lens
from t2lens.analysis import gate_curve, gate_tokens
from t2lens.viz.gates import kl_words

from .driver import new_page

pytestmark = pytest.mark.e2e

PROMPT = "the king saw the king <b>& said"
WAIT = 120_000


def settled(page: Any) -> None:
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=WAIT)


def asked(page: Any) -> dict[str, str]:
    return {key: value[0] for key, value in parse_qs(urlsplit(page.url).query).items()}


def opened(browser: Any, server: str, width: int, height: int, **params: str) -> tuple[Any, list[str]]:
    page, errors = new_page(browser, width, height)
    wanted = {"a": "ddl", "prompt": PROMPT, "gates_over": "prompt", **params}
    page.goto(f"{server}/gates?{urlencode(wanted)}")
    page.wait_for_selector('svg [data-tip^="beta 2: KL"]', timeout=WAIT)
    settled(page)
    return page, errors


def done(page: Any, errors: list[str]) -> None:
    page.close()
    # Streamlit looks for its server below the page's own path first, and the browser counts that as an error
    assert [error for error in errors if "404" not in error] == []


def test_from_the_map_to_an_edit(browser: Any, server: str, screenshots: Path, tmp_path: Path) -> None:
    page, errors = opened(browser, server, 1440, 900, b="clean", node="A:2:5.attn")
    model = t2lens.load("ddl")
    beta = float(gate_tokens(model, PROMPT)["beta"].sel(site="3.mlp")[4])
    cell = page.locator('rect[data-site="3.mlp"][data-pos="4"]').first
    cell.hover()
    page.get_by_text(f"beta {beta:.6g}").first.wait_for(timeout=WAIT)
    cell.click()
    page.wait_for_url(lambda url: parse_qs(urlsplit(url).query)["node"] == ["A:4:3.mlp"], timeout=WAIT)
    settled(page)

    curve = gate_curve(model, PROMPT, site="3.mlp", pos=4).dataset
    start = round(float(curve["plain_gate"].mean()), 1)
    page.get_by_text(kl_words(curve, start)).first.wait_for(timeout=WAIT)
    slider = page.get_by_role("slider")
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    chosen = round(start + 0.3, 1)
    page.get_by_text(kl_words(curve, chosen)).first.wait_for(timeout=WAIT)
    page.wait_for_url(lambda url: parse_qs(urlsplit(url).query).get("gates_value") == [f"{chosen:g}"], timeout=WAIT)
    page.get_by_role("button", name="Keep this as an edit of A").click()
    page.wait_for_url(lambda url: "edits" in parse_qs(urlsplit(url).query), timeout=WAIT)
    settled(page)
    (kept,) = json.loads(asked(page)["edits"])
    assert (kept["site"], kept["value"]) == ("3.mlp", chosen)
    page.get_by_text("A ddl, edited: how much each write replaces").first.wait_for(timeout=WAIT)
    assert page.locator(f'rect[data-site="3.mlp"][data-tip*="beta {chosen:g}:"]').count() > 0
    page.screenshot(path=screenshots / "gates-1440.png", full_page=True)

    page.get_by_role("button", name="Export").click()
    with page.expect_download() as started:
        page.get_by_role("button", name="A tokens (JSON)").click()
    started.value.save_as(tmp_path / "tokens.json")
    with t2lens.edited(model, t2lens.Edit.from_dict(kept)):
        expected = json.loads(gate_tokens(model, PROMPT).to_json())
    assert json.loads((tmp_path / "tokens.json").read_bytes()) == expected
    done(page, errors)


def test_a_link_restores_the_view_on_a_small_screen(browser: Any, server: str, screenshots: Path) -> None:
    view = {"b": "ddl-cc-ec", "node": "A:4:3.mlp", "gates_value": "1.5", "gates_by": "regime", "gates_at": "position"}
    page, errors = opened(browser, server, 1024, 768, **view)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    curve = gate_curve(t2lens.load("ddl"), PROMPT, site="3.mlp", pos=4, at="position").dataset
    assert page.get_by_text(kl_words(curve, 1.5)).first.is_visible()
    assert {key: asked(page)[key] for key in view} == view
    page.screenshot(path=screenshots / "gates-1024.png", full_page=True)
    done(page, errors)

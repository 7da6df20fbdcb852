"""The pages of edits and of models in a real browser: build, mute, reorder and share edits; bring a model."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from t2lens.zoo.registry import BUNDLED

from .driver import new_page

pytestmark = pytest.mark.e2e

PROMPT = "the king saw the king <b>& said"
WAIT = 120_000


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page, errors = new_page(browser)
    yield page
    page.close()
    # Streamlit looks for its server below the page's own path first, and the browser counts that as an error
    assert [error for error in errors if "404" not in error] == []


def settled(page: Any) -> None:
    page.wait_for_timeout(200)
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=WAIT)


def edits_of(page: Any) -> list[dict[str, Any]]:
    return json.loads(parse_qs(urlsplit(page.url).query).get("edits", ["[]"])[0])


def choose(page: Any, label: str, option: str) -> None:
    page.get_by_label(label, exact=True).click()
    page.get_by_role("option", name=option, exact=True).click()
    settled(page)


def press(page: Any, key: str) -> None:
    page.locator(f".st-key-{key} button").first.click()
    settled(page)


def open_edits(page: Any, server: str, **params: str) -> None:
    asked = {"a": "attnres-full", "b": "none", "prompt": PROMPT, "node": "A:3:5.attn", **params}
    page.goto(f"{server}/edits?{urlencode(asked)}")
    page.get_by_text("Build an edit of A").wait_for(timeout=WAIT)
    settled(page)


def test_edits_are_built_muted_reordered_and_shared(page: Any, server: str, browser: Any, screenshots: Path) -> None:
    open_edits(page, server)
    page.get_by_text("No edit acts").wait_for(timeout=WAIT)
    press(page, "from-node")
    choose(page, "What", "depth weights of a read")
    choose(page, "How", "set to zero")
    page.get_by_text("Sets all depth weights in the read at 5.attn to zero at position 3.").wait_for(timeout=WAIT)
    press(page, "add-edit")
    page.locator('[aria-label^="Likeliest next tokens"]').wait_for(timeout=WAIT)
    page.locator('[aria-label^="KL between"]').wait_for(timeout=WAIT)
    first = {"target": "depth_weight", "operation": "zero", "site": "5.attn", "positions": [3]}
    page.wait_for_function("() => new URLSearchParams(location.search).has('edits')", timeout=WAIT)
    assert edits_of(page) == [first]
    page.get_by_role("button", name="Silence an attention").click()
    settled(page)
    second = {"target": "atom", "operation": "zero", "site": "5.attn"}
    page.wait_for_function("() => location.search.includes('atom')", timeout=WAIT)
    assert edits_of(page) == [first, second]
    press(page, "up-1")
    page.locator(".st-key-acts-1 label").click()
    settled(page)
    page.wait_for_function("() => location.search.includes('muted')", timeout=WAIT)
    assert edits_of(page) == [second, {**first, "muted": True}]
    page.screenshot(path=screenshots / "edits-1440.png", full_page=True)

    # a bar of the strip is a position
    page.locator('[aria-label^="KL between"] rect[data-pos="5"]').click(force=True)
    settled(page)
    page.locator("text=(position 5)").first.wait_for(timeout=WAIT)

    # the header of every page has the list in words, and the link opens the same
    link = page.url
    other, errors = new_page(browser, 1024, 768)
    other.goto(link)
    other.get_by_text("1 of 2 act").wait_for(timeout=WAIT)
    settled(other)
    other.locator('[aria-label^="Likeliest next tokens"]').wait_for(timeout=WAIT)
    assert other.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    other.get_by_role("button", name="Edits 1/2").click()
    other.locator(".st-key-short-acts-0").wait_for(timeout=WAIT)
    other.screenshot(path=screenshots / "edits-1024.png")
    other.close()
    assert [error for error in errors if "404" not in error] == []


def test_a_file_of_edits_is_imported_and_undone(page: Any, server: str, tmp_path: Path) -> None:
    open_edits(page, server)
    edit = {"target": "atom", "operation": "scale", "site": "2.mlp", "value": 0.5}
    good, bad = tmp_path / "edits.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"format": "t2lens edits 1", "edits": [edit]}))
    bad.write_text('[{"target": "atom", "operation": "explode", "site": "2.mlp"}]')
    page.get_by_text("As JSON: edit, import, take along").click()
    page.locator('input[type="file"]').set_input_files(bad)
    page.get_by_text("Edit 1: 'explode' is no operation").wait_for(timeout=WAIT)
    page.locator('input[type="file"]').set_input_files(good)
    page.get_by_text("Multiplies what 2.mlp writes by 0.5.").first.wait_for(timeout=WAIT)
    settled(page)
    press(page, "undo")
    page.get_by_text("No edit acts").wait_for(timeout=WAIT)


def test_a_model_is_uploaded_used_and_dropped(page: Any, server: str, tmp_path: Path, screenshots: Path) -> None:
    page.goto(f"{server}/models?{urlencode({'a': 'ddl', 'b': 'none', 'prompt': PROMPT})}")
    page.locator(".st-key-model-card .katex").first.wait_for(timeout=WAIT)
    settled(page)
    fake = tmp_path / "model.safetensors"
    fake.write_bytes(pickle.dumps({"weight": 1}))
    folder = BUNDLED / "standard"
    others = [folder / "config.json", folder / "tokenizer.json"]
    page.locator('input[type="file"]').set_input_files([fake, *others])
    page.get_by_role("button", name="Load these files").click()
    page.get_by_text("The weights are a pickle under another name").wait_for(timeout=WAIT)
    settled(page)
    page.locator('input[type="file"]').set_input_files([folder / "model.safetensors", *others])
    page.get_by_role("button", name="Load these files").click()
    page.get_by_role("heading", name="uploaded-1").wait_for(timeout=WAIT)
    settled(page)
    page.screenshot(path=screenshots / "models-1440.png", full_page=True)
    page.get_by_role("button", name="Use as A").click()
    page.wait_for_function("() => location.search.includes('a=uploaded-1')", timeout=WAIT)
    page.get_by_role("link", name="Edits").click()
    page.get_by_text("Build an edit of A").wait_for(timeout=WAIT)
    page.get_by_text("verified").locator("visible=true").first.wait_for(timeout=WAIT)
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name="Drop this model").click()
    page.wait_for_function("() => !location.search.includes('uploaded-1')", timeout=WAIT)

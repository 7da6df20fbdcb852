"""A written page opens without network and shows, under the pointer, the numbers of the trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from t2lens.analysis.quantities import grid
from t2lens.viz.colors import lut
from t2lens.viz.page import classic_js, fragment, page

from ..viz.words import spoken
from .driver import Maps

pytestmark = pytest.mark.e2e

PROMPT = "the <b>king</b> saw </script> &amp; the <b>king</b>"


@pytest.fixture
def offline(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open HTML as a local file with the network off; at the end there was no error and no request but the file."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, offline=True)
    trouble: list[str] = []

    def open_page(html: str) -> Any:
        file = tmp_path / f"page{len(context.pages)}.html"
        file.write_text(html, encoding="utf-8")
        page = context.new_page()
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: trouble.append(request.url) if request.url != file.as_uri() else None)
        page.goto(file.as_uri())
        return page

    yield open_page
    context.close()
    assert trouble == []


def number(line: str) -> float:
    """The first number in a line of a tooltip: 1.23 of `A   depth entropy 1.23 nats`."""
    return float(re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\))(?=\s|$)", line)[0])


def test_hovered_and_listed_numbers_are_those_of_the_trace(offline: Callable[..., Any], screenshots: Path):
    trace = spoken("attnres-full", PROMPT, dtype=torch.float32)
    other = spoken("ddl", PROMPT, dtype=torch.float32)
    opened = offline(page(trace, other, quantity="residual_norm", cell=(0, 5, "1.attn")))
    maps = Maps(opened)
    norms = [one.dataset["residual_norm"].values for one in (trace, other)]
    for column, row in ((0, 1), (3, 4), (7, 7)):
        lines = maps.hover("grid-A", column, row)
        assert f"position {column}" in lines[0]
        shown = [number(line.split("residual norm")[1]) for line in lines if "residual norm" in line]
        assert shown == pytest.approx([norm[row - 1, column] for norm in norms], rel=1e-6)
    matrix = [one.dataset["mixing"].sel(pos=5).values for one in (trace, other)]
    lines = maps.hover("depth-B", 2, 4)  # the fifth read takes from the third atom
    assert [number(line) for line in lines[1:3]] == pytest.approx([m[4, 2] for m in matrix], rel=1e-6)
    looks = [one.dataset["sequence_attention"].sel(layer=1).mean("head").values for one in (trace, other)]
    lines = maps.hover("sequence-A", 3, 6)
    assert [number(line.split("1.attn")[1]) for line in lines[1:3]] == pytest.approx([m[6, 3] for m in looks], rel=1e-6)

    maps.click("grid-B", 4, 5)
    assert maps.cell() == {"panel": 1, "pos": 4, "site": "2.attn"}
    listed = dict(row[:2] for row in maps.table("B", "node"))
    assert float(listed["gate beta"]) == pytest.approx(
        other.dataset["gate"].sel(write="2.attn", pos=4).item(), rel=1e-3
    )
    assert opened.locator("blockquote").text_content() == trace.text
    assert opened.locator("b").count() == 0
    opened.screenshot(path=screenshots / "page.png")


def test_the_chosen_quantity_is_drawn_from_the_page_alone(offline: Callable[..., Any]):
    trace = spoken("attnres-full", PROMPT, dtype=torch.float32)
    opened = offline(page(trace))
    maps = Maps(opened)
    expected = grid(trace, "effective_atoms").values
    opened.get_by_label("colour of the grid").select_option("effective_atoms")
    lines = maps.hover("grid-A", 2, 6)
    shown = next(line for line in lines if "effective atoms" in line)
    assert number(shown.split("effective atoms")[1]) == pytest.approx(float(expected[6, 2]), rel=1e-6)
    dark, light = maps.pixel("grid-A", 2, 7), maps.pixel("grid-A", 2, 1)
    assert (sum(dark) < sum(light)) == (expected[7, 2] > expected[1, 2])


def test_rounded_pages_show_three_digits(offline: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("t2lens.viz.page.BUDGET", 1000)
    trace = spoken("standard", PROMPT)
    opened = offline(page(trace))
    maps = Maps(opened)
    (line,) = [line for line in maps.hover("grid-A", 3, 5) if "residual norm" in line]
    exact = trace.dataset["residual_norm"].values[4, 3]
    assert number(line.split("residual norm")[1]) == float(f"{np.float16(exact):.3g}")
    assert "rounded to 3 digits" in opened.locator(".t2l").text_content()


def test_fragments_live_together_in_one_document(offline: Callable[..., Any]):
    one, two = spoken("standard", PROMPT), spoken("ddl", "the dog")
    parts = [fragment(one), fragment(two), fragment(one)]
    opened = offline(f"<!doctype html><meta charset=utf-8><body>{'<hr>'.join(parts)}</body>")
    opened.wait_for_function("document.querySelectorAll('[data-map=\"grid-A\"][data-geom]').length === 3")
    assert opened.locator("pre").count() == 0
    boxes = opened.locator("[data-t2lens]")
    names = ["standard", "ddl", "standard"]
    assert [name in boxes.nth(i).locator(".t2l").text_content() for i, name in enumerate(names)] == [True] * 3
    boxes.nth(0).locator('[data-map="grid-A"]').click(position={"x": 60, "y": 30})
    cells = [boxes.nth(i).locator(".t2l").get_attribute("data-cell") for i in range(3)]
    assert cells[0] != cells[2]  # each has its own choice


def test_scripts_inserted_later_find_their_element(offline: Callable[..., Any]):
    """Notebooks put the HTML in place first and run copies of its scripts afterwards, perhaps elsewhere."""
    html = fragment(spoken("standard", PROMPT))
    opened = offline("<!doctype html><meta charset=utf-8><body><main></main></body>")
    opened.evaluate(
        """(html) => {
            const main = document.querySelector("main");
            main.innerHTML = html;
            const old = main.querySelector("script"), script = document.createElement("script");
            script.textContent = old.textContent;
            old.remove();
            document.head.append(script);
        }""",
        html,
    )
    Maps(opened)


def test_figures_and_maps_use_the_same_colours(offline: Callable[..., Any]):
    opened = offline("<!doctype html><meta charset=utf-8>")
    script = classic_js().replace("</", "<\\/")
    tables = opened.evaluate(f"""() => {{ {script}
        const every = (names) => Object.fromEntries(Object.entries(names).map(([name, table]) => [name, lut(table)]));
        return Object.fromEntries(Object.entries(RAMPS).map(([theme, names]) => [theme, every(names)])); }}""")
    for theme in ("light", "dark"):
        for name in ("cool", "warm", "both"):
            assert tables[theme][name] == lut(name, theme).tolist(), (theme, name)

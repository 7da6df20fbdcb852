"""What the tests show in the two-axis maps, and how they look at it: geometry, pixels, tables, tooltip."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import t2lens
from t2lens.config import MLP, Attention, ModelConfig

__all__ = ["BASE", "IDS", "Maps", "Show", "new_page", "same", "trace"]


def new_page(browser: Any, width: int = 1440, height: int = 900) -> tuple[Any, list[str]]:
    """A page, and the list in which its errors collect."""
    page = browser.new_page(viewport={"width": width, "height": height})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    return page, errors


class Maps:
    """The maps of a page; map names are grid-A, depth-B, sequence-A, ..."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.wait()

    def wait(self) -> None:
        self.page.wait_for_selector('[data-map="grid-A"][data-geom]', timeout=90_000)

    def canvas(self, name: str) -> Any:
        return self.page.locator(f'[data-map="{name}"]')

    def geometry(self, name: str) -> dict[str, Any]:
        return json.loads(self.canvas(name).get_attribute("data-geom"))

    def at(self, name: str, column: int, row: int) -> tuple[float, float]:
        """Middle of a cell inside its canvas; row counts from the bottom in grids and depth maps."""
        g = self.geometry(name)
        line = g["rows"] - 1 - row if g["up"] else row
        return g["x"] + (column + 0.5) * g["cw"], g["y"] + (line + 0.5) * g["ch"]

    def click(self, name: str, column: int, row: int) -> None:
        x, y = self.at(name, column, row)
        self.canvas(name).click(position={"x": x, "y": y})

    def hover(self, name: str, column: int, row: int) -> list[str]:
        """Lines of the tooltip."""
        x, y = self.at(name, column, row)
        self.canvas(name).hover(position={"x": x, "y": y})
        return self.page.locator(".t2l .tip").text_content().split("\n")

    def pixel(self, name: str, column: int, row: int, down: float = 0.2) -> tuple[int, int, int]:
        """Colour inside a cell, above its middle (there may be a dot)."""
        x, y = self.at(name, column, row)
        y -= down * self.geometry(name)["ch"]
        script = """(canvas, [x, y]) => { const s = devicePixelRatio;
            return [...canvas.getContext("2d").getImageData(Math.round(x * s), Math.round(y * s), 1, 1).data]; }"""
        r, g, b, _ = self.canvas(name).evaluate(script, [x, y])
        return r, g, b

    def cell(self) -> dict[str, Any]:
        return json.loads(self.page.locator(".t2l").get_attribute("data-cell"))

    def heads(self, letter: str, name: str) -> list[str]:
        return self.page.locator(f'[data-node="{letter}"] [data-table="{name}"] th').all_text_contents()

    def table(self, letter: str, name: str) -> list[list[str]]:
        rows = self.page.locator(f'[data-node="{letter}"] [data-table="{name}"] tbody tr')
        return [row.locator("td").all_text_contents() for row in rows.all()]

    def crumbs(self) -> str:
        """The walk, as it is read."""
        return self.page.locator(".t2l .walk").text_content().strip()

    def said(self, name: str) -> str:
        """The sentence below a map."""
        return self.page.locator(f'section:has([data-map="{name}"]) .why').text_content()

    def wants(self) -> list[dict[str, Any]]:
        """The last question of the maps."""
        asked = [value["wants"] for key, value in self.page.evaluate("heard") if key == "ask"]
        return asked[-1] if asked else []

    def answer(self, *answers: dict[str, Any]) -> None:
        self.page.evaluate("a => answer(a)", list(answers))


BASE = ModelConfig(
    d_vocab=50,
    n_ctx=300,
    d_model=16,
    n_layers=3,
    attention=Attention(n_heads=2, n_kv_heads=1, d_head=8),
    mlp=MLP(d_mlp=20),
)
IDS = [0, 7, 3, 7, 9, 7, 2, 11]
Show = Callable[..., Maps]


def trace(ids: list[int] = IDS, seed: int = 1, **parts: Any) -> t2lens.Trace:
    return t2lens.trace(t2lens.build(replace(BASE, **parts), seed=seed), ids)


def number(text: str) -> float:
    return float(text.split()[-1])


def same(shown: str, value: float) -> bool:
    return number(shown) == pytest.approx(value, rel=2e-6, abs=1e-9)

"""What the home page measures for one node, in a real browser: the numbers of the analyses, also under edits, or why
there are none."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

import t2lens
from t2lens.analysis import rollout
from t2lens.analysis.node_effects import node_effects

from .driver import Maps, new_page

pytestmark = pytest.mark.e2e

PROMPT = "the king saw the queen and the king said"
ATOM = json.dumps([{"target": "atom", "site": "1.mlp", "operation": "zero"}])
ROWS = ["embed", *(f"{layer}.{kind}" for layer in range(8) for kind in ("attn", "mlp")), "out"]
STREAM = json.dumps([{"target": "stream", "site": "3.attn", "operation": "zero"}])


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page, errors = new_page(browser)
    yield page
    page.close()
    assert errors == []


def visit(page: Any, server: str, **params: str) -> Maps:
    page.goto(f"{server}/?{urlencode({'prompt': PROMPT, **params})}")
    return Maps(page)


def choose(maps: Maps, letter: str, pos: int, site: str) -> None:
    maps.click(f"grid-{letter}", pos, ROWS.index(site))
    assert maps.cell() == {"panel": "AB".index(letter), "pos": pos, "site": site}


def computed(maps: Maps, *letters: str) -> None:
    for letter in letters:
        below = maps.page.locator(f'section:has(> .map [data-map="grid-{letter}"]) .why')
        below.filter(has_text="embeddings of").wait_for(timeout=60_000)


def shares(maps: Maps, letter: str, places: list[tuple[int, int]]) -> list[float]:
    """Of the rollout, under the pointer, at these (row, position)s."""
    found = []
    for row, pos in places:
        tip, words = maps.hover(f"grid-{letter}", pos, row), "that passes here: "
        mine = [line.startswith(letter) for line in tip].index(True)
        found.append(float(next(line for line in tip[mine:] if words in line).split(words)[1]))
    return found


def effects_of(maps: Maps, letter: str) -> dict[str, str]:
    """The column of effects, wherever it stands."""
    found: dict[str, str] = {}
    for table in ("weights", "atoms"):
        if maps.heads(letter, table)[-1:] == ["effect"]:
            found |= {row[0]: row[-1] for row in maps.table(letter, table)}
    return found


def check_effects(shown: dict[str, str], model: Any, **node: Any) -> None:
    expected = node_effects(model, PROMPT, **node)
    assert shown and set(shown) <= set(expected.values)
    most = max(value for value in expected.values.values() if value is not None)
    for name, text in shown.items():
        value = expected.values[name]
        assert value is not None
        if text.startswith("<"):
            assert value <= float(text[2:]) * 1.05
        else:
            assert float(text) == pytest.approx(value, abs=0.006 * most + 1e-7)


def measure(maps: Maps, *letters: str) -> None:
    maps.page.get_by_role("button", name="measure effects").first.click()
    for letter in letters:
        maps.page.locator(f'[data-node="{letter}"] [data-note="effects"]').wait_for(timeout=60_000)


def test_the_rollout_of_a_clicked_node_is_that_of_the_analysis(page: Any, server: str) -> None:
    names = ("attnres-full", "ddl-cc-ec")
    maps = visit(page, server, a=names[0], b=names[1], node="A:4:2.mlp", layer="rollout")
    computed(maps, "A", "B")
    dice = random.Random()
    site, pos = dice.choice(["4.attn", "5.mlp", "6.attn"]), dice.randrange(5, 9)
    choose(maps, "B", pos, site)
    computed(maps, "A", "B")
    for letter, name in zip("AB", names, strict=True):
        model = t2lens.load(name)
        found = rollout(model, PROMPT, pos=pos, site=site)
        rows = np.concatenate([found["absorbed"].values[None], found["mass"].values])
        places = [(dice.randrange(len(rows) - 1), dice.randrange(pos + 1)) for _ in range(6)]
        places += [divmod(int(rows[:-1].argmax()), rows.shape[1])]
        assert shares(maps, letter, places) == pytest.approx([float(rows[at]) for at in places], rel=1e-4, abs=1e-9)

    # a node that feeds it is a step of the walk; Back returns, and asks for nothing again
    choose(maps, "B", pos - 2, "1.mlp")
    assert maps.crumbs() == f"{site}@{pos} \u2190 1.mlp@{pos - 2}"
    maps.page.get_by_role("button", name="Back").click()
    assert maps.cell() == {"panel": 1, "pos": pos, "site": site}
    assert "embeddings of" in maps.said("grid-B")
    assert maps.page.locator(".t2l").first.get_attribute("aria-busy") == "false"


def test_effects_of_both_models_stand_beside_mass(page: Any, server: str) -> None:
    names = ("attnres-full", "standard")
    maps = visit(page, server, a=names[0], b=names[1], node="A:5:4.attn")
    measure(maps, "A", "B")
    for letter, name in zip("AB", names, strict=True):
        check_effects(effects_of(maps, letter), t2lens.load(name), pos=5, site="4.attn")
    choose(maps, "A", 8, "6.mlp")
    assert effects_of(maps, "A") == {}  # another node has not been measured
    measure(maps, "A")
    check_effects(effects_of(maps, "A"), t2lens.load(names[0]), pos=8, site="6.mlp")


def test_effects_are_those_of_the_way_that_is_shown(page: Any, server: str) -> None:
    maps = visit(page, server, a="muddformer", b="none", node="A:6:5.attn", way="q")
    model, seen = t2lens.load("muddformer"), []
    for way in ("q", "v"):
        page.get_by_label("attention reads with its").select_option(way)
        measure(maps, "A")
        seen.append(effects_of(maps, "A"))
        check_effects(seen[-1], model, pos=6, site="5.attn", way=way)
    assert seen[0] != seen[1]


def test_edited_against_clean(page: Any, server: str) -> None:
    name, pos, site = "attnres-full", 6, "5.attn"
    maps = visit(page, server, a=name, b="clean", edits=ATOM, node=f"A:{pos}:{site}", layer="rollout")
    computed(maps, "A", "B")
    measure(maps, "A", "B")
    model, found = t2lens.load(name), {}
    for letter, edits in (("A", ATOM), ("B", "")):
        with t2lens.edited(model, edits or ()):
            check_effects(effects_of(maps, letter), model, pos=pos, site=site)
            found[letter] = rollout(model, PROMPT, pos=pos, site=site)["mass"]
        (share,) = shares(maps, letter, [(4, pos)])
        assert share == pytest.approx(float(found[letter][3, pos]), rel=1e-4, abs=1e-9)
    assert not np.allclose(found["A"], found["B"], atol=1e-3)


def test_edits_under_which_an_answer_would_be_wrong_are_named(page: Any, server: str) -> None:
    maps = visit(page, server, a="standard", b="clean", edits=STREAM, node="A:5:5.attn", layer="rollout")
    computed(maps, "B")
    page.locator(".t2l .why", has_text="Rollout of 5.attn@5").wait_for(timeout=60_000)
    refused = maps.said("grid-A")
    assert "not right under the edit" in refused and "3.attn" in refused
    page.get_by_role("button", name="measure effects").first.click()
    why = page.locator('[data-node="A"] .why', has_text="Effects: ")
    why.wait_for(timeout=60_000)
    assert "not right under the edit" in why.text_content()
    check_effects(effects_of(maps, "B"), t2lens.load("standard"), pos=5, site="5.attn")


def test_playback_asks_where_it_stops(page: Any, server: str) -> None:
    maps = visit(page, server, a="standard", b="none", node="A:5:4.attn", layer="rollout")
    computed(maps, "A")
    page.get_by_label("direction of playback").select_option("depth 16")
    page.get_by_role("button", name="play", exact=True).click()
    page.wait_for_url("**node=A%3A5%3Aout**", timeout=60_000)
    computed(maps, "A")
    found = rollout(t2lens.load("standard"), PROMPT, pos=5, site="out")
    (share,) = shares(maps, "A", [(1, 5)])
    assert share == pytest.approx(float(found["mass"][0, 5]), rel=1e-4)


def test_a_prompt_of_its_own_for_b_is_aligned_from_the_end(page: Any, server: str) -> None:
    other = "and the king said"
    maps = visit(page, server, a="standard", b="attnres-full", prompt_b=other, align="right", node="A:9:4.attn")
    model = t2lens.load("attnres-full")
    n_a, n_b = len(model.to_tokens(PROMPT)[0]), len(model.to_tokens(other)[0])
    choose(maps, "A", n_a - 1, "4.attn")
    page.get_by_label("of the node, show").select_option("rollout")
    computed(maps, "A", "B")
    found = rollout(model, other, pos=n_b - 1, site="4.attn")
    places = [(1, n_b - 2), (3, n_b - 1)]
    assert shares(maps, "B", places) == pytest.approx([float(found["mass"][r - 1, p]) for r, p in places], rel=1e-4)
    choose(maps, "A", n_a - n_b - 1, "4.attn")  # nothing of B stands beside it
    assert "No position of B stands beside" in maps.said("grid-B")

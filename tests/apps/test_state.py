"""The state of the dashboard and its URL: a link restores exactly; a hostile one falls back with a notice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from t2lens.apps.edits import entries
from t2lens.apps.state import (
    PROMPT_LIMIT,
    Cell,
    Selection,
    fit_cell,
    fit_link,
    flag,
    format_url,
    limit_prompt,
    one_of,
    parse_cell,
    parse_url,
    read_cell,
    text,
    whole,
)

DEFAULT = Selection(model_a="one", model_b="two", prompt="a b", cell=Cell(panel=0, pos=1, site="out"))
PARAMETERS = (
    one_of("quantity", lambda: ["gate", "residual_norm"], "gate"),
    one_of("depth", ["mixing", "weights"], "mixing"),
    whole("beta", None, -2, 40),
    whole("n", 5, 1, 10),
    flag("diff", False),
    text("token"),
)
DEFAULTS = {each.key: each.default for each in PARAMETERS}
KNOWN = {"models": ["one", "two", "three"], "parameters": PARAMETERS}


@pytest.mark.parametrize(
    ("selection", "values"),
    [
        (DEFAULT, DEFAULTS),
        (
            Selection(model_a="three", model_b="none", prompt="the cat saw the dog\n<b>&</script> \t"),
            {"quantity": "residual_norm", "depth": "weights", "beta": -2, "n": 10, "diff": True, "token": " <i>&"},
        ),
        (
            Selection(
                model_a="two",
                model_b="clean",
                prompt="%26=&?#+ \u00e9",
                prompt_b="another",
                align="right",
                edits='[{"target": "atom"}]',
                cell=Cell(panel=1, pos=127, site="12.mlp"),
            ),
            {**DEFAULTS, "beta": 0, "token": "\u0000\u202e"},
        ),
    ],
)
def test_a_selection_survives_the_url(selection: Selection, values: dict[str, Any]) -> None:
    restored, read, notices = parse_url(format_url(selection, values, PARAMETERS), DEFAULT, **KNOWN)
    assert (restored, read) == (selection, values)
    assert notices == []


def test_an_empty_url_is_the_default() -> None:
    assert parse_url({}, DEFAULT, **KNOWN) == (DEFAULT, DEFAULTS, [])


def test_a_new_prompt_does_not_inherit_the_default_node() -> None:
    assert parse_url({"prompt": "x"}, DEFAULT, **KNOWN)[0].cell is None


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"a": "<script>alert(1)</script>"}, "model_a"),
        ({"a": "../../etc/passwd"}, "model_a"),
        ({"a": "none"}, "model_a"),  # only B may be absent
        ({"b": ""}, "model_b"),
        ({"align": "middle"}, "align"),
        ({"edits": "x" * (PROMPT_LIMIT + 1)}, "edits"),
        ({"quantity": "__class__"}, "quantity"),
        ({"depth": "x" * 10_000}, "depth"),
        ({"n": "11"}, "n"),
        ({"n": "1e3"}, "n"),
        ({"n": ""}, "n"),
        ({"beta": "\u0661"}, "beta"),
        ({"diff": "yes"}, "diff"),
        ({"token": "x" * 201}, "token"),
    ],
)
def test_unknown_values_fall_back_with_one_notice(params: dict[str, str], field: str) -> None:
    selection, values, notices = parse_url(params, DEFAULT, **KNOWN)
    assert selection == DEFAULT and values == DEFAULTS
    assert len(notices) == 1 and len(notices[0]) < 200 and f" {next(iter(params))} = " in notices[0], field


def test_a_near_miss_is_named() -> None:
    assert "three" in parse_url({"a": "thre"}, DEFAULT, **KNOWN)[2][0]
    assert "did you mean gate?" in parse_url({"quantity": "gat"}, DEFAULT, **KNOWN)[2][0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A",
        "C:1:out",
        "A:-1:out",
        "A:1:",
        "A:1:<b>",
        "A:1:out:x",
        "A:\u0661:out",
        "A:9999999:out",
        "A:1:out\n",
    ],
)
def test_a_broken_node_is_reported(text: str) -> None:
    assert parse_cell(text) is None
    selection, _, notices = parse_url({"node": text}, DEFAULT, **KNOWN)
    assert selection.cell is None and len(notices) == 1


def test_a_long_prompt_is_cut_with_a_notice() -> None:
    prompt, notices = limit_prompt("x" * (PROMPT_LIMIT + 1))
    assert len(prompt) == PROMPT_LIMIT and str(PROMPT_LIMIT) in notices[0]
    assert limit_prompt("short") == ("short", [])


@pytest.mark.parametrize(
    "value",
    [
        None,
        "A:1:out",
        3,
        [],
        {},
        {"panel": 2, "pos": 1, "site": "out"},
        {"panel": 0, "pos": -1, "site": "out"},
        {"panel": 0, "pos": 1.5, "site": "out"},
        {"panel": True, "pos": True, "site": "out"},
        {"panel": 0, "pos": float("nan"), "site": "out"},
        {"panel": 0, "pos": 1, "site": "<img>"},
        {"panel": 0, "pos": 1, "site": None},
        {"panel": [], "pos": 1, "site": "out"},
    ],
)
def test_what_is_not_a_cell_is_not_read_as_one(value: object) -> None:
    assert read_cell(value) is None


def test_a_cell_of_the_browser_is_read() -> None:
    assert read_cell({"panel": 1, "pos": 7, "site": "5.mlp"}) == Cell(panel=1, pos=7, site="5.mlp")


SITES = [["embed", "0.attn", "0.mlp", "out"], ["embed", "0.attn", "out"]]


def test_a_cell_outside_the_traces_is_moved_inside() -> None:
    cell, notices = fit_cell(Cell(panel=1, pos=99, site="0.mpl"), [5, 4], SITES)
    assert cell.panel == 1 and cell.pos == 3 and cell.site in SITES[1]
    assert len(notices) == 2
    assert fit_cell(Cell(panel=1, pos=2, site="0.mlp"), [5], SITES[:1]) == (
        Cell(panel=0, pos=2, site="0.mlp"),
        [],
    )
    assert fit_cell(None, [5, 4], SITES) == (Cell(panel=0, pos=4, site="out"), [])


def test_edits_of_a_link_are_text() -> None:
    for given in ('[{"target": "\\ud800"}]', '{"\\udc00": 1}'):
        with pytest.raises(ValueError, match="half a character"):
            entries(given)
    assert entries('[{"target": "\\ud83d\\ude00"}]') == [{"target": "\U0001f600"}]


@pytest.mark.parametrize("seed", range(3))
def test_a_link_too_long_to_open_leaves_out_the_longest_and_says_so(seed: int) -> None:
    dice = random.Random(seed)
    params = {"a": "x", "prompt": "\U0001f451" * dice.randrange(5_200, 12_000), "edits": "e" * dice.randrange(9_000)}
    kept, told = fit_link(params)
    assert kept == {"a": "x", "edits": params["edits"]} and len(told) == 1 and "leaves out prompt" in told[0]
    short = {**params, "prompt": "word " * 1000}
    assert fit_link(short) == (short, [])

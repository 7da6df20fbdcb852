"""A walk in a link is the walk that one shared, and what is none is said."""

import random
from typing import Any

import pytest

from t2lens.apps.state import Cell
from t2lens.apps.walk import STEPS, WALK, fit_walk, parse_walk, write_walk

SITES = [["embed", "0.attn", "0.mlp", "1.attn", "1.mlp", "out"]] * 2
END = Cell(panel=0, pos=2, site="0.mlp")


def step(panel: int, pos: int, site: str, **word: str) -> dict[str, Any]:
    return {"panel": panel, "pos": pos, "site": site, **word}


def test_a_walk_comes_back_as_it_was() -> None:
    dice = random.Random()
    for word in (" king", "~A1-out-", "%20&=#", "\u05e9\u05dc", "\U0001f468\u200d\U0001f469", "", "\n"):
        walk = [step(0, 5, "out", word=word), step(0, 5, "out"), step(0, dice.randrange(3, 5), "1.mlp")]
        assert parse_walk(WALK.read(write_walk(walk))) == walk
        assert fit_walk(write_walk(walk), END, [6, 6], SITES) == walk
    assert parse_walk("") == fit_walk("", END, [6, 6], SITES) == [] and write_walk([]) == ""
    long = [step(0, 100 - k, "out") for k in range(90)]
    assert parse_walk(write_walk(long)) == long[-STEPS:] and len(write_walk(long)) < 400
    assert parse_walk(write_walk([step(0, 1, "out", word="x" * 10**6)]))[0]["word"] == "x" * 40
    assert write_walk([step(0, 1, "out", word="\ud800")])


@pytest.mark.parametrize(
    "wrong",
    ["A", "A1", "C1-out", "A1-out~", "A-1-out", "A1-<b>", "A1-out~A0-out-w", "A1-out~" * 40 + "A1-out", "\ud800"],
)
def test_what_is_no_walk_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="which is no walk"):
        WALK.read(wrong)


def test_a_browser_can_send_anything_as_a_trail() -> None:
    for wrong in (None, 3, "A1-out", {}, [None], [{}], [step(2, 1, "out")], [step(0, -1, "out")], [step(0, 1, "a b")]):
        assert write_walk(wrong) == ""


def test_a_walk_that_cannot_be_here_is_left_out() -> None:
    for walk in ("A9-out", "A5-7.mlp", "B9-out"):
        with pytest.raises(ValueError, match="which is not here; it is left out"):
            fit_walk(walk, END, [6, 6], SITES)
    with pytest.raises(ValueError, match="not here"):
        fit_walk("B2-out", END, [6], SITES[:1])
    for walk in ("A1-out", "A2-embed", "A2-0.mlp", "A5-out~A5-out~A2-1.mlp", "A5-out-word~A5-1.mlp"):
        with pytest.raises(ValueError, match="cannot read"):
            fit_walk(walk, END, [6, 6], SITES)
    assert len(fit_walk("A5-out~B1-1.mlp~A4-out", END, [6, 6], SITES)) == 3  # B beside A, and back

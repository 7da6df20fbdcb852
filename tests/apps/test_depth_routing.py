"""The page Depth routing, without a browser: its numbers are those of the functions, what cannot be is a sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

import t2lens
from t2lens.analysis import depth_profile
from t2lens.apps import loaders
from t2lens.store import corpus_statistics
from t2lens.zoo.text import sample_texts
from tests.apps.pages import open_page as open_on
from tests.apps.pages import texts

PROMPT = "the king saw the <b>&"
EDIT = '[{"target": "atom", "site": "3.attn", "operation": "zero"}]'


def open_page(**params: str) -> AppTest:
    return open_on("depth-routing", **{"a": "attnres-full", "b": "none", "prompt": PROMPT, **params})


def numbers(app: AppTest, i: int = 0) -> dict[tuple[str, str], float]:
    """(read, source) -> what the table of side i shows, without what does not exist."""
    table = app.dataframe[i].value
    rows = table.to_dict("records")
    return {
        (str(row["read"]), str(name)): float(row[name])
        for row in rows
        for name in table.columns[1:]
        if row[name] is not None and np.isfinite(row[name])
    }


def same(shown: dict[tuple[str, str], float], array: Any) -> None:
    axis = next(str(dim) for dim in array.dims if dim != "read")
    wanted = {
        (str(read), str(name)): float(array.sel({"read": read, axis: name}))
        for read in array["read"].values
        for name in array[axis].values
        if np.isfinite(array.sel({"read": read, axis: name}))
    }
    assert shown.keys() == wanted.keys()
    assert list(shown.values()) == pytest.approx([wanted[key] for key in shown], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("what", "name"),
    [("weights", "weight"), ("mixing", "mixing"), ("contribution", "contribution"), ("share", "share")],
)
def test_an_average_over_the_prompt_is_that_of_the_function(what: str, name: str) -> None:
    app = open_page(routing_what=what)
    assert not app.exception
    found = depth_profile(t2lens.load("attnres-full"), PROMPT)
    same(numbers(app), found[f"{name}_mean"])
    n = int(found["n_tokens"])
    assert f"n = {n} tokens of the prompt, 1 start token left out" in texts(app)


def test_start_tokens_and_spread_are_choices() -> None:
    app = open_page(routing_what="weights", routing_stat="sd", routing_start="1")
    found = depth_profile(t2lens.load("attnres-full"), PROMPT, start=True)
    same(numbers(app), found["weight_std"])
    assert "start tokens counted" in texts(app)
    app.selectbox(key="routing_stat").set_value("iqr").run()
    quartile = found["weight_quartile"]
    same(numbers(app), quartile.sel(q=0.75) - quartile.sel(q=0.25))


def test_one_token_is_that_of_the_trace() -> None:
    app = open_page(routing_what="mixing", routing_over="token", node="A:3:5.attn")
    data = t2lens.trace(t2lens.load("attnres-full"), PROMPT).dataset
    same(numbers(app), data["mixing"].sel(pos=3))
    assert "n = 1 token" in texts(app) and "Chosen: 5.attn at position 3" in texts(app)


def test_passages_say_how_many() -> None:
    app = open_page(routing_over="8", a="muddformer", routing_what="weights")
    found = depth_profile(t2lens.load("muddformer"), sample_texts(8))
    same(numbers(app), found["weight_mean"])
    assert f"n = {int(found['n_tokens']):,} tokens of 8 bundled passages, 8 start tokens left out" in texts(app)


def test_the_corpus_is_the_bundled_statistics() -> None:
    app = open_page(routing_over="corpus", routing_what="weights", b="ddl")
    assert not app.exception
    found = corpus_statistics("attnres-full")
    same(numbers(app), found["weight_mean"])
    n = next(int(note.split()[2]) for note in found.notes if note.startswith("n = "))
    assert n > 100_000 and f"n = {n:,} tokens, all of the held-out text" in texts(app)
    assert "B, ddl: this system has no depth weights of its own" in texts(app)
    app.selectbox(key="routing_what").set_value("share").run()
    assert not app.exception
    assert "of own depth weights alone" in texts(app)


def test_edited_stands_against_clean_and_the_corpus_knows_no_edits() -> None:
    app = open_page(b="clean", edits=EDIT, routing_what="contribution")
    assert not app.exception
    edited, clean = numbers(app), numbers(app, 1)
    assert edited["out", "3.attn"] == 0 and clean["out", "3.attn"] > 0
    app.selectbox(key="routing_what").set_value("weights")
    app.selectbox(key="routing_over").set_value("corpus").run()
    assert "of the model without edits" in texts(app)


def test_what_has_no_difference_says_so() -> None:
    app = open_page(b="attnres-block", routing_what="weights", routing_minus="1")
    assert not app.exception
    assert "A and B do not have the same sources" in texts(app)


def test_a_prompt_of_b_without_the_place_says_so() -> None:
    app = open_page(b="standard", prompt_b="the", routing_over="token", node="A:5:5.attn")
    assert not app.exception
    assert "B, standard: its prompt has no token at the place of the chosen one." in texts(app)
    assert len(app.dataframe) == 1


def test_effects_are_measured_when_asked_and_content_is_run_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []
    run = loaders.analyse

    def noting(loaded: Any, key: str, given: Any, options: dict[str, Any], edits: str = "") -> Any:
        asked.append((key, options))
        return run(loaded, key, given, options, edits)

    monkeypatch.setattr(loaders, "analyse", noting)
    app = open_page()
    assert ("effects", {"fast": True}) in asked and "content" not in [key for key, _ in asked]
    app.toggle(key="routing_content").set_value(True).run()
    assert "content" in [key for key, _ in asked]
    app.session_state["routing_effect"] = "measured"
    app.run()
    assert not app.exception
    assert ("effects", {"fast": False}) in asked


def test_a_link_from_a_stranger_falls_back_with_notices() -> None:
    app = open_page(routing_over="<script>", routing_what="weigths", routing_start="yes", node="A:99:9.attn")
    assert not app.exception
    assert "did you mean weights?" in texts(app) and "neither 0 nor 1" in texts(app)
    assert len(app.dataframe) == 1

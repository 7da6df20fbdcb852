"""The pages made from the catalog of analyses, without a browser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import t2lens
from t2lens.analysis.catalog import ANALYSES, Analysis, Option, analysis
from t2lens.apps import loaders
from t2lens.apps.views.analyses import _options
from tests.apps.pages import open_page as open_on
from tests.apps.pages import texts, url

PROMPT = "the king saw the <b>&"


def open_page(**params: str) -> AppTest:
    return open_on("analyses", **params)


def test_a_page_shows_the_numbers_of_the_function() -> None:
    app = open_page(b="none", a="standard", prompt=PROMPT, analysis="logits")
    assert not app.exception
    finding = analysis("logits").run(t2lens.load("standard"), PROMPT)
    table = app.dataframe[0].value
    assert list(table.columns) == list(finding.columns)
    assert len(table) == len(finding.rows)
    for row, expected in zip(table.itertuples(index=False), finding.rows, strict=True):
        assert row[1] == pytest.approx(expected[1], abs=1e-6)
    for note in finding.notes:
        assert note.split("; here")[0] in texts(app)
    expected = {"a": "standard", "b": "none", "prompt": PROMPT, "analysis": "logits"}
    assert {key: value for key, value in url(app).items() if key != "analysis_over"} == expected


def test_options_and_the_prompt_change_what_is_run() -> None:
    app = open_page(b="none", a="standard", prompt=PROMPT, analysis="logits")
    app.selectbox(key="logits-by").set_value("head")
    next(each for each in app.button if each.label == "Run with these").click().run()
    app.text_area(key="prompt").set_value("In the beginning")
    next(each for each in app.button if each.label == "Run").click()
    app.run()
    assert not app.exception
    finding = analysis("logits").run(t2lens.load("standard"), "In the beginning", by="head")
    assert len(app.dataframe[0].value) == len(finding.rows)
    assert url(app)["prompt"] == "In the beginning"


def test_what_a_model_cannot_give_is_a_sentence() -> None:
    app = open_page(b="none", a="standard", prompt=PROMPT, analysis="ddl")
    assert not app.exception
    assert not app.dataframe
    assert "ddl" in texts(app)


def test_an_empty_prompt_is_a_sentence() -> None:
    app = open_page(b="none", a="standard", prompt=" ", analysis="logits")
    assert "The prompt is empty" in texts(app)


def test_a_link_from_a_stranger_falls_back_with_notices() -> None:
    app = open_page(
        a="<script>", b="none", analysis="lenz", analysis_options='{"pos": "<b>", "by": 7, "x": []', prompt=PROMPT
    )
    assert not app.exception
    assert "The link asks for a = '<script>'" in texts(app) and "did you mean lens?" in texts(app)
    assert len(app.dataframe) == 1


def hostile(option: Option) -> list[Any]:
    """What a link can ask of an option that it cannot be."""
    never = [float("nan"), float("inf"), 1e99, 10**30, -(10**30), [1], {"a": 1}, "\ud800"]
    also = {
        "flag": [1, "x"],
        "choice": [True, 0, "no such choice"],
        "position": [True, 0.5, "x", 2**53],
        "count": [True, 0.5, -1, "x", option.most + 1],
        "number": [True, "x"],
    }
    return never + also.get(option.kind, [True, 0])


EVERY = [(entry, option) for entry in ANALYSES for option in entry.options]


@pytest.mark.parametrize(("entry", "option"), EVERY, ids=[f"{entry.key}.{option.name}" for entry, option in EVERY])
def test_options_that_cannot_be_are_named_and_left_out(entry: Analysis, option: Option) -> None:
    for value in hostile(option):
        written = json.dumps({option.name: value})
        found, notices = _options(entry, written)
        assert found == {} and len(notices) == 1 and repr(option.name) in notices[0], value
        notices[0].encode()
        assert len(notices[0]) < 250


def test_a_hostile_option_shows_its_default_and_a_notice() -> None:
    for given in (1e99, float("nan"), 2**53, True):
        app = open_page(a="standard", b="none", prompt=PROMPT, analysis_options=json.dumps({"pos": given}))
        assert not app.exception
        assert app.number_input("logits-pos").value == -1
        assert "'pos'" in texts(app) and "analysis_options" not in url(app)
    app = open_page(a="standard", b="none", prompt=PROMPT, analysis_options='{"token": "\\ud800"}')
    assert not app.exception and app.text_input("logits-token").value == ""
    app = open_page(a="standard", b="none", prompt=PROMPT, analysis_options="[" * 1900)
    assert not app.exception and "no JSON object" in texts(app)


def test_tokens_of_a_list_are_not_those_of_the_prompt() -> None:
    """The most frequent tokens have means of their own; they are not what stands at positions."""
    app = open_page(a="standard", b="none", prompt="the king the king the king", analysis="statistics")
    assert not app.exception


def test_options_of_a_link_are_taken_and_kept() -> None:
    app = open_page(
        a="standard", b="none", prompt=PROMPT, analysis="logits", analysis_options='{"by": "head", "pos": 2}'
    )
    finding = analysis("logits").run(t2lens.load("standard"), PROMPT, by="head", pos=2)
    assert len(app.dataframe[0].value) == len(finding.rows)
    assert json.loads(url(app)["analysis_options"]) == {"by": "head", "pos": 2}


def test_both_models_stand_side_by_side_and_one_that_cannot_says_so() -> None:
    app = open_page(a="standard", b="ddl", prompt=PROMPT, analysis="ddl")
    assert not app.exception
    assert "A, standard: " in texts(app)
    assert len(app.dataframe) == 1


EDIT = '[{"target": "atom", "site": "3.attn", "operation": "zero"}]'


def test_edited_stands_against_clean() -> None:
    app = open_page(a="standard", b="clean", prompt=PROMPT, analysis="lens", edits=EDIT)
    assert not app.exception
    edited, clean = (app.dataframe[i].value for i in (0, 1))
    plain = analysis("lens").run(t2lens.load("standard"), PROMPT)
    assert edited.values.tolist() != clean.values.tolist()
    assert list(clean.iloc[0])[1] == pytest.approx(plain.rows[0][1])
    assert plain.title in [each.value for each in app.text]  # of both alike


def test_titles_that_differ_say_whose_they_are() -> None:
    text = "And the king said unto the queen, What wilt thou, O queen? And the king"
    app = open_page(a="attnres-full", b="ddl-cc-ec", prompt=text, analysis="logits")
    titles = {name: analysis("logits").run(t2lens.load(name), text).title for name in ("attnres-full", "ddl-cc-ec")}
    assert len(set(titles.values())) == 2
    said = texts(app).splitlines()
    assert f"A  {titles['attnres-full']}" in said and f"B  {titles['ddl-cc-ec']}" in said


def test_a_finding_is_computed_once() -> None:
    loaders.forget()
    loaded = loaders.load("standard")
    first = loaders.analyse(loaded, "logits", PROMPT, {"by": "atom"})
    assert loaders.analyse(loaded, "logits", PROMPT, {"by": "atom"}) is first
    assert loaders.analyse(loaded, "logits", PROMPT, {"by": "head"}) is not first
    assert json.loads(first.to_json())["title"] == first.title

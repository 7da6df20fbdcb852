"""The pages made from the catalog of analyses, without a browser."""

from __future__ import annotations

import json
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

import t2lens
from t2lens.analysis.catalog import ANALYSES, analysis
from t2lens.apps import loaders
from t2lens.apps.state import parse_analysis
from t2lens.apps.views.analyses import GROUPS

PROMPT = "the king saw the <b>&"


def _page(group: str) -> None:
    import streamlit as st

    from t2lens.apps.header import keep
    from t2lens.apps.views.analyses import page

    st.session_state["pages"] = []
    keep()
    page(group)()


def open_page(group: str, **params: str) -> AppTest:
    app = AppTest.from_function(_page, args=(group,), default_timeout=120)
    for key, value in params.items():
        app.query_params[key] = value
    return app.run()


def texts(app: AppTest) -> str:
    return "\n".join(element.value for element in app.text)


def url(app: AppTest) -> dict[str, Any]:
    return {key: value[0] if isinstance(value, list) else value for key, value in app.query_params.items()}


def test_every_analysis_stands_on_a_page() -> None:
    assert {entry.group for entry in ANALYSES} == set(GROUPS)
    assert len({entry.key for entry in ANALYSES}) == len(ANALYSES)


def test_a_page_shows_the_numbers_of_the_function() -> None:
    app = open_page("attribution", a="standard", prompt=PROMPT, analysis="logits")
    assert not app.exception
    finding = analysis("logits").run(t2lens.load("standard"), PROMPT)
    table = app.dataframe[0].value
    assert list(table.columns) == list(finding.columns)
    assert len(table) == len(finding.rows)
    for row, expected in zip(table.itertuples(index=False), finding.rows, strict=True):
        assert row[1] == pytest.approx(expected[1], abs=1e-6)
    for note in finding.notes:
        assert note.split("; here")[0] in texts(app)
    assert url(app) == {"a": "standard", "prompt": PROMPT, "analysis": "logits"}


def test_options_and_the_prompt_change_what_is_run() -> None:
    app = open_page("attribution", a="standard", prompt=PROMPT, analysis="logits")
    app.selectbox(key="logits-by").set_value("head")
    app.text_area(key="prompt").set_value("In the beginning")
    app.button[0].click()
    app.run()
    assert not app.exception
    finding = analysis("logits").run(t2lens.load("standard"), "In the beginning", by="head")
    assert len(app.dataframe[0].value) == len(finding.rows)
    assert url(app)["prompt"] == "In the beginning"


def test_what_a_model_cannot_give_is_a_sentence() -> None:
    app = open_page("gates", a="standard", prompt=PROMPT, analysis="ddl")
    assert not app.exception
    assert not app.dataframe
    assert "ddl" in texts(app)


def test_an_empty_prompt_is_a_sentence() -> None:
    app = open_page("attribution", a="standard", prompt=" ", analysis="logits")
    assert "The prompt is empty" in texts(app)


def test_a_link_from_a_stranger_falls_back_with_notices() -> None:
    given = {"model": "ddl", "prompt": "x", "analysis": "lens", "models": ["ddl"], "analyses": ["lens", "loss"]}
    asked = {"a": "<script>", "analysis": "lenz", "prompt": "y" * 5000}
    (model, prompt, chosen), notices = parse_analysis(asked, **given)  # type: ignore[arg-type]
    assert (model, chosen, len(prompt)) == ("ddl", "lens", 4000)
    assert [notice.split(",")[0] for notice in notices] == [
        "The link asks for a = '<script>'",
        "The prompt has 5000 characters; only the first 4000 are read.",
        "The link asks for analysis = 'lenz'",
    ]


def test_a_finding_is_computed_once() -> None:
    st.cache_resource.clear()
    loaded = loaders.load("standard")
    first = loaders.analyse(loaded, "logits", PROMPT, {"by": "atom"})
    assert loaders.analyse(loaded, "logits", PROMPT, {"by": "atom"}) is first
    assert loaders.analyse(loaded, "logits", PROMPT, {"by": "head"}) is not first
    assert json.loads(first.to_json())["title"] == first.title

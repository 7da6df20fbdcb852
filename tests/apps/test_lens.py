"""The page Lens without a browser: what it shows are the numbers of the functions."""

from __future__ import annotations

import html
import re
from typing import Any

import numpy as np
import pytest
import streamlit as st
import torch
from streamlit.testing.v1 import AppTest

import t2lens
from t2lens.analysis import ablate_writes, attribute_logits, continue_text, logit_lens, top_paths
from t2lens.apps.nodes import picked
from t2lens.apps.state import Cell
from t2lens.viz.labels import fmt, glyphs
from tests.apps.pages import open_page as open_on
from tests.apps.pages import pictures, texts

PROMPT = "And the king said unto the <b>& people, and the"
EDIT = '[{"target": "atom", "site": "3.attn", "operation": "zero"}]'
STRONG = '[{"target": "atom", "site": "*.mlp", "operation": "zero"}]'
STREAM = '[{"target": "stream", "site": "1.attn", "operation": "scale", "value": 0.5}]'


def open_page(**params: str) -> AppTest:
    return open_on("lens", **{"a": "standard", "b": "none", "prompt": PROMPT, **params})


def tips(svg: str) -> list[str]:
    return [html.unescape(tip) for tip in re.findall(r'data-tip="([^"]*)"', svg)]


def about(svg: str) -> str:
    found = re.search(r'aria-label="([^"]*)"', svg)
    assert found
    return html.unescape(found[1])


def test_the_grid_shows_what_each_read_predicts() -> None:
    app = open_page(node="A:4:2.mlp")
    assert not app.exception
    finding = logit_lens(t2lens.load("standard"), PROMPT)
    said = tips(pictures(app)["lens-grid-A"])
    reads, n = finding["read"].values, min(13, finding.dataset.sizes["pos"])
    assert len(said) == len(reads) * n
    for read in reads:
        at = finding.dataset.sel(read=read, pos=4)
        expected = (
            f"{read} at position 4, after {glyphs(str(finding['token'].values[4]))}\npredicts "
            f"{glyphs(str(at['top_token'].values[0]))} with probability {fmt(float(at['top_probability'][0]))}\n"
            f"probability of the followed token: {fmt(float(at['probability']))}"
        )
        assert expected in said


def test_the_shares_sum_and_the_sum_is_shown() -> None:
    app = open_page(node="A:3:out", lens_by="head", b="attnres-full")
    assert not app.exception
    for letter, name in (("A", "standard"), ("B", "attnres-full")):
        model = t2lens.load(name)
        token = int(model.to_tokens(PROMPT)[0, 4])
        finding = attribute_logits(model, PROMPT, pos=3, token=token, by="head")
        svg = pictures(app)[f"shares-{letter}"]
        total, logit = float(finding["share"].sum()), float(finding["logit"])
        assert f"sum = {fmt(total)}, logit of the model = {fmt(logit)}, off by {abs(total - logit):.0e}" in about(svg)
        assert total == pytest.approx(logit, abs=1e-4)
        for part, share in zip(finding["part"].values, finding["share"].values, strict=True):
            if part != "bias" or share:
                assert any(tip.startswith(f"{part}: {fmt(float(share))} logits") for tip in tips(svg))


def test_paths_are_those_of_the_function() -> None:
    app = open_page(node="A:3:out")
    model = t2lens.load("standard")
    finding = top_paths(model, PROMPT, pos=3, token=int(model.to_tokens(PROMPT)[0, 4]), n=10)
    svg = pictures(app)["paths-A"]
    listed = float(finding["value"].sum())
    assert f"these 10 = {fmt(listed)} ({listed / float(finding['logit']):.0%})" in about(svg)
    running = [f"{x:+.3f}".replace("-", "\u2212") for x in np.cumsum(finding["value"].values)]
    assert all(f">{number}</text>" in svg for number in running)


def test_a_token_can_be_followed_against_another() -> None:
    app = open_page(node="A:3:out", lens_follow="token", lens_token="\u00b7king", lens_against=" people")
    assert not app.exception
    finding = attribute_logits(t2lens.load("standard"), PROMPT, pos=3, token=" king", against=" people")
    assert f"difference of logits of the model = {fmt(float(finding['logit']))}" in about(pictures(app)["shares-A"])
    lens = logit_lens(t2lens.load("standard"), PROMPT, target=" king")
    value = fmt(float(lens["probability"].sel(read="out", pos=3)))
    assert any(tip.endswith(value) and "out at position 3" in tip for tip in tips(pictures(app)["lens-line"]))


def test_what_is_no_token_is_a_sentence_with_the_space_it_may_lack() -> None:
    app = open_page(lens_follow="token", lens_token="people")
    assert not app.exception and not pictures(app)
    assert "' people', as the word stands within a text" in texts(app)
    app = open_page(lens_follow="token")
    assert "type the token that is to be followed" in texts(app)


def test_at_the_last_position_the_likeliest_is_followed_and_it_is_said() -> None:
    model = t2lens.load("standard")
    last = len(model.to_tokens(PROMPT)[0]) - 1
    app = open_page(node=f"A:{last}:out")
    best = int(logit_lens(model, PROMPT)["top_id"].sel(read="out").values[last, 0])
    word = model.to_str_tokens([best])[0]
    assert f"at the last, which has none, A's likeliest, {glyphs(word)}" in texts(app)
    assert f"adds to the logit of {glyphs(word)} at position {last}" in about(pictures(app)["shares-A"])
    edited = open_page(node=f"A:{last}:out", b="clean", edits=STRONG)
    with torch.no_grad(), t2lens.edited(model, STRONG):
        other = model.to_str_tokens([int(model(model.to_tokens(PROMPT))[0, -1].argmax())])[0]
    assert other != word
    assert f"A's likeliest, {glyphs(other)} (in A and B)" in texts(edited)
    assert f"the logit of {glyphs(other)} at" in about(pictures(edited)["shares-B"])
    clean = logit_lens(model, PROMPT, target=other).dataset.sel(read="out").isel(pos=last)
    said = f"probability of the followed token: {fmt(float(clean['probability']))}"
    assert any(
        tip.endswith(said) and f"out at position {last}," in tip for tip in tips(pictures(edited)["lens-grid-B"])
    )


def test_writes_taken_away_stand_beside_their_shares_under_edits_too() -> None:
    app = open_page(node="A:3:out", b="clean", edits=EDIT, lens_writes="1", lens_effect="logit", lens_sort="size")
    assert not app.exception
    model = t2lens.load("standard")
    token = int(model.to_tokens(PROMPT)[0, 4])
    for letter, edits in (("A", EDIT), ("B", "[]")):
        with t2lens.edited(model, edits):
            found = ablate_writes(model, PROMPT, pos=3, token=token)
        svg = pictures(app)[f"writes-{letter}"]
        said = f"over {len(model.atoms)} writes = {fmt(float(found['spearman'].sel(measure='logit')), 2)}"
        assert said in about(svg)
        first = [tip.split(":")[0] for tip in dict.fromkeys(tips(svg))]
        assert first == [model.atoms[i] for i in np.argsort(-np.abs(found["share"].values), kind="stable")]
        for name in found["write"].values:
            at = found.dataset.sel(write=name)
            share, lost = fmt(float(at["share"])), fmt(-float(at["logit"]))
            assert f"{name}: adds {share} logits itself\nlogit lost without it: {lost} (logits)" in tips(svg)
    gone = float(found["logit"].sel(write="3.attn"))
    assert gone != 0  # in B; in A the edit has taken it away before
    assert "3.attn: adds 0 logits itself\nlogit lost without it: 0 (logits)" in tips(pictures(app)["writes-A"])
    refused = open_page(edits=STREAM, lens_writes="1")
    assert not refused.exception and "writes-A" not in pictures(refused) and "edits the stream" in texts(refused)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({"site": "2.mlp", "pos": 3, "way": "", "turn": 1}, Cell(panel=1, pos=3, site="2.mlp")),
        ({"site": "2.mlp", "pos": 3, "panel": "0"}, Cell(panel=0, pos=3, site="2.mlp")),
        ({"site": "2.mlp"}, Cell(panel=1, pos=5, site="2.mlp")),
        ({"site": "<b>", "pos": True, "panel": "7"}, Cell(panel=0, pos=5, site="out")),
        (None, Cell(panel=0, pos=5, site="out")),
        ("x", Cell(panel=0, pos=5, site="out")),
    ],
)
def test_a_click_is_the_shared_node(reported: Any, expected: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(st, "session_state", {"x": {"pick": reported}, "cell": Cell(panel=0, pos=5, site="out")})
    picked("x", 1)
    assert st.session_state["cell"] == expected


def test_positions_of_two_prompts_are_aligned_by_the_stated_rule() -> None:
    app = open_page(b="attnres-full", prompt_b="the people", align="right", node="A:1:out")
    assert not app.exception
    assert "B has no position beside this one" in texts(app)
    assert "lens-grid-A" in pictures(app) and "lens-grid-B" not in pictures(app)


def test_edited_and_clean_texts_are_compared() -> None:
    app = open_page(b="clean", edits=EDIT, lens_write="1", write_tokens="6", node="A:3:out")
    assert not app.exception
    model = t2lens.load("standard")
    clean = continue_text(model, PROMPT, n=6)["id"].values
    with t2lens.edited(model, EDIT):
        edited = continue_text(model, PROMPT, n=6)["id"].values
    for letter, ids in (("A", edited), ("B", clean)):
        words = " ".join(glyphs(word) for word in model.to_str_tokens(ids.tolist()))
        assert about(pictures(app)[f"written-{letter}"]).endswith(f": {words}")
    differ = np.flatnonzero(edited != clean)
    assert (f"new token {differ[0] + 1}, " if len(differ) else "are the same") in texts(app)


def test_hostile_parameters_fall_back() -> None:
    app = open_page(
        lens_follow="<b>", write_temperature="1e9", write_tokens="65", write_among="-1", lens_color="__class__"
    )
    assert not app.exception
    assert texts(app).count("The link asks for") == 5

"""The page of edits and the list of edits: without a browser."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from streamlit.testing.v1 import AppTest

import t2lens
from t2lens.apps import loaders
from t2lens.apps.edit_form import DRAFT
from t2lens.apps.edits import active, changed, edit_of, entries, refused, toggle, written
from t2lens.apps.frame import Side
from t2lens.apps.header import SHORT
from t2lens.apps.snippets import change_code, trace_code
from t2lens.apps.state import PROMPT_LIMIT
from t2lens.apps.views import edits as page
from t2lens.apps.views.edits import ROWS
from t2lens.apps.words import plain
from t2lens.edits import edits_to_json
from tests.apps.pages import open_page as open_on
from tests.apps.pages import texts, url

PROMPT = "the king saw the <b>& queen"
ZERO: dict[str, Any] = {"target": "atom", "operation": "zero", "site": "3.attn"}
EVEN: dict[str, Any] = {
    "target": "depth_weight",
    "operation": "zero_renormalise",
    "site": "5.attn",
    "sources": ["embed"],
}


def open_page(**params: str) -> AppTest:
    return open_on("edits", **{"a": "attnres-full", "b": "none", "prompt": PROMPT, "node": "A:3:5.attn", **params})


def listed(app: AppTest) -> list[dict[str, Any]]:
    return entries(app.session_state["edits"])


# --- the list as data ------------------------------------------------------------------------------------------------


def test_the_list_is_changed_as_asked() -> None:
    dice = random.Random(random.randrange(1000))
    here: list[dict[str, Any]] = [{"n": i} for i in range(4)]
    i = dice.randrange(1, 3)
    assert [each["n"] for each in changed(here, "up", i)].index(i) == i - 1
    assert [each["n"] for each in changed(here, "down", i)].index(i) == i + 1
    assert changed(here, "up", 0) == changed(here, "down", 3) == here
    assert changed(here, "double", i)[i : i + 2] == [here[i], here[i]]
    assert here[i] not in changed(here, "remove", i)
    assert changed(here, "add", value={"n": 9})[-1] == {"n": 9}
    muted = changed(here, "mute", i, True)
    assert [each.get("muted", False) for each in muted] == [j == i for j in range(4)]
    assert changed(muted, "mute", i, False) == changed(muted, "mute_all", value=False) == here
    assert json.loads(active(written(muted))) == [each for each in here if each["n"] != i]
    assert active(written(changed(here, "mute_all", value=True))) == ""


@pytest.mark.parametrize("text", ["", "[]", "{", "7", '["a"]', '{"format": "t2lens edits 1", "edits": []}', "[" * 3000])
def test_any_text_is_a_list_or_a_sentence(text: str) -> None:
    try:
        assert isinstance(entries(text), list)
    except ValueError as error:
        assert str(error).endswith(".") and active(text) == text


def test_a_list_that_no_link_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="a link holds"):
        written([{**ZERO, "prompt": "x" * PROMPT_LIMIT}])


def test_what_edits_to_json_writes_is_a_list() -> None:
    assert [edit_of(each).to_dict() for each in entries(edits_to_json([ZERO, EVEN]))] == [ZERO, EVEN]


def test_text_stays_text_where_markdown_is_read() -> None:
    assert plain("a*b :red[x] $y$ <b>") == r"a\*b \:red\[x\] \$y\$ \<b\>"


@pytest.mark.parametrize("edits", [[], [ZERO], [ZERO, {**EVEN, "positions": [2, -1]}]])
def test_the_snippet_makes_the_same_trace(edits: list[dict[str, Any]]) -> None:
    text = json.dumps(edits) if edits else ""
    made: dict[str, Any] = {}
    side = Side(letter="A", loaded=loaders.load("attnres-full"), prompt=PROMPT, edits=text)
    exec(trace_code(side), made)
    shown = loaders.trace(loaders.load("attnres-full"), PROMPT, text)
    assert made["trace"].edits == shown.edits
    for name in ("residual_norm", "loss", "next_logprob"):
        assert np.array_equal(made["trace"].dataset[name], shown.dataset[name], equal_nan=True)


# --- the page --------------------------------------------------------------------------------------------------------


def test_an_edit_is_built_by_choosing_and_undone() -> None:
    app = open_page()
    assert not app.exception
    assert app.selectbox(key="build_site").value == "5.attn"  # of the node
    app.button(key="from-node").click().run()
    assert app.multiselect(key="build_positions").value == [3]
    app.selectbox(key="build_target").set_value("depth_weight").run()
    app.selectbox(key="build_operation").set_value("one").run()
    assert "needs exactly one source" in texts(app) and app.button(key="add-edit").disabled
    app.multiselect(key="build_sources").set_value(["2.mlp"]).run()
    assert "Sets the depth weight of 2.mlp in the read at 5.attn to 1 and the others to 0 at position 3." in texts(app)
    draft = {"target": "depth_weight", "operation": "one", "sources": ["2.mlp"], "positions": [3]}
    assert json.loads(url(app)["edits_draft"]) == draft  # the site is that of the node
    app.button(key="add-edit").click().run()
    assert not app.exception
    (made,) = listed(app)
    assert made == {
        "target": "depth_weight",
        "operation": "one",
        "site": "5.attn",
        "sources": ["2.mlp"],
        "positions": [3],
    }
    assert json.loads(url(app)["edits"]) == [made]
    app.button(key="undo").click().run()
    assert listed(app) == [] and app.button(key="undo").disabled


def test_the_list_is_reordered_muted_doubled_and_emptied() -> None:
    app = open_page(edits=json.dumps([ZERO, EVEN]))
    app.button(key="up-1").click().run()
    assert listed(app) == [EVEN, ZERO]
    app.checkbox(key="acts-0").uncheck().run()
    assert listed(app) == [{**EVEN, "muted": True}, ZERO]
    app.checkbox(key="short-acts-1").uncheck().run()  # the short list in the header
    assert all(each["muted"] for each in listed(app))
    assert any("No edit acts" in each.value for each in app.caption)
    app.button(key="mute-all").click().run()
    assert listed(app) == [EVEN, ZERO]
    app.button(key="double-0").click().run()
    app.button(key="remove-2").click().run()
    assert listed(app) == [EVEN, EVEN] and not app.exception


def test_the_numbers_are_those_of_the_edited_and_of_the_clean_pass() -> None:
    app = open_page(edits=json.dumps([ZERO]), node="A:2:out")
    assert not app.exception
    model = t2lens.load("attnres-full")
    ids = model.to_tokens(PROMPT)
    with torch.no_grad():
        clean = model(ids)[0].double().log_softmax(dim=-1)
        with t2lens.edited(model, ZERO):
            changed_ = model(ids)[0].double().log_softmax(dim=-1)
    kl = (clean.exp() * (clean - changed_)).sum(dim=-1)
    assert f"{float(kl[2]):.4g} nats after position 2, {float(kl.mean()):.4g} on average" in texts(app)
    loss = [-float(x[:-1].gather(-1, ids[0, 1:, None]).mean()) for x in (clean, changed_)]
    assert f"{loss[0]:.4f} nats clean, {loss[1]:.4f} edited ({loss[1] - loss[0]:+.4f}" in texts(app)


@pytest.mark.parametrize("name", ["standard", "ddl", "muddformer", "hyper-connections", "denseformer"])
def test_every_preset_can_be_added_and_runs(name: str) -> None:
    app = open_page(a=name)
    keys = [str(each.key) for each in app.button if str(each.key).startswith("preset-")]
    assert len(keys) >= 3
    for key in keys:
        app.button(key=key).click().run()
        assert not app.exception
    assert len(listed(app)) == len(keys) and "nats after position" in texts(app)


def test_an_edit_of_another_model_is_a_sentence_and_muting_it_helps() -> None:
    app = open_page(a="standard", edits=json.dumps([EVEN]))
    assert not app.exception
    assert "no depth weights" in texts(app)
    app.checkbox(key="acts-0").uncheck().run()
    assert "A, standard" not in texts(app)


def test_json_is_applied_or_refused_with_nothing_lost() -> None:
    app = open_page(edits=json.dumps([ZERO]))
    for text, words in (
        ("{", "not JSON"),
        ('[{"target": "atom"}]', "Edit 1: An edit needs its operation"),
        ('[{"target": "atom", "operation": "zero", "site": "1.mlp", "x": 1}]', "no 'x'"),
    ):
        app.text_area(key="edits_json").set_value(text)
        next(each for each in app.button if each.label == "Apply").click().run()
        assert not app.exception and words in texts(app)
        assert listed(app) == [ZERO]
    app.text_area(key="edits_json").set_value(json.dumps([EVEN]))
    next(each for each in app.button if each.label == "Apply").click().run()
    assert listed(app) == [EVEN]


def test_two_sessions_with_other_edits_show_their_own_numbers_and_leave_no_hook() -> None:
    texts_of = {}
    apps = {key: open_page(edits=json.dumps([edit])) for key, edit in (("zero", ZERO), ("even", EVEN))}
    for _ in range(2):
        for key, app in apps.items():
            app.session_state["cell"] = None
            app.run()
            texts_of.setdefault(key, []).append(texts(app))
    assert len({tuple(each) for each in texts_of.values()}) == 2 and all(
        len(set(each)) == 1 for each in texts_of.values()
    )
    for loaded in (loaders.load("attnres-full"),):
        assert not any(point.active for point in loaded.model.hook_dict.values())
        assert not any(point.active for twin in loaded._idle for point in twin.hook_dict.values())


DRAFT_TEXT = json.dumps(
    {"target": "gate", "gate": "beta", "operation": "scale", "value": "0.25, \u05d0", "positions": [4, 1]}
)


def test_a_link_opens_with_the_form_half_filled() -> None:
    app = open_page(a="ddl-cc-ec", edits_draft=DRAFT_TEXT)
    assert not app.exception
    assert app.selectbox(key="build_target").value == "gate" and app.selectbox(key="build_operation").value == "scale"
    assert app.text_input(key="build_value_scale").value == "0.25, \u05d0"
    assert app.multiselect(key="build_positions").value == [4, 1]
    assert "is no number" in texts(app) and "draft" not in texts(app)
    assert json.loads(url(app)["edits_draft"]).items() <= json.loads(DRAFT_TEXT).items()
    app.text_input(key="build_value_scale").set_value("0.25").run()
    assert "by 0.25" in texts(app) or "0.25" in texts(app)
    app.button(key="add-edit").click().run()
    assert listed(app)[0]["value"] == 0.25 and sorted(listed(app)[0]["positions"]) == [1, 4]


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("[" * 2000, "no JSON that can be read"),
        ("x" * 4000, "which has 4000 characters"),
        ('{"target": 7}', "in which target is not a text"),
        ('{"positions": [true]}', "in which positions is not a list of whole numbers"),
        ('{"positions": [NaN]}', "no JSON that can be read"),
        ('{"target": "atom", "target": "gate"}', "no JSON that can be read"),
        ('{"__class__": "x"}', "no object with fields of the form"),
        ('{"prompt": "\\ud800"}', "in which prompt is not a text"),
    ],
)
def test_a_draft_that_is_none_is_refused_in_a_sentence(draft: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        DRAFT.read(draft)


def test_what_the_model_does_not_offer_of_a_draft_falls_back_and_is_said() -> None:
    draft = {"target": "depth_weight", "site": "99.mlp", "sources": ["nobody"], "positions": [10**9]}
    app = open_page(edits_draft=json.dumps(draft))
    assert not app.exception
    told = texts(app)
    assert "asks for site = '99.mlp', sources = ['nobody'], positions = [1000000000], which the form does not" in told
    assert app.selectbox(key="build_site").value == "5.attn" and app.multiselect(key="build_positions").value == []
    assert json.loads(url(app)["edits_draft"]) == {"target": "depth_weight"}


def test_a_list_of_hundreds_is_shown_by_pages_and_holds_in_full() -> None:
    many = [{**ZERO, "site": f"{i % 8}.mlp"} for i in range(180)]
    app = open_page(edits=json.dumps(many))
    assert not app.exception and f"Shown are the edits 1 to {ROWS} of 180" in texts(app)
    assert sum(str(each.key).startswith("remove-") for each in app.button) == ROWS
    assert sum(str(each.key).startswith("short-acts-") for each in app.checkbox) == SHORT
    app.number_input(key="edits_page").set_value(15).run()
    assert "Shown are the edits 169 to 180 of 180" in texts(app) and url(app)["edits_page"] == "15"
    app.button(key="remove-170").click().run()
    assert len(listed(app)) == 179 and not app.exception


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps([ZERO] * 500), "a link holds 12000"),
        ("[" * 100_000, "too deeply"),
        ('[{"target": "atom", "target": "gate"}]', "the key 'target' stands twice"),
        ('[{"target": "atom", "operation": "set", "site": "1.mlp", "value": NaN}]', "NaN is no number"),
        ('[{"target": "atom", "operation": "set", "site": "1.mlp", "value": -Infinity}]', "Infinity is no number"),
        ('[{"target": "atom", "operation": "set", "site": "1.mlp", "value": 1e999}]', "must be finite"),
        ('[{"target": ["atom"], "operation": {"a": 1}}]', "Edit 1"),
        ('[{"target": "\u05d0\U0001f451", "operation": "zero", "site": "1.mlp"}]', "Edit 1"),
        ("7", "a list of objects"),
        ("1" * 10_000, "not JSON"),
    ],
)
def test_hostile_json_is_a_sentence_and_changes_nothing(monkeypatch: Any, text: str, words: str) -> None:
    state = {"edits": "here"}
    monkeypatch.setattr(page.st, "session_state", state)
    page._take(text)
    assert words in state["edits_refused"] and state["edits_refused"].endswith(".") and state["edits"] == "here"
    assert len(state["edits_refused"]) < 400


def test_an_edit_that_cannot_be_muted_for_want_of_room_stays_and_a_sentence_says_so_once(monkeypatch: Any) -> None:
    full = json.dumps([{**ZERO, "site": "0.mlp" + "0" * (PROMPT_LIMIT - len(json.dumps([{**ZERO, "site": "0.mlp"}])))}])
    state = {"edits": full, "box": False}
    monkeypatch.setattr(page.st, "session_state", state)
    toggle(0, "box")
    assert state["edits"] == full
    [said] = refused()
    assert f"a link holds {PROMPT_LIMIT}" in said and refused() == []


def test_the_change_is_exported_with_the_python_that_makes_it() -> None:
    made: dict[str, Any] = {}
    side = Side(letter="A", loaded=loaders.load("attnres-full"), prompt=PROMPT, edits=json.dumps([ZERO]))
    exec(change_code(side, 2), made)
    shown = loaders.edit_change(side.loaded, PROMPT, side.edits, 2)
    assert np.array_equal(made["finding"]["kl"], shown["kl"])
    app = open_page(edits=json.dumps([ZERO]), node="A:2:out")
    buttons: list[Any] = list(app.get("download_button"))
    labels = [each.label for each in buttons]
    assert {"SVG: next tokens", "SVG: KL by position", "Numbers (CSV)", "Edits that act (JSON)"} <= set(labels)
    assert any("edit_change(model" in each.value for each in app.code)

"""The dashboard without a browser: what it runs, keeps and says. A browser drives it in tests/e2e."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from streamlit.testing.v1 import AppTest

import t2lens
from t2lens.apps import dashboard_file, loaders
from t2lens.apps.launch import run
from t2lens.apps.state import NO_MODEL
from tests.apps.pages import texts, url

PROMPT = "the king saw the <b>&"


@pytest.fixture
def forward_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Prompts that were traced, in order; caches start and end empty."""
    loaders.forget()
    seen: list[str] = []
    real = t2lens.trace

    def counted(model: Any, text: str, **more: Any) -> t2lens.Trace:
        seen.append(text)
        return real(model, text, **more)

    monkeypatch.setattr(t2lens, "trace", counted, raising=False)
    yield seen
    loaders.forget()


def open_app(**params: str) -> AppTest:
    app = AppTest.from_file(str(dashboard_file()), default_timeout=60)
    for key, value in params.items():
        app.query_params[key] = value
    return app.run()


def pressed(app: AppTest, label: str) -> None:
    next(button for button in app.button if button.label == label).click().run()


def payload(app: AppTest) -> dict[str, Any]:
    return app.session_state["payload"][1]


def test_the_first_visit_shows_two_models_and_a_hint(forward_passes: list[str]) -> None:
    app = open_app()
    assert not app.exception
    shown = payload(app)
    assert [panel["name"] for panel in shown["panels"]] == [
        app.selectbox("model_a").value,
        app.selectbox("model_b").value,
    ]
    assert all(panel["badge"]["ok"] for panel in shown["panels"])
    assert shown["hint"]
    assert texts(app) == ""
    assert len(forward_passes) == 2
    assert url(app)["node"] == "A:{pos}:{site}".format(**shown["view"])


def test_a_click_runs_no_model_and_sends_the_maps_no_data(forward_passes: list[str]) -> None:
    app = open_app(prompt=PROMPT)
    before, runs = payload(app), len(forward_passes)
    app.session_state["maps"] = {"cell": {"panel": 1, "pos": 2, "site": "3.attn"}, "show": None}
    app.run()
    assert not app.exception
    assert len(forward_passes) == runs
    assert payload(app) is before or payload(app) == before


def test_what_the_maps_ask_is_answered_beside_them(forward_passes: list[str]) -> None:
    app = open_app(prompt=PROMPT)
    before, runs = payload(app), len(forward_passes)
    node = {"panel": 1, "pos": 2, "site": "3.attn", "way": ""}
    wants = [{"kind": "effects", **node}, {"kind": "shell", **node}, {"kind": "rollout", **node}]
    app.session_state["maps"] = {"cell": None, "show": None, "ask": {"turn": 1, "wants": wants}}
    app.session_state["asked"] = wants  # what the report of the component sets
    app.run()
    assert not app.exception
    rev, found = app.session_state["answered"]
    assert rev == before["rev"] and [each["kind"] for each in found] == ["effects", "rollout"]
    assert payload(app) is before or payload(app) == before
    assert len(forward_passes) == runs  # no trace is made for it
    app.run()
    assert app.session_state["answered"][1] is found or app.session_state["answered"][1] == found


def likeliest_last(name: str, edits: Any = ()) -> str:
    model = t2lens.load(name)
    with torch.no_grad(), t2lens.edited(model, edits):
        return model.to_str_tokens([int(model(model.to_tokens(PROMPT))[0, -1].argmax())])[0]


def test_a_token_that_is_none_of_the_model_is_told_and_the_next_is_followed() -> None:
    app = open_app(prompt=PROMPT, a="attnres-full", b=NO_MODEL, follow="kingly and more")
    assert not app.exception
    assert "A follows the true next token" in texts(app)
    assert payload(app)["panels"][0]["follow"]["text"] == "the true next token; at the last position the likeliest"
    edits = '[{"target": "atom", "operation": "zero", "site": "*.mlp"}]'
    both = open_app(prompt=PROMPT, a="attnres-full", b="standard", edits=edits)
    panels = payload(both)["panels"]
    best = panels[0]["follow"]["tokens"][-1]
    assert best == likeliest_last("attnres-full", edits) != likeliest_last("standard")
    assert panels[1]["follow"]["tokens"][-1] == best
    assert panels[1]["follow"]["text"] == f"the true next token; at the last position {best!r}"
    other = open_app(prompt=PROMPT, a="attnres-full", b="standard", prompt_b=f"{PROMPT} the")
    assert payload(other)["panels"][1]["follow"]["text"].endswith("the likeliest")
    word = open_app(prompt=PROMPT, a="attnres-full", b=NO_MODEL, follow="queen")
    assert payload(word)["panels"][0]["follow"]["text"].strip("' ") == "queen"


def test_prompts_of_different_lengths_stand_beside_each_other_by_the_chosen_rule() -> None:
    app = open_app(prompt=PROMPT, prompt_b="the king", align="right")
    a, b = (len(panel["tokens"]) for panel in payload(app)["panels"])
    found = payload(app)["alignment"]
    assert found["rule"] == "right" and found["shift"] == b - a and "last token" in found["text"]


def test_a_link_restores_models_prompt_quantity_and_node(forward_passes: list[str]) -> None:
    asked = {
        "a": "attnres-full",
        "b": NO_MODEL,
        "prompt": PROMPT,
        "quantity": "residual_norm",
        "depth": "contribution",
        "head": "max",
        "layer": "rollout",
        "compare": "difference",
        "follow": " king",
        "walk": "A2-out-%20king~A2-out~A2-5.mlp",
        "node": "A:2:3.attn",
    }
    app = open_app(**asked)
    assert not app.exception
    assert payload(app)["view"] == {
        "panel": 0,
        "pos": 2,
        "site": "3.attn",
        "quantity": "residual_norm",
        "depth": "contribution",
        "head": "max",
        "way": "",
        "layer": "rollout",
        "compare": "difference",
        "trail": [
            {"panel": 0, "pos": 2, "site": "out", "word": " king"},
            {"panel": 0, "pos": 2, "site": "out"},
            {"panel": 0, "pos": 2, "site": "5.mlp"},
        ],
    }
    assert payload(app)["panels"][0]["follow"]["text"] == "' king'"
    assert [panel["name"] for panel in payload(app)["panels"]] == ["attnres-full"]
    assert forward_passes == [PROMPT]
    assert url(app) == asked
    assert payload(app)["hint"] == ""


def test_a_hostile_link_falls_back_and_says_so(forward_passes: list[str]) -> None:
    app = open_app(a="<script>alert(1)</script>", quantity="gat", node="B:99999:99.mlp", prompt=PROMPT, walk="A9-7.nlp")
    assert not app.exception
    said = texts(app)
    assert "<script>" in said and "did you mean gate?" in said  # said as text: st.text knows no markup
    assert "no position 99999" in said and "no site '99.mlp'" in said
    assert "through 7.nlp@9, which is not here" in said and "walk" not in url(app)
    assert payload(app)["view"]["panel"] == 1 and payload(app)["view"]["trail"] == []
    assert len(forward_passes) == 2
    assert "which is no walk" in texts(open_app(walk="<b>", prompt=PROMPT))


@pytest.mark.parametrize("prompt", ["", "   \n "])
def test_an_empty_prompt_gets_a_sentence(prompt: str, forward_passes: list[str]) -> None:
    app = open_app(prompt=prompt)
    assert not app.exception
    assert "empty" in texts(app)
    assert forward_passes == []


def test_a_prompt_over_the_context_is_cut_with_a_notice() -> None:
    app = open_app(prompt="so it was " * 200)
    assert not app.exception
    assert "cut off" in texts(app)
    n_ctx = loaders.load(str(app.selectbox("model_a").value)).model.cfg.n_ctx
    assert len(payload(app)["panels"][0]["tokens"]) == n_ctx


def test_a_new_prompt_runs_once_per_model_and_comes_back_from_the_cache(forward_passes: list[str]) -> None:
    app = open_app(prompt=PROMPT)
    app.text_area(key="prompt").set_value("another word")
    pressed(app, "Run")
    assert not app.exception
    assert forward_passes == [PROMPT, PROMPT, "another word", "another word"]
    assert url(app)["prompt"] == "another word"
    app.text_area(key="prompt").set_value(PROMPT)
    pressed(app, "Run")
    assert len(forward_passes) == 4
    assert "".join(payload(app)["panels"][0]["tokens"][1:]) == PROMPT


def test_the_same_name_with_other_weights_is_not_taken_from_the_cache() -> None:
    one = loaders.load(t2lens.list_models()[0].name)
    other = loaders.Loaded(name=one.name, weights_hash="0" * 16, model=one.model)
    assert loaders.trace(one, PROMPT) is loaders.trace(one, PROMPT)
    assert loaders.trace(other, PROMPT) is not loaders.trace(one, PROMPT)


def test_damaged_weights_get_a_sentence(forward_passes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(name: str) -> Any:
        raise ValueError(f"The weights of {name} are damaged.")

    monkeypatch.setattr(t2lens, "load", damaged, raising=False)
    app = open_app(prompt=PROMPT)
    assert not app.exception
    assert "damaged" in texts(app) and forward_passes == []


def test_no_hook_is_left_on_a_model(forward_passes: list[str]) -> None:
    app = open_app(prompt=PROMPT)
    model = loaders.load(str(app.selectbox("model_a").value)).model
    assert not any(point.active for point in model.hook_dict.values())


def test_the_entry_is_a_file_of_the_package() -> None:
    assert dashboard_file().is_file() and dashboard_file().parent == Path(loaders.__file__).parent


@pytest.mark.parametrize("port", [0, 70_000, "8501", True])
def test_what_is_no_port_is_refused(port: Any) -> None:
    with pytest.raises(ValueError, match="port"):
        run(port=port)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=str(port)):
            run(port=port)


@pytest.mark.skipif(os.name == "nt", reason="there the port of a stopped server is free at once")
def test_the_port_of_a_server_that_stopped_can_be_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()  # the server closes first, as one that stops does: the port waits
    client.close()

    def served(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamlit.web.bootstrap.load_config_options", served)
    with pytest.raises(KeyboardInterrupt):
        run(port=port)


def test_a_head_that_no_model_has_is_the_mean_with_a_notice() -> None:
    app = open_app(head="7")
    assert "There is no attention head 7 here (0..3); showing the mean of all." in texts(app)
    assert url(app)["head"] == "mean"


def test_an_empty_prompt_stands_in_the_url_too() -> None:
    app = open_app(prompt="  ")
    assert "The prompt is empty" in texts(app)
    assert url(app)["prompt"] == "  "


EDIT = '{"target": "atom", "site": "3.attn", "operation": "zero"}'


def test_edits_of_a_link_act_on_a_alone_and_are_told() -> None:
    app = open_app(a="standard", b="standard", prompt=PROMPT, edits=EDIT)
    assert not app.exception
    edited, plain = payload(app)["panels"]
    assert edited != plain
    assert (edited["name"], plain["name"]) == ("standard, edited", "standard")
    assert "Edited: Sets what 3.attn writes to zero." in texts(app)
    assert url(app)["edits"] == EDIT
    assert app.checkbox(key="short-acts-0").value and "Sets what 3.attn writes to zero." in texts(app)


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ("{", "The edits are not JSON"),
        ('{"target": "atom", "site": "9.attn", "operation": "zero"}', "9.attn"),
        ('{"target": "atom", "site": "3.attn", "operation": "zreo"}', "zero"),
        ('{"target": "gate", "name": "beta", "site": "1.attn", "operation": "set", "value": 1}', "has no gates"),
        ("[" * 3000, "The edits are not JSON"),
        ("x" * 15000, "12000 are allowed"),
    ],
)
def test_edits_that_cannot_be_are_a_sentence(edits: str, words: str) -> None:
    app = open_app(a="standard", b="none", prompt=PROMPT, edits=edits)
    assert not app.exception
    assert words in texts(app)


def test_a_page_does_not_wait_for_the_checks_of_its_models(
    forward_passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced_before: list[int] = []
    real = t2lens.verify

    def noted(model: Any) -> Any:
        traced_before.append(forward_passes.count(PROMPT))
        return real(model)

    monkeypatch.setattr(t2lens, "verify", noted)
    monkeypatch.setattr(loaders, "_VERIFIED", {})
    app = open_app(a="standard", b="elc-bert", prompt=PROMPT)
    assert traced_before == [2, 2]  # both models had been traced, and drawn
    assert sum("-badge[verified" in each.value for each in app.markdown) == 2
    app.run()
    assert len(traced_before) == 2

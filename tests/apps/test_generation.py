"""Continue: the prompt grows by the tokens of the model, the node goes along; it can be stopped and taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from streamlit.testing.v1 import AppTest

import t2lens
from t2lens.apps import dashboard_file, writing
from t2lens.apps.generation import is_writing
from t2lens.apps.state import Cell
from t2lens.apps.writing import Writing, grow, stop, take_back, told_now

PROMPT = "And the king said"
EDIT = '[{"target": "atom", "site": "3.attn", "operation": "zero", "positions": [-1]}]'


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PAUSE", 0.0)


def open_app(**params: str) -> AppTest:
    app = AppTest.from_file(str(dashboard_file()), default_timeout=240)
    for key, value in {"a": "standard", "b": "none", "prompt": PROMPT, **params}.items():
        app.query_params[key] = value
    return app.run()


def write(app: AppTest) -> AppTest:
    app.button(key="write").click().run()
    assert not app.exception
    return app


def naive(model: Any, prompt: str, n: int) -> str:
    ids = model.to_tokens(prompt)
    with torch.no_grad():
        for _ in range(n):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(dim=-1)], dim=1)
    return model.to_string(ids[0])


def test_the_prompt_grows_as_a_loop_of_full_passes_says() -> None:
    app = open_app()
    app.number_input(key="write_tokens").set_value(4).run()
    write(app)
    model = t2lens.load("standard")
    expected = naive(model, PROMPT, 4)
    assert app.text_area(key="prompt").value == expected
    panel = app.session_state["payload"][1]["panels"][0]
    assert "".join(panel["tokens"][1:]) == expected  # the maps are those of the text so far
    cell = app.session_state["cell"]
    assert (cell.panel, cell.pos) == (0, len(panel["tokens"]) - 1)
    assert any("wrote 4 of 4" in text.value for text in app.text)
    app.session_state["cell"] = Cell(panel=0, pos=1, site=cell.site)  # elsewhere its line is gone, and it is kept
    app.run()
    assert not any("wrote" in text.value for text in app.text) and "writing" in app.session_state
    app.button(key="take-back").click().run()
    assert app.text_area(key="prompt").value == PROMPT


def test_the_python_that_is_shown_writes_the_same() -> None:
    app = open_app(edits=EDIT)
    app.number_input(key="write_tokens").set_value(3)
    app.selectbox(key="write_how").set_value("sample").run()
    app.number_input(key="write_seed").set_value(7)
    app.number_input(key="write_among").set_value(20).run()
    write(app)
    code = next(each.value for each in app.code if "model.generate" in each.value)
    assert "t2lens.edited" in code and "top_k=20" in code
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert app.text_area(key="prompt").value == scope["text"]


def test_a_full_context_is_a_sentence() -> None:
    app = write(open_app(prompt="so it was " * 200))
    assert any("fills the context" in text.value for text in app.text)
    assert "writing" not in app.session_state


def of_three(**more: Any) -> dict[str, Any]:
    words = {"panel": 1, "key": "prompt", "prompt": "a", "finding": None, "said": "B", "notices": (), "code": ""}
    texts = {"texts": ("a b", "a b c"), "counts": (1, 2), "pos": (2, 3), "chosen": ("m", "n", "")}
    return {"prompt": "a", "model_a": "m", "model_b": "n", "edits": "", "writing": Writing(**words, **texts), **more}


def test_it_grows_step_by_step_and_stops() -> None:
    state = of_three()
    grow(state)
    assert (state["prompt"], state["writing"].n_tokens, state["cell"].pos, state["cell"].panel) == ("a b", 1, 2, 1)
    assert told_now(state, state["writing"]) and is_writing(state)
    stop(state)
    grow(state)
    assert state["prompt"] == "a b" and not is_writing(state)
    assert told_now(state, state["writing"]) and not told_now({**state, "cell": None}, state["writing"])
    take_back(state)
    assert state["prompt"] == "a" and "writing" not in state


@pytest.mark.parametrize(("key", "value"), [("prompt", "typed"), ("model_a", "other"), ("edits", "[]")])
def test_what_the_reader_changes_ends_it(key: str, value: str) -> None:
    state = of_three()
    grow(state)
    state[key] = value
    grow(state)
    assert "writing" not in state and state["prompt"] == ("typed" if key == "prompt" else "a b")


def test_nothing_written_changes_nothing() -> None:
    state: dict[str, Any] = {"prompt": "a"}
    grow(state)
    stop(state)
    take_back(state)
    assert state == {"prompt": "a"}

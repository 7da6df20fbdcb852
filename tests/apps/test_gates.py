"""The page of gates without a browser: its numbers are those of the functions, sliding runs nothing, edits are kept."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

import t2lens
from t2lens.analysis import gate_curve, gate_spectrum, gate_tokens, write_gates
from t2lens.apps import gate_focus, loaders
from t2lens.apps.views import gates as page
from t2lens.apps.words import plain
from t2lens.model import Transformer
from t2lens.viz import gates as draw
from t2lens.viz.labels import fmt
from tests.apps.pages import open_page as open_on

PROMPT = "the king saw the <b>& queen"


def open_page(**params: str) -> AppTest:
    return open_on("gates", **{"gates_over": "prompt", "prompt": PROMPT, **params})


def texts(app: AppTest) -> str:
    return "\n".join(element.value for element in [*app.text, *app.caption])


def tables(app: AppTest) -> list[str]:
    return [element.proto.body for element in app.get("html") if "<table" in element.proto.body]


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Key -> the SVG that the page mounted last."""
    seen: dict[str, str] = {}
    mount = gate_focus.picture

    def noting(svg: str, *, key: str, panel: int) -> Any:
        seen[key] = svg
        return mount(svg, key=key, panel=panel)

    monkeypatch.setattr(gate_focus, "picture", noting)
    return seen


def test_the_page_shows_the_numbers_of_the_functions(pictures: dict[str, str]) -> None:
    app = open_page(a="ddl", b="none", node="A:3:2.mlp", gates_value="1.5")
    assert not app.exception
    model = t2lens.load("ddl")
    found = gate_tokens(model, PROMPT)
    (table,) = tables(app)
    rows = [row for row in found.rows if row[0] == "2.mlp"]
    shown = re.findall(r"<tr><td>.*?</i>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td>", table)
    assert [(regime, n, beta) for regime, n, beta in shown] == [
        (row[1], str(row[2]), fmt(float(row[4]), 3) if row[4] is not None else "") for row in rows
    ]
    assert "<b>" not in table
    erased, written = (fmt(float(found[name].sel(site="2.mlp")[3]), 3) for name in ("erased", "written"))
    assert plain(f"it erases {erased} and writes {written} (squared length") in texts(app)
    for c, beta in enumerate(found["beta"].sel(site="2.mlp").values):
        assert f"position {c} " in pictures["gate-strip-A"]
        assert f"beta {beta:.6g}: " in pictures["gate-strip-A"]
    spectrum = gate_spectrum(model, PROMPT, pos=3)
    for value in spectrum["eigenvalue"].values:
        assert f"eigenvalue {value:.6g} along k" in pictures["gate-spectrum-A"]
    curve = gate_curve(model, PROMPT, site="2.mlp", pos=3)
    for value in curve["kl"].values:
        assert f"KL at the position {value:.6g} nats" in pictures["gate-curve-A"]
    assert draw.kl_words(curve.dataset, 1.5) in texts(app)
    assert fmt(float(curve["kl"].sel(value=1.5))) in texts(app)
    top = curve["candidate"].values[int(np.argmax(curve["plain_probability"].values))]
    assert f"as it is {curve['plain_probability'].values.max():.6g}" in pictures["gate-tokens-A"], top


def test_sliding_runs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    app = open_page(a="ddl", b="ddl-cc-ec", node="A:3:2.mlp")
    assert not app.exception
    passes: list[int] = []
    forward = Transformer.forward

    def counting(self: Transformer, *args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Transformer, "forward", counting)
    before = texts(app)
    for value in (0.1, 0.7, 2.0, 0.7):
        app.slider(key="gates_slider").set_value(value).run()
        assert not app.exception
        assert app.query_params["gates_value"] in ([f"{value:g}"], f"{value:g}")
    assert passes == []
    assert texts(app) != before
    app.segmented_control(key="gates_at").set_value("position").run()  # another curve: a pass and its variants, of each
    assert 4 <= len(passes) <= 6
    n = len(passes)
    app.segmented_control(key="gates_at").set_value("all").run()
    assert len(passes) == n


def test_what_is_kept_is_an_edit_of_a_and_shows_against_clean(pictures: dict[str, str]) -> None:
    app = open_page(a="ddl", b="clean", node="A:3:2.mlp", gates_value="0.2", gates_at="position")
    assert not app.exception
    app.button(key="gates_keep").click().run()
    assert not app.exception
    kept = {"target": "gate", "name": "beta", "site": "2.mlp", "operation": "set", "value": 0.2, "positions": [3]}
    assert json.loads(app.session_state["edits"]) == [kept]
    assert "edited" in pictures["gate-map-A"] and "edited" not in pictures["gate-map-B"]
    model = t2lens.load("ddl")
    with t2lens.edited(model, t2lens.Edit.from_dict(kept)):
        edited = gate_tokens(model, PROMPT)["beta"].sel(site="2.mlp").values
    assert edited[3] == pytest.approx(0.2)
    assert f"beta {edited[3]:.6g}: partial" in pictures["gate-strip-A"]
    assert f"beta {edited[3]:.6g}: partial" not in pictures["gate-strip-B"]
    app.slider(key="gates_slider").set_value(1.9).run()
    app.button(key="gates_keep").click().run()
    assert [each["value"] for each in json.loads(app.session_state["edits"])] == [0.2, 1.9]


def test_the_chosen_node_is_that_of_the_maps() -> None:
    app = open_page(a="ddl", b="none", node="A:2:out")
    assert app.selectbox(key="gates_site").value == "7.mlp"  # the last that writes
    app.selectbox(key="gates_site").set_value("0.attn").run()
    app.selectbox(key="gates_pos").set_value(5).run()
    assert not app.exception
    cell = app.session_state["cell"]
    assert (cell.panel, cell.pos, cell.site) == (0, 5, "0.attn")
    assert app.query_params["node"] in (["A:5:0.attn"], "A:5:0.attn")


def test_prompts_of_different_lengths_are_aligned(pictures: dict[str, str]) -> None:
    app = open_page(a="ddl", b="ddl-cc-ec", prompt_b="In the beginning God", align="right", node="A:1:2.mlp")
    assert not app.exception
    n = [gate_tokens(t2lens.load("ddl"), text)["pos"].size for text in (PROMPT, "In the beginning God")]
    assert 1 + n[1] - n[0] < 0
    assert "B has no such position in its prompt; showing 0." in texts(app)
    app = open_page(a="ddl", b="ddl-cc-ec", prompt_b="In the beginning God", align="right", node=f"A:{n[0] - 2}:2.mlp")
    assert f"position {n[1] - 2}, " in pictures["gate-tokens-B"]


def test_systems_without_gates_are_told_which_models_have_some() -> None:
    app = open_page(a="standard", b="muddformer", node="A:3:2.mlp")
    assert not app.exception
    assert "neither model here has any" in texts(app)
    assert "every write is added to the stream as it is" in texts(app) and "which Depth routing shows" in texts(app)
    app.button(key="gates_switch_ddl-cc-ec").click().run()
    assert not app.exception
    assert app.session_state["model_a"] == "ddl-cc-ec"
    assert len(tables(app)) == 1


def test_the_slider_starts_where_the_model_is_and_follows_until_it_is_moved(pictures: dict[str, str]) -> None:
    app = open_page(a="ddl", b="none", node="A:3:2.mlp")
    beta = gate_tokens(t2lens.load("ddl"), PROMPT)["beta"]

    def at() -> Any:
        assert not app.exception
        return app.slider(key="gates_slider").value

    assert at() == pytest.approx(round(float(beta.sel(site="2.mlp").mean()), 1))
    assert f"As it is: mean {fmt(float(beta.sel(site='2.mlp').mean()), 3)} over the prompt" in texts(app)
    assert "gates_value" not in app.query_params
    app.segmented_control(key="gates_at").set_value("position").run()
    assert at() == pytest.approx(round(float(beta.sel(site="2.mlp")[3]), 1))
    app.selectbox(key="gates_site").set_value("0.attn").run()
    assert at() == pytest.approx(round(float(beta.sel(site="0.attn")[3]), 1))
    app.slider(key="gates_slider").set_value(0.0).run()
    app.selectbox(key="gates_site").set_value("2.mlp").run()
    assert at() == 0  # what was chosen stays
    app.button(key="gates_back").click().run()
    assert at() == pytest.approx(round(float(beta.sel(site="2.mlp")[3]), 1))


@pytest.mark.parametrize(("a", "b"), [("mhc", "hyper-connections"), ("mhc", "ddl")])
def test_streams_of_hyper_connections_are_shown(pictures: dict[str, str], a: str, b: str) -> None:
    app = open_page(a=a, b=b, node="A:3:2.mlp", gates_stream="stream1")
    assert not app.exception
    data = write_gates(t2lens.load(a), PROMPT).dataset
    for site in ("0.attn", "2.mlp", "7.mlp"):
        own = data.sel(site=site)
        assert f"write weight {float(own['gate'].sel(stream='stream1')[3]):.6g}" in pictures["gate-map-A"]
        assert f"{site} reads stream 2&#10;weight {float(own['read'][2, 3]):.6g}" in pictures["gate-streams-A"]
        assert f"{site} writes to stream 2&#10;weight {float(own['gate'][2, 3]):.6g}" in pictures["gate-streams-A"]
    value = float(data["mix"].sel(site="2.mlp")[2, 0, 3])
    assert f"as 2.mlp writes, stream 2 takes {value:.6g} of stream 0" in pictures["gate-streams-A"]
    start = float(data["gate"].sel(site="2.mlp", stream="stream1").mean())
    assert app.slider(key="gates_slider").value == pytest.approx(round(start, 1))
    curve = gate_curve(t2lens.load(a), PROMPT, site="2.mlp", pos=3, stream="stream1")
    assert f"KL at the position {float(curve['kl'][4]):.6g} nats" in pictures["gate-curve-A"]
    assert ("gate-curve-B" in pictures) == (b != "ddl")
    assert ("choose this model as A" in texts(app)) == (b == "ddl")
    app.button(key="gates_keep").click().run()
    assert not app.exception
    (kept,) = json.loads(app.session_state["edits"])
    assert kept["name"] == "post" and kept["sources"] == ["stream1"] and kept["site"] == "2.mlp"
    assert "As edited" in texts(app) or "A as edited" in texts(app)
    assert "as edited" in pictures["gate-tokens-A"] and "as it is" not in pictures["gate-tokens-A"]


def test_one_side_with_gates_stands_beside_one_without() -> None:
    app = open_page(a="standard", b="ddl", node="A:2:1.mlp")
    assert not app.exception
    assert "A, standard: " in texts(app) and "no gates" in texts(app)
    assert len(tables(app)) == 1
    assert not [each for each in app.button if each.key == "gates_keep"]  # edits are of A


def test_sizes_of_a_write_only_gate_are_no_regimes(pictures: dict[str, str]) -> None:
    app = open_page(a="ddl-write-only", b="none", gates_by="regime")
    assert not app.exception
    assert "below 0.1" in tables(app)[0] and "erased" not in tables(app)[0] and "reflect" not in tables(app)[0]
    assert "has sizes, no regimes" in texts(app) and "it erases nothing and writes" in texts(app)
    assert "eigenvalue 1 along k" in pictures["gate-spectrum-A"]


def test_a_link_from_a_stranger_falls_back_with_notices() -> None:
    app = open_page(a="ddl", b="none", gates_value="<script>", gates_at="here", gates_by="reg", gates_over="9")
    assert not app.exception
    for name in ("gates_value", "gates_at", "gates_by", "gates_over"):
        assert f"The link asks for {name} = " in texts(app)
    app = open_page(a="ddl", b="none", gates_value="0.33", gates_stream="<b>")
    assert not app.exception
    assert app.slider(key="gates_slider").value == pytest.approx(0.3)
    assert open_page(a="ddl", b="none", gates_value="-700").slider(key="gates_slider").value == 0


def test_edits_that_cannot_be_are_a_sentence() -> None:
    app = open_page(
        a="ddl", b="none", edits='[{"target": "gate", "name": "beta", "site": "9.mlp", "operation": "zero"}]'
    )
    assert not app.exception
    assert "A, ddl, edited: " in texts(app)


def test_an_audit_of_a_side_is_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    side = page.Side(letter="A", loaded=loaders.load("ddl"), prompt=PROMPT, edits="")
    asked: list[Any] = []

    def quick(loaded: Any, key: str, given: Any, options: Any, edits: str) -> Any:
        asked.append((key, given))
        return t2lens.analysis.audit_ddl(loaded.model, PROMPT, counterfactuals=False)

    monkeypatch.setattr(loaders, "analyse", quick)
    made = page._audit_of(side, 8)
    assert made.startswith(b"<!") and b"DDL audit" in made
    assert asked == [("ddl", 8)]

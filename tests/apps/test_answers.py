"""Answers to what the maps ask: the numbers of the analyses and of the dataset, and nothing that a browser makes up."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import pytest

import t2lens
from t2lens.analysis import rollout
from t2lens.analysis.node_effects import node_effects
from t2lens.analysis.quantities import QUANTITIES, attention_of, grid
from t2lens.apps import loaders
from t2lens.apps.answers import KINDS, MOST, answer
from t2lens.apps.frame import Side
from t2lens.viz.payload import DEPTH, maps_payload

PROMPT = "And the king said unto the queen"
EDITS = json.dumps([{"target": "atom", "operation": "zero", "site": "2.mlp"}])


def side(name: str, edits: str = "", letter: str = "A") -> Side:
    return Side(letter=letter, loaded=loaders.load(name), prompt=PROMPT, edits=edits)


def shown(*sides: Side) -> list[tuple[Side, Any]]:
    return [(each, each.trace()) for each in sides]


@pytest.fixture(scope="module")
def panels() -> list[tuple[Side, Any]]:
    return shown(side("muddformer"), side("ddl-cc-ec", letter="B"))


def unpack(array: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(array["b64"]), dtype=f"<{array['dtype']}").reshape(array["shape"])


@pytest.mark.parametrize("edits", ["", EDITS])
@pytest.mark.parametrize("name", ["attnres-full", "muddformer", "ddl-cc-ec"])
def test_effects_and_rollout_are_those_of_the_analyses_within_the_edited_model(name: str, edits: str) -> None:
    (one,) = panels = shown(side(name, edits))
    dice = random.Random()
    sites = [str(each) for each in one[1].of_way().dataset["read"].values]
    ask = {"panel": 0, "pos": dice.randrange(len(one[1].tokens)), "site": dice.choice(sites), "way": one[1].ways[0]}
    effects, flow = answer([{"kind": "effects", **ask}, {"kind": "rollout", **ask}], panels)
    model = t2lens.load(name)
    own = next(each for each in model.sites if each.name == ask["site"])
    way = ask["way"] if ask["way"] in model.residual.ways(own) else model.residual.ways(own)[0]
    with t2lens.edited(model, edits or ()):
        found = node_effects(model, PROMPT, pos=ask["pos"], site=ask["site"], way=way)
        back = rollout(model, PROMPT, pos=ask["pos"], site=ask["site"], way=way)
    assert effects == {"kind": "effects", **ask, **effects}
    assert effects["over"] == found.over and effects["unit"] == "nats" and "rounding" in effects["note"]
    assert effects["values"] == pytest.approx(found.values, abs=1e-7)
    key = "weights" if found.over == "source" else "mixing"
    packed = maps_payload([one[1]])["panels"][0]["ways"][ask["way"]]["reads"][key]
    row = sites.index(ask["site"])
    assert [packed["names"][i] for i in packed["columns"][row]] == [
        each for each in packed["names"] if each in effects["values"]
    ]
    values = unpack(flow["values"])
    assert np.allclose(values[0], back["absorbed"], atol=1e-6)
    assert np.allclose(values[1 : row + 2], back["mass"], atol=1e-6) and np.isnan(values[row + 2 :]).all()
    assert values[row + 1, ask["pos"]] == 1 and "embeddings of" in flow["ends"][0]
    json.dumps([effects, flow], allow_nan=False)


def test_columns_rows_and_grids_are_those_of_the_whole_payload(panels: list[tuple[Side, Any]]) -> None:
    dice = random.Random()
    whole = maps_payload([trace for _, trace in panels], heads=True)["panels"]
    for i, (_, trace) in enumerate(panels):
        pos = dice.randrange(len(trace.tokens))
        (column,) = answer([{"kind": "column", "panel": i, "pos": pos}], panels)
        assert set(column["ways"]) == set(trace.ways) and column["next"] == whole[i]["next"][pos]
        for way, held in column["ways"].items():
            full = whole[i]["ways"][way]
            for key in DEPTH:
                one, every = held["reads"][key], full["reads"][key]
                assert one["names"] == every["names"] and one["columns"] == every["columns"]
                assert np.array_equal(unpack(one["values"])[:, 0], unpack(every["values"])[:, pos])
            top = unpack(held["lens"]["top"])[:, 0].astype(int)
            every = unpack(full["lens"]["top"])[:, pos].astype(int)
            spelled = [[full["lens"]["words"][k] for k in row] for row in every]
            assert [[held["lens"]["words"][k] for k in row] for row in top] == spelled
        for site, pattern in attention_of(trace).items():
            (row,) = answer([{"kind": "row", "panel": i, "pos": pos, "site": site}], panels)
            assert np.array_equal(unpack(row["heads"]), pattern[:, pos, : pos + 1])
            assert np.allclose(unpack(row["mean"]), pattern[:, pos, : pos + 1].mean(axis=0))
            assert np.array_equal(unpack(row["max"]), pattern[:, pos, : pos + 1].max(axis=0))
        for key in QUANTITIES:
            way = dice.choice(trace.ways)
            (found,) = answer([{"kind": "grid", "panel": i, "way": way, "quantity": key}], panels)
            expected = grid(trace, key, way or None)
            if expected.absent:
                assert expected.absent in found["why"] and "values" not in found
                continue
            assert np.array_equal(unpack(found["values"]), expected.values, equal_nan=True)
            assert found["missing"] == expected.missing


def test_what_is_no_question_is_left_out(panels: list[tuple[Side, Any]]) -> None:
    good = {"kind": "row", "panel": 1, "pos": 2, "site": "1.attn"}
    node = {"kind": "effects", "panel": 0, "pos": 1, "site": "1.attn", "way": "q"}
    wrong: list[Any] = [
        None,
        7,
        "row",
        [],
        {},
        {"kind": "shell", "panel": 0},
        {"kind": ["row"], "panel": 0},
        {**good, "panel": 2},
        {**good, "panel": True},
        {**good, "panel": -1},
        {**good, "pos": 10**9},
        {**good, "pos": 1.0},
        {**good, "pos": "1"},
        {**good, "site": "1.mlp"},
        {**good, "site": ["1.attn"]},
        {**good, "site": None},
        {**node, "way": "x"},
        {**node, "way": ["q"]},
        {**node, "site": "embed"},
        {"kind": "grid", "panel": 0, "way": "q", "quantity": "__class__"},
        {"kind": "grid", "panel": 0, "way": "q", "quantity": {}},
    ]
    found = answer([*wrong, good, good, *wrong], panels)
    assert [(each["kind"], each["panel"], each["pos"], each["site"]) for each in found] == [("row", 1, 2, "1.attn")]
    for nothing in (None, "wants", 3, {}, {"wants": []}, []):
        assert answer(nothing, panels) == []
    many = [{"kind": "column", "panel": 0, "pos": pos % 5, "more": pos} for pos in range(10_000)]
    assert [each["pos"] for each in answer(many, panels)] == [0, 1, 2, 3, 4]
    n = len(panels[0][1].tokens)
    rows = [{**good, "panel": p, "pos": pos} for p in (0, 1) for pos in range(n)]
    each = [{**one, "site": site} for site in ("0.attn", "1.attn") for one in rows]
    kept = answer(each, panels)
    assert len(kept) == MOST and kept[-1]["pos"] == n - 1 and kept[-1]["site"] == "1.attn"
    assert set(KINDS) == {"rollout", "effects", "column", "row", "grid"}


def test_what_cannot_be_said_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = json.dumps([{"target": "stream", "operation": "scale", "site": "2.mlp", "value": 0.5}])
    panels = shown(side("standard", stream))
    node = {"panel": 0, "pos": 1, "site": "3.attn", "way": ""}
    for kind in ("effects", "rollout"):
        (found,) = answer([{"kind": kind, **node}], panels)
        assert found["kind"] == kind and "edits the stream" in found["why"] and "values" not in found
    monkeypatch.setattr("t2lens.apps.answers.LONG", 3)
    (found,) = answer([{"kind": "rollout", **node}], shown(side("standard")))
    assert "up to 3 tokens" in found["why"]

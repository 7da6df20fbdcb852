"""Edits as data: round trips, sentences, and refusals that say what was given and what was expected."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

import t2lens
from t2lens.edits import Edit, edits_from_json, edits_to_json, edits_to_python, read_edits, without
from tests.edits.make import any_edit


@pytest.mark.parametrize("seed", range(20))
def test_edits_survive_json_and_python(seed: int) -> None:
    dice = random.Random(seed)
    edits = tuple(any_edit(dice) for _ in range(20))
    assert edits_from_json(edits_to_json(edits)) == edits
    assert edits_from_json(json.dumps([edit.to_dict() for edit in edits])) == edits
    for edit in edits:
        assert eval(edit.to_python(), {"t2lens": t2lens}) == edit
        assert hash(edit) == hash(Edit.from_dict(json.loads(json.dumps(edit.to_dict()))))
        words = edit.describe()
        assert words.endswith(".") and "\n" not in words and "None" not in words and "  " not in words


def test_what_is_left_out_is_not_written() -> None:
    edit = Edit(target="atom", operation="zero", site="1.mlp")
    assert edit.to_dict() == {"target": "atom", "operation": "zero", "site": "1.mlp"}
    assert edit.to_python() == "t2lens.Edit(target='atom', operation='zero', site='1.mlp')"
    assert json.loads(edits_to_json(edit))["format"] == "t2lens edits 1"


def test_tensors_arrays_and_single_numbers_are_taken() -> None:
    plain = Edit(target="atom", operation="add", site="1.mlp", value=[1.0, 2.0], positions=3)
    assert plain.positions == (3,)
    for value in (torch.tensor([1.0, 2.0]), np.array([1, 2]), (1, 2)):
        assert Edit(target="atom", operation="add", site="1.mlp", value=value, positions=[3]) == plain
    assert Edit(target="depth_weight", operation="one", site="out", sources="embed").sources == ("embed",)


def test_the_python_of_edits_runs() -> None:
    model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0)
    edit = Edit(target="atom", operation="zero", site="1.mlp")
    names = {"model": model, "tokens": [[1, 2, 3]]}
    exec(edits_to_python([edit]), names)
    with t2lens.edited(model, edit):
        assert torch.equal(names["logits"], model([[1, 2, 3]]))  # type: ignore[arg-type]


WORDS = [
    ({"target": "depth_weight", "operation": "one", "site": "out", "sources": ["embed"]}, "depth weight of embed in"),
    ({"target": "depth_weight", "operation": "swap", "site": "1.attn", "way": "q", "sources": ["a", "b"]}, "1.attn.q"),
    ({"target": "stream", "operation": "add", "site": "out", "value": [1] * 9}, "Adds 9 given numbers to the stream"),
    ({"target": "pattern", "operation": "window", "site": "1.local", "value": 1}, "to the last 1 place."),
    (
        {"target": "head", "operation": "zero", "site": "1.attn", "heads": [0, 2]},
        "Sets heads 0 and 2 at 1.attn to zero.",
    ),
    ({"target": "atom", "operation": "patch", "site": "embed", "prompt": [1, 2]}, "the prompt of ids 1 2."),
    ({"target": "gate", "operation": "freeze_mean", "site": "*", "name": "beta"}, "mean over the real positions"),
]


@pytest.mark.parametrize(("data", "words"), WORDS)
def test_an_edit_says_what_it_does(data: dict, words: str) -> None:
    assert words in Edit.from_dict(data).describe()


ATOM = {"target": "atom", "operation": "zero", "site": "1.mlp"}
WEIGHT = {"target": "depth_weight", "operation": "zero", "site": "1.mlp"}
BAD = [
    ({**ATOM, "positon": [1]}, "An edit has no 'positon'; did you mean 'positions'"),
    ({"target": "atom", "site": "1.mlp"}, "An edit needs its operation, one of set, scale, add"),
    ({"operation": "zero"}, "An edit needs its target, one of depth_weight"),
    ({**ATOM, "target": "atoms"}, "'atoms' is no target; did you mean 'atom'?"),
    ({**ATOM, "target": 3}, r"target must be a text, not 3 \(int\)"),
    ({**ATOM, "operation": "swap"}, "'swap' is no operation on atom; there are set, scale"),
    ({**ATOM, "operation": "plain"}, "'plain' is no operation on atom"),
    ({"target": "atom", "operation": "zero"}, "needs a site, as '1.attn' or"),
    ({**ATOM, "site": 3}, "site must be a text"),
    ({**ATOM, "way": "q"}, "An edit of atom takes no way; depth_weight and depth_score and read and gate do"),
    ({**ATOM, "heads": [0]}, "takes no heads"),
    ({**ATOM, "value": 1}, "The operation zero takes no value"),
    ({**ATOM, "operation": "set"}, "The operation set needs a value"),
    ({**ATOM, "operation": "set", "value": "high"}, "value must be a number or rows of numbers, not 'high'"),
    ({**ATOM, "operation": "set", "value": True}, "value must be a number"),
    ({**ATOM, "operation": "set", "value": float("nan")}, "must be finite, not nan"),
    ({**ATOM, "operation": "set", "value": 10**400}, "must be finite, not inf"),
    ({**ATOM, "operation": "set", "value": [[1, 2], [3]]}, "rows of one length"),
    ({**ATOM, "operation": "set", "value": []}, "rows of one length that are not empty"),
    ({**ATOM, "positions": []}, "positions are empty; leave them out to mean all"),
    ({**ATOM, "positions": [1, 1]}, "positions name 1 twice"),
    ({**ATOM, "positions": [1.0]}, "positions must be whole numbers"),
    ({**ATOM, "positions": [True]}, "positions must be whole numbers"),
    ({**ATOM, "positions": "3"}, "positions must be whole numbers, not '3'"),
    ({**ATOM, "operation": "patch"}, "patch needs a prompt"),
    ({**ATOM, "prompt": "x"}, "The operation zero takes no prompt; patch and freeze_mean do"),
    ({**ATOM, "operation": "patch", "prompt": " "}, "prompt of an edit is empty"),
    ({**ATOM, "operation": "patch", "prompt": []}, "prompt is empty"),
    ({**ATOM, "operation": "patch", "prompt": [-1]}, "prompt must not be negative, as -1 is"),
    ({**ATOM, "operation": "patch", "prompt": "x", "prompt_positions": [1]}, "there is none here"),
    (
        {**ATOM, "operation": "patch", "prompt": "x", "positions": [1, 2], "prompt_positions": [1]},
        "go in pairs, but there are 2 and 1",
    ),
    ({**WEIGHT, "sources": []}, "sources are empty"),
    ({**WEIGHT, "sources": ["a", "a"]}, "sources name 'a' twice"),
    ({**WEIGHT, "sources": [1]}, "sources must be a list of names"),
    ({**WEIGHT, "operation": "swap", "sources": ["a"]}, "exactly two sources, not 1"),
    ({**WEIGHT, "operation": "one"}, "exactly one source, not none"),
    ({**WEIGHT, "operation": "zero_renormalise"}, "without them nothing would be left"),
    ({"target": "pattern", "operation": "one", "site": "0.attn"}, "exactly one key, not none"),
    ({"target": "pattern", "operation": "window", "site": "0.attn", "value": 0}, "whole number of places from 1"),
    ({"target": "pattern", "operation": "window", "site": "0.attn", "value": 1.5}, "whole number of places"),
    ({"target": "pattern", "operation": "window", "site": "0.attn", "value": 1, "keys": [0]}, "takes no keys"),
    ({"target": "pattern", "operation": "scale", "site": "0.attn", "value": [1, 2]}, "scaled by one number"),
    ({"target": "head", "operation": "zero", "site": "0.attn", "heads": [-1]}, "heads must not be negative, as -1"),
    ({**ATOM, "positions": [10**30]}, "positions must be at most 2147483647 in size"),
    ({**ATOM, "positions": [-(2**31)]}, "positions must be at most 2147483647 in size"),
    ({**ATOM, "operation": "patch", "prompt": "\ud800 x"}, "half a character in its prompt"),
    ({"target": "hook", "operation": "zero", "name": "\udfff"}, "half a character in its name"),
    ({**WEIGHT, "operation": "zero", "sources": ["\ud800"]}, "half a character in its sources"),
    ({"target": "hook", "operation": "zero"}, "gives the name of the hook point and no site"),
    ({"target": "hook", "operation": "zero", "name": "hook_embed", "site": "embed"}, "and no site"),
]


@pytest.mark.parametrize(("data", "words"), BAD)
def test_an_edit_that_cannot_be_is_refused(data: dict, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        Edit.from_dict(data)
    assert str(caught.value)[-1] in ".?" and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "not of type int"),
        ("[3]", "Edit 0 must be an Edit or an object with a target, not of type int"),
        ('{"format": "t2lens edits 9", "edits": []}', "this version reads 't2lens edits 1'"),
        ('{"format": "t2lens edits 1", "edits": {}}', "must be a list, not of type dict"),
        ('{"format": "t2lens edits 1", "edit": []}', "keys format and edits, not edit, format"),
        (json.dumps([ATOM, {**ATOM, "target": "x"}]), "Edit 1: 'x' is no target"),
    ],
)
def test_text_that_holds_no_edits_is_refused(text: str, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        edits_from_json(text)


def test_edits_come_in_any_form() -> None:
    edit = Edit.from_dict(ATOM)
    for given in (edit, ATOM, json.dumps(ATOM), [edit], [ATOM, json.dumps(ATOM)], edits_to_json([edit, edit])):
        assert set(read_edits(given)) == {edit}
    assert read_edits([]) == ()
    with pytest.raises(TypeError, match="not of type int"):
        read_edits(3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_renormalising_fills_a_row_however_little_is_left_of_it(dtype: torch.dtype) -> None:
    least = {torch.float64: 1e-300, torch.float32: 1e-40, torch.float16: 1e-6}[dtype]
    weights = torch.tensor([[1.0, least, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64).to(dtype)
    left = without(weights, torch.tensor([True, False, False]), renormalise=True)
    assert left.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]

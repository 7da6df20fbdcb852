"""What a model or a pass cannot do is refused in one sentence, and what one should know is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from t2lens.edits import Edit, edited
from tests.systems import tiny

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("standard", {"target": "depth_weight", "operation": "zero", "site": "1.mlp"}, "model has no depth weights"),
    ("standard", {"target": "gate", "operation": "zero", "site": "1.mlp"}, "model has no gates"),
    ("standard", {"target": "atom", "operation": "zero", "site": "7.mlp"}, "no atom '7.mlp'; did you mean"),
    ("standard", {"target": "atom", "operation": "zero", "site": "out"}, "no atom 'out'"),
    ("standard", {"target": "atom", "operation": "zero", "site": "*.local"}, r"no atom '\*.local'"),
    ("standard", {"target": "head", "operation": "zero", "site": "1.mlp"}, "no attention at 1.mlp; "),
    ("standard", {"target": "head", "operation": "zero", "site": "1.attn", "heads": [2]}, "heads are 0 to 1"),
    ("standard", {"target": "read", "operation": "zero", "site": "1.attn", "way": "q"}, "reads in one way, so leave"),
    ("standard", {"target": "hook", "operation": "zero", "name": "hook_embd"}, "did you mean 'hook_embed'"),
    (
        "standard",
        {"target": "hook", "operation": "freeze_mean", "name": "blocks.0.attn.hook_pattern"},
        "have no mean or patch",
    ),
    (
        "standard",
        {"target": "atom", "operation": "set", "site": "1.attn", "value": [1, 2]},
        r"shape \[2\], which does not spread over what is at blocks.1.hook_attn_out \(d_model 16\)",
    ),
    ("attnres-full", {"target": "stream", "operation": "zero", "site": "1.attn"}, "No stream is carried to 1.attn"),
    (
        "attnres-full",
        {"target": "depth_weight", "operation": "zero", "site": "1.mlp", "sources": ["2.attn"]},
        "no source '2.attn' at 1.mlp; did you mean '1.attn'",
    ),
    (
        "attnres-full",
        {"target": "depth_weight", "operation": "set", "site": "1.mlp", "value": [1, 2]},
        r"\(source 4\)",
    ),
    ("attnres-full", {"target": "depth_weight", "operation": "zero", "site": "out", "way": "q"}, "reads in one way"),
    (
        "denseformer",
        {"target": "depth_weight", "operation": "zero", "site": "1.mlp"},
        "no depth weight to choose at 1.mlp",
    ),
    ("muddformer", {"target": "read", "operation": "zero", "site": "1.attn", "way": "x"}, "the ways are q, k, v, r"),
    ("ddl", {"target": "gate", "operation": "zero", "site": "1.mlp"}, "several gates at 1.mlp, beta_logit, beta, dir"),
    ("ddl", {"target": "gate", "operation": "zero", "site": "out", "name": "beta"}, "no gate at out; 0.attn"),
    ("ddl", {"target": "gate", "operation": "set", "site": "*", "name": "bta", "value": 0}, "did you mean 'beta'"),
    (
        "ddl",
        {"target": "gate", "operation": "set", "site": "1.mlp", "name": "beta", "value": 2.5},
        "lies in 0 to 2; the edit would make it 2.5",
    ),
    (
        "ddl",
        {"target": "gate", "operation": "set", "site": "1.mlp", "name": "dir", "value": [1] * 16},
        "the given vector has the length 4",
    ),
    ("ddl", {"target": "gate", "operation": "set", "site": "1.mlp", "name": "dir", "value": 1}, "cannot be set to one"),
    (
        "ddl",
        {"target": "gate", "operation": "zero", "site": "1.mlp", "name": "beta", "sources": ["state"]},
        "not split over sources",
    ),
    ("highway", {"target": "gate", "operation": "set", "site": "1.mlp", "value": -0.1}, "lies in 0 to 1"),
    (
        "mhc",
        {"target": "stream", "operation": "zero", "site": "1.mlp", "sources": ["stream3"]},
        "no source 'stream3' at 1.mlp; did you mean 'stream",
    ),
    ("mhc", {"target": "gate", "operation": "set", "site": "1.mlp", "name": "res", "value": [1, 2]}, "does not spread"),
    ("standard", {"target": "atom", "operation": "patch", "site": "embed", "prompt": "the king"}, "no tokenizer"),
    ("standard", {"target": "atom", "operation": "patch", "site": "embed", "prompt": [50]}, "outside the vocabulary"),
    (
        "standard",
        {"target": "atom", "operation": "patch", "site": "embed", "prompt": [1, 2], "positions": [2]},
        "prompt of the edit has 2 tokens, so there is no position 2",
    ),
]


@pytest.mark.parametrize(("system", "data", "words"), BAD)
def test_what_a_model_cannot_do_is_refused_before_anything_runs(system: str, data: dict, words: str) -> None:
    model = tiny(system)
    with pytest.raises((KeyError, ValueError), match=words):
        Edit.from_dict(data).check(model)
    with pytest.raises((KeyError, ValueError), match=words), edited(model, data):
        raise AssertionError("the block must not begin")


RUNNING: list[tuple[str, dict[str, Any], str]] = [
    ("standard", {"target": "atom", "operation": "zero", "site": "1.mlp", "positions": [5]}, "no position 5: .* has 5"),
    ("standard", {"target": "atom", "operation": "zero", "site": "1.mlp", "positions": [-6]}, "no position -6"),
    ("standard", {"target": "pattern", "operation": "zero", "site": "1.attn", "keys": [9]}, "no position 9"),
    (
        "standard",
        {"target": "pattern", "operation": "one", "site": "1.attn", "keys": [3], "positions": [1]},
        r"No query at \[1\] sees position 3",
    ),
    ("standard", {"target": "atom", "operation": "patch", "site": "embed", "prompt": [1]}, "as long as the sequences"),
    (
        "standard",
        {"target": "hook", "operation": "set", "name": "blocks.0.mlp.hook_post", "value": [1, 2]},
        r"shape \[2\], which does not spread",
    ),
    ("ddl", {"target": "gate", "operation": "scale", "site": "*", "name": "beta", "value": 40}, "lies in 0 to 2"),
    (
        "denseformer",
        {"target": "depth_weight", "operation": "zero_renormalise", "site": "out", "sources": ["embed"]},
        "have signs",
    ),
]


@pytest.mark.parametrize(("system", "data", "words"), RUNNING)
def test_what_a_pass_cannot_do_is_refused_in_it(system: str, data: dict, words: str) -> None:
    model = tiny(system)
    if system == "denseformer":
        model.residual.weights[-1].data[0] = -1.0
    with pytest.raises(ValueError, match=words), edited(model, data):
        model([[1, 2, 3, 4, 5]])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"target": "atom", "operation": "zero", "site": "1.mlp", "positions": [-1]}, "count from the start"),
        ({"target": "atom", "operation": "freeze_mean", "site": "1.mlp"}, "give freeze_mean a prompt"),
        ({"target": "pattern", "operation": "zero", "site": "1.attn", "keys": [0]}, "no fixed place in the cache"),
    ],
)
def test_what_needs_the_whole_sequence_is_refused_while_text_is_generated(data: dict, words: str) -> None:
    model = tiny("standard")
    with edited(model, data), pytest.raises(ValueError, match=words):
        model.generate(torch.tensor([[1, 2]]), 2)


def test_what_whoever_edits_should_know_is_told() -> None:
    model = tiny("attnres-full")
    told = _edit("depth_weight", "set", "out", value=-0.5, sources=["embed"]).check(model)
    assert len(told) == 2 and "need not" in told[0] and "below 0" in told[1]
    assert _edit("depth_weight", "set", "1.mlp", value=[0.25] * 4).check(model) == []
    assert _edit("depth_weight", "zero_renormalise", "out", sources=["embed"]).check(model) == []
    assert "later ones too" in _edit("atom", "freeze_mean", "1.mlp").check(model)[0]
    assert "length 1" in _edit("gate", "scale", "1.mlp", name="dir", value=2).check(tiny("ddl"))[0]


def _edit(target: str, operation: str, site: str, **rest: Any) -> Edit:
    return Edit(target=target, operation=operation, site=site, **rest)

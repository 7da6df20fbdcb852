"""What a form offers of a model is what the model can do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import t2lens
from t2lens.edits import OPERATIONS, Edit, check, edited
from t2lens.edits.choices import (
    gate_names,
    heads_at,
    hook_names,
    operations_on,
    sites_of,
    sources_at,
    targets_of,
    ways_at,
)
from t2lens.edits.presets import presets
from tests.systems import SYSTEMS, tiny

IDS = [3, 7, 1, 9, 7]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_offered_edit_can_be_done(system: str) -> None:
    seed = random.randrange(1000)
    model, dice = tiny(system, seed, local=seed % 2 == 0), random.Random(seed)
    for target in targets_of(model):
        site = "" if target == "hook" else dice.choice(sites_of(model, target))
        name = dice.choice(hook_names(model)) if target == "hook" else None
        if target == "gate":
            name = dice.choice(gate_names(model, site))
        way = dice.choice(["", *ways_at(model, target, site, name)]) or None
        sources, heads = sources_at(model, target, site, name, way), heads_at(model, target, site)
        for operation in operations_on(model, target, site, name, way):
            assert operation in OPERATIONS[target]
            more: dict[str, Any] = {}
            if operation in ("set", "scale", "add", "window"):
                more["value"] = 1
            if operation in ("swap", "one", "zero_renormalise") and target != "pattern":
                more["sources"] = dice.sample(sources, 2 if operation == "swap" else 1)
            if target == "pattern" and operation in ("one", "zero_renormalise"):
                more["keys"] = [0]
            if operation == "patch":
                more["prompt"] = IDS
            if heads and dice.random() < 0.5:
                more["heads"] = [dice.randrange(heads)]
            edit = Edit(target=target, operation=operation, site=site, name=name, way=way, **more)
            if operation == "set" and target in ("gate", "hook"):  # a direction is no number
                continue
            assert check(model, [edit]) is not None, (seed, edit)


def test_what_a_model_lacks_is_not_offered() -> None:
    assert "gate" not in targets_of(tiny("standard")) and "depth_weight" not in targets_of(tiny("ddl"))
    assert sites_of(tiny("attnres-full"), "depth_score")[0] == "0.mlp"  # the first read has one source
    assert sources_at(tiny("attnres-full"), "depth_weight", "0.mlp") == ["embed", "0.attn"]
    assert operations_on(tiny("attnres-full"), "depth_weight", "0.attn") == [
        "set",
        "scale",
        "add",
        "zero",
        "freeze_mean",
        "patch",
    ]
    assert ways_at(tiny("muddformer"), "depth_weight", "1.attn") == ["q", "k", "v", "r"]
    assert gate_names(tiny("ddl"), "1.mlp")[:2] == ["beta_logit", "beta"] and gate_names(tiny("ddl"), "out") == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_presets_can_be_done_and_change_something(system: str) -> None:
    seed = random.randrange(1000)
    model = tiny(system, seed)
    with torch.no_grad():
        plain = model([IDS])
        for site in ("", "1.attn", "2.mlp", "out", "embed"):
            found = presets(model, site)
            assert {"Silence an attention", "Silence an MLP"} <= set(found)
            for words, edit in found.items():
                check(model, [edit])
                if site == "1.attn":
                    with edited(model, edit):
                        assert torch.isfinite(model([IDS])).all(), (seed, words)
        with edited(model, presets(model)["Silence an MLP"]):
            assert float((model([IDS]) - plain).abs().max()) > 0
    assert t2lens.Edit.from_dict(presets(model)["Silence an MLP"].to_dict()).operation == "zero"

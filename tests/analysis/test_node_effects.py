"""Effects of the routes into one node: against a pass that does the same by hand, and under edits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import t2lens
from t2lens.analysis.node_effects import Recorded, node_effects
from t2lens.analysis.sweep import routes_of
from tests.systems import SYSTEMS, random_tokens, tiny


def by_hand(model: Any, ids: torch.Tensor, pos: int, read: Any, over: str, route: int, edits: Any = ()) -> float:
    """KL at `pos` without one route: a whole pass with a hook, no resume, no batching."""
    with torch.no_grad(), t2lens.edited(model, edits):
        plain = model(ids)[0, pos].log_softmax(dim=-1)
        parts = t2lens.contributions(model, ids, read=read.name) if over == "atom" else torch.empty(0)

        def cut(x: torch.Tensor, *, hook: Any) -> torch.Tensor:
            x = x.clone()
            if over == "source":
                x[0, pos, route] = 0
            else:
                x[0, pos] -= parts[0, pos, route]
            return x

        name = read.site.hook("depth_attn" if over == "source" else "read", read.way)
        with model.hooks([(name, cut)]):
            without = model(ids)[0, pos].log_softmax(dim=-1)
    return float((plain.exp() * (plain - without)).sum())


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_route_does_what_a_hook_on_the_whole_pass_does(system: str) -> None:
    seed = random.randrange(1000)
    dice, model, ids = random.Random(seed), tiny(system, seed), random_tokens(seed)[0]
    for over in ("source", "atom"):
        routes = {read: names for read, names in routes_of(model, over).items() if read.way != "r"}
        if not routes:
            with pytest.raises(ValueError, match="no depth weights"):
                node_effects(model, ids, pos=0, site="1.mlp", over=over)
            continue
        read, pos = dice.choice(list(routes)), dice.randrange(len(ids))
        found = node_effects(model, ids, pos=pos, site=read.site.name, way=read.way, over=over)
        assert found.over == over and tuple(found.values) == routes[read]
        for i in dice.sample(range(len(routes[read])), min(3, len(routes[read]))):
            wanted = by_hand(model, ids, pos, read, over, i)
            value = found.values[routes[read][i]]
            assert value == pytest.approx(wanted, abs=1e-9, rel=1e-6), (seed, read.name, pos, over, i)


def test_under_edits_the_edited_model_is_measured() -> None:
    seed = random.randrange(1000)
    model, ids = tiny("attnres-full", seed), random_tokens(seed)[0]
    edits = [{"target": "atom", "operation": "scale", "site": "0.mlp", "value": -2}]
    read = next(read for read in model.reads if read.name == "1.mlp")
    with t2lens.edited(model, edits):
        found = node_effects(model, ids, pos=1, site="1.mlp")
        again = node_effects(model, Recorded.of(model, ids), pos=1, site="1.mlp")
    assert found == again
    for i, value in enumerate(found.values.values()):
        assert value == pytest.approx(by_hand(model, ids, 1, read, "source", i, edits), abs=1e-9)
    assert found.values != node_effects(model, ids, pos=1, site="1.mlp").values


def test_what_is_no_node_is_refused() -> None:
    model = tiny("muddformer")
    for wrong, words in (
        ({"site": "7.mlp"}, "No site"),
        ({"pos": 3}, "positions 0..2"),
        ({"way": "x"}, "does not read in the way"),
        ({"over": "head"}, "must be"),
    ):
        with pytest.raises(ValueError, match=words):
            node_effects(model, [0, 7, 3], **{"pos": 0, "site": "1.attn", **wrong})
    with pytest.raises(ValueError, match="one sequence"):
        node_effects(model, [[0, 7], [1, 2]], pos=0, site="1.attn")

"""Random edits: any that can be written down, and those that a given model can do."""

from __future__ import annotations

import random
from typing import Any

from t2lens.edits import OPERATIONS, Edit
from t2lens.edits.places import gates_at

NUMBERS = ("set", "scale", "add")


def any_edit(dice: random.Random) -> Edit:
    """An edit of any kind, of no model in particular."""
    target = dice.choice(list(OPERATIONS))
    operation = dice.choice(OPERATIONS[target])
    data: dict[str, Any] = {"target": target, "operation": operation}
    if target == "hook":
        data["name"] = "blocks.0.mlp.hook_post"
    else:
        data["site"] = dice.choice(["0.attn", "1.mlp", "*", "*.local"])
    if target == "gate" and dice.random() < 0.5:
        data["name"] = "beta"
    if target in ("depth_weight", "depth_score", "read", "gate") and dice.random() < 0.5:
        data["way"] = dice.choice("qkvr")
    if operation in ("one", "swap", "zero_renormalise") and target != "pattern":
        data["sources"] = dice.sample(["embed", "0.attn", "block1", "stream2"], 2 if operation == "swap" else 1)
    if target == "pattern" and operation in ("one", "zero_renormalise"):
        data["keys"] = [dice.randrange(-9, 9)]
    if target in ("head", "pattern") and dice.random() < 0.5:
        data["heads"] = dice.sample(range(9), 2)
    if dice.random() < 0.5:
        data["positions"] = dice.sample(range(-9, 9), dice.randint(1, 4))
    if operation in NUMBERS:
        data["value"] = (
            dice.choice([0, -1.5, 1e-30, 7]) if target == "pattern" else dice.choice([3, [0.1, 2], [[1], [2]]])
        )
    if operation == "window":
        data["value"] = dice.randint(1, 5)
    if operation == "patch" or (operation == "freeze_mean" and dice.random() < 0.5):
        data["prompt"] = dice.choice(['caf\u00e9 \u2028 "quoted"', [3, 1, 4, 1, 5]])
    if operation == "patch" and "positions" in data and dice.random() < 0.5:
        data["prompt_positions"] = dice.choices(range(-5, 5), k=len(data["positions"]))
    return Edit.from_dict(data)


def edits_of(model: Any, dice: random.Random, positions: list[int] | None = None) -> dict[str, Edit]:
    """One random edit of every target that the model has, at `positions`; they keep all numbers finite."""
    here: dict[str, Any] = {} if positions is None else {"positions": positions}
    sites = [site for site in model.sites if site.kind != "out"]
    prompt = [dice.randrange(50) for _ in range(12)]
    source = {
        "prompt": prompt,
        **({} if positions is None else {"prompt_positions": dice.choices(range(-12, 12), k=len(positions))}),
    }
    vector = [dice.gauss(0, 1) for _ in range(model.cfg.d_model)]
    numeric: list[dict[str, Any]] = [
        {"operation": "set", "value": vector},
        {"operation": "scale", "value": dice.choice([0.5, 2, -1])},
        {"operation": "add", "value": vector},
        {"operation": "zero"},
        {"operation": "freeze_mean", "prompt": prompt},
    ]
    if positions is not None:
        numeric.append({"operation": "patch", **source})
    found: dict[str, Edit] = {}

    def put(target: str, **rest: Any) -> None:
        found[target] = Edit.from_dict({"target": target, **here, **rest})

    put("atom", site=dice.choice(["embed", *(site.name for site in sites)]), **dice.choice(numeric))
    put("read", site=dice.choice(model.sites).name, **dice.choice([*numeric, {"operation": "plain_sum"}]))
    put(
        "head",
        site=dice.choice([s for s in sites if s.kind != "mlp"]).name,
        heads=[0],
        **dice.choice(numeric[1:2] + numeric[3:]),
    )
    put("pattern", site=dice.choice([s for s in sites if s.kind != "mlp"]).name, operation="window", value=2)
    weighed = [r for r in model.reads if r.site.hook("depth_attn", r.way) in model.hook_dict]
    if weighed:
        read = dice.choice(weighed)
        names = model.sources()[read.name]
        one = dice.choice(names)
        own = [
            {"operation": "one", "sources": [one]},
            {"operation": "set", "value": [dice.gauss(0, 1) for _ in names]},
            {"operation": "scale", "sources": [one], "value": 0.5},
            {"operation": "add", "sources": [one], "value": 0.25},
            {"operation": "zero", "sources": [one]},
            {"operation": "freeze_mean", "prompt": prompt},
        ]
        if len(names) > 1:
            own.append({"operation": "swap", "sources": dice.sample(names, 2)})
        put("depth_weight", site=read.site.name, way=read.way or None, **dice.choice(own))
    gated = [(site.name, name, way) for site in model.sites for name, way in gates_at(model, site)]
    if gated:
        site, name, way = dice.choice(gated)
        point = next(
            p for s in model.sites if s.name == site for key, p in gates_at(model, s).items() if key == (name, way)
        )
        ops = [{"operation": "scale", "value": 1.25}, {"operation": "freeze_mean", "prompt": prompt}]
        ops = ops[1:] if " to " in point.unit or ".." in point.unit else ops
        if positions is not None:
            ops.append({"operation": "patch", **source})
        put("gate", site=site, name=name, way=way or None, **dice.choice(ops))
    stem = "streams" if "blocks.0.hook_streams_pre" in model.hook_dict else "resid"
    if f"blocks.0.hook_{stem}_pre" in model.hook_dict:
        where = dice.choice([s.name for s in model.sites if s.opens or (s.kind == "mlp")])
        some = {"sources": ["stream1"]} if stem == "streams" else {}
        put("stream", site=where, **some, **dice.choice(numeric))
    return found

"""The picture of two aligned prompts and of their difference: every number recomputed from the traces."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

import t2lens
from t2lens.analysis import rollout
from t2lens.config import Attention
from t2lens.residual import AttnRes
from t2lens.viz.maps_picture import maps_picture

MINUS = "B \u2212 A: "


def trace(n_layers: int, ids: list[int], seed: int, **residual: Any) -> t2lens.Trace:
    cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=n_layers, **residual)
    return t2lens.trace(t2lens.build(cfg, seed=seed), ids)


def differences(svg: str) -> dict[tuple[str, ...], float]:
    """The lines above the number -> the number, of every cell of a difference."""
    found = {}
    for mark in ET.fromstring(svg).iter():
        *place, last = mark.attrib.get("data-tip", "").split("\n")
        if last.startswith(MINUS):
            found[tuple(place)] = float(last.removeprefix(MINUS))
    return found


@pytest.mark.parametrize("align", ["left", "right"])
def test_differences_meet_where_the_rule_says(align: Any) -> None:
    dice = random.Random()
    n_a, n_b = dice.sample(range(4, 9), 2)
    seed = dice.randrange(1000)
    a = trace(2, [dice.randrange(50) for _ in range(n_a)], seed, residual=AttnRes())
    b = trace(2, [dice.randrange(50) for _ in range(n_b)], seed + 1, residual=AttnRes())
    shift = n_b - n_a if align == "right" else 0
    pos = max(0, -shift) + dice.randrange(min(n_a, n_b) - 1)
    svg = maps_picture([a, b], cell=(0, pos, "1.attn"), compare="difference", align=align)
    found = differences(svg)
    partners = [p for p in range(n_a) if 0 <= p + shift < n_b]
    expected = {}
    for site in a.dataset["read"].values:
        norm_a, norm_b = (each.dataset["residual_norm"].sel(read=site).values for each in (a, b))
        for p in partners:
            expected["site", str(site), p] = norm_b[p + shift] - norm_a[p]
        reads = [each.dataset["depth_weight"].sel(read=site) for each in (a, b)]
        for source in a.dataset["source"].values:
            w_a, w_b = (float(w.sel(source=source)[p]) for w, p in zip(reads, (pos, pos + shift), strict=True))
            if np.isfinite(w_a):
                expected["read", str(site), str(source)] = w_b - w_a
    looks = [each.dataset["sequence_attention"].sel(layer=1).mean("head").values for each in (a, b)]
    for q in partners:
        for k in partners:
            if k <= q:
                expected["query", q, k] = looks[1][q + shift, k + shift] - looks[0][q, k]
    seen = {}
    for (first, second), value in found.items():
        kind, name, *_ = first.split(" ")
        if kind == "site":
            seen[kind, name, int(second.split(" ")[1])] = value
        elif kind == "read":
            seen[kind, name, second.removeprefix("takes from ")] = value
        else:
            seen[kind, int(name), int(second.split(" ")[1])] = value
    assert {key for key in seen if key[1] != "embed"} == set(expected)
    for key, value in expected.items():
        assert seen[key] == pytest.approx(float(value), rel=1e-3, abs=1e-6), key
    assert f"counted from the {'last' if align == 'right' else 'first'} token" in svg


def test_a_node_without_a_partner_and_models_of_other_depth_are_said() -> None:
    long, short = trace(2, [1, 2, 3, 4, 5, 6], 0), trace(4, [7, 8, 9], 1)
    svg = maps_picture([long, short], depth="mixing", cell=(0, 1, "1.attn"), align="right", compare="difference")
    assert "no position of B stands beside" in svg and "meet at the same relative depth" in svg
    beside = maps_picture([long, short], depth="mixing", cell=(0, 4, "1.attn"), align="right", compare="difference")
    assert "reads from depth at position 1" in beside and "3.attn looks back" in beside
    assert "A and B differ in depth" in beside and "no position of B" not in beside
    rows = {place[0] for place in differences(beside) if place[0].startswith("site ")}
    # sites of two layers meet those of four at 0 and 3
    assert {"site 0.attn", "site 1.mlp", "site out"} <= rows
    value = differences(beside)["site 1.mlp", next(p[1] for p in differences(beside) if p[1].startswith("pos 5"))]
    norms = [each.dataset["residual_norm"] for each in (long, short)]
    expected = float(norms[1].sel(read="3.mlp")[2]) - float(norms[0].sel(read="1.mlp")[5])
    assert value == pytest.approx(expected, rel=1e-3)


def arms(svg: str, site: str, pos: int) -> tuple[dict[int, Any], dict[str, Any]]:
    """The arms of a node by key and by source: attributes of their marks, which lie between the two frames."""
    left, down = {}, {}
    for mark in ET.fromstring(svg).iter():
        first, second, *_ = [*mark.attrib.get("data-tip", "").split("\n"), ""]
        place = (mark.attrib.get("data-site"), mark.attrib.get("data-pos"))
        if first.startswith(f"query {pos} ") and place[0] == site:
            left.setdefault(int(second.split()[1]), mark.attrib)  # the first is in the grid, the other in its own map
        if first == f"read {site}":
            down.setdefault(second.removeprefix("takes from "), mark.attrib)
    return left, down


@pytest.mark.parametrize("width", [700, 2400])
def test_the_arms_lie_where_the_page_has_them(width: int) -> None:
    ids = random.Random().sample(range(50), 9)
    one = trace(
        3, ids, 4, residual=AttnRes(block_size=2), attention=Attention(n_heads=2, n_kv_heads=1, d_head=8, window=4)
    )
    svg = maps_picture([one], depth="weights", cell=(0, 7, "2.mlp"), width=width)
    grid = {(m.attrib["data-site"], m.attrib["data-pos"]): m.attrib for m in ET.fromstring(svg).iter()
            if m.attrib.get("data-tip", "").startswith("site ")}  # fmt: skip
    step = float(grid["out", "1"]["x"]) - float(grid["out", "0"]["x"])
    y = {site: float(at["y"]) for (site, pos), at in grid.items() if pos == "7"}
    y["embed"] = y["0.attn"] + 17  # has no residual norm
    held = {name: atoms for name, atoms in one.source_atoms["2.mlp"].items() if len(atoms) > 1}
    assert held
    _, down = arms(svg, "2.mlp", 7)
    for name, mark in down.items():
        bracket = name in held
        wide = 6.0 if bracket else max(step, 11.0) if step < 18 else round(0.56 * step)
        assert float(mark["width"]) == pytest.approx(wide, abs=0.02)
        rows = [y[atom] for atom in one.source_atoms["2.mlp"][name]]
        assert float(mark["y"]) == pytest.approx(min(rows) + 1, abs=0.6)
        tall = max(rows) - min(rows) + 17
        assert float(mark["height"]) == pytest.approx(tall - 2, abs=0.6)
        assert bracket == (
            float(mark["x"]) > float(grid["out", "7"]["x"]) + step / 2
            or float(mark["x"]) < float(grid["out", "7"]["x"])
        )
    left, _ = arms(maps_picture([one], depth="weights", cell=(0, 7, "2.attn"), width=width), "2.attn", 7)
    assert set(left) >= {4, 5, 6, 7}
    assert all(float(left[k]["height"]) == round(0.56 * 17) for k in (4, 5, 6, 7))
    assert 3 not in left or float(left[3]["height"]) != round(0.56 * 17)  # outside the window: not in the arm


def test_choices_that_do_not_exist_are_refused() -> None:
    one = trace(1, [1, 2], 0)
    with pytest.raises(ValueError, match="aligned left or right"):
        maps_picture([one], align="middle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="beside each other"):
        maps_picture([one], compare="nothing")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="its cross or its rollout"):
        maps_picture([one], layer="all")  # type: ignore[arg-type]
    assert MINUS not in maps_picture([one], compare="difference")
    for cell, words in (
        ("out", r"A node is \(panel, position, site\)"),
        ((1, 0, "out"), "panel counts the traces, from 0 to 0"),
        ((0, 2, "out"), "positions 0 to 1, not 2"),
        ((0, -1, "out"), "positions 0 to 1, not -1"),
        ((0, 1, "7.mlp"), "no site '7.mlp'"),
    ):
        with pytest.raises(ValueError, match=words):
            maps_picture([one], cell=cell)  # type: ignore[arg-type]
    for width in (float("nan"), -5, "wide"):
        with pytest.raises(ValueError, match="width is a number of pixels"):
            maps_picture([one], width=width)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="light or dark"):
        maps_picture([one], theme="grey")  # type: ignore[arg-type]


def test_a_rollout_of_another_node_is_not_drawn_as_that_of_the_chosen_one() -> None:
    ids = random.Random().sample(range(50), 5)
    cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=AttnRes())
    model = t2lens.build(cfg, seed=3)
    one, found = t2lens.trace(model, ids), rollout(model, ids, pos=3, site="1.attn")
    assert "share of 1.attn@3 that passes here" in maps_picture(
        [one], cell=(0, 3, "1.attn"), layer="rollout", rollouts=[found]
    )
    for pos, site in ((2, "1.attn"), (3, "1.mlp"), (3, "0.mlp")):
        with pytest.raises(ValueError, match=f"not of the chosen node, {site} at position {pos}"):
            maps_picture([one], cell=(0, pos, site), layer="rollout", rollouts=[found])
    with pytest.raises(TypeError, match=r"what t2lens\.analysis\.rollout finds, not int"):
        maps_picture([one], cell=(0, 3, "1.attn"), layer="rollout", rollouts=[3])

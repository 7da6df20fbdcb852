"""Gates on writes, of every system that has some: the numbers of the pass, whatever the padding, and what others do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.analysis import gate_curve, write_gates
from t2lens.analysis.gates import gate_span, write_gate
from tests.systems import SYSTEMS, tiny

STREAMED = [name for name, cfg in SYSTEMS.items() if isinstance(cfg, t2lens.residual.HyperConnections)]
GATED = ["highway", "ddl", *STREAMED]
TEXTS = [[3, 1, 3, 7], [5, 2, 9]]


def seen(model: Any, tokens: list[int], stems: tuple[str, ...]) -> dict[str, list[np.ndarray]]:
    """What passes the hook points hook_STEM of every write in order, [pos, ...]."""
    _, cache = model.run_with_cache(torch.tensor([tokens]))
    own = {name: value[0].double().numpy() for name, value in cache.items()}
    found: dict[str, list[np.ndarray]] = {}
    for stem in stems:
        for site in model.sites[:-1]:
            names = (f"blocks.{site.layer}.hc_{site.kind}.hook_{stem}", site.hook(stem))
            found.setdefault(stem, []).append(next(own[name] for name in names if name in own))
    return found


@pytest.mark.parametrize("name", STREAMED)
def test_streams_are_those_of_the_hook_points(name: str) -> None:
    model = tiny(name, 5)
    data = write_gates(model, TEXTS[0]).dataset
    passed = seen(model, TEXTS[0], ("post", "res", "depth_attn"))
    for ours, stem in (("gate", "post"), ("mix", "res"), ("read", "depth_attn")):
        for i, values in enumerate(passed[stem]):
            assert np.moveaxis(data[ours].values[i], -1, 0) == pytest.approx(values, abs=1e-6), (ours, i)
    gate = write_gate(model)
    assert gate is not None
    low, high = gate_span(gate, data["gate"])
    assert low <= float(data["gate"].min()) and float(data["gate"].max()) <= high


@pytest.mark.parametrize("name", GATED)
def test_several_texts_are_each_of_them(name: str) -> None:
    model = tiny(name, 6)
    padded = torch.tensor([[0, *TEXTS[1]], TEXTS[0]])
    data = write_gates(model, padded, torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])).dataset
    alone = np.concatenate([write_gates(model, text)["gate"].values for text in (TEXTS[1], TEXTS[0])], axis=-1)
    assert data["gate"].values == pytest.approx(alone, abs=1e-5)
    assert data["sequence"].values.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert data["position"].values.tolist() == [0, 1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize("name", ["highway", "ddl"])
def test_one_number_per_write_is_the_gate_of_the_trace(name: str) -> None:
    model = tiny(name, 7)
    gate = t2lens.trace(model, TEXTS[0]).dataset["gate"]
    assert write_gates(model, TEXTS[0])["gate"].values == pytest.approx(gate.transpose("write", "pos").values, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "stream"), [("highway", None), ("mhc", None), ("mhc", "stream1"), ("hyper-static", "stream0")]
)
@pytest.mark.parametrize("at", ["all", "position"])
def test_a_pass_with_each_gate_as_an_edit_gives_the_curve(name: str, stream: str | None, at: Any) -> None:
    model, site, pos = tiny(name, 8), "1.attn", 2
    found = gate_curve(model, TEXTS[0], site=site, pos=pos, at=at, stream=stream, low=0, high=1.5, steps=3)
    gate = write_gate(model)
    assert gate is not None
    plain = model(torch.tensor([TEXTS[0]]))[0].detach().double().log_softmax(-1)
    for value, kl in zip(found["value"].values.tolist(), found["kl"].values.tolist(), strict=True):
        where: dict[str, Any] = {"positions": [pos]} if at == "position" else {}
        where |= {"sources": [stream]} if stream else {}
        if name == "highway" and value > 1:
            continue  # no edit sets it beyond its range
        edit = t2lens.Edit.from_dict({"target": "gate", "name": gate.name, "site": site, "operation": "set",
                                      "value": value, **where})  # fmt: skip
        with t2lens.edited(model, [edit]):
            changed = model(torch.tensor([TEXTS[0]]))[0].detach().double().log_softmax(-1)
        assert kl == pytest.approx(float((plain[pos].exp() * (plain[pos] - changed[pos])).sum()), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"stream": "stream9"}, "no stream 'stream9'; it has stream0"),
        ({"low": 2.0, "high": 1.0}, "from 2 to 1"),
        ({"low": float("nan")}, "from nan to 2"),
        ({"low": "a"}, "low and high must be numbers, not 'a' and None"),
        ({"low": -1e300, "high": 1e309}, "from -1e\\+300 to inf"),
        ({"steps": 2.5}, "steps and top must be whole numbers of at least 1, not 2.5 and 8"),
        ({"top": None}, "steps and top must be whole numbers of at least 1, not 20 and None"),
        ({"pos": 1.0}, "pos must be a whole number, not 1.0"),
        ({"site": 3}, "No sublayer 3 has a gate"),
    ],
)
def test_bad_options_are_a_sentence(options: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, KeyError), match=error):
        gate_curve(tiny("mhc", 1), [2, 8], **{"site": "1.attn", **options})


def test_a_gate_beyond_the_numbers_of_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="is a float16 of at most 6"):
        gate_curve(tiny("mhc", 1, dtype=torch.float16), [2, 8], site="1.attn", low=0.0, high=1e6)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name not in GATED and not name.startswith("ddl")])
def test_systems_without_gates_on_writes_are_refused_in_a_sentence(name: str) -> None:
    model = tiny(name, 1)
    if "gate" in t2lens.trace(model, [3, 1]).dataset:
        assert write_gate(model) is not None
        return
    with pytest.raises(ValueError, match="has no gates on its writes"):
        write_gates(model, [3, 1])

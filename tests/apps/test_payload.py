"""The maps' payload: the numbers of the dataset, what is missing and why, one range for both panels."""

from __future__ import annotations

import base64
import copy
import json
from dataclasses import replace

import numpy as np
import pytest

import t2lens
from t2lens.analysis.quantities import QUANTITIES, grid
from t2lens.config import MLP, Attention, ModelConfig, ShortSWA
from t2lens.residual import AttnRes, DeepDelta, DepthSWA, Standard
from t2lens.viz.payload import DEPTH, maps_payload, renderer_js, triangle
from tests.systems import tiny

BASE = ModelConfig(
    d_vocab=50,
    n_ctx=32,
    d_model=16,
    n_layers=3,
    attention=Attention(n_heads=2, n_kv_heads=1, d_head=8),
    mlp=MLP(d_mlp=20),
)
SYSTEMS = {
    "standard": replace(BASE, residual=Standard()),
    "standard-swa": replace(BASE, local=ShortSWA(window=3, n_heads=1, n_kv_heads=1, d_head=8)),
    "attnres-full": replace(BASE, residual=AttnRes()),
    "attnres-block": replace(BASE, residual=AttnRes(block_size=2)),
    "depth-swa": replace(BASE, residual=DepthSWA(window=2)),
    "ddl": replace(BASE, residual=DeepDelta()),
    "ddl-cc-ec": replace(BASE, residual=DeepDelta(value_channels=4, embed_conv=4)),
}
TOKENS = [0, 7, 3, 7, 9, 7]


@pytest.fixture(scope="module")
def traces() -> dict[str, t2lens.Trace]:
    return {name: t2lens.trace(t2lens.build(cfg, seed=1), TOKENS, name=name) for name, cfg in SYSTEMS.items()}


def unpack(array: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(array["b64"]), dtype=f"<{array['dtype']}").reshape(array["shape"])


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_number_is_the_number_of_the_dataset(traces: dict[str, t2lens.Trace], name: str) -> None:
    trace = traces[name]
    (panel,) = maps_payload([trace])["panels"]
    data = trace.dataset
    assert panel["rows"] == ["embed", *data["read"].values]
    assert panel["tokens"] == trace.tokens
    for key in QUANTITIES:
        expected = grid(trace, key)
        if expected.absent:
            assert panel["ways"][""]["absent"][key] == expected.absent and key not in panel["ways"][""]["grids"]
        else:
            assert np.array_equal(unpack(panel["ways"][""]["grids"][key]), expected.values, equal_nan=True)
    for key, (variable, column, _, _) in DEPTH.items():
        sent = panel["ways"][""]["reads"][key]
        values, start = unpack(sent["values"]), 0
        rebuilt = np.full((data.sizes["read"], data.sizes[column], len(TOKENS)), np.nan, np.float32)
        where = [list(data[column].values).index(source) for source in sent["names"]]
        for r, columns in enumerate(sent["columns"]):
            rebuilt[r, [where[c] for c in columns]] = values[start : start + len(columns)]
            start += len(columns)
        assert np.array_equal(
            rebuilt, data[variable].transpose("read", column, "pos").values.astype("f4"), equal_nan=True
        )
    attn = data["sequence_attention"].mean("head").values
    for layer in range(3):
        sent = unpack(panel["sequence"][f"{layer}.attn"])
        assert np.allclose(sent, triangle(attn[layer]), rtol=1e-6, atol=0)
    assert [[token for token, _ in row] for row in panel["next"]] == data["next_token"].values.tolist()


def test_the_lower_triangle_is_row_by_row() -> None:
    pattern = np.arange(9.0).reshape(3, 3)
    packed = triangle(pattern)
    for q in range(3):
        for k in range(q + 1):
            assert packed[q * (q + 1) // 2 + k] == pattern[q, k]


def test_a_system_without_gates_says_so_and_sends_no_zeros(traces: dict[str, t2lens.Trace]) -> None:
    panel_a, panel_b = maps_payload([traces["standard"], traces["ddl"]], quantity="gate")["panels"]
    assert "no gates" in panel_a["ways"][""]["absent"]["gate"] and "gate" not in panel_a["ways"][""]["grids"]
    assert "gate" in panel_b["ways"][""]["grids"]
    assert set(panel_b["ways"][""]["missing"]["gate"]) == {"embed", "out"}


def test_sums_and_states_name_the_atoms_they_hold(traces: dict[str, t2lens.Trace]) -> None:
    block = maps_payload([traces["attnres-block"]])["panels"][0]
    assert block["ways"][""]["holds"]["1.mlp"]["block1"] == ["0.attn", "0.mlp"]
    assert block["ways"][""]["reads"]["weights"]["names"][-1] == "partial"  # it moves, so it stands last
    full = maps_payload([traces["attnres-full"]])["panels"][0]
    assert full["ways"][""]["holds"]["2.mlp"] == {}  # every source is one atom
    ddl = maps_payload([traces["ddl"]])["panels"][0]
    assert ddl["ways"][""]["holds"]["1.attn"]["state"] == ["embed", "0.attn", "0.mlp"]


def test_coefficients_that_are_means_say_so(traces: dict[str, t2lens.Trace]) -> None:
    what = {
        name: maps_payload([traces[name]])["panels"][0]["ways"][""]["reads"]["mixing"]["what"]
        for name in ("ddl", "ddl-cc-ec")
    }
    assert "mean" in what["ddl-cc-ec"] and "mean" not in what["ddl"]


def test_a_window_is_told(traces: dict[str, t2lens.Trace]) -> None:
    panel = maps_payload([traces["standard-swa"]])["panels"][0]
    assert panel["windows"] == {f"{layer}.local": 3 for layer in range(3)}
    assert panel["heads"]["0.local"] == 1 and panel["heads"]["0.attn"] == 2


def test_every_head_is_sent_when_asked(traces: dict[str, t2lens.Trace]) -> None:
    assert maps_payload([traces["ddl"]])["panels"][0]["patterns"] == {}
    panel = maps_payload([traces["standard-swa"]], heads=True)["panels"][0]
    assert set(panel["patterns"]) == {f"{layer}.attn" for layer in range(3)}  # ShortSWA has one head: its mean is it
    sent = unpack(panel["patterns"]["2.attn"])
    assert np.array_equal(sent, triangle(traces["standard-swa"].dataset["sequence_attention"].values[2]))


def test_both_panels_share_one_range(traces: dict[str, t2lens.Trace]) -> None:
    pair = [traces["attnres-full"], traces["ddl"]]
    payload = maps_payload(pair)
    ranges = {entry["key"]: entry for entry in payload["quantities"]}
    norms = np.concatenate([trace.dataset["residual_norm"].values.ravel() for trace in pair])
    norm = ranges["residual_norm"]
    assert norm["lo"] == norms.min()
    assert norm["above"] == (norms > norm["hi"]).sum()
    assert (norm["hi"] == norms.max()) == (norm["above"] == 0)
    assert (ranges["gate"]["lo"], ranges["gate"]["hi"]) == (0.0, 2.0)
    mixing = next(entry for entry in payload["depth"] if entry["key"] == "mixing")
    every = np.concatenate([trace.dataset["mixing"].values.ravel() for trace in pair])
    assert mixing["hi"] == np.nanmax(np.abs(every))
    assert mixing["signed"] == bool((every < 0).any())


def test_a_wide_positive_quantity_gets_a_logarithmic_scale(traces: dict[str, t2lens.Trace]) -> None:
    def entry(scale: float) -> dict:
        wide = copy.deepcopy(traces["ddl"])
        wide.dataset["residual_norm"].values[...] = np.geomspace(1.0, scale, 7 * 6).reshape(7, 6)
        return maps_payload([wide])["quantities"][0]

    assert entry(20.0)["log"] is False
    assert (entry(1e3)["log"], entry(1e3)["lo"], entry(1e3)["hi"], entry(1e3)["above"]) == (True, 1.0, 1e3, 0)


def test_half_precision_is_half_the_size_and_says_so(traces: dict[str, t2lens.Trace]) -> None:
    pair = [traces["attnres-full"], traces["ddl"]]
    exact, half = maps_payload(pair), maps_payload(pair, precision="f2")
    assert half["precision"] == "f2"
    sent = unpack(half["panels"][0]["ways"][""]["reads"]["mixing"]["values"])
    assert np.allclose(sent, unpack(exact["panels"][0]["ways"][""]["reads"]["mixing"]["values"]), rtol=1e-3)
    small = maps_payload(pair, precision="f2", reads=["mixing"], depth="mixing", sequence=False)
    assert len(json.dumps(small)) < len(json.dumps(half)) < len(json.dumps(exact))
    assert small["panels"][0]["sequence"] == {}


def test_nothing_but_json_and_the_revision_follows_the_content(traces: dict[str, t2lens.Trace]) -> None:
    one, again = maps_payload([traces["ddl"]]), maps_payload([traces["ddl"]])
    assert one == again == json.loads(json.dumps(one, allow_nan=False))
    assert one["rev"] != maps_payload([traces["ddl"]], cell=(0, 1, "out"))["rev"]
    assert one["view"] == {
        "panel": 0,
        "pos": 5,
        "site": "out",
        "quantity": "residual_norm",
        "depth": "weights",
        "head": "mean",
        "way": "",
    }


def test_wrong_asks_get_one_sentence(traces: dict[str, t2lens.Trace]) -> None:
    trace = traces["ddl"]
    with pytest.raises(ValueError, match="one or two"):
        maps_payload([])
    with pytest.raises(ValueError, match="one or two"):
        maps_payload([trace] * 3)
    with pytest.raises(ValueError, match="not 'beta'"):
        maps_payload([trace], quantity="beta")
    with pytest.raises(ValueError, match="first"):
        maps_payload([trace], depth="weight")
    with pytest.raises(ValueError, match="mixin"):
        maps_payload([trace], reads=["mixin"])


def test_a_failed_check_is_a_badge(traces: dict[str, t2lens.Trace]) -> None:
    from t2lens.checks import Check, Verification

    class Broken(t2lens.Trace):
        def verify(self) -> Verification:
            return Verification((Check("recombination", float("nan"), 1e-4, "sum"), Check("finite", 0.0, 0.0, "count")))

    good = traces["ddl"]
    bad = Broken(good.dataset, good._meta)
    badge = maps_payload([bad])["panels"][0]["badge"]
    assert not badge["ok"] and "recombination" in badge["text"] and len(badge["lines"]) == 2
    assert maps_payload([good])["panels"][0]["badge"]["ok"]


def test_the_renderer_is_safe_inside_a_script_element() -> None:
    text = renderer_js()
    assert "</" not in text and "<!--" not in text
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text
    assert "http://" not in text and "https://" not in text and "import " not in text.replace("important ", "")
    assert text.isascii() and len(text) < 120_000


def test_a_model_that_reads_in_several_ways_sends_each_of_them() -> None:
    trace = t2lens.trace(tiny("muddformer"), [0, 7, 3, 7])
    payload = maps_payload([trace, t2lens.trace(tiny("standard"), [0, 7, 3, 7])])
    mudd, standard = payload["panels"]
    assert list(mudd["ways"]) == ["q", "k", "v", "r"] and list(standard["ways"]) == [""]
    assert mudd["rows"] == standard["rows"] and payload["view"]["way"] == "q"
    for way, sent in mudd["ways"].items():
        norms = unpack(sent["grids"]["residual_norm"])
        expected = trace.dataset["residual_norm"].sel(read=f"1.attn.{way}").values
        assert np.array_equal(norms[mudd["rows"].index("1.attn")], expected.astype(np.float32))
    one = {way: unpack(sent["reads"]["weights"]["values"]) for way, sent in mudd["ways"].items()}
    assert not np.array_equal(one["q"], one["v"])

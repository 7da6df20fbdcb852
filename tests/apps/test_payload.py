"""The maps' payload: the numbers of the dataset, what is missing and why, one range for both panels."""

from __future__ import annotations

import base64
import copy
import json
import random
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

import t2lens
from t2lens.analysis.places import align
from t2lens.analysis.quantities import QUANTITIES, grid
from t2lens.config import MLP, Attention, ModelConfig, ShortSWA
from t2lens.residual import AttnRes, DeepDelta, DepthSWA, Standard
from t2lens.viz.fitting import BUDGET, fitted_payload
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
        "layer": "cross",
        "compare": "both",
        "trail": [],
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


def test_prompts_are_aligned_by_a_stated_rule_and_never_stretched() -> None:
    rules: tuple[Literal["left", "right"], ...] = ("left", "right")
    model = tiny("standard")
    dice = random.Random()
    for _ in range(5):
        lengths = dice.sample(range(2, 12), 2)
        a, b = (t2lens.trace(model, [dice.randrange(50) for _ in range(n)]) for n in lengths)
        for rule in rules:
            found = maps_payload([a, b], align=rule)["alignment"]
            pairs = align(lengths[0], lengths[1], rule)  # the rule that patching follows
            assert {q - p for p, q in pairs} == {found["shift"]} and found["rule"] == rule
            assert str(abs(lengths[0] - lengths[1])) in found["text"] and "none beside" in found["text"]
    assert maps_payload([a])["alignment"] is None
    assert maps_payload([a, a])["alignment"] == {"rule": "same", "shift": 0, "text": ""}
    other = t2lens.trace(model, [(i + 1) % 50 for i in a.token_ids])
    assert maps_payload([a, other])["alignment"]["rule"] == "left"  # as long, but another prompt
    with pytest.raises(ValueError, match="left or right"):
        maps_payload([a, b], align="middle")  # type: ignore[arg-type]


def test_what_is_followed_crosses_and_its_shares_sum_to_the_logit() -> None:
    trace = t2lens.trace(tiny("muddformer"), [0, 7, 3, 7], follow="next")
    panel = maps_payload([trace])["panels"][0]
    follow = panel["follow"]
    best = str(int(tiny("muddformer")([[0, 7, 3, 7]])[0, -1].argmax()))
    assert follow["text"] == trace.follow and follow["tokens"] == ["7", "3", "7", best]
    shares = unpack(panel["ways"]["q"]["grids"]["logit_share"])[:-1].sum(axis=0)
    assert np.allclose(shares + unpack(follow["bias"]), unpack(follow["logit"]), atol=1e-5)
    for way in ("q", "v"):
        lens, data = panel["ways"][way]["lens"], trace.of_way(way).dataset
        top, log = unpack(lens["top"]).astype(int), unpack(lens["logprob"])
        assert top.shape == log.shape == (7, 4, 3)
        words = data["word"].values[data["lens_top"].values[..., :3]]
        assert [[[lens["words"][i] for i in at] for at in row] for row in top] == words.tolist()
        assert np.allclose(log, data["lens_top_logprob"].values[..., :3])
    plain = maps_payload([t2lens.trace(tiny("standard"), [0, 7])])["panels"][0]
    assert plain["follow"] is None and plain["ways"][""]["lens"] is None


def test_a_head_that_has_no_shares_is_followed_without_them() -> None:
    model = t2lens.build(replace(BASE, residual=Standard(), head="mlm"), seed=1)
    panel = maps_payload([t2lens.trace(model, TOKENS, follow=3)])["panels"][0]
    assert panel["follow"]["logit"] is None and panel["follow"]["tokens"] == ["3"] * 6


def test_the_largest_weight_over_heads_is_sent_where_heads_are_not(traces: dict[str, t2lens.Trace]) -> None:
    trace = traces["standard-swa"]
    panel = maps_payload([trace], maxima=True)["panels"][0]
    most = trace.dataset["sequence_attention"].max("head").values
    assert set(panel["maxima"]) == {f"{layer}.attn" for layer in range(3)}
    assert np.array_equal(unpack(panel["maxima"]["1.attn"]), triangle(most[1]))
    assert maps_payload([trace], maxima=True, heads=True)["panels"][0]["maxima"] == {}


def test_a_payload_over_its_budget_loses_heads_then_digits_then_reads_and_says_so(
    traces: dict[str, t2lens.Trace],
) -> None:
    pair = [traces["attnres-full"], traces["ddl"]]
    sizes, seen = [], []
    whole = len(json.dumps(fitted_payload(pair, budget=10**9)))
    for budget in (10**9, whole - 1, whole // 2, whole // 4, 1):
        payload = fitted_payload(pair, budget=budget, notes=["a note"], quantity="residual_norm")
        sizes.append(len(json.dumps(payload)))
        assert payload["notes"][0] == "a note" and (sizes[-1] <= budget or payload["lean"])
        heads = bool(payload["panels"][0]["patterns"])
        seen.append((heads, payload["precision"], payload["lean"]))
        said = " ".join(payload["notes"])
        assert ("row by row" in said) == (not heads and not payload["lean"])
        assert ("3 digits" in said) == (payload["precision"] == "f2") and ("too long" in said) == payload["lean"]
    assert sizes == sorted(sizes, reverse=True)
    assert seen[0] == (True, "f4", False) and seen[-1] == (False, "f2", True)
    assert (False, "f4", False) in seen
    # without a server nothing is put off
    assert not fitted_payload(pair, budget=1, served=False)["lean"]


def test_a_lean_payload_holds_the_first_quantity_and_the_range_of_all(traces: dict[str, t2lens.Trace]) -> None:
    mudd = t2lens.trace(tiny("muddformer"), TOKENS)
    lean = maps_payload([traces["ddl"], mudd], lean=True, quantity="write_norm", way="v")
    whole = maps_payload([traces["ddl"], mudd], quantity="write_norm", way="v")
    for panel in lean["panels"]:
        assert panel["sequence"] == panel["patterns"] == {} and panel["next"] is None
        assert all(way["reads"] == {} and way["lens"] is None for way in panel["ways"].values())
    assert list(lean["panels"][0]["ways"][""]["grids"]) == ["write_norm"]
    sent = {way: list(each["grids"]) for way, each in lean["panels"][1]["ways"].items()}
    assert sent == {"q": [], "k": [], "v": ["write_norm"], "r": []}
    assert lean["panels"][0]["heads"] == whole["panels"][0]["heads"]
    for one, other in zip(lean["quantities"], whole["quantities"], strict=True):
        assert one.pop("later", False) is True  # the ways that are not shown first
        key = one["key"]
        if not key.startswith(("sequence_", "effective_positions")):
            assert one == other
        else:  # bounds that hold whatever the attention, without a look at it
            assert one["lo"] <= other["lo"] and one["hi"] >= other["hi"]
    for one, other in zip(lean["panels"], whole["panels"], strict=True):
        for way in one["ways"]:
            for part in ("missing", "absent", "holds"):
                assert one["ways"][way][part] == other["ways"][way][part]
    norm = maps_payload([traces["ddl"]], lean=True, quantity="residual_norm")
    assert [entry["key"] for entry in norm["quantities"] if not entry.get("later")] == ["residual_norm"]


def test_two_models_at_2048_tokens_and_97_rows_stay_under_three_megabytes() -> None:
    generator = np.random.default_rng()
    cfg = replace(BASE, n_layers=48, n_ctx=2048, residual=AttnRes(), d_model=8)
    short = t2lens.trace(t2lens.build(replace(cfg, n_ctx=4)), [0, 1], follow="next")
    data = short.dataset.drop_vars("sequence_attention").isel(pos=[0] * 2048, query=[0] * 2048, key=[0] * 2048)
    data = data.assign_coords(pos=np.arange(2048), token=("pos", np.array(["\u00e9token"] * 2048, dtype=object)))
    data["residual_norm"] = data["residual_norm"] * generator.uniform(0.5, 2, (97, 2048)).astype("f4")
    # attention of this length would take 3 GB: a view of one number says what is there
    data["sequence_attention"] = (
        ("layer", "head", "query", "key"),
        np.broadcast_to(np.float32(0.1), (48, 4, 2048, 2048)),
    )
    trace = t2lens.Trace(data, short._meta)
    payload = fitted_payload([trace, trace], quantity="residual_norm")
    assert payload["lean"] and payload["precision"] == "f4"
    assert len(payload["panels"][0]["rows"]) == 98
    assert len(json.dumps(payload)) < BUDGET
    assert unpack(payload["panels"][0]["ways"][""]["grids"]["residual_norm"]).shape == (98, 2048)

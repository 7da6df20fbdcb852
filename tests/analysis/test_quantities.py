"""Quantities against loops written out by hand, and their reasons where there is no value."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.analysis.quantities import QUANTITIES, attention_of, grid, quantity

from ..systems import SYSTEMS, tiny, tiny_config
from ..viz.words import edited

IDS = [0, 7, 3, 7, 9, 7]


def traced(system: str, **changes: Any) -> Any:
    return t2lens.trace(tiny(system, **changes), IDS)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_quantity_is_finite_or_says_why(system: str, local: bool):
    trace = traced(system, local=local)
    for key in QUANTITIES:
        found = grid(trace, key)
        assert found.values.shape == (len(found.sites), len(IDS))
        assert found.values.dtype == np.float64 or found.absent
        assert found.sites == ("embed", *trace.of_way().dataset["read"].values)
        for site, row in zip(found.sites, found.values, strict=True):
            if found.why(site):
                assert np.isnan(row).all()
            else:
                assert np.isfinite(row).all()
                low, high = found.limits
                assert low is None or (row >= low - 1e-9).all()
                assert high is None or (row <= high).all()


def test_uniform_depth_weights_spread_over_every_source():
    model = t2lens.build(tiny_config("attnres-full"), seed=0).double()  # queries are zero at the start
    trace = t2lens.trace(model, IDS)
    entropy, sources = grid(trace, "depth_entropy"), grid(trace, "effective_sources")
    for n in range(1, len(entropy.sites)):
        np.testing.assert_allclose(entropy.values[n], math.log(n), atol=1e-12)
        np.testing.assert_allclose(sources.values[n], n, atol=1e-12)


def test_entropy_by_hand_and_with_exact_zeros():
    trace = traced("attnres-window")
    weights = trace.dataset["depth_weight"].values
    assert (weights == 0).any()
    values = grid(trace, "depth_entropy").values
    for i in range(weights.shape[0]):
        for t in range(weights.shape[1]):
            by_hand = -sum(w * math.log(w) for w in weights[i, t] if w > 0)
            assert values[i + 1, t] == pytest.approx(by_hand, abs=1e-12)


@pytest.mark.parametrize(("system", "local"), [("attnres-block", False), ("ddl-cc-ec", False), ("standard", True)])
def test_look_back_in_depth_and_effective_atoms_by_hand(system: str, local: bool):
    trace = traced(system, local=local)
    length = trace.dataset["contribution_norm"].values
    back, spread = grid(trace, "depth_lookback").values, grid(trace, "effective_atoms").values
    per_block = 3 if local else 2
    for r in range(length.shape[0]):
        for t in range(len(IDS)):
            shares = [length[r, t, a] / np.nansum(length[r, t]) for a in range(r + 1)]  # r atoms and embed exist
            sublayers = sum(share * (r - a + 1) for a, share in enumerate(shares))
            assert back[r + 1, t] == pytest.approx(sublayers / per_block, abs=1e-12)
            entropy = -sum(share * math.log(share) for share in shares if share > 0)
            assert spread[r + 1, t] == pytest.approx(math.exp(entropy), abs=1e-12)


def test_the_first_read_is_one_sublayer_after_the_embedding():
    assert grid(traced("standard"), "depth_lookback").values[1] == pytest.approx(0.5)


def test_look_back_in_the_sequence_by_hand():
    trace = traced("standard", local=True)
    found = grid(trace, "sequence_lookback")
    patterns = attention_of(trace)
    assert list(patterns) == ["0.local", "0.attn", "1.local", "1.attn", "2.local", "2.attn"]
    assert [len(heads) for heads in patterns.values()] == [1, 2, 1, 2, 1, 2]
    for site, heads in patterns.items():
        for q in range(len(IDS)):
            by_hand = np.mean([sum(head[q, k] * (q - k) for k in range(q + 1)) for head in heads])
            assert found.values[found.sites.index(site), q] == pytest.approx(by_hand, abs=1e-12)
    window = tiny_config("standard", local=True).local
    assert window is not None and window.window == 3
    assert (found.values[found.sites.index("1.local")] <= 2).all()
    assert found.missing["0.mlp"] == "reads its own position only"


def test_norms_are_those_of_the_model():
    model = tiny("attnres-full")
    trace = t2lens.trace(model, IDS)
    record = model.record([IDS])
    reads, writes = grid(trace, "residual_norm"), grid(trace, "write_norm")
    for i, read in enumerate(record.reads.values(), start=1):
        np.testing.assert_allclose(reads.values[i], read[0].norm(dim=-1))
    for i, atom in enumerate(record.atoms):
        np.testing.assert_allclose(writes.values[i], atom[0].norm(dim=-1))
    assert writes.missing == {"out": "the readout writes nothing to the stream"}


def test_the_gate_lies_at_the_site_that_writes():
    model = tiny("ddl")
    found = grid(t2lens.trace(model, IDS), "gate")
    _, cache = model.run_with_cache(torch.tensor([IDS]))
    assert found.quantity.label == "gate beta"
    assert found.limits == (0.0, 2.0)
    for layer in range(3):
        for kind in ("attn", "mlp"):
            beta = cache[f"blocks.{layer}.ddl_{kind}.hook_beta"][0, :, 0]
            np.testing.assert_array_equal(found.values[found.sites.index(f"{layer}.{kind}")], beta)
    assert set(found.missing) == {"embed", "out"}


@pytest.mark.parametrize(
    ("system", "key", "why"),
    [
        ("standard", "gate", "no gates"),
        ("standard", "depth_entropy", "not a distribution"),
        ("ddl", "effective_sources", "one state"),
        ("ddl-cc", "depth_entropy", "one state"),
    ],
)
def test_what_a_system_does_not_have_is_absent(system: str, key: str, why: str):
    found = grid(traced(system), key)
    assert why in found.absent
    assert np.isnan(found.values).all()
    assert found.why("1.mlp") == found.absent


def test_a_read_of_the_carried_stream_has_no_weights():
    found = grid(traced("depth-swa"), "depth_entropy")
    assert not found.absent
    assert found.missing["1.mlp"] == "reads one carried stream: no weights over depth"
    assert "1.attn" not in found.missing


def test_nan_of_the_model_stays_nan_without_a_reason():
    trace = traced("attnres-full")
    weights = trace.dataset["depth_weight"].values.copy()
    weights[3, 2, 1] = np.nan
    norms = trace.dataset["contribution_norm"].values.copy()
    norms[3, 2, 1] = np.nan
    broken = edited(trace, depth_weight=weights, contribution_norm=norms)
    for key in ("depth_entropy", "effective_sources", "effective_atoms", "depth_lookback"):
        found = grid(broken, key)
        assert np.argwhere(np.isnan(found.values[1:])).tolist() == [[3, 2]]
        assert not found.why(found.sites[4])


def test_one_token_and_one_block():
    cfg = replace(tiny_config("attnres-full"), n_layers=1)
    trace = t2lens.trace(t2lens.build(cfg, seed=0), [5])
    assert grid(trace, "sequence_lookback").values[1].tolist() == [0.0]
    assert grid(trace, "effective_sources").values[:, 0].tolist()[1:] == pytest.approx([1, 2, 3])


def test_an_unknown_quantity_names_the_nearest():
    with pytest.raises(KeyError, match="did you mean 'residual_norm'"):
        grid(traced("standard"), "residual_nrm")
    with pytest.raises(KeyError, match="there are residual_norm, write_norm"):
        quantity("zzz")


def test_every_quantity_is_described():
    for key, about in QUANTITIES.items():
        assert about.key == key
        assert about.label and about.meaning.endswith(".")


def test_signed_weights_are_not_said_to_be_ones() -> None:
    cases = {"muddformer": "signed, or of another sum", "standard": "every earlier write has weight 1"}
    for system, words in cases.items():
        made = t2lens.trace(tiny(system), [1, 2, 3])
        assert words in grid(made, "depth_entropy").absent


@pytest.mark.parametrize("system", ["standard", "ddl", "muddformer"])
def test_spread_and_reach_of_attention_by_hand(system: str):
    trace = traced(system, local=True)
    entropy, positions = grid(trace, "sequence_entropy"), grid(trace, "effective_positions")
    reach = grid(trace, "sequence_reach")
    for site, pattern in attention_of(trace).items():
        row = entropy.sites.index(site)
        for t in range(len(IDS)):
            each = [-sum(w * math.log(w) for w in head[t, : t + 1] if w > 0) for head in pattern]
            assert entropy.values[row, t] == pytest.approx(sum(each) / len(each), abs=1e-12)
            spread = sum(map(math.exp, each)) / len(each)
            assert positions.values[row, t] == pytest.approx(spread, abs=1e-12)
            back = [sum(w * (t - k) for k, w in enumerate(head[t, : t + 1])) for head in pattern]
            assert reach.values[row, t] == pytest.approx(max(back), abs=1e-12)
    assert entropy.why("1.mlp") == "reads its own position only"


def test_what_a_trace_follows_is_shown_or_said_to_be_missing():
    plain, model = traced("ddl"), tiny("ddl")
    for key in ("lens_probability", "lens_rank", "lens_kl", "logit_share"):
        assert "follow='next'" in grid(plain, key).absent
    assert "not edited" in grid(plain, "edit_effect").absent
    trace = t2lens.trace(model, IDS, follow="next", edits={"target": "atom", "operation": "zero", "site": "1.mlp"})
    data = trace.dataset
    for key, variable in (("lens_rank", "lens_rank"), ("lens_kl", "lens_kl"), ("edit_effect", "edit_effect")):
        assert np.array_equal(grid(trace, key).values[1:], data[variable].values, equal_nan=True)
    chance = grid(trace, "lens_probability")
    assert np.allclose(chance.values[1:], np.exp(data["lens_logprob"].values)) and not chance.why("out", len(IDS) - 1)
    share = grid(trace, "logit_share")
    assert share.quantity.scale == "diverging" and "the bias completes the sum" in share.why("out")
    whole = share.values[:-1].sum(axis=0) + data["logit_bias"].values
    assert np.allclose(whole, data["logit"].values, atol=1e-10)
    assert "Followed: the true next token; at the last position the likeliest." in share.quantity.meaning
    nowhere = {"target": "atom", "operation": "scale", "site": "embed", "value": 1e308}
    chance = grid(t2lens.trace(tiny("standard"), IDS, follow="next", edits=[nowhere] * 2), "lens_probability")
    assert chance.why("out", len(IDS) - 1) == "no token is followed at this position"
    for key in ("erased_energy", "written_energy"):
        found = grid(trace, key)
        assert np.array_equal(found.values[1:-1], data[key].values) and np.isnan(found.values[[0, -1]]).all()
    assert "along a direction" in grid(traced("standard"), "written_energy").absent


def test_behind_an_edited_stream_shares_of_the_logit_are_said_to_be_absent():
    edit = {"target": "stream", "operation": "scale", "site": "1.mlp", "value": 0.5}
    trace = t2lens.trace(tiny("standard"), IDS, follow=3, edits=edit)
    assert "no sum of writes" in grid(trace, "logit_share").absent and not grid(trace, "lens_kl").absent


def test_edited_attention_that_is_no_distribution_has_no_entropy():
    edit = {"target": "hook", "operation": "scale", "name": "blocks.1.attn.hook_pattern", "value": 0.5}
    found = grid(t2lens.trace(tiny("standard"), IDS, edits=edit), "sequence_entropy")
    assert "edited" in found.why("1.attn") and np.isfinite(found.values[found.sites.index("0.attn")]).all()

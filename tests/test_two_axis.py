"""The duality: shown on models, refused for systems that are not that operator."""

from __future__ import annotations

import pytest
import torch

import t2lens
from t2lens.config import residual_kinds
from t2lens.ordered_attention import ordered_attention
from t2lens.residual import DepthSWA
from t2lens.two_axis import _WHY_NOT
from tests.systems import random_tokens, tiny


@pytest.mark.parametrize("placement", ["extra", "replace"])
@pytest.mark.parametrize("window", [None, 1, 2, 5])
def test_depth_read_is_short_swa_on_the_transposed_stack(placement, window, capsys):
    model = tiny("depth-swa", 3, residual=DepthSWA(window=window, d_key=6, placement=placement), n_layers=5)
    result = t2lens.duality(model, random_tokens(3))
    print(result)
    assert "largest difference" in capsys.readouterr().out
    assert result.largest < 1e-12
    assert len(result.difference) == (6 if placement == "extra" else 11)


def test_transposing_the_state_tensor_swaps_the_axes():
    """One function, two axes: over positions of a layer, or over layers of a position, the same numbers."""
    states = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # [L, T, D]
    over_depth = ordered_attention(*(states.transpose(0, 1)[:, None],) * 3, window=2)
    for t in range(6):
        as_sequence = states[:, t][None, None]  # the trajectory of one token, now a sequence of four
        assert torch.equal(ordered_attention(as_sequence, as_sequence, as_sequence, window=2)[0, 0], over_depth[t, 0])


@pytest.mark.parametrize("system, why", [("standard", "weight 1"), ("attnres-full", "constant"), ("ddl", "edits one")])
def test_other_systems_are_refused_with_the_reason(system, why):
    with pytest.raises(ValueError, match=why):
        t2lens.duality(tiny(system), [0, 1, 2])


def test_every_other_system_has_its_reason():
    assert set(residual_kinds()) == {*_WHY_NOT, "depth-swa"}


def test_a_wrong_read_is_noticed():
    model = tiny("depth-swa", 4)
    tokens = random_tokens(4)
    record_read = model.residual.read

    def twisted(state, site, gates):
        return record_read(state, site, gates) * (1 + 1e-6)

    model.residual.read = twisted
    try:
        assert t2lens.duality(model, tokens).largest > 1e-9
    finally:
        del model.residual.read

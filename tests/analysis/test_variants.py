"""Variants of a pass as rows, intervals over sequences, rank correlation."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from t2lens.analysis import variants
from t2lens.analysis.inputs import read_batch
from t2lens.analysis.statistics import interval_of_mean, pearson, spearman
from t2lens.analysis.variants import EMBEDDING, Variant, effects_of, layer_of, run_variants
from tests.systems import random_tokens, tiny


def _scale(factor: float) -> Any:
    return lambda x, rows: x * factor


@pytest.mark.parametrize("budget", [1, 2**27])
def test_every_variant_meets_every_sequence_once_however_small_the_passes(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "_BUDGET", budget)
    model, tokens = tiny("attnres-full", seed=1), random_tokens(5)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[-1, -1] = False
    names = ["hook_embed", "blocks.0.hook_mlp_out", "blocks.2.hook_depth_attn_attn", "hook_read_final"]
    plans = [{name: 0.5} for name in names] + [{names[1]: 0.1, names[3]: 2.0}]
    made = [
        Variant(layer=min(layer_of(model, n) for n in plan), edits={n: _scale(f) for n, f in plan.items()})
        for plan in plans
    ]
    assert [v.layer for v in made] == [EMBEDDING, 0, 2, 3, 0]
    seen = {}
    for which, rows, logits in run_variants(model, model.record(tokens, mask), made):
        for i, row, out in zip(which.tolist(), rows.tolist(), logits, strict=True):
            assert (i, row) not in seen
            seen[i, row] = out
    assert len(seen) == len(plans) * len(tokens)
    for i, plan in enumerate(plans):
        hooks = [(name, lambda x, hook, f=factor: x * f) for name, factor in plan.items()]
        with torch.no_grad():
            alone = model.run_with_hooks(tokens, mask, fwd_hooks=hooks)
        for row in range(len(tokens)):
            assert (seen[i, row] - alone[row])[mask[row]].abs().max() < 1e-10


def test_effects_are_the_same_where_the_plain_prediction_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny("standard", seed=2), random_tokens(8)
    batch, record = read_batch(model, tokens), model.record(tokens)
    made = [Variant(layer=1, edits={"blocks.1.hook_mlp_out": _scale(0.0)})]
    kept = effects_of(model, record, batch, made)
    monkeypatch.setattr(variants, "_KEPT", 0)
    again = effects_of(model, record, batch, made)
    for name in ("loss", "kl", "probability", "hits", "base_loss"):
        assert torch.equal(getattr(kept, name), getattr(again, name))
    logits = model(tokens).detach()
    assert (kept.base_loss - batch.losses(logits).sum(dim=-1)).abs().max() < 1e-10


def test_intervals_are_the_quantiles_of_resampled_means() -> None:
    dice = np.random.default_rng(random.randrange(1000))
    sums, counts = dice.normal(size=(3, 6)), dice.integers(1, 9, size=6)
    low, high = interval_of_mean(sums, counts, seed=3, draws=200, level=0.8)
    drawn = np.random.default_rng(3).integers(6, size=(200, 6))
    for k in range(3):
        means = np.array([float(sum(sums[k, b] for b in row)) / float(sum(counts[b] for b in row)) for row in drawn])
        assert low[k] == pytest.approx(np.quantile(means, 0.1))
        assert high[k] == pytest.approx(np.quantile(means, 0.9))
    again, other = interval_of_mean(sums, counts, seed=3), interval_of_mean(sums, counts, seed=4)
    assert np.array_equal(again[0], interval_of_mean(sums, counts, seed=3)[0])
    assert not np.array_equal(again[0], other[0])


def test_sequences_without_a_token_that_counts_are_not_drawn() -> None:
    low, high = interval_of_mean([[1.0, 0.0, 3.0]], [1, 0, 1])
    assert (low[0], high[0]) == (1.0, 3.0)
    assert np.isnan(interval_of_mean([[1.0, 0.0]], [1, 0])).all()


def test_ranks_share_their_places_and_what_does_not_exist_is_left_out() -> None:
    assert spearman([1, 2, 2, 5, np.nan], [2, 4, 4, 9, 0]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert np.isnan(spearman([1, 2], [1, 2]))
    assert np.isnan(pearson([1, 1, 1], [1, 2, 3]))
    x, y = np.random.default_rng(0).normal(size=(2, 20))
    assert pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])

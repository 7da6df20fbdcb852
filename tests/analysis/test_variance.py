"""Sums of squares by site, token, position and rest: known answers, least squares, and expectations under noise."""

import numpy as np
import pytest

from t2lens.analysis.variance import Groups, explain

DICE = np.random.default_rng(0)


def crossed(n_tokens=5, n_positions=6, n_each=4):
    """Every token at every position, n_each times."""
    token, position = (a.ravel() for a in np.meshgrid(range(n_tokens), range(n_positions), indexing="ij"))
    return np.tile(token, n_each), np.tile(position, n_each)


def dummies(labels):
    return (labels[:, None] == np.unique(labels)[None]).astype(float)


def residual(y, design):
    return float(((y - design @ np.linalg.lstsq(design, y, rcond=None)[0]) ** 2).sum())


def test_what_is_constant_is_the_site_alone():
    token, position = crossed()
    weights = np.tile([0.7, 0.2, 0.1], (len(token), 1))
    found = explain(weights, token, position)
    assert found.shares().tolist() == [1, 0, 0, 0]
    assert found.raw[:, 1:].max() == 0  # exactly, although 0.1 has no exact mean
    assert found.total[0] == pytest.approx(len(token) * (0.7 - 1 / 3) ** 2)
    assert np.isnan(explain(np.full((8, 2), 0.5), np.arange(8), np.arange(8)).shares()).all()  # uniform: nothing


def test_what_the_token_decides_is_the_token():
    token, position = crossed()
    weights = np.stack([token == 1, token == 2, (token != 1) & (token != 2)], axis=1).astype(float)
    site, of_token, of_position, rest = explain(weights, token, position).shares()
    assert (of_position, rest) == (pytest.approx(0, abs=1e-12), pytest.approx(0, abs=1e-12))
    mean = np.array([0.2, 0.2, 0.6])
    assert site == pytest.approx(((mean - 1 / 3) ** 2).sum() / ((weights - 1 / 3) ** 2).mean(axis=0).sum())
    assert site + of_token == pytest.approx(1)


def test_what_the_position_decides_is_the_position():
    token, position = crossed()
    weights = (position[:, None] ** np.array([1.0, 2.0])).astype(float)
    site, of_token, of_position, rest = explain(weights, token, position).shares()
    assert (of_token, rest) == (pytest.approx(0, abs=1e-12), pytest.approx(0, abs=1e-12))
    assert site + of_position == pytest.approx(1)
    assert of_position > 0.3


def test_noise_is_the_rest_however_small_the_groups():
    token, position = np.arange(600) // 2, np.arange(600) % 20  # pairs: half of the freedom is the tokens'
    found = explain(DICE.normal(size=(600, 200)), token, position)
    site, of_token, of_position, rest = found.shares(adjusted=False)
    assert of_token > 0.45  # what an unadjusted share would claim
    site, of_token, of_position, rest = found.shares()
    assert abs(of_token) < 0.02 and abs(of_position) < 0.02 and abs(site) < 0.02
    assert rest == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sums_are_those_of_least_squares_on_any_design(seed):
    dice = np.random.default_rng(seed)
    n = int(dice.integers(30, 90))
    token, position = dice.geometric(0.2, n) * 3, dice.integers(0, 9, n)
    y = dice.normal(size=(n, 3)) + (token % 2)[:, None] + 0.3 * position[:, None] * np.array([0, 1, -1])
    found = explain(y, token, position)
    tokens, both = dummies(token), np.concatenate([dummies(token), dummies(position)], axis=1)
    r = y.mean()
    for j in range(3):
        by_token, by_both = residual(y[:, j], tokens), residual(y[:, j], both)
        wanted = [
            n * (y[:, j].mean() - r) ** 2,
            ((y[:, j] - y[:, j].mean()) ** 2).sum() - by_token,
            by_token - by_both,
            by_both,
        ]
        np.testing.assert_allclose(found.raw[j], wanted, rtol=1e-9, atol=1e-9)
        assert found.total[j] == pytest.approx(((y[:, j] - r) ** 2).sum())
    np.testing.assert_allclose(found.adjusted.sum(axis=1), found.total)
    ranks = [1, np.linalg.matrix_rank(tokens) - 1, np.linalg.matrix_rank(both) - np.linalg.matrix_rank(tokens)]
    np.testing.assert_allclose(found.freedom, [*ranks, n - sum(ranks)], atol=1e-9)


def test_rows_drawn_twice_have_the_sums_of_two_rows_and_the_noise_of_one():
    dice = np.random.default_rng(4)
    token, position = np.arange(60) // 3, np.arange(60) % 12
    times = dice.integers(0, 4, 60)
    y = dice.normal(size=(60, 4000))
    drawn = np.repeat(np.arange(60), times)
    found = Groups(token, position, times).explain(y, 0.0)
    twice = Groups(token[drawn], position[drawn]).explain(y[drawn], 0.0)
    np.testing.assert_allclose(found.raw, twice.raw, atol=1e-9)
    # expected sums under noise of variance 1, which 4000 columns estimate
    np.testing.assert_allclose(found.raw.mean(axis=0), found.freedom, rtol=0.1)
    np.testing.assert_allclose(found.adjusted.mean(axis=0)[:3], 0, atol=0.05 * found.total.mean())
    assert found.freedom.sum() == pytest.approx(times.sum())
    assert twice.adjusted.mean(axis=0)[1] > 0.1 * found.total.mean()  # what counting them as two would claim


def test_where_nothing_is_left_to_estimate_noise_from_there_is_no_adjusted_share():
    found = explain(DICE.normal(size=(5, 2)), np.arange(5), np.arange(5))
    assert np.isnan(found.shares()).all()
    assert found.shares(adjusted=False).sum() == pytest.approx(1)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"the shapes are \[4, 2\], \[3\] and \[4\]"):
        explain(np.zeros((4, 2)), np.zeros(3), np.zeros(4))
    with pytest.raises(ValueError, match="n at least 1"):
        explain(np.zeros((0, 2)), np.zeros(0), np.zeros(0))

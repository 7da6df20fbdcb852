"""The bigram model against counting by hand."""

import math

import numpy as np
import pytest

from t2lens.zoo.baseline import DISCOUNTS, Bigram


def test_probabilities_sum_to_one_for_every_context() -> None:
    tokens = np.random.default_rng(0).integers(0, 20, 500).astype(np.uint16) % 17  # ids 17 to 19 never occur
    model = Bigram.fit(tokens, 20)
    for previous in range(20):
        total = np.exp(model.log_prob(np.full(20, previous), np.arange(20))).sum()
        assert total == pytest.approx(1, abs=1e-12)


def test_probability_by_hand() -> None:
    tokens = np.array([0, 1, 0, 1, 0, 2] * 10, dtype=np.uint16)
    model = Bigram.fit(tokens, 4)
    d = model.discount
    assert d in DISCOUNTS
    # after 0 (30 times): 1 twenty times, 2 ten times. Before: 0 follows {1, 2}, 1 follows {0}, 2 follows {0}; plus one
    # each, 3 + 2 + 2 + 1 = 8.
    q = {0: 3 / 8, 1: 2 / 8, 2: 2 / 8, 3: 1 / 8}
    expected = {0: 0 + 2 * d * q[0], 1: 20 - d + 2 * d * q[1], 2: 10 - d + 2 * d * q[2], 3: 2 * d * q[3]}
    for token, mass in expected.items():
        assert model.log_prob(np.array([0]), np.array([token]))[0] == pytest.approx(math.log(mass / 30), abs=1e-12)
    # 3 was never seen: the smoothed unigram, (count + 1) / (60 + 4)
    assert model.log_prob(np.array([3]), np.array([0]))[0] == pytest.approx(math.log(31 / 64), abs=1e-12)


def test_loss_is_over_the_targets_of_the_models() -> None:
    rng = np.random.default_rng(1)
    model = Bigram.fit(rng.integers(0, 9, 400), 10)
    rows = np.concatenate([np.zeros((3, 1), np.int64), rng.integers(0, 9, (3, 5))], axis=1)
    by_hand = [math.log(model.unigram[row[1]]) for row in rows]
    by_hand += [model.log_prob(row[i - 1 : i], row[i : i + 1])[0] for row in rows for i in range(2, 6)]
    assert model.loss(rows) == pytest.approx(-sum(by_hand) / 15, abs=1e-12)


def test_it_finds_what_the_previous_token_tells() -> None:
    rng = np.random.default_rng(2)
    chain = [0]
    for _ in range(4000):  # with probability 0.9 the successor, else anything
        chain.append((chain[-1] + 1) % 8 if rng.random() < 0.9 else int(rng.integers(8)))
    tokens = np.array(chain)
    model = Bigram.fit(tokens[:3000], 8)
    rows = np.concatenate([np.zeros((1, 1), np.int64), tokens[None, 3000:]], axis=1)
    stay = 0.9 + 0.1 / 8
    entropy = -(stay * math.log(stay) + 7 * (0.1 / 8) * math.log(0.1 / 8))
    assert abs(model.loss(rows) - entropy) < 0.1 < math.log(8) - model.loss(rows)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 40 tokens"):
        Bigram.fit(np.zeros(39, np.uint16), 10)

"""Bigram model: what predicting from the previous token alone achieves.

    p(w | v) = (max(c(v, w) - d, 0) + d * n(v) * q(w)) / c(v),      q(w) = m(w) / sum m

c: pair counts, n(v): how many different tokens followed v, m(w): how many different tokens came before w, plus one
(interpolated Kneser-Ney, the strongest common bigram; Kneser and Ney 1995). A context that was never seen,
and the first token of a window, are predicted with the smoothed unigram instead. The discount d is the one
that predicts the last 5% of the training tokens best from the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DISCOUNTS = tuple(n / 20 for n in range(2, 20))


@dataclass(frozen=True, kw_only=True)
class Bigram:
    """Counts of a token array, sparse: sorted pair codes v * n_vocab + w and how often each occurs."""

    n_vocab: int
    discount: float
    pairs: np.ndarray  # [pair] int64, sorted
    counts: np.ndarray  # [pair] int64
    total: np.ndarray  # [vocab] c(v)
    distinct: np.ndarray  # [vocab] n(v)
    before: np.ndarray  # [vocab] q(w)
    unigram: np.ndarray  # [vocab]

    @classmethod
    def fit(cls, tokens: np.ndarray, n_vocab: int) -> Bigram:
        """Count tokens [token] and choose the discount. Errors: ValueError for fewer than 40 tokens."""
        if len(tokens) < 40:
            raise ValueError(f"A bigram model needs at least 40 tokens, but the text has {len(tokens)}.")
        cut = int(len(tokens) * 0.95)
        head = cls._count(tokens[:cut], n_vocab, DISCOUNTS[0])
        tail = tokens[cut:]
        best = min(DISCOUNTS, key=lambda d: -head.with_discount(d).log_prob(tail[:-1], tail[1:]).mean())
        return cls._count(tokens, n_vocab, best)

    @classmethod
    def _count(cls, tokens: np.ndarray, n_vocab: int, discount: float) -> Bigram:
        codes = tokens[:-1].astype(np.int64) * n_vocab + tokens[1:]
        pairs, counts = np.unique(codes, return_counts=True)
        before = 1.0 + np.bincount(pairs % n_vocab, minlength=n_vocab)
        unigram = 1.0 + np.bincount(tokens, minlength=n_vocab)
        return cls(
            n_vocab=n_vocab,
            discount=discount,
            pairs=pairs,
            counts=counts,
            total=np.bincount(tokens[:-1], minlength=n_vocab),
            distinct=np.bincount(pairs // n_vocab, minlength=n_vocab),
            before=before / before.sum(),
            unigram=unigram / unigram.sum(),
        )

    def with_discount(self, discount: float) -> Bigram:
        return Bigram(**{**vars(self), "discount": discount})

    def log_prob(self, previous: np.ndarray, token: np.ndarray) -> np.ndarray:
        """ln p(token | previous), both [n] -> [n] float64."""
        previous, token = previous.astype(np.int64), token.astype(np.int64)
        codes = previous * self.n_vocab + token
        place = np.searchsorted(self.pairs, codes).clip(max=len(self.pairs) - 1)
        count = np.where(self.pairs[place] == codes, self.counts[place], 0)
        seen = np.maximum(self.total[previous], 1)
        kept = np.maximum(count - self.discount, 0) + self.discount * self.distinct[previous] * self.before[token]
        return np.log(np.where(self.total[previous] > 0, kept / seen, self.unigram[token]))

    def loss(self, rows: np.ndarray) -> float:
        """Mean nats per token over windows [row, pos] that begin with BOS: exactly the targets of the models."""
        first = np.log(self.unigram[rows[:, 1]])
        rest = self.log_prob(rows[:, 1:-1].ravel(), rows[:, 2:].ravel())
        return float(-(first.sum() + rest.sum()) / (len(first) + len(rest)))

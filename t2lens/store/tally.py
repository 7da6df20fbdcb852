"""`Tally`: what `statistics` counts, over the tokens that one worker saw; tallies of several workers merge into one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from t2lens.analysis.variance import Design, Explained
from t2lens.store.moments import Histogram, Moments
from t2lens.store.wants import POSITIONS

__all__ = ["MOST", "Part", "Tally", "add_pass", "parts_of"]

MOST = 4096  # numbers per token of one tensor


@dataclass(frozen=True)
class Part:
    """A tensor as columns: its key, what the plan says of it, and the names of its entries per token."""

    key: str
    about: Mapping[str, Any]
    names: tuple[str, ...]

    @property
    def family(self) -> str:
        """ "weight": depth weights of a read; "norm": length of a read; "other": anything else."""
        stem = self.key.split(".")[-1]
        of_read = self.about.get("read") is not None
        if of_read and stem.startswith("hook_depth_attn") and list(self.about["axes"]) == ["pos", "source"]:
            return "weight"
        return "norm" if of_read and stem.startswith("hook_read_") and stem.endswith("|norm") else "other"

    @classmethod
    def of(cls, key: str, about: Mapping[str, Any], axis: int) -> Part:
        """axis: of positions, counted from the sequence (which is 0). ValueError for more entries than are sensible."""
        words = list(zip(about["axes"], about["shape"], strict=True))
        del words[axis - 1]
        n = int(np.prod([n for _, n in words], dtype=np.int64))
        if n > MOST:
            raise ValueError(
                f"{key} has {n} numbers per token, and statistics take at most {MOST}; use a reducer (norm, mean:AXIS)."
            )
        labels = about.get("labels", {})
        own = [labels[word] if len(labels.get(word, ())) == size else range(size) for word, size in words]
        plain = all(size == 1 for _, size in words)
        names = ["" if plain else f"[{','.join(map(str, entry))}]" for entry in product(*own)]
        return cls(key, about, tuple(names))


def parts_of(tensors: Mapping[str, Mapping[str, Any]], n_pos: int) -> list[tuple[Part, int]]:
    """Of tensors as a plan describes them, with n_pos positions: each part, and the axis of its positions (the sequence
    is axis 0). ValueError for a tensor without a row of fixed size for every position."""
    found = []
    for key, about in tensors.items():
        words = list(about["axes"])
        axis = next((i for i, word in enumerate(words, 1) if word in POSITIONS), 0)
        if not axis or "key_pos" in words or "pos" in about.get("labels", {}) or about["shape"][axis - 1] != n_pos:
            raise ValueError(
                f"{key} ({', '.join(words)}) has no row of fixed size for every token; use reducers (mean:AXIS, top:K) "
                "that leave one."
            )
        found.append((Part.of(key, about, axis), axis))
    return found


class Tally:
    """Running statistics of columns: over all tokens, by position and, unless that is too much, by token.

    Memory does not grow with the tokens seen: some 16 bytes per column and position, and per column and entry of the
    vocabulary (by_token), and 4 bytes per position and entry of the vocabulary.
    """

    def __init__(
        self, parts: tuple[Part, ...], n_pos: int, n_vocab: int, *, model: str = "", by_token: bool = True
    ) -> None:
        self.parts, self.n_pos, self.model = parts, n_pos, model
        ends = np.cumsum([0, *(len(part.names) for part in parts)])
        self.columns = {part.key: slice(a, b) for part, a, b in zip(parts, ends, ends[1:], strict=False)}
        n = int(ends[-1])
        self.total, self.by_pos = Moments(1, n), Moments(n_pos, n)
        self.by_token = Moments(n_vocab, n) if by_token else None
        self.count = np.zeros((n_vocab, n_pos), dtype=np.int32) if by_token else None
        self.low, self.high = np.full(n, np.inf), np.full(n, -np.inf)
        self.histogram = Histogram(n)
        self.n_sequences = 0

    @property
    def n(self) -> int:
        """Tokens seen."""
        return int(self.total.n[0])

    def add(self, rows: Mapping[str, Tensor], tokens: Tensor, positions: Tensor) -> None:
        """Rows of tokens: key -> [N, ...], their ids [N] and positions [N]. ValueError where a number is not finite."""
        n = len(tokens)
        if not n:
            return
        flat = [rows[part.key].double().reshape(n, -1).cpu().numpy() for part in self.parts]
        for part, values in zip(self.parts, flat, strict=True):
            if not np.isfinite(values).all():
                wrong = int((~np.isfinite(values)).any(axis=1).sum())
                raise ValueError(f"{part.key} is not finite at {wrong} of {n} tokens, so it has no statistics.")
        values, ids, places = np.concatenate(flat, axis=1), tokens.cpu().numpy(), positions.cpu().numpy()
        self.total.add(values)
        self.by_pos.add(values, places)
        self.low = np.minimum(self.low, values.min(axis=0))
        self.high = np.maximum(self.high, values.max(axis=0))
        self.histogram.add(values)
        if self.by_token is not None and self.count is not None:
            self.by_token.add(values, ids)
            np.add.at(self.count, (ids, places), 1)

    def merge(self, other: Tally) -> Tally:
        """Take in what another worker saw of the same model; returns self. ValueError for tallies of other columns."""
        if (self.parts, self.n_pos, self.model) != (other.parts, other.n_pos, other.model):
            raise ValueError("These tallies are of other models, tensors or lengths; they cannot be merged.")
        if (self.by_token is None) != (other.by_token is None):
            raise ValueError("One of these tallies counts by token and the other does not; they cannot be merged.")
        self.total.merge(other.total)
        self.by_pos.merge(other.by_pos)
        self.histogram.merge(other.histogram)
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        self.n_sequences += other.n_sequences
        if self.by_token is not None and other.by_token is not None:
            self.by_token.merge(other.by_token)
        if self.count is not None and other.count is not None:
            self.count += other.count
        return self

    def quantiles(self, at: tuple[float, ...]) -> np.ndarray:
        """[C, q], as near as `Histogram` says."""
        found = np.stack([self.histogram.quantile(q) for q in at], axis=1)
        return np.clip(found, self.low[:, None], self.high[:, None])

    def explained(self) -> dict[str, Explained] | None:
        """Of each tensor, what its columns follow (`t2lens.analysis.variance`), around the mean of its columns; None
        where nothing was counted by token."""
        if self.by_token is None or self.count is None:
            return None
        seen, there = np.flatnonzero(self.by_token.n), np.flatnonzero(self.by_pos.n)
        design = Design(self.count[np.ix_(seen, there)])
        mean = self.total.mean[0]
        tokens, places = self.by_token.sums_around(mean)[seen], self.by_pos.sums_around(mean)[there]
        return {
            key: design.of_sums(mean[own], self.total.m2[0, own], tokens[:, own], places[:, own])
            for key, own in self.columns.items()
        }


def add_pass(seen: Tally, taken: Mapping[str, Tensor], axes: Mapping[str, int], tokens: Tensor, valid: Tensor) -> None:
    """Count sequences: the tensors of each key [B, ...], with their axis of positions, of tokens [B, T]; `valid` [B, T]
    is False where there is padding, which is not counted and no position."""
    rows = {key: taken[key].movedim(axis, 1)[valid] for key, axis in axes.items()}
    seen.add(rows, tokens[valid], (valid.cumsum(dim=1) - 1)[valid])
    seen.n_sequences += int(valid.any(dim=1).sum())

"""The weights of every read at every real token of many texts, as they stand and with their tokens shuffled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from t2lens.analysis.inputs import Batch, check_finite
from t2lens.analysis.progress import progress
from t2lens.mixing import mixing_by_read
from t2lens.tracing import depth_weights

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["Over", "Rows", "Shuffle", "Weights", "collect", "shuffled"]

Over = Literal["source", "mixing"]
_AT_ONCE = {"source": 2048, "mixing": 512}  # tokens per pass


@dataclass(frozen=True)
class Weights:
    """Of every read over n tokens: its weights [n, S] and the names of its columns."""

    reads: dict[str, np.ndarray]
    columns: dict[str, tuple[str, ...]]


class Rows:
    """The real tokens of a batch, one row each, sequence by sequence: their ids, positions and sequence."""

    def __init__(self, batch: Batch) -> None:
        valid = batch.valid.cpu()
        self.token = batch.tokens.cpu()[valid].numpy()
        self.position = (valid.cumsum(dim=1) - 1)[valid].numpy()
        self.sequence = torch.arange(len(valid))[:, None].expand(valid.shape)[valid].numpy()
        self.n_sequences = len(valid)
        self.counts = np.bincount(self.sequence, minlength=len(valid))
        starts = np.cumsum([0, *self.counts[:-1]])
        self.of = [np.arange(start, start + n) for start, n in zip(starts, self.counts, strict=True)]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """[..., B]: values [n, ...] summed over the tokens of each sequence."""
        return np.stack([values[rows].sum(axis=0) for rows in self.of], axis=-1)


@torch.no_grad()
def collect(model: Transformer, tokens: Tensor, batch: Batch, over: Over) -> Weights:
    """The weights of every read that has at least two, over all real tokens, a few sequences at a time."""
    size = max(1, _AT_ONCE[over] // tokens.shape[1])
    found: dict[str, list[np.ndarray]] = {}
    residual = model.residual
    starts = range(0, len(tokens), size)
    for start in progress(starts, "Reading texts", total=len(starts)):
        ids, valid = tokens[start : start + size], batch.valid[start : start + size]
        part = replace(batch, tokens=ids, mask=None if batch.mask is None else valid)
        record = model.record(ids, part.mask)
        for name, weights in _by_read(model, record, over):
            check_finite(weights, part, f"The weights of {name}")
            found.setdefault(name, []).append(weights[valid].double().cpu().numpy())
    columns = {}
    for read in model.reads:
        names = [s.name for s in residual.sources(read.site)]
        columns[read.name] = tuple(names if over == "source" else model.atoms[: read.site.seen + 1])
    reads = {name: np.concatenate(parts) for name, parts in found.items() if len(columns[name]) > 1}
    return Weights(reads, {name: columns[name] for name in reads})


def _by_read(model: Transformer, record: Any, over: Over) -> Iterator[tuple[str, Tensor]]:
    """(read, weights [B, T, S])."""
    if over == "source":
        yield from depth_weights(model, record).items()
        return
    for read, row in mixing_by_read(model.residual, record):
        yield read.name, row[: read.site.seen + 1].movedim(0, -1)


@dataclass(frozen=True)
class Shuffle:
    weights: Weights
    home: np.ndarray  # [n]: the row that each row's token came from


def shuffled(model: Transformer, batch: Batch, rows: Rows, over: Over, n: int, seed: int) -> list[Shuffle]:
    """Every sequence in another order, its first token in place."""
    dice, out = np.random.default_rng(seed), []
    valid = batch.valid.cpu()
    for _ in range(n):
        home = np.concatenate([np.concatenate([own[:1], dice.permutation(own[1:])]) for own in rows.of])
        tokens = batch.tokens.cpu().clone()
        tokens[valid] = torch.as_tensor(rows.token[home])
        out.append(Shuffle(collect(model, tokens.to(batch.tokens.device), batch, over), home))
    return out

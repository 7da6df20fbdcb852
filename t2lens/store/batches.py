"""Shuffled batches of a store for training: every row once, the same order for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from t2lens.store.wants import POSITIONS

if TYPE_CHECKING:
    from t2lens.store.reader import Store, Stored

__all__ = ["Batches", "row_axis"]

_BUFFER = 256 * 2**20  # bytes that are mixed by default
_PIECES = 8  # that a full buffer holds at least
_LABELS = ("token", "sequence", "pos", "document")


class Batches(IterableDataset[dict[str, Tensor]]):
    """Batches of a store: dictionaries of the tensors asked for, with what the rows are.

    A row is a token, or a sequence. Short pieces of shards are read in random order into a buffer; a full buffer is
    shuffled, half of it is given out, and the rest stays to be mixed with what comes. So every row is given once per
    pass, whatever the batch size; which one when depends on seed, epoch, mixing, and the number of workers.

    It is a torch `IterableDataset`: `DataLoader(batches, batch_size=None, num_workers=4)` divides the pieces among its
    workers, no row twice. To iterate without a DataLoader, use it as it is.

    Args:
        keys: of the store. batch_size: rows per batch.
        rows: "tokens": every tensor is [batch, ...], its axis of positions taken apart, and beside the keys there are
            "token" (id), "sequence", "pos" and "document" [batch]. "sequences": tensors as they are stored, [batch,
            pos, ...], and token and document [batch, pos], sequence [batch].
        sequences: which (numbers or a slice; default: all that are there). documents: only tokens of these documents
            (numbers, or a mask of all), as an honest split needs it; rows must be tokens.
        seed: None: in order, not mixed. epoch: another order of the same seed; `set_epoch` changes it.
        mixing: rows in the buffer; default: as many as take 256 MB. Memory is up to twice that.
        dtype: of floating point tensors in the batches; default: the stored one.
        drop_last: leave out the last batch where it is not full (one per worker).
        rank, world: this process among several that share the rows (data-parallel training).

    Raises:
        KeyError: no such key. ValueError: no row at all, a tensor without an axis of all positions where rows are
            tokens, counts below 1, or a shard that is not there or damaged.
    """

    def __init__(
        self,
        store: Store,
        keys: list[str],
        batch_size: int,
        *,
        rows: Literal["tokens", "sequences"] = "tokens",
        sequences: Any = None,
        documents: Any = None,
        seed: int | None = 0,
        epoch: int = 0,
        mixing: int | None = None,
        dtype: torch.dtype | None = None,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size < 1 or (mixing is not None and mixing < 1):
            raise ValueError("batch_size and mixing must be at least 1.")
        if rows not in ("tokens", "sequences"):
            raise ValueError(f"rows must be tokens or sequences, not {rows!r}.")
        if not 0 <= rank < world:
            raise ValueError(f"rank must lie in 0..{world - 1}, not {rank}.")
        if documents is not None and rows != "tokens":
            raise ValueError("documents choose tokens, as a sequence may hold parts of several: rows must be tokens.")
        self.store, self.keys, self.batch_size, self.rows = store, keys, batch_size, rows
        self.seed, self.epoch, self.dtype, self.drop_last = seed, epoch, dtype, drop_last
        self.rank, self.world = rank, world
        per_row = 8 * len(_LABELS)
        for key in keys:
            size = int(np.prod(store[key].shape[1:], dtype=np.int64)) * (dtype or store[key].dtype).itemsize
            per_row += size // (store.plan.n_pos if self._axis(store[key]) else 1)
        self.mixing = max(mixing or _BUFFER // per_row, 1)
        self._sequences, self._documents = self._chosen(sequences, documents)

    def set_epoch(self, epoch: int) -> None:
        """Another order; with a DataLoader before its iterator is made."""
        self.epoch = epoch

    @property
    def n_rows(self) -> int:
        """Of all workers and processes together."""
        n_pos = self.store.plan.n_pos
        if self._documents is None:
            return len(self._sequences) * (n_pos if self.rows == "tokens" else 1)
        there = self.store.document_of(self._sequences[:, None], np.arange(n_pos))
        return int(self._documents[there].sum())

    def _axis(self, stored: Stored) -> int:
        """Where rows are tokens, the axis of all positions, which each row is one of; 0 where they are sequences."""
        axis = row_axis(stored, self.store.plan.n_pos)
        if axis or self.rows == "sequences":
            return axis if self.rows == "tokens" else 0
        raise ValueError(
            f"{stored.key} has no axis of all positions ({', '.join(stored.axes) or 'no axis'}), so its rows cannot be "
            'tokens; use rows="sequences".'
        )

    def _chosen(self, sequences: Any, documents: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """(sequences to read, mask of documents or None)."""
        store = self.store
        there = store.sequences
        if sequences is not None:
            every = np.arange(store.plan.n_sequences)
            there = every[_index(sequences)]
            if len(np.unique(there)) < len(there):
                raise ValueError("sequences names one twice; every row is given once.")
            for shard_row in there:
                store.shard_of(int(shard_row))
        mask = None
        if documents is not None:
            mask = np.zeros(len(store.documents), bool)
            mask[_index(documents)] = True
            holds = mask[store.document_of(there[:, None], np.arange(store.plan.n_pos))].any(axis=1)
            there = there[holds]
        if not len(there):
            raise ValueError("No row is left to make batches of.")
        return np.sort(there), mask

    # --- one pass
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        share, shares = self.rank * workers + worker, self.world * workers
        pieces, order = self._pieces(shares), None
        if self.seed is not None:
            np.random.default_rng([self.seed, self.epoch]).shuffle(pieces)
            order = np.random.default_rng([self.seed, self.epoch, share, shares])
        held: list[dict[str, Tensor]] = []
        n = 0
        for piece in pieces[share::shares]:
            held.append(self._load(piece))
            n += len(held[-1]["sequence"])
            if n >= self.mixing + self.batch_size:
                give = max(1, (n - self.mixing // 2) // self.batch_size) * self.batch_size
                rest = yield from self._give(held, order, give)
                held, n = [rest], n - give
        if n:
            yield from self._give(held, order, n)

    def _give(
        self, held: list[dict[str, Tensor]], order: np.random.Generator | None, give: int
    ) -> Iterator[dict[str, Tensor]]:
        """Batches of the first `give` rows of the shuffled buffer; returns the rest."""
        pool = {name: torch.cat([_plain(part[name]) for part in held]) for name in held[0]}
        dtypes = {name: held[0][name].dtype for name in pool}
        held.clear()
        n = len(pool["sequence"])
        places = torch.arange(n) if order is None else torch.from_numpy(order.permutation(n))
        for start in range(0, give, self.batch_size):
            rows = places[start : min(start + self.batch_size, give)]
            if len(rows) == self.batch_size or not self.drop_last:
                yield {name: x[rows].view(dtypes[name]) for name, x in pool.items()}
        return {name: x[places[give:]].view(dtypes[name]) for name, x in pool.items()}

    def _pieces(self, shares: int) -> list[np.ndarray]:
        """Sequences of one shard each, a part of the buffer at a time."""
        rows, per_shard = self._sequences, self.store.plan.sequences_per_shard
        size = self.mixing // (_PIECES * (self.store.plan.n_pos if self.rows == "tokens" else 1))
        size = max(1, min(size, len(rows) // (_PIECES * shares)))
        shards = np.split(rows, np.flatnonzero(np.diff(rows // per_shard)) + 1)
        return [own[start : start + size] for own in shards for start in range(0, len(own), size)]

    def _load(self, piece: np.ndarray) -> dict[str, Tensor]:
        store, n_pos = self.store, self.store.plan.n_pos
        rows = piece.tolist()
        out = {key: self._cast(store[key][rows]) for key in self.keys}
        labels = {
            "token": store["tokens"][rows].long(),
            "sequence": torch.from_numpy(piece.astype(np.int64)),
            "document": torch.from_numpy(store.document_of(piece[:, None], np.arange(n_pos))),
        }
        if self.rows == "sequences":
            return out | labels
        labels["sequence"] = labels["sequence"][:, None].expand(-1, n_pos)
        labels["pos"] = torch.arange(n_pos).expand(len(rows), n_pos)
        out = {key: x.movedim(self._axis(store[key]), 1) for key, x in out.items()} | labels
        flat = {name: x.reshape(len(rows) * n_pos, *x.shape[2:]) for name, x in out.items()}
        if self._documents is None:
            return flat
        kept = torch.from_numpy(self._documents[flat["document"].numpy()])
        return {name: _plain(x)[kept].view(x.dtype) for name, x in flat.items()}

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if self.dtype is not None and x.is_floating_point() else x


def _index(which: Any) -> Any:
    """What numpy takes as an index: an empty list too."""
    if isinstance(which, slice):
        return which
    which = np.asarray(which)
    return which if which.size else which.astype(np.int64)


def row_axis(stored: Stored, n_pos: int) -> int:
    """The axis of all positions, 0 where there is none."""
    axes = enumerate(zip(stored.axes, stored.shape[1:], strict=True), start=1)
    return next((i for i, (word, n) in axes if word in POSITIONS and n == n_pos), 0)


def _plain(x: Tensor) -> Tensor:
    """Eight-bit floats as bytes, which every operation of torch takes."""
    return x.view(torch.uint8) if x.itemsize == 1 and x.is_floating_point() else x

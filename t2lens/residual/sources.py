"""A stack of sources, each stored once, that reads mix with per-token weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor

__all__ = ["Sources"]


class Sources:
    """Append-only stack of [..., B, T, D] tensors.

    Without gradients the sources lie in one preallocated block and a read is one batched product over it; with
    gradients they stay the tensors they are (a preallocated block would be written to in place under autograd) and a
    read adds them up one by one, saving references and no copies. Either way memory grows linearly with their number.

    Where many rows go on from one sequence (`take`), what was there before is kept once for all of them.
    """

    def __init__(self, capacity: int, first: Tensor) -> None:
        self._items: list[Tensor] = []
        self._shared: Tensor | None = None  # [S, 1, T, D], the first sources where all rows have the same
        self._block = None if torch.is_grad_enabled() else first.new_empty(capacity, *first.shape)
        self.append(first)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, i: int) -> Tensor:
        return self._items[i]

    @property
    def n_shared(self) -> int:
        return 0 if self._shared is None else len(self._shared)

    def append(self, x: Tensor) -> None:
        if self._block is not None:
            place = self._block[len(self._items) - self.n_shared]
            x = place.copy_(x)
        self._items.append(x)

    def _own(self, start: int = 0) -> Tensor:
        """[S, ..., B, T, D] in the block: the sources from `start` on, but for the shared ones."""
        assert self._block is not None
        return self._block[max(0, start - self.n_shared) : len(self) - self.n_shared]

    def dot(self, direction: Tensor, start: int = 0) -> Tensor:
        """[..., B, T, S]: every source from `start` on against one direction [D]."""
        if self._block is None:
            return torch.stack([x @ direction for x in self._items[start:]], dim=-1)
        own = (self._own(start) @ direction).movedim(0, -1)
        if self._shared is None or start >= self.n_shared:
            return own
        shared = (self._shared[start:] @ direction).movedim(0, -1)
        return torch.cat([shared.expand(*own.shape[:-1], shared.shape[-1]), own], dim=-1)

    def mix(self, weights: Tensor, start: int = 0) -> Tensor:
        """[..., B, T, D]: the sources from `start` on, weighted with `weights` [B, T, S] and summed."""
        if self._block is not None:
            return self._product(weights.unsqueeze(-2), start).squeeze(-2)
        total = self._items[start] * weights[..., 0:1]
        for i, x in enumerate(self._items[start + 1 :], start=1):
            total = torch.addcmul(total, x, weights[..., i : i + 1])
        return total

    def mix_ways(self, weights: Tensor) -> tuple[Tensor, ...]:
        """One mixture [..., B, T, D] per way, weights [B, T, W, S]; all ways in one product where there is no graph."""
        if self._block is not None:
            return self._product(weights).unbind(-2)
        return tuple(self.mix(weights[..., way, :]) for way in range(weights.shape[-2]))

    def _product(self, weights: Tensor, start: int = 0) -> Tensor:
        """[..., B, T, W, D] of weights [..., B, T, W, S]."""
        n = max(0, self.n_shared - start)
        own = weights[..., n:] @ self._own(start).movedim(0, -2) if weights.shape[-1] > n else None
        if not n:
            assert own is not None
            return own
        assert self._shared is not None
        by_token = weights[..., :n].transpose(0, 1)  # the rows of a token are those of one product
        mixed = by_token.flatten(1, 2) @ self._shared[start:, 0].movedim(0, -2)  # [T, B W, D]
        mixed = mixed.unflatten(1, by_token.shape[1:3]).transpose(0, 1)
        return mixed.contiguous() if own is None else own.add_(mixed)

    def add_channels(self, total: Tensor, weights: Iterable[Tensor]) -> Tensor:
        """total [..., B, T, D] plus every source times its weights, which may differ between channels: [..., D]."""
        for i, (x, weight) in enumerate(zip(self._items, weights, strict=True)):
            if i and self._block is not None:  # from the second on `total` is ours
                total.addcmul_(x, weight)
            else:
                total = torch.addcmul(total, x, weight)
        return total

    def take(self, rows: Tensor) -> Self:
        """The same sources for other rows of the batch: row i goes on from row `rows[i]`. Items are [B, T, D]."""
        taken = copy.copy(self)
        if self._block is None:
            taken._items = [x[rows] for x in self._items]
            return taken
        n, shape = len(self), (len(rows), *self._block.shape[2:])
        if self._shared is None and self._block.shape[1] == 1:
            taken._shared = self._block[:n]
            taken._block = self._block.new_empty(len(self._block) - n, *shape)
            taken._items = [x.expand(shape) for x in self._items]
        else:
            taken._shared = None
            taken._block = self._block.new_empty(n + len(self._block) - len(self._own()), *shape)
            taken._items = [torch.index_select(x, 0, rows, out=taken._block[i]) for i, x in enumerate(self._items)]
        return taken

    def drop(self, i: int, *, into: int | None = None) -> None:
        """Source i leaves, and those after it move up; added to source `into`, or for good."""
        if self._shared is not None:  # from here on each row has its own
            apart = self.take(torch.arange(len(self._items[0]), device=self._shared.device))
            self._shared, self._block, self._items = None, apart._block, apart._items
        if into is not None:
            if self._block is None:
                self._items[into] = self._items[into] + self._items[i]
            else:
                self._items[into] += self._items[i]
        if self._block is None:
            del self._items[i]
            return
        for j in range(i, len(self._items) - 1):
            self._block[j].copy_(self._block[j + 1])
        del self._items[-1]

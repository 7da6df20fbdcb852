"""A stack of sources, each stored once, that reads mix with per-token weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Sources"]


class Sources:
    """Append-only stack of [..., B, T, D] tensors.

    Without gradients the sources lie in one preallocated block and a read is one batched product over it; with
    gradients they stay the tensors they are (a preallocated block would be written to in place under autograd) and a
    read adds them up one by one, saving references and no copies. Either way memory grows linearly with their number.
    """

    def __init__(self, capacity: int, first: Tensor) -> None:
        self._items: list[Tensor] = []
        self._block = None if torch.is_grad_enabled() else first.new_empty(capacity, *first.shape)
        self.append(first)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, i: int) -> Tensor:
        return self._items[i]

    def append(self, x: Tensor) -> None:
        if self._block is not None:
            self._block[len(self._items)].copy_(x)
            x = self._block[len(self._items)]
        self._items.append(x)

    def dot(self, direction: Tensor, start: int = 0) -> Tensor:
        """[..., B, T, S]: every source from `start` on against one direction [D]."""
        if self._block is not None:
            return (self._block[start : len(self)] @ direction).movedim(0, -1)
        return torch.stack([x @ direction for x in self._items[start:]], dim=-1)

    def mix(self, weights: Tensor, start: int = 0) -> Tensor:
        """[..., B, T, D]: the sources from `start` on, weighted with `weights` [B, T, S] and summed."""
        if self._block is not None:
            sources = self._block[start : len(self)].movedim(0, -2)  # [..., B, T, S, D]
            return (weights.unsqueeze(-2) @ sources).squeeze(-2)
        total = self._items[start] * weights[..., 0:1]
        for i, x in enumerate(self._items[start + 1 :], start=1):
            total = torch.addcmul(total, x, weights[..., i : i + 1])
        return total

    def mix_ways(self, weights: Tensor) -> tuple[Tensor, ...]:
        """One mixture [..., B, T, D] per way, weights [B, T, W, S]; all ways in one product where there is no graph."""
        if self._block is not None:
            return (weights @ self._block[: len(self)].movedim(0, -2)).unbind(-2)
        return tuple(self.mix(weights[..., way, :]) for way in range(weights.shape[-2]))

    def add_channels(self, total: Tensor, weights: Iterable[Tensor]) -> Tensor:
        """total [..., B, T, D] plus every source times its weights, which may differ between channels: [..., D]."""
        for i, (x, weight) in enumerate(zip(self._items, weights, strict=True)):
            if i and self._block is not None:  # from the second on `total` is ours
                total.addcmul_(x, weight)
            else:
                total = torch.addcmul(total, x, weight)
        return total

    def drop(self, i: int, *, into: int | None = None) -> None:
        """Source i leaves, and those after it move up; added to source `into`, or for good."""
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

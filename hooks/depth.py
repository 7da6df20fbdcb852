"""Depth weights of a whole pass in one tensor, by the identity of what they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .names import nearest_names

DEPTH_WEIGHTS = "*hook_depth_attn*"  # the filter that caches them


@dataclass(frozen=True)
class DepthStack:
    """Depth weights of many reads, padded to all sources there are.

    Attributes:
        weights: [read, (batch,) pos, source]; NaN where the read has no such source.
        reads: names of the first axis; a site that reads in several ways has one each ("3.attn.q").
        sources: names of the last axis.
        mask: [read, source], True where the read has that source.
        fixed: [read], True where nothing weighs: the read holds each of its sources with weight 1.
    """

    weights: Tensor
    reads: tuple[str, ...]
    sources: tuple[str, ...]
    mask: Tensor
    fixed: Tensor

    def of(self, read: str) -> Tensor:
        """[(batch,) pos, source] of one read, its own sources only. KeyError with the nearest names."""
        if read not in self.reads:
            raise unknown_read(read, self.reads)
        i = self.reads.index(read)
        return self.weights[i][..., self.mask[i]]


def unknown_read(read: str, reads: Sequence[str]) -> KeyError:
    near = nearest_names(read, reads) or list(reads)
    return KeyError(f"No read {read!r}; did you mean {' or '.join(map(repr, near[:3]))}?")


def stack_weights(
    cached: Mapping[str, Tensor],
    sources: Mapping[str, Sequence[str]],
    hooks: Mapping[str, str | None],
    order: Sequence[str],
    reads: Sequence[str] | None = None,
) -> DepthStack:
    """Put the cached weights of `reads` (all of them) side by side.

    Args:
        sources: read -> names of its sources, in the order of its weights.
        hooks: read -> the hook point of its weights, None where they are all exactly 1.
        order: names of all sources.

    Raises:
        KeyError: an unknown read, or weights that are not in the cache.
    """
    wanted = list(sources) if reads is None else [reads] if isinstance(reads, str) else list(reads)
    for read in wanted:
        if read not in sources:
            raise unknown_read(read, list(sources))
    missing = [read for read in wanted if (name := hooks[read]) is not None and name not in cached]
    if missing:
        raise KeyError(
            f"The depth weights of {', '.join(missing)} are not in this cache; run with names_filter="
            f"{DEPTH_WEIGHTS!r} (or none) to the last layer, or ask for reads=[...] that are."
        )
    found = {read: cached[name] for read in wanted if (name := hooks[read]) is not None}
    like = next(iter(found.values()), None)
    if like is None:  # no read mixes: any tensor of the stream says how many places there are
        streams = (name for name in cached if name == "hook_embed" or ".hook_read_" in name or "_out" in name)
        name = next(streams, None)
        if name is None:
            raise KeyError("Nothing in this cache says how many positions there are; cache hook_embed as well.")
        like = cached[name]
    columns = [name for name in order if any(name in sources[read] for read in wanted)]
    weights = torch.full((len(wanted), *like.shape[:-1], len(columns)), torch.nan, dtype=like.dtype, device=like.device)
    mask = torch.zeros(len(wanted), len(columns), dtype=torch.bool)
    for i, read in enumerate(wanted):
        at = [columns.index(source) for source in sources[read]]
        mask[i, at] = True
        weights[i][..., at] = found.get(read, 1.0)
    fixed = torch.tensor([read not in found for read in wanted])
    return DepthStack(weights, tuple(wanted), tuple(columns), mask, fixed)

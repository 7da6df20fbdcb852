"""The one rule by which depth weights are taken away."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["without"]


def without(weights: Tensor, mask: Tensor, *, renormalise: bool) -> Tensor:
    """Depth weights [B, T, S] with those where `mask` is True set to zero.

    renormalise: the rest is scaled so that every row sums to what it did (a softmax over the sources that are left).
        A row of which nothing is left stays zero. ValueError for signed weights, whose sum is no total to keep.
    """
    left = weights.masked_fill(mask, 0.0)
    if not renormalise:
        return left
    if bool((weights < 0).any()):
        raise ValueError("These depth weights have signs, so there is no total to renormalise to; zero them instead.")
    total = left.sum(dim=-1, keepdim=True)
    # the quotient first: what is left may be so little that a factor overflows
    return left / torch.where(total > 0, total, 1.0) * weights.sum(dim=-1, keepdim=True)

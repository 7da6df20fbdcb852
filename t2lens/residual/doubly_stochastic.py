"""Matrices near the Birkhoff polytope (rows and columns sum to 1), from logits: Sinkhorn's iteration, permutations.

Axes are [..., to, from], as in `hyper_connections`: what multiplies the state. A row that sums to 1 makes a new stream
a mean of the old ones; a column that sums to 1 gives away all of an old stream, no more and no less.
"""

from __future__ import annotations

from itertools import permutations
from typing import Literal

import torch
from torch import Tensor

__all__ = ["permutation_table", "sinkhorn"]


def sinkhorn(logits: Tensor, iterations: int, last: Literal["rows", "columns"] = "rows", eps: float = 0.0) -> Tensor:
    """exp(logits) [..., to, from] with columns and rows divided by their sums in turn, `iterations` times.

    Only the side that is divided `last` sums to 1 to rounding; the other is off by what is left to converge.
    eps: added to the matrix after its first division, and to every sum after that (DeepSeek-V4).

    The first division is a softmax, which no logit overflows. After it only two scale vectors change, M = u E v, so
    that a step is one product with each, with tokens on the last axis: the same numbers as dividing the matrix every
    time, at a tenth of the time. What is below 1e-15 of its column (1e-123 in float64) is held there, since a row of
    nothing but zeros has no sum to divide by, and its gradient goes with the square of that.
    """
    if last == "columns":
        return sinkhorn(logits.transpose(-1, -2), iterations, "rows", eps).transpose(-1, -2)
    n = logits.shape[-1]
    e = logits.reshape(-1, n, n).permute(2, 1, 0).contiguous().softmax(dim=1) + eps  # [from, to, N]
    e = e.clamp(min=torch.finfo(e.dtype).tiny ** 0.4)
    turned = e.transpose(0, 1).contiguous()
    u, v = 1 / (e.sum(dim=0) + eps), torch.ones_like(e[:, 0])  # [to, N], [from, N]
    for _ in range(iterations - 1):
        v = _divided(v, (turned * u[:, None]).sum(dim=0), eps)
        u = _divided(u, (e * v[:, None]).sum(dim=0), eps)
    return (e * v[:, None] * u).permute(2, 1, 0).reshape(logits.shape)


def _divided(scale: Tensor, rest: Tensor, eps: float) -> Tensor:
    """The scale after a division by the sum, which is scale * rest."""
    return scale / (scale * rest + eps) if eps else 1 / rest


def permutation_table(n: int) -> Tensor:
    """[n!, to, from]: every permutation of n streams, the identity first, in the order of `itertools.permutations`;
    the r-th sends stream s to perm_r[s]."""
    rows = torch.tensor(list(permutations(range(n))))
    return torch.eye(n)[rows].transpose(-1, -2).contiguous()

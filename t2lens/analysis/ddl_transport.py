"""The product of the operators I - beta k k^T of Deep Delta Learning at one token, gates frozen; part of the DDL audit.

T(l) = (I - b_S k_S k_S^T) ... (I - b_{l+1} k_{l+1} k_{l+1}^T) carries the state as write l left it to the readout; each
channel of an expanded state alike. Every factor is symmetric and acts in the span of the directions alone, so with
Q an orthonormal basis of that span (r = min(S, D) vectors) and c = Q^T k

    T = I - Q Q^T + Q t Q^T,     t the product of the I - b c c^T, r x r

and the singular values of T are those of t and D - r ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Transport", "transport"]


@dataclass(frozen=True)
class Transport:
    """For n tokens, A = S + 1 starts (the embedding, then every write), r = min(S, D) directions.

    values [A, n, r]: singular values of T in the span of the directions, falling; the D - r others are 1.
    rank [A, n]: effective rank exp(entropy of sigma / sum sigma) of all D singular values.
    survival [A, n]: |T x| / |x| of what started there: X_0 for the embedding, k for a write (NaN where there is none).
    carried [n, V, D]: T X_0, from the embedding.
    """

    values: Tensor
    rank: Tensor
    survival: Tensor
    carried: Tensor


def transport(directions: Tensor, betas: Tensor, x0: Tensor) -> Transport:
    """directions [n, S, D], betas [n, S] and the state that the embedding makes [n, V, D], in float64."""
    q, c = torch.linalg.qr(directions.mT)  # [n, D, r], [n, r, S]
    n, r, n_writes = c.shape
    t = torch.eye(r, dtype=c.dtype, device=c.device).repeat(n, 1, 1)
    values, survival = [], []
    for write in reversed(range(n_writes)):
        values.append(torch.linalg.svdvals(t))
        image, length = (t @ c[:, :, write, None]), c[:, :, write].norm(dim=-1)
        lasting = image.squeeze(-1).norm(dim=-1) / length
        survival.append(torch.where(length > 0.5, lasting, torch.nan))  # no direction to speak of below
        t = t - betas[:, write, None, None] * image * c[:, None, :, write]
    values.append(torch.linalg.svdvals(t))
    inside = q.mT @ x0.mT  # [n, r, V]
    carried = x0 + (q @ (t @ inside - inside)).mT
    size = x0.square().sum(dim=(-2, -1)).sqrt()
    lasting = carried.square().sum(dim=(-2, -1)).sqrt() / size
    survival.append(torch.where(size > 0, lasting, torch.nan))
    every = torch.stack(values[::-1])
    return Transport(every, _effective_rank(every, directions.shape[-1]), torch.stack(survival[::-1]), carried)


def _effective_rank(values: Tensor, width: int) -> Tensor:
    ones = width - values.shape[-1]
    total = values.sum(dim=-1) + ones
    logs = torch.where(values > 0, values.clamp(min=1e-300).log(), 0.0)
    # entropy of p = sigma / total: log total - sum p log sigma, where the ones add nothing
    return (total.log() - (values * logs).sum(dim=-1) / total).exp()

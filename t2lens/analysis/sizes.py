"""How much each position of a read adds to what a sublayer writes: the sequence axis of `t2lens.analysis.flow`.

With its nonlinearities held, a sublayer writes out_t = sum_p u_tp + constant, u_tp what position p of its read adds.
The size of u_tp is found without a vector for every pair where that can be: an MLP mixes no positions (but for Canon
layers, which reach a few back), and in attention

    u_tp = sum_h a_h[t, p] v_h[p] W_O,h            |u_tp|^2 = sum_hh' a_h a_h' <v_h W_O,h, v_h' W_O,h'>

Convolutions on the values and KV shift put read p into the values of p, p + 1, ..., p + reach. Each of these is one
more head, with the pattern of its own position. Anything else (buckets, hooks that edit heads) is run position by
position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from t2lens.analysis.frozen import Frozen, value_read
from t2lens.block import Block
from t2lens.residual import Site
from t2lens.sublayers import MLP, Attention, LocalConv
from t2lens.sublayers.norms import wide
from t2lens.sublayers.values import KVShift

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["WATCHED", "Lags", "Pairs", "Size", "sequence_sizes", "size_of"]

Size = Literal["norm", "projection"]
WATCHED = ("v", "pattern", "z")  # hook points of an attention that a `Frozen` must have watched
_CHUNK = 2**23  # numbers of the largest tensor at a time
_CACHED = 2**17  # numbers that stay in the cache of a core while they are used again


@dataclass(frozen=True)
class Pairs:
    """sizes [T, P]: of what position p adds at t, in the precision in which they were found."""

    sizes: Tensor

    def totals(self) -> Tensor:
        """[T]: their sums over p, float64."""
        return self.sizes.sum(dim=-1, dtype=torch.float64)

    def back(self, weights: Tensor) -> Tensor:
        """[P]: sum over t of weights [T] times sizes, float64."""
        some = weights.nonzero()[:, 0]
        if not len(some):
            return torch.zeros_like(weights)
        rows = slice(int(some[0]), int(some[-1]) + 1)
        return weights[rows] @ self.sizes[rows].double()


@dataclass(frozen=True)
class Lags:
    """sizes [n, T]: of what position t - lag adds at t, for the lags below n; none else adds anything."""

    sizes: Tensor

    def totals(self) -> Tensor:
        return self.sizes.sum(dim=0, dtype=torch.float64)

    def back(self, weights: Tensor) -> Tensor:
        found, moved = torch.zeros_like(weights), weights * self.sizes
        for lag, row in enumerate(moved):
            found[: len(row) - lag] += row[lag:]
        return found


def size_of(parts: Tensor, whole: Tensor, by: Size) -> Tensor:
    """[...]: size of parts [..., D] of `whole` [..., D]: their length, or their part along it if positive."""
    parts, whole = wide(parts), wide(whole)
    if by == "norm":
        return torch.linalg.vector_norm(parts, dim=-1)
    return (parts * whole).sum(dim=-1).clamp(min=0)


@torch.no_grad()
def sequence_sizes(frozen: Frozen, site: Site, by: Size) -> Iterator[tuple[str, Pairs | Lags]]:
    """For every read that `site` is made of: (name, sizes of what its position p adds to the atom at t)."""
    sublayer = _sublayer(frozen.model, site)
    if isinstance(sublayer, MLP):
        yield from _by_lag(frozen, site, by)
    elif type(sublayer) is Attention and _is_plain(frozen, site, sublayer):
        yield from _by_heads(frozen, site, sublayer, by)
    else:
        yield from _by_position(frozen, site, by)


def _sublayer(model: Transformer, site: Site) -> Any:
    return getattr(model.blocks[site.layer or 0], site.kind)


def _reach(model: Transformer, site: Site) -> int:
    """How many positions back the content of what `site` writes at t, or of its value at t, can come from."""
    block, sublayer = model.blocks[site.layer or 0], _sublayer(model, site)
    assert isinstance(block, Block)
    way = value_read(model.residual, site).way
    letter = {"attn": "a", "mlp": "c"}.get(site.kind, "")
    mixers: list[nn.Module | None] = [getattr(block, f"canon_{letter}{f'_{way}' if way else ''}", None)]
    if isinstance(sublayer, MLP):
        mixers.append(sublayer.canon_d)
    else:
        mixers.append(sublayer.canon_b)
        mixers += [each["v"] for each in (sublayer.shifts, sublayer.convs) if "v" in each]
    reach = sum(x.weight.shape[-1] - 1 + x.shift for x in mixers if isinstance(x, LocalConv))
    return reach + sum(isinstance(x, KVShift) for x in mixers)


def _classes(x: Tensor, n: int) -> Tensor:
    """[n, B, T, D]: x at the positions p with p mod n = 0, 1, ..., zero elsewhere."""
    at = torch.arange(x.shape[1], device=x.device) % n
    return x * (at == torch.arange(n, device=x.device)[:, None])[:, None, :, None]


def _by_lag(frozen: Frozen, site: Site, by: Size) -> Iterator[tuple[str, Lags]]:
    """Of what reaches few positions back: among n in a row only one position p has p mod n = c, so that one pass
    carries every n-th position."""
    out, n = frozen.outs[site.index], 1 + _reach(frozen.model, site)
    n_pos = out.shape[1]
    t = torch.arange(n_pos)
    for name, parts in frozen.push(site, out, lambda x: _classes(x, n)):
        sizes = size_of(parts, out, by)[:, 0].cpu()  # [n, T]
        yield name, Lags(torch.stack([sizes[(t - lag) % n, t] * (t >= lag) for lag in range(min(n, n_pos))]))


def _is_plain(frozen: Frozen, site: Site, attention: Attention) -> bool:
    """Whether what was written is z W_O + b_O with z the pattern times the values: no hook has edited heads."""
    v, pattern, z = (frozen.seen[f"blocks.{site.layer}.{site.kind}.hook_{name}"] for name in WATCHED)
    v = v.repeat_interleave(attention.cfg.n_heads // v.shape[2], dim=2)
    out, mixed = attention.output(z.flatten(-2)), torch.einsum("bhts,bshk->bthk", pattern, v)
    if (valid := frozen.record.valid) is not None:
        out = out * valid.unsqueeze(-1)
    pairs = ((mixed, z), (out, frozen.outs[site.index]))
    return all(torch.allclose(one, other, atol=1e-3, rtol=1e-2) for one, other in pairs)


def _by_heads(frozen: Frozen, site: Site, attention: Attention, by: Size) -> Iterator[tuple[str, Pairs]]:
    stem = f"blocks.{site.layer}.{site.kind}.hook_"
    pattern, n_heads = wide(frozen.seen[stem + "pattern"][0]), attention.cfg.n_heads  # [H, T, S]
    reach = _reach(frozen.model, site)
    if attention.value_residual is not None:
        reach = max(reach, _reach(frozen.model, next(s for s in frozen.model.sites if s.kind == site.kind)))
    n_pos = pattern.shape[-1]
    n = min(1 + reach, n_pos)
    later = torch.nn.functional.pad(pattern, (0, n - 1))
    heads = torch.cat([later[..., lag : lag + n_pos] for lag in range(n)])  # [lag H, T, P]: pattern at p + lag
    source = torch.arange(n_pos, device=pattern.device)
    for name, parts in frozen.push(site, frozen.seen[stem + "v"], lambda x: _classes(x, n)):
        v = torch.nn.functional.pad(wide(parts[:, 0]), (0, 0, 0, 0, 0, n - 1))  # [class, S, G, K]
        v = torch.stack([v[source % n, source + lag] for lag in range(n)])  # [lag, P, G, K]
        v = v.repeat_interleave(n_heads // v.shape[2], dim=2)
        u = torch.einsum("lphk,hkd->lhpd", v, wide(attention.W_O)).flatten(0, 1)  # [lag H, P, D]
        if by == "projection":
            along = torch.einsum("hpd,td->htp", u, wide(frozen.outs[site.index][0]))
            sizes = (heads * along).sum(dim=0).clamp(min=0)
        else:
            sizes = _quadratic(heads, torch.einsum("hpd,gpd->hgp", u, u), frozen.model.cfg.causal)
            sizes = sizes.clamp_(min=0).sqrt_()
        yield name, Pairs(sizes.cpu())


def _quadratic(heads: Tensor, gram: Tensor, causal: bool) -> Tensor:
    """[T, P]: sum_hg heads_h heads_g gram_hg of heads [H, T, P] and symmetric gram [H, H, P]; causal: 0 where p > t."""
    n_heads, n_pos, _ = heads.shape
    found, step = torch.zeros_like(heads[0]), max(1, _CACHED // (n_heads * n_pos))
    for first in range(0, n_pos, step):  # some rows at a time
        seen = min(first + step, n_pos) if causal else n_pos
        rows, sums = heads[:, first : first + step, :seen], found[first : first + step, :seen]
        for h in range(n_heads):  # each pair of heads once
            beside = rows[h] * gram[h, h, :seen]
            for g in range(h):
                beside.addcmul_(rows[g], gram[h, g, :seen], value=2)
            sums.addcmul_(rows[h], beside)
    return found


def _by_position(frozen: Frozen, site: Site, by: Size) -> Iterator[tuple[str, Pairs]]:
    """Each position of each read by itself through the whole sublayer, some at a time."""
    out = frozen.outs[site.index]
    n_pos = out.shape[1]
    step = max(1, _CHUNK // (n_pos * out.shape[-1]))
    found: dict[str, list[Tensor]] = {}
    for first in range(0, n_pos, step):
        alone = torch.eye(n_pos, device=out.device, dtype=out.dtype)[first : first + step, None, :, None]
        for name, parts in frozen.push(site, out, lambda x, alone=alone: x * alone):  # [P, B, T, D]
            found.setdefault(name, []).append(size_of(parts, out, by)[:, 0].cpu())
    for name, sizes in found.items():
        yield name, Pairs(torch.cat(sizes).T.contiguous())

"""Many variants of a pass as rows of few forward passes, and what each does to the predictions.

A variant edits some hook points. What comes before its first edit is as in the plain pass, so each is taken up at the
block where it begins to differ (`Transformer.resume`), and variants that begin at the same block share a pass. One
sequence at a time: rows of different sequences share nothing, and would be padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.analysis.inputs import Batch, check_finite
from t2lens.analysis.progress import progress
from t2lens.mixing import ForwardRecord
from t2lens.sublayers.norms import wide

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = [
    "EMBEDDING",
    "Change",
    "Effects",
    "Plain",
    "Variant",
    "effects_of",
    "layer_of",
    "recorded",
    "run_variants",
    "sequences",
]

EMBEDDING = -1  # the layer of a variant that changes something before all blocks
_BUDGET = 2**27  # bytes of the largest tensors of a pass, about

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """layer: the first block in which it changes something (n_layers: the readout, EMBEDDING: before all blocks).

    edits: hook name -> function of the tensor there, [1, pos, ...], that returns the changed one.
    """

    layer: int
    edits: Mapping[str, Change]


def layer_of(model: Transformer, hook: str) -> int:
    """The block in which a hook point fires: n_layers at the readout, EMBEDDING before all blocks."""
    parts = hook.split(".")
    if parts[0] == "blocks":
        return int(parts[1])
    return EMBEDDING if hook == "hook_embed" else model.cfg.n_layers


def sequences(batch: Batch) -> Iterator[Batch]:
    """Each sequence by itself, without the padding before and after it."""
    for tokens, valid in zip(batch.tokens, batch.valid, strict=True):
        there = valid.nonzero().flatten()
        span = slice(int(there[0]), int(there[-1]) + 1)
        mask = None if bool(valid[span].all()) else valid[None, span]
        yield replace(batch, tokens=tokens[None, span], mask=mask)


@torch.no_grad()
def recorded(model: Transformer, batch: Batch) -> tuple[ForwardRecord, Tensor]:
    """The plain pass: its record and its logits."""
    record = ForwardRecord()
    logits = model.forward(batch.tokens, batch.mask, record=record)
    return record, logits


@torch.no_grad()
def run_variants(
    model: Transformer, record: ForwardRecord, variants: Sequence[Variant]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every variant of a recorded pass over one sequence: yields (index of the variant [R], logits [R, pos, vocab])
    until each has been there once. R is as large as memory allows."""
    assert record.tokens is not None and len(record.tokens) == 1
    n_rows = max(1, _BUDGET // _row_bytes(model, record.tokens.shape[1]))
    for layer in sorted({variant.layer for variant in variants}):
        mine = [i for i, variant in enumerate(variants) if variant.layer == layer]
        for some in (mine[start : start + n_rows] for start in range(0, len(mine), n_rows)):
            which = torch.tensor(some, device=record.tokens.device)
            rows = torch.zeros_like(which)
            with model.hooks(fwd_hooks=_hooks([variants[i] for i in some])):
                if layer == EMBEDDING:
                    logits = model(record.tokens[rows], None if record.valid is None else record.valid[rows])
                else:
                    logits = model.resume(record, layer, rows)
            yield which, logits


def _row_bytes(model: Transformer, width: int) -> int:
    """About what one row takes: logits (and what is computed of them), and every atom."""
    itemsize = next(model.parameters()).element_size()
    vocabulary = model.cfg.d_vocab * 4 * max(itemsize, 4)
    return width * (vocabulary + model.cfg.d_model * itemsize * (2 * len(model.atoms) + 8))


def _hooks(variants: Sequence[Variant]) -> list[tuple[str, Any]]:
    """One hook per hook point, which does to each row what its variant says."""
    changes: dict[str, list[tuple[int, Change]]] = {}
    for row, variant in enumerate(variants):
        for name, change in variant.edits.items():
            changes.setdefault(name, []).append((row, change))

    def hook_of(mine: list[tuple[int, Change]]) -> Any:
        def hook(x: Tensor, *, hook: Any) -> Tensor:  # noqa: ARG001
            x = x.clone()
            for row, change in mine:
                x[row : row + 1] = change(x[row : row + 1])
            return x

        return hook

    return [(name, hook_of(mine)) for name, mine in changes.items()]


@dataclass(frozen=True, kw_only=True)
class Effects:
    """What variants do to the predictions, summed over the positions of each sequence that have a next token.

    loss, kl, logit, probability, hits [variant, sequence], float64: change of the next-token loss in nats; KL(plain ||
    variant) in nats; change of the logit that is followed, and of the probability of the true next token; change of the
    number of positions where that is the likeliest. counts [sequence]: how many positions. base_loss [sequence]: the
    loss of the plain pass, summed.

    Where no position has a next token (a bidirectional model, single tokens), kl is over all real tokens and the others
    are NaN.
    """

    loss: Tensor
    kl: Tensor
    logit: Tensor
    probability: Tensor
    hits: Tensor
    counts: Tensor
    base_loss: Tensor

    def mean(self, sums: Tensor) -> Tensor:
        """[...]: per position, of sums [..., sequence]."""
        return sums.sum(dim=-1) / self.counts.sum()


Numbered = Mapping[int, Variant]


@torch.no_grad()
def effects_of(
    model: Transformer,
    batch: Batch,
    variants: Sequence[Variant] | Callable[[ForwardRecord], Iterator[Numbered]],
    n: int | None = None,
    *,
    token: int | None = None,
    what: str = "Ablating",
) -> Effects:
    """Run every variant on every sequence of `batch`.

    Args:
        variants: the variants; or a function that makes them of the plain pass over a sequence, block by block (number
            -> variant; the readout is one more block), where the changes need numbers of that pass. n: then how many.
        token: whose logit is followed (None: that of the true next token). what: the words beside the progress bar.

    Raises:
        ValueError: logits that are NaN or infinite.
    """
    if not callable(variants):
        made, n = _by_layer(model, variants), len(variants)
        variants = lambda record: iter(made)  # noqa: ARG005, E731
    assert n is not None
    known = batch.predicts if model.cfg.causal and bool(batch.predicts.any()) else None
    sums = torch.zeros(5, n, len(batch.tokens), dtype=torch.float64, device=batch.tokens.device)
    counts = (batch.valid if known is None else known).sum(dim=-1)
    base = torch.zeros(len(batch.tokens), dtype=torch.float64, device=batch.tokens.device)

    def passes() -> Iterator[None]:
        for row, one in enumerate(sequences(batch)):
            if not counts[row]:
                continue
            record, logits = recorded(model, one)
            check_finite(logits, one, "The logits")
            plain = Plain(one, logits, one.valid[0] if known is None else one.predicts[0], token)
            base[row] = plain.loss
            for numbered in variants(record):
                numbers = torch.tensor(list(numbered), dtype=torch.long, device=sums.device)
                for which, changed in run_variants(model, record, list(numbered.values())):
                    sums[:, numbers[which], row] = plain.shifts(changed)
                yield

    for _ in progress(passes(), what, total=int((counts > 0).sum()) * (model.cfg.n_layers + 1)):
        pass
    kl, *others = sums
    if known is None:
        others, base = [torch.full_like(x, torch.nan) for x in others], torch.full_like(base, torch.nan)
    loss, logit, probability, hits = others
    return Effects(loss=loss, kl=kl, logit=logit, probability=probability, hits=hits, counts=counts, base_loss=base)


def _by_layer(model: Transformer, variants: Sequence[Variant]) -> list[Numbered]:
    """Of each block, and of the readout, the variants that begin there; those before all blocks with the first."""
    out: list[dict[int, Variant]] = [{} for _ in range(model.cfg.n_layers + 1)]
    for i, variant in enumerate(variants):
        out[max(variant.layer, 0)][i] = variant
    return list(out)


class Plain:
    """The plain pass over one sequence, which others are compared with at the positions `where` [T]."""

    def __init__(self, one: Batch, logits: Tensor, where: Tensor, token: int | None) -> None:
        self.where, self.all = where, bool(where.all())
        self.logits = wide(logits)[:, where]  # [1, P, V]
        self.logprob = self.logits.log_softmax(dim=-1)
        self.none = self.logprob.logsumexp(dim=-1)  # 0 but for rounding, which is then in no difference
        self.p = self.logprob[0].exp()
        self.next = one.next_tokens[:, where].unsqueeze(-1)
        self.followed = self.next if token is None else torch.full_like(self.next, token)
        self.loss = -self.logprob.double().gather(-1, self.next).sum()
        self.right = (self.logits.argmax(dim=-1) == self.next.squeeze(-1)).double()

    def shifts(self, logits: Tensor) -> Tensor:
        """[5, R] float64, summed over positions: KL, change of loss, of the followed logit, of the probability of the
        next token, and of where it is the likeliest.

        They are made of the differences d of logits, so that small effects are not lost in rounding: with z = log sum p
        e^d, the loss changes by z - d[next], and KL(p || q) = z - sum p d.
        """
        here = wide(logits) if self.all else wide(logits)[:, self.where]
        right = (here.argmax(dim=-1) == self.next.squeeze(-1)).double() - self.right
        d = here - self.logits
        at_next, followed = (d.gather(-1, ids.expand(len(d), -1, -1)).squeeze(-1) for ids in (self.next, self.followed))
        z = (self.logprob + d).logsumexp(dim=-1) - self.none
        kl = (z - torch.einsum("rtv,tv->rt", d, self.p)).clamp(min=0)
        p_next = self.p.gather(-1, self.next[0]).squeeze(-1)
        probability = p_next * torch.expm1(at_next - z)
        return torch.stack([x.double().sum(dim=-1) for x in (kl, z - at_next, followed, probability, right)])

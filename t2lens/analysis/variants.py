"""Many variants of one recorded pass as rows of few forward passes, and what each does to the loss.

A variant edits some hook points. What comes before its first edit is the same in all variants, so each is taken up at
the block where it begins to differ (`Transformer.resume`), and variants that begin at the same block share a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.analysis.progress import progress

if TYPE_CHECKING:
    from t2lens.analysis.inputs import Batch
    from t2lens.mixing import ForwardRecord
    from t2lens.model import Transformer

__all__ = ["EMBEDDING", "Effects", "Variant", "effects_of", "layer_of", "run_variants"]

EMBEDDING = -1  # the layer of an edit before all blocks
_BUDGET = 2**27  # bytes of the largest tensors of a pass, about
_KEPT = 2**28  # bytes of log-probabilities of the plain pass that are kept

Edit = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """layer: the first block in which it edits something (n_layers: the readout, EMBEDDING: before all blocks).

    edits: hook name -> function of (tensor [R, pos, ...], rows [R]) that returns the edited tensor; `rows` says which
    sequences of the batch the R rows are.
    """

    layer: int
    edits: Mapping[str, Edit]


def layer_of(model: Transformer, hook: str) -> int:
    """The block in which a hook point fires: n_layers at the readout, EMBEDDING before all blocks."""
    parts = hook.split(".")
    if parts[0] == "blocks":
        return int(parts[1])
    return EMBEDDING if hook == "hook_embed" else model.cfg.n_layers


@torch.no_grad()
def run_variants(
    model: Transformer, record: ForwardRecord, variants: Sequence[Variant], what: str | None = "Ablating"
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Every variant on every sequence of the record: yields (index of the variant [R], sequence [R], logits
    [R, pos, vocab]) until all pairs have been there once. R is as large as memory allows. what: the words beside the
    progress bar; None shows none."""
    assert record.tokens is not None
    n_sequences, width = record.tokens.shape
    size = _row_bytes(model, width)
    n_rows = max(1, _BUDGET // size)
    chunks = []
    for layer in sorted({variant.layer for variant in variants}):
        mine = [i for i, variant in enumerate(variants) if variant.layer == layer]
        pairs = [(i, row) for i in mine for row in range(n_sequences)]
        chunks += [(layer, pairs[start : start + n_rows]) for start in range(0, len(pairs), n_rows)]
    device = record.tokens.device
    for layer, pairs in chunks if what is None else progress(chunks, what, total=len(chunks)):
        which = torch.tensor([i for i, _ in pairs], device=device)
        rows = torch.tensor([row for _, row in pairs], device=device)
        with model.hooks(fwd_hooks=_hooks(variants, pairs, rows)):
            if layer == EMBEDDING:
                mask = None if record.valid is None else record.valid[rows]
                logits = model(record.tokens[rows], mask)
            else:
                logits = model.resume(record, layer, rows)
        yield which, rows, logits


def _row_bytes(model: Transformer, width: int) -> int:
    """About what one row takes: logits (and their float64 log-probabilities), and every atom."""
    itemsize = next(model.parameters()).element_size()
    vocabulary = model.cfg.d_vocab * (itemsize + 16)
    return width * (vocabulary + model.cfg.d_model * itemsize * (2 * len(model.atoms) + 8))


def _hooks(variants: Sequence[Variant], pairs: list[tuple[int, int]], rows: Tensor) -> list[tuple[str, Any]]:
    """One hook per hook point, which does to each stretch of rows what its variant says."""
    stretches: dict[int, slice] = {}
    for at, (i, _) in enumerate(pairs):  # rows of one variant lie together
        stretches[i] = slice(stretches[i].start if i in stretches else at, at + 1)
    edits: dict[str, list[tuple[slice, Edit]]] = {}
    for i, stretch in stretches.items():
        for name, edit in variants[i].edits.items():
            edits.setdefault(name, []).append((stretch, edit))

    def hook_of(mine: list[tuple[slice, Edit]]) -> Any:
        def hook(x: Tensor, *, hook: Any) -> Tensor:  # noqa: ARG001
            x = x.clone()
            for stretch, edit in mine:
                x[stretch] = edit(x[stretch], rows[stretch])
            return x

        return hook

    return [(name, hook_of(mine)) for name, mine in edits.items()]


@dataclass(frozen=True, kw_only=True)
class Effects:
    """What variants do to the prediction of the next token, summed over the positions of each sequence that have one.

    loss, kl, probability, hits [variant, sequence], float64: change of the loss in nats; KL(plain || variant) in nats;
    change of the probability of the true next token; change of the number of positions where that is the likeliest.
    counts [sequence]: how many positions. base_loss [sequence]: the loss of the plain pass, summed.
    """

    loss: Tensor
    kl: Tensor
    probability: Tensor
    hits: Tensor
    counts: Tensor
    base_loss: Tensor

    def mean(self, sums: Tensor) -> Tensor:
        """[variant]: per position, over all sequences."""
        return sums.sum(dim=-1) / self.counts.sum()


@torch.no_grad()
def effects_of(
    model: Transformer, record: ForwardRecord, batch: Batch, variants: Sequence[Variant], what: str = "Ablating"
) -> Effects:
    """Run every variant on every sequence of `batch` (which `record` is a plain pass of)."""
    n, n_sequences = len(variants), len(batch.tokens)
    shape = (n, n_sequences)
    device = batch.tokens.device
    loss, kl, probability, hits = (torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(4))
    plain = _Plain(model, record, batch)
    for which, rows, logits in run_variants(model, record, variants, what):
        base, mine = plain.logprob(rows), logits.double().log_softmax(dim=-1)
        where = batch.predicts[rows]
        ids = batch.next_tokens[rows].unsqueeze(-1)
        before, after = (x.gather(-1, ids).squeeze(-1) for x in (base, mine))
        at = (which, rows)
        loss[at] = ((before - after) * where).sum(dim=-1)
        probability[at] = ((after.exp() - before.exp()) * where).sum(dim=-1)
        right = [(x.argmax(dim=-1) == ids.squeeze(-1)).double() for x in (base, mine)]
        hits[at] = ((right[1] - right[0]) * where).sum(dim=-1)
        kl[at] = (_divergence(base, mine) * where).sum(dim=-1)
    return Effects(
        loss=loss,
        kl=kl,
        probability=probability,
        hits=hits,
        counts=batch.predicts.sum(dim=-1),
        base_loss=plain.loss(),
    )


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats of log-probabilities [..., V]; what has no probability adds nothing."""
    terms = p.exp() * (p - q)
    return torch.where(p > -torch.inf, terms, 0.0).sum(dim=-1)


class _Plain:
    """Log-probabilities of the plain pass, kept where they are small, else made again from its last read."""

    def __init__(self, model: Transformer, record: ForwardRecord, batch: Batch) -> None:
        self.model, self.record, self.batch = model, record, batch
        n, width = batch.tokens.shape
        self.kept = None
        if n * width * model.cfg.d_vocab * 8 <= _KEPT:
            self.kept = self._logprob(torch.arange(n, device=batch.tokens.device))

    def _logprob(self, rows: Tensor) -> Tensor:
        logits = self.model.unembed(self.model.ln_final(self.record.read("out")[rows]))
        return logits.double().log_softmax(dim=-1)

    def logprob(self, rows: Tensor) -> Tensor:
        """[R, T, V] float64"""
        return self._logprob(rows) if self.kept is None else self.kept[rows]

    def loss(self) -> Tensor:
        """[B] float64, summed over positions."""
        out = []
        for row in range(len(self.batch.tokens)):
            rows = torch.tensor([row], device=self.batch.tokens.device)
            one = replace(self.batch, tokens=self.batch.tokens[rows], mask=self.batch.valid[rows])
            out.append(one.losses(self.logprob(rows)).sum())
        return torch.stack(out)

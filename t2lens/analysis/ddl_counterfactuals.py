"""What the gate of Deep Delta Learning does: other gates in its place, inside the forward pass; part of the DDL audit.

    beta = 0        the sublayer writes nothing (and erases nothing)
    beta = 1        what the state held along k is replaced by v
    beta = mean     beta's mean over the text at that sublayer: a gate that does not look at the token
    no erasure      k^T X := 0 in v - k^T X, so X' = X + beta k v^T: the write without the erasing

each at one sublayer alone, and at all of them at once. All else follows: later gates, directions and attention are
computed anew from the changed state. The variants of one sublayer are rows of one batch, taken up at its block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from t2lens.analysis.ddl_gates import Pass, gate_hook
from t2lens.analysis.statistics import interval_of_mean

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["ALL", "Effects", "kinds_of", "measure"]

KINDS = ("beta = 0", "beta = 1", "beta = mean", "no erasure")
ALL = "all"
_PLACES = 4096  # tokens of one pass: more at once is no faster
_NUMBERS = 2**26  # logits of one pass


def kinds_of(erases: bool) -> tuple[str, ...]:
    return KINDS if erases else KINDS[:-1]


@dataclass
class Effects:
    """Sums per sequence: loss, kl [S + 1, kind, B] (last row: all sublayers at once), n_losses and n_tokens [B]."""

    kinds: tuple[str, ...]
    loss: np.ndarray
    kl: np.ndarray
    base: np.ndarray
    n_losses: np.ndarray
    n_tokens: np.ndarray

    @classmethod
    def none(cls, n_writes: int, n_rows: int, erases: bool) -> Effects:
        shape, kinds = (n_writes + 1, len(kinds_of(erases)), n_rows), kinds_of(erases)
        return cls(kinds, np.zeros(shape), np.zeros(shape), np.zeros(n_rows), np.zeros(n_rows), np.zeros(n_rows))

    def mean_kl(self) -> np.ndarray:
        """[S + 1, kind]: nats per token."""
        return self.kl.sum(axis=-1) / max(self.n_tokens.sum(), 1.0)

    def mean_loss(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[S + 1, kind] each: change of the loss in nats per token, and the ends of its 95% interval over sequences
        (bootstrap; NaN below two sequences; all NaN where there is no loss)."""
        total = self.n_losses.sum()
        if total == 0:
            return tuple(np.full(self.loss.shape[:2], np.nan) for _ in range(3))  # type: ignore[return-value]
        return (self.loss.sum(axis=-1) / total, *interval_of_mean(self.loss, self.n_losses))


@torch.no_grad()
def measure(model: Transformer, seen: Pass, means: Tensor, effects: Effects) -> Iterator[int]:
    """Add the effects on the sequences of `seen` to `effects`; yields after each sublayer, last all at once.

    means [S]: beta's mean over the text.
    """
    tokens, base, rows = seen.record.tokens, _wide(seen.logits), seen.rows.cpu().numpy()
    assert tokens is not None
    known = seen.valid[:, :-1] & seen.valid[:, 1:] & model.cfg.causal  # a bidirectional model has no next-token loss
    ids = torch.where(known, tokens[:, 1:], 0)
    totals = base.logsumexp(dim=-1)
    before = _losses(base, totals, ids)
    effects.n_losses[rows] = known.sum(dim=1).cpu().numpy()
    effects.n_tokens[rows] = seen.valid.sum(dim=1).cpu().numpy()
    effects.base[rows] = (before * known).sum(dim=1).cpu().numpy()
    n_writes, n_kinds = len(model.sites) - 1, len(effects.kinds)
    pairs = [(row, kind) for row in range(len(base)) for kind in range(n_kinds)]
    at_once = max(1, min(_PLACES // base.shape[1], _NUMBERS // (base.shape[1] * base.shape[2])))
    for place in range(n_writes + 1):
        changed = model.sites[:-1] if place == n_writes else (model.sites[place],)
        layer = 0 if place == n_writes else model.sites[place].layer
        assert layer is not None
        for start in range(0, len(pairs), at_once):
            mine = pairs[start : start + at_once]
            which = torch.tensor([row for row, _ in mine], device=base.device)
            kinds = torch.tensor([kind for _, kind in mine], device=base.device)
            with model.hooks(_forced(changed, kinds, means, effects.kinds)):
                logits = model.resume(seen.record, layer, which)
            old, p = -1, base[0]
            for logit, (row, kind) in zip(logits, mine, strict=True):
                if row != old:
                    old, p = row, (base[row] - totals[row].unsqueeze(-1)).exp()
                logit = _wide(logit)
                total = logit.logsumexp(dim=-1)
                moved = _losses(logit, total, ids[row]) - before[row]
                effects.loss[place, kind, rows[row]] = float((moved * known[row]).sum())
                # sum p (log p - log q), with log p = base - totals and log q = logit - total
                kl = (p * (base[row] - logit)).sum(dim=-1).double() + (total - totals[row]).double()
                effects.kl[place, kind, rows[row]] = float((kl.clamp(min=0) * seen.valid[row]).sum())
        yield place


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _losses(logits: Tensor, totals: Tensor, ids: Tensor) -> Tensor:
    """-log p of the next token [..., T - 1] from logits [..., T, vocab] and their logsumexp, in float64."""
    chosen = logits[..., :-1, :].gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return totals[..., :-1].double() - chosen.double()


def _forced(sites: Sequence[Any], kinds: Tensor, means: Tensor, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Hooks that give row i of a batch the gate of kinds[i] at `sites`."""
    hooks: list[tuple[str, Any]] = []
    erase = "no erasure"
    for site in sites:
        values = torch.tensor([0.0, 1.0, float(means[site.index]), torch.nan], dtype=torch.float64)[: len(names)]
        hooks.append((gate_hook(site, "beta"), _set(values.to(kinds.device)[kinds])))
        if erase in names:
            forgets = torch.where(kinds == names.index(erase), 0.0, torch.nan)
            hooks.append((gate_hook(site, "proj"), _set(forgets)))
    return hooks


def _set(values: Tensor) -> Any:
    """A hook that puts values[i] in place of row i, where it is a number."""

    def hook(gate: Tensor, *, hook: Any) -> Tensor:  # noqa: ARG001
        row = values.to(gate.dtype)[:, None, None]
        return torch.where(row.isnan(), gate, row)

    return hook

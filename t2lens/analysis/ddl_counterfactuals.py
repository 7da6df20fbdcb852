"""What the gate of Deep Delta Learning does: other gates in its place, inside the forward pass; part of the DDL audit.

    beta = 0        the sublayer writes nothing (and erases nothing)
    beta = 1        what the state held along k is replaced by v
    beta = mean     beta's mean over the text at that sublayer: a gate that does not look at the token
    no erasure      k^T X := 0 in v - k^T X, so X' = X + beta k v^T: the write without the erasing

each at one sublayer alone, and at all of them at once. All else follows: later gates, directions and attention are
computed anew from the changed state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from t2lens.analysis.ddl_gates import gate_hook
from t2lens.analysis.statistics import interval_of_mean
from t2lens.analysis.variants import Change, Variant, effects_of

if TYPE_CHECKING:
    from t2lens.analysis.inputs import Batch
    from t2lens.model import Transformer

__all__ = ["ALL", "Counterfactuals", "counterfactuals", "kinds_of"]

KINDS = ("beta = 0", "beta = 1", "beta = mean", "no erasure")
ALL = "all"


def kinds_of(erases: bool) -> tuple[str, ...]:
    return KINDS if erases else KINDS[:-1]


@dataclass(frozen=True, kw_only=True)
class Counterfactuals:
    """Means per token [S + 1, kind] (last row: all sublayers at once), in nats.

    loss: change of the loss; low, high: its 95% interval over sequences (NaN below two); NaN where no position has a
    next token. kl: KL(as it is || changed). base: the loss of the model as it is.
    """

    kinds: tuple[str, ...]
    loss: np.ndarray
    low: np.ndarray
    high: np.ndarray
    kl: np.ndarray
    base: float


def counterfactuals(model: Transformer, batch: Batch, means: Tensor, erases: bool) -> Counterfactuals:
    """means [S]: beta's mean over the text."""
    kinds, writes = kinds_of(erases), model.sites[:-1]
    variants = [
        Variant(layer=places[0].layer or 0, edits=_edits(places, kind, means))
        for places in (*((site,) for site in writes), writes)
        for kind in kinds
    ]
    found = effects_of(model, batch, variants, what="Running counterfactuals")
    low, high = interval_of_mean(found.loss.cpu(), found.counts.cpu())
    loss, kl = (found.mean(x).cpu().numpy() for x in (found.loss, found.kl))
    loss, low, high, kl = (x.reshape(len(writes) + 1, len(kinds)) for x in (loss, low, high, kl))
    return Counterfactuals(kinds=kinds, loss=loss, low=low, high=high, kl=kl, base=float(found.mean(found.base_loss)))


def _edits(sites: Sequence[Any], kind: str, means: Tensor) -> dict[str, Change]:
    if kind == "no erasure":
        return {gate_hook(site, "proj"): torch.zeros_like for site in sites}
    values = {"beta = 0": torch.zeros_like(means), "beta = 1": torch.ones_like(means), "beta = mean": means}[kind]
    return {gate_hook(site, "beta"): _set(float(values[site.index])) for site in sites}


def _set(value: float) -> Change:
    return lambda gate: torch.full_like(gate, value)

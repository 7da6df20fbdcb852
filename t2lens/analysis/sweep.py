"""Every route of every read cut, one at a time: what each cut does to the predictions, in batched passes.

A cut takes sources (or atoms) out of one read. What comes before the read is as in the plain pass, so that cuts of one
block are rows of a pass that is taken up there (`Transformer.resume`); everything after the read runs anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from t2lens.analysis.variants import Change, Effects, Variant, effects_of
from t2lens.edits import without
from t2lens.mixing import ForwardRecord, Resume, contributions_by_read
from t2lens.residual import Read, ResidualSystem, by_way
from t2lens.residual.dca import DeepCrossAttention
from t2lens.sublayers import Places

if TYPE_CHECKING:
    from t2lens.analysis.inputs import Batch
    from t2lens.model import Transformer

__all__ = [
    "Cut",
    "Over",
    "caveats",
    "changes_of",
    "point_of",
    "routes_of",
    "source_parts",
    "sweep",
]

Over = Literal["source", "atom"]


@dataclass(frozen=True)
class Cut:
    """The routes number `removed` of one read are taken out; `renormalise`: the other weights fill what they held."""

    read: Read
    removed: tuple[int, ...]
    renormalise: bool = False


def point_of(read: Read, over: Over) -> str:
    """Name of the hook point at which routes into a read are cut: of its depth weights, or of the read itself (what a
    block carries on is read at hook_resid_pre)."""
    if over == "source":
        return read.site.hook("depth_attn", read.way)
    if read.way != "r":
        return read.site.hook("read", read.way)
    return f"blocks.{read.site.layer}.hook_resid_pre" if read.site.opens else ""


def routes_of(model: Transformer, over: Over) -> dict[Read, tuple[str, ...]]:
    """Every read whose routes can be cut, with their names: its sources, or the atoms written before it."""
    found = {}
    for read in model.reads:
        if point_of(read, over) in model.hook_dict:
            atoms = model.atoms[: read.site.seen + 1]
            found[read] = atoms if over == "atom" else tuple(s.name for s in model.residual.sources(read.site))
    return found


def caveats(model: Transformer) -> list[str]:
    """What taking away depth weights does not do, or does besides, in this system."""
    residual, out = model.residual, []
    is_dca = isinstance(residual, DeepCrossAttention)
    if is_dca and residual.cfg.grn != "v1":
        out.append(
            "Coefficients are vectors over channels here: their mean is ablated, what each channel has beyond it stays."
        )
    replaces = type(residual).enter is not ResidualSystem.enter and not is_dca
    if replaces and not any(read.way == "r" for read in model.reads):
        out.append(
            "The mixture that a block begins with is also what it carries on, so its ablation reaches later reads too."
        )
    return out


@torch.no_grad()
def source_parts(model: Transformer, record: ForwardRecord, read: Read) -> Tensor:
    """What each source adds to a read, with its weight: [S, T, D]; the record is of one sequence.

    The system's own linear code runs with the weights of one source left, and with none; what is in the read without
    any (a stream that it adds to) belongs to no source.
    """
    assert record.tokens is not None
    residual, site = model.residual, read.site
    weights = residual.depth_weights(site, _gates(record, read))
    assert weights is not None
    own = by_way(weights)[read.way]
    n = own.shape[-1]
    kept = torch.cat([torch.eye(n), torch.zeros(1, n)]).to(own)[:, None] * own
    rows = record.tokens.new_zeros(n + 1)
    places = Places.of(record.tokens[rows], None if record.valid is None else record.valid[rows], None)
    state = Resume(record, _layer(model, read), rows).state(residual, places)
    for step in record.steps:
        if step.site.layer != site.layer:
            continue
        gates = {name: kept if gate is own else gate[rows] for name, gate in step.gates.items()}
        state = residual.enter(state, step.site, gates)
        if step.site is site:
            found = by_way(residual.read(state, site, gates))[read.way]
            return found[:-1] - found[-1:]
        if model.cfg.block != "parallel":  # where all sublayers read before any writes
            assert step.out is not None
            state = residual.write(state, step.site, residual.atom(step.out[rows], gates), gates)
    raise AssertionError("every read has a step")


def _gates(record: ForwardRecord, read: Read) -> dict[str, Tensor]:
    return next(step.gates for step in record.steps if step.site is read.site)


def _layer(model: Transformer, read: Read) -> int:
    return model.cfg.n_layers if read.site.layer is None else read.site.layer


def sweep(model: Transformer, batch: Batch, cuts: Sequence[Cut], over: Over, token: int | None = None) -> Effects:
    """Carry out every cut on every sequence. token: whose logit is followed (None: that of the true next token)."""
    by_layer: dict[int, list[int]] = {}
    for i, cut in enumerate(cuts):
        by_layer.setdefault(_layer(model, cut.read), []).append(i)

    def variants(record: ForwardRecord) -> Iterator[dict[int, Variant]]:
        for layer, removers in _removers_by_layer(model, record, over):
            mine = by_layer.get(layer, [])
            yield {i: Variant(layer=layer, edits=_edits_of(cuts[i], over, removers)) for i in mine}

    return effects_of(model, batch, variants, len(cuts), token=token, what="Cutting routes")


# --- from cuts to edits at hook points -------------------------------------------------------------------------------

_Remove = Callable[[Cut], Change]


def _removers_by_layer(
    model: Transformer, record: ForwardRecord, over: Over
) -> Iterator[tuple[int, Mapping[Read, _Remove]]]:
    """Block by block (the readout is one more): how routes are taken out of each of its reads."""
    if over == "source":
        for layer in range(model.cfg.n_layers + 1):
            yield layer, {}
        return
    shares = contributions_by_read(model.residual, record)
    for layer, group in groupby(shares, key=lambda found: _layer(model, found[0])):
        yield layer, {read: _contribution_remover(share[: read.site.seen + 1]) for read, share in group}


def _edits_of(cut: Cut, over: Over, removers: Mapping[Read, _Remove]) -> dict[str, Change]:
    remove = _weight_remover if over == "source" else removers[cut.read]
    return {point_of(cut.read, over): remove(cut)}


def changes_of(model: Transformer, record: ForwardRecord, cuts: Sequence[Cut], over: Over) -> list[Change]:
    """What each cut of one read does at its hook point (`point_of`), in a pass that goes on from the record."""
    (read,) = {cut.read for cut in cuts}
    if over == "source":
        return [_weight_remover(cut) for cut in cuts]
    share = next(share for found, share in contributions_by_read(model.residual, record) if found == read)
    remove = _contribution_remover(share[: read.site.seen + 1])
    return [remove(cut) for cut in cuts]


def _weight_remover(cut: Cut) -> Change:
    def change(weights: Tensor) -> Tensor:
        mask = torch.zeros(weights.shape[-1], dtype=torch.bool, device=weights.device)
        mask[list(cut.removed)] = True
        return without(weights, mask, renormalise=cut.renormalise)

    return change


def _contribution_remover(share: Tensor) -> _Remove:
    """Subtracts contributions [A, 1, T, D] of the plain pass, which are exact: nothing before the read has changed."""

    def remove(cut: Cut) -> Change:
        removed = list(cut.removed)
        kept = [i for i in range(len(share)) if i not in cut.removed]

        def change(x: Tensor) -> Tensor:
            # the sum of fewer is more exact; what is left of all of them is nothing
            if len(kept) < len(removed):
                return share[kept].sum(dim=0).to(x.dtype)
            return x - share[removed].sum(dim=0).to(x.dtype)

        return change

    return remove

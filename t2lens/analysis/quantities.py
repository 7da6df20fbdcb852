"""Quantities of a trace on the grid of both axes: one number per site and position, with unit and meaning.

The grid has a row per site, `embed` first and `out` last, and a column per position. Where a quantity has no
value the grid holds NaN and says why: for a row (`Grid.missing`) or for the whole trace (`Grid.absent`). A
NaN that no reason covers came out of the model itself.

Everything here is numpy on the arrays of `Trace.dataset`; no model and no torch are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import numpy as np

from t2lens.analysis.grids import NOT_READ, OFF, Grid, Quantity, entropy, nothing, of_reads, sites_of
from t2lens.analysis.sequence_quantities import (
    OWN_POSITION,
    attention_of,
    effective_positions,
    sequence_bounds,
    sequence_entropy,
    sequence_lookback,
    sequence_reach,
)

__all__ = ["QUANTITIES", "Grid", "Quantity", "attention_of", "grid", "outline", "quantity"]


def quantity(key: str) -> Quantity:
    """The quantity named `key`; KeyError names the nearest."""
    if key not in QUANTITIES:
        near = get_close_matches(key, QUANTITIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(QUANTITIES)}."
        raise KeyError(f"No quantity {key!r}; {hint}")
    return QUANTITIES[key]


def grid(trace: Any, key: str, way: str | None = None) -> Grid:
    """The quantity `key` of a trace at every site and position. KeyError names the nearest key.

    way: which read stands for a site that reads in several ways; by default the first (`Trace.of_way`).

    Example:
        >>> import t2lens
        >>> from t2lens.analysis.quantities import grid
        >>> system = t2lens.residual.AttnRes()
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=system)
        >>> tr = t2lens.trace(t2lens.build(cfg, seed=0), [0, 7, 3])
        >>> sources = grid(tr, "effective_sources")  # weights start uniform over embed, 0.attn, ...
        >>> dict(zip(sources.sites, sources.values[:, 2].round(3).tolist()))
        {'embed': nan, '0.attn': 1.0, '0.mlp': 2.0, '1.attn': 3.0, '1.mlp': 4.0, 'out': 5.0}
        >>> sources.why("embed")
        'the embedding is written, not read'
    """
    about = quantity(key)
    return _MAKE[key](trace.of_way(way), about)


_NO_TOKEN = "this trace follows no token: t2lens.trace(..., follow='next')"


def outline(trace: Any, key: str) -> Grid:
    """`grid(trace, key)`, but of quantities that are slow on long prompts only their reasons and bounds, with no column
    of values."""
    trace, about = trace.of_way(), quantity(key)
    bounds = sequence_bounds(trace, key)
    if bounds is None:
        return _MAKE[key](trace, about)
    if isinstance(bounds, str):
        return nothing(trace, about, bounds)
    sites, patterns = sites_of(trace), attention_of(trace)
    missing = NOT_READ | {site: OWN_POSITION for site in sites[1:] if site not in patterns}
    return Grid(quantity=about, values=np.zeros((len(sites), 0)), sites=sites, missing=missing, limits=bounds)


# --- shared pieces -----------------------------------------------------------------------------------


def _shares(trace: Any) -> np.ndarray:
    """[read, pos, atom]: share of each atom in the summed length of the contributions; 0: not yet written. All 0
    where nothing contributes."""
    length = trace.dataset["contribution_norm"].transpose("read", "pos", "atom").values
    written = np.arange(length.shape[2]) <= trace.dataset["seen"].values[:, None]  # atom 0 is embed
    length = np.where(written[:, None, :], length, 0)
    total = length.sum(-1, keepdims=True)
    return np.divide(length, total, out=np.zeros_like(length), where=total != 0)


def _per_block(trace: Any) -> float:
    """Sublayers per block."""
    sites = sites_of(trace)[1:-1]
    return len(sites) / len({site.split(".")[0] for site in sites})


# --- the quantities ----------------------------------------------------------------------------------


def _residual_norm(trace: Any, about: Quantity) -> Grid:
    return of_reads(trace, about, trace.dataset["residual_norm"].transpose("read", "pos").values)


def _write_norm(trace: Any, about: Quantity) -> Grid:
    rows = trace.dataset["atom_norm"].transpose("atom", "pos").values
    blank = np.full((1, rows.shape[1]), np.nan, rows.dtype)
    return Grid(
        quantity=about,
        values=np.concatenate([rows, blank]),
        sites=sites_of(trace),
        missing={"out": "the readout writes nothing to the stream"},
    )


def _gate(trace: Any, about: Quantity) -> Grid:
    if "gate" not in trace.dataset:
        return nothing(trace, about, "this system has no gates")
    gates = trace.dataset["gate"].transpose("write", "pos")
    label = gates.attrs.get("label")
    named = replace(
        about,
        label=f"{about.label} {label}" if label else about.label,
        meaning=gates.attrs.get("meaning") or about.meaning,
    )
    sites = sites_of(trace)
    values = np.full((len(sites), gates.shape[1]), np.nan, gates.dtype)
    values[[sites.index(str(name)) for name in gates["write"].values]] = gates.values
    missing = {"embed": "the embedding is written without a gate", "out": "the readout writes nothing"}
    low, high = gates.attrs.get("range", (None, None))
    return Grid(quantity=named, values=values, sites=sites, missing=missing, limits=(low, high))


def _own_entropy(trace: Any) -> tuple[np.ndarray, dict[str, str], str]:
    """([read, pos] entropy in nats of the own depth weights, missing, absent)."""
    data = trace.dataset
    weights = data["depth_weight"].transpose("read", "pos", "source").values
    exists = ~np.isnan(weights).all(axis=1)  # [read, source]
    names = [str(name) for name in data["source"].values]
    rows = np.full(weights.shape[:2], np.nan, weights.dtype)
    missing, chosen, several = {}, False, False
    for i, read in enumerate(sites_of(trace)[1:]):
        w = weights[i][:, exists[i]]
        held = [names[j] for j in np.flatnonzero(exists[i])]
        several |= len(held) > 1
        if len(held) == 1 and len(trace.source_atoms.get(read, {}).get(held[0], [read])) > 1:
            missing[read] = f"reads one carried {held[0].rstrip('0123456789')}: no weights over depth"
        elif not len(held) or (w < 0).any() or (np.abs(w.sum(-1) - 1) > OFF).any():
            missing[read] = "its weights are not a distribution: they do not sum to 1"
        else:
            total = w.sum(-1, keepdims=True)
            rows[i] = np.where(np.isfinite(w).all(-1), entropy(w / total), np.nan)
            chosen |= len(held) > 1
    absent = ""
    if not chosen and not several:
        absent = "this system carries one state and has no weights over depth"
    elif not chosen:
        ones = bool((weights[~np.isnan(weights)] == 1).all())
        why = "every earlier write has weight 1" if ones else "signed, or of another sum than 1"
        absent = f"the depth weights of this system are not a distribution ({why})"
    return rows, missing, absent


def _depth_entropy(trace: Any, about: Quantity) -> Grid:
    rows, missing, absent = _own_entropy(trace)
    return nothing(trace, about, absent) if absent else of_reads(trace, about, rows, missing=missing)


def _effective_sources(trace: Any, about: Quantity) -> Grid:
    rows, missing, absent = _own_entropy(trace)
    if absent:
        return nothing(trace, about, absent)
    return of_reads(trace, about, np.exp(rows), missing=missing, limits=(1.0, None))


def _effective_atoms(trace: Any, about: Quantity) -> Grid:
    shares = _shares(trace)
    rows = np.where(np.isfinite(shares).all(-1), np.exp(entropy(shares)), np.nan).astype(shares.dtype)
    rows[(shares == 0).all(-1)] = 0
    return of_reads(trace, about, rows)


def _depth_lookback(trace: Any, about: Quantity) -> Grid:
    shares = _shares(trace)
    n_reads, _, n_atoms = shares.shape
    back = (1 + np.arange(n_reads)[:, None] - np.arange(n_atoms)) / _per_block(trace)  # [read, atom]
    rows = (shares * back[:, None, :]).sum(-1).astype(shares.dtype)
    return of_reads(trace, about, rows)


def _energy(trace: Any, about: Quantity) -> Grid:
    if about.key not in trace.dataset:
        return nothing(trace, about, "the writes of this system do not edit a state along a direction")
    sites, rows = sites_of(trace), trace.dataset[about.key].transpose("write", "pos").values
    blank = np.full((1, rows.shape[1]), np.nan, rows.dtype)
    missing = {"embed": "the embedding starts the state and edits nothing", "out": "the readout writes nothing"}
    return Grid(quantity=about, values=np.concatenate([blank, rows, blank]), sites=sites, missing=missing)


def _edit_effect(trace: Any, about: Quantity) -> Grid:
    if "edit_effect" not in trace.dataset:
        return nothing(trace, about, "this pass was not edited")
    return of_reads(trace, about, trace.dataset["edit_effect"].transpose("read", "pos").values)


def _lens(variable: str, **limits: Any) -> Callable[[Any, Quantity], Grid]:
    def make(trace: Any, about: Quantity) -> Grid:
        if variable not in trace.dataset:
            return nothing(trace, about, _NO_TOKEN)
        rows = trace.dataset[variable].transpose("read", "pos").values
        if variable == "lens_kl":
            return of_reads(trace, about, rows, **limits)
        shown = np.exp(rows) if variable == "lens_logprob" else rows
        return of_reads(trace, _of_followed(trace, about), shown, blank=_unfollowed(trace), **limits)

    return make


def _of_followed(trace: Any, about: Quantity) -> Quantity:
    """The quantity with the token that it is about."""
    return replace(about, meaning=f"{about.meaning} Followed: {trace.follow}.")


def _unfollowed(trace: Any) -> dict[int, str]:
    ids = trace.dataset["followed_id"].values
    return {int(i): "no token is followed at this position" for i in np.flatnonzero(ids < 0)}


def _logit_share(trace: Any, about: Quantity) -> Grid:
    data = trace.dataset
    if "logit_share" not in data:
        why = "the head of this model is not linear, so that its logits are no sum of shares"
        return nothing(trace, about, why if "lens_kl" in data else _NO_TOKEN)
    rows = data["logit_share"].transpose("atom", "pos").values
    if np.isnan(rows).all() and not np.isnan(data["logit"].values).all():
        return nothing(trace, about, "behind this edit no sum of writes gives the logits")
    blank = np.full((1, rows.shape[1]), np.nan, rows.dtype)
    missing = {"out": "the readout writes nothing; the bias completes the sum"}
    values = np.concatenate([rows, blank])
    named = _of_followed(trace, about)
    return Grid(
        quantity=named,
        values=values,
        sites=sites_of(trace),
        missing=missing,
        blank=_unfollowed(trace),
        limits=(None, None),
    )


_ALL: tuple[tuple[Callable[[Any, Quantity], Grid], Quantity], ...] = (
    (
        _residual_norm,
        Quantity(
            key="residual_norm",
            label="residual norm",
            unit="",
            meaning="Length of what the site reads, before its norm.",
        ),
    ),
    (
        _write_norm,
        Quantity(
            key="write_norm",
            label="write size",
            unit="",
            meaning="Length of the raw sublayer output that the site writes (at embed: of the embedding).",
        ),
    ),
    (
        _gate,
        Quantity(
            key="gate",
            label="gate",
            unit="",
            meaning="The gate with which the system writes the site's output.",
        ),
    ),
    (
        _depth_entropy,
        Quantity(
            key="depth_entropy",
            label="depth entropy",
            unit="nats",
            meaning="Shannon entropy of the own depth weights of the read, where they are a distribution.",
        ),
    ),
    (
        _effective_sources,
        Quantity(
            key="effective_sources",
            label="effective sources",
            unit="sources",
            meaning="exp(entropy) of the own depth weights: over how many sources the read spreads.",
        ),
    ),
    (
        _effective_atoms,
        Quantity(
            key="effective_atoms",
            label="effective atoms",
            unit="atoms",
            meaning="exp(entropy) of the contributions' shares of length: over how many atoms the read "
            "spreads; every system has it, and it compares across systems.",
        ),
    ),
    (
        _depth_lookback,
        Quantity(
            key="depth_lookback",
            label="look-back in depth",
            unit="layers",
            meaning="Mean distance from the read to the atoms in it, weighted by the share of each "
            "contribution's length. The latest write is one sublayer back; a layer is one block.",
        ),
    ),
    (
        sequence_lookback,
        Quantity(
            key="sequence_lookback",
            label="look-back in the sequence",
            unit="positions",
            meaning="Mean distance from query to keys under the attention of the site, mean over heads.",
        ),
    ),
    (
        sequence_reach,
        Quantity(
            key="sequence_reach",
            label="look-back of the farthest head",
            unit="positions",
            meaning="Mean distance from query to keys under the attention of the site, of the head that looks "
            "back farthest.",
        ),
    ),
    (
        sequence_entropy,
        Quantity(
            key="sequence_entropy",
            label="sequence entropy",
            unit="nats",
            meaning="Shannon entropy of the attention of the site over positions, mean over heads.",
        ),
    ),
    (
        effective_positions,
        Quantity(
            key="effective_positions",
            label="effective positions",
            unit="positions",
            meaning="exp(entropy) of the attention of the site: over how many positions a head spreads, mean "
            "over heads.",
        ),
    ),
    (
        _energy,
        Quantity(
            key="erased_energy",
            label="erased energy",
            unit="state squared",
            meaning="|beta k k^T X|^2: squared length of what the write erases from the state along its direction.",
        ),
    ),
    (
        _energy,
        Quantity(
            key="written_energy",
            label="written energy",
            unit="state squared",
            meaning="|beta k v^T|^2: squared length of what the write puts into the state along its direction.",
        ),
    ),
    (
        _lens("lens_logprob", limits=(0.0, 1.0)),
        Quantity(
            key="lens_probability",
            label="lens probability",
            unit="",
            meaning="Probability of the followed token when what the site reads goes straight to the readout.",
        ),
    ),
    (
        _lens("lens_rank", limits=(1.0, None)),
        Quantity(
            key="lens_rank",
            label="lens rank",
            unit="",
            meaning="Place of the followed token among all tokens there; 1 is the likeliest.",
        ),
    ),
    (
        _lens("lens_kl"),
        Quantity(
            key="lens_kl",
            label="lens KL",
            unit="nats",
            meaning="KL(final || lens): what the prediction made of this read misses of the model's own prediction.",
        ),
    ),
    (
        _logit_share,
        Quantity(
            key="logit_share",
            label="share of the logit",
            unit="logit",
            meaning="What the write of the site adds to the logit of the followed token at its position, at the "
            "recorded norm scale; with the bias a column sums to the logit. Exact arithmetic, no causal claim.",
            scale="diverging",
        ),
    ),
    (
        _edit_effect,
        Quantity(
            key="edit_effect",
            label="effect of the edit",
            unit="",
            meaning="|edited - clean| / |clean|: how far what the site reads is from the read without the edits.",
        ),
    ),
)

QUANTITIES: dict[str, Quantity] = {about.key: about for _, about in _ALL}
"""key -> quantity, in the order in which a menu lists them."""

_MAKE = {about.key: make for make, about in _ALL}

"""Quantities of a trace on the grid of both axes: one number per site and position, with unit and meaning.

The grid has a row per site, `embed` first and `out` last, and a column per position. Where a quantity has no
value the grid holds NaN and says why: for a row (`Grid.missing`) or for the whole trace (`Grid.absent`). A
NaN that no reason covers came out of the model itself.

Everything here is numpy on the arrays of `Trace.dataset`; no model and no torch are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np

__all__ = ["QUANTITIES", "Grid", "Quantity", "attention_of", "grid", "quantity"]

_OFF = 1e-2
"""How far from 1 the sum of weights may lie and still be called a distribution: wide enough for bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What a grid shows. `scale`: what its colours mean (diverging: signed, centred at 0)."""

    key: str
    label: str
    unit: str
    meaning: str
    scale: Literal["sequential", "diverging"] = "sequential"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One quantity of one trace.

    Attributes:
        values: [site, pos], in the dtype of the trace; NaN where there is no value.
        sites: names of the rows, `embed`, the sublayers in reading order, `out`.
        missing: site -> why that whole row has no value.
        absent: why the trace has no such quantity at all, or "".
        limits: the range that the values cannot leave (None: no bound), as far as it is known.
    """

    quantity: Quantity
    values: np.ndarray
    sites: tuple[str, ...]
    missing: dict[str, str] = field(default_factory=dict)
    absent: str = ""
    limits: tuple[float | None, float | None] = (0.0, None)

    def why(self, site: str) -> str:
        """Why there is no value at `site`, or ""."""
        return self.absent or self.missing.get(site, "")


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


def attention_of(trace: Any) -> dict[str, np.ndarray]:
    """site -> attention over positions [head, query, key], NaN at keys that are masked; sites in reading order."""
    data = trace.dataset
    found = {}
    for variable, kind, head in (
        ("local_attention", "local", "local_head"),
        ("sequence_attention", "attn", "head"),
    ):
        if variable in data:
            head = head if head in data[variable].dims else "head"
            stack = data[variable].transpose("layer", head, "query", "key")
            found |= {f"{int(n)}.{kind}": stack.values[i] for i, n in enumerate(data["layer"].values)}
    return {site: found[site] for site in _sites(trace.of_way()) if site in found}


# --- shared pieces -----------------------------------------------------------------------------------


def _sites(trace: Any) -> tuple[str, ...]:
    return ("embed", *(str(site) for site in trace.dataset["read"].values))


_NOT_READ = {"embed": "the embedding is written, not read"}


def _of_reads(trace: Any, about: Quantity, rows: np.ndarray, **more: Any) -> Grid:
    """A grid from [read, pos]: the embedding is not read."""
    blank = np.full((1, rows.shape[1]), np.nan, rows.dtype)
    missing = {**_NOT_READ, **more.pop("missing", {})}
    return Grid(quantity=about, values=np.concatenate([blank, rows]), sites=_sites(trace), missing=missing, **more)


def _nothing(trace: Any, about: Quantity, why: str) -> Grid:
    sites = _sites(trace)
    values = np.full((len(sites), trace.dataset.sizes["pos"]), np.nan, np.float32)
    return Grid(quantity=about, values=values, sites=sites, absent=why)


def _entropy(p: np.ndarray) -> np.ndarray:
    """Shannon entropy in nats over the last axis; NaN entries are no part of it, and 0 log 0 is 0.

    Below 1e-12 it is rounding of a single source, and 0.
    """
    there = np.isfinite(p) & (p > 0)
    entropy = np.where(there, -p * np.log(np.where(there, p, 1)), 0).sum(-1)
    return np.where(np.abs(entropy) < 1e-12, 0, entropy)


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
    sites = _sites(trace)[1:-1]
    return len(sites) / len({site.split(".")[0] for site in sites})


# --- the quantities ----------------------------------------------------------------------------------


def _residual_norm(trace: Any, about: Quantity) -> Grid:
    return _of_reads(trace, about, trace.dataset["residual_norm"].transpose("read", "pos").values)


def _write_norm(trace: Any, about: Quantity) -> Grid:
    rows = trace.dataset["atom_norm"].transpose("atom", "pos").values
    blank = np.full((1, rows.shape[1]), np.nan, rows.dtype)
    return Grid(
        quantity=about,
        values=np.concatenate([rows, blank]),
        sites=_sites(trace),
        missing={"out": "the readout writes nothing to the stream"},
    )


def _gate(trace: Any, about: Quantity) -> Grid:
    if "gate" not in trace.dataset:
        return _nothing(trace, about, "this system has no gates")
    gates = trace.dataset["gate"].transpose("write", "pos")
    label = gates.attrs.get("label")
    named = replace(
        about,
        label=f"{about.label} {label}" if label else about.label,
        meaning=gates.attrs.get("meaning") or about.meaning,
    )
    sites = _sites(trace)
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
    for i, read in enumerate(_sites(trace)[1:]):
        w = weights[i][:, exists[i]]
        held = [names[j] for j in np.flatnonzero(exists[i])]
        several |= len(held) > 1
        if len(held) == 1 and len(trace.source_atoms.get(read, {}).get(held[0], [read])) > 1:
            missing[read] = f"reads one carried {held[0].rstrip('0123456789')}: no weights over depth"
        elif not len(held) or (w < 0).any() or (np.abs(w.sum(-1) - 1) > _OFF).any():
            missing[read] = "its weights are not a distribution: they do not sum to 1"
        else:
            total = w.sum(-1, keepdims=True)
            rows[i] = np.where(np.isfinite(w).all(-1), _entropy(w / total), np.nan)
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
    return _nothing(trace, about, absent) if absent else _of_reads(trace, about, rows, missing=missing)


def _effective_sources(trace: Any, about: Quantity) -> Grid:
    rows, missing, absent = _own_entropy(trace)
    if absent:
        return _nothing(trace, about, absent)
    return _of_reads(trace, about, np.exp(rows), missing=missing, limits=(1.0, None))


def _effective_atoms(trace: Any, about: Quantity) -> Grid:
    shares = _shares(trace)
    rows = np.where(np.isfinite(shares).all(-1), np.exp(_entropy(shares)), np.nan).astype(shares.dtype)
    rows[(shares == 0).all(-1)] = 0
    return _of_reads(trace, about, rows)


def _depth_lookback(trace: Any, about: Quantity) -> Grid:
    shares = _shares(trace)
    n_reads, _, n_atoms = shares.shape
    back = (1 + np.arange(n_reads)[:, None] - np.arange(n_atoms)) / _per_block(trace)  # [read, atom]
    rows = (shares * back[:, None, :]).sum(-1).astype(shares.dtype)
    return _of_reads(trace, about, rows)


def _sequence_lookback(trace: Any, about: Quantity) -> Grid:
    patterns = attention_of(trace)
    if not patterns:
        return _nothing(trace, about, "no attention over positions was recorded")
    if not trace.causal:
        return _nothing(trace, about, "the attention of this model looks ahead as well as back")
    sites = _sites(trace)
    n_pos = trace.dataset.sizes["pos"]
    values = np.full((len(sites), n_pos), np.nan, next(iter(patterns.values())).dtype)
    past = np.tri(n_pos, dtype=bool)
    back = np.arange(n_pos)[:, None] - np.arange(n_pos)
    for site, pattern in patterns.items():
        values[sites.index(site)] = (np.where(past, pattern.mean(0), 0) * back).sum(-1)
    missing = {site: "reads its own position only" for site in sites[1:] if site not in patterns}
    return Grid(quantity=about, values=values, sites=sites, missing={**_NOT_READ, **missing})


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
        _sequence_lookback,
        Quantity(
            key="sequence_lookback",
            label="look-back in the sequence",
            unit="positions",
            meaning="Mean distance from query to keys under the attention of the site, mean over heads.",
        ),
    ),
)

QUANTITIES: dict[str, Quantity] = {about.key: about for _, about in _ALL}
"""key -> quantity, in the order in which a menu lists them."""

_MAKE = {about.key: make for make, about in _ALL}

"""Quantities of the sequence axis: how attention over positions spreads, and how far back it looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from t2lens.analysis.grids import NOT_READ, OFF, Grid, Quantity, entropy, nothing, sites_of

__all__ = [
    "OWN_POSITION",
    "attention_of",
    "averaged_heads",
    "effective_positions",
    "sequence_bounds",
    "sequence_entropy",
    "sequence_lookback",
    "sequence_reach",
]

OWN_POSITION = "reads its own position only"
_NO_ATTENTION = "no attention over positions was recorded"
_MEAN_ALONE = "this trace holds the mean over attention heads alone"
_LOOKS_AHEAD = "the attention of this model looks ahead as well as back"


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
    return {site: found[site] for site in sites_of(trace.of_way()) if site in found}


def averaged_heads(trace: Any) -> dict[str, int]:
    """Kind of sublayer -> over how many heads its attention is a mean, where the trace holds no single heads."""
    data = trace.dataset
    kinds = {"attn": "sequence_attention", "local": "local_attention"}
    over = {kind: data[name].attrs.get("mean_of") for kind, name in kinds.items() if name in data}
    return {kind: int(n) for kind, n in over.items() if n is not None}


def sequence_bounds(trace: Any, key: str) -> tuple[float, float] | str | None:
    """Between what a quantity of attention lies, whatever the attention; a text: why the trace has no such quantity;
    None: `key` is another one."""
    n_pos = trace.dataset.sizes["pos"]
    bounds = {
        "sequence_lookback": (0.0, n_pos - 1.0),
        "sequence_reach": (0.0, n_pos - 1.0),
        "sequence_entropy": (0.0, float(np.log(n_pos))),
        "effective_positions": (1.0, float(n_pos)),
    }
    if key not in bounds:
        return None
    if not attention_of(trace):
        return _NO_ATTENTION
    if key != "sequence_lookback" and averaged_heads(trace):
        return _MEAN_ALONE
    return _LOOKS_AHEAD if key in ("sequence_lookback", "sequence_reach") and not trace.causal else bounds[key]


def sequence_lookback(trace: Any, about: Quantity) -> Grid:
    return _lookback(trace, about, lambda heads: heads.mean(0))


def sequence_reach(trace: Any, about: Quantity) -> Grid:
    if averaged_heads(trace):
        return nothing(trace, about, _MEAN_ALONE)
    return _lookback(trace, about, lambda heads: heads.max(0))


def _lookback(trace: Any, about: Quantity, over_heads: Callable[[np.ndarray], np.ndarray]) -> Grid:
    """over_heads: [head, query] mean distances -> [query]."""
    patterns = attention_of(trace)
    if not patterns:
        return nothing(trace, about, _NO_ATTENTION)
    if not trace.causal:
        return nothing(trace, about, _LOOKS_AHEAD)
    n_pos = trace.dataset.sizes["pos"]
    back = np.arange(n_pos)[:, None] - np.arange(n_pos)
    past = np.where(back >= 0, back, 0)
    rows = {}
    for site, pattern in patterns.items():
        seen = np.where(back >= 0, pattern, 0)
        rows[site] = over_heads(np.einsum("hqk,qk->hq", seen, past.astype(seen.dtype)))
    return _of_attention(trace, about, rows)


def _attended(trace: Any) -> dict[str, tuple[np.ndarray, str]]:
    """site -> (entropy in nats [head, query] of its attention over positions, why it has none or "")."""
    found = {}
    for site, pattern in attention_of(trace).items():
        sums = np.nansum(pattern, axis=-1)
        off = bool((np.abs(sums - 1) > OFF)[np.isfinite(pattern).any(axis=-1)].any())
        found[site] = (entropy(pattern), "its attention was edited and does not sum to 1" if off else "")
    return found


def _of_attention(trace: Any, about: Quantity, rows: dict[str, np.ndarray], **more: Any) -> Grid:
    """A grid from [query] of every site that attends."""
    sites = sites_of(trace)
    dtype = next(iter(rows.values())).dtype if rows else np.float32
    values = np.full((len(sites), trace.dataset.sizes["pos"]), np.nan, dtype)
    missing = {site: OWN_POSITION for site in sites[1:] if site not in rows}
    missing |= more.pop("missing", {})
    for site, row in rows.items():
        if site not in missing:
            values[sites.index(site)] = row
    return Grid(quantity=about, values=values, sites=sites, missing={**NOT_READ, **missing}, **more)


def sequence_entropy(trace: Any, about: Quantity) -> Grid:
    if averaged_heads(trace):
        return nothing(trace, about, _MEAN_ALONE)
    found = _attended(trace)
    if not found:
        return nothing(trace, about, _NO_ATTENTION)
    missing = {site: why for site, (_, why) in found.items() if why}
    return _of_attention(trace, about, {site: each.mean(0) for site, (each, _) in found.items()}, missing=missing)


def effective_positions(trace: Any, about: Quantity) -> Grid:
    if averaged_heads(trace):
        return nothing(trace, about, _MEAN_ALONE)
    found = _attended(trace)
    if not found:
        return nothing(trace, about, _NO_ATTENTION)
    missing = {site: why for site, (_, why) in found.items() if why}
    rows = {site: np.exp(each).mean(0) for site, (each, _) in found.items()}
    return _of_attention(trace, about, rows, missing=missing, limits=(1.0, None))

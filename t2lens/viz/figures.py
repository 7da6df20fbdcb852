"""Plotly figures of traces, for notebooks and papers: numpy in, figure out.

Three maps. `grid_map`: a quantity at every site and position. `depth_map`: what every read takes from depth
at one position. `sequence_map`: where a site looks in the sequence. Each shows one trace, or two side by side
on one stated range, and where they share their coordinates also the difference B - A.

Axes are numeric with tick text, so that a repeated token stays two columns. What has no value is blank, never
a zero; masked cells, exact zeros, numbers that are not finite and values above the range look different.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import numpy as np
import plotly.graph_objects as go

from t2lens.analysis.quantities import QUANTITIES, Grid, attention_of, grid
from t2lens.viz.labels import glyphs
from t2lens.viz.panels import MASKED, NO_SOURCE, Panel, Scale, draw
from t2lens.viz.payload import DEPTH, column_meaning, depth_range, ordered_reads, quantity_range

__all__ = ["depth_map", "grid_map", "plot", "sequence_map"]


def plot(trace: Any, quantity: str = "residual_norm", trace_b: Any = None, **options: Any) -> go.Figure:
    """A figure of one quantity of a trace, or of two traces side by side on one range.

    Args:
        quantity: a key of `t2lens.analysis.quantities.QUANTITIES` (a map of site x position: `grid_map`);
            "depth_weight", "mixing" or "contribution_norm" (read x source at one position: `depth_map`); or
            "attention" (query x key of one site: `sequence_map`).
        options: those of the function named above: pos, site, head, difference.

    Raises:
        KeyError: no such quantity, site or head. ValueError: no such position, or nothing to subtract.

    Example:
        >>> import t2lens
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2)
        >>> tr = t2lens.trace(t2lens.build(cfg, seed=0), [0, 7, 3, 7])
        >>> tr.plot("attention", site="1.attn", head=0).data[0].z.shape
        (4, 4)
    """
    depth = {variable: key for key, (variable, *_) in DEPTH.items()}
    if quantity in depth:
        return depth_map(trace, trace_b, reads=quantity, **options)
    if quantity == "attention":
        return sequence_map(trace, trace_b, **options)
    known = [*QUANTITIES, *depth, "attention"]
    if quantity not in QUANTITIES:
        near = get_close_matches(quantity, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
        raise KeyError(f"No quantity {quantity!r}; {hint}")
    return grid_map(trace, trace_b, quantity=quantity, **options)


def grid_map(
    trace: Any, trace_b: Any = None, *, quantity: str = "residual_norm", difference: bool = False
) -> go.Figure:
    """Site x position: one quantity of one trace, or of two on one range. `difference` adds B - A."""
    traces = _both(trace, trace_b)
    grids = [grid(each, quantity) for each in traces]
    shared = quantity_range(grids)
    about = next((each for each in grids if not each.absent), grids[0]).quantity
    maps = []
    for each, one in zip(grids, traces, strict=True):
        without = [i for i, site in enumerate(each.sites) if each.why(site)]
        kind = np.zeros(each.values.shape, np.uint8)
        kind[without] = NO_SOURCE
        kind[:, list(each.blank)] = NO_SOURCE
        maps.append(
            Panel(
                name=str(one.model_name),
                z=each.values,
                kind=kind,
                x=_tokens(one),
                y=list(each.sites),
                hover_x=_spelled(one),
                hover_y=list(each.sites),
                note=each.absent or _reasons(each),
                empty=each.absent,
            )
        )
    unit = f" ({about.unit})" if about.unit else ""
    scale = Scale(
        label=f"{about.label}{unit}",
        lo=shared["lo"],
        hi=shared["hi"],
        signed=shared["signed"],
        above=shared["above"],
        warp="log" if shared["log"] else "linear",
    )
    return draw(
        maps,
        scale,
        traces,
        axes=("position", "site"),
        about=about.meaning,
        hover=("at", "site", about.label),
        difference=difference,
    )


def depth_map(
    trace: Any,
    trace_b: Any = None,
    *,
    reads: str = "depth_weight",
    pos: int = -1,
    difference: bool = False,
) -> go.Figure:
    """Read x source at one position.

    reads: the system's own weights ("depth_weight"), the "mixing" matrix or "contribution_norm".
    pos: the position, counted from the end when negative. A source that does not exist at a read is blank.
    """
    traces = _both(trace, trace_b)
    by_variable = {variable: key for key, (variable, *_) in DEPTH.items()}
    if reads not in by_variable:
        raise KeyError(f"No reads {reads!r} from depth; there are {', '.join(by_variable)}.")
    key = by_variable[reads]
    shared = depth_range(key, traces)
    maps = []
    for one in traces:
        at = _position(one, pos)
        names, values = ordered_reads(one.dataset, key, one.source_atoms)
        kind = np.where(np.isnan(values).all(axis=-1), NO_SOURCE, 0).astype(np.uint8)
        rows = [str(name) for name in one.dataset["read"].values]
        maps.append(
            Panel(
                name=f"{one.model_name}, position {at} \u201c{glyphs(one.tokens[at])}\u201d",
                z=values[:, :, at],
                kind=kind,
                x=names,
                y=rows,
                hover_x=names,
                hover_y=rows,
                square=True,
            )
        )
    scale = Scale(label=shared["label"].lower(), lo=0.0, hi=shared["hi"], signed=shared["signed"], warp="root")
    return draw(
        maps,
        scale,
        traces,
        axes=("source" if key == "weights" else "atom", "read"),
        about=f"Row: a read. Column: {' or '.join(dict.fromkeys(column_meaning(one.dataset, key) for one in traces))}.",
        hover=("takes from", "read", shared["label"].lower()),
        difference=difference,
    )


def sequence_map(
    trace: Any,
    trace_b: Any = None,
    *,
    site: str | None = None,
    head: int | None = None,
    difference: bool = False,
) -> go.Figure:
    """Query x key: where a site looks in the sequence.

    site: a site with attention ("3.attn"), by default the middle one; head: one head, by default their mean.
    """
    traces = _both(trace, trace_b)
    maps = []
    for one in traces:
        patterns = attention_of(one)
        if not patterns:
            raise ValueError(f"The trace of {one.model_name} holds no attention over positions.")
        name = site if site is not None else list(patterns)[len(patterns) // 2]
        if name not in patterns:
            raise KeyError(f"No attention at {name!r}; the sites that look are {', '.join(patterns)}.")
        heads = patterns[name]
        if head is not None and not 0 <= head < len(heads):
            raise KeyError(f"{name} has the heads 0..{len(heads) - 1}, not {head}.")
        values = heads.mean(axis=0) if head is None else heads[head]
        kind = np.where(np.tri(len(values), dtype=bool), 0, MASKED).astype(np.uint8)
        which = f"mean of {len(heads)} heads" if head is None else f"head {head} of {len(heads)}"
        tokens, spelled = _tokens(one), _spelled(one)
        maps.append(
            Panel(
                name=f"{one.model_name}, {name}, {which}",
                z=values,
                kind=kind,
                x=tokens,
                y=tokens,
                hover_x=spelled,
                hover_y=spelled,
                down=True,
                square=True,
            )
        )
    scale = Scale(label="attention", lo=0.0, hi=1.0, warp="root")
    return draw(
        maps,
        scale,
        traces,
        axes=("key", "query"),
        about="Row: a query. Column: a key. Each row sums to 1.",
        hover=("key", "query", "attention"),
        difference=difference,
    )


def _both(trace: Any, trace_b: Any) -> list[Any]:
    return [trace] if trace_b is None else [trace, trace_b]


def _tokens(trace: Any) -> list[str]:
    return [glyphs(token) for token in trace.tokens]


def _spelled(trace: Any) -> list[str]:
    """`queen (7)`: a token and its position, so that repeated tokens are told apart."""
    return [f"{glyphs(token).lstrip(chr(0xB7))} ({i})" for i, token in enumerate(trace.tokens)]


def _reasons(each: Grid) -> str:
    """`No value at embed (the embedding is written, not read), 8 sites 0.mlp ... 7.mlp (...)`."""
    sites: dict[str, list[str]] = {}
    for site in each.sites:
        if site in each.missing:
            sites.setdefault(each.missing[site], []).append(site)
    parts = [
        f"{', '.join(at)} ({why})" if len(at) < 4 else f"the {len(at)} sites {at[0]} ... {at[-1]} ({why})"
        for why, at in sites.items()
    ]
    parts += [f"position {pos} ({why})" for pos, why in each.blank.items()]
    return f"No value at {'; at '.join(parts)}" if parts else ""


def _position(trace: Any, pos: int) -> int:
    n = len(trace.tokens)
    if not -n <= pos < n:
        raise ValueError(f"This trace has the positions 0..{n - 1}, not {pos}.")
    return pos % n

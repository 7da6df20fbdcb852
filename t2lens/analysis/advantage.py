"""Routing advantage: which routes training would strengthen or weaken, on both axes by one equation.

    z_i = sum_j a_ij v_j,   a_i = softmax(s_i)      dL/ds_ij = a_ij (b_ij - sum_k a_ik b_ik)
                                                    b_ij = dL/da_ij = <dL/dz_i, v_j>

That is the Jacobian of the softmax; arXiv 2512.22473 calls it the advantage-based routing law of sequence attention.
A route whose source would lower the loss more than the average of what is read now has dL/ds < 0: gradient descent
raises its score. Over depth z_i is the read of token i and v_j what one unit of weight on source j puts into it. A
place whose value is zero (a sink logit) has b = 0 and drops out of the sum, whatever its weight.

Other normalisers have g in the place of a, and an average under g:   dL/ds_j = g_j (b_j - sum_k g_k b_k / sum_k g_k)
    sparsemax  g = 1 on its support (arXiv 1602.02068)      entmax 1.5  g = sqrt(a) (arXiv 1905.05702)
    sigmoid    weights that do not compete: dL/ds_j = a_j (1 - a_j) b_j
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.inputs import Batch, read_batch
from t2lens.analysis.route_gradients import Route, RouteGradients
from t2lens.analysis.route_gradients import advantage as advantage
from t2lens.tracing import source_order

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["advantage", "routing_advantage"]

Axis = Literal["both", "sequence", "depth"]
TOWARD = ("first", "itself", "previous", "earlier")


def routing_advantage(
    model: Transformer,
    input: Any,
    *,
    axis: Axis = "both",
    position: int | None = None,
    attention_mask: Any = None,
) -> Finding:
    """dL/ds of every attention score, over positions and over depth: what training would strengthen and weaken.

    Args:
        input: text, texts or ids. Maps per position are kept for one sequence; of several, sums over positions.
        axis: "sequence" (attn and local, every head), "depth" (reads whose weights are made of scores), or "both".
        position: L is the loss of the prediction at this position (one sequence only); None: the mean over all.

    Returns:
        Finding with `route_advantage(read, source)` and `head_advantage(site, head, toward)`: dL/ds summed over
        positions, that is the change of L per unit by which the score is raised at every position, nats; and of one
        sequence the maps depth_b, depth_advantage, depth_weight (read, pos, source) and sequence_b,
        sequence_advantage, sequence_weight (site, head, query, key). Equation and source: module docstring.

    Raises:
        ValueError: an unknown axis, a position without a next token, a bidirectional model, or axis="depth" on a model
            in which no read has scores (DenseFormer, Deep Delta Learning: their weights or gates are not attention).

    Example:
        >>> import t2lens
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.AttnRes())
        >>> found = routing_advantage(t2lens.build(cfg, seed=0), [0, 7, 3, 7, 9], axis="depth")
        >>> found["depth_advantage"].dims
        ('read', 'pos', 'source')
        >>> bool(abs(found["depth_advantage"].sum("source")).max() < 1e-6)  # scores of one read compete
        True
    """
    if axis not in ("both", "sequence", "depth"):
        raise ValueError(f"axis must be both, sequence or depth, not {axis!r}.")
    batch = read_batch(model, input, attention_mask, losses=True)
    where = _positions(batch, position)
    run = RouteGradients(model, batch, where, axis)
    variables, coords, rows, notes = {}, {}, [], []
    single = len(batch.tokens) == 1
    coords["pos"] = np.arange(batch.tokens.shape[1])
    if single:
        coords["token"] = ("pos", np.array(batch.strings[0], dtype=object))
    charts: list[Chart] = []
    n = int(where.sum())
    if axis != "sequence":
        found = _over_depth(run, n, single, variables, coords, rows)
        if not found and axis == "depth":
            reasons = "; ".join(f"{', '.join(reads[:4])}: {why}" for why, reads in run.left_out.items())
            raise ValueError(
                f"No read of this model has attention scores over depth ({reasons}), so there is no routing advantage "
                'of the depth axis; use axis="sequence".'
            )
        notes += _depth_notes(run, found)
        charts += _depth_charts(variables) if found else []
    if axis != "depth":
        _over_sequence(run, n, single, variables, coords, rows)
        charts += _sequence_charts(variables)
    rows.sort(key=lambda row: -abs(row[4]))
    loss = f"the loss of the prediction at position {position}" if position is not None else "the mean next-token loss"
    for why, names in run.left_out.items():
        notes.append(f"Left out: {', '.join(names)} ({why}).")
    return Finding(
        title=f"Routing advantage, {_words(axis)}: dL/ds of {loss}",
        dataset=xr.Dataset(variables, coords=coords),
        columns=("axis", "route", "toward", "mean weight", "dL/ds (nats)", "training would"),
        rows=tuple(rows),
        notes=(
            f"L is {loss}, {run.loss / n:.4f} nats, n = {n} prediction{'s' if n > 1 else ''}; padding is left out.",
            "dL/ds in the table is summed over positions: what L changes by, per unit by which that score is raised "
            "at every position (the mean over positions of what the summed loss would change by). Negative: the loss "
            "falls when the score rises, so that training would strengthen the route.",
            "dL/ds = a (b - sum a b), b = <dL/dz, v>: the softmax Jacobian; for sequence attention also arXiv "
            "2512.22473. It is a first-order statement about scores taken one at a time; weights that are shared "
            "between tokens, heads and reads move together.",
            *notes,
            *([] if single else [f"{len(batch.tokens)} sequences: maps per position are kept for one sequence only."]),
            *batch.notices,
        ),
        charts=tuple(charts),
    )


def _words(axis: Axis) -> str:
    return "both axes" if axis == "both" else f"{axis} axis"


def _positions(batch: Batch, position: int | None) -> Tensor:
    """[B, T] bool: the predictions whose losses make up L."""
    if position is None:
        return batch.predicts
    if len(batch.tokens) > 1:
        raise ValueError(
            f"position is of one sequence; {len(batch.tokens)} were given: leave it out for the mean loss."
        )
    n = batch.tokens.shape[1]
    if not -n <= position < n:
        raise ValueError(f"position must lie in 0..{n - 1} (or count from the end), not {position}.")
    where = torch.zeros_like(batch.predicts)
    where[0, position] = True
    if not bool((where & batch.predicts).any()):
        known = batch.predicts[0].nonzero().flatten().tolist()
        raise ValueError(
            f"Position {position} has no next token, so no loss; positions {known[0]}..{known[-1]} have one."
        )
    return where


# --- what is kept of it ---------------------------------------------------------------------------------------------


def _over_depth(run: RouteGradients, n: int, single: bool, variables: dict, coords: dict, rows: list) -> list[Route]:
    """Adds variables, coordinates and table rows of the depth axis; the routes found (their arrays emptied)."""
    routes, sums, maps = [], [], []
    real = run.batch.valid.unsqueeze(-1)
    for route in run.depth_routes():
        slope, weight = (route.slope * real).sum(dim=(0, 1)) / n, (route.weights * real).sum(dim=(0, 1)) / real.sum()
        sums.append((slope.cpu().numpy(), weight.cpu().numpy()))
        if single:
            maps.append([_array(x[0], run) for x in (route.b / n, route.slope / n, route.weights)])
        for j, source in enumerate(route.columns):
            rows.append(("depth", route.name, source, float(weight[j]), float(slope[j]), _verdict(float(slope[j]))))
        empty = torch.empty(0)
        routes.append(route._replace(weights=empty, b=empty, slope=empty, seen=empty))
    if not routes:
        return []
    reads, sources = [r.name for r in routes], _used(run.model, routes)
    coords["read"], coords["source"] = np.array(reads, dtype=object), np.array(sources, dtype=object)
    per = np.full((2, len(reads), len(sources)), np.nan)
    full = np.full((3, len(reads), run.batch.tokens.shape[1], len(sources)), np.nan, _kind(run)) if single else None
    for i, route in enumerate(routes):
        columns = [sources.index(name) for name in route.columns]
        per[:, i, columns] = sums[i]
        if full is not None:
            full[:, i, :, columns] = np.stack(maps[i]).transpose(2, 0, 1)
            full[:, i, ~run.batch.valid[0].cpu().numpy()] = np.nan
    variables["route_advantage"] = (("read", "source"), per[0], _SUMMED)
    variables["route_weight"] = (("read", "source"), per[1], {"meaning": "mean depth weight", "unit": "weight"})
    if full is not None:
        dims = ("read", "pos", "source")
        variables["depth_b"] = (dims, full[0], _B)
        variables["depth_advantage"] = (dims, full[1], _SLOPE)
        variables["depth_weight"] = (dims, full[2], {"meaning": "depth weight", "unit": "weight"})
    return routes


def _over_sequence(run: RouteGradients, n: int, single: bool, variables: dict, coords: dict, rows: list) -> None:
    """Adds variables, coordinates and table rows of the sequence axis."""
    sites, t = list(run.sites), run.batch.tokens.shape[1]
    heads = max(site.pattern.shape[1] for site in run.sites.values())
    per = np.full((2, len(sites), heads, len(TOWARD)), np.nan)
    pressure = np.full((len(sites), heads), np.nan)
    full = np.full((3, len(sites), heads, t, t), np.nan, _kind(run)) if single else None
    classes, real = _toward(run.batch.valid), run.batch.valid[:, None, :, None]
    for route in run.sequence_routes():
        i, n_heads = sites.index(route.name), len(route.columns)
        slope = torch.where(route.seen, route.slope, 0.0) * real / n
        weight = route.weights * real / real.sum()
        for c, there in enumerate(classes):
            sums = [(x * there.unsqueeze(1)).sum(dim=(0, 2, 3)).cpu().numpy() for x in (slope, weight)]
            per[:, i, :n_heads, c] = sums
            for head in range(n_heads):
                down, mass = float(sums[0][head]), float(sums[1][head])
                rows.append(("sequence", f"{route.name} head {head}", TOWARD[c], mass, down, _verdict(down)))
        pressure[i, :n_heads] = slope.abs().sum(dim=(0, 2, 3)).cpu().numpy()
        if full is not None:
            there = (route.seen & real)[0]
            for part, x in zip(full, (route.b[0] / n, slope[0], route.weights[0]), strict=True):
                part[i, :n_heads] = _array(torch.where(there, x, torch.nan), run)
    coords["site"], coords["head"] = np.array(sites, dtype=object), np.arange(heads)
    coords["toward"] = np.array(TOWARD, dtype=object)
    dims = ("site", "head", "toward")
    variables["head_advantage"] = (dims, per[0], _SUMMED)
    variables["head_weight"] = (dims, per[1], {"meaning": "attention paid, mean over queries", "unit": "probability"})
    meaning = "sum of |dL/ds| over queries and keys: how strongly training pulls at the head"
    variables["head_pressure"] = (("site", "head"), pressure, {"meaning": meaning, "unit": "nats per unit score"})
    if full is not None:
        coords["query"] = coords["key"] = np.arange(t)
        dims = ("site", "head", "query", "key")
        variables["sequence_b"] = (dims, full[0], _B)
        variables["sequence_advantage"] = (dims, full[1], _SLOPE)
        variables["sequence_weight"] = (dims, full[2], {"meaning": "attention pattern", "unit": "probability"})


_B = {"meaning": "b = dL/da = <dL/dz, v>", "unit": "nats per unit weight"}
_SLOPE = {"meaning": "dL/ds; negative: training would strengthen the route", "unit": "nats per unit score"}
_SUMMED = {
    "meaning": "dL/ds summed over positions; negative: training would strengthen it",
    "unit": "nats per unit score",
}


def _toward(valid: Tensor) -> list[Tensor]:
    """[B, T, T] bool for each of TOWARD, which exclude each other: a key is the query itself, else the first real
    token, else the one before the query, else an earlier one."""
    index = torch.arange(valid.shape[1], device=valid.device)
    itself = (index[:, None] == index[None, :]).expand(len(valid), -1, -1)
    first = (index == valid.int().argmax(dim=1, keepdim=True)).unsqueeze(1) & ~itself
    previous = (index[:, None] == index[None, :] + 1) & ~first & ~itself
    return [first, itself, previous, ~(first | itself | previous)]


def _verdict(slope: float) -> str:
    return "strengthen" if slope < 0 else "weaken" if slope > 0 else "leave as it is"


def _used(model: Transformer, routes: list[Route]) -> list[str]:
    """The sources of these reads, in the order of a trace."""
    wanted = {name for route in routes for name in route.columns}
    return [name for name in source_order(model) if name in wanted]


def _kind(run: RouteGradients) -> type:
    return np.float64 if run.model.W_E.dtype == torch.float64 else np.float32


def _array(x: Tensor, run: RouteGradients) -> np.ndarray:
    return x.cpu().numpy().astype(_kind(run))


def _depth_notes(run: RouteGradients, routes: list[Route]) -> list[str]:
    notes = []
    others = sorted({route.normaliser for route in routes} - {"softmax"})
    if others:
        notes.append(f"Depth weights here are made by {', '.join(others)}; dL/ds has the Jacobian of that.")
    scores = list(run.scores.values())
    if routes and all(torch.equal(s, s[:1, :1].expand_as(s)) for s in scores):
        notes.append("The depth scores are parameters, the same for every token: the sum is the parameter's gradient.")
    if routes and run.model.W_E.dtype in (torch.float16, torch.bfloat16):
        notes.append("In half precision what a unit of weight puts into a read is rounded; take float32 for small b.")
    return notes


def _depth_charts(variables: dict) -> list[Chart]:
    out = [Chart(kind="heat", variable="route_advantage", x="source", y="read", signed=True, title="Depth: dL/ds")]
    if "depth_advantage" in variables:
        size = np.nansum(np.abs(variables["depth_advantage"][1]), axis=(1, 2))
        title = "Depth: dL/ds by position, the read pulled at most"
        at = (("read", int(size.argmax())),)
        out.append(Chart(kind="heat", variable="depth_advantage", x="pos", y="source", signed=True, at=at, title=title))
    return out


def _sequence_charts(variables: dict) -> list[Chart]:
    title = "Sequence: sum of |dL/ds| per head"
    out = [Chart(kind="heat", variable="head_pressure", x="head", y="site", title=title)]
    if "sequence_advantage" in variables:
        pressure = np.nan_to_num(variables["head_pressure"][1])
        site, head = np.unravel_index(int(pressure.argmax()), pressure.shape)
        at = (("site", int(site)), ("head", int(head)))
        title = "Sequence: dL/ds, the head pulled at most"
        out.append(
            Chart(kind="heat", variable="sequence_advantage", x="key", y="query", signed=True, at=at, title=title)
        )
    return out

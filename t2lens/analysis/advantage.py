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

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.inputs import Batch, read_batch
from t2lens.analysis.progress import progress
from t2lens.analysis.route_gradients import Route, RouteGradients
from t2lens.analysis.route_gradients import advantage as advantage
from t2lens.files import few
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
        sequence_advantage (site, head, query, key). Equation and source: module docstring.

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
    kept = _Kept(model, batch, int(where.sum()))
    for start, size in _groups(batch):
        some = slice(start, start + size)
        mask = None if batch.mask is None else batch.mask[some]
        part = replace(batch, tokens=batch.tokens[some], mask=mask)
        kept.add(RouteGradients(model, part, where[some], axis))
    kept.close()
    if axis == "depth" and not kept.depth:
        reasons = "; ".join(f"{few(names, 4)}: {why}" for (_, why), names in kept.left_out.items())
        raise ValueError(
            f"No read of this model has attention scores over depth ({reasons}), so there is no routing advantage "
            'of the depth axis; use axis="sequence".'
        )
    loss = f"the loss of the prediction at position {position}" if position is not None else "the mean next-token loss"
    return kept.finding(axis, loss)


_AT_ONCE = 1024  # tokens per pass: the graph of a pass is what takes memory


def _groups(batch: Batch) -> Iterator[tuple[int, int]]:
    """(first, how many) sequences of each pass."""
    n, size = len(batch.tokens), max(1, _AT_ONCE // batch.tokens.shape[1])
    starts = range(0, n, size)
    for start in progress(starts, "Gradients at every score", total=len(starts)) if len(starts) > 1 else starts:
        yield start, size


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


class _Kept:
    """Sums over the tokens of all passes, and of one sequence the maps per position."""

    def __init__(self, model: Transformer, batch: Batch, n: int) -> None:
        self.model, self.batch, self.n, self.loss = model, batch, n, 0.0
        self.single, self.n_tokens = len(batch.tokens) == 1, int(batch.valid.sum())
        self.kind = np.float64 if model.W_E.dtype == torch.float64 else np.float32
        self.depth: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}  # read -> sources, [dL/ds or weight, source]
        self.sequence: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # site -> [2, head, toward], pressure [head]
        self.maps: dict[str, np.ndarray] = {}  # read -> b, dL/ds, weights, each [pos, source]
        self.grids: np.ndarray | None = None  # b and dL/ds [site, head, query, key]
        self.left_out: dict[tuple[str, str], list[str]] = {}  # axis, reason -> names
        self.normalisers: set[str] = set()
        self.static, self.sites = True, list[str]()

    def add(self, run: RouteGradients) -> None:
        """The routes of one pass."""
        self.loss += run.loss
        self.sites = list(run.sites)
        real = run.batch.valid
        for route in run.depth_routes():
            self.normalisers.add(route.normaliser)
            both = [(x * real.unsqueeze(-1)).sum(dim=(0, 1)) for x in (route.slope, route.weights)]
            sums = np.stack([both[0].cpu().numpy() / self.n, both[1].cpu().numpy() / self.n_tokens])
            self._sum(self.depth, route.name, (route.columns, sums))
            if self.single:
                there, parts = real[0].unsqueeze(-1), (route.b[0] / self.n, route.slope[0] / self.n, route.weights[0])
                self.maps[route.name] = np.stack([torch.where(there, x, torch.nan).cpu().numpy() for x in parts])
        self.static &= all(torch.equal(s, s[:1, :1].expand_as(s)) for s in run.scores.values())
        classes = torch.stack([there & real.unsqueeze(-1) for there in _toward(real)])  # [4, B, T, T]
        for route in run.sequence_routes():
            there = classes.to(route.slope.dtype)
            sums = [torch.einsum("bhqk,cbqk->hc", x, there).cpu().numpy() for x in (route.slope, route.weights)]
            per = np.stack([sums[0] / self.n, sums[1] / self.n_tokens])
            pull = torch.einsum("bhqk,bq->h", route.slope.abs(), real.to(there.dtype)).cpu().numpy() / self.n
            self._sum(self.sequence, route.name, (per, pull))
            if self.single:
                self._keep_maps(run, route, route.seen[0] & real[0, None, :, None])
        for why, names in run.left_out.items():
            self.left_out[why] = list(dict.fromkeys([*self.left_out.get(why, []), *names]))

    def close(self) -> None:
        """What was left out of one pass is left out: its sums are not of all tokens."""
        for (axis, _), names in self.left_out.items():
            for name in names:
                (self.depth if axis == "depth" else self.sequence).pop(name, None)

    @staticmethod
    def _sum(into: dict[str, Any], name: str, new: tuple[Any, ...]) -> None:
        old = into.get(name)
        into[name] = (
            new if old is None else tuple(a if isinstance(a, tuple) else a + b for a, b in zip(old, new, strict=True))
        )

    def _keep_maps(self, run: RouteGradients, route: Route, there: Tensor) -> None:
        """b and dL/ds of one attention site, where they stay: these are the largest arrays by far."""
        if self.grids is None:
            t, heads = there.shape[-1], max(site.z.shape[2] for site in run.sites.values())
            self.grids = np.empty((2, len(run.sites), heads, t, t), self.kind)  # memory that is used site by site
        i = self.sites.index(route.name)
        for grid, x in zip(self.grids, (route.b, route.slope), strict=True):
            grid[i, x.shape[1] :] = np.nan
            grid[i, : x.shape[1]] = torch.where(there, x[0] / self.n, torch.nan).cpu().numpy()

    def finding(self, axis: Axis, loss: str) -> Finding:
        variables: dict[str, Any] = {}
        coords: dict[str, Any] = {"pos": np.arange(self.batch.tokens.shape[1])}
        if self.single:
            coords["token"] = ("pos", np.array(self.batch.strings[0], dtype=object))
        charts = [*self._over_depth(variables, coords), *self._over_sequence(variables, coords)]
        n = len(self.batch.tokens)
        rows: list[tuple[str, str, str, float, float, str]] = sorted(self._rows(), key=lambda row: -abs(row[4]))
        return Finding(
            title=f"Routing advantage, {_words(axis)}: dL/ds of {loss}",
            dataset=xr.Dataset(variables, coords=coords),
            columns=("axis", "route", "toward", "mean weight", "dL/ds (nats)", "training would"),
            rows=tuple(rows),
            notes=(
                f"L is {loss}, {self.loss / self.n:.4f} nats, n = {self.n} prediction{'s' if self.n > 1 else ''}; "
                "padding is left out.",
                "dL/ds in the table is summed over positions: what L changes by, per unit by which that score is "
                "raised at every position (the mean over positions of what the summed loss would change by). Negative: "
                "the loss falls when the score rises, so that training would strengthen the route.",
                "dL/ds = a (b - sum a b), b = <dL/dz, v>: the softmax Jacobian; for sequence attention also arXiv "
                "2512.22473. It is a first-order statement about scores taken one at a time; weights that are shared "
                "between tokens, heads and reads move together.",
                *self._notes(),
                *([] if self.single else [f"{n} sequences: maps per position are kept for one sequence only."]),
                *self.batch.notices,
            ),
            charts=tuple(charts),
        )

    def _rows(self) -> Iterator[tuple[str, str, str, float, float, str]]:
        for name, (columns, (slopes, weights)) in self.depth.items():
            for source, slope, weight in zip(columns, slopes.tolist(), weights.tolist(), strict=True):
                yield "depth", name, source, weight, slope, _verdict(slope)
        for name, ((slopes, weights), _) in self.sequence.items():
            for head, (of_slope, of_weight) in enumerate(zip(slopes.tolist(), weights.tolist(), strict=True)):
                for toward, slope, weight in zip(TOWARD, of_slope, of_weight, strict=True):
                    yield "sequence", f"{name} head {head}", toward, weight, slope, _verdict(slope)

    def _over_depth(self, variables: dict, coords: dict) -> list[Chart]:
        if not self.depth:
            return []
        used = {name for columns, _ in self.depth.values() for name in columns}
        reads, sources = list(self.depth), [name for name in source_order(self.model) if name in used]
        coords["read"], coords["source"] = np.array(reads, dtype=object), np.array(sources, dtype=object)
        per = np.full((2, len(reads), len(sources)), np.nan)
        full = np.full((3, len(reads), self.batch.tokens.shape[1], len(sources)), np.nan, self.kind)
        for i, (name, (columns, sums)) in enumerate(self.depth.items()):
            at = [sources.index(column) for column in columns]
            per[:, i, at] = sums
            if self.single:
                full[:, i, :, at] = self.maps[name].transpose(2, 0, 1)
        variables["route_advantage"] = (("read", "source"), per[0], _SUMMED)
        variables["route_weight"] = (("read", "source"), per[1], {"meaning": "mean depth weight", "unit": "weight"})
        title = "Depth: dL/ds"
        charts = [Chart(kind="heat", variable="route_advantage", x="source", y="read", signed=True, title=title)]
        if self.single:
            dims = ("read", "pos", "source")
            variables["depth_b"] = (dims, full[0], _B)
            variables["depth_advantage"] = (dims, full[1], _SLOPE)
            variables["depth_weight"] = (dims, full[2], {"meaning": "depth weight", "unit": "weight"})
            read = int(np.nansum(np.abs(full[1]), axis=(1, 2)).argmax())
            title = f"Depth: dL/ds by position at {reads[read]}, the read pulled at most"
            at = (("read", read),)
            heat = {"kind": "heat", "variable": "depth_advantage", "x": "pos", "y": "source", "signed": True}
            charts.append(Chart(**heat, at=at, title=title))
        return charts

    def _over_sequence(self, variables: dict, coords: dict) -> list[Chart]:
        if not self.sequence:
            return []
        sites = self.sites  # those left out are NaN
        heads = max(len(pressure) for _, pressure in self.sequence.values())
        per, pull = np.full((2, len(sites), heads, len(TOWARD)), np.nan), np.full((len(sites), heads), np.nan)
        for name, (sums, pressure) in self.sequence.items():
            i = sites.index(name)
            per[:, i, : len(pressure)], pull[i, : len(pressure)] = sums, pressure
        coords["site"], coords["head"] = np.array(sites, dtype=object), np.arange(heads)
        coords["toward"] = np.array(TOWARD, dtype=object)
        dims = ("site", "head", "toward")
        variables["head_advantage"] = (dims, per[0], _SUMMED)
        meaning = {"meaning": "attention paid, mean over queries", "unit": "probability"}
        variables["head_weight"] = (dims, per[1], meaning)
        meaning = "sum of |dL/ds| over queries and keys: how strongly training pulls at the head"
        variables["head_pressure"] = (("site", "head"), pull, {"meaning": meaning, "unit": "nats per unit score"})
        title = "Sequence: sum of |dL/ds| per head"
        charts = [Chart(kind="heat", variable="head_pressure", x="head", y="site", title=title)]
        if self.grids is not None:
            coords["query"] = coords["key"] = np.arange(self.grids.shape[-1])
            self.grids[:, [i for i, name in enumerate(sites) if name not in self.sequence]] = np.nan
            dims = ("site", "head", "query", "key")
            variables["sequence_b"] = (dims, self.grids[0], _B)
            variables["sequence_advantage"] = (dims, self.grids[1], _SLOPE)
            site, head = (int(i) for i in np.unravel_index(int(np.nan_to_num(pull).argmax()), pull.shape))
            title = f"Sequence: dL/ds of {sites[site]} head {head}, the head pulled at most"
            at = (("site", site), ("head", head))
            heat = {"kind": "heat", "variable": "sequence_advantage", "x": "key", "y": "query", "signed": True}
            charts.append(Chart(**heat, at=at, title=title))
        return charts

    def _notes(self) -> list[str]:
        notes = []
        if others := sorted(self.normalisers - {"softmax"}):
            notes.append(f"Depth weights here are made by {', '.join(others)}; dL/ds has the Jacobian of that.")
        if self.depth and self.static:
            notes.append(
                "The depth scores are parameters, the same for every token: the sum is the parameter's gradient."
            )
        if self.depth and self.model.W_E.dtype in (torch.float16, torch.bfloat16):
            notes.append("In half precision what a unit of weight puts into a read is rounded; take float32.")
        notes += [f"Left out: {few(names, 6)} ({why})." for (_, why), names in self.left_out.items()]
        return notes


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

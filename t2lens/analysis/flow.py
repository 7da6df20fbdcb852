"""Two-axis rollout: unit mass at one read, followed back over depth and over positions until the embeddings hold it.

    depth       a read divides its mass over what was written, in proportion to the size of each contribution:
                mass(a, t') += mass(read, t) |c_a,t'| / sum |c|      with  read_t = sum_{a,t'} c_a,t'
    sequence    an atom divides its mass over the positions that its sublayer read, by the same rule:
                mass(read, s) += mass(atom, t) |u_s| / sum |u|       with  atom_t = sum_s u_s + constant

Attention rollout (Abnar & Zuidema 2020, arXiv 2005.00928) multiplies attention maps and stands every residual
connection at one half; here the depth axis is what the residual system does. The size on the sequence axis is that of
the attention-weighted value after the output projection, summed over heads (Kobayashi et al. 2020, arXiv 2004.10102),
because weights on small values move nothing. An MLP stays at its position. Both axes follow the one rule, "contribution
to the frozen pass" (`t2lens.analysis.frozen`), so convolutions over time, KV shift, value residuals and reads that look
back in time (Deep Delta Learning compressed over time) need no rule of their own.

Every step divides all of the mass it was given, so what the embeddings absorb sums to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.frozen import Frozen, place, value_read
from t2lens.analysis.inputs import Batch, check_finite, read_batch
from t2lens.analysis.layout import put, token_coords
from t2lens.analysis.progress import progress
from t2lens.analysis.sizes import WATCHED, Lags, Pairs, Size, sequence_sizes, size_of
from t2lens.mixing import Step, account_by_read, walk
from t2lens.residual import Read, Site
from t2lens.sublayers.norms import wide

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["Flow", "Masses", "rollout", "site_masses", "start_of"]

_BUDGET = 2**25  # numbers of what a system carries at a time


@torch.inference_mode(False)  # gradients are wanted wherever this is called from
def rollout(
    model: Transformer,
    input: Any,
    *,
    attention_mask: Any = None,
    pos: int = -1,
    site: str = "out",
    way: str | None = None,
    by: Size = "norm",
    form: str = "additive",
) -> Finding:
    """Where what is read at one place comes from, over both axes: every (site, position) node's share of it.

    Equation and source: see the module. Mass is a share, at most 1 at any node; nodes of different depth lie on the
    same routes and do not add up, while the embeddings' absorbed mass sums to 1.

    Args:
        input: one text, or token ids [pos] or [1, pos] with their `attention_mask`.
        pos, site: the read that is followed back; pos is counted over the real tokens (negative: from the end).
        way: which read of the site, where it has several; by default the one whose content it passes on ("v").
        by: the size of a contribution, "norm" (its length) or "projection" (its part along the whole, if positive; the
            whole is the read, or what the sublayer wrote).
        form: form of the residual system's account, as in `mixing_matrix`.

    Returns:
        A Finding with `mass` (site, pos) that passes each read, `atom_mass` (atom, pos) that passes each write,
        `absorbed` (pos) by the embeddings, and `stuck` (site, pos): mass that reached a place with no contribution to
        follow (a zero read, or a sublayer that wrote only its bias). absorbed and stuck sum to 1.

    Raises:
        ValueError: several sequences, no such position, site, way, form or `by`.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import rollout
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0)
        >>> found = rollout(model, [0, 7, 3])
        >>> round(float(found["absorbed"].sum()), 6)
        1.0
    """
    if by not in ("norm", "projection"):
        raise ValueError(f"by must be norm or projection, not {by!r}.")
    start = start_of(model, site, way)
    batch = read_batch(model, input, attention_mask)
    at = place(batch, pos)
    flow = Flow(model, batch, by, form)
    check_finite(flow.frozen.record.read(start.name), batch, f"What is read at {start.name}")
    return _finding(model, batch, start, at, by, flow.back(start, at))


def start_of(model: Transformer, site: str, way: str | None) -> Read:
    sites = {each.name: each for each in model.sites}
    if site not in sites:
        near = get_close_matches(site, sites, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sites)}."
        raise ValueError(f"No site {site!r}; {hint}")
    ways = model.residual.ways(sites[site])
    if way is None:
        return value_read(model.residual, sites[site])
    if way not in ways:
        given = ", ".join(map(repr, ways)) if ways != ("",) else "one way only, so leave way out"
        raise ValueError(f"The site {site} does not read in the way {way!r}; it has {given}.")
    return Read(sites[site], way)


@dataclass
class Masses:
    """Where the mass of one read went: mass, read name -> [T]; atom_mass [A, T]; stuck [site, T]. float64, CPU."""

    mass: dict[str, Tensor]
    atom_mass: Tensor
    stuck: Tensor


class Flow:
    """The shares of one recorded pass of one sequence, made as they are needed and kept: following another read of the
    same pass back costs little. The pass runs at once; `back` needs neither hooks nor edits that were attached to it.
    What is kept is a number per attention sublayer and pair of positions (`nbytes`); the pass itself, which is larger,
    goes as they are found (`divide`: all of them now).

    by, form: as `rollout`.
    """

    def __init__(self, model: Transformer, batch: Batch, by: Size = "norm", form: str = "additive") -> None:
        watch = [f"blocks.{s.layer}.{s.kind}.hook_{x}" for s in model.sites[:-1] if s.kind != "mlp" for x in WATCHED]
        self.frozen = Frozen(model, batch.tokens, batch.mask, form=form, watch=watch)
        self.by: Size = by
        self.n_pos = batch.tokens.shape[1]
        self.depth: dict[str, Tensor] = {}  # read name -> [A, lag, T]
        self.sequence: dict[int, tuple[dict[str, Pairs | Lags], Tensor]] = {}  # site -> sizes by read, their sums [T]

    @property
    def nbytes(self) -> int:
        """Bytes of the shares found so far."""
        sizes = [each.sizes for parts, _ in self.sequence.values() for each in parts.values()]
        return sum(x.nbytes for x in [*sizes, *self.depth.values()])

    @torch.inference_mode(False)
    def divide(self) -> Flow:
        """Find all shares now, for the values of every site; returns the flow itself."""
        model = self.frozen.model
        every = {value_read(model.residual, site).name for site in model.sites}
        self.depth.update(self._depth_shares(every - self.depth.keys()))
        for site in progress(model.sites[:-1], "Dividing writes over positions", total=len(model.sites) - 1):
            self._sizes(site)
        return self

    @torch.inference_mode(False)  # gradients are wanted wherever this is called from
    def back(self, start: Read, at: int) -> Masses:
        """Unit mass at position `at` of a read, followed back."""
        model, residual = self.frozen.model, self.frozen.model.residual
        sites = model.sites[: start.site.index]
        reads = [start, *(value_read(residual, s) for s in sites)]
        missing = {read.name for read in reads} - self.depth.keys()
        if missing:  # of all values at once, since the system's code runs through all reads anyway
            every = {value_read(residual, site).name for site in model.sites}
            self.depth.update(self._depth_shares((missing | every) - self.depth.keys()))
        found = Masses(
            mass={read.name: torch.zeros(self.n_pos, dtype=torch.float64) for read in reads},
            atom_mass=torch.zeros(len(model.atoms), self.n_pos, dtype=torch.float64),
            stuck=torch.zeros(len(model.sites), self.n_pos, dtype=torch.float64),
        )
        found.mass[start.name][at] = 1.0
        self._to_atoms(start, found)
        for site in progress(reversed(sites), "Following mass back", total=len(sites)):
            if bool((found.atom_mass[site.index + 1] > 0).any()):
                self._to_reads(site, found)
            self._to_atoms(value_read(residual, site), found)
        return found

    def _to_atoms(self, read: Read, found: Masses) -> None:
        """What a read holds goes to the atoms, each at the position where it was written."""
        mass, shares = found.mass[read.name], self.depth[read.name]  # [T], [A, lag, T]
        for lag in range(shares.shape[1]):
            moved = shares[:, lag] * mass
            found.atom_mass[:, : self.n_pos - lag] += moved[:, lag:]
        found.stuck[read.site.index] += mass * (shares.sum(dim=(0, 1)) == 0)

    def _to_reads(self, site: Site, found: Masses) -> None:
        """What an atom holds goes to the reads that its sublayer made it of, at their positions."""
        mass = found.atom_mass[site.index + 1]
        parts, total = self._sizes(site)
        weights = torch.where(total > 0, mass / torch.where(total > 0, total, 1.0), 0.0)
        for name, sizes in parts.items():
            found.mass[name] += sizes.back(weights)
        found.stuck[site.index] += mass * (total <= 0)

    def _sizes(self, site: Site) -> tuple[dict[str, Pairs | Lags], Tensor]:
        """The sizes of what `site` reads, by read, and their sums over reads and positions [T]."""
        if site.index not in self.sequence:
            parts = dict(sequence_sizes(self.frozen, site, self.by))
            total = sum((each.totals() for each in parts.values()), torch.zeros(self.n_pos, dtype=torch.float64))
            self.sequence[site.index] = parts, total
            self.frozen.forget(site)
        return self.sequence[site.index]

    def _depth_shares(self, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
        """For every wanted read: its shares [A, lag, T] of atoms written `lag` positions earlier."""
        n_lags = min(1 + self.frozen.model.residual.looks_back, self.n_pos)
        found = {name: torch.zeros(len(self.frozen.atoms), n_lags, self.n_pos, dtype=torch.float64) for name in wanted}
        t = torch.arange(self.n_pos)
        # atoms of one position in n_lags at a time: then every read sees at most one of them, and which is known
        for kept in progress(range(n_lags), "Dividing reads over depth", total=n_lags):
            for read, atoms, size in _depth_sizes(self.frozen, t % n_lags == kept, self.by, wanted):
                found[read.name][atoms, (t - kept) % n_lags, t] = size[:, 0].double().cpu()
        for name, sizes in found.items():
            total = sizes.sum(dim=(0, 1))
            yield name, torch.where(total > 0, sizes / torch.where(total > 0, total, 1.0), 0.0)


@torch.no_grad()
def _depth_sizes(frozen: Frozen, where: Tensor, by: Size, wanted: set[str]) -> Iterator[tuple[Read, slice, Tensor]]:
    """For every wanted read, some atoms at a time: sizes [A, B, T] of what they wrote at positions `where`."""
    code, n_atoms, record = frozen.code, len(frozen.atoms), frozen.record
    if code.coefficients() != "operator" and bool(where.all()):
        exact = wide(frozen.atoms[0]).dtype == frozen.atoms[0].dtype  # else each contribution is widened first
        for account in account_by_read(frozen.model.residual, record, frozen.form):
            if (read := account.read).name in wanted:
                short = by == "norm" and exact
                whole = record.reads[read.name]
                yield read, slice(n_atoms), account.lengths() if short else size_of(account.contributions(), whole, by)
        return
    step = max(1, _BUDGET // (n_atoms * frozen.atoms[0].numel()))  # a system may carry all that was written
    for first in range(0, n_atoms, step):
        some = range(first, min(first + step, n_atoms))

        def slot(atom: Tensor, i: int, some: range = some) -> Tensor:
            line = atom.new_zeros(len(some), *atom.shape)
            if i in some:
                line[i - some.start] = atom * where.to(atom).view(-1, *[1] * (atom.ndim - 2))
            return line

        def written(step: Step, slot: Any = slot) -> Tensor:
            assert step.out is not None
            return slot(frozen.code.atom(step.out, step.gates), step.site.index + 1)

        for read, parts in walk(code, record, slot(frozen.atoms[0].detach(), 0), written):
            if read.name in wanted:
                yield read, slice(some.start, some.stop), size_of(parts, record.reads[read.name], by)


# --- the result -----------------------------------------------------------------------------------------------------


def site_masses(model: Transformer, start: Read, found: Masses) -> np.ndarray:
    """[site, T]: the mass that passes every site up to the one of `start`."""
    names = {value_read(model.residual, s).name: s.index for s in model.sites} | {start.name: start.site.index}
    mass = np.zeros((1 + start.site.index, found.atom_mass.shape[1]))
    for name, row in found.mass.items():
        mass[names[name]] += row.numpy()
    return mass


def _finding(model: Transformer, batch: Batch, start: Read, at: int, by: Size, found: Masses) -> Finding:
    valid = batch.valid[0].cpu().numpy()
    sites = [s.name for s in model.sites if s.index <= start.site.index]
    mass = site_masses(model, start, found)
    n_atoms = 1 + start.site.index
    absorbed, stuck = found.atom_mass[0].numpy(), found.stuck[: len(sites)].numpy()

    def shown(values: np.ndarray) -> np.ndarray:
        return np.where(valid, values, np.nan)

    lost = float(abs(1 - absorbed.sum() - stuck.sum()))
    words = batch.strings[0]
    what = f"the read {start.name} at position {batch.count(at)} ({words[at]!r})"
    atoms = list(model.atoms[:n_atoms])
    data = xr.Dataset(coords={"site": sites, "atom": atoms, **token_coords(batch)})
    put(data, "mass", ("site", "pos"), shown(mass), f"share of {what} that passes this read")
    through = shown(found.atom_mass[:n_atoms].numpy())
    put(data, "atom_mass", ("atom", "pos"), through, f"share of {what} that passes this write")
    put(data, "absorbed", ("pos",), shown(absorbed), "share that ends in this embedding")
    put(data, "stuck", ("site", "pos"), shown(stuck), "share that had nothing to follow here")
    put(data, "error", (), lost, "mass that is neither absorbed nor stuck")
    order = np.argsort(-absorbed, kind="stable")
    rows = tuple((batch.count(int(i)), words[i], float(absorbed[i]), _busiest(data, int(i))) for i in order if valid[i])
    size = {
        "norm": "the length of a contribution",
        "projection": "the part of a contribution along the whole, 0 where that is negative",
    }
    notes = [
        f"Unit mass at {what}, followed back until embeddings absorb it: {_ends(absorbed.sum(), stuck.sum(), lost)}. "
        f"Size: {size[by]}.",
        "Each read divides its mass over the atoms that contribute to it, each atom over the positions that its "
        "sublayer read. Biases get none. Sizes hide signs: contributions that cancel both get mass.",
        "Queries and keys decide where attention looks, not what it passes on, so mass goes through values alone"
        + (" (the way v)." if any("v" in model.residual.ways(s) for s in model.sites) else "."),
        "Gates, norm scales and patterns are held at their values in this pass; no causal claim.",
        "Attention rollout: arXiv 2005.00928; value-weighted attention: arXiv 2004.10102; over depth: contributions.",
    ]
    if model.residual.looks_back:
        notes.insert(1, "Reads of this system look back in time; mass follows each write to its own position.")
    return Finding(
        title=f"Rollout of {what}",
        dataset=data,
        columns=("pos", "token", "absorbed", "largest write here"),
        rows=rows,
        notes=(*notes, *batch.notices),
        charts=(
            Chart(kind="heat", variable="mass", x="pos", y="site", title=f"Rollout of {what}: reads"),
            Chart(kind="heat", variable="atom_mass", x="pos", y="atom", title=f"Rollout of {what}: writes"),
            Chart(kind="bars", variable="absorbed", x="pos", title="Where the mass comes from"),
        ),
    )


def _ends(absorbed: float, stuck: float, lost: float) -> str:
    said = f"{absorbed:.6g} arrives (error {lost:.1g})"
    return said if not stuck else f"{said}, {stuck:.3g} found nothing to follow (a zero read, or a bias alone)"


def _busiest(data: xr.Dataset, pos: int) -> str | None:
    """The sublayer whose write at `pos` passes most mass."""
    column = data["atom_mass"].values[1:, pos]
    return str(data["atom"].values[1 + int(column.argmax())]) if column.size and column.max() > 0 else None

"""Exact accounting: a residual system's own linear code, run on atoms.

With the gates of one forward pass frozen, every read is a linear function of what was written. So the reads' equations
are not described a second time: `begin`, `read` and `write` run again with the recorded gates on a state with an extra
atom axis (slot 0 the embedding, slot i + 1 the output of sublayer i). What a read then returns is its contributions,
and they sum to the read; fed with ones of width 1 in place of the vectors, it returns their coefficients, where
these are numbers: the mixing matrix. Exact as arithmetic on this input; not a causal claim, because gates depend on
the same state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.residual.base import Coefficients, Gates, Read, Reads, ResidualSystem, Site, by_way
from t2lens.residual.rows import take_rows
from t2lens.sublayers.positions import Places

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = [
    "ForwardRecord",
    "ReadAccount",
    "Resume",
    "Step",
    "account_by_read",
    "contributions",
    "contributions_by_read",
    "contributions_of_parts",
    "mixing_by_read",
    "mixing_matrix",
    "walk",
]

TOLERANCE = 0.1  # of a read, far above rounding, in half precision too


@dataclass
class Step:
    """What one site did: `out` is the raw sublayer output (None at the readout)."""

    site: Site
    gates: Gates
    out: Tensor | None = None


@dataclass
class ForwardRecord:
    """The gates, reads and atoms of one forward pass, filled by `Transformer.forward(record=...)`."""

    tokens: Tensor | None = None  # [B, T]
    embed: Tensor | None = None  # [B, T, D]
    valid: Tensor | None = None  # [B, T] bool, None when nothing is padding
    steps: list[Step] = field(default_factory=list)
    reads: dict[str, Tensor] = field(default_factory=dict)  # name of the read ("3.mlp", "3.attn.q") -> [B, T, D]
    first_values: dict[str, Tensor] = field(default_factory=dict)  # as in `Places`
    made: dict[str, Tensor] = field(default_factory=dict)  # the same reads as the residual system made them
    index: Tensor | None = None  # [B, T] position of each token, counted over the real tokens of its row
    decoding: bool = False  # whether a decoding cache stands behind the pass

    def reaches(self, site: Site, gates: Gates, reads: Reads) -> None:
        """Note what `site` reads, as the residual system made it. `gates` may grow until the site has written."""
        self.steps.append(Step(site, gates))
        self._read(site, reads)
        self.made |= {Read(site, way).name: read for way, read in by_way(reads).items()}

    def writes(self, site: Site, reads: Reads, out: Tensor | None = None) -> None:
        """Note what `site` wrote, and its reads as they were used: a hook may have changed them. The readout writes
        nothing."""
        step = next(step for step in reversed(self.steps) if step.site is site)
        step.out = out
        self._read(site, reads)

    def _read(self, site: Site, reads: Reads) -> None:
        self.reads |= {Read(site, way).name: read for way, read in by_way(reads).items()}

    @property
    def atoms(self) -> list[Tensor]:
        """What was written, embed first: [B, T, D] each."""
        assert self.embed is not None
        return [self.embed, *(step.out for step in self.steps if step.out is not None)]

    def read(self, name: str) -> Tensor:
        """[B, T, D] of the read called `name`; KeyError lists the reads there are."""
        if name not in self.reads:
            raise KeyError(f"No read {name!r}; the reads are {', '.join(self.reads)}.")
        return self.reads[name]

    def detach(self) -> ForwardRecord:
        """The same numbers without their autograd graph."""
        return ForwardRecord(
            tokens=self.tokens,
            embed=None if self.embed is None else self.embed.detach(),
            valid=self.valid,
            steps=[
                Step(s.site, {n: g.detach() for n, g in s.gates.items()}, None if s.out is None else s.out.detach())
                for s in self.steps
            ],
            reads={name: read.detach() for name, read in self.reads.items()},
            first_values={kind: values.detach() for kind, values in self.first_values.items()},
            made={name: read.detach() for name, read in self.made.items()},
            index=self.index,
            decoding=self.decoding,
        )


@dataclass(frozen=True)
class Resume:
    """Where to take up a recorded pass: what the blocks before `layer` wrote stands, all later ones run anew.

    rows [R]: which row of the recorded batch each row of the new pass goes on from, so that many variants of one pass
    (other hooks in each row) share what comes before them. The state is made by the linear code, as in the accounting,
    once for each row of the record that is asked for.
    """

    record: ForwardRecord
    layer: int
    rows: Tensor

    @classmethod
    def of(cls, record: ForwardRecord, layer: int, rows: Any, sites: tuple[Site, ...]) -> Resume:
        """The checked form; rows None: all of the record, once. ValueError where there is nothing to go on from."""
        if record.tokens is None or record.decoding:
            raise ValueError("This record is not of a whole pass: nothing ran yet, or it ran with a decoding cache.")
        n_layers = 1 + max(site.layer for site in sites if site.layer is not None)
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer <= n_layers:
            raise ValueError(f"layer must be a whole number in 0..{n_layers}, not {layer!r}.")
        wrote = {step.site.name for step in record.steps if step.out is not None}
        for site in sites:
            if site.layer is not None and site.layer < layer and site.name not in wrote:
                raise ValueError(f"Block {layer} cannot be resumed: the recorded pass did not reach {site.name}.")
        n = len(record.tokens)
        wanted = torch.arange(n) if rows is None else torch.as_tensor(rows)
        whole = wanted.dtype == torch.int64 and wanted.ndim == 1 and len(wanted) > 0
        if not whole or int(wanted.min()) < 0 or int(wanted.max()) >= n:
            raise ValueError(f"rows must be whole numbers in 0..{n - 1}, one for each row of the new pass.")
        return cls(record, layer, wanted.to(record.tokens.device))

    @property
    def tokens(self) -> Tensor:
        """[R, T]"""
        assert self.record.tokens is not None
        return self.record.tokens[self.rows]

    @property
    def embed(self) -> Tensor:
        """[R, T, D]"""
        assert self.record.embed is not None
        return self.record.embed[self.rows]

    def state(self, residual: ResidualSystem, places: Places) -> Any:
        """What the system carries as block `layer` begins."""
        record = self.record
        assert record.tokens is not None and record.embed is not None
        places.first_values |= {kind: values[self.rows] for kind, values in record.first_values.items()}
        used, back = self.rows.unique(return_inverse=True)
        whole = len(used) == len(record.tokens)  # else only the rows that are asked for are replayed

        def of(x: Tensor) -> Tensor:
            return x if whole else x[used]

        own_places = Places.of(of(record.tokens), None if record.valid is None else of(record.valid), None)
        state = residual.begin(of(record.embed), own_places)
        before = [step for step in record.steps if step.site.layer is not None and step.site.layer < self.layer]
        for together in _together(before):
            gates = [{name: of(gate) for name, gate in step.gates.items()} for step in together]
            for step, own in zip(together, gates, strict=True):
                state = residual.enter(state, step.site, own)
            for step, own in zip(together, gates, strict=True):
                assert step.out is not None
                state = residual.write(state, step.site, residual.atom(of(step.out), own), own)
        return take_rows(state, back, places)


def _account(
    code: ResidualSystem, record: ForwardRecord, counts: list[int], pieces: Callable[[int, Step | None], Tensor]
) -> Iterator[tuple[Read, Tensor]]:
    """Yields (read, [sum(counts), B, T, D]) for every read: `pieces(i, step)` [counts[i], B, T, D] of atom i, each
    carried to the read by itself. The step is the one that wrote the atom, None for the embedding."""
    starts = [sum(counts[:i]) for i in range(len(counts))]

    def lines(i: int, step: Step | None) -> Tensor:
        vectors = pieces(i, step)
        apart = vectors.new_zeros(sum(counts), *vectors.shape[1:])
        apart[starts[i] : starts[i] + counts[i]] = vectors
        return apart

    yield from walk(code, record, lines(0, None), lambda step: lines(step.site.index + 1, step))


def walk(
    code: ResidualSystem, record: ForwardRecord, embed: Tensor, atom: Callable[[Step], Tensor]
) -> Iterator[tuple[Read, Tensor]]:
    """Run linear code with the gates of a record on `embed` and on `atom(step)` of every step that wrote: yields every
    (read, what it reads). Both [..., B, T, D] with any leading axes; gradients flow where they are on."""
    state = code.begin(embed)
    for together in _together(record.steps):
        for step in together:
            state = code.enter(state, step.site, step.gates)
            for way, read in by_way(code.read(state, step.site, step.gates)).items():
                yield Read(step.site, way), read
        for step in together:
            if step.out is not None:
                state = code.write(state, step.site, atom(step), step.gates)


def _whole(code: ResidualSystem, record: ForwardRecord, *, width_one: bool) -> Iterator[tuple[Read, Tensor]]:
    """The account of every atom as it is, or (`width_one`) of ones in its place: [A, B, T, D or 1]."""

    def pieces(_: int, step: Step | None) -> Tensor:
        atom = _atom(code, record, step).unsqueeze(0)
        return torch.ones_like(atom[..., :1]) if width_one else atom

    return _account(code, record, [1] * len(code.atoms), pieces)


def _atom(code: ResidualSystem, record: ForwardRecord, step: Step | None) -> Tensor:
    if step is None:
        assert record.embed is not None
        return record.embed
    assert step.out is not None
    return code.atom(step.out, step.gates)


def _together(steps: list[Step]) -> Iterator[list[Step]]:
    """Steps that read before any of them writes: one each, or a parallel block."""
    group: list[Step] = []
    for step in steps:
        if group and step.site.seen != group[0].site.seen:
            yield group
            group = []
        group.append(step)
    if group:
        yield group


@dataclass(frozen=True)
class ReadAccount:
    """What one read is made of: the contribution [B, T, D] of every atom, in the order of the system's atoms, and what
    is told of it. Zero for atoms that are written later, or not at all in this pass.

    Where coefficients are numbers, contributions are not made for what can be told without: one atom at a time is in
    memory.
    """

    read: Read
    _written: tuple[Tensor, ...]  # what was written, embed first: [B, T, D] each
    _carried: tuple[Tensor, ...]  # the same as the linear form takes it; the vectors that coefficients multiply
    _energy: tuple[Tensor, ...]  # |written|^2 [B, T]
    _long: Callable[[int], Tensor]  # atom -> |carried| [B, T]
    _found: Tensor  # [A, B, T, D or 1] coefficients, or [A, B, T, D] contributions
    _kind: Coefficients

    @property
    def _there(self) -> range:
        return range(min(len(self._written), self.read.site.seen + 1))

    def _part(self, i: int) -> Tensor:
        return self._found[i] if self._kind == "operator" else self._found[i] * self._carried[i]

    def _rows(self, row: Callable[[int], Tensor], like: Tensor) -> Tensor:
        """[A, ...] of row(i) for every atom there, zeros else."""
        rows = like.new_zeros(len(self._found), *like.shape)
        for i in self._there:
            rows[i] = row(i)
        return rows

    def contributions(self) -> Tensor:
        """[A, B, T, D]; they sum over A to the read as the residual system made it."""
        return self._found if self._kind == "operator" else self._rows(self._part, self._carried[0])

    def total(self) -> Tensor:
        """[B, T, D]: their sum."""
        if self._kind == "operator":
            return self._found.sum(dim=0)
        total = torch.zeros_like(self._carried[0])
        for i in self._there:
            total.addcmul_(self._found[i].to(total.dtype), self._carried[i])
        return total

    def mixing(self) -> Tensor:
        """[A, B, T], a row of the mixing matrix: the coefficient c of each atom a where that is one number; else the
        energy-weighted mean <c a, a> / <a, a> (0 where the atom is the zero vector), the one number that keeps the part
        of a contribution along its atom."""
        return self._found.squeeze(-1) if self._kind == "scalar" else self._rows(self._along, self._energy[0])

    def _along(self, i: int) -> Tensor:
        along, energy = (self._part(i) * self._written[i]).sum(dim=-1), self._energy[i]
        return torch.where(energy > 0, along / energy.clamp(min=torch.finfo(energy.dtype).tiny), 0)

    def lengths(self) -> Tensor:
        """[A, B, T]: the length of each contribution."""
        if self._kind == "scalar":  # |c a| = |c| |a|
            return self._rows(lambda i: self._found[i, ..., 0].abs() * self._long(i), self._energy[0])
        return self._rows(lambda i: self._part(i).norm(dim=-1), self._energy[0])


@torch.no_grad()
def account_by_read(residual: ResidualSystem, record: ForwardRecord, form: str = "additive") -> Iterator[ReadAccount]:
    """The account of every read in order, in one walk over the record. ValueError: a form the system does not have."""
    code = residual.linear_form(form)
    kind = code.coefficients()
    written = tuple(record.atoms)
    writers = (None, *(step for step in record.steps if step.out is not None))
    carried = () if kind == "operator" else tuple(_atom(code, record, step) for step in writers)
    energy = tuple(atom.square().sum(dim=-1) for atom in written)
    long = functools.cache(lambda i: torch.linalg.vector_norm(carried[i], dim=-1))
    for read, found in _whole(code, record, width_one=kind != "operator"):
        yield ReadAccount(read, written, carried, energy, long, found, kind)


def contributions_by_read(
    residual: ResidualSystem, record: ForwardRecord, form: str = "additive"
) -> Iterator[tuple[Read, Tensor]]:
    """For every read in order: (read, contributions [A, B, T, D]). They sum over A to `record.reads[read.name]`."""
    return ((account.read, account.contributions()) for account in account_by_read(residual, record, form))


@torch.no_grad()
def contributions_of_parts(
    residual: ResidualSystem,
    record: ForwardRecord,
    read: str,
    parts: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    form: str = "additive",
) -> Iterator[tuple[str, Tensor]]:
    """For every (atom, parts [P, B, T, D] of what it wrote) in `parts`: (atom, what each part contributes to `read`).

    A part goes through the residual system as its atom does, gates as recorded, so that parts that sum to `out` of the
    atom's step (to `record.embed`) have contributions [P, B, T, D] that sum to the atom's. Lazy on both sides: one
    atom's parts exist at a time where `parts` is a generator; `dict(...)` of the result keeps all of them.

    Raises:
        KeyError: no such read or atom, or an atom that this pass has not written.

    Example:
        >>> import t2lens
        >>> from t2lens.mixing import contributions_of_parts
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0)
        >>> record = model.record([[0, 7, 3]])
        >>> half = 0.5 * record.atoms[2]  # what 0.mlp wrote, in two equal parts
        >>> halves = {"0.mlp": torch.stack([half, half])}
        >>> dict(contributions_of_parts(model.residual, record, "1.attn", halves))["0.mlp"].shape
        torch.Size([2, 1, 3, 16])
    """
    record.read(read)
    code = residual.linear_form(form)
    steps = {step.site.name: step for step in record.steps if step.out is not None}
    places = {name: i for i, name in enumerate(residual.atoms) if i == 0 or name in steps}
    walked = None if code.coefficients() == "operator" else _whole(code, record, width_one=True)
    coefficients = next(found for each, found in walked if each.name == read) if walked else None
    for name, mine in parts.items() if isinstance(parts, Mapping) else parts:
        if name not in places:
            raise KeyError(f"No atom {name!r} in this pass; the atoms are {', '.join(places)}.")
        yield name, _parts_of_one(code, record, read, places[name], mine, coefficients)


def _parts_of_one(
    code: ResidualSystem, record: ForwardRecord, read: str, place: int, parts: Tensor, coefficients: Tensor | None
) -> Tensor:
    """What `parts` [P, B, T, D] of one atom contribute to one read."""

    def pieces(i: int, step: Step | None) -> Tensor:
        if step is None:
            assert record.embed is not None
            return parts if i == place else record.embed.new_zeros(0, *record.embed.shape)
        assert step.out is not None
        return code.share(parts if i == place else step.out.new_zeros(0, *step.out.shape), step.out, step.gates)

    if coefficients is not None:
        step = next((step for step in record.steps if step.site.index + 1 == place), None) if place else None
        return coefficients[place] * pieces(place, step)
    counts = [len(parts) if i == place else 0 for i in range(len(code.atoms))]
    return next(share for r, share in _account(code, record, counts, pieces) if r.name == read)


def mixing_by_read(
    residual: ResidualSystem, record: ForwardRecord, form: str = "additive"
) -> Iterator[tuple[Read, Tensor]]:
    """For every read in order: (read, M row [A, B, T]); see `ReadAccount.mixing`."""
    return ((account.read, account.mixing()) for account in account_by_read(residual, record, form))


@torch.no_grad()
def mixing_matrix(
    model: Transformer, tokens: Any, attention_mask: Tensor | None = None, *, form: str = "additive"
) -> Tensor:
    """Mixing matrix M [batch, read, pos, atom]: the effective coefficient of each atom in each read, gates frozen.

    Reads are `model.reads` in order, atoms `model.atoms`; an atom that is not written before a read has coefficient 0.
    Where coefficients are vectors or operators (expanded DDL, depth ShortSWA) the entry is the energy-weighted mean
    <contribution, atom> / <atom, atom>. Positions that are padding hold numbers without meaning.

    Args:
        tokens: text, list of texts, or token ids [batch, pos] (or [pos]).
        form: "additive", or "operator" for Deep Delta Learning (its two exact forms attribute erasure differently).

    Raises:
        ValueError: a form that the system does not have.

    Example:
        >>> import t2lens
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0)
        >>> M = t2lens.mixing_matrix(model, [[0, 7, 3]])
        >>> tuple(M.shape)  # batch, read, pos, atom
        (1, 5, 3, 5)
        >>> M[0, -1, 0].tolist()  # the standard residual: the readout holds every atom once
        [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    record = model.record(tokens, attention_mask)
    rows = [row for _, row in mixing_by_read(model.residual, record, form)]
    return torch.stack(rows).movedim(1, -1).movedim(0, 1)


@torch.no_grad()
def contributions(
    model: Transformer,
    tokens: Any,
    attention_mask: Tensor | None = None,
    *,
    read: str = "out",
    form: str = "additive",
) -> Tensor:
    """Contributions of every atom to one read: [batch, pos, atom, d_model]; they sum over atoms to that read.

    Args:
        tokens: text, list of texts, or token ids [batch, pos] (or [pos]).
        read: name of the read, one of `[r.name for r in model.reads]`.
        form: as in `mixing_matrix`.

    Raises:
        KeyError: no such read (the message lists them). ValueError: no such form, or a hook that is attached edits the
            stream or the read itself, so that no sum of writes gives it.

    Example:
        >>> import t2lens
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0)
        >>> t2lens.contributions(model, [[0, 7, 3]], read="1.mlp").shape
        torch.Size([1, 3, 5, 16])
    """
    record = model.record(tokens, attention_mask)
    return contributions_of(model.residual, record, read, form)


def contributions_of(residual: ResidualSystem, record: ForwardRecord, read: str, form: str = "additive") -> Tensor:
    """`contributions` of a pass that was recorded already."""
    wanted = record.read(read)
    for found, share in contributions_by_read(residual, record, form):
        if found.name == read:
            error = float((share.sum(dim=0) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
            if error > TOLERANCE:
                raise ValueError(
                    f"The contributions miss the read {read!r} by {error:.0%}: a hook edits the stream or the read "
                    "itself (hook_resid_*, hook_read_*), where no write accounts for it; edit depth weights, gates or "
                    "atoms instead."
                )
            return share.movedim(0, -2)
    raise AssertionError("a recorded read is always visited")

"""Paths through depth: from a logit back over reads and atoms, without enumerating them all.

With everything nonlinear held (`t2lens.analysis.frozen`) the logit of a token is linear in the atoms, each atom in its
sublayer's read at earlier positions, each read in earlier atoms. Multiplied out, the logit is a sum over all paths

    logit <- atom @ position <- atom @ position <- ... <- embed @ position     (or <- the constant of a sublayer)

of which there are exponentially many. `top_paths` keeps a frontier of leaves that always sums to the logit. A leaf that
ends at an atom b, with the vector g that reads it (value <g, b>), is replaced by its continuations

    <g, b> = sum_a <C_a^T L_b^T g, a> + <g, constant of b>

and the leaf with the largest |value| is replaced first. `through` and `edge` need no enumeration: one sweep from the
readout to the embedding gives the sum of all paths through every atom and over every edge (read, atom).

The expansion of the residual stream into paths is that of Elhage et al. 2021 ("A Mathematical Framework for Transformer
Circuits"); the depth factor C_a is what a residual system puts in the place of the identity.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.frozen import Frozen, place, value_read
from t2lens.analysis.inputs import Batch, check_finite, gradients, read_batch, token_id
from t2lens.analysis.layout import put, token_coords, word
from t2lens.analysis.progress import progress

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["top_paths"]

_EMBEDDING, _CONSTANT, _OPEN = "embedding", "constant", "open"
_NOTHING = 1e-9  # of the largest path, below which one is not listed
_ROUNDING = 30  # units in the last place of the sum of all sizes, below which a constant is none


@torch.inference_mode(False)  # gradients are wanted wherever this is called from
def top_paths(
    model: Transformer,
    input: Any,
    *,
    attention_mask: Any = None,
    pos: int = -1,
    token: str | int | None = None,
    against: str | int | None = None,
    n: int = 20,
    max_expansions: int = 200,
    by_position: bool = True,
    form: str = "additive",
) -> Finding:
    """The paths through depth and positions that carry most of a logit; all leaves together sum to it.

    Equation and source: see the module. Units are logits. A path ends at the embedding, at the constant of a sublayer
    (its biases, and what a hook put in by hand), or is still open: its last atom was not expanded.

    Args:
        input: one text, or token ids [pos] or [1, pos] with their `attention_mask`.
        pos: which position predicts, counted over the real tokens (negative: from the end), as are positions in the
            names of paths. The axis `pos` counts padding too.
        token: whose logit, its text or id; by default the likeliest one there. against: the logit of this token is
            subtracted.
        n: how many paths are listed.
        max_expansions: how many leaves are replaced at most. It ends earlier when the n largest leaves are complete.
        by_position: whether the same atom at two positions is two nodes; False merges positions.
        form: form of the residual system's account, as in `mixing_matrix`.

    Returns:
        A Finding with `value`, `share`, `ends`, `start` (path; start is the position of its last node, -1 where that
        is the readout or positions are merged), `through` (atom, pos): the sum of all paths through an atom,
        `edge` (read, atom): over an edge, `constant` (atom): that end in a sublayer's constant, and the numbers
        `logit`, `total` (of all leaves) and `error` (their difference).

    Raises:
        ValueError: several sequences, no such position, n or max_expansions out of range, no such token or form, or a
            model whose head is not linear.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import top_paths
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0)
        >>> found = top_paths(model, [0, 7, 3], token=5, n=3)
        >>> found.columns
        ('path', 'token', 'value (logits)', 'share', 'ends')
        >>> float(abs(found["error"])) < 1e-6
        True
    """
    if n < 1 or max_expansions < 0:
        raise ValueError(f"n must be at least 1 and max_expansions at least 0, not {n} and {max_expansions}.")
    batch = read_batch(model, input, attention_mask)
    at = place(batch, pos)
    frozen = Frozen(model, batch.tokens, batch.mask, form=form)
    check_finite(frozen.logits, batch, "The logits")
    target = _Target.of(model, frozen, batch, at, token, against)
    tree = _Tree(frozen, batch, target, n=n, by_position=by_position)
    tree.grow(max_expansions)
    return _finding(model, batch, frozen, target, tree, by_position)


@dataclass(frozen=True)
class _Target:
    """What is explained: `value` in logits; `gradient` [1, T, D] of it with respect to the last read."""

    name: str
    value: float
    bias: float
    gradient: Tensor

    @classmethod
    def of(
        cls,
        model: Transformer,
        frozen: Frozen,
        batch: Batch,
        at: int,
        token: str | int | None,
        against: str | int | None,
    ) -> _Target:
        logits = frozen.logits[0, at].double()
        ids = [int(logits.argmax()) if token is None else token_id(model, token)]
        ids += [] if against is None else [token_id(model, against)]
        words = [repr(word(model, i)) for i in ids]
        read = frozen.record.read("out")
        with gradients(model):
            sign = torch.tensor([1.0, -1.0][: len(ids)], dtype=logits.dtype, device=logits.device)
            leaf = read.detach().requires_grad_()
            # by the recorded scale, so that the share is linear in the read
            shares = model.logit_shares(leaf[:, at : at + 1], read[:, at : at + 1])[0, 0, ids]
            (gradient,) = torch.autograd.grad((shares.double() * sign).sum(), leaf)
        return cls(
            name=f"logit of {' less that of '.join(words)} at position {batch.count(at)}",
            value=float(logits[ids] @ sign),
            bias=float(model.logit_bias.detach().double()[ids] @ sign),
            gradient=gradient,
        )


class _Path(NamedTuple):
    name: str
    value: float
    ends: str
    start: int


@dataclass
class _Node:
    """An expanded leaf: `children` [A, T] (or [A, 1], positions merged) are the values of its continuations, 0 where
    one has become a node itself; `constant` what is left, which may be no more than `rounding`."""

    parent: int | None
    atom: int
    pos: int
    children: np.ndarray
    constant: float
    rounding: float


@dataclass(order=True)
class _Leaf:
    size: float  # less its sign, so that the largest is the smallest
    order: int
    node: int = field(compare=False)
    atom: int = field(compare=False)
    pos: int = field(compare=False)
    vector: Tensor = field(compare=False)  # [D], or [T, D]


class _Tree:
    """The frontier: the leaves are the children and constants of all nodes, and always sum to the target."""

    def __init__(self, frozen: Frozen, batch: Batch, target: _Target, *, n: int, by_position: bool) -> None:
        self.frozen, self.batch, self.n, self.by_position = frozen, batch, n, by_position
        self.values = [x.detach().double() for x in frozen.atoms]
        self.sites = frozen.model.sites
        self.nodes: list[_Node] = []
        self.waiting: list[_Leaf] = []  # a heap of leaves that may yet be expanded
        self.done: list[float] = []  # a heap of the n largest sizes of leaves that end
        self.target = target

    def grow(self, steps: int) -> None:
        self._add(None, -1, -1, self.target.value, {"out": self.target.gradient}, steps)
        for left in progress(range(steps - 1, -1, -1), "Expanding paths", total=steps):
            if not self.waiting or (len(self.done) == self.n and self.done[0] >= -self.waiting[0].size):
                break
            leaf = heapq.heappop(self.waiting)
            node = self.nodes[leaf.node]
            value, node.children[leaf.atom, leaf.pos] = node.children[leaf.atom, leaf.pos], 0.0
            g = torch.zeros_like(self.frozen.atoms[leaf.atom])
            if self.by_position:
                g[0, leaf.pos] = leaf.vector
            else:
                g[0] = leaf.vector
            reads = self.frozen.to_reads(self.sites[leaf.atom - 1], g)
            self._add(leaf.node, leaf.atom, leaf.pos, float(value), reads, left)

    def _add(self, parent: int | None, atom: int, pos: int, value: float, reads: dict[str, Tensor], left: int) -> None:
        """A node of this value whose continuations are what `reads` hold; `left`: expansions that are left."""
        rows = len(self.values), self.values[0].shape[1] if self.by_position else 1
        children = np.zeros(rows)
        vectors, size = self.frozen.to_atoms(reads) if reads else [], 0.0
        for i, g in enumerate(vectors):
            if g is not None:
                products = g[0].double() * self.values[i][0]
                shares, size = products.sum(dim=-1), size + float(products.abs().sum())
                children[i] = (shares if self.by_position else shares.sum()).cpu().numpy()
        rounding = _ROUNDING * torch.finfo(self.frozen.atoms[0].dtype).eps * size
        node = _Node(parent, atom, pos, children, value - math.fsum(children.ravel()), rounding)
        self.nodes.append(node)
        for size in (*np.abs(children[0]).tolist(), abs(node.constant)):
            self._ends(size)
        self._wait(len(self.nodes) - 1, children, vectors, left)

    def _ends(self, size: float) -> None:
        if len(self.done) < self.n:
            heapq.heappush(self.done, size)
        else:
            heapq.heappushpop(self.done, size)

    def _wait(self, node: int, children: np.ndarray, vectors: list[Tensor | None], left: int) -> None:
        """Line up what can still have a turn: the `left` largest of all leaves. So memory holds few vectors."""
        sizes = np.abs(children[1:]).ravel()
        order = np.argsort(-sizes, kind="stable")[:left]
        floor = max(leaf.size for leaf in self.waiting) if len(self.waiting) >= max(left, 1) else 0.0
        for k in order.tolist():
            if sizes[k] == 0 or (floor and -sizes[k] >= floor):
                break
            atom, pos = 1 + k // children.shape[1], k % children.shape[1]
            g = vectors[atom]
            assert g is not None
            vector = g[0, pos].clone() if self.by_position else g[0]
            heapq.heappush(self.waiting, _Leaf(-float(sizes[k]), node * sizes.size + k, node, atom, pos, vector))
        if len(self.waiting) > left:
            self.waiting = heapq.nsmallest(left, self.waiting)  # sorted, so a heap

    # --- what came out
    @property
    def total(self) -> float:
        return math.fsum(x for node in self.nodes for x in (*node.children.ravel(), node.constant))

    @property
    def n_leaves(self) -> int:
        return sum(int(np.count_nonzero(node.children)) + 1 for node in self.nodes)

    @property
    def still_open(self) -> float:
        """Sum of the sizes of all leaves that could be expanded."""
        return float(sum(np.abs(node.children[1:]).sum() for node in self.nodes))

    def largest(self) -> tuple[list[_Path], int]:
        """The n leaves of largest |value|, and how many of all that are not 0 are next to nothing beside the largest,
        so that they are left out. A constant that is rounding is none."""
        every = []
        for i, node in enumerate(self.nodes):
            flat = node.children.ravel()
            top = np.argpartition(-np.abs(flat), min(self.n, flat.size) - 1)[: self.n]
            every += [(abs(flat[k]), i, int(k)) for k in top if flat[k]]
            if abs(node.constant) > node.rounding:
                every.append((abs(node.constant), i, -1))
        every.sort(key=lambda leaf: -leaf[0])
        least = _NOTHING * every[0][0] if every else 0.0
        sizes = [np.abs(node.children) for node in self.nodes]
        hidden = sum(int(((x > 0) & (x < least)).sum()) for x in sizes)
        return [self._spelled(i, k) for size, i, k in every[: self.n] if size >= least], hidden

    def _spelled(self, i: int, k: int) -> _Path:
        node = self.nodes[i]
        path = self._path(i)
        if k < 0:
            return _Path(" <- ".join([*path, "constant"]), node.constant, _CONSTANT, node.pos)
        atom, pos = divmod(k, node.children.shape[1])
        path = [*path, self._name(atom, pos), *([] if atom == 0 else ["..."])]
        end = _EMBEDDING if atom == 0 else _OPEN
        return _Path(" <- ".join(path), float(node.children[atom, pos]), end, pos if self.by_position else -1)

    def _path(self, i: int) -> list[str]:
        names = []
        at: int | None = i
        while at:  # node 0 is the readout
            names.append(self._name(self.nodes[at].atom, self.nodes[at].pos))
            at = self.nodes[at].parent
        return ["logit", *reversed(names)]

    def _name(self, atom: int, pos: int) -> str:
        name = self.frozen.model.atoms[atom]
        return f"{name}@{self.batch.count(pos)}" if self.by_position else name


@dataclass
class _Totals:
    """Sums over all paths: through[A, T] an atom, edge {read: [A]}, constant [A] (NaN for the embedding)."""

    through: np.ndarray
    edge: dict[str, np.ndarray]
    constant: np.ndarray

    @classmethod
    def of(cls, frozen: Frozen, target: _Target) -> _Totals:
        """One sweep from the readout to the embedding: the gradient of everything, a step at a time."""
        atoms = frozen.atoms
        values = [x.detach().double() for x in atoms]
        below: list[Tensor] = [torch.zeros_like(x.detach()) for x in atoms]  # what later reads hold of each atom
        grads: dict[str, Tensor] = {"out": target.gradient}
        edge, constant = {}, np.full(len(atoms), np.nan)
        for site in reversed(frozen.model.sites):
            if site.kind != "out":
                g = below[site.index + 1]
                back = frozen.to_reads(site, g)
                arrived = float((g.double() * values[site.index + 1]).sum())
                passed = [float((x.double() * frozen.leaves[n].detach().double()).sum()) for n, x in back.items()]
                constant[site.index + 1] = arrived - math.fsum(passed)
                for name, x in back.items():
                    grads[name] = grads[name] + x if name in grads else x
            name = value_read(frozen.model.residual, site).name
            row = np.full(len(atoms), np.nan)
            for i, g in enumerate(frozen.to_atoms({name: grads[name]}) if name in grads else []):
                if g is not None:
                    row[i] = float((g.double() * values[i]).sum())
                    below[i] += g
            edge[name] = row
        through = np.stack([(g.double() * v).sum(dim=-1)[0].cpu().numpy() for g, v in zip(below, values, strict=True)])
        return cls(through, dict(reversed(edge.items())), constant)


def _finding(
    model: Transformer, batch: Batch, frozen: Frozen, target: _Target, tree: _Tree, by_position: bool
) -> Finding:
    totals = _Totals.of(frozen, target)
    paths, hidden = tree.largest()
    values = np.array([path.value for path in paths])
    tokens = [batch.strings[0][path.start] if path.start >= 0 else None for path in paths]
    whole = target.value or math.nan
    read, atom = list(totals.edge), list(model.atoms)
    data = xr.Dataset(coords={"path": [path.name for path in paths], "atom": atom, "read": read, **token_coords(batch)})
    put(data, "value", ("path",), values, "what the path adds", "logit")
    put(data, "share", ("path",), values / whole, "the same as a share of the whole")
    put(data, "ends", ("path",), [path.ends for path in paths], "where the path ends")
    put(data, "start", ("path",), [path.start for path in paths], "its last node, on the axis pos")
    through = np.where(batch.valid.cpu().numpy(), totals.through, np.nan)
    put(data, "through", ("atom", "pos"), through, "sum of all paths through the atom", "logit")
    edge = np.stack(list(totals.edge.values()))
    put(data, "edge", ("read", "atom"), edge, "sum of all paths from the read to the atom", "logit")
    put(data, "constant", ("atom",), totals.constant, "sum of all paths that end in what it adds by itself", "logit")
    put(data, "logit", (), target.value, target.name, "logit")
    put(data, "bias", (), target.bias, "what the readout adds by itself", "logit")
    put(data, "total", (), tree.total, "sum of all leaves", "logit")
    put(data, "error", (), tree.total - target.value, "total less logit", "logit")
    n_open = sum(path.ends == _OPEN for path in paths)
    notes = [
        f"All {tree.n_leaves} paths that {len(tree.nodes) - 1} expansions have made sum to the {target.name}, "
        f"{target.value:.4g} (error {abs(tree.total - target.value):.1g}); those listed sum to {values.sum():.4g}. "
        f"The sizes of what could still be followed sum to {tree.still_open:.3g}.",
        "Held at their values in this pass: norm scales, attention patterns (so queries and keys), MLP gates, and the "
        "gates of the residual system. The sum is exact; it is no causal claim.",
        "The open path of largest size is followed first. A small one may hold large paths that cancel.",
        "A path that ends in a constant: biases of the sublayer before it (of the readout, after logit), and what a "
        "hook put in by hand.",
        "Paths: Elhage et al. 2021, A Mathematical Framework for Transformer Circuits.",
    ]
    if hidden:
        notes.insert(1, f"Left out of the list: {hidden} paths below {_NOTHING:.0e} of the largest.")
    if n_open:
        notes.insert(1, f"{n_open} of the listed paths are open (...): raise max_expansions to follow them.")
    if not by_position:
        notes.insert(1, "Positions are merged: an atom at two positions is one node.")
    return Finding(
        title=f"Paths of the {target.name}",
        dataset=data,
        columns=("path", "token", "value (logits)", "share", "ends"),
        rows=tuple(
            (path.name, token, path.value, path.value / whole if target.value else None, path.ends)
            for path, token in zip(paths, tokens, strict=True)
        ),
        notes=(*notes, *batch.notices),
        charts=(
            Chart(
                kind="bars",
                variable="value",
                x="path",
                signed=True,
                title="What each of the largest paths adds to the logit",
                label="contribution (logit)",
            ),
            Chart(
                kind="heat",
                variable="through",
                x="pos",
                y="atom",
                signed=True,
                title="What all paths through each write at each position add to the logit",
                label="contribution (logit)",
            ),
            Chart(
                kind="heat",
                variable="edge",
                x="atom",
                y="read",
                signed=True,
                title="What all paths from each write into each read add to the logit",
                label="contribution (logit)",
            ),
        ),
    )

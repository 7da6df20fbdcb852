"""The contract of the depth axis: what a residual system is.

Whatever a residual system does, it first computes numbers from the state (its gates: softmax weights, beta, k, v, ...),
nonlinearly, and then applies them linearly to what was written. The two are kept apart, so that the same linear code
that makes the forward pass also accounts for it (`t2lens.mixing` runs it on a state with an extra atom axis):

    state = begin(embed)
    for site, sublayer in sites:
        gates = read_gates(state, site)                        nonlinear, through hook points
        state = enter(state, site, gates)                      linear: where an aggregate replaces what is carried
        read  = read(state, site, gates)                       linear in state: one tensor, or one per way
        out   = sublayer(norm(read))
        gates = gates | write_gates(state, site, read, normed, out)      nonlinear, often empty
        state = write(state, site, atom(out, gates), gates)    linear in (state, atom)
    logits = unembed(norm(read at site "out"))

Linear code sees [..., B, T, D] with any leading axes, and D of width 1 where `coefficients()` are numbers. Ways:
attention may read with its queries, keys and values apart ("q", "k", "v"); "r" is what the block carries on, where a
system mixes that too. A new system is one file with one subclass and one line in `residual/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from t2lens.config import ModelConfig
from t2lens.hooks import HookPoint
from t2lens.sublayers.positions import DecodingCache, Places

__all__ = [
    "Coefficients",
    "Gates",
    "Read",
    "Reads",
    "ResidualSystem",
    "Site",
    "Source",
    "WeightsFrom",
    "by_way",
    "make_sites",
]

Gates = dict[str, Tensor]  # one forward pass's numbers at one site: [B, T, ...] each
Reads = Tensor | dict[str, Tensor]  # one read, or one per way
WeightsFrom = Literal["nothing", "keys", "state"]
Coefficients = Literal["scalar", "channel", "operator"]
State = Any  # what the system carries; its own business


@dataclass(frozen=True)
class Site:
    """A place in depth where a sublayer reads, or the readout.

    index: its place in the order of writing (what it writes is atom index + 1). seen: how many sublayers wrote before
    it reads, which is index but for parallel blocks, where all sublayers of a block read the same state.
    """

    index: int
    layer: int | None
    kind: Literal["local", "attn", "mlp", "out"]
    opens: bool  # the first sublayer of its block (the readout counts as one)
    closes: bool  # the last sublayer of its block
    seen: int

    @property
    def name(self) -> str:
        return "out" if self.layer is None else f"{self.layer}.{self.kind}"

    def hook(self, stem: str, way: str = "") -> str:
        """Full hook name at this site: `blocks.3.hook_read_mlp`, or `hook_read_final` for the readout."""
        way = f"_{way}" if way else ""
        return f"hook_{stem}_final{way}" if self.layer is None else f"blocks.{self.layer}.hook_{stem}_{self.kind}{way}"


@dataclass(frozen=True)
class Read:
    """One read: a site, and the way where the site reads with several ("3.attn.q")."""

    site: Site
    way: str = ""

    @property
    def name(self) -> str:
        return f"{self.site.name}.{self.way}" if self.way else self.site.name


def make_sites(
    n_layers: int, kinds: Sequence[Literal["local", "attn", "mlp"]], *, parallel: bool = False
) -> tuple[Site, ...]:
    """All sites of a model in reading order, `out` last."""
    n = len(kinds)
    sites = [
        Site(
            index=layer * n + i,
            layer=layer,
            kind=kind,
            opens=i == 0,
            closes=i == n - 1,
            seen=layer * n + (0 if parallel else i),
        )
        for layer in range(n_layers)
        for i, kind in enumerate(kinds)
    ]
    last = n_layers * n
    return (*sites, Site(index=last, layer=None, kind="out", opens=True, closes=False, seen=last))


def by_way(value: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """Reads (or depth weights) as {way: tensor}; a single one has the way ""."""
    return value if isinstance(value, dict) else {"": value}


@dataclass(frozen=True)
class Source:
    """What a system's depth weights run over at one read: a name, and the atoms it holds."""

    name: str
    atoms: tuple[str, ...]


class ResidualSystem(nn.Module):
    """Base of all residual systems; see the module docstring for the seam. The defaults are those of a plain read."""

    #: linear forms under which `mixing` can account for the system; the first is the one that the forward pass runs
    forms: ClassVar[tuple[str, ...]] = ("additive",)
    #: True when the readout is the plain sum of all atoms, so that transformer-lens's residual helpers are right
    is_additive: ClassVar[bool] = False
    #: whether hook_resid_*, where it exists, is all that later reads see
    stream_is_whole: bool = False
    #: whether the system can stand in parallel blocks, where what a sublayer reads is not what was written last
    in_parallel_blocks: ClassVar[bool] = False
    #: whether the depth weights of every read sum to 1
    weights_sum_to_one: bool = False
    #: name and range of the gate that `gate()` returns, where the system has one
    gate_label: ClassVar[str | None] = None
    gate_range: ClassVar[tuple[float, float] | None] = None
    #: one sentence on what values of the gate do
    gate_meaning: ClassVar[str | None] = None
    #: name of its hook point ("transform" of `hook_transform_mlp`), by which edits set it
    gate_name: ClassVar[str | None] = None
    #: how many positions back in the text the linear code looks (0: tokens do not mix on the depth axis)
    looks_back: int = 0

    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        super().__init__()
        if cfg.block == "parallel" and not self.in_parallel_blocks:
            raise ValueError(f"{cfg.residual.describe()} is not defined for parallel blocks; use sequential ones.")
        self.model_cfg = cfg
        self.sites = sites
        self.atoms = ("embed", *(site.name for site in sites if site.kind != "out"))
        # full hook name -> hook point. The model mounts them at these names; a plain dict keeps them from being
        # registered a second time under "residual."
        self.hook_points: dict[str, HookPoint] = {}

    # --- nonlinear: gates, through hook points
    def read_gates(self, state: State, site: Site) -> Gates:
        return {}

    def write_gates(self, state: State, site: Site, read: Any, normed: Any, out: Tensor) -> Gates:
        return {}

    def carry(self, state: State, name: str) -> State:
        """Pass what the block carries through the hook point `name` (`blocks.3.hook_resid_pre`), where it is one
        single stream. A system that keeps that stream inside its state overrides this."""
        return self.hook_points[name](state) if name in self.hook_points else state

    # --- linear in the state and in what is written
    def begin(self, embed: Tensor, places: Places | None = None) -> State:
        raise NotImplementedError

    def enter(self, state: State, site: Site, gates: Gates) -> State:
        """The state as `site` is reached: where a mixture replaces what is carried on, not only what is read."""
        return state

    def read(self, state: State, site: Site, gates: Gates) -> Reads:
        raise NotImplementedError

    def atom(self, out: Tensor, gates: Gates) -> Tensor:
        """What is written: the raw sublayer output, unless a form writes something else."""
        return out

    def share(self, part: Tensor, out: Tensor, gates: Gates) -> Tensor:
        """What a part [..., B, T, D] of `out` is of `atom(out, gates)`: linear in the part, so that parts that sum to
        `out` have shares that sum to the atom (unless an edit put something else in the place of `out`)."""
        return part

    def write(self, state: State, site: Site, atom: Tensor, gates: Gates) -> State:
        """`gates` are those of the read and of the write together."""
        raise NotImplementedError

    # --- what the numbers mean
    def ways(self, site: Site) -> tuple[str, ...]:
        """The ways in which `site` reads: the keys of what `read` returns, or ("",) for a single tensor."""
        return ("",)

    @property
    def reads(self) -> tuple[Read, ...]:
        """Every read of the model in order."""
        return tuple(Read(site, way) for site in self.sites for way in self.ways(site))

    def linear_form(self, form: str) -> ResidualSystem:
        """The linear code under the name `form`. ValueError names the forms this system has."""
        if form not in self.forms:
            raise ValueError(f"{type(self).__name__} has no form {form!r}; it has {', '.join(self.forms)}.")
        return self

    def coefficients(self) -> Coefficients:
        """What an atom is multiplied by on its way into a read: one number per token ("scalar"), one per token and
        channel ("channel"), or something that mixes channels or tokens ("operator"). Without "scalar", M holds
        energy-weighted means."""
        return "scalar"

    def sources(self, site: Site) -> tuple[Source, ...]:
        """What the depth weights of `site` run over (in every way), in the order of their last axis."""
        raise NotImplementedError

    def depth_weights(self, site: Site, gates: Gates) -> Tensor | dict[str, Tensor] | None:
        """The system's own weights [B, T, S] of the read at `site`, as its paper plots them, one per way where there
        are several; None: all exactly 1."""
        return None

    def weights_from(self, site: Site) -> WeightsFrom:
        """What the equation makes the depth weights at `site` of: "nothing" (numbers of the model, the same for every
        token), "keys" (each of its own source, by what the reader is fixed to look for) or "state" (what is carried
        there, or other sources, decide too). Where a system has no depth weights: the coefficients of its stream."""
        return "nothing"

    def gate(self, gates: Gates) -> Tensor | None:
        """The system's gate on a write [B, T], or None."""
        return None

    def energies(self, gates: Gates) -> tuple[Tensor, Tensor] | None:
        """Squared lengths [B, T] of what a write erases from the state and of what it puts there, for systems that edit
        a state along a direction; None for the others."""
        return None

    # --- for subclasses
    def hook_point(self, name: str, *, shape: str, meaning: str, unit: str = "") -> HookPoint:
        self.hook_points[name] = point = HookPoint(shape=shape, meaning=meaning, unit=unit)
        return point

    def single_stream_hooks(self) -> None:
        """Give the carried stream transformer-lens's names. Only for a state that is one [B, T, D] tensor."""
        for layer in range(self.model_cfg.n_layers):
            for where, meaning in (("pre", "before the block"), ("mid", "before the MLP"), ("post", "after the block")):
                if where == "mid" and self.model_cfg.block == "parallel":
                    continue  # there the MLP reads what the block read
                name = f"blocks.{layer}.hook_resid_{where}"
                self.hook_point(name, shape="batch pos d_model", meaning=f"the carried stream {meaning}", unit="stream")

    def spread(self, name: str, row: Tensor, like: Tensor) -> Tensor:
        """Static numbers `row` [S] for every token of `like` [B, T, D], through the hook point `name`: [B, T, S]."""
        point = self.hook_points[name]
        everywhere = row.expand(*like.shape[:-1], len(row))
        return point(everywhere.clone() if point.active else everywhere)  # a hook may write into its tensor

    def depth_hooks(self, site: Site, n_sources: int, way: str = "", *, scores: bool = True) -> None:
        """Hook points of the depth weights at `site` and, where there is a choice to make, of their scores."""
        read = Read(site, way).name
        if scores and n_sources > 1:
            self.hook_point(
                site.hook("depth_scores", way),
                shape="batch pos source",
                meaning=f"depth scores of the read at {read}",
                unit="logit",
            )
        self.hook_point(
            site.hook("depth_attn", way),
            shape="batch pos source",
            meaning=f"depth weights of the read at {read}",
            unit="weight",
        )


def memory_of(places: Places | None) -> DecodingCache | None:
    """The decoding cache behind a pass, if it decodes."""
    return None if places is None else places.cache

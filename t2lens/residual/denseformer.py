"""DenseFormer (Pagliardini et al., arXiv 2402.02622): the stream becomes a weighted average of its own past states.

    X_0 = Y_0 = embed,   X_i = unit_i(Y_{i-1}),   Y_i = sum_j a_ij X_j  over j in 0..i with j = i (mod dilation)

with raw signed scalars a_ij: no softmax, no dependence on the token. Y_i replaces the stream that the next unit reads
and carries on (the last one is what the readout reads). Init a_ii = 1, all others 0: exactly a standard transformer.

A unit is one block (section 3). `period` p averages only after every p-th unit; the others pass X_i on as it is, and
every X_i stays a source (section 3.2, "kxp-DenseFormer"). Paper and code: the experiment code has no period; its
`increase_T_every` is `group` here, which makes several blocks one unit, so that states inside a group are no sources.
`every="sublayer"` averages after attention and after the MLP (GPT-BERT, arXiv 2410.24159). Averaging once, after the
last unit, is the paper's baseline "connect to last", which starts at 1e-4 where DenseFormer starts at 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from t2lens.config import ModelConfig, ResidualConfig, check_one_of, check_plain, check_positive
from t2lens.residual.base import Gates, ResidualSystem, Site, Source
from t2lens.residual.sources import Sources
from t2lens.sublayers.positions import Places

__all__ = ["DenseFormer", "DepthWeightedAverage"]


@dataclass(frozen=True, kw_only=True)
class DenseFormer(ResidualConfig):
    """DenseFormer (arXiv 2402.02622): after each unit the stream is replaced by a static, signed average of its past.

    every: what is averaged after, a "block" (the paper) or a "sublayer" (GPT-BERT, arXiv 2410.24159).
    dilation, period: the paper's k x p. period None averages once, after the last unit: its "connect to last".
    group: so many blocks (or sublayers) make one unit, the experiment code's increase_T_every.
    off_diagonal: where all weights but the newest start; 0 makes a fresh model equal to a standard one, 1e-4 is the
    code's value for "connect to last".
    """

    kind: ClassVar[str] = "denseformer"
    every: Literal["block", "sublayer"] = "block"
    dilation: int = 1
    period: int | None = 1
    group: int = 1
    off_diagonal: float = 0.0

    def __post_init__(self) -> None:
        check_plain(self)
        check_one_of(self, "every", ("block", "sublayer"))
        check_positive(self, "dilation", "group")
        if self.period is not None:
            check_positive(self, "period")

    def describe(self) -> str:
        unit = self.every if self.group == 1 else f"{self.group} {self.every}s"
        if self.period is None:
            return f"connect to last, a source per {unit}"
        return f"DenseFormer {self.dilation}x{self.period}, a source per {unit}"


@dataclass
class _State:
    stream: Tensor
    sources: dict[int, Sources]  # i mod dilation -> X_i of that class, as far as an average still reads them


class DepthWeightedAverage(ResidualSystem):
    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        super().__init__(cfg, sites)
        assert isinstance(cfg.residual, DenseFormer)
        self.cfg = cfg.residual
        n_writes = len(sites) - 1
        self.size = self.cfg.group * (n_writes // cfg.n_layers if self.cfg.every == "block" else 1)  # writes per unit
        if n_writes % self.size:
            n = cfg.n_layers if self.cfg.every == "block" else n_writes
            raise ValueError(f"DenseFormer.group ({self.cfg.group}) must divide the number of {self.cfg.every}s ({n}).")
        n_units = n_writes // self.size
        period, k = self.cfg.period or n_units, self.cfg.dilation
        averages = [i for i in range(1, n_units + 1) if i % period == 0]
        self.slot = {sites[i * self.size]: n for n, i in enumerate(averages)}
        # class of indices -> how many of its states are kept: none after the last average that reads them
        self.kept = {i % k: i // k + 1 for i in averages}
        self.weights = nn.ParameterList(torch.full((i // k + 1,), self.cfg.off_diagonal) for i in averages)
        for row in self.weights:
            row.data[-1] = 1.0
        self.single_stream_hooks()
        for site in self.slot:
            self.depth_hooks(site, len(self.sources(site)), scores=False)

    def _unit(self, site: Site) -> int | None:
        """i where the stream at `site` is X_i, None inside a unit."""
        return None if site.index % self.size else site.index // self.size

    def begin(self, embed: Tensor, places: Places | None = None) -> _State:
        return self._keep(_State(embed, {}), 0)

    def _keep(self, state: _State, i: int) -> _State:
        which = i % self.cfg.dilation
        if i // self.cfg.dilation >= self.kept.get(which, 0):
            return state
        if which in state.sources:
            state.sources[which].append(state.stream)
        else:
            state.sources[which] = Sources(self.kept[which], state.stream)
        return state

    def read_gates(self, state: _State, site: Site) -> Gates:
        if site not in self.slot:
            return {}
        return {"weights": self.spread(site.hook("depth_attn"), self.weights[self.slot[site]], state.stream)}

    def enter(self, state: _State, site: Site, gates: Gates) -> _State:
        # here and not in `write`, so that an edit of X_i at hook_resid_post is an edit of the source
        if (i := self._unit(site)) is None or i == 0:
            return state
        state = self._keep(state, i)
        if site in self.slot:
            state.stream = state.sources[i % self.cfg.dilation].mix(gates["weights"])
        return state

    def read(self, state: _State, site: Site, gates: Gates) -> Tensor:
        return state.stream

    def write(self, state: _State, site: Site, atom: Tensor, gates: Gates) -> _State:
        state.stream = state.stream + atom
        return state

    def carry(self, state: _State, name: str) -> _State:
        state.stream = super().carry(state.stream, name)
        return state

    def sources(self, site: Site) -> tuple[Source, ...]:
        i = self._unit(site)
        if i is None:
            return (Source("stream", self.atoms[: site.index + 1]),)
        first = i % self.cfg.dilation if site in self.slot else i
        return tuple(self._source(j) for j in range(first, i + 1, self.cfg.dilation))

    def _source(self, i: int) -> Source:
        """X_i: `block3` is the stream after three blocks, `state@0.attn` the one after that sublayer."""
        end = i * self.size
        if i == 0:
            name = "embed"
        elif self.cfg.every == "block":
            name = f"block{i * self.cfg.group}"
        else:
            name = f"state@{self.atoms[end]}"
        return Source(name, self.atoms[: end + 1])

    def depth_weights(self, site: Site, gates: Gates) -> Tensor | None:
        return gates.get("weights")

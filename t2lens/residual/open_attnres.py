"""The published open ports of Attention Residuals: three programs, one `model_type` ("qwen3_attnres"), different maths.

A: wdlctc/open-attention-residuals, modeling_attnres.py (the checkpoints wdlctc/open-attnres-*). B: the same repository,
Attention-Residuals/modeling_qwen3_attnres.py. C: wdlctc/delta-attention-residuals-code (arXiv 2605.18855).

    s_{l,j} = w_l . RMSNorm(v_j; g_l)  (+ b_l at the newest, A and B)      m_l = sum_j softmax_j(s_l)_j v_j
    h_l = m_l                or, where the mixture adds,  h_l = x + m_l
    h_l <- (1 - gamma) x + gamma h_l                      gate types; gamma = sigmoid(c), sigmoid(W x + c) or alpha

x is what is carried: the stream, or (where `pushes` is "sums") the sum of the current block. `_SCHEMES` says, for each
program and mode, what the v_j are and whether the readout is such a read or x itself.

What differs from the paper (attnres.py): in A and B sources are cumulative streams or sums that hold the embedding
twice, so that reads see duplicates, which share the weight of one tensor between them; a learned scalar b on the newest
source; no final read in A and in every mode that adds. C block and full are the paper. Odd as published, and kept:
C delta_block appends x - (last source), which alternates (embed, block 1, embed + block 2, block 1 + block 3, ...);
C first_layer takes the attention of layer 1, B that of layer 0's MLP. Queries start at N(0, 0.02), not at zero.

Not supported: the null source of delta modes, a constant vector of each read, which no atom holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from t2lens.config import ModelConfig, ResidualConfig, check_one_of, check_plain, check_positive
from t2lens.residual.attnres import Keys
from t2lens.residual.base import Coefficients, Gates, Read, Reads, ResidualSystem, Site, Source, WeightsFrom
from t2lens.sublayers.norms import rms_scale, wide
from t2lens.sublayers.positions import Places

__all__ = ["OpenAttentionResiduals", "OpenAttnRes", "Scheme"]

GATES = ("bias", "sigmoid_scalar", "sigmoid_vector", "learnable_alpha")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What one mode of one program reads.

    pushes: what becomes a source: the carried stream ("streams"), each write ("writes"), the sum of a block, which then
    starts anew ("sums"), what the stream gained in a block ("gains"), the stream less the last source ("alternating").
    each: after every sublayer, or once per block; "sums" and "alternating" act at the first read of the next block,
    after it. embed: when it becomes a source of its own. carried: what is carried is a source too, the newest. adds:
    the mixture is added to what is carried. final: the readout is such a read. values: attention reads its values with
    a query of their own. bias: a learned scalar on the newest source. filters: sources pass a gate per channel before
    they are scored. only: the one write that is a source, from the next layer on.
    """

    pushes: Literal["streams", "writes", "sums", "gains", "alternating"]
    each: Literal["sublayer", "block"] = "sublayer"
    embed: Literal["first", "second", "never"] = "first"  # a source from the first read on, the second, or never
    carried: bool = False
    adds: bool = False
    final: bool = False
    values: bool = False
    bias: bool = False
    filters: bool = False
    only: str | None = None


_STREAMS = Scheme(pushes="streams", carried=True, bias=True)
_SCHEMES: dict[str, Scheme] = {
    "A block": Scheme(pushes="streams", each="block", carried=True, bias=True),
    "A full": _STREAMS,
    "B block": Scheme(pushes="sums", each="block", carried=True, bias=True, final=True),
    "B full": _STREAMS,
    "B delta": Scheme(pushes="writes", adds=True),
    "B delta_block": Scheme(pushes="gains", each="block", adds=True),
    "B delta_v": Scheme(pushes="writes", adds=True, values=True),
    "B first_layer": Scheme(pushes="writes", embed="never", carried=True, only="0.mlp"),
    "B pre_gated": Scheme(pushes="writes", adds=True, filters=True),
    "C block": Scheme(pushes="sums", each="block", embed="never", carried=True, final=True),
    "C full": Scheme(pushes="sums", embed="never", carried=True, final=True),
    "C delta": Scheme(pushes="writes", embed="second", adds=True),
    "C delta_block": Scheme(pushes="alternating", each="block", embed="never", adds=True),
    "C delta_v": Scheme(pushes="writes", embed="never", adds=True, values=True),
    "C delta_replace": Scheme(pushes="writes", embed="never", carried=True),
    "C full_v": Scheme(pushes="streams", embed="never", carried=True, values=True),
    "C full_additive": Scheme(pushes="streams", embed="never", adds=True),
    "C first_layer": Scheme(pushes="writes", embed="never", carried=True, only="1.attn"),
    "C pre_gated": Scheme(pushes="writes", embed="never", adds=True, filters=True),
}


@dataclass(frozen=True, kw_only=True)
class OpenAttnRes(ResidualConfig):
    """One mode of one of the three open programs of Attention Residuals (names as published).

    dialect: "A", "B" or "C" (see the module); mode: "block", "full", "delta", ... n_blocks: as the programs count, so
    that a block has ceil(n_layers / n_blocks) layers (28 layers in 8 blocks make 7). gate: how the read is mixed with
    what is carried; "bias" is no gate. bias_init: start of the scalar on the newest source (A and B; their class
    default is 3, their trainings from scratch used 0).
    """

    kind: ClassVar[str] = "open-attnres"
    dialect: Literal["A", "B", "C"] = "A"
    mode: str = "block"
    n_blocks: int = 8
    gate: Literal["bias", "sigmoid_scalar", "sigmoid_vector", "learnable_alpha"] = "bias"
    bias_init: float = 0.0

    def __post_init__(self) -> None:
        check_plain(self)
        check_one_of(self, "dialect", ("A", "B", "C"))
        check_one_of(self, "gate", GATES)
        check_positive(self, "n_blocks")
        if f"{self.dialect} {self.mode}" not in _SCHEMES:
            modes = ", ".join(name[2:] for name in _SCHEMES if name[0] == self.dialect)
            raise ValueError(f"OpenAttnRes: dialect {self.dialect} has no mode {self.mode!r}; it has {modes}.")
        if self.gate != "bias" and (self.scheme.filters or self.scheme.only):
            raise ValueError(f"OpenAttnRes: the programs apply no gate in mode {self.mode!r}, so it must be 'bias'.")

    @property
    def scheme(self) -> Scheme:
        return _SCHEMES[f"{self.dialect} {self.mode}"]

    def describe(self) -> str:
        gate = "" if self.gate == "bias" else f", gate {self.gate}"
        return f"open Attention Residuals, dialect {self.dialect}, {self.mode}{gate}"


@dataclass
class _State:
    held: Tensor | None  # what is carried; None where a block has just been closed
    mark: Tensor  # the stream as the block began
    done: Keys | None = None


@dataclass
class _Names:
    """Names of what a state holds, written in step with it."""

    held: tuple[str, ...]
    mark: tuple[str, ...] = ()
    done: list[Source] = field(default_factory=list)


class OpenAttentionResiduals(ResidualSystem):
    """Reads after a `Scheme`; `t2lens.residual.delta_attnres` runs on it too."""

    weights_sum_to_one = True

    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        super().__init__(cfg, sites)
        self.scheme, self.gate_kind, bias_init = self._configured(cfg.residual)
        d, n = cfg.d_model, len(sites) if self.scheme.final else len(sites) - 1
        self.query, self.key_norm = nn.Parameter(torch.zeros(n, d)), nn.Parameter(torch.ones(n, d))
        if self.scheme.values:
            self.value_query = nn.Parameter(torch.zeros(cfg.n_layers, d))
            self.value_key_norm = nn.Parameter(torch.ones(cfg.n_layers, d))
        if self.scheme.bias:
            self.bias = nn.Parameter(torch.full((n,), float(bias_init)))
        if self.gate_kind == "sigmoid_vector":
            self.gate_weight = nn.Parameter(torch.zeros(len(sites) - 1, d, d))
            self.gate_bias = nn.Parameter(torch.full((len(sites) - 1, d), -2.0))
        elif self.gate_kind != "bias":
            start = -2.0 if self.gate_kind == "sigmoid_scalar" else 0.0
            self.gate_value = nn.Parameter(torch.full((len(sites) - 1,), start))
        if self.scheme.filters:
            self.filter_weight = nn.Parameter(torch.zeros(n, d, d))
            self.filter_bias = nn.Parameter(torch.zeros(n, d))
        self._sources, self._capacity = self._name_sources()
        self._hooks()

    def _configured(self, residual: ResidualConfig) -> tuple[Scheme, str, float]:
        assert isinstance(residual, OpenAttnRes)
        self.per_block = -(-self.model_cfg.n_layers // residual.n_blocks)
        return residual.scheme, residual.gate, residual.bias_init

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Queries N(0, 0.02), as the programs end up with; all else at its constant."""
        for name in ("query", "value_query"):
            if hasattr(self, name):
                getattr(self, name).data.normal_(0.0, 0.02, generator=generator)

    # --- when something becomes a source
    def _begins_block(self, site: Site) -> bool:
        """Whether the read at `site` is the first after the end of a block (or of all)."""
        return self.scheme.each == "sublayer" or (site.opens and (site.layer or 0) % self.per_block == 0)

    def _ends_block(self, site: Site) -> bool:
        assert site.layer is not None
        return self.scheme.each == "sublayer" or (site.closes and (site.layer + 1) % self.per_block == 0)

    def _pushes_before(self, site: Site) -> bool:
        """Whether what is carried becomes a source once `site` has read, before its write."""
        if self.scheme.pushes not in ("sums", "alternating") or site.kind == "out":
            return False
        return self._begins_block(site) and (site.index > 0 or self.scheme.embed != "first")

    def _pushes_after(self, site: Site) -> bool:
        """Whether the write of `site` ends with a new source."""
        if self.scheme.pushes in ("sums", "alternating"):
            return False
        return self._ends_block(site) if self.scheme.only is None else site.name == self.scheme.only

    def _mixes(self, site: Site) -> bool:
        """Whether `site` reads a mixture; else it reads what is carried, as it is."""
        return self._weighs[site.index]

    # --- the state: linear
    def begin(self, embed: Tensor, places: Places | None = None) -> _State:
        state = _State(held=embed, mark=embed)
        if self.scheme.embed == "first":
            self._push(state, embed)
        return state

    def _push(self, state: _State, x: Tensor) -> None:
        if state.done is None:
            state.done = Keys(self._capacity, x, self.model_cfg.norm_eps)
        else:
            state.done.append(x)

    def read(self, state: _State, site: Site, gates: Gates) -> Reads:
        reads = {way: self._read(state, site, gates, way) for way in self.ways(site)}
        return reads if len(reads) > 1 else reads[""]

    def _read(self, state: _State, site: Site, gates: Gates, way: str) -> Tensor:
        held = state.held
        if not self._mixes(site):
            assert held is not None
            return held
        weights, n = gates[f"weights{way}"], 0 if state.done is None else len(state.done)
        mixture = None if state.done is None else state.done.mix(weights[..., :n])
        if self.scheme.carried:
            assert held is not None
            newest = weights[..., n:]
            mixture = held * newest if mixture is None else torch.addcmul(mixture, held, newest)
        assert mixture is not None and held is not None
        if "filter" in gates:
            mixture = mixture * gates["filter"]
        if self.scheme.adds:
            return held + (mixture if "gate" not in gates else gates["gate"] * mixture)
        return mixture if "gate" not in gates else torch.lerp(held, mixture, gates["gate"])

    def write(self, state: _State, site: Site, atom: Tensor, gates: Gates) -> _State:
        if self._pushes_before(site):
            assert state.held is not None
            if self.scheme.pushes == "alternating" and state.done is not None:
                self._push(state, state.held - state.done[-1])
            else:
                self._push(state, state.held)
            if self.scheme.pushes == "sums":
                state.held = None
        if site.index == 0 and self.scheme.embed == "second":
            assert state.held is not None
            self._push(state, state.held)
        state.held = atom if state.held is None else state.held + atom
        if self._pushes_after(site):
            pushed = {"streams": state.held, "writes": atom}.get(self.scheme.pushes)
            self._push(state, state.held - state.mark if pushed is None else pushed)
            state.mark = state.held
        return state

    def carry(self, state: _State, name: str) -> _State:
        if name in self.hook_points:
            assert state.held is not None
            state.held = self.hook_points[name](state.held)
        return state

    # --- the gates of a read: nonlinear
    def read_gates(self, state: _State, site: Site) -> Gates:
        if not self._mixes(site):
            return {}
        assert state.held is not None
        gates: Gates = {}
        if self.scheme.filters:
            inner = nn.functional.linear(state.held, self.filter_weight[site.index], self.filter_bias[site.index])
            gates["filter"] = self._seen(site.hook("depth_filter"), inner.sigmoid())
        shared = self._scores(state, site, self.query, self.key_norm, site.index, gates.get("filter"))
        for way in self.ways(site):
            scores = shared
            if way == "v":
                scores = self._scores(state, site, self.value_query, self.value_key_norm, site.layer or 0, None)
            scores = self._seen(site.hook("depth_scores", way), scores)
            weights = scores.softmax(dim=-1).to(state.held.dtype)
            gates[f"weights{way}"] = self.hook_points[site.hook("depth_attn", way)](weights)
        if self.gate_kind != "bias" and site.kind != "out":
            gates["gate"] = self._seen(site.hook("depth_gate"), self._gate(state.held, site.index))
        return gates

    def _seen(self, name: str, x: Tensor) -> Tensor:
        """x through its hook point, which a read of copies of one source does not have: nothing depends on x there."""
        return self.hook_points[name](x) if name in self.hook_points else x

    def _scores(
        self, state: _State, site: Site, query: Tensor, norm: Tensor, row: int, through: Tensor | None
    ) -> Tensor:
        """[B, T, S] in at least float32, the newest source last."""
        direction, held = query[row] * norm[row], state.held
        if through is not None:
            assert state.done is not None
            filtered = (state.done[j] * through for j in range(len(state.done)))
            return torch.stack(
                [wide(x @ direction) / rms_scale(x, self.model_cfg.norm_eps).squeeze(-1) for x in filtered], dim=-1
            )
        parts = [] if state.done is None else [state.done.score(direction)]
        if self.scheme.carried:
            assert held is not None
            newest = wide(held @ direction).unsqueeze(-1) / rms_scale(held, self.model_cfg.norm_eps)
            parts.append(newest + self.bias[row] if self.scheme.bias else newest)
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def _gate(self, held: Tensor, i: int) -> Tensor:
        """[B, T, 1], or [B, T, D] where it is one per channel."""
        if self.gate_kind == "sigmoid_vector":
            return nn.functional.linear(held, self.gate_weight[i], self.gate_bias[i]).sigmoid()
        value = self.gate_value[i].sigmoid() if self.gate_kind == "sigmoid_scalar" else self.gate_value[i]
        return value.to(held.dtype).expand(*held.shape[:-1], 1)

    # --- what the numbers mean
    def ways(self, site: Site) -> tuple[str, ...]:
        return ("q", "k", "v") if self.scheme.values and site.kind == "attn" else ("",)

    def coefficients(self) -> Coefficients:
        if self.scheme.filters:
            return "operator"
        return "channel" if self.gate_kind == "sigmoid_vector" else "scalar"

    def depth_weights(self, site: Site, gates: Gates) -> Tensor | dict[str, Tensor] | None:
        if not self._mixes(site):
            return None
        ways = self.ways(site)
        return gates["weights"] if ways == ("",) else {way: gates[f"weights{way}"] for way in ways}

    def weights_from(self, site: Site) -> WeightsFrom:
        if not self._mixes(site) or len({source.atoms for source in self.sources(site)}) == 1:
            return "nothing"
        return "state" if self.scheme.filters else "keys"

    def sources(self, site: Site) -> tuple[Source, ...]:
        return self._sources[site.index]

    def _name_sources(self) -> tuple[list[tuple[Source, ...]], int]:
        """The sources of every site, from the same pushes that `write` makes; and how many there are in the end."""
        names, found = _Names(held=("embed",), mark=("embed",)), []
        self._weighs: list[bool] = []
        if self.scheme.embed == "first":
            names.done.append(Source("embed", ("embed",)))
        for site in self.sites:
            late = self.scheme.only is None or (site.layer or 0) > int(self.scheme.only.split(".")[0])
            mixes = (self.scheme.carried or bool(names.done)) and late and (site.kind != "out" or self.scheme.final)
            self._weighs.append(mixes)
            if not mixes:
                found.append((Source("stream", names.held),))
            else:
                newest = (Source(self._name_of(site, names), names.held),) if self.scheme.carried else ()
                found.append((*names.done, *newest))
            if site.kind != "out":
                self._note(site, names)
        return found, len(names.done)

    def _note(self, site: Site, names: _Names) -> None:
        """`write`, on names."""
        atom = (site.name,)
        if self._pushes_before(site):
            if self.scheme.pushes == "alternating":
                last = names.done[-1].atoms if names.done else ()
                n = len(names.done)
                name = "embed" if n == 0 else f"block{n}" + (f"+{names.done[-2].name}" if n > 1 else "")
                names.done.append(Source(name, tuple(a for a in names.held if a not in last)))
            else:
                names.done.append(Source(self._name_of(site, names), names.held))
                names.held = ()
        if site.index == 0 and self.scheme.embed == "second":
            names.done.append(Source("embed", names.held))
        names.held = (*names.held, *atom)
        if not self._pushes_after(site):
            return
        if self.scheme.pushes == "streams":
            names.done.append(Source(f"state@{site.name}", names.held))
        elif self.scheme.pushes == "writes":
            names.done.append(Source(site.name, atom))
        else:
            names.done.append(Source(f"block{len(names.done)}", tuple(a for a in names.held if a not in names.mark)))
        names.mark = names.held

    def _name_of(self, site: Site, names: _Names) -> str:
        """The name of what is carried, as a source of `site`."""
        if self.scheme.pushes != "sums":
            return "stream"
        if names.held == ("embed",) and self.scheme.embed == "never":
            return "embed"
        if self.scheme.each == "sublayer":
            return names.held[-1]
        return f"block{len(names.done)}" if site.kind == "out" or self._pushes_before(site) else "partial"

    def _hooks(self) -> None:
        if self.scheme.pushes != "sums":
            self.single_stream_hooks()
        for site in self.sites:
            if not self._mixes(site):
                continue
            sources = self.sources(site)
            differ = len({source.atoms for source in sources}) > 1  # among copies of one there is nothing to choose
            for way in self.ways(site):
                self.depth_hooks(site, len(sources), way, scores=differ)
            name, channels = Read(site).name, self.gate_kind == "sigmoid_vector"
            if self.gate_kind != "bias" and site.kind != "out" and differ:
                self._gate_hook(site, "depth_gate", f"gate of the depth read at {name}: 0 carried, 1 read", channels)
            if self.scheme.filters and differ:
                self._gate_hook(site, "depth_filter", f"gate of the sources before the read at {name}", True)

    def _gate_hook(self, site: Site, stem: str, meaning: str, channels: bool) -> None:
        shape = "batch pos d_model" if channels else "batch pos 1"
        unit = "" if (stem, self.gate_kind) == ("depth_gate", "learnable_alpha") else "0 to 1"  # which nothing bounds
        self.hook_point(site.hook(stem), shape=shape, meaning=meaning, unit=unit)

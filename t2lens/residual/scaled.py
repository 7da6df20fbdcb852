"""The small relatives of the residual stream, which scale, gate or norm its two terms:

    x' = N( (1 - g) (a x + c x_0) + g b f + L(x) )      with g, N, L and each coefficient where the configuration has it

    skips with gains   a learned, one per write, 1 at first        DenseFormer's baseline, arXiv 2402.02622
    ReZero             b learned, 0 at first                       arXiv 2003.04887 (it also drops the LayerNorms)
    LayerScale         b learned per channel, small at first       arXiv 2103.17239
    Highway            g = sigmoid(W x + bias), (1 - g) x + g f    arXiv 1505.00387
    DeepNet            N a LayerNorm, a = (2 n_layers)^(1/4)       arXiv 2203.00555, decoder only
    x0 lambdas         x <- r x + z x_0 as a block opens           nanochat: r, z learned, one per layer
    LAuReL             L(x) = W_r W_l x, low rank                  arXiv 2411.07501; Gemma 3n's form is below

LAuReL in Gemma 3n, attention only: x' = (x + f + n + RMSNorm(W_r W_l n)) / sqrt(2), n = RMSNorm(x). There n is what
attention reads, while ours has a weight of its own; its norm of attention's output belongs to f. `RELATIVES` and
`deepnet` spell all of them out.

Paper and ours: DeepNet's LayerNorm has a bias, ours has none, because it would belong to no atom; its scale is recorded
like a gate. A model that has no other norms, as the papers of DeepNet and ReZero have it, is
ModelConfig(norm=Norm(kind="none", weight=False)). DeepNet's smaller initial matrices belong to the sublayers, and the
rest of nanochat (smear, backout, value embeddings) is not here. W of the gate and the low-rank factors start as normal
numbers of deviation 1/sqrt(fan in), except that the plain W_r starts at 0: a fresh model equals a standard one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from t2lens.config import ModelConfig, Norm, ResidualConfig, check_one_of, check_plain, check_positive
from t2lens.residual.base import Coefficients, Gates, ResidualSystem, Site, Source, WeightsFrom
from t2lens.sublayers.norms import centred, rms_scale, wide
from t2lens.sublayers.positions import Places

__all__ = ["RELATIVES", "Gain", "Scaled", "ScaledResidual", "deepnet"]


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A coefficient: learned per "write", per "layer" or per "channel" of every write, or "fixed" (no parameter).

    start: its initial value; with `end` it goes in equal steps from there to `end` at the last layer.
    """

    per: Literal["write", "layer", "channel", "fixed"] = "write"
    start: float = 1.0
    end: float | None = None

    def __post_init__(self) -> None:
        check_plain(self)
        check_one_of(self, "per", ("write", "layer", "channel", "fixed"))

    def value(self, layer: int, n_layers: int) -> float:
        """The initial (or fixed) value in `layer`."""
        return self.start if self.end is None else self.start + (self.end - self.start) * layer / max(1, n_layers - 1)


@dataclass(frozen=True, kw_only=True)
class Scaled(ResidualConfig):
    """x' = N((1 - g) (keep x + x0 x_0) + g add f + L(x)): gains, gates and norms on the residual stream.

    keep, add, x0: coefficients of the stream, of what is written, and of the embedding (None: 1, 1 and 0).
    at: where keep and x0 act, at every "write" or as a "block" opens, before it reads.
    gate: Highway's g, one per token ("scalar") or per "channel"; gate_bias: its initial bias.
    post_norm: N, without a bias. low_rank: the rank of L; low_rank_form: "plain" W_r W_l x after every sublayer, or
    "normed" as in Gemma 3n, after attention.
    """

    kind: ClassVar[str] = "scaled"
    parts: ClassVar[dict[str, type]] = {"keep": Gain, "add": Gain, "x0": Gain, "post_norm": Norm}
    keep: Gain | None = None
    add: Gain | None = None
    x0: Gain | None = None
    at: Literal["write", "block"] = "write"
    gate: Literal["none", "scalar", "channel"] = "none"
    gate_bias: float = -1.0
    post_norm: Norm | None = None
    low_rank: int | None = None
    low_rank_form: Literal["plain", "normed"] = "plain"

    def __post_init__(self) -> None:
        check_plain(self)
        for name, part in (("keep", Gain), ("add", Gain), ("x0", Gain), ("post_norm", Norm)):
            if not isinstance(value := getattr(self, name), part | None):
                raise ValueError(f"Scaled.{name} must be a {part.__name__} or None, not {value!r}.")
        check_one_of(self, "at", ("write", "block"))
        check_one_of(self, "gate", ("none", "scalar", "channel"))
        check_one_of(self, "low_rank_form", ("plain", "normed"))
        if self.low_rank is not None:
            check_positive(self, "low_rank")
        if self.post_norm is not None and self.post_norm.bias:
            raise ValueError("Scaled.post_norm must have no bias, which would be in no atom's contribution.")
        if self.post_norm is not None and self.post_norm.kind == "none":
            raise ValueError('Scaled.post_norm must be of the kind "rms" or "layer"; for no norm leave it None.')
        for name in ("keep", "x0") if self.at == "block" else ():
            gain = getattr(self, name)
            if gain is not None and gain.per not in ("layer", "fixed"):
                raise ValueError(f'Scaled.{name} acts once per block (at="block"), so it is per "layer" or "fixed".')

    def describe(self) -> str:
        names = {"keep": "stream", "add": "write", "x0": "embedding"}
        words = [f"{names[n]} times {g.per} gain" for n in names if (g := getattr(self, n)) is not None]
        words += [f"Highway gate per {'token' if self.gate == 'scalar' else 'channel'}"] if self.gate != "none" else []
        words += [f"LAuReL of rank {self.low_rank}"] if self.low_rank is not None else []
        words += ["norm after the sum"] if self.post_norm is not None else []
        return f"scaled residual: {', '.join(words)}" if words else "scaled residual without any scale"


def deepnet(n_layers: int) -> Scaled:
    """DeepNet's residual (arXiv 2203.00555) for a decoder of `n_layers`: LN((2 n_layers)^(1/4) x + f)."""
    return Scaled(keep=Gain(per="fixed", start=(2 * n_layers) ** 0.25), post_norm=Norm(kind="layer"))


#: the relatives that need no number of layers (see `deepnet`). Start values: ReZero, Highway (its gate nearly shut),
#: LayerScale for 24 layers and nanochat's as published, Gemma 3n's rank
RELATIVES: dict[str, Scaled] = {
    "skips-with-gains": Scaled(keep=Gain()),
    "rezero": Scaled(add=Gain(start=0.0)),
    "layerscale": Scaled(add=Gain(per="channel", start=1e-5)),
    "highway": Scaled(gate="channel"),
    "x0-lambdas": Scaled(
        at="block", keep=Gain(per="layer", start=1.15, end=1.05), x0=Gain(per="layer", start=0.2, end=0.05)
    ),
    "laurel": Scaled(low_rank=64),
    "laurel-gemma": Scaled(low_rank=64, low_rank_form="normed"),
}


@dataclass
class _State:
    stream: Tensor
    embed: Tensor | None  # kept where it is added again
    pending: Tensor | None = None  # the (centred) sum whose scale was just measured, so that it is made once


class ScaledResidual(ResidualSystem):
    gate_label: ClassVar[str | None] = "transform gate"
    gate_name: ClassVar[str | None] = "transform"
    gate_range: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    gate_meaning: ClassVar[str | None] = "0 keeps the stream, 1 replaces it by what is written (mean over channels)."

    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        super().__init__(cfg, sites)
        assert isinstance(cfg.residual, Scaled)
        self.cfg = cfg.residual
        self.stream_is_whole = self.cfg.x0 is None
        d, n = cfg.d_model, len(sites) - 1
        self.single_stream_hooks()
        self.gains: dict[str, Gain] = {
            name: gain for name in ("keep", "add", "x0") if (gain := getattr(self.cfg, name)) is not None
        }
        for name, gain in self.gains.items():
            if gain.per != "fixed":
                layers = range(cfg.n_layers) if gain.per == "layer" else [site.layer for site in sites[:-1]]
                start = torch.tensor([[gain.value(layer or 0, cfg.n_layers)] for layer in layers])
                setattr(self, name, nn.Parameter(start.repeat(1, d if gain.per == "channel" else 1)))
        if self.cfg.gate != "none":
            width = d if self.cfg.gate == "channel" else 1
            self.gate_weight = nn.Parameter(torch.zeros(n, width, d))
            self.gate_bias = nn.Parameter(torch.full((n, width), float(self.cfg.gate_bias)))
        if self.cfg.low_rank is not None:
            self.lowered = [s for s in sites[:-1] if self.cfg.low_rank_form == "plain" or s.kind == "attn"]
            self.low_left = nn.Parameter(torch.zeros(len(self.lowered), self.cfg.low_rank, d))
            self.low_right = nn.Parameter(torch.zeros(len(self.lowered), d, self.cfg.low_rank))
            if self.cfg.low_rank_form == "normed":
                self.low_norm_in = nn.Parameter(torch.ones(len(self.lowered), d))
                self.low_norm_out = nn.Parameter(torch.ones(len(self.lowered), d))
        if self.cfg.post_norm is not None and self.cfg.post_norm.weight:
            self.post_norm_weight = nn.Parameter(torch.ones(n, d))
        for site in sites[:-1]:
            self._hooks(site)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """What the module docstring says, drawn from `generator`."""
        for name in ("gate_weight", "low_left", "low_right"):
            weight = getattr(self, name, None)
            if weight is not None and not (name == "low_right" and self.cfg.low_rank_form == "plain"):
                weight.data.normal_(0.0, 1 / math.sqrt(weight.shape[-1]), generator=generator)

    # --- gates
    def read_gates(self, state: _State, site: Site) -> Gates:
        return self._coefficients(state, site, opening=True) if self._opens_block(site) else {}

    def write_gates(self, state: _State, site: Site, read: Any, normed: Any, out: Tensor) -> Gates:
        gates = self._coefficients(state, site, opening=False)
        if self.cfg.gate != "none":
            x, i = wide(read), site.index
            g = (x @ self.gate_weight[i].to(x.dtype).T + self.gate_bias[i].to(x.dtype)).sigmoid()
            gates["gate"] = self.hook_points[site.hook("transform")](g.to(read.dtype))
        if self._normed_low_rank(site):
            scale = self.hook_points[site.hook("laurel_scale")]
            gates["laurel_scale"] = scale(rms_scale(state.stream, self.model_cfg.norm_eps))
            low = self._low_rank(self._laurel_input(state.stream, site, gates), site)
            scale = self.hook_points[site.hook("laurel_out_scale")]
            gates["laurel_out_scale"] = scale(rms_scale(low, self.model_cfg.norm_eps))
        if self.cfg.post_norm is not None:
            state.pending = self._centred(self._sum(state, site, out, gates))
            scale = self.hook_points[site.hook("post_scale")]
            gates["post_scale"] = scale(rms_scale(state.pending, self.cfg.post_norm.eps))
        return gates

    def _coefficients(self, state: _State, site: Site, *, opening: bool) -> Gates:
        rows = ((n, site.layer if self.gains[n].per == "layer" else site.index) for n in self._acting(opening=opening))
        return {
            n: self.spread(self._name(n, site, opening=opening), self.get_parameter(n)[row], state.stream)
            for n, row in rows
        }

    # --- linear
    def begin(self, embed: Tensor, places: Places | None = None) -> _State:
        return _State(embed, embed if self.cfg.x0 is not None else None)

    def enter(self, state: _State, site: Site, gates: Gates) -> _State:
        if self._opens_block(site):
            state.stream = self._kept(state, site, gates)
        return state

    def read(self, state: _State, site: Site, gates: Gates) -> Tensor:
        return state.stream

    def write(self, state: _State, site: Site, atom: Tensor, gates: Gates) -> _State:
        if self.cfg.post_norm is None:
            state.stream = self._sum(state, site, atom, gates)
            return state
        total = self._centred(self._sum(state, site, atom, gates)) if state.pending is None else state.pending
        total = (total / gates["post_scale"]).to(state.stream.dtype)
        state.stream = total * self.post_norm_weight[site.index] if self.cfg.post_norm.weight else total
        state.pending = None
        return state

    def carry(self, state: _State, name: str) -> _State:
        state.stream = super().carry(state.stream, name)
        return state

    def _sum(self, state: _State, site: Site, atom: Tensor, gates: Gates) -> Tensor:
        if "gate" in gates:  # (1 - g) kept + g added
            kept = self._kept(state, site, gates) if self.cfg.at == "write" else state.stream
            total = torch.lerp(kept, self._times("add", atom, site, gates), gates["gate"])
        elif self.cfg.at == "write" and self.cfg.x0 is None and self.cfg.keep is not None:
            total = self._plus("keep", self._times("add", atom, site, gates), state.stream, site, gates)
        else:
            kept = self._kept(state, site, gates) if self.cfg.at == "write" else state.stream
            total = self._plus("add", kept, atom, site, gates)
        if self.cfg.low_rank is None:
            return total
        if self.cfg.low_rank_form == "plain":
            return total + self._low_rank(state.stream, site)
        if not self._normed_low_rank(site):
            return total
        n = self._laurel_input(state.stream, site, gates)
        low = (self._low_rank(n, site) / gates["laurel_out_scale"]).to(n.dtype)
        return (total + n + low * self.low_norm_out[self.lowered.index(site)]) / math.sqrt(2)

    def _kept(self, state: _State, site: Site, gates: Gates) -> Tensor:
        kept = self._times("keep", state.stream, site, gates)
        return kept if state.embed is None else self._plus("x0", kept, state.embed, site, gates)

    def _times(self, name: str, x: Tensor, site: Site, gates: Gates) -> Tensor:
        return x if name not in self.gains else x * self._gain(name, site, gates)

    def _plus(self, name: str, total: Tensor, x: Tensor, site: Site, gates: Gates) -> Tensor:
        """total + coefficient * x, in one pass over memory."""
        gain = self._gain(name, site, gates) if name in self.gains else 1.0
        return torch.addcmul(total, x, gain) if isinstance(gain, Tensor) else torch.add(total, x, alpha=gain)

    def _gain(self, name: str, site: Site, gates: Gates) -> Tensor | float:
        gain = self.gains[name]
        assert site.layer is not None
        return gain.value(site.layer, self.model_cfg.n_layers) if gain.per == "fixed" else gates[name]

    def _low_rank(self, x: Tensor, site: Site) -> Tensor:
        i = self.lowered.index(site)
        return (x @ self.low_left[i].T) @ self.low_right[i].T

    def _laurel_input(self, x: Tensor, site: Site, gates: Gates) -> Tensor:
        return (wide(x) / gates["laurel_scale"]).to(x.dtype) * self.low_norm_in[self.lowered.index(site)]

    def _centred(self, x: Tensor) -> Tensor:
        assert self.cfg.post_norm is not None
        return centred(x) if self.cfg.post_norm.kind == "layer" else wide(x)

    # --- where what acts
    def _opens_block(self, site: Site) -> bool:
        return self.cfg.at == "block" and site.opens and site.kind != "out"

    def _acting(self, *, opening: bool) -> list[str]:
        """The learned gains that act as a block opens, or those that act with a write."""
        at_block = ("keep", "x0") if self.cfg.at == "block" else ()
        return [n for n, gain in self.gains.items() if gain.per != "fixed" and (n in at_block) == opening]

    @staticmethod
    def _name(gain: str, site: Site, *, opening: bool) -> str:
        return f"blocks.{site.layer}.hook_{gain}" if opening else site.hook(gain)

    def _normed_low_rank(self, site: Site) -> bool:
        return self.cfg.low_rank is not None and self.cfg.low_rank_form == "normed" and site.kind == "attn"

    # --- what the numbers mean
    def coefficients(self) -> Coefficients:
        norm = self.cfg.post_norm
        if self.cfg.low_rank or (norm is not None and norm.kind == "layer"):
            return "operator"
        by_channel = self.cfg.gate == "channel" or any(gain.per == "channel" for gain in self.gains.values())
        return "channel" if by_channel or (norm is not None and norm.weight) else "scalar"

    def sources(self, site: Site) -> tuple[Source, ...]:
        return (Source("stream", self.atoms[: site.index + 1]),)

    def weights_from(self, site: Site) -> WeightsFrom:
        seen = self.cfg.gate != "none" or self.cfg.post_norm is not None
        return "state" if seen or (self.cfg.low_rank is not None and self.cfg.low_rank_form == "normed") else "nothing"

    def gate(self, gates: Gates) -> Tensor | None:
        return gates["gate"].mean(dim=-1) if "gate" in gates else None

    def _hooks(self, site: Site) -> None:
        what = {"keep": "the stream", "add": "what is written", "x0": "the embedding"}
        for opening in (True, False) if self._opens_block(site) else (False,):
            for gain in self._acting(opening=opening):
                axis = "d_model" if self.gains[gain].per == "channel" else "1"
                where = f"as block {site.layer} opens" if opening else f"at the write of {site.name}"
                name = self._name(gain, site, opening=opening)
                self.hook_point(name, shape=f"batch pos {axis}", meaning=f"coefficient of {what[gain]} {where}")
        if self.cfg.gate != "none":
            axis = "d_model" if self.cfg.gate == "channel" else "1"
            meaning = f"gate of {site.name}: 0 keeps the stream, 1 replaces it"
            self.hook_point(site.hook("transform"), shape=f"batch pos {axis}", meaning=meaning, unit="0 to 1")
        scales = {"post_scale": "the sum after"} if self.cfg.post_norm is not None else {}
        if self._normed_low_rank(site):
            scales |= {"laurel_scale": "the stream before", "laurel_out_scale": "the low-rank branch at"}
        for name, meaning in scales.items():
            meaning = f"root mean square of {meaning} {site.name}"
            self.hook_point(site.hook(name), shape="batch pos 1", meaning=meaning, unit="stream")

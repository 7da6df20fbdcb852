"""MUDDFormer (arXiv 2502.12170): after every block, four mixtures of all block outputs, one per role of the next block.

    dw_i = W2 act(W1 X_i / rms(X_i)) + A_i      [way, source 0..i] per token      way_c = sum_j dw_i[c, j] X_j
    block i + 1:  h = R + MHA(norm_q Q, norm_k K, norm_v V)      X_{i+1} = h + MLP(norm h)
    parallel blocks (MUDDPythia):  X_{i+1} = R + MHA(norm_q Q, norm_k K, norm_v V) + MLP(norm R)

Sections 2.2 to 2.4. X_0 is the embedding, X_i the output of block i; the weights are signed and not normalised; the
first block reads X_0 in every role (and so has a single way), the readout has one way. R replaces the stream: it is
hook_resid_pre, and X_i is hook_resid_post. Init: W1 N(0, 1/D), W2 = 0, A_i one-hot on X_i, which is the plain residual.

PrePostDANorm (section 2.5, Eq. 10), where Xn_j = X_j / rms(X_j) * g_j and A_i starts at 0:

    "paper"   way_c = X_i + postnorm_c(DA_c(Xn))                      for every way
    "code"    way_c = X_i + DA_c(Xn) for q, k, v;  way_r = X_i + postnorm(DA_r(Xn)), also at the readout

In that mode the generator's RMSNorm has a learned scale. Only the code says where the scale of postnorm starts (1e-3,
against the 1/sqrt(eps) slope of a norm at zero); ours starts there in both.

Paper and code: the paper's K (rows of W1) is ways * sources, the code rounds it up to the next multiple of 64
(`hidden_round`) and makes it four times as large in the last module (`hidden_expand_last`); GELU is exact in the
PyTorch code, the tanh form in JAX. The public PyTorch class draws A at random, being made for inference only.

With ShortSWA before attention (ours; the papers have none) ShortSWA reads R, and what it writes is added to Q, K and V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from t2lens.config import ModelConfig, ResidualConfig, check_one_of, check_positive
from t2lens.residual.base import Coefficients, Gates, ResidualSystem, Site, Source, WeightsFrom
from t2lens.residual.sources import Sources
from t2lens.sublayers.norms import rms_scale, wide
from t2lens.sublayers.positions import Places

__all__ = ["MUDDFormer", "MultiwayDynamicDense", "reallocated_widths"]

_WAYS = ("q", "k", "v", "r")
_ACTS = {"gelu": "none", "gelu_tanh": "tanh"}


@dataclass(frozen=True, kw_only=True)
class MUDDFormer(ResidualConfig):
    """MUDDFormer (arXiv 2502.12170): signed mixtures of all block outputs for queries, keys, values and the stream.

    weights: "dynamic" (static plus a small MLP of the newest state, per token) or "static" (the paper's ablation).
    pre_post_norm: "none", or PrePostDANorm as the "paper" has it or as the JAX "code" has it.
    hidden_round, hidden_expand_last: the generator's width as in the code (64 and 4); 1 and 1 are the paper's.
    """

    kind: ClassVar[str] = "muddformer"
    weights: Literal["dynamic", "static"] = "dynamic"
    pre_post_norm: Literal["none", "paper", "code"] = "none"
    act: Literal["gelu", "gelu_tanh"] = "gelu"
    hidden_round: int = 1
    hidden_expand_last: int = 1

    def __post_init__(self) -> None:
        check_one_of(self, "weights", ("dynamic", "static"))
        check_one_of(self, "pre_post_norm", ("none", "paper", "code"))
        check_one_of(self, "act", tuple(_ACTS))
        check_positive(self, "hidden_round", "hidden_expand_last")

    def describe(self) -> str:
        norm = "" if self.pre_post_norm == "none" else f", PrePostDANorm ({self.pre_post_norm})"
        return f"MUDDFormer, {'static weights' if self.weights == 'static' else 'static and dynamic weights'}{norm}"

    def hidden(self, n_weights: int, *, last: bool) -> int:
        """Width K of a generator of `n_weights` weights. The code's rounding always adds: 64 becomes 128."""
        width = n_weights * (self.hidden_expand_last if last else 1)
        return width if self.hidden_round == 1 else (width // self.hidden_round + 1) * self.hidden_round


def reallocated_widths(d_mlp: int, n_layers: int, multiple: int = 128) -> tuple[int, ...]:
    """MLP widths that grow with depth from d_mlp / 2 to 3 d_mlp / 2 in multiples of `multiple` (section 2.4), for
    `MLP(d_mlp=...)`. Halves round to even, as in the code. ValueError where a width would be 0.

    Example:
        >>> reallocated_widths(256, 4)
        (128, 256, 256, 384)
    """
    steps = [0.5 if n_layers == 1 else i / (n_layers - 1) for i in range(n_layers)]
    widths = tuple(round(d_mlp * (step + 0.5) / multiple) * multiple for step in steps)
    if min(widths, default=0) < 1:
        raise ValueError(
            f"MLP widths around {d_mlp} in multiples of {multiple} over {n_layers} layers would be {widths}; "
            "all must be at least 1."
        )
    return widths


@dataclass
class _State:
    stream: Tensor  # what the block carries on: R, then R + what the block wrote
    newest: Tensor  # X_i, the output of the last block that is finished
    sources: Sources | None = None  # X_0 .. X_i, or Xn_0 .. Xn_i
    ways: dict[str, Tensor] = field(default_factory=dict)  # the mixtures of this block
    weights: Gates = field(default_factory=dict)  # what they were made with
    mixed: tuple[Tensor, ...] | None = None  # the mixtures, where a gate needed them before `enter` does


class MultiwayDynamicDense(ResidualSystem):
    in_parallel_blocks = True

    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        super().__init__(cfg, sites)
        assert isinstance(cfg.residual, MUDDFormer)
        self.cfg, d, n = cfg.residual, cfg.d_model, cfg.n_layers
        self.pre = self.cfg.pre_post_norm != "none"
        # the site whose hook points show a block's weights: its attention
        self.reader = {site.layer: site for site in sites if site.kind in ("attn", "out")}
        counts = [(len(self._ways(after)), after + 1) for after in range(1, n + 1)]  # (ways, sources) of module i
        self.static = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in counts)
        if self.cfg.weights == "dynamic":
            hidden = [self.cfg.hidden(c * s, last=i == n - 1) for i, (c, s) in enumerate(counts)]
            self.generator_in = nn.ParameterList(nn.Parameter(torch.zeros(k, d)) for k in hidden)
            self.generator_out = nn.ParameterList(
                nn.Parameter(torch.zeros(c * s, k)) for (c, s), k in zip(counts, hidden, strict=True)
            )
            if self.pre:
                self.generator_norm = nn.Parameter(torch.ones(n, d))
        if self.pre:
            self.source_norm = nn.Parameter(torch.ones(n + 1, d))
            self.post_norm = nn.ParameterList(
                nn.Parameter(torch.full((len(self._post(after)), d), 1e-3)) for after in range(1, n + 1)
            )
        if not self.pre:
            for static in self.static:
                static.data[:, -1] = 1.0
        self._hooks()

    def reset_parameters(self, generator: torch.Generator) -> None:
        """W1 N(0, 1/D), drawn from `generator`; the rest as the module docstring says."""
        if self.cfg.weights == "dynamic":
            for weight in self.generator_in:
                weight.data.normal_(0.0, 1 / math.sqrt(self.model_cfg.d_model), generator=generator)

    # --- which module belongs where: module `after` (1-based) stands after block `after`
    def _after(self, site: Site) -> int:
        return self.model_cfg.n_layers if site.layer is None else site.layer

    def _ways(self, after: int) -> tuple[str, ...]:
        return _WAYS if after < self.model_cfg.n_layers else ("",)

    def _post(self, after: int) -> tuple[str, ...]:
        """The ways whose mixture is normed."""
        return tuple(way for way in self._ways(after) if self.cfg.pre_post_norm == "paper" or way in ("r", ""))

    def ways(self, site: Site) -> tuple[str, ...]:
        return _WAYS if site.kind == "attn" and site.layer else ("",)

    # --- nonlinear
    def read_gates(self, state: _State, site: Site) -> Gates:
        """All mixtures of a block are made as it opens; with ShortSWA in front, attention reads them afterwards."""
        if not site.opens:
            return state.weights if site.kind == "attn" else {}
        after, gates = self._after(site), {}
        if self.pre:
            scale = rms_scale(state.stream, self.model_cfg.norm_eps)
            gates["source_scale"] = self.hook_points[site.hook("source_scale")](scale)
        if not after:
            return gates
        self._store(state, site, gates)
        gates |= self._weights(state, site)
        if self.pre:
            state.mixed = self._mix(state, gates)
            for way, mixture in zip(self._ways(after), state.mixed, strict=True):
                if way in self._post(after):
                    point = self.hook_points[self.reader[site.layer].hook("post_scale", way)]
                    gates[f"post_scale_{way}"] = point(rms_scale(mixture, self.model_cfg.norm_eps))
        state.weights = gates
        return gates

    def _weights(self, state: _State, site: Site) -> Gates:
        """The weights [B, T, S] of every way: static, plus what the generator makes of the newest state."""
        after, reader, x = self._after(site), self.reader[site.layer], state.newest
        static, n_sources = self.static[after - 1], after + 1
        dynamic = None
        if self.cfg.weights == "dynamic":
            seen = (wide(x) / rms_scale(x, self.model_cfg.norm_eps)).to(x.dtype)
            if self.pre:
                seen = seen * self.generator_norm[after - 1]
            hidden = F.gelu(F.linear(seen, self.generator_in[after - 1]), approximate=_ACTS[self.cfg.act])
            dynamic = F.linear(hidden, self.generator_out[after - 1]).unflatten(-1, (-1, n_sources))
        gates = {}
        for c, way in enumerate(self._ways(after)):
            name = reader.hook("depth_attn", way)
            if dynamic is None:
                gates[f"weights_{way}"] = self.spread(name, static[c], x)
            else:
                part = self.hook_points[reader.hook("depth_dynamic", way)](dynamic[..., c, :])
                gates[f"weights_{way}"] = self.hook_points[name](static[c] + part)
        return gates

    def carry(self, state: _State, name: str) -> _State:
        if (point := self.hook_points.get(name)) is not None:
            # a copy where a hook may write into it: the first block carries the embedding itself, which is a source
            state.stream = point(state.stream.clone() if point.may_edit else state.stream)
        return state

    # --- linear
    def begin(self, embed: Tensor, places: Places | None = None) -> _State:
        return _State(stream=embed, newest=embed)

    def _store(self, state: _State, site: Site, gates: Gates) -> None:
        """The stream as a source, once: gates of this read are made of it before `enter` comes to it."""
        after = self._after(site)
        if state.sources is not None and len(state.sources) > after:
            return
        state.newest = x = state.stream
        if self.pre:
            x = (x / gates["source_scale"]).to(x.dtype) * self.source_norm[after]
        if state.sources is None:
            state.sources = Sources(self.model_cfg.n_layers + 1, x)
        else:
            state.sources.append(x)

    def _mix(self, state: _State, gates: Gates) -> tuple[Tensor, ...]:
        assert state.sources is not None
        weights = [w for name, w in gates.items() if name.startswith("weights_")]
        return state.sources.mix_ways(torch.stack(weights, dim=-2))

    def enter(self, state: _State, site: Site, gates: Gates) -> _State:
        if not site.opens:
            return state
        self._store(state, site, gates)
        if after := self._after(site):
            mixed = self._mix(state, gates) if state.mixed is None else state.mixed
            ways = zip(self._ways(after), mixed, strict=True)
            state.ways, state.mixed = {w: self._finish(state, after, w, x, gates) for w, x in ways}, None
            state.stream = state.ways.pop("r" if site.layer else "")
        return state

    def _finish(self, state: _State, after: int, way: str, mixture: Tensor, gates: Gates) -> Tensor:
        if not self.pre:
            return mixture
        if way in self._post(after):
            scale = self.post_norm[after - 1][self._post(after).index(way)]
            mixture = (mixture / gates[f"post_scale_{way}"]).to(mixture.dtype) * scale
        return state.newest + mixture

    def read(self, state: _State, site: Site, gates: Gates) -> Tensor | dict[str, Tensor]:
        return {**state.ways, "r": state.stream} if len(self.ways(site)) > 1 else state.stream

    def write(self, state: _State, site: Site, atom: Tensor, gates: Gates) -> _State:
        state.stream = state.stream + atom
        if site.kind == "local":
            state.ways = {way: x + atom for way, x in state.ways.items()}
        return state

    # --- what the numbers mean
    def coefficients(self) -> Coefficients:
        return "channel" if self.pre else "scalar"

    def sources(self, site: Site) -> tuple[Source, ...]:
        if not self._after(site) or site.kind == "mlp":
            return (Source("stream" if site.seen else "embed", self.atoms[: site.seen + 1]),)
        width = len([s for s in self.sites if s.layer == 0])
        ends = [width * i for i in range(self._after(site) + 1)]
        return tuple(Source(f"block{i}" if i else "embed", self.atoms[: 1 + end]) for i, end in enumerate(ends))

    def depth_weights(self, site: Site, gates: Gates) -> Tensor | dict[str, Tensor] | None:
        if not self._after(site) or site.kind == "mlp":
            return None
        if site.kind == "local":
            return gates["weights_r"]
        weights = {way: gates[f"weights_{way}"] for way in self.ways(site)}
        return weights if len(weights) > 1 else weights[""]

    def weights_from(self, site: Site) -> WeightsFrom:
        mixes = self._after(site) and site.kind != "mlp"
        return "state" if mixes and self.cfg.weights == "dynamic" else "nothing"

    def _hooks(self) -> None:
        self.single_stream_hooks()
        for site in (s for s in self.sites if s.opens):
            after, reader = self._after(site), self.reader[site.layer]
            if self.pre:
                name, meaning = site.hook("source_scale"), "root mean square of the newest state"
                self.hook_point(name, shape="batch pos 1", meaning=meaning, unit="stream")
            for way in self._ways(after) if after else ():
                if self.cfg.weights == "dynamic":
                    name, meaning = reader.hook("depth_dynamic", way), "the part of the depth weights made per token"
                    self.hook_point(name, shape="batch pos source", meaning=meaning, unit="weight")
                self.depth_hooks(reader, after + 1, way, scores=False)
                if self.pre and way in self._post(after):
                    name, meaning = reader.hook("post_scale", way), "root mean square of the mixture"
                    self.hook_point(name, shape="batch pos 1", meaning=meaning, unit="stream")

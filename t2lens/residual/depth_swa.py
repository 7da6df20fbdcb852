"""Depth ShortSWA (arXiv 2603.16039, section 2): a token attends over its own last K states, layer index as time.

    q = h^(l) W_Q ;   k = W W_K ;   z^(l) = softmax(q k^T / sqrt(d_k)) W W_V ,   W = [h^(max(0, l-K+1)), ..., h^(l)]

This is `ordered_attention` with depth as the ordered axis, and the one system here that literally is that operator
(`t2lens.duality` shows it). W_V acts after the mixture, which is the same sum: (p W) W_V = p (W W_V).

"extra": the stream adds as usual; h^(l) are the states at block boundaries; the first sublayer of a block, and the
readout, read h^(l) + z^(l). "replace": there is no sum; h^(j) are the embedding and the raw sublayer outputs, and every
sublayer reads z. The paper leaves the init open. Ours: extra starts with W_V = 0 (equal to the standard residual),
replace with W_Q = 0 and W_V = I (the mean of the window).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from t2lens.config import ModelConfig, ResidualConfig, check_one_of, check_positive
from t2lens.hooks import HookPoint
from t2lens.ordered_attention import ordered_pattern
from t2lens.residual.base import Coefficients, Gates, ResidualSystem, Site, Source, WeightsFrom
from t2lens.residual.sources import Sources
from t2lens.sublayers.positions import Places

__all__ = ["DepthSWA", "DepthShortSWA"]


@dataclass(frozen=True, kw_only=True)
class DepthSWA(ResidualConfig):
    """Depth ShortSWA (arXiv 2603.16039, section 2): QKV attention of a token over its own last `window` states.

    placement "extra": the stream adds as usual and every block (and the readout) reads stream + z, z the attention
    over the states at block boundaries. placement "replace": no sum at all; every sublayer reads z, the attention
    over the embedding and the raw sublayer outputs. window None keeps every state.
    """

    kind: ClassVar[str] = "depth-swa"
    window: int | None = 4
    d_key: int = 16
    placement: Literal["extra", "replace"] = "extra"

    def __post_init__(self) -> None:
        check_positive(self, "d_key")
        if self.window is not None:
            check_positive(self, "window")
        check_one_of(self, "placement", ("extra", "replace"))

    def describe(self) -> str:
        window = "all states" if self.window is None else f"window of {self.window} states"
        return f"depth ShortSWA, {window}, {self.placement}"


@dataclass
class _State:
    states: Sources
    stream: Tensor | None  # None where the sum is replaced


class DepthShortSWA(ResidualSystem):
    weights_sum_to_one = True

    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        super().__init__(cfg, sites)
        assert isinstance(cfg.residual, DepthSWA)
        self.cfg = cfg.residual
        self.extra = self.cfg.placement == "extra"
        self.readers = [site for site in sites if site.opens or not self.extra]
        self.slot = {site: i for i, site in enumerate(self.readers)}
        d, n = cfg.d_model, len(self.readers)
        self.query = nn.Parameter(torch.zeros(n, d, self.cfg.d_key))
        self.key = nn.Parameter(torch.zeros(n, d, self.cfg.d_key))
        self.value = nn.Parameter(torch.zeros(n, d, d) if self.extra else torch.eye(d).repeat(n, 1, 1))
        for site in self.readers:
            self.depth_hooks(site, len(self.sources(site)))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """W_K (and in "extra" W_Q) N(0, 1/sqrt(D)), drawn from `generator`; the rest as the module docstring says."""
        std = 1 / math.sqrt(self.model_cfg.d_model)
        for weight in (self.key, self.query) if self.extra else (self.key,):
            weight.data.normal_(0.0, std, generator=generator)

    def begin(self, embed: Tensor, places: Places | None = None) -> _State:
        capacity = 1 + (self.model_cfg.n_layers if self.extra else len(self.sites) - 1)
        return _State(states=Sources(capacity, embed), stream=embed if self.extra else None)

    def read_gates(self, state: _State, site: Site) -> Gates:
        if site not in self.slot:
            return {}
        i, start = self.slot[site], self._start(len(state.states))
        keys = [state.states[j] @ self.key[i] for j in range(start, len(state.states))]
        q = (state.states[-1] @ self.query[i])[..., None, None, :]  # [B, T, 1 head, 1 query, d_key]
        k = torch.stack(keys, dim=-2).unsqueeze(-3)  # [B, T, 1 head, S, d_key]
        pattern = ordered_pattern(q, k, observer=_DepthObserver(self, site))
        return {"weights": pattern[..., 0, 0, :]}

    def read(self, state: _State, site: Site, gates: Gates) -> Tensor:
        if site not in self.slot:
            assert state.stream is not None
            return state.stream
        mixture = state.states.mix(gates["weights"], start=self._start(len(state.states)))
        z = mixture @ self.value[self.slot[site]]
        return z if state.stream is None else state.stream + z

    def write(self, state: _State, site: Site, atom: Tensor, gates: Gates) -> _State:
        if state.stream is None:
            state.states.append(atom)
            return state
        state.stream = state.stream + atom
        if site.closes:
            state.states.append(state.stream)
        return state

    def _start(self, n_states: int) -> int:
        return 0 if self.cfg.window is None else max(0, n_states - self.cfg.window)

    def coefficients(self) -> Coefficients:
        return "operator"

    def sources(self, site: Site) -> tuple[Source, ...]:
        if not self.extra:
            every = [Source(a, (a,)) for a in self.atoms[: site.index + 1]]
        elif site not in self.slot:
            return (Source("stream", self.atoms[: site.index + 1]),)
        else:
            ends = [0, *(s.index + 1 for s in self.sites[: site.index] if s.closes)]
            every = [Source("embed" if end == 0 else f"state{n}", self.atoms[: 1 + end]) for n, end in enumerate(ends)]
        return tuple(every[self._start(len(every)) :])

    def depth_weights(self, site: Site, gates: Gates) -> Tensor | None:
        return gates.get("weights")

    def weights_from(self, site: Site) -> WeightsFrom:
        return "state" if site in self.slot and len(self.sources(site)) > 1 else "nothing"


class _DepthObserver:
    """Lets the hook points of a depth read see [batch, pos, source] where the operator has head and query axes too."""

    def __init__(self, system: DepthShortSWA, site: Site) -> None:
        self._points = system.hook_points
        self._site = site

    def scores(self, x: Tensor) -> Tensor:
        name = self._site.hook("depth_scores")
        return self._through(self._points[name], x) if name in self._points else x

    def pattern(self, x: Tensor) -> Tensor:
        return self._through(self._points[self._site.hook("depth_attn")], x)

    @staticmethod
    def _through(point: HookPoint, x: Tensor) -> Tensor:
        return point(x[..., 0, 0, :])[..., None, None, :]

"""Attention Residuals (Kimi Team, arXiv 2603.15031): every sublayer attends over what was written before it.

    s_{l,j} = w_l . RMSNorm(v_j; g_l)        alpha_l = softmax_j(s_{l,.})        h_l = sum_j alpha_{l,j} v_j

per token, over depth. w_l is a learned vector of the reader (no input dependence, no 1/sqrt(d)); the values v_j are the
raw sources, not normalised; nothing is added to h_l afterwards: there is no running stream. The readout is one more
such read. Full (section 3): v_0 = embed, v_{j+1} = raw output of sublayer j. Block (section 4): sublayer outputs are
summed within a block; a reader sees embed, the sums of the completed blocks and, inside a block, the partial sum.
Init: w = 0 (weights exactly 1/S), g = 1.

Paper and code: the paper's "layer" is a sublayer, and its block_size counts sublayers. `sources="streams"` and
`recency_bias` describe the published open-attention-residuals checkpoints instead (cumulative streams as sources, a
learned scalar on the newest one). `normaliser="sparsemax"` (Martins & Astudillo 2016) gives exact zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from t2lens.config import ModelConfig, ResidualConfig, check_one_of, check_positive
from t2lens.residual.base import Gates, ResidualSystem, Site, Source
from t2lens.residual.sources import Sources
from t2lens.sublayers.norms import rms_scale, wide
from t2lens.sublayers.positions import Places

__all__ = ["AttentionResiduals", "AttnRes", "sparsemax"]


@dataclass(frozen=True, kw_only=True)
class AttnRes(ResidualConfig):
    """Attention Residuals (arXiv 2603.15031): softmax over earlier writes, one learned query per read.

    block_size counts sublayers, as the paper's pseudocode does; None is the full form (every write is a source).
    sources: "outputs" (the paper: raw sublayer outputs, summed per block) or "streams" (cumulative sums, as in the
    published open-attention-residuals checkpoints). recency_bias: initial value of a learned scalar added to the score
    of the newest source, or None for no such parameter (the paper).
    """

    kind: ClassVar[str] = "attnres"
    block_size: int | None = None
    sources: Literal["outputs", "streams"] = "outputs"
    normaliser: Literal["softmax", "sparsemax"] = "softmax"
    recency_bias: float | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None:
            check_positive(self, "block_size")
        check_one_of(self, "sources", ("outputs", "streams"))
        check_one_of(self, "normaliser", ("softmax", "sparsemax"))

    def describe(self) -> str:
        blocks = "full" if self.block_size is None else f"blocks of {self.block_size} sublayers"
        return f"Attention Residuals, {blocks}"


@dataclass
class _State:
    done: Sources  # completed sources
    partial: Tensor | None = None  # the block being summed (outputs), or the running stream (streams)
    scales: list[Tensor] = field(default_factory=list)  # root mean square of each completed source, computed once


class AttentionResiduals(ResidualSystem):
    weights_sum_to_one = True

    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        super().__init__(cfg, sites)
        assert isinstance(cfg.residual, AttnRes)
        self.cfg = cfg.residual
        self.size = self.cfg.block_size or 1  # sublayers per source
        self.query = nn.Parameter(torch.zeros(len(sites), cfg.d_model))
        self.key_norm = nn.Parameter(torch.ones(len(sites), cfg.d_model))
        if self.cfg.recency_bias is not None:
            self.recency_bias = nn.Parameter(torch.full((len(sites),), float(self.cfg.recency_bias)))
        for site in sites:
            self.depth_hooks(site, len(self.sources(site)))

    def begin(self, embed: Tensor, places: Places | None = None) -> _State:
        capacity = 2 + (len(self.sites) - 1) // self.size
        return _State(done=Sources(capacity, embed), partial=embed if self.cfg.sources == "streams" else None)

    def read_gates(self, state: _State, site: Site) -> Gates:
        for j in range(len(state.scales), len(state.done)):
            state.scales.append(rms_scale(state.done[j], self.model_cfg.norm_eps))
        direction = self.query[site.index] * self.key_norm[site.index]
        scores = wide(state.done.dot(direction)) / torch.cat(state.scales, dim=-1)
        if self._reads_partial(site):
            assert state.partial is not None
            newest = wide(state.partial @ direction).unsqueeze(-1) / rms_scale(state.partial, self.model_cfg.norm_eps)
            scores = torch.cat([scores, newest], dim=-1)
        if self.cfg.recency_bias is not None:
            scores = torch.cat([scores[..., :-1], scores[..., -1:] + self.recency_bias[site.index]], dim=-1)
        if scores.shape[-1] > 1:
            scores = self.hook_points[site.hook("depth_scores")](scores)
        weights = scores.softmax(dim=-1) if self.cfg.normaliser == "softmax" else sparsemax(scores)
        return {"weights": self.hook_points[site.hook("depth_attn")](weights.to(state.done[0].dtype))}

    def read(self, state: _State, site: Site, gates: Gates) -> Tensor:
        weights, n = gates["weights"], len(state.done)
        mixture = state.done.mix(weights[..., :n])
        if self._reads_partial(site):
            assert state.partial is not None
            mixture = torch.addcmul(mixture, state.partial, weights[..., n:])
        return mixture

    def write(self, state: _State, site: Site, atom: Tensor, gates: Gates) -> _State:
        state.partial = atom if state.partial is None else state.partial + atom
        if self._completes(site):
            state.done.append(state.partial)
            if self.cfg.sources == "outputs":
                state.partial = None
        return state

    def _completes(self, site: Site) -> bool:
        """Whether the write of `site` completes a source."""
        return (site.index + 1) % self.size == 0 or site.index + 1 == len(self.sites) - 1

    def _reads_partial(self, site: Site) -> bool:
        return site.index % self.size != 0 and site.kind != "out"

    def sources(self, site: Site) -> tuple[Source, ...]:
        out = [Source("embed", ("embed",))]
        ends = [i + 1 for i in range(site.index) if self._completes(self.sites[i])]
        start = 0
        for n, end in enumerate([*ends, site.index] if self._reads_partial(site) else ends, start=1):
            held = self.atoms[1 + start : 1 + end] if self.cfg.sources == "outputs" else self.atoms[: 1 + end]
            partial = end == site.index and self._reads_partial(site)
            if self.cfg.sources == "streams":
                name = f"state@{self.atoms[end]}"
            elif self.cfg.block_size is None:
                name = held[0]
            else:
                name = "partial" if partial else f"block{n}"
            out.append(Source(name, held))
            start = end
        return tuple(out)

    def depth_weights(self, site: Site, gates: Gates) -> Tensor:
        return gates["weights"]


def sparsemax(scores: Tensor) -> Tensor:
    """Euclidean projection of `scores` [..., S] onto the simplex (arXiv 1602.02068): sums to 1, with exact zeros."""
    ordered = scores.sort(dim=-1, descending=True).values
    k = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    excess = ordered.cumsum(dim=-1) - 1
    support = (k * ordered > excess).sum(dim=-1, keepdim=True)
    threshold = excess.gather(-1, support - 1) / support
    return (scores - threshold).clamp(min=0)

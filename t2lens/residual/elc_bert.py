"""ELC-BERT, "Every Layer Counts" (arXiv 2311.02265, section 3): a block reads a learned average of all earlier blocks.

    h_i = sum_{j < i} softmax(p_i)_j H_j        H_0 = embed
    A_i = Att(h_i)        H_i = A_i + F(h_i + A_i)

p_i is a static vector of i scalars: the same weights for every token and channel. Nothing of h_i is added to H_i (h_i
stays the sum inside the block alone), so H_i is what block i wrote and the average is the only way past it. The readout
reads H_L. Variants: "base" has F(A_i), its MLP never sees h_i, and p_i starts with 1 on the newest source; the others
start at p = 0, plain means. "zero" is the equation above; "normalized" has H_i = N(A_i + F(h_i + A_i)), N without
affine; "weighted_output" reads out one more average, over H_0 .. H_L.

Paper and code: the paper scales outputs to unit vectors, the code uses a LayerNorm without affine, which also removes
the mean (output_norm "layer"); "rms" is the paper's, times sqrt(d). The paper keeps h_i in the MLP, "base" does not.
With ShortSWA in the block, attention is its second mixer and reads h_i plus what ShortSWA wrote, in "base" too.
A block with one source has nothing to choose: its weight is exactly 1 and its entry of p gets no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from t2lens.config import ModelConfig, ResidualConfig, check_one_of
from t2lens.residual.base import Coefficients, Gates, ResidualSystem, Site, Source
from t2lens.residual.sources import Sources
from t2lens.sublayers.norms import centred, rms_scale, wide
from t2lens.sublayers.positions import Places

__all__ = ["ELCBert", "EveryLayerCounts", "StaticSoftmaxReads"]


@dataclass(frozen=True, kw_only=True)
class ELCBert(ResidualConfig):
    """ELC-BERT (arXiv 2311.02265): every block reads a static softmax average of the outputs of all blocks before it.

    variant: which of the four published bodies (see the module's docstring). output_norm: what "normalized" does to a
    block's output, LayerNorm without affine as the code or division by the root mean square; the others ignore it.
    """

    kind: ClassVar[str] = "elc-bert"
    variant: Literal["base", "zero", "normalized", "weighted_output"] = "base"
    output_norm: Literal["layer", "rms"] = "layer"

    def __post_init__(self) -> None:
        check_one_of(self, "variant", ("base", "zero", "normalized", "weighted_output"))
        check_one_of(self, "output_norm", ("layer", "rms"))

    def describe(self) -> str:
        return f"ELC-BERT, {self.variant.replace('_', ' ')}"


@dataclass
class _State:
    sources: Sources  # the embedding and the output of every block that is over
    stream: Tensor  # what the block read, plus what it wrote so far
    written: Tensor | None = None  # what the block wrote so far
    output: Tensor | None = None  # of the block that has just ended (centred for a LayerNorm); a source from then on
    scales: Tensor | None = None  # [B, T, S] of the sources, where they are normed


class StaticSoftmaxReads(ResidualSystem):
    """Blocks that read softmax(p_i) over earlier blocks' outputs: what ELC-BERT and relatives of it have in common.

    newest: start of the raw weight of the newest source (the others start at 0).
    norm: what a source is put through as it is read, none or one of `_SCALES`. norms_embed: the embedding too.
    mixes_output: whether the readout averages too; if not it reads the last output, normed where norms_readout.
    keeps_residual: whether a block's output contains what the block read.
    mlp_sees_read: whether the MLP reads what the block read, besides what the block wrote.
    """

    weights_sum_to_one = True

    def __init__(
        self,
        cfg: ModelConfig,
        sites: tuple[Site, ...],
        *,
        newest: float = 0.0,
        norm: Literal["none", "layer", "rms", "l2"] = "none",
        norms_embed: bool = False,
        norms_readout: bool = True,
        mixes_output: bool = False,
        keeps_residual: bool = False,
        mlp_sees_read: bool = True,
    ) -> None:
        super().__init__(cfg, sites)
        self.norm, self.norms_embed, self.norms_readout = norm, norms_embed, norms_readout
        self.mixes_output, self.keeps_residual, self.mlp_sees_read = mixes_output, keeps_residual, mlp_sees_read
        self.readers = [s for s in sites if s.opens and (s.kind != "out" or mixes_output)]
        # the rows p_i end to end, which have 1, 2, ... entries
        rows = [torch.zeros(len(self.sources(site))) for site in self.readers]
        for row in rows:
            row[-1] = newest
        self.weights = nn.Parameter(torch.cat(rows))
        for site in sites:
            if not site.opens:
                continue
            n = self._n_sources(site)
            if site in self.readers:
                self.depth_hooks(site, n)
            if self._scales_newest(site):
                self.hook_point(
                    site.hook("source_scale"),
                    shape="batch pos 1",
                    meaning=f"what {self._names()[n - 1]} is divided by as a source, from {site.name} on",
                    unit="stream",
                )
        if keeps_residual:
            self.single_stream_hooks()

    def row(self, site: Site) -> Tensor:
        """[S]: the raw weights p of the read at `site`."""
        n = self._n_sources(site)
        return self.weights[n * (n - 1) // 2 : n * (n + 1) // 2]

    # --- gates
    def read_gates(self, state: _State, site: Site) -> Gates:
        if not site.opens:
            return {}
        gates: Gates = {}
        newest = state.sources[0] if state.output is None else state.output
        if self.norm != "none":
            if self._scales_newest(site):
                scale = _SCALES[self.norm](newest, self.model_cfg.norm_eps)
                scale = self.hook_points[site.hook("source_scale")](scale)
            else:
                scale = wide(newest).new_ones(*newest.shape[:-1], 1)
            gates["scales"] = scale if state.scales is None else torch.cat([state.scales, scale], dim=-1)
        if site in self.readers:
            row = wide(self.row(site))
            scores = (
                self.spread(site.hook("depth_scores"), row, newest)
                if len(row) > 1
                else row.expand(*newest.shape[:-1], 1)
            )
            weights = scores.softmax(dim=-1).to(newest.dtype)
            gates["weights"] = self.hook_points[site.hook("depth_attn")](weights)
        return gates

    # --- linear
    def begin(self, embed: Tensor, places: Places | None = None) -> _State:
        return _State(sources=Sources(1 + self.model_cfg.n_layers, embed), stream=embed)

    def enter(self, state: _State, site: Site, gates: Gates) -> _State:
        if not site.opens:
            return state
        if state.output is not None:
            state.sources.append(state.output)
        state.scales = gates.get("scales")
        if site in self.readers:
            weights = gates["weights"]
            if "scales" in gates:
                weights = (weights / gates["scales"]).to(weights.dtype)
            state.stream = state.sources.mix(weights)
        else:
            newest = state.sources[-1]
            state.stream = (newest / gates["scales"][..., -1:]).to(newest.dtype) if "scales" in gates else newest
        state.written = state.output = None
        return state

    def read(self, state: _State, site: Site, gates: Gates) -> Tensor:
        if site.kind == "mlp" and not self.mlp_sees_read:
            assert state.written is not None
            return state.written
        return state.stream

    def write(self, state: _State, site: Site, atom: Tensor, gates: Gates) -> _State:
        if self.keeps_residual or not site.closes:
            state.stream = state.stream + atom
        if not self.keeps_residual:
            state.written = atom if state.written is None else state.written + atom
        if site.closes:
            output = state.stream if self.keeps_residual else state.written
            assert output is not None
            state.output = centred(output).to(output.dtype) if self.norm == "layer" else output
        return state

    def carry(self, state: _State, name: str) -> _State:
        if name not in self.hook_points:
            return state
        if name.endswith("resid_post"):
            assert state.output is not None
            state.output = self.hook_points[name](state.output)
        else:
            state.stream = self.hook_points[name](state.stream)
        return state

    def _scales_newest(self, site: Site) -> bool:
        """Whether the newest source at `site` is divided by a scale."""
        if self.norm == "none" or (site.index == 0 and not self.norms_embed):
            return False
        return site in self.readers or self.norms_readout

    # --- what the numbers mean
    def coefficients(self) -> Coefficients:
        return "operator" if self.norm == "layer" else "scalar"

    def depth_weights(self, site: Site, gates: Gates) -> Tensor | None:
        return gates.get("weights")

    def _n_sources(self, site: Site) -> int:
        """Blocks that are over at `site`, and the embedding."""
        return 1 + (self.model_cfg.n_layers if site.layer is None else site.layer)

    def _names(self) -> list[str]:
        return ["embed", *(f"block{n + 1}" for n in range(self.model_cfg.n_layers))]

    def sources(self, site: Site) -> tuple[Source, ...]:
        ends = [0, *(s.index + 1 for s in self.sites if s.closes)]
        if not site.opens:
            start = ends[self._n_sources(site) - 1]
            if site.kind == "mlp" and not self.mlp_sees_read:
                return (Source("partial", self.atoms[1 + start : 1 + site.index]),)
            return (Source("stream", self.atoms[: 1 + site.index]),)
        every = [Source("embed", ("embed",))]
        for name, start, end in zip(self._names()[1:], ends, ends[1:], strict=False):
            every.append(Source(name, self.atoms[0 if self.keeps_residual else 1 + start : 1 + end]))
        n = self._n_sources(site)
        return tuple(every[:n] if site.kind != "out" or self.mixes_output else every[n - 1 : n])


_SCALES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "layer": rms_scale,  # of a source that is centred already
    "rms": rms_scale,
    # |x| / sqrt(d), bounded before the root, which has no derivative at the zeros of padding
    "l2": lambda x, eps: wide(x).square().mean(dim=-1, keepdim=True).clamp(min=eps).sqrt(),
}


class EveryLayerCounts(StaticSoftmaxReads):
    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        assert isinstance(cfg.residual, ELCBert)
        variant = cfg.residual.variant
        super().__init__(
            cfg,
            sites,
            newest=1.0 if variant == "base" else 0.0,
            norm=cfg.residual.output_norm if variant == "normalized" else "none",
            mixes_output=variant == "weighted_output",
            mlp_sees_read=variant != "base",
        )

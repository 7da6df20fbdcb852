"""Vertical Attention (OpenReview A6uabXKiXc, submitted to ICLR 2026): a RECONSTRUCTION, from its abstract and reviews.

    h_l = sum_{j < l} softmax(p_l)_j N(H_j)        H_0 = embed        H_l = h_l + (what block l writes)

The text of the paper was not readable, and there is no code and no checkpoint. Known from the reviews: the weights are
static learned scalars under a softmax over the layers before, at the start of each layer (the same rule as ELC-BERT's
equation 6, whose code runs here), and hidden vectors are normalised by the norm of the layer's activations. Not known,
so values here: what N is (ours: division by the root mean square, "rms"; "l2" is x sqrt(d) / |x|, or "none"), whether
the ordinary residual inside a block stays (ours: yes), how p starts (ours: zeros), whether the readout averages too
(ours: no, it reads H_L as it is).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from t2lens.config import ModelConfig, ResidualConfig, check_one_of, check_plain
from t2lens.residual.base import Site
from t2lens.residual.elc_bert import StaticSoftmaxReads

__all__ = ["VerticalAttention", "VerticalAttentionReconstruction"]


@dataclass(frozen=True, kw_only=True)
class VerticalAttention(ResidualConfig):
    """Vertical Attention, a reconstruction (the public text does not give its equations; see the module's docstring).

    source_norm: what a source is put through as it is read. keep_internal_residual: whether a block's output contains
    what it read. init: raw weights at zero (plain means), or 1 on the newest source. output_aggregation: whether the
    readout averages over the embedding and all blocks as well.
    """

    kind: ClassVar[str] = "vertical-attention-reconstructed"
    source_norm: Literal["rms", "l2", "none"] = "rms"
    keep_internal_residual: bool = True
    init: Literal["zeros", "last_biased"] = "zeros"
    output_aggregation: bool = False

    def __post_init__(self) -> None:
        check_plain(self)
        check_one_of(self, "source_norm", ("rms", "l2", "none"))
        check_one_of(self, "init", ("zeros", "last_biased"))

    def describe(self) -> str:
        return "Vertical Attention (reconstruction)"


class VerticalAttentionReconstruction(StaticSoftmaxReads):
    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        assert isinstance(cfg.residual, VerticalAttention)
        ours = cfg.residual
        super().__init__(
            cfg,
            sites,
            newest=1.0 if ours.init == "last_biased" else 0.0,
            norm=ours.source_norm,
            norms_embed=True,
            norms_readout=False,
            mixes_output=ours.output_aggregation,
            keeps_residual=ours.keep_internal_residual,
        )

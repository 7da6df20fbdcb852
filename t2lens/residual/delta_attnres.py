"""Delta Attention Residuals (arXiv 2605.18855): a residual stream, and on top of it a softmax over what was written.

    x_{l+1} = x_l + f_l        h_l = x_l + sum_j alpha_{l,j} v_j        alpha_l = softmax_j(w_l . RMSNorm(v_j; g_l))

per token, over depth. Delta: v = embed, f_0, ..., f_{l-1}. Delta Block: v = embed and what the stream gained in each
completed block. The first read has no source and takes x as it is; the readout is x itself, so the coefficient of an
atom is 1 + alpha inside and 1 at the end. Sources that are single writes differ from each other more than cumulative
sums do (mean cosine below 0.3 against 0.95 in the paper), which leaves the softmax something to choose.

Paper and code: `block_size` counts sublayers. The published code's delta_block appends x - (last source) instead of the
gain of a block, and starts its queries at N(0, 0.02), as we do; both, and its gates, are in open_attnres.py, whose
equation this is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from t2lens.config import ResidualConfig, check_positive
from t2lens.residual.base import Site
from t2lens.residual.open_attnres import OpenAttentionResiduals, Scheme

__all__ = ["DeltaAttentionResiduals", "DeltaAttnRes"]


@dataclass(frozen=True, kw_only=True)
class DeltaAttnRes(ResidualConfig):
    """Delta Attention Residuals (arXiv 2605.18855): the stream plus a softmax mixture of earlier writes.

    block_size: sublayers whose gain is one source (Delta Block); None: every write is a source (Delta).
    """

    kind: ClassVar[str] = "delta-attnres"
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None:
            check_positive(self, "block_size")

    def describe(self) -> str:
        blocks = "" if self.block_size is None else f", blocks of {self.block_size} sublayers"
        return f"Delta Attention Residuals{blocks}"


class DeltaAttentionResiduals(OpenAttentionResiduals):
    def _configured(self, residual: ResidualConfig) -> tuple[Scheme, str, float]:
        assert isinstance(residual, DeltaAttnRes)
        self.size = residual.block_size or 1
        return Scheme(pushes="gains" if self.size > 1 else "writes", embed="second", adds=True), "bias", 0.0

    def _ends_block(self, site: Site) -> bool:
        return (site.index + 1) % self.size == 0

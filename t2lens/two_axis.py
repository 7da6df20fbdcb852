"""The duality, shown: a depth read is short sliding-window attention on the transposed state stack (arXiv 2603.16039).

`H[l, t]` is the state of token t after l blocks. Fix t and let depth be the ordered axis: the depth read of `DepthSWA`
is then the very ShortSWA that a sequence axis would carry, with the same window. `duality` checks it on a real model:
the states of a forward pass are stacked, depth becomes the sequence, `ordered_attention` runs over it once per reader
as paper section 2 writes it, and the result is compared with what the model itself read.

Covered exactly: `DepthSWA`, in both placements, because its read has explicit queries, keys and values. Not covered,
though in the same design space: Attention Residuals (the query is a constant of the reader, values are raw, no
1/sqrt(d)), static weightings such as ELC-BERT and DenseFormer (no query at all), the standard residual (weights 1) and
Deep Delta Learning (no read over a stack of states; it edits one state). For those `duality` raises and says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.mixing import ForwardRecord
from t2lens.ordered_attention import ordered_attention
from t2lens.residual.depth_swa import DepthShortSWA

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["Duality", "duality"]

_RAW = "its query is a constant of the reader, its values are raw and its scores are not divided by sqrt(d)"
_STATIC = "its depth weights are learned numbers that no query and no key go into"
_WHY_NOT = {
    "standard": "its reads are plain sums with weight 1; there is no attention along depth",
    "scaled": "its reads are one carried stream; there is no attention along depth",
    "attnres": _RAW,
    "delta-attnres": _RAW,
    "open-attnres": _RAW,
    "elc-bert": _STATIC,
    "vertical-attention-reconstructed": _STATIC,
    "denseformer": _STATIC,
    "muddformer": "its depth weights are a small network of the newest state alone, not queries against keys",
    "dca": "its depth weights are learned numbers plus a gate of each source alone, not queries against keys",
    "hyper-connections": "it reads no stack of states; it mixes a few carried streams",
    "ddl": "it reads no stack of states; it edits one carried state",
}


@dataclass(frozen=True)
class Duality:
    """Largest absolute difference between the model's depth reads and ShortSWA on the transposed stack, per read."""

    difference: dict[str, float]
    window: int | None
    dtype: str

    @property
    def largest(self) -> float:
        return max(self.difference.values())

    def __str__(self) -> str:
        window = "the whole past" if self.window is None else f"a window of {self.window}"
        return (
            f"depth reads against ShortSWA on the transposed state stack, {window}, {self.dtype}: "
            f"largest difference {self.largest:.1e} over {len(self.difference)} reads"
        )


@torch.no_grad()
def duality(model: Transformer, tokens: Any, attention_mask: Tensor | None = None) -> Duality:
    """Compare every depth read of a `DepthSWA` model with `ordered_attention` along the transposed state stack.

    Runs in the dtype of the model; use `model.double()` to see differences below 1e-12.

    Raises:
        ValueError: the residual system is not literally this operator (the message says in what it differs).

    Example:
        >>> import t2lens
        >>> from t2lens.residual import DepthSWA
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=4, residual=DepthSWA(window=3))
        >>> result = t2lens.duality(t2lens.build(cfg, seed=0).double(), [[0, 7, 3, 7, 9]])
        >>> result.largest < 1e-12
        True
    """
    residual = model.residual
    if not isinstance(residual, DepthShortSWA):
        kind = model.cfg.residual.kind
        why = _WHY_NOT.get(kind, "it has no query-key-value read over a stack of states")
        raise ValueError(f"The duality covers depth ShortSWA only. {kind} is not that operator: {why}.")
    record = model.record(tokens, attention_mask)
    states = _states(residual, record)
    difference = {}
    for step in record.steps:
        if step.site not in residual.slot:
            continue
        i = residual.slot[step.site]
        n = states_before(residual, step.site.index)
        over_depth = states[:n].movedim(0, 2)  # [B, T, L, D]: depth is the sequence now
        q, k, v = (over_depth @ w[i] for w in (residual.query, residual.key, residual.value))
        z = ordered_attention(q[:, :, None], k[:, :, None], v[:, :, None], window=residual.cfg.window)
        ours = z[:, :, 0, -1] + (states[n - 1] if residual.extra else 0)
        difference[step.site.name] = float((ours - record.reads[step.site.name]).abs().max())
    return Duality(difference, residual.cfg.window, str(states.dtype).removeprefix("torch."))


def states_before(residual: DepthShortSWA, index: int) -> int:
    """How many states exist at the read with `index` atoms behind it."""
    if not residual.extra:
        return index + 1
    return 1 + sum(site.closes for site in residual.sites[:index])


def _states(residual: DepthShortSWA, record: ForwardRecord) -> Tensor:
    """[L, B, T, D] in depth order, from the atoms: block-boundary sums, or the atoms where the sum is replaced."""
    assert record.embed is not None
    states = [record.embed]
    stream = record.embed
    for step in record.steps:
        if step.out is not None:
            stream = stream + step.out
            if not residual.extra:
                states.append(step.out)
            elif step.site.closes:
                states.append(stream)
    return torch.stack(states)

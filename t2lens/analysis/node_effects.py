"""One node of both axes: what every route into it does to the prediction at its position.

A node is a read at one position. Each route into it (a source of its depth weights, or an atom's contribution) is taken
out there, at this position alone, everything after it runs anew, and the predictions at the same position are compared:

    effect = KL(plain || without) in nats, at out

All routes are rows of one pass that is taken up at the block of the read, so that a node costs little more than half a
pass per route. `measure_effects` does the same at all positions at once, and averages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.analysis.effects_report import LEAST
from t2lens.analysis.flow import start_of
from t2lens.analysis.inputs import Batch, read_batch
from t2lens.analysis.sweep import Cut, Over, changes_of, point_of, routes_of
from t2lens.analysis.variants import Plain, Variant, recorded, run_variants
from t2lens.mixing import ForwardRecord

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["NodeEffects", "Recorded", "node_effects"]


@dataclass(frozen=True)
class Recorded:
    """A recorded pass over one sequence, from which nodes are measured. Made and used inside the same edits."""

    batch: Batch
    record: ForwardRecord
    logits: Tensor

    @classmethod
    def of(cls, model: Transformer, input: Any) -> Recorded:
        """The pass over a text or token ids [pos] or [1, pos]. ValueError: several sequences."""
        batch = read_batch(model, input)
        if len(batch.tokens) != 1:
            raise ValueError(f"A node is of one sequence; {len(batch.tokens)} were given.")
        record, logits = recorded(model, batch)
        return cls(batch, record, logits)


@dataclass(frozen=True, kw_only=True)
class NodeEffects:
    """over: of what the routes are ("source", "atom"). values: route -> KL in nats, None where it is NaN or infinite.
    floor: below it an effect is rounding."""

    over: Over
    values: dict[str, float | None]
    floor: float


@torch.no_grad()
def node_effects(
    model: Transformer,
    input: Any,
    *,
    pos: int,
    site: str,
    way: str | None = None,
    over: Over | None = None,
) -> NodeEffects:
    """What taking each route out of the read of `site` at `pos` does to the prediction there (see the module).

    Args:
        input: a text, token ids, or a `Recorded` pass of this model, made under the edits that are in force now.
        way: which read of the site, where it has several; by default the one of its values.
        over: as in `measure_effects`.

    Raises:
        ValueError: no such site, way or position; over="source" where the read has no depth weights; a read that
            nothing can be taken out of.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis.node_effects import node_effects
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.AttnRes())
        >>> found = node_effects(t2lens.build(cfg, seed=0), [0, 7, 3], pos=2, site="1.attn")
        >>> found.over, list(found.values)
        ('source', ['embed', '0.attn', '0.mlp'])
    """
    read = start_of(model, site, way)
    there: dict[Over, bool] = {each: read in routes_of(model, each) for each in ("source", "atom")}
    over = over or ("source" if there["source"] else "atom")
    if over not in there:
        raise ValueError(f'over must be "source" or "atom", not {over!r}.')
    if not there[over]:
        what = "has no depth weights of its own" if over == "source" and there["atom"] else "is used by no sublayer"
        raise ValueError(f"The read {read.name} {what}, so that no route can be taken out of it.")
    run = input if isinstance(input, Recorded) else Recorded.of(model, input)
    n_pos = run.batch.tokens.shape[1]
    if not -n_pos <= pos < n_pos:
        raise ValueError(f"The sequence has the positions 0..{n_pos - 1}, not {pos}.")
    names, at = routes_of(model, over)[read], pos % n_pos
    layer = model.cfg.n_layers if read.site.layer is None else read.site.layer
    cuts = [Cut(read, ()), *(Cut(read, (i,)) for i in range(len(names)))]  # the first takes out nothing
    variants = [
        Variant(layer=layer, edits={point_of(read, over): _at(change, at)})
        for change in changes_of(model, run.record, cuts, over)
    ]
    where = torch.arange(n_pos, device=run.logits.device) == at
    plain = Plain(run.batch, run.logits, where, None)
    kl = torch.full((len(cuts),), torch.nan, dtype=torch.float64, device=run.logits.device)
    for which, logits in run_variants(model, run.record, variants):
        kl[which] = plain.shifts(logits)[0]
    idle, *effects = kl.tolist()
    values = [each if abs(each) < float("inf") else None for each in effects]  # NaN too
    floor = max(LEAST, 2 * idle) if idle == idle else LEAST
    return NodeEffects(over=over, values=dict(zip(names, values, strict=True)), floor=floor)


def _at(change: Any, at: int) -> Any:
    """A change of a whole row [1, T, ...] made at one position of it."""

    def here(x: Tensor) -> Tensor:
        out = x.clone()
        out[:, at] = change(x)[:, at]
        return out

    return here

"""Effect next to mass: what each route carries, and what becomes of the predictions without it.

    mass        mean over positions of |w|, w the depth weight of a source in a read (of an atom: its coefficient)
    share       mean of |w v| / sum over routes of |w v|, w v the vector that the route adds to the read
    gradient    - sum over positions of w dL/dw (of an atom with contribution c: - c . dL/dread), L the mean loss
    loss        loss without the route less the plain loss; kl, logit: KL(plain || without) and the target's logit
    rescue      (L_none - L_only) / (L_none - L_plain): all routes of the read are taken out, one is put back

The gradient is the first-order estimate of the ablation (Molchanov et al., arXiv 1611.06440; attribution patching): one
backward pass for all routes. Where a read is nothing but its mixture and a norm takes its scale out, the estimates of a
read's routes sum to zero (to the norm's eps): turning the read is seen, losing most of it is not, which is why the
measured correlation stands beside them. Ablations leave everything before the read as it is and run all after it anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from t2lens.analysis.effects_report import DAMAGE, LEAST, MEASURES, Values, finding_of
from t2lens.analysis.finding import Finding
from t2lens.analysis.inputs import Batch, check_finite, gradients, read_batch, token_id
from t2lens.analysis.sweep import Cut, Over, point_of, routes_of, source_parts, sweep
from t2lens.analysis.variants import recorded, sequences
from t2lens.mixing import ForwardRecord, account_by_read
from t2lens.residual import Read
from t2lens.sublayers.norms import wide
from t2lens.tracing import depth_weights

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["measure_effects"]


@torch.inference_mode(False)  # gradients are wanted wherever this is called from
def measure_effects(
    model: Transformer,
    input: Any,
    *,
    over: Over | None = None,
    reads: str | Sequence[str] | None = None,
    token: str | int | None = None,
    renormalise: bool | None = None,
    fast: bool = False,
    attention_mask: Any = None,
) -> Finding:
    """Mass of every route into every read, and what happens to the predictions without it.

    Args:
        input: text, texts or token ids [pos] or [batch, pos]; a causal model, and at least two tokens.
        over: routes of "source" (the system's depth weights, way by way) or of "atom" (every system: the contribution
            of an atom is subtracted from the read, and what the block carries on stays). None: source where there are
            depth weights.
        reads: names of the reads, None: all.
        token: whose logit `logit` follows, a text or an id; None: the true next token's.
        renormalise: whether each route is also taken out with the other weights scaled to fill its place. None: where
            no weight is negative.
        fast: masses and the gradient's estimate only: one backward pass per sequence.

    Returns:
        Dataset over (read, source) or (read, atom), NaN where there is no such route; see the module for the equations.
        weight, mass, norm_mass, share, gradient; and without `fast` loss, kl, logit, each also `_renormalised`, rescue,
        rescue_kl, disagreement, and per read damage and damage_kl (all its routes out). spearman(predictor, measure)
        and pearson of the gradient with the loss: over the routes of reads that have more than one. The table begins
        with the routes in which mass and effect (KL) disagree most; effects below the floor of rounding, which the
        notes state, are ties.

    Raises:
        ValueError: over="source" on a system without depth weights; reads that are not there; renormalise=True where
            weights have signs or over="atom"; a bidirectional model; fewer than two tokens.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import measure_effects
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.AttnRes())
        >>> found = measure_effects(t2lens.build(cfg, seed=0), [[0, 7, 3, 7, 9]])
        >>> found["mass"].sel(read="1.attn").dropna("source").values.round(3).tolist()
        [0.333, 0.333, 0.333]
        >>> bool((found["kl"].fillna(0) >= 0).all())
        True
    """
    over = _over(model, over)
    routes = _chosen(routes_of(model, over), reads)
    batch = read_batch(model, input, attention_mask, losses=True)
    target = None if token is None else token_id(model, token)
    values, signed = _masses(model, batch, routes, over)
    again, why = _renormalises(renormalise, over, signed)
    floors: dict[str, float] = dict.fromkeys(MEASURES, LEAST)
    if not fast:
        found, floors = _ablations(model, batch, routes, over, target, again)
        values |= found
    return finding_of(model, batch, routes, over, values, floors, token, why)


def _over(model: Transformer, over: Over | None) -> Over:
    own = bool(routes_of(model, "source"))
    if over is None:
        return "source" if own else "atom"
    if over not in ("source", "atom"):
        raise ValueError(f'over must be "source" or "atom", not {over!r}.')
    if over == "source" and not own:
        what = model.cfg.residual.describe()
        raise ValueError(f'{what[:1].upper()}{what[1:]} has no depth weights of its own; use over="atom".')
    return over


def _chosen(routes: dict[Read, tuple[str, ...]], reads: str | Sequence[str] | None) -> dict[Read, tuple[str, ...]]:
    if reads is None:
        return routes
    by_name = {read.name: read for read in routes}
    wanted = [reads] if isinstance(reads, str) else list(reads)
    for name in wanted:
        if name not in by_name:
            near = get_close_matches(str(name), by_name, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(by_name)}."
            raise ValueError(f"There is no read {name!r} whose routes can be taken out; {hint}")
    return {by_name[name]: routes[by_name[name]] for name in by_name if name in wanted}


def _renormalises(renormalise: bool | None, over: Over, signed: bool) -> tuple[bool, str]:
    """Whether weights are scaled to fill a gap, and why not."""
    why = ""
    if over == "atom":
        why = "Contributions of atoms have no total to renormalise to; those columns are empty."
    elif signed:
        why = "Depth weights have signs here, so there is no total to renormalise to; those columns are empty."
    if renormalise and why:
        raise ValueError(f"{why.split(';')[0]}; leave renormalise out.")
    if renormalise is False:
        why = "Renormalised ablations were not asked for; those columns are empty."
    return not why, why


# --- mass and gradient: one plain pass and one backward pass ---------------------------------------------------------


@torch.no_grad()
def _masses(model: Transformer, batch: Batch, routes: dict[Read, tuple[str, ...]], over: Over) -> tuple[Values, bool]:
    """weight, mass, norm_mass, share and gradient of every route, and whether some weight is negative."""
    names = ("weight", "mass", "norm_mass", "share", "gradient")
    values: Values = {name: {read: np.zeros(len(routes[read])) for read in routes} for name in names}
    n_valid, n_next, signed = int(batch.valid.sum()), int(batch.predicts.sum()), False
    for one in sequences(batch):
        record, logits = recorded(model, one)
        check_finite(logits, one, "The logits")
        slopes = _slopes(model, one, [point_of(read, over) for read in routes])
        where = one.valid[0]
        for read, weight, lengths, product in _of_reads(model, record, routes, over, slopes):
            weight, lengths = weight[:, where].double(), lengths[:, where].double()
            signed = signed or bool((weight < 0).any())
            share = lengths / lengths.sum(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
            for name, x in (("weight", weight), ("mass", weight.abs()), ("norm_mass", lengths), ("share", share)):
                values[name][read] += x.sum(dim=-1).cpu().numpy() / n_valid
            values["gradient"][read] -= product.double().cpu().numpy() / n_next
    return values, signed


def _of_reads(
    model: Transformer,
    record: ForwardRecord,
    routes: dict[Read, tuple[str, ...]],
    over: Over,
    slopes: dict[str, Tensor],
) -> Any:
    """For every read: (read, weights [S, T], lengths of what each route adds [S, T], sum of w dL/dw [S])."""
    if over == "source":
        own = depth_weights(model, record)
        for read in routes:
            weight = own[read.name][0].T
            product = (weight.double() * slopes[point_of(read, over)][0].T.double()).sum(dim=-1)
            yield read, weight, source_parts(model, record, read).double().norm(dim=-1), product
        return
    for account in account_by_read(model.residual, record):
        if (read := account.read) in routes:
            n = len(routes[read])
            part = account.contributions()[:n, 0].double()
            product = torch.einsum("atd,td->a", part, slopes[point_of(read, over)][0].double())
            yield read, account.mixing()[:n, 0], part.norm(dim=-1), product


def _slopes(model: Transformer, one: Batch, points: Sequence[str]) -> dict[str, Tensor]:
    """The gradient of the summed loss of one sequence at hook points, as if something were added there."""
    added: dict[str, Tensor] = {}

    def lift(x: Tensor, *, hook: Any) -> Tensor:
        added[hook.name] = zero = torch.zeros_like(x, requires_grad=True)
        return x + zero

    names = list(dict.fromkeys(points))
    where = one.predicts
    with gradients(model), model.hooks([(name, lift) for name in names]):
        logits = model.forward(one.tokens.clone(), None if one.mask is None else one.mask.clone())
        loss = F.cross_entropy(wide(logits[where]), one.next_tokens[where], reduction="sum")
        found = torch.autograd.grad(loss, [added[name] for name in names], allow_unused=True)
    return {
        name: torch.zeros_like(added[name]) if slope is None else slope
        for name, slope in zip(names, found, strict=True)
    }


# --- ablations -------------------------------------------------------------------------------------------------------


def _ablations(
    model: Transformer,
    batch: Batch,
    routes: dict[Read, tuple[str, ...]],
    over: Over,
    target: int | None,
    renormalise: bool,
) -> tuple[Values, dict[str, float]]:
    """What the cuts do, and for each measure the floor below which an effect is rounding: twice what a pass that is
    taken up again and cuts nothing differs from the plain one by, LEAST at least."""
    cuts: dict[Cut, int] = {}  # each once: with two routes, one alone is the other taken out

    def place(read: Read, removed: Sequence[int], again: bool = False) -> int:
        return cuts.setdefault(Cut(read, tuple(removed), again), len(cuts))

    where: dict[Read, tuple[list[int], list[int], list[int], int]] = {}
    for read, names in routes.items():
        every = range(len(names))
        out = [place(read, [i]) for i in every]
        filled = [place(read, [i], True) for i in every] if renormalise and len(names) > 1 else []
        alone = [place(read, [j for j in every if j != i]) for i in every]
        where[read] = out, filled, alone, place(read, every)
    idle = [place(read, ()) for read in {read.site.layer: read for read in routes}.values()]
    found = sweep(model, batch, list(cuts), over, target)
    arrays = {name: found.mean(getattr(found, name)).cpu().numpy() for name in MEASURES}
    floors = {name: max(LEAST, 2 * float(np.abs(array[idle]).max())) for name, array in arrays.items()}
    values: Values = {name: {} for name in (*MEASURES, *(f"{m}_renormalised" for m in MEASURES))}
    values |= {"rescue": {}, "rescue_kl": {}, "damage": {}, "damage_kl": {}}
    for read, (out, filled, alone, none) in where.items():
        for name, array in arrays.items():
            values[name][read] = array[out]
            values[f"{name}_renormalised"][read] = array[filled] if filled else np.full(len(out), np.nan)
        for name, measure in (("rescue", "loss"), ("rescue_kl", "kl")):
            damage = arrays[measure][none]
            left = arrays[measure][alone]
            tells = abs(damage) > max(DAMAGE, floors[measure])
            values[name][read] = (damage - left) / damage if tells else np.full(len(out), np.nan)
            values["damage" if measure == "loss" else "damage_kl"][read] = np.array(damage)
    return values, floors

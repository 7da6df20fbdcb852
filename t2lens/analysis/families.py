"""Source-family routing ablation: do reads use the sources that their depth weights point at?

A protocol for Block Attention Residuals (arXiv 2606.13168): the sources of every read are sorted into families, the
weights of one family are masked in all reads of one kind in one part of the depth, the rest is renormalised, and what
the prediction loses is put next to the weight that the family had. The published finding is that the two come apart:
the family with most mass is not the one with most effect, and one has mass without effect.

Of the paper its abstract was at hand. How families are told (by what a source holds and when it was written, so that
the protocol runs on every system with depth weights) and where thirds of the depth begin are definitions of t2lens;
they may differ from the paper's, and numbers of the two are no replication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.inputs import read_batch
from t2lens.analysis.statistics import interval_of_mean, spearman
from t2lens.analysis.sweep import caveats
from t2lens.analysis.variants import Change, Variant, effects_of, layer_of
from t2lens.edits import without
from t2lens.residual import Read, Source
from t2lens.residual.hyper_connections import HyperConnected
from t2lens.tracing import depth_weights

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["FAMILIES", "ablate_families", "family_of"]

FAMILIES = ("embedding", "current", "previous", "older")
_THIRDS = ("early", "middle", "late")
_MASS = 0.1  # share of a read from which on a family without effect is worth a sentence
_NAMED = 5  # of those


def family_of(sources: tuple[Source, ...]) -> tuple[str, ...]:
    """The family of each source of a read: "embedding" where it holds the embedding alone; of the others, which stand
    in the order of writing, "current" is the last, "previous" the one before, "older" all before that.

    Example:
        >>> from t2lens.residual import Source
        >>> blocks = [Source(f"block{i}", (f"{i}.attn", f"{i}.mlp")) for i in range(3)]
        >>> family_of((Source("embed", ("embed",)), *blocks))
        ('embedding', 'older', 'previous', 'current')
    """
    written = [i for i, source in enumerate(sources) if source.atoms != ("embed",)]
    names = dict.fromkeys(written, "older")
    names |= dict(zip(written[::-1], ("current", "previous"), strict=False))
    return tuple(names.get(i, "embedding") for i in range(len(sources)))


@dataclass(frozen=True)
class _Reading:
    """One row of depth weights that can be ablated: who reads by it, how deep, and what each source is."""

    read: Read
    hook: str
    cell: str
    families: tuple[str, ...]

    def mask(self, family: str) -> Tensor:
        """[S] bool"""
        return torch.tensor([name == family for name in self.families])


@torch.no_grad()
def ablate_families(
    model: Transformer,
    input: Any,
    *,
    renormalise: bool | None = None,
    attention_mask: Any = None,
    seed: int = 0,
    level: float = 0.95,
) -> Finding:
    """Mask one family of sources in all reads of one kind and depth, and see what the prediction loses.

    For every cell (kind of reader, third of the depth) and family, one pass in which every read of that cell has

        alpha'_j = 0 for j in the family,   alpha_j * (sum_i alpha_i) / (sum of the rest)   otherwise

    and all else runs on from there. Families exclude each other and cover every source of a read:

        embedding   the source that holds the embedding alone
        current     the newest of the others: the partial sum inside a block, else what was written last
        previous    the one before it
        older       all before that

    Readers: attn (its queries, keys and values together), mlp, readout, and carried (the mixture that the block carries
    on, where a system mixes that too). Thirds: early, middle, late, of the blocks; the readout has none.

    Args:
        input: text, texts or token ids [pos] or [batch, pos]; effects are on the next token, intervals over sequences.
        renormalise: None: where the depth weights of the system sum to 1; elsewhere (signed weights have no total to
            keep) the family's weights are set to zero and the others stay.
        seed, level: of the bootstrap over sequences.

    Returns:
        Dataset over (cell, family): mass (mean share of |weight|; the families of a cell sum to 1), loss_change (nats
        per token; low and high its paired interval), kl (nats), probability_change and accuracy_change (of the true
        next token), pairs (read, position) that were edited, and pairs left as they are, because nothing else is there
        to read. NaN where a family is not among the sources. rank_correlation: Spearman's, of mass and loss_change over
        all entries.

    Source: arXiv 2606.13168 (its abstract) for the protocol; the definition of families by source identity is ours.

    Raises:
        ValueError: a system without depth weights, or whose sources are streams (`ablate_streams` is for those);
            renormalise=True where weights have signs; a bidirectional model.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import ablate_families
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=3, residual=t2lens.residual.AttnRes())
        >>> found = ablate_families(t2lens.build(cfg, seed=0), [[0, 7, 3, 7], [1, 2, 3, 4]])
        >>> float(found["mass"].sel(cell="late mlp").sum().round(6))
        1.0
    """
    readings = _readings(model)
    batch = read_batch(model, input, attention_mask, losses=True)
    renormalise = model.residual.weights_sum_to_one if renormalise is None else renormalise
    record = model.record(batch.tokens, batch.mask)
    weights = depth_weights(model, record)
    cells = list(dict.fromkeys(reading.cell for reading in readings))
    places = [(cell, family) for cell in cells for family in FAMILIES]
    variants: dict[tuple[str, str], Variant] = {}
    mass, pairs, left = (np.full((len(cells), len(FAMILIES)), np.nan) for _ in range(3))
    for cell, family in places:
        mine = [reading for reading in readings if reading.cell == cell]
        if not any(family in reading.families for reading in mine):
            continue
        at = cells.index(cell), FAMILIES.index(family)
        shares = torch.stack([_share(weights[r.read.name], r.mask(family))[batch.valid] for r in mine])
        mass[at] = float(shares.nanmean())  # a gated row may be all zero
        there = [reading for reading in mine if family in reading.families]
        touched = [_editable(weights[r.read.name], r.mask(family), renormalise) & batch.valid for r in there]
        pairs[at] = sum(int(each.sum()) for each in touched)
        left[at] = len(there) * int(batch.valid.sum()) - pairs[at]
        edits = {r.hook: _ablation(r.mask(family), renormalise) for r in there if not all(r.mask(family))}
        if edits:
            variants[cell, family] = Variant(layer=min(layer_of(model, hook) for hook in edits), edits=edits)
    if renormalise:  # says at once why it cannot be, on the plain weights
        for reading in readings:
            without(weights[reading.read.name], torch.tensor(False), renormalise=True)
    effects = effects_of(model, batch, list(variants.values()), what="Ablating families")
    values = _filled(effects, list(variants), cells, seed, level)
    return _finding(model, batch, cells, {"mass": mass, "pairs": pairs, "left": left, **values}, renormalise, level)


def _readings(model: Transformer) -> list[_Reading]:
    """The rows of depth weights with a hook point of their own; ValueError where the system has none, or streams."""
    what = model.cfg.residual.describe()
    if isinstance(model.residual, HyperConnected):
        raise ValueError(
            f"The sources of {what} are parallel streams, which are no families of earlier writes; "
            "use ablate_streams (t2lens analyze streams)."
        )
    found = []
    for read in model.reads:
        hook = read.site.hook("depth_attn", read.way)
        if hook in model.hook_dict:
            sources = model.residual.sources(read.site)
            found.append(_Reading(read, hook, _cell(model, read), family_of(sources)))
    if not found:
        raise ValueError(
            f"{what[:1].upper()}{what[1:]} has no depth weights, so there is no routing to ablate by family; "
            'patch_activations(..., what="atom") tells what each write does there.'
        )
    return found


def _cell(model: Transformer, read: Read) -> str:
    if read.site.layer is None:
        return "readout"
    third = _THIRDS[3 * read.site.layer // model.cfg.n_layers]
    return f"{third} {'carried' if read.way == 'r' else read.site.kind}"


def _share(weights: Tensor, mask: Tensor) -> Tensor:
    """[B, T] float64: share of the absolute weights [B, T, S] that lies where `mask` [S] is True; NaN of nothing."""
    size = weights.double().abs()
    return (size * mask.to(size.device)).sum(dim=-1) / size.sum(dim=-1)


def _editable(weights: Tensor, mask: Tensor, renormalise: bool) -> Tensor:
    """[B, T] bool: where something else is left to read."""
    rest = weights.masked_fill(mask.to(weights.device), 0.0)
    some = (rest > 0).any(dim=-1) if renormalise else torch.ones_like(rest[..., 0], dtype=torch.bool)
    return some & (not bool(mask.all()))


def _ablation(mask: Tensor, renormalise: bool) -> Change:
    def change(weights: Tensor) -> Tensor:
        there = mask.to(weights.device)
        left = without(weights, there.expand_as(weights), renormalise=renormalise)
        return torch.where(_editable(weights, mask, renormalise).unsqueeze(-1), left, weights)

    return change


def _filled(
    effects: Any, places: list[tuple[str, str]], cells: list[str], seed: int, level: float
) -> dict[str, np.ndarray]:
    """The effects as arrays [cell, family]."""
    low, high = interval_of_mean(effects.loss.cpu(), effects.counts.cpu(), seed=seed, level=level)
    columns = {
        "loss_change": effects.mean(effects.loss).cpu().numpy(),
        "low": low,
        "high": high,
        "kl": effects.mean(effects.kl).cpu().numpy(),
        "probability_change": effects.mean(effects.probability).cpu().numpy(),
        "accuracy_change": effects.mean(effects.hits).cpu().numpy(),
    }
    out = {name: np.full((len(cells), len(FAMILIES)), np.nan) for name in columns}
    for i, (cell, family) in enumerate(places):
        for name, values in columns.items():
            out[name][cells.index(cell), FAMILIES.index(family)] = values[i]
    return out


_MEANING = {
    "mass": ("mean share of the family in the (absolute) depth weights of the cell's reads", "share"),
    "loss_change": ("what the mean next-token loss gains when the family is ablated", "nats"),
    "low": ("lower end of the bootstrap interval of loss_change", "nats"),
    "high": ("upper end of the bootstrap interval of loss_change", "nats"),
    "kl": ("mean KL divergence of the plain prediction from the ablated one", "nats"),
    "probability_change": ("mean change of the probability of the true next token", "probability"),
    "accuracy_change": ("change of the share of positions where the true next token is the likeliest", "share"),
    "pairs": ("(read, position) pairs that were edited", "count"),
    "left": ("(read, position) pairs of the family left as they are: nothing else is there to read", "count"),
}


def _finding(
    model: Transformer, batch: Any, cells: list[str], values: dict[str, np.ndarray], renormalise: bool, level: float
) -> Finding:
    effect, mass = values["loss_change"], values["mass"]
    variables: dict[str, Any] = {
        name: (("cell", "family"), values[name], {"meaning": meaning, "unit": unit})
        for name, (meaning, unit) in _MEANING.items()
    }
    rank = spearman(mass, effect)
    variables["rank_correlation"] = ((), rank, {"meaning": "Spearman's, of mass and loss_change over all entries"})
    coords = {
        "cell": np.array(cells, dtype=object),
        "family": np.array(FAMILIES, dtype=object),
        "reader": ("cell", np.array([cell.split()[-1] for cell in cells], dtype=object)),
        "third": ("cell", np.array([cell.split()[0] if " " in cell else "" for cell in cells], dtype=object)),
    }
    shown = ["mass", "loss_change", "low", "high", "kl", "accuracy_change"]
    shown = [n for n in shown if n not in ("low", "high") or np.isfinite(values[n]).any()]
    places = [at for at in np.ndindex(effect.shape) if np.isfinite(effect[at])]
    places.sort(key=lambda at: -effect[at])
    rows = tuple(
        (cells[c], FAMILIES[f], *(float(values[name][c, f]) for name in shown), int(values["pairs"][c, f]))
        for c, f in places
    )
    name = getattr(model, "name", None) or model.cfg.residual.describe()
    return Finding(
        title=f"Source families of {name}: mass and effect",
        dataset=xr.Dataset(variables, coords=coords),
        columns=("cell", "family", *(n.replace("_", " ").replace("kl", "KL") for n in shown), "pairs"),
        rows=rows,
        notes=(*_verdict(cells, values, rank), *_notes(model, batch, renormalise, level), *batch.notices),
        charts=(
            Chart(
                kind="heat",
                variable="loss_change",
                x="family",
                y="cell",
                signed=True,
                title="How the loss changes without each family of sources",
                label="change of the loss (nats)",
            ),
            Chart(
                kind="heat",
                variable="mass",
                x="family",
                y="cell",
                title="How much weight each family of sources has in the reads",
                label="mass (weight)",
            ),
            Chart(
                kind="scatter",
                variable="loss_change",
                x="mass",
                by="family",
                title="Change of the loss without a family of sources, against its weight",
                label="change of the loss (nats)",
                xlabel="mass (weight)",
            ),
        ),
    )


def _verdict(cells: list[str], values: dict[str, np.ndarray], rank: float) -> list[str]:
    """Does mass predict effect here? In words."""
    effect, mass = values["loss_change"], values["mass"]
    several = [c for c in range(len(cells)) if np.isfinite(effect[c]).sum() > 1]
    most = np.where(np.isfinite(effect), mass, np.nan)
    agree = [c for c in several if np.nanargmax(most[c]) == np.nanargmax(effect[c])]
    out = []
    if several:
        words = f"In {len(agree)} of {len(several)} cells the family with most mass is the one with most effect"
        out.append(f"{words}; Spearman's rank correlation of mass and effect over all entries is {rank:.2f}.")
    idle = [
        (c, f)
        for c, f in np.ndindex(mass.shape)
        if mass[c, f] >= _MASS and values["low"][c, f] <= 0 <= values["high"][c, f]
    ]
    if idle:
        idle.sort(key=lambda at: -mass[at])
        named = ", ".join(f"{FAMILIES[f]} in {cells[c]} (mass {mass[c, f]:.2f})" for c, f in idle[:_NAMED])
        more = f" and {len(idle) - _NAMED} more" if len(idle) > _NAMED else ""
        out.append(f"Mass of {_MASS} and more without an effect that the interval tells from zero: {named}{more}.")
    return out


def _notes(model: Transformer, batch: Any, renormalise: bool, level: float) -> list[str]:
    n, tokens = len(batch.tokens), int(batch.predicts.sum())
    notes = [
        f"Effects are means over {tokens} positions with a next token, of {n} sequence(s); mass over "
        f"{int(batch.valid.sum())} positions; padding is excluded."
    ]
    notes.append(
        "Mass is a share of the (absolute) weights; loss change and KL are in nats per token; largest loss first."
    )
    if n > 1:
        notes.append(f"Intervals (low, high): {level:.0%}, paired bootstrap over sequences.")
    else:
        notes.append("One sequence gives no interval; give several.")
    if renormalise:
        notes.append("What a mask leaves is scaled to the sum that the row had.")
    else:
        notes.append("These depth weights have no total to keep: the family is set to zero, the others stay.")
    notes.append(
        "A read that has nothing but the family to read is left as it is (`left`, as counted in the plain pass)."
    )
    notes += caveats(model)
    notes.append(
        "Protocol: after arXiv 2606.13168. That families are told by what a source holds and when it was written is "
        "t2lens's definition, not the paper's."
    )
    return notes

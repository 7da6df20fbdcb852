"""Stream ablate-and-rescue: which of the parallel streams of Hyper-Connections are used, and which can stand in.

After "Ablate and Rescue" (arXiv 2603.14833), which takes streams away at inference, one and two at a time, gives them
back or lets another stand in, and finds that streams which look alike are not used alike: representational similarity
tells neither redundancy nor asymmetry. The similarities stand beside the causal numbers here, with their correlation.
Of the paper its abstract was at hand: the formulas of rescue, restoration and interaction are t2lens's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.inputs import read_batch
from t2lens.analysis.statistics import interval_of_mean, spearman
from t2lens.analysis.variants import Change, Variant, effects_of, layer_of
from t2lens.residual.hyper_connections import HyperConnected

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["ablate_streams", "stream_boundaries"]

_LEAST = 0.01  # nats: the recovery of a smaller effect says nothing
Replacement = Literal["zero", "mean"]


def stream_boundaries(model: Transformer) -> dict[str, str]:
    """Boundary -> the hook point where all carried streams [batch, pos, stream, d_model] pass: before every block, and
    before the readout. ValueError where the model carries no streams."""
    if not isinstance(model.residual, HyperConnected):
        what = model.cfg.residual.describe()
        raise ValueError(
            f"{what[:1].upper()}{what[1:]} carries no parallel streams to ablate; Hyper-Connections (mHC, mHC-lite, "
            "DeepSeek-V4) do, and ablate_families is for systems whose reads weigh earlier writes."
        )
    n = model.cfg.n_layers
    names = {f"block {layer}": f"blocks.{layer}.hook_streams_pre" for layer in range(n)}
    return names | {"readout": f"blocks.{n - 1}.hook_streams_post"}


@torch.no_grad()
def ablate_streams(
    model: Transformer,
    input: Any,
    *,
    by: Replacement = "zero",
    attention_mask: Any = None,
    seed: int = 0,
    level: float = 0.95,
) -> Finding:
    """Take the carried streams away at every block boundary, one and two at a time, and let others stand in.

    With L(.) the mean next-token loss when, at one boundary and at all positions, X_i is replaced as said:

        ablated[i]       L(X_i := 0) - L                             low and high: its paired interval
        both[i, j]       L(X_i := 0, X_j := 0) - L
        substituted[i, j]  L(X_i := X_j) - L                         j stands in for i
        rescue[i, j]     1 - substituted[i, j] / ablated[i]          1: j does all that i did, 0: no better than nothing
        restored[i, j]   1 - ablated[j] / both[i, j]                 share of the joint damage undone by giving back i
        interaction[i, j]  both[i, j] - ablated[i] - ablated[j]      above 0: each covers for the other (redundant)
        cosine[i, j], norm[i]                                        of the streams there, means over positions

    rescue and restored are NaN where what they divide by is under 0.01 nats. At block 0 the streams are copies of the
    embedding, so that rescue is 1 there by construction; correlations leave that boundary out.

    Args:
        input: text, texts or token ids [pos] or [batch, pos]; effects are on the next token, intervals over sequences.
        by: "zero", or "mean": an ablated stream becomes its mean over all positions of all sequences.
        seed, level: of the bootstrap over sequences.

    Returns:
        Dataset over (boundary, stream, other), and the rank correlations (Spearman) of similarity with the causal
        numbers: cosine_rescue, cosine_interaction, cosine_asymmetry (|rescue[i, j] - rescue[j, i]|), norm_effect.

    Source: arXiv 2603.14833 (its abstract) for the protocol; the formulas are ours.

    Raises:
        ValueError: a model without streams (`ablate_families` is for the others); a bidirectional model.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import ablate_streams
        >>> hc = t2lens.residual.HyperConnections(n_streams=2)
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=hc)
        >>> found = ablate_streams(t2lens.build(cfg, seed=0), [[0, 7, 3, 7], [1, 2, 3, 4]])
        >>> found["cosine"].sel(boundary="block 0").values.round(6).tolist()  # copies of the embedding
        [[1.0, 1.0], [1.0, 1.0]]
    """
    boundaries = stream_boundaries(model)
    if by not in ("zero", "mean"):
        raise ValueError(f'ablate_streams replaces a stream by "zero" or by its "mean", not by {by!r}.')
    batch = read_batch(model, input, attention_mask, losses=True)
    carried: dict[str, Tensor] = {}

    def keep(x: Tensor, *, hook: Any) -> None:
        carried[hook.name] = x

    with model.hooks(fwd_hooks=[(name, keep) for name in boundaries.values()]):
        model(batch.tokens, batch.mask)
    n = next(iter(carried.values())).shape[-2]
    shape = (len(boundaries), n, n)
    similar = np.zeros(shape)
    norm = np.zeros(shape[:2])
    plans, variants = [], []
    for b, (_, name) in enumerate(boundaries.items()):
        here = carried.pop(name)[batch.valid].double()  # [tokens, stream, D]
        unit = here / here.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        similar[b] = (unit @ unit.transpose(-1, -2)).mean(dim=0).cpu().numpy()
        norm[b] = here.norm(dim=-1).mean(dim=0).cpu().numpy()
        fill = torch.zeros_like(here[0]) if by == "zero" else here.mean(dim=0)
        for plan, edit in _edits(n, fill):
            plans.append((b, *plan))
            variants.append(Variant(layer=layer_of(model, name), edits={name: edit}))
    effects = effects_of(model, batch, variants, what="Ablating streams")
    change = effects.mean(effects.loss).cpu().numpy()
    low, high = interval_of_mean(effects.loss.cpu(), effects.counts.cpu(), seed=seed, level=level)
    values: dict[str, np.ndarray] = {
        "ablated": np.zeros(shape[:2]),
        "low": np.zeros(shape[:2]),
        "high": np.zeros(shape[:2]),
        "kl": np.zeros(shape[:2]),
        "both": np.zeros(shape),
        "substituted": np.zeros(shape),
    }
    kl = effects.mean(effects.kl).cpu().numpy()
    for at, (b, kind, i, j) in enumerate(plans):
        if kind == "ablated":
            for name, numbers in (("ablated", change), ("low", low), ("high", high), ("kl", kl)):
                values[name][b, i] = numbers[at]
        elif kind == "both":
            values["both"][b, i, j] = values["both"][b, j, i] = change[at]
        else:
            values["substituted"][b, i, j] = change[at]
    return _finding(model, batch, tuple(boundaries), values | {"cosine": similar, "norm": norm}, by, level)


def _edits(n: int, fill: Tensor) -> Iterator[tuple[tuple[str, int, int], Change]]:
    """((what, i, j), edit of the streams [R, pos, stream, D]) of everything that is done at one boundary."""

    def put(targets: tuple[int, ...], source: int | None) -> Change:
        def change(x: Tensor) -> Tensor:
            x = x.clone()
            for i in targets:
                x[:, :, i] = fill[i].to(x.dtype) if source is None else x[:, :, source]
            return x

        return change

    for i in range(n):
        yield ("ablated", i, i), put((i,), None)
        for j in range(n):
            if j > i:
                yield ("both", i, j), put((i, j), None)
            if j != i:
                yield ("substituted", i, j), put((i,), j)


_MEANING = {
    "ablated": ("what the mean next-token loss gains when the stream is ablated at this boundary", "nats"),
    "low": ("lower end of the bootstrap interval of `ablated`", "nats"),
    "high": ("upper end of the bootstrap interval of `ablated`", "nats"),
    "kl": ("mean KL divergence of the plain prediction from the one without the stream", "nats"),
    "both": ("what the loss gains when stream and other are ablated", "nats"),
    "substituted": ("what the loss gains when other stands in the place of stream", "nats"),
    "rescue": ("1 - substituted / ablated: how much of the effect other makes good", "share"),
    "restored": ("1 - ablated[other] / both: share of the joint effect that giving back stream undoes", "share"),
    "interaction": ("both - ablated[stream] - ablated[other]: above 0 each covers for the other", "nats"),
    "cosine": ("mean cosine between stream and other", ""),
    "norm": ("mean length of the stream", "stream"),
}
_PAIRED = {
    "cosine_rescue": "Spearman's correlation of cosine and rescue over ordered pairs of streams and boundaries",
    "cosine_interaction": "Spearman's correlation of cosine and interaction over pairs of streams and boundaries",
    "cosine_asymmetry": "Spearman's correlation of cosine and |rescue[i, j] - rescue[j, i]| over pairs",
    "norm_effect": "Spearman's correlation of norm and ablated over streams and boundaries",
}


def _ratios(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What follows from the measured effects; NaN on the diagonal."""
    ablated, both, n = values["ablated"], values["both"], values["ablated"].shape[1]
    own = np.eye(n, dtype=bool)
    first, second = ablated[:, :, None], ablated[:, None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        rescue = np.where(first < _LEAST, np.nan, 1 - values["substituted"] / first)
        restored = np.where(both < _LEAST, np.nan, 1 - second / both)
    found = {"rescue": rescue, "restored": restored, "interaction": both - first - second}
    found |= {"both": both, "substituted": values["substituted"]}
    return {name: np.where(own, np.nan, array) for name, array in found.items()}


def _correlations(values: dict[str, np.ndarray]) -> dict[str, float]:
    """Similarity against causal numbers, without the first boundary, where streams are copies."""
    later = {name: array[1:] for name, array in values.items()}
    n = later["ablated"].shape[1]
    pair = np.triu(np.ones((n, n), bool), 1)
    apart = np.abs(later["rescue"] - later["rescue"].transpose(0, 2, 1))
    return {
        "cosine_rescue": spearman(later["cosine"], later["rescue"]),
        "cosine_interaction": spearman(later["cosine"][:, pair], later["interaction"][:, pair]),
        "cosine_asymmetry": spearman(later["cosine"][:, pair], apart[:, pair]),
        "norm_effect": spearman(later["norm"], later["ablated"]),
    }


def _finding(
    model: Transformer, batch: Any, boundaries: tuple[str, ...], values: dict[str, np.ndarray], by: str, level: float
) -> Finding:
    values = values | _ratios(values)
    found = _correlations(values)
    axes = ("boundary", "stream", "other")
    variables: dict[str, Any] = {
        name: (axes[: values[name].ndim], values[name], {"meaning": meaning, "unit": unit})
        for name, (meaning, unit) in _MEANING.items()
    }
    variables |= {name: ((), found[name], {"meaning": meaning}) for name, meaning in _PAIRED.items()}
    n = values["ablated"].shape[1]
    streams = np.array([f"stream{i}" for i in range(n)], dtype=object)
    coords = {"boundary": np.array(boundaries, dtype=object), "stream": streams, "other": streams}
    rows = []
    for b, i in np.ndindex(values["ablated"].shape):
        rescue = values["rescue"][b, i]
        best = int(np.nanargmax(rescue)) if np.isfinite(rescue).any() else None
        rows.append(
            (
                boundaries[b],
                f"stream{i}",
                *(float(values[name][b, i]) for name in ("ablated", "low", "high", "norm")),
                None if best is None else f"stream{best}",
                None if best is None else float(rescue[best]),
                None if best is None else float(values["cosine"][b, i, best]),
            )
        )
    rows.sort(key=lambda row: -row[2])
    columns = ("boundary", "stream", "ablated", "low", "high", "norm", "best stand-in", "rescue", "cosine")
    if not np.isfinite(values["low"]).any():  # one sequence has no interval
        columns, rows = (*columns[:3], *columns[5:]), [(*row[:3], *row[5:]) for row in rows]
    name = getattr(model, "name", None) or model.cfg.residual.describe()
    return Finding(
        title=f"Streams of {name}: ablate and rescue",
        dataset=xr.Dataset(variables, coords=coords),
        columns=columns,
        rows=tuple(rows),
        notes=(*_verdict(values, found), *_notes(batch, by, level), *batch.notices),
        charts=(
            Chart(
                kind="heat",
                variable="ablated",
                x="stream",
                y="boundary",
                signed=True,
                title="How the loss changes when one stream is taken away at a boundary of blocks",
                label="change of the loss (nats)",
            ),
            Chart(
                kind="scatter",
                variable="rescue",
                x="cosine",
                by="boundary",
                title="How far one stream stands in for another, against how alike the two are",
                label="part of the effect made good (share)",
                xlabel="cosine of the two streams",
            ),
            Chart(
                kind="heat",
                variable="rescue",
                x="other",
                y="stream",
                signed=True,
                title="How far each stream stands in for each other one",
                label="part of the effect made good (share)",
            ),
            Chart(
                kind="scatter",
                variable="ablated",
                x="norm",
                by="boundary",
                title="Change of the loss without a stream, against its length",
                label="change of the loss (nats)",
                xlabel="mean length of the stream",
            ),
        ),
    )


def _verdict(values: dict[str, np.ndarray], found: dict[str, float]) -> list[str]:
    """Does similarity predict what streams do for each other? In words."""
    rho = "Spearman's rank correlation after block 0"
    out = [
        f"{rho}: cosine and rescue {found['cosine_rescue']:.2f}, cosine and interaction "
        f"{found['cosine_interaction']:.2f}, cosine and asymmetry of rescue {found['cosine_asymmetry']:.2f}, "
        f"length and effect {found['norm_effect']:.2f} (1 or -1: similarity tells all; 0: it tells nothing)."
    ]
    rescue = values["rescue"][1:]
    if np.isfinite(rescue).any():
        out.append(
            f"After block 0, a stand-in makes good between {np.nanmin(rescue):.2f} and {np.nanmax(rescue):.2f} of an "
            f"effect (median {np.nanmedian(rescue):.2f}; below 0: worse than nothing in its place)."
        )
    return out


def _notes(batch: Any, by: str, level: float) -> list[str]:
    n, tokens = len(batch.tokens), int(batch.predicts.sum())
    gone = "zero" if by == "zero" else "its mean over all positions of all sequences"
    interval = f"intervals: {level:.0%}, paired bootstrap over sequences" if n > 1 else "one sequence gives no interval"
    return [
        f"Effects are means over {tokens} positions with a next token, of {n} sequence(s); {interval}.",
        f"An ablated stream becomes {gone}, at one boundary and all positions; what follows runs on from there.",
        f"rescue and restored are left out where the effect they divide by is under {_LEAST} nats.",
        "ablated is the gain of the loss in nats per token, norm the mean length of the stream; largest gain first. "
        "best stand-in: the stream of largest rescue = 1 - substituted / ablated (1: does all that this one did).",
        "Protocol: after arXiv 2603.14833; the formulas are t2lens's, and may differ from the paper's.",
    ]

"""Activation patching between two prompts, and its estimate from one gradient (attribution patching).

The clean prompt shows a behaviour, the corrupted one does not. An activation of the clean run, put into the corrupted
run at one place and position, brings back some of the behaviour: how much says what that place carries (Zhang and
Nanda, arXiv 2309.16042). The places here are those of the depth axis: atoms, reads, depth weights, streams, and heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.inputs import Batch, check_finite, gradients, read_batch, token_id
from t2lens.analysis.places import Alignment, Grid, Place, align, grid_of
from t2lens.analysis.progress import progress
from t2lens.analysis.statistics import pearson, spearman
from t2lens.analysis.variants import Change, Variant, layer_of, run_variants

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["METRICS", "attribution_patching", "patch_activations"]

What = Literal["atom", "read", "depth_weight", "head", "stream"]
Metric = Literal["logit_diff", "loss", "probability", "kl"]
METRICS: tuple[str, ...] = get_args(Metric)
_UNITS = {"logit_diff": "logit", "loss": "nats", "probability": "probability", "kl": "nats"}
_FAR = 3.0  # times the distance of the two runs; beyond it a share of that distance is a quotient by little
_SHOWN = 60  # rows of the table


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """Two prompts, how their positions match, and what is measured where."""

    model: Transformer
    grid: Grid
    clean: Batch
    corrupted: Batch
    pairs: tuple[tuple[int, int], ...]
    metric: Metric
    at: int  # position of the corrupted prompt whose prediction is measured
    answer: int
    wrong: int
    reference: Tensor  # [V] log-probabilities of the clean prediction, float64
    kept: dict[str, Tensor]  # hook name -> activations [pos, ...] of the clean run
    ends: tuple[float, float]  # metric of the corrupted and of the clean run

    def measure(self, logits: Tensor) -> Tensor:
        """[R] float64 of logits [R, pos, V]."""
        return _measure(logits[:, self.at], self.metric, self.answer, self.wrong, self.reference)

    def recovered(self, metric: np.ndarray) -> np.ndarray:
        """0 as the corrupted run, 1 as the clean one; NaN where the two do not differ."""
        low, high = self.ends
        return (metric - low) / (high - low) if high != low else np.full_like(metric, np.nan)

    @property
    def slope(self) -> float:
        low, high = self.ends
        return 1 / (high - low) if high != low else float("nan")


def _measure(logits: Tensor, metric: str, answer: int, wrong: int, reference: Tensor) -> Tensor:
    """[R] float64 of logits [R, V]."""
    logits = logits.double()
    if metric == "logit_diff":
        return logits[:, answer] - logits[:, wrong]
    logprob = logits.log_softmax(dim=-1)
    if metric == "loss":
        return -logprob[:, answer]
    if metric == "probability":
        return logprob[:, answer].exp()
    terms = reference.exp() * (reference - logprob)
    return torch.where(reference > -torch.inf, terms, 0.0).sum(dim=-1)


def _setting(
    model: Transformer,
    input: Any,
    other: Any,
    what: str,
    metric: str,
    answer: str | int | None,
    wrong: str | int | None,
    position: int,
    alignment: Alignment | None,
) -> _Setting:
    grid = grid_of(model, what)
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, not {metric!r}.")
    if other is None:
        raise ValueError(
            "Patching needs a second prompt, other= (--other): the corrupted one, which takes the activations."
        )
    clean, corrupted = (_one(model, prompt, name) for prompt, name in ((input, "first"), (other, "second")))
    n = [batch.tokens.shape[1] for batch in (clean, corrupted)]
    pairs = align(n[0], n[1], alignment)
    for count, name in zip(n, ("clean", "corrupted"), strict=True):
        if not -count <= position < count:
            raise ValueError(f"The {name} prompt has no position {position}; it has 0..{count - 1} (or -{count}..-1).")
    kept: dict[str, Tensor] = {}

    def keep(x: Tensor, *, hook: Any) -> None:
        kept[hook.name] = x[0]

    with torch.no_grad():
        with model.hooks(fwd_hooks=[(name, keep) for name in grid.hooks]):
            both = [model(clean.tokens)]
        both.append(model(corrupted.tokens))
        for batch, found in zip((clean, corrupted), both, strict=True):
            check_finite(found, batch, "The logits")
        logits = [found[:, position].double() for found in both]
        reference = logits[0][0].log_softmax(dim=-1)
        best = logits[0][0].topk(2).indices.tolist()
        right = best[0] if answer is None else token_id(model, answer)
        rival = int(logits[1][0].argmax()) if wrong is None else token_id(model, wrong)
        if wrong is None and rival == right:
            rival = best[1] if best[0] == right else best[0]
        ends = [float(_measure(x, metric, right, rival, reference)) for x in logits[::-1]]
    return _Setting(
        model=model,
        grid=grid,
        clean=clean,
        corrupted=corrupted,
        pairs=pairs,
        metric=metric,  # type: ignore[arg-type]
        at=position % n[1],
        answer=right,
        wrong=rival,
        reference=reference,
        kept=kept,
        ends=(ends[0], ends[1]),
    )


def _one(model: Transformer, prompt: Any, which: str) -> Batch:
    batch = read_batch(model, prompt)
    if len(batch.tokens) > 1:
        raise ValueError(f"Patching is between two prompts; the {which} holds {len(batch.tokens)} sequences.")
    return batch


@torch.no_grad()
def patch_activations(
    model: Transformer,
    input: Any,
    other: Any = None,
    *,
    what: What = "atom",
    metric: Metric = "logit_diff",
    answer: str | int | None = None,
    wrong: str | int | None = None,
    position: int = -1,
    alignment: Alignment | None = None,
    positions: Literal["each", "all"] = "each",
) -> Finding:
    """Put activations of the clean prompt `input` into the run on the corrupted prompt `other`, one place at a time.

        recovered = (m(patched) - m(corrupted)) / (m(clean) - m(corrupted))        0: nothing, 1: all of the behaviour

    for every place and every position that has a partner in the other prompt. With the prompts exchanged the same call
    asks what a place is needed for (noising) in place of what it is enough for (denoising); the two are not the same.

    Args:
        input, other: a text or token ids [pos] each; one sequence.
        what: "atom" (what each sublayer wrote, and the embedding), "read" (what each read holds, before its norm),
            "depth_weight" (the weights of a read over its sources), "head" (what each head mixed), or "stream" (what is
            carried into each block; each of the streams, where there are several).
        metric: at `position`: "logit_diff", logit(answer) - logit(wrong); "loss", -log p(answer) in nats;
            "probability", p(answer); "kl", KL(clean || run) in nats, of which a clean run has 0.
        answer, wrong: tokens as text or id; by default the likeliest next token of the clean and of the corrupted run
            (or the runner-up of the clean run, where those are one).
        position: index into each prompt, negative from its end.
        alignment: see `align`. Prompts of different lengths need one: nothing is stretched or repeated.
        positions: "each" one at a time, or "all": a place is patched at all aligned positions at once.

    Returns:
        Dataset over the place (atom, read, site and head, boundary, boundary and stream) and pos (of the corrupted
        prompt; clean_pos, clean_token: its partner): recovered, and metric, its raw value. NaN: no partner.

    Source: Zhang and Nanda, arXiv 2309.16042 (sections 2 and 3).

    Raises:
        ValueError: no second prompt, several sequences, prompts of different lengths without alignment, an unknown
            place or metric, a system without depth weights or streams where those are asked for.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import patch_activations
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.AttnRes())
        >>> model = t2lens.build(cfg, seed=0)
        >>> found = patch_activations(model, [0, 7, 3, 7], [0, 9, 3, 7], positions="all")
        >>> float(found["recovered"].sel(atom="embed").round(4))  # the whole embedding is the whole prompt
        1.0
    """
    if positions not in ("each", "all"):
        raise ValueError(f'positions must be "each" or "all", not {positions!r}.')
    setting = _setting(model, input, other, what, metric, answer, wrong, position, alignment)
    values = _patched(setting, positions)
    return _finding(setting, what, positions, {"recovered": setting.recovered(values), "metric": values})


def _patched(setting: _Setting, positions: str) -> np.ndarray:
    """The metric [*grid, pos] (or [*grid]) of every patched run; NaN where nothing is patched."""
    grid, width = setting.grid, setting.corrupted.tokens.shape[1]
    values = np.full((*grid.shape, *((width,) if positions == "each" else ())), np.nan)
    groups = [(pair,) for pair in setting.pairs] if positions == "each" else [setting.pairs]
    variants, slots = [], []
    for place in grid.places:
        for group in groups:
            edit = _patch(place, setting.kept[place.hook], group)
            variants.append(Variant(layer=layer_of(setting.model, place.hook), edits={place.hook: edit}))
            slots.append((*place.at, group[0][1]) if positions == "each" else place.at)
    record = setting.model.record(setting.corrupted.tokens)
    for which, logits in progress(run_variants(setting.model, record, variants), "Patching"):
        for i, value in zip(which.tolist(), setting.measure(logits).tolist(), strict=True):
            values[slots[i]] = value
    return values


def _patch(place: Place, clean: Tensor, pairs: Sequence[tuple[int, int]]) -> Change:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        for a, b in pairs:
            if place.part is None:
                x[:, b] = clean[a]
            else:
                x[:, b, place.part] = clean[a, place.part]
        return x

    return change


def attribution_patching(
    model: Transformer,
    input: Any,
    other: Any = None,
    *,
    what: What = "atom",
    metric: Metric = "logit_diff",
    answer: str | int | None = None,
    wrong: str | int | None = None,
    position: int = -1,
    alignment: Alignment | None = None,
    compare: bool = False,
) -> Finding:
    """The gradient's estimate of `patch_activations`: all places and positions from one forward and one backward pass.

        estimate = (x_clean - x_corrupted) . dm/dx |corrupted  / (m(clean) - m(corrupted))

    with x the activation at one place and position (for depth weights, sum_j (w_clean - w)_j dm/dw_j). It is the first
    order of what patching does: good for small changes, poor where much changes at once (whole reads and streams, the
    embedding) or where the metric saturates.

    Args:
        compare: patch as well, and report `recovered` and the correlation of the two.
        The others as in `patch_activations`.

    Returns:
        Dataset with estimate over the same axes; with `compare` recovered and, as numbers of their own, pearson and
        spearman over all entries.

    Source: Nanda, "Attribution patching" (2023); Syed et al., arXiv 2310.10348 (section 3).

    Raises:
        ValueError: as `patch_activations`.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import attribution_patching
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.AttnRes())
        >>> model = t2lens.build(cfg, seed=0)
        >>> found = attribution_patching(model, [0, 7, 3, 7], [0, 9, 3, 7], compare=True)
        >>> float(found["pearson"]) > 0.7
        True
    """
    setting = _setting(model, input, other, what, metric, answer, wrong, position, alignment)
    values = {"estimate": _estimated(setting)}
    if compare:
        values["recovered"] = setting.recovered(_patched(setting, "each"))
    return _finding(setting, what, "each", values)


def _estimated(setting: _Setting) -> np.ndarray:
    """[*grid, pos]"""
    grid, width = setting.grid, setting.corrupted.tokens.shape[1]
    seen: dict[str, Tensor] = {}

    def watch(x: Tensor, *, hook: Any) -> Tensor:
        # a node of its own: what was made of the tensor before it came here is not what a patch changes
        x = x.clone() if x.requires_grad else x.detach().clone().requires_grad_()  # (parameters may be frozen)
        seen[hook.name] = x
        return x

    # the embedding too, so that what is made of it has a gradient where parameters are frozen
    hooks = [(name, watch) for name in dict.fromkeys(("hook_embed", *grid.hooks))]
    with gradients(setting.model), setting.model.hooks(fwd_hooks=hooks):
        metric = setting.measure(setting.model(setting.corrupted.tokens))
        wanted = [seen[name] for name in grid.hooks]
        found = torch.autograd.grad(metric.sum(), wanted, allow_unused=True)
    grads = {
        name: torch.zeros_like(x) if grad is None else grad
        for name, x, grad in zip(grid.hooks, wanted, found, strict=True)
    }
    values = np.full((*grid.shape, width), np.nan)
    for place in grid.places:
        clean, plain, grad = setting.kept[place.hook], seen[place.hook][0].detach(), grads[place.hook][0]
        for a, b in setting.pairs:
            change = place.of(clean, a).double() - place.of(plain, b).double()
            values[(*place.at, b)] = float((change * place.of(grad, b).double()).sum()) * setting.slope
    return values


_MEANING = {
    "recovered": ("share of the clean behaviour that the patch brings back: 0 corrupted, 1 clean", "share"),
    "metric": ("the metric of the patched run", ""),
    "estimate": ("the gradient's estimate of recovered", "share"),
}


def _finding(setting: _Setting, what: str, positions: str, values: dict[str, np.ndarray]) -> Finding:
    grid, clean, corrupted = setting.grid, setting.clean, setting.corrupted
    partner = {b: a for a, b in setting.pairs}
    coords: dict[str, Any] = {axis: np.array(grid.names[axis], dtype=object) for axis in grid.axes}
    axes: tuple[str, ...] = grid.axes
    if positions == "each":
        width = range(corrupted.tokens.shape[1])
        axes = (*grid.axes, "pos")
        coords["pos"] = np.array(width)
        coords["token"] = ("pos", np.array(corrupted.strings[0], dtype=object))
        coords["clean_pos"] = ("pos", np.array([float(partner.get(b, np.nan)) for b in width]))
        words = [clean.strings[0][partner[b]] if b in partner else "" for b in width]
        coords["clean_token"] = ("pos", np.array(words, dtype=object))
    variables: dict[str, Any] = {}
    for name, array in values.items():
        meaning, unit = _MEANING[name]
        unit = _UNITS[setting.metric] if name == "metric" else unit
        variables[name] = (axes, array, {"meaning": meaning, "unit": unit})
    for name, value in zip(("corrupted_metric", "clean_metric"), setting.ends, strict=True):
        run = name.split("_")[0]
        variables[name] = ((), value, {"meaning": f"the metric of the {run} run", "unit": _UNITS[setting.metric]})
    notes, compared = [], "estimate" in values and "recovered" in values
    if compared:
        both = values["estimate"], values["recovered"]
        variables["pearson"] = ((), pearson(*both), {"meaning": "correlation of estimate and recovered"})
        variables["spearman"] = ((), spearman(*both), {"meaning": "rank correlation of estimate and recovered"})
        notes.append(
            f"Measured against patching: correlation {pearson(*both):.2f}, rank correlation {spearman(*both):.2f} over "
            f"{int(np.isfinite(both[1]).sum())} patches."
        )
    first = next(iter(values))
    charts = [_heat(grid, first, positions)]
    if compared:
        charts.append(
            Chart(
                kind="scatter",
                variable="recovered",
                x="estimate",
                title="What a patch brings back, measured, against the estimate of the gradient",
                label="brought back by the patch (share)",
                xlabel="estimated (share)",
            )
        )
    columns, rows = _table(setting, positions, values)
    return Finding(
        title=f"{'Activation' if first == 'recovered' else 'Attribution'} patching of {what.replace('_', ' ')}s",
        dataset=xr.Dataset(variables, coords=coords),
        columns=columns,
        rows=rows,
        notes=(*notes, *_notes(setting, first, values[first]), *grid.notes, *clean.notices, *corrupted.notices),
        charts=tuple(charts),
    )


def _heat(grid: Grid, variable: str, positions: str) -> Chart:
    first, *more = grid.axes
    if positions == "each":  # of several heads or streams the last one; the data has all
        return Chart(kind="heat", variable=variable, x="pos", y=first, signed=True)
    if more:
        return Chart(kind="heat", variable=variable, x=more[0], y=first, signed=True)
    return Chart(kind="bars", variable=variable, x=first, signed=True)


def _table(
    setting: _Setting, positions: str, values: dict[str, np.ndarray]
) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """The largest first, by what they recover (or are estimated to)."""
    grid = setting.grid
    order = next(iter(values.values()))
    if not np.isfinite(order).any():
        order = values.get("metric", order)
    places: list[Any] = [at for at in np.ndindex(order.shape) if np.isfinite(order[at])]
    places.sort(key=lambda at: -abs(order[at]))
    rows = []
    for at in places[:_SHOWN]:
        row: list[Any] = [grid.names[axis][i] for axis, i in zip(grid.axes, at, strict=False)]
        if positions == "each":
            row += [at[-1], setting.corrupted.strings[0][at[-1]]]
        rows.append((*row, *(float(array[at]) for array in values.values())))
    columns = (*grid.axes, *(("pos", "token") if positions == "each" else ()), *values)
    return columns, tuple(rows)


def _notes(setting: _Setting, first: str, shares: np.ndarray) -> list[str]:
    words = [str(t) if setting.model.tokenizer is None else setting.model.tokenizer.str_token(t)
             for t in (setting.answer, setting.wrong)]  # fmt: skip
    low, high = setting.ends
    of = {
        "logit_diff": f"logit of {words[0]!r} less logit of {words[1]!r}",
        "loss": f"-log p of {words[0]!r}, nats",
        "probability": f"probability of {words[0]!r}",
        "kl": "KL of the clean prediction from that of the run, nats",
    }[setting.metric]
    notes = [
        f"Metric: {of}, after position {setting.at} of the corrupted prompt; {low:.4g} there, {high:.4g} in the clean "
        "run.",
        f"{len(setting.pairs)} of {setting.corrupted.tokens.shape[1]} positions have a partner; one pair of prompts.",
    ]
    if high == low:
        notes.append("Both runs have the same metric, so there is nothing to recover; see the raw metric.")
    elif (most := float(np.nanmax(np.abs(shares), initial=0.0))) > _FAR:
        notes.append(
            f"A single patch goes {most:.3g} times as far as the runs are apart: they differ too little in this metric "
            "for shares to say much. Name the tokens on which they differ (answer, wrong), or read the raw metric."
        )
    if first == "estimate":
        notes.append("First order at the corrupted run; source: Nanda (2023), Syed et al. (arXiv 2310.10348).")
    else:
        notes.append("Clean activations in the corrupted run (denoising); source: Zhang and Nanda, arXiv 2309.16042.")
    return notes

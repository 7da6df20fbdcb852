"""Which writes matter: every write (an atom: the embedding, and what each sublayer wrote) taken away, one at a time.

With one write set to zero (or to its mean) at all positions, and everything after it run anew:

    loss = L(without) - L        mean over the positions of the sequence that have a next token, nats
    kl, kl_mean                  KL(plain || without) at one position, and its mean over all real positions, nats
    logit, probability           of the followed token at that position, without the write less as it is

Beside it stands the share of that logit which the write has by attribution (`attribute_logits`): what it puts there
itself, norm and gates held. A write can do much with a small share (later sublayers read it), or little with a large
one (they make up for it); the rank correlation says how far the two agree. All writes of a block are rows of one pass
that is taken up there, so that the ranking costs about as much as one pass for every two blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.attribution import attribute_logits
from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.inputs import Batch, check_finite, read_batch
from t2lens.analysis.layout import chosen_tokens, columns_of, per_sequence, put, token_axes, token_coords, word
from t2lens.analysis.places import activation_places
from t2lens.analysis.progress import progress
from t2lens.analysis.statistics import spearman
from t2lens.analysis.variants import Change, Plain, Variant, layer_of, recorded, run_variants, sequences

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["ablate_writes"]

MEASURES = ("kl", "kl_mean", "loss", "logit", "probability")
_MEANING = {
    "kl": ("KL of the prediction at the position as it is from the one without the write", "nats"),
    "kl_mean": ("the same, mean over all positions", "nats"),
    "loss": ("change of the mean next-token loss without the write", "nats"),
    "logit": ("change of the followed token's logit without the write", "logit"),
    "probability": ("change of the followed token's probability without the write", "probability"),
    "share": ("what the write itself adds to the followed token's logit", "logit"),
    "share_size": ("size of that share, whatever its sign", "logit"),
}


@torch.no_grad()
def ablate_writes(
    model: Transformer,
    input: Any,
    *,
    pos: int = -1,
    token: str | int | None = None,
    by: Literal["zero", "mean"] = "zero",
    attention_mask: Any = None,
) -> Finding:
    """Rank the writes by what becomes of the predictions without each; beside it the share that attribution gives.

    Args:
        input: text, texts, or token ids [pos] or [batch, pos] (with `attention_mask`).
        pos: which position predicts, counted over the real tokens of each sequence (negative: from the end).
        token: the token that is followed there, a text or an id; None: of each sequence the likeliest at `pos`.
        by: what a write becomes everywhere: "zero", or "mean", its mean over all real positions of all sequences.

    Returns:
        A Finding. Its dataset over write, float64 (with an axis `sequence` where there are several):

            kl, kl_mean, loss, logit, probability   the change without the write, see the module
            share, share_size   the write's share of the logit, and its size; NaN where the head is not linear
            plain_logit, plain_probability, plain_loss   as it is
            spearman(measure)   rank correlation over writes of share_size with the size of each effect, both means
                over sequences

        loss is NaN in a bidirectional model and where a sequence is one token. The table begins with the largest kl.

    Raises:
        ValueError: another `by`, a text that is not one token, a position outside a sequence, logits that are NaN.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import ablate_writes
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0)
        >>> found = ablate_writes(model, [0, 7, 3], token=9)
        >>> found["write"].values.tolist()
        ['embed', '0.attn', '0.mlp', '1.attn', '1.mlp']
        >>> bool((found["kl"] >= 0).all())
        True
    """
    if by not in ("zero", "mean"):
        raise ValueError(f'ablate_writes replaces a write by "zero" or by its "mean", not by {by!r}.')
    batch = read_batch(model, input, attention_mask)
    columns, ids = columns_of(batch, pos), chosen_tokens(model, batch, token, "token")
    points = activation_places(model, "atom").values()
    fills = _means(model, batch, points) if by == "mean" else dict.fromkeys(points)
    variants = [Variant(layer=layer_of(model, name), edits={name: _filled(fill)}) for name, fill in fills.items()]
    changes = torch.full((len(MEASURES), len(variants), len(batch.tokens)), torch.nan, dtype=torch.float64)
    plain, followed = torch.full((3, len(batch.tokens)), torch.nan, dtype=torch.float64), []
    for row, one in enumerate(progress(sequences(batch), "Taking writes away", len(batch.tokens))):
        at = int(columns[row] - batch.valid[row].nonzero()[0])
        record, logits = recorded(model, one)
        check_finite(logits, one, "The logits")
        here = logits[0, at].double()
        target = int(here.argmax()) if ids is None else int(ids[row])
        followed.append(target)
        chosen = torch.arange(logits.shape[1], device=logits.device) == at
        near, all_of = Plain(one, logits, chosen, target), Plain(one, logits, one.valid[0], target)
        predicts = one.predicts[0]
        loss = Plain(one, logits, predicts, target) if model.cfg.causal and bool(predicts.any()) else None
        n_valid, n_next = int(one.valid.sum()), int(predicts.sum())
        p = here.softmax(dim=-1)[target]
        plain[:, row] = torch.stack([here[target], p, here[target] * torch.nan])
        if loss is not None:
            plain[2, row] = loss.loss / n_next
        for which, changed in run_variants(model, record, variants):
            of_here = near.shifts(changed)
            q = changed[:, at].double().softmax(dim=-1)[:, target]
            gained = torch.full_like(q, torch.nan) if loss is None else loss.shifts(changed)[1] / n_next
            values = [of_here[0], all_of.shifts(changed)[0] / n_valid, gained, of_here[2], q - p]
            changes[:, which.cpu(), row] = torch.stack(values).cpu()
    shares = _shares(model, batch, pos, followed)
    return _finding(model, batch, pos, by, columns, followed, changes, plain, shares)


def _filled(fill: Tensor | None) -> Change:
    """Nothing, or `fill` [D], in place of what was written."""

    def change(x: Tensor) -> Tensor:
        return torch.zeros_like(x) if fill is None else fill.to(x.dtype).expand_as(x)

    return change


def _means(model: Transformer, batch: Batch, points: Iterable[str]) -> dict[str, Tensor | None]:
    """Of these hook points, in their order: the mean [D] of what is written there, over all real positions."""
    sums: dict[str, Tensor] = {}

    def keep(x: Tensor, *, hook: Any) -> None:
        total = x[0][where].double().sum(dim=0)
        sums[hook.name] = sums[hook.name] + total if hook.name in sums else total

    for one in sequences(batch):
        where = one.valid[0]
        with model.hooks(fwd_hooks=[(name, keep) for name in points]):
            model(one.tokens, one.mask)
    n = int(batch.valid.sum())
    return {name: sums[name] / n for name in points}


def _shares(model: Transformer, batch: Batch, pos: int, ids: list[int]) -> Tensor:
    """[write, sequence] shares of the followed logits; NaN where the head is not linear."""
    if not model.unembed.is_linear:
        return torch.full((len(model.atoms), len(ids)), torch.nan, dtype=torch.float64)
    found = attribute_logits(model, batch.tokens, attention_mask=batch.mask, pos=pos, token=ids)
    return torch.from_numpy(found["share"].values[: len(model.atoms)].reshape(len(model.atoms), -1))


def _finding(
    model: Transformer,
    batch: Batch,
    pos: int,
    by: str,
    columns: Tensor,
    followed: list[int],
    changes: Tensor,
    plain: Tensor,
    shares: Tensor,
) -> Finding:
    own, names = token_axes(batch)[:-1], list(model.atoms)
    arrays = dict(zip(MEASURES, changes, strict=True)) | {"share": shares, "share_size": shares.abs()}
    told = [word(model, i) for i in followed]
    data = xr.Dataset(coords={"write": np.array(names, dtype=object), **token_coords(batch)})
    data = data.assign_coords(target=(own, told) if own else told[0], column=(own, per_sequence(columns, batch)))
    for name, (meaning, unit) in _MEANING.items():
        put(data, name, ("write", *own), per_sequence(arrays[name], batch), meaning, unit)
    for name, values, unit in zip(
        ("logit", "probability", "loss"), plain, ("logit", "probability", "nats"), strict=True
    ):
        what = "mean next-token loss" if name == "loss" else f"{name} of the followed token"
        put(data, f"plain_{name}", own, per_sequence(values, batch), f"{what}, as it is", unit)
    means = {name: values.mean(dim=-1).numpy() for name, values in arrays.items()}
    agree = [spearman(np.abs(means["share"]), np.abs(means[name])) for name in MEASURES]
    data = data.assign_coords(measure=np.array(MEASURES, dtype=object))
    put(data, "spearman", ("measure",), np.array(agree), "rank correlation of the size of the share with the effect")
    shown = ("kl", "probability", "logit", "share", "loss", "kl_mean")
    titles = ("KL (nats)", "probability", "logit", "share of the logit", "loss (nats)", "mean KL (nats)")
    order = sorted(range(len(names)), key=lambda i: -means["kl"][i])
    rows = [(names[i], *(_number(means[name][i]) for name in shown)) for i in order]
    if own:
        titles = (*titles, "spread of KL")
        spread = changes[0].std(dim=-1).numpy()
        rows = [(*row, float(spread[i])) for row, i in zip(rows, order, strict=True)]
    of = f"{told[0]!r}" if len(set(told)) == 1 else "the followed tokens"
    where = f"in {len(followed)} sequences" if own else f"at position {batch.count(int(columns[0]))}"
    gone = "zero" if by == "zero" else "its mean"
    return Finding(
        title=f"Writes set to {gone}, one at a time: the prediction of {of} {where}",
        dataset=data,
        columns=("write", *titles),
        rows=tuple(rows),
        notes=(
            f"Without each write (everywhere {_GONE[by]}), less as it is; what comes after runs anew. KL, probability "
            f"and logit are at {'the position' if not own else f'position {pos} of each sequence'}"
            f"{f', means over n = {len(followed)} sequences' if own else ''}; loss and mean KL over the whole input.",
            _agreement(dict(zip(MEASURES, agree, strict=True)), len(names)),
            "A share is arithmetic at the recorded norm scale and gates; an effect is measured in another pass.",
            *batch.notices,
        ),
        charts=(
            Chart(
                kind="bars",
                variable="kl",
                x="write",
                title="What the prediction loses without each write",
                label="KL without the write (nats)",
            )
            if not own
            else Chart(
                kind="heat",
                variable="kl",
                x="sequence",
                y="write",
                title="What the prediction loses without each write, by sequence",
                label="KL without the write (nats)",
            ),
            *([] if own else [_bars("probability", "Change of the followed token's probability without each write")]),
            *([] if own else [_bars("share", "What each write adds to the logit")]),
            Chart(
                kind="scatter",
                variable="kl",
                x="share_size",
                title="What the prediction loses without a write, against the size of its share of the logit",
                label="KL without the write (nats)",
                xlabel="size of the share (logit)",
            ),
        ),
    )


_GONE = {"zero": "set to zero", "mean": "set to its mean over all real positions of the input"}


def _bars(variable: str, title: str) -> Chart:
    return Chart(kind="bars", variable=variable, x="write", signed=True, title=title)


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _agreement(agree: dict[str, float], n: int) -> str:
    """How far shares rank writes as their effects do, in a sentence."""
    if not any(np.isfinite(list(agree.values()))):
        return "The size of shares and the effects have no rank correlation here: one of them does not differ."
    said = {"kl": "KL", "logit": "the change of the logit", "probability": "the change of the probability"}
    parts = [f"{said[name]} {agree[name]:.2f}" for name in said if np.isfinite(agree[name])]
    return f"Spearman's rank correlation over {n} writes of the size of a share with {', '.join(parts)}."

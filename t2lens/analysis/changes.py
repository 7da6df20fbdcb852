"""What edits change: the predictions of the edited pass against those of the clean one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.frozen import place
from t2lens.analysis.inputs import check_finite, read_batch
from t2lens.analysis.layout import put, token_coords
from t2lens.edits import check, edited, read_edits
from t2lens.readout import word

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["edit_change"]


@torch.no_grad()
def edit_change(model: Transformer, input: Any, edits: Any, *, pos: int = -1, top: int = 8) -> Finding:
    """Run a prompt as it is and under edits, and compare what is predicted.

        kl[pos] = KL(clean || edited) = sum over tokens of p_clean (log p_clean - log p_edited)

    Args:
        input: one text, or token ids [pos] or [1, pos].
        edits: as `t2lens.edited` takes them.
        pos: the position whose next token is compared (negative: from the end).
        top: how many of the likeliest tokens of each pass are kept.

    Returns:
        A Finding: kl(pos) in nats, loss(pass, pos) of the next token in nats (NaN where there is none), and at `pos`
        probability(pass, candidate) of every token that is among the `top` likeliest of either pass, likeliest clean
        ones first, with token_id(candidate). pass: "clean" and "edited".

    Raises:
        ValueError, KeyError, TypeError: edits that this model cannot do, several sequences, no such position, logits
            that are not finite.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import edit_change
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0)
        >>> edit = t2lens.Edit(target="atom", operation="zero", site="1.mlp", positions=2)
        >>> found = edit_change(model, [0, 7, 3], edit)
        >>> found["kl"].values[:2].tolist(), float(found["kl"][2]) > 0
        ([0.0, 0.0], True)
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ValueError(f"top must be a whole number from 1 on, not {top!r}.")
    wanted = read_edits(edits)
    told = check(model, wanted)
    batch = read_batch(model, input)
    at = place(batch, pos)
    logits = {"clean": model(batch.tokens, batch.mask)}
    with edited(model, wanted):
        logits["edited"] = model(batch.tokens, batch.mask)
    for name, found in logits.items():
        check_finite(found, batch, f"The {name} logits")
    logprob = torch.stack([found[0].double().log_softmax(dim=-1) for found in logits.values()])  # [2, T, V]
    kl = (logprob[0].exp() * (logprob[0] - logprob[1])).sum(dim=-1).clamp(min=0)
    known = batch.predicts[0] & model.cfg.causal
    loss = -logprob.gather(-1, batch.next_tokens[0].expand(2, -1).unsqueeze(-1)).squeeze(-1)
    loss = torch.where(known, loss, torch.nan)
    here = logprob[:, at].exp()
    best = here.topk(min(top, here.shape[-1]), dim=-1).indices
    ids = list(dict.fromkeys(best.flatten().tolist()))
    ids.sort(key=lambda i: -float(here[0, i]))
    words = [word(model, i) for i in ids]

    data = xr.Dataset(coords={"pass": list(logits), "candidate": np.arange(len(ids)), **token_coords(batch)})
    data = data.assign_coords(token_id=("candidate", ids), word=("candidate", np.array(words, dtype=object)))
    put(data, "kl", ("pos",), kl.numpy(), "KL(clean || edited) of the next token", "nats")
    put(data, "loss", ("pass", "pos"), loss.numpy(), "loss of the next token", "nats")
    put(
        data,
        "probability",
        ("pass", "candidate"),
        here[:, ids].numpy(),
        "of the token, after `position`",
        "probability",
    )
    data = data.assign_attrs(position=at)
    return Finding(
        title="What the edits change" if wanted else "There are no edits: both passes are the same",
        dataset=data,
        columns=("token", "clean", "edited", "change"),
        rows=tuple(
            (name, float(here[0, i]), float(here[1, i]), float(here[1, i] - here[0, i]))
            for name, i in zip(words, ids, strict=True)
        ),
        notes=(*_said(kl, loss, known, at), *(edit.describe() for edit in wanted), *told, *batch.notices),
        charts=(
            Chart(
                kind="bars",
                variable="kl",
                x="pos",
                title="How far the edits move the prediction of each next token: KL(clean || edited)",
                label="KL (nats)",
            ),
        ),
    )


def _said(kl: Tensor, loss: Tensor, known: Tensor, at: int) -> list[str]:
    said = [f"KL(clean || edited): {float(kl[at]):.4g} nats after position {at}, {float(kl.mean()):.4g} on average."]
    if n := int(known.sum()):
        clean, edited_ = (float(each[known].mean()) for each in loss)
        said.append(
            f"Loss on the prompt: {clean:.4f} nats clean, {edited_:.4f} edited ({edited_ - clean:+.4f}; n = {n})."
        )
    return said

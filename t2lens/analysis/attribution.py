"""Attribution that sums: what every atom, or every head, adds to a logit, and to the next-token loss.

With the gates of one pass as recorded, the last read is a sum of contributions of atoms (`t2lens.mixing`); a part of
an atom (what one head wrote) goes the same way. At the recorded scale of the final norm, logits are a sum of shares:

    logits = sum over parts of W_U (w * part / scale) + bias

The loss is not linear in the logits. Its shares are Aumann-Shapley values along the ray from zero logits (a uniform
prediction, loss log V) to the logits z of the pass, with y the next token:

    loss = log V + sum over parts of g . (logits of the part),   g = integral over t in 0..1 of softmax(t z) - e_y

(Aumann and Shapley, Values of Non-Atomic Games, 1974; integrated gradients with the zero baseline, Sundararajan et al.
2017, arXiv 1703.01365, section 3 and its completeness axiom). g is one vector per position, made by Gauss-Legendre
quadrature whose number of nodes grows until nothing changes any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import log
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.inputs import Batch, read_batch
from t2lens.analysis.layout import (
    chosen_tokens,
    columns_of,
    per_sequence,
    per_token,
    put,
    token_axes,
    token_coords,
    word,
)
from t2lens.analysis.parts import Part, PassInParts
from t2lens.analysis.progress import progress

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["attribute_logits", "attribute_loss"]

_NODES = (16, 32, 64, 128, 256, 512, 1024)
_CLOSE = 1e-12  # change of a share, relative to the logits, at which more nodes are of no use
_ENTRIES = 2**22  # numbers of one float64 tensor [positions, vocab]
_ABOVE = (
    "A constant added to all logits changes no prediction: above mean token is the share less its mean over all tokens."
)
_BUDGET = 2**26  # numbers of the larger tensors of one pass


@torch.no_grad()
def attribute_logits(
    model: Transformer,
    input: Any,
    *,
    attention_mask: Any = None,
    pos: int = -1,
    token: str | int | Sequence[str | int] | None = None,
    against: str | int | Sequence[str | int] | None = None,
    by: Literal["atom", "head"] = "atom",
    form: str = "additive",
) -> Finding:
    """Direct logit attribution: the logit of `token` at `pos` as the sum of shares of atoms or heads, and a bias.

        logit = sum over parts of (w * part / scale) . W_U[:, token] + bias

    with part [d_model] what an atom (or one of its heads) contributes to the last read, through any residual system,
    gates as recorded; scale and w of the final norm (a LayerNorm centres the part as well). Exact as arithmetic on
    this input; not a causal claim, because gates and later atoms depend on the same state.

    Args:
        input: text, list of texts, or token ids [pos] or [batch, pos] (with `attention_mask`).
        pos: which position predicts, counted over the real tokens of each sequence (negative: from the end).
        token: the token (text or id; one for all sequences, or one each); by default the likeliest next one.
        against: another token: shares are then those of the logit difference, token less against.
        by: "atom", or "head": each attention atom in its heads ("3.attn.h0") and what is constant ("3.attn.bias").
        form: as in `t2lens.mixing_matrix`.

    Returns:
        A Finding. Its dataset, in logits and float64 (with an axis `sequence` where there are several):

            share(part)               what the part adds at `pos`; the bias is the last part
            share_above_mean(part)    the same less its mean over all tokens: the part of it that softmax sees
            share_by_pos(part, pos)   the share in the logit of the same token at every position
            logit, error              the model's logit at `pos`, and the sum of shares less it

    Raises:
        ValueError: a head that is not linear, a text that is not one token, a position outside the sequence.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import attribute_logits
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0).double()
        >>> finding = attribute_logits(model, [0, 7, 3], token=9, by="head")
        >>> finding["part"].values.tolist()[:3]
        ['embed', '0.attn.h0', '0.attn.h1']
        >>> bool(abs(finding["share"].sum() - finding["logit"]) < 1e-10)
        True
    """
    batch = read_batch(model, input, attention_mask)
    here = (torch.arange(len(batch.tokens), device=batch.tokens.device), columns_of(batch, pos))
    ids, other = chosen_tokens(model, batch, token, "token"), chosen_tokens(model, batch, against, "against")
    run = PassInParts(model, batch, by, form)
    ids = run.logits[here].argmax(dim=-1) if ids is None else ids
    unembed, bias, logits = model.W_U, model.logit_bias.double(), run.logits.double()
    # what is taken off: the other token's share, or for "above mean" the mean over all tokens
    chosen = unembed[:, ids].T.double()  # [B, D]
    mean = (
        unembed.mean(dim=-1, dtype=torch.float64).expand_as(chosen) if other is None else unembed[:, other].T.double()
    )
    off = 0.0 if other is None else mean
    parts, by_pos, above = [], [], []
    for part, share in progress(run.parts(), "Attributing the logit", run.n_parts):
        parts.append(part)
        by_pos.append((share * (chosen - off)[:, None]).sum(dim=-1))
        above.append((share[here] * (chosen - mean)).sum(dim=-1))
    constant = bias[ids] if other is None else bias[ids] - bias[other]
    parts.append(Part())
    by_pos.append(constant[:, None].expand(batch.tokens.shape))
    above.append(bias[ids] - (bias.mean() if other is None else bias[other]))
    logit = logits[here].gather(-1, ids[:, None]).squeeze(-1)
    level = logits[here].mean(dim=-1) if other is None else logits[here].gather(-1, other[:, None]).squeeze(-1)
    logit_above, logit = logit - level, logit if other is None else logit - level

    everywhere = torch.stack(by_pos)  # [P, B, T]
    shares, aboves = everywhere[:, *here], torch.stack(above)
    error = shares.sum(dim=0) - logit
    axes, own = token_axes(batch), token_axes(batch)[:-1]
    words = {"target": ids, **({} if other is None else {"against": other})}
    told = {name: [word(model, i) for i in each.tolist()] for name, each in words.items()}
    data = xr.Dataset(coords={**Part.coords(parts), **token_coords(batch)})
    data = data.assign_coords({name: (own, each) if own else each[0] for name, each in told.items()})
    data = data.assign_coords(column=(own, per_sequence(here[1], batch)))
    masked = torch.where(batch.valid, everywhere, torch.nan)
    put(data, "share", ("part", *own), per_sequence(shares, batch), "what each part adds to the logit", "logit")
    why = "the share less its mean over all tokens (against another token: the share)"
    put(data, "share_above_mean", ("part", *own), per_sequence(aboves, batch), why, "logit")
    put(
        data,
        "share_by_pos",
        ("part", *axes),
        per_token(masked, batch),
        "what each part adds at every position",
        "logit",
    )
    put(data, "logit", own, per_sequence(logit, batch), "the model's logit, or difference of logits", "logit")
    put(data, "error", own, per_sequence(error, batch), "the sum of shares less the logit", "logit")

    lines = [(part.name, s, a) for part, s, a in zip(parts, shares, aboves, strict=True) if part.atom or bias.any()]
    whole = "logit of the model" if other is None else "difference of logits"
    lines = [(whole, logit, logit_above), *sorted(lines, key=lambda line: -abs(float(line[1].mean())))]
    columns: dict[str, list[float]] = {"mean share" if own else "share": [float(s.mean()) for _, s, _ in lines]}
    if other is None:  # else the same numbers
        columns["above mean token"] = [float(a.mean()) for _, _, a in lines]
    if own:
        columns["spread over sequences"] = [float(s.std()) for _, s, _ in lines]
    what = f"Logit of {told['target'][0]!r}" if len(set(told["target"])) == 1 else "Logits of the chosen tokens"
    if other is not None:
        what += f" against {told['against'][0]!r}" if len(set(told["against"])) == 1 else " against others"
    where = f"in {len(batch.tokens)} sequences" if own else f"at position {batch.count(int(here[1][0]))}"
    return Finding(
        title=f"{what} {where}, by {by}",
        dataset=data,
        columns=("part", *columns),
        rows=tuple((name, *(each[i] for each in columns.values())) for i, (name, _, _) in enumerate(lines)),
        notes=(
            f"Shares, in logits, sum to the logit (error {float(error.abs().max()):.1e}).",
            "Norm scale and gates are as recorded: exact arithmetic on this input, not the effect of an ablation.",
            *([_ABOVE] if other is None else []),
            *run.notes(),
            *batch.notices,
        ),
        charts=(
            Chart(kind="bars", variable="share", x="part", signed=True, label="added to the logit (logit)"),
            Chart(
                kind="heat", variable="share_by_pos", x="pos", y="part", signed=True, label="added to the logit (logit)"
            ),
        ),
    )


@torch.no_grad()
def attribute_loss(
    model: Transformer,
    input: Any,
    *,
    attention_mask: Any = None,
    by: Literal["atom", "head"] = "atom",
    form: str = "additive",
) -> Finding:
    """Token-level loss attribution: every next-token loss as log V plus a share of each atom, or head, and the bias.

        loss[pos] = log V + sum over parts of g[pos] . (logits of the part)
        g = integral over t in 0..1 of (softmax(t z) - e_y) dt,   z the logits, y the next token

    Aumann-Shapley shares along the ray from zero logits, at the recorded norm scale (Sundararajan et al. 2017, arXiv
    1703.01365; see the module docstring). A negative share lowers the loss. They are complete, and a constant added to
    all logits of a part changes none. They say what a part's own direction does to the loss at the readout, not what
    would happen without it.

    Args:
        input: text, list of texts, or token ids [pos] or [batch, pos] (with `attention_mask`).
        by, form: as in `attribute_logits`.

    Returns:
        A Finding. Its dataset, in nats and float64 (with an axis `sequence` where there are several):

            share(part, pos)          NaN where there is no next token; the bias is the last part
            loss(pos), error(pos)     the model's loss, and log V plus the sum of shares less it
            mean(part), spread(part)  over all positions that have a next token (spread: standard deviation)

    Raises:
        ValueError: a head that is not linear, a bidirectional model, no sequence of two tokens.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import attribute_loss
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0).double()
        >>> finding = attribute_loss(model, [0, 7, 3])
        >>> bool(abs(finding["error"]).max() < 1e-10)
        True
    """
    batch = read_batch(model, input, attention_mask, losses=True)
    cfg, (n, width) = model.cfg, batch.tokens.shape
    size = max(1, _BUDGET // (width * max(cfg.d_vocab, cfg.d_model * (len(model.atoms) + 1))))
    groups = [slice(first, first + size) for first in range(0, n, size)]
    parts: list[Part] = []
    tables, losses, nodes, notes = [], [], 0, []
    one, what = len(groups) == 1, "Attributing the loss"  # a bar over groups, or over the parts of the only one
    for rows in groups if one else progress(groups, what, len(groups)):
        some = _of(batch, rows)
        run = PassInParts(model, some, by, form)
        where = some.predicts
        gradient, used = _mean_gradient(run.logits[where], some.next_tokens[where])
        directions = gradient @ model.W_U.T.double()  # [N, D]
        each = progress(run.parts(), what, run.n_parts) if one else run.parts()
        found = [(part, (share[where] * directions).sum(dim=-1)) for part, share in each]
        mine = [*(part for part, _ in found), Part()]
        if parts and parts != mine:
            raise ValueError('A hook edits what attention writes in some of the sequences only; use by="atom" there.')
        parts, nodes, notes = mine, max(nodes, used), run.notes()
        shares = torch.stack([*(share for _, share in found), gradient @ model.logit_bias.double()])
        table = torch.full((len(parts), *some.tokens.shape), torch.nan, dtype=torch.float64, device=shares.device)
        table[:, where] = shares
        tables.append(table)
        losses.append(torch.where(where, some.losses(run.logits), torch.nan))
    share, loss, uniform = torch.cat(tables, dim=1), torch.cat(losses), log(cfg.d_vocab)
    error = share.sum(dim=0) + uniform - loss
    known = batch.predicts
    count = int(known.sum())
    mean, spread = share[:, known].mean(dim=-1), _spread(share[:, known])
    with_bias = bool(model.logit_bias.any())
    lines = [(part.name, each) for part, each in zip(parts, share, strict=True) if part.atom or with_bias]
    lines.sort(key=lambda line: -abs(float(line[1][known].mean())))
    lines[:0] = [("loss of the model", loss), ("log V (uniform prediction)", torch.full_like(loss, uniform))]

    axes = token_axes(batch)
    data = xr.Dataset(coords={**Part.coords(parts), **token_coords(batch)})
    put(data, "share", ("part", *axes), per_token(share, batch), "what the part adds to the next token's loss", "nats")
    put(data, "loss", axes, per_token(loss, batch), "next-token loss of the model", "nats")
    put(data, "error", axes, per_token(error, batch), "log V and all shares, less the loss", "nats")
    put(data, "mean", ("part",), mean.cpu().numpy(), "mean of the share over positions", "nats")
    put(data, "spread", ("part",), spread.cpu().numpy(), "standard deviation of the share over positions", "nats")
    return Finding(
        title=f"Next-token loss by {by}, {count} position{'s' * (count != 1)}",
        dataset=data,
        columns=("part", "mean (nats)", "spread over positions"),
        rows=tuple((name, float(x[known].mean()), float(_spread(x[known]))) for name, x in lines),
        notes=(
            f"Means over n = {count} positions with a next token; padding is left out. Negative lowers the loss.",
            f"log V and the shares sum to the loss at every position (error {float(error[known].abs().max()):.1e}, "
            f"up to {nodes} quadrature nodes).",
            "Aumann-Shapley shares along the ray from zero logits, which is integrated gradients (Sundararajan et al. "
            "2017, arXiv 1703.01365); norm scale and gates as recorded.",
            *notes,
            *batch.notices,
        ),
        charts=(
            Chart(kind="bars", variable="mean", x="part", signed=True, label="mean share of the loss (nats)"),
            Chart(kind="heat", variable="share", x="pos", y="part", signed=True, label="share of the loss (nats)"),
        ),
    )


def _mean_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """[N, V] float64: the mean over t in 0..1 of softmax(t z) - e_y, and how many nodes the hardest row took."""
    out, most = torch.empty(logits.shape, dtype=torch.float64, device=logits.device), 0
    close = max(_CLOSE, torch.finfo(logits.dtype).eps / 100)  # well below the rounding of the logits themselves
    size = max(1, _ENTRIES // logits.shape[1])
    for first in range(0, len(logits), size):
        z, y = logits[first : first + size].double(), targets[first : first + size, None]
        rows, before = torch.arange(first, first + len(z), device=z.device), torch.full_like(z, torch.inf)
        for count in _NODES:  # each row until it stays as it is
            g = torch.zeros_like(z)
            for t, weight in _legendre(count):
                g.add_((t * z).softmax(dim=-1), alpha=weight)
            g.scatter_add_(-1, y, torch.full_like(g[:, :1], -1.0))
            out[rows], most = g, max(most, count)
            largest = z.abs().amax(dim=-1)
            lowered = z.log_softmax(dim=-1).gather(-1, y).squeeze(-1) + log(z.shape[1])  # log V - loss
            off = torch.maximum((g - before).abs().sum(dim=-1) * largest, ((g * z).sum(dim=-1) + lowered).abs())
            more = ~(off <= close * (1 + largest))
            if not bool(more.any()):
                break
            rows, z, y, before = rows[more], z[more], y[more], g[more]
    return out, most


@cache
def _legendre(count: int) -> list[tuple[float, float]]:
    """Nodes in 0..1 and their weights, which sum to 1."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return list(zip(((nodes + 1) / 2).tolist(), (weights / 2).tolist(), strict=True))


def _of(batch: Batch, rows: slice) -> Batch:
    """Some sequences of a batch."""
    mask = None if batch.mask is None else batch.mask[rows]
    return replace(batch, tokens=batch.tokens[rows], mask=mask)


def _spread(values: Tensor) -> Tensor:
    """Standard deviation over the last axis; 0 where there is one value."""
    return values.std(dim=-1, correction=min(1, values.shape[-1] - 1))

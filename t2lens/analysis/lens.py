"""Logit lens on every read: what the readout would say of what each sublayer reads.

    lens = unembed(ln_final(read))      loss = -log p[target]
    KL(final || lens) = sum over tokens of p_final (log p_final - log p_lens)

The logit lens (nostalgebraist 2020) looks at the carried stream between blocks. Where reads are mixtures over depth
there is no one stream, so the lens is put on every read, each way by itself; the read at "out" is the model's own
prediction. In Hyper-Connections, what is carried are streams: there the lens is put on each stream after every block
too, as the readout would take it, and on the mixture that the readout would make of all of them there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding, Value
from t2lens.analysis.inputs import Batch, read_batch, token_id
from t2lens.analysis.layout import chosen_tokens, per_token, put, token_axes, token_coords, word
from t2lens.analysis.progress import progress
from t2lens.mixing import ForwardRecord
from t2lens.readout import chunks, entropy, lens, lens_values, likeliest
from t2lens.residual.hyper_connections import HyperConnected

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["logit_lens"]

_MEANING = {
    "probability": ("probability that the lens gives the target", "probability"),
    "loss": ("-log of that probability; of true next tokens, or of a target that was named", "nats"),
    "rank": ("place of the target among all tokens, 1 is the likeliest", "place"),
    "entropy": ("entropy of the prediction", "nats"),
    "kl": ("KL(final || lens): what is missing to the model's own prediction", "nats"),
}


@torch.no_grad()
def logit_lens(
    model: Transformer,
    input: Any,
    *,
    attention_mask: Any = None,
    top: int = 5,
    target: Any = None,
    last: str | int | None = None,
) -> Finding:
    """What every read predicts when it goes straight to the final norm and the unembedding.

        lens = unembed(ln_final(read)),   KL(final || lens) = sum over tokens of p_final (log p_final - log p_lens)

    The logit lens (nostalgebraist 2020) on each read of the depth axis, each way by itself ("3.attn.q"); the read
    "out" is the model's prediction. The norm's scale is the read's own. An expanded state is seen as it is read
    (compressed). Hyper-Connections have a lens on each stream after every block as well, and on "all", the mixture
    that the readout would make of the streams there.

    Args:
        input: text, list of texts, or token ids [pos] or [batch, pos] (with `attention_mask`).
        top: how many of the likeliest tokens are kept.
        target: a token (text or id; one, or one for each sequence) whose probability and rank are followed at every
            position; by default the true next token at each (in a bidirectional model the token that stands there).
        last: the token that is followed by default where there is no true next one, at the last position; None: the one
            that the model itself finds likeliest there.

    Returns:
        A Finding. Its dataset (with an axis `sequence` in front of `pos` where there are several; NaN at padding):

            probability, rank(read, pos)         of the target; NaN where there is none
            loss(read, pos)                      nats; NaN also where there is no true next token, unless by `target`
            entropy, kl(read, pos)               nats, kl from the model's own prediction
            top_probability, top_id, top_token(read, pos, k)   the likeliest tokens
            stream_probability, ... (block, stream, pos)       Hyper-Connections: the same of each stream

    Raises:
        ValueError: top below 1, a target that is no token of the model.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import logit_lens
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0)
        >>> finding = logit_lens(model, [0, 7, 3])
        >>> finding["kl"].sel(read="out").values.tolist()
        [0.0, 0.0, 0.0]
    """
    batch = read_batch(model, input, attention_mask)
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ValueError(f"top must be a whole number from 1 on, not {top!r}.")
    top = min(top, model.cfg.d_vocab)
    followed = chosen_tokens(model, batch, target, "target")
    record, streams = _record(model, batch)
    wanted = _wanted(model, batch, followed, last, record.read("out"))
    # a bidirectional model has seen the next token: there is no loss unless a token is named
    known = batch.valid if followed is not None else batch.predicts & model.cfg.causal
    ranked = known if bool(known.any()) else batch.valid & (wanted >= 0)
    reads = [read.name for read in model.reads]
    looks = {name: record.read(name) for name in reads}
    for block, state in enumerate(streams):
        looks |= {f"block {block}, {name}": x for name, x in _stream_reads(model.residual, state).items()}
    found = _measure(model, batch, record.read("out"), list(looks.values()), wanted, known, top)
    words = {i: "" if i < 0 else word(model, i) for i in found["top_id"].unique().tolist()}

    axes, n = token_axes(batch), len(reads)
    data = xr.Dataset(coords={"read": reads, "k": np.arange(top), **token_coords(batch)})
    for name, (meaning, unit) in _MEANING.items():
        put(data, name, ("read", *axes), per_token(found[name][:n], batch), meaning, unit)
    best = {name: per_token(found[f"top_{name}"][:n], batch, -3) for name in ("probability", "id")}
    spelled = np.array([words[i] for i in best["id"].ravel().tolist()], dtype=str).reshape(best["id"].shape)
    of_top, which = ("read", *axes, "k"), "the likeliest tokens, likeliest first"
    put(data, "top_probability", of_top, best["probability"], f"probability of {which}", "probability")
    put(data, "top_id", of_top, best["id"], f"ids of {which}; -1 where there are none (padding)")
    put(data, "top_token", of_top, spelled, which)
    if streams:
        names = [f"stream{i}" for i in range(streams[0].shape[-2])] + ["all"]
        data = data.assign_coords(block=np.arange(len(streams)), stream=names)
        for name, (meaning, unit) in _MEANING.items():
            table = found[name][n:].unflatten(0, (len(streams), len(names)))
            put(data, f"stream_{name}", ("block", "stream", *axes), per_token(table, batch), meaning, unit)
    charts = [Chart(kind="heat", variable=name, x="pos", y="read") for name in ("kl", "entropy")]
    charts += [Chart(kind="heat", variable="loss", x="pos", y="read")] if bool(known.any()) else []
    charts += [Chart(kind="heat", variable="stream_kl", x="block", y="stream")] if streams else []
    return Finding(
        title="Logit lens on every read" + ("" if followed is None else f", following {_named(model, followed)}"),
        dataset=data,
        columns=("read", "top token", "probability", "loss (nats)", "median rank", "entropy (nats)", "KL (nats)"),
        rows=tuple(
            _row(name, batch, {key: x[i] for key, x in found.items()}, known, ranked, words)
            for i, name in enumerate(looks)
        ),
        notes=(*_without_value(looks, batch), *_notes(model, batch, followed, last, known)),
        charts=tuple(charts),
    )


def _wanted(model: Transformer, batch: Batch, target: Tensor | None, last: str | int | None, out: Tensor) -> Tensor:
    """[B, T]: which token is followed where, -1 where there is none; the rule of `t2lens.readout.Followed`."""
    if target is not None:
        return target[:, None].expand(batch.tokens.shape)
    if not model.cfg.causal:
        return batch.tokens
    ends = batch.valid & ~batch.predicts
    own = likeliest(model.unembed(model.ln_final(out[ends].unsqueeze(0)))[0]) if last is None else token_id(model, last)
    wanted = batch.next_tokens.clone()
    wanted[ends] = own
    return wanted


def _without_value(looks: dict[str, Tensor], batch: Batch) -> list[str]:
    """A sentence on reads that are NaN or infinite somewhere."""
    bad = [name for name, x in looks.items() if not bool(x[batch.valid].isfinite().all())]
    return [f"NaN or infinite, so without a prediction at some positions: {', '.join(bad)}."] if bad else []


def _notes(
    model: Transformer, batch: Batch, followed: Tensor | None, last: str | int | None, known: Tensor
) -> list[str]:
    n, every = int(known.sum()), int(batch.valid.sum())
    if followed is not None:
        what = f"Loss and rank are those of {_named(model, followed)}, over n = {n} positions"
    elif n:
        what = f"Loss and rank are those of the true next token, over n = {n} positions that have one"
    elif model.cfg.causal:
        what = "There is no loss: no position has a next token to predict"
    else:
        what = "There is no next-token loss: this model sees both sides, so that the token at each position is followed"
    where = "the last position" if len(batch.tokens) == 1 else "the last position of the first sequence"
    end = "the likeliest" if last is None else repr(word(model, token_id(model, last)))
    at_end = followed is None and model.cfg.causal
    said = [
        *([f"At the last position, which has no true next token, {end} is followed."] if at_end else []),
        f"{what}; entropy and KL are means over n = {every} positions; padding is left out.",
        f"Top token and probability are those at {where}.",
        "Each read goes through the final norm at its own scale, and the unembedding. KL is from the model's own "
        'prediction (the read "out") to the lens.',
    ]
    if isinstance(model.residual, HyperConnected):
        said.append(
            'Streams are taken after each block as the readout would take them; "all" is the readout\'s own mixture of '
            "them there. Reads at sublayers are mixtures of streams."
        )
    if model.ln_final.cfg.kind == "none":
        said.append("The final norm of this model divides by nothing, so a lens on a read keeps the read's size.")
    return [*said, *batch.notices]


def _named(model: Transformer, followed: Tensor) -> str:
    """What is followed, in words."""
    first = int(followed[0])
    return repr(word(model, first)) if bool((followed == first).all()) else "one token for each sequence"


def _record(model: Transformer, batch: Batch) -> tuple[ForwardRecord, list[Tensor]]:
    """The record of a pass, and in Hyper-Connections the streams [B, T, n, D] after every block."""
    if not isinstance(model.residual, HyperConnected):
        return model.record(batch.tokens, batch.mask), []
    record = ForwardRecord()
    names = [f"blocks.{layer}.hook_streams_post" for layer in range(model.cfg.n_layers)]
    _, tensors = model.run_with_cache(
        batch.tokens, batch.mask, names_filter=names, return_cache_object=False, record=record
    )
    return record, [tensors[name] for name in names]


def _stream_reads(residual: Any, state: Tensor) -> dict[str, Tensor]:
    """name -> [B, T, D]: what the readout would read of each stream alone, and of all of them ("all")."""
    site = residual.sites[-1]
    weights = residual.read_gates(state, site)["weights"]
    one = torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
    alone = {f"stream{i}": residual.read(state, site, {"weights": weights * row}) for i, row in enumerate(one)}
    return {**alone, "all": residual.read(state, site, {"weights": weights})}


def _measure(
    model: Transformer, batch: Batch, last: Tensor, looks: list[Tensor], wanted: Tensor, known: Tensor, top: int
) -> dict[str, Tensor]:
    """Every number of every look: [look, B, T] (top_*: [look, B, T, top]), a few positions at a time."""
    shape = (len(looks), *batch.tokens.shape)
    found = {name: last.new_full(shape, torch.nan, dtype=torch.float64) for name in _MEANING}
    found["top_probability"] = last.new_full((*shape, top), torch.nan, dtype=torch.float64)
    found["top_id"] = last.new_full((*shape, top), -1, dtype=torch.int64)
    rows, columns = batch.valid.nonzero(as_tuple=True)
    parts = list(chunks(model, len(rows)))
    total = len(parts) * len(looks)
    for step in progress(range(total), "Logit lens", total):
        chunk, i = parts[step // len(looks)], step % len(looks)
        at = (rows[chunk], columns[chunk])
        if i == 0:
            final, target, has = lens(model, last[at]), wanted[at], known[at]
            there = target >= 0
        own = final if looks[i] is last else lens(model, looks[i][at])
        values = lens_values(own, final, target.clamp(min=0))
        logprob = torch.where(there, values.pop("logprob"), torch.nan)
        values["rank"] = torch.where(there, values["rank"], torch.nan)
        values |= {"probability": logprob.exp(), "loss": torch.where(has, -logprob, torch.nan), "entropy": entropy(own)}
        best = own.topk(top, dim=-1)
        values |= {"top_probability": best.values.exp(), "top_id": best.indices.masked_fill(best.values.isnan(), -1)}
        for name, value in values.items():
            found[name][i][at] = value
    return found


def _row(
    name: str, batch: Batch, look: dict[str, Tensor], known: Tensor, ranked: Tensor, words: dict[int, str]
) -> tuple[Value, ...]:
    """The row of one look in the table."""
    end = (0, int(batch.valid[0].nonzero()[-1]))  # the last token of the first sequence
    return (
        name,
        words[int(look["top_id"][end][0])],
        float(look["top_probability"][end][0]),
        float(look["loss"][known].mean()) if bool(known.any()) else None,
        float(look["rank"][ranked].median()) if bool(ranked.any()) else None,
        float(look["entropy"][batch.valid].mean()),
        float(look["kl"][batch.valid].mean()),
    )

"""Statistics of a corpus without storing activations: what depth weights, gates and norms do over all its tokens.

Mean, spread and quantiles of every number, by position and by token, and what it follows (the shares of
`t2lens.analysis.content_dependence`), in one pass: tokens come and go, and only sums stay (`tally.Tally`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from t2lens.analysis.inputs import read_batch
from t2lens.analysis.progress import progress
from t2lens.store.memory import last_layer, taking
from t2lens.store.packing import describe, token_rows
from t2lens.store.plan import fingerprint
from t2lens.store.reader import Store
from t2lens.store.report import report
from t2lens.store.tally import Tally, add_pass, parts_of
from t2lens.store.wants import read_wants

if TYPE_CHECKING:
    from t2lens.analysis.finding import Finding
    from t2lens.model import Transformer

__all__ = ["statistics", "tally"]

_WHAT = ("depth weights", "gates", "residual norms")


def statistics(
    source: Transformer | Store,
    input: Any = None,
    *,
    what: str | Sequence[str] | None = None,
    n_tokens: int = 20,
    by_token: bool = True,
    attention_mask: Any = None,
    field: str = "text",
    batch_size: int = 8,
) -> Finding:
    """Mean, spread, quantiles and shares of every depth weight, gate and norm over a corpus or a store.

    Args:
        source: a model, which runs over `input`; or a `Store`, whose tokens are counted.
        input: of a model: a text, texts (also an iterator, of any length), token ids with their attention_mask, or a
            `Path` to a corpus as in `t2lens.store.documents`, which is packed into sequences of the context; None: the
            bundled passages.
        what: names, globs, roles, reducers, as in `t2lens.capture` (a model), or keys and globs (a store). Default:
            depth weights, gates and residual norms; of a store everything with a number or few per token.
        n_tokens: how many of the most frequent tokens have a mean of their own in the result.
        by_token: False spares the memory of sums by token (the vocabulary times the columns); then there are no shares.
        field: of a jsonl or parquet corpus. batch_size: sequences per pass.

    Returns:
        Finding with, where there are such: weight_* (read, source), norm_* (read) and other_* (entry), each as mean,
        std, min, max, quantile (q), mean_by_pos and std_by_pos (pos), mean_by_token (token), and part_share (part), the
        share of each entry's second moment around the mean of its read or tensor; share (read, part) for all sources of
        a read together. Moments are exact but for rounding; quantiles as near as `t2lens.store.moments.Histogram` says.

    Raises:
        ValueError: nothing of what was asked, a tensor that has no row per token or too many numbers, or bad input.

    Example:
        >>> import t2lens
        >>> from t2lens.store import statistics
        >>> found = statistics(t2lens.load("attnres-full"), ["In the beginning God created the heaven."])
        >>> round(float(found["weight_mean"].sel(read="3.mlp").sum()), 4), found["norm_mean"].dims
        (1.0, ('read',))
    """
    seen = tally(
        source,
        input,
        what=what,
        by_token=by_token,
        attention_mask=attention_mask,
        field=field,
        batch_size=batch_size,
    )
    return report(seen, source, n_tokens=n_tokens)


def tally(
    source: Transformer | Store,
    input: Any = None,
    *,
    what: str | Sequence[str] | None = None,
    by_token: bool = True,
    attention_mask: Any = None,
    field: str = "text",
    batch_size: int = 8,
    rank: int = 0,
    world: int = 1,
) -> Tally:
    """What `statistics` counts, of share `rank` of `world` workers: `a.merge(b)` puts shares together, and `report`
    makes a Finding of the whole. Arguments as in `statistics`."""
    if not 0 <= rank < world or batch_size < 1:
        raise ValueError(f"rank must lie in 0..{world - 1} and batch_size be at least 1, not {rank} and {batch_size}.")
    if isinstance(source, Store):
        if input is not None:
            raise ValueError("A store has its tokens; statistics of it take no input.")
        return _of_store(source, what, by_token, rank, world)
    groups = _groups(source, input, attention_mask, field, batch_size)
    return _of_model(source, groups, what or _WHAT, by_token, rank, world)


# --- counting


def _of_store(store: Store, what: str | Sequence[str] | None, by_token: bool, rank: int, world: int) -> Tally:
    from t2lens.store.tallies import store_keys

    n_pos, keys = store.plan.n_pos, store_keys(store, what)
    parts = tuple(part for part, _ in parts_of({key: store.about(key) for key in keys}, n_pos))
    n_vocab = len(store.vocabulary or ()) or 1 + max(int(store["tokens"][int(i)].max()) for i in store.sequences)
    seen = Tally(parts, n_pos, n_vocab, model=store.plan.model["sha256"], by_token=by_token)
    size = max(1, 2**24 // max(1, 8 * sum(len(part.names) for part in parts)))
    batches = store.batches(keys, size, seed=None, mixing=size, rank=rank, world=world)
    for batch in progress(batches, "Reading the store"):
        seen.add(batch, batch["token"], batch["pos"])
        seen.n_sequences += int((batch["pos"] == 0).sum())
    return seen


@torch.no_grad()
def _of_model(
    model: Transformer,
    groups: Iterable[tuple[Tensor, Tensor | None]],
    what: str | Sequence[str],
    by_token: bool,
    rank: int,
    world: int,
) -> Tally:
    wants = read_wants(model, what)
    n = min(model.cfg.n_ctx, 256)
    tensors = describe(model, wants, n)
    found = parts_of({want.key: tensors[want.key] for want in wants}, n)
    parts, axes = tuple(part for part, _ in found), {part.key: axis for part, axis in found}
    seen = Tally(parts, model.cfg.n_ctx, model.cfg.d_vocab, model=fingerprint(model), by_token=by_token)
    stop = last_layer(wants)
    with taking(model, wants) as tap:
        for tokens, mask in progress(islice(groups, rank, None, world), "Running the model"):
            model(tokens, mask, stop_at_layer=stop)
            valid = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
            add_pass(seen, tap.pop(), axes, tokens, valid)
    if not seen.n:
        raise ValueError("There is no text to make statistics of.")
    return seen


def _groups(
    model: Transformer, input: Any, attention_mask: Any, field: str, batch_size: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """(ids [B, T], mask) of a few sequences at a time."""
    if isinstance(input, Path):
        yield from _packed(model, input, field, batch_size)
        return
    if input is None:
        from t2lens.zoo.text import sample_texts

        input = sample_texts()
    texts = [input] if isinstance(input, str) else input
    is_ids = isinstance(texts, Tensor | np.ndarray) or (
        isinstance(texts, list | tuple) and not (texts and isinstance(texts[0], str))
    )
    if is_ids:
        batch = read_batch(model, texts, attention_mask)
        for start in range(0, len(batch.tokens), batch_size):
            rows = slice(start, start + batch_size)
            yield batch.tokens[rows], None if batch.mask is None else batch.mask[rows]
        return
    stream = iter(texts)
    while some := list(islice(stream, batch_size)):
        batch = read_batch(model, some)
        yield batch.tokens, batch.mask


def _packed(model: Transformer, corpus: Path, field: str, batch_size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The documents of a corpus one after the other, cut into sequences of the context; the last one is padded."""
    n, held = batch_size * model.cfg.n_ctx, np.zeros(0, np.int64)
    device = model.W_E.device
    for ids, _ in token_rows(model, corpus, field):
        held = np.concatenate([held, np.asarray(ids, np.int64)])
        while len(held) >= n:
            yield torch.from_numpy(held[:n]).view(batch_size, -1).to(device), None
            held = held[n:]
    if len(held):
        rows = -(-len(held) // model.cfg.n_ctx)
        tokens = np.zeros(rows * model.cfg.n_ctx, np.int64)
        tokens[: len(held)] = held
        mask = torch.arange(len(tokens)) < len(held)
        yield torch.from_numpy(tokens).view(rows, -1).to(device), mask.view(rows, -1).to(device)

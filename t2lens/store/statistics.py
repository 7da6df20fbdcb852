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
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding, Value
from t2lens.analysis.inputs import read_batch
from t2lens.analysis.progress import progress
from t2lens.analysis.variance import PARTS
from t2lens.store.batches import POSITIONS, row_axis
from t2lens.store.memory import capture_size, last_layer, taking
from t2lens.store.moments import Histogram
from t2lens.store.plan import fingerprint, tensor_about, token_rows
from t2lens.store.reader import Store
from t2lens.store.tally import MOST, Part, Tally
from t2lens.store.views import union
from t2lens.store.wants import read_wants

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["report", "statistics", "tally"]

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_WHAT = ("depth weights", "gates", "residual norms")
_NAMES = {"weight": "depth weights", "norm": "lengths of reads", "other": "gates and other numbers per token"}


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
    from t2lens.hooks import resolve_names

    n_pos = store.plan.n_pos
    if what is None:
        keys = [key for key in store if row_axis(store[key], n_pos) and not key.endswith("|index")]
        keys = [key for key in keys if store[key].dtype.is_floating_point]
        keys = [key for key in keys if np.prod(store[key].shape[1:], dtype=np.int64) // n_pos <= MOST]
    else:
        names = [what] if isinstance(what, str) else what
        keys = list(dict.fromkeys(key for name in names for key in resolve_names(name, list(store))))
    if not keys:
        raise ValueError("Nothing in this store has a number, or few, per token; name keys (what).")
    parts = tuple(Part.of(key, store.about(key), row_axis(store[key], n_pos)) for key in keys)
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
    size = capture_size(model, [want.key for want in wants], 1, n)
    parts, axes = [], {}
    for want in wants:
        about = tensor_about(model, want, n)
        if not set(about["axes"]) & set(POSITIONS) or "key_pos" in about["axes"] or "pos" in about.get("labels", {}):
            raise ValueError(
                f"{want.key} ({', '.join(about['axes'])}) has no row of fixed size for every token; use reducers "
                "(mean:AXIS, top:K) that leave one."
            )
        axes[want.key] = next(i for i, word in enumerate(about["axes"], 1) if word in POSITIONS)
        about["shape"] = list(size.shapes[want.key][1:])
        parts.append(Part.of(want.key, about, axes[want.key]))
    n_ctx, n_vocab = model.cfg.n_ctx, model.cfg.d_vocab
    seen = Tally(tuple(parts), n_ctx, n_vocab, model=fingerprint(model), by_token=by_token)
    stop = last_layer(wants)
    with taking(model, wants) as tap:
        for tokens, mask in progress(islice(groups, rank, None, world), "Running the model"):
            model(tokens, mask, stop_at_layer=stop)
            taken = tap.pop()
            valid = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
            rows = {key: taken[key].movedim(axis, 1)[valid] for key, axis in axes.items()}
            seen.add(rows, tokens[valid], (valid.cumsum(dim=1) - 1)[valid])
            seen.n_sequences += int(valid.any(dim=1).sum())
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
    for ids in token_rows(model, corpus, field):
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


# --- telling


def report(seen: Tally, source: Transformer | Store, *, n_tokens: int = 20) -> Finding:
    """A Finding of a tally; source: the model or the store, for the strings of tokens. See `statistics`."""
    frequent: np.ndarray = np.zeros(0, int)
    if seen.by_token is not None:
        order = np.argsort(-seen.by_token.n, kind="stable")[:n_tokens]
        frequent = order[seen.by_token.n[order] > 0]
    out = _Report(seen, frequent)
    for family in _NAMES:
        out.put(family)
    return out.finding(_strings(source, frequent))


def _strings(source: Transformer | Store, ids: np.ndarray) -> list[str]:
    if isinstance(source, Store):
        return source.token_strings(ids).tolist()
    return [str(i) if source.tokenizer is None else source.tokenizer.str_token(int(i)) for i in ids]


class _Report:
    """The dataset and the table, family by family."""

    def __init__(self, seen: Tally, frequent: np.ndarray) -> None:
        self.seen, self.frequent = seen, frequent
        self.of = {f: [part for part in seen.parts if part.family == f] for f in _NAMES}
        self.reads = union([[part.about["read"] for part in seen.parts if part.family != "other"]])
        labels = [part.about["labels"]["source"] for part in self.of["weight"]]
        self.sources = union(labels)
        self.entries = [part.key + name for part in self.of["other"] for name in part.names]
        self.explained = seen.explained()
        self.quantiles = seen.quantiles(QUANTILES)
        self.n_pos = int(np.flatnonzero(seen.by_pos.n).max()) + 1
        self.vars: dict[str, Any] = {}
        self.rows: list[tuple[Value, ...]] = []

    def put(self, family: str) -> None:
        parts = self.of[family]
        if not parts:
            return
        seen, first = self.seen, {"weight": ("read", "source"), "norm": ("read",), "other": ("entry",)}[family]
        unit = str(parts[0].about.get("unit", "")) if len({p.about.get("unit") for p in parts}) == 1 else ""

        def add(name: str, values: np.ndarray, dims: tuple[str, ...], meaning: str, unit: str = unit) -> None:
            self.vars[f"{family}_{name}"] = (
                (*first, *dims),
                self._laid_out(family, values),
                {"meaning": f"{meaning} ({_NAMES[family]})", "unit": unit},
            )

        add("mean", seen.total.mean[0], (), "mean over tokens")
        add("std", seen.total.std()[0], (), "standard deviation over tokens")
        add("min", seen.low, (), "least")
        add("max", seen.high, (), "greatest")
        add("quantile", self.quantiles, ("q",), f"quantiles, each within {Histogram.error:.1%}")
        add("mean_by_pos", seen.by_pos.means()[: self.n_pos].T, ("pos",), "mean by position in the sequence")
        add("std_by_pos", seen.by_pos.std()[: self.n_pos].T, ("pos",), "standard deviation by position")
        if seen.by_token is not None and self.explained is not None:
            add("mean_by_token", seen.by_token.means()[self.frequent].T, ("token",), "mean by token, the most frequent")
            with np.errstate(invalid="ignore", divide="ignore"):
                shares = [x.adjusted / np.where(x.total > 0, x.total, np.nan)[:, None] for x in self.explained.values()]
            add("part_share", np.concatenate(shares), ("part",), "share of the second moment", "share")
            if family != "other":
                self._shares(family)
        self._table(family)

    def _laid_out(self, family: str, values: np.ndarray) -> np.ndarray:
        """values [C, ...] over the axes of the family; NaN where there is no such entry."""
        parts, columns = self.of[family], self.seen.columns
        if family == "other":
            return np.concatenate([values[columns[part.key]] for part in parts])
        shape = (len(self.reads), len(self.sources)) if family == "weight" else (len(self.reads),)
        out = np.full((*shape, *values.shape[1:]), np.nan)
        for part in parts:
            at = self.reads.index(part.about["read"])
            own = values[columns[part.key]]
            if family == "norm":
                out[at] = own[0]
            else:
                out[at, [self.sources.index(name) for name in part.about["labels"]["source"]]] = own
        return out

    def _shares(self, family: str) -> None:
        assert self.explained is not None
        out = np.full((len(self.reads), len(PARTS)), np.nan)
        for part in self.of[family]:
            out[self.reads.index(part.about["read"])] = self.explained[part.key].shares()
        name, of = (
            ("share", "all sources of a read together") if family == "weight" else ("norm_share", "of its length")
        )
        meaning = f"share of the second moment around the mean of the read, adjusted for chance, {of}"
        self.vars[name] = (("read", "part"), out, {"meaning": meaning, "unit": "share"})

    def _table(self, family: str) -> None:
        seen, rows = self.seen, []
        low, middle, high = (QUANTILES.index(q) for q in (0.05, 0.5, 0.95))
        for part in self.of[family]:
            own = seen.columns[part.key]
            read = part.about.get("read")
            shares = None if self.explained is None else self.explained[part.key]
            for i, name in enumerate(part.names, start=own.start):
                label = f"length of {read}" if family == "norm" else part.key + name
                if family == "weight":
                    label = f"{read} <- {part.about['labels']['source'][i - own.start]}"
                row: list[Value] = [label, float(seen.total.mean[0, i]), float(seen.total.std()[0, i])]
                row += [float(self.quantiles[i, q]) for q in (low, middle, high)]
                own_shares = np.full(len(PARTS), np.nan)
                if shares is not None:
                    one = i - own.start
                    own_shares = shares.shares(slice(one, one + 1))
                row += [None if np.isnan(share) else float(share) for share in own_shares[1:]]
                rows.append(tuple(row))
        self.rows += sorted(rows, key=lambda row: -float(row[2]))  # what moves most comes first

    def finding(self, strings: list[str]) -> Finding:
        seen = self.seen
        coords: dict[str, Any] = {"q": np.array(QUANTILES), "pos": np.arange(self.n_pos)}
        coords |= {"read": np.array(self.reads, dtype=object), "source": np.array(self.sources, dtype=object)}
        coords |= {"entry": np.array(self.entries, dtype=object), "part": np.array(PARTS, dtype=object)}
        coords["token"] = np.array(strings, dtype=object)
        used = {dim for dims, *_ in self.vars.values() for dim in dims}
        coords = {name: values for name, values in coords.items() if name in used}
        if "token" in coords:
            coords["token_id"] = ("token", self.frequent)
            assert seen.by_token is not None
            coords["token_count"] = ("token", seen.by_token.n[self.frequent])
        coords["pos_count"] = ("pos", seen.by_pos.n[: self.n_pos])
        return Finding(
            title=f"Statistics over {seen.n} tokens of {seen.n_sequences} sequence(s)",
            dataset=xr.Dataset(self.vars, coords=coords),
            columns=("of", "mean", "std", "5%", "median", "95%", *(f"{part} share" for part in PARTS[1:])),
            rows=tuple(self.rows),
            notes=tuple(self._notes()),
            charts=tuple(self._charts()),
        )

    def _notes(self) -> Iterator[str]:
        seen = self.seen
        yield f"n = {seen.n} tokens of {seen.n_sequences} sequence(s), padding left out; std divides by n."
        yield (
            "Means, deviations and shares are exact but for rounding (Chan, Golub and LeVeque's merge); each quantile "
            f"is within {Histogram.error:.1%} of the value of its rank."
        )
        if self.explained is None:
            yield "Nothing was counted by token, so there are no shares."
        else:
            yield (
                "Shares are of sum (y - mean of the read or tensor)^2, as in content_dependence: token identity, then "
                "what position explains beyond it, then the rest (context), adjusted for chance; what is left of 1 is "
                "the fixed profile (site). Position is that in the sequence, not in its document."
            )

    def _charts(self) -> Iterator[Chart]:
        if self.of["weight"]:
            signed = bool((np.nan_to_num(self.vars["weight_mean"][1]) < 0).any())
            yield Chart(kind="heat", variable="weight_mean", x="source", y="read", signed=signed, title="Mean weight")
            yield Chart(kind="heat", variable="weight_std", x="source", y="read", title="How far weights move")
            if self.explained is not None:
                yield Chart(kind="stack", variable="share", x="read", by="part", title="What the weights follow")
        if self.of["norm"]:
            yield Chart(kind="bars", variable="norm_mean", x="read", title="Mean length of every read")
        if self.of["other"]:
            yield Chart(kind="bars", variable="other_mean", x="entry", title="Mean gate")
        if self.of["norm"]:
            yield Chart(kind="heat", variable="norm_mean_by_pos", x="pos", y="read", title="Length by position")

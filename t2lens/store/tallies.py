"""Statistics as a run on disk: a shard holds the tally of its sequences, and all of them, merged in order, are what one
worker would have counted. So any launcher and any number of workers give the same numbers to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from t2lens.analysis.progress import progress
from t2lens.files import read_arrays, write_file
from t2lens.store.batches import row_axis
from t2lens.store.memory import last_layer, taking
from t2lens.store.packing import digests, new_run, put, statistics_per_shard
from t2lens.store.plan import Plan, read_plan
from t2lens.store.reader import Store
from t2lens.store.report import report
from t2lens.store.tally import Tally, add_pass, parts_of
from t2lens.store.wants import Want, read_wants
from t2lens.store.worker import directions_of, missing, shard_file

if TYPE_CHECKING:
    from t2lens.analysis.finding import Finding
    from t2lens.model import Transformer

__all__ = ["make_statistics_run", "read_statistics", "read_tally", "store_keys", "tally_maker"]

_READ = 2**26  # bytes of a store that are in memory at a time, about


def make_statistics_run(
    store: Store,
    out: str | Path,
    what: str | Sequence[str] | None = None,
    *,
    by_token: bool = True,
    sequences_per_shard: int | None = None,
) -> Path:
    """Write the folder of a run that counts over a store, which must be finished; `run_shards(store, run)` makes its
    shards. (`make_run(..., statistics=True)` plans one that counts while a model runs.)

    Args:
        out: folder in which the run's folder is made. what: keys and globs; default: everything with few numbers per
        token. by_token, sequences_per_shard: as in `make_run`.

    Raises:
        ValueError: a store that is not finished, nothing to count, or a tensor that has no statistics.
    """
    of = store.plan
    if store.missing:
        raise ValueError(f"{len(store.missing)} of {of.n_shards} shards of {store.path} are not there yet.")
    if sequences_per_shard is not None and sequences_per_shard < 1:
        raise ValueError(f"sequences_per_shard must be at least 1, not {sequences_per_shard}.")
    keys = store_keys(store, what)
    tensors = {key: dict(store.about(key)) for key in keys}
    parts_of(tensors, of.n_pos)
    vocabulary = store.vocabulary
    n_vocab = len(vocabulary or ()) or 1 + max(int(store["tokens"][int(i)].max()) for i in store.sequences)
    with new_run(out) as folder:
        if vocabulary is not None:
            write_file(folder / "vocabulary.json", json.dumps(vocabulary).encode())
        plan = Plan(
            model=of.model,
            files=digests(folder),
            n_sequences=of.n_sequences,
            n_pos=of.n_pos,
            n_documents=of.n_documents,
            what=tuple(keys),
            dtype=of.dtype,
            tensors=tensors,
            sequences_per_shard=sequences_per_shard or statistics_per_shard(of.n_sequences, of.n_pos),
            batch_size=of.batch_size,
            threads=of.threads,
            device="cpu",
            statistics={"by_token": by_token, "n_vocab": n_vocab, "store": of.name},
        )
        return put(folder, plan, Path(out))


def store_keys(store: Store, what: str | Sequence[str] | None) -> list[str]:
    """The keys that statistics of a store are of. ValueError where there are none."""
    from t2lens.hooks import resolve_names

    n_pos = store.plan.n_pos
    if what is None:
        from t2lens.store.tally import MOST

        keys = [key for key in store if row_axis(store[key], n_pos) and not key.endswith("|index")]
        keys = [key for key in keys if store[key].dtype.is_floating_point]
        keys = [key for key in keys if np.prod(store[key].shape[1:], dtype=np.int64) // n_pos <= MOST]
    else:
        names = [what] if isinstance(what, str) else what
        keys = list(dict.fromkeys(key for name in names for key in resolve_names(name, list(store))))
    if not keys:
        raise ValueError("Nothing in this store has a number, or few, per token; name keys (what).")
    return keys


def read_statistics(run: str | Path, *, n_tokens: int = 20) -> Finding:
    """The Finding of a run of statistics that is finished; see `t2lens.store.statistics.statistics`.

    Raises ValueError: no such run, one of captures, or one that is not finished or is damaged.

    Example:
        >>> import tempfile, t2lens
        >>> from t2lens.store import collect, read_statistics
        >>> texts = ["In the beginning God created the heaven and the earth."] * 4
        >>> what = ["depth weights", "residual norms"]
        >>> model = t2lens.load("attnres-full")
        >>> run = collect(model, texts, tempfile.mkdtemp(), what, n_pos=16, statistics=True, quiet=True)
        >>> round(float(read_statistics(run)["weight_mean"].sel(read="3.mlp").sum()), 4)
        1.0
    """
    return report(read_tally(run), vocabulary_of(Path(run)), n_tokens=n_tokens)


def vocabulary_of(run: Path) -> list[str] | None:
    file = run / "vocabulary.json"
    return json.loads(file.read_bytes()) if file.is_file() else None


def read_tally(run: str | Path) -> Tally:
    """All shards of a run of statistics, merged. Raises as `read_statistics`."""
    run = Path(run)
    plan = read_plan(run)
    if plan.statistics is None:
        raise ValueError(f"{run} is a run of captures, not of statistics; t2lens store stats makes those of it.")
    left = missing(run)
    if left:
        raise ValueError(f"{len(left)} of {plan.n_shards} shards of {run} are not there yet; t2lens capture goes on.")
    whole = _empty(plan)
    for shard in progress(range(plan.n_shards), "merging", plan.n_shards):
        file = shard_file(run, shard)
        try:
            whole.merge(_from_arrays(read_arrays(file)[0], plan))
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}); t2lens store check says more.") from None
    return whole


# --- one shard


def tally_maker(
    source: Transformer | Store, run: Path, plan: Plan, tokens: np.ndarray | None
) -> Callable[[int], dict[str, Any]]:
    """What makes the tensors of a shard; source: the model, or the store that the plan names."""
    if isinstance(source, Store):
        return lambda shard: _tensors_of(_of_store(source, plan, shard))
    assert tokens is not None
    directions = directions_of(run, plan)
    wants = read_wants(source, plan.what, directions)
    return lambda shard: _tensors_of(_of_model(source, plan, wants, directions, tokens, shard))


def _empty(plan: Plan) -> Tally:
    assert plan.statistics is not None
    parts = tuple(part for part, _ in parts_of({key: plan.tensors[key] for key in plan.what}, plan.n_pos))
    by_token, n_vocab = plan.statistics["by_token"], plan.statistics["n_vocab"]
    return Tally(parts, plan.n_pos, n_vocab, model=plan.model["sha256"], by_token=by_token)


@torch.inference_mode()
def _of_model(
    model: Transformer,
    plan: Plan,
    wants: Sequence[Want],
    directions: Mapping[str, Tensor],
    tokens: np.ndarray,
    shard: int,
) -> Tally:
    seen, rows = _empty(plan), plan.rows(shard)
    axes = {part.key: axis for part, axis in parts_of({key: plan.tensors[key] for key in plan.what}, plan.n_pos)}
    stop, ids = last_layer(wants), torch.from_numpy(np.asarray(tokens[rows.start : rows.stop]).astype(np.int64))
    with taking(model, wants, directions=directions) as tap:
        for start in range(0, len(ids), plan.batch_size):
            part = ids[start : start + plan.batch_size].to(model.W_E.device)
            model(part, stop_at_layer=stop)
            add_pass(seen, tap.pop(), axes, part, torch.ones_like(part, dtype=torch.bool))
    return seen


def _of_store(store: Store, plan: Plan, shard: int) -> Tally:
    seen, rows = _empty(plan), plan.rows(shard)
    axes = {part.key: row_axis(store[part.key], plan.n_pos) for part in seen.parts}
    size = max(1, _READ // max(1, 8 * plan.n_pos * sum(len(part.names) for part in seen.parts)))
    for start in range(rows.start, rows.stop, size):
        own = slice(start, min(start + size, rows.stop))
        taken = {part.key: store[part.key][own] for part in seen.parts}
        ids = store["tokens"][own].long()
        add_pass(seen, taken, axes, ids, torch.ones_like(ids, dtype=torch.bool))
    return seen


def _tensors_of(tally: Tally) -> dict[str, Tensor]:
    """A tally as tensors, without what is zero: FORMAT.md describes them."""
    arrays = {
        "sequences": np.array([tally.n_sequences]),
        "total.n": tally.total.n,
        "total.mean": tally.total.mean,
        "total.m2": tally.total.m2,
        "pos.n": tally.by_pos.n,
        "pos.mean": tally.by_pos.mean,
        "pos.m2": tally.by_pos.m2,
        "least": tally.low,
        "greatest": tally.high,
        "histogram.first": np.array([tally.histogram.low]),
        "histogram.counts": tally.histogram.counts,
    }
    if tally.by_token is not None and tally.count is not None:
        ids = np.flatnonzero(tally.by_token.n)
        arrays |= {
            "token.id": ids,
            "token.n": tally.by_token.n[ids],
            "token.mean": tally.by_token.mean[ids],
            "token.m2": tally.by_token.m2[ids],
        }
        at = np.nonzero(tally.count)
        arrays |= {"count.id": at[0], "count.pos": at[1], "count.n": tally.count[at]}
        arrays |= {name: arrays[name].astype(np.int32) for name in ("count.id", "count.pos", "count.n")}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _from_arrays(arrays: dict[str, np.ndarray], plan: Plan) -> Tally:
    tally = _empty(plan)
    tally.n_sequences = int(arrays["sequences"][0])
    for moments, name in ((tally.total, "total"), (tally.by_pos, "pos")):
        moments.n[:], moments.mean[:], moments.m2[:] = (arrays[f"{name}.{of}"] for of in ("n", "mean", "m2"))
    tally.low, tally.high = arrays["least"].copy(), arrays["greatest"].copy()
    tally.histogram.low, tally.histogram.counts = int(arrays["histogram.first"][0]), arrays["histogram.counts"].copy()
    if tally.by_token is not None and tally.count is not None:
        ids = arrays["token.id"]
        tally.by_token.n[ids], tally.by_token.mean[ids], tally.by_token.m2[ids] = (
            arrays[f"token.{of}"] for of in ("n", "mean", "m2")
        )
        tally.count[arrays["count.id"], arrays["count.pos"]] = arrays["count.n"]
    return tally

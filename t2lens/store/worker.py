"""The worker: runs the shards of a run that are its own and not there yet. The same function under every launcher.

A shard is written beside its place, synced and renamed; then its record, in the same way. Killed at any moment, what
has a record is whole, and the next start makes the rest. Which worker makes a shard changes no byte of it.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from t2lens.files import write_file
from t2lens.store.memory import last_layer, taking
from t2lens.store.plan import DTYPES, Plan, fingerprint, make_run, read_plan
from t2lens.store.wants import read_wants

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["collect", "committed", "run_shards", "shard_file"]


def collect(
    model: Transformer, source: Any, out: str | Path, what: str | Sequence[str], *, quiet: bool = False, **options: Any
) -> Path:
    """`make_run`, then every shard that is missing, in this process; returns the folder of the run. Called again with
    the same arguments after any interruption, it makes what is missing.

    Args:
        source, out, what, options: as in `make_run`. quiet: no progress bar.
    """
    from rich.console import Console
    from rich.progress import track

    run = make_run(model, source, out, what, **options)
    left = sum(committed(run, shard) is None for shard in range(read_plan(run).n_shards))
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    for _ in track(run_shards(model, run), "capturing", left, console=console, transient=True, disable=hidden):
        pass
    return run


def shard_file(run: Path, shard: int, suffix: str = "safetensors") -> Path:
    return run / "shards" / f"{shard:06d}.{suffix}"


def committed(run: Path, shard: int) -> dict[str, Any] | None:
    """The record of a shard, or None where it is not there (or damaged, and so must be made again)."""
    try:
        record = json.loads(shard_file(run, shard, "json").read_bytes())
        size = shard_file(run, shard).stat().st_size
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("bytes") == size else None


def run_shards(model: Transformer, run: str | Path, *, rank: int = 0, world: int = 1) -> Iterator[int]:
    """Make the shards rank, rank + world, ... of a run that have no record yet; yields each once it is committed.

    Raises:
        ValueError: the model is not the one of the plan, or the tokens are damaged. OSError: a full disk; what is
        committed stays, and the same call goes on when there is room.
    """
    run = Path(run)
    plan = read_plan(run)
    if fingerprint(model) != plan.model["sha256"]:
        raise ValueError(
            f"The run {run.name} was planned for other weights (or another config) than this model has; make a new run."
        )
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in 0..{world - 1}, not {rank}.")
    tokens = np.load(run / "tokens.npy", mmap_mode="r")
    if tokens.shape != (plan.n_sequences, plan.n_pos):
        raise ValueError(f"{run / 'tokens.npy'} is {list(tokens.shape)}, and the plan says otherwise; it is damaged.")
    mine = [shard for shard in range(rank, plan.n_shards, world) if committed(run, shard) is None]
    before = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    try:
        with _Writer(run) as writer:
            for shard in mine:
                rows = plan.rows(shard)
                writer.put(shard, rows, _forward(model, plan, np.asarray(tokens[rows.start : rows.stop])))
                yield from writer.finished()
        yield from writer.finished()
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def _forward(model: Transformer, plan: Plan, tokens: np.ndarray) -> dict[str, Tensor]:
    wants = read_wants(model, plan.what)
    shapes = {key: (len(tokens), *about["shape"]) for key, about in plan.tensors.items()}
    kept = {key: torch.empty(shape, dtype=getattr(torch, plan.tensors[key]["dtype"])) for key, shape in shapes.items()}
    ids, stop = torch.from_numpy(tokens.astype(np.int64)), last_layer(wants)
    dtype = None if plan.dtype is None else DTYPES[plan.dtype]
    with taking(model, wants, dtype=dtype, device="cpu") as tap:
        for start in range(0, len(ids), plan.batch_size):
            part = ids[start : start + plan.batch_size]
            model(part.to(model.W_E.device), stop_at_layer=stop)
            for key, tensor in tap.pop().items():
                kept[key][start : start + len(part)] = tensor
    kept["tokens"] = ids.to(torch.int32)
    return kept


class _Writer:
    """Writes shards in a thread of its own, at most one waiting, so that the next forward runs meanwhile."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._jobs: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._done: queue.Queue[int] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> _Writer:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._jobs.put(None)
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def put(self, shard: int, rows: range, tensors: dict[str, Tensor]) -> None:
        if self._error is not None:
            raise self._error
        self._jobs.put((shard, rows, tensors))

    def finished(self) -> Iterator[int]:
        while not self._done.empty():
            yield self._done.get()

    def _work(self) -> None:
        from safetensors.torch import save

        while (job := self._jobs.get()) is not None:
            if self._error is not None:
                continue  # the queue must empty, so that nobody waits for ever
            shard, rows, tensors = job
            try:
                data = save(tensors)
                write_file(shard_file(self.run, shard), data)
                record = {
                    "shard": shard,
                    "sequences": [rows.start, rows.stop],
                    "bytes": len(data),
                    "sha256": hashlib.sha256(data).hexdigest(),
                }
                write_file(shard_file(self.run, shard, "json"), (json.dumps(record) + "\n").encode())
                self._done.put(shard)
            except BaseException as error:
                self._error = error

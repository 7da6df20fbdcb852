"""The worker: makes shards of a run that are not there yet. The same function under every launcher.

A shard is written beside its place, synced and renamed; then its record, in the same way. Killed at any moment, what
has a record is whole, and the next start makes the rest. Which worker makes a shard changes no byte of it.
"""

from __future__ import annotations

import hashlib
import json
import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from t2lens.files import write_file, write_parts
from t2lens.store.memory import last_layer, taking
from t2lens.store.packing import make_run, read_directions
from t2lens.store.plan import DTYPES, SAFETENSORS, Plan, fingerprint, in_words, read_plan, sha256_of
from t2lens.store.wants import Want, read_wants

if TYPE_CHECKING:
    from t2lens.model import Transformer
    from t2lens.store.reader import Store

__all__ = [
    "check_room",
    "collect",
    "committed",
    "directions_of",
    "make_shards",
    "missing",
    "record_of",
    "run_shards",
    "shard_file",
]

_PIECE = 2**24  # bytes that are hashed and written at a time


def collect(
    model: Transformer, source: Any, out: str | Path, what: str | Sequence[str], *, quiet: bool = False, **options: Any
) -> Path:
    """`make_run`, then every shard that is missing, in this process; returns the folder of the run. Called again with
    the same arguments after any interruption, it makes what is missing.

    Args:
        source, out, what, options: as in `make_run`. quiet: no progress bar.

    Raises:
        ValueError: as `make_run`. OSError: too little room on the disk, said before anything runs, or a full disk.
    """
    from rich.console import Console
    from rich.progress import track

    run = make_run(model, source, out, what, **options)
    check_room(run)
    left = len(missing(run))
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
        record = record_of(shard_file(run, shard, "json").read_bytes())
        size = shard_file(run, shard).stat().st_size
    except OSError:
        return None
    own = record is not None and (record.get("bytes"), record.get("shard")) == (size, shard)
    return record if own else None


def record_of(data: bytes) -> dict[str, Any] | None:
    """What the record of a shard says, or None where it is damaged."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def missing(run: str | Path) -> list[int]:
    """The shards of a run that have no record yet."""
    return [shard for shard in range(read_plan(run).n_shards) if committed(Path(run), shard) is None]


def check_room(run: str | Path) -> None:
    """OSError, with the numbers, when what a run still has to write does not fit on its disk."""
    plan, run = read_plan(run), Path(run)
    need = sum(map(plan.bytes_of, missing(run)))
    free = shutil.disk_usage(run).free
    if need > free:
        raise OSError(
            f"This capture has {in_words(need)} to write ({plan.bytes_per_token:,.0f} bytes per token), and "
            f"{in_words(free)} are free on the disk of {run}; capture less (fewer names, reducers, a smaller dtype), "
            "or make room."
        )


def run_shards(model: Transformer | Store, run: str | Path, *, rank: int = 0, world: int = 1) -> Iterator[int]:
    """Make the shards rank, rank + world, ... of a run that have no record yet; yields each once it is committed.

    Raises as `make_shards`.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in 0..{world - 1}, not {rank}.")
    return make_shards(model, run, range(rank, read_plan(run).n_shards, world))


def make_shards(model: Transformer | Store, run: str | Path, shards: Iterable[int]) -> Iterator[int]:
    """Make those of `shards` that have no record yet; yields each once it is committed.

    model: that of the plan; of a run that counts over a store, the store.

    Raises:
        ValueError: the model is not the one of the plan, the tokens are damaged, or a shard of another run lies here.
        OSError: a full disk; what is committed stays, and the same call goes on when there is room.
    """
    run = Path(run)
    plan = read_plan(run)
    make = _maker(model, run, plan)
    (run / "shards").mkdir(exist_ok=True)
    before = torch.get_num_threads()
    with _Writer(run, plan) as writer:
        for shard in shards:
            record = committed(run, shard)
            if record is None:
                torch.set_num_threads(plan.threads)
                try:
                    writer.put(shard, make(shard))
                finally:
                    torch.set_num_threads(before)
            elif record.get("plan") != plan.name:
                raise ValueError(
                    f"{shard_file(run, shard, 'json')} belongs to another run ({record.get('plan')}); move it away."
                )
            yield from writer.finished()
    yield from writer.finished()


def _maker(model: Transformer | Store, run: Path, plan: Plan) -> Callable[[int], dict[str, Tensor]]:
    """What makes the tensors of a shard; ValueError where the model or the store is not the one of the plan."""
    from t2lens.store.reader import Store

    if isinstance(model, Store):
        of = None if plan.statistics is None else plan.statistics["store"]
        if of != model.plan.name:
            raise ValueError(f"The run {run.name} does not count over the store {model.plan.name}; make a new run.")
        tokens = None
    elif plan.statistics is not None and plan.statistics["store"]:
        raise ValueError(f"The run {run.name} counts over the store {plan.statistics['store']}: give that, no model.")
    else:
        tokens = _check(model, run, plan)
    if plan.statistics is not None:
        from t2lens.store.tallies import tally_maker

        return tally_maker(model, run, plan, tokens)
    assert tokens is not None and not isinstance(model, Store)
    directions = directions_of(run, plan)
    wants = read_wants(model, plan.what, directions)

    def make(shard: int) -> dict[str, Tensor]:
        rows = plan.rows(shard)
        return _forward(model, plan, wants, directions, np.asarray(tokens[rows.start : rows.stop]))

    return make


def directions_of(run: Path, plan: Plan) -> dict[str, Tensor]:
    """What reducers of a run project onto. ValueError where the file is not that of the plan."""
    name = "directions.safetensors"
    if name not in plan.files:
        return {}
    _check_file(run, plan, name)
    return read_directions(run / name)


def _check_file(run: Path, plan: Plan, name: str) -> None:
    file = run / name
    if not file.is_file() or sha256_of(file) != plan.files[name]:
        fault = "damaged" if file.is_file() else "missing"
        raise ValueError(f"{file} is {fault}; the same capture, given the corpus again, puts it back.")


def _check(model: Transformer, run: Path, plan: Plan) -> np.ndarray:
    """The tokens of a run, mapped; ValueError where they or the model are not those of the plan."""
    if fingerprint(model) != plan.model["sha256"]:
        raise ValueError(
            f"The run {run.name} was planned for other weights (or another config) than this model has; make a new run."
        )
    if model.W_E.device.type != plan.device:
        raise ValueError(
            f"The run {run.name} was planned for {plan.device!r}, which rounds otherwise than "
            f"{model.W_E.device.type!r}; put the model there, or make a new run."
        )
    _check_file(run, plan, "tokens.npy")
    return np.load(run / "tokens.npy", mmap_mode="r")


@torch.inference_mode()
def _forward(
    model: Transformer, plan: Plan, wants: Sequence[Want], directions: Mapping[str, Tensor], tokens: np.ndarray
) -> dict[str, Tensor]:
    device = model.W_E.device
    pinned = device.type == "cuda"
    kept = {
        key: torch.empty((len(tokens), *about["shape"]), dtype=getattr(torch, about["dtype"]), pin_memory=pinned)
        for key, about in plan.tensors.items()
    }
    ids, stop = torch.from_numpy(tokens.astype(np.int64)), last_layer(wants)
    dtype = None if plan.dtype is None else DTYPES[plan.dtype]
    with taking(model, wants, directions=directions, dtype=dtype) as tap:
        for start in range(0, len(ids), plan.batch_size):
            part = ids[start : start + plan.batch_size]
            model(part.to(device), stop_at_layer=stop)
            for key, tensor in tap.pop().items():
                kept[key][start : start + len(part)].copy_(tensor, non_blocking=pinned)
    if pinned:
        torch.cuda.current_stream(device).synchronize()  # copies to pinned memory run on after copy_ returns
    kept["tokens"] = ids.to(torch.int32)
    return kept


class _Writer:
    """Writes shards in a thread of its own, at most one waiting, so that the next forward runs meanwhile."""

    def __init__(self, run: Path, plan: Plan) -> None:
        self.run, self.plan = run, plan
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

    def put(self, shard: int, tensors: dict[str, Tensor]) -> None:
        if self._error is not None:
            raise self._error
        self._jobs.put((shard, tensors))

    def finished(self) -> Iterator[int]:
        while not self._done.empty():
            yield self._done.get()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is not None:
                continue  # the queue must empty, so that nobody waits for ever
            try:
                self._write(*job)
                self._done.put(job[0])
            except OSError as error:
                self._error = OSError(
                    error.errno,
                    f"{error.strerror}; what is committed stays, and the same capture goes on",
                    str(self.run),
                )
            except BaseException as error:
                self._error = error
            del job  # or this shard would stay in memory until the next one is there

    def _write(self, shard: int, tensors: dict[str, Tensor]) -> None:
        rows, total, n_bytes = self.plan.rows(shard), hashlib.sha256(), 0

        def parts() -> Iterator[bytes | memoryview]:
            nonlocal n_bytes
            for part in _safetensors(tensors, {"plan": self.plan.name, "shard": str(shard)}):
                total.update(part)
                n_bytes += len(part)
                yield part

        write_parts(shard_file(self.run, shard), parts())
        record = {
            "plan": self.plan.name,
            "shard": shard,
            "sequences": [rows.start, rows.stop],
            "bytes": n_bytes,
            "sha256": total.hexdigest(),
        }
        write_file(shard_file(self.run, shard, "json"), (json.dumps(record) + "\n").encode())


def _safetensors(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file, piece by piece: its own writer would hold the whole file once more. Wide dtypes come first,
    so that each tensor lies at a multiple of the size of its numbers."""
    order = sorted(tensors, key=lambda key: (-tensors[key].itemsize, key))
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for key in order:
        tensor = tensors[key]
        header[key] = {
            "dtype": SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little") + head
    for key in order:
        data = tensors[key].flatten().view(torch.uint8).numpy().data
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]

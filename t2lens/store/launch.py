"""Launchers: who runs the worker. None changes a byte of a run, in whatever number and however often they are killed.

local      in this process, or in several of this machine; those that die are started again
torchrun   the process is one of many that torchrun, srun or a job array started; ranks come from the environment
ray        actors of a Ray cluster (`ray_workers`)
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from t2lens.files import hold
from t2lens.store.worker import run_shards

if TYPE_CHECKING:
    from t2lens.model import Transformer
    from t2lens.store.reader import Store

__all__ = ["DEATHS", "LAUNCHERS", "ModelSource", "StoreSource", "launch", "once", "rank_and_world", "started_by_others"]

LAUNCHERS = ("local", "torchrun", "ray")
DEATHS = 10  # of workers, one after the other without a shard in between, and the run is given up
_TOGETHER = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")  # who was started
_RANKS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


@dataclass(frozen=True)
class ModelSource:
    """How a worker in another process comes by the model: as `t2lens.load` takes it."""

    name: str
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self, local_rank: int = 0) -> Transformer:
        """local_rank: of the workers of a machine, which share out its GPUs."""
        from t2lens.zoo.registry import load

        cuda = self.device == "cuda"
        device = f"cuda:{local_rank % max(1, torch.cuda.device_count())}" if cuda else self.device
        return load(self.name, device=device, **self.options)


@dataclass(frozen=True)
class StoreSource:
    """The same of a store, where statistics are counted over one: the folder of its run."""

    name: str

    def load(self, _local_rank: int = 0) -> Store:
        from t2lens.store.reader import Store

        return Store(self.name)


def once(out: Path, asked: Sequence[Any], source: Path, world: int, make: Callable[[], Path]) -> Path:
    """What `make` gives: the folder of a run in `out`. Of processes that were started together and ask for the same,
    one makes it (the tokenising of a corpus), while the others wait and take it.

    They meet at a file, as they know of nothing else that all see; the last of `world` removes it. Where the file
    system has no locks, each makes it.

    Args:
        asked: everything that decides what is made, apart from the content of `source`, a file or folder.
    """
    if world == 1:
        return make()
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(source.rglob("*")) if source.is_dir() else [source] if source.exists() else []
    seen = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    together = {name: os.environ.get(name, "") for name in _TOGETHER}
    key = hashlib.sha256(json.dumps([together, seen, list(asked)], default=str).encode()).hexdigest()[:16]
    meeting = out / f".new.{key}.tmp"
    with meeting.open("a+b") as file:
        hold(file.fileno())
        file.seek(0)
        name, _, others = file.read().decode().partition(" ")
        n = int(others or 0) + 1
        run = out / name
        if not name or not (run / "plan.json").is_file():
            run = make()
        file.truncate(0)
        file.write(f"{run.name} {n}".encode())
        if n == world:
            meeting.unlink(missing_ok=True)
    return run


def started_by_others() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank_and_world() -> tuple[int, int, int]:
    """(rank, world, local rank) of this process from RANK and WORLD_SIZE, or Slurm's; ValueError where neither is."""
    for rank, world in _RANKS:
        if rank in os.environ and world in os.environ:
            local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
            try:
                return int(os.environ[rank]), int(os.environ[world]), int(local)
            except ValueError:
                raise ValueError(f"{rank} and {world} in the environment must be whole numbers.") from None
    raise ValueError(
        "The launcher torchrun is for processes that torchrun or srun started: RANK and WORLD_SIZE are not in the "
        "environment. Try: torchrun --nproc-per-node 2 -m t2lens.cli capture ..."
    )


def launch(
    run: str | Path,
    launcher: str,
    source: ModelSource | StoreSource,
    *,
    workers: int = 1,
    model: Transformer | Store | None = None,
) -> Iterator[int]:
    """Make the shards of a run that have no record yet; yields each once it is committed (under torchrun: its own).

    Args:
        launcher: one of `LAUNCHERS`. source: where workers get the model (or the store that is counted over).
        workers: processes or actors. model: what the source loads, where it is loaded already.

    Raises:
        ValueError, OSError: as `make_shards`, whichever worker met it. RuntimeError: workers die again and again.
    """
    if workers < 1:
        raise ValueError(f"There must be at least 1 worker, not {workers}.")
    if launcher == "local" and workers == 1:
        return run_shards(source.load() if model is None else model, run)
    if launcher == "local":
        return _local(Path(run), source, workers)
    if launcher == "torchrun":
        rank, world, local_rank = rank_and_world()
        return run_shards(source.load(local_rank) if model is None else model, run, rank=rank, world=world)
    if launcher == "ray":
        from t2lens.store.ray_workers import run_on_ray

        return run_on_ray(Path(run), source, workers)
    raise ValueError(f"There is no launcher {launcher!r}; there are {', '.join(LAUNCHERS)}.")


def _local(run: Path, source: ModelSource | StoreSource, workers: int) -> Iterator[int]:
    """Processes that tell, each through a pipe of its own, which shards they have made."""
    context, deaths = multiprocessing.get_context("spawn"), 0

    def start(rank: int) -> tuple[Any, Connection]:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(run, source, rank, workers, theirs, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    running = {rank: start(rank) for rank in range(workers)}
    try:
        while running:
            ready = wait([pipe for _, pipe in running.values()])
            for rank, (process, pipe) in list(running.items()):
                if pipe not in ready:
                    continue
                try:
                    told = pipe.recv()
                except (EOFError, OSError):  # it has ended, in one way or the other
                    process.join()
                    del running[rank]
                    if process.exitcode:
                        deaths += 1
                        if deaths > DEATHS:
                            raise RuntimeError(f"{deaths} workers died one after the other; see above.") from None
                        running[rank] = start(rank)
                    continue
                if isinstance(told, Exception):
                    raise told
                deaths = 0
                yield told
    finally:
        for process, _ in running.values():
            process.terminate()
            process.join()


def _serve(run: Path, source: ModelSource | StoreSource, rank: int, world: int, pipe: Connection, parent: int) -> None:
    try:
        for shard in run_shards(source.load(rank), run, rank=rank, world=world):
            pipe.send(shard)
            if os.getppid() != parent:  # it was killed; nobody would know of this process
                return
    except (ValueError, KeyError, OSError) as error:
        pipe.send(error)
    except KeyboardInterrupt:
        pass  # the parent got it too

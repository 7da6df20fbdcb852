"""Actors of a Ray cluster, which take shards as they become free.

An actor that is not placed yet has no shards, so a cluster may grow (its autoscaler sees the actors that wait) and
shrink while a run goes on. What a dead actor had is given to another. Only numbers of shards travel: every actor reads
tokens and writes shards in the run's folder, which all machines must see under the same path.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from t2lens.store.launch import DEATHS, ModelSource, StoreSource
from t2lens.store.plan import read_plan
from t2lens.store.worker import make_shards, missing

__all__ = ["run_on_ray"]

_AT_ONCE = 4  # shards of a call: the next runs while the last is written


class _Actor:
    def __init__(self, run: Path, source: ModelSource | StoreSource) -> None:
        self.run, self.source, self.model = run, source, None

    def load(self) -> list[int]:
        """Here and not in __init__, where Ray would tell of an error only that the actor died."""
        self.model = self.source.load()
        return []

    def make(self, shards: list[int]) -> list[int]:
        assert self.model is not None
        return list(make_shards(self.model, self.run, shards))


def run_on_ray(run: Path, source: ModelSource | StoreSource, workers: int) -> Iterator[int]:
    """Make the missing shards of a run on the cluster that Ray finds (RAY_ADDRESS, or a new one on this machine).

    Raises:
        ValueError, OSError: Ray is not installed; or as `make_shards`. RuntimeError: actors die again and again.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise ValueError("The launcher ray needs Ray, which is not installed: pip install 't2lens[ray]'.") from None
    run, plan, left = run.absolute(), read_plan(run), missing(run)
    if Path(source.name).exists():  # actors work in other folders
        source = replace(source, name=str(Path(source.name).absolute()))
    size = max(1, min(_AT_ONCE, len(left) // (4 * workers)))
    waiting = deque(left[i : i + size] for i in range(0, len(left), size))
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, logging_level=logging.WARNING, configure_logging=False)
    kind = ray.remote(num_cpus=plan.threads, num_gpus=int(plan.device == "cuda"), max_restarts=0)(_Actor)
    actors: list[Any] = []
    running: dict[Any, tuple[Any, list[int]]] = {}  # call -> actor, its shards (none: it loads the model)

    def start() -> None:
        actors.append(kind.remote(run, source))
        running[actors[-1].load.remote()] = (actors[-1], [])

    try:
        for _ in range(min(workers, len(waiting))):
            start()
        deaths = 0
        while waiting or any(shards for _, shards in running.values()):
            (call, *_), _ = ray.wait(list(running), num_returns=1)
            actor, shards = running.pop(call)
            try:
                made = ray.get(call)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                deaths += 1
                if deaths > DEATHS:
                    raise RuntimeError(f"{deaths} actors died one after the other; the last: {error}") from None
                if shards:
                    waiting.appendleft(shards)
                start()
                continue
            deaths = 0 if made else deaths
            yield from made
            if waiting:
                block = waiting.popleft()
                running[actor.make.remote(block)] = (actor, block)
    finally:
        for actor in actors:
            ray.kill(actor)
        if ours:
            ray.shutdown()

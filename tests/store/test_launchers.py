"""Every launcher, with any number of workers and however they die, leaves the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from t2lens.store import collect, make_run, read_plan
from t2lens.store.launch import ModelSource, launch, rank_and_world
from t2lens.store.upkeep import repair_run
from t2lens.store.worker import missing
from tests.store.conftest import files

WHAT = ["depth weights", "residual norms"]
OPTIONS: dict[str, Any] = {"n_pos": 8, "sequences_per_shard": 1, "batch_size": 1}


@pytest.fixture
def runs(small_model, ids, tmp_path: Path) -> tuple[Path, Path]:
    """A whole run, and the same with nothing but its plan."""
    whole = collect(small_model, ids(1200), tmp_path / "whole", WHAT, **OPTIONS)
    return whole, make_run(small_model, ids(1200), tmp_path / "runs", WHAT, **OPTIONS)


def below(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [each for child in children for each in below(child)]


def is_worker(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"torch.distributed" not in command and any(
        word in command for word in (b"spawn_main", b"t2lens.cli\0capture", b"ray::_Actor")
    )


class Killer(threading.Thread):
    """Kills a random worker below a process whenever so many shards are there."""

    def __init__(self, run: Path, parent: int, at: Iterable[int]) -> None:
        super().__init__(daemon=True)
        self.folder, self.parent, self.at, self.killed = run / "shards", parent, list(at), 0
        self.stopped = threading.Event()

    def run(self) -> None:
        for n in self.at:
            while not self.stopped.wait(0.02):
                if len(list(self.folder.glob("*.json"))) < n:
                    continue
                workers = [pid for pid in below(self.parent) if is_worker(pid)]
                if workers:
                    os.kill(random.choice(workers), signal.SIGKILL)
                    self.killed += 1
                    break

    def stop(self) -> int:
        self.stopped.set()
        self.join()
        return self.killed


def capture(run: Path, log: Path, *command: str) -> int:
    """Run a command that captures and kill workers of it at two moments; how many were."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_AUTH_MODE": "disabled"}
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process:
        killer = Killer(run, process.pid, at=sorted(random.sample(range(61), 2)))
        killer.start()
        code = process.wait(timeout=200)
        killed = killer.stop()
    assert code == 0, log.read_text()[-3000:]
    return killed


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_local_workers_that_are_killed_are_started_again(runs, small) -> None:
    whole, run = runs
    killer = Killer(run, os.getpid(), at=sorted(random.sample(range(61), 2)))
    killer.start()
    made = list(launch(run, "local", ModelSource(str(small)), workers=2))
    assert killer.stop() == 2
    assert set(made) <= set(range(read_plan(run).n_shards))
    assert missing(run) == []
    repair_run(run)
    assert files(run) == files(whole)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_under_torchrun_the_bytes_are_the_same_though_workers_are_killed(runs, small, tmp_path) -> None:
    whole, run = runs
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=9"]
    resume = ["-m", "t2lens.cli", "capture", str(small), "--resume", str(run)]
    assert capture(run, tmp_path / "log", *torchrun, *resume) == 2
    assert missing(run) == []
    repair_run(run)
    assert files(run) == files(whole)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_actors_of_a_ray_cluster_that_are_killed_are_replaced(runs, small, tmp_path) -> None:
    whole, run = runs
    resume = ["-m", "t2lens.cli", "capture", str(small), "--resume", str(run), "--launcher=ray", "--workers=2"]
    assert capture(run, tmp_path / "log", sys.executable, *resume) == 2
    assert missing(run) == []
    repair_run(run)
    assert files(run) == files(whole)


@pytest.mark.slow
def test_what_a_worker_meets_is_said_by_the_one_that_started_it(runs) -> None:
    _, run = runs
    with pytest.raises(ValueError, match="'nowhere'"):
        list(launch(run, "local", ModelSource("nowhere"), workers=2))


def test_ranks_come_from_the_environment(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK and WORLD_SIZE are not in the environment"):
        rank_and_world()
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert rank_and_world() == (5, 8, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_and_world()[:2] == (2, 4)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ValueError, match="must be whole numbers"):
        rank_and_world()


def test_launchers_that_are_not_there_are_named(runs, small) -> None:
    _, run = runs
    with pytest.raises(ValueError, match="no launcher 'spark'; there are local, torchrun, ray"):
        launch(run, "spark", ModelSource(str(small)))
    with pytest.raises(ValueError, match="at least 1 worker"):
        launch(run, "local", ModelSource(str(small)), workers=0)

"""What lies in the folder of a run: what is whole, what is damaged, what killed writers left, and what is not ours."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from t2lens.files import is_held
from t2lens.store.plan import BESIDE, Plan, read_plan, sha256_of
from t2lens.store.ranges import Files
from t2lens.store.worker import record_of, shard_file

__all__ = ["Fault", "Health", "examine", "repair_run", "shard_fault"]

_SHARD = re.compile(r"(\d{6,})\.(json|safetensors)")
_LEFTOVER = re.compile(r"\.(\d{6,}\.(json|safetensors)|plan\.json|vocabulary\.json)\.\w+\.tmp")
_NEW_RUN = re.compile(r"\.new\.\w+\.tmp")


@dataclass
class Health:
    """The state of a run.

    missing: shards that were never finished. damaged: sentences on files that are not what they should be, of which
    `records` are the records of damaged shards (without them, the next capture makes those shards). leftovers: of
    writers that were killed; not those of writers that are at work. foreign: files that no capture wrote.
    """

    n_shards: int
    missing: list[int] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    records: list[Path] = field(default_factory=list)
    leftovers: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.missing and not self.damaged


def examine(run: str | Path) -> Iterator[Health]:
    """Compare every file of a run with its plan and records; yields the state so far after each shard (the last one is
    that of the whole run).

    Raises:
        ValueError: no run there, or its plan is damaged.
    """
    run = Path(run)
    plan = read_plan(run)
    state = Health(plan.n_shards)
    for name, wanted in plan.files.items():
        if not (run / name).is_file():
            state.damaged.append(f"{name} is missing; the same capture, given the corpus again, puts it back")
        elif sha256_of(run / name) != wanted:
            state.damaged.append(f"{name} is damaged; the same capture, given the corpus again, puts it back")
    _sort_out(run, plan, state)
    yield state
    for shard in range(plan.n_shards):
        fault = shard_fault(Files(str(run)), plan, shard)
        if fault is not None and fault.kind == "missing":
            state.missing.append(shard)
        elif fault is not None:
            state.damaged.append(fault.sentence)
            if fault.kind == "damaged":
                state.records.append(shard_file(run, shard, "json"))
        yield state


def repair_run(run: str | Path) -> list[str]:
    """Remove the leftovers of killed writers and the records of damaged shards, so that the next capture makes those
    shards again; nothing else is ever removed. Returns a line for each."""
    *_, state = examine(run)
    done = []
    for path in state.leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        done.append(f"removed {path.name}, which a killed writer left")
    for record in state.records:
        record.unlink(missing_ok=True)
        done.append(f"removed the record {record.name}: its shard is damaged and will be made again")
    return done


def _sort_out(run: Path, plan: Plan, state: Health) -> None:
    """Leftovers and files that are not ours."""
    known = {"plan.json", *BESIDE, "shards"}
    beside = [path for path in run.parent.iterdir() if _NEW_RUN.fullmatch(path.name)]
    inside = [path for path in run.iterdir() if path.name not in known]
    shards = list((run / "shards").iterdir()) if (run / "shards").is_dir() else []
    for path in sorted((*beside, *inside, *shards)):
        number = _SHARD.fullmatch(path.name)
        if path in beside or _LEFTOVER.fullmatch(path.name):
            if not is_held(path):
                state.leftovers.append(path)
        elif path.parent == run or number is None or int(number[1]) >= plan.n_shards:
            state.foreign.append(path)


@dataclass(frozen=True)
class Fault:
    """Of a shard. kind: "missing" (it was never finished), "foreign" (another run's) or "damaged"."""

    kind: Literal["missing", "foreign", "damaged"]
    sentence: str


def shard_fault(files: Files, plan: Plan, shard: int) -> Fault | None:
    """What is wrong with a shard, here or behind a URL: its record is compared with the plan, and its file with the
    record, byte by byte. None: it is whole."""
    record, file = f"shards/{shard:06d}.json", f"shards/{shard:06d}.safetensors"
    data = files.read_all([record]).get(record)
    if data is None:
        return Fault("missing", f"shard {shard} is not there")
    about = record_of(data)
    if about is None or not isinstance(about.get("bytes"), int):
        return Fault("damaged", f"the record of shard {shard} is damaged")
    if about.get("plan") != plan.name:
        return Fault("foreign", f"shard {shard} belongs to another run ({about.get('plan')}); move it away")
    try:
        whole = files.ends_at(file, about["bytes"]) and files.sha256(file, about["bytes"]) == about.get("sha256")
    except FileNotFoundError:
        return Fault("damaged", f"shard {shard} has a record and no file")
    except EOFError:
        whole = False
    return None if whole else Fault("damaged", f"shard {shard} is damaged: its SHA-256 is not that of its record")

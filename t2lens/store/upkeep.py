"""What lies in the folder of a run: what is whole, what is damaged, what killed writers left, and what is not ours."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from t2lens.files import is_held
from t2lens.store.plan import BESIDE, Plan, read_plan, sha256_of
from t2lens.store.worker import committed, shard_file

__all__ = ["Health", "examine", "repair_run"]

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
    for key, name in BESIDE.items():
        if plan.tokens[key] and not (run / name).is_file():
            state.damaged.append(f"{name} is missing; the same capture, given the corpus again, puts it back")
        elif plan.tokens[key] and sha256_of(run / name) != plan.tokens[key]:
            state.damaged.append(f"{name} is damaged; the same capture, given the corpus again, puts it back")
    _sort_out(run, plan, state)
    yield state
    for shard in range(plan.n_shards):
        _examine_shard(run, plan, shard, state)
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
    known = {"plan.json", *BESIDE.values(), "shards"}
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


def _examine_shard(run: Path, plan: Plan, shard: int, state: Health) -> None:
    record, file = shard_file(run, shard, "json"), shard_file(run, shard)
    if not record.is_file():
        state.missing.append(shard)
        return
    about = _read(record)
    if about.get("plan", plan.name) != plan.name:
        state.damaged.append(f"shard {shard} belongs to another run ({about['plan']}); move it away")
    elif not about:
        state.damaged.append(f"the record of shard {shard} is damaged")
        state.records.append(record)
    elif not file.is_file():
        state.damaged.append(f"shard {shard} has a record and no file")
        state.records.append(record)
    elif committed(run, shard) is None or sha256_of(file) != about.get("sha256"):
        state.damaged.append(f"shard {shard} is damaged: its SHA-256 is not that of its record")
        state.records.append(record)


def _read(record: Path) -> dict[str, Any]:
    try:
        about = json.loads(record.read_bytes())
    except (ValueError, OSError):
        return {}
    return about if isinstance(about, dict) else {}

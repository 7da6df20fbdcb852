"""What commands that make the shards of a run share: where they run, what there is to do, a bar."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from t2lens.store.plan import Plan

__all__ = ["BY_TOKEN", "LAUNCHER", "WORKERS", "announce", "estimate", "make", "placed"]

LAUNCHER = Annotated[str | None, typer.Option(help="local, torchrun or ray; default: who started this.")]
WORKERS = Annotated[int, typer.Option(help="Processes (local) or actors (ray).")]
BY_TOKEN = Annotated[
    bool, typer.Option("--by-token/--no-by-token", help="Statistics count by token too: memory grows with vocabulary.")
]


def placed(launcher: str | None) -> tuple[str, int, int, int]:
    """(launcher, rank, world, local rank) of this process."""
    from t2lens.store.launch import rank_and_world, started_by_others

    launcher = launcher or ("torchrun" if started_by_others() else "local")
    rank, world, local_rank = rank_and_world() if launcher == "torchrun" else (0, 1, 0)
    return launcher, rank, world, local_rank


def announce(plan: Plan, left: list[int], rank: int = 0) -> None:
    """What a run is and how much of it is left, on stderr."""
    if rank == 0:
        typer.echo(estimate(plan, left), err=True)


def make(
    run: Path, plan: Plan, launcher: str, where: Any, workers: int, loaded: Any, rank: int = 0, world: int = 1
) -> None:
    """Make what is missing of a run, or this process's share of it."""
    from t2lens.store.launch import launch
    from t2lens.store.worker import check_room, missing

    left = missing(run)
    announce(plan, left, rank)
    check_room(run)
    mine = [number for number in left if number % world == rank]
    made = launch(run, launcher, where, workers=workers, model=loaded)
    n = sum(1 for _ in _bar(made, plan, mine, hidden=rank > 0))
    if rank == 0:
        typer.echo(f"{n} of {plan.n_shards} shards made, {len(missing(run))} missing", err=True)


def estimate(plan: Plan, left: list[int]) -> str:
    """A sentence on what a run is, and on what is left of it."""
    from t2lens.store.plan import in_words

    tokens = plan.n_sequences * plan.n_pos
    todo = sum(map(plan.bytes_of, left))
    about = "" if plan.statistics is None else "statistics of "
    most = "" if plan.statistics is None else "at most "
    return (
        f"{tokens:,} tokens ({plan.n_documents:,} documents), {about}{len(plan.tensors)} tensors, {most}"
        f"{plan.bytes_per_token:,.0f} bytes per token, {in_words(plan.n_bytes)} in {plan.n_shards:,} shards; "
        f"{in_words(todo)} to write"
    )


def _bar(made: Iterable[int], plan: Plan, left: list[int], hidden: bool = False) -> Iterator[int]:
    """A bar over the tokens of the shards that are made, on stderr, which goes away at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    def tokens(shard: int) -> int:
        return len(plan.rows(shard)) * plan.n_pos

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn()
    total, done, start = sum(map(tokens, left)), 0, time.monotonic()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as progress:
        task = progress.add_task("capturing", total=total, said=f"0 of {total:,} tokens")
        for shard in made:
            done += tokens(shard)
            speed = done / max(time.monotonic() - start, 1e-9)
            progress.update(task, completed=done, said=f"{done:,} of {total:,} tokens, {speed:,.0f} per second")
            yield shard

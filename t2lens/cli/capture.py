"""`t2lens capture` and `t2lens store`: chosen tensors of a corpus on disk, and what lies there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from t2lens.cli.pieces import MODEL_HELP, OPTION, console, read_options, sentences, table
from t2lens.cli.root import app, store

if TYPE_CHECKING:
    from t2lens.store.plan import Plan

RUN = Annotated[Path, typer.Argument(help="The folder of a run.")]
_DEFAULT = ["depth weights", "gates", "residual norms"]


@app.command()
def capture(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    source: Annotated[
        Path | None,
        typer.Argument(help="Text: .txt, .jsonl, .parquet, a folder of those, a datasets folder; token ids: .npy."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder in which the run gets its own.")] = Path("runs"),
    what: Annotated[
        list[str] | None,
        typer.Option(help="Names, globs or roles, with reducers: '*hook_pattern|mean:head|top:8'. Repeatable."),
    ] = None,
    field: Annotated[str, typer.Option(help="The entry or column that holds the text.")] = "text",
    n_pos: Annotated[int | None, typer.Option(help="Tokens per sequence; default: the context.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of what is stored: bfloat16, float16, float8_e4m3fn, ...")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per pass.")] = 8,
    shard: Annotated[int | None, typer.Option(help="Sequences per shard; default: some 256 MB.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads per worker.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    option: Annotated[list[str] | None, typer.Option(help=OPTION)] = None,
    launcher: Annotated[str | None, typer.Option(help="local, torchrun or ray; default: who started this.")] = None,
    workers: Annotated[int, typer.Option(help="Processes (local) or actors (ray).")] = 1,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run; its plan says everything else.")] = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Write the tokens and the plan; run nothing.")] = False,
) -> None:
    """Run a model over a corpus and store chosen tensors, resumably. The same command goes on where it stopped."""
    with sentences():
        from t2lens.store.launch import ModelSource, launch, rank_and_world, started_by_others
        from t2lens.store.plan import make_run, read_plan
        from t2lens.store.worker import check_room, missing

        launcher = launcher or ("torchrun" if started_by_others() else "local")
        rank, world, local_rank = rank_and_world() if launcher == "torchrun" else (0, 1, 0)
        if resume is not None:
            if source is not None:
                raise ValueError("--resume takes the corpus of its run: give no SOURCE.")
            run, loaded, plan = resume, None, read_plan(resume)
            where = ModelSource(model or plan.model["name"], plan.device, read_options(option))
        else:
            if model is None or source is None:
                raise ValueError("Give a MODEL and a SOURCE, or --resume RUN.")
            where = ModelSource(model, device, read_options(option))
            loaded = where.load(local_rank)
            options: dict[str, Any] = {"n_pos": n_pos, "dtype": dtype, "batch_size": batch_size, "threads": threads}
            options |= {"field": field, "sequences_per_shard": shard, "name": model}
            run = make_run(loaded, source, out, what or _DEFAULT, **options)
            plan = read_plan(run)
        left = missing(run)
        if rank == 0:
            typer.echo(_estimate(plan, left), err=True)
        check_room(run)
        if plan_only:
            typer.echo(run)
            return
        mine = [number for number in left if number % world == rank]
        made = launch(run, launcher, where, workers=workers, model=loaded)
        n = sum(1 for _ in _bar(made, plan, mine, hidden=rank > 0))
        if rank == 0:
            typer.echo(f"{n} of {plan.n_shards} shards made, {len(missing(run))} missing", err=True)
            typer.echo(run)


def _estimate(plan: Plan, left: list[int]) -> str:
    from t2lens.store.plan import in_words

    tokens = plan.n_sequences * plan.n_pos
    todo = sum(len(plan.rows(shard)) for shard in left) * plan.bytes_per_sequence
    return (
        f"{tokens:,} tokens ({plan.n_documents:,} documents), {len(plan.tensors)} tensors, {plan.bytes_per_token:,.0f} "
        f"bytes per token, {in_words(plan.n_sequences * plan.bytes_per_sequence)} in {plan.n_shards:,} shards; "
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


@store.command()
def check(run: RUN) -> None:
    """Compare every file of a run with its plan and records. Exit code 1 when anything is missing or damaged."""
    with sentences():
        from t2lens.analysis.progress import progress
        from t2lens.store.plan import read_plan
        from t2lens.store.upkeep import examine

        *_, state = progress(examine(run), "checking", read_plan(run).n_shards + 1)
    for fault in state.damaged:
        typer.echo(fault)
    if state.missing:
        typer.echo(f"{len(state.missing)} of {state.n_shards} shards are not there yet; capture --resume makes them")
    for path in state.leftovers:
        typer.echo(f"{path.name} was left by a killed writer; repair removes it")
    for path in state.foreign:
        typer.echo(f"{path.relative_to(run)} is not part of the run; it is left alone")
    if not state.whole:
        raise typer.Exit(1)
    typer.echo(f"whole: {state.n_shards} shards")


@store.command()
def repair(run: RUN) -> None:
    """Remove leftovers of killed writers and the records of damaged shards (capture --resume then makes those again);
    nothing else."""
    with sentences():
        from t2lens.store.upkeep import repair_run

        done = repair_run(run)
    for line in done or ["nothing to repair"]:
        typer.echo(line)


@store.command()
def info(run: RUN) -> None:
    """What a run holds, and how much of it is there."""
    with sentences():
        from math import prod

        import torch

        from t2lens.store.plan import read_plan
        from t2lens.store.worker import missing

        plan = read_plan(run)
        left = missing(run)
    typer.echo(f"model {plan.model['name'] or '(unnamed)'}, weights {plan.model['sha256'][:16]}, on {plan.device}")
    typer.echo(_estimate(plan, left))
    rows = table("tensor", "axes", "shape of a sequence", "dtype", "bytes per token>", "meaning")
    for key, about in plan.tensors.items():
        size = prod(about["shape"]) * getattr(torch, about["dtype"]).itemsize / plan.n_pos
        shape = " x ".join(map(str, about["shape"]))
        rows.add_row(key, " ".join(about["axes"]), shape, about["dtype"], f"{size:,.1f}", about["meaning"])
    console().print(rows)

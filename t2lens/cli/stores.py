"""`t2lens store`: what lies in the folder of a run, whether it is whole, and statistics of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from t2lens.cli.pieces import JSON, console, sentences, show, table
from t2lens.cli.root import store
from t2lens.cli.shards import BY_TOKEN, LAUNCHER, WORKERS, estimate, make, placed

RUN = Annotated[Path, typer.Argument(help="The folder of a run.")]


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
    typer.echo(estimate(plan, left))
    if plan.metadata:
        typer.echo(f"of every document: {', '.join(plan.metadata)}")
    rows = table("tensor", "axes", "shape of a sequence", "dtype", "bytes per token>", "meaning")
    for key, about in plan.tensors.items():
        size = prod(about["shape"]) * getattr(torch, about["dtype"]).itemsize / plan.n_pos
        shape = " x ".join(map(str, about["shape"]))
        rows.add_row(key, " ".join(about["axes"]), shape, about["dtype"], f"{size:,.1f}", about["meaning"])
    console().print(rows)


@store.command()
def stats(
    run: RUN,
    what: Annotated[list[str] | None, typer.Option(help="Keys or globs; default: all with few numbers.")] = None,
    json: Annotated[Path | None, typer.Option(help=JSON)] = None,
    rows: Annotated[int, typer.Option(help="Rows of the table that are printed.")] = 30,
    tokens: Annotated[int, typer.Option(help="How many frequent tokens have means of their own.")] = 20,
    by_token: BY_TOKEN = True,
    out: Annotated[Path | None, typer.Option(help="Where the run of statistics lies; default: beside RUN.")] = None,
    shard: Annotated[int | None, typer.Option(help="Sequences that are counted together.")] = None,
    launcher: LAUNCHER = None,
    workers: WORKERS = 1,
) -> None:
    """Mean, spread, quantiles and shares of a run: of capture --statistics, as it was counted; of one with tensors, by
    a run of statistics that is made beside it, the same to the last bit for any number of workers."""
    with sentences():
        from t2lens.store.launch import StoreSource
        from t2lens.store.plan import read_plan
        from t2lens.store.reader import Store
        from t2lens.store.tallies import make_statistics_run, read_statistics
        from t2lens.store.worker import missing

        if min(rows, tokens) < 1:
            raise ValueError("--rows and --tokens must be at least 1.")
        launcher, rank, world, _ = placed(launcher)
        if read_plan(run).statistics is None:
            kept, out = Store(run), run.absolute().parent if out is None else out
            of = make_statistics_run(kept, out, what, by_token=by_token, sequences_per_shard=shard)
            make(of, read_plan(of), launcher, StoreSource(str(run.absolute())), workers, kept, rank, world)
            run = of
        elif what:
            raise ValueError(f"{run} holds statistics of chosen tensors already: --what is for runs with tensors.")
        if rank > 0:
            return
        if world > 1 and missing(run):  # the others are at work
            typer.echo(f"t2lens store stats {run} shows them when all have ended", err=True)
        else:
            show(lambda: read_statistics(run, n_tokens=tokens), json, rows)


@store.command()
def bundle(
    run: RUN,
    model: Annotated[str, typer.Argument(help="A bundled name, or the folder of a model.")],
    of: Annotated[str, typer.Option(help="What the text is, in words.")] = "a corpus",
) -> None:
    """Write the statistics of RUN beside the weights of its model, where corpus_statistics reads them."""
    with sentences():
        from t2lens.store.bundled import write_corpus_statistics
        from t2lens.store.tallies import read_tally

        typer.echo(write_corpus_statistics(read_tally(run), model, of))

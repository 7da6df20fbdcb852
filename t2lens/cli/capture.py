"""`t2lens capture`: chosen tensors of a corpus on disk, or their statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from t2lens.cli.pieces import MODEL_HELP, OPTION, read_options, sentences
from t2lens.cli.root import app
from t2lens.cli.shards import BY_TOKEN, LAUNCHER, WORKERS, announce, make, placed

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
        typer.Option(
            help="Hook names, globs or roles (depth weights, gates, residual norms, atoms, reads, patterns), with "
            "reducers: '*hook_pattern|mean:head|top:8'. Repeatable."
        ),
    ] = None,
    field: Annotated[str, typer.Option(help="The entry or column that holds the text.")] = "text",
    n_pos: Annotated[int | None, typer.Option(help="Tokens per sequence; default: the context.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of what is stored: bfloat16, float16, float8_e4m3fn, ...")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per pass.")] = 8,
    shard: Annotated[int | None, typer.Option(help="Sequences per shard; default: some 256 MB.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads per worker.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    option: Annotated[list[str] | None, typer.Option(help=OPTION)] = None,
    directions: Annotated[
        Path | None, typer.Option(help="[n, d] by name, for project:NAME: .safetensors, or .npy (its name).")
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(help="Fields of a row kept beside its text; default: all. '' for none.")
    ] = None,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Store no tensors, only their statistics; store stats shows them.")
    ] = False,
    by_token: BY_TOKEN = True,
    launcher: LAUNCHER = None,
    workers: WORKERS = 1,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run; its plan says everything else.")] = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Write the tokens and the plan; run nothing.")] = False,
) -> None:
    """Run a model over a corpus and store chosen tensors, resumably. The same command goes on where it stopped."""
    with sentences():
        from t2lens.store.launch import ModelSource, once
        from t2lens.store.packing import make_run, read_directions
        from t2lens.store.plan import read_plan, sha256_of
        from t2lens.store.worker import check_room, missing

        launcher, rank, world, local_rank = placed(launcher)
        if resume is not None:
            if source is not None:
                raise ValueError("--resume takes the corpus of its run: give no SOURCE.")
            run, loaded, plan = resume, None, read_plan(resume)
            if plan.statistics is not None and plan.statistics["store"]:
                raise ValueError(f"{run} counts over a store: t2lens store stats STORE goes on with it.")
            where = ModelSource(model or plan.model["name"], plan.device, read_options(option))
        else:
            if model is None or source is None:
                raise ValueError("Give a MODEL and a SOURCE, or --resume RUN.")
            where = ModelSource(model, device, read_options(option))
            loaded, onto = where.load(local_rank), None if directions is None else read_directions(directions)
            options: dict[str, Any] = {"n_pos": n_pos, "dtype": dtype, "batch_size": batch_size, "threads": threads}
            options |= {"field": field, "sequences_per_shard": shard, "name": model}
            options |= {"directions": onto, "statistics": statistics, "by_token": by_token}
            options |= {"metadata": None if metadata is None else [name for name in metadata if name]}
            digest = None if directions is None else sha256_of(directions)
            asked = [str(source.absolute()), what, digest, {**options, "directions": None}]
            run = once(out, asked, source, world, lambda: make_run(loaded, source, out, what or _DEFAULT, **options))
            plan = read_plan(run)
        if plan_only:
            announce(plan, missing(run), rank)
            check_room(run)
        else:
            make(run, plan, launcher, where, workers, loaded, rank, world)
        if rank == 0:
            typer.echo(run)

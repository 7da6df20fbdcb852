"""`t2lens app`, `t2lens train` and `t2lens bench`: what runs for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from t2lens.cli.pieces import MODEL, console, sentences, table
from t2lens.cli.root import app


@app.command(name="app")
def dashboard(
    port: Annotated[int, typer.Option(help="The port on this machine.")] = 8501,
    browser: Annotated[bool, typer.Option("--browser", help="Open a browser as well.")] = False,
    model: Annotated[list[str] | None, typer.Option(help="A checkpoint beside the bundled models; repeatable.")] = None,
) -> None:
    """Start the dashboard on this machine."""
    with sentences():
        from t2lens.apps.launch import run

        run(port=port, open_browser=browser, models=model or [])


@app.command()
def train(
    folder: Annotated[Path, typer.Argument(help="A folder of .txt files.")],
    out: Annotated[Path, typer.Option(help="The model folder to write; it must not exist.")],
    system: Annotated[str, typer.Option(help="A recipe, named like the bundled models.")] = MODEL,
    tokens: Annotated[int | None, typer.Option(help="Training tokens.")] = None,
    rows: Annotated[int | None, typer.Option(help="Windows per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak rate of vectors and the residual system (AdamW).")] = None,
    embed_lr: Annotated[float | None, typer.Option(help="Peak rate of the embedding (AdamW).")] = None,
    matrix_lr: Annotated[float | None, typer.Option(help="Peak rate of the matrices of the blocks (Muon).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the weights and of the order of the data.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    precision: Annotated[str, typer.Option(help="Of the arithmetic: float32, or bfloat16 (autocast).")] = "float32",
) -> None:
    """Train a small model on any folder of text. Killed at any moment, the same command goes on where it stopped."""
    with sentences():
        from t2lens.zoo.recipes import Budget
        from t2lens.zoo.training import train as run

        given = {"tokens": tokens, "rows": rows, "lr": lr, "embed_lr": embed_lr, "matrix_lr": matrix_lr, "seed": seed}
        budget = Budget(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        made = run(system, folder, out, budget=budget, threads=threads, precision=precision)  # type: ignore[arg-type]
    typer.echo(f"Wrote {made}. Try: t2lens trace TEXT --model {made}")


@app.command()
def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SUITE]...", help="hooks, systems, effects, store, app; default: all."),
    ] = None,
    pairs: Annotated[int, typer.Option(help="Pairs of runs per ratio.")] = 21,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Measure what hook points, caching, depth reads and stores cost, as ratios of two things timed in turn; app: the
    dashboard in Chromium against its limits."""
    with sentences():
        if pairs < 2 or threads < 1:
            raise ValueError(f"--pairs must be at least 2 and --threads at least 1, not {pairs} and {threads}.")
        import torch
        from rich.progress import track

        from t2lens.bench import SUITES

        unknown = [name for name in suites or [] if name not in SUITES]
        if unknown:
            raise ValueError(f"There is no suite {unknown[0]!r}; there are {', '.join(SUITES)}.")
        torch.set_num_threads(threads)
        out = console()
        rows = table("what", "ratio>", "quartiles>", "bound>", "median>")
        for name in suites or SUITES:
            ratios = track(SUITES[name](pairs), name, console=out, transient=True, disable=not out.is_terminal)
            for ratio in ratios:
                bound = "" if ratio.bound is None else f"<= {ratio.bound:g}"
                quartiles = f"{ratio.low:.2f} .. {ratio.high:.2f}"
                median = ratio.shown or f"{ratio.seconds * 1000:.1f} ms"
                style = "bold red" if ratio.passed is False else None
                rows.add_row(ratio.name, f"{ratio.median:.3f}", quartiles, bound, median, style=style)
        out.print(rows)

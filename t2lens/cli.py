"""The command line: `t2lens models | trace | verify | app | train | bench`.

Nothing heavy is imported before a command runs, so that `t2lens --help` answers at once. Bad input gives one sentence
on stderr and exit code 2; files appear complete or not at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

__all__ = ["app", "main"]

app = typer.Typer(
    name="t2lens",
    help="See, cache and edit what moves along both axes of a transformer: sequence position and layer depth.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

MODEL = "attnres-full"
IDS = "Token ids in place of a text: 0,7,3."
OPTION = "NAME=VALUE: what the format of a checkpoint leaves open, as elc_variant=zero."


def main() -> None:
    app(prog_name="t2lens")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from t2lens import __version__

        typer.echo(f"t2lens {__version__}")
        raise typer.Exit


@app.command()
def models(
    published: Annotated[bool, typer.Option("--published", help="List known public checkpoints instead.")] = False,
    systems: Annotated[bool, typer.Option("--systems", help="List every residual system and mixer instead.")] = False,
) -> None:
    """List the bundled trained models."""
    import t2lens

    if published or systems:
        for wanted, show in ((published, _published), (systems, _systems)):
            if wanted:
                show()
        return
    with _sentences():
        found = t2lens.list_models()
        if not found:
            raise ValueError("This installation holds no bundled models.")
    table = _table("name", "system", "parameters>", "held-out loss>", "bigram loss>", "trained on>", "seed>")
    for info in found:
        table.add_row(
            info.name,
            info.system,
            f"{info.n_params:,}",
            f"{info.validation_loss:.3f}",
            f"{info.bigram_loss:.3f}",
            f"{info.tokens:,} tokens",
            str(info.seed),
        )
    console = _console()
    console.print(table)
    console.print("Losses in nats per token on text that was not trained on.")


@app.command()
def trace(
    text: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    model: Annotated[
        str, typer.Option("--model", help="A bundled name, a checkpoint folder or file, a hub id.")
    ] = MODEL,
    model_b: Annotated[str | None, typer.Option("--model-b", help="A second model, side by side.")] = None,
    ids: Annotated[str | None, typer.Option(help=IDS)] = None,
    option: Annotated[list[str] | None, typer.Option(help=OPTION)] = None,
    load: Annotated[Path | None, typer.Option(help="Show a trace that --save wrote; no model runs.")] = None,
    quantity: Annotated[str | None, typer.Option(help="What the map shows; default: what is the system's own.")] = None,
    pos: Annotated[int, typer.Option(help="The position of the table; negative counts from the end.")] = -1,
    html: Annotated[Path | None, typer.Option(help="Write an interactive page, one file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every number, one per line.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write every number, as arrays.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the trace (safetensors) for t2lens.load_trace.")] = None,
) -> None:
    """Run a prompt and show what moved along both axes; write it as a page, as tables or as a trace file."""
    with _sentences():
        files = [path for path in (html, csv, json, save) if path is not None]
        _check_outputs(files)
        traces = _traces(text, model, model_b, ids, load, option or [])
        if save is not None and len(traces) > 1:
            raise ValueError("--save keeps one trace; leave out --model-b, or run it once per model.")
        _report(traces, quantity, pos)
        _write(traces, quantity, html, csv, json, save)


@app.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Bundled names, checkpoints, hub ids.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The prompt to check on.")] = None,
    ids: Annotated[str | None, typer.Option(help=IDS)] = None,
    option: Annotated[list[str] | None, typer.Option(help=OPTION)] = None,
) -> None:
    """Check every identity that the pictures rely on; exit code 1 when one fails. No name: all bundled models."""
    import t2lens

    with _sentences():
        chosen = names or [info.name for info in t2lens.list_models()]
        if not chosen:
            raise ValueError("There are no bundled models to verify; name a model folder.")
        if text is not None and not text.strip():
            raise ValueError("The prompt is empty: type at least one word.")
        if text is not None and ids is not None:
            raise ValueError("Give --text or --ids, not both.")
        prompt = text if ids is None else _ids(ids)
        loaded = [
            t2lens.load(name, **_options(option)) for name in chosen
        ]  # all first: a typo in the last costs nothing
        console, passed = _console(), True
        for name, model in zip(chosen, loaded, strict=True):
            result = t2lens.verify(model, prompt)
            table = _table("", "check", "value>", "limit>", "meaning", title=name)
            for check in result:
                sign = ">=" if check.at_least else "<="
                row = ("ok" if check.passed else "FAIL", check.name, f"{check.value:.2e}", f"{sign} {check.limit:.0e}")
                table.add_row(*row, check.meaning, style=None if check.passed else "bold red")
            console.print(table)
            failed = [check.name for check in result if not check.passed]
            word = f"FAILED: {', '.join(failed)}." if failed else f"all {len(result)} checks passed."
            console.print(f"{name}: {word}\n")
            passed = passed and not failed
    if not passed:
        raise typer.Exit(1)


@app.command(name="app")
def dashboard(
    port: Annotated[int, typer.Option(help="The port on this machine.")] = 8501,
    browser: Annotated[bool, typer.Option("--browser", help="Open a browser as well.")] = False,
    model: Annotated[list[str] | None, typer.Option(help="A checkpoint beside the bundled models; repeatable.")] = None,
) -> None:
    """Start the dashboard on this machine."""
    with _sentences():
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
    with _sentences():
        from t2lens.zoo.recipes import Budget
        from t2lens.zoo.training import train as run

        given = {"tokens": tokens, "rows": rows, "lr": lr, "embed_lr": embed_lr, "matrix_lr": matrix_lr, "seed": seed}
        budget = Budget(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        made = run(system, folder, out, budget=budget, threads=threads, precision=precision)  # type: ignore[arg-type]
    typer.echo(f"Wrote {made}. Try: t2lens trace TEXT --model {made}")


@app.command()
def bench(
    suites: Annotated[
        list[str] | None, typer.Argument(metavar="[SUITE]...", help="hooks, reads; default: all.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Pairs of runs per ratio.")] = 21,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Measure what hook points, caching and depth reads cost: ratios of two things timed in turn, never absolutes."""
    with _sentences():
        if pairs < 2 or threads < 1:
            raise ValueError(f"--pairs must be at least 2 and --threads at least 1, not {pairs} and {threads}.")
        import torch
        from rich.progress import track

        from t2lens.bench import SUITES

        unknown = [name for name in suites or [] if name not in SUITES]
        if unknown:
            raise ValueError(f"There is no suite {unknown[0]!r}; there are {', '.join(SUITES)}.")
        torch.set_num_threads(threads)
        console = _console()
        table = _table("what", "ratio>", "quartiles>", "bound>", "median>")
        for name in suites or SUITES:
            ratios = track(SUITES[name](pairs), name, console=console, transient=True, disable=not console.is_terminal)
            for ratio in ratios:
                bound = "" if ratio.bound is None else f"<= {ratio.bound:g}"
                quartiles, median = f"{ratio.low:.2f} .. {ratio.high:.2f}", f"{ratio.seconds * 1000:.1f} ms"
                style = "bold red" if ratio.passed is False else None
                table.add_row(ratio.name, f"{ratio.median:.3f}", quartiles, bound, median, style=style)
        console.print(table)


def _published() -> None:
    from t2lens.checkpoints.published import PUBLISHED, UNPUBLISHED

    console = _console()
    for one in PUBLISHED:  # blocks, because ids and sentences are too long for a table
        console.print(one.id, style="bold")
        table = _table("", "", title=None)
        table.box, table.show_header = None, False
        facts = (("system", one.system), ("size", f"{one.parameters} parameters, {one.size}"))
        facts += (("licence", one.licence), ("causal", one.causal), ("t2lens.load", one.reads))
        for name, value in (*facts, ("needs", one.needs), ("status", one.status)):
            if value:
                table.add_row(f"  {name}", value)
        console.print(table)
    console.print()
    console.print("No file of these was opened when the list was written: it comes from cards, listings and code.")
    console.print(UNPUBLISHED)


def _systems() -> None:
    from t2lens.zoo.systems import list_systems

    table = _table("name", "in t2lens", "what it is", "paper")
    for one in list_systems():
        table.add_row(one.name, one.config, one.what, one.paper)
    _console().print(table)


# --- pieces --------------------------------------------------------------------------------------------------


@contextmanager
def _sentences() -> Iterator[None]:
    """An error that a user can act on becomes its sentence on stderr and exit code 2; anything else stays a crash."""
    try:
        yield
    except (ValueError, KeyError, TypeError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        words = error.args[0] if isinstance(error, KeyError) and error.args else error
        typer.echo(f"t2lens: {' '.join(str(words).split())}", err=True)
        raise typer.Exit(2) from None


def _console() -> Console:
    from rich.console import Console

    plain = not sys.stdout.isatty()
    return Console(markup=False, highlight=False, emoji=False, width=160 if plain else None, soft_wrap=False)


def _table(*columns: str, title: str | None = None) -> Any:
    """A rich table; a column whose name ends in > is of numbers, flush right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="", pad_edge=False)
    for name in columns:
        number = name.endswith(">")
        table.add_column(name.rstrip(">"), justify="right" if number else "left", no_wrap=number)
    return table


def _check_outputs(files: list[Path]) -> None:
    """Before anything runs: can these files be written, and is each meant once?"""
    for path in files:
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file to write.")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"The folder {path.absolute().parent} does not exist, so {path.name} cannot be written.")
    if len({path.absolute() for path in files}) < len(files):
        raise ValueError("Two outputs have the same file name; give each its own.")


def _ids(ids: str) -> list[int]:
    try:
        numbers = [int(part) for part in ids.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--ids takes whole numbers like 0,7,3, not {ids!r}.") from None
    if not numbers:
        raise ValueError("--ids is empty: give at least one token id.")
    return numbers


def _options(pairs: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE, where a value that reads as JSON is that (true, 3) and any other a text."""
    from json import loads

    options: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--option takes NAME=VALUE, not {pair!r}.")
        try:
            options[name] = loads(value)
        except ValueError:
            options[name] = value
    return options


def _traces(
    text: str | None, model: str, model_b: str | None, ids: str | None, load: Path | None, option: list[str]
) -> list[Any]:
    import t2lens

    if sum(given is not None for given in (text, ids, load)) != 1:
        raise ValueError("Give one of: a text, --ids, or --load with a trace file.")
    if load is not None:
        if model_b is not None:
            raise ValueError("--load shows one saved trace; it cannot be combined with --model-b.")
        return [t2lens.load_trace(load)]
    prompt: Any = text
    if text == "-":
        prompt = sys.stdin.read()
    if ids is not None:
        prompt = _ids(ids)
    elif not prompt.strip():
        raise ValueError("The prompt is empty: type at least one word.")
    names = [model] if model_b is None else [model, model_b]
    loaded = [t2lens.load(name, **(_options(option) if name == model else {})) for name in names]
    return [t2lens.trace(one, prompt, name=Path(name).name) for one, name in zip(loaded, names, strict=True)]


def _report(traces: list[Any], quantity: str | None, pos: int) -> None:
    from textwrap import fill

    from t2lens.analysis.quantities import QUANTITIES, grid
    from t2lens.analysis.quantities import quantity as known
    from t2lens.viz.labels import fmt, glyphs
    from t2lens.viz.terminal import summary, top_reads

    if quantity is not None:
        known(quantity)
    for one in traces:
        if not -len(one.tokens) <= pos < len(one.tokens):
            raise ValueError(f"--pos must lie in 0..{len(one.tokens) - 1}, not {pos}.")
    console = _console()
    for one in traces:
        console.print(summary(one, quantity), soft_wrap=True)
        at = pos % len(one.tokens)
        shown = [grid(one, key) for key in QUANTITIES if key != "effective_sources"]  # exp of the entropy beside it
        shown = [each for each in shown if not each.absent]
        heads = [
            fill(" ".join(dict.fromkeys(f"{each.quantity.label} {each.quantity.unit}".split())), 10) for each in shown
        ]
        title = f"At position {at} '{glyphs(one.tokens[at])}':"
        most = {site: top_reads(one, site, at) for site in shown[0].sites if site != "embed"}
        what = " or ".join(dict.fromkeys(label for label, _ in most.values()))
        wide = console.width >= 110
        last = [f"reads most from\n({what})"] if wide else []
        table = _table("site", *(f"{head}>" for head in heads), *last, title=title)
        for i, site in reversed(list(enumerate(shown[0].sites))):
            row = [site, *("" if each.why(site) else fmt(float(each.values[i, at]), 3) for each in shown)]
            if wide:
                reads = most[site][1][:2] if site in most else []
                row.append(", ".join(f"{name} {fmt(value, 2)}" for name, value in reads))
            table.add_row(*row)
        console.print()
        console.print(table)


def _write(
    traces: list[Any], quantity: str | None, html: Path | None, csv: Path | None, json: Path | None, save: Path | None
) -> None:
    from t2lens.files import write_file

    def page() -> bytes:
        from t2lens.viz.page import page

        return page(*traces, **({"quantity": quantity} if quantity else {})).encode()

    def table() -> bytes:
        from t2lens.analysis.export import to_csv

        return to_csv(traces)

    def arrays() -> bytes:
        from t2lens.analysis.export import to_json

        return to_json(traces)

    makers: list[tuple[Path | None, Callable[[], bytes]]] = [(html, page), (csv, table), (json, arrays)]
    made = [(path, make()) for path, make in makers if path is not None]
    for path, content in made:
        typer.echo(f"wrote {write_file(path, content)}")
    if save is not None:
        typer.echo(f"wrote {traces[0].save(save)}")


if __name__ == "__main__":
    main()

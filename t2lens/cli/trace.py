"""`t2lens trace`: a prompt, and what moved along both axes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from t2lens.cli.pieces import (
    EDIT,
    FOLLOW,
    IDS,
    MODEL,
    OPTION,
    THEME,
    check_figure,
    check_outputs,
    console,
    read_edit_options,
    read_ids,
    read_options,
    sentences,
    table,
)
from t2lens.cli.root import app

_UNLISTED = ("effective_sources", "effective_positions", "sequence_reach")
"""Not in the table: they say once more, as exp of an entropy or of another head, what stands beside them."""

_FOLLOWING = ("lens_probability", "lens_rank", "lens_kl", "logit_share")
"""In a table of their own."""


@app.command()
def trace(
    text: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    model: Annotated[
        str, typer.Option("--model", help="A bundled name, a checkpoint folder or file, a hub id.")
    ] = MODEL,
    model_b: Annotated[str | None, typer.Option("--model-b", help="A second model, side by side.")] = None,
    ids: Annotated[str | None, typer.Option(help=IDS)] = None,
    option: Annotated[list[str] | None, typer.Option(help=OPTION)] = None,
    edit: Annotated[list[str] | None, typer.Option(help=EDIT)] = None,
    follow: Annotated[str | None, typer.Option(help=FOLLOW)] = None,
    load: Annotated[Path | None, typer.Option(help="Show a trace that --save wrote; no model runs.")] = None,
    quantity: Annotated[str | None, typer.Option(help="What the map shows; default: what is the system's own.")] = None,
    pos: Annotated[int, typer.Option(help="The position of the table; negative counts from the end.")] = -1,
    html: Annotated[Path | None, typer.Option(help="Write an interactive page, one file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every number, one per line.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write every number, as arrays.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the trace (safetensors) for t2lens.load_trace.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the maps at --pos to this file: .svg, .png or .pdf.")
    ] = None,
    theme: Annotated[str, typer.Option(help=THEME)] = "light",
) -> None:
    """Run a prompt and show what moved along both axes; write it as a page, as tables or as a trace file."""
    with sentences():
        files = [path for path in (html, csv, json, save, figure) if path is not None]
        check_outputs(files)
        check_figure(figure, theme)
        traces = _traces(text, model, model_b, ids, load, option or [], edit or [], follow)
        if save is not None and len(traces) > 1:
            raise ValueError("--save keeps one trace; leave out --model-b, or run it once per model.")
        _report(traces, quantity, pos)
        _write(traces, quantity, html, csv, json, save)
        if figure is not None:
            typer.echo(f"wrote {_draw(traces, figure, quantity, pos, theme)}")


def _traces(
    text: str | None,
    model: str,
    model_b: str | None,
    ids: str | None,
    load: Path | None,
    option: list[str],
    edit: list[str],
    follow: str | None,
) -> list[Any]:
    import t2lens
    from t2lens.readout import NEXT, same_word

    if sum(given is not None for given in (text, ids, load)) != 1:
        raise ValueError("Give one of: a text, --ids, or --load with a trace file.")
    if load is not None:
        if model_b is not None:
            raise ValueError("--load shows one saved trace; it cannot be combined with --model-b.")
        if edit:
            raise ValueError("--load shows one saved trace; no model runs, so that nothing can be edited.")
        if follow is not None:
            raise ValueError("--load shows one saved trace; no model runs, so that no token can be followed.")
        return [t2lens.load_trace(load)]
    prompt: Any = text
    if text == "-":
        prompt = sys.stdin.read()
    if ids is not None:
        prompt = read_ids(ids)
    elif not prompt.strip():
        raise ValueError("The prompt is empty: type at least one word.")
    edits = read_edit_options(edit)
    names = [model] if model_b is None else [model, model_b]
    loaded = [t2lens.load(name, **(read_options(option) if name == model else {})) for name in names]
    pairs = zip(loaded, names, strict=True)
    traces: list[Any] = []
    for one, name in pairs:  # where the prompt ends both follow one token, the first model's likeliest
        last = same_word(one, str(traces[0].dataset["followed"].values[-1])) if traces and follow == NEXT else None
        traces.append(t2lens.trace(one, prompt, edits=edits, name=Path(name).name, follow=follow, last=last))
    return traces


def _report(traces: list[Any], quantity: str | None, pos: int) -> None:
    from t2lens.analysis.quantities import QUANTITIES
    from t2lens.analysis.quantities import quantity as known
    from t2lens.viz.labels import glyphs
    from t2lens.viz.terminal import summary

    if quantity is not None:
        known(quantity)
    for one in traces:
        if not -len(one.tokens) <= pos < len(one.tokens):
            raise ValueError(f"--pos must lie in 0..{len(one.tokens) - 1}, not {pos}.")
    out = console()
    for one in traces:
        out.print(summary(one, quantity), soft_wrap=True)
        at = pos % len(one.tokens)
        where = f"At position {at} '{glyphs(one.tokens[at])}'"
        _table(
            out, one, at, [key for key in QUANTITIES if key not in (*_UNLISTED, *_FOLLOWING)], f"{where}:", reads=True
        )
        if one.follow:
            _table(out, one, at, list(_FOLLOWING), f"{where}, following {one.follow}:", reads=False)


def _table(out: Any, one: Any, at: int, keys: list[str], title: str, *, reads: bool) -> None:
    """Quantities of every site at one position; `reads`: and what the site reads most from, where there is room."""
    from textwrap import fill

    from t2lens.analysis.quantities import grid
    from t2lens.viz.labels import fmt
    from t2lens.viz.terminal import top_reads

    shown = [each for each in (grid(one, key) for key in keys) if not each.absent]
    heads = [fill(" ".join(dict.fromkeys(f"{each.quantity.label} {each.quantity.unit}".split())), 10) for each in shown]
    most = {site: top_reads(one, site, at) for site in shown[0].sites if site != "embed"} if reads else {}
    what = " or ".join(dict.fromkeys(label for label, _ in most.values()))
    most = most if out.width >= 110 else {}
    rows = table(
        "site", *(f"{head}>" for head in heads), *([f"reads most from\n({what})"] if most else []), title=title
    )
    for i, site in reversed(list(enumerate(shown[0].sites))):
        row = [site, *("" if each.why(site, at) else fmt(float(each.values[i, at]), 3) for each in shown)]
        if most:
            row.append(", ".join(f"{name} {fmt(value, 2)}" for name, value in most.get(site, ("", []))[1][:2]))
        rows.add_row(*row)
    out.print()
    out.print(rows)


def _draw(traces: list[Any], figure: Path, quantity: str | None, pos: int, theme: str) -> Path:
    from t2lens.viz.page import first_view

    view = first_view(traces)
    cell = (0, pos % len(traces[0].tokens), view["cell"][2])
    chosen = {**view, "cell": cell, "theme": theme, **({"quantity": quantity} if quantity else {})}
    return traces[0].save_figure(figure, *traces[1:], **chosen)


def _write(
    traces: list[Any], quantity: str | None, html: Path | None, csv: Path | None, json: Path | None, save: Path | None
) -> None:
    from t2lens.files import write_file

    def page() -> bytes:
        from t2lens.viz.page import page

        return page(*traces, **({"quantity": quantity} if quantity else {})).encode()

    def lines() -> bytes:
        from t2lens.analysis.export import to_csv

        return to_csv(traces)

    def arrays() -> bytes:
        from t2lens.analysis.export import to_json

        return to_json(traces)

    makers: list[tuple[Path | None, Callable[[], bytes]]] = [(html, page), (csv, lines), (json, arrays)]
    made = [(path, make()) for path, make in makers if path is not None]
    for path, content in made:
        typer.echo(f"wrote {write_file(path, content)}")
    if save is not None:
        typer.echo(f"wrote {traces[0].save(save)}")

"""What every command shares: errors as sentences, tables, prompts, and findings on the screen and in files."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

__all__ = [
    "EDIT",
    "FOLLOW",
    "IDS",
    "JSON",
    "MODEL",
    "MODEL_HELP",
    "OPTION",
    "THEME",
    "check_figure",
    "check_outputs",
    "console",
    "load",
    "read_edit_options",
    "read_ids",
    "read_options",
    "read_prompt",
    "sentences",
    "show",
    "table",
]

MODEL = "attnres-full"
MODEL_HELP = "A bundled name, a checkpoint folder or file, a hub id."
IDS = "Token ids in place of a text: 0,7,3."
JSON = "Write every number to this file."
FIGURE = "Draw it to this file: .svg, .png or .pdf."
THEME = "Colours of the figure: light or dark."
EDIT = "An edit as JSON, several as a list, or a file with them. Repeatable: they act in this order."
FOLLOW = (
    "Follow a token through lens and logit shares: next (the true next one; at the end the likeliest), its text or id."
)
OPTION = "NAME=VALUE: what the format of a checkpoint leaves open, as elc_variant=zero."


@contextmanager
def sentences() -> Iterator[None]:
    """An error that a user can act on becomes its sentence on stderr and exit code 2; anything else stays a crash."""
    try:
        yield
    except (ValueError, KeyError, TypeError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        words = error.args[0] if isinstance(error, KeyError) and error.args else error
        typer.echo(f"t2lens: {' '.join(str(words).split())}", err=True)
        raise typer.Exit(2) from None


def console() -> Console:
    from rich.console import Console

    plain = not sys.stdout.isatty()
    return Console(markup=False, highlight=False, emoji=False, width=160 if plain else None, soft_wrap=False)


def table(*columns: str, title: str | None = None) -> Any:
    """A rich table; a column whose name ends in > is of numbers, flush right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="", pad_edge=False)
    for name in columns:
        number = name.endswith(">")
        table.add_column(name.rstrip(">"), justify="right" if number else "left", no_wrap=number)
    return table


def check_outputs(files: list[Path]) -> None:
    """Before anything runs: can these files be written, and is each meant once?"""
    for path in files:
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file to write.")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"The folder {path.absolute().parent} does not exist, so {path.name} cannot be written.")
    if len({path.absolute() for path in files}) < len(files):
        raise ValueError("Two outputs have the same file name; give each its own.")


def read_ids(ids: str) -> list[int]:
    try:
        numbers = [int(part) for part in ids.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--ids takes whole numbers like 0,7,3, not {ids!r}.") from None
    if not numbers:
        raise ValueError("--ids is empty: give at least one token id.")
    return numbers


def read_options(pairs: list[str] | None) -> dict[str, Any]:
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


def read_edit_options(given: list[str]) -> list[Any]:
    """The edits of every --edit: JSON (it begins with { or [), or the path of a file that holds JSON."""
    from t2lens.edits import edits_from_json

    edits: list[Any] = []
    for each in given:
        if each.lstrip()[:1] in ("{", "["):
            edits += edits_from_json(each)
            continue
        path = Path(each)
        if not path.is_file():
            raise ValueError(f"--edit takes JSON or the path of a file, and there is no file {each!r}.")
        try:
            edits += edits_from_json(path.read_text(encoding="utf-8"))
        except (ValueError, TypeError) as error:  # a file that is no text too
            raise ValueError(f"{each}: {error}") from None
    return edits


def load(model: str, option: list[str] | None = None) -> Any:
    import t2lens

    return t2lens.load(model, **read_options(option))


def read_prompt(text: str | None, ids: str | None) -> Any:
    """The prompt of a command: a text (- is standard input) or token ids; ValueError unless exactly one is given."""
    if (text is None) == (ids is None):
        raise ValueError("Give a text or --ids, one of them.")
    if ids is not None:
        return read_ids(ids)
    text = sys.stdin.read() if text == "-" else text
    assert text is not None
    if not text.strip():
        raise ValueError("The prompt is empty: type at least one word.")
    return text


def check_figure(path: Path | None, theme: str = "light") -> None:
    """Before anything runs: is this a kind of figure, and one that can be made here?"""
    if path is None:
        return
    from t2lens.viz.raster import FIGURE_KINDS, figure_bytes

    if path.suffix[1:].lower() not in FIGURE_KINDS:
        raise ValueError(f"--figure writes .svg, .png or .pdf, not {path.name!r}.")
    if theme not in ("light", "dark"):
        raise ValueError(f"--theme is light or dark, not {theme!r}.")
    figure_bytes('<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>', path.suffix[1:].lower())


def show(
    make: Callable[[], Any],
    json: Path | None = None,
    n_rows: int = 30,
    *,
    figure: Path | None = None,
    chart: int = 0,
    theme: str = "light",
) -> Any:
    """Run an analysis, print its finding, and write it where asked. Outputs are checked before anything runs."""
    from t2lens.files import write_file
    from t2lens.viz.findings import text

    check_outputs([path for path in (json, figure) if path is not None])
    check_figure(figure, theme)
    finding = make()
    typer.echo(text(finding, n_rows))
    if json is not None:
        typer.echo(f"wrote {write_file(json, finding.to_json())}")
    if figure is not None:
        if not 0 <= chart < len(finding.charts):
            raise ValueError(f"This finding has {len(finding.charts)} chart(s), from 0; there is no chart {chart}.")
        typer.echo(f"wrote {finding.save_figure(figure, chart, theme=theme)}")
    return finding

"""The Typer app that all commands belong to."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["analyze", "app", "audit", "main", "store"]

app = typer.Typer(
    name="t2lens",
    help="See, cache and edit what moves along both axes of a transformer: sequence position and layer depth.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
analyze = typer.Typer(
    help="Attribution, routes and what they do: from looking to knowing.", no_args_is_help=True, rich_markup_mode=None
)
audit = typer.Typer(
    help="Audits with a verdict: exit code 1 when one fails.", no_args_is_help=True, rich_markup_mode=None
)
store = typer.Typer(
    help="Runs of t2lens capture: what they hold, and whether it is whole.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(analyze, name="analyze")
app.add_typer(audit, name="audit")
app.add_typer(store, name="store")


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

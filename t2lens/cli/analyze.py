"""`t2lens analyze NAME TEXT`: one command per entry of the catalog of analyses, made from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from t2lens.analysis.catalog import ANALYSES, Analysis, Option
from t2lens.cli.pieces import (
    FIGURE,
    IDS,
    JSON,
    MODEL,
    MODEL_HELP,
    OPTION,
    THEME,
    load,
    read_prompt,
    sentences,
    show,
)
from t2lens.cli.root import analyze

_TYPES: dict[str, Any] = {"position": int, "count": int, "number": float, "flag": bool}


def _command(entry: Analysis) -> Callable[..., None]:
    """The function that Typer makes a command of: the arguments that all have, then the options of the entry."""

    def run(
        text: str | None,
        model: str,
        ids: str | None,
        option: list[str] | None,
        json: Path | None,
        rows: int,
        figure: Path | None,
        chart: int,
        theme: str,
        **own: Any,
    ) -> None:
        with sentences():
            if rows < 1:
                raise ValueError(f"--rows must be at least 1, not {rows}.")
            if entry.texts and text is None and ids is None:
                from t2lens.zoo.text import sample_texts

                prompt: Any = sample_texts(entry.passages)
            else:
                prompt = read_prompt(text, ids)
            drawn: dict[str, Any] = {"figure": figure, "chart": chart, "theme": theme}
            show(lambda: entry.run(load(model, option), prompt, **own), json, rows, **drawn)

    what = "The prompt; - reads it from standard input."
    if entry.texts:
        what += f" Left out: {entry.passages} bundled passages that no bundled model was trained on."
    arguments = {
        "text": (str | None, typer.Argument(help=what), None),
        "model": (str, typer.Option("--model", help=MODEL_HELP), MODEL),
        "ids": (str | None, typer.Option(help=IDS), None),
        "option": (list[str] | None, typer.Option(help=OPTION), None),
        "json": (Path | None, typer.Option(help=JSON), None),
        "rows": (int, typer.Option(help="Rows of the table that are printed."), 30),
        "figure": (Path | None, typer.Option(help=FIGURE), None),
        "chart": (int, typer.Option(help="Which of its charts is drawn, from 0."), 0),
        "theme": (str, typer.Option(help=THEME), "light"),
        **{each.name: _argument(each) for each in entry.options},
    }
    kind = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, info])
            for name, (hint, info, default) in arguments.items()
        ]
    )
    run.__annotations__ = {name: Annotated[hint, info] for name, (hint, info, _) in arguments.items()}
    run.__doc__ = entry.what
    return run


def _argument(option: Option) -> tuple[Any, Any, Any]:
    hint = _TYPES.get(option.kind, str)
    words = option.help + (f" One of {', '.join(option.choices)}." if option.choices else "")
    name = f"--{option.name.replace('_', '-')}"
    if option.kind == "flag":
        return bool, typer.Option(f"{name}/--no-{name[2:]}", help=words), bool(option.default)
    return hint | None, typer.Option(name, help=words), option.default


for _entry in ANALYSES:
    analyze.command(_entry.key)(_command(_entry))

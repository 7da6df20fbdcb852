"""`t2lens audit ddl`: is a Deep Delta Learning model what its gate's names say, and does it matter?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from t2lens.cli.pieces import IDS, JSON, MODEL_HELP, OPTION, check_outputs, load, read_prompt, sentences
from t2lens.cli.root import audit

_MOST = 64  # passages of --texts


@audit.command()
def ddl(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = "ddl",
    text: Annotated[
        str | None,
        typer.Argument(
            help="The text; - reads it from standard input. Left out: 32 bundled passages that no bundled model was "
            "trained on."
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help=f"A .txt file, or a folder of them: paragraphs, the first {_MOST} of them, are the texts."),
    ] = None,
    ids: Annotated[str | None, typer.Option(help=IDS)] = None,
    option: Annotated[list[str] | None, typer.Option(help=OPTION)] = None,
    counterfactuals: Annotated[
        bool, typer.Option("--counterfactuals/--no-counterfactuals", help="Other gates in place of the model's.")
    ] = True,
    html: Annotated[Path | None, typer.Option(help="Write the report, one page with all figures.")] = None,
    json: Annotated[Path | None, typer.Option(help=JSON)] = None,
) -> None:
    """Audit the gates of a Deep Delta Learning model on text; exit code 1 when a check fails."""
    from t2lens.files import write_file

    with sentences():
        check_outputs([path for path in (html, json) if path is not None])
        prompt, said = _prompt(text, texts, ids)
        from t2lens.analysis.ddl_audit import audit_ddl, checks_of
        from t2lens.viz.findings import text as in_columns

        finding = audit_ddl(load(model, option), prompt, counterfactuals=counterfactuals, name=Path(model).name)
        typer.echo(in_columns(finding))
        typer.echo(f"\n{checks_of(finding)}")
        if said:
            typer.echo(said)
        if html is not None:
            from t2lens.viz.ddl_report import report

            typer.echo(f"wrote {write_file(html, report(finding).encode())}")
        if json is not None:
            typer.echo(f"wrote {write_file(json, finding.to_json())}")
    if not finding.passed:
        raise typer.Exit(1)


def _prompt(text: str | None, texts: Path | None, ids: str | None) -> tuple[Any, str]:
    """What to run on (None: the bundled passages), and what to say about it."""
    if texts is None:
        return (None if text is None and ids is None else read_prompt(text, ids)), ""
    if text is not None or ids is not None:
        raise ValueError("Give a text, --texts or --ids, one of them.")
    if texts.is_dir():
        from t2lens.zoo.text import read_corpus

        corpus = read_corpus(texts)
        files = [corpus.folder / name for name in corpus.names]
    elif texts.is_file():
        files = [texts]
    else:
        raise ValueError(f"--texts names a .txt file or a folder of them; there is none at {texts}.")
    found = [part for path in files for part in re.split(r"\n\s*\n", _read(path)) if part.strip()]
    if not found:
        raise ValueError(f"There is no text in {texts}.")
    said = f"{len(found)} paragraphs in {texts}; the first {_MOST} were read." if len(found) > _MOST else ""
    return found[:_MOST], said


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte at offset {error.start}).") from None

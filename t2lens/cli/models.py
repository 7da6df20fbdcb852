"""`t2lens models` and `t2lens verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from t2lens.cli.pieces import IDS, OPTION, console, read_ids, read_options, sentences, table
from t2lens.cli.root import app


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
    with sentences():
        found = t2lens.list_models()
        if not found:
            raise ValueError("This installation holds no bundled models.")
    rows = table("name", "system", "parameters>", "held-out loss>", "bigram loss>", "trained on>", "seed>")
    for info in found:
        rows.add_row(
            info.name,
            info.system,
            f"{info.n_params:,}",
            f"{info.validation_loss:.3f}",
            f"{info.bigram_loss:.3f}",
            f"{info.tokens:,} tokens",
            str(info.seed),
        )
    out = console()
    out.print(rows)
    out.print("Losses in nats per token on text that was not trained on.")


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

    with sentences():
        chosen = names or [info.name for info in t2lens.list_models()]
        if not chosen:
            raise ValueError("There are no bundled models to verify; name a model folder.")
        if text is not None and not text.strip():
            raise ValueError("The prompt is empty: type at least one word.")
        if text is not None and ids is not None:
            raise ValueError("Give --text or --ids, not both.")
        prompt = text if ids is None else read_ids(ids)
        loaded = [
            t2lens.load(name, **read_options(option)) for name in chosen
        ]  # all first: a typo in the last costs nothing
        out, passed = console(), True
        for name, model in zip(chosen, loaded, strict=True):
            result = t2lens.verify(model, prompt)
            rows = table("", "check", "value>", "limit>", "meaning", title=name)
            for check in result:
                sign = ">=" if check.at_least else "<="
                row = ("ok" if check.passed else "FAIL", check.name, f"{check.value:.2e}", f"{sign} {check.limit:.0e}")
                rows.add_row(*row, check.meaning, style=None if check.passed else "bold red")
            out.print(rows)
            failed = [check.name for check in result if not check.passed]
            word = f"FAILED: {', '.join(failed)}." if failed else f"all {len(result)} checks passed."
            out.print(f"{name}: {word}\n")
            passed = passed and not failed
    if not passed:
        raise typer.Exit(1)


def _published() -> None:
    from t2lens.checkpoints.published import PUBLISHED, UNPUBLISHED

    out = console()
    for one in PUBLISHED:  # blocks, because ids and sentences are too long for a table
        out.print(one.id, style="bold")
        rows = table("", "", title=None)
        rows.box, rows.show_header = None, False
        facts = (("system", one.system), ("size", f"{one.parameters} parameters, {one.size}"))
        facts += (("licence", one.licence), ("causal", one.causal), ("t2lens.load", one.reads))
        for name, value in (*facts, ("needs", one.needs), ("status", one.status)):
            if value:
                rows.add_row(f"  {name}", value)
        out.print(rows)
    out.print()
    out.print("No file of these was opened when the list was written: it comes from cards, listings and code.")
    out.print(UNPUBLISHED)


def _systems() -> None:
    from t2lens.zoo.systems import list_systems

    rows = table("name", "in t2lens", "what it is", "paper")
    for one in list_systems():
        rows.add_row(one.name, one.config, one.what, one.paper)
    console().print(rows)

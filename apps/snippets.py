"""The Python that makes what a page shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from t2lens.analysis.catalog import analysis
from t2lens.apps.loaders import address
from t2lens.edits import read_edits
from t2lens.readout import NEXT

if TYPE_CHECKING:
    from t2lens.apps.frame import Side

__all__ = ["analysis_code", "change_code", "generation_code", "maps_code", "trace_code"]


def analysis_code(
    side: Side, key: str, options: Mapping[str, Any], *, passages: int = 0, last: Sequence[str] | None = None
) -> str:
    """An analysis of the catalog, on the prompt or on so many bundled passages: `finding`. last: lines that use it, by
    default its figure and its numbers."""
    module, function = analysis(key).function.split(":")
    imports = [f"from {module} import {function}"]
    imports += ["from t2lens.zoo.text import sample_texts"] if passages else []
    given = f"sample_texts({passages})" if passages else repr(side.prompt)
    run = f"finding = {function}(model, {given}{_words(options)})"
    last = [f'finding.save_figure("{key}-{side.letter.lower()}.svg")', "print(finding)"] if last is None else last
    return _script([*_model(side), *_within(side, run), *last], imports)


def trace_code(side: Side, last: Sequence[str] = ("trace",)) -> str:
    """The trace of a side: `trace`. ValueError, TypeError as `read_edits`."""
    edits = ", edits=edits" if side.edits else ""
    return _script([*_model(side), *_edits(side), f"trace = t2lens.trace(model, {side.prompt!r}{edits})", *last])


def change_code(side: Side, pos: int) -> str:
    """What the edits of a side change after a position: `finding`. ValueError, TypeError as `read_edits`."""
    run = f"finding = edit_change(model, {side.prompt!r}, edits, pos={pos})"
    lines = [*_model(side), *_edits(side), run, "print(finding)"]
    return _script(lines, ["from t2lens.analysis import edit_change"])


def maps_code(
    sides: Sequence[Side], view: Mapping[str, Any], follow: Sequence[Any] = (), starts: Sequence[Any] = ()
) -> str:
    """The traces and the figure of the two-axis maps, of A and B. follow: the token that each trace follows; starts:
    what the rollout of each starts from, or None."""
    lines: list[str] = []
    for name, side, token, start in zip("ab", sides, [*follow, *[""] * 2], [*starts, *[None] * 2], strict=False):
        more = ", edits=edits" if side.edits else ""
        more += f", follow={token!r}" if token not in (None, "") else ""
        more += f", last={side.last!r}" if token == NEXT and side.last is not None else ""
        model = f"t2lens.load({address(side.loaded.name)!r})"
        lines += [*_edits(side), f"{name} = t2lens.trace({model}, {side.prompt!r}, name={side.name!r}{more})"]
        if start is not None:
            run = f"fed_{name} = rollout(model, {side.prompt!r}{_words(start)})"
            within = ["with t2lens.edited(model, edits):", f"    {run}"] if side.edits else [run]
            lines += [*_model(side), *within]
    chosen = _words({key: value for key, value in view.items() if value not in ("", None)})
    other = ", b" if len(sides) > 1 else ""
    if any(start is not None for start in starts):
        fed = ["None" if start is None else f"fed_{name}" for name, start in zip("ab", starts, strict=False)]
        chosen += f", rollouts=[{', '.join(fed)}]"
    imports = ["from t2lens.analysis import rollout"] if "rollouts=" in chosen else []
    return _script([*lines, f'a.save_figure("maps.svg"{other}{chosen})', "print(a.dataset)  # every number"], imports)


def generation_code(side: Side, options: Mapping[str, Any]) -> str:
    """The text that `continue_text` writes with these options: `text`."""
    given = {"temperature": options.get("temperature", 0), **{k: v for k, v in options.items() if k != "n"}}
    run = f"text = model.generate(prompt, {options['n']}{_words(given)})"
    return _script([*_model(side), f"prompt = {side.prompt!r}", *_within(side, run)])


def _script(lines: Iterable[str], imports: Iterable[str] = ()) -> str:
    return "\n".join(["import t2lens", *imports, "", *lines])


def _model(side: Side) -> list[str]:
    return [f"model = t2lens.load({address(side.loaded.name)!r})"]


def _edits(side: Side) -> list[str]:
    """The edits, one a line with what it does; nothing where there are none."""
    told = [f"    {edit.to_python()},  # {edit.describe()}" for edit in read_edits(side.edits or ())]
    return ["edits = [", *told, "]"] if told else []


def _within(side: Side, run: str) -> list[str]:
    return [*_edits(side), "with t2lens.edited(model, edits):", f"    {run}"] if side.edits else [run]


def _words(options: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())

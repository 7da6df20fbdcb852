"""What is chosen in the dashboard, as values, and the same as URL query parameters.

One `Selection` holds for every page; a page adds `Parameter`s of its own. A URL is input from a stranger: `parse_url`
never raises, it falls back and says so in a notice, and what it quotes is plain text (pages show notices as text,
never as markup).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote_plus, urlencode

__all__ = [
    "ALIGN",
    "CLEAN",
    "LINK_LIMIT",
    "NO_MODEL",
    "OVER",
    "PROMPT_LIMIT",
    "SHARED",
    "Cell",
    "Parameter",
    "Selection",
    "fit_cell",
    "fit_link",
    "flag",
    "format_url",
    "limit_prompt",
    "one_of",
    "parse_url",
    "passages",
    "quote",
    "read_cell",
    "read_pick",
    "text",
    "whole",
]

PROMPT_LIMIT = 12_000
"""Characters of a prompt: more than 2,048 tokens, and a URL stays a URL."""

LINK_LIMIT = 60_000
"""Characters of a link, in which a letter that is not ASCII takes up to twelve: the server refuses long requests."""

NO_MODEL = "none"
"""Stands for "no model B": show A alone."""

CLEAN = "clean"
"""Stands for "A without its edits" as model B."""

ALIGN = ("left", "right")
"""How positions of two prompts of different lengths stand beside each other: from the first token, or from the last."""


OVER = {"prompt": "the prompt", "8": "8 bundled passages", "32": "all 32 bundled passages"}
"""What a page can look at, in words; `passages` says how many texts that is."""


def passages(over: str) -> int:
    """How many bundled passages a key of `OVER` stands for; 0: the prompt."""
    return 0 if over == "prompt" else int(over)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A node of the grid: panel 0 (A) or 1 (B), position from 0, site."""

    panel: int
    pos: int
    site: str


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What holds on every page.

    model_b: a model, `CLEAN` or `NO_MODEL`. prompt_b: of model B, or nothing: the same as A's. edits: of model A, as
    JSON, or nothing. cell None: the last position at `out`.
    """

    model_a: str
    model_b: str
    prompt: str
    prompt_b: str = ""
    align: str = "left"
    edits: str = ""
    cell: Cell | None = None


SHARED = tuple(field.name for field in fields(Selection))
"""The names under which a session keeps the selection."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A choice of one page that a link keeps, under the same key in the session and in the URL.

    key: begins with the word of its page (`routing_over`, `lens_token`, `gates_value`); those of "Continue", which any
    page can offer, with `write`. The maps are the home page, and theirs stand bare (`quantity`, `depth`).

    read: the value that a text of the URL means; ValueError (a sentence's end: "which ...") for one that it cannot.
    """

    key: str
    default: Any
    read: Callable[[str], Any]
    write: Callable[[Any], str] = str


def one_of(key: str, allowed: Sequence[str] | Callable[[], Sequence[str]], default: str) -> Parameter:
    """One of some words."""

    def read(given: str) -> str:
        words = list(allowed() if callable(allowed) else allowed)
        if given not in words:
            near = get_close_matches(given, words, n=1)
            raise ValueError(f"which does not exist{f' (did you mean {near[0]}?)' if near else ''}")
        return given

    return Parameter(key=key, default=default, read=read)


def whole(key: str, default: int | None, low: int, high: int) -> Parameter:
    """A whole number from `low` to `high`; nothing, where `default` is None."""

    def read(given: str) -> int | None:
        if given == "" and default is None:
            return None
        if not re.fullmatch(r"-?\d{1,9}", given, flags=re.ASCII) or not low <= int(given) <= high:
            raise ValueError(f"which is no whole number from {low} to {high}")
        return int(given)

    return Parameter(key=key, default=default, read=read, write=lambda value: "" if value is None else str(value))


def flag(key: str, default: bool) -> Parameter:
    """Yes ("1") or no ("0")."""

    def read(given: str) -> bool:
        if given not in ("0", "1"):
            raise ValueError("which is neither 0 nor 1")
        return given == "1"

    return Parameter(key=key, default=default, read=read, write=lambda value: "1" if value else "0")


def text(key: str, default: str = "", limit: int = 200) -> Parameter:
    """Any text of at most `limit` characters."""

    def read(given: str) -> str:
        if len(given) > limit:
            raise ValueError(f"which has {len(given)} characters; {limit} are allowed")
        return given

    return Parameter(key=key, default=default, read=read, write=lambda value: value or "")


def parse_url(
    params: Mapping[str, str], default: Selection, *, models: Sequence[str], parameters: Sequence[Parameter] = ()
) -> tuple[Selection, dict[str, Any], list[str]]:
    """The selection and the page's own values that URL parameters ask for, and one notice for each that had to fall
    back to `default`.

    Parameters of every page: a, b (models; b may be "none" or "clean"), prompt, prompt_b, align, edits (JSON), and
    node ("A:7:5.mlp").
    """
    notices: list[str] = []

    def read(parameter: Parameter, name: str) -> Any:
        if name not in params:
            return parameter.default
        try:
            return parameter.read(params[name])
        except ValueError as error:
            shown = f"; showing {parameter.default}" if parameter.default not in ("", None) else ""
            notices.append(f"The link asks for {name} = {quote(params[name])}, {error}{shown}.")
            return parameter.default

    a = read(one_of("model_a", models, default.model_a), "a")
    b = read(one_of("model_b", [*models, CLEAN, NO_MODEL], default.model_b), "b")
    prompts = []
    for name in ("prompt", "prompt_b"):
        prompt, cut = limit_prompt(params.get(name, getattr(default, name)))
        prompts.append(prompt)
        notices += cut
    cell = default.cell if "prompt" not in params and "node" not in params else None
    if "node" in params:
        cell = parse_cell(params["node"])
        if cell is None:
            notices.append(f"The link asks for node = {quote(params['node'])}; a node reads like A:7:5.mlp.")
    selection = Selection(
        model_a=a,
        model_b=b,
        prompt=prompts[0],
        prompt_b=prompts[1],
        align=read(one_of("align", ALIGN, default.align), "align"),
        # whether they can be made is checked against the model, when it runs
        edits=read(text("edits", default.edits, PROMPT_LIMIT), "edits"),
        cell=cell,
    )
    return selection, {each.key: read(each, each.key) for each in parameters}, notices


def format_url(selection: Selection, values: Mapping[str, Any], parameters: Sequence[Parameter]) -> dict[str, str]:
    """The query parameters of a selection and of a page's own values; `parse_url` of them gives both back. Defaults are
    written too, so that a link means the same when a later version has others; what is nothing is left out."""
    params = {"a": selection.model_a, "b": selection.model_b, "prompt": selection.prompt}
    if selection.prompt_b:
        params["prompt_b"] = selection.prompt_b
    if selection.align != ALIGN[0]:
        params["align"] = selection.align
    if selection.edits.strip():
        params["edits"] = selection.edits.strip()
    for each in parameters:
        written = each.write(values[each.key])
        if written or each.default not in ("", None):
            params[each.key] = written
    if selection.cell is not None:
        params["node"] = format_cell(selection.cell)
    return params


def fit_link(params: dict[str, str], limit: int = LINK_LIMIT) -> tuple[dict[str, str], list[str]]:
    """The parameters as far as a link can hold them, and a sentence where it cannot: the longest are left out, so that
    what is opened is another view, never a refused request.

    >>> fit_link({"a": "x", "prompt": "y" * 90}, limit=60)[0]
    {'a': 'x'}
    """
    if (n := len(urlencode(params))) <= limit:
        return params, []
    kept, left = dict(params), []
    while kept and len(urlencode(kept)) > limit:
        left.append(max(kept, key=lambda name: len(quote_plus(kept[name]))))
        del kept[left[-1]]
    return kept, [
        f"A link to this view would have {n:,} characters, and one of {limit:,} is the longest that opens: the address "
        f"leaves out {' and '.join(left)}. Export the view, or shorten the text, to take it along."
    ]


def format_cell(cell: Cell) -> str:
    return f"{'AB'[cell.panel]}:{cell.pos}:{cell.site}"


def parse_cell(text: str) -> Cell | None:
    found = re.fullmatch(r"([AB]):(\d{1,6}):([\w.]{1,40})", text, flags=re.ASCII)
    return Cell(panel="AB".index(found[1]), pos=int(found[2]), site=found[3]) if found else None


def read_cell(value: Any) -> Cell | None:
    """What the map component reports as chosen, or None for what is no cell: a browser can send anything."""
    if not isinstance(value, Mapping):
        return None
    panel, pos, site = value.get("panel"), value.get("pos"), value.get("site")
    if type(panel) is not int or panel not in (0, 1) or type(pos) is not int or not isinstance(site, str):
        return None
    return parse_cell(f"{'AB'[panel]}:{pos}:{site}")


def read_pick(value: Any) -> dict[str, Any]:
    """What a picture reports as clicked, {"panel", "pos", "site"} as far as it is that: a browser can send anything.

    >>> read_pick({"site": "3.attn", "pos": 2, "turn": 1})
    {'pos': 2, 'site': '3.attn'}
    """
    if not isinstance(value, Mapping):
        return {}
    found: dict[str, Any] = {}
    if value.get("panel") in ("0", "1"):  # an attribute of a mark, so text
        found["panel"] = int(value["panel"])
    if type(pos := value.get("pos")) is int and 0 <= pos < 1_000_000:
        found["pos"] = pos
    if isinstance(site := value.get("site"), str) and re.fullmatch(r"[\w.]{1,40}", site, flags=re.ASCII):
        found["site"] = site
    return found


def fit_cell(cell: Cell | None, tokens: Sequence[int], sites: Sequence[Sequence[str]]) -> tuple[Cell, list[str]]:
    """The cell, brought inside the traces; tokens[i], sites[i]: number of positions, names of sites of panel i."""
    if cell is None:
        return Cell(panel=0, pos=tokens[0] - 1, site="out"), []
    notices: list[str] = []
    fitted = cell
    if cell.panel >= len(tokens):
        fitted = replace(fitted, panel=0)
    last = tokens[fitted.panel] - 1
    if cell.pos > last:
        notices.append(f"There is no position {cell.pos} in this prompt; showing the last, {last}.")
        fitted = replace(fitted, pos=last)
    if cell.site not in sites[fitted.panel]:
        near = get_close_matches(cell.site, sites[fitted.panel], n=1) or ["out"]
        notices.append(f"There is no site {quote(cell.site)} in this model; showing {near[0]}.")
        fitted = replace(fitted, site=near[0])
    return fitted, notices


def limit_prompt(prompt: str) -> tuple[str, list[str]]:
    """The prompt within PROMPT_LIMIT characters, and a notice when it was cut."""
    if len(prompt) <= PROMPT_LIMIT:
        return prompt, []
    return prompt[:PROMPT_LIMIT], [f"The prompt has {len(prompt)} characters; only the first {PROMPT_LIMIT} are read."]


def quote(value: Any) -> str:
    """A value from outside, as a sentence shows it: short, and with nothing in it that is no text."""
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= 40 else text[:40] + "..."
    return repr(text) if isinstance(value, str) else text

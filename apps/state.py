"""What is chosen in the dashboard, as one value, and the same as URL query parameters.

A URL is input from a stranger: `parse_url` never raises, it falls back and says so in a notice, and what it
quotes is plain text (the page shows notices as text, never as markup).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

__all__ = [
    "HEADS",
    "NO_MODEL",
    "PROMPT_LIMIT",
    "WAYS",
    "Cell",
    "Selection",
    "fit_cell",
    "format_url",
    "parse_url",
    "read_cell",
]

PROMPT_LIMIT = 4000
"""Characters of a prompt; the models read far fewer tokens, and a URL should stay a URL."""

WAYS = ("", "q", "k", "v", "r")
"""With what attention reads from depth, where a system mixes queries, keys, values and the carried stream apart; a
model without that way shows its first."""

HEADS = ("mean", *map(str, range(64)))
"""What the choice of an attention head can be; a site without that head shows its mean."""

NO_MODEL = "none"
"""Stands for "no model B": show A alone."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A node of the grid: panel 0 (A) or 1 (B), position from 0, site."""

    panel: int
    pos: int
    site: str


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Everything that a link restores. edits: of model A, as JSON, or nothing. head: "mean", or the number of an
    attention head as text; cell None: the last position at `out`."""

    model_a: str
    model_b: str
    prompt: str
    quantity: str
    depth: str
    head: str = "mean"
    way: str = ""
    cell: Cell | None = None
    edits: str = ""


def parse_url(
    params: Mapping[str, str],
    default: Selection,
    *,
    models: Sequence[str],
    quantities: Sequence[str],
    depths: Sequence[str],
) -> tuple[Selection, list[str]]:
    """The selection that URL parameters ask for, and one notice for each that had to fall back to `default`.

    Parameters: a, b (models; b may be "none"), prompt, edits (JSON), quantity, depth, head ("mean", "0", ...), way
    ("q", ...), and node ("A:7:5.mlp").
    """
    notices: list[str] = []
    one_of = partial(_one_of, params, notices)
    a = one_of("a", models, default.model_a)
    b = one_of("b", [*models, NO_MODEL], default.model_b)
    prompt, cut = limit_prompt(params.get("prompt", default.prompt))
    notices += cut
    cell = default.cell if "prompt" not in params and "node" not in params else None
    if "node" in params:
        cell = parse_cell(params["node"])
        if cell is None:
            notices.append(f"The link asks for node = {_quote(params['node'])}; a node reads like A:7:5.mlp.")
    selection = Selection(
        model_a=a,
        model_b=b,
        prompt=prompt,
        quantity=one_of("quantity", quantities, default.quantity),
        depth=one_of("depth", depths, default.depth),
        head=one_of("head", HEADS, default.head),
        way=one_of("way", WAYS, default.way),
        cell=cell,
        edits=_limit_edits(params.get("edits", default.edits), notices),
    )
    return selection, notices


def _one_of(params: Mapping[str, str], notices: list[str], key: str, allowed: Sequence[str], fallback: str) -> str:
    """The parameter `key` where it is allowed, else the fallback and a notice."""
    value = params.get(key, fallback)
    if value in allowed:
        return value
    near = get_close_matches(value, allowed, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    notices.append(f"The link asks for {key} = {_quote(value)}, which does not exist{hint}; showing {fallback}.")
    return fallback


def parse_analysis(
    params: Mapping[str, str],
    *,
    model: str,
    prompt: str,
    analysis: str,
    models: Sequence[str],
    analyses: Sequence[str],
) -> tuple[tuple[str, str, str], list[str]]:
    """(model, prompt, analysis) that the URL of a page of analyses asks for (parameters a, prompt, analysis), and one
    notice for each that had to fall back to what is given here."""
    notices: list[str] = []
    chosen = _one_of(params, notices, "a", models, model)
    prompt, cut = limit_prompt(params.get("prompt", prompt))
    notices += cut
    return (chosen, prompt, _one_of(params, notices, "analysis", analyses, analysis)), notices


def format_url(selection: Selection) -> dict[str, str]:
    """The query parameters of a selection; `parse_url` of them gives the selection back."""
    params = {
        "a": selection.model_a,
        "b": selection.model_b,
        "prompt": selection.prompt,
        "quantity": selection.quantity,
        "depth": selection.depth,
        "head": selection.head,
    }
    if selection.edits.strip():
        params["edits"] = selection.edits.strip()
    if selection.way:
        params["way"] = selection.way
    if selection.cell is not None:
        params["node"] = format_cell(selection.cell)
    return params


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
        notices.append(f"There is no site {_quote(cell.site)} in this model; showing {near[0]}.")
        fitted = replace(fitted, site=near[0])
    return fitted, notices


def limit_prompt(prompt: str) -> tuple[str, list[str]]:
    """The prompt within PROMPT_LIMIT characters, and a notice when it was cut."""
    if len(prompt) <= PROMPT_LIMIT:
        return prompt, []
    return prompt[:PROMPT_LIMIT], [f"The prompt has {len(prompt)} characters; only the first {PROMPT_LIMIT} are read."]


def _limit_edits(edits: str, notices: list[str]) -> str:
    """The edits of a link, or none and a notice where they are too long to be any. What they say is checked against
    the model when it runs."""
    if len(edits) <= PROMPT_LIMIT:
        return edits
    notices.append(f"The link asks for edits of {len(edits)} characters; {PROMPT_LIMIT} are allowed, so none is made.")
    return ""


def _quote(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")

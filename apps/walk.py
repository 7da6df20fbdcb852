"""The walk to the chosen node as a link keeps it: "A18-out-%20king~A18-out~A18-7.mlp" are the nodes that one came
through, the first with the token whose logit one comes from. The chosen node itself, where the walk ends, is not in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

from t2lens.apps.state import Cell, Parameter, read_cell

__all__ = ["STEPS", "WALK", "fit_walk", "parse_walk", "write_walk"]

STEPS = 24
"""Nodes that a walk keeps, the last ones; the maps keep as many (`LONGEST` of walk.js)."""

WORD = 40
"""Characters of its token."""

_STEP = re.compile(r"([AB])(\d{1,6})-([\w.]{1,40})(?:-(.{0,480}))?", flags=re.ASCII)


def write_walk(steps: Any) -> str:
    """What the maps report as their trail, [{panel, pos, site, word}, ...], as text; nothing for what is no trail: a
    browser can send anything.

    >>> write_walk([{"panel": 0, "pos": 3, "site": "out", "word": " a~b"}, {"panel": 0, "pos": 3, "site": "out"}])
    'A3-out-%20a%7Eb~A3-out'
    """
    if not isinstance(steps, list | tuple):
        return ""
    written = []
    for step in steps[-STEPS:]:
        cell = read_cell(step)
        if cell is None:
            return ""
        word = step.get("word") if not written else None
        said = "-" + quote(word[:WORD], safe="", errors="replace").replace("~", "%7E") if isinstance(word, str) else ""
        written.append(f"{'AB'[cell.panel]}{cell.pos}-{cell.site}{said}")
    return "~".join(written)


def parse_walk(text: str) -> list[dict[str, Any]]:
    """The trail that a text means, as the maps take it. ValueError (a sentence's end) for what is none."""
    steps: list[dict[str, Any]] = []
    for part in text.split("~") if text else []:
        found = _STEP.fullmatch(part)
        if found is None or (found[4] is not None and steps) or len(steps) == STEPS:
            raise ValueError(f"which is no walk of at most {STEPS} nodes, like A18-out~A18-7.mlp")
        word = {} if found[4] is None else {"word": unquote(found[4])[:WORD]}
        steps.append({"panel": "AB".index(found[1]), "pos": int(found[2]), "site": found[3], **word})
    return steps


def fit_walk(text: str, cell: Cell, n_pos: Sequence[int], sites: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The trail to `cell`. n_pos[i], sites[i]: positions and sites of panel i, from the embedding up.

    ValueError, a sentence, where it is none here: it leaves the prompt or the model, or goes where no read goes, to a
    later position or up.
    """
    steps = parse_walk(text)
    ends: list[Mapping[str, Any]] = [*steps[1:], {"panel": cell.panel, "pos": cell.pos, "site": cell.site}]
    ends = ends[: len(steps)]  # of no walk there is no end
    for step, end in zip(steps, ends, strict=True):
        panel = step["panel"]
        if panel >= len(n_pos) or step["pos"] >= n_pos[panel] or step["site"] not in sites[panel]:
            raise ValueError(
                f"The walk to this node comes through {step['site']}@{step['pos']}, which is not here; it is left out."
            )
        if panel != end["panel"]:
            continue  # from a node of A one goes on from the one beside it
        moved = (end["pos"] - step["pos"], sites[panel].index(end["site"]) - sites[panel].index(step["site"]))
        if max(moved) > 0 or (moved == (0, 0)) != ("word" in step):
            raise ValueError("The walk to this node is left out: one of its nodes cannot read from the next.")
    return steps


def _read(given: str) -> str:
    parse_walk(given)
    return given


WALK = Parameter(key="walk", default="", read=_read)

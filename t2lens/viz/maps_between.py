"""Two traces beside each other in the picture of the maps: which position and site of one meets which of the other, and
the map of the difference B - A. The same rules as in the page (panel.js, between.js)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from t2lens.viz.labels import fmt
from t2lens.viz.maps_drawing import Map
from t2lens.viz.payload import alignment, layers_of

__all__ = ["MINUS", "beside", "chosen", "depth_difference", "grid_difference", "same_site", "sequence_difference"]

MINUS = "B \u2212 A"


def chosen(traces: Sequence[Any], cell: tuple[int, int, str], align: str) -> tuple[list[int | None], list[str]]:
    """The position and the site of the chosen node in every trace."""
    panel, pos, site = cell
    aligned = alignment([one.tokens for one in traces], align)
    places = beside([len(one.tokens) for one in traces], aligned["shift"] if aligned else 0, panel, pos)
    every = [[str(name) for name in one.dataset["read"].values] for one in traces]
    met = [site if i == panel else same_site(site, ["embed", *mine], every[panel]) for i, mine in enumerate(every)]
    return places, [each or site for each in met]


def beside(n_pos: Sequence[int], shift: int, panel: int, pos: int) -> list[int | None]:
    """The position that stands beside `pos` of `panel` in every panel, where there is one: p of A meets p + shift of
    B."""
    places = [pos + shift * (i - panel) for i in range(len(n_pos))]
    return [at if 0 <= at < n else None for at, n in zip(places, n_pos, strict=True)]


def same_site(site: str, mine: Sequence[str], other: Sequence[str], *, exact: bool = False) -> str | None:
    """The site among `mine` that meets a site of `other`: of its name where both have as many layers, else of its kind
    at the same relative depth. exact: None where there is none, in place of one that stands in for it."""
    layers, theirs = layers_of(mine), layers_of(other)
    if "." not in site or layers == theirs:
        name = site
    else:
        layer, kind = site.split(".")
        level = int(np.floor(int(layer) / max(1, theirs - 1) * (layers - 1) + 0.5))
        name = f"{level}.{kind}"
        if name not in mine and not exact:
            name = f"{level}.attn"
    return name if name in mine else None if exact else "out"


def grid_difference(a: Map, b: Map, shift: int) -> Map:
    """B - A of two grids of one quantity, on the coordinates of A."""
    rows = [_index(b.rows, same_site(site, b.rows, a.rows, exact=True)) for site in a.rows]
    return _difference(a, b, rows, _shifted(a, b, shift), _missing(a, b), "site {row}\npos {at} {column}")


def depth_difference(a: Map, b: Map, sites: tuple[Sequence[str], Sequence[str]]) -> Map:
    """B - A of what is read from depth at one position of each, by the names of the sources. sites: of A and B."""
    why = _missing(a, b)
    if not why and layers_of(sites[0]) != layers_of(sites[1]):
        why = "A and B differ in depth, so the same source stands at other depths"
    if not why and not {name for name in a.columns if name != "embed"} & set(b.columns):
        why = "the sources of A and B have different names; the mixing matrix compares them by atom"
    rows, columns = [_index(b.rows, name) for name in a.rows], [_index(b.columns, name) for name in a.columns]
    return _difference(a, b, rows, columns, why, "read {row}\ntakes from {column}")


def sequence_difference(a: Map, b: Map, shift: int, same: bool) -> Map:
    """B - A of sequence attention. same: whether both maps are of the same site."""
    why = _missing(a, b) or ("" if same else "A and B show sites that are not the same")
    at = _shifted(a, b, shift)
    return _difference(a, b, at, at, why, "query {down} {row}\nkey {at} {column}")


def _missing(a: Map, b: Map) -> str:
    """Why one of them is not there."""
    return next((f"{letter}: {each.instead}" for letter, each in (("A", a), ("B", b)) if each.instead), "")


def _difference(a: Map, b: Map, rows: Sequence[int], columns: Sequence[int], why: str, words: str) -> Map:
    if why:
        values, blank = np.zeros((1, 1)), np.ones((1, 1), bool)
        nothing = replace(a, name=MINUS, values=values, blank=blank, rows=[""], columns=[""])
        return replace(nothing, instead=f"No difference. {why[:1].upper()}{why[1:]}.")
    take = np.ix_(rows, columns)  # -1 takes the last, which is then blank
    values = b.values[take].astype(float) - a.values.astype(float)
    alone = (np.array(rows) < 0)[:, None] | (np.array(columns) < 0)[None, :]
    blank = a.blank | b.blank[take] | alone
    there = values[np.isfinite(values) & ~blank]
    top = float(np.abs(there).max()) if there.size else 0.0
    label = f"{MINUS}: {a.scale.label.removesuffix(', root scale')}, root scale"
    scale = replace(a.scale, label=label, low=-(top or 1.0), high=top or 1.0, ramp="both", warp="root", above=0)

    def tip(r: int, c: int) -> str:
        place = words.format(row=a.rows[r], column=a.columns[c], at=c, down=r)
        return f"{place}\n{MINUS}: {fmt(float(values[r, c]), 5)}"

    return replace(a, name=MINUS, values=values, blank=blank, tip=tip, scale=scale, instead="")


def _shifted(a: Map, b: Map, shift: int) -> list[int]:
    n = len(b.columns)
    return [c + shift if 0 <= c + shift < n else -1 for c in range(len(a.columns))]


def _index(names: Sequence[str], name: str | None) -> int:
    return list(names).index(name) if name is not None and name in names else -1

"""How a chart of a finding becomes series: which numbers, in which order, under which words; one rule for all pictures.

A coordinate `pos` with token strings beside it (`token(pos)`) is labelled with them, on a numeric axis, so that
repeated tokens stay apart. Words are plain text on one line, never markup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from t2lens.viz.depth_map import KINDS
from t2lens.viz.dots import family_of
from t2lens.viz.labels import clip, fmt, glyphs, one_line

__all__ = ["Axis", "Series", "axis", "exact", "node_of", "series"]

LABEL, TITLE = 14, 80  # characters of a label of an axis, and of a title made of what a variable means
_SITES = ("site", "read", "atom", "write")
_POSITIONS = ("pos", "query", "key")
_SOURCES = ("source", "atom", "write")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The places of one axis. words: their labels, clipped; full: the same in full, with the position where a token
    stands; nodes: of each place what it says of a node of the maps, {"pos": 3} or {"site": "3.attn", "way": "q"}, or
    nothing; numbers: the places themselves, where they are numbers; said: what the axis is, where its name is no
    word for a reader."""

    name: str
    words: tuple[str, ...]
    full: tuple[str, ...]
    nodes: tuple[dict[str, Any], ...]
    numbers: np.ndarray | None = None
    unit: str = ""
    said: str = ""

    @property
    def label(self) -> str:
        if self.said:
            return self.said
        name = {"pos": "position"}.get(self.name, self.name.replace("_", " "))
        return f"{name} ({self.unit})" if self.unit else name

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True, kw_only=True)
class Series:
    """What one chart draws.

    kind: as in `Chart`. values: of "heat" [y, x]; of "bars", "stack" and "lines" [name, x]; of "scatter" [dot].
    names: the words of a legend, one "" where there is none. Of "scatter": `across` [dot], the value on the other
    axis; `group` [dot], an index into names; `dims`, the axes over which dots run, first axis slowest.
    """

    kind: str
    title: str
    label: str
    unit: str
    signed: bool
    values: np.ndarray
    x: Axis
    y: Axis | None = None
    names: tuple[str, ...] = ("",)
    by: Axis | None = None
    across: np.ndarray | None = None
    group: np.ndarray | None = None
    dims: tuple[Axis, ...] = ()

    def tip(self, *index: int) -> str:
        """What a mark says, in lines: where it is and its exact value. index: into values."""
        number = exact(self.values[index])
        value = f"{self.label}: {number}" + (f" {self.unit}" if self.unit and self.unit not in self.label else "")
        places = [f"{axis.name} {axis.full[i]}" for axis, i in self._at(index)]
        if self.across is not None:
            return "\n".join([*places, f"{self.x.label}: {exact(self.across[index])}", value])
        return "\n".join([*places, value])

    def called(self, dot: int) -> str:
        """The name of a dot: what it is of, in one line; a route reads from left to right."""
        places = {axis.name: axis.full[i] for axis, i in self._at((dot,)) if len(axis) > 1}
        if len(places) == 2 and "read" in places:
            (source,) = (word for name, word in places.items() if name != "read")
            return f"{source} \u2192 {places['read']}"
        return ", ".join(places.values())

    def node(self, *index: int) -> dict[str, Any]:
        """The node of the maps that a mark stands for: {"site", "way", "pos"} as far as its axes say; rows go first."""
        found: dict[str, Any] = {}
        for axis, i in self._at(index):
            if not found.keys() & axis.nodes[i].keys():
                found |= axis.nodes[i]
        return found

    def _at(self, index: tuple[int, ...]) -> list[tuple[Axis, int]]:
        if self.across is not None:
            places = np.unravel_index(index[0], [len(axis) for axis in self.dims])
            return [(axis, int(i)) for axis, i in zip(self.dims, places, strict=True)]
        first = self.y if self.kind == "heat" else self.by
        return [*([(first, index[0])] if first is not None else []), (self.x, index[1])]


def exact(value: Any) -> str:
    """The shortest text that reads back to the same number of the same type."""
    return str(value) if isinstance(value, np.generic) else repr(value)


def series(finding: Any, chart: int = 0) -> Series:
    """The series of one chart of a finding. IndexError where there is no such chart."""
    if not 0 <= chart < len(finding.charts):
        raise IndexError(f"This finding has {len(finding.charts)} chart(s); there is no chart {chart}.")
    spec, data = finding.charts[chart], finding.dataset
    variable = data[spec.variable]
    name, unit = spec.variable.replace("_", " "), variable.attrs.get("unit", "")
    meaning = clip(variable.attrs.get("meaning", ""), TITLE)
    head = {
        "kind": spec.kind,
        "title": (spec.title or meaning[:1].upper() + meaning[1:] or finding.title).replace("`", ""),
        "label": spec.label or (f"{name} ({unit})" if unit and unit not in name else name),
        "unit": unit,
        "signed": spec.signed,
    }
    if spec.kind == "scatter":
        return _dots(data, spec, head)
    by = spec.y if spec.kind == "heat" else spec.by
    array, at = variable, dict(spec.at)
    keep = [*([by] if by else []), spec.x]
    array = array.isel({dim: at.get(str(dim), -1) for dim in array.dims if str(dim) not in keep}).transpose(*keep)
    values = array.values if by else array.values[None]
    rows = axis(data, by) if by else None
    if spec.kind == "heat":
        return Series(**head, values=values, x=axis(data, spec.x), y=rows)
    return Series(**head, values=values, x=axis(data, spec.x), by=rows, names=rows.words if rows else ("",))


def axis(data: Any, name: str) -> Axis:
    """The places of one axis of a dataset."""
    n, source = data.sizes[name], "token" if name in _POSITIONS and _is_token_of(data, name) else name
    own = data[name].values if name in data.coords and data[name].ndim == 1 else np.arange(n)
    if source not in data.coords or data[source].ndim != 1 or data[source].dtype.kind in "iu":
        words = full = [str(i) for i in own]
    elif data[source].dtype.kind == "f":
        words = full = [fmt(float(value)) for value in data[source].values]
    else:
        shown = glyphs if source == "token" else one_line
        full = [shown(str(word)) for word in data[source].values]
        words = [clip(word, LABEL) for word in full]
    if source == "token":
        full = [f"{place} {word}" for place, word in zip(own, full, strict=True)]
    numbers = own.astype(float) if own.dtype.kind in "iuf" else None
    unit = data[name].attrs.get("unit", "") if name in data.coords else ""
    nodes = _nodes(data, name, own)
    return Axis(name=name, words=tuple(words), full=tuple(full), nodes=nodes, numbers=numbers, unit=unit)


def _is_token_of(data: Any, name: str) -> bool:
    """Whether the coordinate `token` says what stands at each place: elsewhere it may be a list of tokens."""
    if "token" not in data.coords or data["token"].ndim != 1:
        return False
    (dim,) = data["token"].dims
    return dim in _POSITIONS and data.sizes[dim] == data.sizes[name]


def _nodes(data: Any, name: str, own: np.ndarray) -> tuple[dict[str, Any], ...]:
    if name in ("pos", "query"):
        return tuple({"pos": int(place)} if own.dtype.kind in "iu" else {} for place in own)
    beside = (each for each in _SITES if each in data.coords and data[each].dims == (name,))
    source = name if name in _SITES else next(beside, "")
    if source not in data.coords or data[source].ndim != 1:
        return ({},) * len(own)
    return tuple(node_of(str(word)) for word in data[source].values)


def node_of(name: str) -> dict[str, Any]:
    """The node of the maps that a read or an atom stands for, or nothing: `3.attn.q` is way q of the site 3.attn."""
    parts = name.split(".")
    if len(parts) == 3:
        return {"site": ".".join(parts[:2]), "way": parts[2]}
    return {"site": name} if len(parts) == 2 or name in ("embed", "out") else {}


def _dots(data: Any, spec: Any, head: dict[str, Any]) -> Series:
    variable, across = data[spec.variable], data[spec.x]
    names, group = _groups(data, variable, spec.by)
    by = axis(data, spec.by) if spec.by in data.coords else None
    unit = across.attrs.get("unit", "")
    words = ("",) * variable.size
    return Series(
        **head,
        values=variable.values.ravel(),
        x=Axis(name=spec.x, words=words, full=words, nodes=({},) * variable.size, unit=unit, said=spec.xlabel),
        names=names,
        by=by,
        across=across.transpose(*variable.dims).values.ravel(),
        group=group,
        dims=tuple(axis(data, str(dim)) for dim in variable.dims),
    )


def _groups(data: Any, variable: Any, by: str) -> tuple[tuple[str, ...], np.ndarray]:
    """The words of a legend and the entry of each dot: by a coordinate; else by what kind of source a dot is of."""
    over = by or next((str(dim) for dim in variable.dims if dim in _SOURCES), "")
    if not over or over not in data.coords:
        return ("",), np.zeros(variable.size, int)
    labels = [str(word) for word in data[over].values]
    if not by:
        held = data["holds"].transpose(..., over).values if "holds" in data and over in data["holds"].dims else None
        labels = [family_of(word, () if held is None else held[:, j].tolist()) for j, word in enumerate(labels)]
    shape = [-1 if str(dim) == over else 1 for dim in variable.dims]
    flat = np.broadcast_to(np.array(labels, dtype=object).reshape(shape), variable.shape).ravel().tolist()
    order = labels if by else sorted(labels, key=[*KINDS.values(), *labels].index)
    known = {word: i for i, word in enumerate(dict.fromkeys(order))}
    return tuple(one_line(word) for word in known), np.array([known[word] for word in flat])

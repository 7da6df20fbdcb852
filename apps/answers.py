"""What the two-axis maps ask for after their payload, answered: `t2lens.viz.payload` says what each answer holds.

What is asked comes from a browser, so that anything can stand in it: what is no question about these panels is left
out, and never raises. What cannot be said (edits under which an analysis is not right, a prompt that is too long for
it) is answered with a sentence, `why`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import t2lens
from t2lens.analysis.flow import Flow, site_masses, start_of
from t2lens.analysis.inputs import read_batch
from t2lens.analysis.node_effects import node_effects
from t2lens.analysis.quantities import QUANTITIES, attention_of, grid
from t2lens.analysis.under_edits import VARIANTS, check_needs, check_under_edits
from t2lens.apps.memory import Memory
from t2lens.apps.words import why
from t2lens.edits import edited, read_edits
from t2lens.viz.maps_cross import ends
from t2lens.viz.payload import DEPTH, next_tokens, pack_array, pack_lens, pack_reads

if TYPE_CHECKING:
    from t2lens.apps.frame import Side

__all__ = ["KINDS", "LONG", "MOST", "answer", "way_of"]

MOST = 16
"""Questions that are answered at a time, the last ones."""

LONG = 512
"""Tokens of a prompt up to which the rollout of a node is offered. The first needs a pass and a number for every pair
of positions in every attention sublayer: a second for 24 of them at that length, and more than three at twice that.
They are kept (25 MB), and later rollouts take hundredths of a second."""

_FLOWS = Memory(limit=0.4e9, size=lambda flow: flow.nbytes + 10**6)
_FOUND = Memory(limit=0.05e9, size=lambda found: 2 * len(str(found)))
_BACK = threading.Lock()  # a flow makes its shares as they are needed


@dataclass(frozen=True, kw_only=True)
class _Want:
    """A checked question: about panel number `panel`, whose trace has this position, site, way and quantity."""

    kind: str
    panel: int
    pos: int = 0
    site: str = ""
    way: str = ""
    quantity: str = ""


def answer(wants: Any, panels: Sequence[tuple[Side, Any]]) -> list[dict[str, Any]]:
    """The answers to what a browser asked, in the order of asking; each question once, and no more than `MOST`.

    wants: anything. panels: (side, its trace) of A and, where there is one, B.
    """
    checked = [_read(want, panels) for want in wants[-4 * MOST :]] if isinstance(wants, list | tuple) else []
    last = list(dict.fromkeys(want for want in checked[::-1] if want is not None))[:MOST][::-1]
    return [_answer(want, *panels[want.panel]) for want in last]


def _read(want: Any, panels: Sequence[tuple[Side, Any]]) -> _Want | None:
    """The question, or None where it is none."""
    if not isinstance(want, Mapping):
        return None
    kind, panel = want.get("kind"), want.get("panel")
    if not isinstance(kind, str) or kind not in KINDS:
        return None
    if type(panel) is not int or not 0 <= panel < len(panels):
        return None
    trace = panels[panel][1]
    sites = [str(site) for site in trace.of_way().dataset["read"].values]
    checks: dict[str, Callable[[Any], bool]] = {
        "pos": lambda value: type(value) is int and 0 <= value < len(trace.tokens),
        "site": lambda value: isinstance(value, str) and value in (attention_of(trace) if kind == "row" else sites),
        "way": lambda value: isinstance(value, str) and value in trace.ways,
        "quantity": lambda value: isinstance(value, str) and value in QUANTITIES,
    }
    given: dict[str, Any] = {part: want.get(part) for part in KINDS[kind][0]}
    if not all(checks[part](value) for part, value in given.items()):
        return None
    return _Want(kind=kind, panel=panel, **given)


def _answer(want: _Want, side: Side, trace: Any) -> dict[str, Any]:
    parts, make = KINDS[want.kind]
    asked = {"kind": want.kind, "panel": want.panel, **{part: getattr(want, part) for part in parts}}
    try:
        return asked | make(want, side, trace)
    except (ValueError, TypeError, KeyError) as error:
        return asked | {"why": why(error)}


# --- what is computed for one node


def _key(side: Side, *parts: Any) -> tuple[Any, ...]:
    return (side.loaded.name, side.loaded.weights_hash, side.prompt, side.edits.strip(), *parts)


def way_of(model: Any, site: str, way: str) -> str:
    """The way in which a site reads where it has the one that is shown, else its first, as the maps show it."""
    ways = model.residual.ways(next(each for each in model.sites if each.name == site))
    return way if way in ways else ways[0]


def _rollout(want: _Want, side: Side, trace: Any) -> dict[str, Any]:
    n = len(trace.tokens)
    if n > LONG:
        raise ValueError(
            f"The rollout is offered for up to {LONG} tokens, and this prompt has {n}; t2lens.analysis.rollout follows "
            "longer ones."
        )

    def make() -> Flow:
        with side.loaded.twin() as model:
            edits = read_edits(side.edits or ())
            check_under_edits(model, edits, "rollout")
            with edited(model, edits):
                return Flow(model, read_batch(model, side.prompt)).divide()

    flow = _FLOWS.get(_key(side), make)
    model = flow.frozen.model
    start = start_of(model, want.site, way_of(model, want.site, want.way))
    with _BACK:
        found = flow.back(start, want.pos)
    mass, absorbed = site_masses(model, start, found), found.atom_mass[0].numpy()
    values = np.full((1 + len(model.sites), n), np.nan)
    values[0], values[1 : 1 + len(mass)] = absorbed, mass
    return {"values": pack_array(values, "f4"), "ends": ends(trace.tokens, absorbed, float(found.stuck.sum()))}


def _effects(want: _Want, side: Side, trace: Any) -> dict[str, Any]:  # noqa: ARG001
    def make() -> dict[str, Any]:
        with side.loaded.twin() as model:
            edits, way = read_edits(side.edits or ()), way_of(model, want.site, want.way)
            check_needs(model, edits, ("account", *VARIANTS))
            with edited(model, edits):
                found = node_effects(model, side.prompt, pos=want.pos, site=want.site, way=way)
        return {
            "over": found.over,
            "unit": "nats",
            "values": found.values,
            "floor": found.floor,
            "note": "KL(plain || without) of the prediction at this position: one route into this node is taken out, "
            f"at this position alone; what is below {found.floor:.1g} is rounding.",
        }

    return _FOUND.get(_key(side, want.pos, want.site, want.way), make)


# --- what a lean payload left out


def _column(want: _Want, side: Side, trace: Any) -> dict[str, Any]:  # noqa: ARG001
    data = trace.dataset.drop_vars(["sequence_attention", "local_attention"], errors="ignore")
    here = t2lens.Trace(data.isel(pos=[want.pos]), trace._meta)
    pack, ways = partial(pack_array, precision="f4"), {}
    for way in here.ways:
        one = here.of_way(way)
        there = [key for key, (variable, *_) in DEPTH.items() if variable in one.dataset]
        reads = {key: pack_reads(one.dataset, key, one.source_atoms, pack) for key in there}
        ways[way] = {"reads": reads, "lens": pack_lens(one.dataset, "f4")}
    following = next_tokens(here.dataset)
    return {"ways": ways, "next": None if following is None else following[0]}


def _row(want: _Want, side: Side, trace: Any) -> dict[str, Any]:  # noqa: ARG001
    if not trace.causal:
        raise ValueError("The attention of this model looks ahead as well as back, which the maps do not draw.")
    heads = attention_of(trace)[want.site][:, want.pos, : want.pos + 1]
    rows = {"mean": heads.mean(axis=0), "max": heads.max(axis=0), "heads": heads}
    return {name: pack_array(row, "f4") for name, row in rows.items()}


def _grid(want: _Want, side: Side, trace: Any) -> dict[str, Any]:  # noqa: ARG001
    found = grid(trace, want.quantity, want.way or None)
    if found.absent:
        raise ValueError(f"{found.quantity.label[:1].upper()}{found.quantity.label[1:]}: {found.absent}.")
    return {"values": pack_array(found.values, "f4"), "missing": found.missing}


KINDS: dict[str, tuple[tuple[str, ...], Callable[[_Want, Side, Any], dict[str, Any]]]] = {
    "rollout": (("pos", "site", "way"), _rollout),
    "effects": (("pos", "site", "way"), _effects),
    "column": (("pos",), _column),
    "row": (("pos", "site"), _row),
    "grid": (("way", "quantity"), _grid),
}
"""kind -> (what a question of that kind names beside the panel, what answers it)."""

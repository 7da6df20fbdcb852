"""What edits touch that the account of a pass cannot see in its gates and atoms."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from t2lens.edits.edit import Edit
from t2lens.edits.places import CARRIED, places_of
from t2lens.residual import Read

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["Marks", "marks"]

_STREAM = re.compile(r"blocks\.(\d+)\.hook_(?:resid|streams)_(pre|mid|post)")


@dataclass(frozen=True)
class Marks:
    """What edits touch that is not a gate or an atom, so that the account of the pass does not follow from its writes.

    reads: names of reads that were edited after the residual system had made them. lost: reads after an edit of the
    stream, which no sum of writes gives. weights: reads whose depth weights were edited. readout: whether something
    between the last read and the logits was.
    """

    reads: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()
    readout: bool = False


def marks(model: Transformer, edits: Iterable[Edit]) -> Marks:
    """What these edits touch; KeyError as `check`."""
    names = {place.name for edit in edits for place in places_of(model, edit)}
    streams = [match for match in map(_STREAM.fullmatch, names) if match]
    return Marks(
        reads=frozenset(r.name for r in model.reads if r.site.hook("read", r.way) in names),
        lost=frozenset(r.name for r in model.reads if any(_follows(model, r, int(m[1]), m[2]) for m in streams)),
        weights=frozenset(r.name for r in model.reads if r.site.hook("depth_attn", r.way) in names),
        readout=any(name.startswith(("ln_final.", "unembed.")) for name in names),
    )


def _follows(model: Transformer, read: Read, layer: int, where: str) -> bool:
    """Whether a read is made of the stream that passes `blocks.{layer}.hook_resid_{where}`."""
    site = read.site
    if site.layer is None or site.layer > layer:
        return True
    if site.layer < layer or where == "post":
        return False
    if site.opens and CARRIED in model.residual.ways(site):
        return where == "pre" and read.way == CARRIED  # the other ways were made before
    return where == "pre" or site.kind == "mlp"

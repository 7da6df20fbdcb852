"""What a residual system carries, for other rows: row i of the result goes on from row `rows[i]` of the batch."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from t2lens.residual.sources import Sources
from t2lens.sublayers.positions import Places

__all__ = ["take_rows"]


def take_rows(state: Any, rows: Tensor, places: Places) -> Any:
    """`state` with tensors [B, T, ...] taken at `rows` [R], in the pass that has `places`.

    A state is a tensor, or a tuple, list, dict or dataclass of states; sources, places, and plain values among them.
    """
    if isinstance(state, Tensor):
        return state[rows]
    if isinstance(state, Places):
        return places
    if isinstance(state, Sources):
        return state.take(rows)
    if is_dataclass(state) and not isinstance(state, type):
        return replace(state, **{f.name: take_rows(getattr(state, f.name), rows, places) for f in fields(state)})
    if isinstance(state, dict):
        return {key: take_rows(value, rows, places) for key, value in state.items()}
    if isinstance(state, list | tuple):
        taken = [take_rows(value, rows, places) for value in state]
        if hasattr(state, "_fields"):  # a named tuple
            return type(state)(*taken)
        return type(state)(taken)
    return state

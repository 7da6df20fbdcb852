"""How much of two traces crosses to a browser: everything where it fits, then less, and every loss is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t2lens.analysis.quantities import QUANTITIES, attention_of
from t2lens.analysis.sequence_quantities import averaged_heads
from t2lens.viz.payload import DEPTH, LENS_TOP, maps_payload

__all__ = ["BUDGET", "ROUNDED", "fitted_payload", "size"]

BUDGET = 3_000_000
"""Characters of JSON of one payload, all traces together: what a browser parses and draws without a pause that is felt,
and what a line of 10 Mbit/s brings in some two seconds."""

ROUNDED = "To keep this small, its numbers are rounded to 3 digits; the trace holds them in full."
_ONE_BY_ONE = "Single attention heads come row by row, as they are asked for: all of them would be too much to send."
_NO_HEADS = "To keep this small, single attention heads are left out; the trace holds them."
_MEAN = "These prompts are so long that of attention the mean over heads alone is kept."
_LEAN = (
    "These prompts are too long to send whole: reads from depth and attention come for the chosen node, other "
    "quantities when they are chosen."
)


def fitted_payload(
    traces: Sequence[Any],
    *,
    budget: int = BUDGET,
    measure: Callable[[dict[str, Any]], int] | None = None,
    packed: float = 1.0,
    served: bool = True,
    notes: Sequence[str] = (),
    **view: Any,
) -> dict[str, Any]:
    """The payload of one or two traces that holds most and is no larger than `budget`.

    First the heads go (then what is largest over them), then numbers become float16, and last the payload is lean,
    which needs a server that answers (`served`). What is lost is said in its notes. Where nothing fits: the smallest.

    Args:
        measure: size of a payload; by default that of its JSON. packed: a lower bound of how much smaller than plain
            numbers it makes them, so that what cannot fit is not built.
        view: as `maps_payload`.
    """
    heads = any(len(each) > 1 for trace in traces for each in attention_of(trace).values() if trace.causal)
    notes = [*notes, *([_MEAN] if any(n > 1 for trace in traces for n in averaged_heads(trace).values()) else [])]
    fewer = [] if not heads else [_ONE_BY_ONE if served else _NO_HEADS]
    steps: list[tuple[dict[str, Any], list[str]]] = [
        ({"heads": True}, []),
        ({"maxima": True}, fewer),
        ({}, fewer),
        ({"precision": "f2"}, [*fewer, ROUNDED]),
        *([({"lean": True}, [_LEAN]), ({"precision": "f2", "lean": True}, [_LEAN, ROUNDED])] if served else []),
    ]
    for step, said in steps[:-1]:
        if packed * size(traces, **step) <= budget:
            payload = maps_payload(traces, notes=[*notes, *said], **{**view, **step})
            if (measure or _length)(payload) <= budget:
                return payload
    step, said = steps[-1]
    return maps_payload(traces, notes=[*notes, *said], **{**view, **step})


def size(
    traces: Sequence[Any], *, heads: bool = False, maxima: bool = False, precision: str = "f4", lean: bool = False
) -> int:
    """About how long the numbers of a payload are as text, from the shapes alone: no less than they are by much."""
    total = 0
    for trace in traces:
        n, data = len(trace.tokens), trace.of_way().dataset
        rows = data.sizes["read"] + 1
        if lean:
            total += rows * n
            continue
        patterns = attention_of(trace) if trace.causal else {}
        each = sum(1 + (len(p) if heads else maxima) * (len(p) > 1) for p in patterns.values())
        reads = sum(int((~_absent(data, variable)).sum()) for variable, *_ in DEPTH.values() if variable in data)
        lens = 2 * LENS_TOP * (rows - 1) if "lens_top" in data else 0
        some = len(QUANTITIES) // 2  # of which a system has at least so many
        total += each * n * (n + 1) // 2 + len(trace.ways) * n * (reads + rows * some + lens)
    return total * (4 if precision == "f4" else 2) * 4 // 3


def _absent(data: Any, variable: str) -> Any:
    column = next(dim for dim in data[variable].dims if dim not in ("read", "pos"))
    return data[variable].isel(pos=0).transpose("read", column).isnull().values


def _length(payload: Mapping[str, Any]) -> int:
    return len(json.dumps(payload, allow_nan=False))

"""Traces as CSV and JSON, with every digit: reading a number back gives the number in the trace.

CSV is long: one line per number, with the columns of `COLUMNS`; columns that a variable has no axis for are empty, and
what has no value (NaN: no such source, a masked position) has no line. JSON keeps the arrays, nested, NaN as null.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

__all__ = ["COLUMNS", "finding_csv", "plain_dataset", "plain_number", "to_csv", "to_json"]

AXES = ("read", "write", "atom", "source", "layer", "head", "query", "key", "pos", "k")
COLUMNS = ("trace", "model", "variable", *AXES, "token", "value")
_TOKEN_OF = ("pos", "query")  # the axis whose token stands in the column "token"


def to_csv(traces: Sequence[Any]) -> bytes:
    """UTF-8 CSV of one or two traces (A and B in the column "trace").

    Example:
        >>> import csv, io, t2lens
        >>> from t2lens.analysis.export import to_csv
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2)
        >>> tr = t2lens.trace(t2lens.build(cfg, seed=0), [0, 7, 3])
        >>> rows = csv.DictReader(io.StringIO(to_csv([tr]).decode()))
        >>> one = next(r for r in rows if r["variable"] == "mixing" and r["read"] == "out" and r["pos"] == "2")
        >>> one["atom"], one["token"], one["value"]
        ('embed', '3', '1.0')
    """
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    for letter, trace in zip("AB", traces, strict=False):
        for row in _lines(trace):
            writer.writerow([letter, trace.model_name, *row])
    return out.getvalue().encode()


def _lines(trace: Any) -> Iterator[list[str]]:
    data, tokens = trace.dataset, trace.tokens
    for name, variable in data.data_vars.items():
        values = variable.values
        present = ~np.isnan(values) if values.dtype.kind == "f" else np.ones(values.shape, bool)
        where = np.nonzero(present)
        dims = ["head" if dim == "local_head" else str(dim) for dim in variable.dims]
        columns = {}
        for dim, own, index in zip(dims, variable.dims, where, strict=True):
            labels = data[own].values.astype(str) if own in data.coords else np.arange(data.sizes[own]).astype(str)
            columns[dim] = labels[index]
            if dim in _TOKEN_OF:
                columns["token"] = np.array(tokens, dtype=object)[index]
        columns["value"] = values[where].astype(str)  # the shortest text that reads back to the same number
        blank = [""] * len(where[0])
        order = [columns.get(column, blank) for column in (*AXES, "token", "value")]
        for row in zip(*order, strict=True):
            yield [str(name), *row]


def finding_csv(finding: Any) -> bytes:
    """UTF-8 CSV of every number of a finding, one a line: variable, the axes of all variables, words that stand beside
    an axis (tokens), unit, value. Axes that a variable lacks are empty; what has no value has no line."""
    data = finding.dataset
    axes = list(dict.fromkeys(str(dim) for variable in data.data_vars.values() for dim in variable.dims))
    words = [str(name) for name, c in data.coords.items() if c.ndim == 1 and str(name) not in axes]
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(["variable", *axes, *words, "unit", "value"])
    for name, variable in data.data_vars.items():
        values = variable.values
        there = ~np.isnan(values) if values.dtype.kind == "f" else np.ones(values.shape, bool)
        where = np.nonzero(there) if values.ndim else ()
        blank = [""] * int(there.sum())
        columns: dict[str, Any] = {}
        for dim, index in zip(variable.dims, where, strict=True):
            labels = data[dim].values.astype(str) if dim in data.coords else np.arange(data.sizes[dim]).astype(str)
            columns[str(dim)] = labels[index]
            columns |= {word: data[word].values.astype(str)[index] for word in words if data[word].dims == (dim,)}
        chosen = values[there]
        order = [columns.get(column, blank) for column in (*axes, *words)]
        unit = variable.attrs.get("unit", "")
        for row in zip(*order, [unit] * len(chosen), chosen.astype(str), strict=True):
            writer.writerow([str(name), *row])
    return out.getvalue().encode()


def to_json(traces: Sequence[Any]) -> bytes:
    """JSON of one or two traces: {"format": ..., "traces": [{model, text, tokens, checks, coords, variables}]}.

    variables: name -> {"dims", "dtype", "values"}: nested lists; NaN is null, infinities are "inf" and "-inf".
    """
    return json.dumps(
        {"format": "t2lens trace json 1", "traces": [_plain(trace) for trace in traces]}, allow_nan=False
    ).encode()


def _plain(trace: Any) -> dict[str, Any]:
    data = trace.dataset
    verification = trace.verify()
    return {
        "model": trace.model_name,
        "text": trace.text,
        "tokens": trace.tokens,
        "token_ids": trace.token_ids,
        "config": trace.config,
        "form": trace.form,
        "notices": trace.notices,
        "source_atoms": trace.source_atoms,
        "passed": verification.passed,
        "checks": [
            {**row, "value": plain_number(row["value"]), "passed": check.passed}
            for row, check in zip(verification.to_list(), verification, strict=True)
        ],
        **plain_dataset(data),
    }


def plain_dataset(data: Any) -> dict[str, Any]:
    """An xarray.Dataset as {"coords": ..., "variables": name -> {"dims", "dtype", "values"}} of plain lists."""
    return {
        "coords": {str(name): _nested(data[name].values) for name in data.coords},
        "variables": {
            str(name): {
                "dims": [str(dim) for dim in variable.dims],
                "dtype": str(variable.dtype),
                "values": _nested(variable.values),
            }
            for name, variable in data.data_vars.items()
        },
    }


def _nested(values: np.ndarray) -> Any:
    if values.dtype.kind != "f":
        return values.tolist()
    flat = [plain_number(float(text)) for text in values.ravel().astype(str)]  # float32 in its short form
    return np.array(flat, dtype=object).reshape(values.shape).tolist()


def plain_number(value: float) -> float | str | None:
    """A number that JSON has: NaN as None, infinities as words."""
    if np.isfinite(value):
        return value
    return None if np.isnan(value) else "inf" if value > 0 else "-inf"

"""What an analysis returns: every number labelled, the words that must go with them, the table one reads first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xarray as xr

from t2lens.analysis.export import plain_dataset, plain_number

__all__ = ["Chart", "Finding"]

_FORMAT = "t2lens finding 1"
Value = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """How a variable of the dataset is drawn.

    kind: "heat" (variable over y x x), "scatter" (variable against x, both variables over the same axes, one dot per
        entry), "bars" (variable over the coordinate x, one colour per entry of `by`), "stack" (such bars on top of each
        other, for shares of a whole), "lines" (the same as lines).
    variable: name of the variable. x, y: coordinates (of "scatter": x is the other variable). by: a further axis.
    signed: whether the sign means something (a diverging scale with 0 in the middle).
    at: axis -> index, where the variable has more axes than the chart (default: the last entry of such an axis).
    label: what the values are, with their unit; by default the attributes of the variable.
    """

    kind: Literal["heat", "scatter", "bars", "stack", "lines"]
    variable: str
    x: str
    y: str = ""
    by: str = ""
    signed: bool = False
    at: tuple[tuple[str, int], ...] = ()
    title: str = ""
    label: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Finding:
    """The result of an analysis; every analysis of t2lens returns one, so that all are shown, saved and read alike.

    Attributes:
        title: what was analysed, on what.
        dataset: every number, an xarray.Dataset with named coordinates; a variable's attrs say `meaning` and `unit`.
            What does not exist is NaN.
        columns, rows: the table one reads first. Numbers are plain Python numbers, None where there is none.
        notes: what the reader must know: what was averaged over how many, excluded, frozen or approximated; the source
            of the equation.
        charts: how it is drawn.
        passed: the verdict, where the analysis has one (an audit), else None.

    In a notebook a Finding shows its table and notes; `plot()` is a plotly figure; `to_json()` every number.
    """

    title: str
    dataset: xr.Dataset
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    passed: bool | None = None

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), (self.columns, row)
        for chart in self.charts:
            assert chart.variable in self.dataset, chart

    def __getitem__(self, variable: str) -> xr.DataArray:
        """A variable of the dataset; KeyError lists those there are."""
        if variable not in self.dataset:
            raise KeyError(f"No variable {variable!r}; there are {', '.join(map(str, self.dataset.data_vars))}.")
        return self.dataset[variable]

    def to_json(self) -> bytes:
        """Title, table, notes and every number: NaN is null, infinities are "inf" and "-inf"."""
        plain = {
            "format": _FORMAT,
            "title": self.title,
            "passed": self.passed,
            "notes": list(self.notes),
            "columns": list(self.columns),
            "rows": [[plain_number(cell) if isinstance(cell, float) else cell for cell in row] for row in self.rows],
            "meaning": {str(n): v.attrs.get("meaning", "") for n, v in self.dataset.data_vars.items()},
            "unit": {str(n): v.attrs.get("unit", "") for n, v in self.dataset.data_vars.items()},
            **plain_dataset(self.dataset),
        }
        return json.dumps(plain, allow_nan=False, default=_scalar).encode()

    def plot(self, chart: int = 0) -> Any:
        """A plotly figure of one of the charts. IndexError where there is no such chart."""
        from t2lens.viz.findings import figure

        return figure(self, chart)

    def _repr_html_(self) -> str:
        from t2lens.viz.findings import fragment

        return fragment(self)

    def __repr__(self) -> str:
        from t2lens.viz.findings import text

        return text(self)


def _scalar(value: Any) -> Any:
    """numpy scalars as Python's own."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written to JSON")

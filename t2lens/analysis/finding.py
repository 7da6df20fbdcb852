"""What an analysis returns: every number labelled, the words that must go with them, the table one reads first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr

from t2lens.analysis.export import finding_csv, plain_dataset, plain_number

__all__ = ["Chart", "Finding", "load_finding", "read_finding"]

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
    label: what the values are, with their unit; by default the attributes of the variable. xlabel: the same of the
        other axis of a scatter.
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
    xlabel: str = ""


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
            "coord_dims": {str(name): list(map(str, c.dims)) for name, c in self.dataset.coords.items()},
            **plain_dataset(self.dataset),
        }
        return json.dumps(plain, allow_nan=False, default=_scalar).encode()

    def to_csv(self) -> bytes:
        """Every number, one a line (`t2lens.analysis.export.finding_csv`)."""
        return finding_csv(self)

    def plot(self, chart: int = 0) -> Any:
        """A plotly figure of one of the charts. IndexError where there is no such chart."""
        from t2lens.viz.findings import figure

        return figure(self, chart)

    def save_figure(self, path: str | Path, chart: int = 0, **look: Any) -> Path:
        """Write one of the charts as the ending of the file says: .svg, .png or .pdf.

        look: theme ("light", "dark"), width, limits and title, as `t2lens.viz.pictures.picture` takes them.
        IndexError where there is no such chart, ValueError for another ending.
        """
        from t2lens.viz.pictures import picture
        from t2lens.viz.raster import save_figure

        return save_figure(path, picture(self, chart, **look))

    def _repr_html_(self) -> str:
        from t2lens.viz.findings import fragment

        return fragment(self)

    def __repr__(self) -> str:
        from t2lens.viz.findings import text

        return text(self)


def load_finding(path: str | Path) -> Finding:
    """The finding in a file that `Finding.to_json` (or `t2lens analyze --json`) wrote, with the same numbers; how it is
    drawn is not kept. ValueError in one sentence for any other file.

    Example:
        >>> import tempfile, t2lens
        >>> from t2lens.analysis import load_finding, logit_lens
        >>> finding = logit_lens(t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=1)), [0, 7])
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(finding.to_json()), file.flush()
        ...     load_finding(file.name).dataset["kl"].equals(finding.dataset["kl"])
        True
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    try:
        plain = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} holds no finding that can be read ({error}).") from None
    return read_finding(plain, str(path))


def read_finding(plain: Any, where: str) -> Finding:
    """The finding of what `Finding.to_json` says, as json reads it. ValueError in one sentence, which names `where` it
    was, for anything else."""
    try:
        if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
            raise ValueError("it is not one that t2lens wrote")
        variables = {
            name: (v["dims"], _array(v["values"], v["dtype"]), _known(plain, name))
            for name, v in plain["variables"].items()
        }
        return Finding(
            title=plain["title"],
            dataset=xr.Dataset(variables, coords={n: _coordinate(n, c, plain) for n, c in plain["coords"].items()}),
            columns=tuple(plain["columns"]),
            rows=tuple(map(tuple, plain["rows"])),
            notes=tuple(plain["notes"]),
            passed=plain["passed"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} holds no finding that can be read ({error}).") from None


def _array(values: Any, dtype: str) -> np.ndarray:
    if not dtype.startswith("float"):
        return np.array(values, dtype=object if dtype == "object" else dtype)
    flat = np.array(values, dtype=object)
    return np.array([np.nan if v is None else float(v) for v in flat.ravel()], dtype).reshape(flat.shape)


def _known(plain: dict[str, Any], name: str) -> dict[str, str]:
    return {word: plain[word][name] for word in ("meaning", "unit") if plain[word].get(name)}


def _coordinate(name: str, values: Any, plain: dict[str, Any]) -> tuple[Any, Any]:
    """A coordinate over its own axis, or (token strings, say) over the axis that it labels."""
    dims = plain["coord_dims"][name]
    return dims, np.array(values, dtype=object if values and isinstance(np.ravel(values)[0], str) else None)


def _scalar(value: Any) -> Any:
    """numpy scalars as Python's own."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written to JSON")

"""What is written as CSV and JSON reads back to the numbers of the trace, without our own reader."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.analysis.export import COLUMNS, to_csv, to_json

from ..systems import tiny
from ..viz.words import edited, spoken

PROMPT = 'the cat, "saw" </script> <b> the dog'


def from_csv(content: bytes, like: Any, letter: str = "A") -> dict[str, np.ndarray]:
    """The variables of a trace, rebuilt from the lines: NaN where there is none."""
    data = like.dataset
    found = {
        str(name): np.full(variable.shape, np.nan if variable.dtype.kind == "f" else None, variable.dtype)
        for name, variable in data.data_vars.items()
    }
    labels = {
        str(dim): {str(v): i for i, v in enumerate(data[dim].values if dim in data.coords else range(n))}
        for dim, n in data.sizes.items()
    }
    for row in csv.DictReader(io.StringIO(content.decode(), newline="")):
        if row["trace"] == letter:
            dims = [str(dim) for dim in data[row["variable"]].dims]
            at = tuple(labels[dim][row["head" if dim == "local_head" else dim]] for dim in dims)
            found[row["variable"]][at] = row["value"]
    return found


def test_json_reads_back_to_the_same_numbers():
    for system, dtype in (("ddl-cc", torch.float64), ("attnres-block", torch.float32)):
        trace = spoken(system, PROMPT, dtype=dtype)
        read = json.loads(to_json([trace]))["traces"][0]
        assert read["tokens"] == trace.tokens
        assert read["token_ids"] == trace.token_ids
        assert read["passed"] is True
        assert set(read["variables"]) == set(trace.dataset.data_vars)
        for name, variable in trace.dataset.data_vars.items():
            stored = read["variables"][name]
            assert stored["dims"] == list(variable.dims)
            again = np.array(stored["values"], dtype=stored["dtype"])  # null reads as NaN
            np.testing.assert_array_equal(again, variable.values)
        for name in trace.dataset.coords:
            assert read["coords"][name] == trace.dataset[name].values.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_csv_reads_back_to_the_same_numbers(dtype: torch.dtype):
    trace = spoken("attnres-block", PROMPT, local=True, dtype=dtype)
    other = spoken("ddl", PROMPT, dtype=dtype)
    content = to_csv([trace, other])
    for letter, one in (("A", trace), ("B", other)):
        again = from_csv(content, one, letter)
        for name, variable in one.dataset.data_vars.items():
            np.testing.assert_array_equal(again[str(name)], variable.values)


def test_csv_names_positions_tokens_and_sources():
    trace = spoken("attnres-full", "the cat saw the dog")
    rows = list(csv.DictReader(io.StringIO(to_csv([trace]).decode())))
    assert tuple(rows[0]) == COLUMNS
    found = [r for r in rows if r["variable"] == "depth_weight" and r["read"] == "1.attn" and r["pos"] == "4"]
    assert [r["source"] for r in found] == ["embed", "0.attn", "0.mlp"]  # what does not exist has no line
    assert {r["token"] for r in found} == {"the"}
    exact = trace.dataset["depth_weight"].sel(read="1.attn", pos=4, source="0.mlp").item()
    assert float(found[2]["value"]) == exact
    looks = [r for r in rows if r["variable"] == "sequence_attention" and r["query"] == "2"]
    assert {r["key"] for r in looks} == {"0", "1", "2"}


def test_infinities_and_nan_are_kept_in_json():
    trace = t2lens.trace(tiny("standard"), [0, 7, 3])
    norms = trace.dataset["residual_norm"].values.copy()
    norms[0, :] = [np.inf, -np.inf, np.nan]
    read = json.loads(to_json([edited(trace, residual_norm=norms)]))["traces"][0]["variables"]["residual_norm"]
    assert read["values"][0] == ["inf", "-inf", None]
    np.testing.assert_array_equal(np.array(read["values"], dtype="float64"), norms)

"""Findings: what they hold, how they are shown, and that every number survives."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from t2lens.analysis.finding import Chart, Finding, load_finding
from t2lens.viz.findings import figure, fragment, text


def finding(**changes: Any) -> Finding:
    data = xr.Dataset(
        {
            "share": (("site", "pos"), np.array([[1.5, np.nan], [-2.0, 1e-9]]), {"meaning": "what", "unit": "nats"}),
            "mass": (("site", "pos"), np.ones((2, 2))),
        },
        coords={"site": ["0.attn", "out"], "pos": [0, 1], "token": ("pos", np.array([" <b>", "\n"], dtype=object))},
    )
    given: dict = {
        "title": "A <title>",
        "dataset": data,
        "columns": ("site", "share", "is"),
        "rows": (("0.attn", 1.5, True), ("out", None, False)),
        "notes": ("Over 2 positions.",),
        "charts": (
            Chart(kind="heat", variable="share", x="pos", y="site", signed=True),
            Chart(kind="scatter", variable="share", x="mass"),
            Chart(kind="bars", variable="share", x="site"),
            Chart(kind="lines", variable="share", x="pos", by="site"),
            Chart(kind="stack", variable="share", x="pos", by="site"),
        ),
    }
    return Finding(**(given | changes))


def test_json_holds_every_number_and_names_what_is_missing() -> None:
    plain = json.loads(finding().to_json())
    assert plain["variables"]["share"]["values"] == [[1.5, None], [-2.0, 1e-9]]
    assert plain["coords"]["token"] == [" <b>", "\n"]
    assert plain["rows"] == [["0.attn", 1.5, True], ["out", None, False]]
    assert plain["unit"]["share"] == "nats"


def test_every_chart_draws_the_numbers() -> None:
    made = finding()
    heat, scatter, bars, lines, stack = (made.plot(i) for i in range(5))
    np.testing.assert_array_equal(heat.data[0].z, made["share"].values)
    assert list(heat.layout.xaxis.ticktext) == ["\u00b7&lt;b&gt;", "\u21b5"]
    assert heat.data[0].zmin == -heat.data[0].zmax
    np.testing.assert_array_equal(scatter.data[0].y, made["share"].values.ravel())
    np.testing.assert_array_equal(bars.data[0].y, made["share"].values[:, -1])
    assert [line.name for line in lines.data] == ["0.attn", "out"]
    assert stack.layout.barmode == "stack"
    np.testing.assert_array_equal(stack.data[1].y, made["share"].values[1])
    with pytest.raises(IndexError, match=r"has 5 chart\(s\); there is no chart 5"):
        figure(made, 5)


def test_places_on_a_numeric_axis_are_labelled_without_rounding_noise() -> None:
    data = xr.Dataset({"n": ("bin", np.arange(3.0))}, coords={"bin": np.arange(3) * 0.05 + 0.125})
    made = finding(dataset=data, charts=(Chart(kind="bars", variable="n", x="bin"),))
    assert list(made.plot().layout.xaxis.ticktext) == ["0.125", "0.175", "0.225"]


def test_tables_show_what_does_not_exist_as_nothing_and_escape_words() -> None:
    shown = text(finding(passed=False))
    assert shown.splitlines()[0] == "A <title>: FAILED"
    assert shown.splitlines()[5].split() == ["out", "no"]
    assert "<title>" not in fragment(finding())
    assert "Over 2 positions." in fragment(finding())


def test_tables_are_one_line_a_row_whatever_the_token_and_say_what_is_rounding() -> None:
    rows = ((" a\n", 2.0, 1), ("\x1b[31mb c", -1e-13, 2), (" ", 0.0, 3), ("\u202e", 1e-9, 4))
    shown = text(finding(columns=("token", "share", "n"), rows=rows, notes=())).splitlines()[4:]
    assert [line.split() for line in shown] == [
        ["\u00b7a\u21b5", "2", "1"],
        ["\\u001b[31mb", "c", "~0", "2"],
        ["\u00b7", "0", "3"],
        ["\\u202e", "1e-9", "4"],
    ]
    drawn = fragment(finding(columns=("token", "share", "n"), rows=rows))
    assert "\x1b" not in drawn and "\u202e" not in drawn and ">~0<" in drawn


def test_a_variable_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(KeyError, match="there are share, mass"):
        finding()["shares"]


def test_what_was_written_reads_back_to_the_same_numbers(tmp_path: Path) -> None:
    made = finding(passed=True)
    (tmp_path / "a.json").write_bytes(made.to_json())
    again = load_finding(tmp_path / "a.json")
    xr.testing.assert_identical(again.dataset, made.dataset)
    assert (again.title, again.columns, again.rows, again.notes, again.passed) == (
        made.title,
        made.columns,
        made.rows,
        made.notes,
        True,
    )


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": "t2lens finding 1"}', b"\xff"])
def test_another_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match="holds no finding that can be read"):
        load_finding(tmp_path / "a.json")

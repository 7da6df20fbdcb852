"""What a page gives to take home re-imports to the same numbers, and the Python that it shows runs."""

import base64
import csv
import html
import io
import json
import re
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xarray as xr

import t2lens
from t2lens.analysis import rollout
from t2lens.analysis.catalog import analysis
from t2lens.analysis.finding import Chart, Finding, load_finding
from t2lens.apps.export import finding_downloads, maps_downloads, stem
from t2lens.apps.snippets import analysis_code, maps_code
from t2lens.apps.state import read_pick

PROMPT = 'the king\'s "queen" <b>said</b>'


def finding(seed: int) -> Finding:
    rng = np.random.default_rng(seed)
    wild = rng.normal(size=(3, 4)) * 10.0 ** rng.integers(-300, 300, (3, 4))
    wild[0, 1], wild[1, 2], wild[2, 3] = np.nan, np.inf, -np.inf
    tokens = np.array(["</script><script>alert(1)</script>", 'a,b\n"c"', "\u05e9\u05dc", "\U0001f600"], dtype=object)
    data = xr.Dataset(
        {
            "wild": (("site", "pos"), wild, {"unit": "nats"}),
            "small": (("site", "pos"), rng.normal(size=(3, 4)).astype(np.float32)),
            "count": ("site", np.array([1, 2, 3])),
            "all": ((), 0.1 + 0.2),
        },
        coords={"site": ["0.attn", "0.mlp", "out"], "pos": [0, 1, 2, 3], "token": ("pos", tokens)},
    )
    charts = (
        Chart(kind="heat", variable="small", x="pos", y="site", title="Small"),
        Chart(kind="bars", variable="count", x="site"),
    )
    rows = (("</script>", 0.1), ("b", None))
    return Finding(title="<i>", dataset=data, columns=("site", "x"), rows=rows, notes=("<u>n = 3",), charts=charts)


def files(found: Any) -> dict[str, bytes]:
    return {each.file: each.make() for each in found}


@pytest.mark.parametrize("seed", [0, 1])
def test_every_number_of_a_finding_comes_back(tmp_path: Path, seed: int) -> None:
    made = [finding(seed), finding(seed + 10)]
    got = files(finding_downloads(made, ("one", "two"), stem="x", code="print('<b>')"))
    assert set(got) == {
        *("x-1.svg", "x-1.png", "x-2.svg", "x-2.png", "x-a.csv", "x-b.csv", "x-a.json", "x-b.json", "x.html")
    }
    assert got["x-1.svg"][:4] == b"<svg" and got["x-1.png"][:4] == b"\x89PNG"
    for letter, one in zip("ab", made, strict=True):
        (tmp_path / "f.json").write_bytes(got[f"x-{letter}.json"])
        xr.testing.assert_identical(load_finding(tmp_path / "f.json").dataset, one.dataset)
        rows = list(csv.DictReader(io.StringIO(got[f"x-{letter}.csv"].decode(), newline="")))
        again = {
            name: np.full(v.shape, np.nan, v.dtype) if v.dtype.kind == "f" else np.zeros(v.shape, v.dtype)
            for name, v in one.dataset.data_vars.items()
        }
        for row in rows:
            variable = one.dataset[row["variable"]]
            at = tuple(list(variable[dim].values.astype(str)).index(row[str(dim)]) for dim in variable.dims)
            again[row["variable"]][at] = variable.dtype.type(row["value"])
            if row["pos"]:
                assert row["token"] == one.dataset["token"].values[int(row["pos"])]
        for name, values in again.items():
            np.testing.assert_array_equal(values, one.dataset[name].values, err_msg=name)
    text = got["x.html"].decode()
    assert (
        "<i>" not in text and "alert(1)</script>" not in text and "http://" not in text.replace("http://www.w3.org", "")
    )
    assert "default-src 'none'" in text and "print(&#x27;&lt;b&gt;&#x27;)" in text
    for letter, one in zip("AB", made, strict=True):
        data = re.search(rf'<script type="application/json" id="finding-{letter}">(.*?)</script>', text, re.S)
        assert data is not None
        (tmp_path / "g.json").write_text(data[1], encoding="utf-8")
        xr.testing.assert_identical(load_finding(tmp_path / "g.json").dataset, one.dataset)


def test_every_number_of_the_maps_comes_back(tmp_path: Path) -> None:
    trace = t2lens.trace(t2lens.load("attnres-full"), PROMPT, name="<b>")
    view = {"quantity": "residual_norm", "depth": "share", "head": "mean", "way": "", "cell": (0, 2, "3.attn")}
    got = files(maps_downloads([trace], view, stem="m"))
    (tmp_path / "m.safetensors").write_bytes(got["m.safetensors"])
    assert t2lens.load_trace(tmp_path / "m.safetensors").dataset.identical(trace.dataset)
    plain = json.loads(got["m.json"])["traces"][0]["variables"]["residual_norm"]["values"]
    np.testing.assert_array_equal(np.array(plain, np.float32), trace.dataset["residual_norm"].values)
    rows = csv.DictReader(io.StringIO(got["m.csv"].decode(), newline=""))
    mine = [np.float32(row["value"]) for row in rows if row["variable"] == "residual_norm"]
    np.testing.assert_array_equal(mine, trace.dataset["residual_norm"].values.ravel())
    assert got["m.svg"][:4] == b"<svg" and got["m.png"][:4] == b"\x89PNG" and b"<!doctype html>" in got["m.html"]
    # as JSON and as CSV every number, of every variable
    for name, variable in trace.dataset.data_vars.items():
        if variable.dtype.kind == "f":
            every = np.array(json.loads(got["m.json"])["traces"][0]["variables"][str(name)]["values"], variable.dtype)
            np.testing.assert_array_equal(every, variable.values, err_msg=str(name))
    # with the rollout: in the picture and in the page the numbers of the analysis
    fed = rollout(t2lens.load("attnres-full"), PROMPT, pos=2, site="3.attn")
    shown = files(maps_downloads([trace], {**view, "layer": "rollout"}, stem="m", rollouts=lambda: [fed]))
    packed = zlib.decompress(base64.b64decode(re.findall(rb'atob\("([^"]+)"\)', shown["m.html"])[-1]), 31)
    size = int.from_bytes(packed[:4], "little")
    (answer,) = json.loads(packed[4 : 4 + size])["answers"]
    low, high = answer["values"]["span"]
    values = np.frombuffer(packed[4 + size + low : 4 + size + high], "<f4").reshape(answer["values"]["shape"])
    np.testing.assert_array_equal(values[0], fed.dataset["absorbed"].values.astype("f4"))
    np.testing.assert_array_equal(values[1 : 1 + fed.dataset.sizes["site"]], fed.dataset["mass"].values.astype("f4"))
    assert (answer["pos"], answer["site"], answer["way"]) == (2, "3.attn", "")
    tips = re.findall(
        r'data-tip="site (\S+)&#10;pos (\d+)[^"]*share of 3.attn@2 that passes here: (\S+?)"', shown["m.svg"].decode()
    )
    assert len(tips) == 3 * (2 + fed.dataset.sizes["site"] - 1) - 1
    for site, pos, number in tips:
        row = fed.dataset["absorbed"] if site == "embed" else fed.dataset["mass"].sel(site=site)
        assert float(number) == float(row.values[int(pos)])
    assert html.escape(PROMPT, quote=False).encode() in got["m.html"] or html.escape(PROMPT).encode() in got["m.html"]


@pytest.mark.parametrize("edits", ["", '[{"target": "atom", "site": "3.attn", "operation": "zero"}]'])
def test_the_python_that_is_shown_makes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edits: str) -> None:
    monkeypatch.chdir(tmp_path)
    entry, names = analysis("lens"), {}
    loaded = SimpleNamespace(name="attnres-full")
    of = {"loaded": loaded, "name": "attnres-full, edited", "prompt": PROMPT, "edits": edits}
    side: Any = SimpleNamespace(letter="A", last=None, **of)
    other: Any = SimpleNamespace(letter="B", last=9, **of)  # where the prompt ends B follows the token that A says
    exec(analysis_code(side, "lens", {"top": 3}), names)
    from t2lens.edits import edited, read_edits

    model = t2lens.load("attnres-full")
    with edited(model, read_edits(edits or ())):
        xr.testing.assert_identical(names["finding"].dataset, entry.run(model, PROMPT, top=3).dataset)
    assert (tmp_path / "lens-a.svg").read_text()[:4] == "<svg"

    view = {"quantity": "residual_norm", "depth": "share", "head": "mean", "way": "", "cell": (1, 1, "out")}
    made: dict[str, Any] = {}
    exec(maps_code([side, other], view, ("next", "next")), made)
    for name, last in (("a", None), ("b", 9)):
        same = t2lens.trace(model, PROMPT, name=side.name, edits=edits or (), follow="next", last=last)
        xr.testing.assert_identical(made[name].dataset, same.dataset)
    assert (tmp_path / "maps.svg").read_text()[:4] == "<svg"
    starts = [{"pos": 1, "site": "out"}, None]
    exec(maps_code([side, side], {**view, "cell": (0, 1, "out"), "layer": "rollout"}, ("next", "next"), starts), made)
    with edited(model, read_edits(edits or ())):
        xr.testing.assert_identical(made["fed_a"].dataset, rollout(model, PROMPT, pos=1, site="out").dataset)
    picture = (tmp_path / "maps.svg").read_text()
    assert "share of out@1 that passes here" in picture and "B: the rollout of out@1 is not here" in picture


def test_a_browser_can_send_anything_as_a_pick() -> None:
    assert read_pick({"site": "3.attn", "way": "q", "pos": 4, "panel": "1"}) == {"site": "3.attn", "pos": 4, "panel": 1}
    for wrong in (
        None,
        3,
        "x",
        {},
        {"pos": -1},
        {"pos": True},
        {"pos": "4"},
        {"site": "<b>"},
        {"site": 3},
        {"pos": 1.5},
        {"panel": "2"},
        {"panel": 1},
    ):
        assert read_pick(wrong) == {}


def test_names_of_files_hold_nothing_odd() -> None:
    assert stem("maps", "attnres-full, edited") == "maps-attnres-full-edited"
    assert stem("../../etc/passwd") == "etc-passwd" and stem("\u05e9") == "t2lens" and len(stem("a" * 300)) <= 80

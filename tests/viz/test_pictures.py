"""Pictures of findings and maps: their numbers are those of the dataset, their text is text, and they become pixels."""

import base64
import io
import json
import math
import os
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from PIL import Image  # comes with streamlit

import t2lens
from t2lens.analysis import logit_lens
from t2lens.analysis.finding import Chart, Finding
from t2lens.viz import raster
from t2lens.viz.colors import FONT, THEMES, lut
from t2lens.viz.maps_picture import maps_picture
from t2lens.viz.pictures import no_difference, pair, picture, picture_of
from t2lens.viz.raster import encode_png, figure_bytes, save_figure, to_png
from t2lens.viz.series import axis, series

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = ["<script>alert(1)</script>", "\u05e9\u05dc\u05d5\u05dd", "\U0001f600", "a&b\"'", "\x00\x1b[31m", "\n"]


def finding(seed: int = 0, n_sites: int = 4, n_pos: int = 6, **changes: Any) -> Finding:
    rng = np.random.default_rng(seed)
    share, mass = rng.normal(size=(n_sites, n_pos)), rng.uniform(size=(n_sites, n_pos)).astype(np.float32)
    share[0, 0], share[1, 1], share[2, 2] = np.nan, 0.0, np.inf
    tokens = np.array([HOSTILE[i % len(HOSTILE)] for i in range(n_pos)], dtype=object)
    data = xr.Dataset(
        {
            "share": (("site", "pos"), share, {"meaning": "what it adds", "unit": "nats"}),
            "mass": (("site", "pos"), mass),
        },
        coords={"site": [f"{i}.attn" for i in range(n_sites)], "pos": np.arange(n_pos), "token": ("pos", tokens)},
    )
    given: dict[str, Any] = {
        "title": "A <title>",
        "dataset": data,
        "columns": ("site",),
        "rows": (("0.attn",),),
        "notes": ("Over 7 sequences; padding left out.",),
        "charts": (
            Chart(kind="heat", variable="share", x="pos", y="site", signed=True),
            Chart(kind="scatter", variable="share", x="mass", by="site"),
            Chart(kind="bars", variable="share", x="site"),
            Chart(kind="bars", variable="share", x="pos", by="site"),
            Chart(kind="lines", variable="share", x="pos", by="site"),
            Chart(kind="stack", variable="mass", x="pos", by="site"),
        ),
    }
    return Finding(**(given | changes))


def marks(svg: str) -> list[ET.Element]:
    return [each for each in ET.fromstring(svg).iter() if "data-tip" in each.attrib]


def said(mark: ET.Element) -> float:
    """The value on the last line of a tip."""
    return float(re.sub(r" nats$", "", mark.attrib["data-tip"].splitlines()[-1].split(": ")[-1]))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("chart", range(6))
def test_the_numbers_of_marks_are_those_of_the_dataset(chart: int, seed: int) -> None:
    made = finding(seed, n_sites=3 + seed, n_pos=5 + 2 * seed)
    spec, drawn = made.charts[chart], marks(picture(made, chart))
    values = made[spec.variable]
    if spec.kind == "bars" and not spec.by:
        values = values.isel(pos=-1)
    finite = values.values[np.isfinite(values.values)]
    numbers = [said(mark) for mark in drawn]
    if spec.kind == "heat":
        assert len(drawn) == values.size and np.isnan(numbers).sum() == np.isnan(values.values).sum()
        numbers = [number for number in numbers if math.isfinite(number)]
    exact = {float(str(value)) for value in finite}
    assert sorted(numbers) == sorted(float(str(value)) for value in finite) and set(numbers) == exact
    for mark in drawn:  # a mark says which node of the maps it stands for
        pos, site = mark.attrib.get("data-pos"), mark.attrib["data-site"]
        if pos is not None and math.isfinite(said(mark)):
            assert float(str(values.sel(site=site, pos=int(pos)).values[()])) == said(mark)
        assert pos is not None or "pos" not in values.dims


def test_text_of_any_origin_is_text() -> None:
    for chart in range(6):
        for theme in ("light", "dark"):
            svg = picture(finding(), chart, theme=theme)
            root = ET.fromstring(svg)
            assert not list(root.iter(f"{SVG}script")) and "<script" not in svg and "\x1b" not in svg
            assert root.attrib["aria-label"] and THEMES[theme].paper in svg
    words = [each.text for each in ET.fromstring(picture(finding(n_pos=3), 0)).iter(f"{SVG}text")]
    assert "<script>alert\u2026" in words and "\u05e9\u05dc\u05d5\u05dd" in words and "\U0001f600" in words
    assert "Over 7 sequences." in words


def test_blank_zero_and_infinite_cells_look_different() -> None:
    made = finding()
    svg = picture(made, 0)
    cells = {(m.attrib["data-site"], m.attrib["data-pos"]): m.attrib["fill"] for m in marks(svg)}
    middle = ["#" + lut("both")[step].tobytes().hex() for step in (127, 128)]
    assert cells["0.attn", "0"] == cells["2.attn", "2"] == "none" and cells["1.attn", "1"] in middle
    assert "Blank: no value (1); cross: infinite (1); dot: exactly zero (1)." in svg
    assert len(list(ET.fromstring(svg).iter(f"{SVG}circle"))) == 1


def test_a_signed_scale_is_symmetric_and_its_range_is_stated() -> None:
    svg = picture(finding(), 0, limits=(-2.5, 2.5))
    words = [each.text for each in ET.fromstring(svg).iter(f"{SVG}text")]
    assert "-2.5" in words and "2.5" in words
    own = [each.text for each in ET.fromstring(picture(finding(), 0)).iter(f"{SVG}text")]
    values = finding()["share"].values
    most = np.abs(values[np.isfinite(values)]).max()
    assert f"{most:.3g}" in own and f"{-most:.3g}" in own


def test_a_map_of_many_cells_is_one_image_with_its_numbers() -> None:
    made = finding(3, n_sites=40, n_pos=150)
    svg = picture(made, 0)
    image = next(each for each in ET.fromstring(svg).iter(f"{SVG}image") if "data-cells" in each.attrib)
    words = json.loads(image.attrib["data-cells"])
    values = np.frombuffer(base64.b64decode(image.attrib["data-values"]), "<f8").reshape(40, 150)[::-1]
    np.testing.assert_array_equal(values, made["share"].values)
    assert words["rows"][-1] == "site 0.attn" and words["columnNodes"][7] == {"pos": 7}
    assert words["rowNodes"][0] == {"site": "39.attn"}
    pixels = decoded(base64.b64decode(image.attrib["href"].split(",")[1]))[::-1]
    assert (
        pixels.shape == (40, 150, 4)
        and pixels[0, 0, 3] == 0
        and pixels[1, 1, 3] == 255
        and (pixels[1, 1, :3] > 235).all()
    )
    assert "pixelated" in image.attrib["style"] and len(svg) < 200_000


def decoded(png: bytes) -> np.ndarray:
    """A PNG without filters, as `encode_png` writes it."""
    width, height, _, kind = struct.unpack(">IIBB", png[16:26])
    data = png[png.index(b"IDAT") + 4 : png.index(b"IEND") - 8]
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, {2: 3, 6: 4}[kind])


@pytest.mark.parametrize("channels", [3, 4])
def test_pixels_survive_as_png(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels)).astype(np.uint8)
    np.testing.assert_array_equal(decoded(encode_png(pixels)), pixels)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encode_png(pixels)))), pixels)


def test_two_findings_share_one_scale() -> None:
    a, b = finding(0), finding(1)
    svg = pair([a, b], 0, ("one", "two"), difference=True)
    drawn = [[said(m) for m in group.iter() if "data-tip" in m.attrib] for group in ET.fromstring(svg).iter(f"{SVG}g")]
    drawn = [numbers for numbers in drawn if numbers]
    np.testing.assert_array_equal(drawn[0], a["share"].values.ravel())
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(drawn[2], (b["share"].values - a["share"].values).ravel())
    fill = {round(said(m), 12): m.attrib["fill"] for m in marks(svg)}
    both = np.concatenate([a["share"].values.ravel(), b["share"].values.ravel()])
    most = np.abs(both[np.isfinite(both)]).max()
    low = a["share"].values[1, 2]
    step = round(255 * (low + most) / (2 * most))
    assert fill[round(float(low), 12)] == "#" + lut("both")[step].tobytes().hex()


def test_what_cannot_be_subtracted_says_why() -> None:
    a, b = finding(0), finding(0, n_pos=5)
    assert "do not have the same places on the axis 'position'" in no_difference(a, b, 0)
    assert "no counterpart" in no_difference(a, a, 1) and no_difference(a, a, 0) == ""
    with pytest.raises(ValueError, match="same places"):
        pair([a, b], 0, difference=True)
    other = finding(charts=(Chart(kind="bars", variable="mass", x="site"),))
    with pytest.raises(ValueError, match="no common scale"):
        pair([a, other], 0)
    assert len(marks(picture_of([a, other], 0))) == 24 + 4  # each on its own
    with pytest.raises(IndexError, match="there is no chart 6"):
        picture(a, 6)


def test_labels_of_axes_never_overlap() -> None:
    made = finding(0, n_pos=150)
    for chart in (0, 3, 4, 5):
        words = ET.fromstring(picture(made, chart)).iter(f"{SVG}text")
        places = [each.attrib["transform"] for each in words if "rotate(-90)" in each.attrib.get("transform", "")]
        xs = [float(p.split("(")[1].split()[0]) for p in places if p.endswith("rotate(-90)")]
        low = [x for x, p in zip(xs, places, strict=True) if x > 30]
        assert len(low) < 150 and np.diff(sorted(set(low)))[:-1].min() > 9


def test_series_name_what_plotly_draws() -> None:
    made = finding()
    for i in range(6):
        figure, one = made.plot(i), series(made, i)
        drawn = np.concatenate([np.ravel(trace.z if i == 0 else trace.y) for trace in figure.data])
        assert sorted(drawn.astype(str)) == sorted(one.values.ravel().astype(str)), i


def size(png: bytes) -> tuple[int, int]:
    return struct.unpack(">II", png[16:24])


def ink(png: bytes) -> float:
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    return float((np.abs(pixels - pixels[0, 0]).sum(axis=-1) > 60).mean())


def test_a_picture_becomes_png_and_pdf_without_a_browser(tmp_path: Path) -> None:
    svg = picture(finding(), 2, width=400)
    height = int(ET.fromstring(svg).attrib["height"])
    png = to_png(svg, scale=2)
    assert size(png) == (800, 2 * height) and ink(png) > 0.02
    made = finding()
    assert made.save_figure(tmp_path / "a.png", 1, theme="dark").read_bytes()[:4] == b"\x89PNG"
    assert made.save_figure(tmp_path / "a.pdf").read_bytes()[:4] == b"%PDF"
    assert made.save_figure(tmp_path / "a.svg").read_text()[:4] == "<svg"
    with pytest.raises(ValueError, match=r"written as .svg, .png or .pdf, not as .gif"):
        save_figure(tmp_path / "a.gif", svg)


def test_without_the_library_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ValueError, match="pip install vl-convert-python"):
        to_png("<svg/>")
    assert figure_bytes("<svg/>", "svg") == b"<svg/>"


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="hiding the fonts of a machine needs root"
)
def test_text_is_drawn_on_a_machine_without_fonts() -> None:
    script = (
        "import sys; from t2lens.viz.raster import to_png, _missing; "
        'svg = \'<svg xmlns="http://www.w3.org/2000/svg" width="200" height="40"><text x="5" y="25" font-size="20" '
        f'font-family="{FONT}">0.attn \u21b5</text></svg>\'; '
        "sys.stdout.buffer.write(to_png(svg, 1)); sys.stderr.write(repr(_missing()))"
    )
    folders = "/usr/share/fonts /usr/local/share/fonts"
    hide = f'for d in {folders}; do mount -t tmpfs none "$d" || exit 99; done; exec "$0" -c "$1"'
    ran = subprocess.run(["unshare", "-m", "sh", "-c", hide, sys.executable, script], capture_output=True, check=False)
    if ran.returncode == 99 or b"unshare failed" in ran.stderr:
        pytest.skip("this machine does not let its fonts be hidden")
    alpha = np.asarray(Image.open(io.BytesIO(ran.stdout)).convert("RGBA"))[..., 3]
    assert (alpha > 128).sum() > 150 and "\\u21b5" in ascii(ran.stderr.decode())


def test_signs_that_no_font_has_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raster, "_missing", lambda: ("\u21b5",))
    assert raster._drawable("a\u21b5\u2205") == "a\u00b6\u2205"


# --- the maps ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces() -> list[t2lens.Trace]:
    models = [t2lens.load(name) for name in ("attnres-full", "ddl-cc-ec")]
    return [t2lens.trace(m, "the king said", name=n) for m, n in zip(models, ("<b>A</b>", "two"), strict=True)]


def test_the_maps_as_a_picture_have_the_numbers_of_the_traces(traces: list[t2lens.Trace], tmp_path: Path) -> None:
    svg = maps_picture(traces, quantity="residual_norm", depth="share", cell=(0, 2, "3.attn"))
    root = ET.fromstring(svg)
    assert float(root.attrib["width"]) == 1440 and "<b>" not in svg and "&lt;b&gt;A" in svg
    norms = {}
    for mark in marks(svg):
        tip = mark.attrib["data-tip"].splitlines()
        if tip[0].startswith("site ") and "residual norm" in tip[-1]:
            key = (mark.attrib["data-site"], int(mark.attrib["data-pos"]))
            norms.setdefault(key, []).append(float(tip[-1].split(": ")[1]))
    for i, trace in enumerate(traces):
        data = trace.dataset["residual_norm"]
        for read in data["read"].values:
            for pos in range(data.sizes["pos"]):
                value = float(str(data.sel(read=read).values[pos]))
                assert norms[str(read), pos][i] == value
    shares = [m.attrib["data-tip"] for m in marks(svg) if m.attrib["data-tip"].startswith("read 3.attn\n")]
    drawn = {tip.splitlines()[1]: float(tip.split(": ")[-1]) for tip in shares[len(shares) // 2 :]}
    norms_of_b = traces[1].dataset["contribution_norm"].sel(read="3.attn").isel(pos=2)
    for atom in ("embed", "0.mlp", "2.mlp"):
        share = float(norms_of_b.sel(atom=atom) / norms_of_b.sum())
        assert drawn[f"takes from {atom}"] == pytest.approx(share, rel=1e-5)
    assert traces[0].save_figure(tmp_path / "m.png", traces[1], width=1000).read_bytes()[:4] == b"\x89PNG"


def test_a_picture_of_the_maps_says_what_it_cannot(traces: list[t2lens.Trace]) -> None:
    svg = maps_picture([traces[1]], quantity="depth_entropy", depth="weights", cell=(0, 1, "out"), theme="dark")
    assert "this system carries one state" in svg and THEMES["dark"].paper in svg
    with pytest.raises(ValueError, match="Reads from depth are"):
        maps_picture(traces, depth="nothing")
    with pytest.raises(ValueError, match="one or two traces"):
        maps_picture([])


def test_every_chart_of_an_analysis_is_drawn() -> None:
    model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0)
    made = logit_lens(model, [0, 7, 3, 7])
    for i in range(len(made.charts)):
        numbers = [said(mark) for mark in marks(picture(made, i))]
        np.testing.assert_array_equal(numbers, made[made.charts[i].variable].values.ravel())


def test_a_list_of_tokens_is_not_what_stands_at_positions() -> None:
    own = finding().dataset
    data = own.drop_vars("token").assign_coords(token=np.array(["the"] * own.sizes["pos"], dtype=object))
    for tokens in (data, data.isel(token=slice(2))):  # as long as the prompt, and not
        assert axis(tokens, "pos").words == tuple(str(i) for i in range(own.sizes["pos"]))

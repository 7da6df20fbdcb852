"""Pictures of the lens, shares, paths and continuations: numbers of the finding, one scale, windows, hostile text."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from t2lens.analysis import attribute_logits, continue_text, logit_lens, top_paths
from t2lens.viz.colors import THEMES
from t2lens.viz.labels import fmt
from t2lens.viz.lens_grid import LENS, by_depth, lens_grid, range_of, stream_grid, values_of, window
from t2lens.viz.new_tokens import first_difference, new_tokens_picture
from t2lens.viz.shares import path_strips, share_bars, shares_of
from t2lens.viz.svg import fit, text_width
from tests.systems import tiny

TOKENS = [1, 7, 3, 7, 9, 2, 4, 4, 8]


def marks(svg: str) -> list[ET.Element]:
    return [each for each in ET.fromstring(svg).iter() if "data-tip" in each.attrib]


@pytest.mark.parametrize("seed", range(4))
def test_a_window_holds_its_position_and_no_more_than_there_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        n, room = int(rng.integers(1, 300)), int(rng.integers(1, 20))
        pos = int(rng.integers(0, n))
        shown = window(pos, n, room)
        assert pos in shown and len(shown) == min(n, room) and shown[0] >= 0 and shown[-1] < n


@pytest.mark.parametrize("quantity", LENS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_grid_has_a_cell_for_each_read_and_position(quantity: str, theme: str) -> None:
    finding = logit_lens(tiny("muddformer", 1), TOKENS)
    positions = [2, 3, 4]
    values = values_of(finding, quantity, positions)
    limits = range_of(quantity, [values])
    assert limits[1] >= np.nanmax(values) and limits[0] == (1.0 if quantity == "rank" else 0.0)
    svg = lens_grid(
        finding,
        title="<b>",
        quantity=quantity,
        pos=3,
        positions=positions,
        limits=limits,
        theme=theme,  # type: ignore[arg-type]
    )
    cells = marks(svg)
    reads = finding["read"].values
    assert len(cells) == len(reads) * 3
    for i, read in enumerate(reads[::-1]):
        cell = cells[3 * i + 1]
        assert cell.attrib["data-pos"] == "3" and read.startswith(cell.attrib["data-site"])
        assert cell.attrib["data-tip"].endswith(f": {fmt(float(values[len(reads) - 1 - i, 1]))}")
    assert THEMES[theme].paper in svg


def test_deeper_colours_are_larger_values_and_smaller_ranks() -> None:
    finding = logit_lens(tiny("standard", 3), TOKENS)
    for quantity, sign in (("kl", 1), ("rank", -1)):
        values = values_of(finding, quantity, [0, 1, 2, 3])
        limits = range_of(quantity, [values])
        cells = marks(lens_grid(finding, title="", quantity=quantity, pos=1, positions=[0, 1, 2, 3], limits=limits))
        light = np.array([sum(int(cell.attrib["fill"][i : i + 2], 16) for i in (1, 3, 5)) for cell in cells])
        order = np.argsort(sign * values[::-1].ravel(), kind="stable")
        assert (np.diff(light[order]) <= 0).mean() > 0.9


def test_streams_have_a_picture_of_their_own() -> None:
    finding = logit_lens(tiny("hyper-connections", 1), TOKENS)
    table = finding["stream_kl"].isel(pos=4).transpose("stream", "block").values
    cells = marks(stream_grid(finding, title="", quantity="kl", pos=4, limits=(0, 9)))
    assert [cell.attrib["data-tip"].rsplit(": ", 1)[1] for cell in cells] == [fmt(float(x)) for x in table.ravel()]


@pytest.mark.parametrize("log", [True, False])
def test_models_of_other_depth_share_one_plot(log: bool) -> None:
    findings = [logit_lens(tiny(name, 1), TOKENS) for name in ("standard", "muddformer")]
    svg = by_depth(findings, [2, 3], ["A", "B <i>"], log=log, title="t")
    dots = marks(svg)
    expected = [fmt(float(p)) for f, pos in zip(findings, (2, 3), strict=True) for p in f["probability"].isel(pos=pos)]
    assert sorted(dot.attrib["data-tip"].rsplit(" ", 1)[1] for dot in dots) == sorted(expected)
    assert {dot.attrib["data-panel"] for dot in dots} == {"0", "1"}
    assert all(np.isfinite(float(dot.attrib["cy"])) for dot in dots)


@pytest.mark.parametrize("by", ["atom", "head"])
@pytest.mark.parametrize("above", [True, False])
def test_shares_sum_to_what_is_shown(by: str, above: bool) -> None:
    model = tiny("attnres-full", 2).double()
    finding = attribute_logits(model, TOKENS, pos=5, token=9, by=by)  # type: ignore[arg-type]
    made = shares_of(finding, above_mean=above)
    logits = model(model.prepare(TOKENS)[0])[0, 5].detach()
    assert made.whole == pytest.approx(float(logits[9] - (logits.mean() if above else 0)), abs=1e-10)
    assert made.shares.sum() == pytest.approx(made.whole, abs=1e-10) and abs(made.error) < 1e-10
    for by_size in (True, False):
        svg = share_bars(made, title="t", by_size=by_size, limits=(-3.0, 3.0))
        bars = [each for each in marks(svg) if each.attrib["fill"] != THEMES["light"].ink]
        assert made.line in svg
        widths = {each.attrib["data-tip"].split(":")[0]: float(each.attrib["width"]) for each in bars}
        order = [list(made.names).index(name) for name in widths]
        sizes = np.abs(made.shares)[order]
        assert np.allclose(list(widths.values()), np.maximum(sizes / 6 * (680 - 162), 0.6), atol=0.02)
        assert not by_size or (np.diff(sizes[: len(made.names) - 1]) <= 1e-12).all()


def test_a_difference_has_no_mean_token() -> None:
    finding = attribute_logits(tiny("standard", 0), TOKENS, token=3, against=4)
    assert shares_of(finding, above_mean=True).line == shares_of(finding).line
    assert "difference of logits" in shares_of(finding).line


def test_paths_say_how_much_of_the_logit_they_are() -> None:
    finding = top_paths(tiny("ddl-tc-ec", 1).double(), TOKENS, pos=6, token=4, n=6, max_expansions=12)
    svg = path_strips(finding, title="t")
    whole, listed = float(finding["logit"]), float(finding["value"].sum())
    assert f"these 6 = {fmt(listed)} ({listed / whole:.0%}), all paths = {fmt(float(finding['total']))}, " in svg
    nodes = [each for each in marks(svg) if "data-site" in each.attrib]
    named = [word for name in finding["path"].values for word in re.findall(r"([\w.]+)@(\d+)", str(name))]
    assert sorted((n.attrib["data-site"], n.attrib["data-pos"]) for n in nodes) == sorted(named)
    for cumulated in np.cumsum(finding["value"].values):
        assert f">{cumulated:+.3f}</text>".replace("-", "\u2212") in svg


def test_a_continuation_shows_every_token_and_what_else_it_might_have_been() -> None:
    finding = continue_text(tiny("standard", 3), TOKENS, n=9, temperature=1.2, seed=2, top=4)
    svg = new_tokens_picture(finding, title="t", before=["<b>", "&", "x"], differs=3)
    said = [html.unescape(each.attrib["data-tip"]) for each in marks(svg)]
    assert len(said) == 2 * 9 and said[:9] == said[9:]
    for i, tip in enumerate(said[:9]):
        p, rank = float(finding["probability"][i]), int(finding["rank"][i])
        assert f"probability {fmt(p)}, rank {rank}, entropy {fmt(float(finding['entropy'][i]))} nats" in tip
        assert f"drawn with probability {fmt(float(finding['drawn_from'][i]))}" in tip
    assert svg.count(THEMES["light"].bad) == 2  # in the text, and in the columns
    assert first_difference([], [1]) is None


def test_long_tokens_are_cut_to_their_cell() -> None:
    for word in ("a", "W" * 40, "\u4e2d" * 9, ""):
        assert text_width(fit(word, 41, 10), 10) <= 41

"""Figures show the numbers of the trace, keep repeated tokens apart, and never pass a missing value off as zero."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.viz import figures
from t2lens.viz.panels import MASKED, Panel, Scale, draw

from ..systems import tiny
from .words import edited, spoken

PROMPT = "the cat saw the dog"

# plotly's figures build their attributes at run time
plot: Any = figures.plot
grid_map: Any = figures.grid_map
depth_map: Any = figures.depth_map
sequence_map: Any = figures.sequence_map


def caption(figure: Any) -> str:
    return " ".join(note.text.replace("<br>", " ") for note in figure.layout.annotations)


def heat(figure: Any) -> list[Any]:
    """Heatmaps that carry values: those on a shared colour axis."""
    return [trace for trace in figure.data if trace.type == "heatmap" and trace.coloraxis]


def marks(figure: Any, symbol: str) -> set[tuple[int, int]]:
    return {
        (int(x), int(y))
        for trace in figure.data
        if trace.type == "scatter" and trace.marker.symbol == symbol
        for x, y in zip(trace.x, trace.y, strict=True)
    }


def test_repeated_tokens_stay_apart_and_in_order():
    trace = spoken("standard", PROMPT, bos=False)
    figure = plot(trace, "residual_norm")
    (cells,) = heat(figure)
    assert cells.z.shape == (8, 5)
    assert list(cells.x) == [0, 1, 2, 3, 4]
    assert list(figure.layout.xaxis.ticktext) == ["the", "cat", "saw", "the", "dog"]
    assert [cells.customdata[0][i] for i in range(5)] == ["the (0)", "cat (1)", "saw (2)", "the (3)", "dog (4)"]
    assert "%{customdata}" in cells.hovertemplate
    np.testing.assert_array_equal(cells.z[1:], trace.dataset["residual_norm"].values)
    assert np.isnan(cells.z[0]).all()  # embed is not read
    assert "No value at embed" in caption(figure)


def test_markup_in_tokens_is_text():
    trace = spoken("standard", "<b>bold</b> <a> & </script> x")
    figure = plot(trace, "attention")
    words = [*figure.layout.xaxis.ticktext, *figure.layout.yaxis.ticktext, *map(str, heat(figure)[0].customdata[0])]
    assert not [word for word in words if "<" in word]
    assert "&lt;b&gt;bold&lt;/b&gt;" in words
    assert "</script><b>" not in figure.to_html(include_plotlyjs=False)
    plain = plot(spoken("standard", "a b c d e"), "attention").to_html(include_plotlyjs=False)
    assert figure.to_html(include_plotlyjs=False).count("</script>") == plain.count("</script>")


def test_numbers_are_arrays_all_the_way():
    figure = plot(spoken("attnres-full", PROMPT), "depth_weight")
    (cells,) = heat(figure)
    assert isinstance(cells.z, np.ndarray)
    assert set(json.loads(figure.to_json())["data"][0]["z"]) == {"dtype", "bdata", "shape"}


def test_a_source_that_does_not_exist_is_blank_and_counted():
    trace = spoken("attnres-full", PROMPT)
    figure = depth_map(trace, pos=2)
    (cells,) = heat(figure)
    expected = trace.dataset["depth_weight"].sel(pos=2).values
    np.testing.assert_array_equal(cells.z, expected)
    assert np.isnan(cells.z[0, 1:]).all()
    assert cells.hoverongaps is False
    assert f"blank: no such source, or no value ({int(np.isnan(expected).sum())})" in caption(figure)
    assert f"n = {int(np.isfinite(expected).sum())} values" in caption(figure)


def test_exact_zeros_look_different_from_missing_sources():
    trace = spoken("attnres-window", PROMPT)
    weights = trace.dataset["depth_weight"].sel(pos=4).values
    figure = depth_map(trace, pos=-2)
    zeros = {(int(c), int(r)) for r, c in np.argwhere(weights == 0)}
    assert zeros
    assert marks(figure, "circle") == zeros
    assert f"dot: exactly zero ({len(zeros)})" in caption(figure)


def test_nan_and_infinities_are_marked_and_counted():
    trace = spoken("standard", PROMPT)
    norms = trace.dataset["residual_norm"].values.copy()
    norms[2, 1], norms[3, 2], norms[4, 3] = np.nan, np.inf, -np.inf
    figure = grid_map(edited(trace, residual_norm=norms))
    assert marks(figure, "x-thin") == {(1, 3), (2, 4), (3, 5)}
    assert "cross: not a finite number (3)" in caption(figure)
    assert np.isfinite(figure.layout.coloraxis.cmax)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype_is_drawn(dtype: torch.dtype):
    model = tiny("attnres-full", dtype=dtype)
    trace = t2lens.trace(model, [0, 7, 3])
    for quantity in ("residual_norm", "depth_weight", "attention"):
        assert np.isfinite(heat(plot(trace, quantity))[0].z).any()


def test_half_precision_arrays_are_drawn():
    z = np.array([[1, np.nan], [0, 2]], np.float16)
    panel = Panel(name="x", z=z, kind=np.zeros((2, 2), np.uint8), x=["a", "b"], y=["c", "d"], hover_x=[], hover_y=[])
    panel.hover_x, panel.hover_y = panel.x, panel.y
    trace = spoken("standard", PROMPT)
    figure = draw(
        [panel],
        Scale(label="x", lo=0, hi=2),
        [trace],
        axes=("a", "b"),
        about="x.",
        hover=("a", "b", "c"),
        difference=False,
    )
    assert heat(figure)[0].z.dtype == np.float32
    assert marks(figure, "x-thin") == {(1, 0)}
    assert marks(figure, "circle") == {(0, 1)}


def test_masked_cells_are_grey_and_not_missing():
    trace = spoken("attnres-full", PROMPT)
    figure = sequence_map(trace, site="1.attn", head=1)
    values, masked = figure.data[0], figure.data[1]
    np.testing.assert_array_equal(values.z, trace.dataset["sequence_attention"].sel(layer=1, head=1).values)
    assert np.array_equal(masked.z == 1, ~np.tri(6, dtype=bool))
    assert "grey: masked, a later position (15)" in caption(figure)
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]  # queries run downwards
    assert MASKED != 0


def test_the_mean_over_heads_is_stated():
    trace = spoken("attnres-full", PROMPT)
    figure = sequence_map(trace, site="2.attn")
    mean = trace.dataset["sequence_attention"].sel(layer=2).mean("head")
    np.testing.assert_allclose(heat(figure)[0].z, mean.values)
    assert "mean of 2 heads" in caption(figure)


def test_two_traces_share_one_stated_range():
    a, b = spoken("attnres-full", PROMPT), spoken("standard", PROMPT, seed=3)
    figure = plot(a, "residual_norm", b)
    both = np.concatenate([a.dataset["residual_norm"].values, b.dataset["residual_norm"].values])
    first, second = heat(figure)
    assert first.coloraxis == second.coloraxis == "coloraxis"
    assert figure.layout.coloraxis.cmin == both.min()
    assert f"one range for A and B {both.min():.3g} to {figure.layout.coloraxis.cmax:.3g}" in caption(figure)
    above = int((both > figure.layout.coloraxis.cmax).sum())
    assert (f"triangle: above the range ({above})" in caption(figure)) == (above > 0)


def test_values_far_above_the_rest_are_marked_not_hidden():
    trace = spoken("standard", " ".join(f"w{i}" for i in range(20)))
    norms = trace.dataset["residual_norm"].values.copy()
    norms[:] = np.clip(norms, 1.0, 2.0)
    norms[3, 0] = 20.0
    figure = grid_map(edited(trace, residual_norm=norms))
    assert figure.layout.coloraxis.cmax == 2.0
    assert (0, 4) in marks(figure, "triangle-up")
    assert figure.layout.coloraxis.colorbar.ticktext[-1].endswith("or more")


def test_wide_ranges_are_drawn_on_a_logarithmic_scale_that_is_named():
    trace = spoken("standard", PROMPT)
    norms = trace.dataset["residual_norm"].values.copy()
    norms[:], norms[2, 3], norms[1, 1] = 10.0, 1000.0, 0.1
    figure = grid_map(edited(trace, residual_norm=norms))
    axis = figure.layout.coloraxis
    assert (axis.cmin, axis.cmax) == (0.1, 1000.0)
    assert axis.colorbar.title.text == "residual norm, log scale"
    halfway = [at * (axis.cmax - axis.cmin) + axis.cmin for at, _ in axis.colorscale][16]
    assert halfway == pytest.approx(10.0)  # the middle colour stands at the geometric mean
    assert [color for _, color in axis.colorscale][16] == "#4ea5c4"
    assert heat(figure)[0].z[3, 3] == 1000.0  # cells keep their numbers


def test_reads_are_drawn_on_a_root_scale_that_is_named():
    axis = plot(spoken("attnres-full", PROMPT), "depth_weight").layout.coloraxis
    assert axis.colorbar.title.text == "own depth weights, root scale"
    assert [at for at, _ in axis.colorscale][16] == 0.25


def test_negative_numbers_get_a_diverging_scale_around_zero():
    a, b = spoken("ddl", PROMPT), spoken("attnres-full", PROMPT)
    assert a.dataset["mixing"].min() < 0
    figure = plot(a, "mixing", b)
    axis = figure.layout.coloraxis
    assert axis.cmin == -axis.cmax
    most = max(float(np.nanmax(np.abs(t.dataset["mixing"].values))) for t in (a, b))
    assert axis.cmax == pytest.approx(most)
    middle = [color for at, color in axis.colorscale if at == 0.5]
    assert middle == ["#f8f7f4"]


def test_the_difference_is_b_minus_a():
    a, b = spoken("attnres-full", PROMPT), spoken("standard", PROMPT)
    figure = plot(a, "mixing", b, pos=2, difference=True)
    last = heat(figure)[-1]
    expected = b.dataset["mixing"].sel(pos=2).values - a.dataset["mixing"].sel(pos=2).values
    np.testing.assert_allclose(last.z, expected)
    assert last.coloraxis == "coloraxis2"
    assert figure.layout.coloraxis2.cmin == -figure.layout.coloraxis2.cmax


def test_a_difference_needs_a_shared_axis():
    a = spoken("attnres-full", PROMPT)
    with pytest.raises(ValueError, match="do not share the axis 'source'"):
        plot(a, "depth_weight", spoken("attnres-block", PROMPT), difference=True)
    with pytest.raises(ValueError, match="do not share the axis 'position'"):
        plot(a, "residual_norm", spoken("attnres-full", "the dog"), difference=True)
    with pytest.raises(ValueError, match="nothing to subtract: this system has no gates"):
        plot(a, "gate", spoken("ddl", PROMPT), difference=True)
    with pytest.raises(ValueError, match="needs two traces"):
        plot(a, "residual_norm", difference=True)


def test_what_a_system_does_not_have_is_said_in_the_panel():
    figure = plot(spoken("attnres-full", PROMPT), "gate", spoken("ddl", PROMPT))
    assert "this system has no gates" in caption(figure)
    assert np.isnan(heat(figure)[0].z).all()
    assert figure.layout.coloraxis.cmin == 0
    assert figure.layout.coloraxis.cmax == 2


def test_a_failed_check_is_a_badge_in_the_picture():
    trace = spoken("standard", PROMPT)
    assert "verified, " in caption(plot(trace))
    trace._meta["checks"][0]["value"] = 1.0
    name = trace._meta["checks"][0]["name"]
    assert f"FAILED: {name}. Do not trust this picture." in caption(plot(trace))


def test_notices_of_the_trace_are_in_the_caption():
    trace = spoken("standard", " ".join(["word"] * 40))
    assert "context 32" in caption(plot(trace))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"quantity": "residual_nrm"}, KeyError, "did you mean 'residual_norm'"),
        ({"quantity": "attention", "site": "1.mlp"}, KeyError, "the sites that look are 0.attn, 1.attn, 2.attn"),
        ({"quantity": "attention", "head": 2}, KeyError, "has the heads 0..1, not 2"),
        ({"quantity": "mixing", "pos": 6}, ValueError, "positions 0..5, not 6"),
    ],
)
def test_bad_choices_are_one_sentence(options: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        plot(spoken("standard", PROMPT), **options)


def test_a_long_prompt_thins_its_labels_but_not_its_cells():
    model = tiny("standard", n_ctx=256)
    trace = t2lens.trace(model, [i % 50 for i in range(200)])
    grids, looks = plot(trace, "residual_norm"), plot(trace, "attention")
    assert heat(grids)[0].z.shape == (8, 200)
    assert heat(looks)[0].z.shape == (200, 200)
    assert len(grids.layout.xaxis.ticktext) <= 70
    assert grids.layout.width < 1000
    assert looks.layout.height < 800
    assert "%{x}" in heat(looks)[0].hovertemplate


def test_averaged_coefficients_are_called_that():
    exact, averaged = spoken("ddl", PROMPT), spoken("ddl-cc", PROMPT)
    assert "energy-weighted mean" not in caption(plot(exact, "mixing"))
    assert "energy-weighted mean" in caption(plot(averaged, "mixing"))
    assert "energy-weighted mean" not in caption(plot(averaged, "contribution_norm"))

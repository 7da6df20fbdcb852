"""Pictures of gates on writes of any system but Deep Delta Learning: map, tokens, histogram, and the streams of
Hyper-Connections, what reads them, what writes to them and how they mix.

Each is one SVG document, made of the dataset of a finding (`t2lens.analysis.write_gates`). stream: of a gate that every
stream has, the one that is shown; "": their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from t2lens.viz.colors import THEMES, ThemeName, ink_on, shade
from t2lens.viz.gate_grid import bars, grid, scale, shares, tokens
from t2lens.viz.labels import fmt
from t2lens.viz.svg import document, fit, heading, mark, paragraph, round_ticks, words

__all__ = ["gate_map", "histogram", "most_in_a_bin", "streams", "streams_limits", "strip", "values_of"]

Range = tuple[float, float]
_SIDE = 27.0  # of a cell that holds a number


def values_of(data: Any, stream: str) -> np.ndarray:
    """The gate that is shown, [site, token]: of a stream, or the mean over streams where there are some."""
    gate = data["gate"]
    if "stream" not in gate.dims:
        return gate.values
    return (gate.sel(stream=stream) if stream else gate.mean("stream")).values


def _color(value: float, limits: Range, theme: ThemeName) -> str:
    """Magnitudes from 0; where there are signs, on the ramp that has 0 in its middle."""
    low, high = limits
    if low < 0:
        return shade("both", 0.5 + value / (2 * max(-low, high)), theme)
    return shade("cool", (value - low) / (high - low), theme)


def _scale(limits: Range, theme: ThemeName, words_on: tuple[str, str] = ("", "")) -> Any:
    low, high = limits
    ticks = [v for v in round_ticks(low, high, log=False) if (high - low) * 0.12 < v - low < (high - low) * 0.88]
    marks = [(low, fmt(low, 3), words_on[0]), *((v, fmt(v, 3), "") for v in ticks), (high, fmt(high, 3), words_on[1])]
    return lambda x, y, height: scale(lambda v: _color(v, limits, theme), limits, marks, x, y, height, theme)


def gate_map(
    data: Any,
    *,
    site: str,
    pos: int,
    limits: Range,
    stream: str = "",
    theme: ThemeName = "light",
    width: int = 560,
    title: str = "",
) -> str:
    """The gate of every write, sublayer x position, the chosen node framed. limits: of the colours."""
    values, label = values_of(data, stream), str(data.attrs["gate"])
    return grid(
        data,
        values,
        site=site,
        pos=pos,
        fill=lambda r, c: _color(float(values[r, c]), limits, theme),
        tip=lambda r, c: f"{label} {float(values[r, c]):.6g}",
        legend=_scale(limits, theme),
        legend_width=62,
        label=label,
        unit="",
        title=title,
        about=f"{title}. {label}, {fmt(limits[0], 3)} to {fmt(limits[1], 3)}.",
        theme=theme,
        width=width,
    )


def strip(
    data: Any,
    *,
    site: str,
    pos: int,
    limits: Range,
    stream: str = "",
    theme: ThemeName = "light",
    width: int = 560,
    title: str = "",
) -> str:
    """The text, every token in the colour of its gate at one sublayer, the chosen one framed."""
    values, label = values_of(data, stream)[data["site"].values.tolist().index(site)], str(data.attrs["gate"])
    body, y = tokens(
        data,
        site=site,
        pos=pos,
        fill=lambda c: _color(float(values[c]), limits, theme),
        tip=lambda c: f"{label} {float(values[c]):.6g}",
        y=30.0,
        theme=theme,
        width=width,
    )
    said, y = paragraph([_said(values, label)], y + 4, width, theme)
    return document(heading(title, theme) + body + said, width, y + 8, f"{title}. {_said(values, label)}", theme)


def _said(values: np.ndarray, label: str) -> str:
    low, middle, high = (fmt(float(v), 3) for v in (values.min(), np.median(values), values.max()))
    return f"{label} of {values.size:,} tokens: {low} to {high}, median {middle}."


def histogram(
    data: Any,
    passages: Any | None,
    *,
    site: str,
    limits: Range,
    most: float,
    stream: str = "",
    theme: ThemeName = "light",
    width: int = 560,
    bins: int = 40,
    title: str = "",
) -> str:
    """The gate of one sublayer: bars over the tokens of the prompt, an outline over those of the passages. limits: of
    the axis and of the colours; most: the largest share that is shown (`most_in_a_bin`)."""
    i, label = data["site"].values.tolist().index(site), str(data.attrs["gate"])
    plot = bars(
        values_of(data, stream)[i],
        None if passages is None else values_of(passages, stream)[i],
        0 if passages is None else len(set(passages["sequence"].values.tolist())),
        limits=limits,
        top=most,
        bins=bins,
        color=lambda value: _color(value, limits, theme),
        word=lambda _: "",
        label=label,
        theme=theme,
        width=width,
    )
    plot.xticks(round_ticks(*limits, log=False))
    return document(heading(title, theme) + "".join(plot.marks), width, 236, f"{title}. Histogram of {label}.", theme)


def most_in_a_bin(data: Any, passages: Any | None, site: str, limits: Range, stream: str = "", bins: int = 40) -> float:
    """The top of the histogram, which several may share."""
    i = data["site"].values.tolist().index(site)
    values = [values_of(each, stream)[i] for each in (data, passages) if each is not None]
    return 1.12 * max(float(each.max()) for each in shares(values, limits, bins))


def streams_limits(datasets: Sequence[Any]) -> Range:
    """The range of weights that several pictures of streams share: from 0 where none is negative, round at its end."""
    every = np.concatenate([data[name].values.ravel() for data in datasets for name in ("gate", "read", "mix")])
    low, high = min(float(every.min()), 0.0), max(float(every.max()), 1.0)
    return float(np.floor(low * 10) / 10) if low < -1e-9 else 0.0, float(np.ceil(high * 10) / 10)


def streams(
    data: Any,
    *,
    site: str,
    pos: int,
    limits: Range | None = None,
    theme: ThemeName = "light",
    width: int = 560,
    title: str = "",
) -> str:
    """At one token: with which weight every sublayer reads each stream, and writes to each; and the matrix by which the
    streams are multiplied as the chosen one writes. All weights are in one scale."""
    look, shown = THEMES[theme], limits or streams_limits([data])
    sites, n = [str(s) for s in data["site"].values], data.sizes["stream"]
    at = data.isel({data["gate"].dims[-1]: pos})
    gap, left, right = 14.0, 54.0, 48.0
    w = min(_SIDE, (width - left - right - 2 * gap - 34) / (3 * n))
    h = min(_SIDE * 0.74, max(4.0, 380 / len(sites)))
    top, body = 62.0, [heading(title, theme)]
    numbers = w >= 20 and h >= 12

    def cell(x: float, y: float, value: float, tip: str, node: dict[str, Any], high: float) -> None:
        fill, outline = _color(value, shown, theme), {"stroke": look.paper, "stroke_width": 0.8}
        body.append(mark("rect", tip, node, x=x, y=y, width=w, height=high, fill=fill, **outline))
        if numbers:
            said = f"{value:.2f}".replace("-0.00", "0.00").replace("0.", ".", 1)
            place = {"anchor": "middle", "size": 9.5 if w >= 24 else 8.5, "idle": True}
            body.append(words(x + w / 2, y + high / 2 + 3.4, said, ink_on(fill), **place))

    for k, (name, said) in enumerate((("read", "reads"), ("gate", "writes to"))):
        x0 = left + k * (n * w + gap)
        body.append(words(x0 + n * w / 2, 40, said, look.ink, anchor="middle", bold=True))
        for j in range(n):
            body.append(words(x0 + (j + 0.5) * w, 56, str(j), look.mute, anchor="middle"))
        for r, row in enumerate(sites):
            y = top + (len(sites) - 1 - r) * h
            for j in range(n):
                value = float(at[name].values[r, j])
                cell(x0 + j * w, y, value, f"{row} {said} stream {j}\nweight {value:.6g}", {"site": row}, h)
    for r, row in enumerate(sites):
        y, bold = top + (len(sites) - 1 - r) * h, row == site
        color = look.ink if bold else look.mute
        body.append(words(left - 6, y + h / 2 + 3.8, row, color, size=11.0, anchor="end", bold=bold))
        if bold:
            frame = {"fill": "none", "stroke": look.ink, "stroke_width": 1.6, "pointer_events": "none"}
            body.append(mark("rect", x=left - 1, y=y - 0.8, width=2 * n * w + gap + 2, height=h + 1.2, **frame))
    x0, high, base = left + 2 * (n * w + gap) + 34, min(_SIDE, w), top + len(sites) * h
    body.append(words(x0 + n * w / 2, 40, fit(f"mixes, at {site}", n * w + 60, 10.5), look.ink, anchor="middle",
                      bold=True))  # fmt: skip
    mix = at["mix"].sel(site=site).values
    for j in range(n):
        body.append(words(x0 + (j + 0.5) * w, 56, str(j), look.mute, anchor="middle"))
        body.append(words(x0 - 5, top + (j + 0.5) * high + 3.6, str(j), look.mute, anchor="end"))
        for k in range(n):
            value = float(mix[j, k])
            tip = f"as {site} writes, stream {j} takes {value:.6g} of stream {k}"
            cell(x0 + k * w, top + j * high, value, tip, {}, high)
    body.append(words(x0 - 20, top + n * high / 2, "to", look.mute, anchor="middle", upright=True))
    body.append(words(x0 + n * w + 4, 56, "from", look.mute))
    bar = min(130.0, max(base - top - n * high - 34, 60.0))
    body.append(_scale(shown, theme)(x0, base - bar, bar))
    body.append(words(x0, base - bar - 8, "weight", look.mute))
    note = "Each stream becomes its mixture of all streams, plus what the sublayer puts out times the weight it is "
    said, y = paragraph([f"{note}written with."], base + 4, width, theme)
    about = f"{title}. Weights of {n} streams as every sublayer reads and writes, and how {site} mixes them."
    return document("".join(body) + said, width, y + 8, about, theme)

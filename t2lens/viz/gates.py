"""Pictures of the gates of Deep Delta Learning: map, histogram, tokens by regime, spectrum; of any gate, its curve.

Each is one SVG document, made of the dataset of a finding (`t2lens.analysis`: gate_tokens, gate_spectrum, gate_curve).
Marks carry `data-tip`, and those that stand for a node of the maps `data-site` and `data-pos`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from t2lens.analysis.regimes import EDGES, regime_of
from t2lens.viz.change import before_after
from t2lens.viz.colors import THEMES, ThemeName, beta_shade, regimes
from t2lens.viz.gate_grid import bars, edge, grid, scale, shares, tokens
from t2lens.viz.labels import fmt
from t2lens.viz.svg import Plot, document, heading, keys, mark, round_ticks, text_width, words

__all__ = [
    "curve",
    "curve_limits",
    "gate_map",
    "histogram",
    "kl_words",
    "most_in_a_bin",
    "next_tokens",
    "spectrum",
    "spectrum_limits",
    "strip",
]

_MARKS = ((0.0, "0", "keeps"), (1.0, "1", "overwrites"), (2.0, "2", "reflects"))
_SIZES = ((0.0, "0", "nothing"), (1.0, "1", ""), (2.0, "2", "most"))
_RANGE = (0.0, 2.0)


def _erases(data: Any) -> bool:
    return bool(data.attrs.get("erases", 1))


def _regimes(data: Any, theme: ThemeName) -> tuple[str, ...]:
    return regimes(theme, erases=_erases(data))


def gate_map(
    data: Any, *, site: str, pos: int, by: str = "beta", theme: ThemeName = "light", width: int = 560, title: str = ""
) -> str:
    """Beta of every write, sublayer x position, the chosen node framed; by: "beta", or "regime" for its colours."""
    look, colors, erases = THEMES[theme], _regimes(data, theme), _erases(data)
    names, beta, index = [str(r) for r in data["regime"].values], data["beta"].values, data["regime_index"].values

    def color(value: float) -> str:
        return beta_shade(value, theme, erases=erases)

    def fill(r: int, c: int) -> str:
        if by == "regime":
            return colors[int(index[r, c])] if index[r, c] >= 0 else look.blank
        return color(float(beta[r, c]))

    def tip(r: int, c: int) -> str:
        i = int(index[r, c])
        return f"beta {float(beta[r, c]):.6g}" + (f": {names[i]}" if i >= 0 else "")

    def legend(x: float, y: float, height: float) -> str:
        if by != "regime":
            return scale(color, _RANGE, _MARKS if erases else _SIZES, x, y, height, theme)
        parts = []
        for k, i in enumerate(reversed(range(len(names)))):
            parts.append(mark("rect", x=x, y=y + 17 * k, width=10.0, height=10.0, fill=colors[i], **edge(theme)))
            parts.append(words(x + 15, y + 17 * k + 9, names[i], look.mute))
        return "".join(parts)

    return grid(
        data,
        beta,
        site=site,
        pos=pos,
        fill=fill,
        tip=tip,
        legend=legend,
        legend_width=92 if by == "regime" else 76,
        label="beta",
        unit="0..2",
        title=title,
        about=f"{title}. Beta of every write, 0 to 2.",
        theme=theme,
        width=width,
    )


def histogram(
    data: Any,
    passages: Any | None,
    *,
    site: str,
    theme: ThemeName = "light",
    width: int = 560,
    bins: int = 40,
    limits: float | None = None,
    title: str = "",
) -> str:
    """Beta of one sublayer: bars over the tokens of the prompt, an outline over those of the passages. limits: the
    largest share that is shown."""
    look, colors, names = THEMES[theme], _regimes(data, theme), [str(r) for r in data["regime"].values]
    plot = bars(
        data["beta"].sel(site=site).values,
        None if passages is None else passages["beta"].sel(site=site).values,
        0 if passages is None else len(set(passages["sequence"].values.tolist())),
        limits=_RANGE,
        top=limits or most_in_a_bin(data, passages, site, bins),
        bins=bins,
        color=lambda beta: colors[int(regime_of(np.array(beta)))],
        word=lambda beta: f": {names[int(regime_of(np.array(beta)))]}",
        label="beta",
        theme=theme,
        width=width,
    )
    plot.xticks([0, 0.5, 1, 1.5, 2])
    for i, (low, high) in enumerate(itertools.pairwise([0.0, *EDGES, 2.0])):
        if i:
            plot.line_at(low, across=False, color=look.hair, dash="2 2")
        room, word = plot.x(high) - plot.x(low), names[i]
        if text_width(word, 9.5) < room + 14:
            plot.text(plot.x((low + high) / 2), 41, word, anchor="middle", size=9.5)
    return document(heading(title, theme) + "".join(plot.marks), width, 236, f"{title}. Histogram of beta.", theme)


def most_in_a_bin(data: Any, passages: Any | None, site: str, bins: int = 40) -> float:
    """The top of the histogram, which several may share."""
    values = [each["beta"].sel(site=site).values for each in (data, passages) if each is not None]
    return 1.12 * max(float(each.max()) for each in shares(values, _RANGE, bins))


def strip(data: Any, *, site: str, pos: int, theme: ThemeName = "light", width: int = 560, title: str = "") -> str:
    """The text, every token in the colour of its regime at one sublayer, the chosen one framed; counts beside."""
    look, row, colors = THEMES[theme], data.sel(site=site), _regimes(data, theme)
    names, beta, index = [str(r) for r in data["regime"].values], row["beta"].values, row["regime_index"].values
    counts = [f"{name} {int((index == i).sum())}" for i, name in enumerate(names)]
    legend, y = keys(list(zip(colors, counts, strict=True)), 2.0, 28.0, width, look.mute, 11.0, edge(theme))

    def tip(c: int) -> str:
        said = names[int(index[c])] if index[c] >= 0 else "no regime is named"
        more = (f"\n{name} {float(row[name].values[c]):.4g}" for name in ("erased", "written", "alignment"))
        return f"beta {float(beta[c]):.6g}: {said}{''.join(more)}"

    def fill(c: int) -> str:
        return colors[int(index[c])] if index[c] >= 0 else look.blank

    body, y = tokens(data, site=site, pos=pos, fill=fill, tip=tip, y=y + 19, theme=theme, width=width)
    return document(heading(title, theme) + legend + body, width, y + 8, f"{title}. Tokens by regime.", theme)


def spectrum(
    data: Any,
    *,
    site: str,
    theme: ThemeName = "light",
    width: int = 560,
    limits: tuple[float, float] | None = None,
    title: str = "",
) -> str:
    """Left: the eigenvalue of every step along its k. Right: singular values of the steps that follow the embedding,
    and of those that follow the chosen write, in the span of their directions, falling."""
    look = THEMES[theme]
    half = width // 2
    sites = [str(s) for s in data["site"].values]
    eigen, n = data["eigenvalue"].values, len(sites)
    plot = Plot(half, 250, (-1.15, 1.15), (0, n), top=42, bottom=36, left=52, right=8, theme=theme,
                xlabel="eigenvalue along k")  # fmt: skip
    for value in (-1.0, 0.0, 1.0):
        plot.line_at(value, across=False, color=look.mute if value == 0 else look.hair)
    plot.xticks([-1, 0, 1])
    step, at = max(1, math.ceil(12 / (plot.inner_h / n))), sites.index(site) if site in sites else -n
    for i, name in enumerate(sites):
        y, chosen = plot.y(i + 0.5), name == site
        color = look.ink if chosen else look.mute
        if chosen or (i % step == 0 and abs(i - at) * plot.inner_h / n >= 11):
            body = words(plot.left - 6, y + 3.8, name, color, anchor="end", bold=chosen, size=10)
            plot.marks.append(body)
        value, beta = float(eigen[i]), float(data["beta"].values[i])
        fill = _regimes(data, theme)[int(regime_of(np.array(beta)))]
        plot.marks.append(f'<path d="M{plot.x(1):.1f} {y:.1f}H{plot.x(value):.1f}" stroke="{look.hair}"/>')
        tip = f"{name}: eigenvalue {value:.6g} along k, 1 across it\nbeta {beta:.6g}"
        plot.marks.append(mark("circle", tip, {"site": name}, cx=plot.x(value), cy=y, r=5.0 if chosen else 3.4,
                               fill=fill, stroke=look.ink, stroke_width=1.6 if chosen else 0.5))  # fmt: skip
    values = data["transport"].values
    low, high = limits or spectrum_limits([data])
    right = Plot(width - half, 250, (1, values.shape[1]), (low, high), top=42, bottom=36, left=50, right=12, log=True,
                 theme=theme, xlabel="singular value, falling", ylabel="")  # fmt: skip
    right.yticks()
    right.line_at(1.0, color=look.mute)
    xs = np.arange(1, values.shape[1] + 1)
    right.xticks(sorted({1, (1 + values.shape[1]) // 2, values.shape[1]}))
    for k, (atom, color) in enumerate(zip(("embed", site), (look.mute, THEMES[theme].series[1]), strict=True)):
        mine = np.maximum(data["transport"].sel(atom=atom).values, low)
        right.line(xs, mine, color)
        for x, v, shown in zip(xs, data["transport"].sel(atom=atom).values, mine, strict=True):
            tip = f"after {atom}: singular value {x} is {v:.6g}"
            right.marks.append(mark("circle", tip, cx=right.x(float(x)), cy=right.y(float(shown)), r=2.4, fill=color))
        right.marks.append(
            words(right.left + 8, right.top + right.inner_h - 10 - 14 * k, f"all steps after {atom}", color, size=10)
        )
    body = f'{heading(title, theme)}{"".join(plot.marks)}<g transform="translate({half} 0)">{"".join(right.marks)}</g>'
    body += words(plot.left, 36, "each step: 1 \u2212 \u03b2 along k, 1 elsewhere", look.mute, size=10)
    body += words(half + right.left, 36, "their product, to the readout", look.mute, size=10)
    return document(body, width, 250, f"{title}. Eigenvalues of steps and singular values of their product.", theme)


def spectrum_limits(datasets: Sequence[Any]) -> tuple[float, float]:
    """The range of singular values that several share: powers of ten, from 1e-4 at least."""
    every = np.concatenate([data["transport"].values.ravel() for data in datasets])
    low = max(float(every.min()), 1e-4)
    return 10.0 ** min(math.floor(math.log10(low)), -1), max(float(every.max()) * 1.3, 2.0)


def curve(
    data: Any,
    value: float,
    *,
    theme: ThemeName = "light",
    width: int = 560,
    limits: dict[str, tuple[float, float]] | None = None,
    plain: str = "as it is",
    title: str = "",
) -> str:
    """KL at the position, its mean over the prompt, and the change of the loss, over the gate; the chosen value and the
    gate as it is (in the words of `plain`) are marked. limits: name of a variable -> its range."""
    look, colors = THEMES[theme], THEMES[theme].series
    xs, body, y = data["value"].values, [heading(title, theme)], 0.0
    at_pos = float(data["plain_gate"].values[int(data.attrs["position"])])
    everything = data["plain_gate"].values
    shared, gate = limits or curve_limits([data]), str(data.attrs["gate"])
    said = f"{gate} of {data.attrs['site']}"
    said += f" to {data.attrs['stream'].replace('stream', 'stream ')}" if data.attrs["stream"] else ""
    said += ", set at all positions" if data.attrs["at"] == "all" else f", set at position {data.attrs['position']}"
    i = int(np.abs(xs - value).argmin())
    for part, names in enumerate((("kl", "kl_mean"), ("loss",))):
        known = [name for name in names if np.isfinite(data[name].values).any()]
        low, high = shared[names[0]]
        plot = Plot(width, 168 if part == 0 else 162, (float(xs[0]), float(xs[-1])), (low, high),
                    top=40 if part == 0 else 20, bottom=34, left=52, right=12, theme=theme, xlabel=said if part else "",
                    ylabel=("KL, nats", "change of loss, nats")[part])  # fmt: skip
        plot.yticks().xticks(round_ticks(float(xs[0]), float(xs[-1]), log=False))
        if low < 0 < high:
            plot.line_at(0, color=look.mute)
        if data.attrs["at"] == "all":
            at = {"x": plot.x(float(everything.min())), "y": plot.top, "height": float(plot.inner_h)}
            at["width"] = plot.x(float(everything.max())) - at["x"]
            tip = f"{plain}: {everything.min():.4g} to {everything.max():.4g} over {len(everything)} positions"
            plot.marks.append(mark("rect", tip, **at, fill=look.mask, opacity=0.6))
        plot.line_at(at_pos, across=False, color=look.mute, dash="3 3")
        plot.line_at(value, across=False, color=look.ink)
        for name, color in zip(known, (colors[1], colors[0]) if part == 0 else (colors[2],), strict=False):
            ys = data[name].values
            plot.line(xs, ys, color)
            for x, v in zip(xs, ys, strict=True):
                tip = f"{gate} {x:.3g}: {_NAMES[name]} {v:.6g} nats"
                plot.marks.append(mark("circle", tip, cx=plot.x(float(x)), cy=plot.y(float(v)), r=2.2, fill=color))
            plot.marks.append(mark("circle", cx=plot.x(float(xs[i])), cy=plot.y(float(ys[i])), r=4.6, fill=color,
                                   stroke=look.paper, stroke_width=1.2, pointer_events="none"))  # fmt: skip
        if not known:
            plot.instead("no next token is known, so there is no loss")
        if part == 0:
            x = plot.left
            for name, color in zip(known, (colors[1], colors[0]), strict=False):
                body.append(words(x, 33, _NAMES[name], color, size=10))
                x += text_width(_NAMES[name], 10) + 14
            body.append(words(x, 33, f"dashed: {plain}, {at_pos:.3g}", look.mute, size=10))
        body.append(f'<g transform="translate(0 {y:.0f})">{"".join(plot.marks)}</g>')
        y += plot.height
    return document("".join(body), width, y, f"{title}. KL and change of the loss against {gate}.", theme)


_NAMES = {"kl": "KL at the position", "kl_mean": "KL, mean over the prompt", "loss": "change of the loss"}


def curve_limits(datasets: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """Ranges that several curves share."""
    found = {}
    for names in (("kl", "kl_mean"), ("loss",)):
        every = np.concatenate([data[name].values for data in datasets for name in names])
        every = every[np.isfinite(every)]
        low, high = (min(float(every.min()), 0.0), max(float(every.max()), 0.0)) if every.size else (0.0, 1.0)
        room = 0.06 * (high - low) or 1e-6
        found[names[0]] = (low - room if low < 0 else low, high + room)
    return found


def next_tokens(
    data: Any,
    value: float,
    *,
    theme: ThemeName = "light",
    width: int = 560,
    most: float | None = None,
    plain: str = "as it is",
    title: str = "",
) -> str:
    """The likeliest next tokens at the position as it is and with the chosen value of the gate. most: the end of both
    scales."""
    i = int(np.abs(data["value"].values - value).argmin())
    before, after = data["plain_probability"].values, data["probability"].values[i]
    names = (plain, f"{data.attrs['gate']} {data['value'].values[i]:.3g}")
    look: dict[str, Any] = {"most": most, "theme": theme, "width": width}
    return before_after(data["candidate"].values, before, after, names=names, title=title, n=8, **look)


def kl_words(data: Any, value: float) -> str:
    """The effect of the chosen value in one sentence."""
    i = int(np.abs(data["value"].values - value).argmin())
    loss = float(data["loss"].values[i])
    told = f"; loss on the prompt {loss:+.4f} nats" if math.isfinite(loss) else ""
    return f"KL {fmt(float(data['kl'].values[i]))} nats here, {fmt(float(data['kl_mean'].values[i]))} on average{told}."

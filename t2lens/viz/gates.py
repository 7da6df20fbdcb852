"""Pictures of the gates of Deep Delta Learning: map, histogram, tokens by regime, spectrum, the curve of another beta.

Each is one SVG document, made of the dataset of a finding (`t2lens.analysis`: gate_tokens, gate_spectrum, beta_curve).
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
from t2lens.viz.charts import CELLS, cell_data
from t2lens.viz.colors import THEMES, ThemeName, ink_on, regimes, shade
from t2lens.viz.labels import clip, fmt, glyphs
from t2lens.viz.raster import image
from t2lens.viz.series import Series, axis
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

SIZE = 11.0  # of labels
_BAR = 10
_MARKS = ((0.0, "keeps"), (1.0, "overwrites"), (2.0, "reflects"))
_CELL = 22  # largest side of a cell of the map


def _color_of(beta: float, index: int, by: str, erases: bool, theme: ThemeName) -> str:
    if by == "regime":
        return regimes(theme)[index] if index >= 0 else THEMES[theme].blank
    return shade("both" if erases else "cool", beta / 2, theme)


def gate_map(
    data: Any, *, site: str, pos: int, by: str = "beta", theme: ThemeName = "light", width: int = 560, title: str = ""
) -> str:
    """Beta of every write, sublayer x position, the chosen node framed; by: "beta", or "regime" for its colours."""
    look, erases = THEMES[theme], bool(data.attrs.get("erases", 1))
    sites, names = [str(s) for s in data["site"].values], [str(r) for r in data["regime"].values]
    tokens = [glyphs(str(t)) for t in data["token"].values]
    beta, index = data["beta"].values, data["regime_index"].values
    n_rows, n_columns = beta.shape
    left, legend = 54, 76 if by == "beta" else 92
    w = min(_CELL, (width - left - legend) / n_columns)
    h = min(_CELL, max(3.0, 330 / n_rows))
    top, below = 30, 64 if w >= 9 else 30
    body = [heading(title, theme)]
    for r in range(n_rows):
        y = top + (n_rows - 1 - r) * h
        if h >= 10 or r % math.ceil(11 / h) == 0:
            bold = sites[r] == site
            color = look.ink if bold else look.mute
            body.append(words(left - 6, y + h / 2 + 3.8, sites[r], color, size=SIZE, anchor="end", bold=bold))
        for c in range(n_columns if n_rows * n_columns <= CELLS else 0):
            value, i = float(beta[r, c]), int(index[r, c])
            tip = f"{sites[r]}, position {c} {tokens[c]}\nbeta {value:.6g}" + (f": {names[i]}" if i >= 0 else "")
            gap = 0.6 if min(w, h) >= 7 else 0.0
            at = {"x": left + c * w, "y": y, "width": w - gap, "height": h - gap}
            fill = _color_of(value, i, by, erases, theme)
            body.append(mark("rect", tip, {"site": sites[r], "pos": c}, **at, fill=fill))
    if n_rows * n_columns > CELLS:
        colors = [[_color_of(b, i, by, erases, theme) for b, i in zip(*row, strict=True)] for row in zip(
            beta.tolist(), index.tolist(), strict=True)]  # fmt: skip
        pixels = np.array([[[*bytes.fromhex(color[1:]), 255] for color in row] for row in colors], np.uint8)[::-1]
        made = Series(kind="heat", title=title, label="beta", unit="0..2", signed=False, values=beta,
                      x=axis(data, "pos"), y=axis(data, "site"))  # fmt: skip
        body.append(image(pixels, left, top, n_columns * w, n_rows * h, data=cell_data(made)))
    base = top + n_rows * h
    for c in range(n_columns):
        x = left + (c + 0.5) * w
        if w >= 9:
            color, place = look.ink if c == pos else look.mute, {"size": SIZE - 1, "anchor": "end", "upright": True}
            body.append(words(x + 3.6, base + 6, clip(tokens[c], 9), color, bold=c == pos, **place))
        elif c % max(1, math.ceil(30 / w)) == 0:
            body.append(words(x, base + 15, str(c), look.mute, anchor="middle"))
    if site in sites:
        y = top + (n_rows - 1 - sites.index(site)) * h
        at = {"x": left - 0.8, "y": y - 0.8, "width": n_columns * w + 1, "height": h + 1}
        body.append(mark("rect", "", None, **at, fill="none", stroke=look.ink, stroke_width=0.8, pointer_events="none"))
        at = {"x": left + pos * w - 1.2, "y": y - 1.2, "width": w + 1.8, "height": h + 1.8}
        body.append(mark("rect", "", None, **at, fill="none", stroke=look.ink, stroke_width=2.2, pointer_events="none"))
    x = left + n_columns * w + 14
    body.append(_legend(x, top, names, by, erases, theme, min(n_rows * h, 190)))
    return document("".join(body), width, base + below, f"{title}. Beta of every write, 0 to 2.", theme)


def _legend(x: float, y: float, names: Sequence[str], by: str, erases: bool, theme: ThemeName, height: float) -> str:
    look, parts = THEMES[theme], []
    if by == "regime":
        for i, name in reversed(list(enumerate(names))):
            parts.append(mark("rect", x=x, y=y, width=10.0, height=10.0, fill=regimes(theme)[i]))
            parts.append(words(x + 15, y + 9, name, look.mute))
            y += 17
        return "".join(parts)
    steps = 60
    for i in range(steps):
        color = _color_of(2 * (i + 0.5) / steps, 0, "beta", erases, theme)
        at = {"x": x, "y": y + height * (steps - 1 - i) / steps, "width": float(_BAR), "height": height / steps + 0.4}
        parts.append(mark("rect", "", None, **at, fill=color))
    for value, word in _MARKS if erases else ((0.0, "nothing"), (1.0, ""), (2.0, "most")):
        at = y + height * (1 - value / 2)
        parts.append(f'<path d="M{x + _BAR:.1f} {at:.1f}h3" stroke="{look.mute}" stroke-width=".8"/>')
        parts.append(words(x + _BAR + 6, at + (9 if value == 2 else 0 if value == 0 else 3.8), f"{value:g}", look.ink))
        parts.append(words(x + _BAR + 6, at + (21 if value == 2 else -12 if value == 0 else 16), word, look.mute,
                           size=9.5))  # fmt: skip
    return "".join(parts)


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
    look, edges = THEMES[theme], np.linspace(0, 2, bins + 1)
    mine = data["beta"].sel(site=site).values
    counted = _shares(data, passages, site, bins)
    top = limits or most_in_a_bin(data, passages, site, bins)
    said = f"beta; bars: {len(mine):,} tokens of the prompt"
    if passages is not None:
        said += f"; line: {passages['beta'].shape[1]:,} of {len(set(passages['sequence'].values.tolist()))} passages"
    plot = Plot(width, 236, (0, 2), (0, top), top=46, bottom=36, left=46, right=12, theme=theme,
                xlabel=said, ylabel="share of tokens")  # fmt: skip
    plot.yticks(round_ticks(0, top, log=False)).xticks([0, 0.5, 1, 1.5, 2])
    names = [str(r) for r in data["regime"].values]
    colors = regimes(theme)
    for i, count in enumerate(counted[0]):
        if count:
            middle = (edges[i] + edges[i + 1]) / 2
            regime = int(regime_of(middle))
            n = round(float(count) * len(mine))
            tip = f"beta {edges[i]:.2f} to {edges[i + 1]:.2f}: {names[regime]}\n{n} of {len(mine)} tokens of the prompt"
            at = {"x": plot.x(edges[i]) + 0.4, "width": plot.x(edges[i + 1]) - plot.x(edges[i]) - 0.8}
            at |= {"y": plot.y(float(count)), "height": plot.y(0) - plot.y(float(count))}
            plot.marks.append(mark("rect", tip, None, **at, fill=colors[regime]))
    if len(counted) > 1:
        points = [f"M{plot.x(0):.1f} {plot.y(0):.1f}"]
        for i, count in enumerate(counted[1]):
            points.append(f"V{plot.y(float(count)):.1f}H{plot.x(edges[i + 1]):.1f}")
        plot.marks.append(f'<path d="{"".join(points)}V{plot.y(0):.1f}" fill="none" stroke="{look.ink}"/>')
    cuts = [0.0, *EDGES, 2.0]
    for i, (low, high) in enumerate(itertools.pairwise(cuts)):
        if i:
            plot.line_at(low, across=False, color=look.hair, dash="2 2")
        room, word = plot.x(high) - plot.x(low), names[i]
        if text_width(word, 9.5) < room + 14:
            plot.text(plot.x((low + high) / 2), 41, word, anchor="middle", size=9.5)
    return document(heading(title, theme) + "".join(plot.marks), width, 236, f"{title}. Histogram of beta.", theme)


def _shares(data: Any, passages: Any | None, site: str, bins: int) -> list[np.ndarray]:
    """[bin] of the prompt and, where there are any, of the passages."""
    found = [each["beta"].sel(site=site).values for each in (data, passages) if each is not None]
    return [np.histogram(each, bins, (0, 2))[0] / len(each) for each in found]


def most_in_a_bin(data: Any, passages: Any | None, site: str, bins: int = 40) -> float:
    """The top of the histogram, which several may share."""
    return 1.12 * max(float(each.max()) for each in _shares(data, passages, site, bins))


def strip(data: Any, *, site: str, pos: int, theme: ThemeName = "light", width: int = 560, title: str = "") -> str:
    """The text, every token in the colour of its regime at one sublayer, the chosen one framed; counts beside."""
    look, row = THEMES[theme], data.sel(site=site)
    names, colors = [str(r) for r in data["regime"].values], regimes(theme)
    beta, index = row["beta"].values, row["regime_index"].values
    counts = [f"{name} {int((index == i).sum())}" for i, name in enumerate(names)]
    legend, y = keys(list(zip(colors, counts, strict=True)), 2.0, 28.0, width, look.mute, SIZE)
    body = [heading(title, theme), legend]
    x, y, high = 2.0, y + 19, 20.0
    for c, token in enumerate(data["token"].values):
        word = clip(glyphs(str(token)), 24)
        wide = text_width(word, 12) + 8
        if x + wide > width - 2 and x > 2:
            x, y = 2.0, y + high + 3
        fill = colors[int(index[c])] if index[c] >= 0 else look.blank
        said = names[int(index[c])] if index[c] >= 0 else "no regime is named"
        tip = f"position {c} {word}\nbeta {float(beta[c]):.6g}: {said}"
        tip += "".join(f"\n{name} {float(row[name].values[c]):.4g}" for name in ("erased", "written", "alignment"))
        frame = {"stroke": look.ink, "stroke_width": 2.0} if c == pos else {}
        body.append(mark("rect", tip, {"site": site, "pos": c}, x=x, y=y, width=wide, height=high, rx=3.0, fill=fill,
                         **frame))  # fmt: skip
        body.append(words(x + 4, y + 14.2, word, ink_on(fill), size=12, idle=True))
        x += wide + 3
    return document("".join(body), width, y + high + 8, f"{title}. Tokens by regime.", theme)


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
        fill = regimes(theme)[int(regime_of(np.array(beta)))]
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
    title: str = "",
) -> str:
    """KL at the position, its mean over the prompt, and the change of the loss, over beta; the chosen beta and the gate
    as it is are marked. limits: name of a variable -> its range."""
    look, colors = THEMES[theme], THEMES[theme].series
    xs, body, y = data["value"].values, [heading(title, theme)], 0.0
    at_pos = float(data["plain_beta"].values[int(data.attrs["position"])])
    everything = data["plain_beta"].values
    shared = limits or curve_limits([data])
    i = int(np.abs(xs - value).argmin())
    for part, names in enumerate((("kl", "kl_mean"), ("loss",))):
        known = [name for name in names if np.isfinite(data[name].values).any()]
        low, high = shared[names[0]]
        plot = Plot(width, 168 if part == 0 else 162, (0, 2), (low, high), top=40 if part == 0 else 20, bottom=34,
                    left=52, right=12, theme=theme, xlabel="beta" if part else "",
                    ylabel=("KL, nats", "change of loss, nats")[part])  # fmt: skip
        plot.yticks().xticks([0, 0.5, 1, 1.5, 2])
        if low < 0 < high:
            plot.line_at(0, color=look.mute)
        if data.attrs["at"] == "all":
            at = {"x": plot.x(float(everything.min())), "y": plot.top, "height": float(plot.inner_h)}
            at["width"] = plot.x(float(everything.max())) - at["x"]
            tip = f"as it is: {everything.min():.4g} to {everything.max():.4g} over {len(everything)} positions"
            plot.marks.append(mark("rect", tip, **at, fill=look.mask, opacity=0.6))
        plot.line_at(at_pos, across=False, color=look.mute, dash="3 3")
        plot.line_at(value, across=False, color=look.ink)
        for name, color in zip(known, (colors[1], colors[0]) if part == 0 else (colors[2],), strict=False):
            ys = data[name].values
            plot.line(xs, ys, color)
            for x, v in zip(xs, ys, strict=True):
                tip = f"beta {x:.3g}: {_NAMES[name]} {v:.6g} nats"
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
            body.append(words(x, 33, f"dashed: as it is, {at_pos:.3g}", look.mute, size=10))
        body.append(f'<g transform="translate(0 {y:.0f})">{"".join(plot.marks)}</g>')
        y += plot.height
    return document("".join(body), width, y, f"{title}. KL and change of the loss against beta.", theme)


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
    title: str = "",
) -> str:
    """The likeliest next tokens at the position as it is and with the chosen beta. most: the end of both scales."""
    i = int(np.abs(data["value"].values - value).argmin())
    before, after = data["plain_probability"].values, data["probability"].values[i]
    names = ("as it is", f"beta {data['value'].values[i]:.3g}")
    look: dict[str, Any] = {"most": most, "theme": theme, "width": width}
    return before_after(data["candidate"].values, before, after, names=names, title=title, n=8, **look)


def kl_words(data: Any, value: float) -> str:
    """The effect of the chosen beta in one sentence."""
    i = int(np.abs(data["value"].values - value).argmin())
    loss = float(data["loss"].values[i])
    told = f"; loss on the prompt {loss:+.4f} nats" if math.isfinite(loss) else ""
    return f"KL {fmt(float(data['kl'].values[i]))} nats here, {fmt(float(data['kl_mean'].values[i]))} on average{told}."

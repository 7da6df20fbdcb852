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
from t2lens.viz.charts import CELLS, cell_data
from t2lens.viz.colors import THEMES, ThemeName, regimes, shade
from t2lens.viz.labels import clip, fmt, glyphs
from t2lens.viz.raster import image
from t2lens.viz.series import Series, axis
from t2lens.viz.svg import Plot, document, mark, round_ticks, say, text_width

__all__ = [
    "before_after",
    "curve",
    "curve_limits",
    "gate_map",
    "histogram",
    "kl_words",
    "most_in_a_bin",
    "spectrum",
    "spectrum_limits",
    "strip",
]

SIZE = 11.0
_BAR = 10
_MARKS = ((0.0, "keeps"), (1.0, "overwrites"), (2.0, "reflects"))
_CELL = 22  # largest side of a cell of the map


def _rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _luminance(color: str) -> float:
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in _rgb(color))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def ink_on(color: str) -> str:
    """Black or white, whichever stands out more."""
    light = _luminance(color)
    return "#ffffff" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "#000000"


def _title(words: str, theme: ThemeName, y: float = 16) -> str:
    return f'<text x="2" y="{y}" font-size="12.5" font-weight="600" fill="{THEMES[theme].ink}">{say(words)}</text>'


def _said(
    x: float, y: float, words: str, color: str, *, anchor: str = "start", size: float = SIZE, weight: int = 400
) -> str:
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{bold} '
        f'style="font-variant-numeric:tabular-nums">{say(words)}</text>'
    )


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
    body = [_title(title, theme)] if title else []
    for r in range(n_rows):
        y = top + (n_rows - 1 - r) * h
        if h >= 10 or r % math.ceil(11 / h) == 0:
            weight = 600 if sites[r] == site else 400
            body.append(_said(left - 6, y + h / 2 + 3.8, sites[r], look.ink if weight == 600 else look.mute,
                              anchor="end", weight=weight))  # fmt: skip
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
            color, bold = (look.ink, ' font-weight="600"') if c == pos else (look.mute, "")
            body.append(
                f'<text transform="translate({x + 3.6:.1f} {base + 6:.1f}) rotate(-90)" text-anchor="end" '
                f'font-size="{SIZE - 1}" fill="{color}"{bold}>{say(clip(tokens[c], 9))}</text>'
            )
        elif c % max(1, math.ceil(30 / w)) == 0:
            body.append(_said(x, base + 15, str(c), look.mute, anchor="middle"))
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
            parts.append(_said(x + 15, y + 9, name, look.mute))
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
        parts.append(_said(x + _BAR + 6, at + (9 if value == 2 else 0 if value == 0 else 3.8), f"{value:g}", look.ink))
        parts.append(_said(x + _BAR + 6, at + (21 if value == 2 else -12 if value == 0 else 16), word, look.mute,
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
    return document(_title(title, theme) + "".join(plot.marks), width, 236, f"{title}. Histogram of beta.", theme)


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
    body, x, y = [_title(title, theme)] if title else [], 2.0, 26.0
    for i, name in enumerate(names):
        words = f"{name} {int((index == i).sum())}"
        step = text_width(words, SIZE) + 26
        if x + step > width:
            x, y = 2.0, y + 17
        body.append(mark("rect", x=x, y=y, width=10.0, height=10.0, fill=colors[i]))
        body.append(_said(x + 14, y + 9, words, look.mute))
        x += step
    x, y, high = 2.0, y + 19, 20.0
    for c, token in enumerate(data["token"].values):
        words = clip(glyphs(str(token)), 24)
        wide = text_width(words, 12) + 8
        if x + wide > width - 2 and x > 2:
            x, y = 2.0, y + high + 3
        fill = colors[int(index[c])] if index[c] >= 0 else look.blank
        said = names[int(index[c])] if index[c] >= 0 else "no regime is named"
        tip = f"position {c} {words}\nbeta {float(beta[c]):.6g}: {said}"
        tip += "".join(f"\n{name} {float(row[name].values[c]):.4g}" for name in ("erased", "written", "alignment"))
        frame = {"stroke": look.ink, "stroke_width": 2.0} if c == pos else {}
        body.append(mark("rect", tip, {"site": site, "pos": c}, x=x, y=y, width=wide, height=high, rx=3.0, fill=fill,
                         **frame))  # fmt: skip
        body.append(
            f'<text x="{x + 4:.1f}" y="{y + 14.2:.1f}" font-size="12" fill="{ink_on(fill)}" pointer-events="none" '
            f'direction="ltr">{say(words)}</text>'
        )
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
            body = _said(plot.left - 6, y + 3.8, name, color, anchor="end", weight=600 if chosen else 400, size=10)
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
            _said(right.left + 8, right.top + right.inner_h - 10 - 14 * k, f"all steps after {atom}", color, size=10)
        )
    body = f'{_title(title, theme)}{"".join(plot.marks)}<g transform="translate({half} 0)">{"".join(right.marks)}</g>'
    body += _said(plot.left, 36, "each step: 1 \u2212 \u03b2 along k, 1 elsewhere", look.mute, size=10)
    body += _said(half + right.left, 36, "their product, to the readout", look.mute, size=10)
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
    xs, body, y = data["value"].values, [_title(title, theme)], 0.0
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
                body.append(_said(x, 33, _NAMES[name], color, size=10))
                x += text_width(_NAMES[name], 10) + 14
            body.append(_said(x, 33, f"dashed: as it is, {at_pos:.3g}", look.mute, size=10))
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


def before_after(
    data: Any,
    value: float,
    *,
    theme: ThemeName = "light",
    width: int = 560,
    n: int = 8,
    most: float | None = None,
    title: str = "",
) -> str:
    """The likeliest next tokens at the position as it is and with the chosen beta, side by side, with arrows."""
    look = THEMES[theme]
    i = int(np.abs(data["value"].values - value).argmin())
    before, after = data["plain_probability"].values, data["probability"].values[i]
    words = [glyphs(str(word)) for word in data["candidate"].values]
    order = np.argsort(-np.maximum(before, after), kind="stable")[:n]
    top = most or float(np.maximum(before, after).max()) * 1.05
    side = (width - 128) / 2
    body = [_title(title, theme)]
    middle = width / 2
    body.append(_said(middle - 64, 34, "as it is", look.mute, anchor="end", size=10))
    body.append(_said(middle + 64, 34, f"beta {data['value'].values[i]:.3g}", look.mute, size=10))
    room = side - 50
    for row, j in enumerate(order):
        y, p, q = 42.0 + 22 * row, float(before[j]), float(after[j])
        color = look.mute if abs(q - p) < 5e-4 else THEMES[theme].series[1 if q > p else 0]
        tip = f"{words[j]}\nas it is {p:.6g}, with beta {data['value'].values[i]:.3g} {q:.6g}: {q - p:+.6g}"
        a, b = room * min(p / top, 1), room * min(q / top, 1)
        body.append(mark("rect", tip, x=middle - 62 - a, y=y + 2, width=max(a, 0.5), height=15.0, fill=look.mute))
        body.append(mark("rect", tip, x=middle + 62, y=y + 2, width=max(b, 0.5), height=15.0, fill=color))
        body.append(_said(middle - 66 - a, y + 14, f"{p:.3f}", look.ink, anchor="end"))
        arrow = "\u2192" if abs(q - p) < 5e-4 else "\u2191" if q > p else "\u2193"
        body.append(_said(middle + 66 + b, y + 14, f"{q:.3f} {arrow}", look.ink))
        body.append(_said(middle, y + 14, clip(words[j], 15), look.ink, anchor="middle", size=12))
    rest_p, rest_q = 1 - before[order].sum(), 1 - after[order].sum()
    y = 42.0 + 22 * len(order) + 14
    body.append(_said(middle - 66, y, f"{max(rest_p, 0.0):.3f}", look.mute, anchor="end"))
    body.append(_said(middle, y, "all others", look.mute, anchor="middle"))
    body.append(_said(middle + 66, y, f"{max(rest_q, 0.0):.3f}", look.mute))
    return document("".join(body), width, y + 10, f"{title}. Likeliest next tokens before and after.", theme)


def kl_words(data: Any, value: float) -> str:
    """The effect of the chosen beta in one sentence."""
    i = int(np.abs(data["value"].values - value).argmin())
    loss = float(data["loss"].values[i])
    told = f"; loss on the prompt {loss:+.4f} nats" if math.isfinite(loss) else ""
    return f"KL {fmt(float(data['kl'].values[i]))} nats here, {fmt(float(data['kl_mean'].values[i]))} on average{told}."

"""Charts beside the maps of depth routing: mass against effect, what weights follow, how far back reads look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from t2lens.analysis.statistics import spearman
from t2lens.viz.colors import THEMES, ThemeName, shade
from t2lens.viz.depth_map import KINDS
from t2lens.viz.dots import Cloud, draw_cloud, family_of
from t2lens.viz.labels import fmt
from t2lens.viz.routing import SIZE
from t2lens.viz.series import node_of
from t2lens.viz.svg import Plot, document, keys, mark, paragraph, text_width, words

__all__ = ["Dots", "content_picture", "effect_limits", "effects_picture", "profile_limits", "profile_picture"]

_AGES = ("embedding", "newest write", "the one before", "all older")  # in words, the families of atoms
_PARTS = {"site": "the same for all tokens", "token": "token", "position": "position", "rest": "context"}


class Dots:
    """Mass and effect of every route of a finding of `measure_effects`, for reads that have more than one.

    x: mass (the mean size of a depth weight; of atoms the share of what is read); y: KL divergence without the route
    or, where only the gradient was taken, the size of its estimate of the change of the loss. kinds: of what kind the
    source of each is, in words. apart: by how many ranks, as a share of all, mass is ahead of effect: near 1 is mass
    without effect.
    """

    def __init__(self, finding: Any) -> None:
        data = finding.dataset
        self.over = "source" if "source" in data.dims else "atom"
        self.measured = "kl" in data
        self.mass = "mass" if self.over == "source" else "share"
        apart = data["disagreement"].values
        at = np.argwhere(np.isfinite(apart))
        names, reads = data[self.over].values, data["read"].values
        held = data["holds"].values if "holds" in data else np.tile(names, (len(reads), 1))
        kinds = [family_of(str(name), held[:, j].tolist()) for j, name in enumerate(names)]
        self.routes = [(str(reads[i]), str(names[j])) for i, j in at]
        self.kinds = [kinds[j] for _, j in at]
        self.apart = -apart[np.isfinite(apart)]  # ranks count from the largest
        self.x = data[self.mass].values[np.isfinite(apart)]
        y = data["kl" if self.measured else "gradient"].values[np.isfinite(apart)]
        self.y = np.abs(y)
        self.floor = float(data.attrs.get("floor_kl" if self.measured else "floor_gradient", 1e-6))
        told = np.where(self.y < self.floor, 0.0, self.y)
        self.rank = spearman(np.round(self.x, 6), told)

    @property
    def words(self) -> tuple[str, str]:
        x = "mean |depth weight|" if self.mass == "mass" else "mean share of the contribution"
        y = "KL without the route, nats" if self.measured else "|gradient's estimate|, nats"
        return x, y


def effect_limits(dots: Sequence[Dots]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The ranges of both axes that several share."""
    x = np.concatenate([each.x for each in dots] or [np.ones(1)])
    y = np.concatenate([np.maximum(each.y, each.floor) for each in dots] or [np.ones(1)])
    if not x.size:
        return (0.0, 1.0), (1e-6, 1.0)
    return (0.0, float(x.max()) or 1.0), (float(y.min()), max(float(y.max()), 2 * float(y.min())))


def effects_picture(
    dots: Dots,
    *,
    theme: ThemeName = "light",
    width: int = 560,
    limits: tuple[tuple[float, float], tuple[float, float]] | None = None,
    counted: str = "",
    chosen: str = "",
    whose: str = "",
) -> str:
    """Mass against effect as SVG: mass on a square-root axis, effect on a logarithmic one, a colour for each kind of
    source, and the largest of both by name. limits: of both axes. chosen: a site, whose routes are ringed. whose: what
    stands above it."""
    look = THEMES[theme]
    rank = f"rank correlation {fmt(dots.rank, 2)}" if np.isfinite(dots.rank) else "no rank correlation"
    head = f"Mass against effect: {rank}, n = {len(dots.routes)} routes"
    colors = dict(zip(KINDS.values(), look.series, strict=True))
    nodes = [node_of(read) for read, _ in dots.routes]
    low = dots.y < dots.floor
    tips = [
        "\n".join(
            [
                f"{name} into {read}",
                f"{dots.words[0]}: {fmt(float(dots.x[i]))}",
                f"{dots.words[1]}: {fmt(float(dots.y[i]))}",
                *(["below the floor of rounding: no effect"] if low[i] else []),
            ]
        )
        for i, (read, name) in enumerate(dots.routes)
    ]
    cloud = Cloud(
        x=dots.x,
        y=dots.y,
        names=[f"{name} \u2192 {read}" for read, name in dots.routes],
        tips=tips,
        nodes=nodes,
        colors=[colors.get(kind, look.mute) for kind in dots.kinds],
        ringed=np.array([node["site"] == chosen for node in nodes], bool),
        floor=dots.floor,
    )
    height = 310
    plot, named = draw_cloud(
        cloud,
        bends=("root", "log"),
        limits=limits or effect_limits([dots]),
        labels=dots.words,
        theme=theme,
        size=(width, height),
        title=head,
    )
    there = [(colors[kind], kind) for kind in KINDS.values() if kind in dots.kinds]
    listed, y = keys(there, plot.left, height + 6, width, look.ink, SIZE)
    told = [
        f"Spearman's rank correlation, over routes into reads that have more than one. {counted}".strip(),
        f"Named: the {len(named)} of the largest effect or mass; the others under the pointer."
        + (" Ringed: into the chosen site." if cloud.ringed.any() else "")
        + (f" At the lower edge: {int(low.sum())} whose effect is rounding." if low.any() else ""),
        ""
        if dots.measured
        else "The estimate is of first order: where a norm follows the read, the estimates of a read "
        "cancel, and losing most of it is not seen. Measure to be sure.",
    ]
    body = "".join(plot.marks) + listed
    return _with_notes(body, width, y + 14, [each for each in told if each], head + ".", theme, whose)


def content_picture(
    finding: Any,
    *,
    theme: ThemeName = "light",
    width: int = 560,
    chosen: str = "",
    counted: str = "",
    whose: str = "",
) -> str:
    """What the weights of each read follow: bars of shares of their second moment, upwards in depth, with the label.
    whose: what stands above it."""
    look, data = THEMES[theme], finding.dataset
    reads = [str(read) for read in data["read"].values]
    shares, parts = data["share"].values, [str(part) for part in data["part"].values]
    labels, moves = [str(label) for label in data["label"].values], data["variation"].values
    fills = dict(zip(_PARTS, (look.mask, *look.series[:3]), strict=True))
    left = max(text_width(read, SIZE, bold=True) for read in reads) + 10
    right = text_width("content-driven", SIZE) + 14
    bar = width - left - right - 4
    ch, top = 16.0 if len(reads) <= 20 else 11.0, 6.0
    out = []
    for k, read in enumerate(reads):
        y, x = top + ch * (len(reads) - 1 - k), left
        node = node_of(read)
        bold = node["site"] == chosen
        color, place = look.ink if bold else look.mute, {"size": SIZE, "anchor": "end", "bold": bold}
        out.append(words(left - 6, y + ch / 2 + 3.4, read, color, **place))
        tip = [f"{read}: {labels[k]}", f"weights move by {moves[k]:.1%} of their rms between tokens"]
        tip += [f"{_PARTS[part]}: {fmt(float(shares[k, m]), 3)}" for m, part in enumerate(parts)]
        for m, part in enumerate(parts):
            value = float(shares[k, m])
            if np.isfinite(value) and value > 0:
                wide = min(bar * value, left + bar - x)
                out.append(
                    mark("rect", "\n".join(tip), node, x=x, y=y + 1.5, width=wide, height=ch - 3, fill=fills[part])
                )
                x += wide
        if not np.isfinite(shares[k]).any():
            out.append(words(left, y + ch / 2 + 3.4, "no shares", look.mute, size=SIZE))
        color = look.mute if labels[k] == "static" else look.ink
        out.append(words(left + bar + 8, y + ch / 2 + 3.4, labels[k], color, size=SIZE))
    y = top + ch * len(reads)
    for value in (0.0, 0.5, 1.0):
        out.append(f'<path d="M{left + bar * value:.1f} {y:.1f}v3" stroke="{look.hair}"/>')
        out.append(words(left + bar * value, y + 14, f"{value:g}", look.mute, size=SIZE, anchor="middle"))
    y += 20
    listed, y = keys([(fills[part], _PARTS[part]) for part in _PARTS], 4.0, y, width, look.ink, SIZE)
    out.append(listed)
    notes = [
        "Shares of the weights' second moment around the mean of the read, adjusted for chance. Static: they move by "
        "less than 1%. Key-driven: each follows its own source alone. Content-driven: what the reader holds decides "
        f"too. {counted}"
    ]
    return _with_notes("".join(out), width, y + 14, notes, "What the weights of each read follow.", theme, whose)


def profile_limits(findings: Sequence[Any]) -> tuple[float, float]:
    """The largest share by distance and the largest look-back of several, which their pictures share."""

    def most(name: str, least: float) -> float:
        tops = [found.dataset[f"{name}_interval"].values[..., 1] for found in findings]
        tops += [found.dataset[name].values for found in findings]
        return max(float(np.nanmax(each, initial=least)) for each in tops)

    return most("share_by_distance", 0.05), most("lookback", 1.0)


def profile_picture(
    finding: Any,
    *,
    theme: ThemeName = "light",
    width: int = 560,
    limits: tuple[float, float] | None = None,
    counted: str = "",
    whose: str = "",
) -> str:
    """Lines of a `depth_profile`: share by distance in depth, look-back by read, shares of families by read. limits:
    the tops of the first two, by default their own. whose: what stands above it."""
    look, data = THEMES[theme], finding.dataset
    half = (width - 16) // 2
    reader_colors = {"attn": look.series[1], "mlp": look.series[2], "local": look.series[3], "carried": look.series[6]}
    readers = [str(each) for each in data["reader"].values]
    distance = data["distance"].values.astype(float)
    mean, interval = data["share_by_distance"].values, data["share_by_distance_interval"].values
    top, high = limits or profile_limits([finding])
    far = Plot(half, 190, (0.5, distance[-1] + 0.5), (0, top * 1.08), title="Share by distance in depth", theme=theme,
               xlabel="sublayers back (1: the newest write)")  # fmt: skip
    far.yticks().xticks([1, *range(4, int(distance[-1]) + 1, 4)])
    for k, reader in enumerate(readers):
        color = reader_colors.get(reader, look.ink)
        far.band(distance, interval[k, :, 0], interval[k, :, 1], color, 0.2).line(distance, mean[k], color)
        _dots(far, distance, mean[k], color, [f"{reader} reads, {int(d)} back" for d in distance], [{}] * len(distance))
    first = {str(site): i for i, site in reversed(list(enumerate(data["site"].values)))}
    sites = sorted(first, key=first.__getitem__)
    at, places = [first[site] for site in sites], np.arange(len(sites)) + 0.5
    nodes = [{"site": site} for site in sites]
    back, ends = data["lookback"].values[at], data["lookback_interval"].values[at]
    near = Plot(half, 190, (0, len(sites)), (0, high * 1.08), title="Mean look-back, in blocks", theme=theme, bottom=48)
    near.yticks().band(places, ends[:, 0], ends[:, 1], look.series[0], 0.2).line(places, back, look.series[0])
    _dots(near, places, back, look.series[0], [f"{site} looks back" for site in sites], nodes)
    near.xticks(list(places), sites, turned=True)
    share = data["family_share"].values[at]
    families = [str(each) for each in data["family"].values]
    ages = (look.series[0], *(shade("warm", part, theme) for part in (0.78, 0.5, 0.24)))
    fills, said = dict(zip(families, ages, strict=True)), dict(zip(families, _AGES, strict=True))
    bars = Plot(width, 190, (0, len(sites)), (0, 1), title="Shares of what is read, by age", theme=theme, bottom=48)
    bars.yticks([0, 0.5, 1]).xticks(list(places), sites, turned=True)
    for k, site in enumerate(sites):
        base = 0.0
        for m, family in enumerate(families):
            value = float(share[k, m])
            if np.isfinite(value) and value > 0:
                x0, x1, y0, y1 = bars.x(k + 0.08), bars.x(k + 0.92), bars.y(base), bars.y(base + value)
                tip = f"{site}: {said[family]} {fmt(value, 3)}"
                bars.marks.append(
                    mark("rect", tip, nodes[k], x=x0, y=y1, width=x1 - x0, height=max(y0 - y1, 0.1), fill=fills[family])
                )
                base += value
    body = [f'<g transform="translate(0 4)">{"".join(far.marks)}</g>',
            f'<g transform="translate({half + 16} 4)">{"".join(near.marks)}</g>']  # fmt: skip
    named = {"attn": "attention", "mlp": "MLP", "out": "readout", "carried": "what is carried on"}
    listed, y = keys(
        [(reader_colors.get(r, look.ink), named.get(r, r)) for r in readers], 46, 200, half, look.ink, SIZE
    )
    body.append(listed)
    y += 22
    body.append(f'<g transform="translate(0 {y})">{"".join(bars.marks)}</g>')
    listed, y = keys([(fills[f], said[f]) for f in families], 46, y + 194, width, look.ink, SIZE)
    body.append(listed)
    several = any(str(way) for way in data["way"].values)
    notes = [
        f"Shares of the summed length of contributions. {counted}. The embedding is left out of the distances."
        + (" Of several ways distances are means, and by read the first is shown." if several else "")
        + (" Bands: 95% over sequences." if np.isfinite(interval).any() else "")
    ]
    return _with_notes("".join(body), width, y + 16, notes, "How far back in depth reads look.", theme, whose)


# --- pieces


def _dots(plot: Plot, xs: Any, ys: Any, color: str, names: Sequence[str], nodes: Sequence[dict[str, str]]) -> None:
    for x, y, name, node in zip(xs, ys, names, nodes, strict=True):
        if np.isfinite(y):
            tip = f"{name}: {fmt(float(y), 3)}"
            plot.marks.append(mark("circle", tip, node, cx=plot.x(float(x)), cy=plot.y(float(y)), r=2.6, fill=color))


def _with_notes(body: str, width: int, y: float, notes: Sequence[str], about: str, theme: ThemeName, whose: str) -> str:
    """The picture with its notes below it, and above it whose it is."""
    told, y = paragraph(notes, y - 3, width, theme, SIZE)
    body += told
    if whose:
        head = words(4, 12, whose, THEMES[theme].ink, size=SIZE + 1, bold=True)
        body = f'{head}<g transform="translate(0 22)">{body}</g>'
        y, about = y + 22, f"{whose}. {about}"
    return document(body, width, y + 14, f"{about} {' '.join(notes)}", theme)

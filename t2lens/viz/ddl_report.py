"""The report of a DDL audit as one HTML file: checks, findings, figures and tables; no script and no network."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from t2lens.viz.colors import FONT, THEMES, regimes
from t2lens.viz.findings import cell
from t2lens.viz.labels import fmt
from t2lens.viz.svg import Plot, heat, row

__all__ = ["report"]

LIGHT = THEMES["light"]
BLUE, RED, _, _, GOLD, *_ = LIGHT.series
WIDE = 1076
_CUTS = (0.1, 0.9, 1.1, 1.5)

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>%(title)s</title>
<style>
body{margin:0 auto;max-width:1076px;padding:26px 24px 60px;background:%(paper)s;color:%(ink)s;font:13.5px/1.5 %(font)s}
h1{font-size:20px;font-weight:600;margin:0 0 4px}
h2{font-size:14px;font-weight:600;margin:30px 0 6px}
p{margin:4px 0}
.mute,figcaption,td.mean{color:%(mute)s}
.verdict{font-weight:600}.pass{color:%(good)s}.fail{color:%(bad)s}
figure{margin:26px 0 0}svg{display:block;max-width:100%%;height:auto}
figcaption{font-size:12px;max-width:900px;margin-top:6px}
figcaption b{color:%(ink)s}
.scroll{overflow-x:auto}
table.wide{width:100%%}
table{border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums;border-top:1.2px solid %(ink)s;
border-bottom:1.2px solid %(ink)s}
th{font-weight:600;text-align:right;padding:4px 9px 4px 0;border-bottom:.8px solid %(ink)s;vertical-align:bottom}
td{text-align:right;padding:2px 9px 2px 0;white-space:nowrap}
th.w,td.w{text-align:left}td.mean{white-space:normal;width:66%%}
tr.all td{border-bottom:.8px solid %(hair)s}
ul{margin:4px 0;padding-left:1.2em}li{margin:2px 0}
ul.notes{font-size:12px;color:%(mute)s}
.key{white-space:nowrap;margin-left:8px}
.key i{display:inline-block;border:.7px solid %(mute)s;width:10px;height:10px;margin-right:4px;vertical-align:-1px}
sup{line-height:0}
@media print{figure{break-inside:avoid}}
</style>
</head>
<body>
%(body)s
</body>
</html>
"""


def report(finding: Any) -> str:
    """A complete HTML file from the Finding of `t2lens.analysis.ddl_audit.audit_ddl`."""
    body = "\n".join(_body(finding))
    words = {name: getattr(LIGHT, name) for name in ("paper", "ink", "mute", "hair", "bad", "good")}
    return _PAGE % {**words, "title": html.escape(finding.title), "font": FONT, "body": body}


def _body(finding: Any) -> Iterator[str]:
    data = finding.dataset
    n_said = data.sizes.get("number", 0)
    yield f"<h1>{html.escape(finding.title)}</h1>"
    yield _verdict(data, finding.passed)
    yield "<h2>What was found</h2>" + _list(finding.notes[:n_said])
    yield "<h2>Checks</h2>" + _checks(data)
    for i, (drawing, caption) in enumerate(_figures(data), start=1):
        yield f"<figure>{drawing}<figcaption><b>Figure {i}.</b> {_symbols(caption)}</figcaption></figure>"
    yield "<h2>Sublayers</h2>" + _rows(finding)
    if "loss_effect" in data:
        yield "<h2>Counterfactuals</h2>" + _effects_table(data)
    yield "<h2>Definitions</h2>" + _list(finding.notes[n_said:], "notes") + _definitions(data)


def _verdict(data: Any, passed: bool) -> str:
    n, ok = data.sizes["check"], int(data["check_passed"].sum())
    word = '<span class="verdict pass">passed</span>' if passed else '<span class="verdict fail">FAILED</span>'
    loss = float(data["loss"])
    words = f"{ok} of {n} checks pass; {int(data['n_tokens'])} tokens in {int(data['n_sequences'])} sequences"
    words += f", loss {loss:.4f} nats per token" if np.isfinite(loss) else ""
    return f"<p>{word} <span class=mute>\u2014 {html.escape(words)}.</span></p>"


def _list(lines: Any, kind: str = "") -> str:
    return f'<ul class="{kind}">' + "".join(f"<li>{_math(line)}</li>" for line in lines) + "</ul>"


def _math(text: str) -> str:
    """Text as HTML, with the symbols of the equations as one writes them."""
    text = re.sub(r"\b([kv])\^T\b", r"\1<sup>T</sup>", html.escape(text))
    return _symbols(text.replace("^2", "\u00b2").replace("+-", "\u00b1"))


def _symbols(markup: str) -> str:
    return re.sub(r"\bbeta\b", "\u03b2", markup)


def _checks(data: Any) -> str:
    head = '<tr><th class=w>check</th><th class=w></th><th>found</th><th>limit</th><th class="w">what</th></tr>'
    lines = [head]
    for i, name in enumerate(data["check"].values.tolist()):
        ok = bool(data["check_passed"].values[i])
        value, limit = (float(data[f"check_{part}"].values[i]) for part in ("value", "limit"))
        mark = '<span class="pass">pass</span>' if ok else '<span class="verdict fail">FAIL</span>'
        lines.append(
            f"<tr><td class=w>{html.escape(name)}</td><td "
            f"class=w>{mark}</td><td>{fmt(value, 3)}</td><td>{fmt(limit, 3)}"
            f'</td><td class="w mean">{_math(str(data["check_meaning"].values[i]))}</td></tr>'
        )
    return f"<table class=wide>{''.join(lines)}</table>"


# --- figures --


def _figures(data: Any) -> Iterator[tuple[str, str]]:
    if not np.isfinite(data["beta"].values).all():
        return
    sites = data["site"].values.tolist()
    yield _histograms(data, sites)
    yield _regimes(data, sites)
    yield _errors(data, sites)
    yield _reuse(data, sites)
    if data.attrs["erases"] and np.isfinite(data["transport_rank"].values).all():
        yield _transport(data)
    if "loss_effect" in data:
        yield _effects(data, sites)


def _colors(data: Any) -> tuple[str, ...]:
    """Of the regimes, skip .. reflect, or of the sizes of a gate that erases nothing."""
    return regimes(erases=bool(data.attrs["erases"]))


def _key(data: Any) -> str:
    return " ".join(
        f'<span class="key"><i style="background:{color}"></i>{html.escape(name)}</span>'
        for name, color in zip(data["regime"].values.tolist(), _colors(data), strict=True)
    )


def _histograms(data: Any, sites: list[str]) -> tuple[str, str]:
    counts, centres = data["beta_histogram"].values, data["bin"].values
    half, n_columns = (centres[1] - centres[0]) / 2, 8 if len(sites) > 16 else 4
    width = (WIDE - 18 * (n_columns - 1)) // n_columns
    lines = []
    for start in range(0, len(sites), n_columns):
        plots = []
        for i in range(start, min(start + n_columns, len(sites))):
            plot = Plot(width, 108, (0, 2), (0, 1.04), title=sites[i], bottom=20, left=8)
            top = max(counts[i].max(), 1)
            for centre, count in zip(centres, counts[i], strict=True):
                color = _colors(data)[int(np.searchsorted(_CUTS, centre))]
                hover = f"{sites[i]}, beta {fmt(centre - half, 3)} to {fmt(centre + half, 3)}: {int(count)} tokens"
                plot.bar(centre - half, centre + half, 0, count / top, color, hover, outline=LIGHT.mute)
            for cut in _CUTS:
                plot.line_at(cut, across=False, color=LIGHT.hair, dash="2 2")
            words = f"mean {fmt(float(data['beta'].values[i]), 2)}, std {fmt(float(data['beta_std'].values[i]), 2)}"
            plot.text(width - 10, 14, words, anchor="end", size=10)
            plots.append(plot.xticks([0, 0.5, 1, 1.5, 2]))
        lines.append(row(*plots))
    named = "regimes" if data.attrs["erases"] else "sizes of a write (nothing is erased)"
    caption = (
        f"Beta over {int(data['n_tokens'])} tokens at every write, in order of depth; each panel is scaled to its "
        f"highest bin. Colours are {named}, with bounds at 0.1, 0.9, 1.1 and 1.5: "
        f"{_key(data)}."
    )
    return "".join(lines), caption


def _depth_axis(plot: Plot, names: list[str]) -> Plot:
    return plot.xticks(list(range(len(names))), names, turned=True).yticks()


def _regimes(data: Any, sites: list[str]) -> tuple[str, str]:
    n, half = len(sites), (WIDE - 18) // 2
    shares = data["share"].values
    left = Plot(half, 230, (-0.6, n - 0.4), (0, 1), title="a  Share of tokens", bottom=46, ylabel="share")
    if np.isfinite(shares).all():
        for i, site in enumerate(sites):
            below = 0.0
            for name, share, color in zip(data["regime"].values.tolist(), shares[i], _colors(data), strict=True):
                left.bar(
                    i - 0.42,
                    i + 0.42,
                    below,
                    below + share,
                    color,
                    f"{site}, {name}: {100 * share:.1f}%",
                    outline=LIGHT.mute,
                )
                below += share
    else:
        left.instead("regime names are refused: a precondition fails")
    _depth_axis(left, sites)
    eigen = data["eigenvalue_quantile"]
    eigenvalue = "b  Eigenvalue along k" + (", 1 \u2212 \u03b2" if data.attrs["erases"] else "")
    right = Plot(half, 230, (-0.6, n - 0.4), (-1, 1.02), title=eigenvalue, bottom=46)
    xs = list(range(n))
    if np.isfinite(eigen.values).all():
        at = {q: eigen.sel(quantile=q).values for q in (0.05, 0.25, 0.5, 0.75, 0.95)}
        right.band(xs, at[0.05], at[0.95], BLUE, 0.15).band(xs, at[0.25], at[0.75], BLUE, 0.3)
        right.line(xs, at[0.5], BLUE).dots(xs, at[0.5], BLUE, sites)
        right.line_at(0)
    else:
        right.instead("refused: without the preconditions beta is no eigenvalue")
    _depth_axis(right, sites)
    caption = (
        f"(a) {_key(data)}. (b) median over tokens with the middle 50% and 90%; below the "
        "line at 0 a write turns the sign of what the state held along k."
        if data.attrs["erases"]
        else "(a) Sizes of a write. (b) Nothing is erased, so the state is carried on as it is: eigenvalue 1."
    )
    return row(left, right), caption


def _errors(data: Any, sites: list[str]) -> tuple[str, str]:
    n, third = len(sites), (WIDE - 36) // 3
    xs = list(range(n))
    before, after = data["error_before"].values, data["error_after"].values
    a = Plot(
        third, 230, (-0.6, n - 0.4), (0, 1.05 * max(before.max(), after.max())), title="a  Error along k", bottom=46
    )
    a.whiskers(xs, np.minimum(before, after), np.maximum(before, after), LIGHT.hair)
    a.dots(xs, before, RED, [f"{s}, before" for s in sites]).dots(xs, after, BLUE, [f"{s}, after" for s in sites])
    erased, written = data["erased"].values, data["written"].values
    every = np.concatenate([written, erased if data.attrs["erases"] else written])
    every = every[every > 0] if (every > 0).any() else np.ones(1)
    low, high = 10 ** np.floor(np.log10(every.min())), 10 ** np.ceil(np.log10(every.max()))
    b = Plot(third, 230, (-0.6, n - 0.4), (low, max(high, low * 10)), title="b  Energy", bottom=46, log=True)
    b.dots(xs, np.where(written > 0, written, np.nan), BLUE, [f"{s}, written" for s in sites])
    if data.attrs["erases"]:
        b.dots(xs, np.where(erased > 0, erased, np.nan), RED, [f"{s}, erased" for s in sites])
    change, alignment = data["change"].values, data["alignment"].values
    top = 1.05 * max(change.max(), alignment.max())
    c = Plot(third, 230, (-0.6, n - 0.4), (0, top), title="c  Change and alignment", bottom=46)
    c.line(xs, change, BLUE).dots(xs, change, BLUE, sites).line(xs, alignment, GOLD).dots(xs, alignment, GOLD, sites)
    for plot in (a, b, c):
        _depth_axis(plot, sites)
    erases = ", and erases, |beta k k<sup>T</sup>X|\u00b2 (red)" if data.attrs["erases"] else ""
    caption = (
        "Means over tokens. (a) |k<sup>T</sup>X \u2212 v| before the write (red) and after it (blue). (b) Energy "
        f"that a write brings, |beta v|\u00b2 (blue){erases}. (c) Net change |X' \u2212 X| / |X| (blue) and alignment "
        "|k<sup>T</sup>X| / |X| (gold)."
    )
    return row(a, b, c), caption


def _reuse(data: Any, sites: list[str]) -> tuple[str, str]:
    a = heat(data["cosine"].values, sites, "a  mean |cos(k, k')| at the same token", size=400)
    b = heat(data["overlap"].values, sites, "b  overlap of spans over text", size=400)
    r = data.sizes["angle"]
    return row(a, b, gap=60), (
        f"Reuse of directions. (a) Two sublayers at the same token. (b) The spans of their {r} leading directions "
        "over text: mean cos\u00b2 of the principal angles, 1 for the same span, 0 for spans apart."
    )


def _transport(data: Any) -> tuple[str, str]:
    third, atoms = (WIDE - 36) // 3, data["atom"].values.tolist()
    xs = list(range(len(atoms)))
    spectrum = data["transport_spectrum"].isel(atom=0)
    r = data.sizes["direction"]
    a = Plot(third, 230, (0.5, r + 0.5), (0, 1.03), title="a  Spectrum from the embedding", xlabel="number", bottom=46)
    numbers = list(range(1, r + 1))
    a.band(numbers, spectrum.sel(quantile=0.05).values, spectrum.sel(quantile=0.95).values, BLUE, 0.2)
    middle = spectrum.sel(quantile=0.5).values
    a.line(numbers, middle, BLUE).dots(numbers, middle, BLUE, [f"value {i}" for i in numbers]).yticks()
    step = max(1, r // 8)
    a.xticks(numbers[::step])
    survival = data["survival"]
    b = Plot(third, 230, (-0.6, len(xs) - 0.4), (0, 1.03), title="b  What reaches the readout", bottom=46)
    b.band(xs, survival.sel(quantile=0.05).values, survival.sel(quantile=0.95).values, BLUE, 0.15)
    b.band(xs, survival.sel(quantile=0.25).values, survival.sel(quantile=0.75).values, BLUE, 0.3)
    b.line(xs, survival.sel(quantile=0.5).values, BLUE).dots(xs, survival.sel(quantile=0.5).values, BLUE, atoms)
    small, rank = data["transport_smallest"].sel(quantile=0.5).values, data["transport_rank"].values
    low = min(float(rank.min()) * 0.995, float(rank.max()) - 1)
    c = Plot(third, 230, (-0.6, len(xs) - 0.4), (low, float(rank.max()) * 1.002), title="c  Effective rank", bottom=46)
    c.line(xs, rank, BLUE).dots(xs, rank, BLUE, [f"{x}, smallest {fmt(float(v), 3)}" for x, v in zip(atoms, small)])  # noqa: B905
    for plot in (b, c):
        _depth_axis(plot, atoms)
    caption = (
        f"Frozen transport of the state to the readout at one token, over {int(data['n_transport_tokens'])} tokens. "
        f"(a) Its {r} singular values in the span of the directions (all others are 1): median and middle 90%. (b) |T "
        "x| / |x| of the embedding and of each write along its k: median, middle 50% and 90%. (c) Effective rank, "
        "mean over tokens."
    )
    return row(a, b, c), caption


def _effects(data: Any, sites: list[str]) -> tuple[str, str]:
    kinds = data["kind"].values.tolist()
    loss = data["loss_effect"].values
    by_loss = bool(np.isfinite(loss).all())
    effect = loss if by_loss else data["kl"].values
    low, high = (data[f"loss_{end}"].values for end in ("low", "high"))
    width = (WIDE - 18 * (len(kinds) - 1)) // len(kinds)
    xs, plots = list(range(len(sites))), []
    for k, kind in enumerate(kinds):
        ends = [effect[:-1, k], low[:-1, k], high[:-1, k]]
        finite = np.concatenate([e[np.isfinite(e)] for e in ends])
        bottom, top = min(float(finite.min()), 0.0), max(float(finite.max()), 1e-6)
        plot = Plot(width, 230, (-0.6, len(xs) - 0.4), (bottom * 1.05, top * 1.05), title=_symbols(kind), bottom=46)
        plot.line_at(0).whiskers(xs, low[:-1, k], high[:-1, k], LIGHT.mute).dots(xs, effect[:-1, k], BLUE, sites)
        plot.text(width - 10, 14, f"all at once {effect[-1, k]:+.3f}", anchor="end")
        plots.append(_depth_axis(plot, sites))
    what = "Change of the loss in nats per token" if by_loss else "KL in nats per token"
    return row(*plots), (
        f"{what} with another gate in place of beta, at one sublayer alone; whiskers are 95% intervals over "
        "sequences. The number in each panel is the effect of the same gate at all sublayers at once. Scales differ."
    )


# --- tables --


def _rows(finding: Any) -> str:
    head = "".join(f"<th{' class=w' if i == 0 else ''}>{_math(c)}</th>" for i, c in enumerate(finding.columns))
    lines = [f"<tr>{head}</tr>"]
    for i, values in enumerate(finding.rows):
        shown = [fmt(v, 3) if isinstance(v, float) else cell(v) for v in values]
        cells = "".join(f"<td{' class=w' if j == 0 else ''}>{html.escape(v)}</td>" for j, v in enumerate(shown))
        lines.append(f"<tr{' class=all' if i == 0 else ''}>{cells}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _effects_table(data: Any) -> str:
    kinds, places = data["kind"].values.tolist(), data["place"].values.tolist()
    head = "".join(f"<th>{_math(kind)}</th><th>95%</th><th>KL</th>" for kind in kinds)
    lines = [f"<tr><th class=w>sublayer</th>{head}</tr>"]
    for i in (len(places) - 1, *range(len(places) - 1)):
        cells = ""
        for k in range(len(kinds)):
            effect, low, high, kl = (
                float(data[v].values[i, k]) for v in ("loss_effect", "loss_low", "loss_high", "kl")
            )
            interval = f"[{low:+.3f}, {high:+.3f}]" if np.isfinite(low) else ""
            cells += (
                f"<td>{f'{effect:+.4f}' if np.isfinite(effect) else ''}</td><td>{interval}</td><td>{fmt(kl, 3)}</td>"
            )
        first = f"<td class=w>{html.escape(places[i])}{' (at once)' if i == len(places) - 1 else ''}</td>"
        lines.append(f"<tr{' class=all' if i == len(places) - 1 else ''}>{first}{cells}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _definitions(data: Any) -> str:
    lines = []
    for name, variable in data.data_vars.items():
        if variable.ndim and not str(name).startswith("check") and name not in ("statement", "kind"):
            unit = f" ({variable.attrs['unit']})" if variable.attrs.get("unit") else ""
            lines.append(f"<li><code>{html.escape(str(name))}</code> {_math(variable.attrs['meaning'] + unit)}</li>")
    return f'<p class="mute">Every number, by its name in the JSON file:</p><ul class="notes">{"".join(lines)}</ul>'

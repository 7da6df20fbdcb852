"""What the two-axis maps need from one or two traces, as one JSON-able dict, and the renderer as one text.

`maps_payload` takes traces, as `t2lens.trace` and `t2lens.load_trace` return them, and needs neither torch nor
the models. The renderer (`renderer_js`) draws such a payload in the app, in a notebook and in a static page.
Whatever choosing a node shows crosses at once, so choosing needs no server; only what must be computed for one node, or
is too long to send, is asked for later.

The payload:

    rev         hash of everything below; a renderer that gets the same rev again keeps what it has
    precision   "f4" (float32, the numbers of the dataset) or "f2" (float16: tooltips show 3 digits;
                an array that float16 cannot hold stays float32)
    lean        true: too long to send whole (`fitted_payload`); see below what is left out and can be asked for
    hint        one sentence above the maps, or "";  notes  sentences below them
    quantities  [{key, label, unit, meaning, signed, log, lo, hi, above, later}]: what can colour the grid; one range
                for all panels, `above` cells exceed hi; log: the colour scale is logarithmic; later (only where true):
                some panel or way does not hold its grid yet: ask for "grid"
    depth       [{key, label, signed, hi}]: the reads from depth that can be shown ("weights", "mixing",
                "contribution", and "share", which the renderer makes of it), one range for all panels
    sequenceHi  top of the range of sequence attention (1)
    alignment   null for one panel, or {rule: "same" | "left" | "right", shift, text}: position p of A stands beside
                p + shift of B. Both prompts the same: "same". Else "left" (same index, shift 0) or "right" (same
                distance from the end); positions without a partner have nothing beside them, and text says how many
    view        {panel, pos, site, quantity, depth, head, way, layer, compare, trail}: what is chosen at first; head is
                "mean", "max" (of each weight over heads) or "0", "1", ...; layer "cross" or "rollout", compare "both"
                (A | B) or "difference" (A | B | B - A); trail [{panel, pos, site, word}]: the nodes that one came
                through to this one, word the next token at whose logit one began: these three may be absent
    answers     answers (see below) known beforehand, for a page without a server; may be absent
    panels      one per trace:
        letter, name, badge {ok, text, lines}, layers
        tokens      [pos] strings as the tokenizer gives them
        rows        ["embed", site, ..., "out"], bottom to top
        ways        {way: {grids, missing, absent, reads, holds, lens}}: "" alone where every site has one read
            grids   {quantity: array [row, pos]}; lean: only the first quantity, and only in the way shown first
            missing {quantity: {row: why the row has no value}};  absent {quantity: why the trace has no such quantity}
            reads   {"weights" | "mixing" | "contribution": {names, columns, values, what}}: columns[r] = indices into
                    names of the sources that exist for read r; values = array [sum of len(columns[r]), pos];
                    lean: {} (ask for "column")
            holds   {site: {source: [atoms that it holds at that read]}}; without sources that are one atom
            lens    {words: [...], top: array [read, pos, k], logprob: array of the same}: the likeliest tokens of the
                    logit lens of each read (rows[1:]) as indices into words, nats; null: the trace follows no token,
                    or lean (it comes with "column")
        sequence    {site: array [pos (pos + 1) / 2]}: head mean of the attention, lower triangle row by row; lean: {}
                    (ask for "row")
        maxima      the same, of each weight the largest over heads, where patterns lacks the site; may be {}
        patterns    {site: array [head, pos (pos + 1) / 2]}: the same of every head, or {}: with heads[site] > 1 one row
                    of them can be asked for ("row")
        meanOf      {kind of sublayer: number of heads}: if the trace holds the mean over them alone; heads says 1
        heads       {site: number of heads};  windows  {site: number of positions it can see}, where there is a window
        next        [pos][k] = [token, log probability in nats or null], or null; lean: null (comes with "column")
        follow      null, or {"text": which token is followed, in words, "tokens": [pos] the token that is followed at
                    each position (null where there is none), "logit": array [pos] | null its logit, "bias": array [pos]
                    | null what no atom adds to it}: the column of logit_share and bias sum to logit
    array = {"dtype": "f4" | "f2", "shape": [...], "b64": little-endian values in C order}, or for the renderer
            "bytes", a Uint8Array of the same, in place of "b64"

Answers (`t2lens.apps.answers`): what the renderer asks for later comes as data {"of": rev, "answers": [...]} of a
second mount of the component, newest last; in all of them "panel" is 0 or 1 and "way" one of the panel's ways:

    {"kind": "rollout", "panel", "pos", "site", "way", "values": array [row, pos], "ends": [sentences]}
        share of the node that passes each earlier node, both axes; row 0: what each embedding absorbs; NaN above it
    {"kind": "effects", "panel", "pos", "site", "way", "over": "source" | "atom", "unit": "nats",
        "values": {name: number | null}, "floor": number, "note"}
        KL(plain || without) at out of this position with one route into this node taken out; names as in reads
        ("source": of weights, "atom": of mixing); below floor it is rounding
    {"kind": "column", "panel", "pos", "ways": {way: {"reads": as `reads` with values [n, 1], "lens": as `lens` with one
        position, or null}}, "next": [[token, log probability]] or null}
    {"kind": "row", "panel", "site", "pos", "mean": array [pos + 1], "max": array [pos + 1],
        "heads": array [head, pos + 1]}   one row of sequence attention
    {"kind": "grid", "panel", "way", "quantity", "values": array [row, pos], "missing": {row: why}}

In place of its values an answer may say "why" there are none, in one sentence, which is shown.

It asks through component state `ask` = {"turn", "wants": [{"kind", "panel", "pos", "site", "way", "quantity"}, ...]},
each with the keys that its answer has; every question names all that is shown and not there yet.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal

import numpy as np

from t2lens.analysis.quantities import QUANTITIES, Grid, attention_of, grid, outline
from t2lens.analysis.sequence_quantities import averaged_heads
from t2lens.viz.colors import luts_js

__all__ = [
    "DEPTH",
    "MODES",
    "alignment",
    "badge",
    "column_meaning",
    "depth_range",
    "exchange_js",
    "holds_of",
    "layers_of",
    "maps_payload",
    "next_tokens",
    "ordered_reads",
    "pack_array",
    "pack_lens",
    "pack_reads",
    "quantity_range",
    "renderer_js",
    "triangle",
    "windows_of",
]

DEPTH = {
    "weights": ("depth_weight", "source", "Own depth weights", "a source of the system's own weights"),
    "mixing": ("mixing", "atom", "Mixing matrix", "an atom, with its effective coefficient"),
    "contribution": (
        "contribution_norm",
        "atom",
        "Contribution norm",
        "an atom, with the norm of what it adds",
    ),
}
"""key -> (dataset variable, its column dimension, label, what a column is)"""

LENS_TOP = 3
"""Likeliest tokens of the lens that are sent for each read and position."""

MODES = (*DEPTH, "share")
"""What the maps can show of a read from depth: the three, and each contribution's share of their summed norms."""


RENDERER = (
    "ink.js",
    "panel.js",
    "answers.js",
    "exchange.js",
    "maps.js",
    "tell.js",
    "pen.js",
    "draw.js",
    "layers.js",
    "between.js",
    "walk.js",
    "node.js",
)
"""The parts of the renderer, in order."""


@functools.cache
def renderer_js() -> str:
    """The renderer as the text of one ES module: `renderMaps(root, payload, onSelect)` and a default export.

    In a page: `<script type="module">` + this text + a call of `renderMaps`; onSelect may be null and hears
    `("cell", ...)`, `("show", ...)` and `("ask", ...)` (see `t2lens.apps.components.maps`). The text contains no `</`.
    """
    read = resources.files("t2lens.viz").joinpath
    sheets = "".join(read(name).read_text("utf-8") for name in ("maps.css", "node.css"))
    css = json.dumps(sheets).replace("</", "<\\/")
    parts = [read(name).read_text("utf-8") for name in RENDERER]
    return "\n".join([f"const CSS = {css};", luts_js(), *parts])


@functools.cache
def exchange_js() -> str:
    """A small module whose default export, called as Streamlit's components are, hands its data, answers (see above),
    to the maps of this page."""
    text = resources.files("t2lens.viz").joinpath("exchange.js").read_text("utf-8")
    return f"{text}\nexport default ({{ data }}) => void deliver(data);\n"


def maps_payload(
    traces: Sequence[Any],
    *,
    quantity: str = "residual_norm",
    depth: str = "weights",
    cell: tuple[int, int, str] | None = None,
    hint: str = "",
    notes: Sequence[str] = (),
    precision: Literal["f4", "f2"] = "f4",
    reads: Sequence[str] = tuple(DEPTH),
    sequence: bool = True,
    heads: bool = False,
    maxima: bool = False,
    head: str = "mean",
    way: str = "",
    layer: Literal["cross", "rollout"] = "cross",
    compare: Literal["both", "difference"] = "both",
    align: Literal["left", "right"] = "left",
    lean: bool = False,
    answers: Sequence[Mapping[str, Any]] = (),
    trail: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The payload (see above) of one or two traces.

    quantity, depth: what is shown first; cell: (panel, position, site) chosen first, by default the last position
    at `out`. reads: which of the three reads from depth to send; sequence: whether to send the sequence attention
    (its size grows with the square of the prompt); heads: whether each head of it and not the mean alone; maxima:
    whether its largest weight over heads, where heads are not sent; head: which one is shown first; way: the same of
    sites that read in several ways; layer, compare: what is drawn over the maps, and which of them; precision "f2"
    halves every array; align: how two different prompts stand beside each other; lean: the first quantity alone, and
    neither reads nor sequence attention; answers, trail: see above. `t2lens.viz.fitting.fitted_payload` chooses what
    fits.

    Raises ValueError for no trace, more than two, or an unknown choice.
    """
    if not 1 <= len(traces) <= 2:
        raise ValueError(f"The maps show one or two traces side by side, not {len(traces)}.")
    unknown = set(reads) - set(DEPTH)
    if unknown or not reads:
        raise ValueError(f"Reads from depth are {', '.join(DEPTH)}, not {', '.join(sorted(unknown)) or 'nothing'}.")
    if quantity not in QUANTITIES:
        raise ValueError(f"A grid can show {', '.join(QUANTITIES)}, not {quantity!r}.")
    if align not in ("left", "right"):
        raise ValueError(f"Positions are aligned left or right, not {align!r}.")
    panels, shown = [], []  # shown: the grids of every panel and way, which share their ranges
    for letter, trace in zip("AB", traces, strict=False):
        first, ways = (way if way in trace.ways else trace.ways[0]), {}
        for name in trace.ways:
            one = trace.of_way(name)
            grids = {key: outline(one, key) if lean and key != quantity else grid(one, key) for key in QUANTITIES}
            sent = list(QUANTITIES) if not lean else [quantity] if name == first else []
            ways[name] = way_of(one, grids, sent, precision, () if lean else [key for key in DEPTH if key in reads])
            shown.append(grids)
        panels.append(_panel(letter, trace.of_way(), precision, sequence, heads, maxima, lean) | {"ways": ways})
    quantities = [quantity_range([each[key] for each in shown]) for key in QUANTITIES]
    for entry in quantities if lean else ():
        if entry["key"] != quantity or len(shown) > len(traces):
            entry["later"] = True
    modes = [depth_range(key, traces) for key in DEPTH if key in reads]
    if "contribution" in reads:
        modes.append({"key": "share", "label": "Contribution share", "signed": False, "hi": 1.0})
    if depth not in [mode["key"] for mode in modes]:
        raise ValueError(f"A read from depth that was not asked for, {depth!r}, cannot be shown first.")
    panel, pos, site = cell or (0, len(panels[0]["tokens"]) - 1, "out")
    payload = {
        "precision": precision,
        "lean": lean,
        "hint": hint,
        "notes": list(notes),
        "quantities": quantities,
        "depth": modes,
        "sequenceHi": 1.0,
        "alignment": alignment([panel["tokens"] for panel in panels], align),
        "answers": [dict(answer) for answer in answers],
        "panels": panels,
        "view": {
            "panel": panel,
            "pos": pos,
            "site": site,
            "quantity": quantity,
            "depth": depth,
            "head": head,
            "way": way or next(iter(panels[panel]["ways"])),
            "layer": layer,
            "compare": compare,
            "trail": [dict(step) for step in trail],
        },
    }
    text = json.dumps(payload, sort_keys=True, allow_nan=False)
    return {"rev": hashlib.sha256(text.encode()).hexdigest()[:16], **payload}


def alignment(tokens: Sequence[Sequence[str]], rule: str) -> dict[str, Any] | None:
    """How positions of two prompts stand beside each other (see above): position p of A beside p + shift of B. Never
    stretched: what has no partner has none."""
    if len(tokens) < 2:
        return None
    a, b = tokens
    if list(a) == list(b):
        return {"rule": "same", "shift": 0, "text": ""}
    counted = "first token" if rule == "left" else "last token"
    alone = abs(len(a) - len(b))
    more = (
        f"; {alone} of {'A' if len(a) > len(b) else 'B'} {'has' if alone == 1 else 'have'} none beside" if alone else ""
    )
    same = "".join(a) == "".join(b)
    what = "A and B cut the prompt into other tokens" if same else "The prompts differ"
    unit = "" if same else " tokens"
    text = f"{what} ({len(a)} and {len(b)}{unit}): positions are counted from the {counted}{more}."
    return {"rule": rule, "shift": 0 if rule == "left" else len(b) - len(a), "text": text}


def layers_of(sites: Sequence[str]) -> int:
    """How many blocks these sites are of."""
    return 1 + max((int(site.split(".")[0]) for site in sites if "." in site), default=0)


def triangle(pattern: np.ndarray) -> np.ndarray:
    """[..., query, key] -> [..., query (query + 1) / 2 + key]: the causal part, row by row."""
    return pattern[..., *np.tril_indices(pattern.shape[-1])]


def way_of(
    trace: Any, grids: Mapping[str, Grid], sent: Sequence[str], precision: str, reads: Sequence[str]
) -> dict[str, Any]:
    """What the maps show of a trace with one read per site. sent: the quantities whose numbers go along; reads: the
    reads from depth that do (none: lean)."""
    data, pack = trace.dataset, functools.partial(pack_array, precision=precision)
    there = {key: grid for key, grid in grids.items() if not grid.absent}
    return {
        "grids": {key: pack(there[key].values) for key in sent if key in there},
        "missing": {key: grid.missing for key, grid in there.items()},
        "absent": {key: grid.absent for key, grid in grids.items() if grid.absent},
        "reads": {key: pack_reads(data, key, trace.source_atoms, pack) for key in reads if DEPTH[key][0] in data},
        "holds": {str(site): holds_of(trace, str(site)) for site in data["read"].values},
        "lens": pack_lens(data, precision) if reads else None,
    }


def _panel(
    letter: str, trace: Any, precision: str, sequence: bool, heads: bool, maxima: bool, lean: bool
) -> dict[str, Any]:
    data = trace.dataset
    sites = [str(site) for site in data["read"].values]
    pack = functools.partial(pack_array, precision=precision)
    patterns = attention_of(trace) if sequence and trace.causal else {}  # the maps draw the past alone
    sent = {} if lean else patterns
    every = {site: each for site, each in sent.items() if heads and len(each) > 1}
    most = {site: each for site, each in sent.items() if maxima and len(each) > 1 and site not in every}
    return {
        "letter": letter,
        "name": str(trace.model_name),
        "badge": badge(list(trace.verify())),
        "layers": layers_of(sites),
        "tokens": [str(token) for token in trace.tokens],
        "rows": ["embed", *sites],
        "sequence": {site: pack(triangle(each.mean(axis=0))) for site, each in sent.items()},
        "maxima": {site: pack(triangle(each.max(axis=0))) for site, each in most.items()},
        "patterns": {site: pack(triangle(each)) for site, each in every.items()},
        "heads": {site: len(each) for site, each in patterns.items()},
        "meanOf": averaged_heads(trace),
        "windows": {site: n for site, n in windows_of(trace).items() if site in patterns},
        "next": None if lean else next_tokens(data),
        "follow": _follow(trace, pack),
    }


def _follow(trace: Any, pack: Any) -> dict[str, Any] | None:
    data = trace.dataset
    if trace.follow is None:
        return None
    tokens = [
        str(token) if there >= 0 else None
        for token, there in zip(data["followed"].values, data["followed_id"].values, strict=True)
    ]
    found: dict[str, Any] = {"text": trace.follow, "tokens": tokens, "logit": None, "bias": None}
    if "logit_share" in data and not grid(trace, "logit_share").absent:
        found |= {"logit": pack(data["logit"].values), "bias": pack(data["logit_bias"].values)}
    return found


def pack_lens(data: Any, precision: str) -> dict[str, Any] | None:
    """The likeliest tokens of the lens, as the payload has them; None where no token is followed."""
    if "lens_top" not in data:
        return None
    top = data["lens_top"].transpose("read", "pos", "k").values[..., :LENS_TOP]
    log = data["lens_top_logprob"].transpose("read", "pos", "k").values[..., :LENS_TOP]
    kept, index = np.unique(top, return_inverse=True)
    words = [str(each) for each in data["word"].values[kept]]
    places = pack_array(index.reshape(top.shape), "f4")  # whole numbers, which float16 would not hold
    return {"words": words, "top": places, "logprob": pack_array(log, precision)}


def pack_array(values: np.ndarray, precision: str) -> dict[str, Any]:
    """An array as the payload has it."""
    if precision == "f2":
        size = np.abs(values)
        if (size[np.isfinite(size)] > np.finfo(np.float16).max).any():
            precision = "f4"
        else:  # what is not zero must not become zero
            least = np.finfo(np.float16).smallest_subnormal
            values = np.where((size > 0) & (size < least), np.copysign(least, values), values)
    stored = np.ascontiguousarray(values, dtype=f"<{precision}")
    return {
        "dtype": precision,
        "shape": list(stored.shape),
        "b64": base64.b64encode(stored.tobytes()).decode(),
    }


def pack_reads(data: Any, key: str, source_atoms: Mapping[str, Any], pack: Any) -> dict[str, Any]:
    """One kind of read from depth, as the payload has it."""
    names, values = ordered_reads(data, key, source_atoms)
    # by name, not by what is NaN: a number that failed is not a source that does not exist
    sites = [str(site) for site in data["read"].values]
    written = [["embed", *sites[:n]] for n in data["seen"].values.tolist()]
    there = [source_atoms[site] if key == "weights" else atoms for site, atoms in zip(sites, written, strict=True)]
    exists = np.array([[name in held for name in names] for held in there])
    return {
        "names": names,
        "columns": [np.flatnonzero(row).tolist() for row in exists],
        "values": pack(values[exists]),
        "what": column_meaning(data, key),
    }


def column_meaning(data: Any, key: str) -> str:
    """What a column of one kind of read is, and what its coefficients are where they are not one number per atom."""
    kind = str(data[DEPTH[key][0]].attrs.get("coefficients", "scalar"))
    return DEPTH[key][3] + ("" if kind == "scalar" else f" ({kind})")


def ordered_reads(data: Any, key: str, source_atoms: Mapping[str, Any]) -> tuple[list[str], np.ndarray]:
    """(names of the columns, [read, column, pos]) of one kind of read from depth, in the order in which maps show it.

    Sources that hold other atoms at other reads (a partial sum, a carried state) come last.
    """
    variable, column, _, _ = DEPTH[key]
    held: dict[str, set[tuple[str, ...]]] = {}
    for per_read in source_atoms.values():
        for name, atoms in per_read.items():
            held.setdefault(name, set()).add(tuple(atoms))
    names = [str(name) for name in data[column].values]
    order = sorted(range(len(names)), key=lambda i: len(held.get(names[i], ())) > 1)
    return [names[i] for i in order], data[variable].transpose("read", column, "pos").values[:, order]


def windows_of(trace: Any) -> dict[str, int]:
    """{site: number of positions that it can see}, where it has a window."""
    part = {"attn": trace.config.get("attention") or {}, "local": trace.config.get("local") or {}}
    windows = {site: part[site.split(".")[1]].get("window") for site in attention_of(trace)}
    return {site: window for site, window in windows.items() if window is not None}


def holds_of(trace: Any, site: str) -> dict[str, list[str]]:
    """{source: the atoms that it holds} at a read, without sources that are one atom."""
    sources = trace.source_atoms[site]
    return {str(name): list(atoms) for name, atoms in sources.items() if list(atoms) != [name]}


def badge(checks: Sequence[Any]) -> dict[str, Any]:
    """How the checks of a trace came out, as the payload has it."""
    if not checks:
        return {"ok": False, "text": "not verified", "lines": ["This trace carries no checks."]}
    failed = [check.name for check in checks if not check.passed]
    lines = [f"{'ok  ' if c.passed else 'FAIL'} {c.name}: {c.value:.3g} (limit {c.limit:.3g})" for c in checks]
    text = f"this trace fails: {', '.join(failed)}" if failed else f"this trace: {len(checks)} checks hold"
    return {"ok": not failed, "text": text, "lines": lines}


def next_tokens(data: Any) -> list[list[list[Any]]] | None:
    """The likeliest continuations, as the payload has them."""
    if "next_token" not in data:
        return None
    words, logs = data["next_token"].values, data["next_logprob"].values
    return [
        [[str(word), float(log) if np.isfinite(log) else None] for word, log in zip(*row, strict=True)]
        for row in zip(words, logs, strict=True)
    ]


def quantity_range(grids: Sequence[Grid]) -> dict[str, Any]:
    """The menu entry of one quantity and its range over all panels: its own limits, or least to largest value.

    Positive values that span more than a factor of 30 go on a logarithmic scale. Else a few values far above all
    others stay above the range, marked and counted.
    """
    shown = next((grid for grid in grids if not grid.absent), grids[0])
    there = [grid for grid in grids if not grid.absent] or [shown]
    lows, highs = zip(*(grid.limits for grid in there), strict=True)
    low, high = (None if None in lows else min(lows)), (None if None in highs else max(highs))
    values = np.concatenate([grid.values[np.isfinite(grid.values)].ravel() for grid in grids])
    signed, log = shown.quantity.scale == "diverging", False
    if low is None or high is None:
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
        log = not signed and high > 30 * low > 0
        most = float(np.quantile(values, 0.98)) if values.size else high
        high = most if not log and high - low > 3 * (most - low) else high
    if signed:
        low, high = -max(-low, high), max(-low, high)
    about = shown.quantity
    entry = {"key": about.key, "label": about.label, "unit": about.unit, "meaning": about.meaning}
    return entry | {"signed": signed, "log": log, "lo": low, "hi": high, "above": int((values > high).sum())}


def depth_range(key: str, traces: Sequence[Any]) -> dict[str, Any]:
    variable, _, label, _ = DEPTH[key]
    all_values = [trace.dataset[variable].values for trace in traces if variable in trace.dataset]
    finite = np.concatenate([values[np.isfinite(values)].ravel() for values in all_values] or [np.zeros(0)])
    high = float(np.abs(finite).max()) if finite.size else 1.0
    return {"key": key, "label": label, "signed": bool((finite < 0).any()), "hi": high or 1.0}

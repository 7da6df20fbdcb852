"""What the two-axis maps need from one or two traces, as one JSON-able dict, and the renderer as one text.

`maps_payload` takes traces, as `t2lens.trace` and `t2lens.load_trace` return them, and needs neither torch nor the models. The renderer (`renderer_js`)
draws such a payload in the app, in a notebook and in a static page. Everything that any choice of a node can show
crosses at once, so choosing needs no server.

The payload:

    rev         hash of everything below; a renderer that gets the same rev again keeps what it has
    precision   "f4" (float32, the numbers of the dataset) or "f2" (float16: tooltips show 3 digits)
    hint        one sentence above the maps, or "";  notes  sentences below them
    quantities  [{key, label, unit, signed, lo, hi, above}]: what can colour the grid; one range for all panels,
                `above` cells exceed hi
    depth       [{key, label, signed, hi}]: the reads from depth that can be shown ("weights", "mixing",
                "contribution"), one range for all panels
    sequenceHi  top of the range of sequence attention (1)
    view        {panel, pos, site, quantity, depth}: what is chosen at first
    panels      one per trace:
        letter, name, subtitle, badge {ok, text, lines}, layers
        tokens      [pos] strings as the tokenizer gives them
        rows        ["embed", site, ..., "out"], bottom to top
        grids       {quantity: array [site, pos]}, NaN = no value
        absent      {quantity: why the whole map is missing}
        reads       {"weights" | "mixing" | "contribution": {names, columns, values, what}}: columns[r] = indices into
                    names of the sources that exist for read r; values = array [sum of len(columns[r]), pos]
        holds       {site: {source: [atoms that it holds at that read]}}; without sources that are one atom
        sequence    {site: array [pos (pos + 1) / 2]}: head mean of the attention, lower triangle row by row
        heads       {site: number of heads}
        next        [pos][k] = [token, log probability in nats], or null
    array = {"dtype": "f4" | "f2", "shape": [...], "b64": little-endian values in C order}
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

__all__ = ["maps_payload", "renderer_js", "triangle"]

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


@functools.cache
def renderer_js() -> str:
    """The renderer as the text of one ES module: `renderMaps(root, payload, onSelect)` and a default export.

    In a page: `<script type="module">` + this text + a call of `renderMaps`; onSelect may be null and hears
    `("cell", {panel, pos, site})` and `("show", {quantity, depth})`. The text contains no `</`.
    """
    read = resources.files("t2lens.viz").joinpath
    css = json.dumps(read("maps.css").read_text("utf-8")).replace("</", "<\\/")
    parts = [read(name).read_text("utf-8") for name in ("ink.js", "maps.js", "draw.js", "node.js")]
    return "\n".join([f"const CSS = {css};", *parts])


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
) -> dict[str, Any]:
    """The payload (see above) of one or two traces.

    quantity, depth: what is shown first; cell: (panel, position, site) chosen first, by default the last position
    at `out`. reads: which of the three reads from depth to send; sequence: whether to send the sequence attention
    (its size grows with the square of the prompt); precision "f2" halves every array.

    Raises ValueError for no trace, more than two, or an unknown choice.
    """
    if not 1 <= len(traces) <= 2:
        raise ValueError(f"The maps show one or two traces side by side, not {len(traces)}.")
    unknown = set(reads) - set(DEPTH)
    if unknown or not reads:
        raise ValueError(
            f"Reads from depth are {', '.join(DEPTH)}, not {', '.join(sorted(unknown)) or 'nothing'}."
        )
    grids = [quantity_grids(trace) for trace in traces]
    panels = [
        _panel("AB"[i], trace, grids[i], precision, [key for key in DEPTH if key in reads], sequence)
        for i, trace in enumerate(traces)
    ]
    quantities = [_quantity_range(key, [grid[key][0] for grid in grids]) for key in QUANTITIES]
    if quantity not in QUANTITIES:
        raise ValueError(f"A grid can show {', '.join(QUANTITIES)}, not {quantity!r}.")
    panel, pos, site = cell or (0, len(panels[0]["tokens"]) - 1, "out")
    payload = {
        "precision": precision,
        "hint": hint,
        "notes": list(notes),
        "quantities": quantities,
        "depth": [_depth_range(key, traces) for key in DEPTH if key in reads],
        "sequenceHi": 1.0,
        "panels": panels,
        "view": {"panel": panel, "pos": pos, "site": site, "quantity": quantity, "depth": depth},
    }
    text = json.dumps(payload, sort_keys=True, allow_nan=False)
    return {"rev": hashlib.sha256(text.encode()).hexdigest()[:16], **payload}


def triangle(pattern: np.ndarray) -> np.ndarray:
    """[..., query, key] -> [..., query (query + 1) / 2 + key]: the causal part, row by row."""
    return pattern[..., *np.tril_indices(pattern.shape[-1])]


def _panel(
    letter: str,
    trace: Any,
    grids: Mapping[str, tuple[np.ndarray | None, str]],
    precision: str,
    reads: Sequence[str],
    sequence: bool,
) -> dict[str, Any]:
    data = trace.dataset
    sites = [str(site) for site in data["read"].values]
    layers = 1 + max((int(site.split(".")[0]) for site in sites if "." in site), default=0)
    pack = functools.partial(_array, precision=precision)
    patterns = _patterns(data) if sequence else {}
    return {
        "letter": letter,
        "name": str(trace.model_name),
        "subtitle": "",
        "badge": _badge(list(trace.verify())),
        "layers": layers,
        "tokens": [str(token) for token in trace.tokens],
        "rows": ["embed", *sites],
        "grids": {key: pack(grid) for key, (grid, _) in grids.items() if grid is not None},
        "absent": {key: why for key, (grid, why) in grids.items() if grid is None},
        "reads": {key: _reads(data, key, pack) for key in reads if DEPTH[key][0] in data},
        "holds": _holds(trace.source_atoms, data),
        "sequence": {site: pack(triangle(pattern)) for site, (pattern, _) in patterns.items()},
        "heads": {site: heads for site, (_, heads) in patterns.items()},
        "next": _next_tokens(data),
    }


def _array(values: np.ndarray, precision: str) -> dict[str, Any]:
    stored = np.ascontiguousarray(values, dtype=f"<{precision}")
    return {
        "dtype": precision,
        "shape": list(stored.shape),
        "b64": base64.b64encode(stored.tobytes()).decode(),
    }


def _reads(data: Any, key: str, pack: Any) -> dict[str, Any]:
    variable, column, _, what = DEPTH[key]
    values = data[variable].transpose("read", column, "pos").values
    exists = ~np.isnan(values).all(axis=-1)  # NaN at every position: there is no such source
    return {
        "names": [str(name) for name in data[column].values],
        "columns": [np.flatnonzero(row).tolist() for row in exists],
        "values": pack(values[exists]),
        "what": what,
    }


def _patterns(data: Any) -> dict[str, tuple[np.ndarray, int]]:
    """site -> (head mean of its sequence attention [query, key], number of heads)."""
    found = {}
    for variable, kind, head in (
        ("local_attention", "local", "local_head"),
        ("sequence_attention", "attn", "head"),
    ):
        if variable in data:
            means = data[variable].mean(head, skipna=False).transpose("layer", "query", "key").values
            heads = data.sizes[head]
            found |= {
                f"{int(n)}.{kind}": (mean, heads) for n, mean in zip(data["layer"].values, means, strict=True)
            }
    return found


def _holds(source_atoms: Mapping[str, Any], data: Any) -> dict[str, dict[str, list[str]]]:
    sites = [str(site) for site in data["read"].values]
    return {
        site: {str(name): list(atoms) for name, atoms in source_atoms[site].items() if list(atoms) != [name]}
        for site in sites
    }


def _badge(checks: Sequence[Any]) -> dict[str, Any]:
    if not checks:
        return {"ok": False, "text": "not verified", "lines": ["This trace carries no checks."]}
    failed = [check.name for check in checks if not check.passed]
    lines = [
        f"{'ok  ' if c.passed else 'FAIL'} {c.name}: {c.value:.3g} (limit {c.limit:.3g})" for c in checks
    ]
    text = f"failed: {', '.join(failed)}" if failed else f"verified ({len(checks)} checks)"
    return {"ok": not failed, "text": text, "lines": lines}


def _next_tokens(data: Any) -> list[list[list[Any]]] | None:
    if "next_token" not in data:
        return None
    words, logs = data["next_token"].values, data["next_logprob"].values
    return [[[str(w), float(v)] for w, v in zip(*row, strict=True)] for row in zip(words, logs, strict=True)]


def _quantity_range(key: str, grids: Sequence[np.ndarray | None]) -> dict[str, Any]:
    label, unit, signed = QUANTITIES[key]
    finite = np.concatenate(
        [grid[np.isfinite(grid)].ravel() for grid in grids if grid is not None] or [np.zeros(0)]
    )
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    return {"key": key, "label": label, "unit": unit, "signed": signed, "lo": low, "hi": high, "above": 0}


def _depth_range(key: str, traces: Sequence[Any]) -> dict[str, Any]:
    variable, _, label, _ = DEPTH[key]
    all_values = [trace.dataset[variable].values for trace in traces if variable in trace.dataset]
    finite = np.concatenate([values[np.isfinite(values)].ravel() for values in all_values] or [np.zeros(0)])
    high = float(np.abs(finite).max()) if finite.size else 1.0
    return {"key": key, "label": label, "signed": bool((finite < 0).any()), "hi": high or 1.0}


QUANTITIES = {
    "residual_norm": ("residual norm", "", False),
    "gate": ("gate", "", False),
    "depth_entropy": ("depth entropy", "nats", False),
    "depth_lookback": ("look-back in depth", "layers", False),
    "sequence_lookback": ("look-back in the sequence", "positions", False),
}


def quantity_grids(trace: Any) -> dict[str, tuple[np.ndarray | None, str]]:
    data = trace.dataset
    sites = [str(s) for s in data["read"].values]
    n, t = len(sites), len(trace.tokens)
    out: dict[str, tuple[np.ndarray | None, str]] = {"residual_norm": (data["residual_norm"].values, "")}
    if "gate" in data:
        gate = np.full((n, t), np.nan)
        for i, name in enumerate(data["write"].values):
            gate[sites.index(str(name))] = data["gate"].values[i]
        out["gate"] = (gate, "")
    else:
        out["gate"] = (None, "no gates in this system")
    w = np.abs(np.nan_to_num(data["mixing"].transpose("read", "pos", "atom").values))
    p = w / np.maximum(w.sum(-1, keepdims=True), 1e-12)
    out["depth_entropy"] = (-(p * np.log(np.maximum(p, 1e-12))).sum(-1), "")
    depth = np.array([-1, *[int(s.split(".")[0]) for s in sites[:-1]]])
    at = np.array([*[int(s.split(".")[0]) for s in sites[:-1]], depth[-1] + 1])
    out["depth_lookback"] = ((p * (at[:, None, None] - depth)).sum(-1), "")
    look = np.full((n, t), np.nan)
    for site, (pattern, _) in _patterns(data).items():
        q = np.arange(t)
        look[sites.index(site)] = (np.nan_to_num(pattern) * (q[:, None] - q)).sum(-1)
    out["sequence_lookback"] = (look, "")
    return out

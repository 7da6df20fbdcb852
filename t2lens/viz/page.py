"""The two-axis maps as HTML: a fragment for notebooks and a page of its own, one file each, no network.

Both hold the renderer (plain JavaScript) and the numbers, compressed. As long as the whole stays under `BUDGET`
bytes, numbers are float32 and exact when hovered, and every head can be shown; above that there is less, and a note
says what is lost (`t2lens.viz.fitting`).
Tokens are data for the renderer and reach the page as text, never as markup.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t2lens.analysis.quantities import grid
from t2lens.viz.fitting import fitted_payload
from t2lens.viz.maps_between import chosen
from t2lens.viz.maps_cross import ends, rollout_of
from t2lens.viz.payload import pack_array, renderer_js
from t2lens.viz.terminal import own_quantity, summary

__all__ = ["BUDGET", "first_view", "fragment", "page"]

BUDGET = 377_000
"""Bytes of a fragment up to which nothing is left out; a page around it stays under 380 kB, of which 100 are the
renderer: small enough for a mail and for a notebook with dozens of them."""

# Classic script, because notebooks do not run modules everywhere. The renderer is defined once per page and version,
# the element is found by the hash of its numbers, so any number of fragments live in one notebook, also twice the same.
_SCRIPT = """
(() => {
const all = window.t2lensMaps = window.t2lensMaps || {};
all["%(version)s"] = all["%(version)s"] || (() => {
%(renderer)s
return renderMaps;
})();
const here = document.currentScript && document.currentScript.previousElementSibling;
const fill = async () => {
  const packed = Uint8Array.from(atob("%(data)s"), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const raw = await new Response(stream).arrayBuffer(), n = new DataView(raw).getUint32(0, true);
  const text = new TextDecoder().decode(new Uint8Array(raw, 4, n));
  const payload = JSON.parse(text, (key, v) => (v && v.span
    ? { dtype: v.dtype, shape: v.shape, bytes: new Uint8Array(raw.slice(4 + n + v.span[0], 4 + n + v.span[1])) } : v));
  const roots = new Set(document.querySelectorAll('[data-t2lens="%(rev)s"]'));
  if (here && here.dataset && here.dataset.t2lens === "%(rev)s") roots.add(here);
  for (const root of roots) if (!root.t2lens) { root.textContent = ""; all["%(version)s"](root, payload, null); }
};
if (typeof DecompressionStream === "function") fill();
})();
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data:">
<title>%(title)s</title>
<style>
:root{color-scheme:light dark;--st-background-color:#fff;--st-text-color:#1b1f24}
@media (prefers-color-scheme:dark){:root{--st-background-color:#15181c;--st-text-color:#e6e8eb}}
body{margin:0 auto;max-width:1760px;padding:14px 22px 26px;background:var(--st-background-color);
color:var(--st-text-color);font:13px/1.45 system-ui,-apple-system,"Segoe UI","Helvetica Neue",Arial,sans-serif}
header{display:flex;gap:6px 14px;align-items:baseline;flex-wrap:wrap;margin-bottom:10px}
h1{font-size:15px;margin:0}
blockquote{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;opacity:.8;max-height:4.4em;overflow:auto}
pre{white-space:pre-wrap}
</style>
</head>
<body>
<header><h1>%(title)s</h1><blockquote>%(prompt)s</blockquote></header>
%(fragment)s
</body>
</html>
"""


def fragment(trace: Any, trace_b: Any = None, **view: Any) -> str:
    """HTML of the maps of one trace, or of two side by side, to put into a page or a notebook.

    view: what is shown first, `quantity`, `depth` and `cell` as `t2lens.viz.payload.maps_payload` takes them, and
    `rollouts` as `maps_picture` does: what feeds the chosen node can then be shown.
    Where scripts do not run (an untrusted notebook, a preview), the text summary stands instead.
    """
    traces = [trace] if trace_b is None else [trace, trace_b]
    rest = {**first_view(traces), **view}
    notes = [f"{one.model_name}: {notice}" for one in traces for notice in one.notices]
    found = rest.pop("rollouts", ())
    rest["answers"] = [*rest.get("answers", ()), *_rollouts(traces, found, rest)]
    made = {}  # the HTML of each payload that was tried, by its rev

    def measure(payload: dict[str, Any]) -> int:
        made[payload["rev"]] = _render(traces, payload)
        return len(made[payload["rev"]])

    notes = [*notes, *rest.pop("notes", ())]
    chosen = fitted_payload(traces, budget=BUDGET, measure=measure, packed=0.3, served=False, notes=notes, **rest)
    return made.get(chosen["rev"]) or _render(traces, chosen)


def page(trace: Any, trace_b: Any = None, *, title: str | None = None, **view: Any) -> str:
    """A complete HTML file of the maps: opens anywhere, without network. `view` as for `fragment`."""
    names = [str(one.model_name) for one in (trace, trace_b) if one is not None]
    return _PAGE % {
        "title": html.escape(title or f"t2lens: {' and '.join(names)}"),
        "prompt": html.escape(trace.text or ""),
        "fragment": fragment(trace, trace_b, **view),
    }


def first_view(traces: Sequence[Any]) -> dict[str, Any]:
    """What shows most of these systems at once: their own gate or depth weights, at an attention site half way up."""
    a = traces[0]
    own = own_quantity(a)
    sites = [str(site) for site in a.of_way().dataset["read"].values if str(site).endswith(".attn")]
    return {
        "quantity": own if not any(grid(one, own).absent for one in traces) else "depth_lookback",
        "depth": "weights" if len(traces) == 1 and not grid(a, "depth_entropy").absent else "mixing",
        "cell": (0, len(a.tokens) - 1, sites[(len(sites) + 1) // 2] if len(sites) > 1 else "out"),
    }


def _rollouts(traces: Sequence[Any], rollouts: Sequence[Any], view: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers of a payload that hold them."""
    places, sites = chosen(traces, view["cell"], view.get("align", "left"))
    answers = []
    for i, (one, found) in enumerate(zip(traces, rollouts, strict=False)):
        if found is None:
            continue
        way = view.get("way", "") if view.get("way", "") in one.ways else one.ways[0]
        values = pack_array(rollout_of(found, 1 + one.dataset.sizes["read"]), "f4")
        data = found.dataset
        words = ends(one.tokens, data["absorbed"].values, float(np.nansum(data["stuck"].values)))
        node = {"panel": i, "pos": places[i], "site": sites[i], "way": way}
        answers.append({"kind": "rollout", **node, "values": values, "ends": words})
    return answers


def _render(traces: Sequence[Any], payload: dict[str, Any]) -> str:
    script = _SCRIPT % {
        "version": _version(),
        "rev": payload["rev"],
        "renderer": classic_js(),
        "data": base64.b64encode(_pack(payload)).decode(),
    }
    plain = html.escape("\n\n".join(summary(one) for one in traces))
    return f'<div data-t2lens="{payload["rev"]}"><pre>{plain}</pre></div>\n<script>{script}</script>'


@functools.cache
def classic_js() -> str:
    """The renderer as statements of a function body: its exports become plain functions."""
    text = re.sub(r"^export default function ", "const streamlitEntry = function ", renderer_js(), flags=re.M)
    text = re.sub(r"^export (?=function |const |class )", "", text, flags=re.M)
    assert not re.search(r"^\s*(?:export|import)\b", text, re.M), "the renderer must stay one module without imports"
    return re.sub(r"^[ \t]+|^//.*\n", "", text, flags=re.M)


@functools.cache
def _version() -> str:
    return hashlib.sha256(classic_js().encode()).hexdigest()[:12]


def _pack(payload: dict[str, Any]) -> bytes:
    """gzip of: length of the JSON (uint32), the JSON with spans in place of arrays, the arrays, equal ones once."""
    spans: dict[bytes, tuple[int, int]] = {}
    size = 0

    def walk(node: Any) -> Any:
        nonlocal size
        if isinstance(node, dict) and "b64" in node:
            raw = base64.b64decode(node["b64"])
            if raw not in spans:
                spans[raw] = (size, size + len(raw))
                size += len(raw)
            return {"dtype": node["dtype"], "shape": node["shape"], "span": spans[raw]}
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        return [walk(value) for value in node] if isinstance(node, list) else node

    text = json.dumps(walk(payload), separators=(",", ":")).encode()
    return gzip.compress(len(text).to_bytes(4, "little") + text + b"".join(spans), compresslevel=6, mtime=0)

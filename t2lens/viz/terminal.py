"""A trace as a few lines of plain text: what `repr(trace)` shows and `t2lens trace` prints first."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from t2lens.analysis.quantities import grid
from t2lens.viz.labels import clip, fmt, glyphs
from t2lens.viz.payload import DEPTH, ordered_reads, quantity_range

__all__ = ["own_quantity", "summary", "top_reads"]

_BARS, _DIGITS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", "12345678"
_WIDTH = 78  # columns of the text
_MOST = 64  # positions in the map


def own_quantity(trace: Any) -> str:
    """Key of the quantity that is the system's own: its gate, else the entropy of its depth weights, else the norm."""
    for key in ("gate", "depth_entropy"):
        if not grid(trace, key).absent:
            return key
    return "residual_norm"


def summary(trace: Any, quantity: str | None = None) -> str:
    """Header, checks, a map of one quantity (a row per site, one sign per position) and the top reads of `out`.

    quantity: a key of `t2lens.analysis.quantities.QUANTITIES`, by default `own_quantity(trace)`.
    """
    n = len(trace.tokens)
    lines = [f"Trace of {trace.model_name}: {n} token{'s' if n > 1 else ''}, {_size(trace)}"]
    if trace.text:
        lines.append(f"  {clip(glyphs(trace.text).replace(chr(0xB7), ' '), _WIDTH - 4)}")
    lines += [f"  note: {notice}" for notice in trace.notices]
    lines += _checks(trace)
    lines += ["", *_map(trace, quantity or own_quantity(trace)), ""]
    last = n - 1
    label, reads = top_reads(trace, "out", last)
    lines.append(f"  out at position {last} {_quoted(trace.tokens[last])} reads, {label}:")
    lines.append("    " + "  ".join(f"{name} {fmt(value, 3)}" for name, value in reads[:6]))
    data = trace.dataset
    words, logs = data["next_token"].values[last], data["next_logprob"].values[last]
    following = "  ".join(f"{_quoted(str(w))} {np.exp(v):.3f}" for w, v in zip(words, logs, strict=True))
    lines.append(f"  {'next token' if trace.causal else 'token here'}: {following}")
    loss = data["loss"].values
    if np.isfinite(loss).any():
        lines.append(f"  loss: {np.nanmean(loss):.3f} nats per token over {int(np.isfinite(loss).sum())} tokens")
    return _printable("\n".join(lines))


def top_reads(trace: Any, read: str, pos: int) -> tuple[str, list[tuple[str, float]]]:
    """(what the numbers are, [(source, number)] by falling size) of one read at one position.

    The system's own weights where they are a distribution over several sources, else the lengths of contributions.
    `read` may be a site; where it reads in several ways, that is its first.
    """
    if read in (reads := [str(name) for name in trace.dataset["read"].values]):
        found = trace.dataset.sel(read=read)
        trace, read = trace.of_way(str(found["way"].values) or None), str(found["site"].values)
    else:
        trace = trace.of_way()
    weights = grid(trace, "depth_entropy")
    own = not weights.absent and read not in weights.missing
    key = "weights" if own else "contribution"
    names, values = ordered_reads(trace.dataset, key, trace.source_atoms)
    sites = [str(name) for name in trace.dataset["read"].values]
    if read not in sites:
        raise KeyError(f"No read {read!r}; the reads are {', '.join(reads)}.")
    row = values[sites.index(read), :, pos]
    found = [(name, float(value)) for name, value in zip(names, row, strict=True) if not np.isnan(value)]
    return DEPTH[key][2].lower(), sorted(found, key=lambda pair: -abs(pair[1]))


def _size(trace: Any) -> str:
    config = trace.config
    kind = config["residual"]["kind"]
    parts = [f"residual {kind}", f"{config['n_layers']} blocks", f"d_model {config['d_model']}"]
    return ", ".join([*parts, "with ShortSWA"] if config.get("local") else parts)


def _checks(trace: Any) -> list[str]:
    result = trace.verify()
    failed = [check for check in result if not check.passed]
    if not failed:
        return [f"  verified: {len(result)} checks passed"]
    return ["  VERIFY FAILED:", *(f"    {check}" for check in failed)]


def _map(trace: Any, key: str) -> list[str]:
    shown = grid(trace, key)
    about = shown.quantity
    unit = f" in {about.unit}" if about.unit else ""
    if shown.absent:
        return [f"  {about.label}{unit}: none; {shown.absent}"]
    span = quantity_range([shown])
    low, high = (-span["hi"] if span["signed"] else span["lo"]), span["hi"]
    first = max(0, shown.values.shape[1] - _MOST)
    head = f"  {about.label}{unit}, low bar {fmt(low, 3)} to full bar {fmt(high, 3)}"
    head += (", log scale" if span["log"] else "") + (f" ({span['above']} above)" if span["above"] else "")
    head += f"; positions {first} to {first + _MOST - 1}" if first else ""
    lines = [head]
    for site, row in reversed(list(zip(shown.sites, shown.values[:, first:], strict=True))):
        if site in shown.missing:
            lines.append(f"  {site:>8}  ({shown.missing[site]})")
            continue
        signs = ""
        for pos, value in enumerate(row, first):
            level = _BARS[_level(float(value), low, high, span["log"])] if np.isfinite(value) else "?"
            signs += " " if shown.why(site, pos) else level
        lines.append(f"  {site:>8}  {signs}")
    return lines


def _level(value: float, low: float, high: float, log: bool) -> int:
    """0..7: which eighth of the range a value lies in."""
    share = math.log(value / low) / math.log(high / low) if log else (value - low) / ((high - low) or 1.0)
    return min(7, max(0, int(share * 8)))


def _quoted(token: str) -> str:
    return f"'{glyphs(token)}'"


def _printable(text: str) -> str:
    """Bars as digits, and other signs escaped, where the terminal cannot show them."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        text = text.translate(str.maketrans(_BARS, _DIGITS)).replace("\u00b7", "_").replace("\u2026", "...")
        return text.encode("ascii", "backslashreplace").decode()
    return text

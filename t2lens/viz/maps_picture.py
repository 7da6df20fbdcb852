"""The view of the two-axis maps as one SVG: the same numbers, on the same scales, for papers and slides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from t2lens.analysis.quantities import attention_of, grid
from t2lens.viz.colors import THEMES, RampName, ThemeName
from t2lens.viz.labels import clip, fmt, glyphs
from t2lens.viz.maps_between import (
    MINUS,
    chosen,
    depth_difference,
    grid_difference,
    same_site,
    sequence_difference,
)
from t2lens.viz.maps_cross import cross, feeding, framed, layer_words, rollout_of, shares
from t2lens.viz.maps_drawing import HEAD, LEFT, Map, Scale, bar, cells, instead, labels, plot_of, small, words_at
from t2lens.viz.payload import DEPTH, alignment, badge, depth_range, holds_of, ordered_reads, quantity_range, windows_of
from t2lens.viz.series import exact
from t2lens.viz.svg import TEXT, document, wrap

__all__ = ["maps_picture"]

MARGIN, GAP, BAR_ROOM = 24, 34, 96
NARROWEST, WIDEST = 400, 20_000  # pixels
GAP_WORD = "\u00a0\u00a0"  # two spaces that SVG keeps
Chosen = tuple[int, int, str]


def maps_picture(
    traces: Sequence[Any],
    *,
    quantity: str = "residual_norm",
    depth: str = "weights",
    cell: Chosen | None = None,
    way: str = "",
    head: str = "mean",
    layer: Literal["cross", "rollout"] = "cross",
    rollouts: Sequence[Any] = (),
    compare: Literal["both", "difference"] = "both",
    align: Literal["left", "right"] = "left",
    theme: ThemeName = "light",
    width: int = 1440,
) -> str:
    """The maps of one or two traces as an SVG document.

    Above, the quantity at every site and position, with the cross of the chosen node: where it looks in the sequence
    and what it reads from depth. Below, every read from depth at that position, and where that site looks.

    quantity, depth, cell, way, head, compare and align as in `t2lens.viz.payload.maps_payload`: "difference" adds maps
    of B - A, align says how two different prompts stand beside each other. layer "rollout" draws in place of the cross
    how much each earlier node feeds the chosen one: rollouts holds what `t2lens.analysis.rollout` finds for it in each
    trace, or None. ValueError for a choice that does not exist.
    """
    _check(traces, depth, compare, align, layer)
    panel, pos, site = _node(traces, cell)
    if theme not in THEMES:
        raise ValueError(f"A picture is {' or '.join(THEMES)}, not {theme!r}.")
    if not hasattr(width, "__float__") or not NARROWEST <= width <= WIDEST:
        raise ValueError(f"width is a number of pixels from {NARROWEST} to {WIDEST}, not {width!r}.")
    ones = [trace.of_way(way if way in trace.ways else None) for trace in traces]
    aligned = alignment([one.tokens for one in ones], align)
    shift = aligned["shift"] if aligned else 0
    places, sites = chosen(ones, (panel, pos, site), align)
    every = [[str(name) for name in one.dataset["read"].values] for one in ones]
    reads = _depth_maps(ones, depth, places)
    sequence = Scale(label="sequence attention, root scale", low=0.0, high=1.0, ramp="warm", warp="root")
    looks = [_sequence_map(i, len(ones), one, sites[i], head, sequence) for i, one in enumerate(ones)]
    grids = _grids(ones, quantity)
    fed = _feeding(grids, rollouts or (), places, sites) if layer == "rollout" else {}
    minus: list[Map] = []  # of the grids, the reads and where they look
    if compare == "difference" and len(ones) == 2:
        same = sites[1] == same_site(sites[0], every[1], every[0], exact=True)
        minus = [
            grid_difference(grids[0], grids[1], shift),
            depth_difference(reads[0], reads[1], (every[0], every[1])),
            sequence_difference(looks[0], looks[1], shift, same),
        ]
    look, parts, y = THEMES[theme], [], 30.0
    node = f"{site} at position {pos} \u201c{glyphs(ones[panel].tokens[pos])}\u201d of {'AB'[panel]}"
    prompts = list(dict.fromkeys(one.text or " ".join(one.tokens) for one in ones))
    about = f"{grids[0].scale.label} by position and depth. Chosen: {node}."
    for i, text in enumerate(prompts):
        letter = f"{'AB'[i]}{GAP_WORD}" if len(prompts) > 1 else ""
        parts.append(
            words_at(MARGIN, y, letter + clip(glyphs(text).replace("\u00b7", " "), 150), 14, look.ink, bold=True)
        )
        y += 20
    parts.append(words_at(MARGIN, y, f"Chosen: {node}.", TEXT + 0.5, look.mute))
    y += 18
    n_maps = len(ones) + bool(minus)
    each = (width - 2 * MARGIN - BAR_ROOM * (1 + bool(minus)) - GAP * (n_maps - 1)) / n_maps - LEFT
    tall = max(_grid_height(one) for one in grids)
    below = 0.0
    for i, (one, drawn) in enumerate(zip(ones, grids, strict=True)):
        x = MARGIN + i * (each + LEFT + GAP)
        plot = plot_of(x + LEFT, y + HEAD, each, tall, drawn, theme)
        parts.append(words_at(x, y + 13, _named(i, one, len(ones)), 12.5, look.ink, bold=True))
        parts.append(_badge(one, x + LEFT + each, y + 13, look))
        plot.marks += ['<g opacity=".25">'] if i in fed else []
        cells(plot, drawn, theme)
        plot.marks += ["</g>"] if i in fed else []
        if sites[i] in drawn.rows and (at := places[i]) is not None:
            if i in fed:
                cells(plot, fed[i], theme)
                shares(plot, fed[i], at, sites[i], theme)
            else:
                held = holds_of(one, sites[i]) if depth == "weights" else {}
                window = windows_of(one).get(sites[i])
                cross(plot, drawn, (at, sites[i]), (looks[i], reads[i]), held, window, theme)
            framed(plot, drawn, at, sites[i], theme)
        instead(plot, drawn)
        below = max(below, labels(plot, drawn, "position", "site"))
        parts += plot.marks
    x = MARGIN + len(ones) * (each + LEFT + GAP)
    bars = [grids[0].scale, *[each.scale for each in fed.values()][:1]]
    room = (tall - 14 * (len(bars) - 1)) / len(bars)
    for k, scale in enumerate(bars):
        parts.append(bar(scale, x - GAP + 18, y + HEAD + k * (room + 14), room, theme))
    if minus:
        deep, made = small(minus[0], x + BAR_ROOM - GAP, y, (each, tall), ("position", "site"), theme)
        parts += [
            made,
            "" if minus[0].instead else bar(minus[0].scale, width - MARGIN - BAR_ROOM + 18, y + HEAD, tall, theme),
        ]
        below = max(below, deep)
    y += HEAD + tall + below + 26
    more, y = _below(reads, looks, minus, depth, y, width, theme)
    parts += more
    said = layer_words(layer, ones, rollouts, places, sites, fed)
    for line in _captions(ones, grids, quantity, aligned, minus, said):
        for text in wrap(line, width - 2 * MARGIN, TEXT):
            parts.append(words_at(MARGIN, y, text, TEXT, look.bad if "FAILED" in line else look.mute))
            y += 14
    return document("".join(parts), width, y + 6, about, theme)


def _check(traces: Sequence[Any], depth: str, compare: str, align: str, layer: str) -> None:
    if not 1 <= len(traces) <= 2:
        raise ValueError(f"The maps show one or two traces side by side, not {len(traces)}.")
    if depth not in (*DEPTH, "share"):
        raise ValueError(f"Reads from depth are {', '.join(DEPTH)} and share, not {depth!r}.")
    if compare not in ("both", "difference"):
        raise ValueError(f"Maps stand beside each other (both) or with their difference (difference), not {compare!r}.")
    if align not in ("left", "right"):
        raise ValueError(f"Positions are aligned left or right, not {align!r}.")
    if layer not in ("cross", "rollout"):
        raise ValueError(f"Of the chosen node the maps show its cross or its rollout, not {layer!r}.")


def _node(traces: Sequence[Any], cell: Any) -> Chosen:
    """The chosen node; by default the last position of the first trace at "out"."""
    if cell is None:
        return 0, len(traces[0].tokens) - 1, "out"
    if not isinstance(cell, list | tuple) or len(cell) != 3:
        raise ValueError(f'A node is (panel, position, site), like (0, 3, "out"), not {cell!r}.')
    panel, pos, site = cell
    if panel not in range(len(traces)):
        raise ValueError(f"panel counts the traces, from 0 to {len(traces) - 1}; it is {panel!r}.")
    if pos not in range(n := len(traces[panel].tokens)):
        raise ValueError(f"A trace of {n} tokens has the positions 0 to {n - 1}, not {pos!r}.")
    names = ["embed", *map(str, traces[panel].of_way().dataset["read"].values)]
    if site not in names:
        raise ValueError(f"The trace has no site {site!r}; it has {', '.join(names)}.")
    return panel, pos, site


def _below(
    reads: list[Map], looks: list[Map], minus: list[Map], depth: str, y: float, width: float, theme: ThemeName
) -> tuple[list[str], float]:
    """The maps of what is read in depth and of where sites look, and the pixels down to their end."""
    parts = []
    some = looks if any(not one.instead for one in looks) else []
    first = ("source" if depth == "weights" else "atom", "read")
    groups = [(reads + minus[1:2], first), ((some + minus[2:]) if some else [], ("key", "query"))]
    # with the differences there is a row for each axis
    lines = [[group] for group in groups if group[0]] if minus else [[group for group in groups if group[0]]]
    for line in lines:
        n = sum(len(drawn) for drawn, _ in line)
        square = (width - 2 * MARGIN - 2 * BAR_ROOM - (LEFT + GAP) * n) / n
        square, x, deepest = min(square, 330.0), float(MARGIN), 0.0
        for drawn, words in line:
            for k, each_map in enumerate(drawn):
                deep, made = small(each_map, x, y, (square, square), words, theme)
                parts.append(made)
                deepest = max(deepest, deep)
                x += LEFT + square + GAP
                if k == len(reads) - 1 or (k == len(reads) and not each_map.instead):
                    parts.append(bar(each_map.scale, x - GAP + 14, y + HEAD, min(square, 200), theme))
                    x += BAR_ROOM - 10
        y += HEAD + square + deepest + 24
    return parts, y


# --- what is shown ----------------------------------------------------------------------------------


def _grids(ones: Sequence[Any], quantity: str) -> list[Map]:
    grids = [grid(one, quantity) for one in ones]
    shared = quantity_range(grids)
    about = grids[0].quantity
    unit = f" ({about.unit})" if about.unit else ""
    scale = Scale(
        label=f"{about.label}{unit}",
        low=shared["lo"],
        high=shared["hi"],
        ramp="both" if shared["signed"] else "cool",
        warp="log" if shared["log"] else "linear",
        above=shared["above"],
    )
    maps = []
    for one, each in zip(ones, grids, strict=True):
        blank = np.zeros(each.values.shape, bool)
        blank[[i for i, site in enumerate(each.sites) if each.absent or each.why(site)]] = True
        tokens = [glyphs(token) for token in one.tokens]
        maps.append(
            Map(
                name=str(one.model_name),
                values=each.values,
                blank=blank,
                rows=[str(site) for site in each.sites],
                columns=tokens,
                tip=lambda r, c, each=each, tokens=tokens: (
                    f"site {each.sites[r]}\npos {c} {tokens[c]}\n{about.label}: {exact(each.values[r, c])}"
                    + (f" {about.unit}" if about.unit else "")
                ),
                node=lambda r, c, each=each: {"site": str(each.sites[r]), "pos": c},
                scale=scale,
                instead=each.absent,
            )
        )
    return maps


def _depth_maps(ones: Sequence[Any], depth: str, places: Sequence[int | None]) -> list[Map]:
    key = "contribution" if depth == "share" else depth
    shared = depth_range(key, ones)
    label = "share of contributions" if depth == "share" else shared["label"].lower()
    high = 1.0 if depth == "share" else shared["hi"]
    signed = depth != "share" and shared["signed"]
    ramp: RampName = "both" if signed else "warm"
    scale = Scale(label=f"{label}, root scale", low=-high if signed else 0.0, high=high, ramp=ramp, warp="root")
    maps = []
    for i, (one, place) in enumerate(zip(ones, places, strict=True)):
        pos, alone = place or 0, f"no position of {'AB'[i]} stands beside the chosen one" if place is None else ""
        names, values, blank = [], np.zeros((1, 1)), np.ones((1, 1), bool)
        rows = [str(name) for name in one.dataset["read"].values]
        if DEPTH[key][0] in one.dataset and not alone:
            names, every = ordered_reads(one.dataset, key, one.source_atoms)
            blank, values = np.asarray(np.isnan(every).all(axis=-1)), every[:, :, pos]
            if depth == "share":
                values = values / np.nansum(values, axis=1, keepdims=True)
        maps.append(
            Map(
                name=_lettered(i, len(ones), "reads from depth" + ("" if alone else f" at position {pos}")),
                values=values,
                blank=blank,
                rows=rows if names else [""],
                columns=names or [""],
                tip=lambda r, c, rows=rows, names=names, values=values: (
                    f"read {rows[r]}\ntakes from {names[c]}\n{label}: {exact(values[r, c])}"
                ),
                node=lambda r, _, rows=rows, pos=pos: {"site": rows[r], "pos": pos},
                scale=scale,
                instead="" if names else alone or f"this system has no {label}",
            )
        )
    return maps


def _sequence_map(i: int, n: int, one: Any, site: str, head: str, scale: Scale) -> Map:
    heads = attention_of(one).get(site) if one.causal else None
    tokens = [glyphs(token) for token in one.tokens]
    which = "mean of heads"
    if heads is not None:
        single = head.isdigit() and int(head) < len(heads)
        values = heads[int(head)] if single else heads.max(axis=0) if head == "max" else heads.mean(axis=0)
        which = f"head {head}" if single else "maximum over heads" if head == "max" else which
    else:
        values = np.full((1, 1), np.nan)
    return Map(
        name=_lettered(i, n, f"{site} looks back, {which}" if heads is not None else f"{site}: no sequence attention"),
        values=values,
        blank=~np.tri(len(values), dtype=bool) if heads is not None else np.ones((1, 1), bool),
        rows=tokens if heads is not None else [""],
        columns=tokens if heads is not None else [""],
        tip=lambda r, c: f"query {r} {tokens[r]}\nkey {c} {tokens[c]}\nattention: {exact(values[r, c])}",
        node=lambda r, _: {"site": site, "pos": r},
        scale=scale,
        down=True,
        instead="" if heads is not None else "it reads only its own position",
    )


def _feeding(
    grids: Sequence[Map], rollouts: Sequence[Any], places: Sequence[int | None], sites: Sequence[str]
) -> dict[int, Map]:
    """What feeds the chosen node in each panel that has it, on one range: the largest share, its own 1 aside."""
    found: dict[int, Map] = {}
    for i, (drawn, each, at) in enumerate(zip(grids, rollouts, places, strict=False)):
        if each is not None and at is not None and sites[i] in drawn.rows[1:]:
            values = rollout_of(each, len(drawn.rows))
            if values.shape != drawn.values.shape:
                raise ValueError(f"The rollout of {'AB'[i]} has shape {values.shape}, its grid {drawn.values.shape}.")
            top = drawn.rows.index(sites[i])  # all of the node passes the node itself, and nothing is above it
            if not np.isnan(values[top + 1 :]).all() or not np.isclose(values[top, at], 1):
                raise ValueError(f"The rollout of {'AB'[i]} is not of the chosen node, {sites[i]} at position {at}.")
            found[i] = feeding(drawn, values, at, sites[i], drawn.scale)
    top = max((float(each.values[~each.blank].max(initial=0.0)) for each in found.values()), default=0.0) or 1.0
    scale = Scale(label="share of the node, root scale", low=0.0, high=top, ramp="warm", warp="root")
    return {i: replace(each, scale=scale) for i, each in found.items()}


def _lettered(i: int, n: int, words: str) -> str:
    return f"{'AB'[i]}{GAP_WORD}{words}" if n > 1 else words[:1].upper() + words[1:]


def _named(i: int, one: Any, n: int) -> str:
    return _lettered(i, n, str(one.model_name)) if n > 1 else str(one.model_name)


def _grid_height(drawn: Map) -> int:
    return round(max(3.0, min(17.0, 400 / len(drawn.rows))) * len(drawn.rows))


def _badge(one: Any, x: float, y: float, look: Any) -> str:
    found = badge(list(one.verify()))
    return words_at(x, y, found["text"], 11, look.good if found["ok"] else look.bad, anchor="end")


def _captions(
    ones: Sequence[Any],
    grids: Sequence[Map],
    quantity: str,
    aligned: dict[str, Any] | None,
    minus: Sequence[Map],
    said: Sequence[str],
) -> list[str]:
    """What is shown, n, what is left out, the range, and what must be said of the traces."""
    scale, about = grids[0].scale, grid(ones[0], quantity).quantity
    counts = " and ".join(str(int((~one.blank).sum())) for one in grids)
    two = "one range for A and B" if len(ones) > 1 else "range"
    span = f"{two} {fmt(scale.low, 3)} to {fmt(scale.high, 3)}"
    above = f"; {scale.above} above the range, in its last colour" if scale.above else ""
    meaning = f"{about.meaning[:1].upper()}{about.meaning[1:]}".rstrip(".")
    lines = [f"{meaning}. n = {counts} values; {span}{above}. Blank: no value; dot: exactly zero; cross: not finite."]
    lines += said
    if aligned and aligned["text"]:
        lines.append(aligned["text"])
    if len(ones) > 1 and grids[0].rows != grids[1].rows:
        lines.append("A and B have different sites: they meet at the same relative depth.")
    if minus:
        lines.append(f"{MINUS}: each map has a symmetric range of its own; what only one of them has is blank.")
    for i, one in enumerate(ones):
        words = " ".join(one.notices)
        failed = [check.name for check in one.verify() if not check.passed]
        if failed:
            words = f"FAILED: {', '.join(failed)}. Do not trust this picture. {words}"
        if words:
            lines.append(f"{'AB'[i]}: {words}" if len(ones) > 1 else words)
    return list(dict.fromkeys(lines))

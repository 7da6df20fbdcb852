"""What the page of gates draws of other gates than beta: map, prompt, histogram, and streams where there are any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from t2lens.apps.export import theme
from t2lens.apps.gate_focus import Focus, show, span
from t2lens.viz import write_gates as draw

__all__ = ["histogram", "left", "map_title", "streams", "streams_title"]


def left(focus: Focus, alike: Sequence[Focus], width: int) -> None:
    """The map of all writes, and the prompt at the chosen sublayer."""
    look = _look(focus, width) | {"pos": focus.pos, "limits": span(alike)}
    show(focus.side, "gate-map", draw.gate_map(focus.tokens.dataset, title=map_title(focus), **look))
    title = f"{focus.head}: {focus.gate.label} of {focus.site} at each token"
    show(focus.side, "gate-strip", draw.strip(focus.tokens.dataset, title=title, **look))
    st.caption(f"{focus.gate.label[:1].upper()}{focus.gate.label[1:]}: {focus.gate.meaning}")


def map_title(focus: Focus) -> str:
    if focus.gate.streams:
        return f"{focus.head}: how much of each write goes{focus.to}"
    return f"{focus.head}: {focus.gate.label} of every write"


def histogram(focus: Focus, over: Any | None, alike: Sequence[tuple[Focus, Any]], width: int) -> None:
    """The gate of the chosen sublayer over tokens. alike: the sides that share its scale, with their passages."""
    every = [each for each, _ in alike]
    low, high = span(every)
    if focus.gate.limits is None:  # passages may go further than the prompt
        seen = [draw.values_of(o, each.stream) for each, o in alike if o is not None]
        low, high = min([low, *(float(o.min()) for o in seen)]), max([high, *(float(o.max()) for o in seen)])
    limits = (low, high)
    most = max(draw.most_in_a_bin(each.tokens.dataset, o, each.site, limits, each.stream) for each, o in alike)
    title = f"{focus.head}: how much of {focus.site} goes{focus.to}, over tokens"
    title = title if focus.gate.streams else f"{focus.head}: {focus.gate.label} of {focus.site} over tokens"
    look = _look(focus, width) | {"limits": limits, "most": most}
    show(focus.side, "gate-histogram", draw.histogram(focus.tokens.dataset, over, title=title, **look))


def streams(focus: Focus, alike: Sequence[Focus], width: int) -> None:
    """How the streams are read, written to and mixed at the chosen token."""
    if not focus.gate.streams:
        return
    limits = draw.streams_limits([each.tokens.dataset for each in alike])
    look: dict[str, Any] = {"site": focus.site, "pos": focus.pos, "theme": theme(), "width": width, "limits": limits}
    show(focus.side, "gate-streams", draw.streams(focus.tokens.dataset, title=streams_title(focus), **look))


def streams_title(focus: Focus) -> str:
    return f"{focus.head}: the streams of each sublayer at {focus.here}"


def _look(focus: Focus, width: int) -> dict[str, Any]:
    return {"site": focus.site, "stream": focus.stream, "theme": theme(), "width": width}

"""What the page of gates draws of other gates than beta: map, prompt, histogram, and streams where there are any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import streamlit as st

from t2lens.apps.export import theme
from t2lens.apps.gate_focus import Focus, show, span
from t2lens.viz import write_gates as draw

__all__ = ["histogram", "left", "pictures"]


def pictures(focus: Focus, alike: Sequence[Focus]) -> dict[str, Callable[..., str]]:
    """Name -> what draws it, as wide as it is told. alike: the sides that share its scales."""
    data, head, label = focus.tokens.dataset, focus.head, focus.gate.label
    node: dict[str, Any] = {"site": focus.site, "pos": focus.pos, "theme": theme()}
    gate = node | {"stream": focus.stream, "limits": span(alike)}
    what = f"how much of each write goes{focus.to}" if focus.gate.streams else f"{label} of every write"
    made = {
        "map": partial(draw.gate_map, data, title=f"{head}: {what}", **gate),
        "tokens": partial(draw.strip, data, title=f"{head}: {label} of {focus.site} at each token", **gate),
    }
    if focus.gate.streams:  # how they are read, written to and mixed at the chosen token
        node["limits"] = draw.streams_limits([each.tokens.dataset for each in alike])
        title = f"{head}: the streams of each sublayer at {focus.here}"
        made["streams"] = partial(draw.streams, data, title=title, **node)
    return made


def left(focus: Focus, made: Mapping[str, Callable[..., str]], width: int) -> None:
    """The map of all writes, and the prompt at the chosen sublayer. made: of `pictures`."""
    show(focus.side, "gate-map", made["map"](width=width))
    show(focus.side, "gate-strip", made["tokens"](width=width))
    st.caption(f"{focus.gate.label[:1].upper()}{focus.gate.label[1:]}: {focus.gate.meaning}")


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
    look: dict[str, Any] = {"site": focus.site, "stream": focus.stream, "limits": limits, "most": most}
    svg = draw.histogram(focus.tokens.dataset, over, title=title, theme=theme(), width=width, **look)
    show(focus.side, "gate-histogram", svg)

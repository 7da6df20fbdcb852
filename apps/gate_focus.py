"""What the page of gates looks at: a side with gates on its writes, and the node that is chosen in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import streamlit as st

from t2lens.analysis.finding import Finding
from t2lens.analysis.gates import WriteGate, gate_span
from t2lens.apps.components.picture import picture
from t2lens.apps.frame import Side
from t2lens.viz.labels import glyphs
from t2lens.viz.write_gates import values_of

__all__ = ["EVERY", "Focus", "beside", "found_of", "show", "span", "stream_words"]

EVERY = ""
"""The stream that stands for all of them."""


@dataclass(frozen=True, kw_only=True)
class Focus:
    """A side with gates, and what is looked at in it. tokens: the finding of its prompt; stream: the one that is looked
    at, where every stream has a gate, or EVERY."""

    side: Side
    gate: WriteGate
    tokens: Finding
    site: str
    pos: int
    stream: str = EVERY

    @property
    def erases(self) -> bool:
        """Whether it is the gate beta of Deep Delta Learning, which has regimes, a spectrum and an audit."""
        return _has_beta(self.side)

    @property
    def head(self) -> str:
        return self.side.head

    @property
    def here(self) -> str:
        return f"position {self.pos}, {glyphs(str(self.tokens['token'].values[self.pos]))}"

    @property
    def plain(self) -> str:
        """What the gate is called that nothing here has set."""
        return "as edited" if self.side.edits else "as it is"

    @property
    def to(self) -> str:
        """Whereto a sublayer writes, where there is a choice."""
        if not self.gate.streams:
            return ""
        return f" to {stream_words(self.stream)}" if self.stream else " to each stream, on average"

    @property
    def values(self) -> np.ndarray:
        """The gate that is looked at, [site, pos]."""
        return self.tokens["beta"].values if self.erases else values_of(self.tokens.dataset, self.stream)

    @property
    def here_and_there(self) -> np.ndarray:
        """That of the chosen sublayer, [pos]."""
        return self.values[[str(site) for site in self.tokens["site"].values].index(self.site)]


def stream_words(stream: str) -> str:
    """What a stream ("stream2") is called in a sentence."""
    return stream.replace("stream", "stream ")


def _has_beta(side: Side) -> bool:
    return side.loaded.model.cfg.residual.kind == "ddl"


def found_of(side: Side, *, passages: int = 0) -> Finding:
    """The gates of every token of the prompt, or of so many passages. Refusal: there are none that can be drawn."""
    finding = side.analyse("gates-tokens" if _has_beta(side) else "gates-writes", passages=passages)
    values = finding["beta" if _has_beta(side) else "gate"].values
    if broken := int((~np.isfinite(values)).sum()):
        raise side.refusal(f"{broken} of its gates are NaN or infinite, so nothing that is made of them is shown.")
    return finding


def span(alike: Sequence[Focus]) -> tuple[float, float]:
    """Between which values the gates of several sides are shown and set."""
    spans = [gate_span(each.gate, each.values) for each in alike]
    return min(low for low, _ in spans), max(high for _, high in spans)


def beside(focused: Sequence[Focus], draw: Callable[[Focus], None]) -> None:
    """What `draw` draws of every side with gates, side by side."""
    if len(focused) == 1:
        draw(focused[0])
        return
    for each, place in zip(focused, st.columns(len(focused), gap="medium"), strict=True):
        with place:
            draw(each)


def show(side: Side, name: str, svg: str) -> Any:
    """Mount a picture of a side."""
    return picture(svg, key=f"{name}-{side.letter}", panel=side.panel)

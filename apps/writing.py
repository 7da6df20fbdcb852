"""A prompt that grows: a continuation is put into the prompt a token at a time, and the page is drawn after each.

What is drawn is then always a full pass over the text so far, which is exact under any edits. `grow` runs before the
widgets of a page, because it sets the prompt; `go_on` after everything, because it starts the next run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st

from t2lens.analysis.finding import Finding
from t2lens.apps.state import Cell

__all__ = ["Writing", "chosen", "go_on", "grow", "stop", "take_back", "told_now"]

PAUSE = 0.12
"""Seconds that a drawn page is left alone: it crosses to the browser meanwhile, and the reader sees it."""


@dataclass(frozen=True, kw_only=True)
class Writing:
    """What is written, and how far it is.

    panel: whose continuation. key: the prompt that grows, as the session names it, from `prompt` over `texts`; counts:
    how many new tokens each of these has; pos: its last position. finding: of `continue_text`. said: who writes.
    notices: what must be said at the end. code: the Python that writes the same. chosen: what else was chosen; when it
    changes, the writing ends.
    """

    panel: int
    key: str
    prompt: str
    texts: tuple[str, ...]
    counts: tuple[int, ...]
    pos: tuple[int, ...]
    finding: Finding
    said: str
    notices: tuple[str, ...]
    code: str
    chosen: tuple[Any, ...]
    done: int = 0
    stopped: bool = False

    @property
    def text(self) -> str:
        """The prompt as it stands."""
        return self.texts[self.done - 1] if self.done else self.prompt

    @property
    def going(self) -> bool:
        return not self.stopped and self.done < len(self.texts)

    @property
    def n_tokens(self) -> int:
        """How many new tokens the prompt has by now."""
        return self.counts[self.done - 1] if self.done else 0


def told_now(state: Any, writing: Writing) -> bool:
    """Whether its line stands on the page: while it is written, and then as long as the last new token is chosen."""
    at = state.get("cell")
    last = writing.pos[writing.done - 1] if writing.done else None
    return writing.going or (at is not None and (at.panel, at.pos) == (writing.panel, last))


def chosen(state: Any) -> tuple[Any, ...]:
    """What ends the writing when it changes."""
    return tuple(state.get(key) for key in ("model_a", "model_b", "edits"))


def grow(state: Any) -> None:
    """One step further, if something is being written: the prompt grows, and the node moves to its last position."""
    writing: Writing | None = state.get("writing")
    if writing is None:
        return
    if state.get(writing.key) != writing.text or chosen(state) != writing.chosen:
        del state["writing"]  # the reader went elsewhere
    elif writing.going:
        at = state.get("cell")
        writing = replace(writing, done=writing.done + 1)
        state["writing"], state[writing.key] = writing, writing.text
        site = at.site if at is not None else "out"
        state["cell"] = Cell(panel=writing.panel, pos=writing.pos[writing.done - 1], site=site)


def go_on(state: Any) -> None:
    """Start the next run, if something is being written."""
    writing: Writing | None = state.get("writing")
    if writing is not None and writing.going:
        time.sleep(PAUSE)
        st.rerun()


def stop(state: Any) -> None:
    """What has been written stays."""
    if (writing := state.get("writing")) is not None:
        state["writing"] = replace(writing, stopped=True)
        state[writing.key] = writing.text  # the browser that asks to stop may not have shown the newest token yet


def take_back(state: Any) -> None:
    """The prompt as it was before."""
    if (writing := state.pop("writing", None)) is not None and state.get(writing.key) == writing.text:
        state[writing.key] = writing.prompt

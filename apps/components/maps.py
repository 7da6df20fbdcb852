"""The two-axis maps as a Streamlit component: the renderer of `t2lens.viz`, mounted in the page.

Choosing a cell, a quantity or a kind of depth read is drawn in the browser at once, then reported here as
state: `cell` = {panel, pos, site, turn}, `show` = {quantity, depth, turn}; `turn` is a new number with every choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from t2lens.viz.payload import renderer_js

__all__ = ["maps"]

_mount = st.components.v2.component("t2lens.maps", js=renderer_js())  # once, at import: never inside a page


def maps(payload: dict[str, Any], *, key: str, on_change: Callable[[], None]) -> Any:
    """Mount the maps of `payload` (t2lens.viz.payload); the state is also in `st.session_state[key]`."""
    return _mount(key=key, data=payload, on_cell_change=on_change, on_show_change=on_change)

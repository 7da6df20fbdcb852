"""The two-axis maps as a Streamlit component: the renderer of `t2lens.viz`, mounted in the page.

A choice is drawn in the browser at once and then reported here as state: `cell` = {panel, pos, site, turn} and
`show` = {quantity, depth, head, way, layer, compare, turn}, where `turn` is a new number with every choice; `ask` =
{wants, turn} is what the maps would know beside their payload, answered in a mount of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from streamlit.components.v2 import component

from t2lens.viz.payload import exchange_js, renderer_js

__all__ = ["answers", "maps", "packed"]

_mount = component("t2lens.maps", js=renderer_js())  # once, at import: never inside a page
_deliver = component("t2lens.answers", js=exchange_js())


def packed(payload: dict[str, Any]) -> bytes:
    """A payload (t2lens.viz.payload) as `maps` takes it: JSON, made once and not anew in every run."""
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).encode()


def maps(payload: bytes, *, key: str, on_change: Callable[[], None]) -> Any:
    """Mount the maps of a `packed` payload; the state is also in `st.session_state[key]`."""
    return _mount(key=key, data=payload, on_cell_change=on_change, on_show_change=on_change, on_ask_change=on_change)


def answers(rev: str, found: Sequence[dict[str, Any]], *, key: str) -> None:
    """Send answers (t2lens.apps.answers) to the maps of the payload with this `rev`; draws nothing."""
    _deliver(key=key, data={"of": rev, "answers": list(found)})

"""An SVG picture of `t2lens.viz` as a Streamlit component: hover text and keys without a server, clicks reported.

A click on a mark that stands for a node of the maps is reported as state `pick` = {site, way, pos, turn}, as far as the
mark says, where `turn` is a new number with every click.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, Literal

from streamlit.components.v2 import component

__all__ = ["picture", "read_pick"]

_mount = component("t2lens.picture", js=resources.files("t2lens.viz").joinpath("tips.js").read_text("utf-8"))


def picture(
    svg: str, *, key: str, on_pick: Callable[[], None] | None = None, width: int | Literal["stretch"] = "stretch"
) -> Any:
    """Mount one SVG document, made by `t2lens.viz`; the state is also in `st.session_state[key]`. width: in pixels, or
    all there is."""
    return _mount(key=key, data={"svg": svg}, on_pick_change=on_pick or (lambda: None), width=width)


def read_pick(value: Any) -> dict[str, Any] | None:
    """What a picture reports as clicked, {"site", "way", "pos"} as far as it is that, or None: a browser can send
    anything.

    >>> read_pick({"site": "3.attn", "pos": 2, "turn": 1})
    {'site': '3.attn', 'pos': 2}
    """
    if not isinstance(value, Mapping):
        return None
    found: dict[str, Any] = {}
    for name, form in (("site", r"[\w.]{1,40}"), ("way", r"[a-z]")):
        word = value.get(name)
        if isinstance(word, str) and re.fullmatch(form, word, flags=re.ASCII):
            found[name] = word
    pos = value.get("pos")
    if type(pos) is int and 0 <= pos < 1_000_000:
        found["pos"] = pos
    return found or None

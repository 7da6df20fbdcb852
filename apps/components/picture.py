"""An SVG picture of `t2lens.viz` as a Streamlit component: hover text and keys without a server, clicks reported.

A click on a mark that stands for a node of the maps is reported as state `pick` = {site, way, pos, turn}, as far as the
mark says, where `turn` is a new number with every click.
"""

from __future__ import annotations

from functools import partial
from importlib import resources
from typing import Any, Literal

from streamlit.components.v2 import component

from t2lens.apps.nodes import picked

__all__ = ["picture"]

_mount = component("t2lens.picture", js=resources.files("t2lens.viz").joinpath("tips.js").read_text("utf-8"))


def picture(svg: str, *, key: str, panel: int | None = None, width: int | Literal["stretch"] = "stretch") -> Any:
    """Mount one SVG document, made by `t2lens.viz`; what is clicked becomes the chosen node.

    panel: whose nodes its marks stand for, 0 (A), 1 (B) or None (of the one that was chosen). width: in pixels, or all
    there is.
    """
    return _mount(key=key, data={"svg": svg}, on_pick_change=partial(picked, key, panel), width=width)

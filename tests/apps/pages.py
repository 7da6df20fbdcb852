"""One page of the dashboard in streamlit's AppTest, and what it shows."""

from __future__ import annotations

import json
from typing import Any

from streamlit.testing.v1 import AppTest


def _page(path: str) -> None:  # runs as a script of its own
    import streamlit as st

    from t2lens.apps import frame
    from t2lens.apps.views import PAGES

    st.session_state["pages"] = []
    frame.keep(PAGES)
    frame.run(next(page for page in PAGES if page.path == path))


def open_page(path: str, **params: str) -> AppTest:
    """The page after its first run, asked for with these parameters of the URL."""
    app = AppTest.from_function(_page, default_timeout=120, kwargs={"path": path})
    for key, value in params.items():
        app.query_params[key] = value
    return app.run()


def texts(app: AppTest) -> str:
    """What it says as plain text."""
    return "\n".join(element.value for element in app.text)


def url(app: AppTest) -> dict[str, str]:
    return {key: value[0] if isinstance(value, list) else value for key, value in app.query_params.items()}


def pictures(app: AppTest) -> dict[str, str]:
    """Key of each picture -> its SVG."""
    found = {}
    for each in app.get("bidi_component"):
        proto: Any = each.proto
        found[proto.id.split("-", 2)[-1]] = json.loads(proto.json)["svg"]
    return found

"""The entry that Streamlit runs: `t2lens app` or `streamlit run .../dashboard.py`."""

from __future__ import annotations

import functools

import streamlit as st

from t2lens.apps import frame
from t2lens.apps.views import PAGES

st.set_page_config(page_title="t2lens", layout="wide", initial_sidebar_state="collapsed")


def _shown(page: frame.Page) -> st.Page:
    draw = functools.partial(frame.run, page)
    return st.Page(draw, title=page.title, url_path=page.path, default=page.default)


shown = [_shown(page) for page in PAGES]
st.session_state["pages"] = shown
frame.keep(PAGES)
st.navigation(shown, position="hidden").run()

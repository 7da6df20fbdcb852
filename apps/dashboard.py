"""The entry that Streamlit runs: `t2lens app` or `streamlit run .../dashboard.py`."""

from __future__ import annotations

import streamlit as st

from t2lens.apps.pages.two_axes import two_axes

st.set_page_config(page_title="t2lens", layout="wide", initial_sidebar_state="collapsed")
st.navigation([st.Page(two_axes, title="two axes", url_path="two-axes", default=True)], position="hidden").run()

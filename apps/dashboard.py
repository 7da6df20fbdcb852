"""The entry that Streamlit runs: `t2lens app` or `streamlit run .../dashboard.py`."""

from __future__ import annotations

import streamlit as st

from t2lens.apps.header import keep
from t2lens.apps.views.analyses import GROUPS, page
from t2lens.apps.views.two_axes import two_axes

st.set_page_config(page_title="t2lens", layout="wide", initial_sidebar_state="collapsed")
pages = [
    st.Page(two_axes, title="Two axes", url_path="two-axes", default=True),
    *(st.Page(page(group), title=group.capitalize(), url_path=group) for group in GROUPS),
]
st.session_state["pages"] = pages
keep()
st.navigation(pages, position="hidden").run()

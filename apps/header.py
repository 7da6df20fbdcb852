"""What stands on top of every page: the name, the pages, and the looks that Streamlit's own chrome gets."""

from __future__ import annotations

import streamlit as st

__all__ = ["header", "keep", "tell"]

STYLE = """<style>
.stMainBlockContainer, [data-testid="stMainBlockContainer"] {padding: 0.7rem 2rem 2rem; max-width: 1680px;}
[data-testid="stHeader"] {display: none;}
[data-testid="stVerticalBlock"] {gap: 0.6rem;}
[data-testid="stForm"] {padding: 0; border: 0;}
[data-testid="stTextAreaRootElement"], [data-testid="stTextAreaRootElement"] textarea
{min-height: 2.6rem; height: 2.6rem;}
[data-testid="stPopoverBody"] [data-testid="stTextAreaRootElement"], [data-testid="stPopoverBody"] textarea
{height: 9rem; font-family: monospace; font-size: 0.85rem;}
[data-testid="stPageLink-NavLink"] {padding: 0.1rem 0.5rem;}
.st-key-pages p {font-size: 0.9rem;}
.st-key-finding [data-testid="stText"] {font-weight: 600; font-size: 1.05rem; margin-top: 0.6rem;}
</style>"""

KEPT = ("model_a", "model_b", "model", "prompt", "edits")
"""What is chosen once for all pages (`model`: for all analyses)."""


def keep() -> None:
    """Streamlit drops the value of a widget that a run does not show; what is chosen for all pages stays."""
    for key in KEPT:
        if key in st.session_state:
            st.session_state[key] = st.session_state[key]


def header() -> None:
    st.html(STYLE)
    with st.container(key="pages", horizontal=True, gap="small", vertical_alignment="center"):
        st.markdown("**t2lens**", width="content")
        for page in st.session_state["pages"]:
            st.page_link(page)


def tell(notices: list[str]) -> None:
    """Sentences for the reader, as plain text."""
    for notice in notices:
        st.text(notice)

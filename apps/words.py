"""Sentences for the reader: plain text, whatever stands in them."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st

__all__ = ["plain", "section", "tell", "why"]


def tell(notices: Iterable[str]) -> None:
    """Sentences as plain text, each once."""
    for notice in dict.fromkeys(notices):
        st.text(notice)


def section(title: str, what: str) -> None:
    """The head of a part of a page, and one sentence on what it shows."""
    st.markdown(f"**{title}**")
    st.caption(what)


def plain(text: str) -> str:
    """Text for a place that reads Markdown, where it is to stay text."""
    return "".join(f"\\{each}" if each in "\\`*_{}[]()#+-.!|<>$~:&" else each for each in text)


def why(error: Exception) -> str:
    """The sentence of an error; of a KeyError without the quotes that `str` puts around it."""
    return str(error.args[0] if error.args else error)

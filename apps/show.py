"""A finding on a page: its pictures, of A alone or of A and B on one scale, its table and its notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from t2lens.apps.components.picture import picture
from t2lens.apps.export import theme
from t2lens.viz.findings import cell
from t2lens.viz.pictures import picture_of

__all__ = ["show_finding", "table"]


def show_finding(
    finding: Any,
    finding_b: Any = None,
    *,
    key: str,
    names: Sequence[str] = ("", ""),
) -> None:
    """Title, pictures, table and notes of a finding, or of the same analysis of two models side by side.

    names: of the models.
    """
    findings = [finding] if finding_b is None else [finding, finding_b]
    for title in dict.fromkeys(map(_title, findings)):
        st.text(title)
    charts = max(len(each.charts) for each in findings)
    difference = len(findings) > 1 and bool(charts) and st.checkbox("B \u2212 A", key=f"{key}-difference")
    alone = len(findings) == 1 and charts > 1  # two pictures of one finding fit beside each other
    for first in range(0, charts, 2 if alone else 1):
        places = st.columns(2, gap="large") if alone else [st.container()]
        for place, chart in zip(places, range(first, charts), strict=False):
            svg = picture_of(findings, chart, names, difference=difference, theme=theme(), width=620)
            with place:
                picture(svg, key=f"{key}-{chart}")
    places = st.columns(len(findings), gap="large")
    for letter, place, each in zip("AB", places, findings, strict=False):
        with place:
            if len(findings) > 1:
                st.text(f"{letter}  {names['AB'.index(letter)]}")
            table(each, key=f"{key}-table-{letter}")
            for note in each.notes:
                st.text(f"\u2013 {note}")


def table(finding: Any, *, key: str) -> None:
    """The table of a finding; numbers stay numbers, so that a column sorts."""
    columns = {name: [_plain(row[i]) for row in finding.rows] for i, name in enumerate(finding.columns)}
    st.dataframe(columns, hide_index=True, height=min(38 + 35 * len(finding.rows), 420), key=key)


def _title(finding: Any) -> str:
    return finding.title + ("" if finding.passed is None else ": passed" if finding.passed else ": FAILED")


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else cell(value)

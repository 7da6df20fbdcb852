"""The page made from the catalog: every analysis with its options, of A and, beside it, of B."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import streamlit as st

from t2lens.analysis.catalog import ANALYSES, Analysis, Option
from t2lens.apps.components.picture import picture
from t2lens.apps.export import export_menu, finding_downloads, stem, theme
from t2lens.apps.frame import Frame, Page, Refusal, Side
from t2lens.apps.snippets import analysis_code
from t2lens.apps.state import OVER, PROMPT_LIMIT, one_of, passages, quote, text
from t2lens.apps.words import tell
from t2lens.text import is_text
from t2lens.viz.findings import cell
from t2lens.viz.pictures import picture_of

__all__ = ["PAGE"]


def analyses(frame: Frame) -> None:
    entry, options, n = _controls(frame.first)
    made = []
    for side in frame.sides:
        try:
            with st.spinner("Running ...", show_time=True):
                made.append((side, side.analyse(entry.key, options, passages=n)))
        except Refusal as error:  # what this model cannot give, the other one may
            tell([str(error)])
    if not made:
        return
    sides, findings = zip(*made, strict=True)
    _show(findings, sides, key=f"finding-{entry.key}")
    code = "\n\n".join(analysis_code(side, entry.key, options, passages=n) for side in sides)
    with frame.tools:
        own = stem(entry.key, *(side.loaded.name for side in sides))
        files = finding_downloads(findings, [side.name for side in sides], stem=own, code=code, look=theme())
        export_menu(files, code=code, key="export")


def _controls(first: bool) -> tuple[Analysis, dict[str, Any], int]:
    titles = {entry.key: f"{entry.group}: {entry.title}" for entry in ANALYSES}
    left, right = st.columns([2.6, 10])
    key = left.selectbox("Analysis", list(titles), format_func=titles.__getitem__, key="analysis")
    entry = next(each for each in ANALYSES if each.key == key)
    asked, untaken = _options(entry, st.session_state["analysis_options"])
    tell(untaken if first else [])  # later they may be those of the analysis before
    options: dict[str, Any] = {}
    n = 0
    with right.form(f"form-{entry.key}", border=False):
        shown = [*entry.options, *([None] if entry.texts else [])]
        for i in range(0, len(shown), 5):
            for option, column in zip(shown[i : i + 5], st.columns(5, vertical_alignment="bottom"), strict=False):
                if option is None:
                    n = passages(
                        column.selectbox("over", list(OVER), format_func=OVER.__getitem__, key="analysis_over")
                    )
                else:
                    options[option.name] = _widget(column, option, entry, asked.get(option.name))
        st.form_submit_button("Run with these", type="secondary")
    st.caption(entry.what)
    chosen = {name: value for name, value in options.items() if value not in (None, "")}
    plain = {option.name: option.default for option in entry.options}
    changed = {name: value for name, value in chosen.items() if value != plain[name]}
    st.session_state["analysis_options"] = json.dumps(changed) if changed else ""
    return entry, chosen, n


def _options(entry: Analysis, written: str) -> tuple[dict[str, Any], list[str]]:
    """The options of a link that this analysis can take, and a sentence for each that it cannot.

    >>> _options(ANALYSES[0], '{"pos": 3, "by": "word"}')
    ({'pos': 3}, ["The link asks for the option 'by' = 'word', which this analysis cannot take; its default holds."])
    """
    try:
        read = json.loads(written or "{}")
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        return {}, ["The options of the link are no JSON object; the defaults hold."]
    known = {option.name: option for option in entry.options}
    good = {name: value for name, value in read.items() if name in known and _fits(known[name], value)}
    return good, [
        f"The link asks for the option {quote(name)} = {quote(value)}, which this analysis cannot take; its default "
        "holds."
        for name, value in read.items()
        if name not in good
    ][:5]


def _fits(option: Option, value: Any) -> bool:
    """Whether a value from outside is one that the widget of this option can show."""
    if option.kind == "flag":
        return type(value) is bool
    if option.kind == "choice":
        return value in option.choices
    if option.kind == "position":
        return type(value) is int and abs(value) <= FARTHEST
    if option.kind == "count":
        return type(value) is int and 0 <= value <= option.most
    if option.kind == "number":
        return type(value) in (int, float) and abs(value) <= FARTHEST  # which NaN is not
    return isinstance(value, str) and len(value) <= PROMPT_LIMIT and is_text(value)


FARTHEST = 1_000_000
"""Beyond any position and any temperature."""


def _widget(column: Any, option: Option, entry: Analysis, asked: Any) -> Any:
    label, key = option.name.replace("_", " "), f"{entry.key}-{option.name}"
    value = option.default if asked is None else asked
    if option.kind == "flag":
        return column.checkbox(label, value=value is True, help=option.help, key=key)
    if option.kind == "choice":
        at = option.choices.index(value) if value in option.choices else 0
        return column.selectbox(label, option.choices, index=at, help=option.help, key=key)
    if option.kind in ("position", "count"):
        low, high = (0, option.most) if option.kind == "count" else (-FARTHEST, FARTHEST)
        return column.number_input(label, low, high, value, step=1, help=option.help, key=key)
    if option.kind == "number":
        number, high = None if value is None else float(value), float(FARTHEST)
        return column.number_input(label, -high, high, number, help=option.help, key=key, format="%g")
    return column.text_input(label, value=value or "", max_chars=PROMPT_LIMIT, help=option.help, key=key)


# --- a finding -------------------------------------------------------------------------------------------------------


def _show(findings: Sequence[Any], sides: Sequence[Side], *, key: str) -> None:
    """Title, pictures, table and notes of a finding, or of the same analysis of two models side by side."""
    titles = [_title(each) for each in findings]
    if len(set(titles)) > 1:  # each model follows a token of its own, or passes where the other fails
        titles = [f"{side.letter}  {title}" for side, title in zip(sides, titles, strict=True)]
    for title in dict.fromkeys(titles):
        st.text(title)
    charts = max(len(each.charts) for each in findings)
    difference = len(findings) > 1 and bool(charts) and st.checkbox("B \u2212 A", key=f"{key}-difference")
    alone = len(findings) == 1 and charts > 1  # two pictures of one finding fit beside each other
    names = [side.name for side in sides]
    for first in range(0, charts, 2 if alone else 1):
        places = st.columns(2, gap="large") if alone else [st.container()]
        for place, chart in zip(places, range(first, charts), strict=False):
            svg = picture_of(findings, chart, names, difference=difference, theme=theme(), width=620)
            with place:
                picture(svg, key=f"{key}-{chart}")
    for side, place, each in zip(sides, st.columns(len(findings), gap="large"), findings, strict=True):
        with place:
            if len(findings) > 1:
                st.text(side.head)
            _table(each, key=f"{key}-table-{side.letter}")
            for note in each.notes:
                st.text(f"\u2013 {note}")


def _table(finding: Any, *, key: str) -> None:
    columns = {name: _column([row[i] for row in finding.rows]) for i, name in enumerate(finding.columns)}
    st.dataframe(columns, hide_index=True, height=min(38 + 35 * len(finding.rows), 420), key=key)


def _title(finding: Any) -> str:
    return finding.title + ("" if finding.passed is None else ": passed" if finding.passed else ": FAILED")


def _column(values: Sequence[Any]) -> list[Any]:
    """A column of a table: numbers stay numbers, so that it sorts, and one that is not there is nothing; where a word
    is among them all of them are words."""
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
        return list(values)
    return [cell(value) for value in values]


PAGE = Page(
    path="analyses",
    title="Analyses",
    draw=analyses,
    parameters=(
        one_of("analysis", [entry.key for entry in ANALYSES], "logits"),
        text("analysis_options", limit=2000),
        one_of("analysis_over", list(OVER), "prompt"),
    ),
)

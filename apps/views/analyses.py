"""The page made from the catalog: every analysis with its options, of A and, beside it, of B."""

from __future__ import annotations

import json
from typing import Any

import streamlit as st

from t2lens.analysis.catalog import ANALYSES, Analysis, Option
from t2lens.apps.frame import Frame, Page, Refusal, Side
from t2lens.apps.header import tell
from t2lens.apps.state import PROMPT_LIMIT, one_of, text
from t2lens.viz.findings import cell, figure

__all__ = ["ANALYSES_PAGE"]

GROUPS = {
    "attribution": "what each write contributed to a prediction",
    "routes": "which routes through depth matter, and what moves them",
    "gates": "what the gates of Deep Delta Learning do",
}
RUN_ON = {"8 bundled passages": 8, "all 32 bundled passages": 32, "the prompt": 0}
"""What an analysis over texts runs on, and how many passages that is."""


def analyses(frame: Frame) -> None:
    entry, options, passages = _controls()
    places = st.columns(len(frame.sides), gap="large")
    for side, place in zip(frame.sides, places, strict=True):
        with place:
            st.markdown(f"**{side.letter}** {side.name}")
            try:
                with st.spinner("Running ...", show_time=True):
                    finding = side.analyse(entry.key, options, passages=passages)
            except Refusal as error:  # what this model cannot give, the other one may
                tell([str(error)])
                continue
            _show(finding, entry, side, options, passages)


def _controls() -> tuple[Analysis, dict[str, Any], int]:
    titles = {entry.key: f"{entry.group}: {entry.title}" for entry in ANALYSES}
    left, right = st.columns([2.6, 10])
    key = left.selectbox("Analysis", list(titles), format_func=titles.__getitem__, key="analysis")
    entry = next(each for each in ANALYSES if each.key == key)
    asked = _options(st.session_state["options"])
    options: dict[str, Any] = {}
    passages = 0
    with right.form(f"form-{entry.key}", border=False):
        shown = [*entry.options, *([None] if entry.texts else [])]
        for i in range(0, len(shown), 5):
            for option, column in zip(shown[i : i + 5], st.columns(5, vertical_alignment="bottom"), strict=False):
                if option is None:
                    passages = RUN_ON[column.selectbox("run on", list(RUN_ON), key="texts")]
                else:
                    options[option.name] = _widget(column, option, entry, asked.get(option.name))
        st.form_submit_button("Run with these", type="secondary")
    st.caption(entry.what)
    chosen = {name: value for name, value in options.items() if value not in (None, "")}
    plain = {option.name: option.default for option in entry.options}
    changed = {name: value for name, value in chosen.items() if value != plain[name]}
    st.session_state["options"] = json.dumps(changed) if changed else ""
    return entry, chosen, passages


def _options(written: str) -> dict[str, Any]:
    """The options of a link; nothing where they are no object."""
    try:
        read = json.loads(written or "{}")
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _widget(column: Any, option: Option, entry: Analysis, asked: Any) -> Any:
    label, key = option.name.replace("_", " "), f"{entry.key}-{option.name}"
    value = option.default if asked is None else asked
    if option.kind == "flag":
        return column.checkbox(label, value=value is True, help=option.help, key=key)
    if option.kind == "choice":
        at = option.choices.index(value) if value in option.choices else 0
        return column.selectbox(label, option.choices, index=at, help=option.help, key=key)
    number = value if type(value) in (int, float) else option.default
    if option.kind in ("position", "count"):
        whole = None if number is None else int(number)
        return column.number_input(label, value=whole, step=1, help=option.help, key=key)
    if option.kind == "number":
        return column.number_input(label, value=number, help=option.help, key=key, format="%g")
    said = value if isinstance(value, str) else ""
    return column.text_input(label, value=said, max_chars=PROMPT_LIMIT, help=option.help, key=key)


def _show(finding: Any, entry: Analysis, side: Side, options: dict[str, Any], passages: int) -> None:
    verdict = "" if finding.passed is None else ": passed" if finding.passed else ": FAILED"
    with st.container(key=f"finding-{side.letter}"):
        st.text(finding.title + verdict)
    for j in range(len(finding.charts)):
        drawn = figure(finding, j)
        st.plotly_chart(drawn, key=f"chart-{side.letter}-{j}", theme=None, config={"displaylogo": False})
    columns = {name: [_plain(row[i]) for row in finding.rows] for i, name in enumerate(finding.columns)}
    st.dataframe(columns, hide_index=True, height=min(38 + 35 * len(finding.rows), 420), key=f"table-{side.letter}")
    for note in finding.notes:
        st.text(f"\u2013 {note}")
    module, function = entry.function.split(":")
    asked = f"sample_texts({passages})" if passages else repr(side.prompt)
    more = "\nfrom t2lens.zoo.text import sample_texts" if passages else ""
    chosen = "".join(f", {key}={value!r}" for key, value in options.items())
    with st.expander("In Python and as data"):
        st.code(
            f"import t2lens\nfrom {module} import {function}{more}\n\n"
            f"finding = {function}(t2lens.load({side.loaded.name!r}), {asked}{chosen})\nfinding.dataset",
            language="python",
        )
        name = f"{entry.key}-{side.loaded.name}.json"
        st.download_button("All numbers (JSON)", finding.to_json(), name, "application/json", key=f"json-{side.letter}")


def _plain(value: Any) -> Any:
    """An entry of the table: numbers stay numbers, so that a column sorts."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else cell(value)


ANALYSES_PAGE = Page(
    path="analyses",
    title="Analyses",
    draw=analyses,
    parameters=(
        one_of("analysis", [entry.key for entry in ANALYSES], "logits"),
        text("options", limit=2000),
        one_of("texts", list(RUN_ON), next(iter(RUN_ON))),
    ),
)

"""The pages made from the catalog of analyses: one page per group, and on it one analysis of one model at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from t2lens.analysis.catalog import ANALYSES, Analysis, Option
from t2lens.apps import loaders
from t2lens.apps.header import header, tell
from t2lens.apps.state import PROMPT_LIMIT, limit_prompt, parse_analysis
from t2lens.apps.views.two_axes import preset
from t2lens.viz.findings import cell, figure

__all__ = ["GROUPS", "page"]

GROUPS = {
    "attribution": "what each write contributed to a prediction",
    "routes": "which routes through depth matter, and what moves them",
    "gates": "what the gates of Deep Delta Learning do",
}
RUN_ON = {"8 bundled passages": 8, "all 32 bundled passages": 32, "this prompt": 0}
"""What an analysis over texts runs on, and how many passages that is."""


def page(group: str) -> Callable[[], None]:
    """The function of one page, for st.Page."""

    def show() -> None:
        header()
        names, entries = loaders.model_names(), [entry for entry in ANALYSES if entry.group == group]
        if not names:
            tell(["No trained model is bundled with this installation: train one with t2lens train."])
            return
        notices = _read_url(group, names, entries)
        entry, options = _controls(group, names, entries)
        prompt, cut = limit_prompt(st.session_state["prompt"])
        _write_url(entry, prompt)
        tell([*notices, *cut])
        passages = RUN_ON[st.session_state["texts"]] if entry.texts else 0
        if not passages and not prompt.strip():
            tell(["The prompt is empty: type a few words and press Run."])
            return
        try:
            with st.spinner("Running ...", show_time=True):
                loaded = loaders.load(st.session_state["model"])
                finding = loaders.analyse(loaded, entry.key, passages or prompt, options)
        except (ValueError, KeyError) as error:  # a sentence for the reader: what this model or prompt cannot give
            tell([str(error.args[0]) if error.args else str(error)])
            return
        _show(finding, entry, passages or prompt, options)

    show.__name__ = group
    return show


def _read_url(group: str, names: list[str], entries: list[Analysis]) -> list[str]:
    """The first run of a session on this page takes its state from the URL; a notice for what it asked in vain."""
    state, notices = st.session_state, []
    if state.get("group") != group:
        asked = {key: st.query_params[key] for key in st.query_params}
        own = next((e for e in entries if state.get(f"analysis-{group}") == e.key), entries[0])
        selection, notices = parse_analysis(
            asked,
            model=_model_for(own, names),
            prompt=state.get("prompt", preset(names).prompt),
            analysis=own.key,
            models=names,
            analyses=[entry.key for entry in entries],
        )
        state["model"], state["prompt"], state[f"analysis-{group}"] = selection
        state["group"] = group
    return notices


def _model_for(entry: Analysis, names: list[str]) -> str:
    """The model to begin with: that of the last analysis or of the maps, where this one is for its kind of system."""
    state, first = st.session_state, preset(names)
    chosen = [state.get("model"), state.get("model_a", first.model_a), state.get("model_b", first.model_b), *names]
    for name in (name for name in dict.fromkeys(chosen) if name in names):
        if not entry.systems or loaders.load(name).model.cfg.residual.kind in entry.systems:
            return name
    return first.model_a


def _controls(group: str, names: list[str], entries: list[Analysis]) -> tuple[Analysis, dict[str, Any]]:
    left, middle, right = st.columns([2, 2.6, 8])
    left.selectbox("Model", names, key="model")
    titles = {entry.key: entry.title for entry in entries}
    key = middle.selectbox("Analysis", list(titles), format_func=titles.__getitem__, key=f"analysis-{group}")
    entry = next(each for each in entries if each.key == key)
    options: dict[str, Any] = {}
    with right.form(f"form-{entry.key}", border=False):
        text, run = st.columns([9, 1.2], vertical_alignment="bottom")
        text.text_area("Prompt", key="prompt", height=68, max_chars=PROMPT_LIMIT)
        run.form_submit_button("Run", type="primary", width="stretch")
        shown = [*entry.options, *([None] if entry.texts else [])]
        for i in range(0, len(shown), 5):
            for option, column in zip(shown[i : i + 5], st.columns(5, vertical_alignment="bottom"), strict=False):
                if option is None:
                    column.selectbox("run on", list(RUN_ON), key="texts")
                else:
                    options[option.name] = _widget(column, option, entry)
    st.caption(entry.what)
    return entry, {name: value for name, value in options.items() if value not in (None, "")}


def _widget(column: Any, option: Option, entry: Analysis) -> Any:
    label, key = option.name.replace("_", " "), f"{entry.key}-{option.name}"
    if option.kind == "flag":
        return column.checkbox(label, value=bool(option.default), help=option.help, key=key)
    if option.kind == "choice":
        at = option.choices.index(option.default) if option.default in option.choices else 0
        return column.selectbox(label, option.choices, index=at, help=option.help, key=key)
    if option.kind in ("position", "count"):
        return column.number_input(label, value=option.default, step=1, help=option.help, key=key)
    if option.kind == "number":
        return column.number_input(label, value=option.default, help=option.help, key=key, format="%g")
    return column.text_input(label, value=option.default or "", max_chars=PROMPT_LIMIT, help=option.help, key=key)


def _write_url(entry: Analysis, prompt: str) -> None:
    wanted = {"a": st.session_state["model"], "prompt": prompt, "analysis": entry.key}
    if {key: st.query_params[key] for key in st.query_params} != wanted:
        st.query_params.from_dict(wanted)


def _show(finding: Any, entry: Analysis, given: str | int, options: dict[str, Any]) -> None:
    verdict = "" if finding.passed is None else ": passed" if finding.passed else ": FAILED"
    with st.container(key="finding"):
        st.text(finding.title + verdict)
    for i in range(0, len(finding.charts), 2):
        for j, place in zip(range(i, min(i + 2, len(finding.charts))), st.columns(2, gap="medium"), strict=False):
            drawn = figure(finding, j)
            place.plotly_chart(drawn, key=f"chart-{j}", theme=None, config={"displaylogo": False})
    columns = {name: [_plain(row[i]) for row in finding.rows] for i, name in enumerate(finding.columns)}
    st.dataframe(columns, hide_index=True, height=min(38 + 35 * len(finding.rows), 420))
    for note in finding.notes:
        st.text(f"\u2013 {note}")
    name, module, function = st.session_state["model"], *entry.function.split(":")
    texts = isinstance(given, int)
    asked = f"sample_texts({given})" if texts else repr(given)
    more = "\nfrom t2lens.zoo.text import sample_texts" if texts else ""
    chosen = "".join(f", {key}={value!r}" for key, value in options.items())
    with st.expander("In Python and as data"):
        st.code(
            f"import t2lens\nfrom {module} import {function}{more}\n\n"
            f"finding = {function}(t2lens.load({name!r}), {asked}{chosen})\nfinding.dataset",
            language="python",
        )
        st.download_button("All numbers (JSON)", finding.to_json(), f"{entry.key}-{name}.json", "application/json")


def _plain(value: Any) -> Any:
    """An entry of the table: numbers stay numbers, so that a column sorts."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else cell(value)

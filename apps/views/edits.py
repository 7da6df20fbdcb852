"""The page of edits: build, list, mute, reorder and share them, and see at once what they change."""

from __future__ import annotations

import functools
from typing import Any

import streamlit as st

from t2lens.analysis.finding import Finding
from t2lens.apps import loaders
from t2lens.apps.components.picture import picture
from t2lens.apps.edit_form import DRAFT, build, draft_told, from_node, refill
from t2lens.apps.edits import (
    act,
    acting,
    can_undo,
    edit_of,
    entries,
    listed_now,
    muted,
    put,
    refused,
    sentence,
    toggle,
    undo,
    written,
)
from t2lens.apps.export import Download, export_menu, figures, stem, theme
from t2lens.apps.frame import Frame, Page, Side
from t2lens.apps.nodes import fit, move, nearest, places
from t2lens.apps.snippets import change_code, trace_code
from t2lens.apps.state import PROMPT_LIMIT, Cell, whole
from t2lens.apps.words import plain, tell, why
from t2lens.edits import edits_to_json, read_edits
from t2lens.edits.presets import presets
from t2lens.model import Transformer
from t2lens.viz.change import kl_strip, next_tokens
from t2lens.viz.labels import glyphs

__all__ = ["PAGE"]

ROWS = 12
"""Edits that the list shows at a time."""

LAST = 1000
TURN = whole("edits_page", 1, 1, LAST)
"""Which of its pages."""


def editing(frame: Frame) -> None:
    side = frame.sides[0]
    if fit(frame).panel:  # edits are of A: the same place there
        pos = places(frame)[0]
        move(panel=0, pos=nearest(frame, side) if pos is None else pos)
        fit(frame)
    if frame.first:
        refill(st.session_state[DRAFT.key])
    left, right = st.columns([1.08, 1], gap="large")
    with left:
        _builder(side.loaded.model, side.tokens)
        _listed(side.loaded.model)
    with right:
        pictures, finding = _effect(side)
    _as_json()
    with frame.tools:
        _export(side, pictures, finding)


# --- building --------------------------------------------------------------------------------------------------------


def _builder(model: Transformer, tokens: list[str]) -> None:
    cell: Cell = st.session_state["cell"]
    with st.container(key="builder"):
        title, node = st.columns([2.2, 1.2], vertical_alignment="center")
        title.markdown("**Build an edit of A**")
        words = f"At the node {cell.site}, {glyphs(tokens[cell.pos])}"
        node.button(
            words, key="from-node", on_click=from_node, args=(cell,), width="stretch", help="Its site, its position"
        )
        try:
            edit = build(model, tokens, cell)
            tell(draft_told())
            told = edit.check(model)
        except (ValueError, TypeError, KeyError) as error:
            tell(draft_told())
            with st.container(key="edit-sentence"):
                st.text(f"Not yet: {why(error)}")
            st.button("Add", key="add-edit", disabled=True, type="primary")
            return
        with st.container(key="edit-sentence"):
            st.text(edit.describe())
            for each in told:
                st.caption(plain(each))
        st.button("Add", key="add-edit", on_click=_act, args=("add", 0, edit.to_dict()), type="primary")


def _act(what: str, i: int = 0, value: Any = None) -> None:
    act(what, i, value)
    if what == "add" and "edits_refused" not in st.session_state:
        st.session_state[TURN.key] = LAST  # where it stands


# --- the list --------------------------------------------------------------------------------------------------------


def _listed(model: Transformer) -> None:
    listed = listed_now()
    tell(refused())
    with st.container(key="edit-list"):
        n = acting(listed)
        title, every, back = st.columns([2.2, 0.8, 0.6], vertical_alignment="center")
        title.markdown(f"**Edits of A**: {n} of {len(listed)} act, in this order" if listed else "**Edits of A**: none")
        silent = bool(listed) and not n
        every.button(
            "Unmute all" if silent else "Mute all",
            key="mute-all",
            on_click=_act,
            args=("mute_all", 0, not silent),
            disabled=not listed,
            width="stretch",
        )
        back.button("Undo", key="undo", on_click=undo, disabled=not can_undo(), width="stretch")
        start = _page(len(listed))
        for i, each in enumerate(listed[start : start + ROWS], start):
            _one(model, i, each, len(listed))
    cell: Cell = st.session_state["cell"]
    found = presets(model, cell.site)
    st.caption("To try, at the chosen node or as near to it as there is one:")
    with st.container(key="presets", horizontal=True, gap="small"):
        for words, edit in found.items():
            help_ = plain(edit.describe())
            st.button(
                words,
                key=f"preset-{words}",
                on_click=_act,
                args=("add", 0, edit.to_dict()),
                help=help_,
            )


def _page(n: int) -> int:
    """The first row to be shown; where there are more than a page of them, the control that turns pages."""
    state, pages = st.session_state, max(1, -(-n // ROWS))
    state[TURN.key] = min(state[TURN.key], pages)
    if pages == 1:
        return 0
    words, turn = st.columns([2.6, 1], vertical_alignment="center")
    start = ROWS * (state[TURN.key] - 1)
    words.text(f"Shown are the edits {start + 1} to {min(start + ROWS, n)} of {n}; all of them hold.")
    turn.number_input("Page of the list", 1, pages, key=TURN.key, label_visibility="collapsed")
    return start


def _one(model: Transformer, i: int, entry: dict[str, Any], n: int) -> None:
    acts, words, moves = st.columns([0.35, 5, 1.9], vertical_alignment="center")
    key = f"acts-{i}"
    st.session_state[key] = not muted(entry)
    acts.checkbox(
        "acts", key=key, label_visibility="collapsed", on_change=toggle, args=(i, key), help="acts, or is muted"
    )
    with words:
        st.text(f"{i + 1}. {sentence(entry)}")
        try:
            edit_of(entry).check(model)
        except (ValueError, TypeError, KeyError) as error:
            st.caption(f":red[{plain(f'Not in this model: {why(error)}')}]")
    with moves.container(key=f"moves-{i}", horizontal=True, gap=None, horizontal_alignment="right"):
        for what, icon, help_, off in (
            ("up", "keyboard_arrow_up", "earlier", i == 0),
            ("down", "keyboard_arrow_down", "later", i == n - 1),
            ("double", "content_copy", "once more", False),
            ("remove", "close", "remove", False),
        ):
            st.button(
                "",
                key=f"{what}-{i}",
                icon=f":material/{icon}:",
                on_click=_act,
                args=(what, i),
                disabled=off,
                type="tertiary",
                help=f"{help_}: edit {i + 1}",
            )


# --- what they change ------------------------------------------------------------------------------------------------


def _effect(side: Side) -> tuple[list[Download], Finding | None]:
    """Pictures and sentences; returns what of them can be taken home."""
    cell: Cell = st.session_state["cell"]
    with st.container(key="edit-effect"):
        st.markdown("**What they change**: A edited, against A as it is")
        if not side.edits:
            st.caption("No edit acts: add one, or try one of those below the list.")
            return [], None
        try:
            with st.spinner("Running both ...", show_time=True):
                finding = loaders.edit_change(side.loaded, side.prompt, side.edits, cell.pos)
        except (ValueError, TypeError, KeyError) as error:
            tell([str(side.refusal(why(error)))])
            return [], None
        look = theme()
        files: list[Download] = []
        for key, words, draw, panel in (
            ("edit-next", "next tokens", next_tokens, None),
            ("edit-kl", "KL by position", kl_strip, 0),
        ):
            svg = functools.partial(draw, finding, theme=look)
            picture(svg(), key=key, panel=panel)
            files += figures(words, stem(key, side.loaded.name), svg)
        for note in (*finding.notes[: 2 if len(finding.notes) > 1 else 1], *_told(finding, side)):
            st.text(note)
    return files, finding


def _told(finding: Finding, side: Side) -> list[str]:
    """What the reader of the edited numbers must know, without the sentences of the list."""
    said = [edit.describe() for edit in read_edits(side.edits)]
    return [each for each in finding.notes[1:] if each not in said and not each.startswith("Loss on the prompt")]


# --- to take along ---------------------------------------------------------------------------------------------------


def _export(side: Side, pictures: list[Download], finding: Finding | None) -> None:
    own = stem("edits", side.loaded.name)
    files = list(pictures)
    if finding is not None:
        files.append(Download("Numbers (CSV)", f"{own}-change.csv", finding.to_csv))
        files.append(Download("Numbers (JSON)", f"{own}-change.json", finding.to_json))
    try:
        text = edits_to_json(side.edits or ())
        files.append(Download("Edits that act (JSON)", f"{own}.json", text.encode))
        code = change_code(side, st.session_state["cell"].pos) if finding is not None else trace_code(side)
    except (ValueError, TypeError) as error:
        code = "\n".join(f"# {line}" for line in str(error).splitlines())
    export_menu(files, code=code, key="edits-export")


def _as_json() -> None:
    state = st.session_state
    with st.expander("As JSON: edit, import, take along", expanded=False):
        with st.form("json-form", border=False):
            state["edits_json"] = state["edits"]
            st.text_area("Edits of A as JSON", key="edits_json", height=170, max_chars=PROMPT_LIMIT)
            st.form_submit_button("Apply", on_click=_apply)
        st.file_uploader(
            f"A file of edits (.json, at most {PROMPT_LIMIT:,} bytes)",
            type=["json"],
            key="edits_file",
            on_change=_imported,
            max_upload_size=1,
        )


def _apply() -> None:
    _take(st.session_state["edits_json"])


def _imported() -> None:
    file = st.session_state["edits_file"]
    if file is None:
        return
    if file.size > PROMPT_LIMIT:
        st.session_state["edits_refused"] = (
            f"The file has {file.size:,} bytes; a list of edits has at most {PROMPT_LIMIT:,}."
        )
        return
    try:
        text = file.getvalue().decode("utf-8-sig")  # a mark at the beginning is no part of the text
    except UnicodeDecodeError:
        st.session_state["edits_refused"] = "The file is no text, so it holds no edits."
        return
    _take(text)


def _take(text: str) -> None:
    """The list of a text, where every entry is an edit; else a sentence, and nothing is changed."""
    try:
        listed = entries(text)
        for i, each in enumerate(listed):
            try:
                edit_of(each)
            except (ValueError, TypeError) as error:
                raise ValueError(f"Edit {i + 1}: {error}") from None
        put(written(listed))
    except ValueError as error:
        st.session_state["edits_refused"] = str(error)


PAGE = Page(path="edits", title="Edits", draw=editing, parameters=(DRAFT, TURN))

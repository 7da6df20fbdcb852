"""The page of models: what each of them is, how good it is, whether its checks hold, and the way to bring another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

import t2lens
from t2lens.apps import loaders
from t2lens.apps.frame import Frame, Page
from t2lens.apps.header import verdict
from t2lens.apps.uploads import AT_ONCE, LIMIT_MB, keep_files
from t2lens.apps.words import plain, tell
from t2lens.zoo.explanations import Explanation, explain

__all__ = ["PAGE"]

HERE = ("127.0.0.1", "localhost", "::1")


def models(frame: Frame) -> None:  # noqa: ARG001 - every page is given one
    state = st.session_state
    if refused := state.pop("model_refused", ""):
        tell([refused])
    bundled = {info.name: info for info in t2lens.list_models()}
    names = loaders.model_names()
    shown, more = st.columns([2.5, 1], gap="large")
    with shown:
        st.markdown("**Models**: one prompt goes through any two of them, as A and B. Tick one to read what it is.")
        if state.get("model_shown") not in names:
            state["model_shown"] = state["model_a"] if state["model_a"] in names else names[0]
        _table(names, bundled)
        _card(state["model_shown"], bundled)
    with more:
        _bring()


# --- the table -------------------------------------------------------------------------------------------------------


def _table(names: list[str], bundled: dict[str, Any]) -> None:
    """All models, one line each; a click on a line shows the model below."""
    rows: list[dict[str, Any]] = []
    for name in names:
        info = bundled.get(name)
        rows.append(
            {
                "model": name,
                "system": info.system if info else "brought by you" if name in loaders.own_models() else "added",
                "loss": info.validation_loss if info else None,
                "below bigrams": info.bigram_loss - info.validation_loss if info else None,
                "parameters": info.n_params if info else None,
            }
        )
    config = {
        "model": st.column_config.TextColumn(width="small"),
        "system": st.column_config.TextColumn(width="medium"),
        "loss": st.column_config.NumberColumn(
            "loss (nats)", format="%.4f", help="Loss per token, on text that was not trained on."
        ),
        "below bigrams": st.column_config.NumberColumn(
            "below bigrams", format="%.4f", help="How far under the loss of bigram counts, on the same text."
        ),
        "parameters": st.column_config.NumberColumn(format="localized"),
    }
    chosen: Any = st.dataframe(
        rows,
        hide_index=True,
        row_height=32,
        height=34 + 32 * min(len(rows), 9),
        column_config=config,
        key="model_rows",
        on_select="rerun",
        selection_mode="single-row",
    )
    if picked := [i for i in chosen.selection.rows if i < len(names)]:
        st.session_state["model_shown"] = names[picked[0]]


# --- one model -------------------------------------------------------------------------------------------------------


def _card(name: str, bundled: dict[str, Any]) -> None:
    info = bundled.get(name)
    with st.container(border=True, key="model-card"):
        try:
            with st.spinner(f"Loading and checking {name} ...", show_time=True):
                loaded = loaders.load(name)
                verified = loaders.verification(loaded)
        except (ValueError, OSError, TypeError, RuntimeError, MemoryError) as error:
            tell([str(error)])
            _drop(name)
            return
        cfg = loaded.model.cfg
        title, a, b = st.columns([3, 1, 1], vertical_alignment="center")
        with title:
            st.subheader(name, anchor=False)
            st.caption(plain(info.system if info else cfg.residual.describe()))
        for place, letter in ((a, "a"), (b, "b")):
            key = f"model_{letter}"
            chosen = st.session_state[key] == name
            label = f"{'Is' if chosen else 'Use as'} {letter.upper()}"
            place.button(label, key=f"use-{letter}", on_click=_use, args=(key, name), disabled=chosen, width="stretch")
        main, *others = explain(cfg)
        _explanation(main)
        for each in others:
            st.markdown(f"... with **{each.title}**")
            _explanation(each)
        _numbers(loaded, info)
        with st.expander(f"{verdict(verified)} checks of t2lens.verify"):
            st.dataframe(
                {
                    "check": [check.name for check in verified],
                    "found": [f"{check.value:.2e}" for check in verified],
                    "limit": [f"{'>=' if check.at_least else '<='} {check.limit:.0e}" for check in verified],
                    "": ["pass" if check.passed else "FAIL" for check in verified],
                    "meaning": [check.meaning for check in verified],
                },
                hide_index=True,
                key="model-checks",
            )
            for each in verified.skipped:
                st.text(f"skipped: {each}")
        _drop(name)


def _explanation(each: Explanation) -> None:
    st.markdown(f"$$\n{each.equation}\n$$")
    said = f"[{each.paper}]({each.link})" if each.link else each.paper
    where = f" {said}{', ' + each.section if each.section else ''}." if said else ""
    st.markdown(f"{each.words}{where}")


def _numbers(loaded: loaders.Loaded, info: Any) -> None:
    cfg, model = loaded.model.cfg, loaded.model
    lines = [
        f"{cfg.n_layers} blocks, width {cfg.d_model}, vocabulary {cfg.d_vocab:,}, context {cfg.n_ctx}; "
        f"{model.n_params:,} parameters."
    ]
    if info is not None:
        lines.append(
            f"Trained on {info.tokens:,} tokens (seed {info.seed}). Held-out loss {info.validation_loss:.4f} nats per "
            f"token, {info.bigram_loss - info.validation_loss:.4f} below bigram counts ({info.bigram_loss:.4f})."
        )
    if (source := model.loaded_from) is not None:
        lines.append(f"Read as {source.family}.")
        lines += [f"Assumed: {sentence}" for sentence in source.assumed]
    what = "SHA-256 of the weights begins with" if info is not None else "Key of its files (names, sizes, times):"
    lines.append(f"{what} {loaded.weights_hash[:16]}.")
    for line in lines:
        st.text(line)


def _use(key: str, name: str) -> None:
    st.session_state[key] = name


def _drop(name: str) -> None:
    if name in loaders.own_models():
        st.button("Drop this model", key="drop-model", on_click=_dropped, args=(name,))


def _dropped(name: str) -> None:
    loaders.drop(name)
    state, left = st.session_state, loaders.model_names()
    for key, other in (("model_a", left[0]), ("model_b", "none")):
        if state[key] == name:
            state[key] = other
    state.pop("model_shown", None)


# --- bringing one ----------------------------------------------------------------------------------------------------


def _bring() -> None:
    state = st.session_state
    st.markdown("**Bring a model**")
    st.caption(
        "Only you see it, for as long as this visit lasts. Its checks run when it is loaded. A file that is too large "
        "is marked red, and nothing of it is sent."
    )
    turn = state.setdefault("upload_turn", 0)  # a new uploader forgets the bytes of the files before
    files = st.file_uploader(
        f"model.safetensors, config.json, tokenizer.json: at most {LIMIT_MB} MB each, {loaders.OWN_AT_ONCE} models of "
        f"yours and {AT_ONCE} of all visitors",
        accept_multiple_files=True,
        key=f"upload-{turn}",
        max_upload_size=LIMIT_MB,
    )
    if st.button("Load these files", key="load-upload", disabled=not files):
        with st.spinner("Checking and loading ...", show_time=True):
            _loaded(lambda: _uploaded(files))
        state["upload_turn"] = turn + 1
        st.rerun()
    if st.get_option("server.address") not in HERE:
        st.caption("A folder can be named where the dashboard serves its own machine alone.")
        return
    with st.form("folder-form", border=False, clear_on_submit=True):
        given = st.text_input("Or a folder on this machine", max_chars=1000, placeholder="/path/to/model")
        wanted = st.form_submit_button("Load the folder")
    if wanted and given.strip():
        with st.spinner("Loading ...", show_time=True):
            _loaded(lambda: _folder(given.strip()))
        st.rerun()


def _loaded(make: Any) -> None:
    """Bring a model and show it, or keep the sentence why not for the next run."""
    state = st.session_state
    try:
        state["model_shown"] = make()
        state.pop("model_rows", None)  # what was clicked before is no longer shown
    except (ValueError, OSError, TypeError, RuntimeError, MemoryError) as error:  # files of a stranger
        state["model_refused"] = str(error) or "The model cannot be loaded."


def _uploaded(files: Any) -> str:
    folder = keep_files(files)
    taken, n = loaders.model_names(), 1
    while f"uploaded-{n}" in taken:
        n += 1
    try:
        return loaders.bring(f"uploaded-{n}", str(folder.path), folder)
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        folder.remove()
        said = str(error).replace(f"{folder.path}/", "").replace(str(folder.path), "the upload")
        raise ValueError(said.splitlines()[0] if said else "The model cannot be loaded.") from None


def _folder(given: str) -> str:
    path = Path(given).expanduser()
    try:
        there = path.is_dir() or path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        there = False
    if not there:
        raise ValueError(f"There is no folder and no file {given!r} on this machine.")
    return loaders.bring(path.absolute().name, str(path))


PAGE = Page(path="models", title="Models", draw=models, bare=True)

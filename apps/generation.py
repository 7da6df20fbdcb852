"""Continue the prompt: the control that any page can offer, and what was written, token by token."""

from __future__ import annotations

import math
import re
from typing import Any

import streamlit as st

from t2lens.analysis.finding import Finding
from t2lens.apps.frame import Frame, Side
from t2lens.apps.snippets import generation_code
from t2lens.apps.state import Parameter, one_of, whole
from t2lens.apps.words import tell
from t2lens.apps.writing import Writing, chosen, stop, take_back, told_now
from t2lens.viz.labels import fmt, glyphs

__all__ = ["GENERATION", "continue_prompt", "is_writing", "options_of"]

MOST = 64
"""Tokens that are written at a time."""

HOTTEST = 5.0


def _temperature(given: str) -> float:
    if not re.fullmatch(r"\d{1,3}(\.\d{1,4})?", given, flags=re.ASCII) or not 0 < float(given) <= HOTTEST:
        raise ValueError(f"which is no temperature above 0 and up to {HOTTEST:g}")
    return float(given)


GENERATION = (
    whole("write_tokens", 20, 1, MOST),
    one_of("write_how", ("greedy", "sample"), "greedy"),
    Parameter(key="write_temperature", default=0.8, read=_temperature, write=lambda value: f"{value:g}"),
    whole("write_among", None, 1, 1_000_000),
    whole("write_seed", 0, 0, 999_999_999),
    one_of("write_by", ("A", "B"), "A"),
)
"""The choices of the control."""


def options_of(state: Any, side: Side) -> dict[str, Any]:
    """The options of `continue_text` that are chosen. Under edits every token is of a pass over the whole text, so that
    all edits can act."""
    options: dict[str, Any] = {"n": int(state["write_tokens"] or 1)}
    if state["write_how"] == "sample":
        options |= {"temperature": float(state["write_temperature"] or 1.0), "seed": int(state["write_seed"] or 0)}
        if state["write_among"]:
            options["top_k"] = int(state["write_among"])
    return {**options, "use_cache": False} if side.edits else options


def _how() -> None:
    """The widgets of the choices but `write_by`, under the keys of `GENERATION`."""
    state = st.session_state
    left, right = st.columns(2)
    left.number_input("New tokens", 1, MOST, key="write_tokens", step=1)
    right.selectbox("Take", ("greedy", "sample"), key="write_how", format_func=_WORDS.__getitem__)
    if state["write_how"] == "sample":
        one, two, three = st.columns(3)
        one.number_input("Temperature", 0.01, HOTTEST, key="write_temperature", step=0.1, format="%.2f")
        two.number_input("Among the likeliest", 1, 1_000_000, key="write_among", step=1, placeholder="all")
        three.number_input("Seed", 0, 999_999_999, key="write_seed", step=1)


_WORDS = {"greedy": "the likeliest token", "sample": "a random draw"}


def continue_prompt(frame: Frame) -> None:
    """The control "Continue" among the tools of a page. A press writes tokens of A or B into the prompt, one at a time;
    the page is drawn after each, so that its pictures are those of the text so far. A page whose links are to keep how
    adds `GENERATION` to its parameters."""
    state = st.session_state
    writing: Writing | None = state.get("writing")
    with frame.tools:
        if is_writing(state):
            st.button("Stop", key="stop-writing", on_click=stop, args=(state,), type="primary")
        else:
            with st.popover("Continue"):
                _control(frame)
    if writing is not None and told_now(state, writing):
        tell([_told(writing), *(writing.notices if not writing.going else [])])
    if notice := state.pop("cannot_write", ""):
        tell([notice])


def is_writing(state: Any) -> bool:
    """Whether the next token is on its way."""
    writing: Writing | None = state.get("writing")
    return writing is not None and writing.going


def _control(frame: Frame) -> None:
    state, letters = st.session_state, [side.letter for side in frame.sides]
    for each in GENERATION:  # a page need not have them in its links
        state.setdefault(each.key, each.default)
    names = {side.letter: f"{side.letter}, {side.name}" for side in frame.sides}
    if state["write_by"] not in letters:
        state["write_by"] = "A"
    st.selectbox("Who writes", letters, key="write_by", format_func=names.__getitem__)
    _how()
    side = next(each for each in frame.sides if each.letter == state["write_by"])
    begin, back = st.columns(2)
    begin.button("Write", key="write", on_click=_begin, args=(frame, side), type="primary", width="stretch")
    written = state.get("writing")
    back.button(
        "Take it back", key="take-back", on_click=take_back, args=(state,), disabled=written is None, width="stretch"
    )
    st.caption(
        f"Up to {MOST} tokens, until the context of {side.loaded.model.cfg.n_ctx} is full. Each token goes into the "
        "prompt, and the page is drawn anew: a full pass over the text so far, exact under every edit. A line says how "
        "far it is; when it is done, it stays as long as the last new token is the chosen one."
    )
    code = generation_code(side, options_of(state, side)) if written is None else written.code
    st.caption("In Python:" if written is None else "What was written, in Python:")
    st.code(code, language="python")


def _begin(frame: Frame, side: Side) -> None:
    """A callback: the continuation is made at once, and shown step by step from the next run on."""
    state = st.session_state
    try:
        finding = side.analyse("continuation", options_of(state, side))
        state["writing"] = _writing(side, finding, state, frame)
    except ValueError as error:  # a refusal, or ids that the tokenizer has no text for
        state["cannot_write"] = str(error)


def _writing(side: Side, finding: Finding, state: Any, frame: Frame) -> Writing:
    model = side.loaded.model
    before = model.to_tokens(side.prompt)[0].tolist()
    assert model.tokenizer is not None  # the dashboard takes no model without one
    ids = finding["id"].values.tolist()
    texts = [side.prompt + model.tokenizer.decode(ids[: k + 1]) for k in range(len(ids))]
    # what is half a character, or other tokens when it is read again, waits for the tokens that come after it
    steps = [k for k, text in enumerate(texts) if model.to_tokens(text)[0].tolist() == before + ids[: k + 1]]
    notices: list[str] = []
    if not steps or steps[-1] < len(ids) - 1:
        steps.append(len(ids) - 1)
        notices.append(
            "Read again as text, the end of what was written is other tokens than the model wrote; those are shown."
        )
    last = [len(before) + k for k in steps]
    if notices:
        last[-1] = min(model.to_tokens(texts[-1]).shape[1], model.cfg.n_ctx) - 1
    own = side.letter == "B" and frame.selection.prompt_b.strip()
    return Writing(
        panel=side.panel,
        key="prompt_b" if own else "prompt",
        prompt=state["prompt_b" if own else "prompt"],
        texts=tuple(texts[k] for k in steps),
        counts=tuple(k + 1 for k in steps),
        pos=tuple(last),
        finding=finding,
        said=f"{side.letter}, {side.name}",
        notices=(*notices, *(note for note in finding.notes if "context" in note)),
        code=generation_code(side, options_of(state, side)),
        chosen=chosen(state),
    )


def _told(writing: Writing) -> str:
    """How far it is, and the newest token, in one line."""
    data, n = writing.finding.dataset, writing.n_tokens
    if not n:
        return f"{writing.said} begins to write ..."
    i = min(n, data.sizes["new"]) - 1
    others = "  ".join(
        f"{glyphs(str(token))} {p:.2f}"
        for token, p in zip(data["top_token"].values[i], data["top_probability"].values[i], strict=True)
        if math.isfinite(p)
    )
    n, of = i + 1, data.sizes["new"]
    how_far = f"writes {n} of {of}" if writing.going else f"wrote {n} of {of}{' (stopped)' if n < of else ''}; the last"
    return (
        f"{writing.said} {how_far}: {glyphs(str(data['token'].values[i]))}  "
        f"p {fmt(float(data['probability'][i]), 3)}, rank {int(data['rank'][i])}, entropy "
        f"{float(data['entropy'][i]):.2f} nats; likeliest: {others}"
    )

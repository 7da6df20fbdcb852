"""The page of one prediction: what every read would predict, which writes make the logit, and how the text goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from t2lens.analysis.finding import Finding
from t2lens.apps.components.picture import picture
from t2lens.apps.export import Download, export_menu, figures, stem, theme
from t2lens.apps.followed import FOLLOW, View, told, views_of
from t2lens.apps.frame import Frame, Page, Refusal, Side
from t2lens.apps.generation import GENERATION, continue_prompt, is_writing, options_of
from t2lens.apps.nodes import move, places
from t2lens.apps.snippets import analysis_code, generation_code
from t2lens.apps.state import flag, one_of, text
from t2lens.apps.words import section, tell
from t2lens.viz.labels import glyphs
from t2lens.viz.lens_grid import LENS, by_depth, lens_grid, range_of, stream_grid, values_of, window
from t2lens.viz.new_tokens import first_difference, new_tokens_picture
from t2lens.viz.shares import (
    EFFECTS,
    effects_in,
    path_strips,
    range_of_bars,
    share_and_effect,
    share_bars,
    shares_of,
)

__all__ = ["PAGE"]

COLUMNS, PATHS, WIDTH = 13, 10, 676
"""Positions that the grid shows, paths that are listed, pixels of a picture: two stand side by side at 1440."""

OF = {"share": "the logit", "share_above_mean": "the logit above the mean token"}
BY = {"atom": "atoms", "head": "heads"}


@dataclass
class _Drawn:
    """What the page shows, to take home: pictures by name, and findings with how they were asked for."""

    pictures: dict[str, str] = field(default_factory=dict)
    findings: dict[str, tuple[Side, str, dict[str, Any], Finding]] = field(default_factory=dict)

    def ask(self, side: Side, key: str, options: dict[str, Any]) -> Finding:
        """The finding of an analysis of a side. Refusal: it cannot give it."""
        found = side.analyse(key, options)
        self.findings[f"{key}-{side.letter}"] = (side, key, options, found)
        return found

    def downloads(self, name: str) -> list[Download]:
        found: list[Download] = []
        for key, svg in self.pictures.items():
            found += figures(key, stem(name, key), lambda svg=svg: svg)
        for key, (*_, each) in self.findings.items():
            found.append(Download(f"Numbers (JSON): {key}", f"{stem(name, key)}.json", each.to_json))
        return found

    def code(self) -> str:
        asked = {(side.letter, key): (side, options) for side, key, options, _ in self.findings.values()}
        return "\n\n".join(analysis_code(side, key, options) for (_, key), (side, options) in asked.items())


def lens(frame: Frame) -> None:
    with st.spinner("Running the models ...", show_time=True):
        traces = [side.trace() for side in frame.sides]
    tell(notice for trace in traces for notice in trace.notices)
    positions = places(frame)
    _controls(frame)
    views = views_of(frame, traces, positions)
    drawn = _Drawn()
    if views:
        _lens(views, drawn)
        _attribution(views, drawn)
        if is_writing(frame.state):  # they cost more passes than all the rest, and nobody reads them in half a second
            st.caption("Effects of writes and top paths are drawn when the writing is done.")
        else:
            _effects(views, drawn)
            _paths(views, drawn)
    _generation(frame, drawn)
    continue_prompt(frame)
    with frame.tools:
        name = stem("lens", *(side.loaded.name for side in frame.sides))
        export_menu(drawn.downloads(name), code=drawn.code(), key="lens-export")


# --- what is looked at -----------------------------------------------------------------------------------------------


def _controls(frame: Frame) -> None:
    """The choices of the page."""
    state, cell = st.session_state, st.session_state["cell"]
    tokens = frame.sides[cell.panel].tokens
    state["lens_pos"] = cell.pos
    one, two, three, four, five = st.columns([1.1, 1.7, 1.7, 1.7, 2.4], vertical_alignment="bottom")
    n, here = len(tokens), glyphs(tokens[cell.pos])
    letter = f" in {'AB'[cell.panel]}" if len({tuple(side.tokens) for side in frame.sides}) > 1 else ""
    one.number_input(
        f"After position{letter}", 0, n - 1, key="lens_pos", step=1, on_change=_moved, help=f"{here} of 0 to {n - 1}"
    )
    two.selectbox("Follow", list(FOLLOW), key="lens_follow", format_func=FOLLOW.__getitem__)
    hint = "A leading space counts: \u00b7queen (or a typed space) is the word within a text."
    given = state["lens_follow"] == "token"
    three.text_input("Token", key="lens_token", max_chars=200, disabled=not given, placeholder="\u00b7queen", help=hint)
    four.text_input("Against", key="lens_against", max_chars=200, placeholder="another token", help=hint)
    five.selectbox("Colour", list(LENS), key="lens_color", format_func=lambda key: LENS[key].label)


def _moved() -> None:
    move(pos=int(st.session_state["lens_pos"] or 0))


# --- what is shown ---------------------------------------------------------------------------------------------------


def _beside(views: list[View], drawn: _Drawn, key: str, draw: Callable[[View], str]) -> None:
    """A picture of each view, beside each other where there is room. What one of them cannot give is said."""
    with st.container(key=key, horizontal=True, gap="medium"):
        for view in views:
            _mount(drawn, draw(view), f"{key}-{view.side.letter}", view.side.panel)


def _mount(drawn: _Drawn, svg: str, key: str, panel: int, width: int = WIDTH) -> None:
    drawn.pictures[key] = svg
    picture(svg, key=key, panel=panel, width=width)


def _findings(views: list[View], make: Callable[[View], Finding]) -> tuple[list[View], list[Finding]]:
    """The views that can give it, and what they give; of the others it is said why not."""
    there, found, notices = [], [], []
    with st.spinner("Running ...", show_time=True):
        for view in views:
            try:
                found.append(make(view))
                there.append(view)
            except Refusal as error:
                notices.append(str(error))
    tell(notices)
    return there, found


def _lens(views: list[View], drawn: _Drawn) -> None:
    state = st.session_state
    section(
        "Logit lens",
        "Each row is a read: what one sublayer reads, the first at the bottom, the model's own readout (out) on top. A "
        "cell holds the token that the model would predict if that read went straight to its output; bold: it is the "
        "followed one.",
    )
    views, found = _findings(views, lambda view: drawn.ask(view.side, "lens", view.lens))
    if not views:
        return
    color, columns = state["lens_color"], {}
    for view, finding in zip(views, found, strict=True):
        columns[view.side.letter] = window(view.pos, finding.dataset.sizes["pos"], COLUMNS)
    tables = [values_of(f, color, columns[v.side.letter]) for v, f in zip(views, found, strict=True)]
    limits = range_of(color, tables)
    by_letter = {view.side.letter: finding for view, finding in zip(views, found, strict=True)}
    _beside(
        views,
        drawn,
        "lens-grid",
        lambda view: lens_grid(
            by_letter[view.side.letter],
            title=f"{view.side.head}: what the model would predict from what each sublayer reads",
            quantity=color,
            pos=view.pos,
            positions=columns[view.side.letter],
            limits=limits,
            theme=theme(),
        ),
    )
    shown, n = columns[views[0].side.letter], found[0].dataset.sizes["pos"]
    part = (
        f"positions {shown[0]} to {shown[-1]} of 0 to {n - 1}, around the chosen one"
        if len(shown) < n
        else "all positions"
    )
    both = " A and B share the scale of colours." if len(views) > 1 else ""
    st.text(f"Followed: {told(views)}. Shown: {part}.{both}")
    with st.container(key="lens-lines", horizontal=True, gap="medium"):
        _mount(drawn, _line(views), "lens-line", views[0].side.panel)
        for view, finding in zip(views, found, strict=True):
            if "stream_kl" in finding.dataset and color != "top":
                title = f"{view.side.head}: what each stream alone would predict, at position {view.pos}"
                _mount(
                    drawn,
                    stream_grid(
                        finding,
                        title=title,
                        quantity=color,
                        pos=view.pos,
                        limits=_streams(finding, color, view.pos),
                        theme=theme(),
                    ),
                    f"streams-{view.side.letter}",
                    view.side.panel,
                )
    st.checkbox("Probability on a log scale", key="lens_log")


def _streams(finding: Finding, color: str, pos: int) -> tuple[float, float]:
    return range_of(color, [finding.dataset[f"stream_{LENS[color].variable}"].isel(pos=pos).values.astype(float)])


def _line(views: list[View]) -> str:
    words = list(dict.fromkeys(view.word(view.token) for view in views))
    return by_depth(
        [view.side.analyse("lens", {"target": view.token}) for view in views],
        [view.pos for view in views],
        [view.side.head for view in views],
        log=st.session_state["lens_log"],
        title=f"How likely {' and '.join(words)} would be, from what each sublayer reads",
        width=WIDTH,
        theme=theme(),
    )


def _attribution(views: list[View], drawn: _Drawn) -> None:
    state = st.session_state
    section(
        "Attribution",
        "A write is what one sublayer puts into the state. What each adds to the logit of the followed token, at the "
        "recorded norm scale and gates; all shares sum to that logit.",
    )
    one, two, three, _ = st.columns([1.3, 1.3, 2.2, 6], vertical_alignment="bottom")
    one.selectbox("By", list(BY), key="lens_by", format_func=BY.__getitem__)
    two.selectbox("Sorted by", ("depth", "size"), key="lens_sort")
    three.selectbox(
        "Shares of", list(OF), key="lens_of", format_func=OF.__getitem__, disabled=bool(state["lens_against"])
    )
    views, found = _findings(views, lambda view: drawn.ask(view.side, "logits", view.logit | {"by": state["lens_by"]}))
    if not views:
        return
    sums = {
        view.side.letter: shares_of(finding, above_mean=state["lens_of"] == "share_above_mean")
        for view, finding in zip(views, found, strict=True)
    }
    limits = range_of_bars([each.shares for each in sums.values()])
    who = "write" if state["lens_by"] == "atom" else "head and other write"
    _beside(
        views,
        drawn,
        "shares",
        lambda view: share_bars(
            sums[view.side.letter],
            title=f"{view.side.head}: what each {who} adds to {view.of_logit}",
            width=WIDTH,
            by_size=state["lens_sort"] == "size",
            limits=limits,
            theme=theme(),
        ),
    )


def _effects(views: list[View], drawn: _Drawn) -> None:
    """Beside the shares: each write taken away, and what becomes of the prediction."""
    state = st.session_state
    one, two, _ = st.columns([3, 3, 5], vertical_alignment="bottom")
    one.toggle(
        "Take each write away and measure",
        key="lens_writes",
        help="Every write is set to zero at all positions, one at a time, and all that comes after it runs anew: about "
        "one pass for every two blocks.",
    )
    two.selectbox(
        "Effect",
        list(EFFECTS),
        key="lens_effect",
        format_func=lambda key: EFFECTS[key].label,
        disabled=not state["lens_writes"],
    )
    if not state["lens_writes"]:
        return
    options = {view.side.letter: {"pos": view.pos, "token": view.token} for view in views}
    views, found = _findings(views, lambda view: drawn.ask(view.side, "writes", options[view.side.letter]))
    if not views:
        return
    by_letter = {view.side.letter: finding for view, finding in zip(views, found, strict=True)}
    share_limits = range_of_bars([finding["share"].values.astype(float) for finding in found])
    effect_limits = range_of_bars([effects_in(finding, state["lens_effect"]) for finding in found])
    _beside(
        views,
        drawn,
        "writes",
        lambda view: share_and_effect(
            by_letter[view.side.letter],
            title=f"{view.side.head}: what each write adds itself, and what is lost without it",
            effect=state["lens_effect"],
            by_size=state["lens_sort"] == "size",
            share_limits=share_limits,
            effect_limits=effect_limits,
            width=WIDTH,
            theme=theme(),
        ),
    )
    st.caption(
        "A write can do much with a small share, when later sublayers read it, and little with a large one, when they "
        "make up for it. Of the followed token alone, whatever it is compared with above."
    )


def _paths(views: list[View], drawn: _Drawn) -> None:
    section(
        "Top paths",
        "The logit as a sum over all paths through writes and positions: the largest, from where they begin. Attention "
        "patterns, norm scales and gates are held.",
    )
    views, found = _findings(views, lambda view: drawn.ask(view.side, "paths", view.logit | {"n": PATHS}))
    by_letter = {view.side.letter: finding for view, finding in zip(views, found, strict=True)}
    _beside(
        views,
        drawn,
        "paths",
        lambda view: path_strips(
            by_letter[view.side.letter],
            title=f"{view.side.head}: the paths that bring most to {view.of_logit}",
            width=WIDTH,
            theme=theme(),
        ),
    )


# --- generation ------------------------------------------------------------------------------------------------------


def _generation(frame: Frame, drawn: _Drawn) -> None:
    state = st.session_state
    section(
        "Generation",
        "What each model writes next. \u201cContinue\u201d, at the top of this page and of Two axes, puts such tokens "
        "into the prompt one at a time, and the pictures follow (effects and top paths when it is done): each is of a "
        "full pass over the text so far, exact under every edit.",
    )
    st.toggle("Write on with A and B side by side", key="lens_write")
    if not state["lens_write"]:
        return
    st.caption("How many tokens, and how they are taken, is chosen under \u201cContinue\u201d.")
    found, notices = {}, []
    with st.spinner("Writing ...", show_time=True):
        for side in frame.sides:
            try:
                found[side.letter] = drawn.ask(side, "continuation", options_of(state, side))
            except Refusal as error:
                notices.append(str(error))
    tell(notices)
    texts = [finding["id"].values.tolist() for finding in found.values()]
    same_prompt = len({side.prompt for side in frame.sides}) == 1
    differs = first_difference(*texts) if len(texts) == 2 and same_prompt else None
    with st.container(key="written", horizontal=True, gap="medium"):
        for side in frame.sides:
            if side.letter in found:
                finding = found[side.letter]
                title = f"{side.head}: how the model writes on, {finding.title}"
                svg = new_tokens_picture(
                    finding, title=title, before=side.trace().tokens, differs=differs, width=WIDTH, theme=theme()
                )
                _mount(drawn, svg, f"written-{side.letter}", side.panel)
    if len(texts) == 2 and same_prompt:
        first = next(iter(found.values()))
        at = (
            "The two texts are the same."
            if differs is None
            else (f"They first differ at new token {differs + 1}, position {int(first['pos'][differs])} (red line).")
        )
        st.text(at)
    with st.expander("In Python"):
        for side in frame.sides:
            st.code(generation_code(side, options_of(state, side)), language="python")


PAGE = Page(
    path="lens",
    title="Lens",
    draw=lens,
    parameters=(
        one_of("lens_follow", list(FOLLOW), "next"),
        text("lens_token"),
        text("lens_against"),
        one_of("lens_color", list(LENS), "probability"),
        flag("lens_log", True),
        one_of("lens_by", list(BY), "atom"),
        one_of("lens_sort", ("depth", "size"), "depth"),
        one_of("lens_of", list(OF), "share"),
        flag("lens_writes", False),
        one_of("lens_effect", list(EFFECTS), "kl"),
        flag("lens_write", False),
        *GENERATION,
    ),
)

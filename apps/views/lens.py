"""The page of one prediction: what every read would predict, which writes make the logit, and how the text goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import streamlit as st

from t2lens import Trace
from t2lens.analysis.finding import Finding
from t2lens.apps.components.picture import picture
from t2lens.apps.export import Download, export_menu, figures, stem, theme
from t2lens.apps.frame import Frame, Page, Refusal, Side
from t2lens.apps.generation import GENERATION, continue_prompt, options_of
from t2lens.apps.nodes import move, places
from t2lens.apps.snippets import analysis_code, generation_code
from t2lens.apps.state import flag, one_of, text
from t2lens.apps.words import section, tell
from t2lens.model import Transformer
from t2lens.readout import token_id
from t2lens.viz.labels import glyphs
from t2lens.viz.lens_grid import LENS, by_depth, lens_grid, range_of, stream_grid, values_of, window
from t2lens.viz.new_tokens import first_difference, new_tokens_picture
from t2lens.viz.shares import path_strips, share_bars, shares_of

__all__ = ["PAGE"]

COLUMNS, PATHS, WIDTH = 13, 10, 676
"""Positions that the grid shows, paths that are listed, pixels of a picture: two stand side by side at 1440."""

FOLLOW = {"next": "the true next token", "likeliest": "A's likeliest here", "token": "this token"}
OF = {"share": "the logit", "share_above_mean": "the logit above the mean token"}
BY = {"atom": "atoms", "head": "heads"}


@dataclass(frozen=True, kw_only=True)
class View:
    """One side at one position. token: whose logit is taken apart; target: the token that the lens follows at all
    positions, None where it is the true next one of each."""

    side: Side
    pos: int
    token: int
    target: int | None
    against: int | None

    def word(self, token: int) -> str:
        return glyphs(self.side.loaded.model.to_str_tokens([token])[0])


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
    views = _views(frame, traces)
    drawn = _Drawn()
    if views:
        _lens(views, drawn)
        _attribution(views, drawn)
        _paths(views, drawn)
    _generation(frame, drawn)
    continue_prompt(frame)
    with frame.tools:
        name = stem("lens", *(side.loaded.name for side in frame.sides))
        export_menu(drawn.downloads(name), code=drawn.code(), key="lens-export")


# --- what is looked at -----------------------------------------------------------------------------------------------


def _views(frame: Frame, traces: list[Trace]) -> list[View]:
    """The sides at the chosen position. Says what cannot be, and leaves that side out."""
    state = st.session_state
    positions = places(frame)
    _controls(frame)
    views, notices = [], []
    last = [len(trace.tokens) - 1 for trace in traces]
    follow, likeliest = state["lens_follow"], None
    unknown = any(p == n or not t.causal for p, n, t in zip(positions, last, traces, strict=True))
    if follow == "likeliest" or (follow == "next" and unknown):
        likeliest = _likeliest(frame.sides[0], last[0] if positions[0] is None else positions[0])
        if follow == "next" and likeliest:
            notices.append(f"There is no next token to follow there: A's likeliest is taken, {glyphs(likeliest)}.")
    for side, trace, pos in zip(frame.sides, traces, positions, strict=True):
        if pos is None:
            notices.append(f"{side.letter} has no position beside this one of the other prompt.")
            continue
        try:
            views.append(_view(side, trace, pos, likeliest))
        except (ValueError, TypeError) as error:
            notices.append(str(side.refusal(str(error))))
    tell(notices)
    return views


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


def _likeliest(side: Side, pos: int) -> str:
    """The side's likeliest token after a position, as text; nothing where its logits are not finite."""
    best = int(side.analyse("lens")["top_id"].isel(k=0, pos=max(pos, 0)).sel(read="out"))
    return side.loaded.model.to_str_tokens([best])[0] if best >= 0 else ""


def _view(side: Side, trace: Trace, pos: int, likeliest: str | None) -> View:
    state, model, ids = st.session_state, side.loaded.model, trace.token_ids
    follow, against = state["lens_follow"], _read_token(model, state["lens_against"])
    if follow == "next" and trace.causal and pos + 1 < len(ids):
        return View(side=side, pos=pos, token=int(ids[pos + 1]), target=None, against=against)
    given = state["lens_token"] if follow == "token" else likeliest
    if not given:
        raise ValueError(
            "type the token that is to be followed."
            if follow == "token"
            else "A has no likeliest token here: its logits are not finite."
        )
    token = _read_token(model, given)
    assert token is not None
    return View(side=side, pos=pos, token=token, target=None if follow == "next" else token, against=against)


def _read_token(model: Transformer, given: str | None) -> int | None:
    """The id of what was typed, where the sign of a space stands for one. ValueError: not one token."""
    if not given:
        return None
    try:
        return token_id(model, given)
    except ValueError:
        if "\u00b7" not in given:
            raise
        return token_id(model, given.replace("\u00b7", " "))


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
    section("Logit lens", "What the readout would say of each read: the likeliest token, in bold where it is followed.")
    views, found = _findings(views, lambda view: drawn.ask(view.side, "lens", _target(view)))
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
            title=view.side.head,
            quantity=color,
            pos=view.pos,
            positions=columns[view.side.letter],
            limits=limits,
            theme=theme(),
        ),
    )
    shown, n = columns[views[0].side.letter], found[0].dataset.sizes["pos"]
    what = "the true next token of each position" if views[0].target is None else f"{views[0].word(views[0].target)}"
    part = (
        f"positions {shown[0]} to {shown[-1]} of 0 to {n - 1}, around the chosen one"
        if len(shown) < n
        else "all positions"
    )
    st.text(f"Followed: {what}. Shown: {part}. A and B share the scale of colours.")
    with st.container(key="lens-lines", horizontal=True, gap="medium"):
        _mount(drawn, _line(views), "lens-line", views[0].side.panel)
        for view, finding in zip(views, found, strict=True):
            if "stream_kl" in finding.dataset and color != "top":
                title = f"{view.side.head}: streams at position {view.pos}"
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


def _target(view: View) -> dict[str, Any]:
    return {} if view.target is None else {"target": view.target}


def _streams(finding: Finding, color: str, pos: int) -> tuple[float, float]:
    return range_of(color, [finding.dataset[f"stream_{LENS[color].variable}"].isel(pos=pos).values.astype(float)])


def _line(views: list[View]) -> str:
    words = list(dict.fromkeys(view.word(view.token) for view in views))
    return by_depth(
        [view.side.analyse("lens", {"target": view.token}) for view in views],
        [view.pos for view in views],
        [view.side.head for view in views],
        log=st.session_state["lens_log"],
        title=f"Probability of {' and '.join(words)} by depth",
        width=WIDTH,
        theme=theme(),
    )


def _attribution(views: list[View], drawn: _Drawn) -> None:
    state = st.session_state
    section(
        "Attribution", "What each write adds to the logit, at the recorded norm scale and gates; all shares sum to it."
    )
    one, two, three, _ = st.columns([1.3, 1.3, 2.2, 6], vertical_alignment="bottom")
    one.selectbox("By", list(BY), key="lens_by", format_func=BY.__getitem__)
    two.selectbox("Sorted by", ("depth", "size"), key="lens_sort")
    three.selectbox(
        "Shares of", list(OF), key="lens_of", format_func=OF.__getitem__, disabled=bool(state["lens_against"])
    )
    views, found = _findings(
        views, lambda view: drawn.ask(view.side, "logits", _logit(view) | {"by": state["lens_by"]})
    )
    if not views:
        return
    sums = {
        view.side.letter: shares_of(finding, above_mean=state["lens_of"] == "share_above_mean")
        for view, finding in zip(views, found, strict=True)
    }
    every = np.concatenate([[0.0], *(each.shares for each in sums.values())])
    room = 0.04 * float(np.ptp(every))
    limits = (float(every.min()) - room * (every.min() < 0), float(every.max()) + room or 1.0)
    titles = {view.side.letter: finding.title for view, finding in zip(views, found, strict=True)}
    _beside(
        views,
        drawn,
        "shares",
        lambda view: share_bars(
            sums[view.side.letter],
            title=f"{view.side.head}: {titles[view.side.letter]}",
            width=WIDTH,
            by_size=state["lens_sort"] == "size",
            limits=limits,
            theme=theme(),
        ),
    )


def _logit(view: View) -> dict[str, Any]:
    options = {"pos": view.pos, "token": view.token}
    return options if view.against is None else {**options, "against": view.against}


def _paths(views: list[View], drawn: _Drawn) -> None:
    section(
        "Top paths",
        "The logit as a sum over all paths through writes and positions: the largest, from where they begin. Attention "
        "patterns, norm scales and gates are held.",
    )
    views, found = _findings(views, lambda view: drawn.ask(view.side, "paths", _logit(view) | {"n": PATHS}))
    by_letter = {view.side.letter: finding for view, finding in zip(views, found, strict=True)}
    _beside(
        views,
        drawn,
        "paths",
        lambda view: path_strips(
            by_letter[view.side.letter],
            title=f"{view.side.head}: {by_letter[view.side.letter].title}",
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
        "into the prompt one at a time, and every picture follows: each is of a full pass over the text so far, exact "
        "under every edit.",
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
                title = f"{side.head}: {finding.title}"
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
        flag("lens_write", False),
        *GENERATION,
    ),
)

"""Depth routing: what reads hold of earlier writes, for one token and on average, and what it is good for.

Top: the maps of A and B (read x source), on one scale. Below: mass against effect, what the weights follow, and how far
back reads look. All numbers are of `t2lens.analysis`; the page chooses and draws.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import streamlit as st

from t2lens import Trace
from t2lens.analysis.finding import Finding
from t2lens.apps.components.picture import picture
from t2lens.apps.export import Download, export_menu, figures, stem, theme
from t2lens.apps.frame import Frame, Page, Refusal, Side
from t2lens.apps.nodes import places
from t2lens.apps.snippets import analysis_code, trace_code
from t2lens.apps.state import OVER, Cell, flag, one_of, passages
from t2lens.apps.words import section, tell, why
from t2lens.viz.depth_map import STATS, WHATS, DepthMap, difference, limits, of_corpus, of_profile, of_trace
from t2lens.viz.labels import glyphs
from t2lens.viz.routing import map_picture
from t2lens.viz.routing_charts import (
    Dots,
    content_picture,
    effect_limits,
    effects_picture,
    profile_limits,
    profile_picture,
)

__all__ = ["PAGE", "map_of"]

MAP_OVER = {
    "token": "this token",
    **{key: f"mean over {words}" for key, words in OVER.items()},
    "corpus": "the whole held-out corpus",
}
SCALES = {"linear": "linear colours", "root": "square-root colours"}
EFFECTS = {"estimate": "gradient's estimate", "measured": "measured by ablation"}
CONTENT = 8  # passages that content dependence is taken from


@dataclass(frozen=True)
class _Shown:
    """A side, the position of the node in its prompt (or none), its map and what goes with it, or why there is none."""

    side: Side
    trace: Trace
    pos: int | None
    shown: DepthMap | None = None
    refused: str = ""


def depth_routing(frame: Frame) -> None:
    state = frame.state
    with st.spinner("Running the models ..."):
        traces = [side.trace() for side in frame.sides]
    tell(notice for trace in traces for notice in trace.notices)
    at = places(frame)
    _choices()
    every = [_Shown(side, trace, pos) for side, trace, pos in zip(frame.sides, traces, at, strict=True)]
    with st.spinner("Averaging ...", show_time=True):
        every = [_with_map(each, state) for each in every]
    pictures = _Pictures()
    _maps(every, state, pictures)
    _node(state["cell"], frame.sides)
    _effects(every, state, pictures)
    _content(every, state, pictures)
    _profile(every, state, pictures)
    with frame.tools:
        name = stem("routing", *(side.loaded.name for side in frame.sides))
        code = "\n\n".join(_python(each, state) for each in every if each.shown is not None)
        numbers = [_numbers_of(each, name) for each in every if each.shown is not None]
        export_menu([*numbers, *pictures.downloads(name)], code=code, key="routing-export")


# --- the maps


def _choices() -> None:
    state = st.session_state
    over, what, stat, scale, start, minus = st.columns([2.6, 2.0, 1.9, 1.9, 1.7, 1.1], vertical_alignment="bottom")
    over.selectbox("Over", list(MAP_OVER), format_func=MAP_OVER.__getitem__, key="routing_over")
    what.selectbox("What", list(WHATS), format_func=lambda key: WHATS[key][0], key="routing_what")
    average = state["routing_over"] != "token"
    stat.selectbox(
        "Shown",
        list(STATS),
        format_func=STATS.__getitem__,
        key="routing_stat",
        disabled=not average,
        help="Over the tokens.",
    )
    scale.selectbox("Scale", list(SCALES), format_func=SCALES.__getitem__, key="routing_scale")
    start.checkbox(
        "count start tokens",
        key="routing_start",
        disabled=state["routing_over"] in ("token", "corpus"),
        help="Position 0 holds the start token, on which attention piles up; averages leave it out unless you ask.",
    )
    minus.checkbox("B \u2212 A", key="routing_minus", help="Where A and B have the same reads and sources.")


def _with_map(each: _Shown, state: Any) -> _Shown:
    try:
        return replace(each, shown=map_of(each.side, each.trace, each.pos, state))
    except Refusal as error:
        return replace(each, refused=str(error))


def map_of(side: Side, trace: Trace, pos: int | None, chosen: Any) -> DepthMap:
    """The map that is chosen, of one side; chosen: the page's own choices. Refusal where it cannot be."""
    over, what = chosen["routing_over"], chosen["routing_what"]
    stat = chosen["routing_stat"]
    if over == "token":
        if pos is None:
            raise side.refusal("its prompt has no token at the place of the chosen one.")
        return of_trace(trace, what, pos)
    if over == "corpus":
        return _of_corpus(side, trace, what, stat)
    finding = _profile_of(side, over, chosen["routing_start"])
    return of_profile(finding, what, stat, where=OVER[over])


def _profile_of(side: Side, over: str, start: bool) -> Finding:
    return side.analyse("profile", {"start": bool(start)}, passages=passages(over))


def _of_corpus(side: Side, trace: Trace, what: str, stat: str) -> DepthMap:
    if what != "weights":
        raise side.refusal(
            f"of the whole corpus there are statistics of own depth weights alone; choose these, or {OVER['32']}."
        )
    if side.edits:
        raise side.refusal("statistics of the corpus are of the model without edits.")
    try:
        return of_corpus(_statistics(side.loaded.name, side.loaded.weights_hash), trace, stat)
    except ValueError as error:
        raise side.refusal(why(error)) from error


@functools.lru_cache(maxsize=24)
def _statistics(name: str, weights_hash: str) -> Any:  # noqa: ARG001 - part of the key
    from t2lens.store import corpus_statistics

    return corpus_statistics(name)


def _maps(every: list[_Shown], state: Any, pictures: _Pictures) -> None:
    drawn = [each.shown for each in every if each.shown is not None]
    shared = limits(drawn) if drawn else (0.0, 1.0)
    minus: DepthMap | None = None
    if state["routing_minus"] and len(drawn) == 2:
        try:
            minus = difference(*drawn)
        except ValueError as error:
            tell([str(error)])
    elif state["routing_minus"]:
        tell(["B \u2212 A needs the maps of two models."])
    places = st.columns(len(every) + (minus is not None), gap="medium")
    width = _width(len(places))
    root, chosen = state["routing_scale"] == "root", state["cell"].site
    for each, place in zip(every, places, strict=False):
        with place:
            if each.shown is None:
                tell([each.refused])
                continue
            look = {"width": width, "limits": shared, "root": root, "chosen": chosen}
            title = f"{each.side.head}: {each.shown.label} of each source in each read"
            pictures.draw(f"map-{each.side.letter}", functools.partial(map_picture, each.shown, title=title, **look))
    if minus is not None:
        with places[-1]:
            look = {"width": width, "root": root, "chosen": chosen, "title": "B \u2212 A, on a scale of its own"}
            pictures.draw("map-difference", functools.partial(map_picture, minus, **look))
    _numbers(every)


def _width(n: int) -> int:
    return {1: 1000, 2: 560}.get(n, 370)


class _Pictures:
    """Draws pictures whose marks choose a node, and keeps how each is made, to take home."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Callable[..., str]]] = []

    def draw(self, key: str, make: Callable[..., str]) -> None:
        """key: its name, which ends with the letter of its model; make: the SVG, given a theme."""
        self.made.append((key, make))
        picture(make(theme=theme()), key=key, panel={"A": 0, "B": 1}.get(key[-1]))

    def downloads(self, name: str) -> list[Download]:
        found: list[Download] = []
        for key, make in self.made:
            found += figures(key.replace("-", " "), stem(name, key), functools.partial(make, theme=theme()))
        return found


def _node(cell: Cell, sides: Sequence[Side]) -> None:
    token = glyphs(sides[cell.panel].tokens[cell.pos])
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key="chosen-node"):
        st.text(
            f"Chosen: {cell.site} at position {cell.pos} ({token}) in {'AB'[cell.panel]}. Click a row to choose it."
        )
        if st.session_state["pages"]:
            st.page_link(st.session_state["pages"][0], label="See it on both axes", icon=":material/grid_on:")


def _numbers(every: list[_Shown]) -> None:
    with st.expander("Numbers"):
        for each in every:
            if each.shown is None:
                continue
            shown = each.shown
            st.text(f"{each.side.head}: {shown.label}; {shown.counted}.")
            columns: dict[str, Any] = {"read": list(shown.reads)}
            columns |= {name: _cells(shown, j) for j, name in enumerate(shown.columns)}
            st.dataframe(columns, hide_index=True, height=260, key=f"numbers-{each.side.letter}")


def _numbers_of(each: _Shown, name: str) -> Download:
    shown = each.shown
    assert shown is not None
    letter = each.side.letter
    return Download(f"Numbers of {letter} (CSV)", f"{name}-{letter.lower()}.csv", lambda: _csv(shown).encode())


def _cells(shown: DepthMap, j: int) -> list[float | None]:
    values = np.where(shown.exists[:, j], shown.values[:, j], np.nan)
    return [float(value) if np.isfinite(value) else None for value in values]


def _csv(shown: DepthMap) -> str:
    """Every entry at full precision, with what its source holds."""
    out = io.StringIO()
    write = csv.writer(out)
    write.writerow(["read", "site", "way", "source", "holds", "value", *shown.more])
    for i, j in np.argwhere(shown.exists):
        more = [" ".join(repr(float(x)) for x in np.atleast_1d(array[i, j])) for array in shown.more.values()]
        own = [shown.reads[i], shown.sites[i], shown.ways[i], shown.columns[j], shown.held[i, j]]
        write.writerow([*own, repr(float(shown.values[i, j])), *more])
    return out.getvalue()


def _python(each: _Shown, state: Any) -> str:
    side, over, what = each.side, state["routing_over"], state["routing_what"]
    if over == "corpus":
        return f"from t2lens.store import corpus_statistics\n\ncorpus_statistics({side.loaded.name!r})['weight_mean']"
    if over == "token":
        variable = WHATS[what][2] or "contribution_norm"  # its shares are these over their sum
        return trace_code(side, [f"print(trace.dataset[{variable!r}].sel(pos={each.pos}))"])
    part = {"mean": "mean", "sd": "std", "iqr": "quartile"}[state["routing_stat"]]
    variable = f"{WHATS[what][1]}_{part}"
    options = {"start": True} if state["routing_start"] else {}
    return analysis_code(side, "profile", options, passages=passages(over), last=[f"print(finding[{variable!r}])"])


# --- below the maps


def _side_by_side(every: list[_Shown], make: Callable[[_Shown], Any]) -> list[tuple[Any, _Shown, Any]]:
    """(place, side, what `make` gives) of the sides that can; the others say why not in their places."""
    found = []
    for each, place in zip(every, st.columns(len(every), gap="medium"), strict=True):
        with place:
            try:
                found.append((place, each, make(each)))
            except Refusal as error:
                tell([str(error)])
    return found


def _effects(every: list[_Shown], state: Any, pictures: _Pictures) -> None:
    section(
        "Mass against effect",
        "Every route into every read, on the prompt: how much it carries, and what its removal does to the prediction. "
        "Mass is not effect.",
    )
    st.segmented_control(
        "Effect",
        list(EFFECTS),
        format_func=EFFECTS.__getitem__,
        key="routing_effect",
        label_visibility="collapsed",
        required=True,
    )
    fast = state["routing_effect"] != "measured"
    with st.spinner("Measuring ..." if fast else "Removing every route, one at a time ...", show_time=True):
        found = _side_by_side(every, lambda each: Dots(each.side.analyse("effects", {"fast": fast})))
    same = len({dots.words for _, _, dots in found}) == 1
    shared = effect_limits([dots for _, _, dots in found]) if same and found else None
    for place, each, dots in found:
        n = len(each.trace.tokens) - 1
        counted = f"Effects: mean over n = {n} predictions of the prompt."
        counted += (
            " Scales of A and B differ: their masses are not the same thing." if len(found) == 2 and not same else ""
        )
        look = {"width": _width(len(every)), "limits": shared, "counted": counted, "whose": each.side.head}
        look["chosen"] = state["cell"].site
        with place:
            pictures.draw(f"effects-{each.side.letter}", functools.partial(effects_picture, dots, **look))


def _content(every: list[_Shown], state: Any, pictures: _Pictures) -> None:
    section(
        "What the weights follow",
        f"Over {CONTENT} bundled passages: is a read the same for every token, or does it follow the token, its "
        "position or the rest of the context?",
    )
    if not st.toggle("Run (a few seconds; longer for systems without depth weights)", key="routing_content"):
        return
    with st.spinner("Running the passages ...", show_time=True):
        options = {"n_boot": 0, "n_shuffles": 0}
        found = _side_by_side(every, lambda each: each.side.analyse("content", options, passages=CONTENT))
    for place, each, finding in found:
        what = "Of own depth weights." if "source" in finding.dataset.dims else "Of coefficients of atoms."
        counted = f"{what} {finding.notes[0].split('. ')[0]}, start tokens counted."
        look = {"width": _width(len(every)), "counted": counted, "whose": each.side.head}
        look["chosen"] = state["cell"].site
        with place:
            pictures.draw(f"content-{each.side.letter}", functools.partial(content_picture, finding, **look))


def _profile(every: list[_Shown], state: Any, pictures: _Pictures) -> None:
    over = state["routing_over"] if state["routing_over"] in OVER else "prompt"
    section(
        "How far back reads look",
        f"Shares of what is read by age and by distance in depth, {MAP_OVER[over]}; comparable across systems.",
    )
    with st.spinner("Averaging ...", show_time=True):
        found = _side_by_side(every, lambda each: _profile_of(each.side, over, state["routing_start"]))
    shared = profile_limits([finding for _, _, finding in found]) if found else None
    for place, each, finding in found:
        counted = of_profile(finding, "share", where=OVER[over]).counted
        look = {"width": _width(len(every)), "limits": shared, "counted": counted, "whose": each.side.head}
        with place:
            pictures.draw(f"profile-{each.side.letter}", functools.partial(profile_picture, finding, **look))


PAGE = Page(
    path="depth-routing",
    title="Depth routing",
    draw=depth_routing,
    parameters=(
        one_of("routing_over", list(MAP_OVER), "prompt"),
        one_of("routing_what", list(WHATS), "share"),
        one_of("routing_stat", list(STATS), "mean"),
        one_of("routing_scale", list(SCALES), "linear"),
        flag("routing_start", False),
        flag("routing_minus", False),
        one_of("routing_effect", list(EFFECTS), "estimate"),
        flag("routing_content", False),
    ),
)

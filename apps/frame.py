"""The frame of every page: what is chosen once for all of them, read from the URL and written back to it.

A page is a function of a `Frame`. It draws the models side by side, A and then B where there is one, by asking a
`Side` for its trace or for a finding; a sentence about what cannot be done is a `Refusal`, which the frame shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import streamlit as st

from t2lens import Trace
from t2lens.analysis.finding import Finding
from t2lens.apps import loaders
from t2lens.apps.edits import active, refused
from t2lens.apps.gallery import PROMPT, VIEW, gallery, look
from t2lens.apps.header import controls, header
from t2lens.apps.state import (
    ALIGN,
    CLEAN,
    NO_MODEL,
    SHARED,
    Cell,
    Parameter,
    Selection,
    fit_link,
    format_url,
    limit_prompt,
    parse_url,
)
from t2lens.apps.words import tell, why
from t2lens.apps.writing import go_on, grow
from t2lens.readout import NEXT, same_word

__all__ = ["Frame", "Page", "Refusal", "Side", "first_view", "keep", "run"]


T = TypeVar("T")


class Refusal(ValueError):
    """What cannot be shown, in one sentence for the reader."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A model on its prompt, under its edits (JSON, or nothing). letter: "A" or "B"; beside: of B, side A."""

    letter: str
    loaded: loaders.Loaded
    prompt: str
    edits: str
    beside: Side | None = None

    @property
    def name(self) -> str:
        return f"{self.loaded.name}, edited" if self.edits else self.loaded.name

    @property
    def head(self) -> str:
        """What stands above its pictures."""
        return f"{self.letter}  {self.name}"

    @property
    def panel(self) -> int:
        return "AB".index(self.letter)

    @cached_property
    def tokens(self) -> list[str]:
        """Those of the prompt, as far as the context goes."""
        model = self.loaded.model
        return self._sentence(lambda: model.to_str_tokens(model.to_tokens(self.prompt)[0, : model.cfg.n_ctx]))

    @property
    def sites(self) -> list[str]:
        """Where a node of this side can stand, from the embedding up."""
        return ["embed", *(site.name for site in self.loaded.model.sites)]

    def trace(self, follow: str | int = NEXT) -> Trace:
        """The trace of the prompt, which follows a token. Refusal: this prompt, these edits or this token cannot be."""
        last = self.last if follow == NEXT else None
        return self._sentence(lambda: loaders.trace(self.loaded, self.prompt, self.edits, follow, last))

    @cached_property
    def last(self) -> int | None:
        """What "next" follows at the last position, which has no true next token: in B, on the prompt of A, the token
        that A finds likeliest there, so that both follow one. None: what the side itself finds likeliest."""
        if self.beside is None or self.beside.prompt != self.prompt:
            return None
        try:
            trace = self.beside.trace()
        except Refusal:
            return None
        return same_word(self.loaded.model, str(trace.dataset["followed"].values[-1])) if trace.causal else None

    def analyse(self, key: str, options: dict[str, Any] | None = None, *, passages: int = 0) -> Finding:
        """The finding of an analysis of the catalog, on the prompt or on so many bundled passages. Refusal: what this
        model, prompt or option cannot give."""
        given = passages or self.prompt
        return self._sentence(lambda: loaders.analyse(self.loaded, key, given, options or {}, self.edits))

    def refusal(self, sentence: str) -> Refusal:
        """What this side cannot show, with its name before it."""
        return Refusal(f"{self.letter}, {self.name}: {sentence}")

    def _sentence(self, make: Callable[[], T]) -> T:
        try:
            return make()
        except (ValueError, TypeError, KeyError) as error:
            raise self.refusal(why(error)) from error


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What a page draws: the selection, the one or two models, `first` on the first run of a visit, and `tools`, the
    place at the right of the header for what a page offers to take home."""

    selection: Selection
    sides: tuple[Side, ...]
    first: bool
    tools: Any

    @property
    def state(self) -> Any:
        """Values of the page's own parameters, under their keys."""
        return st.session_state


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page: its path in the URL, its title, what it draws, and the choices of its own that a link keeps. bare: draws
    without models and prompt above it; default: the page that the root of the URL shows."""

    path: str
    title: str
    draw: Callable[[Frame], None]
    parameters: tuple[Parameter, ...] = ()
    bare: bool = False
    default: bool = False


def first_view(names: Sequence[str]) -> Selection:
    """What a first visit shows."""
    a = [*loaders.added(), *(name for name in names if name == "attnres-full"), *names][0]
    b = "ddl-cc-ec" if "ddl-cc-ec" in names else names[-1]
    return Selection(model_a=a, model_b=b, prompt=PROMPT, cell=Cell(panel=0, pos=17, site="5.attn"))


def keep(pages: Sequence[Page]) -> None:
    """Streamlit drops the value of a widget that a run does not show; what a link keeps stays."""
    for key in (*SHARED, *(each.key for page in pages for each in page.parameters)):
        if key in st.session_state:
            st.session_state[key] = st.session_state[key]


def run(page: Page) -> None:
    """Draw a page in its frame."""
    state, names = st.session_state, loaders.model_names()
    tools = header()
    with tools:
        gallery()
    above = st.container(key="above")
    if not names:
        tell(["No trained model is bundled with this installation: train one with t2lens train."])
        return
    first = state.get("page") != page.path or VIEW in st.query_params  # a link inside the page asks for another view
    notices = _read_url(page, names) if first else []
    if first:
        state["example"] = st.query_params.get(VIEW, "")
    badges = None
    if page.bare:
        tell(notices)
        _draw(page, Frame(selection=_selection(), sides=(), first=first, tools=tools))
    else:
        grow(state)
        badges = controls(names)
        selection = _selection()
        cut = [notice for prompt in (selection.prompt, selection.prompt_b) for notice in limit_prompt(prompt)[1]]
        tell([*notices, *cut])
        if said := look(state["example"], a=selection.model_a, b=selection.model_b, prompt=selection.prompt):
            st.caption(said)
        if not selection.prompt.strip():
            tell(["The prompt is empty: type a few words and press Run."])
        else:
            _draw(page, Frame(selection=selection, sides=(), first=first, tools=tools))
    with above:
        tell([*_write_url(page), *refused()])  # what the page itself has not said
    if badges:
        badges()
    go_on(state)


def _draw(page: Page, frame: Frame) -> None:
    try:
        page.draw(frame if page.bare else replace(frame, sides=_sides(frame.selection)))
    except Refusal as error:
        tell([str(error)])


def _sides(selection: Selection) -> tuple[Side, ...]:
    """A, and B where there is one. Edits are of A; B with the same model shows it without them."""
    prompts = [limit_prompt(selection.prompt)[0], limit_prompt(selection.prompt_b)[0]]
    b = selection.model_a if selection.model_b == CLEAN else selection.model_b
    chosen = [selection.model_a, *([b] if b != NO_MODEL else [])]
    sides: list[Side] = []
    for i, name in enumerate(chosen):
        try:
            loaded = loaders.load(name)
        except ValueError as error:
            raise Refusal(str(error)) from error
        text = prompts[i] if prompts[i].strip() else prompts[0]
        try:
            edits = "" if i else active(selection.edits)
        except ValueError as error:
            raise Refusal(str(error)) from error
        beside = sides[0] if sides else None
        sides.append(Side(letter="AB"[i], loaded=loaded, prompt=text, edits=edits, beside=beside))
    return tuple(sides)


def _read_url(page: Page, names: Sequence[str]) -> list[str]:
    """The first run of a visit takes its state from the URL, and from the session what the URL does not say. Returns a
    notice for what the URL asked in vain."""
    state, default, parameters = st.session_state, first_view(names), list(page.parameters)
    asked = {key: st.query_params[key] for key in st.query_params}
    if VIEW not in asked:  # a view is whole: nothing of what was chosen before is part of it
        default = replace(default, **{key: state[key] for key in SHARED if key in state})
        parameters = [replace(each, default=state.get(each.key, each.default)) for each in parameters]
    selection, values, notices = parse_url(asked, default, models=names, parameters=parameters)
    for key in SHARED:
        state[key] = getattr(selection, key)
    state.update(values)
    state["page"], state["newcomer"] = page.path, not asked and "newcomer" not in state
    return notices


def _selection() -> Selection:
    chosen = {key: st.session_state[key] for key in SHARED}
    return Selection(**{**chosen, "align": chosen["align"] or ALIGN[0]})


def _write_url(page: Page) -> list[str]:
    """Returns a sentence where a link cannot hold all that is chosen."""
    values = {each.key: st.session_state[each.key] for each in page.parameters}
    wanted, told = fit_link(format_url(_selection(), values, page.parameters))
    if {key: st.query_params[key] for key in st.query_params} != wanted:
        st.query_params.from_dict(wanted)
    return told

"""What the page Lens looks at: on each side a position, and the token that is followed there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import streamlit as st

from t2lens.apps.words import tell
from t2lens.readout import token_id
from t2lens.viz.labels import glyphs

if TYPE_CHECKING:
    from t2lens import Trace
    from t2lens.apps.frame import Frame, Side
    from t2lens.model import Transformer

__all__ = ["FOLLOW", "View", "told", "views_of"]

FOLLOW = {"next": "the true next token", "likeliest": "A's likeliest here", "token": "this token"}


@dataclass(frozen=True, kw_only=True)
class View:
    """One side at one position. token: whose logit is taken apart; target: the token that the lens follows at all
    positions, None where it is the true next one of each (at the last, which has none, see `Side.last`)."""

    side: Side
    pos: int
    token: int
    target: int | None
    against: int | None

    def word(self, token: int) -> str:
        return glyphs(self.side.loaded.model.to_str_tokens([token])[0])

    @property
    def lens(self) -> dict[str, Any]:
        """Options of the lens that follow it."""
        if self.target is not None:
            return {"target": self.target}
        return {} if self.side.last is None else {"last": self.side.last}

    @property
    def logit(self) -> dict[str, Any]:
        """Options of what takes its logit apart."""
        options = {"pos": self.pos, "token": self.token}
        return options if self.against is None else {**options, "against": self.against}

    @property
    def of_logit(self) -> str:
        """Whose logit, in words."""
        over = "" if self.against is None else f" over that of {self.word(self.against)}"
        return f"the logit of {self.word(self.token)}{over} at position {self.pos}"


def views_of(frame: Frame, traces: list[Trace], positions: list[int | None]) -> list[View]:
    """The sides at these positions. Says what cannot be, and leaves that side out."""
    state = st.session_state
    views, notices = [], []
    likeliest = None
    if state["lens_follow"] == "likeliest":
        here = positions[0]
        likeliest = _likeliest(frame.sides[0], len(traces[0].tokens) - 1 if here is None else here)
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


def told(views: list[View]) -> str:
    """What the lens follows, in words; at the last position whose likeliest token, and which."""
    if views[0].target is not None:
        return views[0].word(views[0].target)
    ends: dict[str, list[str]] = {}
    said = []
    for side in (view.side for view in views):
        if not side.trace().causal:
            said.append(f"the token at each position (in {side.letter}, which sees both sides)")
            continue
        whose, word = side.letter if side.last is None else "A", str(side.trace().dataset["followed"].values[-1])
        ends.setdefault(f"{whose}'s likeliest, {glyphs(word)}" if word else "none", []).append(side.letter)
    if ends:
        each = [f"{end} (in {' and '.join(sides)})" if len(views) > 1 else end for end, sides in ends.items()]
        said.insert(0, f"the true next token of each position; at the last, which has none, {', '.join(each)}")
    return "; ".join(said)


def _likeliest(side: Side, pos: int) -> str:
    """The side's likeliest token after a position, as text; nothing where its logits are not finite."""
    best = int(side.analyse("lens")["top_id"].isel(k=0, pos=max(pos, 0)).sel(read="out"))
    return side.loaded.model.to_str_tokens([best])[0] if best >= 0 else ""


def _view(side: Side, trace: Trace, pos: int, likeliest: str | None) -> View:
    state, model = st.session_state, side.loaded.model
    follow, against = state["lens_follow"], _read_token(model, state["lens_against"])
    if follow == "next":
        token, target = int(trace.dataset["followed_id"][pos]), None
        if token < 0:
            raise ValueError(f"{side.letter} has no likeliest token here: its logits are not finite.")
    else:
        token = target = _read_token(model, state["lens_token"] if follow == "token" else likeliest)
        if token is None:
            raise ValueError(
                "type the token that is to be followed."
                if follow == "token"
                else "A has no likeliest token here: its logits are not finite."
            )
    return View(side=side, pos=pos, token=token, target=target, against=against)


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

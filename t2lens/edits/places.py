"""Where an edit acts in a model: the hook points it means, and whether the model can do it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.edits.edit import Edit, near, shape_of
from t2lens.hooks.names import is_glob, resolve_names
from t2lens.residual import Read, Site

if TYPE_CHECKING:
    from t2lens.hooks import HookPoint
    from t2lens.model import Transformer

__all__ = ["CARRIED", "Place", "check", "check_span", "gates_at", "places_of"]

_OWN_TARGET = ("depth_attn", "depth_scores")  # hook points of the residual system that are no gates
_RANGE = re.compile(r"(-?\d+(?:\.\d+)?) ?(?:\.\.|to) ?(-?\d+(?:\.\d+)?)")
CARRIED = "r"  # the way in which the stream itself is read


@dataclass(frozen=True)
class Place:
    """One hook point at which an edit acts, and on which entries.

    axis, chosen: the axis of sources or heads and the indices there; None: all of them.
    span: the range that the unit of the hook point states.
    """

    point: HookPoint
    site: Site | None
    axis: int | None = None
    chosen: tuple[int, ...] | None = None
    span: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        assert self.point.name is not None
        return self.point.name

    @property
    def words(self) -> list[str]:
        return self.point.shape.split()


def places_of(model: Transformer, edit: Edit) -> list[Place]:
    """The hook points that `edit` means, in no order. KeyError where there is none, or a name is unknown."""
    if edit.target == "hook":
        assert edit.name is not None
        points = [model.hook_dict[name] for name in resolve_names(edit.name, model.hook_dict)]
        return [_place(model, edit, point, None) for point in points]
    found: list[Place] = []
    missing: list[KeyError] = []
    for name, site in _sites(model, edit):
        try:
            found += [_place(model, edit, point, site) for point in _points(model, edit, name, site)]
        except KeyError as error:  # of many sites, those act that have what is asked for
            missing.append(error)
    if not found:
        raise next((error for error in missing if "did you mean" in str(error)), missing[-1])
    return found


def _sites(model: Transformer, edit: Edit) -> list[tuple[str, Site | None]]:
    """(name, site) of the sites that the edit names; the embedding is an atom without a site."""
    named: dict[str, Site | None] = {"embed": None} if edit.target == "atom" else {}
    named |= {site.name: site for site in model.sites if edit.target != "atom" or site.kind != "out"}
    if edit.site in named:
        return [(edit.site, named[edit.site])]
    matched = [(name, site) for name, site in named.items() if fnmatchcase(name, edit.site)]
    if not matched or not is_glob(edit.site):
        what = "atom" if edit.target == "atom" else "site"
        raise KeyError(f"This model has no {what} {edit.site!r}{near(edit.site, named)}")
    return matched


def _points(model: Transformer, edit: Edit, name: str, site: Site | None) -> list[HookPoint]:
    hooks, what = model.hook_dict, edit.target
    if what == "atom":
        return [hooks["hook_embed" if site is None else f"blocks.{site.layer}.hook_{site.kind}_out"]]
    assert site is not None
    if what == "gate":
        return _gates(model, edit, site)
    if what in ("depth_weight", "depth_score", "read"):
        return _of_ways(model, edit, site)
    if what == "stream":
        for stem in ("resid", "streams"):
            if (full := _reached(model, site, stem)) in hooks:
                return [hooks[full]]
        raise KeyError(f"No stream is carried to {name} that could be edited there (see model.describe_hooks()).")
    last = "hook_z" if what == "head" else "hook_pattern"
    if (full := f"blocks.{site.layer}.{site.kind}.{last}") not in hooks:
        attending = [s.name for s in model.sites if s.kind in ("attn", "local")]
        raise KeyError(f"There is no attention at {name}{near(name, attending)}")
    return [hooks[full]]


def _reached(model: Transformer, site: Site, stem: str) -> str:
    """The hook point of the stream as `site` is reached, before anything there is made of it."""
    if site.layer == 0 and site.opens:
        return f"blocks.0.hook_{stem}_pre"
    if site.opens:
        return f"blocks.{(site.layer or model.cfg.n_layers) - 1}.hook_{stem}_post"
    return f"blocks.{site.layer}.hook_{stem}_mid" if site.kind == "mlp" else ""


def _of_ways(model: Transformer, edit: Edit, site: Site) -> list[HookPoint]:
    """The hook points of the reads at a site, or of their depth weights or scores."""
    ways = model.residual.ways(site)
    if edit.way is not None and edit.way not in ways:
        its = f"the ways are {', '.join(ways)}" if ways != ("",) else "it reads in one way, so leave way out"
        raise KeyError(f"The read at {site.name} has no way {edit.way!r}; {its}.")
    stem = {"depth_weight": "depth_attn", "depth_score": "depth_scores", "read": "read"}[edit.target]
    wanted = [Read(site, way) for way in ways if edit.way in (None, way)]
    names = [_read_hook(read) if stem == "read" else site.hook(stem, read.way) for read in wanted]
    found = [model.hook_dict[name] for name in names if name in model.hook_dict]
    if not found:
        have = [r.site.name for r in model.reads if r.site.hook(stem, r.way) in model.hook_dict]
        what = edit.target.replace("_", " ")
        if not have:
            raise KeyError(f"A {model.cfg.residual.describe()} model has no {what}s.")
        at = site.name if edit.way is None else f"{site.name}.{edit.way}"
        raise KeyError(f"There is no {what} to choose at {at}; {', '.join(dict.fromkeys(have))} have some.")
    return found


def _read_hook(read: Read) -> str:
    """The hook point that a read passes, or "". The stream as a block opens has transformer-lens's name."""
    if read.way != CARRIED:
        return read.site.hook("read", read.way)
    return f"blocks.{read.site.layer}.hook_resid_pre" if read.site.opens else ""


def _gates(model: Transformer, edit: Edit, site: Site) -> list[HookPoint]:
    """The hook points of the residual system's own numbers at a site, by what is between "hook_" and the site."""
    found = {key: point for key, point in gates_at(model, site).items() if edit.way in (None, key[1])}
    names = list(dict.fromkeys(name for name, _ in found))
    if not names:
        have = [s.name for s in model.sites if gates_at(model, s)]
        if not have:
            raise KeyError(f"A {model.cfg.residual.describe()} model has no gates.")
        way = "" if edit.way is None else f" in the way {edit.way!r}"
        raise KeyError(f"There is no gate at {site.name}{way}; {', '.join(have)} have some.")
    if edit.name is None and len(names) > 1:
        raise KeyError(f"There are several gates at {site.name}, {', '.join(names)}: say in name which one is meant.")
    if edit.name is not None and edit.name not in names:
        raise KeyError(f"There is no gate {edit.name!r} at {site.name}{near(edit.name, names)}")
    return [point for (name, _), point in found.items() if edit.name in (None, name)]


def gates_at(model: Transformer, site: Site) -> dict[tuple[str, str], HookPoint]:
    """(name, way) -> hook point of every gate at `site`, found by the names of hook points alone."""
    kind = "final" if site.layer is None else site.kind
    start = "" if site.layer is None else rf"blocks\.{site.layer}\."
    ways = "|".join(way for way in model.residual.ways(site) if way)
    way = rf"(?:_(?P<way>{ways}))?" if ways else ""
    forms = [rf"{start}hook_(?P<name>\w+?)_{kind}{way}", rf"{start}[a-z0-9]+_{kind}\.hook_(?P<name>\w+)"]
    if site.opens and site.layer is not None:  # what stands as the block opens, and names no sublayer
        forms.append(rf"{start}hook_(?!resid_|streams_)(?!\w+_(?:local|attn|mlp)(?:_[qkvr])?$)(?P<name>\w+)")
    found: dict[tuple[str, str], HookPoint] = {}
    for full, point in model.residual.hook_points.items():
        match = next(filter(None, (re.fullmatch(form, full) for form in forms)), None)
        if match is not None and match["name"] not in _OWN_TARGET:
            found[match["name"], match.groupdict().get("way") or ""] = point
    return found


def _place(model: Transformer, edit: Edit, point: HookPoint, site: Site | None) -> Place:
    words = point.shape.split()
    axis, chosen = None, None
    if point.read_only:
        raise ValueError(f"The tensor at {point.name} is only shown: nothing reads it, so that it cannot be edited.")
    if point.pos_dim is None:
        raise ValueError(f"The tensor at {point.name} ({point.shape}) has no positions, so that no edit can act there.")
    if "key_pos" in words and edit.target == "hook" and edit.operation in ("freeze_mean", "patch"):
        raise ValueError(f"Grids of queries and keys ({point.name}) have no mean or patch; scale or zero them.")
    if edit.sources is not None:
        names = [source.name for source in model.residual.sources(site)] if site is not None else []
        axis = next((i for i, word in enumerate(words) if word in ("source", "stream")), None)
        if axis is None:
            raise KeyError(f"What is at {point.name} ({point.shape}) is not split over sources; leave sources out.")
        for name in edit.sources:
            if name not in names:
                where = "" if site is None else f" at {site.name}"
                raise KeyError(f"There is no source {name!r}{where}{near(name, names)}")
        chosen = tuple(names.index(name) for name in edit.sources)
    if edit.heads is not None:
        axis = next((i for i, word in enumerate(words) if word in ("head", "kv_head")), None)
        if axis is None:
            raise KeyError(f"What is at {point.name} ({point.shape}) is not split over heads; leave heads out.")
        n = _size(model, site, point, words[axis])
        if n is not None and max(edit.heads) >= n:
            raise KeyError(f"There is no head {max(edit.heads)} at {point.name}; the heads are 0 to {n - 1}.")
        chosen = edit.heads
    match = _RANGE.fullmatch(point.unit)
    span = (float(match[1]), float(match[2])) if match else None
    return Place(point=point, site=site, axis=axis, chosen=chosen, span=span)


def _size(model: Transformer, site: Site | None, point: HookPoint, word: str) -> int | None:
    """How long an axis is, or None where only a pass tells."""
    local = ".local." in (point.name or "")
    attention: Any = model.cfg.local if local else model.cfg.attention
    sizes = {"d_model": model.cfg.d_model, "head": attention.n_heads, "d_head": attention.d_head}
    if word.isdigit():
        return int(word)
    if site is not None and word in ("source", "stream", "to", "from"):  # the last two: streams as well
        return len(model.residual.sources(site))
    if word == "kv_head":
        return getattr(attention, "n_kv_heads", attention.n_heads)
    return sizes.get(word)


# --- can the model do it ------------------------------------------------------------------------------------------


def check(model: Transformer, edits: Iterable[Edit]) -> list[str]:
    """See that `model` can do these edits; sentences that whoever makes them should know. See `Edit.check`."""
    told: list[str] = []
    for edit in edits:
        places = places_of(model, edit)
        for place in places:
            _check_value(model, edit, place)
        _check_prompt(model, edit)
        told += _notices(model, edit, places)
    return list(dict.fromkeys(told))


def _check_value(model: Transformer, edit: Edit, place: Place) -> None:
    if edit.operation == "plain_sum" or edit.value is None or edit.operation == "window":
        return
    sizes = [_size(model, place.site, place.point, word) for word in place.words]
    if place.chosen is not None:
        assert place.axis is not None
        sizes[place.axis] = len(place.chosen)
    rest, given = sizes[1 + (place.point.pos_dim or 0) :], shape_of(edit.value)
    fits = len(given) <= len(rest) and all(
        n is None or m in (1, n) for m, n in zip(reversed(given), reversed(rest), strict=False)
    )
    if not fits:
        words = place.words[1 + (place.point.pos_dim or 0) :]
        axes = ", ".join(f"{word} {n or '?'}" for word, n in zip(words, rest, strict=True))
        raise ValueError(
            f"The value has the shape {list(given)}, which does not spread over what is at {place.name} ({axes})."
        )
    if edit.operation != "set":
        return
    numbers = torch.tensor(edit.value, dtype=torch.float64)
    check_span(place, numbers)
    length = float(numbers.norm(dim=-1).max()) if numbers.ndim else math.nan
    if "unit direction" in place.point.meaning and not abs(length - 1) < 1e-3:
        raise ValueError(
            f"The {place.point.meaning} has the length 1; the given vector has the length {length:.4g}."
            if numbers.ndim
            else f"The {place.point.meaning} is a vector of length 1, so it cannot be set to one number."
        )


def check_span(place: Place, values: Tensor) -> None:
    """Raise ValueError where a value leaves the range that the hook point states (rounding aside)."""
    if place.span is None:
        return
    low, high = place.span
    slack = 1e-6 * (high - low)
    off = values[(values < low - slack) | (values > high + slack)]
    if off.numel():
        raise ValueError(
            f"What is at {place.name} lies in {low:g} to {high:g}; the edit would make it {float(off.flatten()[0]):g}."
        )


def _check_prompt(model: Transformer, edit: Edit) -> None:
    if edit.prompt is None:
        return
    ids = model.to_tokens(edit.prompt) if isinstance(edit.prompt, str) else torch.tensor([edit.prompt])
    n = model.prepare(ids)[0].shape[1]
    asked = edit.prompt_positions if edit.prompt_positions is not None else edit.positions
    for position in (asked or ()) if edit.operation == "patch" else ():
        if not -n <= position < n:
            raise ValueError(f"The prompt of the edit has {n} tokens, so there is no position {position} in it.")


def _notices(model: Transformer, edit: Edit, places: list[Place]) -> list[str]:
    told = []
    at = edit.site or edit.name
    if edit.target == "depth_weight" and model.residual.weights_sum_to_one:
        value = edit.value if isinstance(edit.value, tuple) else (edit.value,)
        whole = edit.operation == "set" and edit.sources is None and len(value) > 1 and abs(sum(value) - 1) < 1e-6
        if edit.operation in ("set", "scale", "add", "zero") and not whole:
            told.append(f"The depth weights of this system sum to 1; edited ones at {at} need not.")
        if edit.operation == "set" and min(value) < 0:
            told.append(f"A depth weight below 0, as set at {at}, is none that this system can make.")
    if edit.target == "read" and edit.way is None:
        wanted = {place.site for place in places}
        unseen = [read.name for read in model.reads if read.site in wanted and _read_hook(read) not in model.hook_dict]
        if unseen:
            told.append(f"What is read at {', '.join(unseen)} passes no hook point, so it stays as it is.")
    if edit.operation == "freeze_mean" and edit.prompt is None:
        told.append(f"The mean at {at} is over all real positions of the pass, later ones too.")
    if "unit direction" in places[0].point.meaning and edit.operation in ("scale", "add", "zero", "freeze_mean"):
        told.append(f"The direction at {at} need not have the length 1 under this edit.")
    return told

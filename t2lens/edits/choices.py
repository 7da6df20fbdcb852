"""What there is to edit in a model: the names that a form offers, target by target. Nothing runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from t2lens.edits.edit import OPERATIONS, Edit
from t2lens.edits.places import Place, gates_at, places_of

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = [
    "gate_names",
    "heads_at",
    "hook_names",
    "operations_on",
    "place_of",
    "sites_of",
    "sources_at",
    "targets_of",
    "ways_at",
]


def place_of(model: Transformer, target: str, **where: str | None) -> Place | None:
    """The (first) place of a target there (site, name, way), or None where the model has none."""
    places = _places(model, target, **where)
    return places[0] if places else None


def _places(model: Transformer, target: str, **where: str | None) -> list[Place]:
    if target == "hook" and not where.get("name"):
        return []
    given: dict[str, Any] = {name: value for name, value in where.items() if value}
    given |= {"operation": "window", "value": 1} if target == "pattern" else {"operation": "zero"}
    try:
        return places_of(model, Edit(target=target, **given))
    except (KeyError, ValueError):
        return []


def targets_of(model: Transformer) -> list[str]:
    """The targets that the model has, in the order of `OPERATIONS`.

    Example:
        >>> import t2lens
        >>> from t2lens.edits.choices import targets_of
        >>> targets_of(t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0))
        ['atom', 'stream', 'read', 'head', 'pattern', 'hook']
    """
    return [target for target in OPERATIONS if target == "hook" or sites_of(model, target)]


def sites_of(model: Transformer, target: str) -> list[str]:
    """The sites at which it can be edited, and "*" where it is every one of several."""
    names = [site.name for site in model.sites]
    if target == "gate":
        found = [site.name for site in model.sites if gates_at(model, site)]
    else:
        names = ["embed", *names] if target == "atom" else names
        found = [name for name in names if place_of(model, target, site=name)]
    return found if len(found) < 2 else [*found, "*"]


def gate_names(model: Transformer, site: str) -> list[str]:
    """The gates at a site (of "*": at any)."""
    sites = [each for each in model.sites if site in (each.name, "*")]
    return list(dict.fromkeys(name for each in sites for name, _ in gates_at(model, each)))


def hook_names(model: Transformer) -> list[str]:
    """The hook points whose tensor can be edited."""
    return [name for name in model.hook_dict if place_of(model, "hook", name=name)]


def ways_at(model: Transformer, target: str, site: str, name: str | None = None) -> list[str]:
    """The ways in which the target can be edited there one at a time; none where it is one."""
    if target not in ("depth_weight", "depth_score", "read", "gate") or site == "*":
        return []
    here = next((each for each in model.sites if each.name == site), None)
    ways = [way for way in model.residual.ways(here) if way] if here is not None else []
    return [way for way in ways if place_of(model, target, site=site, name=name, way=way)]


def sources_at(
    model: Transformer, target: str, site: str, name: str | None = None, way: str | None = None
) -> list[str]:
    """The sources among which one can choose there; none where what is edited is not split over sources."""
    place = place_of(model, target, site=site, name=name, way=way) if site != "*" else None
    if place is None or target not in ("depth_weight", "depth_score", "stream", "gate") or place.site is None:
        return []
    return [each.name for each in model.residual.sources(place.site)] if {"source", "stream"} & set(place.words) else []


def heads_at(model: Transformer, target: str, site: str) -> int:
    """How many heads there are to choose among; 0 where it has none."""
    if target not in ("head", "pattern") or place_of(model, target, site=site) is None:
        return 0
    if site.endswith(".local"):
        return 0 if model.cfg.local is None else model.cfg.local.n_heads
    return model.cfg.attention.n_heads


def operations_on(
    model: Transformer, target: str, site: str = "", name: str | None = None, way: str | None = None
) -> list[str]:
    """The operations that make sense there: those that choose among sources need two of them."""
    few = len(sources_at(model, target, site, name, way)) < 2
    choosing = ("swap", "one", "zero_renormalise")
    place = place_of(model, target, site=site, name=name, way=way)
    grid = place is not None and target == "hook" and "key_pos" in place.words
    return [
        each
        for each in OPERATIONS[target]
        if not (few and each in choosing and target != "pattern") and not (grid and each in ("freeze_mean", "patch"))
    ]

"""Which hook points a filter means. Nothing matched is an error, with the nearest names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TypeAlias

NameFilter: TypeAlias = "str | re.Pattern[str] | Callable[[str], bool] | Iterable[NameFilter] | None"


def is_glob(text: str) -> bool:
    """True when `text` has one of the wildcards * ? [ (none of them can stand in a hook name)."""
    return any(mark in text for mark in "*?[")


def nearest_names(asked: str, names: Iterable[str], n: int = 3) -> list[str]:
    """The `n` names most like `asked`: those that contain it first, then by spelling."""
    names, asked = list(names), str(asked)  # anything can be asked for
    word = asked.strip("*?").lower()
    holding = [name for name in names if word and word in name.lower()]
    spelled = difflib.get_close_matches(asked, names, n=n, cutoff=0.5)
    if word and not spelled and not holding:
        # A short form differs from every full name, so compare it with their last parts.
        last = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
        tail = word.rsplit(".", 1)[-1]
        spelled = [last[key] for key in difflib.get_close_matches(tail, list(last), n=n, cutoff=0.5)]
    return list(dict.fromkeys([*holding, *spelled]))[:n]


def unknown_name(asked: str, names: Collection[str], among: str = "in this model") -> KeyError:
    """The KeyError for a name or pattern that means no hook point."""
    if not asked:
        return KeyError("An empty string names no hook point; leave names_filter out to take all of them.")
    near = nearest_names(asked, names)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {len(names)} names."
    what = "matches no hook point" if is_glob(asked) else "is not a hook point"
    return KeyError(f"{asked!r} {what} {among}; {hint}")


def resolve_names(names_filter: NameFilter, names: Collection[str]) -> list[str]:
    """The hook names that `names_filter` means, in the order of `names`.

    A filter is None (all), a name, a glob, a compiled pattern (searched in the name), a predicate on names,
    or any iterable of these; each part must match something.

    Raises:
        KeyError: a part matches nothing (the message lists the nearest names), or the iterable is empty.
        TypeError: the filter is none of the above.

    Example:
        >>> names = ["hook_embed", "blocks.0.hook_attn_out", "blocks.1.hook_attn_out", "blocks.1.hook_mlp_out"]
        >>> resolve_names(["blocks.1.*", "hook_embed"], names)
        ['hook_embed', 'blocks.1.hook_attn_out', 'blocks.1.hook_mlp_out']
    """
    if names_filter is None:
        return list(names)
    if isinstance(names_filter, str):
        if names_filter in names:
            return [names_filter]
        globbed = is_glob(names_filter)
        found = [name for name in names if fnmatchcase(name, names_filter)] if globbed else []
        if not found:
            raise unknown_name(names_filter, names)
        return found
    if isinstance(names_filter, re.Pattern):
        found = [name for name in names if names_filter.search(name)]
        if not found:
            raise KeyError(f"The pattern {names_filter.pattern!r} matches none of the {len(names)} hook points.")
        return found
    if callable(names_filter):
        found = [name for name in names if names_filter(name)]
        if not found:
            raise KeyError(f"The names_filter function accepts none of the {len(names)} hook points.")
        return found
    if isinstance(names_filter, Iterable):
        wanted: set[str] = set()
        empty = True
        for part in names_filter:
            empty = False
            if part is None:
                raise TypeError("A collection of hook names must not hold None.")
            wanted.update(resolve_names(part, names))
        if empty:
            raise KeyError("An empty collection names no hook point; leave names_filter out to take all of them.")
        return [name for name in names if name in wanted]
    raise TypeError(
        "names_filter must be a name, a glob, a compiled pattern, a function of the name, or a collection of "
        f"these; got {type(names_filter).__name__}."
    )


def exact_names(names_filter: NameFilter) -> list[str]:
    """The names that a filter spells out in full: these must fire, while a pattern takes what there is."""
    if isinstance(names_filter, str):
        return [] if is_glob(names_filter) else [names_filter]
    if names_filter is None or isinstance(names_filter, re.Pattern) or callable(names_filter):
        return []
    return [name for part in names_filter for name in exact_names(part)]


def select_names(names_filter: NameFilter, names: Collection[str]) -> tuple[list[str], list[str]]:
    """(resolve_names, exact_names) of a filter that may be an iterator."""
    if isinstance(names_filter, Iterator):
        names_filter = list(names_filter)
    return resolve_names(names_filter, names), exact_names(names_filter)


def layer_of(name: str) -> int | None:
    """The block index in a name like `blocks.3.attn.hook_q`; None outside the blocks."""
    parts = name.split(".", 2)
    return int(parts[1]) if len(parts) == 3 and parts[0] == "blocks" and parts[1].isdigit() else None


def count_layers(names: Iterable[str]) -> int:
    """How many blocks the names speak of."""
    return 1 + max((layer for layer in map(layer_of, names) if layer is not None), default=-1)

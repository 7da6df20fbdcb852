"""Values of a checkpoint's config: each of the kind that its key has, or one sentence that says which is not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["agree", "axes", "checked", "n_blocks"]

_LARGEST = 2**31
_LARGEST_FLOAT = 3.4e38  # of float32


def checked(
    config: Mapping[str, Any],
    *,
    whole: Iterable[str] = (),
    natural: Iterable[str] = (),
    number: Iterable[str] = (),
    flag: Iterable[str] = (),
    text: Iterable[str] = (),
    listed: Iterable[str] = (),
    nested: Iterable[str] = (),
) -> dict[str, Any]:
    """The config without what is null, which is as good as not said.

    Args: the keys whose values must be whole numbers of at least 1 (`whole`) or 0 (`natural`), finite numbers, true or
        false, texts, lists, or objects with keys.

    Raises: ValueError naming the first key with a value of another kind.
    """
    config = {key: value for key, value in config.items() if value is not None}
    for least, keys in ((1, whole), (0, natural)):
        for key in keys:
            value = config.get(key, least)
            whole_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
            if not whole_number or not least <= value < _LARGEST:
                raise _wrong(key, value, f"a whole number of at least {least} and below 2^31")
            if key in config:
                config[key] = int(value)
    for key in number:
        value = config.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_FLOAT:
            raise _wrong(key, value, "a finite number")
        if key in config:
            config[key] = float(value)
    kinds = ((flag, bool, "true or false"), (text, str, "a text"), (listed, list, "a list"))
    for keys, kind, words in (*kinds, (nested, dict, "an object with keys")):
        for key in keys:
            if key in config and not isinstance(config[key], kind):
                raise _wrong(key, config[key], words)
    return config


def _wrong(key: str, value: Any, words: str) -> ValueError:
    shown = repr(value)
    return ValueError(
        f"The config has {key} {shown[:40] + '...' if len(shown) > 43 else shown}, which must be {words}."
    )


def agree(config: Mapping[str, Any], key: str, found: int) -> None:
    """ValueError where the config says another number than the weights show."""
    if config.get(key, found) != found:
        raise ValueError(f"The config has {key} {config[key]}, but the weights have {found}.")


def axes(shapes: Mapping[str, tuple[int, ...]], key: str, n: int) -> tuple[int, ...]:
    """The shape of a weight. ValueError where it does not have `n` axes, KeyError where it is missing."""
    if len(shapes[key]) != n:
        raise ValueError(f"{key} has the shape {list(shapes[key])}, which should have {n} axes.")
    return shapes[key]


def n_blocks(shapes: Iterable[str], prefix: str) -> int:
    """How many blocks the keys `prefix`0. , `prefix`1. , ... are of."""
    return len({match[1] for key in shapes if (match := re.match(rf"{re.escape(prefix)}(\d+)\.", key))})

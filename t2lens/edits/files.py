"""Edits as JSON and as Python."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from t2lens.edits.edit import Edit

__all__ = ["edits_from_json", "edits_to_json", "edits_to_python", "read_edits"]

_FORMAT = "t2lens edits 1"


def edits_to_json(edits: Any) -> str:
    """JSON text that `edits_from_json` reads, in one line."""
    listed = [edit.to_dict() for edit in read_edits(edits)]
    return json.dumps({"format": _FORMAT, "edits": listed})


def read_json(text: str) -> Any:
    """JSON without what it may say but nobody can mean: a key twice in one object, and numbers that are none.

    ValueError in one sentence.

    Example:
        >>> read_json('[1, {"a": 2}]')
        [1, {'a': 2}]
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(
            "The edits are not JSON that can be read: brackets stand within brackets too deeply."
        ) from None
    except ValueError as error:
        raise ValueError(f"The edits are not JSON ({error}).") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := next((key for i, key in enumerate(keys) if key in keys[:i]), None):
        raise ValueError(f"the key {twice[:40]!r} stands twice in one object")
    return dict(pairs)


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def edits_from_json(text: str) -> tuple[Edit, ...]:
    """The edits in a JSON text: what `edits_to_json` wrote, or one edit as an object, or a list of them.

    ValueError in one sentence for anything else; keys that no edit has are named.

    Example:
        >>> text = '{"target": "atom", "operation": "zero", "site": "1.mlp"}'
        >>> edits_from_json(text)[0].describe()
        'Sets what 1.mlp writes to zero.'
        >>> edits_from_json(edits_to_json(edits_from_json(text))) == edits_from_json(text)
        True
    """
    data = read_json(text)
    if isinstance(data, Mapping) and "format" in data:
        if data["format"] != _FORMAT:
            raise ValueError(f"These edits have the format {data['format']!r}; this version reads {_FORMAT!r}.")
        if set(data) != {"format", "edits"}:
            raise ValueError(f"An object with edits has the keys format and edits, not {', '.join(sorted(data))}.")
        data = data["edits"]
        if not isinstance(data, list):
            raise ValueError(f"The edits must be a list, not of type {type(data).__name__}.")
    return read_edits(data)


def read_edits(edits: Any) -> tuple[Edit, ...]:
    """Edits given as an `Edit`, as one edit's dictionary, as JSON text, or as several of these in a row.

    With several, a sentence about what is wrong begins with the number of the edit (from 0).
    """
    if isinstance(edits, Edit):
        return (edits,)
    if isinstance(edits, str):
        return edits_from_json(edits)
    if isinstance(edits, Mapping):
        return (Edit.from_dict(edits),)
    if not isinstance(edits, Iterable):
        raise TypeError(f"Edits are Edit objects, dictionaries or JSON text, not of type {type(edits).__name__}.")
    found: list[Edit] = []
    several = list(edits)
    for i, each in enumerate(several):
        if not isinstance(each, Edit | str | Mapping):
            raise TypeError(f"Edit {i} must be an Edit or an object with a target, not of type {type(each).__name__}.")
        try:
            found += read_edits(each)
        except (ValueError, TypeError) as error:
            if len(several) == 1:
                raise
            raise type(error)(f"Edit {i}: {error}") from None
    return tuple(found)


def edits_to_python(edits: Any) -> str:
    """Python that runs `model(tokens)` under the edits."""
    lines = [f"    {edit.to_python()},  # {edit.describe()}" for edit in read_edits(edits)]
    body = "\n".join(["edits = [", *lines, "]"]) if lines else "edits = []"
    return f"import t2lens\n\n{body}\nwith t2lens.edited(model, edits):\n    logits = model(tokens)\n"

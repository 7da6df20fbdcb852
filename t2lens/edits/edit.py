"""One edit: what is changed, where, and how. Plain data: no tensors, no model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from t2lens.edits.words import sentence
from t2lens.hooks.names import nearest_names
from t2lens.text import is_text

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["OPERATIONS", "Edit", "near", "shape_of"]

_VALUES = ("set", "scale", "add", "zero", "freeze_mean", "patch")
#: target -> the operations on it
OPERATIONS: dict[str, tuple[str, ...]] = {
    "depth_weight": (*_VALUES, "zero_renormalise", "swap", "one"),
    "depth_score": (*_VALUES, "swap"),
    "gate": _VALUES,
    "atom": _VALUES,
    "stream": _VALUES,
    "read": (*_VALUES, "plain_sum"),
    "head": _VALUES,
    "pattern": ("zero", "zero_renormalise", "scale", "one", "window"),
    "hook": _VALUES,
}
_FARTHEST = 2**31 - 1  # beyond any text, head and vocabulary
_TAKES = {  # which targets a field can stand with
    "name": ("gate", "hook"),
    "way": ("depth_weight", "depth_score", "read", "gate"),
    "sources": ("depth_weight", "depth_score", "stream", "gate"),
    "heads": ("head", "pattern", "hook"),
    "keys": ("pattern",),
}


@dataclass(frozen=True, kw_only=True)
class Edit:
    """An intervention as data: the same object in Python, on the command line, in the app and in its links.

    Attributes:
        target: what is changed.
            depth_weight    the depth weights of a read, over its sources
            depth_score     what they are made of, where there is a choice to make
            gate            any other number of the residual system at a site; `name` says which: DDL's beta, dir,
                            value, proj, Hyper-Connections' post and res, transform, keep, depth_gate, source_scale, ...
            atom            what a site writes ("embed": the embedding)
            stream          what is carried as the site is reached; `sources` picks streams of Hyper-Connections
            read            what a sublayer takes in at its site; the carried stream stays as it is (but way "r" is it)
            head            z of attention heads, before the output projection (sites 1.attn and 1.local)
            pattern         sequence attention of heads (1.attn; 1.local is ShortSWA)
            hook            the tensor at the hook point `name` (or those that a glob means)
        operation: set, scale (multiply by), add (steer), zero; freeze_mean: its mean over all real positions of all
            rows of the pass, or over the positions of `prompt`; patch: what it is at the same place in `prompt`;
            zero_renormalise: zero, and the rest of the row scaled up to the same total (`without`); swap: two sources
            change places; one: weight 1 on one source (or key), 0 on all others; plain_sum: the sum of all atoms that
            were written before; window: only the last `value` places (ShortSWA's window, made narrower).
        site: name of a site, or a glob ("*.mlp", "*"): every site that has the target and the sources.
        way: q, k, v or r where a site reads in several; None: all of its ways.
        sources: names from `model.sources()`; None: all of them.
        heads: None: all of them.
        positions: counted over the real tokens of each sequence, so that padding changes nothing; negative ones count
            from its end; None: all. Padding is never edited. Of a pattern they are the queries.
        keys: positions of the keys, for a pattern.
        value: a number, or numbers in rows that spread over what is edited (a row of depth weights, a vector).
        prompt: another text, or token ids, that the same model runs first, without these edits (patch, freeze_mean).
        prompt_positions: patch: where in `prompt` the values for `positions` come from, one for each; None: the same.

    Edits act in the order of their list where they meet at one hook point; otherwise in the order of the forward pass.
    `ValueError` or `TypeError` in one sentence where an edit cannot be; `check(model)` for what a model cannot do.

    Example:
        >>> import t2lens
        >>> edit = t2lens.Edit(target="gate", name="beta", site="1.attn", operation="set", value=0, positions=[2, -1])
        >>> edit.to_dict()
        {'target': 'gate', 'operation': 'set', 'site': '1.attn', 'name': 'beta', 'positions': [2, -1], 'value': 0.0}
        >>> edit.describe()
        'Sets the gate beta at 1.attn to 0 at positions 2 and -1.'
        >>> t2lens.Edit.from_dict(edit.to_dict()) == edit
        True
    """

    target: str
    operation: str
    site: str = ""
    name: str | None = None
    way: str | None = None
    sources: tuple[str, ...] | None = None
    heads: tuple[int, ...] | None = None
    positions: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    value: Any = None  # a float, or tuples of them
    prompt: str | tuple[int, ...] | None = None
    prompt_positions: tuple[int, ...] | None = None

    if TYPE_CHECKING:  # lists, arrays and single values become tuples

        def __init__(
            self,
            *,
            target: str,
            operation: str,
            site: str = "",
            name: str | None = None,
            way: str | None = None,
            sources: str | Sequence[str] | None = None,
            heads: int | Sequence[int] | None = None,
            positions: int | Sequence[int] | None = None,
            keys: int | Sequence[int] | None = None,
            value: Any = None,
            prompt: str | Sequence[int] | None = None,
            prompt_positions: int | Sequence[int] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        _one_of("target", self.target, tuple(OPERATIONS), hint="a gate, as beta, is target 'gate' with its name")
        _one_of("operation", self.operation, OPERATIONS[self.target], f" on {self.target}")
        self._check_names()
        for name in ("heads", "positions", "keys", "prompt_positions"):
            repeats = name == "prompt_positions"
            self._keep(name, _whole_numbers(name, getattr(self, name), from_end=name != "heads", repeats=repeats))
        self._keep("value", None if self.value is None else _numbers(self.value))
        self._check_value()
        self._check_prompt()

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_names(self) -> None:
        for name in ("site", "name", "way"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"An edit's {name} must be a text, not {_kind(getattr(self, name))}.")
        for name in ("site", "name", "way", "sources", "prompt"):
            _check_text(name, getattr(self, name))
        if self.site is None:
            self._keep("site", "")
        if self.sources is not None:
            names = [self.sources] if isinstance(self.sources, str) else self.sources
            if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
                raise TypeError(f"An edit's sources must be a list of names, not {_kind(self.sources)}.")
            self._keep("sources", tuple(names))
            _distinct("sources", names)
        for name, targets in _TAKES.items():
            if getattr(self, name) is not None and self.target not in targets:
                raise ValueError(f"An edit of {self.target} takes no {name}; {' and '.join(targets)} do.")
        if self.target == "hook":
            if not self.name or self.site:
                raise ValueError("An edit of a hook gives the name of the hook point and no site.")
        elif not self.site:
            raise ValueError(f"An edit of {self.target} needs a site, as '1.attn' or '*.mlp'.")

    def _check_value(self) -> None:
        operation, value = self.operation, self.value
        takes = operation in ("set", "scale", "add", "window")
        if takes and value is None:
            raise ValueError(f"The operation {operation} needs a value.")
        if not takes and value is not None:
            raise ValueError(f"The operation {operation} takes no value, so it must be left out.")
        if operation == "window" and not (isinstance(value, float) and value >= 1 and value == int(value)):
            raise ValueError("A window is a whole number of places from 1 on (1: the token itself alone).")
        if self.target == "pattern" and operation == "scale" and not isinstance(value, float):
            raise ValueError("A pattern is scaled by one number.")
        n = None if self.sources is None else len(self.sources)
        if operation == "swap" and n != 2:
            raise ValueError(f"The operation swap needs exactly two sources, not {n or 'none'}.")
        if self.target == "pattern":
            n = None if self.keys is None else len(self.keys)
        what = "key" if self.target == "pattern" else "source"
        if operation == "one" and n != 1:
            raise ValueError(f"The operation one needs exactly one {what}, not {n or 'none'}.")
        if operation == "zero_renormalise" and n is None:
            raise ValueError(f"The operation zero_renormalise needs {what}s: without them nothing would be left.")
        if operation == "window" and self.keys is not None:
            raise ValueError("The operation window takes no keys: it is the same for every query.")

    def _check_prompt(self) -> None:
        prompt = self.prompt
        if prompt is not None and self.operation not in ("patch", "freeze_mean"):
            raise ValueError(f"The operation {self.operation} takes no prompt; patch and freeze_mean do.")
        if self.operation == "patch" and prompt is None:
            raise ValueError("The operation patch needs a prompt, the text (or token ids) whose values it takes.")
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError("The prompt of an edit is empty: type at least one word.")
        elif prompt is not None:
            ids = _whole_numbers("prompt", prompt, from_end=False, repeats=True)
            self._keep("prompt", ids)
        if self.prompt_positions is None:
            return
        if self.operation != "patch" or self.positions is None:
            raise ValueError("prompt_positions say where a patch of `positions` takes its values; there is none here.")
        if len(self.prompt_positions) != len(self.positions):
            raise ValueError(
                f"positions and prompt_positions go in pairs, but there are {len(self.positions)} and "
                f"{len(self.prompt_positions)}."
            )

    # --- data
    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without what is left at its default."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: _listed(value) for name, value in found.items() if value not in (None, "")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Edit:
        """The edit of `to_dict`. ValueError names a key that no edit has, or one that is missing."""
        if not isinstance(data, Mapping):
            raise TypeError(f"An edit is an object with a target and an operation, not {_kind(data)}.")
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:
                raise ValueError(f"An edit has no {key!r}{near(str(key), known)}")
        for key in ("target", "operation"):
            if key not in data:
                raise ValueError(f"An edit needs its {key}, one of {', '.join(_choices(key, data))}.")
        return cls(**data)

    def to_python(self) -> str:
        """An expression that makes this edit."""
        plain = {name: tuple(v) if isinstance(v, list) else v for name, v in self.to_dict().items()}
        return f"t2lens.Edit({', '.join(f'{name}={value!r}' for name, value in plain.items())})"

    def describe(self) -> str:
        """One sentence."""
        return sentence(self)

    def check(self, model: Transformer) -> list[str]:
        """See that `model` can do this edit, before anything runs; sentences that whoever makes it should know.

        KeyError for a site, source, way, gate or hook that is not there, with the nearest names; ValueError for a value
        whose shape does not fit, or a gate outside its range (depth weights may be anything: that is a sentence).
        """
        from t2lens.edits.places import check

        return check(model, [self])


# --- values -------------------------------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    return (
        f"{value!r} ({type(value).__name__})" if isinstance(value, str | int | float) else f"a {type(value).__name__}"
    )


def near(asked: str, names: Iterable[str]) -> str:
    """The end of a sentence about a name that is not among `names`."""
    names = list(names)
    nearest = nearest_names(asked, names, 2)
    return f"; did you mean {' or '.join(map(repr, nearest))}?" if nearest else f"; there are {', '.join(names)}."


def _choices(key: str, data: Mapping[str, Any]) -> tuple[str, ...]:
    target = data.get("target")
    if key == "target" or not isinstance(target, str) or target not in OPERATIONS:
        return tuple(OPERATIONS) if key == "target" else tuple(dict.fromkeys(sum(OPERATIONS.values(), ())))
    return OPERATIONS[target]


def _one_of(what: str, value: Any, choices: tuple[str, ...], where: str = "", hint: str = "") -> None:
    if not isinstance(value, str):
        raise TypeError(f"An edit's {what} must be a text, not {_kind(value)}.")
    if value not in choices:
        also = f" There are {', '.join(choices)}; {hint}." if hint else ""
        raise ValueError(f"{value!r} is no {what}{where}{near(value, choices)}{also}")


def _check_text(what: str, value: Any) -> None:
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, str) and not is_text(each):
            raise ValueError(f"An edit has half a character in its {what} (a surrogate without its other half).")


def _distinct(what: str, values: Any) -> None:
    if not len(values):
        raise ValueError(f"An edit's {what} are empty; leave them out to mean all of them.")
    if len(set(values)) < len(values):
        twice = next(each for each in values if list(values).count(each) > 1)
        raise ValueError(f"An edit's {what} name {twice!r} twice.")


def _whole_numbers(what: str, value: Any, *, from_end: bool, repeats: bool) -> tuple[int, ...] | None:
    if value is None:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value
    values = [value] if isinstance(value, int) else value
    if not isinstance(values, list | tuple | range) or not all(type(each) is int for each in values):
        raise TypeError(f"An edit's {what} must be whole numbers, not {_kind(value)}.")
    if any(abs(each) > _FARTHEST for each in values):
        raise ValueError(f"An edit's {what} must be at most {_FARTHEST} in size.")
    if not from_end and any(each < 0 for each in values):
        raise ValueError(f"An edit's {what} must not be negative, as {min(values)} is.")
    if not repeats:
        _distinct(what, values)
    elif not len(values):
        raise ValueError(f"An edit's {what} is empty.")
    return tuple(values)


def _numbers(value: Any) -> Any:
    """A float, or tuples of floats in rows of one length; finite."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        rows = tuple(_numbers(each) for each in value)
        if not rows or len({shape_of(row) for row in rows}) > 1:
            raise ValueError("An edit's value must be a number, or numbers in rows of one length that are not empty.")
        return rows
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"An edit's value must be a number or rows of numbers, not {_kind(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"An edit's value must be finite, not {number}.")
    return number


def shape_of(value: Any) -> tuple[int, ...]:
    """Lengths of an edit's value: () of a number."""
    return (len(value), *shape_of(value[0])) if isinstance(value, tuple) else ()


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value

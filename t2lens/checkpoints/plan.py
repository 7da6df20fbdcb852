"""What a family file says about a checkpoint: our config, and how each of our weights is made of the file's.

A family is a module of this package with two functions and no state:

    recognises(config, shapes) -> bool         by its config and its keys, from small JSON and the header of the weights
    plan(config, shapes, **options) -> Plan    ValueError in one sentence when the config makes no sense

`config` is the checkpoint's own config.json as a dict, `shapes` maps each of its keys to the shape of the tensor. A
plan is data: no tensor is read before the whole of it has been checked against the file and against our model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from t2lens.config import ModelConfig

__all__ = ["Plan", "Take", "rows"]


@dataclass(frozen=True)
class Take:
    """One of our weights as a function of tensors of the file, by their keys (one key and no function: as it is).

    part: the rows of the key that it uses, where not all; those of all takes together must be all there are.
    """

    keys: tuple[str, ...]
    make: Callable[..., Tensor] = lambda x: x
    part: tuple[int, int] | None = None


@dataclass
class Plan:
    """How to load one checkpoint.

    weights: name of ours -> `Take`, or the file's key where it is taken as it is. Every parameter and persistent buffer
    of the model must be named. ignored: key of the file -> why it is not used. equal: pairs of keys that must hold the
    same numbers (a tied head saved twice). assumed: sentences on what the file does not say and the loader took for
    granted; they are printed.
    """

    cfg: ModelConfig
    weights: dict[str, Take | str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    equal: list[tuple[str, str]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def takes(self) -> dict[str, Take]:
        return {name: Take((t,)) if isinstance(t, str) else t for name, t in self.weights.items()}

    def used(self) -> set[str]:
        return {key for take in self.takes().values() for key in take.keys} | {k for pair in self.equal for k in pair}

    def ignore(self, keys: Iterable[str], reason: str) -> None:
        self.ignored |= dict.fromkeys(keys, reason)


def rows(key: str, start: int, stop: int) -> Take:
    """Rows start..stop of a packed weight (or bias)."""
    return Take((key,), lambda x: x[start:stop], part=(start, stop))

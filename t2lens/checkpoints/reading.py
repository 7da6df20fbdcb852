"""From a published checkpoint to a `Transformer`: recognise, plan, check everything, then read tensor by tensor.

The model is built on torch's meta device, which holds no numbers, and each weight is made as its tensors are read: a
model is in memory once, plus what one of its weights takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from t2lens.checkpoints import FAMILIES
from t2lens.checkpoints.archive import Archive
from t2lens.checkpoints.plan import Plan, Take
from t2lens.files import few
from t2lens.model import Transformer

__all__ = ["LoadedFrom", "read_checkpoint"]


@dataclass(frozen=True, kw_only=True)
class LoadedFrom:
    """Where a model came from: kept as `model.loaded_from`.

    assumed: sentences on what the file does not say. ignored: key of the file -> why it is not used.
    """

    path: Path
    family: str
    assumed: tuple[str, ...] = ()
    ignored: dict[str, str] = field(default_factory=dict)


def read_checkpoint(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    *,
    config: Mapping[str, Any] | str | Path | None = None,
    **options: Any,
) -> Transformer:
    """The model of a published checkpoint in eval mode, without a tokenizer.

    Args:
        path: a folder, or one file of weights with its config beside it or inside it.
        device: where to put it; the CPU by default.
        dtype: of the weights; float32 by default, whatever the file holds.
        config: in place of the checkpoint's own, as a dict or a JSON file.
        options: what the format leaves open, by the names that its family knows.

    Raises: ValueError in one sentence: no known format, keys missing or left over, wrong shapes, an unsafe file.
    """
    archive = Archive(path, config)
    family = _family(path, archive)
    name = family.__name__.rpartition(".")[2]
    plan = _plan(family, name, archive, options)
    with torch.device("meta"):
        model = Transformer(plan.cfg)
    takes = plan.takes()
    _check(path, name, archive, plan, takes, model)
    _check_equal(path, archive, plan)
    weights = _weights(path, archive, takes, model, torch.device(device or "cpu"), dtype or torch.float32)
    model.load_state_dict(weights, assign=True)
    left = [key for key, buffer in model.named_buffers() if buffer.is_meta]
    assert not left, f"Buffers that no file holds must be made on first use, not in the constructor: {left}"
    ignored = {key: reason for key, reason in plan.ignored.items() if key in archive.shapes} | archive.no_tensors
    model.loaded_from = LoadedFrom(path=Path(path), family=name, assumed=tuple(plan.assumed), ignored=ignored)
    model.name = (archive.folder if Path(path).is_dir() else Path(path)).absolute().name
    return model.requires_grad_(True).eval()


def _family(path: str | Path, archive: Archive) -> ModuleType:
    found = [family for family in FAMILIES if family.recognises(archive.config, archive.shapes)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(family.__name__.rpartition(".")[2] for family in found)
        raise ValueError(f"The checkpoint {str(path)!r} fits the formats {names} at once.")
    what = archive.config.get("model_type")
    says = f"its config says model_type {what!r}" if what else "its config names no model_type"
    if not archive.config:
        says = "it has no config.json, nor a config inside the weights"
    weights = few(sorted(archive.shapes))
    raise ValueError(f"The checkpoint {str(path)!r} is of no format that t2lens knows: {says}; it holds {weights}.")


def _plan(family: ModuleType, name: str, archive: Archive, options: dict[str, Any]) -> Plan:
    import inspect

    known = [
        key
        for key, parameter in inspect.signature(family.plan).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    if unknown := sorted(set(options) - set(known)):
        has = f"has the options {', '.join(known)}" if known else "has no options"
        raise ValueError(f"There is no option {unknown[0]!r} for a {name} checkpoint, which {has}.")
    try:
        return family.plan(archive.config, archive.shapes, **options)
    except KeyError as error:
        key = error.args[0] if error.args else "?"
        if not archive.config:
            raise ValueError(
                f"The {name} checkpoint {str(archive.folder)!r} has no config.json, nor a config inside the weights: "
                f"give one with config=, which must say {key}."
            ) from None
        raise ValueError(f"The {name} checkpoint {str(archive.folder)!r} lacks {key!r}.") from None


def _check(
    path: str | Path, name: str, archive: Archive, plan: Plan, takes: dict[str, Take], model: Transformer
) -> None:
    """Every key of the file is used or ignored, and every weight of ours is made of keys that are there."""
    used = plan.used()
    missing = sorted(used - set(archive.shapes))
    extra = sorted(set(archive.shapes) - used - set(plan.ignored))
    ours = set(model.state_dict())
    if not missing:
        _check_parts(path, archive, takes)
    faults = [f"it lacks {few(missing)}"] if missing else []
    faults += [f"it has the unexpected {few(extra)}"] if extra else []
    if unmade := sorted(ours - set(takes)):
        faults.append(f"nothing in it gives our {few(unmade)}")
    if unknown := sorted(set(takes) - ours):
        faults.append(f"our model has no {few(unknown)}")
    if faults:
        raise ValueError(f"The {name} checkpoint {str(path)!r} does not fit its config: {'; '.join(faults)}.")


def _check_parts(path: str | Path, archive: Archive, takes: dict[str, Take]) -> None:
    """The rows of a packed weight are all used."""
    parts: dict[str, list[tuple[int, int]]] = {}
    for take in takes.values():
        if take.part is not None:
            parts.setdefault(take.keys[0], []).append(take.part)
    for key, spans in parts.items():
        n, end = archive.shapes[key][0] if archive.shapes[key] else 0, 0
        for start, stop in sorted(spans):
            end = stop if start <= end else end
        if end != n:
            raise ValueError(f"In {str(path)!r} {key} has {n} rows, but by its config it should have {end}.")


def _check_equal(path: str | Path, archive: Archive, plan: Plan) -> None:
    for a, b in plan.equal:
        first, second = (_numbers(path, archive, key) for key in (a, b))
        if not torch.equal(first, second):
            raise ValueError(f"In {str(path)!r} the weights {a} and {b} should be the same, but they differ.")


def _weights(
    path: str | Path,
    archive: Archive,
    takes: dict[str, Take],
    model: Transformer,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, ours in model.state_dict().items():
        take = takes[name]
        sources = [_numbers(path, archive, key, floats=ours.is_floating_point()) for key in take.keys]
        keys = few(list(take.keys))
        if ours.is_floating_point():
            sources = [s.to(torch.promote_types(s.dtype, dtype)) for s in sources]
        try:
            made = take.make(*sources)
        except (RuntimeError, IndexError, ValueError) as error:
            shapes = ", ".join(str(list(s.shape)) for s in sources[:3])
            reason = str(error).splitlines()[0]
            raise ValueError(f"In {str(path)!r} {keys} of shape {shapes} cannot become {name} ({reason}).") from None
        if made.shape != ours.shape:
            raise ValueError(
                f"In {str(path)!r} {keys} gives {name} the shape {list(made.shape)} and not {list(ours.shape)}."
            )
        kind = dtype if ours.is_floating_point() else ours.dtype
        # a copy in any case: what was read is a view of a file
        weights[name] = made.to(device=device, dtype=kind, copy=True, memory_format=torch.contiguous_format)
    return weights


def _numbers(path: str | Path, archive: Archive, key: str, *, floats: bool = False) -> Tensor:
    """The tensor under `key`. ValueError for numbers that stand for others (or with `floats`, for whole ones)."""
    tensor = archive.get(key)
    if tensor.dtype not in (_FLOATS if floats else _FLOATS + _WHOLE):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"In {str(path)!r} {key} is {dtype}; quantised weights cannot be read.")
    return tensor


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

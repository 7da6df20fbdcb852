"""Edits at work: functions at hook points of the one forward pass, there for as long as a `with` block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.edits.edit import Edit
from t2lens.edits.files import read_edits
from t2lens.edits.places import Place, check, check_span, places_of
from t2lens.edits.weights import without
from t2lens.edits.words import joined
from t2lens.mixing import ForwardRecord
from t2lens.ordered_attention import reach
from t2lens.sublayers.norms import wide

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["edited"]


@contextmanager
def edited(model: Transformer, edits: Any) -> Iterator[Transformer]:
    """A `with` block in which every pass of `model` is edited; nothing stays behind, whatever happens inside.

    Everything is checked and the prompts of patches are run before the block begins. Edits act in the order of the list
    where they meet at one hook point, otherwise in the order of the forward pass, and before hooks that are attached
    inside the block, so that caches and records hold the edited values. Padding is never edited. With a decoding cache
    (`generate`) positions go on counting; there edits that need the whole sequence (positions from the end, means over
    the pass, keys) are refused. `model.resume` edits what it runs anew, and not the blocks before.

    Args:
        edits: an `Edit`, its dictionary, JSON text, or several of these. None at all: the plain pass, bit for bit.

    Raises:
        KeyError, ValueError, TypeError: as `Edit` and `Edit.check`; ValueError in the pass for a position that no row
            has, a gate that would leave its range, or weights with signs that are to be renormalised.

    Example:
        >>> import t2lens
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.AttnRes())
        >>> model = t2lens.build(cfg, seed=0)
        >>> edit = t2lens.Edit(target="depth_weight", operation="one", site="1.mlp", sources=["embed"])
        >>> with t2lens.edited(model, edit):
        ...     logits, cache = model.run_with_cache([[0, 7, 3]])
        >>> cache["blocks.1.hook_depth_attn_mlp"][0, 0].tolist()
        [1.0, 0.0, 0.0, 0.0]
        >>> bool((cache["blocks.1.hook_read_mlp"] == cache["hook_embed"]).all())
        True
    """
    wanted = read_edits(edits)
    if not wanted:
        yield model
        return
    check(model, wanted)
    jobs = [(edit, place) for edit in wanted for place in places_of(model, edit)]
    values = _values(model, jobs)
    with model.recording() as record:
        hooks = []
        for edit, place in jobs:
            other = values.get(edit.prompt, {}).get(place.name)
            job = _Job(edit=edit, place=place, record=record, other=other, causal=model.cfg.causal)
            hooks.append((place.name, partial(_act, job=job)))
        with model.hooks(hooks):
            yield model


def _values(model: Transformer, jobs: list[tuple[Edit, Place]]) -> dict[Any, dict[str, Tensor]]:
    """prompt -> hook name -> the tensor there, of one pass of the model per prompt."""
    names: dict[Any, list[str]] = {}
    for edit, place in jobs:
        if edit.prompt is not None:
            names.setdefault(edit.prompt, []).append(place.name)
    found = {}
    for prompt, wanted in names.items():
        with torch.no_grad():
            ids = prompt if isinstance(prompt, str) else [list(prompt)]
            cache: Any = model.run_with_cache(ids, names_filter=wanted)[1]
        found[prompt] = {name: cache[name] for name in wanted}
    return found


@dataclass(frozen=True)
class _Job:
    """One edit at one hook point; `record` gives the record of the pass, `other` is the tensor of the prompt's pass."""

    edit: Edit
    place: Place
    record: Callable[[], ForwardRecord]
    other: Tensor | None
    causal: bool


def _act(x: Tensor, *, hook: Any, job: _Job) -> Tensor | None:  # noqa: ARG001
    edit, place, record = job.edit, job.place, job.record()
    where = _where(edit, record)  # [B, T]
    if edit.target == "pattern":
        new, where = _attend(x, job, record, where)
    else:
        _check_pass(job, record)
        new = _whole_row(x, job, record)
        if new is None:
            part = x if place.chosen is None else x.index_select(place.axis or 0, _index(place, x))
            changed, where = _changed(part, x, job, record, where)
            new = changed if place.chosen is None else x.index_copy(place.axis or 0, _index(place, x), changed)
        where = _along(where, x, place.point.pos_dim or 1)
    if not bool(where.any()):
        return None
    if place.span is not None:
        check_span(place, new.detach()[where.expand_as(new)])
    return torch.where(where, new, x)


def _index(place: Place, x: Tensor) -> Tensor:
    return torch.tensor(place.chosen, device=x.device)


# --- where --------------------------------------------------------------------------------------------------------


def _where(edit: Edit, record: ForwardRecord) -> Tensor:
    """[B, T] bool: the real tokens that are edited."""
    valid = _valid(record)
    if edit.positions is None:
        return valid
    return torch.stack([_found(position, record) for position in edit.positions]).any(dim=0)


def _valid(record: ForwardRecord) -> Tensor:
    assert record.index is not None
    return torch.ones_like(record.index, dtype=torch.bool) if record.valid is None else record.valid


def _found(position: int, record: ForwardRecord) -> Tensor:
    """[B, T] bool: where the real token at `position` stands. ValueError where no row has it."""
    assert record.index is not None
    valid = _valid(record)
    if record.decoding:
        if position < 0:
            raise ValueError(
                f"While text is generated its end moves, so position {position} is not fixed; count from the start."
            )
        return valid & (record.index == position)
    n_real = valid.sum(dim=1, keepdim=True)
    found = valid & (record.index == (position if position >= 0 else n_real + position))
    if not bool(found.any()):
        raise ValueError(f"There is no position {position}: the longest sequence has {int(n_real.max())} tokens.")
    return found


def _along(where: Tensor, x: Tensor, axis: int) -> Tensor:
    """where [B, T] shaped to spread over x, whose positions lie on `axis`."""
    shape = [1] * x.ndim
    shape[0], shape[axis] = where.shape
    return where.reshape(shape)


# --- what ---------------------------------------------------------------------------------------------------------


def _check_pass(job: _Job, record: ForwardRecord) -> None:
    if record.decoding and job.edit.operation == "freeze_mean" and job.other is None:
        raise ValueError("While text is generated there is no mean over the pass; give freeze_mean a prompt.")


def _whole_row(x: Tensor, job: _Job, record: ForwardRecord) -> Tensor | None:
    """What is done to rows of depth weights or to reads as a whole, or None."""
    edit, place = job.edit, job.place
    if edit.operation == "plain_sum":
        return _plain_sum(x, place, record)
    if edit.operation not in ("one", "zero_renormalise"):
        return None
    mask = torch.zeros(x.shape[-1], dtype=torch.bool, device=x.device)
    mask[list(place.chosen or ())] = True
    if edit.operation == "one":
        return mask.to(x.dtype).expand_as(x)
    return without(wide(x), mask, renormalise=True).to(x.dtype)


def _plain_sum(x: Tensor, place: Place, record: ForwardRecord) -> Tensor:
    atoms = record.atoms
    assert place.site is not None
    if len(atoms) != place.site.seen + 1:
        raise ValueError("A resumed pass does not know what was written before it, so that it has no plain sum.")
    total = atoms[0]
    for atom in atoms[1:]:
        total = total + atom
    return total.to(x.dtype)


def _changed(part: Tensor, x: Tensor, job: _Job, record: ForwardRecord, where: Tensor) -> tuple[Tensor, Tensor]:
    """(the entries that are edited, as they become, and the positions [B, T] where they do)."""
    edit, place = job.edit, job.place
    if edit.operation == "zero":
        return torch.zeros_like(part), where
    if edit.operation == "swap":
        return part.flip(place.axis or 0), where
    other = job.other
    if other is not None and place.chosen is not None:
        other = other.index_select(place.axis or 0, _index(place, x))
    if edit.operation == "freeze_mean":
        over = part[_valid(record)] if other is None else other[0]
        return over.double().mean(dim=0).to(part.dtype).expand_as(part), where
    if edit.operation == "patch":
        assert other is not None
        return _patched(part, other, edit, record)
    value = torch.tensor(edit.value, dtype=part.dtype, device=part.device)
    try:
        value = value.expand(part.shape[1 + (place.point.pos_dim or 1) :])
    except RuntimeError:
        raise ValueError(
            f"The value has the shape {list(value.shape)}, which does not spread over what is edited at {place.name} "
            f"({list(part.shape)}, {place.point.shape})."
        ) from None
    if edit.operation == "set":
        return value.expand_as(part), where
    return (part * value if edit.operation == "scale" else part + value), where


def _patched(part: Tensor, other: Tensor, edit: Edit, record: ForwardRecord) -> tuple[Tensor, Tensor]:
    """Values of the prompt at the places they go to."""
    assert record.index is not None
    valid, n = _valid(record), other.shape[1]
    if edit.positions is None:
        longest = int(record.index[valid].max()) + 1
        short = not record.decoding and int(valid.sum(dim=1).min()) < n
        if longest > n or short:
            raise ValueError(
                f"A patch of all positions needs a prompt as long as the sequences; it has {n} tokens and they have "
                f"{int(valid.sum(dim=1).min())} to {longest}: give positions and prompt_positions."
            )
        return other[0][record.index.clamp(max=n - 1)].to(part.dtype), valid
    new, where = part, torch.zeros_like(valid)
    for position, source in zip(edit.positions, edit.prompt_positions or edit.positions, strict=True):
        here = _found(position, record)
        new = torch.where(_along(here, part, 1), other[0, source].to(part.dtype), new)
        where = where | here
    return new, where


def _attend(x: Tensor, job: _Job, record: ForwardRecord, where: Tensor) -> tuple[Tensor, Tensor]:
    """A pattern [B, H, Q, S], and where [B, H, Q, S] (or what spreads over it) it is edited."""
    edit, place = job.edit, job.place
    n_query, n_place = x.shape[-2:]
    at = where[:, None, :, None]
    if place.chosen is not None:
        heads = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
        heads[list(place.chosen)] = True
        at = at & heads[:, None, None]
    past = reach(n_query, n_place, None, x.device)
    if edit.operation == "window":
        near = reach(n_query, n_place, int(edit.value), x.device)
        return _renormalised(x, ~(near if job.causal else near | near.T)), at
    if edit.keys is None:
        keys = torch.ones_like(past)
    elif record.decoding:
        raise ValueError("While text is generated keys have no fixed place in the cache; run the whole text again.")
    else:
        keys = torch.stack([_found(key, record) for key in edit.keys]).any(dim=0)[:, None, None, :]
    if edit.operation == "one":  # at the queries that can see the key
        at = at & ((past if job.causal else torch.ones_like(past)) & keys).any(dim=-1, keepdim=True)
        if edit.positions is not None and not bool(at.any()):
            raise ValueError(
                f"No query at {list(edit.positions)} sees position {joined(edit.keys)}, which comes later."
            )
        return keys.to(x.dtype).expand_as(x), at
    if edit.operation == "zero_renormalise":
        return _renormalised(x, keys), at
    return torch.where(keys, x * (0.0 if edit.operation == "zero" else edit.value), x), at


def _renormalised(x: Tensor, mask: Tensor) -> Tensor:
    return without(wide(x), mask, renormalise=True).to(x.dtype)

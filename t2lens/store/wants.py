"""What to capture: hook points by name, glob or role, and what is made of each tensor before anything is copied.

A want is text, "NAMES" or "NAMES|REDUCER|REDUCER": names are a hook name, a glob, or one of `ROLES`; reducers act one
after the other inside the hook, on the tensor as it passes. So a want fits into a plan, a command line and a file:

    "depth weights"    "blocks.3.*hook_depth*"    "*hook_pattern|mean:head|top:8"    "*hook_read_*|norm"

    mean:AXIS    over an axis, by its word in the hook's shape (head, source, pos, ...)
    norm         Euclidean length along the last axis
    top:K        the K largest entries of the last axis; their indices (int32) are kept as "...|top:K|index"
    pos:A:B      positions A to B - 1, as in Python slices
    project:NAME onto given directions [n, d] (`directions={NAME: ...}`): inner products along the last axis
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from t2lens.hooks import HookPoint, resolve_names

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["POSITIONS", "ROLES", "Want", "read_wants"]

ROLES = {
    "depth weights": "the system's own weights of every read over its sources",
    "gates": "every other number per token that the residual system computes (beta, write and stream gates, ...)",
    "residual norms": "length of every read",
    "atoms": "what every sublayer writes, and the embedding",
    "reads": "what every sublayer and the readout read",
    "patterns": "where every head reads in the sequence",
}


@dataclass(frozen=True)
class Want:
    """One hook point and the reducers of its tensor. `key`: the name under which it is kept."""

    hook: str
    reducers: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return "|".join((self.hook, *self.reducers))

    def axes(self, words: Sequence[str]) -> tuple[str, ...]:
        """The words of the axes of what is kept, of a tensor whose axes are called `words`."""
        for reducer in self.reducers:
            words = _after(reducer, words)
        return tuple(words)

    def meaning(self, of: str) -> str:
        """What is kept, in words; `of`: what the tensor is."""
        for reducer in self.reducers:
            kind, _, argument = reducer.partition(":")
            words = {
                "mean": f"mean over {argument} of ",
                "norm": "Euclidean length of ",
                "top": f"the {argument} largest of ",
                "project": f"inner products with the directions {argument!r} of ",
            }
            of = words.get(kind, "") + of
        return of

    def unit(self, of: str) -> str:
        """`of`: that of the tensor. Directions bring one of their own, which nobody knows."""
        return "" if any(reducer.startswith("project:") for reducer in self.reducers) else of

    def take(self, tensor: Tensor, words: Sequence[str], directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """{key: what is kept} of the tensor that passes, whose axes are called `words`."""
        kept, axes, index = tensor.detach(), tuple(words), None
        for reducer in self.reducers:
            kind, _, argument = reducer.partition(":")
            if kind == "mean":
                axis = axes.index(argument)
                kept = kept.mean(dim=axis, dtype=torch.promote_types(kept.dtype, torch.float32)).to(kept.dtype)
            elif kind == "norm":
                kept = torch.linalg.vector_norm(kept, dim=-1)
            elif kind == "top":
                kept, index = kept.topk(min(int(argument), kept.shape[-1]), dim=-1)
                index = index.int()  # half the bytes
            elif kind == "pos":
                start, stop = (int(part) if part else None for part in argument.split(":"))
                kept = kept[tuple(slice(start, stop) if word in POSITIONS else slice(None) for word in axes)]
            else:
                onto = directions[argument]
                if onto.shape[1] != kept.shape[-1]:
                    raise ValueError(
                        f"The directions {argument!r} have {onto.shape[1]} numbers each, and {self.hook} has "
                        f"{kept.shape[-1]} along {axes[-1]}."
                    )
                kept = kept @ onto.to(kept).T
            axes = _after(reducer, axes)
        return {self.key: kept} if index is None else {self.key: kept, f"{self.key}|index": index}


def _after(reducer: str, axes: Sequence[str]) -> tuple[str, ...]:
    """The words of the axes after a reducer."""
    kind, _, argument = reducer.partition(":")
    if kind == "mean":
        return tuple(axis for axis in axes if axis != argument)
    if kind in ("norm", "top", "project"):
        return (*axes[:-1], *{"norm": (), "top": ("top",), "project": (argument,)}[kind])
    return tuple(axes)


POSITIONS = ("pos", "query_pos")


def read_wants(
    model: Transformer, what: str | Sequence[str], directions: Mapping[str, Tensor] | None = None
) -> tuple[Want, ...]:
    """The hook points that `what` means in this model, in the order in which they fire, each want once. A role of which
    this model has nothing (gates, say) is passed over where anything else is left.

    Raises KeyError for a name, glob or role that means nothing here (with the nearest), ValueError for a reducer that
    does not exist or does not fit the tensor.

    Example:
        >>> import t2lens
        >>> from t2lens.store.wants import read_wants
        >>> system = t2lens.residual.AttnRes()
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=1, residual=system)
        >>> [want.key for want in read_wants(t2lens.build(cfg), ["depth weights", "hook_embed|norm"])]
        ['hook_embed|norm', 'blocks.0.hook_depth_attn_attn', 'blocks.0.hook_depth_attn_mlp', 'hook_depth_attn_final']
    """
    asked = [what] if isinstance(what, str) else list(what)
    if not asked:
        raise ValueError(f"Nothing to capture was named; give hook names, globs or one of: {', '.join(ROLES)}.")
    found: dict[str, Want] = {}
    for want in asked:
        names, *reducers = want.split("|")
        for name in _names(model, names):
            own = (*(["norm"] if names == "residual norms" else []), *reducers)
            one = Want(name, own)
            _check(one, model.hook_dict[name], directions or {})
            found[one.key] = one
    if not found:
        raise KeyError(f"This model ({model.cfg.residual.describe()}) has no {' and no '.join(asked)} to capture.")
    order = {name: i for i, name in enumerate(_firing_order(model))}
    return tuple(sorted(found.values(), key=lambda want: order[want.hook]))


def _firing_order(model: Transformer) -> list[str]:
    """Hook names as they stand in the model; blocks before what follows them."""
    late = ("hook_read_final", "ln_final", "hook_depth", "unembed")
    return sorted(model.hook_dict, key=lambda name: name.startswith(late))


def _names(model: Transformer, names: str) -> list[str]:
    if names not in ROLES:
        try:
            return resolve_names(names, model.hook_dict)
        except KeyError as error:
            raise KeyError(f"{error.args[0]} Roles are {', '.join(ROLES)}.") from None
    return _roles(model)[names]


def _roles(model: Transformer) -> dict[str, list[str]]:
    reads = [n for n in model.hook_dict if n.split(".")[-1].startswith("hook_read_")]
    own = list(model.residual.hook_points)
    stems = [name.split(".")[-1] for name in own]
    depth = [n for n, stem in zip(own, stems, strict=True) if stem.startswith("hook_depth_attn")]
    streams = ("hook_depth_attn", "hook_depth_scores", "hook_resid", "hook_streams")
    gates = [
        n
        for n, stem in zip(own, stems, strict=True)
        if not stem.startswith(streams) and "d_model" not in model.residual.hook_points[n].shape.split()
    ]
    outs = ("hook_attn_out", "hook_mlp_out", "hook_local_out", "hook_embed")
    return {
        "depth weights": depth,
        "gates": gates,
        "residual norms": reads,
        "atoms": [n for n in model.hook_dict if n.split(".")[-1] in outs],
        "reads": reads,
        "patterns": [n for n in model.hook_dict if n.endswith("hook_pattern")],
    }


def _check(want: Want, point: HookPoint, directions: Mapping[str, Tensor]) -> None:
    axes: Sequence[str] = point.shape.split()
    for i, reducer in enumerate(want.reducers):
        kind, _, argument = reducer.partition(":")
        about = f"The reducer {reducer!r} of {want.hook}"
        if kind == "mean":
            if argument not in axes[1:]:
                raise ValueError(f"{about} needs one of the axes {', '.join(axes[1:])}, as in mean:{axes[-1]}.")
        elif kind == "norm" and not argument:
            if len(axes) < 3:
                raise ValueError(f"{about} needs an axis behind batch and position.")
        elif kind == "top":
            if not argument.isdigit() or not int(argument) or i + 1 < len(want.reducers):
                raise ValueError(f"{about} must be top:K with a whole number K above 0, and come last.")
        elif kind == "pos":
            ends = argument.split(":")
            if len(ends) != 2 or not all(not e or e.lstrip("-").isdigit() for e in ends):
                raise ValueError(f"{about} must be pos:START:STOP, as pos:0:16 or pos:-8:.")
            if not set(axes) & set(POSITIONS):
                raise ValueError(f"{about} needs an axis of positions; its axes are {', '.join(axes)}.")
        elif kind == "project":
            if argument not in directions:
                raise ValueError(f"{about} names directions that were not given; there are {sorted(directions)}.")
            if directions[argument].ndim != 2:
                raise ValueError(f"Directions are [n, d]; {argument!r} has {directions[argument].ndim} axes.")
        else:
            raise ValueError(f"{about} is not known; there are mean:AXIS, norm, top:K, pos:A:B, project:NAME.")
        axes = _after(reducer, axes)

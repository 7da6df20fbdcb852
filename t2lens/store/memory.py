"""`capture`: chosen tensors of many sequences in memory, reduced inside the hooks, with the size known beforehand."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.analysis.inputs import read_batch
from t2lens.hooks.names import layer_of
from t2lens.store.plan import in_words
from t2lens.store.wants import Want, read_wants

if TYPE_CHECKING:
    from t2lens.hooks import HookPoint
    from t2lens.model import Transformer

__all__ = ["Captured", "Size", "capture", "capture_size", "taking"]

_SHARE = 0.8  # of the memory that is free now


@dataclass(frozen=True)
class Size:
    """What a capture will hold: shapes and dtypes by key, and bytes in all."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    @property
    def n_bytes(self) -> int:
        return sum(torch.Size(shape).numel() * self.dtypes[key].itemsize for key, shape in self.shapes.items())


@dataclass(frozen=True)
class Captured(Mapping[str, Tensor]):
    """Tensors [sequence, pos, ...] by key, as a read-only mapping; beside them tokens and mask [sequence, pos]."""

    tensors: dict[str, Tensor]
    tokens: Tensor
    mask: Tensor | None
    notices: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Tensor:
        if key not in self.tensors:
            raise KeyError(f"{key!r} was not captured; there are {', '.join(self.tensors)}.")
        return self.tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass
class Taking:
    """A tap on every wanted hook point: reduces what passes, casts and moves it, and keeps it until `pop`."""

    wants: dict[str, list[Want]]
    directions: Mapping[str, Tensor]
    dtype: torch.dtype | None
    device: torch.device | str | None
    taken: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, tensor: Tensor, *, hook: HookPoint) -> None:
        for want in self.wants[hook.name or ""]:
            for key, kept in want.take(tensor, hook.shape.split(), self.directions).items():
                dtype = self.dtype if kept.is_floating_point() else None
                moved = kept.to(device=self.device, dtype=dtype)
                # what is still the passing tensor (or a view of it) would keep all of it in memory
                shares = moved.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                self.taken[key] = moved.clone() if shares else moved

    def pop(self) -> dict[str, Tensor]:
        """What the last pass left; the next starts empty."""
        taken, self.taken = self.taken, {}
        return taken


@contextmanager
def taking(
    model: Transformer,
    wants: Sequence[Want],
    *,
    directions: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Iterator[Taking]:
    """Inside, every pass of the model leaves what `wants` name in the object that this yields. Taps come after all
    hooks, so edits are seen."""
    by_hook: dict[str, list[Want]] = {}
    for want in wants:
        by_hook.setdefault(want.hook, []).append(want)
    tap = Taking(by_hook, directions or {}, dtype, device)
    try:
        for name in by_hook:
            model.hook_dict[name].add_tap(tap)  # type: ignore[union-attr]
        yield tap
    finally:
        for name in by_hook:
            model.hook_dict[name].remove_tap(tap)  # type: ignore[union-attr]


def last_layer(wants: Sequence[Want]) -> int | None:
    """`stop_at_layer` after which nothing wanted comes, or None where the readout is needed."""
    layers = [-1 if want.hook == "hook_embed" else layer_of(want.hook) for want in wants]
    if any(layer is None for layer in layers):
        return None
    return 1 + max(layer for layer in layers if layer is not None)


@torch.no_grad()
def capture_size(
    model: Transformer,
    what: str | Sequence[str],
    n_sequences: int,
    n_pos: int,
    *,
    directions: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Size:
    """What `capture` of so many sequences of n_pos tokens would hold, from one pass over one sequence of that length.

    Raises as `capture`.

    Example:
        >>> import t2lens
        >>> from t2lens.store import capture_size
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=1))
        >>> capture_size(model, ["patterns|mean:head"], n_sequences=100, n_pos=32).n_bytes
        409600
    """
    wants = read_wants(model, what, directions)
    with taking(model, wants, directions=directions, dtype=dtype) as tap:
        model(torch.zeros(1, n_pos, dtype=torch.long, device=model.W_E.device), stop_at_layer=last_layer(wants))
        one = tap.pop()
    return Size({key: (n_sequences, *x.shape[1:]) for key, x in one.items()}, {key: x.dtype for key, x in one.items()})


@torch.no_grad()
def capture(
    model: Transformer,
    input: Any,
    what: str | Sequence[str] = ("depth weights", "gates", "residual norms"),
    *,
    attention_mask: Any = None,
    directions: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    batch_size: int = 8,
    limit: int | None = None,
) -> Captured:
    """Run the model over sequences and keep chosen tensors, reduced inside the hooks before anything is copied.

    Args:
        input: a text, a list of texts, or token ids [pos] or [sequence, pos] with their attention_mask.
        what: names, globs or roles of hook points, with reducers: see `t2lens.store.wants`.
        directions: name -> [n, d], for reducers project:NAME.
        dtype, device: of what is kept (dtype: floating point tensors). Padding holds numbers without meaning.
        batch_size: sequences per pass. limit: bytes that may be kept; default: 80% of the memory that is free.

    Returns:
        Captured: a mapping key -> tensor [sequence, pos, ...]. What comes after the last wanted block does not run.

    Raises:
        KeyError: a name, glob or role that means nothing in this model. ValueError: a reducer that does not fit, bad
            input, or (MemoryError) a size above the limit: both are named, before anything runs.

    Example:
        >>> import t2lens
        >>> system = t2lens.residual.AttnRes()
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=system)
        >>> kept = t2lens.capture(t2lens.build(cfg, seed=0), [[0, 7, 3], [0, 5, 5]], ["depth weights", "atoms|norm"])
        >>> kept["blocks.1.hook_depth_attn_mlp"].shape, kept["blocks.1.hook_mlp_out|norm"].shape
        (torch.Size([2, 3, 4]), torch.Size([2, 3]))
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}.")
    batch = read_batch(model, input, attention_mask)
    wants = read_wants(model, what, directions)
    size = capture_size(model, what, *batch.tokens.shape, directions=directions, dtype=dtype)
    limit = _free_memory() if limit is None and device in (None, "cpu") else limit
    if limit is not None and size.n_bytes > limit:
        largest = max(size.shapes, key=lambda key: torch.Size(size.shapes[key]).numel())
        raise MemoryError(
            f"This capture would hold {in_words(size.n_bytes)}, and {in_words(limit)} are allowed; take fewer "
            f"sequences, a smaller dtype, or reducers (the largest tensor is {largest} {list(size.shapes[largest])})."
        )
    kept: dict[str, Tensor] = {}
    stop = last_layer(wants)
    with taking(model, wants, directions=directions, dtype=dtype, device=device) as tap:
        for start in range(0, len(batch.tokens), batch_size):
            rows = slice(start, start + batch_size)
            model(batch.tokens[rows], None if batch.mask is None else batch.mask[rows], stop_at_layer=stop)
            for key, part in tap.pop().items():
                if key not in kept:
                    kept[key] = part.new_empty(size.shapes[key])
                kept[key][rows] = part
    return Captured(kept, batch.tokens, batch.mask, batch.notices)


def _free_memory() -> int | None:
    """Bytes that may be taken, or None where the system does not tell."""
    try:
        return int(_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return None

"""Capture: the tensors of one forward pass, as they were when their hook points fired."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformer_lens.utilities.slice import Slice

from .point import HookPoint


@cache
def keep_freed_memory() -> None:
    """Ask glibc, once per process, to keep up to 256 MB of freed memory in place of giving it back to the system.

    A cache holds what a plain pass would reuse at once, and when it goes, glibc returns those pages; the next cached
    run then pays for every page anew, which costs more than all the hooks. A MALLOC_TRIM_THRESHOLD_ in the environment
    wins.
    """
    if sys.platform != "linux" or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(-1, 256 * 2**20)  # -1: M_TRIM_THRESHOLD


class Capture:
    """A tap and a hook function in one: at each hook point it stores the tensor under the point's name.

    Args:
        cache: where tensors go.
        alias: store the tensor itself and let `check` find out if it was modified later; else a copy.
        device, dtype: of what is stored (dtype: floating point tensors only).
        pos_slice: what to keep of the position axis (`HookPoint.pos_dim`), as in transformer_lens' Slice.
        remove_batch_dim: drop axis 0, which must have size 1.
        grads: also store gradients, as `<name>_grad`, once the output is differentiated.
        thread: the identity of the only thread whose passes are captured; None for all.
    """

    def __init__(
        self,
        cache: dict[str, Tensor],
        *,
        alias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        pos_slice: Any = None,
        remove_batch_dim: bool = False,
        grads: bool = False,
        thread: int | None = None,
    ):
        self.cache, self.alias, self.device, self.dtype = cache, alias, device, dtype
        self.pos_slice = Slice.unwrap(pos_slice)  # an int keeps the axis, as everywhere in transformer_lens
        self.remove_batch_dim, self.grads, self.thread = remove_batch_dim, grads, thread
        self._versions: list[tuple[str, Tensor, int]] = []

    def __call__(self, tensor: Tensor, *, hook: HookPoint) -> Tensor | None:
        if self.thread is not None and threading.get_ident() != self.thread:
            return None  # another session runs the same model at the same time
        name = hook.name
        if name is None:
            raise ValueError("A HookPoint without a name cannot be cached; call setup() at the end of __init__.")
        if tensor.dim() != hook.n_dims:
            raise ValueError(f"Hook {name!r} is declared as '{hook.shape}', but a tensor {list(tensor.shape)} came.")
        self.cache[name] = self._keep(tensor, hook, self.alias)
        if not (self.grads and tensor.requires_grad):
            return None
        seen = tensor.view_as(tensor)  # a node of its own: its gradient is what flows back into this place and no other
        seen.register_hook(partial(self.keep_grad, hook=hook))
        return seen

    def keep_grad(self, grad: Tensor, *, hook: HookPoint) -> None:
        """A backward hook: store the gradient."""
        self.cache[f"{hook.name}_grad"] = self._keep(grad, hook, alias=False)

    def _keep(self, tensor: Tensor, hook: HookPoint, alias: bool) -> Tensor:
        kept = tensor.detach()
        if self.pos_slice.mode != "identity" and hook.pos_dim is not None:
            alias = False  # a slice is a view that would hold the whole tensor in memory
            try:
                kept = self.pos_slice.apply(kept, dim=hook.pos_dim)
            except IndexError:
                size = tensor.shape[hook.pos_dim]
                raise ValueError(
                    f"pos_slice {self.pos_slice.slice} is outside the {size} positions at hook {hook.name!r}."
                ) from None
        if self.remove_batch_dim:
            if kept.shape[0] != 1:
                raise ValueError(
                    f"remove_batch_dim needs a batch of 1, but at hook {hook.name!r} it is {kept.shape[0]}."
                )
            kept = kept[0]
        moved = kept.to(device=self.device, dtype=self.dtype if kept.is_floating_point() else None)
        if moved is not kept:
            return moved
        if alias and not kept.is_inference():  # inference tensors do not count their modifications
            self._versions.append((hook.name or "", kept, kept._version))
            return kept
        return kept.clone()

    def check(self) -> None:
        """Raise RuntimeError if a stored tensor was modified after its hook point fired."""
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"The tensor at hook {name!r} was modified in place after the hook point, so the cache "
                    "would be wrong; the model promised otherwise with hooked_tensors_are_final."
                )

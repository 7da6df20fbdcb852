"""HookPoint: a named place in the forward pass where a tensor can be seen and edited."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint as LensHookPoint
from transformer_lens.hook_points import LensHandle

POSITION_WORDS = ("pos", "query_pos", "q_pos", "query")

_passes = threading.local()  # .fired: the hook points that fired in the running pass of this thread
_attaching = threading.RLock()  # held while attachments change, so that none of another thread is missed
_opaque_fire: Callable | None = None  # HookPoint._fire, marked so that torch.compile leaves it alone


@contextmanager
def forward_pass() -> Iterator[set[HookPoint]]:
    """One pass of a model: inside it no hook point may fire twice. Yields the set of those that fired."""
    before = getattr(_passes, "fired", None)
    fired: set[HookPoint] = set()
    _passes.fired = fired
    try:
        yield fired
    finally:
        _passes.fired = before


def _label(hook: Callable) -> str:
    # The repr of a partial prints its arguments, which may be large tensors.
    return f"partial({hook.func!r}, ...)" if isinstance(hook, functools.partial) else repr(hook)


def _fire_outside_graph() -> Callable:
    global _opaque_fire
    if _opaque_fire is None:
        # Made only inside a compiled call, where torch._dynamo is loaded anyway: its import takes seconds.
        reason = "A hook is attached to a HookPoint; detach it, or compile without fullgraph=True."
        _opaque_fire = torch.compiler.disable(HookPoint._fire, reason=reason)
    return _opaque_fire


class _Handle(RemovableHandle):
    """torch's handle of a hook, with its hook point told when the hook is removed."""

    point: weakref.ref[HookPoint] | None = None  # a copied or unpickled handle has none

    def __init__(self, handle: RemovableHandle, point: HookPoint):
        vars(self).update(vars(handle))
        self.point = weakref.ref(point)

    def remove(self) -> None:
        with _attaching:
            super().remove()
            point = self.point and self.point()
            if point is not None:
                point._settle()


class _CheckedHook:
    """A user's hook function; a result that cannot stand in for the tensor raises with its name."""

    def __init__(self, point: HookPoint, hook: Callable):
        self.point, self.hook = point, hook

    def __repr__(self) -> str:
        return _label(self.hook)

    def __call__(self, tensor: Any, *, hook: Any) -> Any:
        result = self.hook(tensor, hook=hook)
        if result is not None and result is not tensor:
            self.point.check_result(tensor, result, repr(self))
        return result


class HookPoint(LensHookPoint):
    """An identity with a name. Hooks attached to it see the tensor that passes and may replace it.

    Args:
        shape: the words of the tensor's axes, e.g. "batch pos head d_head"; the first is "batch".
        meaning: what the tensor holds, in one phrase.
        unit: its unit, e.g. "nats"; empty when it has none.
        read_only: the value is not used further on, so that an edit would do nothing: editing raises.

    `pos_dim` is the axis that `pos_slice` cuts (the word "pos" or "query_pos" of the shape), None when there
    is none. `active` is True while anything is attached: forward or backward, through our methods or torch's own
    (but hooks that torch holds for all modules at once miss an idle hook point).

    Example:
        >>> import torch
        >>> point = HookPoint(shape="batch pos d_model", meaning="what the block reads")
        >>> handle = point.add_hook(lambda tensor, hook: tensor * 0)
        >>> point(torch.ones(1, 2, 3)).sum().item()
        0.0
        >>> point.remove_hooks()
        >>> point(torch.ones(1, 2, 3)).sum().item()
        6.0
    """

    active: bool = False
    may_edit: bool = False  # True while something is attached that could change the tensor; captures cannot

    def __init__(self, shape: str, meaning: str, unit: str = "", *, read_only: bool = False):
        super().__init__()
        words = shape.split()
        if not words or words[0] != "batch" or not meaning:
            raise ValueError(
                "A HookPoint needs a meaning and a shape that starts with 'batch', as 'batch pos d_model'; "
                f"got shape {shape!r} and meaning {meaning!r}."
            )
        self.shape, self.meaning, self.unit, self.read_only = shape, meaning, unit, read_only
        self.n_dims = len(words)
        self.pos_dim: int | None = next((words.index(word) for word in POSITION_WORDS if word in words), None)
        self._taps: tuple[Callable, ...] = ()  # captures: they see the tensor after every hook

    @property
    def label(self) -> str:
        return repr(self.name) if self.name else "<unnamed>"

    def _has_torch_hooks(self) -> bool:
        return bool(self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks)

    def __call__(self, x: Tensor) -> Tensor:
        return x  # _Attached does otherwise

    def _fire(self, x: Tensor) -> Tensor:
        hooked = self._has_torch_hooks()
        if not hooked and not self._taps:
            return x
        fired = getattr(_passes, "fired", None)
        if fired is not None:
            if self in fired:
                raise RuntimeError(
                    f"Hook {self.label} fired twice in one forward pass, so its value would be ambiguous; "
                    "each place needs a HookPoint of its own."
                )
            fired.add(self)
        y = x
        if hooked:
            before = x.clone() if self.read_only else x
            y = super().__call__(x)
            if y is not x:
                self.check_result(x, y, "a hook")
            if self.read_only and not torch.allclose(before, y, rtol=0, atol=0, equal_nan=True):
                raise ValueError(f"Hook {self.label} is read-only: nothing reads its tensor, so it must not be edited.")
        for tap in self._taps:
            seen = tap(y, hook=self)
            y = y if seen is None else seen
        return y

    def check_result(self, given: Tensor, result: Any, who: str) -> None:
        """Raise ValueError unless `result`, returned by `who`, can stand in for `given`."""
        if isinstance(result, Tensor):
            alike = (result.shape, result.dtype, result.device) == (given.shape, given.dtype, given.device)
            got = f"{list(result.shape)} {result.dtype} on {result.device}"
        else:
            alike, got = False, f"a {type(result).__name__}"
        if not alike:
            raise ValueError(
                f"At hook {self.label}, {who} returned {got}, but the tensor there is {list(given.shape)} "
                f"{given.dtype} on {given.device} ({self.shape})."
            )

    def add_hook(
        self,
        hook: Callable,
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: list[str] | None = None,
    ) -> LensHandle:
        """`hook(tensor, hook=self)` may return a replacement of the same shape, dtype and device.

        Raises TypeError at once when the function cannot be called so, ValueError for another direction.
        """
        if not callable(hook):
            raise TypeError(f"A hook for {self.label} must be a function, got {type(hook).__name__}.")
        try:
            signature = inspect.signature(hook)
        except ValueError:  # some built-in callables have no signature to look at
            signature = None
        if signature is not None:
            try:
                signature.bind(None, hook=self)
            except TypeError:
                raise TypeError(
                    f"A hook for {self.label} is called as fn(tensor, hook=hook_point), but {_label(hook)} "
                    f"has the signature {signature}."
                ) from None
        handle: Any = super().add_hook(
            _CheckedHook(self, hook),
            dir=dir,
            is_permanent=is_permanent,
            level=level,
            prepend=prepend,
            alias_names=alias_names,
        )
        if handle is None:  # transformer_lens before 4.1 returns nothing
            handle = (self.fwd_hooks if dir == "fwd" else self.bwd_hooks)[0 if prepend else -1]
        if hasattr(handle, "user_hook"):
            handle.user_hook = hook
        return handle

    def add_perma_hook(self, hook: Callable, dir: Literal["fwd", "bwd"] = "fwd") -> LensHandle:  # type: ignore[override]
        """As `add_hook`, for a hook that stays when hooks are reset."""
        return self.add_hook(hook, dir, is_permanent=True)

    def remove_handles(self, handles: list[LensHandle]) -> None:
        """Remove these hooks of this hook point, and no other."""
        gone = {id(handle) for handle in handles}
        with _attaching:
            for handle in handles:
                handle.hook.remove()
            self.fwd_hooks = [each for each in self.fwd_hooks if id(each) not in gone]
            self.bwd_hooks = [each for each in self.bwd_hooks if id(each) not in gone]
            self._settle()

    def add_tap(self, tap: Callable) -> None:
        """Let `tap(tensor, hook=self)` see the tensor after all hooks, until remove_tap or reset_hooks."""
        with _attaching:
            self._taps = (*self._taps, tap)
            self._settle()

    def remove_tap(self, tap: Callable) -> None:
        with _attaching:
            self._taps = tuple(each for each in self._taps if each is not tap)
            self._settle()

    def remove_hooks(
        self,
        dir: Literal["fwd", "bwd", "both"] = "fwd",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        with _attaching:
            super().remove_hooks(dir, including_permanent, level)
            if dir != "bwd" and level is None:
                self._taps = ()
            self._settle()

    def _settle(self) -> None:
        """Be of the class that fits what is attached."""
        idle = getattr(type(self), "idle_form", type(self))
        form: Any = _attached_form(idle) if self._taps or self._has_torch_hooks() else idle
        self.__class__ = form

    # torch's own ways to attach something all pass through here, so that none is missed.
    def _register(self, register: Callable[..., RemovableHandle], *args: Any, **kwargs: Any) -> RemovableHandle:
        with _attaching:
            handle = register(*args, **kwargs)
            self._settle()
        return _Handle(handle, self)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._register(super().register_forward_hook, *args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._register(super().register_forward_pre_hook, *args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._register(super().register_full_backward_hook, *args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._register(super().register_full_backward_pre_hook, *args, **kwargs)

    def register_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._register(super().register_backward_hook, *args, **kwargs)


class _Attached:
    """Mixed into the class of a hook point for as long as something is attached.

    So an idle hook point need not ask whether it is idle, which is a third of its cost, and compiled code, which
    does not guard on hooks but does on classes, notices when that changes.
    """

    active = True

    @property
    def may_edit(self) -> bool:
        return torch.compiler.is_compiling() or self._has_torch_hooks()  # type: ignore[attr-defined]

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _fire_outside_graph()(self, x)
        return (_opaque_fire or HookPoint._fire)(self, x)  # type: ignore[arg-type]


@functools.cache
def _attached_form(idle: type[HookPoint]) -> type[HookPoint]:
    return type(idle.__name__, (_Attached, idle), {"idle_form": idle, "__module__": idle.__module__})

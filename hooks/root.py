"""HookedRoot: the base class of a model whose tensors pass through named hook points."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint as LensHookPoint
from transformer_lens.hook_points import LensHandle

from .cache import ActivationCache
from .capture import Capture
from .describe import HookRow, HookTable
from .names import NameFilter, layer_of, select_names
from .point import HookPoint, forward_pass

Direction = Literal["fwd", "bwd"]
Hooks = Sequence[tuple[Any, Callable]]


class HookedRoot(HookedRootModule):
    """A transformer_lens root module that validates names, cleans up after any error and returns an `ActivationCache`.

    Call `setup()` as the last statement of `__init__`. Hooked and cached passes run eagerly even when the model was compiled in place.

    Class attributes:
        stream_is_additive: the residual stream is a plain sum of what was written to it, so that transformer_lens' residual helpers are
            exact; they raise `NotAdditiveError` otherwise.
        hooked_tensors_are_final: no tensor is modified in place after it passed through a hook point, so that caching need not copy. This
            is verified after every cached run.
    """

    stream_is_additive: bool = False
    hooked_tensors_are_final: bool = False
    hook_dict: dict[str, HookPoint]  # type: ignore[assignment]  # setup() accepts nothing else

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        with forward_pass():
            return super().__call__(*args, **kwargs)

    # ---- construction ----

    def mount(self, path: str, hook_point: HookPoint) -> HookPoint:
        """Register `hook_point` under a dotted path, e.g. `blocks.3.ddl_attn.hook_beta`; empty modules are made where the path has none.

        Raises ValueError when the path is taken, cannot be made, or `setup()` has already run.
        """
        if hasattr(self, "hook_dict"):
            raise ValueError(
                f"{path!r} cannot be mounted after setup(), which gives hook points their names."
            )
        *parents, last = path.split(".")
        at: nn.Module = self
        for part in parents:
            child = at._modules.get(part)
            if child is None:
                if not part or hasattr(at, part) or isinstance(at, nn.ModuleList):
                    raise ValueError(
                        f"{path!r} cannot be mounted: there is no module {part!r} in {type(at).__name__}, nor room for one."
                    )
                child = nn.Module()
                at.add_module(part, child)
            at = child
        if not last or hasattr(at, last):
            raise ValueError(f"{path!r} cannot be mounted: the name is {'taken' if last else 'empty'}.")
        at.add_module(last, hook_point)
        return hook_point

    def setup(self) -> None:
        """Give every hook point its name. Raises when one has two names or none, or is not a t2lens HookPoint."""
        first_name: dict[int, str] = {}
        modules = list(self.named_modules(remove_duplicate=False))
        for name, module in modules:
            if not isinstance(module, LensHookPoint):
                continue
            if not isinstance(module, HookPoint):
                raise TypeError(f"{name!r} must be a t2lens.hooks.HookPoint, got {type(module)!r}.")
            if id(module) in first_name:
                raise ValueError(
                    f"One HookPoint is registered as {first_name[id(module)]!r} and as {name!r}; "
                    "each place needs a HookPoint of its own."
                )
            first_name[id(module)] = name
        for name, module in modules:
            for attribute, value in vars(module).items():
                held = (
                    value.values()
                    if isinstance(value, dict)
                    else value
                    if isinstance(value, list | tuple)
                    else ()
                )
                if any(isinstance(each, LensHookPoint) and id(each) not in first_name for each in held):
                    raise ValueError(
                        f"{name or type(self).__name__} holds a HookPoint in {attribute!r}, a plain {type(value).__name__}, "
                        "where it gets no name; use nn.ModuleList, nn.ModuleDict or mount()."
                    )
        super().setup()

    def _check_setup(self) -> None:
        if not hasattr(self, "hook_dict"):
            raise ValueError(
                f"{type(self).__name__} has no hook names yet; call setup() at the end of its __init__."
            )
        if sum(isinstance(module, LensHookPoint) for module in self.modules()) != len(self.hook_dict):
            names = [
                n for n, m in self.named_modules() if isinstance(m, LensHookPoint) and n not in self.hook_dict
            ]
            raise ValueError(
                f"Hook points were added or removed after setup() ({', '.join(names) or 'removed'}); call setup() again."
            )

    def describe_hooks(self) -> HookTable:
        """Every hook point with the words of its shape, its meaning and its unit; no forward pass is needed."""
        self._check_setup()
        return HookTable(
            HookRow(name=name, shape=p.shape, meaning=p.meaning, unit=p.unit)
            for name, p in self.hook_dict.items()
        )

    # ---- hooks ----

    def _attach(
        self, where: NameFilter, hook: Callable, dir: Direction, **how: Any
    ) -> list[tuple[HookPoint, LensHandle]]:
        added: list[tuple[HookPoint, LensHandle]] = []
        try:
            for name in select_names(where, self.hook_dict)[0]:
                point = self.hook_dict[name]
                checks = {key: value for key, value in how.items() if key in ("is_permanent", "prepend")}
                self.check_hooks_to_add(point, name, hook, dir=dir, **checks)
                added.append((point, point.add_hook(hook, dir=dir, **how)))
        except BaseException:
            _detach(added)
            raise
        return added

    def add_hook(  # type: ignore[override]
        self,
        name: NameFilter,
        hook: Callable,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> list[LensHandle]:
        """Attach `hook` to every hook point that `name` means (see `resolve_names`) until `reset_hooks`; returns the handles.

        Raises KeyError with the nearest names when nothing matches; then nothing is attached.
        """
        self._check_setup()
        added = self._attach(name, hook, dir, is_permanent=is_permanent, level=level, prepend=prepend)
        return [handle for _, handle in added]

    def list_hooks(self, *args: Any, **kwargs: Any) -> dict[str, list[LensHandle]]:
        """As in transformer_lens, without hooks that were removed through their torch handle."""
        listed = super().list_hooks(*args, **kwargs)
        alive = {
            name: [h for h in handles if h.hook.id in (h.hook.hooks_dict_ref() or ())]
            for name, handles in listed.items()
        }
        return {name: handles for name, handles in alive.items() if handles}

    @contextlib.contextmanager
    def hooks(  # type: ignore[override]
        self,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[HookedRoot]:
        """Attach (name or filter, function) pairs inside a `with` block. Hooks that were there before stay, whatever happens.

        With reset_hooks_end=False they stay afterwards too (for a backward pass), unless the block raises.
        """
        self._check_setup()
        added: list[tuple[HookPoint, LensHandle]] = []
        self.context_level += 1
        keep = False
        try:
            for pairs, direction in ((fwd_hooks, "fwd"), (bwd_hooks, "bwd")):
                for where, hook in pairs:
                    added += self._attach(where, hook, direction, level=self.context_level)
            yield self
            keep = not reset_hooks_end
        finally:
            if not keep:
                _detach(added)
            if clear_contexts and reset_hooks_end:
                self.clear_contexts()
            self.context_level -= 1

    def run_with_hooks(  # type: ignore[override]
        self,
        *model_args: Any,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """One forward pass with hooks attached. A hook point that is named in full and does not fire raises KeyError."""
        if len(bwd_hooks) > 0 and reset_hooks_end:
            logging.warning(
                "Backward hooks are removed before a backward pass can run; pass reset_hooks_end=False to keep them."
            )
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            output, fired = self._run_eagerly(model_args, model_kwargs)
            for where, _ in (*fwd_hooks, *bwd_hooks):
                if isinstance(where, str) and where in self.hook_dict and self.hook_dict[where] not in fired:
                    raise KeyError(f"Hook {where!r} did not fire: this pass does not reach it.")
        return output

    def _run_eagerly(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, set[HookPoint]]:
        # Compiled graphs have no hooks in them; recompiling every block around its hooks would cost minutes.
        compiled = "torch._dynamo" in sys.modules
        eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
        with eager, forward_pass() as fired:
            return self._call_impl(*args, **kwargs), fired

    # ---- caches ----

    def run_with_cache(  # type: ignore[override]
        self,
        *model_args: Any,
        names_filter: NameFilter = None,
        stop_at_layer: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        pos_slice: Any = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        return_cache_object: bool = True,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> tuple[Any, Any]:
        """Run the model and keep what passes through its hook points, after all hooks that are attached.

        Args:
            names_filter: which hook points: a name, glob, compiled pattern, predicate, or an iterable of these; None for all.
            stop_at_layer: passed on to `forward`; hook points of later blocks are not asked for.
            device, dtype: of the cached tensors (dtype: floating point ones); the model stays where it is.
            pos_slice: positions to keep (int, tuple as in slice(*tuple), list, transformer_lens Slice); copied, so the rest is freed.
            remove_batch_dim: drop the batch axis, which must have size 1.
            incl_bwd: call backward() on the output, a scalar, and store gradients as `<name>_grad`.
            return_cache_object: False gives the plain dict.
            reset_hooks_end: False leaves the capture attached until `reset_hooks()`: later passes overwrite the cache.

        Returns:
            (output, ActivationCache).

        Raises:
            KeyError: a filter matches nothing, or a hook point named in full does not fire.
            ValueError: incl_bwd without gradients or on an output that is not a scalar; batch above 1 with remove_batch_dim.
            RuntimeError: a hook point fires twice, or a cached tensor was modified in place.
        """
        self._check_setup()
        names, exact = select_names(names_filter, self.hook_dict)
        if stop_at_layer is not None:
            model_kwargs["stop_at_layer"] = stop_at_layer
            stop = stop_at_layer if stop_at_layer >= 0 else stop_at_layer + self._n_layers()
            unreached = [
                name for name in names if (layer_of(name) or 0) >= stop and layer_of(name) is not None
            ]
            _refuse_unreached([name for name in unreached if name in exact], stop_at_layer)
            names = [name for name in names if name not in set(unreached)]
        if incl_bwd and not torch.is_grad_enabled():
            raise ValueError(
                "incl_bwd=True needs gradients, but they are switched off here (no_grad or inference_mode)."
            )
        points = [self.hook_dict[name] for name in names]
        # A hook of the user may edit in place, so only an otherwise idle model lets us keep tensors without a copy.
        alias = self.hooked_tensors_are_final and not any(point.active for point in self.hook_points())
        capture = Capture(
            {},
            alias=alias,
            device=device,
            dtype=dtype,
            pos_slice=pos_slice,
            remove_batch_dim=remove_batch_dim,
            grads=incl_bwd,
            thread=threading.get_ident(),
        )
        keep = False
        self.context_level += 1
        self.is_caching = True
        try:
            for point in points:
                point.add_tap(capture)
            output, _ = self._run_eagerly(model_args, model_kwargs)
            capture.check()
            _refuse_unreached([name for name in exact if name not in capture.cache], stop_at_layer)
            if not capture.cache:
                raise KeyError("None of the hook points that names_filter matches fired in this pass.")
            if incl_bwd:
                _backward(output)
            keep = not reset_hooks_end
        finally:
            if not keep:
                for point in points:
                    point.remove_tap(capture)
                self.is_caching = False
            if clear_contexts and reset_hooks_end:
                self.clear_contexts()
            self.context_level -= 1
        if not return_cache_object:
            return output, capture.cache
        cache = ActivationCache(
            capture.cache,
            self,
            has_batch_dim=not remove_batch_dim,
            tokens=self.input_tokens(*model_args, **model_kwargs),
        )
        return output, cache

    def input_tokens(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The token ids [batch, pos] in the arguments of a forward pass, for the cache's record; None when there are none."""
        given = args[0] if args else kwargs.get("tokens", kwargs.get("input"))
        if isinstance(given, Tensor) and not given.is_floating_point() and given.dim() in (1, 2):
            return (given if given.dim() == 2 else given[None]).detach().cpu().clone()
        return None

    def get_caching_hooks(  # type: ignore[override]
        self,
        names_filter: NameFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict[str, Tensor], list[tuple[str, Callable]], list[tuple[str, Callable]]]:
        """(cache, fwd_hooks, bwd_hooks) for `hooks()`. Tensors are copied, since nobody checks them afterwards."""
        self._check_setup()
        cache = {} if cache is None else cache
        capture = Capture(cache, device=device, pos_slice=pos_slice, remove_batch_dim=remove_batch_dim)
        names, _ = select_names(names_filter, self.hook_dict)
        return (
            cache,
            [(n, capture) for n in names],
            [(n, capture.keep_grad) for n in names] if incl_bwd else [],
        )

    def add_caching_hooks(  # type: ignore[override]
        self,
        names_filter: NameFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Cache every pass from now on, until `reset_hooks()`; each pass overwrites the one before."""
        self._check_setup()
        cache = {} if cache is None else cache
        capture = Capture(cache, device=device, remove_batch_dim=remove_batch_dim, grads=incl_bwd)
        for name in select_names(names_filter, self.hook_dict)[0]:
            self.hook_dict[name].add_tap(capture)
        self.is_caching = True
        return cache

    def depth_decompose(self, record: Any, read: str = "out") -> Any:
        """Split a read into what each atom contributed; models with a depth record override this."""
        raise ValueError(
            f"{type(self).__name__} does not say how a read is decomposed (record {type(record).__name__}, read {read!r})."
        )

    def _n_layers(self) -> int:
        return 1 + max(
            (layer_of(name) or 0 for name in self.hook_dict if layer_of(name) is not None), default=-1
        )


def _detach(added: Iterable[tuple[HookPoint, LensHandle]]) -> None:
    for point, handle in added:
        point.remove_handles([handle])


def _refuse_unreached(names: Sequence[str], stop_at_layer: int | None) -> None:
    if names:
        why = (
            "this pass does not reach"
            if stop_at_layer is None
            else f"stop_at_layer={stop_at_layer} does not reach"
        )
        raise KeyError(
            f"{', '.join(map(repr, names))} cannot be cached: {why} {'it' if len(names) == 1 else 'them'}."
        )


def _backward(output: Any) -> None:
    if not isinstance(output, Tensor) or output.numel() != 1:
        got = f"shape {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ValueError(
            f"incl_bwd=True needs a scalar output, such as return_type='loss'; the model returned {got}."
        )
    if not output.requires_grad:
        raise ValueError(
            "incl_bwd=True needs an output with a gradient; nothing that the model used requires one."
        )
    output.backward()

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
from .capture import Capture, keep_freed_memory
from .describe import HookRow, HookTable
from .names import NameFilter, select_names
from .point import HookPoint, forward_pass

Direction = Literal["fwd", "bwd"]
Hooks = Sequence[tuple[Any, Callable]]  # (name filter, hook function)
Added = list[tuple[HookPoint, LensHandle]]


class HookedRoot(HookedRootModule):
    """A transformer_lens root module that validates names and cleans up after errors.

    Call `setup()` as the last statement of `__init__`. Hooked and cached passes run eagerly even where the
    model or its blocks are compiled; a plain pass of a compiled model with hooks attached fires them, or
    raises where fullgraph=True leaves no room for them.

    Class attributes:
        stream_is_additive: the residual stream is a plain sum of what was written to it, so that the residual
            helpers of transformer_lens are exact; elsewhere they raise `NotAdditiveError`.
        hooked_tensors_are_final: no tensor is modified in place after its hook point, so that caching need
            not copy. Every cached run verifies it.

    Example:
        >>> class Tiny(HookedRoot):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed = nn.Embedding(10, 4)
        ...         self.hook_embed = HookPoint(shape="batch pos d_model", meaning="token embedding")
        ...         self.setup()
        ...
        ...     def forward(self, tokens):
        ...         return self.hook_embed(self.embed(tokens)).sum(-1)
        >>> model = Tiny()
        >>> out, cache = model.run_with_cache(torch.tensor([[1, 2, 3]]), pos_slice=-1)
        >>> cache["hook_embed"].shape
        torch.Size([1, 1, 4])
        >>> model.run_with_hooks(torch.tensor([[1]]), fwd_hooks=[("*embed", lambda x, hook: x * 0)]).item()
        0.0
        >>> model.describe_hooks()
        name        shape              meaning          unit
        hook_embed  batch pos d_model  token embedding
        >>> model.run_with_cache(torch.tensor([[1]]), names_filter="embd")
        Traceback (most recent call last):
        KeyError: "'embd' is not a hook point in this model; did you mean 'hook_embed'?"
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
        """Register `hook_point` under a dotted path, with empty modules on the way where there are none.

        Raises ValueError when the path is taken, cannot be made, or `setup()` has already run.
        """
        if hasattr(self, "hook_dict"):
            raise ValueError(f"{path!r} cannot be mounted after setup(), which gives hook points their names.")
        *parents, last = path.split(".")
        at: nn.Module = self
        for part in parents:
            child = at._modules.get(part)
            if child is None:
                if not part or hasattr(at, part) or isinstance(at, nn.ModuleList):
                    owner = type(at).__name__
                    raise ValueError(f"{path!r} cannot be mounted: {owner} has no module {part!r}, nor room for one.")
                child = nn.Module()
                at.add_module(part, child)
            at = child
        if not last or hasattr(at, last):
            raise ValueError(f"{path!r} cannot be mounted: the name is {'taken' if last else 'empty'}.")
        at.add_module(last, hook_point)
        return hook_point

    def setup(self) -> None:
        """Name every hook point. Raises when one has two names or none, or is not a t2lens HookPoint."""
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
                held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
                if any(isinstance(each, LensHookPoint) and id(each) not in first_name for each in held):
                    raise ValueError(
                        f"{name or type(self).__name__} holds a HookPoint in {attribute!r}, a plain "
                        f"{type(value).__name__}, where it gets no name; use nn.ModuleList or mount()."
                    )
        super().setup()
        for _, module in modules:
            # In the instance dictionary too, so that `self.hook_q` need not go through nn.Module.__getattr__:
            # that costs more than an idle hook point.
            vars(module).update({n: child for n, child in module._modules.items() if isinstance(child, HookPoint)})

    def _check_setup(self) -> None:
        if "hook_dict" not in vars(self):
            raise ValueError(f"{type(self).__name__} has no hook names yet; call setup() at the end of its __init__.")
        count = 0
        stack: list[nn.Module] = [self]
        while stack:  # ten times as fast as self.modules(), and this runs before every cached pass
            for child in stack.pop()._modules.values():
                if isinstance(child, LensHookPoint):
                    count += 1
                elif child is not None and child._modules:
                    stack.append(child)
        if count != len(self.hook_dict):
            named = dict(self.named_modules())
            late = [n for n, m in named.items() if isinstance(m, LensHookPoint) and n not in self.hook_dict]
            gone = [n for n in self.hook_dict if n not in named]
            raise ValueError(
                f"Hook points changed after setup(): {', '.join(late + gone) or 'one has two names'}; "
                "build them in __init__, before setup()."
            )

    def describe_hooks(self) -> HookTable:
        """Every hook point with the words of its shape, its meaning and its unit; needs no forward pass."""
        self._check_setup()
        return HookTable(
            HookRow(name=name, shape=point.shape, meaning=point.meaning, unit=point.unit)
            for name, point in self.hook_dict.items()
        )

    # ---- hooks ----

    def _attach(self, where: NameFilter, hook: Callable, dir: Direction, level: int | None, **how: Any) -> Added:
        added: Added = []
        try:
            for name in select_names(where, self.hook_dict)[0]:
                point = self.hook_dict[name]
                self.check_hooks_to_add(point, name, hook, dir=dir, **how)
                added.append((point, point.add_hook(hook, dir=dir, level=level, **how)))
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
        """Attach `hook` to every hook point that `name` means (see `resolve_names`) until `reset_hooks()`.

        Returns the handles. KeyError with the nearest names when nothing matches; then nothing is attached.
        """
        self._check_setup()
        added = self._attach(name, hook, dir, level, is_permanent=is_permanent, prepend=prepend)
        return [handle for _, handle in added]

    def add_perma_hook(  # type: ignore[override]
        self, name: NameFilter, hook: Callable, dir: Direction = "fwd"
    ) -> list[LensHandle]:
        """As `add_hook`, for hooks that `reset_hooks()` leaves unless told including_permanent=True."""
        return self.add_hook(name, hook, dir, is_permanent=True)

    def list_hooks(self, *args: Any, **kwargs: Any) -> dict[str, list[LensHandle]]:
        """As in transformer_lens, without hooks that were removed through their torch handle."""
        listed = {}
        for name, handles in super().list_hooks(*args, **kwargs).items():
            alive = [handle for handle in handles if handle.hook.id in (handle.hook.hooks_dict_ref() or ())]
            if alive:
                listed[name] = alive
        return listed

    @contextlib.contextmanager
    def hooks(  # type: ignore[override]
        self,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[HookedRoot]:
        """Attach (name filter, function) pairs inside a `with` block. Hooks that were there before stay.

        With reset_hooks_end=False these stay too (for a backward pass), unless the block raises.
        """
        self._check_setup()
        added: Added = []
        self.context_level += 1
        keep = False
        try:
            for where, hook in fwd_hooks:
                added += self._attach(where, hook, "fwd", self.context_level)
            for where, hook in bwd_hooks:
                added += self._attach(where, hook, "bwd", self.context_level)
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
        """One forward pass with hooks attached; KeyError when a hook point named in full does not fire."""
        if len(bwd_hooks) > 0 and reset_hooks_end:
            logging.warning(
                "Backward hooks are removed before a backward pass can run; reset_hooks_end=False keeps them."
            )
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            output, fired = self._run_eagerly(model_args, model_kwargs)
            for where, _ in (*fwd_hooks, *bwd_hooks):
                if isinstance(where, str) and where in self.hook_dict and self.hook_dict[where] not in fired:
                    raise KeyError(f"Hook {where!r} did not fire: this pass does not reach it.")
        return output

    def _run_eagerly(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, set[HookPoint]]:
        # Compiled graphs have no hooks in them, and to recompile every block around its hooks takes minutes.
        compiler = "torch._dynamo" in sys.modules
        eager = torch.compiler.set_stance("force_eager") if compiler else contextlib.nullcontext()
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
            names_filter: which hook points: a name, a glob, a compiled pattern, a predicate, or an iterable
                of these; None for all.
            stop_at_layer: passed on to `forward`; what is not run is not cached.
            device, dtype: of the cached tensors (dtype: floating point ones); the model stays as it is.
            pos_slice: positions to keep: int, (start, stop[, step]), list, or transformer_lens Slice. Copied,
                so that the rest is freed.
            remove_batch_dim: drop the batch axis, which must have size 1.
            incl_bwd: call backward() on the output, a scalar, and store gradients as `<name>_grad`.
            return_cache_object: False gives the plain dict.
            reset_hooks_end: False leaves the capture attached until `reset_hooks()`; later passes overwrite
                the cache.

        Returns:
            (output, ActivationCache).

        Raises:
            KeyError: a filter matches nothing, or a hook point named in full does not fire.
            ValueError: incl_bwd without gradients or with an output that is no scalar; remove_batch_dim on a
                larger batch; pos_slice outside the positions.
            RuntimeError: a hook point fires twice, or a cached tensor was modified in place.
        """
        self._check_setup()
        names, exact = select_names(names_filter, self.hook_dict)
        if stop_at_layer is not None:
            model_kwargs["stop_at_layer"] = stop_at_layer
        if incl_bwd and not torch.is_grad_enabled():
            raise ValueError("incl_bwd=True needs gradients, but they are off here (no_grad or inference_mode).")
        points = [self.hook_dict[name] for name in names]
        # A user's hook may edit in place, so only in an otherwise idle model may tensors be kept uncopied.
        alias = self.hooked_tensors_are_final and not any(point.active for point in self.hook_points())
        keep_freed_memory()
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
        if not return_cache_object:
            return output, capture.cache
        tokens = self.input_tokens(*model_args, **model_kwargs)
        return output, ActivationCache(capture.cache, self, has_batch_dim=not remove_batch_dim, tokens=tokens)

    def input_tokens(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The token ids [batch, pos] in the arguments of a forward pass, for the cache; None without any."""
        given: Any = args[0] if args else kwargs.get("input", kwargs.get("tokens"))
        texts = [given] if isinstance(given, str) else given
        if isinstance(texts, list | tuple) and texts:
            to_tokens: Any = getattr(self, "to_tokens", None)
            given = to_tokens(texts) if isinstance(texts[0], str) else torch.as_tensor(texts)
        if not isinstance(given, Tensor) or given.is_floating_point() or given.dim() not in (1, 2):
            return None
        return (given if given.dim() == 2 else given[None]).detach().cpu().clone()

    def get_caching_hooks(  # type: ignore[override]
        self,
        names_filter: NameFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict[str, Tensor], list[tuple[str, Callable]], list[tuple[str, Callable]]]:
        """(cache, fwd_hooks, bwd_hooks) for `hooks()`. Tensors are copied: nobody checks them afterwards."""
        self._check_setup()
        cache = {} if cache is None else cache
        capture = Capture(cache, device=device, pos_slice=pos_slice, remove_batch_dim=remove_batch_dim)
        names, _ = select_names(names_filter, self.hook_dict)
        backward = [(name, capture.keep_grad) for name in names] if incl_bwd else []
        return cache, [(name, capture) for name in names], backward

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


def _detach(added: Added) -> None:
    for point, handle in added:
        point.remove_handles([handle])


def _refuse_unreached(names: Iterable[str], stop_at_layer: int | None) -> None:
    listed = ", ".join(map(repr, names))
    if listed:
        why = "this pass" if stop_at_layer is None else f"a pass with stop_at_layer={stop_at_layer}"
        raise KeyError(f"{listed} cannot be cached: {why} does not reach that far.")


def _backward(output: Any) -> None:
    if not isinstance(output, Tensor) or output.numel() != 1:
        got = f"shape {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ValueError(f"incl_bwd=True needs a scalar, such as return_type='loss' gives; the model returned {got}.")
    if not output.requires_grad:
        raise ValueError("incl_bwd=True needs an output with a gradient, but nothing that the model used has one.")
    output.backward()

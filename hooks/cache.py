"""ActivationCache: what a pass left at its hook points, with transformer_lens' helpers made exact or refused."""

from __future__ import annotations

import functools
import inspect
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformer_lens import ActivationCache as LensCache
from transformer_lens.utilities import Slice, get_act_name

from .describe import family
from .names import layer_of, unknown_name

FORMAT = "t2lens.cache.1"

# What transformer_lens offers that says nothing about a sum over layers. compute_head_results and get_neuron_results split the output of
# one sublayer, which is exact whatever is done with that output. Every other public method, also one that a later version adds, is
# refused where the stream is not a plain sum.
_SAFE_ANYWHERE = frozenset(
    "remove_batch_dim to toggle_autodiff keys values items apply_slice_to_batch_dim stack_activation compute_head_results "
    "get_neuron_results ssm_layers compute_ssm_effective_attention compute_ssm_state".split()
)


class NotAdditiveError(ValueError):
    """A helper that takes the residual stream for a plain sum was called on a model where it is not one."""


class ActivationCache(LensCache):
    """The tensors of one pass by hook name.

    Attributes:
        record: what the model noted of a full pass for exact decomposition, or None.
        tokens: the token ids [batch, pos] of the pass, or None.
        info: of a cache that was loaded from a file: what was saved beside the tensors.
    """

    def __init__(
        self,
        cache_dict: dict[str, Tensor],
        model: Any,
        has_batch_dim: bool = True,
        *,
        tokens: Tensor | None = None,
        record: Any = None,
        info: dict[str, Any] | None = None,
    ):
        super().__init__(cache_dict, model, has_batch_dim)
        self.tokens, self.record, self.info = tokens, record, info or {}

    def __getitem__(self, key: Any) -> Tensor:
        """A tensor by full name, by short form ("pattern0") or by (name, layer[, layer type]), as in transformer_lens.

        Raises KeyError with the nearest names.
        """
        if isinstance(key, str) and key in self.cache_dict:
            return self.cache_dict[key]
        name = key
        try:
            if isinstance(key, str):
                name = get_act_name(key)
            elif isinstance(key, tuple) and key and isinstance(key[0], str):
                layer = key[1] if len(key) > 1 else None
                if layer is not None and layer < 0:
                    layer += self._n_layers()
                name = get_act_name(key[0], layer, *key[2:])
            else:
                raise TypeError(f"A cache key is a name or (name, layer[, layer type]), got {key!r}.")
        except (AttributeError, IndexError, ValueError, AssertionError):
            pass  # not a short form: reported below as the name that it is
        if isinstance(name, str) and name in self.cache_dict:
            return self.cache_dict[name]
        raise unknown_name(str(key if isinstance(key, str) else name), list(self.cache_dict))

    def _n_layers(self) -> int:
        if self.model is not None:
            return self.model.cfg.n_layers
        return 1 + max(
            (layer_of(name) or 0 for name in self.cache_dict if layer_of(name) is not None), default=-1
        )

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> ActivationCache:
        """The cache of some rows of the batch (an int drops the axis), as in transformer_lens."""
        rows = batch_slice if isinstance(batch_slice, Slice) else Slice(batch_slice)
        if not self.has_batch_dim:
            raise ValueError("This cache has no batch axis to slice; it was removed before.")
        tokens = None if self.tokens is None else rows.apply(self.tokens, dim=0)
        return type(self)(
            {name: rows.apply(tensor, dim=0) for name, tensor in self.cache_dict.items()},
            self.model,
            has_batch_dim=rows.mode != "int",
            tokens=tokens if tokens is None or tokens.dim() == 2 else tokens[None],
        )

    def stack_activation(
        self, activation_name: str, layer: int = -1, sublayer_type: str | None = None
    ) -> Tensor:
        """Tensors of one name from blocks 0 to layer-1, stacked as [layer, ...]. Raises ValueError when their shapes differ."""
        count = self._n_layers() if layer in (None, -1) else layer
        parts = [self[(activation_name, index, sublayer_type)] for index in range(count)]
        shapes = {tuple(part.shape) for part in parts}
        if len(shapes) != 1:
            raise ValueError(
                f"{activation_name!r} cannot be stacked over {count} layers: "
                + (
                    "its shapes differ, from {} to {}.".format(min(shapes), max(shapes))
                    if shapes
                    else "there is nothing to stack."
                )
            )
        return torch.stack(parts)

    def depth_decompose(self, read: str = "out") -> Any:
        """What each atom contributed to one read, in this pass: exact for every residual system.

        Raises ValueError when the cache holds no record (the run was partial, or the cache was loaded or sliced).
        """
        if self.record is None:
            raise ValueError(
                "This cache has no record of its pass; run_with_cache(tokens) without names_filter, pos_slice or stop_at_layer keeps one, "
                f"or call t2lens.contributions(model, tokens, read={read!r})."
            )
        return self.model.depth_decompose(self.record, read)

    def _require_additive(self, helper: str) -> None:
        if self.model is None:
            raise NotAdditiveError(
                f"{helper} needs the model: a cache read from a file has none; set cache.model = model first."
            )
        if not getattr(self.model, "stream_is_additive", False):
            raise NotAdditiveError(
                f"{helper} takes the residual stream for a plain sum of what was written to it, which is not so in this model; use "
                "t2lens.contributions(model, tokens, read=...) or cache.depth_decompose(read) instead, which are exact here."
            )

    # ---- files ----

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the tensors and what explains them to one safetensors file, whole or not at all. Returns the path.

        The metadata hold the token ids, token strings where the model has a tokenizer, the words of each shape, has_batch_dim, and the
        source names where the model offers `sources()`. `load_cache(path)` needs no model.
        """
        target = Path(path)
        tensors, seen = {}, set()
        for name, tensor in self.cache_dict.items():
            if tensor.is_meta:
                raise ValueError(f"{name!r} is on the meta device and has no values to save.")
            place = (tensor.device, tensor.untyped_storage().data_ptr())
            whole = (
                tensor.is_contiguous()
                and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            )
            # safetensors writes neither views nor two names for one piece of memory.
            tensors[name] = (
                tensor.detach()
                if whole and place not in seen
                else tensor.detach().clone(memory_format=torch.contiguous_format)
            )
            seen.add(place)
        text = json.dumps({"format": FORMAT, **self._explained()}, separators=(",", ":"), ensure_ascii=True)
        _write_whole(target, lambda file: save_file(tensors, file, metadata={"t2lens": text}))
        return target

    def _explained(self) -> dict[str, Any]:
        info = dict(self.info)
        info["has_batch_dim"] = self.has_batch_dim
        if self.tokens is not None:
            info["tokens"] = self.tokens.tolist()
        model = self.model
        if model is None:
            return info
        info["shapes"] = {
            family(name): point.shape for name, point in model.hook_dict.items() if name in self.cache_dict
        }
        if self.tokens is not None and getattr(model, "tokenizer", None) is not None:
            info["labels"] = [model.to_str_tokens(row) for row in self.tokens]
        if callable(getattr(model, "sources", None)):
            info["sources"] = model.sources()
        return info


def load_cache(path: str | os.PathLike[str]) -> ActivationCache:
    """Read a cache that `ActivationCache.save` wrote. It has no model; `cache.info` holds the labels, shapes and source names.

    Raises ValueError when the file is not a whole safetensors file of this kind.
    """
    source = Path(path)
    try:
        with safe_open(source, framework="pt") as file:
            text = (file.metadata() or {}).get("t2lens")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  the file is not a dictionary
        info = json.loads(text) if text is not None else {}
        if info.pop("format", None) != FORMAT:
            raise ValueError(f"{source} is a safetensors file, but not a cache that t2lens wrote ({FORMAT}).")
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{source} is not a whole safetensors file with a t2lens cache: {error}.") from None
    tokens = info.pop("tokens", None)
    has_batch_dim = info.pop("has_batch_dim")
    order = {name: None for name in tensors}
    return ActivationCache(
        {name: tensors[name] for name in order},
        None,
        has_batch_dim=has_batch_dim,
        tokens=None if tokens is None else torch.tensor(tokens),
        info=info,
    )


def _write_whole(target: Path, write: Callable[[str], None]) -> None:
    """Let `write` fill a temporary file beside `target`, then put it in its place."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _refused_where_not_additive(name: str, method: Callable) -> Callable:
    @functools.wraps(method)
    def checked(self: ActivationCache, *args: Any, **kwargs: Any) -> Any:
        self._require_additive(name)
        return method(self, *args, **kwargs)

    return checked


for _name, _method in list(vars(LensCache).items()):
    if inspect.isfunction(_method) and not _name.startswith("_") and _name not in _SAFE_ANYWHERE:
        setattr(
            ActivationCache,
            _name,
            _refused_where_not_additive(_name, vars(ActivationCache).get(_name, _method)),
        )
del _name, _method

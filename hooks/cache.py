"""ActivationCache: what a pass left at its hook points, with transformer_lens' helpers exact or refused."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformer_lens import ActivationCache as LensCache
from transformer_lens.utilities.components_utils import get_act_name
from transformer_lens.utilities.slice import Slice

from .describe import family
from .files import read_tensors, write_tensors
from .names import count_layers, unknown_name

# What transformer_lens offers that says nothing about a sum over layers. compute_head_results and
# get_neuron_results split the output of one sublayer, which is exact whatever is done with that output. Every
# other public method, also one that a later version adds, is refused where the stream is not a plain sum.
_SAFE_ANYWHERE = frozenset(
    {
        "apply_slice_to_batch_dim",
        "compute_head_results",
        "compute_ssm_effective_attention",
        "compute_ssm_state",
        "get_neuron_results",
        "items",
        "keys",
        "remove_batch_dim",
        "ssm_layers",
        "stack_activation",
        "to",
        "toggle_autodiff",
        "values",
    }
)


class NotAdditiveError(ValueError):
    """A helper that takes the residual stream for a plain sum was called where it is not one."""


class ActivationCache(LensCache):
    """The tensors of one pass by hook name, with the methods of transformer_lens.

    `apply_ln` divides by the recorded norm scale and leaves the norm's weight out, so that parts sum to
    `hook_normalized`; `logit_attrs` multiplies with the weight as well, so that parts sum to the logit.

    Attributes:
        record: what the model noted of a full pass for exact decomposition, or None.
        tokens: the token ids [batch, pos] of the pass, or None.
        info: what was saved beside the tensors, in a cache that was loaded from a file.
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
        self.model: Any = model
        self.tokens, self.record, self.info = tokens, record, info or {}

    def __getitem__(self, key: Any) -> Tensor:
        """A tensor by full name, by short form ("pattern0") or by (name, layer[, layer type]).

        Raises KeyError with the nearest names.
        """
        if isinstance(key, str) and key in self.cache_dict:
            return self.cache_dict[key]
        if isinstance(key, str):
            name = get_act_name(key)
        elif isinstance(key, tuple) and len(key) in (1, 2, 3) and isinstance(key[0], str):
            short, layer, kind = key[0], *(*key[1:], None, None)[:2]
            if isinstance(layer, int) and layer < 0:
                layer += self._n_layers()
            name = get_act_name(short, layer, kind)
        else:
            raise TypeError(f"A cache key is a name or (name, layer[, layer type]), got {key!r}.")
        if name in self.cache_dict:
            return self.cache_dict[name]
        raise unknown_name(name if isinstance(key, tuple) else key, self.cache_dict, "in this cache")

    def _n_layers(self) -> int:
        return count_layers(self.cache_dict) if self.model is None else self.model.cfg.n_layers

    def remove_batch_dim(self, batch_size: int | None = None) -> ActivationCache:
        """Drop the batch axis of every tensor, in place; ValueError unless the batch is 1."""
        if not self.has_batch_dim:
            logging.warning("The batch axis was removed before.")
            return self
        sizes = {tensor.shape[0] for tensor in self.cache_dict.values()} | {batch_size or 1}
        if sizes != {1}:
            raise ValueError(f"Only a batch of 1 can lose its axis; this one has {max(sizes)}.")
        self.cache_dict = {name: tensor[0] for name, tensor in self.cache_dict.items()}
        self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> ActivationCache:
        """The cache of some rows of the batch (an int drops the axis); it has no record."""
        if not self.has_batch_dim:
            raise ValueError("This cache has no batch axis to slice; it was removed before.")
        rows = batch_slice if isinstance(batch_slice, Slice) else Slice(batch_slice)
        tokens = None if self.tokens is None else rows.apply(self.tokens, dim=0)
        return type(self)(
            {name: rows.apply(tensor, dim=0) for name, tensor in self.cache_dict.items()},
            self.model,
            has_batch_dim=rows.mode != "int",
            tokens=tokens[None] if tokens is not None and rows.mode == "int" else tokens,
        )

    def stack_activation(self, activation_name: str, layer: int = -1, sublayer_type: str | None = None) -> Tensor:
        """Tensors of one name from blocks 0 to layer-1, as [layer, ...]; ValueError when shapes differ."""
        count = self._n_layers() if layer in (None, -1) else layer
        parts = [self[(activation_name, index, sublayer_type)] for index in range(count)]
        shapes = sorted({tuple(part.shape) for part in parts})
        if len(shapes) != 1:
            why = f"shapes go from {shapes[0]} to {shapes[-1]}" if shapes else "there is nothing to stack"
            raise ValueError(f"{activation_name!r} cannot be stacked over {count} layers: {why}.")
        return torch.stack(parts)

    # ---- a stream that is a plain sum ----

    def _require_additive(self, helper: str) -> None:
        if self.model is None:
            raise NotAdditiveError(
                f"{helper} needs the model, which a cache read from a file has not; set cache.model first."
            )
        if not getattr(self.model, "stream_is_additive", False):
            instead = "t2lens.contributions(model, tokens, read=...) or cache.depth_decompose(read)"
            if helper == "logit_attrs":
                instead = f"t2lens.analysis.attribute_logits(model, tokens), {instead}"
            raise NotAdditiveError(
                f"{helper} takes the residual stream for a plain sum of what was written to it, which it is "
                f"not in this model; use {instead} instead, which are exact here."
            )

    def _locals(self, n_layers: int) -> list[str]:
        """What transformer_lens does not know: the output of a third sublayer that opens a block."""
        names = (f"blocks.{layer}.hook_local_out" for layer in range(n_layers))
        return [name for name in names if name in getattr(self.model, "hook_dict", ())]

    def _get_cached_ln_scale(
        self, layer: int | None, mlp_input: bool, pos_slice: Slice, batch_slice: Slice | None = None
    ) -> Tensor:
        # As in transformer_lens, but a block that opens with a local sublayer reads through that one's norm.
        if layer is None or layer == self.model.cfg.n_layers:
            key = "ln_final.hook_scale"
        else:
            opening = "ln_local" if f"blocks.{layer}.hook_local_out" in self._locals(layer + 1) else "ln1"
            key = f"blocks.{layer}.{'ln2' if mlp_input else opening}.hook_scale"
        scale = pos_slice.apply(self[key], dim=-2)
        return batch_slice.apply(scale) if batch_slice is not None and self.has_batch_dim else scale

    def logit_attrs(
        self,
        residual_stack: Tensor,
        tokens: Any,
        incorrect_tokens: Any = None,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
    ) -> Tensor:
        """What each part of a stack [part, (batch,) (pos,) d_model] adds to a logit, norm scale as recorded.

        Over all parts of the stream it sums to the logit of `tokens` (or its difference to that of
        `incorrect_tokens`). Arguments are those of transformer_lens; tokens [batch] mean one token for each
        row at every position.
        """
        directions = self.model.tokens_to_residual_directions(tokens)
        if incorrect_tokens is not None:
            other = self.model.tokens_to_residual_directions(incorrect_tokens)
            if other.shape != directions.shape:
                got = f"{list(directions.shape[:-1])} and {list(other.shape[:-1])}"
                raise ValueError(f"tokens and incorrect_tokens must have the same shape, got {got}.")
            directions = directions - other
        rows = batch_slice if isinstance(batch_slice, Slice) else Slice(batch_slice)
        parts = self.apply_ln_to_stack(
            residual_stack, layer=-1, pos_slice=pos_slice, batch_slice=rows, has_batch_dim=has_batch_dim
        )
        if self.model.ln_final.w is not None:  # it is not folded into W_U
            parts = parts * self.model.ln_final.w
        per_row = has_batch_dim and rows.mode != "int" and parts.ndim == 4 and directions.ndim == 2
        if per_row and directions.shape[0] == parts.shape[1]:
            directions = directions.unsqueeze(-2)
        return (parts * directions).sum(dim=-1)

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """The parts [part, (batch,) pos, d_model] that sum to what block `layer` (or its MLP) reads.

        As in transformer_lens, with `{l}_local_out` where a block has a third sublayer.
        """
        layer = self._n_layers() if layer in (None, -1) else layer
        decomposed: Any = super().decompose_resid(
            layer, mlp_input, mode, False, pos_slice, incl_embeds, return_labels=True
        )
        parts, labels = decomposed
        names = self._locals(layer + mlp_input) if mode == "all" else []
        if names:
            positions = pos_slice if isinstance(pos_slice, Slice) else Slice(pos_slice)
            parts = torch.cat([parts, torch.stack([positions.apply(self[name], dim=-2) for name in names])])
            labels = [*labels, *(f"{name.split('.')[1]}_local_out" for name in names)]
            order = sorted(range(len(labels)), key=lambda i: _place(labels[i]))
            parts, labels = parts[order], [labels[i] for i in order]
        if apply_ln:
            parts = self.apply_ln_to_stack(parts, layer, mlp_input, pos_slice, has_batch_dim=self.has_batch_dim)
        return (parts, labels) if return_labels else parts

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Any = None,
        return_labels: bool = False,
        project_output_onto: Tensor | None = None,
    ) -> Any:
        """Heads, neurons (or MLPs), embedding and bias, as in transformer_lens; then `{l}_local_out` if any.

        The parts sum to what block `layer` (or its MLP) reads.
        """
        layer = self._n_layers() if layer in (None, -1) else layer
        parts, labels = super().get_full_resid_decomposition(
            layer, mlp_input, expand_neurons, apply_ln, pos_slice, True, project_output_onto
        )
        names = self._locals(layer + mlp_input)
        if names:
            positions = pos_slice if isinstance(pos_slice, Slice) else Slice(pos_slice)
            more = torch.stack([positions.apply(self[name], dim=-2) for name in names])
            if apply_ln:
                more = self.apply_ln_to_stack(more, layer, mlp_input, pos_slice, has_batch_dim=self.has_batch_dim)
            more = more if project_output_onto is None else more @ project_output_onto
            parts = torch.cat([parts, more])
            labels = [*labels, *(f"{name.split('.')[1]}_local_out" for name in names)]
        return (parts, labels) if return_labels else parts

    # ---- any stream ----

    def depth_decompose(self, read: str = "out") -> Any:
        """What each atom contributed to one read in this pass, exact for every residual system.

        Raises ValueError when the cache holds no record: the run was partial, or it was sliced or loaded.
        """
        if self.record is None:
            raise ValueError(
                "This cache has no record of its pass; run_with_cache(tokens) without names_filter and "
                f"stop_at_layer keeps one, or call t2lens.contributions(model, tokens, read={read!r})."
            )
        return self.model.depth_decompose(self.record, read)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tensors and what explains them to one safetensors file, whole or not at all.

        Beside the tensors stand the token ids, the token strings where the model has a tokenizer, the words
        of each shape, has_batch_dim, and the source names where the model offers `sources()`;
        `load_cache(path)` needs no model.
        """
        info: dict[str, Any] = {**self.info, "has_batch_dim": self.has_batch_dim}
        if self.tokens is not None:
            info["tokens"] = self.tokens.tolist()
        model = self.model
        if model is not None:
            cached = (item for item in model.hook_dict.items() if item[0] in self.cache_dict)
            info["shapes"] = {family(name): point.shape for name, point in cached}
            if self.tokens is not None and getattr(model, "tokenizer", None) is not None:
                info["labels"] = [model.to_str_tokens(row) for row in self.tokens]
            if callable(getattr(model, "sources", None)):
                info["sources"] = model.sources()
        write_tensors(path, self.cache_dict, info)


def _place(label: str) -> tuple[int, int]:
    """Where a part of the stream was written: embeddings first, then layer by layer."""
    if label in ("embed", "pos_embed"):
        return (-1, label == "pos_embed")
    layer, kind = label.split("_", 1)
    return (int(layer), ("local_out", "attn_out", "mlp_out").index(kind))


def _refused_where_not_additive(name: str, method: Callable) -> Callable:
    @functools.wraps(method)
    def checked(self: ActivationCache, *args: Any, **kwargs: Any) -> Any:
        self._require_additive(name)
        return method(self, *args, **kwargs)

    return checked


for _name, _method in list(vars(LensCache).items()):
    if inspect.isfunction(_method) and not _name.startswith("_") and _name not in _SAFE_ANYWHERE:
        _ours = vars(ActivationCache).get(_name, _method)
        setattr(ActivationCache, _name, _refused_where_not_additive(_name, _ours))


def load_cache(path: str | os.PathLike[str]) -> ActivationCache:
    """Read a cache that `ActivationCache.save` wrote. It has no model; `info` has labels, shapes, sources.

    Raises ValueError when the file is not a whole safetensors file of this kind.

    Example:
        >>> import tempfile
        >>> cache = ActivationCache({"hook_x": torch.ones(1, 2, 3)}, None, tokens=torch.tensor([[7, 9]]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache.save(f"{folder}/cache.safetensors")
        ...     loaded = load_cache(f"{folder}/cache.safetensors")
        >>> loaded["hook_x"].shape, loaded.tokens.tolist()
        (torch.Size([1, 2, 3]), [[7, 9]])
    """
    tensors, info = read_tensors(path)
    tokens = info.pop("tokens", None)
    return ActivationCache(
        tensors,
        None,
        has_batch_dim=info.pop("has_batch_dim"),
        tokens=None if tokens is None else torch.tensor(tokens),
        info=info,
    )

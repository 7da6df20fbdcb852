"""ActivationCache: what a pass left at its hook points, with transformer_lens' helpers exact or refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformer_lens.utilities.components_utils import get_act_name
from transformer_lens.utilities.slice import Slice

from .depth import DepthStack, stack_weights, unknown_read
from .describe import family
from .files import read_tensors, write_tensors
from .names import count_layers, unknown_name
from .plain_sum import PlainSumCache

_MIXING = "t2lens.mixing"  # in a file, beside the tensors of hook points


class ActivationCache(PlainSumCache):
    """The tensors of one pass by hook name, with the methods of transformer_lens.

    `apply_ln` divides by the recorded norm scale and leaves the norm's weight out, so that parts sum to
    `hook_normalized`; `logit_attrs` multiplies with the weight as well, so that parts sum to the logit.

    Attributes:
        record: what the model noted of a full pass for exact decomposition, or None.
        mixing: [read, atom, batch, pos] in a cache that was loaded from a file that has it: enough for `decompose`.
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
        self.mixing: Tensor | None = None

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

    def decompose(
        self, read: str = "out", *, by: Literal["atom", "head"] = "atom", form: str = "additive"
    ) -> tuple[Tensor, list[str]]:
        """What each atom (or head) contributed to one read in this pass, exact for every residual system: (parts
        [part, (batch,) pos, d_model], their names). They sum to the read, before its norm.

        Args:
            read: "out", what the readout reads, or a site ("2.mlp"), with its way where it has several ("2.attn.k").
            by: "atom", or "head" for attention atoms in their heads.
            form: "additive", or "operator" for Deep Delta Learning, whose two forms attribute erasing differently.

        A cache read from a file has the parts by atom where coefficients are scalars; other systems need their model.

        Raises:
            KeyError: no such read, or an atom that a loaded cache does not hold. ValueError: nothing was recorded
                (the run was partial, or the cache was sliced), or a hook edited the stream, the read or an atom.
        """
        if self.record is not None and self.model is not None:
            parts, labels = self.model.decompose(self.record, read, by=by, form=form, tensors=self.cache_dict)
        else:
            parts, labels = self._decompose_loaded(read, by, form)
        return (parts if self.has_batch_dim else parts[:, 0]), labels

    def _decompose_loaded(self, read: str, by: str, form: str) -> tuple[Tensor, list[str]]:
        if self.mixing is None and self.model is None:
            raise ValueError(
                "What atoms contributed is not in this cache, and it has no model to compute it: load the model, and "
                f"call t2lens.contributions(model, tokens, read={read!r})."
            )
        if self.mixing is None:
            raise ValueError(
                "This cache has no record of its pass; run_with_cache(tokens) without names_filter, stop_at_layer and "
                f"pos_slice keeps one, or call t2lens.contributions(model, tokens, read={read!r})."
            )
        if (by, form) != ("atom", "additive"):
            raise ValueError(
                f'A cache from a file has its parts by="atom" in the additive form only, not by={by!r} in the {form} '
                "form: that needs the model to run again."
            )
        reads, atoms = list(self.info["sources"]), list(self.info["atoms"])
        if read not in reads:
            raise unknown_read(read, reads)
        names = ["hook_embed" if a == "embed" else "blocks.{}.hook_{}_out".format(*a.split(".")) for a in atoms]
        if missing := [name for name in names if name not in self.cache_dict]:
            raise KeyError(f"{', '.join(missing)} must be in the cache for its parts; they are what was written.")
        written = torch.stack([self.cache_dict[name] for name in names])
        return self.mixing[reads.index(read)].unsqueeze(-1) * (
            written if self.has_batch_dim else written[:, None]
        ), atoms

    def depth_stack(self, reads: Sequence[str] | None = None) -> DepthStack:
        """The depth weights of all reads (or of some) in one tensor [read, (batch,) pos, source], padded with NaN, by
        the names of their sources. Works on a cache of `names_filter="*hook_depth_attn*"`, and on one from a file.

        Reads that hold all their sources with weight 1 (every read of the standard residual) have rows of ones.

        Raises:
            KeyError: no such read, or weights that this cache does not hold. ValueError: a model without depth weights.
        """
        if self.model is not None and not callable(getattr(self.model, "depth_weight_hooks", None)):
            raise ValueError(f"{type(self.model).__name__} does not say what its reads weigh (depth_weight_hooks).")
        facts = self.info if self.model is None else _depth_facts(self.model)
        if "depth_hooks" not in facts:
            raise ValueError("This file does not say which reads the model had; set cache.model first.")
        return stack_weights(self.cache_dict, facts["sources"], facts["depth_hooks"], facts["source_order"], reads)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tensors and what explains them to one safetensors file, whole or not at all.

        Beside the tensors stand the token ids, the token strings where the model has a tokenizer, the words
        of each shape, has_batch_dim, and the reads, sources and atoms with the mixing matrix of a recorded pass, so
        that `depth_stack` and (where coefficients are scalars) `decompose` work after `load_cache(path)`, which needs
        no model.
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
            if callable(getattr(model, "depth_weight_hooks", None)):
                info |= _depth_facts(model)
        mixing = self.mixing if self.record is None or model is None else model.mixing_of(self.record)
        write_tensors(path, self.cache_dict | ({} if mixing is None else {_MIXING: mixing}), info)


def _depth_facts(model: Any) -> dict[str, Any]:
    """What the depth weights of a pass mean, for a reader without the model."""
    return {
        "sources": model.sources(),
        "source_order": model.source_order(),
        "depth_hooks": model.depth_weight_hooks(),
        "atoms": list(model.atoms),
    }


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
    mixing = tensors.pop(_MIXING, None)
    cache = ActivationCache(
        tensors,
        None,
        has_batch_dim=info.pop("has_batch_dim"),
        tokens=None if tokens is None else torch.tensor(tokens),
        info=info,
    )
    cache.mixing = mixing
    return cache

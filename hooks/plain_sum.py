"""The methods of transformer_lens's cache that take the residual stream for a plain sum: exact, or refused."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformer_lens import ActivationCache as LensCache
from transformer_lens.utilities.slice import Slice

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


class PlainSumCache(LensCache):
    """The part of `ActivationCache` that is of a stream that is a plain sum."""

    model: Any
    cache_dict: dict[str, Tensor]

    def _n_layers(self) -> int:
        raise NotImplementedError

    def _require_additive(self, helper: str) -> None:
        if self.model is None:
            raise NotAdditiveError(
                f"{helper} needs the model, which a cache read from a file has not; set cache.model first."
            )
        if not getattr(self.model, "stream_is_additive", False):
            instead = "t2lens.contributions(model, tokens, read=...) or cache.decompose(read)"
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

    def _norm_at(self, layer: int | None, mlp_input: bool) -> str:
        """The norm through which block `layer` (its MLP, or the readout) reads, where a local sublayer may open it."""
        if layer is None or layer == self.model.cfg.n_layers:
            return "ln_final"
        opening = "ln_local" if f"blocks.{layer}.hook_local_out" in self._locals(layer + 1) else "ln1"
        return f"blocks.{layer}.{'ln2' if mlp_input else opening}"

    def _uses_ln_centering(self, layer: int | None) -> bool:
        # As in transformer_lens, by the norm that is there: the final one may be of another kind than the others.
        norm = self.model.get_submodule(self._norm_at(layer, False))
        return norm.cfg.kind == "layer" if hasattr(norm, "cfg") else super()._uses_ln_centering(layer)

    def _get_cached_ln_scale(
        self, layer: int | None, mlp_input: bool, pos_slice: Slice, batch_slice: Slice | None = None
    ) -> Tensor:
        scale = pos_slice.apply(self[f"{self._norm_at(layer, mlp_input)}.hook_scale"], dim=-2)
        return batch_slice.apply(scale) if batch_slice is not None and self.has_batch_dim else scale

    def compute_head_results(self) -> None:
        """Cache what each head writes as `blocks.{l}.attn.hook_result` [batch, pos, head, d_model].

        As in transformer_lens, with what stands between a head and what is written: a norm, or a gate, as recorded.
        """
        if not all(hasattr(block.attn, "by_head") for block in self.model.blocks):
            super().compute_head_results()
        elif self._ensure_head_results():
            logging.warning("The results of all heads were cached before.")

    def _ensure_head_results(self) -> bool:
        blocks = self.model.blocks
        if not all(hasattr(block.attn, "by_head") for block in blocks):
            return super()._ensure_head_results()
        known = True
        for layer, block in enumerate(blocks):
            name = f"blocks.{layer}.attn.hook_result"
            if name in self.cache_dict:
                continue
            known = False
            made = [self[("z", layer, "attn")]]
            if hasattr(block.attn, "hook_gate"):
                made.append(self[f"blocks.{layer}.attn.hook_gate"])
            made = made if self.has_batch_dim else [x[None] for x in made]
            heads = block.attn.by_head(*made)[:-1].movedim(0, -2).to(made[0].dtype)
            self.cache_dict[name] = heads if self.has_batch_dim else heads[0]
        return known

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
        """Heads, neurons (or MLPs), embedding and bias, as in transformer_lens; then `{l}_local_out` if any, and
        `{l}_attn_rest` where attention writes what is neither a head nor a bias (a norm at its output; padding).

        The parts sum to what block `layer` (or its MLP) reads.
        """
        layer = self._n_layers() if layer in (None, -1) else layer
        parts, labels = super().get_full_resid_decomposition(
            layer, mlp_input, expand_neurons, apply_ln, pos_slice, True, project_output_onto
        )
        rests = self._attention_rests(layer + mlp_input)
        extra = {f"{name.split('.')[1]}_local_out": self[name] for name in self._locals(layer + mlp_input)} | rests
        if extra:
            positions = pos_slice if isinstance(pos_slice, Slice) else Slice(pos_slice)
            more = torch.stack([positions.apply(part, dim=-2) for part in extra.values()])
            if apply_ln:
                more = self.apply_ln_to_stack(more, layer, mlp_input, pos_slice, has_batch_dim=self.has_batch_dim)
            more = more if project_output_onto is None else more @ project_output_onto
            parts = torch.cat([parts, more])
            labels = [*labels, *extra]
        return (parts, labels) if return_labels else parts

    def _attention_rests(self, n_layers: int) -> dict[str, Tensor]:
        """What attention wrote less its heads and its bias, where that is more than rounding."""
        rests = {}
        for layer in range(n_layers):
            written, heads = self[("attn_out", layer)], self[("result", layer, "attn")]
            rest = written - heads.sum(dim=-2) - self.model.blocks[layer].attn.b_O
            limit = 1e3 * torch.finfo(rest.dtype).eps * max(float(x.detach().abs().max()) for x in (written, heads))
            if float(rest.detach().abs().max()) > limit:
                rests[f"{layer}_attn_rest"] = rest
        return rests


def _place(label: str) -> tuple[int, int]:
    """Where a part of the stream was written: embeddings first, then layer by layer."""
    if label in ("embed", "pos_embed"):
        return (-1, label == "pos_embed")
    layer, kind = label.split("_", 1)
    return (int(layer), ("local_out", "attn_out", "mlp_out").index(kind))


def _refused_where_not_additive(name: str, method: Callable) -> Callable:
    arguments = inspect.signature(method)

    @functools.wraps(method)
    def checked(self: PlainSumCache, *args: Any, **kwargs: Any) -> Any:
        self._require_additive(name)
        cfg = self.model.cfg
        if name in ("logit_attrs", "logit_lens") and not getattr(self.model, "logits_are_linear", True):
            raise NotAdditiveError(
                f"{name} takes logits for linear in the last read, which they are not behind this head (dense, GELU, "
                "LayerNorm); cache.decompose() gives what is read, exact in parts."
            )
        if getattr(cfg, "parallel_attn_mlp", False) and arguments.bind(self, *args, **kwargs).arguments.get(
            "mlp_input"
        ):
            raise NotAdditiveError(
                f"{name}(mlp_input=True): in a parallel block the MLP reads what its block reads; leave mlp_input out, "
                'or use cache.decompose("3.mlp").'
            )
        return method(self, *args, **kwargs)

    return checked


for _name, _method in list(vars(LensCache).items()):
    if inspect.isfunction(_method) and not _name.startswith("_") and _name not in _SAFE_ANYWHERE:
        _ours = vars(PlainSumCache).get(_name, _method)
        setattr(PlainSumCache, _name, _refused_where_not_additive(_name, _ours))

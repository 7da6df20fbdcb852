"""What transformer-lens's tools ask of a model beside its hooks, weights and text; where a tool's numbers would be
wrong, the error that names ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from t2lens.hooks import HookedRoot, NotAdditiveError
from t2lens.sublayers import Attention

if TYPE_CHECKING:
    from t2lens.config import ModelConfig
    from t2lens.residual import ResidualSystem, Site

__all__ = ["LensSurface"]

_PATCHING = "transformer_lens.patching"


class LensSurface(HookedRoot):
    """Mixed into `Transformer`."""

    cfg: ModelConfig
    residual: ResidualSystem
    sites: tuple[Site, ...]
    blocks: nn.ModuleList

    # --- weights
    def tl_parameters(self) -> dict[str, Tensor]:
        """Weights under transformer-lens's names and in its layout (`blocks.0.attn.W_V` [head, d_model, d_head]).

        Keys and values have one entry per query head: a group's stands there once for each of its heads. Biases of
        queries, keys and values, and what transformer-lens has no name for, are left out.
        """
        model: Any = self
        found: dict[str, Tensor | None] = {"embed.W_E": model.W_E, "unembed.W_U": model.W_U, "unembed.b_U": model.b_U}
        if self.cfg.positions == "learned":
            found["pos_embed.W_pos"] = model.pos_embed.weight
        for site in self.sites[:-1]:
            stem, part = f"blocks.{site.layer}.{site.kind}", self._sublayer(site)
            if isinstance(part, Attention):
                each = part.cfg.n_heads // part.cfg.n_kv_heads
                found[f"{stem}.W_Q"], found[f"{stem}.W_O"], found[f"{stem}.b_O"] = part.W_Q, part.W_O, part.b_O
                for way, weight in (("K", part.W_K), ("V", part.W_V)):
                    found[f"{stem}.W_{way}"] = weight.repeat_interleave(each, dim=0)
            else:
                for name in ("W_in", "W_gate", "W_out", "b_out"):
                    found[f"{stem}.{name}"] = getattr(part, name)
        norms = {name: p for name, p in self.named_parameters() if name.endswith((".w", ".b")) and "ln" in name}
        return {name: weight for name, weight in (found | norms).items() if weight is not None}

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        """[d_model]: the sum of all output biases before `layer` (before its MLP with `mlp_input`)."""
        model: Any = self
        total = model.W_E.new_zeros(self.cfg.d_model)
        for site in self.sites[:-1]:
            assert site.layer is not None
            before = site.layer < layer or (mlp_input and site.layer == layer and site.kind != "mlp")
            if before and (include_mlp_biases or site.kind != "mlp"):
                part = self._sublayer(site)
                total = total + (part.b_out if site.kind == "mlp" else part.b_O)
        return total

    def _sublayer(self, site: Site) -> Any:
        assert site.layer is not None
        return getattr(self.blocks[site.layer], site.kind)

    # --- facts that its helpers need
    @property
    def stream_is_additive(self) -> bool:  # type: ignore[override]
        """Whether the readout is the plain sum of all atoms (transformer-lens's residual helpers need that)."""
        return self.residual.is_additive

    @property
    def logits_are_linear(self) -> bool:
        """Whether the logits are linear in the last read at a given norm scale."""
        model: Any = self
        return model.unembed.is_linear

    # --- tools that this model cannot serve
    def set_use_split_qkv_input(self, on: bool) -> None:
        """transformer-lens's direct path patching asks for it; there is none here."""
        _refuse("A hook point of the read of each head (use_split_qkv_input)", on)

    def set_use_attn_in(self, on: bool) -> None:
        """As `set_use_split_qkv_input`."""
        _refuse("A hook point of the read of each head (use_attn_in)", on)

    def set_use_attn_result(self, on: bool) -> None:
        """transformer-lens's edge attribution asks for it; `cache.compute_head_results()` gives the tensors."""
        _refuse("A hook point of what each head writes (use_attn_result)", on)

    def set_use_hook_mlp_in(self, on: bool) -> None:
        """transformer-lens's edge attribution asks for it; the read of an MLP is `blocks.{l}.hook_read_mlp`."""
        _refuse("A hook point hook_mlp_in (use_hook_mlp_in)", on)

    def check_hooks_to_add(self, hook_point: Any, hook_point_name: str, hook: Any, *args: Any, **kwargs: Any) -> None:
        """transformer-lens's seam to refuse a hook: its own patching helpers take the carried stream for all that later
        blocks see, and report as its effect what is left where they see more. A hook of yours may edit it all the same.
        """
        super().check_hooks_to_add(hook_point, hook_point_name, hook, *args, **kwargs)
        made_by = getattr(getattr(hook, "func", hook), "__module__", None)
        if made_by == _PATCHING and ".hook_resid_" in hook_point_name and not self.residual.stream_is_whole:
            raise NotAdditiveError(
                f"{_PATCHING} takes {hook_point_name} for all that later blocks see, which it is not in this model: "
                "reads also take older sources; patch attn_out and mlp_out, or use t2lens.analysis.patch_activations."
            )


def _refuse(what: str, on: bool) -> None:
    if on:
        raise ValueError(
            f"{what} does not exist in t2lens models; which head or sublayer a read takes what from is told by "
            "t2lens.analysis.top_paths, and patched by t2lens.analysis.patch_activations or t2lens.edited."
        )

"""ELC-BERT (arXiv 2311.02265, repository ltgoslo/elc-bert), and the LTG-BERT backbone that GPT-BERT's files share.

The four variants have the same keys but for the readout's weights, and published files do not say which one they are.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from t2lens.checkpoints.plan import Plan, Take, rows
from t2lens.checkpoints.values import agree, axes, checked, n_blocks
from t2lens.config import MLP, BucketAttention, ModelConfig, Norm, ResidualConfig
from t2lens.residual import ELCBert
from t2lens.sublayers.bucket_attention import buckets

__all__ = ["ltg_plan", "plan", "recognises"]

_OUTPUT_WEIGHTS = "transformer.prev_layer_weights"
_LONGEST = 8192  # of tables of positions that the file does not hold
_VARIANTS = ("base", "zero", "normalized", "weighted_output")


def recognises(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> bool:  # noqa: ARG001
    first = "transformer.layers.0."
    return f"{first}prev_layer_weights" in shapes and f"{first}attention.in_proj_qk.weight" in shapes


def plan(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], *, elc_variant: str | None = None) -> Plan:
    """elc_variant: base, zero, normalized or weighted_output; by default what the config says, else the likeliest."""
    variant, assumed = _variant(config, shapes, elc_variant)
    layer = "transformer.layers.{}"
    out = ltg_plan(
        config,
        shapes,
        residual=ELCBert(variant=variant),
        causal=False,
        output="post_norm",
        attention=f"{layer}.attention",
        mlp=f"{layer}.mlp.mlp",
    )
    out.assumed += assumed
    raw = [f"{layer}.prev_layer_weights".format(i) for i in range(out.cfg.n_layers)]
    raw += [_OUTPUT_WEIGHTS] * (variant == "weighted_output")
    for n, key in enumerate(raw, start=1):
        if shapes[key] != (n,):
            raise ValueError(f"{key} must hold {n} weights, one per source; its shape is {list(shapes[key])}.")
    out.weights["residual.weights"] = Take(tuple(raw), lambda *p: torch.cat(p))
    for i in range(out.cfg.n_layers):
        ours, theirs = f"blocks.{i}.attn", f"{layer}.attention".format(i)
        for kind in ("weight", "bias"):
            out.weights[f"{ours}.value.{kind}"] = f"{theirs}.in_proj_v.{kind}"
            out.weights[f"{ours}.post_norm.{kind[0]}"] = f"{theirs}.post_layer_norm.{kind}"
    return out


def _variant(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], asked: str | None
) -> tuple[Literal["base", "zero", "normalized", "weighted_output"], list[str]]:
    """(variant, what was assumed)."""
    weighted = _OUTPUT_WEIGHTS in shapes
    said = config.get("elc_variant") if asked is None else asked
    if said is None and weighted:
        return "weighted_output", []  # the only one with these weights
    if said is None:
        return "base", [
            "The file does not say which variant of ELC-BERT it holds, and base, zero and normalized have the same "
            "keys: taken as base. elc_variant='zero' or elc_variant='normalized' reads it as another."
        ]
    for variant in _VARIANTS:
        if variant == str(said).replace("-", "_"):
            if (variant == "weighted_output") != weighted:
                has = "with" if weighted else "without"
                raise ValueError(f"elc_variant {said!r} does not fit a file {has} {_OUTPUT_WEIGHTS}.")
            return variant, []
    raise ValueError(f"elc_variant must be one of {', '.join(_VARIANTS)}, not {said!r}.")


def ltg_plan(
    config: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    *,
    residual: ResidualConfig,
    causal: bool,
    output: Literal["post_norm", "gated"],
    attention: str,
    mlp: str,
) -> Plan:
    """What both families share: everything but values, what follows the heads, and the depth axis.

    attention, mlp: the keys of block {}'s sublayers.
    """
    whole = ("num_hidden_layers", "num_attention_heads", "position_bucket_size", "max_position_embeddings")
    kinds = {"number": ("layer_norm_eps",), "flag": ("tie_word_embeddings",), "text": ("hidden_act",)}
    config = checked(config, whole=whole, **kinds)
    d_vocab, d_model = axes(shapes, "embedding.word_embedding.weight", 2)
    n_layers, n_heads, n_buckets = (config[name] for name in whole[:3])
    agree(config, "num_hidden_layers", n_blocks(shapes, attention.partition("{}")[0]))
    if d_model % n_heads:
        raise ValueError(f"hidden_size ({d_model}) must be a multiple of num_attention_heads ({n_heads}).")
    if not config.get("hidden_act", "gelu").startswith("gelu"):
        raise ValueError(f"The MLP of LTG-BERT has a GELU; hidden_act {config['hidden_act']!r} is not supported.")
    head, assumed = "classifier.nonlinearity", []
    has_head, has_index = f"{head}.1.weight" in shapes, f"{attention.format(0)}.position_indices" in shapes
    tied = config.get("tie_word_embeddings", True) or f"{head}.5.weight" not in shapes
    if "layer_norm_eps" not in config:
        assumed.append("The config has no layer_norm_eps: taken as 1e-7, as in the published models.")
    if not has_head:
        assumed.append("The file has no head: logits are the normed last read times the embedding, an untrained head.")
    if has_head and f"{head}.5.bias" not in shapes:
        assumed.append("The file has no bias of the logits: taken as zero.")
    if not has_index:
        assumed.append("The file has no position_indices: computed from position_bucket_size.")
    norm = Norm(kind="layer", weight=False, eps=config.get("layer_norm_eps", 1e-7))
    out = Plan(
        ModelConfig(
            d_vocab=d_vocab,
            n_ctx=_n_ctx(config, shapes, attention.format(0) if has_index else None),
            d_model=d_model,
            n_layers=n_layers,
            attention=BucketAttention(
                n_heads=n_heads,
                n_kv_heads=n_heads,
                d_head=d_model // n_heads,
                n_buckets=n_buckets,
                output=output,
                causal=causal,
            ),
            mlp=MLP(d_mlp=axes(shapes, f"{mlp.format(0)}.4.weight", 2)[1], act="gelu_tanh", mid_norm=norm),
            residual=residual,
            norm=norm,
            embed_norm=norm,
            head="mlm" if has_head else "linear",
            head_bias=f"{head}.5.bias" in shapes,
            tied=tied,
        ),
        assumed=assumed,
    )
    ours = out.weights
    ours["embed.weight"] = "embedding.word_embedding.weight"
    ours["relative.weight"] = "embedding.relative_embedding"
    ours["relative.w"], ours["relative.b"] = (f"embedding.relative_layer_norm.{kind}" for kind in ("weight", "bias"))
    if has_index:
        first, *others = (f"{attention.format(i)}.position_indices" for i in range(n_layers))
        ours["relative.position_indices"] = Take((first,), lambda table: _table(table, 2 * n_buckets - 1))
        out.equal += [(first, other) for other in others if other in shapes]
    else:
        ours["relative.position_indices"] = Take((), lambda: buckets(out.cfg.n_ctx, n_buckets))
    if has_head:
        ours["unembed.dense.weight"], ours["unembed.dense.bias"] = f"{head}.1.weight", f"{head}.1.bias"
    if out.cfg.head_bias:
        ours["unembed.bias"] = f"{head}.5.bias"
    if not tied:
        ours["unembed.weight"] = f"{head}.5.weight"
    elif f"{head}.5.weight" in shapes:
        out.equal.append((f"{head}.5.weight", "embedding.word_embedding.weight"))
    for i in range(n_layers):
        attn, d_mlp = attention.format(i), out.cfg.d_mlp
        for kind in ("weight", "bias"):
            ours[f"blocks.{i}.attn.query.{kind}"] = rows(f"{attn}.in_proj_qk.{kind}", 0, d_model)
            ours[f"blocks.{i}.attn.key.{kind}"] = rows(f"{attn}.in_proj_qk.{kind}", d_model, 2 * d_model)
            ours[f"blocks.{i}.attn.output.{kind}"] = f"{attn}.out_proj.{kind}"
        ours[f"blocks.{i}.mlp.input.weight"] = rows(f"{mlp.format(i)}.1.weight", 0, d_mlp)
        ours[f"blocks.{i}.mlp.gate.weight"] = rows(f"{mlp.format(i)}.1.weight", d_mlp, 2 * d_mlp)
        ours[f"blocks.{i}.mlp.output.weight"] = f"{mlp.format(i)}.4.weight"
    return out


def _table(table: torch.Tensor, n_rows: int) -> torch.Tensor:
    """position_indices. ValueError where it points beside the rows of relative positions."""
    if table.numel() and not bool(((table >= 0) & (table < n_rows) & (table == table.round())).all()):
        raise ValueError(f"it must hold whole numbers below {n_rows}")
    return table


def _n_ctx(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], attention: str | None) -> int:
    if attention is None:
        if (n_ctx := config["max_position_embeddings"]) > _LONGEST:
            raise ValueError(f"position_indices for {n_ctx} positions would be too large; at most {_LONGEST} can be.")
        return n_ctx
    return axes(shapes, f"{attention}.position_indices", 2)[0]

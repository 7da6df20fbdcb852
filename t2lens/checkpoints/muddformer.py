"""MUDDFormer and MUDDPythia (Caiyun-AI, MIT): llama-like sequential blocks, or NeoX-like parallel ones.

    dense_bs.{i} [ways, i + 2]    dynamic_dense.{i}.w1.weight [K, d]    dynamic_dense.{i}.w2.weight [ways * (i + 2), K]

The first block has one attention norm, the others one each for queries, keys and values; MLP widths differ between
layers. Cosines and sines are rounded, to bfloat16 (MUDDFormer) or float16 (MUDDPythia), and that decides the numbers.
The code writes rotated heads interleaved where it reads them in halves, which no dot product sees: ours stay in halves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from t2lens.checkpoints.plan import Plan, Take
from t2lens.checkpoints.values import agree, axes, checked, n_blocks
from t2lens.config import MLP, Attention, ModelConfig, Norm, Rope
from t2lens.residual import MUDDFormer

__all__ = ["plan", "recognises"]

_TABLES = re.compile(r".*\b(freqs_cis|causal_mask|mask|kv_cache\.[kv]_cache|layer_cache|inv_freq)")
_KINDS: dict[str, tuple[str, ...]] = {
    "whole": ("n_layer", "n_head", "dim", "vocab_size", "block_size"),
    "number": ("norm_eps", "rope_base", "rotary_pct"),
    "flag": ("use_qk_norm", "use_parallel_residual", "round64", "expand_last"),
}
# config key -> the one value with which the released code works
_ALIVE = {"dense": True, "dynamic_dense": True, "dense_type": "qkvr", "sepln": True, "stack_hidden": False}


def recognises(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> bool:  # noqa: ARG001
    """The dense modules of the family; other implementations of the same paper have other names."""
    return "dense_bs.0" in shapes and "tok_embeddings.weight" in shapes


def plan(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Plan:
    """ValueError for what the released code has switches for but does not run, or where config and weights disagree."""
    config = checked(config, **_KINDS)
    for key, known in _ALIVE.items():
        if (value := config.get(key, known)) != known:
            raise ValueError(f"A MUDDFormer checkpoint with {key} {value!r} cannot be read, only with {known!r}.")
    n_layers = n_blocks(shapes, "layers.")
    d_vocab, d_model = axes(shapes, "tok_embeddings.weight", 2)
    for key, found in (("n_layer", n_layers), ("dim", d_model), ("vocab_size", d_vocab)):
        agree(config, key, found)
    n_heads = config["n_head"]
    if d_model % n_heads:
        raise ValueError(f"The config has n_head {n_heads}, which does not divide dim {d_model}.")
    tied = "output.weight" not in shapes
    pythia = "norm.bias" in shapes
    widths = tuple(axes(shapes, f"layers.{i}.feed_forward.w1.weight", 2)[0] for i in range(n_layers))
    gated = "layers.0.feed_forward.w3.weight" in shapes
    cfg = ModelConfig(
        d_vocab=d_vocab,
        n_ctx=config.get("block_size", 2048),
        d_model=d_model,
        n_layers=n_layers,
        attention=_attention(config, shapes, n_heads, d_model // n_heads, pythia),
        mlp=MLP(
            d_mlp=widths,
            gated=gated,
            act="silu" if gated else "gelu",
            bias="layers.0.feed_forward.w1.bias" in shapes,
        ),
        norm=Norm(kind="layer" if pythia else "rms", bias=pythia, eps=config.get("norm_eps", 1e-5 if pythia else 1e-6)),
        block="parallel" if config.get("use_parallel_residual", pythia) else "sequential",
        residual=MUDDFormer(
            hidden_round=64 if config.get("round64", False) else 1,
            hidden_expand_last=4 if config.get("expand_last", False) else 1,
        ),
        tied=tied,
    )
    out = Plan(cfg, {"embed.weight": "tok_embeddings.weight"})
    if tied:
        out.assumed.append("The file has no output.weight, so the head is taken to be the embedding.")
    else:
        out.weights["unembed.weight"] = "output.weight"
    if "block_size" not in config:
        out.assumed.append("The context is 2048 tokens, the default of the format, as the config does not say.")
    out.weights |= dict(_both("ln_final", "norm", pythia, norm=True))
    for i in range(n_layers):
        out.weights |= dict(_block(i, cfg)) | {
            f"residual.static.{i}": f"dense_bs.{i}",
            f"residual.generator_in.{i}": f"dynamic_dense.{i}.w1.weight",
            f"residual.generator_out.{i}": f"dynamic_dense.{i}.w2.weight",
        }
    out.ignore((key for key in shapes if _TABLES.match(key)), "a table that is computed, or an empty cache (buffer)")
    return out


def _attention(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], n_heads: int, d_head: int, pythia: bool
) -> Attention:
    normed = "layers.0.attention.q_norm.weight" in shapes
    if config.get("use_qk_norm", normed) != normed:
        has = "norms of queries and keys" if normed else "no norm of queries and keys"
        raise ValueError(f"The config has use_qk_norm {config['use_qk_norm']}, but the weights have {has}.")
    turned = int(config.get("rotary_pct", 0.25 if pythia else 1.0) * d_head)
    return Attention(
        n_heads=n_heads,
        n_kv_heads=axes(shapes, "layers.0.attention.wk.weight", 2)[0] // d_head,
        d_head=d_head,
        qk_norm="head" if normed else "none",
        bias="layers.0.attention.wq.bias" in shapes,
        rope=Rope(
            base=config.get("rope_base", 10_000.0),
            n_dims=None if turned == d_head else turned,
            table="float16" if pythia else "bfloat16",
        ),
    )


def _both(ours: str, theirs: str, bias: bool, *, norm: bool = False) -> Iterator[tuple[str, Take | str]]:
    yield f"{ours}.{'w' if norm else 'weight'}", f"{theirs}.weight"
    if bias:
        yield f"{ours}.{'b' if norm else 'bias'}", f"{theirs}.bias"


def _block(i: int, cfg: ModelConfig) -> Iterator[tuple[str, Take | str]]:
    ours, theirs = f"blocks.{i}.", f"layers.{i}."
    norms = {"ln2": "ffn_norm"} | {f"ln1_{way}": f"attention_norms.{n}" for n, way in enumerate("qkv") if i}
    for name, of_file in (norms if i else norms | {"ln1": "attention_norm"}).items():
        yield from _both(ours + name, theirs + of_file, cfg.norm.bias, norm=True)
    for name, of_file in {"query": "wq", "key": "wk", "value": "wv", "output": "wo"}.items():
        yield from _both(f"{ours}attn.{name}", f"{theirs}attention.{of_file}", cfg.attention.bias)
    if cfg.attention.qk_norm != "none":
        yield f"{ours}attn.query_norm", f"{theirs}attention.q_norm.weight"
        yield f"{ours}attn.key_norm", f"{theirs}attention.k_norm.weight"
    mlp = {"gate": "w1", "input": "w3", "output": "w2"} if cfg.mlp.gated else {"input": "w1", "output": "w2"}
    for name, of_file in mlp.items():
        yield from _both(f"{ours}mlp.{name}", f"{theirs}feed_forward.{of_file}", cfg.mlp.bias)

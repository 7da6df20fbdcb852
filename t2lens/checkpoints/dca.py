"""lucidrains' deep-cross-attention (MIT): a third-party DeepCrossAttention; the authors released no code.

    dca_blocks.{i}.qkv_grn.bias [3, sources, d]      dca_blocks.{i}.qkv_grn.to_aggregate.{0.weight [d], 1.weight [3, d]}
    final_grn.bias [1, sources, d]                   final_grn.to_aggregate.{0.weight [d], 1.weight [1, d]}

Queries, keys and values are normed apart (RMSNorms with torch's default eps, which is float32's), RoPE turns
interleaved pairs of whole heads by frequencies that are weights of each layer, the MLP is a plain GELU with biases, and
what it adds attention to is the mixture of the queries. With more than 2 past_layers_k sources the first and the last
past_layers_k are read, the others dropped.
"""

from __future__ import annotations

from typing import Any

import torch

from t2lens.checkpoints.plan import Plan, Take
from t2lens.checkpoints.values import agree, axes, checked, n_blocks
from t2lens.config import MLP, Attention, ModelConfig, Norm, Rope
from t2lens.residual import DCA

__all__ = ["plan", "recognises"]

_CONTEXT = 4096
_MLP = {"input": 0, "output": 2}


def recognises(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> bool:  # noqa: ARG001
    """Its blocks, each with an aggregator of queries, keys and values."""
    return "dca_blocks.0.qkv_grn.bias" in shapes


def plan(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], *, past_layers_k: int | None = None) -> Plan:
    """past_layers_k: where the config does not say. ValueError where config and weights disagree."""
    whole = ("num_tokens", "dim", "depth", "heads", "dim_head", "past_layers_k")
    config = checked(config if past_layers_k is None else {**config, "past_layers_k": past_layers_k}, whole=whole)
    d_vocab, d_model = axes(shapes, "token_emb.weight", 2)
    n_layers = n_blocks(shapes, "dca_blocks.")
    inner = axes(shapes, "dca_blocks.0.attn.to_q.1.weight", 2)[0]
    for key, found in (("depth", n_layers), ("dim", d_model), ("num_tokens", d_vocab)):
        agree(config, key, found)
    d_head = _d_head(config, shapes, inner)
    if inner % d_head or config.get("heads", inner // d_head) * d_head != inner:
        raise ValueError(f"Heads of {d_head} as in the config do not make up the {inner} rows of the queries.")
    out = Plan(
        ModelConfig(
            d_vocab=d_vocab,
            n_ctx=_CONTEXT,
            d_model=d_model,
            n_layers=n_layers,
            attention=Attention(
                n_heads=inner // d_head, n_kv_heads=inner // d_head, d_head=d_head, rope=_rope(shapes, d_head)
            ),
            mlp=MLP(d_mlp=axes(shapes, "dca_blocks.0.ff.0.weight", 2)[0], act="gelu", gated=False, bias=True),
            norm=Norm(eps=torch.finfo(torch.float32).eps),
            residual=DCA(key_norm="rms", recent=_recent(config, shapes, n_layers), between="drop"),
            tied="to_logits.weight" not in shapes,
        )
    )
    out.assumed.append(f"The context is {_CONTEXT} tokens: the format knows no limit.")
    if out.cfg.tied:
        out.assumed.append("The file has no to_logits.weight, so the head is taken to be the embedding.")
    else:
        out.weights["unembed.weight"] = "to_logits.weight"
    out.weights |= {"embed.weight": "token_emb.weight", "ln_final.w": "norm.weight"}
    for i in range(n_layers):
        _block(out, i)
        _aggregator(out, i, f"dca_blocks.{i}.qkv_grn")
    _aggregator(out, n_layers, "final_grn")
    scales = tuple(f"{_grn(i, n_layers)}.to_aggregate.0.weight" for i in range(n_layers + 1))
    out.weights["residual.key_scale"] = Take(scales, lambda *rows: torch.stack(rows))
    return out


def _grn(i: int, n_layers: int) -> str:
    return "final_grn" if i == n_layers else f"dca_blocks.{i}.qkv_grn"


def _d_head(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], inner: int) -> int:
    """As the config says, or as the frequencies of RoPE show, which turn whole heads."""
    freqs = "dca_blocks.0.attn.rotary_embed.freqs"
    if "dim_head" in config:
        return config["dim_head"]
    if "heads" in config:
        return max(1, inner // config["heads"])
    if freqs not in shapes:
        raise ValueError("Neither the config (dim_head, heads) nor a table of RoPE says how wide the heads are.")
    return 2 * axes(shapes, freqs, 1)[0]


def _recent(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], n_layers: int) -> int:
    """past_layers_k. A file in which sources are dropped shows it: no aggregator has more than twice as many."""
    counts = [axes(shapes, f"{_grn(i, n_layers)}.bias", 3)[1] for i in range(n_layers + 1)]
    shown = max(counts) // 2 if max(counts) < n_layers + 1 else n_layers + 1
    k = config.get("past_layers_k", shown)
    if counts != [min(2 * k, i + 1) for i in range(n_layers + 1)]:
        raise ValueError(f"With past_layers_k {k} the aggregators would not have {counts} sources as in the weights.")
    return k


def _rope(shapes: dict[str, tuple[int, ...]], d_head: int) -> Rope:
    """The frequencies are weights of each layer, so they are what the file says and not what the base gives."""
    key = "dca_blocks.0.attn.rotary_embed.freqs"
    n_dims = 2 * axes(shapes, key, 1)[0] if key in shapes else d_head
    return Rope(
        n_dims=None if n_dims == d_head else n_dims,
        layout="interleaved",
        frequencies="learned" if key in shapes else "fixed",
    )


def _block(out: Plan, i: int) -> None:
    ours, theirs = f"blocks.{i}.", f"dca_blocks.{i}."
    for way, name in {"q": "query", "k": "key", "v": "value"}.items():
        out.weights[f"{ours}ln1_{way}.w"] = f"{theirs}attn.to_{way}.0.weight"
        out.weights[f"{ours}attn.{name}.weight"] = f"{theirs}attn.to_{way}.1.weight"
    out.weights |= {
        f"{ours}attn.output.weight": f"{theirs}attn.to_out.weight",
        f"{ours}ln2.w": f"{theirs}pre_ff_norm.weight",
    }
    for name, n in _MLP.items():
        for part in ("weight", "bias"):
            out.weights[f"{ours}mlp.{name}.{part}"] = f"{theirs}ff.{n}.{part}"
    out.ignore([f"{theirs}attn.norm.weight"], "a norm that the code makes and never calls")
    if out.cfg.attention.rope is not None and out.cfg.attention.rope.frequencies == "learned":
        out.weights[f"{ours}attn.rope_frequencies"] = f"{theirs}attn.rotary_embed.freqs"


def _aggregator(out: Plan, i: int, theirs: str) -> None:
    out.weights[f"residual.bias.{i}"] = f"{theirs}.bias"
    out.weights[f"residual.gate_weight.{i}"] = f"{theirs}.to_aggregate.1.weight"

"""The open ports of Attention Residuals (`model_type` "qwen3_attnres", three programs) and their Qwen3 baselines.

Qwen3's names, and per layer i and sublayer s ("attn", "mlp"; "v" for a query of the values):

    model.layers.{i}.{s}_res_proj.weight [1, d]    model.layers.{i}.{s}_res_norm.weight [d]    {s}_res_bias []
    {s}_res_gate_logit [] | {s}_res_gate_proj.{weight [d, d], bias [d]} | {s}_res_alpha []
    {s}_pre_gate.{weight [d, d], bias [d]}     (mode pre_gated)
    model.final_res_proj.weight [1, d]    model.final_res_norm.weight [d]    model.final_res_bias []

Which program wrote a file shows in its keys: B has a scalar bias at every read and a final read (block), C has no
scalar bias at all, A has scalar biases and no final read; modes that A lacks are B's.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import torch

from t2lens.checkpoints.plan import Plan, Take
from t2lens.checkpoints.values import agree, axes, checked, n_blocks
from t2lens.config import MLP, Attention, ModelConfig, Norm, ResidualConfig, Rope
from t2lens.residual import OpenAttnRes, Standard

__all__ = ["plan", "recognises"]

_ACTS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
_GATES = {"sigmoid_scalar": "res_gate_logit", "sigmoid_vector": "res_gate_proj.weight", "learnable_alpha": "res_alpha"}
_READS_NULL = ("delta", "delta_block", "delta_v", "delta_block_v", "full_additive")
_KNOWN = ("num_blocks", "mode", "gate_type", "recency_bias_init", "use_null_source", "init_bias", "gate_init")
_KINDS: dict[str, tuple[str, ...]] = {
    "whole": (
        "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "sliding_window", "attnres_num_blocks",
    ),
    "natural": ("max_window_layers",),
    "number": ("rms_norm_eps", "rope_theta", "attnres_recency_bias_init"),
    "flag": ("tie_word_embeddings", "use_sliding_window"),
    "text": ("hidden_act", "attnres_mode", "attnres_gate_type"),
    "listed": ("layer_types",),
    "nested": ("rope_parameters", "rope_scaling"),
}  # fmt: skip
_WHY = {
    "attn_res_bias": "the program makes this scalar and adds it to no score in this mode",
    "v_res_proj.weight": "the program computes a read of the values in this mode and its attention ignores it",
    "gate": "the program makes this gate and does not call it in this mode",
    "null": "the program reads no null source in this mode",
    "idle": "no source is ever appended in this mode, so every read is the stream and these weights do nothing",
}

Shapes = dict[str, tuple[int, ...]]


def recognises(config: dict[str, Any], shapes: Shapes) -> bool:
    """Its model_type or its depth queries beside Qwen3's names; or a plain Qwen3, which is what its baselines are."""
    if "model.layers.0.self_attn.q_proj.weight" not in shapes or "model.layers.0.mlp.gate_proj.weight" not in shapes:
        return False
    ported = config.get("model_type") == "qwen3_attnres" or _layer(0, "attn_res_proj.weight") in shapes
    return ported or (config.get("model_type") == "qwen3" and _layer(0, "self_attn.q_norm.weight") in shapes)


def plan(config: dict[str, Any], shapes: Shapes) -> Plan:
    """ValueError where config and weights disagree, or where a setting is one that is not supported."""
    config = checked(config, **_KINDS)
    n_layers = n_blocks(shapes, "model.layers.")
    agree(config, "num_hidden_layers", n_layers)
    assumed: list[str] = []
    residual, idle = _residual(config, shapes, assumed)
    out = Plan(_backbone(config, shapes, n_layers, residual), assumed=assumed)
    out.weights |= {"embed.weight": "model.embed_tokens.weight", "ln_final.w": "model.norm.weight"}
    if not out.cfg.tied:
        out.weights["unembed.weight"] = "lm_head.weight"
    elif "lm_head.weight" in shapes:
        out.equal.append(("lm_head.weight", "model.embed_tokens.weight"))
    for i in range(n_layers):
        _block(out, i)
    out.ignore((k for k in shapes if k.endswith("rotary_emb.inv_freq")), "a buffer that rope_theta gives")
    if isinstance(residual, OpenAttnRes):
        _depth(out, residual, n_layers)
    _leave_out(out, residual, idle, shapes)
    return out


def _layer(i: int, name: str) -> str:
    return f"model.layers.{i}.{name}"


# --- which program, which mode -----------------------------------------------------------------------------------


def _residual(config: dict[str, Any], shapes: Shapes, assumed: list[str]) -> tuple[ResidualConfig, bool]:
    """The residual system, and whether the depth weights of the file do nothing."""
    mode = config.get("attnres_mode") or "block"
    if _layer(0, "attn_res_proj.weight") not in shapes:
        if config.get("attnres_mode") not in (None, "none", "baseline"):
            raise ValueError(f"The config has attnres_mode {mode!r}, but the weights hold no depth queries.")
        assumed.append("The weights hold no depth queries, so this is the baseline: a plain Qwen3.")
        return Standard(), False
    dialect, why = _dialect(mode, shapes)
    if "attnres_mode" not in config:
        assumed.append("The config names no attnres_mode; the default of the programs is block.")
    assumed.append(f"The file is of dialect {dialect}: {why}.")
    if more := sorted(k for k in config if k.startswith("attnres_") and k.removeprefix("attnres_") not in _KNOWN):
        assumed.append(f"The config also has {', '.join(more)}, taken to be of training alone.")
    if mode in _READS_NULL and _layer(0, "attn_null_source") in shapes:
        raise ValueError(
            f"The file has a null source in mode {mode}: a constant that every read adds and no write accounts for, "
            "which t2lens does not support."
        )
    gate = _gate(config, shapes, assumed)
    if dialect == "C" and mode == "delta_block_v":
        assumed.append("Mode delta_block_v never appends a source: the model is a plain pre-norm transformer.")
        return Standard(), True
    if dialect == "C" and mode == "block_v":
        assumed.append("In mode block_v the attention ignores the read of the values: the model is that of mode block.")
    if dialect == "C" and mode == "delta_centered_reset":
        assumed.append("Mode delta_centered_reset has no branch of its own in the program and runs as full.")
    if mode == "pre_gated" and dialect == "B":
        assumed.append("Sources in mode pre_gated are taken to be those of mode delta, the embedding first.")
    mode = {"block_v": "block", "delta_centered_reset": "full"}.get(mode, mode) if dialect == "C" else mode
    residual = OpenAttnRes(
        dialect=dialect,
        mode=mode,
        n_blocks=config.get("attnres_num_blocks", 8),
        gate="bias" if mode in ("pre_gated", "first_layer") else gate,
        bias_init=config.get("attnres_recency_bias_init", 3.0) if dialect != "C" else 0.0,
    )
    if "attnres_num_blocks" not in config and residual.scheme.each == "block":
        assumed.append("The config names no attnres_num_blocks; the default of the programs is 8.")
    return residual, False


def _dialect(mode: str, shapes: Shapes) -> tuple[Literal["A", "B", "C"], str]:
    biased = _layer(0, "attn_res_bias") in shapes
    final, final_bias = (f"model.final_res_{name}" in shapes for name in ("proj.weight", "bias"))
    if final_bias:
        return "B", "its final read has a scalar bias"
    if final and biased:
        raise ValueError("The file has scalar biases and a final read without one, which no program writes.")
    if final:
        return "C", "it has a final read and no scalar biases; block and full are those of the paper"
    if biased and mode == "block":
        return "A", "it has scalar biases and no final read in mode block"
    if biased and mode == "full":
        return "A", "it has scalar biases and mode full, which A and B compute alike"
    if biased:
        return "B", f"it has scalar biases and mode {mode}, which A lacks"
    if mode in ("block", "block_v", "full", "delta_centered_reset"):
        raise ValueError(
            f"The file has neither scalar biases nor a final read, which no program writes in mode {mode}."
        )
    return "C", "it has no scalar biases"


def _gate(
    config: dict[str, Any], shapes: Shapes, assumed: list[str]
) -> Literal["bias", "sigmoid_scalar", "sigmoid_vector", "learnable_alpha"]:
    found: Any = next((g for g, name in _GATES.items() if _layer(0, f"attn_{name}") in shapes), "bias")
    named = config.get("attnres_gate_type")
    if named is None and found != "bias":
        assumed.append(f"The config names no attnres_gate_type; the weights are those of {found}.")
    if named is not None and named != found and (named in _GATES or found != "bias"):
        raise ValueError(f"The config has attnres_gate_type {named!r}, but the weights are those of {found!r}.")
    return found


# --- weights -----------------------------------------------------------------------------------------------------


def _block(out: Plan, i: int) -> None:
    values = isinstance(out.cfg.residual, OpenAttnRes) and out.cfg.residual.scheme.values
    for norm in ("ln1_q", "ln1_k", "ln1_v") if values else ("ln1",):
        out.weights[f"blocks.{i}.{norm}.w"] = _layer(i, "input_layernorm.weight")
    out.weights[f"blocks.{i}.ln2.w"] = _layer(i, "post_attention_layernorm.weight")
    for ours, theirs in {"query": "q", "key": "k", "value": "v", "output": "o"}.items():
        for part in ("weight", "bias") if out.cfg.attention.bias else ("weight",):
            out.weights[f"blocks.{i}.attn.{ours}.{part}"] = _layer(i, f"self_attn.{theirs}_proj.{part}")
    if out.cfg.attention.qk_norm != "none":
        for ours, theirs in {"query_norm": "q_norm", "key_norm": "k_norm"}.items():
            out.weights[f"blocks.{i}.attn.{ours}"] = _layer(i, f"self_attn.{theirs}.weight")
    for ours, theirs in {"gate": "gate_proj", "input": "up_proj", "output": "down_proj"}.items():
        out.weights[f"blocks.{i}.mlp.{ours}.weight"] = _layer(i, f"mlp.{theirs}.weight")


def _depth(out: Plan, residual: OpenAttnRes, n_layers: int) -> None:
    scheme, gate = residual.scheme, residual.gate
    sublayers = [_layer(i, s) for i in range(n_layers) for s in ("attn", "mlp")]
    reads = [*sublayers, "model.final"] if scheme.final else sublayers
    values = [_layer(i, "v") for i in range(n_layers)]

    def stack(ours: str, prefixes: list[str], name: str) -> None:
        out.weights[f"residual.{ours}"] = Take(tuple(f"{p}_{name}" for p in prefixes), _stacked)

    stack("query", reads, "res_proj.weight")
    stack("key_norm", reads, "res_norm.weight")
    if scheme.values:
        stack("value_query", values, "res_proj.weight")
        stack("value_key_norm", values, "res_norm.weight")
    if scheme.bias:
        stack("bias", reads, "res_bias")
    if gate == "sigmoid_vector":
        stack("gate_weight", sublayers, "res_gate_proj.weight")
        stack("gate_bias", sublayers, "res_gate_proj.bias")
    elif gate != "bias":
        stack("gate_value", sublayers, _GATES[gate])
    if scheme.filters:
        stack("filter_weight", sublayers, "pre_gate.weight")
        stack("filter_bias", sublayers, "pre_gate.bias")


def _stacked(*tensors: torch.Tensor) -> torch.Tensor:
    """[reads, ...]; a query is one row of a matrix in the file."""
    return torch.stack([t[0] if t.ndim == 2 and t.shape[0] == 1 else t for t in tensors])


def _leave_out(out: Plan, residual: ResidualConfig, idle: bool, shapes: Shapes) -> None:
    """Name what the program makes and never uses, with the reason."""
    used = out.used()
    for key in shapes:
        match = re.match(r"model\.layers\.\d+\.(attn|mlp|v)_(.+)", key)
        if match is None or key in used:
            continue
        what, part = match.groups()
        if idle:
            out.ignore([key], _WHY["idle"])
        elif part == "null_source":
            out.ignore([key], _WHY["null"])
        elif what == "v":
            out.ignore([key], _WHY["v_res_proj.weight"])
        elif part == "res_bias" and isinstance(residual, OpenAttnRes) and not residual.scheme.bias:
            out.ignore([key], _WHY["attn_res_bias"])
        elif part.startswith(("res_gate", "res_alpha")) and isinstance(residual, OpenAttnRes):
            out.ignore([key], _WHY["gate"])


# --- the backbone: Qwen3 -----------------------------------------------------------------------------------------


def _backbone(config: dict[str, Any], shapes: Shapes, n_layers: int, residual: ResidualConfig) -> ModelConfig:
    d_vocab, d_model = axes(shapes, "model.embed_tokens.weight", 2)
    n_heads = config["num_attention_heads"]
    d_head = axes(shapes, _layer(0, "self_attn.q_proj.weight"), 2)[0] // n_heads
    if not d_head:
        raise ValueError(f"The config has {n_heads} heads, which is more than its queries have rows.")
    n_kv_heads = axes(shapes, _layer(0, "self_attn.k_proj.weight"), 2)[0] // d_head
    found = {"hidden_size": d_model, "vocab_size": d_vocab, "head_dim": d_head, "num_key_value_heads": n_kv_heads}
    for key, value in found.items():
        agree(config, key, value)
    act = config.get("hidden_act", "silu")
    if act not in _ACTS:
        raise ValueError(f"The config has hidden_act {act!r}, which is not supported; known are {', '.join(_ACTS)}.")
    return ModelConfig(
        d_vocab=d_vocab,
        n_ctx=config.get("max_position_embeddings", 4096),
        d_model=d_model,
        n_layers=n_layers,
        attention=Attention(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_head=d_head,
            qk_norm="head" if _layer(0, "self_attn.q_norm.weight") in shapes else "none",
            rope=_rope(config),
            window=_window(config, n_layers),
            bias=_layer(0, "self_attn.q_proj.bias") in shapes,
        ),
        mlp=MLP(d_mlp=axes(shapes, _layer(0, "mlp.gate_proj.weight"), 2)[0], act=_ACTS[act]),
        norm=Norm(eps=config.get("rms_norm_eps", 1e-6)),
        residual=residual,
        tied="lm_head.weight" not in shapes or config.get("tie_word_embeddings", False),
    )


def _rope(config: dict[str, Any]) -> Rope:
    """rope_theta stands by itself, or under rope_parameters (transformers 5); 10000 is the default of the class."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = checked(given, number=("rope_theta", "partial_rotary_factor"))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default" or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"The config scales its rotary positions ({given}), which is not supported.")
    return Rope(base=given.get("rope_theta", config.get("rope_theta", 10_000.0)))


def _window(config: dict[str, Any], n_layers: int) -> int | None:
    """The sliding window, where every layer has one."""
    kinds = set(map(str, config.get("layer_types") or ["full_attention"]))
    if "layer_types" not in config and config.get("use_sliding_window"):
        kinds = {"sliding_attention"} if config.get("max_window_layers", n_layers) == 0 else {"mixed"}
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"} or not config.get("sliding_window"):
        raise ValueError("The config has sliding windows in some layers only, which is not supported.")
    return config["sliding_window"]

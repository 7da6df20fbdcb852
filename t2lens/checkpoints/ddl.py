"""Deep Delta Learning (arXiv 2601.00417): the files of its authors' repository, `model_type: nanogpt-pro`.

One config class serves all of them; which file of `model/` a checkpoint belongs to is in its keys:

    no compress.*                          scalar state       DDL-vdim1-gpt-mha-rope
    transformer.h.0.compress.shortconv.*   compress="time"    DDL-gpt-mha-rope, with input_embed.* its -EC
    transformer.h.0.compress.weight        "channels"         DDL-gpt-mha-rope-CC, with input_embed.* its -CC-EC

The channels of their convolutions count d * value_channels + v, so their weights are ours with the axes split. QK norm
stands after RoPE; the width of the MLP, floor(8 D / 3) there, is read from the shapes.

Options. implementation: "plain", or "accelerated" for the file with the Triton kernels, which has the config and the
keys of CC-EC, but sqrt(D) * k_eps in the norm of k, and causal channel padding where the config asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from t2lens.checkpoints.plan import Plan, Take
from t2lens.checkpoints.values import agree, axes, checked, n_blocks
from t2lens.config import MLP, Attention, KVShift, ModelConfig, Norm, Rope
from t2lens.residual import DeepDelta

__all__ = ["plan", "recognises"]

_BLOCK = "transformer.h"
_KINDS: dict[str, tuple[str, ...]] = {
    "whole": ("num_hidden_layers", "num_attention_heads", "head_dim", "block_size", "hidden_size_base"),
    "number": (
        "rope_ratio", "ddl_k_eps", "ddl_beta_init", "ddl_v_sigmoid_scale", "ddl_v_constant_value",
        "ddl_v_dim1_constant_value",
    ),
    "flag": (
        "use_qk_rmsnorm", "use_k_shift", "use_v_shift", "ddl_v_sigmoid", "ddl_v_constant", "ddl_v_dim1_constant",
        "ddl_state_dv_shortconv_causal", "tie_word_embeddings", "mup",
    ),
}  # fmt: skip
_UNKNOWN = {  # options of the config class whose equations the published description does not give
    "using_groupnorm": False,
    "use_output_gate": False,
    "q_activation": None,
    "k_activation": None,
    "v_activation": None,
    "scale_attn_by_inverse_layer_idx": False,
    "shortconvq": False,
    "shortconvk": False,
    "shortconvv": False,
}


def recognises(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    del config  # its model_type is that of the authors' other models too
    return any(re.fullmatch(r"transformer\.h\.\d+\.ddl_(attn|mlp)\.beta(_out)?\.bias", key) for key in shapes)


def plan(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, implementation: str = "plain") -> Plan:
    """ValueError: an option that changes the numbers and is not supported (it is named), or keys that do not fit."""
    if implementation not in ("plain", "accelerated"):
        raise ValueError(f"The option implementation must be plain or accelerated, not {implementation!r}.")
    config = checked(config, **_KINDS)
    for option, off in _UNKNOWN.items():
        if (value := config.get(option, off)) not in (off, None, False):
            raise ValueError(f"A Deep Delta Learning checkpoint with {option} = {value!r} is not supported.")
    made = Plan(cfg=_config(config, shapes, implementation))
    _backbone(made, shapes)
    _delta(made, made.cfg, shapes)
    _assumptions(made, config, implementation)
    return made


def _config(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], implementation: str) -> ModelConfig:
    vocabulary, d = axes(shapes, "transformer.wte.weight", 2)
    n_layers = n_blocks(shapes, f"{_BLOCK}.")
    agree(config, "num_hidden_layers", n_layers)
    n_heads = config["num_attention_heads"]
    first = f"{_BLOCK}.0"
    query = axes(shapes, f"{first}.attn.c_q.weight", 2)[0]
    d_head = config.get("head_dim") or query // n_heads
    if n_heads * d_head != query:
        raise ValueError(f"The config has {n_heads} heads of {d_head}, and the file's c_q has {query} rows.")
    shifted = "".join(
        way
        for way in "kv"
        if config.get(f"use_{way}_shift", False) or f"{first}.attn.c_{way}.shift_proj.weight" in shapes
    )
    n_dims = int(d_head * config.get("rope_ratio", 1.0))
    return ModelConfig(
        d_vocab=vocabulary,
        n_ctx=config.get("block_size", 1024),
        d_model=d,
        n_layers=n_layers,
        attention=Attention(
            n_heads=n_heads,
            n_kv_heads=n_heads,
            d_head=d_head,
            qk_norm="head_after_rope" if config.get("use_qk_rmsnorm", True) else "none",
            rope=Rope(n_dims=n_dims, table="float32") if n_dims else None,
            bias=f"{first}.attn.c_q.bias" in shapes,
            kv_shift=KVShift(kind="tokens", on=shifted) if shifted else None,
        ),
        mlp=MLP(d_mlp=axes(shapes, f"{first}.mlp.c_fc1.weight", 2)[0], bias=f"{first}.mlp.c_fc1.bias" in shapes),
        norm=Norm(eps=1e-5),
        residual=_residual(config, shapes, implementation),
        tied="lm_head.weight" not in shapes or config.get("tie_word_embeddings", True),
    )


def _residual(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], implementation: str) -> DeepDelta:
    first, d = f"{_BLOCK}.0", axes(shapes, "transformer.wte.weight", 2)[1]
    over_time = f"{first}.compress.shortconv.weight" in shapes
    channels = axes(shapes, f"{first}.compress.read", 1)[0] if f"{first}.compress.read" in shapes else 1
    of_channels = "ddl_v_constant" if channels > 1 else "ddl_v_dim1_constant"
    constant = config.get(of_channels, False)
    accelerated = implementation == "accelerated"
    if accelerated and (channels != 4 or over_time or constant or f"{first}.ddl_attn.beta.bias" not in shapes):
        raise ValueError(
            "The accelerated file has channel compression, 4 value channels, a linear gate and no constant values only."
        )
    start = config.get("ddl_beta_init", 0.0)  # as the module's fallback; the weights are past it
    hidden = f"{first}.ddl_attn.beta_in.weight"
    kernel = "shortconv.weight" if over_time else "weight"
    return DeepDelta(
        value_channels=channels,
        embed_conv=axes(shapes, "input_embed.conv.weight", 3)[-1] if "input_embed.conv.weight" in shapes else None,
        compress="time" if over_time else "channels",
        compress_kernel=axes(shapes, f"{first}.compress.{kernel}", 2)[-1] if channels > 1 else 4,
        compress_pad="causal" if accelerated and config.get("ddl_state_dv_shortconv_causal", False) else "same",
        value_form="constant" if constant
        else "sigmoid_of_raw" if accelerated or config.get("ddl_v_sigmoid", True)
        else "linear_of_raw",
        value_scale=config.get("ddl_v_sigmoid_scale", 4.0),
        value_constant=config.get(f"{of_channels}_value", 2.0),
        beta_hidden=axes(shapes, hidden, 2)[0] if hidden in shapes else None,
        beta_init=start if 0 <= start < 2 else 1.0,
        k_eps=config.get("ddl_k_eps", 1e-5) * (d**0.5 if accelerated else 1),
    )  # fmt: skip


def _backbone(made: Plan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    cfg, weights = made.cfg, made.weights
    weights |= {"embed.weight": "transformer.wte.weight", "ln_final.w": "ln_f.weight"}
    if "transformer.ln_f.weight" in shapes:
        weights["ln_final.w"] = "transformer.ln_f.weight"
    if not cfg.tied:
        weights["unembed.weight"] = "lm_head.weight"
    elif "lm_head.weight" in shapes:
        made.equal.append(("lm_head.weight", "transformer.wte.weight"))
    shift = cfg.attention.kv_shift
    for i in range(cfg.n_layers):
        ours, theirs = f"blocks.{i}", f"{_BLOCK}.{i}"
        weights |= {f"{ours}.ln1.w": f"{theirs}.ln_1.weight", f"{ours}.ln2.w": f"{theirs}.ln_2.weight"}
        linears = {"attn.query": "attn.c_q", "attn.key": "attn.c_k", "attn.value": "attn.c_v"}
        for way, name in (("k", "key"), ("v", "value")):
            if shift is not None and way in shift.on:
                linears[f"attn.{name}"] = f"attn.c_{way}.linear"
                weights[f"{ours}.attn.shifts.{way}.gate.weight"] = f"{theirs}.attn.c_{way}.shift_proj.weight"
        linears["attn.output"] = "attn.c_proj"
        of_mlp = {"mlp.gate": "mlp.c_fc1", "mlp.input": "mlp.c_fc2", "mlp.output": "mlp.c_proj"}
        for name, key in (linears | of_mlp).items():
            weights[f"{ours}.{name}.weight"] = f"{theirs}.{key}.weight"
            if (cfg.mlp if name in of_mlp else cfg.attention).bias:
                weights[f"{ours}.{name}.bias"] = f"{theirs}.{key}.bias"
        if cfg.attention.qk_norm != "none":
            weights[f"{ours}.attn.query_norm"] = f"{theirs}.attn.q_rms.weight"
            weights[f"{ours}.attn.key_norm"] = f"{theirs}.attn.k_rms.weight"
    if cfg.attention.qk_norm == "none":
        made.ignore([k for k in shapes if re.search(r"\.[qk]_rms\.weight$", k)], "the config has use_qk_rmsnorm off")
    made.ignore([k for k in shapes if re.search(r"inv_freq|\.rotary\.", k)], "RoPE tables are computed")


def _delta(made: Plan, cfg: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Each of our parameters holds the file's of all writes, or of all compressors, in order."""
    rule = cfg.residual
    assert isinstance(rule, DeepDelta)
    writes = [f"{_BLOCK}.{i}.ddl_{kind}" for i in range(cfg.n_layers) for kind in ("attn", "mlp")]
    gate = "beta" if rule.beta_hidden is None else "beta_out"
    stacked = {"beta_weight": f"{gate}.weight", "beta_bias": f"{gate}.bias"}
    if rule.beta_hidden is not None:
        made.weights["residual.beta_in"] = _stack([f"{w}.beta_in.weight" for w in writes])
    for ours, key in stacked.items():
        made.weights[f"residual.{ours}"] = _flat([f"{w}.{key}" for w in writes])
    values = [f"{w}.v_proj.{part}" for part in ("weight", "bias") for w in writes]
    if rule.value_form == "constant":
        made.ignore([k for k in values if k in shapes], "the config says that v is a constant")
    else:
        made.weights["residual.value_weight"] = _stack(values[: len(writes)])
        made.weights["residual.value_bias"] = _stack(values[len(writes) :])
    if rule.value_channels == 1:
        return
    places = [*(f"{_BLOCK}.{i}.compress" for i in range(cfg.n_layers)), "readout"]
    made.weights["residual.compress_read"] = _stack([f"{place}.read" for place in places])
    over_time = rule.compress == "time"
    kernels = [f"{place}.shortconv.weight" if over_time else f"{place}.weight" for place in places]
    split = (cfg.d_model, *([rule.value_channels] if over_time else []), rule.compress_kernel)
    made.weights["residual.compress"] = _stack(kernels, split)
    if rule.embed_conv is not None:
        shape = (cfg.d_model, rule.value_channels, rule.embed_conv)
        made.weights["residual.embed_kernel"] = Take(("input_embed.conv.weight",), lambda x: x.reshape(shape))


def _stack(keys: list[str], shape: tuple[int, ...] | None = None) -> Take:
    """The tensors on a new first axis, each reshaped to `shape`."""
    return Take(tuple(keys), lambda *t: torch.stack([x if shape is None else x.reshape(shape) for x in t]))


def _flat(keys: list[str]) -> Take:
    """As `_stack`, without axes of length 1: a row [1, n] becomes [n], and a bias [1] a number."""
    return Take(tuple(keys), lambda *t: torch.stack([x.squeeze(0) for x in t]))


def _assumptions(made: Plan, config: Mapping[str, Any], implementation: str) -> None:
    rule = made.cfg.residual
    assert isinstance(rule, DeepDelta)
    if config.get("mup", False):
        scale = config.get("hidden_size_base", 1024) / made.cfg.d_model
        final = made.takes()["ln_final.w"]
        made.weights["ln_final.w"] = Take(final.keys, lambda w: w * scale)
        made.assumed.append(
            f"mup: the logits are scaled by hidden_size_base / hidden_size = {scale:g}, which is in the weight of the "
            "final norm here."
        )
    both = rule.value_channels == 4 and rule.compress == "channels" and rule.embed_conv and rule.beta_hidden is None
    if both and rule.value_form == "sigmoid_of_raw" and implementation == "plain":
        made.assumed.append(
            "The plain implementation is assumed; for a checkpoint of the accelerated file, whose k_eps is sqrt(D) "
            "times larger, pass implementation='accelerated'."
        )
    if config.get("ddl_state_dv_shortconv_causal", False) and rule.compress_pad == "same" and rule.value_channels > 1:
        made.assumed.append("ddl_state_dv_shortconv_causal is ignored, as the plain files ignore it.")
    if made.cfg.attention.kv_shift is not None:
        made.assumed.append(
            "k/v shift: their code forgets the previous token when it is given one token alone; here decoding equals "
            "the full pass."
        )

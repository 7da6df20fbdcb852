"""Mistral with depth-weighted averages (model_type `mistral_denseformer`): winglian/mistral-denseformer-7b, Apache-2.0.

Mistral's names, config keys `dilation` and `dwa_period`, and the averages of the DenseFormer package:

    {prefix}alphas.{i}.weight [1, (i + 1) // dilation + 1]      after block i, where i + 1 is a multiple of dwa_period

Written from the description of the format: no published file was at hand to compare with, and the loader says so.
"""

from __future__ import annotations

import re
from typing import Any

from t2lens.checkpoints.plan import Plan, Take
from t2lens.checkpoints.values import agree, axes, checked, n_blocks
from t2lens.config import MLP, Attention, ModelConfig, Norm, Rope
from t2lens.residual import DenseFormer

__all__ = ["plan", "recognises"]

_ALPHA = re.compile(r"((?:.*\.)?)alphas\.(\d+)\.weight")
_BLOCK = {
    "ln1.w": "input_layernorm.weight",
    "attn.query.weight": "self_attn.q_proj.weight",
    "attn.key.weight": "self_attn.k_proj.weight",
    "attn.value.weight": "self_attn.v_proj.weight",
    "attn.output.weight": "self_attn.o_proj.weight",
    "ln2.w": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.input.weight": "mlp.up_proj.weight",
    "mlp.output.weight": "mlp.down_proj.weight",
}
_WHOLE = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "dilation", "dwa_period",
    "max_position_embeddings", "sliding_window",
)  # fmt: skip
_QUERY = "model.layers.0.self_attn.q_proj.weight"


def recognises(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> bool:
    """Mistral's names with averages, or its model_type."""
    averages = any(_ALPHA.fullmatch(key) for key in shapes) and "dwa_period" in config
    return _QUERY in shapes and (averages or config.get("model_type") == "mistral_denseformer")


def plan(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Plan:
    """ValueError where averages are missing or of other lengths, or where a setting is one that is not supported."""
    config = checked(config, whole=_WHOLE, number=("rope_theta", "rms_norm_eps"), flag=("tie_word_embeddings",))
    for key, known in (("hidden_act", "silu"), ("rope_scaling", None), ("attention_bias", False)):
        if (value := config.get(key, known)) != known:
            raise ValueError(f"A mistral_denseformer checkpoint with {key} {value!r} cannot be read, only {known!r}.")
    d_vocab, d_model = axes(shapes, "model.embed_tokens.weight", 2)
    n_layers, n_heads = config["num_hidden_layers"], config["num_attention_heads"]
    agree(config, "num_hidden_layers", n_blocks(shapes, "model.layers."))
    d_head = max(1, axes(shapes, _QUERY, 2)[0] // n_heads)
    n_kv_heads = axes(shapes, _QUERY.replace("q_proj", "k_proj"), 2)[0] // d_head
    agree(config, "num_key_value_heads", n_kv_heads)
    residual = DenseFormer(dilation=config["dilation"], period=config["dwa_period"])
    window = config.get("sliding_window")
    tied = "lm_head.weight" not in shapes or config.get("tie_word_embeddings", False)
    out = Plan(
        ModelConfig(
            d_vocab=d_vocab,
            n_ctx=config["max_position_embeddings"],
            d_model=d_model,
            n_layers=n_layers,
            attention=Attention(
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                d_head=d_head,
                window=window,
                rope=Rope(base=config.get("rope_theta", 10_000.0), table="float32"),
            ),
            mlp=MLP(d_mlp=axes(shapes, "model.layers.0.mlp.gate_proj.weight", 2)[0]),
            norm=Norm(eps=config["rms_norm_eps"]),
            residual=residual,
            tied=tied,
        )
    )
    out.weights = {"embed.weight": "model.embed_tokens.weight", "ln_final.w": "model.norm.weight"}
    if not tied:
        out.weights["unembed.weight"] = "lm_head.weight"
    elif "lm_head.weight" in shapes:
        out.equal.append(("model.embed_tokens.weight", "lm_head.weight"))
    for i in range(n_layers):
        out.weights |= {f"blocks.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in _BLOCK.items()}
    for n, key in enumerate(_averages(residual, n_layers, shapes)):
        out.weights[f"residual.weights.{n}"] = Take((key,), lambda w: w.flatten())
    out.ignore([k for k in shapes if k.endswith("rotary_emb.inv_freq")], "RoPE tables are computed (buffer)")
    out.assumed = [
        "This format is read by its description, without a published file to compare with: check the logits of the "
        "original before you rely on it.",
        "An average replaces the stream after its block, and the last one is what the final norm reads.",
    ]
    if window is not None:
        out.assumed.append(f"The sliding window of {window} counts the token itself.")
    return out


def _averages(cfg: DenseFormer, n_layers: int, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Keys of the averages in order. ValueError where they are not those of dilation and period."""
    found = {int(m[2]): key for key in shapes if (m := _ALPHA.fullmatch(key))}
    n_found = sum(1 for key in shapes if _ALPHA.fullmatch(key))
    wanted = {i: (1, (i + 1) // cfg.dilation + 1) for i in range(n_layers) if (i + 1) % (cfg.period or n_layers) == 0}
    if n_found != len(found) or {i: shapes[key] for i, key in found.items()} != wanted:
        have = ", ".join(f"{i}: {(0, *shapes[found[i]])[-1]}" for i in sorted(found))
        raise ValueError(
            f"The averages of the checkpoint (block: sources {have or 'none'}) are not those of dilation "
            f"{cfg.dilation} and dwa_period {cfg.period} in {n_layers} blocks."
        )
    return [found[i] for i in sorted(found)]

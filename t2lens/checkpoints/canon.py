"""LlamaCanon (arXiv 2512.17351; facebookresearch/PhysicsLM4): a Llama with Canon layers at the sites of `canon_set`.

    <variant>/params.json + consolidated.pth     the training code's names, weights under "model"
    config.json + model files                    the same modules under Hugging Face's names (model_type LlamaCanon)

Give the folder of the variant, or one of files with Hugging Face's names. The Llama twins without Canon layers have the
same format with an empty `canon_set`. RoPE turns interleaved pairs of the first `rope_dim` entries in the training code
(rope_version "lingua"); a config of Hugging Face's kind may say "huggingface", which is halves. QK norm is one RMSNorm
over all heads joined, or one per head where the weight is as long as a head.

Written from the description of the format: no published file was at hand to compare with, and the loader says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from t2lens.checkpoints.plan import Plan, Take
from t2lens.checkpoints.values import axes, checked, n_blocks
from t2lens.config import MLP, Attention, Canon, ModelConfig, Norm, Rope

__all__ = ["plan", "recognises"]

# module of ours -> of the training code, of Hugging Face's names
_IN_BLOCK = {
    "ln1": ("attention_norm", "input_layernorm"),
    "ln2": ("ffn_norm", "post_attention_layernorm"),
    "attn.query": ("attention.wq", "self_attn.q_proj"),
    "attn.key": ("attention.wk", "self_attn.k_proj"),
    "attn.value": ("attention.wv", "self_attn.v_proj"),
    "attn.output": ("attention.wo", "self_attn.o_proj"),
    "attn.query_norm": ("attention.q_norm", "self_attn.q_norm"),
    "attn.key_norm": ("attention.k_norm", "self_attn.k_norm"),
    "mlp.gate": ("feed_forward.w1", "mlp.gate_proj"),
    "mlp.input": ("feed_forward.w3", "mlp.up_proj"),
    "mlp.output": ("feed_forward.w2", "mlp.down_proj"),
    "canon_a": ("canonA", "canonA"),
    "attn.canon_b": ("attention.canonB", "self_attn.canonB"),
    "canon_c": ("canonC", "canonC"),
    "mlp.canon_d": ("feed_forward.canonD", "mlp.canonD"),
}
_TOP = {
    "embed": ("tok_embeddings", "model.embed_tokens"),
    "ln_final": ("norm", "model.norm"),
    "unembed": ("output", "lm_head"),
}
_BLOCKS = ("layers", "model.layers")
_KINDS: dict[str, tuple[str, ...]] = {
    "whole": ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "seq_len", "canon_kernel"),
    "natural": ("rope_dim",),
    "number": ("rope_theta", "norm_eps"),
    "flag": ("weight_tying", "qk_norm", "canon_activation", "canon_residual"),
    "text": ("canon_set", "rope_version", "hidden_act"),
}
# what a config can ask for and this loader does not know
_REFUSED = ("rope_scaling", "sliding_window")


def recognises(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """The config's own name, Canon weights, or the training code's params.json (the twins without Canon layers)."""
    if "layers.0.attention.wq.weight" in shapes:
        inner = config.get("model")
        return (isinstance(inner, Mapping) and "dim" in inner) or any("canon" in key for key in shapes)
    named = str(config.get("model_type", "")).lower().replace("_", "") == "llamacanon"
    in_keys = any(re.fullmatch(r"model\.layers\.\d+\..*canon[A-D]\.weight", key) for key in shapes)
    return "model.layers.0.self_attn.q_proj.weight" in shapes and (named or in_keys)


def plan(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Plan:
    """ValueError: a config value that changes the numbers and is not supported, or that the weights contradict."""
    style = int("layers.0.attention.wq.weight" not in shapes)
    values = _Values(config, style)
    for name in _REFUSED:
        if values.get(name):
            raise ValueError(f"A LlamaCanon checkpoint with {name} = {values.get(name)!r} is not supported.")
    if (act := values.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise ValueError(f"A LlamaCanon checkpoint with hidden_act = {act!r} is not supported.")
    made = Plan(cfg=_config(values, shapes, style))
    _weights(made, shapes, style)
    made.ignore([k for k in shapes if re.search(r"freqs_cis|inv_freq", k)], "RoPE tables are computed")
    made.assumed.append(
        "LlamaCanon is read by the description of its format, without a published file to compare with: check the "
        "logits of the original before you rely on it."
    )
    if made.cfg.attention.qk_norm != "none":
        made.assumed.append("The norms of queries and keys use the epsilon of the other norms.")
    if made.cfg.canon is not None and made.cfg.canon.act == "silu":
        made.assumed.append("canon_activation is taken for SiLU.")
    return made


class _Values:
    """The config under the training code's names, whichever of the two it is."""

    _HF: ClassVar[dict[str, str]] = {
        "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps", "weight_tying": "tie_word_embeddings",
        "seq_len": "max_position_embeddings",
    }  # fmt: skip

    def __init__(self, config: Mapping[str, Any], style: int) -> None:
        inner = config.get("model")
        self._flat: dict[str, Any] = {**config, **(inner if isinstance(inner, Mapping) else {})}
        data = config.get("data")
        if isinstance(data, Mapping) and "seq_len" in data:
            self._flat["seq_len"] = data["seq_len"]
        names = {kind: tuple(self._HF.get(k, k) if style else k for k in keys) for kind, keys in _KINDS.items()}
        self._flat = checked(self._flat, **names)
        self._style = style

    def get(self, name: str, default: Any = None) -> Any:
        value = self._flat.get(self._HF.get(name, name) if self._style else name)
        return default if value is None else value


def _config(values: _Values, shapes: Mapping[str, tuple[int, ...]], style: int) -> ModelConfig:
    vocabulary, d = axes(shapes, f"{_TOP['embed'][style]}.weight", 2)
    first = f"{_BLOCKS[style]}.0"
    of = lambda ours: axes(shapes, f"{first}.{_IN_BLOCK[ours][style]}.weight", 2)  # noqa: E731
    query, key, n_heads = of("attn.query")[0], of("attn.key")[0], values.get("n_heads")
    if n_heads is None:
        raise ValueError("The config of a LlamaCanon checkpoint must say how many heads there are.")
    d_head = values.get("head_dim") or max(1, query // n_heads)
    if query != n_heads * d_head or key % d_head:
        raise ValueError(f"The config has {n_heads} heads of {d_head}, the weights {query} queries and {key} keys.")
    if (n_kv_heads := values.get("n_kv_heads", n_heads)) != key // d_head:
        raise ValueError(f"The config has {n_kv_heads} key heads of {d_head}, and the weights have {key} keys.")
    n_layers = n_blocks(shapes, f"{_BLOCKS[style]}.")
    if values.get("n_layers", n_layers) != n_layers:
        raise ValueError(f"The config has {values.get('n_layers')} layers, but the weights have {n_layers}.")
    tied = bool(values.get("weight_tying", False)) or f"{_TOP['unembed'][style]}.weight" not in shapes
    biased = lambda ours: f"{first}.{_IN_BLOCK[ours][style]}.bias" in shapes  # noqa: E731
    return ModelConfig(
        d_vocab=vocabulary,
        n_ctx=values.get("seq_len", 4096),
        d_model=d,
        n_layers=n_layers,
        attention=Attention(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_head=d_head,
            qk_norm=_qk_norm(values, shapes, first, style, query, d_head),
            rope=_rope(values, style),
            bias=biased("attn.query"),
        ),
        mlp=MLP(d_mlp=of("mlp.gate")[0], bias=biased("mlp.gate")),
        canon=_canon(values, shapes, first, style),
        norm=Norm(eps=values.get("norm_eps", 1e-6 if style else 1e-5)),
        tied=tied,
    )


def _qk_norm(
    values: _Values, shapes: Mapping[str, tuple[int, ...]], first: str, style: int, query: int, d_head: int
) -> Literal["none", "head", "joined"]:
    key = f"{first}.{_IN_BLOCK['attn.query_norm'][style]}.weight"
    if not values.get("qk_norm", key in shapes):
        return "none"
    return "head" if shapes[key] == (d_head,) and d_head != query else "joined"


def _rope(values: _Values, style: int) -> Rope | None:
    version = values.get("rope_version", "huggingface" if style else "lingua")
    if version not in ("huggingface", "lingua"):
        raise ValueError(f"A LlamaCanon checkpoint has rope_version lingua or huggingface, not {version!r}.")
    n_dims = values.get("rope_dim")
    if n_dims == 0:
        return None
    layout = "half" if version == "huggingface" else "interleaved"
    return Rope(base=values.get("rope_theta", 10_000.0), n_dims=n_dims, layout=layout)


def _canon(values: _Values, shapes: Mapping[str, tuple[int, ...]], first: str, style: int) -> Canon | None:
    keys = {site: f"{first}.{_IN_BLOCK[ours][style]}" for ours, site in
            zip(("canon_a", "attn.canon_b", "canon_c", "mlp.canon_d"), "ABCD", strict=True)}  # fmt: skip
    found = "".join(site for site, key in keys.items() if f"{key}.weight" in shapes)
    sites = values.get("canon_set", found)
    if not sites:
        return None
    return Canon(
        sites=sites,
        kernel=(0, *shapes[f"{keys[found[0]]}.weight"])[-1] if found else values.get("canon_kernel", 4),
        bias=bool(found) and f"{keys[found[0]]}.bias" in shapes,
        act="silu" if values.get("canon_activation", False) else "none",
        residual=bool(values.get("canon_residual", True)),
    )


def _weights(made: Plan, shapes: Mapping[str, tuple[int, ...]], style: int) -> None:
    cfg, weights = made.cfg, made.weights
    head, embed = f"{_TOP['unembed'][style]}.weight", f"{_TOP['embed'][style]}.weight"
    weights |= {"embed.weight": embed, "ln_final.w": f"{_TOP['ln_final'][style]}.weight"}
    if not cfg.tied:
        weights["unembed.weight"] = head
    elif head in shapes:
        made.equal.append((head, embed))
    sites = cfg.canon.sites if cfg.canon is not None else ""
    for i in range(cfg.n_layers):
        for ours, names in _IN_BLOCK.items():
            mine, theirs = f"blocks.{i}.{ours}", f"{_BLOCKS[style]}.{i}.{names[style]}"
            if "canon" in ours:
                if ours[-1].upper() not in sites:
                    continue
                weights[f"{mine}.weight"] = Take((f"{theirs}.weight",), _as_conv)
                if cfg.canon is not None and cfg.canon.bias:
                    weights[f"{mine}.bias"] = f"{theirs}.bias"
            elif ours.endswith("_norm"):
                if cfg.attention.qk_norm != "none":
                    weights[mine] = f"{theirs}.weight"
            elif ours in ("ln1", "ln2"):
                weights[f"{mine}.w"] = f"{theirs}.weight"
            else:
                weights[f"{mine}.weight"] = f"{theirs}.weight"
                if (cfg.mlp if ours.startswith("mlp") else cfg.attention).bias:
                    weights[f"{mine}.bias"] = f"{theirs}.bias"


def _as_conv(weight: Tensor) -> Tensor:
    """[C, 1, K], which some implementations of the convolution keep as [C, K]."""
    return weight.reshape(weight.shape[0], 1, -1)

"""DenseFormer's experiment models (epfml/DenseFormer, Apache-2.0): DenseFormer itself and its three baselines.

    denseformer       transformer.h.{group}.{block}., weights.{group}.weight [1, sources]
    connect_to_last   transformer.h.{group}.{block}., mixer.weight.{group} [1]
    base_w_gains      transformer.h.{block}., with gain_attn [1] and gain_mlp [1]: "skips with gains"
    base              transformer.h.{block}.

One backbone: LayerNorms (eps 1e-5), q, k, v packed in this order, RoPE on interleaved pairs, GELU, head tied to the
embedding. `increase_T_every` blocks make a group; only what groups put out is averaged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from t2lens.checkpoints.plan import Plan, Take, rows
from t2lens.checkpoints.values import agree, axes, checked
from t2lens.config import MLP, Attention, ModelConfig, Norm, ResidualConfig, Rope
from t2lens.residual import DenseFormer, Gain, Scaled, Standard

__all__ = ["plan", "recognises"]

_BLOCK = re.compile(r"transformer\.h\.(\d+)\.(?:(\d+)\.)?ln_1\.weight")
_EMBEDDING = "transformer.wte.weight"
_FREQS = "transformer.wpe.freqs"
# module of theirs -> of ours, where weight and bias carry over as they are
_SAME = {"attn.c_proj": "attn.output", "mlp.c_fc": "mlp.input", "mlp.c_proj": "mlp.output"}
_NORMS = {"ln_1": "ln1", "ln_2": "ln2"}
_WHOLE = ("n_head", "n_layer", "n_embd", "vocab_size", "sequence_length", "dilation_factor", "increase_T_every")
_PACKED = ("query", "key", "value")


def recognises(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> bool:
    """The code's block, with what only this repository has: its averages, its mixer, its gains or its rotary buffer."""
    blocks = any(_BLOCK.fullmatch(key) for key in shapes) and any(key.endswith(".attn.c_attn.weight") for key in shapes)
    own = any(re.fullmatch(r"weights\.\d+\.weight|mixer\.weight\.\d+|.*\.gain_attn", key) for key in shapes)
    return blocks and (own or _FREQS in shapes or (config.get("positional_encoder") == "rotary" and "n_embd" in config))


def plan(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Plan:
    """ValueError where the config asks for what these models do not have, or contradicts the weights."""
    config = checked(config, whole=_WHOLE)
    _refuse(config)
    blocks = _blocks(config, shapes)
    embedding = _EMBEDDING if _EMBEDDING in shapes else "lm_head.weight"  # tied, and saved under either name or both
    d_vocab, d_model = axes(shapes, embedding, 2)
    n_heads = config["n_head"]
    agree(config, "n_layer", len(blocks))
    agree(config, "n_embd", d_model)
    agree(config, "vocab_size", d_vocab)
    if d_model % n_heads:
        raise ValueError(f"The config has n_head {n_heads}, which does not divide n_embd {d_model}.")
    first = blocks[0]
    norm = Norm(kind="layer", bias=f"{first}ln_1.bias" in shapes, eps=1e-5)
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_model // n_heads,
        bias=f"{first}attn.c_attn.bias" in shapes,
        # cosines and sines of float32 angles, as the code has them
        rope=Rope(base=10_000.0, layout="interleaved", table="float32"),
    )
    d_mlp = axes(shapes, f"{first}mlp.c_fc.weight", 2)[0]
    mlp = MLP(d_mlp=d_mlp, act="gelu", gated=False, bias=f"{first}mlp.c_fc.bias" in shapes)
    residual, residual_weights = _residual(config, shapes, blocks)
    out = Plan(
        ModelConfig(
            d_vocab=d_vocab,
            n_ctx=config["sequence_length"],
            d_model=d_model,
            n_layers=len(blocks),
            attention=attention,
            mlp=mlp,
            norm=norm,
            residual=residual,
        )
    )
    out.weights = {"embed.weight": embedding, **residual_weights}
    out.weights |= dict(_norm("ln_final", "transformer.ln_f", norm))
    for i, theirs in enumerate(blocks):
        out.weights |= dict(_block(f"blocks.{i}.", theirs, out.cfg))
    _leftovers(out, shapes, attention.d_head)
    return out


def _refuse(config: dict[str, Any]) -> None:
    for key, known in (("positional_encoder", "rotary"), ("lm_cache", "none"), ("attention_window_length", None)):
        if (value := config.get(key, known)) != known:
            raise ValueError(f"A DenseFormer checkpoint with {key} {value!r} cannot be read, only with {known!r}.")


def _blocks(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Prefix of every block in order. ValueError where blocks are missing or groups are of another size."""
    found = [match.groups() for key in shapes if (match := _BLOCK.fullmatch(key))]
    places = sorted((int(group), int(block or 0)) for group, block in found)
    grouped = found[0][1] is not None
    n_groups, size = places[-1][0] + 1, max(block for _, block in places) + 1
    whole = [(group, block) for group in range(n_groups) for block in range(size)]
    if places != whole or any((block is not None) != grouped for _, block in found):
        raise ValueError(f"The checkpoint's {len(places)} blocks are not {n_groups} groups of {size} blocks.")
    if not grouped:
        return [f"transformer.h.{group}." for group, _ in places]
    agree(config, "increase_T_every", size)
    return [f"transformer.h.{group}.{block}." for group, block in places]


def _residual(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], blocks: list[str]
) -> tuple[ResidualConfig, dict[str, Take | str]]:
    grouped = blocks[0].count(".") == 4
    n_groups = len({block.split(".")[2] for block in blocks})
    group = len(blocks) // n_groups
    if "weights.0.weight" in shapes:
        dilation = _dilation(config, [axes(shapes, f"weights.{i}.weight", 2) for i in range(n_groups)])
        weights: dict[str, Take | str] = {
            f"residual.weights.{i}": Take((f"weights.{i}.weight",), lambda w: w.flatten()) for i in range(n_groups)
        }
        return DenseFormer(dilation=dilation, group=group), weights
    if "mixer.weight.0" in shapes:
        keys = tuple(f"mixer.weight.{j}" for j in range(n_groups + 1))
        cfg = DenseFormer(period=None, group=group, off_diagonal=1e-4)
        return cfg, {"residual.weights.0": Take(keys, lambda *w: torch.cat(w))}
    if grouped:
        raise ValueError("The checkpoint's blocks are grouped, but it has neither averages (weights.*) nor a mixer.")
    if f"{blocks[0]}gain_attn" in shapes:
        gains = tuple(f"{block}gain_{kind}" for block in blocks for kind in ("attn", "mlp"))
        return Scaled(keep=Gain()), {"residual.keep": Take(gains, lambda *g: torch.stack(g))}
    return Standard(), {}


def _dilation(config: dict[str, Any], found: list[tuple[int, ...]]) -> int:
    """As the config says, or else the smallest that gives averages of these shapes."""
    fitting = [k for k in range(1, len(found) + 2) if found == [(1, (i + 1) // k + 1) for i in range(len(found))]]
    dilation = config.get("dilation_factor", fitting[0] if fitting else 1)
    if min(dilation, len(found) + 1) not in fitting:  # beyond the number of groups every average is of one state
        lengths = ", ".join(str(shape[-1]) for shape in found)
        raise ValueError(f"Averages of {lengths} sources are not those of dilation_factor {dilation}.")
    return dilation


def _norm(ours: str, theirs: str, cfg: Norm) -> Iterator[tuple[str, Take | str]]:
    yield f"{ours}.w", f"{theirs}.weight"
    if cfg.bias:
        yield f"{ours}.b", f"{theirs}.bias"


def _block(ours: str, theirs: str, cfg: ModelConfig) -> Iterator[tuple[str, Take | str]]:
    d = cfg.d_model
    for name, of_ours in _NORMS.items():
        yield from _norm(ours + of_ours, theirs + name, cfg.norm)
    for part in ("weight", "bias") if cfg.attention.bias else ("weight",):
        for n, name in enumerate(_PACKED):
            yield f"{ours}attn.{name}.{part}", rows(f"{theirs}attn.c_attn.{part}", n * d, (n + 1) * d)
    for name, of_ours in _SAME.items():
        biased = cfg.attention.bias if name.startswith("attn") else cfg.mlp.bias
        for part in ("weight", "bias") if biased else ("weight",):
            yield f"{ours}{of_ours}.{part}", f"{theirs}{name}.{part}"


def _leftovers(out: Plan, shapes: dict[str, tuple[int, ...]], d_head: int) -> None:
    """What is in the file but not a weight of ours: a tied head saved twice, and buffers."""
    if {"lm_head.weight", _EMBEDDING} <= shapes.keys():
        out.equal.append((_EMBEDDING, "lm_head.weight"))
    if _FREQS in shapes:
        if shapes[_FREQS] != (d_head // 2,):
            raise ValueError(
                f"{_FREQS} has the shape {list(shapes[_FREQS])}, but heads of {d_head} turn {d_head // 2}."
            )
        out.ignore([_FREQS], "the angles of RoPE follow from its base 10000 (buffer)")
    else:
        out.assumed.append("RoPE has the base 10000, as the code fixes it; the file holds no table of frequencies.")
    masks = [key for key, shape in shapes.items() if key.endswith(".attn.bias") and len(shape) == 4]
    out.ignore(masks, "the causal mask (buffer)")

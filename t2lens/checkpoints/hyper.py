"""The mhc-lite repository's models (FFTYYY/mhc-lite, MIT): a nanoGPT with one of four residuals in `hyper_conn_type`.

    none       transformer.h.{i}.hc_attn holds only the branch
    hc         static_alpha [n, 1 + n], dynamic_alpha_fn [D, 1 + n], dynamic_beta_fn [D]; one gain each for alpha, beta
    mhc        static_alpha [n, 1 + n], dynamic_alpha_fn [n D, n (1 + n)]; a gain each for pre, post and the matrix
    mhc_lite   static_alpha [n + n!], dynamic_alpha_fn [n D, n + n!]

Their matrices have axes [from, 1 + to], the first column being the weights of the read; ours are [to, from]. Their norm
has a weight 1 + gamma, which goes into our projection. Every branch (norm, then attention or MLP) is in the file twice,
or once where shared tensors were dropped. Readout: ln_f of each stream, then the sum, so our bias is n times theirs.

Backbone: LayerNorms (eps 1e-5), learned positions, q, k, v packed in this order, GELU, head tied to the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import factorial
from typing import Any

import torch
from torch import Tensor

from t2lens.checkpoints.plan import Plan, Take, rows
from t2lens.checkpoints.values import agree, axes, checked
from t2lens.config import MLP, Attention, ModelConfig, Norm, ResidualConfig
from t2lens.residual import HyperConnections, Standard

__all__ = ["plan", "recognises"]

Shapes = dict[str, tuple[int, ...]]

_BRANCH = re.compile(r"transformer\.h\.(\d+)\.(?:branch_attn|hc_attn\.branch)\.1\.c_attn\.weight")
_EMBEDDING, _HEAD = "transformer.wte.weight", "lm_head.weight"
_PACKED = ("query", "key", "value")
_NO_EPS = 1e-26  # their norm only holds the length of a vector at 1e-12 or more
_TYPES = ("none", "hc", "mhc", "mhc_lite")


def recognises(config: dict[str, Any], shapes: Shapes) -> bool:
    """By the names of the branches, which no other nanoGPT has, or the config's name for the residual."""
    return "hyper_conn_type" in config or any(_BRANCH.fullmatch(key) for key in shapes)


def plan(config: dict[str, Any], shapes: Shapes) -> Plan:
    """ValueError where config and weights contradict each other."""
    whole = ("n_head", "n_layer", "n_embd", "vocab_size", "block_size", "hyper_conn_n")
    config = checked(config, whole=whole, flag=("bias",), text=("hyper_conn_type",))
    layers = sorted({int(match[1]) for key in shapes if (match := _BRANCH.fullmatch(key))})
    if not layers or layers != list(range(len(layers))):
        raise ValueError(f"The checkpoint's blocks are {', '.join(map(str, layers)) or 'missing'}, not 0, 1, 2 ...")
    embedding = _EMBEDDING if _EMBEDDING in shapes else _HEAD  # tied, and saved under either name or both
    d_vocab, d_model = axes(shapes, embedding, 2)
    n_ctx, _ = axes(shapes, "transformer.wpe.weight", 2)
    n_heads = config["n_head"]
    found = {"n_layer": len(layers), "n_embd": d_model, "vocab_size": d_vocab, "block_size": n_ctx}
    found["bias"] = bias = "transformer.ln_f.bias" in shapes
    for key, value in found.items():
        agree(config, key, value)
    if d_model % n_heads:
        raise ValueError(f"The config has n_head {n_heads}, which does not divide n_embd {d_model}.")
    kind, n = _kind(config, shapes)
    first = _branch(shapes, 0, "mlp")
    cfg = ModelConfig(
        d_vocab=d_vocab,
        n_ctx=n_ctx,
        d_model=d_model,
        n_layers=len(layers),
        attention=Attention(n_heads=n_heads, n_kv_heads=n_heads, d_head=d_model // n_heads, bias=bias, rope=None),
        mlp=MLP(d_mlp=axes(shapes, f"{first}1.c_fc.weight", 2)[0], act="gelu", gated=False, bias=bias),
        residual=_residual(kind, n),
        norm=Norm(kind="layer", bias=bias, eps=1e-5),
        final_norm=None if kind == "none" else Norm(kind="none", bias=bias),
        positions="learned",
    )
    out = Plan(cfg, {"embed.weight": embedding, "pos_embed.weight": "transformer.wpe.weight"})
    out.weights["ln_final.w"] = "transformer.ln_f.weight"
    if bias:
        out.weights["ln_final.b"] = Take(("transformer.ln_f.bias",), lambda b: n * b)
    for layer in layers:
        for part in ("attn", "mlp"):
            out.weights |= dict(_sublayer(f"blocks.{layer}.", _branch(shapes, layer, part), part, d_model, bias))
    if kind != "none":
        sites = [f"transformer.h.{layer}.hc_{part}." for layer in layers for part in ("attn", "mlp")]
        out.weights |= dict(_connections(kind, n, sites))
    _leftovers(out, shapes, layers)
    return out


def _kind(config: dict[str, Any], shapes: Shapes) -> tuple[str, int]:
    """The residual and its number of streams (1 for none), by the weights; the config must agree."""
    stem = "transformer.h.0.hc_attn."
    alpha = shapes.get(f"{stem}static_alpha")
    if alpha is None:
        kind = "none"
    elif len(alpha) == 1:
        kind = "mhc_lite"
    else:
        kind = "hc" if f"{stem}dynamic_alpha_scale" in shapes else "mhc"
    says = config.get("hyper_conn_type", kind)
    if says not in _TYPES:
        raise ValueError(f"hyper_conn_type {says!r} cannot be read, only {', '.join(_TYPES)}.")
    if says != kind:
        raise ValueError(f"The config has hyper_conn_type {says!r}, but the weights are those of {kind!r}.")
    if kind == "none":
        return kind, 1
    (n,) = axes(shapes, f"{stem}static_beta", 1)
    if config.get("hyper_conn_n", n) != n:
        raise ValueError(f"The config has hyper_conn_n {config['hyper_conn_n']}, but the weights have {n} streams.")
    if alpha != ((n + factorial(min(n, 20)),) if kind == "mhc_lite" else (n, n + 1)):
        raise ValueError(f"{stem}static_alpha has the shape {list(alpha or ())}, which is not that of {n} streams.")
    return kind, n


def _residual(kind: str, n: int) -> ResidualConfig:
    shared: dict[str, Any] = {"n_streams": n, "readout": "normed_sum", "norm_eps": _NO_EPS}
    if kind == "none":
        return Standard()
    if kind == "hc":
        return HyperConnections(norm="rms", **shared)
    if kind == "mhc":  # rows of their matrix last, and used transposed
        return HyperConnections.mhc(sinkhorn_last="columns", **shared)
    return HyperConnections.mhc_lite(**shared)


def _branch(shapes: Shapes, layer: int, part: str) -> str:
    """Prefix of a branch: the one under its connection, or the other where that was dropped."""
    theirs = [f"transformer.h.{layer}.hc_{part}.branch.", f"transformer.h.{layer}.branch_{part}."]
    return next((prefix for prefix in theirs if f"{prefix}0.weight" in shapes), theirs[0])


def _sublayer(ours: str, theirs: str, part: str, d: int, bias: bool) -> Iterator[tuple[str, Take | str]]:
    norm, same = ("ln1", {"c_proj": "attn.output"})
    if part == "mlp":
        norm, same = "ln2", {"c_fc": "mlp.input", "c_proj": "mlp.output"}
    for letter, leaf in (("w", "weight"), ("b", "bias")) if bias else (("w", "weight"),):
        yield f"{ours}{norm}.{letter}", f"{theirs}0.{leaf}"
        for name, of_ours in same.items():
            yield f"{ours}{of_ours}.{leaf}", f"{theirs}1.{name}.{leaf}"
        for i, name in enumerate(_PACKED if part == "attn" else ()):
            yield f"{ours}attn.{name}.{leaf}", rows(f"{theirs}1.c_attn.{leaf}", i * d, (i + 1) * d)


def _connections(kind: str, n: int, sites: list[str]) -> Iterator[tuple[str, Take]]:
    """Our parameters, each stacked over all sublayers."""

    def stacked(make: Callable[..., Tensor], *names: str) -> Take:
        width = len(names)
        keys = tuple(site + name for site in sites for name in names)
        return Take(keys, lambda *x: torch.stack([make(*x[i : i + width]) for i in range(0, len(x), width)]))

    gains = ("dynamic_alpha_scale", "dynamic_beta_scale")
    if kind != "hc":
        gains = ("pre_branch_scale", "h_post_scale", "residual_scale")
    lite, by_stream = kind == "mhc_lite", kind == "hc"
    yield "residual.static_pre", stacked(lambda a: a[:n] if lite else a[:, 0], "static_alpha")
    yield "residual.static_res", stacked(lambda a: a[n:] if lite else a[:, 1:].T, "static_alpha")
    yield "residual.static_post", stacked(lambda b: b, "static_beta")
    yield "residual.gain", stacked(lambda *g: torch.stack([x.reshape(()) for x in g]), *gains)

    def dynamic(gamma: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        """Columns pre, post, matrix."""
        if lite or by_stream:
            pre, matrix = alpha.split([n, alpha.shape[1] - n] if lite else [1, n], dim=1)
        else:
            pairs = alpha.unflatten(1, (n, n + 1))  # [n D, from, 1 + to]
            pre, matrix = pairs[..., 0], pairs[..., 1:].transpose(1, 2).flatten(1)
        return (gamma + 1).unsqueeze(1) * torch.cat([pre, beta.reshape(len(gamma), -1), matrix], dim=1)

    yield "residual.dynamic", stacked(dynamic, "norm.gamma", "dynamic_alpha_fn", "dynamic_beta_fn")


def _leftovers(out: Plan, shapes: Shapes, layers: list[int]) -> None:
    """What is in the file but not a weight of ours: what was saved twice, and buffers."""
    if {_HEAD, _EMBEDDING} <= shapes.keys():
        out.equal.append((_EMBEDDING, _HEAD))
    masks = [key for key, shape in shapes.items() if key.endswith(".1.bias") and len(shape) == 4]
    out.ignore(masks, "the causal mask (buffer)")
    for layer in layers:
        for part in ("attn", "mlp"):
            used, other = f"transformer.h.{layer}.hc_{part}.branch.", f"transformer.h.{layer}.branch_{part}."
            twice = [key for key in shapes if key.startswith(other) and used + key[len(other) :] in shapes]
            out.equal += [(used + key[len(other) :], key) for key in twice if key not in masks]

"""The mhc-lite repository's files: every residual and size, against it written out with streams in the batch."""

from __future__ import annotations

import itertools
import json
from math import factorial, sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from t2lens.checkpoints.reading import read_checkpoint

D, HEADS, LAYERS, VOCAB, CONTEXT = 12, 3, 2, 20, 9
KINDS = [("none", 4), ("hc", 2), ("hc", 1), ("mhc", 3), ("mhc_lite", 3), ("mhc_lite", 2)]


def file(kind, n, bias=True, seed=0):
    """(config, weights) as the repository saves them, every branch under both of its names."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return 0.4 * torch.randn(shape, generator=generator)

    weights = {"transformer.wte.weight": random(VOCAB, D), "transformer.wpe.weight": random(CONTEXT, D)}
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    weights["transformer.ln_f.weight"] = 1 + random(D)
    for layer, part in itertools.product(range(LAYERS), ("attn", "mlp")):
        stem = f"transformer.h.{layer}."
        first, width = ("c_attn", 3 * D) if part == "attn" else ("c_fc", 4 * D)
        branch = {"0.weight": 1 + random(D), f"1.{first}.weight": random(width, D)}
        branch["1.c_proj.weight"] = random(D, D if part == "attn" else 4 * D)
        if bias:
            branch |= {"0.bias": random(D), f"1.{first}.bias": random(width), "1.c_proj.bias": random(D)}
        for name, weight in branch.items():
            weights[f"{stem}branch_{part}.{name}"] = weight
            weights[f"{stem}hc_{part}.branch.{name}"] = weight.clone()
        stem += f"hc_{part}."
        if kind == "hc":
            own = {"static_alpha": random(n, n + 1), "dynamic_alpha_fn": random(D, n + 1), "static_beta": random(n)}
            own |= {"dynamic_beta_fn": random(D), "norm.gamma": random(D)}
            own |= {"dynamic_alpha_scale": random(), "dynamic_beta_scale": random()}
        elif kind != "none":
            k = n + factorial(n) if kind == "mhc_lite" else n * (n + 1)
            own = {"static_alpha": random(k) if kind == "mhc_lite" else random(n, n + 1), "static_beta": random(n)}
            own |= {"dynamic_alpha_fn": random(n * D, k), "dynamic_beta_fn": random(n * D, n)}
            own |= {"norm.gamma": random(n * D), "h_post_scale": random()}
            own |= {"pre_branch_scale": random(1), "residual_scale": random(1)}
        else:
            own = {}
        weights |= {stem + name: weight for name, weight in own.items()}
    if bias:
        weights["transformer.ln_f.bias"] = random(D)
    config = {"block_size": CONTEXT, "vocab_size": VOCAB, "n_layer": LAYERS, "n_head": HEADS, "n_embd": D}
    return config | {"bias": bias, "dropout": 0.1, "hyper_conn_n": n, "hyper_conn_type": kind}, weights


def expected(config, weights, ids):
    """Their forward pass in float64: row b n + s of the batch is stream s of sequence b."""
    w = {name: weight.double() for name, weight in weights.items()}
    kind, n, t = config["hyper_conn_type"], config["hyper_conn_n"], ids.shape[1]
    n = 1 if kind == "none" else n
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][:t]
    x = x.repeat_interleave(n, dim=0)
    for layer, part in itertools.product(range(LAYERS), ("attn", "mlp")):
        stem = f"transformer.h.{layer}.hc_{part}."
        streams = x.unflatten(0, (-1, n))  # [B, n, T, D]
        pre, post, carried = torch.ones(1).double(), torch.ones(1).double(), streams
        if kind != "none":
            pre, post, matrix = connection(kind, n, {k[len(stem) :]: v for k, v in w.items() if k.startswith(stem)}, x)
            carried = torch.einsum("btsu,bstd->butd", matrix, streams)  # used transposed
        else:
            pre = post = torch.ones(len(ids), t, 1).double()
        read = torch.einsum("bts,bstd->btd", pre, streams)
        out = branch(w, f"{stem}branch.", part, read)
        x = (carried + torch.einsum("bts,btd->bstd", post, out)).flatten(0, 1)
    x = F.layer_norm(x, (D,), w["transformer.ln_f.weight"], w.get("transformer.ln_f.bias"))
    return x.unflatten(0, (-1, n)).sum(1) @ w["lm_head.weight"].T


def branch(w, stem, part, x):
    def linear(name, x):
        return F.linear(x, w[f"{stem}1.{name}.weight"], w.get(f"{stem}1.{name}.bias"))

    x = F.layer_norm(x, (D,), w[f"{stem}0.weight"], w.get(f"{stem}0.bias"))
    if part == "mlp":
        return linear("c_proj", F.gelu(linear("c_fc", x)))
    q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in linear("c_attn", x).chunk(3, dim=-1))
    return linear("c_proj", F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def connection(kind, n, own, x):
    """pre, post [B, T, n] and the matrix [B, T, from, to]."""
    streams = x.unflatten(0, (-1, n)).transpose(1, 2)  # [B, T, n, D]
    vector = streams if kind == "hc" else streams.flatten(-2)
    normed = F.normalize(vector, dim=-1, eps=1e-12) * sqrt(vector.shape[-1]) * (own["norm.gamma"] + 1)
    if kind == "hc":
        alpha = own["static_alpha"] + own["dynamic_alpha_scale"] * (normed @ own["dynamic_alpha_fn"]).tanh()
        beta = own["static_beta"] + own["dynamic_beta_scale"] * (normed @ own["dynamic_beta_fn"]).tanh()
        return alpha[..., 0], beta, alpha[..., 1:]
    raw = normed @ own["dynamic_alpha_fn"]
    post = 2 * (own["h_post_scale"] * (normed @ own["dynamic_beta_fn"]) + own["static_beta"]).sigmoid()
    if kind == "mhc":
        raw = raw.unflatten(-1, (n, n + 1))
        pre = own["pre_branch_scale"] * raw[..., 0] + own["static_alpha"][:, 0]
        logs = own["residual_scale"] * raw[..., 1:] + own["static_alpha"][:, 1:]
        for _ in range(20):
            logs = logs - logs.logsumexp(-2, keepdim=True)
            logs = logs - logs.logsumexp(-1, keepdim=True)
        return pre.sigmoid(), post, logs.exp()
    pre = own["pre_branch_scale"] * raw[..., :n] + own["static_alpha"][:n]
    share = (own["residual_scale"] * raw[..., n:] + own["static_alpha"][n:]).softmax(-1)
    table = torch.stack([torch.eye(n)[list(perm)] for perm in itertools.permutations(range(n))]).double()
    return pre.sigmoid(), post, torch.einsum("btr,rsu->btsu", share, table)


def write(folder, config, weights):
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])


@pytest.mark.parametrize(("kind", "n"), KINDS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_logits_are_those_of_the_repository(tmp_path, kind, n, bias):
    config, weights = file(kind, n, bias, seed=n)
    wanted = expected(config, weights, IDS)
    model = read_checkpoint(write(tmp_path / "a", config, weights), dtype=torch.float64)
    with torch.no_grad():
        assert float((model(IDS) - wanted).abs().max()) < 1e-9
    assert model.loaded_from.family == "hyper"


@pytest.mark.parametrize("keep", ["branch_", "hc_"])
def test_files_without_the_copies_load_too(tmp_path, keep):
    """Writers that drop shared tensors leave one name of each branch, and no head."""
    config, weights = file("mhc", 2)
    wanted = expected(config, weights, IDS)
    drop = ".branch_" if keep == "hc_" else ".branch."
    weights = {name: x for name, x in weights.items() if drop not in name and name != "lm_head.weight"}
    model = read_checkpoint(write(tmp_path / "a", config, weights), dtype=torch.float64)
    with torch.no_grad():
        assert float((model(IDS) - wanted).abs().max()) < 1e-9


def test_a_training_checkpoint_brings_its_config(tmp_path):
    config, weights = file("hc", 3)
    torch.save({"model": weights, "model_args": config, "iter_num": 5, "best_val_loss": 2.0}, tmp_path / "ckpt.pt")
    with torch.no_grad():
        logits = read_checkpoint(tmp_path / "ckpt.pt", dtype=torch.float64)(IDS)
    assert float((logits - expected(config, weights, IDS)).abs().max()) < 1e-9


def test_the_residual_is_told_by_the_weights_and_masks_are_ignored(tmp_path):
    config, weights = file("mhc_lite", 2)
    del config["hyper_conn_type"], config["hyper_conn_n"]
    mask = torch.ones(1, 1, CONTEXT, CONTEXT)
    for stem in ("branch_attn.1.bias", "hc_attn.branch.1.bias"):
        weights[f"transformer.h.0.{stem}"] = mask.clone()
    model = read_checkpoint(write(tmp_path / "a", config, weights))
    cfg: Any = model.cfg.residual
    assert cfg.res == "permutations" and cfg.n_streams == 2
    assert len(model.loaded_from.ignored) == 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hyper_conn_type": "hc"}, "has hyper_conn_type 'hc', but the weights are those of 'mhc'"),
        ({"hyper_conn_type": "gated"}, "'gated' cannot be read"),
        ({"hyper_conn_n": 4}, "has hyper_conn_n 4, but the weights have 3 streams"),
        ({"n_layer": 3}, "has n_layer 3, but the weights have 2"),
        ({"bias": False}, "has bias False, but the weights have True"),
        ({"n_head": 5}, "which does not divide"),
        ({"block_size": 8}, "has block_size 8"),
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused(tmp_path, change, sentence):
    config, weights = file("mhc", 3)
    with pytest.raises(ValueError, match=sentence):
        read_checkpoint(write(tmp_path / "a", config | change, weights))


def test_copies_that_differ_and_missing_blocks_are_refused(tmp_path):
    config, weights = file("mhc", 3)
    other = dict(weights)
    other["transformer.h.1.branch_mlp.1.c_fc.weight"] = weights["transformer.h.1.branch_mlp.1.c_fc.weight"] + 1
    with pytest.raises(ValueError, match="should be the same, but they differ"):
        read_checkpoint(write(tmp_path / "a", config, other))
    gap = {name: x for name, x in weights.items() if ".h.0." not in name}
    with pytest.raises(ValueError, match="blocks are 1, not 0"):
        read_checkpoint(write(tmp_path / "b", config, gap))
    odd = dict(weights)
    odd["transformer.h.0.hc_attn.static_alpha"] = torch.zeros(3, 5)
    with pytest.raises(ValueError, match="not that of 3 streams"):
        read_checkpoint(write(tmp_path / "c", config, odd))

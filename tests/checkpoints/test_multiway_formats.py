"""MUDDFormer, MUDDPythia and DeepCrossAttention files of other sizes and options than the golden ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from t2lens.checkpoints.reading import read_checkpoint


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def noise(*shape: int, seed: int, about: float = 0.0, std: float = 0.2) -> Tensor:
    return about + std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def dca_file(n_layers: int, k: int, d: int = 12, heads: int = 2, d_head: int = 4, vocab: int = 31) -> tuple[dict, dict]:
    weights: dict[str, Tensor] = {}

    def put(name: str, *shape: int, about: float = 0.0) -> None:
        weights[name] = noise(*shape, seed=len(weights), about=about)

    put("token_emb.weight", vocab, d)
    for i in range(n_layers + 1):
        at, ways = ("final_grn", 1) if i == n_layers else (f"dca_blocks.{i}.qkv_grn", 3)
        put(f"{at}.bias", ways, min(2 * k, i + 1), d, about=1.0)
        put(f"{at}.to_aggregate.0.weight", d, about=1.0)
        put(f"{at}.to_aggregate.1.weight", ways, d)
    for i in range(n_layers):
        for way in "qkv":
            put(f"dca_blocks.{i}.attn.to_{way}.0.weight", d, about=1.0)
            put(f"dca_blocks.{i}.attn.to_{way}.1.weight", heads * d_head, d)
        put(f"dca_blocks.{i}.attn.to_out.weight", d, heads * d_head)
        put(f"dca_blocks.{i}.attn.norm.weight", d)
        put(f"dca_blocks.{i}.attn.rotary_embed.freqs", d_head // 2, about=0.5)
        put(f"dca_blocks.{i}.pre_ff_norm.weight", d, about=1.0)
        put(f"dca_blocks.{i}.ff.0.weight", 20, d)
        put(f"dca_blocks.{i}.ff.0.bias", 20)
        put(f"dca_blocks.{i}.ff.2.weight", d, 20)
        put(f"dca_blocks.{i}.ff.2.bias", d)
    put("norm.weight", d, about=1.0)
    put("to_logits.weight", vocab, d)
    config = {"num_tokens": vocab, "dim": d, "depth": n_layers, "past_layers_k": k, "heads": heads, "dim_head": d_head}
    return config, weights


def dca_logits(config: dict[str, Any], w: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The format as it is described, from the file's own tensors."""
    k, n_layers, eps = config["past_layers_k"], config["depth"], torch.finfo(torch.float32).eps
    w = {name: x.double() for name, x in w.items()}
    writes = [w["token_emb.weight"][ids]]

    def grn(at: str) -> list[Tensor]:
        seen = writes if len(writes) <= 2 * k else [*writes[:k], *writes[-k:]]
        out = []
        for c, bias in enumerate(w[f"{at}.bias"]):
            total = torch.zeros_like(writes[0])
            for j, f in enumerate(seen):
                key = rms(f, eps) * w[f"{at}.to_aggregate.0.weight"]
                gate = (key * w[f"{at}.to_aggregate.1.weight"][c]).sum(-1, keepdim=True).relu()
                total = total + (bias[j] + gate) * f
            out.append(total)
        return out

    for i in range(n_layers):
        p = f"dca_blocks.{i}."
        reads = grn(f"{p}qkv_grn")
        q, key, v = (
            (rms(x, eps) * w[f"{p}attn.to_{way}.0.weight"]) @ w[f"{p}attn.to_{way}.1.weight"].T
            for x, way in zip(reads, "qkv", strict=True)
        )
        shape = (*ids.shape, config["heads"], config["dim_head"])
        q, key, v = (x.view(shape).transpose(1, 2) for x in (q, key, v))
        angle = torch.arange(ids.shape[1])[:, None] * w[f"{p}attn.rotary_embed.freqs"]
        q, key = (turned(x, angle) for x in (q, key))
        att = F.scaled_dot_product_attention(q, key, v, is_causal=True).transpose(1, 2).flatten(-2)
        att = att @ w[f"{p}attn.to_out.weight"].T
        x = rms(att + reads[0], eps) * w[f"{p}pre_ff_norm.weight"]
        x = F.gelu(x @ w[f"{p}ff.0.weight"].T + w[f"{p}ff.0.bias"])
        writes.append(att + x @ w[f"{p}ff.2.weight"].T + w[f"{p}ff.2.bias"])
    return rms(grn("final_grn")[0], eps) * w["norm.weight"] @ w["to_logits.weight"].T


def turned(x: Tensor, angle: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


@pytest.mark.parametrize(("n_layers", "k"), [(5, 1), (5, 2), (4, 3), (3, 9), (1, 1)])
def test_a_dca_file_gives_the_logits_of_its_format_with_sources_dropped_or_not(tmp_path: Path, n_layers: int, k: int):
    config, weights = dca_file(n_layers, k)
    ids = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(k))
    expected = dca_logits(config, weights, ids)
    for stated in (config, {name: x for name, x in config.items() if name != "past_layers_k"}):
        model = read_checkpoint(write(tmp_path / "a", stated, weights), dtype=torch.float64)
        assert (model(ids) - expected).abs().max() < 1e-10
    assert set(model.loaded_from.ignored) == {f"dca_blocks.{i}.attn.norm.weight" for i in range(n_layers)}


def test_a_dca_file_whose_config_names_no_heads_shows_them_by_its_frequencies(tmp_path: Path):
    config, weights = dca_file(2, 8)
    bare = {key: value for key, value in config.items() if key not in ("heads", "dim_head")}
    assert read_checkpoint(write(tmp_path / "a", bare, weights)).cfg.attention.n_heads == config["heads"]
    without = {key: w for key, w in weights.items() if not key.endswith("freqs")}
    with pytest.raises(ValueError, match="how wide the heads are"):
        read_checkpoint(write(tmp_path / "b", bare, without))


def test_a_dca_file_that_contradicts_its_config_is_refused(tmp_path: Path):
    config, weights = dca_file(3, 1)
    for wrong, match in (
        ({"past_layers_k": 2}, "past_layers_k 2 the aggregators would not have"),
        ({"depth": 4}, "depth 4, but the weights have 3"),
        ({"heads": 3}, "do not make up the 8 rows"),
    ):
        with pytest.raises(ValueError, match=match):
            read_checkpoint(write(tmp_path / "a", config | wrong, weights))


def mudd_file(*, pythia: bool, n_layers: int = 3, d: int = 16, heads: int = 2, vocab: int = 31) -> tuple[dict, dict]:
    weights: dict[str, Tensor] = {}

    def put(name: str, *shape: int, about: float = 0.0) -> None:
        weights[name] = noise(*shape, seed=len(weights), about=about)

    def linear(name: str, rows: int, columns: int) -> None:
        put(f"{name}.weight", rows, columns)
        if pythia:
            put(f"{name}.bias", rows)

    def norm(name: str) -> None:
        put(f"{name}.weight", d, about=1.0)
        if pythia:
            put(f"{name}.bias", d)

    put("tok_embeddings.weight", vocab, d)
    put("output.weight", vocab, d)
    norm("norm")
    for i in range(n_layers):
        p, ways = f"layers.{i}.", 4 if i < n_layers - 1 else 1
        for name in ("wq", "wk", "wv", "wo"):
            linear(f"{p}attention.{name}", d, d)
        for name in ["attention_norms.0", "attention_norms.1", "attention_norms.2"] if i else ["attention_norm"]:
            norm(p + name)
        norm(f"{p}ffn_norm")
        width = 8 + 4 * i
        linear(f"{p}feed_forward.w1", width, d)
        linear(f"{p}feed_forward.w2", d, width)
        if not pythia:
            linear(f"{p}feed_forward.w3", width, d)
        put(f"dense_bs.{i}", ways, i + 2)
        put(f"dynamic_dense.{i}.w1.weight", ways * (i + 2), d)
        put(f"dynamic_dense.{i}.w2.weight", ways * (i + 2), ways * (i + 2))
    config = {"n_layer": n_layers, "n_head": heads, "dim": d, "vocab_size": vocab, "block_size": 32, "head_dim": 99}
    return config | ({"rotary_pct": 0.5, "use_parallel_residual": True} if pythia else {}), weights


def mudd_logits(config: dict[str, Any], w: dict[str, Tensor], ids: Tensor, *, pythia: bool) -> Tensor:
    """The format as it is described, from the file's own tensors."""
    eps, d_head = (1e-5 if pythia else 1e-6), config["dim"] // config["n_head"]
    w = {name: x.double() for name, x in w.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    def norm(x: Tensor, name: str) -> Tensor:
        x = rms(x - x.mean(-1, keepdim=True), eps) if pythia else rms(x, eps)
        return x * w[f"{name}.weight"] + w.get(f"{name}.bias", torch.zeros(()))

    n_dims = int(config.get("rotary_pct", 1.0) * d_head)
    angle = torch.arange(ids.shape[1]).float()[:, None] * (1.0 / 10_000 ** (torch.arange(0, n_dims, 2) / n_dims))
    kind = torch.float16 if pythia else torch.bfloat16
    cos, sin = angle.cos().to(kind).double(), angle.sin().to(kind).double()

    def rope(x: Tensor) -> Tensor:
        a, b, rest = x[..., : n_dims // 2], x[..., n_dims // 2 : n_dims], x[..., n_dims:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    states = [w["tok_embeddings.weight"][ids]]
    q = k = v = r = states[0]
    for i in range(config["n_layer"]):
        p = f"layers.{i}."
        names = [f"{p}attention_norms.{n}" for n in range(3)] if i else [f"{p}attention_norm"] * 3
        heads = [
            linear(norm(x, name), f"{p}attention.{proj}").unflatten(-1, (-1, d_head)).transpose(1, 2)
            for x, name, proj in zip((q, k, v), names, ("wq", "wk", "wv"), strict=True)
        ]
        att = F.scaled_dot_product_attention(rope(heads[0]), rope(heads[1]), heads[2], is_causal=True)
        h = r + linear(att.transpose(1, 2).flatten(-2), f"{p}attention.wo")
        x = norm(r if pythia else h, f"{p}ffn_norm")
        hidden = linear(x, f"{p}feed_forward.w1")
        hidden = F.gelu(hidden) if pythia else F.silu(hidden) * linear(x, f"{p}feed_forward.w3")
        states.append(h + linear(hidden, f"{p}feed_forward.w2"))
        made = F.gelu(rms(states[-1], eps) @ w[f"dynamic_dense.{i}.w1.weight"].T)
        made = (made @ w[f"dynamic_dense.{i}.w2.weight"].T).unflatten(-1, (-1, i + 2)) + w[f"dense_bs.{i}"]
        mixed = list(torch.einsum("btcj,jbtd->cbtd", made, torch.stack(states)))
        q, k, v, r = mixed if len(mixed) == 4 else mixed * 4
    return norm(r, "norm") @ w["output.weight"].T


@pytest.mark.parametrize("pythia", [False, True])
def test_a_mudd_file_of_another_shape_gives_the_logits_of_its_format(tmp_path: Path, pythia: bool):
    """Without QK norm, unrounded generators, MLPs of odd widths, half the head turned, a head_dim that is not used."""
    config, weights = mudd_file(pythia=pythia)
    ids = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = mudd_logits(config, weights, ids, pythia=pythia)
    model = read_checkpoint(write(tmp_path / "a", config, weights | {"freqs_cis": torch.zeros(4)}), dtype=torch.float64)
    assert (model(ids) - expected).abs().max() < 1e-9
    assert list(model.loaded_from.ignored) == ["freqs_cis"] and not model.loaded_from.assumed
    config["rotary_pct"] = 0.75
    assert (model(ids) - mudd_logits(config, weights, ids, pythia=pythia)).abs().max() > 1e-6


def test_a_mudd_file_without_a_head_is_tied_and_says_so(tmp_path: Path):
    config, weights = mudd_file(pythia=False)
    del weights["output.weight"]
    model = read_checkpoint(write(tmp_path / "a", config, weights))
    assert "taken to be the embedding" in model.loaded_from.assumed[0]
    assert torch.equal(model.W_U, model.W_E.T)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"dense_type": "l"}, "dense_type 'l' cannot be read"),
        ({"stack_hidden": True}, "stack_hidden True cannot be read"),
        ({"dynamic_dense": False}, "dynamic_dense False cannot be read"),
        ({"use_qk_norm": True}, "use_qk_norm True, but the weights have no norm"),
        ({"dim": 32}, "dim 32, but the weights have 16"),
        ({"n_head": 3}, "n_head 3, which does not divide"),
        ({"round64": True}, "shape"),
        ({"expand_last": True}, "shape"),
    ],
)
def test_a_mudd_config_that_the_released_code_cannot_run_or_that_contradicts_the_file_is_refused(
    tmp_path: Path, wrong: dict[str, Any], match: str
):
    config, weights = mudd_file(pythia=False)
    with pytest.raises(ValueError, match=match):
        read_checkpoint(write(tmp_path / "a", config | wrong, weights))

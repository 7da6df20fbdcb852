"""LlamaCanon: no published file is at hand, so random ones in its layout, against a forward written out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from t2lens.checkpoints import canon
from t2lens.checkpoints.reading import read_checkpoint

TOKENS = torch.tensor([[0, 7, 3, 7, 9, 1, 1], [4, 4, 2, 8, 0, 4, 6]])
D, HEADS, KV, K, FF, VOCAB, LAYERS = 12, 4, 2, 6, 20, 23, 2
PARAMS = {"dim": D, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV, "head_dim": K, "hidden_dim": None,
          "vocab_size": VOCAB, "rope_theta": 500.0, "norm_eps": 1e-4, "qk_norm": True, "rope_dim": 4,
          "canon_set": "ABCD"}  # fmt: skip
TO_HF = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "attention.canonB": "self_attn.canonB", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj", "feed_forward.canonD": "mlp.canonD", "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "canonA": "canonA", "canonC": "canonC",
}  # fmt: skip


def random_weights(sites: str = "ABCD", seed: int = 0, kernel: int = 4) -> dict[str, Tensor]:
    """Under the training code's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (VOCAB, D), "norm.weight": (D,), "output.weight": (VOCAB, D),
    }  # fmt: skip
    for i in range(LAYERS):
        at = f"layers.{i}"
        shapes |= {
            f"{at}.attention_norm.weight": (D,), f"{at}.ffn_norm.weight": (D,),
            f"{at}.attention.wq.weight": (HEADS * K, D), f"{at}.attention.wk.weight": (KV * K, D),
            f"{at}.attention.wv.weight": (KV * K, D), f"{at}.attention.wo.weight": (D, HEADS * K),
            f"{at}.attention.q_norm.weight": (HEADS * K,), f"{at}.attention.k_norm.weight": (KV * K,),
            f"{at}.feed_forward.w1.weight": (FF, D), f"{at}.feed_forward.w3.weight": (FF, D),
            f"{at}.feed_forward.w2.weight": (D, FF),
        }  # fmt: skip
        canons = {"A": ("canonA", D), "B": ("attention.canonB", (HEADS + 2 * KV) * K), "C": ("canonC", D),
                  "D": ("feed_forward.canonD", 2 * FF)}  # fmt: skip
        shapes |= {f"{at}.{canons[s][0]}.weight": (canons[s][1], 1, kernel) for s in sites}
    generator = torch.Generator().manual_seed(seed)
    return {key: 0.5 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + PARAMS["norm_eps"]).sqrt()


def canon_layer(h: Tensor, weight: Tensor | None) -> Tensor:
    """h_t + sum_i w_i * h_{t-i}, token by token."""
    if weight is None:
        return h
    out, kernel = h.clone(), weight.shape[-1]
    for t in range(h.shape[1]):
        for i in range(min(kernel, t + 1)):
            out[:, t] += weight[:, 0, kernel - 1 - i] * h[:, t - i]
    return out


def turned(x: Tensor, interleaved: bool) -> Tensor:
    """RoPE by complex numbers on the first rope_dim entries of [B, T, heads, K]."""
    n = PARAMS["rope_dim"]
    angle = torch.arange(x.shape[1])[:, None] * PARAMS["rope_theta"] ** (-torch.arange(0, n, 2) / n)
    spin = torch.polar(torch.ones_like(angle), angle)[:, None]
    head, rest = x[..., :n], x[..., n:]
    if interleaved:
        pairs = torch.view_as_complex(head.unflatten(-1, (-1, 2)).contiguous()) * spin
        return torch.cat([torch.view_as_real(pairs).flatten(-2), rest], -1)
    pairs = torch.complex(head[..., : n // 2], head[..., n // 2 :]) * spin
    return torch.cat([pairs.real, pairs.imag, rest], -1)


def forward(w: dict[str, Tensor], tokens: Tensor, interleaved: bool = True, qk_norm: bool = True) -> Tensor:
    """Norm, A, project, QK norm, B on [q, k, v], RoPE, attention; norm, C, [gate, up], D, SwiGLU."""
    x = w["tok_embeddings.weight"][tokens]
    b, t, _ = x.shape
    for i in range(LAYERS):
        of = {
            key.removeprefix(f"layers.{i}.").removesuffix(".weight"): v for key, v in w.items() if f"layers.{i}." in key
        }
        h = canon_layer(rms(x, of["attention_norm"]), of.get("canonA"))
        q, k, v = (h @ of[f"attention.w{name}"].T for name in "qkv")
        if qk_norm:
            q, k = rms(q, of["attention.q_norm"]), rms(k, of["attention.k_norm"])
        q, k, v = canon_layer(torch.cat([q, k, v], -1), of.get("attention.canonB")).split(
            [HEADS * K, KV * K, KV * K], -1
        )
        q, k, v = (y.unflatten(-1, (-1, K)) for y in (q, k, v))
        q, k = turned(q, interleaved), turned(k, interleaved)
        k, v = (y.repeat_interleave(HEADS // KV, dim=2) for y in (k, v))
        z = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        x = x + z.transpose(1, 2).reshape(b, t, -1) @ of["attention.wo"].T
        h = canon_layer(rms(x, of["ffn_norm"]), of.get("canonC"))
        both = torch.cat([h @ of["feed_forward.w1"].T, h @ of["feed_forward.w3"].T], -1)
        gate, up = canon_layer(both, of.get("feed_forward.canonD")).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ of["feed_forward.w2"].T
    return rms(x, w["norm.weight"]) @ w["output.weight"].T


def lingua(folder: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps({"model": PARAMS | changes, "data": {"seq_len": 64}}))
    torch.save({"model": weights}, folder / "consolidated.pth")
    return folder


def hugging_face(folder: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    named = {}
    for key, value in weights.items():
        stem = key.removesuffix(".weight")
        where = f"model.layers.{stem.split('.')[1]}." if stem.startswith("layers.") else ""
        stem = stem.split(".", 2)[2] if where else stem
        named[f"{where}{TO_HF[stem]}.weight"] = value
    config = {"model_type": "LlamaCanon", "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
              "num_key_value_heads": KV, "head_dim": K, "rms_norm_eps": PARAMS["norm_eps"], "rope_theta": 500.0,
              "rope_dim": 4, "qk_norm": True, "canon_set": "ABCD", "max_position_embeddings": 64,
              "tie_word_embeddings": False, "canon_bias": False, "canon_activation": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(named, folder / "model.safetensors")
    return folder


def agree(model: Any, expected: Tensor) -> None:
    with torch.no_grad():
        assert float((model(TOKENS) - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("sites", ["ABCD", "AC", "B", "D", ""])
def test_the_training_codes_files_agree_with_the_written_out_forward(sites, tmp_path):
    weights = random_weights(sites, seed=len(sites))
    model = read_checkpoint(lingua(tmp_path / "default", weights, canon_set=sites))
    agree(model, forward(weights, TOKENS))
    assert model.cfg.n_ctx == 64 and model.loaded_from is not None
    assert "without a published file" in model.loaded_from.assumed[0]


@pytest.mark.parametrize("version", ["lingua", "huggingface"])
def test_hugging_faces_names_and_both_versions_of_rope(version, tmp_path):
    weights = random_weights(kernel=3)
    model = read_checkpoint(hugging_face(tmp_path, weights, rope_version=version))
    agree(model, forward(weights, TOKENS, interleaved=version == "lingua"))


def test_values_that_the_config_can_have(tmp_path):
    weights = random_weights()
    plain = {key: value for key, value in weights.items() if "q_norm" not in key and "k_norm" not in key}
    agree(read_checkpoint(lingua(tmp_path, plain, qk_norm=False)), forward(weights, TOKENS, qk_norm=False))
    tied = {**weights, "output.weight": weights["tok_embeddings.weight"].clone()}
    for saved in (tied, {key: value for key, value in tied.items() if key != "output.weight"}):
        read = read_checkpoint(lingua(tmp_path, saved, weight_tying=True))
        assert read.cfg.tied
        agree(read, forward(tied, TOKENS))
    assert read_checkpoint(lingua(tmp_path, weights, rope_dim=0)).cfg.attention.rope is None
    read = read_checkpoint(lingua(tmp_path, weights, canon_activation=True, canon_residual=False))
    assert read.cfg.canon is not None and (read.cfg.canon.act, read.cfg.canon.residual) == ("silu", False)
    assert read.loaded_from is not None and "SiLU" in read.loaded_from.assumed[-1]
    tables = {**weights, "rope_embeddings.freqs_cis": torch.ones(3)}
    assert read_checkpoint(lingua(tmp_path, tables)).loaded_from.ignored  # type: ignore[union-attr]


def test_what_does_not_fit_is_refused(tmp_path):
    weights = random_weights()
    for changes, words in (
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"rope_version": "other"}, "rope_version"),
        ({"n_heads": 5}, "5 heads"),
        ({"n_kv_heads": 4}, "4 key heads"),
        ({"canon_set": "ABC"}, "unexpected"),
        ({"canon_set": "ABCX"}, "letters"),
        ({"n_layers": 3}, "weights have 2"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ):
        with pytest.raises(ValueError, match=words):
            read_checkpoint(lingua(tmp_path, weights, **changes))
    with pytest.raises(ValueError, match="lacks"):
        read_checkpoint(lingua(tmp_path, random_weights("ABC")))


def test_a_plain_llama_is_not_taken_for_one():
    assert not canon.recognises({"model_type": "llama"}, {"model.layers.0.self_attn.q_proj.weight": (24, 12)})
    assert canon.recognises({"model_type": "LlamaCanon"}, {"model.layers.0.self_attn.q_proj.weight": (24, 12)})
    assert not canon.recognises({"dim": 12}, {"layers.0.attention.wq.weight": (24, 12)})

"""DenseFormer's experiment models: other sizes, biases, groups and baselines than the golden files have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from t2lens.checkpoints import denseformer
from t2lens.checkpoints.reading import read_checkpoint
from t2lens.residual import DenseFormer, Gain, Scaled, Standard

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
D, HEADS, VOCAB = 24, 3, 31
CASES = {
    "1x1": ({"n_layer": 3, "increase_T_every": 1, "dilation_factor": 1}, DenseFormer()),
    "dilation 3, biases": (
        {"n_layer": 4, "increase_T_every": 1, "dilation_factor": 3, "bias": True},
        DenseFormer(dilation=3),
    ),
    "groups of 2, dilation 2": (
        {"n_layer": 6, "increase_T_every": 2, "dilation_factor": 2},
        DenseFormer(group=2, dilation=2),
    ),
    "connect_to_last": (
        {"n_layer": 4, "increase_T_every": 2, "bias": True},
        DenseFormer(period=None, group=2, off_diagonal=1e-4),
    ),
    "base_w_gains": ({"n_layer": 3}, Scaled(keep=Gain())),
    "base": ({"n_layer": 2, "bias": True}, Standard()),
}


def config_of(case: str) -> dict[str, Any]:
    model = case if "base" in case or "last" in case else "denseformer"
    fixed = {"vocab_size": VOCAB, "sequence_length": 16, "n_embd": D, "n_head": HEADS, "lm_cache": "none"}
    return {"bias": False, **fixed, "positional_encoder": "rotary", "dropout": 0.2, "model": model, **CASES[case][0]}


def prefixes(config: dict[str, Any]) -> list[str]:
    if config["model"].startswith("base"):
        return [f"transformer.h.{i}." for i in range(config["n_layer"])]
    size = config["increase_T_every"]
    return [f"transformer.h.{i // size}.{i % size}." for i in range(config["n_layer"])]


def file_of(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator) * 0.3  # noqa: E731
    file = {"transformer.wte.weight": draw(VOCAB, D)}
    linear = {"attn.c_attn": (3 * D, D), "attn.c_proj": (D, D), "mlp.c_fc": (4 * D, D), "mlp.c_proj": (D, 4 * D)}
    norms = ["transformer.ln_f", *(f"{p}{n}" for p in prefixes(config) for n in ("ln_1", "ln_2"))]
    for name in norms:
        file |= {f"{name}.weight": 1 + draw(D)} | ({f"{name}.bias": draw(D)} if config["bias"] else {})
    for at in prefixes(config):
        for name, shape in linear.items():
            file[f"{at}{name}.weight"] = draw(*shape)
            if config["bias"]:
                file[f"{at}{name}.bias"] = draw(shape[0])
        if config["model"] == "base_w_gains":
            file |= {f"{at}gain_attn": 1 + draw(1), f"{at}gain_mlp": 1 + draw(1)}
    n_groups = config["n_layer"] // config.get("increase_T_every", 1)
    if config["model"] == "denseformer":
        for g in range(n_groups):
            file[f"weights.{g}.weight"] = draw(1, (g + 1) // config["dilation_factor"] + 1)
    if config["model"] == "connect_to_last":
        file |= {f"mixer.weight.{j}": draw(1) for j in range(n_groups + 1)}
    e = D // HEADS
    file["transformer.wpe.freqs"] = 10.0 ** (-4 * torch.arange(0, e, 2).float() / e)
    file["lm_head.weight"] = file["transformer.wte.weight"].clone()
    return file


def logits_of(config: dict[str, Any], file: dict[str, Tensor]) -> Tensor:
    """What the published program computes, from its equations."""
    norm = lambda x, name: F.layer_norm(x, (D,), file[f"{name}.weight"], file.get(f"{name}.bias"), 1e-5)  # noqa: E731
    linear = lambda x, name: F.linear(x, file[f"{name}.weight"], file.get(f"{name}.bias"))  # noqa: E731
    angle = torch.arange(IDS.shape[1])[:, None] * file["transformer.wpe.freqs"]

    def turned(x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(z).flatten(-2)

    def attention(x: Tensor, at: str) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in linear(x, f"{at}attn.c_attn").split(D, dim=-1))
        z = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return linear(z.transpose(1, 2).flatten(-2), f"{at}attn.c_proj")

    size, k = config.get("increase_T_every", 1), config.get("dilation_factor", 1)
    x = file["transformer.wte.weight"][IDS]
    states = [x]
    for i, at in enumerate(prefixes(config), start=1):
        x = file.get(f"{at}gain_attn", 1) * x + attention(norm(x, f"{at}ln_1"), at)
        hidden = F.gelu(linear(norm(x, f"{at}ln_2"), f"{at}mlp.c_fc"))
        x = file.get(f"{at}gain_mlp", 1) * x + linear(hidden, f"{at}mlp.c_proj")
        if i % size == 0:
            states.append(x)
            if (row := file.get(f"weights.{i // size - 1}.weight")) is not None:
                n = i // size
                x = torch.stack([w * states[j] for w, j in zip(row[0], range(n % k, n + 1, k), strict=True)]).sum(0)
    if "mixer.weight.0" in file:
        x = torch.stack([file[f"mixer.weight.{j}"] * s for j, s in enumerate(states)]).sum(0)
    return norm(x, "transformer.ln_f") @ file["transformer.wte.weight"].T


def saved(folder: Path, config: dict[str, Any], file: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(file, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_files_of_every_model_agree_with_their_equations(tmp_path: Path, case: str, seed: int):
    config = config_of(case)
    file = file_of(config, seed)
    model = read_checkpoint(saved(tmp_path / "a", config, file))
    assert model.cfg.residual == CASES[case][1]
    expected = logits_of(config, file)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["1x1", "base", "base_w_gains"])
def test_heads_buffers_and_prefixes_may_differ(tmp_path: Path, case: str):
    config, file = config_of(case), file_of(config_of(case))
    expected = logits_of(config, file)

    def without(*keys: str) -> dict[str, Tensor]:
        return {k: t for k, t in file.items() if k not in keys}

    masked = file | {f"{p}attn.bias": torch.ones(1, 1, 16, 16).tril() for p in prefixes(config)}
    compiled = {f"_orig_mod.{k}": t for k, t in file.items()}
    others = [without("lm_head.weight"), without("transformer.wte.weight"), without("transformer.wpe.freqs")]
    for n, other in enumerate([*others, masked, compiled]):
        with torch.no_grad():
            logits = read_checkpoint(saved(tmp_path / str(n), config, other))(IDS)
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_the_dilation_is_read_off_the_weights_where_the_config_is_silent(tmp_path: Path):
    config = config_of("dilation 3, biases")
    file = file_of(config)
    del config["dilation_factor"], config["increase_T_every"]
    model = read_checkpoint(saved(tmp_path / "a", config, file))
    assert model.cfg.residual == DenseFormer(dilation=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positional_encoder": "learned"}, "with positional_encoder 'learned' cannot be read, only with 'rotary'"),
        ({"attention_window_length": 8}, "with attention_window_length 8 cannot be read"),
        ({"lm_cache": "kv"}, "with lm_cache 'kv' cannot be read"),
        ({"n_layer": 5}, "The config has n_layer 5, but the weights have 3."),
        ({"increase_T_every": 3}, "The config has increase_T_every 3, but the weights have 1."),
        ({"dilation_factor": 2}, "Averages of 2, 3, 4 sources are not those of dilation_factor 2."),
        ({"dilation_factor": 9}, "Averages of 2, 3, 4 sources are not those of dilation_factor 9."),
        ({"n_head": 5}, "n_head 5, which does not divide n_embd 24"),
        ({"vocab_size": 30}, "The config has vocab_size 30, but the weights have 31."),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_one_sentence(tmp_path: Path, change: dict[str, Any], message: str):
    config, file = config_of("1x1") | change, file_of(config_of("1x1"))
    with pytest.raises(ValueError, match=message):
        read_checkpoint(saved(tmp_path / "a", config, file))


def test_missing_blocks_and_other_heads_are_refused(tmp_path: Path):
    config, file = config_of("1x1"), file_of(config_of("1x1"))
    holed = {k: t for k, t in file.items() if ".h.1.0." not in k}
    with pytest.raises(ValueError, match="2 blocks are not 3 groups of 1 blocks"):
        read_checkpoint(saved(tmp_path / "a", config, holed))
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight and lm_head\.weight should be the same"):
        read_checkpoint(saved(tmp_path / "b", config, file | {"lm_head.weight": torch.ones(VOCAB, D)}))


def test_other_gpts_are_not_taken_for_it():
    shapes = {"transformer.h.0.ln_1.weight": (D,), "transformer.h.0.attn.c_attn.weight": (3 * D, D)}
    other = {**shapes, "transformer.wpe.weight": (16, D)}
    assert not denseformer.recognises({"n_embd": D, "n_layer": 1}, other)
    assert denseformer.recognises({"n_embd": D, "positional_encoder": "rotary"}, shapes)

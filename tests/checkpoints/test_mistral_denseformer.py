"""Mistral with depth-weighted averages: files in its format against the averages of their equations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from t2lens.checkpoints.reading import read_checkpoint
from t2lens.residual import DenseFormer

CONFIG: dict[str, Any] = {
    "model_type": "mistral_denseformer",
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dilation": 2,
    "dwa_period": 3,
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


def file_of(prefix: str = "model.dwa_modules.", *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator) * 0.3  # noqa: E731
    file = {"model.embed_tokens.weight": draw(29, 16), "lm_head.weight": draw(29, 16)}
    file["model.norm.weight"] = 1 + draw(16)
    for i in range(6):
        at = f"model.layers.{i}."
        for name, shape in {"q": (16, 16), "k": (8, 16), "v": (8, 16), "o": (16, 16)}.items():
            file[f"{at}self_attn.{name}_proj.weight"] = draw(*shape)
        for name, shape in {"gate": (20, 16), "up": (20, 16), "down": (16, 20)}.items():
            file[f"{at}mlp.{name}_proj.weight"] = draw(*shape)
        for name in ("input", "post_attention"):
            file[f"{at}{name}_layernorm.weight"] = 1 + draw(16)
    return file | {f"{prefix}alphas.2.weight": draw(1, 2), f"{prefix}alphas.5.weight": draw(1, 4)}


def saved(folder: Path, config: dict[str, Any], file: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(file, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("prefix", ["model.dwa_modules.", "model.dwa.", ""])
def test_averages_are_those_of_the_file_under_any_prefix(tmp_path: Path, prefix: str):
    file = file_of(prefix)
    model = read_checkpoint(saved(tmp_path / "a", CONFIG, file))
    assert model.cfg.residual == DenseFormer(dilation=2, period=3) and model.cfg.attention.window == 4
    assert model.loaded_from is not None and "without a published file" in model.loaded_from.assumed[0]
    with torch.no_grad():
        record = model.record(IDS)
    atoms = [atom.clone() for atom in record.atoms]
    states, y = [atoms[0]], atoms[0]
    for block in range(6):
        y = y + atoms[2 * block + 1] + atoms[2 * block + 2]
        states.append(y)
        if block == 2:  # after three blocks: sources 1 and 3
            a = file[f"{prefix}alphas.2.weight"][0]
            y = a[0] * states[1] + a[1] * states[3]
    a = file[f"{prefix}alphas.5.weight"][0]
    y = a[0] * states[0] + a[1] * states[2] + a[2] * states[4] + a[3] * states[6]
    torch.testing.assert_close(record.reads["out"], y, rtol=0, atol=1e-5)
    normed = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * file["model.norm.weight"]
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), normed @ file["lm_head.weight"].T, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dwa_period": 2}, "are not those of dilation 2 and dwa_period 2 in 6 blocks"),
        ({"dilation": 3}, r"\(block: sources 2: 2, 5: 4\) are not those of dilation 3"),
        ({"rope_scaling": {"type": "linear"}}, "with rope_scaling .* cannot be read"),
        ({"hidden_act": "gelu"}, "with hidden_act 'gelu' cannot be read"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_one_sentence(tmp_path: Path, change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        read_checkpoint(saved(tmp_path / "a", CONFIG | change, file_of()))

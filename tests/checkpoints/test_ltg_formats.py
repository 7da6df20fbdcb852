"""Files of ELC-BERT and GPT-BERT: what they leave open, and what other files of the same formats look like."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from t2lens.checkpoints import elc_bert, gpt_bert
from t2lens.checkpoints.reading import read_checkpoint
from t2lens.residual import ELCBert
from t2lens.sublayers.bucket_attention import buckets
from tests.checkpoints.golden import unpack

CONFIG: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "max_position_embeddings": 40,
    "position_bucket_size": 8,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "vocab_size": 31,
    "layer_norm_eps": 1e-6,
}


def elc_file(seed: int = 0, *, weighted: bool = False) -> dict[str, torch.Tensor]:
    """An ELC-BERT of two blocks in the published format, in other sizes than the golden ones."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator) * 0.3  # noqa: E731
    d, m = 24, 20
    file = {
        "embedding.word_embedding.weight": draw(31, d),
        "embedding.relative_embedding": draw(15, d),
        "embedding.relative_layer_norm.weight": draw(d),
        "embedding.relative_layer_norm.bias": draw(d),
        "classifier.nonlinearity.1.weight": draw(d, d),
        "classifier.nonlinearity.1.bias": draw(d),
        "classifier.nonlinearity.5.bias": draw(31),
    }
    file["classifier.nonlinearity.5.weight"] = file["embedding.word_embedding.weight"].clone()
    for i in range(2):
        at = f"transformer.layers.{i}"
        file |= {
            f"{at}.prev_layer_weights": draw(i + 1),
            f"{at}.attention.position_indices": buckets(40, 8),
            f"{at}.attention.in_proj_qk.weight": draw(2 * d, d),
            f"{at}.attention.in_proj_qk.bias": draw(2 * d),
            f"{at}.mlp.mlp.1.weight": draw(2 * m, d),
            f"{at}.mlp.mlp.4.weight": draw(d, m),
        }
        for name in ("in_proj_v", "out_proj"):
            file |= {f"{at}.attention.{name}.weight": draw(d, d), f"{at}.attention.{name}.bias": draw(d)}
        file |= {f"{at}.attention.post_layer_norm.weight": draw(d), f"{at}.attention.post_layer_norm.bias": draw(d)}
    if weighted:
        file["transformer.prev_layer_weights"] = draw(3)
    return file


def save(folder: Path, file: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(file, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_of(file: dict[str, torch.Tensor], config: dict[str, Any] | None = None, **options: Any):
    return elc_bert.plan(CONFIG if config is None else config, {k: tuple(v.shape) for k, v in file.items()}, **options)


def variant_of(plan: Any) -> str:
    assert isinstance(plan.cfg.residual, ELCBert)
    return plan.cfg.residual.variant


def test_a_file_that_does_not_say_its_variant_is_read_as_base_and_that_is_said():
    plan = plan_of(elc_file())
    assert variant_of(plan) == "base" and "taken as base" in plan.assumed[0]
    for said in ("zero", "normalized", "base"):
        for plan in (plan_of(elc_file(), elc_variant=said), plan_of(elc_file(), {**CONFIG, "elc_variant": said})):
            assert variant_of(plan) == said and plan.assumed == []


def test_weighted_output_shows_by_its_key():
    plan = plan_of(elc_file(weighted=True))
    assert variant_of(plan) == "weighted_output" and plan.assumed == []
    with pytest.raises(ValueError, match=r"'base' does not fit a file with transformer\.prev_layer_weights"):
        plan_of(elc_file(weighted=True), elc_variant="base")
    with pytest.raises(ValueError, match=r"does not fit a file without transformer\.prev_layer_weights"):
        plan_of(elc_file(), elc_variant="weighted-output")


def test_variants_of_one_file_differ(tmp_path: Path):
    folder = save(tmp_path / "elc", elc_file(), CONFIG)
    logits = [read_checkpoint(folder, elc_variant=v)([[1, 5, 30]]).detach() for v in ("base", "zero", "normalized")]
    assert all(not torch.allclose(a, b, atol=1e-3) for a, b in pairwise(logits))


def test_an_untied_a_missing_and_a_broken_head(tmp_path: Path):
    tokens = [[1, 5, 30]]
    tied = read_checkpoint(save(tmp_path / "tied", elc_file(), CONFIG), elc_variant="zero")
    file = elc_file()
    del file["classifier.nonlinearity.5.weight"]
    dropped = read_checkpoint(save(tmp_path / "dropped", file, CONFIG), elc_variant="zero")
    assert torch.equal(dropped(tokens), tied(tokens))
    file = elc_file()
    file["classifier.nonlinearity.5.weight"] *= 2
    with pytest.raises(ValueError, match="should be the same, but they differ"):
        read_checkpoint(save(tmp_path / "broken", file, CONFIG), elc_variant="zero")
    untied = read_checkpoint(
        save(tmp_path / "untied", file, {**CONFIG, "tie_word_embeddings": False}), elc_variant="zero"
    )
    bias = file["classifier.nonlinearity.5.bias"]
    assert torch.allclose(untied(tokens) - bias, 2 * (tied(tokens) - bias), atol=1e-5)
    headless = {key: value for key, value in elc_file().items() if not key.startswith("classifier.")}
    model = read_checkpoint(save(tmp_path / "headless", headless, CONFIG), elc_variant="zero")
    assert model.loaded_from is not None and "no head" in model.loaded_from.assumed[0]
    assert torch.allclose(model.record(tokens).reads["out"], tied.record(tokens).reads["out"], atol=1e-6)


def test_a_file_without_the_index_buffer_has_it_computed(tmp_path: Path):
    file = {key: value for key, value in elc_file().items() if not key.endswith("position_indices")}
    ours = read_checkpoint(save(tmp_path / "a", file, CONFIG), elc_variant="zero")
    theirs = read_checkpoint(save(tmp_path / "b", elc_file(), CONFIG), elc_variant="zero")
    tokens = torch.arange(30)[None]
    assert torch.equal(ours(tokens), theirs(tokens))
    assert ours.loaded_from is not None and "position_indices" in ours.loaded_from.assumed[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_attention_heads": 5}, "must be a multiple of num_attention_heads"),
        ({"num_hidden_layers": True}, "num_hidden_layers True, which must be a whole number"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"elc_variant": "best"}, "elc_variant must be one of base"),
    ],
)
def test_a_config_that_makes_no_sense_says_so(change: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        plan_of(elc_file(), {**CONFIG, **change})


def test_the_published_buckets_are_those_of_the_equation(tmp_path: Path):
    file = load_file(unpack("gpt-bert", tmp_path / "gpt") / "model.safetensors")
    assert torch.equal(file["transformer.attention_layers.0.position_indices"], buckets(64, 16))


def test_gpt_bert_is_causal_where_its_class_says_so(tmp_path: Path):
    folder = unpack("gpt-bert", tmp_path / "gpt")
    config = json.loads((folder / "config.json").read_text())
    shapes = {key: tuple(value.shape) for key, value in load_file(folder / "model.safetensors").items()}
    assert gpt_bert.plan(config, shapes).cfg.causal
    masked = gpt_bert.plan({**config, "architectures": ["LtgbertForMaskedLM"]}, shapes)
    assert not masked.cfg.causal and "causal=True" in masked.assumed[0]
    unsaid = gpt_bert.plan({**config, "architectures": None}, shapes)
    assert unsaid.cfg.causal and "taken as causal" in unsaid.assumed[0]
    assert not gpt_bert.plan(config, shapes, causal=False).cfg.causal
    both = read_checkpoint(folder, causal=False)
    assert not torch.allclose(both([[1, 2, 3]])[:, 0], read_checkpoint(folder)([[1, 2, 3]])[:, 0], atol=1e-3)


@pytest.mark.parametrize("change", [lambda t: t + 8, lambda t: t - 8, lambda t: t + 0.5])
def test_a_table_of_positions_that_points_beside_its_rows_is_refused(tmp_path, change):
    file = elc_file()
    for key in [key for key in file if key.endswith("position_indices")]:
        file[key] = change(file[key])
    with pytest.raises(ValueError, match=r"position_indices.*whole numbers below 15"):
        read_checkpoint(save(tmp_path, file, CONFIG))


def test_a_table_of_positions_is_not_made_for_contexts_without_end():
    file = {key: w for key, w in elc_file().items() if not key.endswith("position_indices")}
    with pytest.raises(ValueError, match="1000000 positions would be too large"):
        plan_of(file, {**CONFIG, "max_position_embeddings": 1_000_000})


def test_causal_is_true_or_false(tmp_path):
    folder = unpack("gpt-bert", tmp_path / "gpt-bert")
    for value in ("False", 0, "no"):
        with pytest.raises(ValueError, match="causal must be true or false"):
            read_checkpoint(folder, causal=value)

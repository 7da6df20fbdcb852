"""Files of Deep Delta Learning beyond the golden ones: every option that changes the numbers, and refusals by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import t2lens
from t2lens.checkpoints import ddl
from t2lens.checkpoints.reading import read_checkpoint
from t2lens.config import MLP, Attention, KVShift, ModelConfig, Rope
from t2lens.residual import DeepDelta
from t2lens.sublayers import DecodingCache

TOKENS = torch.tensor([[0, 7, 3, 7, 9, 1], [4, 4, 2, 8, 0, 4]])
HEADS = Attention(n_heads=3, n_kv_heads=3, d_head=4, qk_norm="head_after_rope", rope=Rope(n_dims=4, table="float32"))


def random_model(residual: DeepDelta, **changes: Any) -> Any:
    cfg = ModelConfig(
        d_vocab=23, n_ctx=40, d_model=10, n_layers=2, attention=HEADS, mlp=MLP(d_mlp=26), residual=residual
    )
    model = t2lens.build(replace(cfg, **changes), seed=0)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator)
    return model


def as_published(model: Any) -> dict[str, Tensor]:
    """The weights under the names and in the shapes of the published files."""
    r, out = model.residual, {"transformer.wte.weight": model.embed.weight, "ln_f.weight": model.ln_final.w}
    out["lm_head.weight"] = model.unembed.W_U.T.clone()
    beta = "beta" if r.cfg.beta_hidden is None else "beta_out"
    for i, block in enumerate(model.blocks):
        at = f"transformer.h.{i}"
        out |= {f"{at}.ln_1.weight": block.ln1.w, f"{at}.ln_2.weight": block.ln2.w}
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
            weight = getattr(block.attn, ours).weight
            if theirs in block.attn.shifts:
                out[f"{at}.attn.c_{theirs}.linear.weight"] = weight
                out[f"{at}.attn.c_{theirs}.shift_proj.weight"] = block.attn.shifts[theirs].gate.weight
            else:
                out[f"{at}.attn.c_{theirs}.weight"] = weight
        out[f"{at}.attn.c_proj.weight"] = block.attn.output.weight
        if hasattr(block.attn, "query_norm"):
            out |= {f"{at}.attn.q_rms.weight": block.attn.query_norm, f"{at}.attn.k_rms.weight": block.attn.key_norm}
        for theirs, ours in (("c_fc1", "gate"), ("c_fc2", "input"), ("c_proj", "output")):
            out[f"{at}.mlp.{theirs}.weight"] = getattr(block.mlp, ours).weight
        for j, kind in enumerate(("attn", "mlp")):
            write, w = f"{at}.ddl_{kind}", 2 * i + j
            out |= {f"{write}.{beta}.weight": r.beta_weight[w][None], f"{write}.{beta}.bias": r.beta_bias[w][None]}
            if r.cfg.beta_hidden is not None:
                out[f"{write}.beta_in.weight"] = r.beta_in[w]
            if r.cfg.value_form != "constant":
                out |= {f"{write}.v_proj.weight": r.value_weight[w], f"{write}.v_proj.bias": r.value_bias[w]}
        out |= compressor(r, i, f"{at}.compress")
    out |= compressor(r, len(model.blocks), "readout")
    if r.cfg.embed_conv is not None:
        out["input_embed.conv.weight"] = r.embed_kernel.flatten(0, 1)[:, None]
    return {key: value.detach().clone() for key, value in out.items()}


def compressor(r: Any, row: int, at: str) -> dict[str, Tensor]:
    if not r.expanded:
        return {}
    over_time = r.cfg.compress == "time"
    kernel = r.compress[row].flatten(0, 1) if over_time else r.compress[row]
    return {f"{at}.{'shortconv.' if over_time else ''}weight": kernel, f"{at}.read": r.compress_read[row]}


def write(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    basic = {"model_type": "nanogpt-pro", "num_attention_heads": 3, "head_dim": 4, "num_hidden_layers": 2,
             "hidden_size": 10, "block_size": 40, "vocab_size": 23, "ddl_beta_init": 1.0}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(basic | config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def same(ours: Any, read: Any) -> None:
    with torch.no_grad():
        assert float((ours(TOKENS) - read(TOKENS)).abs().max()) < 1e-5


VARIANTS: dict[str, tuple[DeepDelta, dict[str, Any], dict[str, Any]]] = {
    "scalar": (DeepDelta(), {}, {}),
    "two channels over time": (
        DeepDelta(value_channels=2, compress="time", compress_kernel=5, embed_conv=3, beta_hidden=7),
        {"ddl_beta_single_linear": False},
        {},
    ),
    "constant": (
        DeepDelta(value_channels=3, compress_kernel=3, value_form="constant", value_constant=1.25),
        {"ddl_v_constant": True, "ddl_v_constant_value": 1.25},
        {},
    ),
    "scalar constant": (
        DeepDelta(value_form="constant", value_constant=1.5),
        {"ddl_v_dim1_constant": True, "ddl_v_dim1_constant_value": 1.5, "ddl_v_constant": False},
        {},
    ),
    "scale and eps": (
        DeepDelta(value_scale=2.0, k_eps=0.3),
        {"ddl_v_sigmoid_scale": 2.0, "ddl_k_eps": 0.3, "ddl_beta_init": 2.0},
        {},
    ),
    "linear value": (DeepDelta(value_form="linear_of_raw"), {"ddl_v_sigmoid": False}, {}),
    "half of the head turned": (
        DeepDelta(),
        {"rope_ratio": 0.5},
        {"attention": replace(HEADS, rope=Rope(n_dims=2, table="float32"))},
    ),
    "no positions": (DeepDelta(), {"rope_ratio": 0.0}, {"attention": replace(HEADS, rope=None)}),
    "no QK norm": (DeepDelta(), {"use_qk_rmsnorm": False}, {"attention": replace(HEADS, qk_norm="none")}),
    "shifted keys": (
        DeepDelta(),
        {"use_k_shift": True},
        {"attention": replace(HEADS, kv_shift=KVShift(kind="tokens", on="k"))},
    ),
    "shifted keys and values": (
        DeepDelta(value_channels=4),
        {"use_k_shift": True, "use_v_shift": True},
        {"attention": replace(HEADS, kv_shift=KVShift(kind="tokens"))},
    ),
    "untied": (DeepDelta(), {"tie_word_embeddings": False}, {"tied": False}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_option_is_read(name, tmp_path):
    residual, config, changes = VARIANTS[name]
    model = random_model(residual, **changes)
    read = read_checkpoint(write(tmp_path, as_published(model), **config))
    same(model, read)
    again = replace(model.cfg.residual, beta_init=read.cfg.residual.beta_init)  # type: ignore[type-var]
    assert read.cfg.residual == again
    cache, steps = DecodingCache(), []
    with torch.no_grad():
        for i in range(TOKENS.shape[1]):
            steps.append(read(TOKENS[:, i : i + 1], cache=cache))
        assert float((torch.cat(steps, dim=1) - read(TOKENS)).abs().max()) < 1e-4


def test_a_head_that_is_missing_or_saved_twice(tmp_path):
    model = random_model(DeepDelta())
    tensors = as_published(model)
    same(model, read_checkpoint(write(tmp_path, tensors)))
    del tensors["lm_head.weight"]
    same(model, read_checkpoint(write(tmp_path, tensors)))
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    with pytest.raises(ValueError, match="differ"):
        read_checkpoint(write(tmp_path, tensors))


def test_mup_scales_the_logits_and_says_so(tmp_path):
    model = random_model(DeepDelta())
    read = read_checkpoint(write(tmp_path, as_published(model), mup=True, hidden_size_base=25))
    with torch.no_grad():
        assert float((read(TOKENS) - 2.5 * model(TOKENS)).abs().max()) < 1e-4
    assert read.loaded_from is not None and "2.5" in read.loaded_from.assumed[0]


def test_the_accelerated_file_is_an_option_and_the_default_says_so(tmp_path):
    """Its config and keys are those of CC-EC; its epsilon is sqrt(D) times larger, and it honours causal padding."""
    residual = DeepDelta(value_channels=4, embed_conv=4, k_eps=0.1)
    model = random_model(residual)
    path = write(tmp_path, as_published(model), ddl_k_eps=0.1, ddl_state_dv_shortconv_causal=True)
    plain = read_checkpoint(path)
    same(model, plain)
    assert plain.loaded_from is not None
    assert [word in " ".join(plain.loaded_from.assumed) for word in ("accelerated", "shortconv_causal")] == [True, True]
    other = read_checkpoint(path, implementation="accelerated")
    assert other.cfg.residual == replace(residual, k_eps=0.1 * 10**0.5, compress_pad="causal")
    with pytest.raises(ValueError, match="plain or accelerated"):
        read_checkpoint(path, implementation="fast")
    path = write(tmp_path, as_published(model), ddl_v_constant=True)
    with pytest.raises(ValueError, match="no constant values"):
        read_checkpoint(path, implementation="accelerated")
    time = write(tmp_path, as_published(random_model(DeepDelta(value_channels=4, compress="time"))))
    with pytest.raises(ValueError, match="channel compression"):
        read_checkpoint(time, implementation="accelerated")


@pytest.mark.parametrize(
    "option, value",
    [("using_groupnorm", True), ("use_output_gate", True), ("k_activation", "silu"), ("shortconvq", True),
     ("scale_attn_by_inverse_layer_idx", True)],
)  # fmt: skip
def test_options_without_an_equation_are_refused_by_name(option, value, tmp_path):
    path = write(tmp_path, as_published(random_model(DeepDelta())), **{option: value})
    with pytest.raises(ValueError, match=f"{option} = {value!r}"):
        read_checkpoint(path)


def test_files_that_do_not_fit_their_config_are_refused(tmp_path):
    tensors = as_published(random_model(DeepDelta()))
    for config, words in (
        ({"head_dim": 5}, "heads of 5"),
        ({"num_hidden_layers": 3}, "weights have 2"),
        ({"num_hidden_layers": 1}, "weights have 2"),
        ({"use_v_shift": True}, "c_v.linear.weight"),
    ):
        with pytest.raises(ValueError, match=words):
            read_checkpoint(write(tmp_path, tensors, **config))
    assert not ddl.recognises({"model_type": "nanogpt-pro"}, {"transformer.wte.weight": (23, 10)})


def test_buffers_and_weights_that_are_not_used_are_named(tmp_path):
    model = random_model(DeepDelta(value_form="constant"), attention=replace(HEADS, qk_norm="none"))
    tensors = as_published(model)
    for i in range(2):
        tensors[f"transformer.h.{i}.attn.rotary.inv_freq"] = torch.ones(2)
        tensors |= {f"transformer.h.{i}.attn.{x}_rms.weight": torch.ones(4) for x in "qk"}
        for kind in ("attn", "mlp"):
            tensors[f"transformer.h.{i}.ddl_{kind}.v_proj.weight"] = torch.ones(1, 10)
            tensors[f"transformer.h.{i}.ddl_{kind}.v_proj.bias"] = torch.ones(1)
    read = read_checkpoint(write(tmp_path, tensors, use_qk_rmsnorm=False, ddl_v_dim1_constant=True))
    same(model, read)
    assert read.loaded_from is not None and len(read.loaded_from.ignored) == 14

"""The open ports of Attention Residuals: which program wrote a file, and what is refused; numbers: test_golden."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from t2lens.checkpoints import attnres
from t2lens.checkpoints.reading import read_checkpoint
from t2lens.config import Rope
from t2lens.residual import OpenAttnRes, Standard
from tests.systems import random_tokens

D, HEADS, KV, HEAD, FF, VOCAB = 16, 4, 2, 6, 20, 50
CONFIG = {
    "model_type": "qwen3_attnres", "hidden_size": D, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "head_dim": HEAD, "intermediate_size": FF, "num_hidden_layers": 3, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "hidden_act": "silu", "attnres_num_blocks": 2,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
GATES = {
    "sigmoid_scalar": {"res_gate_logit": ()},
    "sigmoid_vector": {"res_gate_proj.weight": (D, D), "res_gate_proj.bias": (D,)},
    "learnable_alpha": {"res_alpha": ()},
}


def weights(*, n_layers=3, bias=True, final=False, final_bias=False, gate=None, value=False, depth=True, **more):
    shapes = {"model.embed_tokens.weight": (VOCAB, D), "model.norm.weight": (D,)}
    if final:
        shapes |= {"model.final_res_proj.weight": (1, D), "model.final_res_norm.weight": (D,)}
    if final_bias:
        shapes["model.final_res_bias"] = ()
    for i in range(n_layers):
        layer = {
            "input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,),
            "self_attn.q_proj.weight": (HEADS * HEAD, D), "self_attn.k_proj.weight": (KV * HEAD, D),
            "self_attn.v_proj.weight": (KV * HEAD, D), "self_attn.o_proj.weight": (D, HEADS * HEAD),
            "self_attn.q_norm.weight": (HEAD,), "self_attn.k_norm.weight": (HEAD,),
            "mlp.gate_proj.weight": (FF, D), "mlp.up_proj.weight": (FF, D), "mlp.down_proj.weight": (D, FF),
        }  # fmt: skip
        for s in ("attn", "mlp") if depth else ():
            layer |= {f"{s}_res_proj.weight": (1, D), f"{s}_res_norm.weight": (D,)}
            layer |= {f"{s}_res_bias": ()} if bias else {}
            layer |= {f"{s}_{name}": shape for name, shape in (GATES[gate] if gate else {}).items()}
            layer |= {f"{s}_{name}": shape for name, shape in more.items()}
        if value:
            layer |= {"v_res_proj.weight": (1, D), "v_res_norm.weight": (D,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder, tensors, **config):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    chosen = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(chosen))
    return folder


C = {"bias": False}
FINAL = {"bias": False, "final": True}


@pytest.mark.parametrize(
    ("mode", "tensors", "expected"),
    [
        ("block", {}, "A block"),
        ("full", {}, "A full"),
        ("block", {"final": True, "final_bias": True}, "B block"),
        ("delta", {}, "B delta"),
        ("delta_block", {}, "B delta_block"),
        ("delta_v", {"value": True}, "B delta_v"),
        ("first_layer", {}, "B first_layer"),
        ("block", FINAL, "C block"),
        ("full", FINAL, "C full"),
        ("block_v", {**FINAL, "value": True}, "C block"),
        ("delta_centered_reset", FINAL, "C full"),
        ("delta", C, "C delta"),
        ("delta_block", C, "C delta_block"),
        ("delta_v", {**C, "value": True}, "C delta_v"),
        ("delta_replace", C, "C delta_replace"),
        ("full_v", {**C, "value": True}, "C full_v"),
        ("full_additive", C, "C full_additive"),
        ("pre_gated", {**C, "pre_gate.weight": (D, D), "pre_gate.bias": (D,)}, "C pre_gated"),
    ],
)
def test_the_keys_say_which_program_wrote_a_file(mode, tensors, expected, tmp_path):
    model = read_checkpoint(write(tmp_path / "a", weights(**tensors), attnres_mode=mode))
    residual = model.cfg.residual
    assert isinstance(residual, OpenAttnRes) and f"{residual.dialect} {residual.mode}" == expected
    assert any(f"dialect {expected[0]}" in sentence for sentence in model.loaded_from.assumed)
    assert model(random_tokens(0)).isfinite().all()


@pytest.mark.parametrize("gate", GATES)
def test_gates_are_read_where_they_act_and_named_where_they_do_not(gate, tmp_path):
    tensors = weights(gate=gate)
    model = read_checkpoint(write(tmp_path / "a", tensors, attnres_mode="block", attnres_gate_type=gate))
    assert model.cfg.residual == OpenAttnRes(n_blocks=2, gate=gate, bias_init=3.0)
    assert not model.loaded_from.ignored
    name = next(iter(GATES[gate]))
    ours = model.residual.get_parameter("gate_weight" if gate == "sigmoid_vector" else "gate_value")
    assert torch.equal(ours[3], tensors[f"model.layers.1.mlp_{name}"])
    idle = read_checkpoint(
        write(tmp_path / "b", weights(gate=gate), attnres_mode="first_layer", attnres_gate_type=gate)
    )
    assert "does not call" in idle.loaded_from.ignored[f"model.layers.0.attn_{name}"]
    with pytest.raises(ValueError, match=f"the weights are those of '{gate}'"):
        read_checkpoint(write(tmp_path / "c", tensors, attnres_gate_type="bias"))


def test_a_baseline_and_an_inert_mode_are_plain_transformers(tmp_path):
    plain = weights(depth=False)
    a = read_checkpoint(write(tmp_path / "a", plain, model_type="qwen3", attnres_num_blocks=None))
    b = read_checkpoint(write(tmp_path / "b", plain, attnres_mode="none"))
    idle = {**weights(bias=False, value=True), **plain}
    c = read_checkpoint(write(tmp_path / "c", idle, attnres_mode="delta_block_v"))
    assert {type(m.cfg.residual) for m in (a, b, c)} == {Standard}
    assert torch.equal(a(random_tokens(1)), b(random_tokens(1))) and torch.equal(
        a(random_tokens(1)), c(random_tokens(1))
    )
    assert "do nothing" in c.loaded_from.ignored["model.layers.2.v_res_norm.weight"]


def test_heads_and_rope_stand_in_either_place(tmp_path):
    tensors = weights()
    tied = read_checkpoint(write(tmp_path / "a", tensors))
    same = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    theta = {"rope_parameters": None, "rope_theta": 10000.0, "head_dim": None}
    twice = read_checkpoint(write(tmp_path / "b", same, **theta))
    assert torch.equal(tied(random_tokens(2)), twice(random_tokens(2))) and twice.cfg.tied
    free = read_checkpoint(
        write(tmp_path / "c", {**same, "lm_head.weight": torch.randn(VOCAB, D)}, tie_word_embeddings=False)
    )
    assert not free.cfg.tied and free.cfg.attention.d_head == HEAD
    other = read_checkpoint(write(tmp_path / "d", tensors, rope_parameters={"rope_theta": 500.0}))
    assert other.cfg.attention.rope == Rope(base=500.0)
    assert not torch.equal(other(random_tokens(2)), tied(random_tokens(2)))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"depth": False}, {"attnres_mode": "block"}, "hold no depth queries"),
        ({"final": True}, {}, "no program writes"),
        ({"bias": False}, {"attnres_mode": "full"}, "neither scalar biases nor a final read"),
        ({"bias": False}, {"attnres_mode": "delta_x"}, "has no mode 'delta_x'"),
        ({"bias": False, "null_source": (D,)}, {"attnres_mode": "delta"}, "null source in mode delta"),
        ({}, {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "scales its rotary positions"),
        ({}, {"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding windows in some layers"),
        ({}, {"num_hidden_layers": 4}, "num_hidden_layers 4"),
        ({}, {"head_dim": 8}, "head_dim 8"),
        ({}, {"tie_word_embeddings": None, "attnres_mode": "block", "vocab_size": 51}, "vocab_size 51"),
    ],
)
def test_what_does_not_fit_is_refused(tensors, config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_checkpoint(write(tmp_path / "a", weights(**tensors), **config))


def test_a_null_source_that_no_read_sees_is_named(tmp_path):
    model = read_checkpoint(write(tmp_path / "a", weights(**FINAL, null_source=(D,)), attnres_mode="block"))
    assert "no null source" in model.loaded_from.ignored["model.layers.0.mlp_null_source"]


def test_other_models_of_the_same_names_are_left_to_others():
    shapes = {name: tuple(t.shape) for name, t in weights(depth=False).items()}
    assert not attnres.recognises({"model_type": "llama"}, shapes)
    assert attnres.recognises({"model_type": "qwen3"}, shapes)
    assert not attnres.recognises({"model_type": "qwen3_attnres"}, {"transformer.wte.weight": (2, 2)})

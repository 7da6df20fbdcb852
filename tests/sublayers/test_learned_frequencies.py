"""RoPE whose frequencies are weights of each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import t2lens
from t2lens.config import Rope
from tests.systems import random_tokens, tiny_config


def model(rope: Rope) -> Any:
    cfg = tiny_config("standard")
    return t2lens.build(replace(cfg, attention=replace(cfg.attention, rope=rope)), seed=1).double()


def test_they_start_as_the_fixed_ones_and_turn_each_layer_by_its_own():
    tokens = random_tokens(1)
    for rope in (Rope(), Rope(n_dims=4, layout="interleaved", base=100.0)):
        fixed, learned = model(rope), model(replace(rope, frequencies="learned"))
        assert (fixed(tokens) - learned(tokens)).abs().max() < 1e-6
        learned(tokens, return_type="loss").backward()
        frequencies = [block.attn.rope_frequencies for block in learned.blocks]
        assert all(f.grad.abs().max() > 0 and len(f) == (rope.n_dims or 8) // 2 for f in frequencies)
        with torch.no_grad():
            frequencies[1] *= 1.5
        assert (fixed(tokens) - learned(tokens)).abs().max() > 1e-6


def test_a_table_of_low_precision_rounds_them_too():
    tokens = random_tokens(1)
    rounded = model(Rope(table="bfloat16")), model(Rope(table="bfloat16", frequencies="learned"))
    assert (rounded[0](tokens) - rounded[1](tokens)).abs().max() < 1e-6
    assert (rounded[0](tokens) - model(Rope())(tokens)).abs().max() > 1e-6

"""Tiny models of every residual system with random weights, for tests that must hold on all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

import t2lens
from t2lens.config import MLP, Attention, ModelConfig, ShortSWA
from t2lens.residual import (
    DCA,
    RELATIVES,
    AttnRes,
    DeepDelta,
    DeltaAttnRes,
    DenseFormer,
    DepthSWA,
    ELCBert,
    Gain,
    HyperConnections,
    MUDDFormer,
    OpenAttnRes,
    Scaled,
    Standard,
    VerticalAttention,
    deepnet,
)

SYSTEMS = {
    "standard": Standard(),
    "attnres-full": AttnRes(),
    "attnres-block": AttnRes(block_size=3),
    "attnres-window": AttnRes(window=2, key_norm="unweighted", normaliser="sparsemax", bias="newest"),
    "attnres-static": AttnRes(block_size=2, query="none", key_norm="none", bias="per_source", normaliser="sigmoid"),
    "attnres-delta": DeltaAttnRes(),
    "attnres-delta-block": DeltaAttnRes(block_size=2),
    "attnres-a-block": OpenAttnRes(dialect="A", n_blocks=2, gate="sigmoid_scalar"),
    "attnres-b-block": OpenAttnRes(dialect="B", n_blocks=2, gate="sigmoid_vector"),
    "attnres-c-delta-v": OpenAttnRes(dialect="C", mode="delta_v", gate="learnable_alpha"),
    "ddl": DeepDelta(),
    "ddl-linear": DeepDelta(value_form="linear_of_normed"),
    "ddl-cc": DeepDelta(value_channels=4),
    "ddl-cc-ec": DeepDelta(value_channels=3, compress_kernel=3, embed_conv=4, value_form="linear_of_normed"),
    "ddl-tc-ec": DeepDelta(value_channels=2, compress="time", embed_conv=3, value_form="linear_of_raw", beta_hidden=5),
    "ddl-write-only": DeepDelta(value_channels=4, edit="write_only"),
    "denseformer": DenseFormer(),
    "denseformer-2x2": DenseFormer(dilation=2, period=2, every="sublayer"),
    "connect-to-last": DenseFormer(period=None, off_diagonal=1e-4),
    "elc-base": ELCBert(variant="base"),
    "elc-normalized": ELCBert(variant="normalized"),
    "elc-normalized-rms": ELCBert(variant="normalized", output_norm="rms"),
    "elc-weighted": ELCBert(variant="weighted_output"),
    "vertical-attention": VerticalAttention(),
    "vertical-attention-open": VerticalAttention(
        source_norm="l2", keep_internal_residual=False, init="last_biased", output_aggregation=True
    ),
    "muddformer": MUDDFormer(hidden_round=8, hidden_expand_last=2),
    "muddformer-prepost": MUDDFormer(pre_post_norm="paper", act="gelu_tanh"),
    "muddformer-static": MUDDFormer(pre_post_norm="code", weights="static"),
    "dca": DCA(),
    "dca-v1": DCA(grn="v1", ways="one", recent=1),
    "dca-inner": DCA(gate_form="inner_bias", skip_source="own", recent=1),
    "dca-drop": DCA(gate_form="relu_sum", key_norm="rms", skip_source="sum", recent=1, between="drop"),
    "rezero": Scaled(keep=Gain(), add=Gain(per="layer", start=0.0)),
    "highway": Scaled(gate="channel"),
    "deepnet": deepnet(3),
    "x0-lambdas": RELATIVES["x0-lambdas"],
    "laurel": Scaled(low_rank=3, low_rank_form="normed", add=Gain(per="channel")),
    "depth-swa": DepthSWA(window=2, d_key=4),
    "depth-swa-replace": DepthSWA(window=3, d_key=4, placement="replace"),
    "hyper-connections": HyperConnections(n_streams=3),
    "hyper-static": HyperConnections(n_streams=2, coefficients="static", readout="mean"),
    "mhc": HyperConnections.mhc(n_streams=3),
    "mhc-lite": HyperConnections.mhc_lite(n_streams=3),
    "deepseek-v4": HyperConnections.deepseek_v4(n_streams=4, sinkhorn_iterations=3),
}


def tiny_config(system: str, *, local: bool = False, tied: bool = True, **changes: object) -> ModelConfig:
    cfg = ModelConfig(
        d_vocab=50,
        n_ctx=32,
        d_model=16,
        n_layers=3,
        attention=Attention(n_heads=2, n_kv_heads=1, d_head=8, qk_norm="head"),
        mlp=MLP(d_mlp=20),
        local=ShortSWA(window=3, n_heads=1, n_kv_heads=1, d_head=8) if local else None,
        residual=SYSTEMS[system],
        tied=tied,
    )
    return replace(cfg, **changes)  # type: ignore[arg-type]


def tiny(
    system: str, seed: int = 0, *, dtype: torch.dtype = torch.float64, **changes: object
) -> Any:  # not Transformer: tests reach into parts that only some systems have
    """A model in which every parameter has been moved away from its (often zero) start."""
    model = t2lens.build(tiny_config(system, **changes), seed=seed)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed + 1)
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator)
    return model.to(dtype)


def random_tokens(seed: int, d_vocab: int = 50) -> torch.Tensor:
    """[batch, pos] ids of a random shape, with a repeated token."""
    dice = random.Random(seed)
    shape = (dice.randint(1, 3), dice.randint(3, 9))
    tokens = torch.randint(d_vocab, shape, generator=torch.Generator().manual_seed(seed))
    tokens[:, -1] = tokens[:, 0]
    return tokens

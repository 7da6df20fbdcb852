"""The one backbone, the one budget, and the seven bundled models: they differ in the residual system alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from t2lens.config import (
    Attention,
    AttnRes,
    DeepDelta,
    DepthSWA,
    ModelConfig,
    ShortSWA,
    SwiGLU,
)

BACKBONE = ModelConfig(
    d_vocab=2048,
    n_ctx=256,
    d_model=128,
    n_layers=8,
    attention=Attention(n_heads=4, n_kv_heads=2, d_head=32, qk_norm=True),
    mlp=SwiGLU(d_mlp=208),
)

RECIPES: dict[str, ModelConfig] = {
    "standard": BACKBONE,
    "standard-swa": replace(BACKBONE, local=ShortSWA(window=16, n_heads=1, n_kv_heads=1, d_head=32)),
    "attnres-full": replace(BACKBONE, residual=AttnRes()),
    "attnres-block": replace(BACKBONE, residual=AttnRes(block_size=4)),
    "depth-swa": replace(BACKBONE, residual=DepthSWA(window=4)),
    "ddl": replace(BACKBONE, residual=DeepDelta()),
    "ddl-cc-ec": replace(BACKBONE, residual=DeepDelta(value_channels=4, embed_conv=4)),
}

"""The one backbone, the one budget, and the bundled models: they differ in the residual system (or a local mixer)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches

from t2lens.config import MLP, Attention, Canon, ModelConfig, ShortSWA
from t2lens.residual import (
    DCA,
    AttnRes,
    DeepDelta,
    DeltaAttnRes,
    DenseFormer,
    DepthSWA,
    ELCBert,
    HyperConnections,
    MUDDFormer,
    VerticalAttention,
)

BACKBONE = ModelConfig(
    d_vocab=2048,
    n_ctx=256,
    d_model=128,
    n_layers=8,
    attention=Attention(n_heads=4, n_kv_heads=2, d_head=32, qk_norm="head"),
    mlp=MLP(d_mlp=208),
)

RECIPES: dict[str, ModelConfig] = {
    "standard": BACKBONE,
    "standard-swa": replace(BACKBONE, local=ShortSWA(window=16, n_heads=1, n_kv_heads=1, d_head=32)),
    "canon": replace(BACKBONE, canon=Canon()),
    "elc-bert": replace(BACKBONE, residual=ELCBert(variant="normalized", output_norm="rms")),
    "denseformer": replace(BACKBONE, residual=DenseFormer()),
    "vertical-attention": replace(BACKBONE, residual=VerticalAttention()),
    "muddformer": replace(BACKBONE, residual=MUDDFormer()),
    "dca": replace(BACKBONE, residual=DCA()),
    "attnres-full": replace(BACKBONE, residual=AttnRes()),
    "attnres-block": replace(BACKBONE, residual=AttnRes(block_size=4)),
    "attnres-delta": replace(BACKBONE, residual=DeltaAttnRes()),
    "depth-swa": replace(BACKBONE, residual=DepthSWA(window=4)),
    "hyper-connections": replace(BACKBONE, residual=HyperConnections()),
    "mhc": replace(BACKBONE, residual=HyperConnections.mhc()),
    "ddl": replace(BACKBONE, residual=DeepDelta()),
    "ddl-cc-ec": replace(BACKBONE, residual=DeepDelta(value_channels=4, embed_conv=4)),
    "ddl-tc-ec": replace(BACKBONE, residual=DeepDelta(value_channels=4, embed_conv=4, compress="time")),
    "ddl-write-only": replace(BACKBONE, residual=DeepDelta(value_channels=4, embed_conv=4, edit="write_only")),
}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long and how to train (Muon and AdamW, linear warm-up, cosine decay); by default as the bundled models."""

    tokens: int = 1_500_000  # rounded up to whole steps
    rows: int = 4  # windows per step
    lr: float = 6e-3  # of vectors and of the residual system (AdamW), at the end of the warm-up
    embed_lr: float = 0.04  # of the embedding (AdamW)
    matrix_lr: float = 0.012  # of the matrices of the blocks (Muon)
    final_lr: float = 0.02  # at the end, as a fraction of the full rate
    warmup: float = 0.05  # fraction of the steps
    weight_decay: float = 0.05  # on the matrices of the blocks alone
    clip: float = 1.0  # largest gradient norm
    seed: int = 0  # of the weights and of the order of the data

    def __post_init__(self) -> None:
        for name in ("tokens", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"Budget.{name} must be at least 1, not {getattr(self, name)}.")
        if not (min(self.lr, self.embed_lr, self.matrix_lr, self.clip) > 0 and self.weight_decay >= 0):
            raise ValueError(
                "Budget: the learning rates and clip must be positive and weight_decay must not be negative."
            )
        if not (0 <= self.warmup <= 1 and 0 <= self.final_lr <= 1):
            raise ValueError("Budget: warmup and final_lr are fractions between 0 and 1.")


def recipe(name: str) -> ModelConfig:
    """The config of a bundled model. Errors: ValueError with the nearest names."""
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=2) or list(RECIPES)
        raise ValueError(f"There is no recipe {name!r}; did you mean {' or '.join(map(repr, near))}?")
    return RECIPES[name]

"""A small model in a folder, which workers in other processes load in a moment, and a corpus of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import t2lens
from t2lens.config import MLP, Attention, ModelConfig
from t2lens.residual import AttnRes
from t2lens.zoo import registry
from t2lens.zoo.tokenizer import Tokenizer

WORDS = "the king said to the queen, the king is here\n"


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with a tokenizer."""
    folder = tmp_path_factory.mktemp("shelf") / "small"
    cfg = ModelConfig(
        d_vocab=270,
        n_ctx=64,
        d_model=16,
        n_layers=2,
        attention=Attention(n_heads=2, n_kv_heads=1, d_head=8),
        mlp=MLP(d_mlp=20),
        residual=AttnRes(),
    )
    model = t2lens.build(cfg, seed=1)
    model.tokenizer = Tokenizer.train([WORDS * 9], n_vocab=270)
    registry.save(model, folder)
    return folder


@pytest.fixture(scope="session")
def small_model(small: Path) -> Any:
    return t2lens.load(small)


@pytest.fixture
def ids(tmp_path: Path) -> Callable[..., Path]:
    """Makes an .npy file of n random token ids."""

    def make(n: int, seed: int = 0) -> Path:
        file = tmp_path / f"ids-{n}-{seed}.npy"
        np.save(file, np.random.default_rng(seed).integers(0, 270, n, dtype=np.uint16))
        return file

    return make


def files(run: Path) -> dict[str, str]:
    """SHA-256 of every file of a run by its name."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(run.rglob("*")) if p.is_file()}

"""Published model formats: one file per family, which recognises its files and plans our weights from theirs."""

from __future__ import annotations

from types import ModuleType

from t2lens.checkpoints import (
    attnres,
    canon,
    dca,
    ddl,
    denseformer,
    elc_bert,
    gpt_bert,
    hyper,
    mistral_denseformer,
    muddformer,
)

FAMILIES: tuple[ModuleType, ...] = (
    attnres,
    canon,
    dca,
    ddl,
    denseformer,
    elc_bert,
    gpt_bert,
    hyper,
    mistral_denseformer,
    muddformer,
)

"""Published model formats: one file per family, which recognises its files and plans our weights from theirs."""

from __future__ import annotations

from types import ModuleType

FAMILIES: tuple[ModuleType, ...] = ()

"""Numbers computed from traces and models: what pictures, tables and files show.

Analyses of a model return a `Finding`; `t2lens.analysis.catalog` lists them. Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES: dict[str, str] = {
    "Finding": "t2lens.analysis.finding",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 't2lens.analysis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

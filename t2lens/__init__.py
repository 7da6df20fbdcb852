"""t2lens: a lens for both axes of a transformer, sequence position and layer depth.

Everything is imported on first use, so that `import t2lens` and `t2lens --help` stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from t2lens import config as config
    from t2lens import residual as residual
    from t2lens.config import ModelConfig as ModelConfig
    from t2lens.edits import Edit as Edit
    from t2lens.edits import edited as edited
    from t2lens.mixing import contributions as contributions
    from t2lens.mixing import mixing_matrix as mixing_matrix
    from t2lens.model import build as build
    from t2lens.store import capture as capture
    from t2lens.tracing import Trace as Trace
    from t2lens.tracing import load_trace as load_trace
    from t2lens.tracing import trace as trace
    from t2lens.two_axis import duality as duality
    from t2lens.verification import verify as verify
    from t2lens.zoo.registry import list_models as list_models
    from t2lens.zoo.registry import load as load

__version__ = "0.1.0"

_HOMES = {
    "Edit": "t2lens.edits",
    "edited": "t2lens.edits",
    "ModelConfig": "t2lens.config",
    "build": "t2lens.model",
    "capture": "t2lens.store",
    "contributions": "t2lens.mixing",
    "duality": "t2lens.two_axis",
    "list_models": "t2lens.zoo.registry",
    "load": "t2lens.zoo.registry",
    "load_trace": "t2lens.tracing",
    "mixing_matrix": "t2lens.mixing",
    "Trace": "t2lens.tracing",
    "trace": "t2lens.tracing",
    "verify": "t2lens.verification",
}

__all__ = [
    "Edit",
    "ModelConfig",
    "Trace",
    "__version__",
    "build",
    "capture",
    "config",
    "contributions",
    "duality",
    "edited",
    "list_models",
    "load",
    "load_trace",
    "mixing_matrix",
    "residual",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in ("config", "residual"):
        return import_module(f"t2lens.{name}")
    raise AttributeError(f"module 't2lens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

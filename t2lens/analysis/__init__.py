"""Numbers computed from traces and models: what pictures, tables and files show.

Analyses of a model return a `Finding`; `t2lens.analysis.catalog` lists them. Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES: dict[str, str] = {
    "routing_advantage": "t2lens.analysis.advantage",
    "continue_text": "t2lens.analysis.continuation",
    "content_dependence": "t2lens.analysis.content",
    "audit_ddl": "t2lens.analysis.ddl_audit",
    "gate_curve": "t2lens.analysis.gate_curves",
    "gate_spectrum": "t2lens.analysis.ddl_tokens",
    "gate_tokens": "t2lens.analysis.ddl_tokens",
    "attribution_patching": "t2lens.analysis.patching",
    "patch_activations": "t2lens.analysis.patching",
    "edit_change": "t2lens.analysis.changes",
    "ablate_families": "t2lens.analysis.families",
    "ablate_streams": "t2lens.analysis.streams",
    "write_gates": "t2lens.analysis.gates",
    "ablate_writes": "t2lens.analysis.writes",
    "depth_profile": "t2lens.analysis.depth_maps",
    "attribute_logits": "t2lens.analysis.attribution",
    "attribute_loss": "t2lens.analysis.attribution",
    "measure_effects": "t2lens.analysis.effects",
    "Finding": "t2lens.analysis.finding",
    "load_finding": "t2lens.analysis.finding",
    "logit_lens": "t2lens.analysis.lens",
    "rollout": "t2lens.analysis.flow",
    "top_paths": "t2lens.analysis.paths",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 't2lens.analysis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)

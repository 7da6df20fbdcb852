"""GPT-BERT (arXiv 2410.24159, repository ltgoslo/gpt-bert): LTG-BERT with gated heads, averaged after every sublayer.

The same weights run causally and bidirectionally; which one is meant stands in the config, as the class it names.
"""

from __future__ import annotations

from typing import Any

from t2lens.checkpoints.elc_bert import ltg_plan
from t2lens.checkpoints.plan import Plan, rows
from t2lens.checkpoints.values import checked
from t2lens.residual import DenseFormer

__all__ = ["plan", "recognises"]

_ALPHAS = "transformer.dwa_modules.alphas"


def recognises(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> bool:  # noqa: ARG001
    return f"{_ALPHAS}.0" in shapes and "transformer.attention_layers.0.in_proj_vg.weight" in shapes


def plan(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], *, causal: bool | None = None) -> Plan:
    """causal: whether a token sees only those before it; by default what the config's class says."""
    if not isinstance(causal, bool | None):
        raise ValueError(f"The option causal must be true or false, not {causal!r}.")
    chosen, assumed = (causal, []) if causal is not None else _causal(config)
    attention = "transformer.attention_layers.{}"
    out = ltg_plan(
        config,
        shapes,
        residual=DenseFormer(every="sublayer"),
        causal=chosen,
        output="gated",
        attention=attention,
        mlp="transformer.mlp_layers.{}.mlp",
    )
    out.assumed += assumed
    d = out.cfg.d_model
    for i in range(out.cfg.n_layers):
        for kind in ("weight", "bias"):
            packed = f"{attention.format(i)}.in_proj_vg.{kind}"
            out.weights[f"blocks.{i}.attn.value.{kind}"] = rows(packed, 0, d)
            out.weights[f"blocks.{i}.attn.gate.{kind}"] = rows(packed, d, 2 * d)
    for m in range(2 * out.cfg.n_layers):
        out.weights[f"residual.weights.{m}"] = f"{_ALPHAS}.{m}"
    return out


def _causal(config: dict[str, Any]) -> tuple[bool, list[str]]:
    config = checked(config, flag=("is_decoder",), listed=("architectures",))
    classes = " ".join(map(str, config.get("architectures", ())))
    if "CausalLM" in classes or config.get("is_decoder"):
        return True, []
    if "MaskedLM" in classes:
        return False, ["Read as a bidirectional model, as its class says; causal=True reads it as a causal one."]
    return True, ["The config does not say whether tokens see those after them: taken as causal (causal=False)."]

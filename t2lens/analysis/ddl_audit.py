"""The audit of Deep Delta Learning: do the gates do what their names say, on text, and does it matter?

The DDL paper (arXiv 2601.00417) reads its gate as regimes, since X' = X + beta k (v^T - k^T X) with a unit k has the
operator I - beta k k^T with the eigenvalue 1 - beta along k (1 elsewhere), so that what is wrong along k shrinks by it:
k^T X' - v^T = (1 - beta) (k^T X - v^T). Its section 5 says that the learned gates were not audited, and that the gains
of the expanded state were not isolated from a write-only control. `audit_ddl` measures both on any model of the family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.analysis.ddl_counterfactuals import Counterfactuals, counterfactuals
from t2lens.analysis.ddl_gates import IDLE, Gates, Pass, in_groups, plain_state, written
from t2lens.analysis.ddl_transport import Transport, transport
from t2lens.analysis.finding import Finding
from t2lens.analysis.inputs import Batch, read_batch
from t2lens.analysis.progress import progress
from t2lens.checks import Check, Verification
from t2lens.residual.deep_delta import DeepDeltaLearning
from t2lens.tracing import LIMITS

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["PRECONDITIONS", "Measured", "audit_ddl", "check_system", "checks_of", "measured"]

PRECONDITIONS = ("finite numbers", "gate range", "unit direction")
_UNIT = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
_BYTES = 2**26  # of the directions, and of the logits, of one group of sequences


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured, before it is summarised: `ddl_summary` makes the Finding of it.

    transports: of the sampled tokens, one entry per group of sequences; None where there is none to compute (numbers
    that are not finite, or a write-only model, whose transport is the identity). effects: None where not asked for.
    order [n, 2]: the sequence, and the position in it, of each column of the numbers per token.
    """

    model: Any
    batch: Batch
    gates: Gates
    transports: list[Transport]
    effects: Counterfactuals | None
    checks: Verification
    order: Tensor


def audit_ddl(
    model: Transformer,
    input: Any = None,
    attention_mask: Any = None,
    *,
    counterfactuals: bool = True,
    transport_tokens: int = 512,
    name: str | None = None,
) -> Finding:
    """Audit the gates of a Deep Delta Learning model on text.

    Preconditions come first (finite numbers, beta in [0, 2], |k| = 1 wherever a sublayer wrote); where one fails, beta
    says nothing about an eigenvalue, and regime names are refused (NaN). Then identities of the pass: what a write left
    along k, k^T X' - v^T = (1 - beta |k|^2) (k^T X - v^T), from the state after it; that it changed X along k only; and
    that the product of the operators is what the operator form carries the embedding with. `passed` says whether all
    of these hold; what was found on top of that (idle or saturated gates, ...) is stated, and no failure.

    Measured at every write over all tokens: beta by regime (skip < 0.1, partial to 0.9, overwrite to 1.1, over-relax to
    1.5, reflect above) with quantiles and a histogram, saturation and idleness, errors |k^T X - v| before and
    |k^T X' - v| after, erased |beta k k^T X|^2 and written |beta v|^2 energy, net change |X' - X| / |X|, alignment
    |k^T X| / |X|, |cos| of directions at the same token and principal angles of the spans of directions over text; the
    singular values of the frozen transport T = (I - beta k k^T) ... from every write to the readout, and what it leaves
    of the embedding and of each write; and what other gates in their place do to the loss (`ddl_counterfactuals`).
    A state of several channels: the operator acts on each alike, errors are lengths over channels. With reads over time
    (TC), the transport is of the state and not of the read.

    Write-only models (X + beta k v^T) have the same checks and numbers where these mean something. Their beta is the
    size of a write: it is counted in bins with the same bounds, which are named by them and not by regimes. Erased
    energy is 0, eigenvalues and the transport are 1, and |k^T X' - v| is no error that a write is to shrink. Of the
    counterfactuals there is no "no erasure".

    Args:
        input: a text, a list of texts or token ids [pos] or [batch, pos]; by default the 32 bundled passages.
        attention_mask: [batch, pos], 0 at padding.
        counterfactuals: whether to run them (most of the time goes there).
        transport_tokens: over how many tokens, evenly spaced, the transport is computed.
        name: of the model, for the title.

    Returns:
        Finding: `passed`, a row per sublayer (all of them first), and every number in `dataset`; `checks_of` gives the
        named checks, `t2lens.viz.ddl_report.report` a page.

    Raises:
        ValueError: not a Deep Delta Learning model, or bad input (see `read_batch`).

    Example:
        >>> import t2lens
        >>> from t2lens.analysis.ddl_audit import audit_ddl, checks_of
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.DeepDelta())
        >>> finding = audit_ddl(t2lens.build(cfg, seed=0), [[0, 7, 3, 7], [9, 2, 2, 4]])
        >>> finding.passed, [check.name for check in checks_of(finding)][:3]
        (True, ['finite numbers', 'gate range', 'unit direction'])
        >>> finding["share"].sel(site="0.attn").sum().item()
        1.0
    """
    from t2lens.analysis.ddl_summary import summarise

    check_system(model)
    if transport_tokens < 1:
        raise ValueError(f"transport_tokens must be at least 1, not {transport_tokens}.")
    if input is None:
        from t2lens.zoo.text import sample_texts

        input = sample_texts()
    batch = read_batch(model, input, attention_mask)
    return summarise(measured(model, batch, counterfactuals, transport_tokens), name or getattr(model, "name", None))


def checks_of(finding: Finding) -> Verification:
    """The named checks of an audit, with their numbers and limits."""
    data = finding.dataset
    columns = [data[f"check_{part}"].values.tolist() for part in ("value", "limit", "meaning")]
    rows = zip(data["check"].values.tolist(), *columns, strict=True)
    return Verification(tuple(Check(name=n, value=v, limit=limit, meaning=m) for n, v, limit, m in rows))


def check_system(model: Any) -> None:
    """ValueError for a model that has no such gates; it names those that do."""
    if isinstance(getattr(model, "residual", None), DeepDeltaLearning):
        return
    given = model.cfg.residual.describe() if hasattr(model, "cfg") else type(model).__name__
    raise ValueError(
        f"The DDL audit is for models of Deep Delta Learning, and this one is {given}; bundled are "
        f"{', '.join(bundled_of('ddl'))}."
    )


def bundled_of(*kinds: str) -> list[str]:
    """The bundled models of some residual systems."""
    import json

    from t2lens.zoo.registry import BUNDLED, list_models

    configs = {i.name: json.loads((BUNDLED / i.name / "config.json").read_text("utf-8")) for i in list_models()}
    return [name for name, config in configs.items() if config["model"]["residual"]["kind"] in kinds]


@torch.no_grad()
def measured(model: Any, batch: Batch, others: bool, transport_tokens: int) -> Measured:
    """All numbers of the audit; `others`: run counterfactuals as well; without `transport_tokens` nothing of the
    operator form."""
    residual, cfg = model.residual, model.cfg.residual
    n_writes, width = len(model.sites) - 1, model.cfg.d_model
    most = min(_BYTES // (8 * n_writes * width), _BYTES // (4 * model.cfg.d_vocab))
    groups = in_groups(batch, max(1, most))
    sampled = _evenly(batch.valid, transport_tokens)
    gates = Gates(k_eps=cfg.k_eps, erases=cfg.edit == "delta")
    transports: list[Transport] = []
    order: list[Tensor] = []
    for rows in progress(groups, "Reading the gates", len(groups)):
        seen = written(model, batch, rows)
        directions, betas = gates.add(residual, seen)
        position = seen.valid.cumsum(dim=1) - 1  # counted over the real tokens
        order.append(torch.stack([rows[:, None].expand_as(position)[seen.valid], position[seen.valid]], dim=1))
        if gates.n_broken == 0 and transport_tokens:
            chosen = _of(sampled, batch, seen)
            _operators(residual, seen, directions[chosen], betas[chosen], chosen, gates, transports)
    effects = None
    if others and gates.n_broken == 0:
        effects = counterfactuals(model, batch, gates.tokens("beta").mean(dim=1), gates.erases)
    return Measured(
        model=model,
        batch=batch,
        gates=gates,
        transports=transports,
        effects=effects,
        checks=_checks(model, gates),
        order=torch.cat(order),
    )


def _evenly(valid: Tensor, n: int) -> Tensor:
    """[B, T] bool: at most n of the valid places, evenly spaced."""
    places = valid.flatten().nonzero().squeeze(-1)
    step = torch.linspace(0, len(places) - 1, min(n, len(places)), dtype=torch.float64).round().long()
    chosen = torch.zeros_like(valid).flatten()
    chosen[places[step.to(places.device)]] = True
    return chosen.view_as(valid)


def _of(places: Tensor, batch: Batch, seen: Pass) -> Tensor:
    """[n] bool: `places` [B, T] at the valid tokens of a pass."""
    mine = batch.valid[seen.rows] & places[seen.rows]
    return mine[batch.valid[seen.rows]]


def _operators(
    residual: Any, seen: Pass, directions: Tensor, betas: Tensor, chosen: Tensor, gates: Gates, into: list[Transport]
) -> None:
    """The operator form in float64 with the recorded gates, against the pass and against the product of operators."""
    code, record = residual.linear_form("operator"), seen.record
    whole = alone = _in_double(residual.begin(record.embed))
    x0 = plain_state(residual, alone)[seen.valid][chosen]
    for step in record.steps:
        if step.out is not None:
            own = {name: gate.double() for name, gate in step.gates.items()}
            atom = code.atom(step.out.double(), own)
            whole = code.write(whole, step.site, atom, own)
            alone = code.write(alone, step.site, torch.zeros_like(atom), own)
    end = seen.end[seen.valid].double()
    gates.note("operator form", _apart(plain_state(residual, whole)[seen.valid], end))
    if not len(x0):
        return
    if gates.erases:
        into.append(transport(directions, betas, x0))
        carried = into[-1].carried
    else:
        carried = x0
    gates.note("transport product", _apart(plain_state(residual, alone)[seen.valid][chosen], carried, x0))


def _in_double(state: Any) -> Any:
    return state.double() if isinstance(state, Tensor) else state._replace(x=state.x.double())


def _apart(a: Tensor, b: Tensor, like: Tensor | None = None) -> Tensor:
    """[n]: |a - b| / |like| of states [n, V, D]."""
    size = (b if like is None else like).square().sum(dim=(-2, -1)).sqrt().clamp(min=1e-30)
    return (a - b).square().sum(dim=(-2, -1)).sqrt() / size


def _checks(model: Any, gates: Gates) -> Verification:
    dtype = model.W_E.dtype
    limit, worst = LIMITS[dtype], {name: gates.worst.get(name, float("nan")) for name in _MEANINGS}
    limits = {"gate range": 1e-6, "unit direction": _UNIT[dtype], "transport product": LIMITS[torch.float64]}
    checks = [
        Check(
            "finite numbers",
            float(gates.n_broken),
            0.0,
            "how many gates, states and logits are not finite",
        )
    ]
    for name, words in _MEANINGS.items():
        if name in ("operator form", "transport product") and (gates.n_broken or name not in gates.worst):
            continue  # not computed
        if name == "post-write" and not gates.erases:
            words = "k^T X' = k^T X + beta |k|^2 v^T (nothing is erased), relative to the longest of X, X' and v"
        if name == "transport product" and not gates.erases:
            words = "nothing is erased: the operator form carries the embedding as it is (relative)"
        words = words.format(idle=f"{IDLE * gates.k_eps:g}")
        checks.append(Check(name, worst[name], limits.get(name, limit), words))
    skipped = ("operator form and transport product: numbers that are not finite",) if gates.n_broken else ()
    return Verification(tuple(checks), skipped)


_MEANINGS = {
    "gate range": "how far beta leaves [0, 2]",
    "unit direction": "largest | |k| - 1 | where a sublayer wrote at all, |F| >= {idle}",
    "replay": "the recorded writes, written again, end in the state that the pass ends in (relative)",
    "post-write": "k^T X' - v^T = (1 - beta |k|^2) (k^T X - v^T), relative to the longest of X, X' and v, per channel",
    "along k": "part of X' - X that is not along k, relative to the same, per channel",
    "operator form": "operators and writes in float64 give the state that the pass ends in (relative)",
    "transport product": "the product of I - beta k k^T carries the embedding as the operator form does (relative)",
}


def failed_preconditions(checks: Sequence[Check] | Verification) -> list[Check]:
    """Checks without which beta is no eigenvalue."""
    return [check for check in checks if check.name in PRECONDITIONS and not check.passed]

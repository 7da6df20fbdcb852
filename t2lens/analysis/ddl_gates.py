"""What every write of Deep Delta Learning did to the state, measured on the states of the pass; part of the DDL audit.

The carried state is not a hook point where it is expanded, so it is written again, step by step, by the residual
system's own linear code with the recorded gates: the same operations on the same numbers. Whether that ends in the
state that a pass of the model ends in is one of the checks. Everything measured is computed in float64 from the
numbers that the model used, in its own dtype: S writes, n tokens (padding left out), D width, V value channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.mixing import ForwardRecord, Step
from t2lens.residual.deep_delta import edit_energy

if TYPE_CHECKING:
    from t2lens.analysis.inputs import Batch
    from t2lens.model import Transformer

__all__ = ["Gates", "Pass", "in_groups", "written"]

IDLE = 100  # times k_eps: an |F| below that has no direction to speak of, as |k| is visibly below 1


@dataclass(frozen=True)
class Pass:
    """A recorded pass over some sequences of the batch.

    rows: which. logits [b, T, vocab]; beta_logits: per write [b, T, 1]; end: the state it ended in, [b, T, V, D].
    """

    rows: Tensor
    valid: Tensor
    record: ForwardRecord
    logits: Tensor
    beta_logits: list[Tensor]
    end: Tensor


def in_groups(batch: Batch, n_tokens: int) -> list[Tensor]:
    """Rows of the batch in groups of at most n_tokens places (one row at least), those of like length together."""
    lengths = batch.valid.sum(dim=1)
    groups: list[list[int]] = []
    for row in lengths.argsort(stable=True).tolist():
        if not groups or (len(groups[-1]) + 1) * int(lengths[row]) > n_tokens:
            groups.append([])
        groups[-1].append(row)
    return [torch.tensor(group, device=lengths.device) for group in groups]


def columns(batch: Batch, rows: Tensor) -> slice:
    """The places that some of `rows` fill: a group of short sequences need not run over the padding of the longest."""
    filled = batch.valid[rows].any(dim=0).nonzero().squeeze(-1)
    return slice(int(filled[0]), int(filled[-1]) + 1)


@torch.no_grad()
def written(model: Transformer, batch: Batch, rows: Tensor) -> Pass:
    """Run `rows` of the batch and keep what the audit needs."""
    here = columns(batch, rows)
    tokens, valid = batch.tokens[rows, here], batch.valid[rows, here]
    mask = None if bool(valid.all()) else valid
    logits: dict[str, Tensor] = {}

    def keep(logit: Tensor, *, hook: Any) -> None:
        logits[hook.name] = logit

    names = [gate_hook(site, "beta_logit") for site in model.sites[:-1]]
    record, residual = ForwardRecord(), model.residual
    with model.hooks([(name, keep) for name in names]):
        out = model(tokens, mask, record=record)
    end = model(tokens, mask, stop_at_layer=model.cfg.n_layers)
    return Pass(rows, valid, record, out, [logits[name] for name in names], plain_state(residual, end))


def gate_hook(site: Any, what: str) -> str:
    return f"blocks.{site.layer}.ddl_{site.kind}.hook_{what}"


def plain_state(residual: Any, state: Any) -> Tensor:
    """The carried state as [..., V, D], V = 1 where it is a vector."""
    x = state if isinstance(state, Tensor) else state.x
    return x if residual.expanded else x.unsqueeze(-2)


def states(residual: Any, record: ForwardRecord) -> Iterator[tuple[Step, Tensor, Tensor]]:
    """(write, state before, state after) of a recorded pass, [b, T, V, D] in the dtype of the model."""
    state = residual.begin(record.embed)
    before = plain_state(residual, state)
    for step in record.steps:
        if step.out is not None:
            state = residual.write(state, step.site, residual.atom(step.out, step.gates), step.gates)
            after = plain_state(residual, state)
            yield step, before, after
            before = after


@dataclass
class Gates:
    """Everything measured about the writes, over all passes that were `add`ed.

    per_token: name -> [S, n] float64, columns in the order of the passes. subspace [S, D, D]: sum of k k^T over tokens.
    cosines, pairs [S, S]: sum of |cos(k, k')| at the same token, and over how many. worst: largest violation of each
    identity. n_broken: numbers that are not finite.
    """

    k_eps: float
    erases: bool
    per_token: dict[str, list[Tensor]] = field(default_factory=dict)
    subspace: Tensor | None = None
    cosines: Tensor | None = None
    pairs: Tensor | None = None
    worst: dict[str, float] = field(default_factory=dict)
    n_broken: int = 0

    def add(self, residual: Any, seen: Pass) -> tuple[Tensor, Tensor]:
        """Measure a pass. Returns directions [n, S, D] and betas [n, S], for the transport."""
        found: dict[str, list[Tensor]] = {}
        directions, after = [], None
        for (step, before, after), logit in zip(states(residual, seen.record), seen.beta_logits, strict=True):
            self._broken(logit, *step.gates.values(), after)
            one = self._write(step, before[seen.valid].double(), after[seen.valid].double(), seen.valid)
            one["logit"] = logit[seen.valid].squeeze(-1).double()
            directions.append(step.gates["direction"][seen.valid].double())
            for name, values in one.items():
                found.setdefault(name, []).append(values)
        assert after is not None
        self._broken(seen.logits)
        end, replay = seen.end[seen.valid].double(), after[seen.valid].double()
        size = end.square().sum(dim=(-2, -1)).sqrt()
        self.note("replay", (end - replay).square().sum(dim=(-2, -1)).sqrt() / size.clamp(min=1e-30))
        for name, values in found.items():
            self.per_token.setdefault(name, []).append(torch.stack(values))
        k = torch.stack(directions, dim=1)
        self._directions(k, torch.stack(found["norm"]).T)
        return k, torch.stack(found["beta"], dim=1)

    def _write(self, step: Step, x: Tensor, after: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """Numbers of one write [n] from the state before and after it [n, V, D]."""
        assert step.out is not None
        gates = {name: step.gates[name][valid].double() for name in ("beta", "value", "direction")}
        beta, value, k = gates["beta"], gates["value"], gates["direction"].unsqueeze(-2)
        norm = step.out[valid].double().norm(dim=-1)
        square = k.square().sum(dim=-1)  # |k|^2: 1 but for k_eps
        held, left = (x * k).sum(dim=-1), (after * k).sum(dim=-1)  # k^T X before and after, [n, V]
        kept = 1 - beta * square if self.erases else torch.ones_like(beta)
        goal = value if self.erases else torch.zeros_like(value)
        expected = goal + kept * (held - goal) + (0 if self.erases else beta * square * value)
        channel = torch.stack([x.norm(dim=-1), after.norm(dim=-1), value.abs()])
        scale = channel.amax(dim=0).clamp(min=1e-30)  # per channel
        self.note("post-write", (left - expected).abs() / scale)
        step_along = (left - held).unsqueeze(-1) / square.clamp(min=1e-30).unsqueeze(-1) * k
        self.note("along k", ((after - x) - step_along).norm(dim=-1) / scale)
        self.note("gate range", torch.maximum(-beta, beta - 2).clamp(min=0))
        awake = norm >= IDLE * self.k_eps
        self.note("unit direction", (square.squeeze(-1).sqrt() - 1).abs()[awake])
        size = x.square().sum(dim=(-2, -1)).sqrt().clamp(min=1e-30)
        direction = gates["direction"]
        return {
            "beta": beta.squeeze(-1),
            "norm": norm,
            "error_before": (held - value).norm(dim=-1),
            "error_after": (left - value).norm(dim=-1),
            "erased": edit_energy(beta, direction, held) * (1.0 if self.erases else 0.0),
            "written": edit_energy(beta, direction, value),
            "change": (after - x).square().sum(dim=(-2, -1)).sqrt() / size,
            "alignment": held.norm(dim=-1) / size,
        }

    def _directions(self, k: Tensor, norm: Tensor) -> None:
        """Sums over tokens: k k^T of each write, and |cos| of each pair where both wrote."""
        n_writes, width = k.shape[1:]
        if self.subspace is None or self.cosines is None or self.pairs is None:
            self.subspace = k.new_zeros(n_writes, width, width)
            self.cosines, self.pairs = k.new_zeros(n_writes, n_writes), k.new_zeros(n_writes, n_writes)
        for i in range(n_writes):
            self.subspace[i] += k[:, i].T @ k[:, i]
        length = k.norm(dim=-1)
        awake = ((norm >= IDLE * self.k_eps) & (length > 0)).double()
        unit = k / length.clamp(min=1e-30).unsqueeze(-1)
        cosines = torch.einsum("nid,njd->nij", unit, unit).abs()
        both = awake.unsqueeze(2) * awake.unsqueeze(1)
        self.cosines += (cosines * both).sum(dim=0)
        self.pairs += both.sum(dim=0)

    def note(self, name: str, errors: Tensor) -> None:
        """Keep the largest; NaN stays."""
        found = float(errors.max()) if errors.numel() else 0.0
        before = self.worst.get(name, 0.0)
        self.worst[name] = found if found != found else before if before != before else max(before, found)

    def _broken(self, *tensors: Tensor) -> None:
        self.n_broken += sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors)

    def tokens(self, name: str) -> Tensor:
        """[S, N] of one per-token number."""
        return torch.cat(self.per_token[name], dim=1)

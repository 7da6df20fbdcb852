"""The gradient of the loss at every attention score of both axes, by the formula of `t2lens.analysis.advantage`.

One forward pass with its graph; what is taken from autograd is the gradient at what was mixed (z of a head, a read),
not that of any weight: b is its inner product with what was mixed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from t2lens.analysis.inputs import Batch, check_finite, gradients
from t2lens.mixing import ForwardRecord
from t2lens.residual import Read, ResidualSystem, by_way
from t2lens.residual.attnres import entmax, sparsemax, top_k_softmax
from t2lens.sublayers.norms import wide

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["Route", "RouteGradients", "advantage", "normaliser_of", "source_vectors"]

Normaliser = Literal["softmax", "top_k", "sparsemax", "entmax", "sigmoid"]


def advantage(weights: Tensor, b: Tensor, normaliser: Normaliser = "softmax") -> Tensor:
    """dL/ds [..., S] of the scores behind `weights` [..., S], from b = dL/dweights [..., S].

    Softmax (also over the k largest, and with a sink, whose b is 0): a (b - sum a b). Source: module docstring.

    Example:
        >>> import torch
        >>> advantage(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])).tolist()
        [0.25, -0.25]
    """
    if normaliser == "sigmoid":
        return weights * (1 - weights) * b
    if normaliser in ("softmax", "top_k"):
        return weights * (b - (weights * b).sum(dim=-1, keepdim=True))
    slope = (weights > 0).to(weights.dtype) if normaliser == "sparsemax" else weights.sqrt()
    return slope * (b - (slope * b).sum(dim=-1, keepdim=True) / slope.sum(dim=-1, keepdim=True))


class Route(NamedTuple):
    """The routes of one read (weights, b, slope [B, T, S]) or of one attention site ([B, H, T, T]), in nats of the
    summed loss, in at least float32. seen: which routes exist."""

    name: str
    columns: tuple[str, ...]
    weights: Tensor
    b: Tensor
    slope: Tensor
    seen: Tensor
    normaliser: str


# --- one pass with gradients ----------------------------------------------------------------------------------------


@dataclass
class _Site:
    """What one attention module computed."""

    seen: Tensor = field(default_factory=lambda: torch.empty(0))
    pattern: Tensor = field(default_factory=lambda: torch.empty(0))
    v: Tensor = field(default_factory=lambda: torch.empty(0))
    z: Tensor = field(default_factory=lambda: torch.empty(0))
    error: float = 0.0  # how far the pattern is from the softmax of the scores


class RouteGradients:
    """One forward pass, and the gradient of the summed loss at every read and every mixed value."""

    def __init__(self, model: Transformer, batch: Batch, where: Tensor, axis: str) -> None:
        self.model, self.batch = model, batch
        self.left_out: dict[tuple[str, str], list[str]] = {}  # axis, reason -> names
        self.scores: dict[str, Tensor] = {}
        self.sites: dict[str, _Site] = {}
        hooks: list[tuple[str, Any]] = [("hook_embed", _leaf)]
        if axis != "sequence":
            hooks += [(name, self._keep_scores) for name in model.hook_dict if "hook_depth_scores" in name]
        if axis != "depth":
            ends = (".hook_attn_scores", ".hook_pattern", ".hook_v", ".hook_z")
            hooks += [(name, self._keep_site) for name in model.hook_dict if name.endswith(ends)]
        with gradients(model), model.hooks(fwd_hooks=hooks):
            self.record = record = ForwardRecord()
            chosen, mask = where.clone(), None if batch.mask is None else batch.mask.clone()
            logits = model(batch.tokens.clone(), mask, record=record)
            check_finite(logits.detach(), batch, "The logits")
            loss = F.cross_entropy(wide(logits[chosen]), batch.next_tokens.clone()[chosen], reduction="sum")
            self.loss = float(loss.detach())
            reads = list(record.made.items()) if axis != "sequence" else []
            wanted = [read for _, read in reads] + [site.z for site in self.sites.values()]
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]
        self.of_read = {name: grad for (name, _), grad in zip(reads, grads, strict=False)}
        self.of_z = dict(zip(self.sites, grads[len(reads) :], strict=True))

    def _keep_scores(self, tensor: Tensor, *, hook: Any) -> None:
        self.scores[hook.name] = tensor.detach()

    def _keep_site(self, tensor: Tensor, *, hook: Any) -> None:
        _, layer, kind, what = hook.name.split(".")
        site = self.sites.setdefault(f"{layer}.{kind}", _Site())
        if what == "hook_attn_scores":
            site.seen, site.pattern = tensor.detach() > -torch.inf, wide(tensor.detach()).softmax(dim=-1)
        elif what == "hook_pattern":
            site.error, site.pattern = _distance(site.pattern, tensor.detach()), tensor.detach()
        elif what == "hook_v":
            site.v = tensor.detach()
        else:
            site.z = tensor

    def leave_out(self, why: str, name: str, axis: str = "depth") -> None:
        self.left_out.setdefault((axis, why), []).append(name)

    def depth_routes(self) -> Iterator[Route]:
        """The reads whose weights are a known function of scores; the others are noted in `left_out`."""
        residual, cfg = self.model.residual, self.model.cfg.residual
        declared = getattr(cfg, "normaliser", None) or getattr(cfg, "pre", None)  # of AttnRes, of Hyper-Connections
        known: dict[str, tuple[str, Tensor, Tensor, Normaliser, float]] = {}  # read -> gate, weights, their fit
        for step in self.record.steps:
            own = residual.depth_weights(step.site, step.gates)
            ways = by_way(own) if own is not None else dict.fromkeys(residual.ways(step.site))
            for way, weights in ways.items():
                name = Read(step.site, way).name
                scores = self.scores.get(step.site.hook("depth_scores", way))
                if weights is None or weights.shape[-1] == 1:
                    self.leave_out("there is nothing to choose between", name)
                elif scores is None:
                    self.leave_out("its weights are not made of scores, or its sources are copies of one", name)
                else:
                    gate = next(key for key, value in step.gates.items() if value is weights)
                    kind, a, factor = normaliser_of(scores, weights.detach(), declared)
                    if kind is None:
                        self.leave_out("its weights are no softmax, sparsemax, entmax, top k or sigmoid", name)
                    else:
                        known[name] = (gate, weights.detach(), a, kind, factor)
        gates = {name: gate for name, (gate, *_) in known.items()}
        for read, base, vectors in source_vectors(residual, self.record.detach(), gates):
            _, own, a, kind, factor = known[read.name]
            made = self.record.made[read.name].detach()
            mixed = base + (own.movedim(-1, 0).unsqueeze(-1) * vectors).sum(dim=0)
            if _distance(mixed, made) > 0.1:
                self.leave_out("a hook edits the stream or the read, so it is not what its sources make", read.name)
                continue
            grad = self.of_read[read.name].double()
            b = torch.stack([(vector.double() * grad).sum(dim=-1) for vector in vectors], dim=-1)
            columns = tuple(source.name for source in residual.sources(read.site))
            slope = advantage(a, factor * b, kind)
            yield Route(read.name, columns, own.double(), b, slope, torch.ones_like(own, dtype=torch.bool), kind)

    def sequence_routes(self) -> Iterator[Route]:
        """Every attention site whose pattern is the softmax of its scores; to be run through once."""
        for name, site in self.sites.items():
            if site.error > _tolerance(site.pattern):
                self.leave_out("a hook edits its pattern, which is no softmax of its scores", name, "sequence")
                continue
            grad, v = wide(self.of_z[name]).transpose(1, 2), wide(site.v).transpose(1, 2)  # [B, H, T, K]
            v = v.repeat_interleave(grad.shape[1] // v.shape[1], dim=1)
            weights, b = wide(site.pattern), grad @ v.transpose(-1, -2)
            heads = tuple(f"{i}" for i in range(weights.shape[1]))
            seen, site.pattern, site.seen = site.seen, torch.empty(0), torch.empty(0)  # free as the caller goes on
            yield Route(name, heads, weights, b, advantage(weights, b), seen, "softmax")


def _leaf(tensor: Tensor, *, hook: Any) -> Tensor:  # noqa: ARG001
    """The embedding as a leaf that wants a gradient, so that frozen parameters are no hindrance."""
    return tensor.detach().requires_grad_()


def source_vectors(
    residual: ResidualSystem, record: ForwardRecord, gates: dict[str, str]
) -> Iterator[tuple[Read, Tensor, Tensor]]:
    """For the reads named in `gates` (read -> the gate that holds its depth weights): (read, base [B, T, D], vectors
    [S, B, T, D]), so that the read is base + sum_j a_j vectors[j].

    The system's own linear code runs with all weights zero, and with 1 on one source at a time: what a unit of weight
    puts into the read, with the scales, gates and matrices between source and read.
    """
    assert record.embed is not None
    if not gates:
        return
    mutates = type(residual).enter is not ResidualSystem.enter
    with torch.no_grad():
        state = residual.begin(record.embed)
        for step in record.steps:  # systems with depth scores have sequential blocks
            mine = [way for way in residual.ways(step.site) if Read(step.site, way).name in gates]
            for way in mine:
                read = Read(step.site, way)
                weights = step.gates[gates[read.name]]
                n = weights.shape[-1]
                units = torch.cat([weights.new_zeros(1, n), torch.eye(n, dtype=weights.dtype, device=weights.device)])
                made = []
                for unit in units:  # one at a time: a product over all would hold [S, B, T, S, D]
                    row = unit.expand(weights.shape).contiguous()
                    changed = {name: row if gate is weights else gate for name, gate in step.gates.items()}
                    entered = residual.enter(copy.deepcopy(state) if mutates else state, step.site, changed)
                    made.append(by_way(residual.read(entered, step.site, changed))[way])
                yield read, made[0], torch.stack(made[1:]) - made[0]
            state = residual.enter(state, step.site, step.gates)
            if step.out is not None:
                state = residual.write(state, step.site, residual.atom(step.out, step.gates), step.gates)


def normaliser_of(
    scores: Tensor, weights: Tensor, declared: str | None = None
) -> tuple[Normaliser | None, Tensor, float]:
    """(the function that makes these weights [B, T, S] of these scores; the weights that `advantage` takes, float64; a
    factor on b). Found by trying, the `declared` one first, because equal scores have equal weights under any.

    A sigmoid may be doubled, and have a constant added.
    """
    s, w = scores.double(), weights.double()
    kept = int((w != 0).sum(dim=-1).max())
    tries: dict[Normaliser, Callable[[], Tensor]] = {
        "softmax": lambda: s.softmax(dim=-1),
        "top_k": lambda: top_k_softmax(s, max(kept, 1)),
        "sparsemax": lambda: sparsemax(s),
        "entmax": lambda: entmax(s),
    }
    order: list[Normaliser] = sorted(tries, key=lambda kind: kind != declared)
    kind: Normaliser | None = next((kind for kind in order if _distance(tries[kind](), w) <= _tolerance(weights)), None)
    if kind is not None and (kind == declared or "sigmoid" not in (declared or "")):
        return kind, w, 1.0
    for factor in (1.0, 2.0):
        rest = w - factor * s.sigmoid()
        if float(rest.max() - rest.min()) <= factor * _tolerance(weights):
            return "sigmoid", s.sigmoid(), factor
    return kind, w, 1.0


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry of b (at least 1e-30)."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))


def _tolerance(x: Tensor) -> float:
    """How far numbers of the dtype of x may be from what they are a function of."""
    return {torch.float64: 1e-9, torch.float32: 2e-6}.get(x.dtype, 2 * torch.finfo(x.dtype).eps)

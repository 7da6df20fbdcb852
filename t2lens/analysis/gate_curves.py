"""What another gate at one sublayer does to a prediction, over the whole range of the gate: Deep Delta Learning's beta,
the weights with which Hyper-Connections write to their streams, Highway's transform gate.

All values are rows of one resumed pass, so that the curve costs about as many rows as it has points, and a slider
along it costs no pass at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.frozen import place
from t2lens.analysis.gates import WriteGate, check_gates, gate_span, gates_of
from t2lens.analysis.inputs import Batch, check_finite, read_batch
from t2lens.analysis.variants import Change, Variant, recorded, run_variants
from t2lens.edits.places import gates_at
from t2lens.hooks.names import nearest_names
from t2lens.readout import word

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["gate_curve"]


@torch.no_grad()
def gate_curve(
    model: Transformer,
    input: Any,
    attention_mask: Any = None,
    *,
    site: str,
    pos: int = -1,
    at: Literal["all", "position"] = "all",
    stream: str | None = None,
    low: float | None = None,
    high: float | None = None,
    steps: int = 20,
    top: int = 8,
) -> Finding:
    """Set the gate of one sublayer to every value of a grid, and measure what becomes of the prediction.

    Everything that follows the changed write is computed anew; inside `t2lens.edited`, "as it is" is the edited model.

    Args:
        input: one sequence: a text, or token ids [pos].
        attention_mask: [1, pos], 0 at padding.
        site: the sublayer, as "3.mlp".
        pos: the position whose prediction is compared, counted over the real tokens; negative from the end.
        at: where the gate is set: at "all" positions, or at `pos` alone ("position").
        stream: of Hyper-Connections: the stream whose weight is set; None: those of all streams.
        low, high: ends of the grid; by default those of the gate (0..2 of beta), or whole numbers around 0, 1 and all
            its values on this input.
        steps: how many steps the grid has, ends included; 0, 1 and 2 of beta lie on it when it is even.
        top: how many of the likeliest tokens of each point are kept.

    Returns:
        Finding: in `dataset`, over `value` (the grid): kl, KL(as it is || changed) at `pos` in nats; kl_mean, the same,
        mean over the prompt; loss, the change of the mean next-token loss in nats (NaN where no next token is known);
        probability(value, candidate) and plain_probability(candidate) of every token that is among the `top` likeliest
        as it is or at some value, at `pos`, with token_id(candidate); plain_gate(pos): the gate as it is, where several
        are set their mean. A row per value.

    Raises:
        ValueError: a system without gates on its writes that edits can set, several sequences, no such position, a low
            end that is not below the high one, an end too large for the model's numbers, steps or top below 1, logits
            that are not finite. KeyError: no such sublayer or stream.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import gate_curve
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.DeepDelta())
        >>> curve = gate_curve(t2lens.build(cfg, seed=0), [0, 7, 3], site="1.attn", steps=4)
        >>> curve["value"].values.tolist(), float(curve["kl"].idxmin())  # beta starts near 1
        ([0.0, 0.5, 1.0, 1.5, 2.0], 1.0)
    """
    gate = check_gates(model)
    if not gate.name:
        raise ValueError(f"No edit sets the {gate.label} of {model.cfg.residual.describe()}.")
    writes = {each.name: each for each in model.sites[:-1]}
    if site not in writes:
        near = " or ".join(map(repr, nearest_names(site, list(writes), 2))) or ", ".join(writes)
        raise KeyError(f"No sublayer {site!r} has a gate; did you mean {near}?")
    if stream is not None and stream not in gate.streams:
        raise KeyError(f"This model has no stream {stream!r}; it has {', '.join(gate.streams) or 'one alone'}.")
    if at not in ("all", "position"):
        raise ValueError(f'at must be "all" or "position", not {at!r}.')
    if not all(hasattr(n, "__index__") and n >= 1 for n in (steps, top)):
        raise ValueError(f"steps and top must be whole numbers of at least 1, not {steps!r} and {top!r}.")
    if not all(end is None or hasattr(end, "__float__") for end in (low, high)):
        raise ValueError(f"low and high must be numbers, not {low!r} and {high!r}.")
    batch = read_batch(model, input, attention_mask)
    column = place(batch, pos)
    chosen, hook = writes[site], gates_at(model, writes[site])[gate.name, ""].name
    assert hook is not None
    record, logits = recorded(model, batch)
    check_finite(logits, batch, "The logits")
    which = slice(None) if stream is None else slice(k := gate.streams.index(stream), k + 1)
    step = next(step for step in record.steps if step.site.name == site)
    plain = gates_of(model, gate, step.gates)["gate"][0, batch.valid[0]].double()  # [T], or [T, stream]
    plain = (plain[:, which].mean(dim=-1) if gate.streams else plain).cpu().numpy()
    span = gate_span(gate, plain)
    low, high = span[0] if low is None else low, span[1] if high is None else high
    if not (np.isfinite([low, high]).all() and low < high):
        raise ValueError(f"The grid must go from a lower to a higher number, not from {low:g} to {high:g}.")
    if max(abs(low), abs(high)) > (most := torch.finfo(logits.dtype).max):
        raise ValueError(f"A gate of this model is a {str(logits.dtype).removeprefix('torch.')} of at most {most:.4g}.")
    values = np.linspace(low, high, steps + 1)
    where = batch.valid[0].clone()
    if at == "position":
        where[:] = False
        where[column] = True
    variants = [Variant(layer=chosen.layer or 0, edits={hook: _set(value, where, which)}) for value in values.tolist()]
    found = _measured(model, batch, record, logits, variants, column)
    return _finding(model, batch, gate, values, found, plain, column, site, at, stream, top)


def _set(value: float, where: Tensor, which: slice) -> Change:
    """The numbers `which` of a gate [1, pos, n] at the positions `where` [pos]."""

    def change(gate: Tensor) -> Tensor:
        mask = torch.zeros_like(gate, dtype=torch.bool)
        mask[..., which] = where[None, :, None]
        return torch.where(mask, torch.full_like(gate, value), gate)

    return change


def _measured(
    model: Transformer, batch: Batch, record: Any, logits: Tensor, variants: list[Variant], column: int
) -> dict[str, np.ndarray]:
    """kl, kl_mean, loss [value] in nats, and probability [value + 1, vocab] at the position, as it is in the last
    row."""
    plain = logits.double().log_softmax(dim=-1)  # [1, T, V]
    p, base = plain[0].exp(), batch.losses(logits)
    own = (p * plain[0]).sum(dim=-1)  # [T]
    known = model.cfg.causal and bool(batch.predicts.any())
    n, device = len(variants), logits.device
    kl, kl_mean, loss = (torch.full((n,), torch.nan, dtype=torch.float64, device=device) for _ in range(3))
    probability = torch.empty(n + 1, plain.shape[-1], dtype=torch.float64, device=device)
    probability[n] = p[column]
    for which, changed in run_variants(model, record, variants):
        logprob = changed.double().log_softmax(dim=-1)
        each = (own - torch.einsum("rtv,tv->rt", logprob, p)).clamp(min=0)  # [R, T]
        kl[which] = each[:, column]
        kl_mean[which] = each[:, batch.valid[0]].mean(dim=-1)
        if known:
            right = logprob.gather(-1, batch.next_tokens.expand(len(which), -1).unsqueeze(-1)).squeeze(-1)
            shift = torch.where(batch.predicts, -right - base, 0.0)
            loss[which] = shift.sum(dim=-1) / batch.predicts.sum()
        probability[which] = logprob[:, column].exp()
    found = {"kl": kl, "kl_mean": kl_mean, "loss": loss, "probability": probability}
    return {name: x.cpu().numpy() for name, x in found.items()}


def _finding(
    model: Transformer,
    batch: Batch,
    gate: WriteGate,
    values: np.ndarray,
    found: dict[str, np.ndarray],
    plain: np.ndarray,
    column: int,
    site: str,
    at: str,
    stream: str | None,
    top: int,
) -> Finding:
    everything, n = found["probability"], int(batch.valid.sum())
    pos, token = batch.count(column), batch.strings[0][column]
    likeliest = np.argsort(-everything, axis=1, kind="stable")[:, :top]
    ids = np.array(list(dict.fromkeys(likeliest[[-1, *range(len(values))]].ravel().tolist())))
    where = "at all positions" if at == "all" else f"at position {pos} alone"
    what = f"{gate.label[:1].upper()}{gate.label[1:]} of {site}"
    what += f" to {stream}" if stream else " to every stream" if gate.streams else ""
    dataset = xr.Dataset(
        {
            "kl": ("value", found["kl"], _is("KL(as it is || changed) of the prediction at the position", "nats")),
            "kl_mean": ("value", found["kl_mean"], _is(f"the same, mean over {n} positions", "nats")),
            "loss": (
                "value",
                found["loss"],
                _is(f"change of the next-token loss, mean over {int(batch.predicts.sum())} positions", "nats"),
            ),
            "probability": (
                ("value", "candidate"),
                everything[:-1, ids],
                _is("probability of the next token at the position, changed", ""),
            ),
            "plain_probability": ("candidate", everything[-1, ids], _is("the same as it is", "")),
            "plain_gate": (
                "pos",
                plain,
                _is(f"{gate.label} as it is{', mean over streams' if gate.streams and stream is None else ''}", ""),
            ),
        },
        coords={
            "value": values,
            "pos": np.arange(n),
            "token": ("pos", _objects(s for s, v in zip(batch.strings[0], batch.valid[0].tolist(), strict=True) if v)),
            "token_id": ("candidate", ids),
            "candidate": _objects(word(model, int(i)) for i in ids),
        },
        attrs={
            "system": model.cfg.residual.describe(),
            "gate": gate.label,
            "site": site,
            "stream": stream or "",
            "at": at,
            "position": pos,
        },
    )
    best = likeliest[:, 0]
    rows = tuple(
        (
            float(value),
            float(found["kl"][i]),
            float(found["kl_mean"][i]),
            float(found["loss"][i]) if np.isfinite(found["loss"][i]) else None,
            word(model, int(best[i])),
            float(everything[i, best[i]]),
        )
        for i, value in enumerate(values)
    )
    notes = [
        f"{what} is set {where}; all that follows is computed anew. As it is, it has the mean "
        f"{float(plain.mean()):.3g} over {n} positions, and {float(plain[pos]):.3g} at "
        f"position {pos}, {token!r}.",
        f"As it is, the likeliest next token there is {word(model, int(best[-1]))!r}, with the probability "
        f"{float(everything[-1, best[-1]]):.3g}.",
    ]
    if not np.isfinite(found["loss"]).all():
        notes.append("Without a next token that is known there is no loss.")
    return Finding(
        title=f"{what} from {values[0]:g} to {values[-1]:g} {where}: {model.cfg.residual.describe()}",
        dataset=dataset,
        columns=(gate.label, "KL", "KL, mean", "loss", "likeliest", "probability"),
        rows=rows,
        notes=(*notes, *batch.notices),
        charts=(
            Chart(kind="lines", variable="kl", x="value", title="KL at the position"),
            Chart(kind="lines", variable="loss", x="value", signed=True, title="Change of the loss"),
        ),
    )


def _is(meaning: str, unit: str) -> dict[str, str]:
    return {"meaning": meaning, "unit": unit}


def _objects(words: Any) -> np.ndarray:
    return np.array(list(words), dtype=object)

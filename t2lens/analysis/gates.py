"""The gates on writes of any residual system that has some, token by token: what each write of each token is multiplied
by, and for the parallel streams of Hyper-Connections also how a sublayer reads and mixes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.ddl_audit import bundled_of
from t2lens.analysis.ddl_gates import columns, in_groups
from t2lens.analysis.finding import Chart, Finding, Value
from t2lens.analysis.inputs import Batch, read_batch
from t2lens.analysis.progress import progress
from t2lens.edits.places import gates_at
from t2lens.residual.hyper_connections import HyperConnected

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["WriteGate", "check_gates", "gate_span", "gates_of", "write_gate", "write_gates"]

_BYTES = 2**26  # of the atoms that one group of sequences records
_QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True, kw_only=True)
class WriteGate:
    """The gate on the writes of a model.

    name: by which edits set it ("beta", "transform", "post"); "": none does. label, meaning: in words. limits: between
    which it lies; None: anywhere. streams: the carried streams that each have their own number; (): there is one.
    """

    name: str
    label: str
    meaning: str
    limits: tuple[float, float] | None
    streams: tuple[str, ...] = ()


def write_gate(model: Transformer) -> WriteGate | None:
    """The gate on the writes of a model; None: what it writes is added as it is.

    >>> import t2lens
    >>> hc = t2lens.residual.HyperConnections.mhc(n_streams=2)
    >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=hc)
    >>> gate = write_gate(t2lens.build(cfg, seed=0))
    >>> gate.name, gate.limits, gate.streams
    ('post', (0.0, 2.0), ('stream0', 'stream1'))
    """
    residual, first = model.residual, model.sites[0]
    if isinstance(residual, HyperConnected):
        squashed = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "2sigmoid": (0.0, 2.0)}
        return WriteGate(
            name="post",
            label="write weight",
            meaning="0 keeps what a sublayer puts out away from a stream, 1 adds it as a plain residual does.",
            limits=squashed.get(residual.cfg.post),
            streams=tuple(source.name for source in residual.sources(first)),
        )
    if residual.gate_label is None:
        return None
    if residual.gate_name is not None and (residual.gate_name, "") not in gates_at(model, first):
        return None  # the system can have one, and this model does not
    return WriteGate(
        name=residual.gate_name or "",
        label=residual.gate_label,
        meaning=(residual.gate_meaning or "").removeprefix(f"{_upper(residual.gate_label)}: "),
        limits=residual.gate_range,
    )


def check_gates(model: Transformer) -> WriteGate:
    """The gate on the writes of a model. ValueError where there is none."""
    found = write_gate(model)
    if found is None:
        raise ValueError(
            f"{_upper(model.cfg.residual.describe())} has no gates on its writes, which are added as they are; Deep "
            "Delta Learning, Hyper-Connections and Highway have: bundled are "
            f"{', '.join(bundled_of('ddl', 'hyper-connections'))}."
        )
    return found


def gate_span(gate: WriteGate, values: Any) -> tuple[float, float]:
    """Between which values of a gate one may look: its limits, or whole numbers around 0, 1 and all values seen."""
    if gate.limits is not None:
        return gate.limits
    seen = np.asarray(values)
    return float(math.floor(min(0.0, float(seen.min())))), float(math.ceil(max(1.0, float(seen.max()))))


@torch.no_grad()
def write_gates(model: Transformer, input: Any = None, attention_mask: Any = None) -> Finding:
    """Every gate on every write of every token, whatever the system.

    Args:
        input: a text, a list of texts or token ids [pos] or [batch, pos]; by default the 32 bundled passages.
        attention_mask: [batch, pos], 0 at padding.

    Returns:
        Finding: in `dataset` gate(site, pos), or gate(site, stream, pos) where every carried stream has its own; then
        also read(site, stream, pos), with which a sublayer reads the streams, and mix(site, to, from, pos), by which
        they are multiplied as it writes (X' = mix X + gate f). One sequence's tokens lie along `pos`, those of several
        along `place`, one after the other, with `sequence` and `position`. A row per sublayer (and stream): mean,
        spread and quantiles.

    Raises:
        ValueError: a system without gates on its writes, or bad input (see `read_batch`).

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import write_gates
        >>> hc = t2lens.residual.HyperConnections(n_streams=2)
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=hc)
        >>> found = write_gates(t2lens.build(cfg, seed=0), [0, 7, 3])
        >>> found["gate"].dims, float(found["gate"].mean())  # at initialisation every stream gets every write
        (('site', 'stream', 'pos'), 1.0)
    """
    gate = check_gates(model)
    if input is None:
        from t2lens.zoo.text import sample_texts

        input = sample_texts()
    batch = read_batch(model, input, attention_mask)
    dataset = _dataset(model, gate, batch, _values(model, gate, batch))
    names, rows = _table(dataset, gate)
    n = int(batch.valid.sum())
    notes = [
        f"{n} tokens of {len(batch.tokens)} sequence(s), padding left out; each sublayer writes once at each of them.",
        f"{_upper(gate.label)}: {gate.meaning}" if gate.meaning else "",
    ]
    axis = str(dataset["gate"].dims[-1])
    charts = (
        Chart(kind="heat", variable="gate_mean", x="stream", y="site", title="What a write is multiplied by, mean")
        if gate.streams
        else Chart(kind="heat", variable="gate", x=axis, y="site", title=f"{_upper(gate.label)} of every write"),
    )
    return Finding(
        title=f"Gates on writes: {model.cfg.residual.describe()}",
        dataset=dataset,
        columns=names,
        rows=rows,
        notes=(*filter(None, notes), *batch.notices),
        charts=charts,
    )


def _values(model: Transformer, gate: WriteGate, batch: Batch) -> dict[str, np.ndarray]:
    """name -> [site, ..., token], sequence after sequence."""
    counts = batch.valid.sum(dim=1)
    start = (counts.cumsum(0) - counts).tolist()
    out: dict[str, np.ndarray] = {}
    groups = in_groups(batch, max(1, _BYTES // (8 * len(model.sites) * model.cfg.d_model)))
    for rows in progress(groups, "Reading the gates", len(groups)):
        here = columns(batch, rows)
        valid = batch.valid[rows, here]
        record = model.record(batch.tokens[rows, here], None if bool(valid.all()) else valid)
        steps = [step for step in record.steps if step.out is not None]
        for i, step in enumerate(steps):
            for name, values in gates_of(model, gate, step.gates).items():  # [b, T, ...]
                if name not in out:
                    out[name] = np.empty((len(steps), *values.shape[2:], int(counts.sum())))
                for r, row in enumerate(rows.tolist()):
                    mine = values[r][valid[r]].double().cpu().numpy()
                    out[name][i, ..., start[row] : start[row] + len(mine)] = np.moveaxis(mine, 0, -1)
    return out


def gates_of(model: Transformer, gate: WriteGate, gates: dict[str, Tensor]) -> dict[str, Tensor]:
    """name -> numbers [B, T, ...] of one write: gate, and with streams also read and mix."""
    if gate.streams:
        return {"gate": gates["post"], "read": gates["weights"], "mix": gates["res"]}
    found = model.residual.gate(gates)
    if found is None:
        raise ValueError(f"{_upper(model.cfg.residual.describe())} has no gate at one of its writes.")
    return {"gate": found}


def _dataset(model: Transformer, gate: WriteGate, batch: Batch, values: dict[str, np.ndarray]) -> xr.Dataset:
    axis = "pos" if len(batch.tokens) == 1 else "place"
    counts = batch.valid.sum(dim=1).tolist()
    valid = batch.valid.tolist()
    real = [s for row, v in zip(batch.strings, valid, strict=True) for s, ok in zip(row, v, strict=True) if ok]
    position = np.concatenate([np.arange(n) for n in counts])
    coords: dict[str, Any] = {
        "site": [site.name for site in model.sites[:-1]],
        "token": (axis, np.array(real, dtype=object)),
    }
    if axis == "pos":
        coords["pos"] = position
    else:
        coords |= {"sequence": (axis, np.repeat(np.arange(len(counts)), counts)), "position": (axis, position)}
    if gate.streams:
        coords |= {name: list(gate.streams) for name in ("stream", "to", "from")}
    dims = {"gate": ("stream",), "read": ("stream",), "mix": ("to", "from")} if gate.streams else {"gate": ()}
    meaning = {
        "gate": f"{gate.label} of every write{', per stream' if gate.streams else ''}",
        "read": "weight of a stream in what the sublayer reads",
        "mix": "what multiplies the streams as the sublayer writes, to and from",
    }
    variables: dict[str, Any] = {
        name: (("site", *dims[name], axis), array, {"meaning": meaning[name], "unit": "weight"})
        for name, array in values.items()
    }
    if gate.streams:
        mean = values["gate"].mean(axis=-1)
        variables["gate_mean"] = (("site", "stream"), mean, {"meaning": f"{gate.label}, mean", "unit": "weight"})
    attrs: dict[str, Any] = {"system": model.cfg.residual.describe(), "gate": gate.label, "meaning": gate.meaning}
    return xr.Dataset(variables, coords=coords, attrs=attrs)


def _table(data: xr.Dataset, gate: WriteGate) -> tuple[tuple[str, ...], tuple[tuple[Value, ...], ...]]:
    """A row per sublayer, and stream."""
    rows: list[tuple[Value, ...]] = []
    values = data["gate"].values
    for i, site in enumerate(data["site"].values.tolist()):
        for j, name in enumerate(gate.streams or ("",)):
            mine = values[i, j] if gate.streams else values[i]
            numbers = (mine.mean(), mine.std(), *np.quantile(mine, _QUANTILES))
            rows.append((site, *([name] if gate.streams else []), *map(float, numbers)))
    return ("site", *(["stream"] if gate.streams else []), "mean", "std", "5%", "median", "95%"), tuple(rows)


def _upper(words: str) -> str:
    return words[:1].upper() + words[1:]

"""The gates of Deep Delta Learning token by token: which regime each write of each token is in, and its spectrum."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from t2lens.analysis.ddl_audit import Measured, check_system, failed_preconditions, measured
from t2lens.analysis.ddl_gates import Gates, states, written
from t2lens.analysis.ddl_transport import transport
from t2lens.analysis.finding import Chart, Finding, Value
from t2lens.analysis.frozen import place
from t2lens.analysis.inputs import read_batch
from t2lens.analysis.regimes import REGIMES, SIZES, regime_of

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["gate_spectrum", "gate_tokens"]

_PER_TOKEN = {
    "beta": ("gate beta", "0..2"),
    "erased": ("erased energy |beta k k^T X|^2", "state squared"),
    "written": ("written energy |beta v|^2", "state squared"),
    "alignment": ("|k^T X| / |X|, how much of the state lies along k", "of the state"),
    "change": ("net change |X' - X| / |X|", "of the state"),
    "error_before": ("|k^T X - v|, the error along k before the write (length over channels)", "state"),
    "error_after": ("|k^T X' - v|, the same after the write", "state"),
    "norm": ("|F|, length of what the sublayer put out", "stream"),
}
_EXAMPLES = 5


def gate_tokens(model: Transformer, input: Any = None, attention_mask: Any = None) -> Finding:
    """Every write of every token: beta and its regime, what is erased and written, how much of the state lies along k.

    The numbers and the bounds of the regimes are those of `audit_ddl`, before they are averaged; where one of its
    preconditions fails, no regime is named. Write-only models have sizes of beta in place of regimes.

    Args:
        input: a text, a list of texts or token ids [pos] or [batch, pos]; by default the 32 bundled passages.
        attention_mask: [batch, pos], 0 at padding.

    Returns:
        Finding: in `dataset` beta, erased, written, alignment, change, error_before, error_after, norm (site, pos), and
        regime_index (site, pos) into the coordinate `regime`, -1 where none is named; one sequence's tokens lie along
        `pos`, those of several along `place`, one after the other, with `sequence` and `position`. A row per sublayer
        and regime: how many tokens, means, the commonest ones.

    Raises:
        ValueError: not a Deep Delta Learning model, or bad input (see `read_batch`).

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import gate_tokens
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.DeepDelta())
        >>> finding = gate_tokens(t2lens.build(cfg, seed=0), [0, 7, 3, 7])
        >>> finding["beta"].dims, finding["beta"].shape  # beta starts near 1
        (('site', 'pos'), (4, 4))
        >>> finding["regime"].values[finding["regime_index"].sel(site="0.attn")].tolist()
        ['overwrite', 'overwrite', 'overwrite', 'overwrite']
    """
    check_system(model)
    if input is None:
        from t2lens.zoo.text import sample_texts

        input = sample_texts()
    batch = read_batch(model, input, attention_mask)
    seen = measured(model, batch, False, 0)
    dataset = _dataset(seen)
    columns, rows = _table(dataset)
    erases, n = seen.gates.erases, int(batch.valid.sum())
    notes = [
        f"{n} tokens of {len(batch.tokens)} sequence(s), padding left out; each sublayer writes once at each of them. "
        + ("Bounds: skip < 0.1, partial < 0.9, overwrite to 1.1, over-relax to 1.5, reflect above." if erases else "")
    ]
    if not erases:
        notes.append("A write-only model erases nothing: its beta is the size of a write, and has sizes, no regimes.")
    notes += [
        f"No regime is named, as {check.name} does not hold: {check.meaning} is {check.value:.3g}."
        for check in failed_preconditions(seen.checks)
    ]
    axis = str(dataset["beta"].dims[1])
    return Finding(
        title=f"Gates by token: {model.cfg.residual.describe()}",
        dataset=dataset,
        columns=columns,
        rows=rows,
        notes=(*notes, *batch.notices),
        charts=(Chart(kind="heat", variable="beta", x=axis, y="site", title="Beta of every write"),),
    )


def _dataset(seen: Measured) -> xr.Dataset:
    batch, gates = seen.batch, seen.gates
    order = seen.order.cpu().numpy()
    by_place = np.lexsort((order[:, 1], order[:, 0]))
    order = order[by_place]
    axis = "pos" if len(batch.tokens) == 1 else "place"
    over = ("site", axis)
    numbers = {name: gates.tokens(name).cpu().numpy()[:, by_place] for name in _PER_TOKEN}
    regime = regime_of(numbers["beta"])
    if failed_preconditions(seen.checks):
        regime = np.full_like(regime, -1)
    real = [
        [s for s, is_real in zip(row, v, strict=True) if is_real]
        for row, v in zip(batch.strings, batch.valid.tolist(), strict=True)
    ]
    strings = np.array([real[row][column] for row, column in order.tolist()], dtype=object)
    coords: dict[str, Any] = {
        "site": [site.name for site in seen.model.sites[:-1]],
        "regime": list(REGIMES if gates.erases else SIZES),
        "token": (axis, strings),
    }
    if axis == "pos":
        coords["pos"] = order[:, 1]
    else:
        coords |= {"sequence": (axis, order[:, 0]), "position": (axis, order[:, 1])}
    variables: dict[str, Any] = {
        name: (over, numbers[name], {"meaning": meaning, "unit": unit}) for name, (meaning, unit) in _PER_TOKEN.items()
    }
    variables["regime_index"] = (over, regime, {"meaning": "which regime; -1: none is named", "unit": "index"})
    return xr.Dataset(
        variables,
        coords=coords,
        attrs={"system": seen.model.cfg.residual.describe(), "erases": int(gates.erases)},
    )


def _table(data: xr.Dataset) -> tuple[tuple[str, ...], tuple[tuple[Value, ...], ...]]:
    """A row per sublayer and regime."""
    means = ["beta", "erased", "written", "alignment", "change"]
    if not data.attrs["erases"]:
        means.remove("erased")
    rows = []
    tokens, index = data["token"].values, data["regime_index"].values
    for i, site in enumerate(data["site"].values.tolist()):
        for j, regime in enumerate(data["regime"].values.tolist()):
            mine = index[i] == j
            n = int(mine.sum())
            numbers = [float(data[name].values[i][mine].mean()) if n else None for name in means]
            common = [token for token, _ in Counter(tokens[mine].tolist()).most_common(_EXAMPLES)]
            rows.append((site, regime, n, 100 * n / len(tokens), *numbers, " | ".join(common)))
    return ("site", "regime", "tokens", "%", *means, "commonest"), tuple(rows)


@torch.no_grad()
def gate_spectrum(model: Transformer, input: Any, attention_mask: Any = None, *, pos: int = -1) -> Finding:
    """The eigenvalue of every step I - beta k k^T at one token, and the singular values of their product.

    A step has the eigenvalue 1 - beta |k|^2 along k, and 1 in the D - 1 directions across it. The product of all steps
    after a write, T, carries what the state held then to the readout, gates frozen at this pass; its singular values
    say by how much it shrinks or grows what it carries, and how many directions it leaves alone (they are 1).

    Args:
        input: one sequence: a text, or token ids [pos].
        attention_mask: [1, pos], 0 at padding.
        pos: which token, counted over the real ones; negative from the end.

    Returns:
        Finding: in `dataset` eigenvalue(site), beta(site); transport(atom, direction): the singular values in the span
        of the directions, falling, from the state as that atom left it to the readout, the others 1; survival(atom):
        what is left of the embedding, or of a write along its k; rank(atom): effective rank.

    Raises:
        ValueError: not a Deep Delta Learning model, several sequences, no such position, numbers that are not finite.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import gate_spectrum
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.DeepDelta())
        >>> found = gate_spectrum(t2lens.build(cfg, seed=0), [0, 7, 3])  # beta starts near 1: projections
        >>> bool(abs(found["eigenvalue"]).max() < 0.3), found["transport"].sel(atom="1.mlp").values.tolist()
        (True, [1.0, 1.0, 1.0, 1.0])
    """
    check_system(model)
    batch = read_batch(model, input, attention_mask)
    column = place(batch, pos)
    at = batch.count(column)
    seen = written(model, batch, torch.tensor([0], device=batch.tokens.device))
    alone = torch.zeros_like(seen.valid)
    alone[0, seen.valid[0].nonzero()[at]] = True
    seen = replace(seen, valid=alone)  # measured at that token alone
    cfg: Any = model.cfg.residual
    gates = Gates(k_eps=cfg.k_eps, erases=cfg.edit == "delta")
    k, beta = gates.add(model.residual, seen)
    if gates.n_broken:
        raise ValueError(f"{gates.n_broken} gates, states and logits are NaN or infinite, so there is no spectrum.")
    start = next(before for _, before, _ in states(model.residual, seen.record))[alone].double()
    acting = beta if gates.erases else torch.zeros_like(beta)  # or the operator is the identity
    carried = transport(k, acting, start)
    width = model.cfg.d_model
    sites = [site.name for site in model.sites[:-1]]
    values = carried.values[:, 0].cpu().numpy()
    dataset = xr.Dataset(
        {
            "beta": ("site", beta[0].cpu().numpy(), _is("gate beta", "0..2")),
            "eigenvalue": (
                "site",
                (1 - acting * k.square().sum(dim=-1))[0].cpu().numpy(),
                _is("eigenvalue of the step along k, 1 - beta |k|^2; it is 1 across k"),
            ),
            "transport": (
                ("atom", "direction"),
                values,
                _is(f"singular values of all later steps, falling; the {width - values.shape[1]} others are 1"),
            ),
            "survival": (
                "atom",
                carried.survival[:, 0].cpu().numpy(),
                _is("|T x| / |x|: what they leave of the embedding, or of a write along its k"),
            ),
            "rank": ("atom", carried.rank[:, 0].cpu().numpy(), _is(f"effective rank of their product, of {width}")),
        },
        coords={"site": sites, "atom": list(model.atoms), "direction": np.arange(1, values.shape[1] + 1)},
        attrs={"system": model.cfg.residual.describe(), "erases": int(gates.erases), "pos": at},
    )
    token = batch.strings[0][column]
    betas_, eigen = dataset["beta"].values, dataset["eigenvalue"].values
    survival, rank = dataset["survival"].values, dataset["rank"].values
    rows: list[tuple[Value, ...]] = [
        ("embed", None, None, float(survival[0]), float(values[0, -1]), float(values[0, 0]), float(rank[0]))
    ]
    for i, site in enumerate(sites):
        after = (survival[i + 1], values[i + 1, -1], values[i + 1, 0], rank[i + 1])
        rows.append((site, float(betas_[i]), float(eigen[i]), *(float(x) if np.isfinite(x) else None for x in after)))
    notes = [
        "Gates and directions are those of this pass, frozen: the product of steps is arithmetic on this input, no "
        "causal claim.",
        "Source: Deep Delta Learning, arXiv 2601.00417, section 3.",
    ]
    if not gates.erases:
        notes.insert(0, "A write-only model erases nothing: each step is the identity, and every value is 1.")
    if model.residual.expanded:
        notes.append("The state has channels: the operator acts on each alike.")
    return Finding(
        title=f"Steps at position {at}, {token!r}: {model.cfg.residual.describe()}",
        dataset=dataset,
        columns=("atom", "beta", "eigenvalue", "survival", "smallest", "largest", "rank"),
        rows=tuple(rows),
        notes=(*notes, *batch.notices),
        charts=(
            Chart(kind="bars", variable="eigenvalue", x="site", title="Eigenvalue of every step along its k"),
            Chart(kind="heat", variable="transport", x="direction", y="atom", title="Singular values of later steps"),
        ),
    )


def _is(meaning: str, unit: str = "") -> dict[str, str]:
    return {"meaning": meaning, "unit": unit}

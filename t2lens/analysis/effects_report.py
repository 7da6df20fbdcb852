"""What `measure_effects` found, as a Finding: arrays, ranks, correlations, the table, the words that go with them."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.inputs import Batch
from t2lens.analysis.statistics import pearson, ranks, spearman
from t2lens.analysis.sweep import Over, caveats, routes_of
from t2lens.residual import Read

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["LEAST", "MEASURES", "Values", "finding_of"]

Values = dict[str, dict[Read, np.ndarray]]  # variable -> read -> [route], or [] of the read as a whole

LEAST = 1e-6  # nats (logits): effects below it count as none, so that rounding is not ranked
DAMAGE = 0.01  # nats; a share of less than that means nothing
_DIGITS = 6  # decimals of masses that are told apart
_SAME = 1e-3  # of the largest effect
_PREDICTORS = ("mass", "share", "gradient")
MEASURES = ("loss", "kl", "logit")

_MEANING = {
    "weight": ("mean {weight}", "weight"),
    "mass": ("mean size of the {weight}", "weight"),
    "norm_mass": ("mean length of the vector that the route adds to the read", "stream"),
    "share": ("mean share of that length in the lengths of all routes of the read", "share"),
    "gradient": ("first-order estimate of the change of the loss without the route", "nats"),
    "loss": ("change of the mean next-token loss without the route", "nats"),
    "kl": ("mean KL divergence of the plain prediction from the one without the route", "nats"),
    "logit": ("mean change of the logit of the target without the route", "logit"),
    "loss_renormalised": ("change of the loss without the route, the others filling its weight", "nats"),
    "kl_renormalised": ("the same of the KL divergence", "nats"),
    "logit_renormalised": ("the same of the logit of the target", "logit"),
    "rescue": ("part of the loss that the read adds which the route alone brings back", "share"),
    "rescue_kl": ("the same of the KL divergence: 1 - KL(plain || only this route) / KL(plain || none)", "share"),
    "disagreement": (
        "rank by mass less rank by effect, over their number less 1: positive: does more than it weighs",
        "",
    ),
}
_OF_READ = {
    "damage": ("change of the loss without all routes of the read", "nats"),
    "damage_kl": ("mean KL divergence of the plain prediction from the one without all routes of the read", "nats"),
}


def finding_of(
    model: Transformer,
    batch: Batch,
    routes: dict[Read, tuple[str, ...]],
    over: Over,
    values: Values,
    floors: dict[str, float],
    token: str | int | None,
    why: str,
) -> Finding:
    columns = list(dict.fromkeys(name for names in routes.values() for name in names))
    several = [read for read in routes if len(routes[read]) > 1]
    fast = "kl" not in values
    effect = "gradient" if fast else "kl"
    flat = {name: _joined(values[name], several) for name in values if name not in _OF_READ}
    told = _told_apart(flat, floors)
    by_mass, by_effect = (_ranked(np.abs(told[name])) for name in ("mass", effect))
    apart = (by_mass - by_effect) / max(len(by_mass) - 1, 1)
    ends = np.cumsum([0, *(len(routes[read]) for read in several)])
    values = values | {"disagreement": {r: apart[a:b] for r, a, b in zip(several, ends, ends[1:], strict=False)}}
    kind = _carries(over)
    variables: dict[str, Any] = {}
    for name, (meaning, unit) in _MEANING.items():
        if name in values:
            grid = _grid(values[name], routes, columns)
            variables[name] = (("read", over), grid, {"meaning": meaning.format(weight=kind), "unit": unit})
    for name, (meaning, unit) in _OF_READ.items():
        if name in values:
            array = np.array([float(values[name][read]) for read in routes])
            variables[name] = ("read", array, {"meaning": meaning, "unit": unit})
    if over == "source":
        held = np.full((len(routes), len(columns)), "", dtype=object)
        for i, read in enumerate(routes):
            for source in model.residual.sources(read.site):
                if source.name in columns:
                    held[i, columns.index(source.name)] = " ".join(source.atoms)
        meaning = "the atoms that a source holds at a read; empty: no such source"
        variables["holds"] = (("read", over), held, {"meaning": meaning})
    related = {}
    for p, m in product(_PREDICTORS, () if fast else MEASURES):  # KL has no sign, so that of the gradient is left out
        related[p, m] = spearman(np.abs(told[p]) if m == "kl" else told[p], told[m])
    attrs: dict[str, Any] = {"over": over, "fast": fast, "n_routes": len(apart)}
    attrs |= {f"floor_{name}": floor for name, floor in floors.items()} if not fast else {"floor_gradient": LEAST}
    if not fast:
        grid = np.array([[related[p, m] for m in MEASURES] for p in _PREDICTORS])
        meaning = "Spearman's rank correlation over the routes of reads that have more than one (with KL: of the sizes)"
        variables["spearman"] = (("predictor", "measure"), grid, {"meaning": meaning, "unit": ""})
        line = pearson(flat["gradient"], flat["loss"])
        meaning = "Pearson's correlation of the gradient's estimate with the change of the loss"
        variables["pearson"] = ((), line, {"meaning": meaning, "unit": ""})
        attrs |= {f"spearman_{p}_{m}": value for (p, m), value in related.items()} | {"pearson_gradient_loss": line}
    coords: dict[str, Any] = {
        "read": np.array([read.name for read in routes], dtype=object),
        over: np.array(columns, dtype=object),
    }
    if not fast:
        coords |= {"predictor": np.array(_PREDICTORS, dtype=object), "measure": np.array(MEASURES, dtype=object)}
    dataset = xr.Dataset(variables, coords=coords, attrs=attrs)
    shown = [n for n in ("mass", "share", "gradient", "loss", "loss_renormalised", "kl", "rescue") if n in values]
    shown = [n for n in shown if np.isfinite(flat[n]).any() or not len(flat[n])]
    places = [(read, i) for read in several for i in range(len(routes[read]))]
    order = sorted(range(len(places)), key=lambda at: -abs(apart[at]))
    rows = tuple(
        (
            places[at][0].name,
            routes[places[at][0]][places[at][1]],
            *(_plain(flat[name][at]) for name in shown),
            float(by_mass[at]),
            float(by_effect[at]),
        )
        for at in order
    )
    name = getattr(model, "name", None) or model.cfg.residual.describe()
    return Finding(
        title=f"Mass and effect of every {over} in every read of {name}",
        dataset=dataset,
        columns=("read", over, *(n.replace("_", " ") for n in shown), "mass rank", "effect rank"),
        rows=rows,
        notes=tuple(_notes(model, batch, routes, over, dataset, token, why)),
        charts=_charts(over, fast),
    )


def _joined(of_reads: dict[Read, np.ndarray], reads: list[Read]) -> np.ndarray:
    return np.concatenate([of_reads[read] for read in reads]) if reads else np.zeros(0)


def _told_apart(flat: dict[str, np.ndarray], floors: dict[str, float]) -> dict[str, np.ndarray]:
    """What is ranked: without differences that are rounding."""
    floors = {**floors, "gradient": LEAST}
    told = {
        name: np.where(np.abs(flat[name]) < floor, 0.0, flat[name]) for name, floor in floors.items() if name in flat
    }
    return told | {name: np.round(flat[name], _DIGITS) for name in ("mass", "share")}


def _ranked(x: np.ndarray) -> np.ndarray:
    """1 is the largest; ties share the mean of their ranks."""
    return ranks(-x)


def _grid(of_reads: dict[Read, np.ndarray], routes: dict[Read, tuple[str, ...]], columns: list[str]) -> np.ndarray:
    grid = np.full((len(routes), len(columns)), np.nan)
    for i, (read, names) in enumerate(routes.items()):
        if read in of_reads:
            grid[i, [columns.index(name) for name in names]] = of_reads[read]
    return grid


def _plain(x: Any) -> float | None:
    return float(x) if np.isfinite(x) else None


def _carries(over: Over) -> str:
    return "depth weight" if over == "source" else "coefficient of the atom"


def _charts(over: Over, fast: bool) -> tuple[Chart, ...]:
    heat = Chart(
        kind="heat",
        variable="gradient",
        x=over,
        y="read",
        signed=True,
        title="What the loss would change by without each route, estimated by the gradient",
        label="change of the loss (nats)",
    )
    if fast:
        return (
            heat,
            Chart(
                kind="scatter",
                variable="gradient",
                x="mass",
                title="Estimated change of the loss without a route, against the mass it carries",
                label="estimated change of the loss (nats)",
                xlabel=f"mean size of the {_carries(over)}",
            ),
        )
    return (
        Chart(
            kind="scatter",
            variable="kl",
            x="mass",
            title="What the prediction loses without a route, against the mass it carries",
            label="KL without the route (nats)",
            xlabel=f"mean size of the {_carries(over)}",
        ),
        Chart(
            kind="heat",
            variable="loss",
            x=over,
            y="read",
            signed=True,
            title="How the loss changes without each route",
            label="change of the loss (nats)",
        ),
        Chart(
            kind="scatter",
            variable="loss",
            x="gradient",
            title="Change of the loss without a route: measured, against the estimate of the gradient",
            label="measured (nats)",
            xlabel="estimated (nats)",
        ),
        Chart(
            kind="heat",
            variable="mass",
            x=over,
            y="read",
            title=f"How much each route carries: mean size of the {_carries(over)}",
            label="mass (weight)",
        ),
    )


def _notes(
    model: Transformer,
    batch: Batch,
    routes: dict[Read, tuple[str, ...]],
    over: Over,
    data: xr.Dataset,
    token: str | int | None,
    why: str,
) -> list[str]:
    n, tokens, fast = len(batch.tokens), int(batch.predicts.sum()), bool(data.attrs["fast"])
    notes = [
        f"Effects are means over {tokens} positions with a next token, of {n} sequence(s); masses over "
        f"{int(batch.valid.sum())} positions; padding is excluded."
    ]
    notes.append(
        "Loss, gradient and KL in nats per token; rows in order of how far mass rank and effect rank are apart."
    )
    if not fast:
        notes += _correlations(data, over)
        notes.append(
            f"Effects below {data.attrs['floor_kl']:.1g} nats of KL ({data.attrs['floor_loss']:.1g} of loss) are ties: "
            "no more than rounding, as measured by a pass that is taken up again and cuts nothing."
        )
    else:
        notes.append("The gradient is a first-order estimate; without fast the ablations that it estimates are run.")
    lone = [read.name for read in routes if len(routes[read]) == 1]
    if lone:
        notes.append(
            f"Ranks and correlations are over the {data.attrs['n_routes']} routes of reads that have more than one; "
            f"left out: {', '.join(lone)}."
        )
    if not fast:
        followed = "the true next token" if token is None else repr(token)
        what = "its weight set to zero" if over == "source" else "its contribution subtracted from the read"
        notes += [
            f"Without a route: {what} at every position; all before the read stays, all after it runs anew. The target "
            f"of logit is {followed}.",
            "Rescue: all routes of the read out, one put back with the weight it had; 1 is the plain loss again. Empty "
            f"where the damage of all is below {DAMAGE:g} nats.",
        ]
        notes += _renormalising(data, why)
    notes += caveats(model) if over == "source" else []
    notes += _left_out(model, over)
    if over == "atom" and model.residual.linear_form("additive").coefficients() != "scalar":
        notes.append("Coefficients are vectors or operators here: mass is their energy-weighted mean <c, a> / <a, a>.")
    return [*notes, *batch.notices]


def _correlations(data: xr.Dataset, over: Over) -> list[str]:
    at, n = data.attrs, data.attrs["n_routes"]
    if np.isfinite(at["spearman_mass_kl"]):
        mass = "mass" if over == "source" else "mass (size of coefficients)"
        says = f"of {mass} with KL {at['spearman_mass_kl']:.2f}, with the loss {at['spearman_mass_loss']:.2f}; "
    else:
        says = "mass is the same in every route and says nothing; "
    return [
        f"Does mass say what a route does? Spearman's rank correlation: {says}of the share of the read's size with KL "
        f"{at['spearman_share_kl']:.2f}, with the loss {at['spearman_share_loss']:.2f} ({n} routes).",
        "The fast path: the gradient's estimate against the change of the loss, Pearson "
        f"{at['pearson_gradient_loss']:.2f}, Spearman {at['spearman_gradient_loss']:.2f} ({n} routes).",
    ]


def _renormalising(data: xr.Dataset, why: str) -> list[str]:
    if why:
        return [why]
    plain, filled = data["kl"].values, data["kl_renormalised"].values
    both = np.isfinite(filled)
    if both.any() and np.abs(plain - filled)[both].max() <= _SAME * np.abs(plain[both]).max():
        return [
            "Renormalising makes no difference here: a norm follows the read, which takes its scale out again, and the "
            "read is nothing but the mixture."
        ]
    return ["Renormalised: what is left of a row of weights is scaled to the sum that the row had."]


def _left_out(model: Transformer, over: Over) -> list[str]:
    everywhere = routes_of(model, over)
    gone = [read.name for read in model.reads if read not in everywhere]
    if not gone:
        return []
    why = (
        "it takes one stream as it is, or shares its weights with another read"
        if over == "source"
        else ("no hook point stands at it alone")
    )
    return [f"Not among the reads, because {why}: {', '.join(gone)}."]

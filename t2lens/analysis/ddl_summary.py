"""The Finding of a DDL audit, from what was measured: its dataset, its table and what it states in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.ddl_audit import Measured, failed_preconditions
from t2lens.analysis.ddl_counterfactuals import ALL
from t2lens.analysis.ddl_gates import IDLE
from t2lens.analysis.ddl_statements import statements
from t2lens.analysis.finding import Chart, Finding, Value
from t2lens.analysis.regimes import EDGES, REGIMES, SIZES, regime_of

__all__ = ["summarise"]

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
BINS = 40
SATURATED, CONSTANT, N_ANGLES = 6.0, 0.01, 4

Variable = tuple[tuple[str, ...], Any, dict[str, str]]


def summarise(seen: Measured, name: str | None) -> Finding:
    model, refused = seen.model, failed_preconditions(seen.checks)
    sites = [site.name for site in model.sites[:-1]]
    data = _Data(seen, bool(refused))
    variables = {**data.gates(), **data.directions(), **data.transport(), **data.effects(), **data.totals()}
    variables |= {
        "check_value": (("check",), [c.value for c in seen.checks], {"meaning": "what was found", "unit": ""}),
        "check_limit": (("check",), [c.limit for c in seen.checks], {"meaning": "largest that passes", "unit": ""}),
        "check_meaning": (("check",), [c.meaning for c in seen.checks], {"meaning": "what is checked", "unit": ""}),
        "check_passed": (("check",), [c.passed for c in seen.checks], {"meaning": "the verdict", "unit": ""}),
    }
    erases = seen.gates.erases
    edges = np.linspace(0, 2, BINS + 1)
    dataset = xr.Dataset(
        variables,
        coords={
            "site": sites,
            "other": sites,
            "atom": list(model.atoms),
            "place": [*sites, ALL],
            "regime": list(REGIMES if erases else SIZES),
            "quantile": list(QUANTILES),
            "bin": (edges[:-1] + edges[1:]) / 2,
            "angle": np.arange(1, min(N_ANGLES, model.cfg.d_model) + 1),
            "check": [check.name for check in seen.checks],
        },
        attrs={"model": name or "", "system": model.cfg.residual.describe(), "erases": int(erases)},
    )
    said = statements(dataset, refused, erases, model.cfg.d_model)
    dataset["statement"] = xr.DataArray(list(said), dims=("number",), attrs={"meaning": "what was found", "unit": ""})
    title = f"DDL audit of {name}: {dataset.attrs['system']}" if name else f"DDL audit: {dataset.attrs['system']}"
    columns, rows = _table(dataset, erases)
    return Finding(
        title=title,
        dataset=dataset,
        columns=columns,
        rows=rows,
        notes=(*said, *_notes(seen)),
        charts=_charts(erases, seen.effects is not None),
        passed=seen.checks.passed,
    )


class _Data:
    """The variables of the dataset, each with what it means."""

    def __init__(self, seen: Measured, refused: bool) -> None:
        self.seen, self.refused, self.broken = seen, refused, seen.gates.n_broken > 0
        self.n_writes, self.width = len(seen.model.sites) - 1, seen.model.cfg.d_model

    def _per_site(self, name: str, of: Callable[[Tensor], Any], *shape: int) -> np.ndarray:
        """of(values [S, N]) as an array, NaN throughout where numbers were broken."""
        if self.broken:
            return np.full((self.n_writes, *shape), np.nan)
        return np.asarray(of(self.seen.gates.tokens(name)), dtype=float)

    def gates(self) -> dict[str, Variable]:
        erases, nan = self.seen.gates.erases, np.nan
        shares = self._per_site("beta", _shares, len(REGIMES))
        counts = self._per_site("beta", _histogram, BINS)
        eigen = 1 - self._per_site("beta", _quantiles, len(QUANTILES))[:, ::-1]
        negative = self._per_site("beta", lambda b: (b > 1).double().mean(dim=1))
        if not erases:
            eigen, negative = np.ones_like(eigen), np.zeros_like(negative)
        if self.refused:
            shares, eigen, negative = (np.full_like(each, nan) for each in (shares, eigen, negative))
        site = ("site",)
        found: dict[str, Variable] = {
            "beta": (site, self._per_site("beta", _mean), _is("mean gate beta over tokens", "0..2")),
            "beta_std": (site, self._per_site("beta", _std), _is("standard deviation of beta over tokens", "0..2")),
            "beta_quantile": (
                ("site", "quantile"),
                self._per_site("beta", _quantiles, len(QUANTILES)),
                _is("quantiles of beta over tokens", "0..2"),
            ),
            "beta_histogram": (("site", "bin"), counts, _is("tokens whose beta lies in the bin", "tokens")),
            "share": (("site", "regime"), shares, _is(f"share of tokens by {_cuts(erases)}", "of tokens")),
            "eigenvalue_quantile": (
                ("site", "quantile"),
                eigen,
                _is(f"quantiles of the eigenvalue along k, {_eigenvalue(erases)}", ""),
            ),
            "eigenvalue_negative": (site, negative, _is("share of tokens with a negative eigenvalue", "of tokens")),
            "saturated": (
                site,
                self._per_site("logit", lambda x: (x.abs() > SATURATED).double().mean(dim=1)),
                _is(f"share of tokens whose gate logit is beyond +-{SATURATED:g}", "of tokens"),
            ),
            "idle": (
                site,
                self._per_site("norm", lambda x: (x < IDLE * self.seen.gates.k_eps).double().mean(dim=1)),
                _is(f"share of tokens without a direction, |F| < {IDLE * self.seen.gates.k_eps:g}", "of tokens"),
            ),
        }
        for name, meaning, unit in (
            ("error_before", "|k^T X - v|, the error along k before the write (length over channels)", "state"),
            ("error_after", "|k^T X' - v|, the same after the write", "state"),
            ("erased", "erased energy |beta k k^T X|^2", "state squared"),
            ("written", "written energy |beta v|^2", "state squared"),
            ("change", "net change |X' - X| / |X|", "of the state"),
            ("alignment", "|k^T X| / |X|, how much of the state lies along k", "of the state"),
            ("norm", "|F|, length of what the sublayer put out", "stream"),
        ):
            found[name] = (site, self._per_site(name, _mean), _is(f"{meaning}, mean over tokens", unit))
        return found

    def directions(self) -> dict[str, Variable]:
        n, width, seen = self.n_writes, self.width, self.seen.gates
        r = min(N_ANGLES, width)
        cosines, angles, inside = np.full((n, n), np.nan), np.full((n, n, r), np.nan), np.full(n, np.nan)
        if not self.broken and seen.subspace is not None and seen.cosines is not None and seen.pairs is not None:
            sums, pairs = seen.cosines.cpu().numpy(), seen.pairs.cpu().numpy()
            cosines = np.where(pairs > 0, sums / np.maximum(pairs, 1), np.nan)
            values, vectors = torch.linalg.eigh(seen.subspace)  # rising
            total = values.sum(dim=1)
            leading = vectors[:, :, -r:]
            inside = torch.where(total > 0, values[:, -r:].sum(dim=1) / total, torch.nan).cpu().numpy()
            shared = torch.einsum("idk,jdl->ijkl", leading, leading)
            between = torch.linalg.svdvals(shared).clamp(max=1).acos().rad2deg().cpu().numpy()
            empty = (total <= 0).cpu().numpy()
            between[empty] = np.nan
            between[:, empty] = np.nan
            angles = between
        alike = (np.cos(np.radians(angles)) ** 2).mean(axis=-1)
        pair = ("site", "other")
        return {
            "cosine": (pair, cosines, _is("mean |cos(k, k')| of the directions at the same token", "")),
            "principal_angle": (
                (*pair, "angle"),
                angles,
                _is(f"principal angles between the {r} leading directions over text", "degrees"),
            ),
            "overlap": (pair, alike, _is(f"mean cos^2 of the {r} principal angles: 1 the same span, 0 apart", "")),
            "concentration": (
                ("site",),
                inside,
                _is(f"share of the directions' energy in their {r} leading directions over text", ""),
            ),
        }

    def transport(self) -> dict[str, Variable]:
        starts, r = self.n_writes + 1, min(self.n_writes, self.width)
        parts = self.seen.transports
        q = len(QUANTILES)
        small, large = np.full((starts, q), np.nan), np.full(starts, np.nan)
        rank, spectrum, lasting = np.full(starts, np.nan), np.full((starts, r, q), np.nan), np.full((starts, q), np.nan)
        if not self.seen.gates.erases and not self.broken:
            small, large, rank = np.ones_like(small), np.ones_like(large), np.full(starts, float(self.width))
            spectrum, lasting = np.ones_like(spectrum), np.ones_like(lasting)
        elif parts:
            values = torch.cat([part.values for part in parts], dim=1).cpu().numpy()
            small, large = _over(values[..., -1]), values[..., 0].mean(axis=1)
            if r < self.width:
                large = np.maximum(large, 1.0)
            rank = torch.cat([part.rank for part in parts], dim=1).mean(dim=1).cpu().numpy()
            spectrum = _over(np.moveaxis(values, 1, -1))
            lasting = _over(torch.cat([part.survival for part in parts], dim=1).cpu().numpy())
        over = ("atom", "quantile")
        return {
            "transport_smallest": (over, small, _is("smallest singular value of the transport to the readout", "")),
            "transport_largest": (("atom",), large, _is("largest singular value of the same, mean over tokens", "")),
            "transport_rank": (
                ("atom",),
                rank,
                _is(f"effective rank exp(entropy of sigma) of the same, of {self.width}; mean over tokens", ""),
            ),
            "transport_spectrum": (
                ("atom", "direction", "quantile"),
                spectrum,
                _is(
                    f"its singular values in the span of the directions, falling; the {self.width - r} others are 1", ""
                ),
            ),
            "survival": (
                over,
                lasting,
                _is("|T x| / |x|: what it leaves of the embedding, and of a write along k", ""),
            ),
        }

    def effects(self) -> dict[str, Variable]:
        found = self.seen.effects
        if found is None:
            return {}
        over = ("place", "kind")
        return {
            "loss_effect": (over, found.loss, _is("change of the mean next-token loss with the other gate", "nats")),
            "loss_low": (over, found.low, _is("lower end of its 95% interval over sequences (bootstrap)", "nats")),
            "loss_high": (over, found.high, _is("upper end of its 95% interval over sequences (bootstrap)", "nats")),
            "kl": (over, found.kl, _is("mean KL(as it is || with the other gate), nats per token", "nats")),
            "kind": (("kind",), list(found.kinds), _is("what the gate is replaced with", "")),
        }

    def totals(self) -> dict[str, Variable]:
        batch, found = self.seen.batch, self.seen.effects
        sampled = sum(part.values.shape[1] for part in self.seen.transports)
        return {
            "n_sequences": ((), len(batch.tokens), _is("sequences", "")),
            "n_tokens": ((), int(batch.valid.sum()), _is("tokens, padding left out", "")),
            "n_transport_tokens": ((), sampled, _is("tokens over which the transport was computed", "")),
            "loss": (
                (),
                math.nan if found is None else found.base,
                _is("loss of the model as it is, mean over tokens", "nats"),
            ),
        }


def _is(meaning: str, unit: str) -> dict[str, str]:
    return {"meaning": meaning, "unit": unit}


def _cuts(erases: bool) -> str:
    return "regime of beta" if erases else "size of beta (nothing is erased, so these are no regimes)"


def _eigenvalue(erases: bool) -> str:
    return "1 - beta" if erases else "1, as nothing is erased"


def _mean(x: Tensor) -> Tensor:
    return x.mean(dim=1).cpu()


def _std(x: Tensor) -> Tensor:
    return x.std(dim=1, correction=0).cpu()


def _quantiles(x: Tensor) -> np.ndarray:
    return np.quantile(x.cpu().numpy(), QUANTILES, axis=1).T


def _over(x: np.ndarray) -> np.ndarray:
    """Quantiles over the last axis, NaN left out: [..., n] -> [..., q]."""
    found = np.full((*x.shape[:-1], len(QUANTILES)), np.nan)
    for place in np.ndindex(x.shape[:-1]):
        finite = x[place][np.isfinite(x[place])]
        if finite.size:
            found[place] = np.quantile(finite, QUANTILES)
    return found


def _shares(beta: Tensor) -> np.ndarray:
    """[S, regime]"""
    regimes = regime_of(beta.cpu().numpy())
    return np.stack([(regimes == i).mean(axis=1) for i in range(len(REGIMES))], axis=1)


def _histogram(beta: Tensor) -> np.ndarray:
    return np.stack([np.histogram(row, bins=BINS, range=(0, 2))[0] for row in beta.cpu().numpy()])


def _table(data: xr.Dataset, erases: bool) -> tuple[tuple[str, ...], tuple[tuple[Value, ...], ...]]:
    """A row for all sublayers together, then each in order of depth."""
    numbers: dict[str, np.ndarray] = {"beta": data["beta"].values, "std": data["beta_std"].values}
    for i, regime in enumerate(data["regime"].values.tolist()):
        numbers[f"{regime} %"] = 100 * data["share"].values[:, i]
    numbers |= {
        "saturated %": 100 * data["saturated"].values,
        "error before": data["error_before"].values,
        "after": data["error_after"].values,
        "erased": data["erased"].values,
        "written": data["written"].values,
        "change": data["change"].values,
        "alignment": data["alignment"].values,
    }
    if not erases:
        del numbers["erased"]
    columns, body = ["site", *numbers], []
    for i, site in enumerate([ALL, *data["site"].values.tolist()]):
        row = [values.mean() if i == 0 else values[i - 1] for values in numbers.values()]
        body.append([site, *map(_plain, row)])
    if "loss_effect" in data:
        kinds = data["kind"].values.tolist()
        columns += [f"loss, {kind}" for kind in kinds]
        effect = data["loss_effect"].values
        for row, values in zip(body, [effect[-1], *effect[:-1]], strict=True):
            row += map(_plain, values)
    return tuple(columns), tuple(map(tuple, body))


def _plain(value: Any) -> float | None:
    return None if not np.isfinite(value) else float(value)


def _notes(seen: Measured) -> tuple[str, ...]:
    batch, model = seen.batch, seen.model
    bounds = f"Bounds: skip below {EDGES[0]:g}, partial below {EDGES[1]:g}, overwrite to {EDGES[2]:g}, over-relax to "
    bounds += f"{EDGES[3]:g}, reflect above"
    if not seen.gates.erases:
        bounds = f"Sizes of beta are counted in bins bounded by {', '.join(f'{edge:g}' for edge in EDGES)}"
    notes = [
        "What is stated holds for this model (one set of trained weights) on this text, not for Deep Delta "
        "Learning at large.",
        f"Over {int(batch.valid.sum())} tokens of {len(batch.tokens)} sequence(s), padding left out; each mean is over "
        "all of these tokens, and the row 'all' is the mean over sublayers (effects: all sublayers at once). Effects "
        "are in nats per token, over positions with a next token.",
        f"{bounds}; saturated: gate logit beyond +-{SATURATED:g}; without a direction: |F| below "
        f"{IDLE * seen.gates.k_eps:g}; a constant gate: standard deviation of beta below {CONSTANT:g}.",
        "Gates, directions and the transport are those of the pass, frozen: the product of operators is arithmetic on "
        "this input, no causal claim. Counterfactuals change gates inside the pass, and all that follows is computed "
        "anew; intervals are 95%, by drawing sequences anew with replacement.",
        "Source: Deep Delta Learning, arXiv 2601.00417, sections 3 and 5.",
    ]
    if model.residual.expanded:
        notes.append("The state has channels: the operator acts on each alike; errors are lengths over channels.")
        if model.cfg.residual.compress == "time":
            notes.append("Reads look back in time; the transport is of the state at one token, not of the read.")
    if not model.cfg.causal:
        notes.append("A bidirectional model has no next-token loss; effects are given as KL over all tokens.")
    return (*notes, *batch.notices, *(f"Not checked: {each}." for each in seen.checks.skipped))


def _charts(erases: bool, effects: bool) -> tuple[Chart, ...]:
    charts = [
        Chart(kind="stack", variable="share", x="site", by="regime", title=f"Tokens by {_cuts(erases)}"),
        Chart(kind="heat", variable="beta_histogram", x="bin", y="site", title="Beta by sublayer"),
        Chart(kind="heat", variable="cosine", x="other", y="site", title="Directions at the same token: mean |cos|"),
        Chart(kind="lines", variable="survival", x="atom", by="quantile", title="What reaches the readout"),
    ]
    if effects:
        charts.append(
            Chart(kind="bars", variable="loss_effect", x="place", by="kind", title="Other gates: change of the loss")
        )
    return tuple(charts)

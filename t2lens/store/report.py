"""What a tally says, as a Finding: means, spread, quantiles and shares by read, source, position and token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from t2lens.analysis.finding import Chart, Finding, Value
from t2lens.analysis.variance import PARTS
from t2lens.store.moments import Histogram
from t2lens.store.reader import Store
from t2lens.store.tally import Tally
from t2lens.store.views import union

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["QUANTILES", "charts_of", "report"]

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_NAMES = {"weight": "depth weights", "norm": "lengths of reads", "other": "gates and other numbers per token"}


def report(
    seen: Tally,
    source: Transformer | Store | Sequence[str] | None,
    *,
    n_tokens: int = 20,
    positions: Literal["each", "octaves"] = "each",
) -> Finding:
    """A Finding of a tally; source: for the strings of tokens, the model, the store, the vocabulary or None. See
    `statistics`.

    positions: "octaves" puts positions 0, 1, 2-3, 4-7, ... together in place of one column for each, and the coordinate
    pos holds these words.
    """
    frequent: np.ndarray = np.zeros(0, int)
    if seen.by_token is not None:
        order = np.argsort(-seen.by_token.n, kind="stable")[:n_tokens]
        frequent = order[seen.by_token.n[order] > 0]
    if not seen.n:
        raise ValueError("Nothing was counted, so there are no statistics.")
    out = _Report(seen, frequent, positions == "octaves")
    for family in _NAMES:
        out.put(family)
    return out.finding(_strings(source, frequent))


def _strings(source: Transformer | Store | Sequence[str] | None, ids: np.ndarray) -> list[str]:
    if isinstance(source, Store):
        return source.token_strings(ids).tolist()
    if source is None or isinstance(source, Sequence):
        return [str(i) if source is None else str(source[i]) for i in ids]
    return [str(i) if source.tokenizer is None else source.tokenizer.str_token(int(i)) for i in ids]


class _Report:
    """The dataset and the table, family by family."""

    def __init__(self, seen: Tally, frequent: np.ndarray, octaves: bool) -> None:
        self.seen, self.frequent = seen, frequent
        self.of = {f: [part for part in seen.parts if part.family == f] for f in _NAMES}
        self.reads = union([[part.about["read"] for part in seen.parts if part.family != "other"]])
        labels = [part.about["labels"]["source"] for part in self.of["weight"]]
        self.sources = union(labels)
        self.entries = [part.key + name for part in self.of["other"] for name in part.names]
        self.explained = seen.explained()
        self.quantiles = seen.quantiles(QUANTILES)
        n_pos = int(np.flatnonzero(seen.by_pos.n).max()) + 1
        self.by_pos, self.places = seen.by_pos, np.arange(n_pos)
        if octaves:
            which = np.array([i.bit_length() for i in range(len(seen.by_pos.n))])
            self.by_pos, self.places = seen.by_pos.joined(which), np.array(_octaves(n_pos), dtype=object)
        self.vars: dict[str, Any] = {}
        self.rows: list[tuple[Value, ...]] = []

    def put(self, family: str) -> None:
        parts = self.of[family]
        if not parts:
            return
        seen, first = self.seen, {"weight": ("read", "source"), "norm": ("read",), "other": ("entry",)}[family]
        unit = str(parts[0].about.get("unit", "")) if len({p.about.get("unit") for p in parts}) == 1 else ""

        def add(name: str, values: np.ndarray, dims: tuple[str, ...], meaning: str, unit: str = unit) -> None:
            self.vars[f"{family}_{name}"] = (
                (*first, *dims),
                self._laid_out(family, values),
                {"meaning": f"{meaning} ({_NAMES[family]})", "unit": unit},
            )

        add("mean", seen.total.mean[0], (), "mean over tokens")
        add("std", seen.total.std()[0], (), "standard deviation over tokens")
        add("min", seen.low, (), "least")
        add("max", seen.high, (), "greatest")
        add("quantile", self.quantiles, ("q",), f"quantiles, each within {Histogram.error:.1%}")
        add("mean_by_pos", self.by_pos.means()[: len(self.places)].T, ("pos",), "mean by position in the sequence")
        add("std_by_pos", self.by_pos.std()[: len(self.places)].T, ("pos",), "standard deviation by position")
        if seen.by_token is not None and self.explained is not None:
            add("mean_by_token", seen.by_token.means()[self.frequent].T, ("token",), "mean by token, the most frequent")
            with np.errstate(invalid="ignore", divide="ignore"):
                shares = [x.adjusted / np.where(x.total > 0, x.total, np.nan)[:, None] for x in self.explained.values()]
            add("part_share", np.concatenate(shares), ("part",), "share of the second moment", "share")
            if family != "other":
                self._shares(family)
        self._table(family)

    def _laid_out(self, family: str, values: np.ndarray) -> np.ndarray:
        """values [C, ...] over the axes of the family; NaN where there is no such entry."""
        parts, columns = self.of[family], self.seen.columns
        if family == "other":
            return np.concatenate([values[columns[part.key]] for part in parts])
        shape = (len(self.reads), len(self.sources)) if family == "weight" else (len(self.reads),)
        out = np.full((*shape, *values.shape[1:]), np.nan)
        for part in parts:
            at = self.reads.index(part.about["read"])
            own = values[columns[part.key]]
            if family == "norm":
                out[at] = own[0]
            else:
                out[at, [self.sources.index(name) for name in part.about["labels"]["source"]]] = own
        return out

    def _shares(self, family: str) -> None:
        assert self.explained is not None
        out = np.full((len(self.reads), len(PARTS)), np.nan)
        for part in self.of[family]:
            out[self.reads.index(part.about["read"])] = self.explained[part.key].shares()
        name, of = (
            ("share", "all sources of a read together") if family == "weight" else ("norm_share", "of its length")
        )
        meaning = f"share of the second moment around the mean of the read, adjusted for chance, {of}"
        self.vars[name] = (("read", "part"), out, {"meaning": meaning, "unit": "share"})

    def _table(self, family: str) -> None:
        seen, rows = self.seen, []
        low, middle, high = (QUANTILES.index(q) for q in (0.05, 0.5, 0.95))
        for part in self.of[family]:
            own = seen.columns[part.key]
            read = part.about.get("read")
            shares = None if self.explained is None else self.explained[part.key]
            for i, name in enumerate(part.names, start=own.start):
                label = f"length of {read}" if family == "norm" else part.key + name
                if family == "weight":
                    label = f"{read} <- {part.about['labels']['source'][i - own.start]}"
                row: list[Value] = [label, float(seen.total.mean[0, i]), float(seen.total.std()[0, i])]
                row += [float(self.quantiles[i, q]) for q in (low, middle, high)]
                own_shares = np.full(len(PARTS), np.nan)
                if shares is not None:
                    one = i - own.start
                    own_shares = shares.shares(slice(one, one + 1))
                row += [None if np.isnan(share) else float(share) for share in own_shares[1:]]
                rows.append(tuple(row))
        self.rows += sorted(rows, key=lambda row: -float(row[2]))  # what moves most comes first

    def finding(self, strings: list[str]) -> Finding:
        seen = self.seen
        coords: dict[str, Any] = {"q": np.array(QUANTILES), "pos": self.places}
        coords |= {"read": np.array(self.reads, dtype=object), "source": np.array(self.sources, dtype=object)}
        coords |= {"entry": np.array(self.entries, dtype=object), "part": np.array(PARTS, dtype=object)}
        coords["token"] = np.array(strings, dtype=object)
        used = {dim for dims, *_ in self.vars.values() for dim in dims}
        coords = {name: values for name, values in coords.items() if name in used}
        if "token" in coords:
            coords["token_id"] = ("token", self.frequent)
            assert seen.by_token is not None
            coords["token_count"] = ("token", seen.by_token.n[self.frequent])
        coords["pos_count"] = ("pos", self.by_pos.n[: len(self.places)])
        data = xr.Dataset(self.vars, coords=coords)
        return Finding(
            title=f"Statistics over {seen.n} tokens of {seen.n_sequences} sequence(s)",
            dataset=data,
            columns=("of", "mean", "std", "5%", "median", "95%", *(f"{part} share" for part in PARTS[1:])),
            rows=tuple(self.rows),
            notes=tuple(self._notes()),
            charts=charts_of(data),
        )

    def _notes(self) -> Iterator[str]:
        seen = self.seen
        yield f"n = {seen.n} tokens of {seen.n_sequences} sequence(s), padding left out; std divides by n."
        yield (
            "Means, deviations and shares are exact but for rounding (Chan, Golub and LeVeque's merge); each quantile "
            f"is within {Histogram.error:.1%} of the value of its rank."
        )
        if self.explained is None:
            yield "Nothing was counted by token, so there are no shares."
        else:
            yield (
                "Shares are of sum (y - mean of the read or tensor)^2, as in content_dependence: token identity, then "
                "what position explains beyond it, then the rest (context), adjusted for chance; what is left of 1 is "
                "the fixed profile (site). Position is that in the sequence, not in its document."
            )


def charts_of(data: xr.Dataset) -> tuple[Chart, ...]:
    """How the dataset of such a Finding is drawn."""
    charts: list[Chart] = []
    if "weight_mean" in data:
        signed = bool((np.nan_to_num(data["weight_mean"].values) < 0).any())
        charts.append(
            Chart(kind="heat", variable="weight_mean", x="source", y="read", signed=signed, title="Mean weight")
        )
        charts.append(Chart(kind="heat", variable="weight_std", x="source", y="read", title="How far weights move"))
    if "share" in data:
        charts.append(Chart(kind="stack", variable="share", x="read", by="part", title="What the weights follow"))
    if "norm_mean" in data:
        charts.append(Chart(kind="bars", variable="norm_mean", x="read", title="Mean length of every read"))
    if "other_mean" in data:
        charts.append(Chart(kind="bars", variable="other_mean", x="entry", title="Mean gate"))
    if "norm_mean_by_pos" in data:
        charts.append(Chart(kind="heat", variable="norm_mean_by_pos", x="pos", y="read", title="Length by position"))
    return tuple(charts)


def _octaves(n_pos: int) -> list[str]:
    """ "0", "1", "2-3", "4-7", ...: the last one ends where the positions do."""
    starts = [0, *(2**i for i in range(max(n_pos - 1, 0).bit_length()))]
    ends = [min(end, n_pos) - 1 for end in (*starts[1:], n_pos)]
    return [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]

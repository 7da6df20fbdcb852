"""Content dependence: does a route follow what is read, or is it the same for every token?

For every read over many texts: its mean profile, and how much of its weights' spread is that profile, the token's
identity, its position or the rest (`t2lens.analysis.variance` has the equation). The label joins this with the
system's equation (`ResidualSystem.weights_from`):

    static           the weights move by less than STILL (a hundredth) of their root mean square
    key-driven       they move, and each is made of its own source alone: the reader looks for a fixed thing
    content-driven   they move, and the state of the reader (or of other sources) has a part in them
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from t2lens.analysis.finding import Chart, Finding, Value
from t2lens.analysis.inputs import Batch, read_batch
from t2lens.analysis.progress import progress
from t2lens.analysis.statistics import draws_of, interval_of_mean
from t2lens.analysis.token_weights import Over, Rows, Shuffle, Weights, collect, shuffled
from t2lens.analysis.variance import PARTS, Groups
from t2lens.analysis.variance import explain as explain
from t2lens.tracing import source_order

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["content_dependence", "explain"]

STILL = 0.01
SINK = 2.0  # times its even share
_LEVEL = (2.5, 97.5)
_MOSTLY = {"token": "token", "position": "position", "rest": "context"}


def content_dependence(
    model: Transformer,
    input: Any = None,
    *,
    over: Over | None = None,
    n_shuffles: int = 1,
    n_boot: int = 200,
    seed: int = 0,
    attention_mask: Any = None,
) -> Finding:
    """How far the weights of each read are static, follow the keys, or follow the content.

    Args:
        input: texts, a text or ids; None: the 32 bundled passages. Shares need several sequences.
        over: "source", the system's own depth weights (default where it has any); or "mixing", the coefficients of
            atoms in each read (default of systems without depth weights; signed).
        n_shuffles: how often every text is shuffled (its first token stays): what an order of the same tokens matters.
        n_boot: draws of sequences for the intervals (2.5 to 97.5 percent); 0: no intervals. seed: of both.

    Returns:
        Finding with, by read and source (or atom): weight_mean, weight_std, route_share (by part), weight_shuffled;
        by read: share (part) with share_interval, share_raw, variation (rms change over rms weight), entropy (nats) and
        n_effective = exp(entropy), profile_change and token_change under shuffling, label, label_shuffled; by
        source: sink_share. Equations: this module and `t2lens.analysis.variance`.

    Raises:
        ValueError: over="source" on a system without depth weights, an unknown `over`, negative counts, or a model in
            which no read has two sources.

    Example:
        >>> import t2lens
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.AttnRes())
        >>> ids = [[0, 7, 3, 7, 9], [0, 3, 3, 9, 7], [0, 9, 7, 7, 3]]
        >>> found = content_dependence(t2lens.build(cfg, seed=0), ids, n_boot=0)
        >>> set(found["label"].values.tolist())  # fresh queries are zero: plain means
        {'static'}
    """
    over = _over(model, over)
    for name, value in (("n_shuffles", n_shuffles), ("n_boot", n_boot)):
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a whole number of at least 0, not {value!r}.")
    batch = read_batch(model, _texts(input), attention_mask)
    rows = Rows(batch)
    weights = collect(model, batch.tokens, batch, over)
    if not weights.reads:
        raise ValueError(
            "No read of this model has two sources to weigh"
            + ('; over="mixing" shows the coefficients of atoms.' if over == "source" else ".")
        )
    others = shuffled(model, batch, rows, over, n_shuffles, seed)
    out = _Numbers(model, weights, rows, over)
    out.spread(n_boot, seed)
    out.concentration(n_boot, seed)
    out.shuffle(others, n_boot, seed)
    out.sinks()
    return out.finding(batch, n_shuffles, n_boot)


def _over(model: Transformer, over: str | None) -> Over:
    if over not in (None, "source", "mixing"):
        raise ValueError(f"over must be source or mixing, not {over!r}.")
    has_own = any("hook_depth_attn" in name for name in model.hook_dict)
    if over == "source" and not has_own:
        raise ValueError(
            f'{model.cfg.residual.describe()} has no depth weights of its own; over="mixing" takes the coefficients '
            "of atoms in every read."
        )
    return "source" if over in (None, "source") and has_own else "mixing"


def _texts(input: Any) -> Any:
    if input is not None:
        return input
    from t2lens.zoo.text import sample_texts

    return sample_texts()


# --- from weights to numbers ----------------------------------------------------------------------------------------


def _variation(mean: np.ndarray, within: np.ndarray, n: int) -> float:
    """Root mean square change of the weights over their root mean square."""
    change, size = within.sum() / n, within.sum() / n + (mean**2).sum()
    return float(np.sqrt(change / size)) if size > 0 else 0.0


def _magnitudes(weights: np.ndarray) -> np.ndarray:
    """|w| as shares of their sum, per row; even where a row is zero."""
    size = np.abs(weights)
    total = size.sum(axis=-1, keepdims=True)
    return np.where(total > 0, size / np.where(total > 0, total, 1), 1 / weights.shape[-1])


class _Numbers:
    """The variables of the result, filled step by step."""

    def __init__(self, model: Transformer, weights: Weights, rows: Rows, over: Over) -> None:
        self.model, self.weights, self.rows, self.over = model, weights, rows, over
        self.names = list(weights.reads)
        self.axis = "source" if over == "source" else "atom"
        used = {name for columns in weights.columns.values() for name in columns}
        order = source_order(model) if over == "source" else list(model.atoms)
        self.entries = [name for name in order if name in used]
        self.at = {name: [self.entries.index(c) for c in columns] for name, columns in weights.columns.items()}
        ends = np.cumsum([0, *(w.shape[1] for w in weights.reads.values())])
        self.slices = {name: slice(a, b) for name, a, b in zip(self.names, ends, ends[1:], strict=False)}
        self.all = np.concatenate(list(weights.reads.values()), axis=1)  # [n, every route]
        self.out: dict[str, Any] = {}
        self.variation: dict[str, float] = {}

    def put(self, name: str, dims: tuple[str, ...], values: Any, meaning: str, unit: str = "weight") -> None:
        self.out[name] = (dims, np.asarray(values), {"meaning": meaning, "unit": unit})

    def wide(self, values: np.ndarray) -> np.ndarray:
        """[read, source, ...] of values [every route, ...]; NaN where there is no such source."""
        out = np.full((len(self.names), len(self.entries), *values.shape[1:]), np.nan)
        for i, name in enumerate(self.names):
            out[i, self.at[name]] = values[self.slices[name]]
        return out

    def references(self, mean: np.ndarray) -> np.ndarray:
        """[every route]: the mean over the sources of its read."""
        out = np.empty_like(mean)
        for part in self.slices.values():
            out[part] = mean[part].mean()
        return out

    def label(self, name: str, variation: float) -> str:
        """static, key-driven or content-driven; see the module docstring."""
        if variation < STILL:
            return "static"
        return "content-driven" if self.seen(name) == "state" else "key-driven"

    def seen(self, name: str) -> str:
        """What the equation makes the weights of this read of; coefficients of atoms: of everything up to it."""
        read = next(read for read in self.model.reads if read.name == name)
        residual = self.model.residual
        if self.over == "source":
            return residual.weights_from(read.site)
        before = {residual.weights_from(site) for site in residual.sites if site.index <= read.site.index}
        return next(kind for kind in ("state", "keys", "nothing") if kind in before)

    def spread(self, n_boot: int, seed: int) -> None:
        """Means, standard deviations, shares of the parts, and labels."""
        rows, n = self.rows, len(self.all)
        groups = Groups(rows.token, rows.position)
        found = groups.explain(self.all, self.references(self.all.mean(axis=0)))
        within = found.raw[:, 1:].sum(axis=1)
        self.found, dims = found, ("read", self.axis)
        self.put("weight_mean", dims, self.wide(found.mean), "mean over tokens")
        self.put("weight_std", dims, self.wide(np.sqrt(within / n)), "standard deviation over tokens")
        with np.errstate(invalid="ignore", divide="ignore"):
            routes = np.where(found.total[:, None] > 0, found.adjusted / found.total[:, None], np.nan)
        meaning = "share of the second moment around the mean of the read, adjusted for chance"
        self.put("route_share", (*dims, "part"), self.wide(routes), meaning, "share")
        shares = np.stack([found.shares(part) for part in self.slices.values()])
        self.put("share", ("read", "part"), shares, meaning + ", all sources together", "share")
        raw = np.stack([found.shares(part, adjusted=False) for part in self.slices.values()])
        self.put("share_raw", ("read", "part"), raw, "the same, not adjusted for chance", "share")
        for name, part in self.slices.items():
            self.variation[name] = _variation(found.mean[part], within[part], n)
        self.put("variation", ("read",), list(self.variation.values()), "rms change of the weights / their rms", "")
        labels = np.array([self.label(name, self.variation[name]) for name in self.names], dtype=object)
        self.put("label", ("read",), labels, "static, key-driven or content-driven", "")
        meaning = "what the equation makes the weights of: nothing, keys or state"
        self.put("weights_from", ("read",), np.array([self.seen(n) for n in self.names], dtype=object), meaning, "")
        bounds = np.full((len(self.names), len(PARTS), 2), np.nan)
        if n_boot and rows.n_sequences > 1:
            bounds = self._bootstrap(n_boot, seed)
        self.put("share_interval", ("read", "part", "bound"), bounds, "interval of share over sequences", "share")
        self._interval("weight_mean", dims, self.all, n_boot, seed)

    def _bootstrap(self, n_boot: int, seed: int) -> np.ndarray:
        """[read, part, bound]: percentiles of the shares over draws of sequences."""
        rows, every = self.rows, draws_of(self.rows.n_sequences, n_boot, seed)
        draws = np.full((n_boot, len(self.names), len(PARTS)), np.nan)
        for draw, times in enumerate(progress(every, "Drawing sequences", total=n_boot)):
            by_row = times[rows.sequence]
            mean = (by_row @ self.all) / by_row.sum()
            found = Groups(rows.token, rows.position, by_row).explain(self.all, self.references(mean))
            draws[draw] = [found.shares(part) for part in self.slices.values()]
        out = np.full((len(self.names), len(PARTS), 2), np.nan)
        there = ~np.isnan(draws).all(axis=0)
        if there.any():
            out[there] = np.nanpercentile(draws[:, there], _LEVEL, axis=0).T
        return out

    def _interval(self, name: str, dims: tuple[str, ...], values: np.ndarray, n_boot: int, seed: int) -> None:
        """Adds the interval over sequences of the mean of values [n, every route or read]."""
        bounds = np.full((values.shape[1], 2), np.nan)
        if n_boot:
            low, high = interval_of_mean(self.rows.sums(values), self.rows.counts, seed=seed, draws=n_boot)
            bounds = np.stack([low, high], axis=-1)
        bounds = self.wide(bounds) if dims[1:] else bounds
        self.put(
            f"{name}_interval",
            (*dims, "bound"),
            bounds,
            f"interval of {name} over sequences",
            self.out[name][2]["unit"],
        )

    def concentration(self, n_boot: int, seed: int) -> None:
        """Entropy over sources, per token, and the number of sources that have as much."""
        share = [_magnitudes(w) for w in self.weights.reads.values()]
        entropy = np.stack([-(s * np.log(np.where(s > 0, s, 1))).sum(axis=1) for s in share], axis=1)  # [n, read]
        mean = entropy.mean(axis=0)
        self.put("entropy", ("read",), mean, "mean over tokens of the entropy over sources (of |weight|)", "nats")
        self._interval("entropy", ("read",), entropy, n_boot, seed)
        self.put("n_effective", ("read",), np.exp(mean), "exp(entropy): how many sources are read", "sources")
        self.put("n_sources", ("read",), [s.shape[1] for s in share], "sources of the read", "sources")
        self.mass = [s.mean(axis=0) for s in share]

    def shuffle(self, others: list[Shuffle], n_boot: int, seed: int) -> None:
        """What another order of the same tokens changes: the profile of a read, and the weights of a token."""
        if not others:
            return
        every = [np.concatenate([s.weights.reads[name] for name in self.names], axis=1) for s in others]
        mean = self.found.mean + np.mean([(w - self.all).mean(axis=0) for w in every], axis=0)  # no change is exactly 0
        within = np.mean([((w - mean) ** 2).sum(axis=0) for w in every], axis=0)
        self.put("weight_shuffled", ("read", self.axis), self.wide(mean), "mean weight over tokens of shuffled texts")
        moved = np.mean([np.abs(w - self.all[s.home]) for w, s in zip(every, others, strict=True)], axis=0)
        change = [float(np.abs(mean - self.found.mean)[part].mean()) for part in self.slices.values()]
        token = [float(moved[:, part].mean()) for part in self.slices.values()]
        self.put("profile_change", ("read",), change, "mean absolute change of the mean profile under shuffling")
        self.put("token_change", ("read",), token, "mean absolute change of a token's weights under shuffling")
        bounds = np.full((len(self.names), 2), np.nan)
        if n_boot and self.rows.n_sequences > 1:
            bounds = self._change_interval(every, n_boot, seed)
        meaning = "interval of profile_change over sequences"
        self.put("profile_change_interval", ("read", "bound"), bounds, meaning)
        labels = []
        for name, part in self.slices.items():
            labels.append(self.label(name, _variation(mean[part], within[part], len(self.all))))
        self.put("label_shuffled", ("read",), np.array(labels, dtype=object), "label on shuffled texts", "")

    def _change_interval(self, every: list[np.ndarray], n_boot: int, seed: int) -> np.ndarray:
        rows = self.rows
        before, after = rows.sums(self.all), np.mean([rows.sums(w) for w in every], axis=0)  # [every route, B]
        times = draws_of(rows.n_sequences, n_boot, seed)
        change = np.abs((after - before) @ times.T) / np.maximum(times @ rows.counts, 1)
        return np.stack([np.percentile(change[part].mean(axis=0), _LEVEL) for part in self.slices.values()])

    def sinks(self) -> None:
        """Of the reads with three sources or more that see a source: where it has twice its even share."""
        seen, heavy = np.zeros(len(self.entries)), np.zeros(len(self.entries))
        for name, mass in zip(self.names, self.mass, strict=True):
            if len(mass) < 3:
                continue
            seen[self.at[name]] += 1
            heavy[self.at[name]] += mass >= SINK / len(mass)
        with np.errstate(invalid="ignore"):
            share = np.where(seen > 0, heavy / np.maximum(seen, 1), np.nan)
        meaning = f"share of the reads (of 3 sources or more) at which it has at least {SINK:g} times its even share"
        self.put("sink_share", (self.axis,), share, meaning, "share of reads")
        self.put("n_reads", (self.axis,), seen, "reads of 3 sources or more that see it", "reads")
        self.sink_names = [
            f"{name} ({int(h)} of {int(s)} reads)"
            for name, h, s in zip(self.entries, heavy, seen, strict=True)
            if s >= 3 and h > s / 2
        ]

    # --- in words
    def finding(self, batch: Batch, n_shuffles: int, n_boot: int) -> Finding:
        coords = {
            "read": np.array(self.names, dtype=object),
            self.axis: np.array(self.entries, dtype=object),
            "part": np.array(PARTS, dtype=object),
            "bound": np.array(["low", "high"], dtype=object),
        }
        rows = sorted((self._row(i, name) for i, name in enumerate(self.names)), key=lambda row: -float(row[3] or 0))
        columns = ["read", "label", "mostly", "variation", *(f"{part} share" for part in PARTS)]
        columns += [
            "sources read",
            "most weight on",
            "its mean",
            *(["change, shuffled", "label stays"] * bool(n_shuffles)),
        ]
        what = "depth weights" if self.over == "source" else "mixing coefficients"
        charts = (
            Chart(kind="stack", variable="share", x="read", by="part", title=f"What the {what} of a read follow"),
            Chart(
                kind="heat",
                variable="weight_mean",
                x=self.axis,
                y="read",
                signed=bool((self.found.mean < 0).any()),
                title=f"Mean {what}",
            ),
            Chart(
                kind="bars",
                variable="variation",
                x="read",
                title=f"How far the {what} of each read move between tokens",
                label="rms change over rms weight",
            ),
        )
        return Finding(
            title=f"Content dependence of {what} over {self.rows.n_sequences} sequence(s)",
            dataset=xr.Dataset(self.out, coords=coords),
            columns=tuple(columns),
            rows=tuple(rows),
            notes=(*self._notes(n_shuffles, n_boot), *batch.notices),
            charts=charts,
        )

    def _row(self, i: int, name: str) -> tuple[Value, ...]:
        shares = self.out["share"][1][i]
        label = str(self.out["label"][1][i])
        mostly = None
        if label != "static" and not np.isnan(shares[1:]).any():
            mostly = _MOSTLY[PARTS[1 + int(shares[1:].argmax())]]
        mean = self.found.mean[self.slices[name]]
        most = int(np.abs(mean).argmax())
        row: list[Value] = [name, label, mostly, self.variation[name]]
        row += [None if np.isnan(share) else float(share) for share in shares]
        row += [float(self.out["n_effective"][1][i]), self.weights.columns[name][most], float(mean[most])]
        if "profile_change" in self.out:
            row += [float(self.out["profile_change"][1][i]), bool(self.out["label_shuffled"][1][i] == label)]
        return tuple(row)

    def _notes(self, n_shuffles: int, n_boot: int) -> list[str]:
        rows, labels = self.rows, list(self.out["label"][1])
        counts = ", ".join(f"{labels.count(k)} {k}" for k in dict.fromkeys(labels))
        notes = [
            f"n = {len(self.all)} tokens of {rows.n_sequences} sequence(s), padding left out. Reads: {counts}.",
            "Shares are of sum (w - mean of the read)^2: site (the mean profile), then token identity, then what "
            "position explains beyond it, then the rest (context); sequential sums of squares, adjusted for chance "
            "(Kelley's epsilon squared), so they add up to 1 and can be below 0. Tokens count as independent.",
            f"Label: static where the weights move by less than {STILL:.0%} of their rms (variation); else by the "
            "system's equation: key-driven (each weight is made of its own source) or content-driven (the state of the "
            "reader, or of other sources, has a part).",
        ]
        if any(np.isnan(self.out["share"][1]).any(axis=1) & (np.array(list(self.variation.values())) > 0)):
            notes.append(
                "Where shares are missing, tokens and positions leave nothing to estimate chance from; give more texts."
            )
        sinks = ", ".join(self.sink_names) or "none"
        notes.append(
            f"Depth sinks (at least {SINK:g} times the even share 1/S at more than half of the reads of three "
            f"sources or more, and three such reads): {sinks}."
        )
        if self.over == "source" and bool((self.all < 0).any()):
            notes.append("These weights have signs; entropy and sinks are of their magnitudes.")
        if self.over == "mixing":
            notes.append(
                "Mixing coefficients, products of all weights and gates up to a read; entropy and sinks are of their "
                "magnitudes. Where an equation has no weights that see the content, coefficients that move do so "
                "through norms or because a coefficient is a matrix (energy-weighted mean)."
            )
        if n_shuffles:
            notes.append(
                f"Shuffled: tokens permuted within each sequence, the first one kept, {n_shuffles} time(s). The change "
                "is of the mean profile (token_change: of the same token's own weights)."
            )
        if n_boot and rows.n_sequences > 1:
            notes.append(f"Intervals (in the data): percentile bootstrap over sequences, {n_boot} draws.")
        missing = [read.name for read in self.model.reads if read.name not in self.weights.reads]
        if missing:
            notes.append(f"Left out, as there is nothing to choose: {', '.join(missing)}.")
        return notes

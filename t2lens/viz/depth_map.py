"""Maps of reads over sources, as data for pictures: of a trace, of an average (`depth_profile`), of a whole corpus.

numpy only. A map says for every entry whether there is such a source at all, what the source holds, and how its value
spreads over the tokens that it was averaged over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from t2lens.viz.labels import fmt, glyphs

__all__ = [
    "KINDS",
    "STATS",
    "WHATS",
    "DepthMap",
    "difference",
    "kind_of",
    "limits",
    "of_corpus",
    "of_profile",
    "of_trace",
]

What = Literal["weights", "mixing", "contribution", "share"]

WHATS: dict[str, tuple[str, str, str]] = {
    "weights": ("own depth weights", "weight", "depth_weight"),
    "mixing": ("mixing matrix M", "mixing", "mixing"),
    "contribution": ("contribution norm", "contribution", "contribution_norm"),
    "share": ("contribution share", "share", ""),
}
"""what a map shows -> (words, its name in `depth_profile`, its variable in a trace)"""

STATS: dict[str, str] = {"mean": "mean", "sd": "standard deviation", "iqr": "interquartile range"}
"""which number over tokens a map shows"""

KINDS: dict[str, str] = {
    "embed": "embedding",
    "attn": "attention write",
    "mlp": "MLP write",
    "local": "local write",
    "block": "writes of a block, summed",
    "output": "output of a block (all up to it)",
    "running": "running sum, or carried state",
    "stream": "parallel stream",
}
"""kind of a source -> words, in the order of the legend"""


@dataclass(frozen=True, kw_only=True)
class DepthMap:
    """values [read, column], NaN where there is none; exists: whether the read has such a source.

    reads: full names; sites, ways: what they are made of. layers: block of each read (the readout: one more).
    own: whether the weights of a read are the system's (else all are exactly 1). held: the atoms in a source.
    kinds: of the columns. counted: over what, in words. more: further lines of a tooltip, words -> [read, column] or
    [read, column, 2]. label, unit: what the values are. signed: whether some can be negative.
    """

    what: str
    reads: tuple[str, ...]
    sites: tuple[str, ...]
    ways: tuple[str, ...]
    columns: tuple[str, ...]
    kinds: tuple[str, ...]
    values: np.ndarray
    exists: np.ndarray
    held: np.ndarray
    own: np.ndarray
    counted: str
    label: str
    unit: str
    signed: bool
    more: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[int, ...]:
        blocks = [int(site.split(".")[0]) if "." in site else -1 for site in self.sites]
        return tuple(max(blocks, default=0) + 1 if block < 0 else block for block in blocks)

    def lines(self, i: int, j: int) -> list[str]:
        """What a tooltip says of an entry."""
        value = float(self.values[i, j])
        unit = f" {self.unit}" if self.unit == "stream" else ""
        said = f"{self.label}: {fmt(value)}{unit}" if np.isfinite(value) else f"{self.label}: no number"
        out = [f"{self.reads[i]} reads {self.columns[j]}", said]
        row = np.abs(np.where(self.exists[i], self.values[i], np.nan))
        if np.isfinite(value) and np.isfinite(row).sum() > 1:
            out.append(f"rank {1 + int((row > abs(value)).sum())} of {int(np.isfinite(row).sum())} in its read")
        for words, array in self.more.items():
            numbers = np.atleast_1d(array[i, j])
            if np.isfinite(numbers).all():
                out.append(f"{words}: {' to '.join(fmt(float(x), 3) for x in numbers)}")
        if self.held[i, j] and self.held[i, j] != self.columns[j]:
            atoms = str(self.held[i, j]).split()
            out.append(
                f"holds {', '.join(atoms) if len(atoms) <= 6 else f'{len(atoms)} atoms, {atoms[0]} to {atoms[-1]}'}"
            )
        return [*out, self.counted]


def kind_of(name: str, held: Sequence[str]) -> str:
    """The kind of a source: held are the atoms in it at each read, as joined names.

    >>> kind_of("block1", ["embed 0.attn 0.mlp"] * 2), kind_of("partial", ["0.attn", "0.attn 0.mlp"])
    ('output', 'running')
    """
    different = list(dict.fromkeys(each for each in held if each))
    if name.rstrip("0123456789") == "stream" and name != "stream":
        return "stream"
    if len(different) > 1 or name in ("partial", "state", "stream"):
        return "running"
    atoms = different[0].split() if different else [name]
    if len(atoms) > 1:
        return "output" if "embed" in atoms else "block"
    return "embed" if atoms[0] == "embed" else atoms[0].rpartition(".")[2]


def of_trace(trace: Any, what: str, pos: int) -> DepthMap:
    """The map of one position. KeyError for an unknown `what`."""
    data, words = trace.dataset, WHATS[what][0]
    reads = [str(read) for read in data["read"].values]
    held = _held(trace.source_atoms, reads, [str(s) for s in data["source"].values])
    counted = f"n = 1 token, {glyphs(str(trace.tokens[pos]))} at position {pos}"
    if what == "share":
        length = data["contribution_norm"].sel(pos=pos).transpose("read", "atom").values
        total = np.nansum(length, axis=1, keepdims=True)
        values = length / np.where(total > 0, total, 1.0)
    else:
        axis = "source" if what == "weights" else "atom"
        values = data[WHATS[what][2]].sel(pos=pos).transpose("read", axis).values
    return _made(data, what, values, held, words, counted, {})


def of_profile(finding: Any, what: str, stat: str = "mean", where: str = "") -> DepthMap:
    """The map of a `depth_profile`; where: what its tokens are of, in words ("8 bundled passages")."""
    data = finding.dataset
    words, name, _ = WHATS[what]
    held = data["holds"].values
    n, left = int(data["n_tokens"]), int(data["n_excluded"])
    counted = f"n = {n:,} tokens of {where or f'{int(data.n_sequences)} sequence(s)'}"
    counted += f", {left} start token{'s' * (left != 1)} left out" if left else ", start tokens counted"
    more = {
        "mean": data[f"{name}_mean"].values,
        "sd over tokens": data[f"{name}_std"].values,
        "quartiles over tokens": data[f"{name}_quartile"].values[..., [0, -1]],
        "95% interval of the mean, over sequences": data[f"{name}_interval"].values,
    }
    return _made(data, what, _stat(more, stat), held, _words(words, stat), counted, more)


def of_corpus(finding: Any, trace: Any, stat: str = "mean") -> DepthMap:
    """The map of the statistics of a corpus (`t2lens.store.corpus_statistics`) of own depth weights; trace: of the same
    model, for what its sources hold. ValueError where the system has no depth weights."""
    data = finding.dataset
    if "weight_mean" not in data:
        raise ValueError("this system has no depth weights of its own, so the corpus has no statistics of them")
    n = next((note.split(" tokens")[0] for note in finding.notes if note.startswith("n = ")), "n = ?")
    counted = f"n = {int(n[4:]):,} tokens, all of the held-out text, start tokens counted"
    at = [float(q) for q in data["q"].values]
    more = {
        "mean": data["weight_mean"].values,
        "sd over tokens": data["weight_std"].values,
        "quartiles over tokens": data["weight_quantile"].values[..., [at.index(0.25), at.index(0.75)]],
    }
    reads = [str(read) for read in data["read"].values]
    held = _held(trace.source_atoms, reads, [str(s) for s in data["source"].values])
    return _made(
        data, "weights", _stat(more, stat), held, _words(WHATS["weights"][0], stat), counted, more, trace.dataset
    )


def difference(a: DepthMap, b: DepthMap) -> DepthMap:
    """B - A. ValueError, in a sentence, where reads or columns are not the same."""
    for one, other, what in ((a.reads, b.reads, "reads"), (a.columns, b.columns, "sources")):
        if one != other:
            raise ValueError(f"A and B do not have the same {what}, so B \u2212 A has no meaning here.")
    return replace(
        a,
        values=b.values - a.values,
        exists=a.exists & b.exists,
        signed=True,
        label=f"B \u2212 A, {a.label}",
        more={"A": a.values, "B": b.values},
        counted=a.counted if a.counted == b.counted else f"A: {a.counted}; B: {b.counted}",
    )


def limits(maps: Sequence[DepthMap]) -> tuple[float, float]:
    """The one range of several maps: from 0, or symmetric around it."""
    values = np.concatenate([each.values[np.isfinite(each.values) & each.exists] for each in maps] or [np.zeros(0)])
    high = float(np.abs(values).max()) if values.size else 1.0
    return (-high if any(each.signed for each in maps) else 0.0), high or 1.0


# --- pieces


def _words(words: str, stat: str) -> str:
    return words if stat == "mean" else f"{STATS[stat]} over tokens, {words}"


def _stat(more: dict[str, np.ndarray], stat: str) -> np.ndarray:
    if stat not in STATS:
        raise KeyError(f"A map shows {', '.join(STATS)}, not {stat!r}.")
    quartiles = more["quartiles over tokens"]
    shown = {"mean": more["mean"], "sd": more["sd over tokens"], "iqr": quartiles[..., 1] - quartiles[..., 0]}
    return shown[stat]


def _held(
    source_atoms: Mapping[str, Mapping[str, Sequence[str]]], reads: Sequence[str], names: list[str]
) -> np.ndarray:
    out = np.full((len(reads), len(names)), "", dtype=object)
    for i, read in enumerate(reads):
        for name, atoms in source_atoms[read].items():
            if name in names:
                out[i, names.index(name)] = " ".join(atoms)
    return out


def _made(
    data: Any,
    what: str,
    values: np.ndarray,
    held: np.ndarray,
    label: str,
    counted: str,
    more: dict[str, np.ndarray],
    about: Any = None,
) -> DepthMap:
    """about: the dataset that says of which site and way a read is, where `data` does not."""
    about = data if about is None else about
    reads = tuple(str(read) for read in data["read"].values)
    at = [list(map(str, about["read"].values)).index(read) for read in reads]
    axis = "source" if what == "weights" else "atom"
    names = [str(name) for name in data[axis].values]
    own = np.ones(len(reads), bool)
    if what == "weights":
        exists = held != ""
        kinds = [kind_of(name, list(held[:, j])) for j, name in enumerate(names)]
        mean, spread = more.get("mean", values), more.get("sd over tokens", np.zeros_like(values))
        own = ~(~exists | ((mean == 1) & (spread == 0))).all(axis=1)
    else:
        seen = about["seen"].values[at]
        exists = np.arange(len(names)) <= seen[:, None]
        held = np.where(exists, np.array(names, dtype=object), "")
        kinds = [kind_of(name, [name]) for name in names]
    order = sorted(range(len(names)), key=lambda j: kinds[j] == "running")
    finite = values[np.isfinite(values)]
    return DepthMap(
        what=what,
        reads=reads,
        sites=tuple(str(site) for site in about["site"].values[at]),
        ways=tuple(str(way) for way in about["way"].values[at]),
        columns=tuple(names[j] for j in order),
        kinds=tuple(kinds[j] for j in order),
        values=values[:, order],
        exists=exists[:, order],
        held=held[:, order],
        own=own,
        counted=counted,
        label=label,
        unit={"weights": "weight", "mixing": "", "contribution": "stream", "share": "share"}[what],
        signed=bool((finite < 0).any()),
        more={words: array[:, order] for words, array in more.items()},
    )

"""Averaged depth maps: what reads hold of what was written before, over the tokens of many texts.

Four maps of every read, each as mean, spread over tokens, and interval over sequences:

    weight         the system's own depth weights over its sources, as its paper plots them
    mixing         M, the effective coefficient of every atom (`t2lens.mixing_matrix`)
    contribution   |c|, the length of the vector that an atom adds to the read
    share          |c| / sum of |c| over the atoms of the read, per token (0 where nothing is read)

and three profiles of the shares: how far back in depth they lie, how they fall with that distance, and how much is the
embedding's, the newest write's, the one's before it and all older ones' (the families of `t2lens.analysis.families`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.families import FAMILIES, family_of
from t2lens.analysis.finding import Chart, Finding, Value
from t2lens.analysis.inputs import Batch, check_finite, read_batch
from t2lens.analysis.layout import put
from t2lens.analysis.progress import progress
from t2lens.analysis.statistics import interval_of_mean
from t2lens.analysis.variants import recorded, sequences
from t2lens.mixing import TOLERANCE, ForwardRecord, account_by_read
from t2lens.residual import Read, Source
from t2lens.tracing import depth_weights

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["MAPS", "QUARTILES", "depth_profile"]

QUARTILES = (0.25, 0.5, 0.75)

MAPS = {
    "weight": ("source", "depth weight", "weight"),
    "mixing": ("atom", "coefficient of the atom", "coefficient"),
    "contribution": ("atom", "length of the contribution", "stream"),
    "share": ("atom", "share of the contribution's length in the lengths of all", "share"),
}
"""map -> (its column axis, what a value is, unit)"""


@torch.no_grad()
def depth_profile(
    model: Transformer,
    input: Any = None,
    *,
    start: bool = False,
    form: str = "additive",
    n_boot: int = 1000,
    seed: int = 0,
    attention_mask: Any = None,
) -> Finding:
    """Mean over tokens, spread and intervals of every read's depth weights, mixing row and contributions.

    Args:
        input: text, texts or token ids [pos] or [batch, pos]; None: the 32 bundled passages. Padding never counts.
        start: whether the first token of every sequence counts. It is the start token, on which attention piles up, and
            its reads are unlike all others; by default it does not.
        form: "additive", or "operator" for Deep Delta Learning (which attributes erasing differently).
        n_boot: draws of sequences for the intervals (2.5 to 97.5 percent; NaN for one sequence); 0: none. seed: theirs.

    Returns:
        Dataset, for each KIND of `MAPS` over (read, source or atom): KIND_mean, KIND_std (over tokens, population),
        KIND_quartile (q: 0.25, 0.5, 0.75) and KIND_interval (bound: low, high; of the mean); NaN where there is no such
        source. holds (read, source): the atoms in a source, "" where it does not exist. lookback (read): mean distance
        in blocks, weighted with share (the newest write is one sublayer back); share_by_distance (reader, distance):
        mean share of the write so many sublayers back, the embedding left out; family_share (read, family), of atoms;
        family_mass (read, family), of |depth weight|, where the system has such over earlier writes. Each of these with
        its _interval. n_tokens, n_sequences, n_excluded: what was averaged, and start tokens that were not.

    Raises:
        ValueError: bad input, no token left besides the first, an unknown form, a negative n_boot.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import depth_profile
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.AttnRes())
        >>> found = depth_profile(t2lens.build(cfg, seed=0), [[0, 7, 3, 7], [0, 2, 3, 4]])
        >>> found["weight_mean"].sel(read="1.attn").dropna("source").values.round(3).tolist()
        [0.333, 0.333, 0.333]
        >>> int(found["n_tokens"]), int(found["n_excluded"]), float(found["share_mean"].sel(read="out").sum().round(6))
        (6, 2, 1.0)
    """
    if isinstance(n_boot, bool) or not isinstance(n_boot, int) or n_boot < 0:
        raise ValueError(f"n_boot must be a whole number of at least 0, not {n_boot!r}.")
    if input is None:
        from t2lens.zoo.text import sample_texts

        input = sample_texts()
    batch = read_batch(model, input, attention_mask)
    tokens = _Tokens(model, form)
    for one in progress(sequences(batch), "Reading texts", total=len(batch.tokens)):
        tokens.add(one, start)
    if not sum(tokens.counts):
        raise ValueError("Only first tokens are here, and they are not counted; give longer texts, or start=True.")
    return _finding(model, batch, tokens, start, n_boot, seed)


class _Tokens:
    """The numbers of every counted token, sequence by sequence."""

    def __init__(self, model: Transformer, form: str) -> None:
        self.model, self.form = model, form
        self.reads = model.reads
        self.n = len(model.atoms)
        self.counts: list[int] = []
        self.rows: dict[str, list[np.ndarray]] = {kind: [] for kind in MAPS}  # [n, read, column]
        self.lost: set[str] = set()
        self.sources = model.source_order()

    def add(self, one: Batch, start: bool) -> None:
        """One sequence, without padding around it."""
        record, logits = recorded(self.model, one)
        check_finite(logits, one, "The logits")
        counted = one.valid[0].clone()
        if not start:
            counted[0] = False
        self.counts.append(int(counted.sum()))
        self.rows["weight"].append(self._weights(record, counted))
        residual, shape = self.model.residual, (self.counts[-1], len(self.reads), self.n)
        mixing, length = np.full(shape, np.nan), np.full(shape, np.nan)
        for i, account in enumerate(account_by_read(residual, record, self.form)):
            there = account.read.site.seen + 1
            mixing[:, i, :there] = _numbers(account.mixing()[:there, 0, counted].T)
            length[:, i, :there] = _numbers(account.lengths()[:there, 0, counted].T)
            if self._misses(account.total(), record.made[account.read.name]):
                self.lost.add(account.read.name)
        self.rows["mixing"].append(mixing)
        self.rows["contribution"].append(length)

    def _weights(self, record: ForwardRecord, counted: Tensor) -> np.ndarray:
        own = depth_weights(self.model, record)
        out = np.full((self.counts[-1], len(self.reads), len(self.sources)), np.nan)
        for i, read in enumerate(self.reads):
            columns = [self.sources.index(source.name) for source in self.model.residual.sources(read.site)]
            out[:, i, columns] = _numbers(own[read.name][0, counted]) if read.name in own else 1.0
        return out

    @staticmethod
    def _misses(found: Tensor, made: Tensor) -> bool:
        """Whether an edit of the stream left a read that no sum of writes gives."""
        return float((found - made).abs().max() / made.abs().max().clamp(min=1e-30)) > TOLERANCE

    def maps(self) -> dict[str, np.ndarray]:
        """kind -> [n, read, column]."""
        found = {kind: np.concatenate(self.rows[kind]) for kind in ("weight", "mixing", "contribution")}
        for i, read in enumerate(self.reads):
            if read.name in self.lost:
                found["mixing"][:, i] = found["contribution"][:, i] = np.nan
        total = np.nansum(found["contribution"], axis=2, keepdims=True)
        with np.errstate(invalid="ignore"):
            found["share"] = found["contribution"] / np.where(total > 0, total, 1.0)
        return found

    def sums(self, values: np.ndarray) -> np.ndarray:
        """[..., B]: values [n, ...] summed over the counted tokens of each sequence."""
        ends = np.cumsum([0, *self.counts])
        return np.stack([values[a:b].sum(axis=0) for a, b in pairwise(ends)], axis=-1)


def _numbers(x: Tensor) -> np.ndarray:
    return x.double().cpu().numpy()


def _readers(model: Transformer) -> list[str]:
    """Who reads, of every read: attn (its queries, keys and values alike), local, mlp, out, or carried on."""
    return ["carried" if read.way == "r" else read.site.kind for read in model.reads]


def _families(sources: tuple[Source, ...], values: np.ndarray) -> np.ndarray:
    """[n, family]: values [n, source] of a read, summed by family; NaN where it has no such source."""
    names = np.array(family_of(sources))
    return np.stack(
        [values[:, names == f].sum(axis=1) if f in names else np.full(len(values), np.nan) for f in FAMILIES], axis=1
    )


def _by_family(tokens: _Tokens, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """[n, read, family] of the shares of atoms, and of own weights where their sources are earlier writes."""
    model = tokens.model
    share = np.full((*found["share"].shape[:2], len(FAMILIES)), np.nan)
    mass = share.copy()
    some = False
    for i, read in enumerate(tokens.reads):
        atoms = tuple(Source(name, (name,)) for name in model.atoms[: read.site.seen + 1])
        share[:, i] = _families(atoms, found["share"][:, i, : len(atoms)])
        if not _writes(model, read):
            continue
        some = True
        own = model.residual.sources(read.site)
        size = np.abs(found["weight"][:, i, [tokens.sources.index(source.name) for source in own]])
        total = size.sum(axis=1, keepdims=True)
        mass[:, i] = _families(own, size / np.where(total > 0, total, 1.0))
    return {"family_share": share} | ({"family_mass": mass} if some else {})


def _writes(model: Transformer, read: Read) -> bool:
    """Whether the read has weights of its own, over what was written (streams hold everything, and are no family)."""
    from t2lens.residual.hyper_connections import HyperConnected

    return read.site.hook("depth_attn", read.way) in model.hook_dict and not isinstance(model.residual, HyperConnected)


def _by_distance(tokens: _Tokens, share: np.ndarray, readers: list[str]) -> np.ndarray:
    """[n, reader, distance - 1]: mean over the reads of one reader of the share of the write that far back."""
    kinds = list(dict.fromkeys(readers))
    total = np.zeros((len(share), len(kinds), tokens.n - 1))
    times = np.zeros((len(kinds), tokens.n - 1))
    for i, read in enumerate(tokens.reads):
        at = kinds.index(readers[i])
        for atom in range(1, read.site.seen + 1):
            total[:, at, read.site.index - atom] += share[:, i, atom]
            times[at, read.site.index - atom] += 1
    return total / np.where(times > 0, times, np.nan)


def _finding(model: Transformer, batch: Batch, tokens: _Tokens, start: bool, n_boot: int, seed: int) -> Finding:
    found, readers, data = tokens.maps(), _readers(model), xr.Dataset()
    atoms, sources = model.atoms, tokens.sources

    def mean(name: str, dims: tuple[str, ...], values: np.ndarray, meaning: str, unit: str, suffix: str = "") -> None:
        """The mean over tokens of values [n, ...] and its interval over sequences."""
        put(data, name + suffix, dims, values.mean(axis=0), f"mean over tokens: {meaning}", unit)
        low = high = np.full(values.shape[1:], np.nan)
        if n_boot:
            low, high = interval_of_mean(tokens.sums(values), tokens.counts, seed=seed, draws=n_boot)
        words = f"interval over sequences of {name}{suffix}"
        put(data, f"{name}_interval", (*dims, "bound"), np.stack([low, high], axis=-1), words, unit)

    for kind, (axis, meaning, unit) in MAPS.items():
        dims = ("read", axis)
        mean(kind, dims, found[kind], meaning, unit, "_mean")
        put(data, f"{kind}_std", dims, found[kind].std(axis=0), f"standard deviation over tokens: {meaning}", unit)
        quartiles = np.moveaxis(np.quantile(found[kind], QUARTILES, axis=0), 0, -1)
        put(data, f"{kind}_quartile", (*dims, "q"), quartiles, f"quartiles over tokens: {meaning}", unit)
    sites = [read.site for read in tokens.reads]
    per_block = (len(model.residual.sites) - 1) / model.cfg.n_layers
    back = (1 + np.array([site.index for site in sites])[:, None] - np.arange(len(atoms))) / per_block
    lookback = np.where(np.isnan(found["share"]), 0, found["share"] * back).sum(axis=2)
    lookback[:, [read.name in tokens.lost for read in tokens.reads]] = np.nan
    mean("lookback", ("read",), lookback, "distance in depth to what is read, weighted with share", "blocks")
    by_distance = _by_distance(tokens, found["share"], readers)
    mean("share_by_distance", ("reader", "distance"), by_distance, "share of the write so many sublayers back", "share")
    for name, values in _by_family(tokens, found).items():
        what = "share of the atoms" if name == "family_share" else "share of |depth weight| on the sources"
        mean(name, ("read", "family"), values, f"{what} of a family", "share")
    held = np.full((len(sites), len(sources)), "", dtype=object)
    for i, site in enumerate(sites):
        for source in model.residual.sources(site):
            held[i, sources.index(source.name)] = " ".join(source.atoms)
    put(data, "holds", ("read", "source"), held, "the atoms that a source holds at a read; empty: no such source")
    n_first = 0 if start else len(tokens.counts)
    for name, value, words in (
        ("n_tokens", sum(tokens.counts), "tokens that were averaged over"),
        ("n_sequences", len(tokens.counts), "sequences they are of"),
        ("n_excluded", n_first, "first tokens of sequences, which were not counted"),
    ):
        put(data, name, (), value, words, "count")
    data = data.assign_coords(
        read=np.array([read.name for read in tokens.reads], dtype=object),
        site=("read", np.array([site.name for site in sites], dtype=object)),
        way=("read", np.array([read.way for read in tokens.reads], dtype=object)),
        seen=("read", np.array([site.seen for site in sites])),
        source=np.array(sources, dtype=object),
        atom=np.array(atoms, dtype=object),
        q=np.array(QUARTILES),
        bound=np.array(["low", "high"], dtype=object),
        family=np.array(FAMILIES, dtype=object),
        reader=np.array(list(dict.fromkeys(readers)), dtype=object),
        distance=np.arange(1, len(atoms)),
    )
    columns = ["read", "sources", "most weight on", "its mean", "its sd", "largest share", "its mean share"]
    columns += ["embedding share", "newest share", "look-back in blocks"]
    signed = bool(np.nanmin(found["weight"]) < 0), bool(np.nanmin(found["mixing"]) < 0)
    name = getattr(model, "name", None) or model.cfg.residual.describe()
    return Finding(
        title=f"What reads hold of earlier writes, on average: {name}",
        dataset=data,
        columns=tuple(columns),
        rows=tuple(_row(data, i) for i in range(len(sites))),
        notes=(*_notes(model, tokens, start, n_boot), *batch.notices),
        charts=(
            Chart(
                kind="heat",
                variable="share_mean",
                x="atom",
                y="read",
                title="What share of each read comes from each write",
                label="mean share of the contribution",
            ),
            Chart(
                kind="heat",
                variable="weight_mean",
                x="source",
                y="read",
                signed=signed[0],
                title="The model's own weights of each read over its sources",
                label="mean depth weight",
            ),
            Chart(
                kind="heat",
                variable="mixing_mean",
                x="atom",
                y="read",
                signed=signed[1],
                title="Mixing matrix: how often each write is in each read in the end",
                label="mean coefficient",
            ),
            Chart(
                kind="lines",
                variable="share_by_distance",
                x="distance",
                by="reader",
                title="How far back in depth reads look: share by number of sublayers back",
                label="mean share of the contribution",
            ),
            Chart(
                kind="stack",
                variable="family_share",
                x="read",
                by="family",
                title="What each read is made of, by age of the writes",
                label="mean share of the contribution",
            ),
        ),
    )


def _row(data: xr.Dataset, i: int) -> tuple[Value, ...]:
    def most(kind: str) -> tuple[str | None, float | None, float | None]:
        axis = MAPS[kind][0]
        values = data[f"{kind}_mean"].values[i]
        if not np.isfinite(values).any():
            return None, None, None
        at = int(np.nanargmax(np.abs(values)))
        return str(data[axis].values[at]), float(values[at]), float(data[f"{kind}_std"].values[i, at])

    def plain(value: Any) -> float | None:
        return float(value) if np.isfinite(value) else None

    family = data["family_share"].values[i]
    return (
        str(data["read"].values[i]),
        int((data["holds"].values[i] != "").sum()),
        *most("weight"),
        *most("share")[:2],
        plain(family[FAMILIES.index("embedding")]),
        plain(family[FAMILIES.index("current")]),
        plain(data["lookback"].values[i]),
    )


def _notes(model: Transformer, tokens: _Tokens, start: bool, n_boot: int) -> list[str]:
    n, several = sum(tokens.counts), len(tokens.counts)
    counted = "counted" if start else f"excluded ({several})"
    notes = [
        f"n = {n} tokens of {several} sequence(s), padding excluded; the first token of every sequence is {counted}.",
        "Spread (sd, quartiles) is over these tokens. Shares are taken per token and then averaged.",
    ]
    if several > 1 and n_boot:
        notes.append(f"Intervals (low, high) of means: 95%, bootstrap over sequences, {n_boot} draws.")
    else:
        notes.append("There are no intervals: " + ("they were not asked for." if several > 1 else "one sequence."))
    if model.residual.linear_form(tokens.form).coefficients() != "scalar":
        notes.append("A coefficient is a matrix or a vector in this system: mixing is its energy-weighted mean.")
    if tokens.lost:
        names = ", ".join(read.name for read in tokens.reads if read.name in tokens.lost)
        notes.append(f"The stream was edited: no sum of writes gives the reads {names}, and they are left out.")
    notes.append(
        "Averages of weights say what is typical, not what matters: what a route does is measured by `measure_effects`."
    )
    return notes

"""DeepCrossAttention (arXiv 2502.06785): queries, keys and values each read their own mixture of what blocks wrote.

    GRN-v1   g = sum_j b[j] f_j                   GRN-v3   g = sum_j (b[:, j] + relu(w . f_j)) * f_j
    GRN-v2   g = sum_j b[:, j] * f_j              f_0 the embedding, f_j what block j wrote, b[:, j] per channel

    q, k, v = GRN^Q(f), GRN^K(f), GRN^V(f)     att = MHA(norm q, norm k, norm v)     f_t = att + MLP(norm(att + r))

Sections 3 and 4. There is no stream: the sum of the sources is what a residual would carry, r is the block's skip input
(inside f_t nothing of it), and the readout is one more GRN. k-DCA (section 4, `recent`) keeps f_0, the last k sources,
and the sum of those between. Init: b = 1 and a silent gate, which is the plain residual.

The gate as written cannot train: at w = 0 the derivative of relu(w . f) is 0 for ever (`gate_std=0.0`; `untrained`
names the parameters). The default start is w ~ N(0, 1e-2). The paper also leaves open which mixture r is
(`skip_source`), and its Figure 10 reads as if b stood inside the ReLU, its parameter counts as if there were a second
bias there (`gate_form`); with "relu_sum" the gate trains from w = 0 too. No code was released. The public
re-implementation by lucidrains normalises the sources before the dot product (`key_norm="rms"`), takes r = q and,
where sources are limited, keeps the first and last k and drops the others (`between="drop"`), which is no residual any
more.

A coefficient is a vector over channels. The depth weights are its mean over the channels, so that the picture and its
hook point mean something; the deviation of each channel from that mean is added beside them.
With ShortSWA before attention (ours; the paper has none) ShortSWA reads r, and what it writes is added to q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from t2lens.config import ModelConfig, ResidualConfig, check_one_of, check_plain, check_positive
from t2lens.residual.base import Coefficients, Gates, ResidualSystem, Site, Source, WeightsFrom
from t2lens.residual.sources import Sources
from t2lens.sublayers.norms import rms_scale, wide
from t2lens.sublayers.positions import Places

__all__ = ["DCA", "DeepCrossAttention"]


@dataclass(frozen=True, kw_only=True)
class DCA(ResidualConfig):
    """DeepCrossAttention (arXiv 2502.06785): per query, key and value a mixture of what every block wrote.

    grn: "v1" (static scalars), "v2" (static, per channel) or "v3" (per channel, plus a gate made of each source).
    ways: "qkv", or "one" mixture for all three, as in the paper's ablation.
    recent: k of k-DCA, or None (all sources). between: what becomes of the others, "sum" (the paper: one source that
        sums them; f_0 and the last k stay) or "drop" (lucidrains: gone; the first and the last k stay).
    gate_form: "paper" b + relu(w.f), "inner_bias" b + relu(w.f + c) with c per channel, or "relu_sum" relu(b + w.f).
    skip_source: what the block's MLP adds attention to: the mixture of "q", one of its "own", or the plain "sum".
    key_norm: "rms" divides sources by their root mean square (and scales them) for the gate's dot product.
    gate_std: w starts as N(0, gate_std); at 0.0, as the paper has it, the gate never trains.
    """

    kind: ClassVar[str] = "dca"
    grn: Literal["v1", "v2", "v3"] = "v3"
    ways: Literal["qkv", "one"] = "qkv"
    recent: int | None = None
    between: Literal["sum", "drop"] = "sum"
    gate_form: Literal["paper", "inner_bias", "relu_sum"] = "paper"
    skip_source: Literal["q", "own", "sum"] = "q"
    key_norm: Literal["none", "rms"] = "none"
    gate_std: float = 1e-2

    def __post_init__(self) -> None:
        check_plain(self)
        check_one_of(self, "grn", ("v1", "v2", "v3"))
        check_one_of(self, "ways", ("qkv", "one"))
        check_one_of(self, "between", ("sum", "drop"))
        check_one_of(self, "gate_form", ("paper", "inner_bias", "relu_sum"))
        check_one_of(self, "skip_source", ("q", "own", "sum"))
        check_one_of(self, "key_norm", ("none", "rms"))
        if self.recent is not None:
            check_positive(self, "recent")
        if self.ways == "one" and self.skip_source == "own":
            raise ValueError('DCA: skip_source="own" needs ways="qkv"; with one mixture take "q" (that one) or "sum".')
        if self.grn != "v3" and (self.gate_form, self.key_norm) != ("paper", "none"):
            raise ValueError(f"DCA: GRN-{self.grn} has no gate, so gate_form and key_norm must stay as they are.")
        if not self.gate_std >= 0:
            raise ValueError(f"DCA.gate_std must not be negative, it is {self.gate_std}.")

    def describe(self) -> str:
        recent = "" if self.recent is None else f", {self.recent} recent sources"
        return f"DeepCrossAttention, GRN-{self.grn}{recent}"


@dataclass
class _State:
    done: Sources  # f_0, f_1, ..., as many as are kept
    skip: Tensor  # r of this block
    total: Tensor  # all f_j summed up, where the skip is that
    scales: list[Tensor | None] = field(default_factory=list)  # root mean squares of the sources, for the key norm
    ways: dict[str, Tensor] = field(default_factory=dict)  # the mixtures of this block, "r" the skip
    weights: Gates = field(default_factory=dict)  # what they were made with
    written: Tensor | None = None  # by this block so far


class DeepCrossAttention(ResidualSystem):
    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        super().__init__(cfg, sites)
        assert isinstance(cfg.residual, DCA)
        self.cfg, d = cfg.residual, cfg.d_model
        # one aggregator per block and one for the readout; its hook points stand at the block's attention
        self.reader = [site for site in sites if site.kind in ("attn", "out")]
        counts = [(len(self._mixtures(at)), len(self._columns(at))) for at in range(len(self.reader))]
        shape = () if self.cfg.grn == "v1" else (d,)
        self.bias = nn.ParameterList(nn.Parameter(torch.ones(*count, *shape)) for count in counts)
        if self.cfg.grn == "v3":
            self.gate_weight = nn.ParameterList(nn.Parameter(torch.zeros(c, d)) for c, _ in counts)
            if self.cfg.gate_form == "inner_bias":
                self.inner_bias = nn.ParameterList(nn.Parameter(torch.zeros(*count, d)) for count in counts)
            if self.cfg.key_norm == "rms":
                self.key_scale = nn.Parameter(torch.ones(len(counts), d))
        for at, site in enumerate(self.reader):
            for way in self._mixtures(at):
                if self.cfg.grn == "v3":
                    name = site.hook("depth_scores", way)
                    meaning = f"w . f of the read at {site.name}, before the ReLU"
                    self.hook_point(name, shape="batch pos source", meaning=meaning, unit="logit")
                self.depth_hooks(site, counts[at][1], way, scores=False)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """The gate's w N(0, gate_std), drawn from `generator`; the rest as the module docstring says."""
        if self.cfg.grn == "v3" and self.cfg.gate_std > 0:
            for weight in self.gate_weight:
                weight.data.normal_(0.0, self.cfg.gate_std, generator=generator)

    @property
    def untrained(self) -> tuple[str, ...]:
        """Names of the parameters that get no gradient from the start on, by the paper's own rule."""
        if self.cfg.grn != "v3" or self.cfg.gate_std > 0 or self.cfg.gate_form == "relu_sum":
            return ()
        return tuple(n for n, _ in self.named_parameters() if n.split(".")[0] != "bias")

    # --- which aggregator makes what
    def _at(self, site: Site) -> int:
        return len(self.reader) - 1 if site.layer is None else site.layer

    def _mixtures(self, at: int) -> tuple[str, ...]:
        """The ways in which aggregator `at` mixes, each with its own weights."""
        if at == self.model_cfg.n_layers:
            return ("",)
        ways = ("q", "k", "v") if self.cfg.ways == "qkv" else ("",)
        return (*ways, "r") if self.cfg.skip_source == "own" else ways

    def _columns(self, at: int) -> list[tuple[int, ...]]:
        """The sources of aggregator `at`: which f each one holds."""
        columns: list[tuple[int, ...]] = [(0,)]
        for new in range(1, at + 1):
            columns.append((new,))
            leaves = self._leaves(len(columns))
            if leaves is not None:
                gone = columns.pop(leaves)
                if self.cfg.between == "sum":
                    columns[leaves - 1] += gone
        return columns

    def _leaves(self, n: int) -> int | None:
        """Which of n sources is one too many: it is summed into the one before it, or dropped."""
        k = self.cfg.recent
        if k is None:
            return None
        if self.cfg.between == "sum":
            return 2 if n > k + 2 else None
        return k if n > 2 * k else None

    def ways(self, site: Site) -> tuple[str, ...]:
        return self._mixtures(self._at(site)) if site.kind == "attn" else ("",)

    @property
    def _skip(self) -> str | None:
        """The mixture that is the block's skip input; None where that is the plain sum."""
        own = {"own": "r", "sum": None}
        return own.get(self.cfg.skip_source, "q" if self.cfg.ways == "qkv" else "")

    # --- nonlinear
    def read_gates(self, state: _State, site: Site) -> Gates:
        """All mixtures of a block are made as it opens; with ShortSWA in front, attention reads them afterwards."""
        if not site.opens:
            return state.weights if site.kind == "attn" else {}
        at = self._at(site)
        reader, gates, like = self.reader[at], {}, state.done[0]
        scores = self._scores(state, at) if self.cfg.grn == "v3" else None
        for c, way in enumerate(self._mixtures(at)):
            name, bias = reader.hook("depth_attn", way), wide(self.bias[at][c])
            level = bias if self.cfg.grn == "v1" else bias.mean(dim=-1)
            if scores is None:
                gates[f"weights_{way}"] = self.spread(name, level.to(like.dtype), like)
                continue
            score = self.hook_points[reader.hook("depth_scores", way)](scores[..., c, :])
            if self.cfg.gate_form == "paper":
                weights = level + score.relu()
            else:
                gates[f"scores_{way}"] = score
                weights = torch.stack([x.mean(dim=-1) for x in self._coefficients(at, c, score)], dim=-1)
            gates[f"weights_{way}"] = self.hook_points[name](weights.to(like.dtype))
        state.weights = gates
        return gates

    def _scores(self, state: _State, at: int) -> Tensor:
        """w . f for every way and source: [B, T, W, S]."""
        if self.cfg.key_norm == "none":
            return wide(state.done.dot(self.gate_weight[at].T))
        state.scales += [None] * (len(state.done) - len(state.scales))
        for j, scale in enumerate(state.scales):
            if scale is None:
                state.scales[j] = rms_scale(state.done[j], self.model_cfg.norm_eps)
        scales = torch.stack([s for s in state.scales if s is not None], dim=-1)  # [B, T, 1, S]
        return wide(state.done.dot((self.gate_weight[at] * self.key_scale[at]).T)) / scales

    def _coefficients(self, at: int, c: int, score: Tensor) -> Iterator[Tensor]:
        """What multiplies each source, per channel [B, T, D], where that is not a sum of a vector and a number."""
        for j in range(score.shape[-1]):
            bias, one = wide(self.bias[at][c, j]), score[..., j : j + 1]
            if self.cfg.gate_form == "relu_sum":
                yield (bias + one).relu()
            else:
                yield bias + (one + wide(self.inner_bias[at][c, j])).relu()

    # --- linear
    def begin(self, embed: Tensor, places: Places | None = None) -> _State:
        n = self.model_cfg.n_layers + 1
        if self.cfg.recent is not None:  # one more than stays, before the oldest leaves
            n = min(n, 1 + (self.cfg.recent + 2 if self.cfg.between == "sum" else 2 * self.cfg.recent))
        return _State(done=Sources(n, embed), skip=embed, total=embed)

    def enter(self, state: _State, site: Site, gates: Gates) -> _State:
        if not site.opens:
            return state
        at = self._at(site)
        ways = self._mixtures(at)
        mixed = state.done.mix_ways(torch.stack([gates[f"weights_{way}"] for way in ways], dim=-2))
        if self.cfg.grn != "v1":
            mixed = [
                state.done.add_channels(x, (d.to(x.dtype) for d in self._deviations(at, c, gates.get(f"scores_{way}"))))
                for c, (way, x) in enumerate(zip(ways, mixed, strict=True))
            ]
        state.ways = dict(zip(ways, mixed, strict=True))
        if site.layer is not None:
            state.skip = state.total if self._skip is None else state.ways[self._skip]
        return state

    def _deviations(self, at: int, c: int, score: Tensor | None) -> Iterator[Tensor]:
        """Each source's coefficients less their mean over the channels, which is its depth weight: [..., D]."""
        for x in wide(self.bias[at][c]) if score is None else self._coefficients(at, c, score):
            yield x - x.mean(dim=-1, keepdim=True)

    def read(self, state: _State, site: Site, gates: Gates) -> Tensor | dict[str, Tensor]:
        if site.kind in ("local", "mlp"):
            return state.skip if state.written is None else state.skip + state.written
        reads = {way: x if state.written is None else x + state.written for way, x in state.ways.items()}
        return reads if len(reads) > 1 else reads[""]

    def write(self, state: _State, site: Site, atom: Tensor, gates: Gates) -> _State:
        state.written = atom if state.written is None else state.written + atom
        if site.closes:
            state.done.append(state.written)
            if self._skip is None:
                state.total = state.total + state.written
            if (leaves := self._leaves(len(state.done))) is not None:
                into = leaves - 1 if self.cfg.between == "sum" else None
                state.done.drop(leaves, into=into)
                if state.scales:
                    del state.scales[leaves]
                    if into is not None:
                        state.scales[into] = None
            state.written = None
        return state

    # --- what the numbers mean
    def coefficients(self) -> Coefficients:
        return "scalar" if self.cfg.grn == "v1" else "channel"

    def sources(self, site: Site) -> tuple[Source, ...]:
        if site.kind == "mlp" or (site.kind == "local" and self._skip is None):
            return (Source("skip", self.atoms[: site.seen + 1]),)
        width = len([s for s in self.sites if s.layer == 0])
        out = []
        for held in self._columns(self._at(site)):
            name = f"block{held[0]}" if len(held) == 1 else f"block{held[0]}..{held[-1]}"
            atoms = self.atoms[1 + width * (held[0] - 1) : 1 + width * held[-1]]
            out.append(Source(name, atoms) if held[0] else Source("embed", ("embed",)))
        return tuple(out)

    def depth_weights(self, site: Site, gates: Gates) -> Tensor | dict[str, Tensor] | None:
        if site.kind == "mlp" or (site.kind == "local" and self._skip is None):
            return None
        if site.kind == "local":
            return gates[f"weights_{self._skip}"]
        weights = {way: gates[f"weights_{way}"] for way in self.ways(site)}
        return weights if len(weights) > 1 else weights[""]

    def weights_from(self, site: Site) -> WeightsFrom:
        has_own = site.kind != "mlp" and (site.kind != "local" or self._skip is not None)
        return "keys" if has_own and self.cfg.grn == "v3" else "nothing"

"""Attention Residuals (Kimi Team, arXiv 2603.15031): every sublayer attends over what was written before it.

    s_{l,j} = w_l . RMSNorm(v_j; g_l)        alpha_l = softmax_j(s_{l,.})        h_l = sum_j alpha_{l,j} v_j

per token, over depth. w_l is a learned vector of the reader (no input dependence, no 1/sqrt(d)); the values v_j are the
raw sources, not normalised; nothing is added to h_l afterwards: there is no running stream. The readout is one more
such read. Full (section 3): v_0 = embed, v_{j+1} = raw output of sublayer j. Block (section 4): sublayer outputs are
summed within a block; a reader sees embed, the sums of the completed blocks and, inside a block, the partial sum.
Init: w = 0 (weights exactly 1/S), g = 1.

Units: the paper's "layer" is a sublayer, and its block_size counts sublayers, as ours does. Kimi K3's
`attn_res_block_size` (12) counts transformer layers: block_size = 2 * 12. K3 pushes a block only after the first read
behind it, from a sum that it still calls current; the sources of every read are the same, and so is the result.

Ablations of the paper, as values: `window` (embed and the last K sources), `normaliser` "sigmoid", `key_norm` "none",
`query` "none" with `bias` "per_source" (scalar weights that no input moves). Not covered, because the text does not fix
them: queries computed from the input, and several heads. "sparsemax" (Martins & Astudillo, arXiv 1602.02068), "entmax"
(alpha 1.5; Peters et al., arXiv 1905.05702) and "top_k" give exact zeros; they are not of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from t2lens.config import ModelConfig, ResidualConfig, check_one_of, check_plain, check_positive
from t2lens.residual.base import Gates, ResidualSystem, Site, Source, WeightsFrom
from t2lens.residual.sources import Sources
from t2lens.sublayers.norms import rms_scale, wide
from t2lens.sublayers.positions import Places

__all__ = ["AttentionResiduals", "AttnRes", "Keys", "entmax", "sparsemax", "top_k_softmax"]

NORMALISERS = ("softmax", "sparsemax", "entmax", "top_k", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class AttnRes(ResidualConfig):
    """Attention Residuals (arXiv 2603.15031): softmax over earlier writes, one learned query per read.

    block_size: sublayers per block (Kimi K3 counts layers: twice that); None is the full form, every write a source.
    window: how many sources besides embed a read sees, the newest ones; None: all. normaliser: of the depth scores;
    "top_k" keeps the `top_k` largest. key_norm: RMSNorm of the keys with a learned weight, without one, or none at all.
    query: "none" leaves the bias alone as the score. bias: a learned number added to the score of the newest source, or
    one for every source of every read, starting at `bias_init`.
    """

    kind: ClassVar[str] = "attnres"
    block_size: int | None = None
    window: int | None = None
    normaliser: Literal["softmax", "sparsemax", "entmax", "top_k", "sigmoid"] = "softmax"
    top_k: int | None = None
    query: Literal["learned", "none"] = "learned"
    key_norm: Literal["learned", "unweighted", "none"] = "learned"
    bias: Literal["none", "newest", "per_source"] = "none"
    bias_init: float = 0.0

    def __post_init__(self) -> None:
        for name in ("block_size", "window", "top_k"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        check_plain(self)
        check_one_of(self, "normaliser", NORMALISERS)
        check_one_of(self, "query", ("learned", "none"))
        check_one_of(self, "key_norm", ("learned", "unweighted", "none"))
        check_one_of(self, "bias", ("none", "newest", "per_source"))
        if (self.normaliser == "top_k") != (self.top_k is not None):
            raise ValueError(
                'AttnRes: normaliser "top_k" needs top_k, the number of sources it keeps, and no other does.'
            )
        if self.query == "none" and (self.bias != "per_source" or self.key_norm != "none"):
            raise ValueError(
                'AttnRes: without a query nothing scores the keys, so query "none" needs bias "per_source" '
                'and key_norm "none".'
            )

    def describe(self) -> str:
        parts = ["full" if self.block_size is None else f"blocks of {self.block_size} sublayers"]
        if self.window is not None:
            parts.append(f"embed and the last {self.window} sources")
        if self.normaliser != "softmax":
            parts.append(f"top {self.top_k}" if self.normaliser == "top_k" else self.normaliser)
        return f"Attention Residuals, {', '.join(parts)}"


class Keys(Sources):
    """Sources that a learned query scores by their direction; the size of each is computed once."""

    def __init__(self, capacity: int, first: Tensor, eps: float) -> None:
        super().__init__(capacity, first)
        self.eps = eps
        self._scales: list[Tensor] = []

    def take(self, rows: Tensor) -> Self:
        taken = super().take(rows)
        taken._scales = [scale[rows] for scale in self._scales]
        return taken

    def score(self, direction: Tensor, start: int = 0, *, normed: bool = True) -> Tensor:
        """[B, T, S], in at least float32: direction . v / rms(v) for every source from `start` on."""
        dots = wide(self.dot(direction, start))
        if not normed:
            return dots
        for j in range(len(self._scales), len(self)):
            x = self[j] if self._shared is None or j >= self.n_shared else self._shared[j]
            self._scales.append(rms_scale(x, self.eps).expand(*self[j].shape[:-1], 1))
        return dots / torch.cat(self._scales[start:], dim=-1)

    def score_of(self, x: Tensor, direction: Tensor, *, normed: bool = True) -> Tensor:
        """[B, T, 1]: the same of a tensor that is not (yet) one of the sources."""
        dot = wide(x @ direction).unsqueeze(-1)
        return dot / rms_scale(x, self.eps) if normed else dot


@dataclass
class _State:
    done: Keys  # completed sources
    partial: Tensor | None = None  # the block being summed


class AttentionResiduals(ResidualSystem):
    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        super().__init__(cfg, sites)
        assert isinstance(cfg.residual, AttnRes)
        self.cfg = cfg.residual
        self.weights_sum_to_one = self.cfg.normaliser != "sigmoid"
        self.size = self.cfg.block_size or 1  # sublayers per source
        if self.cfg.query == "learned":
            self.query = nn.Parameter(torch.zeros(len(sites), cfg.d_model))
        if self.cfg.key_norm == "learned":
            self.key_norm = nn.Parameter(torch.ones(len(sites), cfg.d_model))
        most = max(len(self.sources(site)) for site in sites)
        if self.cfg.bias != "none":
            n = 1 if self.cfg.bias == "newest" else most
            self.bias = nn.Parameter(torch.full((len(sites), n), float(self.cfg.bias_init)))
        for site in sites:
            self.depth_hooks(site, len(self.sources(site)))

    def begin(self, embed: Tensor, places: Places | None = None) -> _State:
        capacity = 2 + (len(self.sites) - 1) // self.size
        return _State(done=Keys(capacity, embed, self.model_cfg.norm_eps))

    def read_gates(self, state: _State, site: Site) -> Gates:
        scores = self._scores(state, site)
        if self.cfg.bias == "newest":
            scores = torch.cat([scores[..., :-1], scores[..., -1:] + self.bias[site.index]], dim=-1)
        elif self.cfg.bias == "per_source":
            scores = scores + self.bias[site.index, : scores.shape[-1]]
        if scores.shape[-1] > 1:
            scores = self.hook_points[site.hook("depth_scores")](scores)
        weights = _normalise(scores, self.cfg)
        return {"weights": self.hook_points[site.hook("depth_attn")](weights.to(state.done[0].dtype))}

    def _scores(self, state: _State, site: Site) -> Tensor:
        """[B, T, S] of the sources in view, embed first, before any bias."""
        if self.cfg.query == "none":
            embed = wide(state.done[0])
            return embed.new_zeros(*embed.shape[:-1], len(self.sources(site)))
        direction, normed = self.query[site.index], self.cfg.key_norm != "none"
        if self.cfg.key_norm == "learned":
            direction = direction * self.key_norm[site.index]
        oldest = self._oldest(site)
        start = oldest if oldest > 1 else 0
        # in a window of one source inside a block no completed one is in view
        parts = [state.done.score(direction, start, normed=normed)] if start < len(state.done) else []
        if oldest > 1:
            parts.insert(0, state.done.score_of(state.done[0], direction, normed=normed))
        if self._reads_partial(site):
            assert state.partial is not None
            parts.append(state.done.score_of(state.partial, direction, normed=normed))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def read(self, state: _State, site: Site, gates: Gates) -> Tensor:
        weights, oldest, n = gates["weights"], self._oldest(site), len(state.done)
        if oldest > 1:
            n = 1 + n - oldest  # completed sources in view
            mixture = state.done[0] * weights[..., :1]
            if n > 1:
                mixture = mixture + state.done.mix(weights[..., 1:n], oldest)
        else:
            mixture = state.done.mix(weights[..., :n])
        if self._reads_partial(site):
            assert state.partial is not None
            mixture = torch.addcmul(mixture, state.partial, weights[..., n:])
        return mixture

    def write(self, state: _State, site: Site, atom: Tensor, gates: Gates) -> _State:
        state.partial = atom if state.partial is None else state.partial + atom
        if self._completes(site):
            state.done.append(state.partial)
            state.partial = None
        return state

    def _completes(self, site: Site) -> bool:
        """Whether the write of `site` completes a source."""
        return (site.index + 1) % self.size == 0 or site.index + 1 == len(self.sites) - 1

    def _reads_partial(self, site: Site) -> bool:
        return site.index % self.size != 0 and site.kind != "out"

    def _oldest(self, site: Site) -> int:
        """The first source besides embed (source 0) that `site` sees."""
        if self.cfg.window is None:
            return 1
        n_done = 1 + -(-site.index // self.size) if site.kind == "out" else 1 + site.index // self.size
        return max(1, n_done + self._reads_partial(site) - self.cfg.window)

    def sources(self, site: Site) -> tuple[Source, ...]:
        out = [Source("embed", ("embed",))]
        ends = [i + 1 for i in range(site.index) if self._completes(self.sites[i])]
        start = 0
        for n, end in enumerate([*ends, site.index] if self._reads_partial(site) else ends, start=1):
            held = self.atoms[1 + start : 1 + end]
            partial = end == site.index and self._reads_partial(site)
            name = held[0] if self.cfg.block_size is None else "partial" if partial else f"block{n}"
            out.append(Source(name, held))
            start = end
        return (out[0], *out[self._oldest(site) :])

    def depth_weights(self, site: Site, gates: Gates) -> Tensor:
        return gates["weights"]

    def weights_from(self, site: Site) -> WeightsFrom:
        return "keys" if self.cfg.query == "learned" else "nothing"


# --- from scores to weights ---------------------------------------------------------------------------------------


def _normalise(scores: Tensor, cfg: AttnRes) -> Tensor:
    if cfg.normaliser == "top_k":
        assert cfg.top_k is not None
        return top_k_softmax(scores, cfg.top_k)
    if cfg.normaliser == "sigmoid":
        return scores.sigmoid()
    return {"softmax": torch.softmax, "sparsemax": sparsemax, "entmax": entmax}[cfg.normaliser](scores, dim=-1)


def sparsemax(scores: Tensor, dim: int = -1) -> Tensor:
    """Euclidean projection of `scores` onto the simplex along `dim` (arXiv 1602.02068): sums to 1, exact zeros."""
    scores = scores.movedim(dim, -1)
    ordered = scores.sort(dim=-1, descending=True).values
    k = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    excess = ordered.cumsum(dim=-1) - 1
    support = (k * ordered > excess).sum(dim=-1, keepdim=True).clamp(min=1)  # none where scores are NaN: so is all
    threshold = excess.gather(-1, support - 1) / support
    return (scores - threshold).clamp(min=0).movedim(-1, dim)


def entmax(scores: Tensor, dim: int = -1) -> Tensor:
    """entmax with alpha 1.5 along `dim`, exact (arXiv 1905.05702, algorithm 2): p = max(s/2 - tau, 0)^2, sum p = 1."""
    half = scores.movedim(dim, -1) / 2
    half = half - half.amax(dim=-1, keepdim=True)
    with torch.no_grad():  # which entries are not zero; the threshold is then differentiable in those alone
        ordered = half.sort(dim=-1, descending=True).values
        k = torch.arange(1, half.shape[-1] + 1, device=half.device, dtype=half.dtype)
        mean = ordered.cumsum(dim=-1) / k
        spread = ordered.square().cumsum(dim=-1) - k * mean.square()
        threshold = mean - ((1 - spread) / k).clamp(min=0).sqrt()
        n = (threshold <= ordered).sum(dim=-1, keepdim=True).clamp(min=1)  # as in sparsemax
        support = half >= ordered.gather(-1, n - 1)
        n = support.sum(dim=-1, keepdim=True)  # of equal entries all or none
    mean = (half * support).sum(dim=-1, keepdim=True) / n
    spread = ((half - mean) * support).square().sum(dim=-1, keepdim=True)
    tau = mean - ((1 - spread) / n).sqrt()
    return (half - tau).clamp(min=0).square().movedim(-1, dim)


def top_k_softmax(scores: Tensor, k: int) -> Tensor:
    """Softmax over the k largest of the last axis, exact zeros elsewhere; fewer than k: all of them."""
    largest = scores.topk(min(k, scores.shape[-1]), dim=-1)
    return torch.zeros_like(scores).scatter(-1, largest.indices, largest.values.softmax(dim=-1))

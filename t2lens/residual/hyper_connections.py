"""Hyper-Connections: n streams X [n, D] in place of one. Every sublayer mixes them, reads a mixture, and writes to all.

    h = sum_i pre[i] X[i]        X'[j] = sum_i res[j, i] X[i] + post[j] F(h)        X_0 = n copies of the embedding

per token, the three of them from X: a static part plus a learned gain times a projection of the normed streams. One
convention here: res[to, from] is the matrix that multiplies the state, X' = res X + post f.

    HC (arXiv 2409.19606, Algorithm 2)   static + s tanh(LayerNorm(X_i) W), each stream by itself; readout: the sum
    mHC (arXiv 2512.24880, section 4)    logits s (RMSNorm(vec X) W) + b of all streams flattened; pre = sigmoid,
                                         post = 2 sigmoid, res = Sinkhorn(exp logits), columns then rows, 20 times
    DeepSeek-V4                          the same with eps in pre and Sinkhorn; readout: gates of its own, like pre
    mhc-lite repository (arXiv 2601.05732)  the transpose of mHC's rule ("mhc": the sum of the streams is conserved), or
                                         res = a softmax over the n! permutation matrices (exactly doubly stochastic);
                                         readout: the final norm of each stream, summed

Paper and code: HC's alpha, V4's comb and the repository's H have axes [from, to] and are used transposed; mHC's paper
writes H_res x. Loaders transpose once. V4 norms after its projection, and the repository has a norm weight 1 + gamma:
both are a projection of the unweighted norm (W absorbs the weight). V4's softmax is the first division of Sinkhorn.

Init "identity": projections 0, gains 0.01, and the static part at the plain residual as near as its squashing allows
(HC: exactly, sublayer l reads stream l mod n; sigmoids: +1 on that stream, -1 on others; res: 0 and -8). "normal", as
in ports of DeepSeek-V4: projections N(0, 0.02), gains 1, static part 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import factorial
from typing import Any, ClassVar, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from t2lens.config import ModelConfig, ResidualConfig, check_one_of, check_plain, check_positive
from t2lens.residual.base import Coefficients, Gates, ResidualSystem, Site, Source, WeightsFrom
from t2lens.residual.doubly_stochastic import permutation_table, sinkhorn
from t2lens.sublayers.norms import rms_scale, wide
from t2lens.sublayers.positions import Places

__all__ = ["HyperConnected", "HyperConnections", "composite"]

Squash = Literal["none", "sigmoid", "2sigmoid", "softmax"]
Res = Literal["free", "sinkhorn", "permutations", "static", "identity"]
_ITERATIONS = 1000  # long after Sinkhorn has converged; a config from elsewhere could ask for a billion
_MOST_PERMUTED = 6  # 720 permutations


@dataclass(frozen=True, kw_only=True)
class HyperConnections(ResidualConfig):
    """Hyper-Connections (arXiv 2409.19606) as they stand; `mhc`, `mhc_lite` and `deepseek_v4` make their descendants.

    coefficients: "tanh" b + s tanh(r), "linear" b + s r, or "static" b: static part b, gain s, projection r.
    pre, post: what is made of them for the read and for the write: "none" (taken as they are), "sigmoid", "2sigmoid",
        "softmax" (over streams).
    res: the matrix made of them: "free" (taken as they are), "sinkhorn", "permutations" (a softmax over all n! of
        them); or "static" (b alone, whatever the others do), "identity" (no exchange between streams).
    norm, norm_over, norm_eps: of what is projected; one "stream" at a time, or "all" of them flattened to n D numbers.
        None: the eps of the model's norms.
    gains: "shared" (pre and res have one, as HC) or "separate".
    readout: "sum", "mean", "head" (sigmoid gates of its own), or "normed_sum" (the model's norm, without weight, of
        each stream, then the sum: the final norm is then usually Norm(kind="none")).
    sinkhorn_last: the side of res that sums to 1 exactly: "rows" (each new stream is a mean of the old ones) or
        "columns" (the sum of the streams is conserved).
    eps: added to sigmoids of a read, and inside Sinkhorn.
    """

    kind: ClassVar[str] = "hyper-connections"
    n_streams: int = 4
    coefficients: Literal["tanh", "linear", "static"] = "tanh"
    pre: Squash = "none"
    post: Squash = "none"
    res: Res = "free"
    norm: Literal["layer", "rms"] = "layer"
    norm_over: Literal["stream", "all"] = "stream"
    norm_eps: float | None = None
    gains: Literal["shared", "separate"] = "shared"
    readout: Literal["sum", "mean", "head", "normed_sum"] = "sum"
    sinkhorn_iterations: int = 20
    sinkhorn_last: Literal["rows", "columns"] = "rows"
    eps: float = 0.0
    init: Literal["identity", "normal"] = "identity"

    @classmethod
    def mhc(cls, **changes: Any) -> Self:
        """Manifold-constrained Hyper-Connections (arXiv 2512.24880)."""
        return cls(**_constrained({"res": "sinkhorn"}, changes))

    @classmethod
    def mhc_lite(cls, **changes: Any) -> Self:
        """mHC-lite (arXiv 2601.05732): res is a mixture of permutations."""
        return cls(**_constrained({"res": "permutations", "readout": "normed_sum"}, changes))

    @classmethod
    def deepseek_v4(cls, **changes: Any) -> Self:
        """The production form of mHC in DeepSeek-V4."""
        own = {"res": "sinkhorn", "readout": "head", "eps": 1e-6, "norm_eps": 1e-6, "init": "normal"}
        return cls(**_constrained(own, changes))

    def __post_init__(self) -> None:
        check_plain(self)
        check_positive(self, "n_streams", "sinkhorn_iterations")
        if self.sinkhorn_iterations > _ITERATIONS:
            raise ValueError(f"HyperConnections.sinkhorn_iterations must be at most {_ITERATIONS}.")
        check_one_of(self, "coefficients", ("tanh", "linear", "static"))
        for name in ("pre", "post"):
            check_one_of(self, name, get_args(Squash))
        check_one_of(self, "res", get_args(Res))
        check_one_of(self, "norm", ("layer", "rms"))
        check_one_of(self, "norm_over", ("stream", "all"))
        check_one_of(self, "gains", ("shared", "separate"))
        check_one_of(self, "readout", ("sum", "mean", "head", "normed_sum"))
        check_one_of(self, "sinkhorn_last", ("rows", "columns"))
        check_one_of(self, "init", ("identity", "normal"))
        if not self.eps >= 0 or (self.norm_eps is not None and not self.norm_eps > 0):
            raise ValueError(
                "HyperConnections: eps must not be negative and norm_eps must be positive, "
                f"not {self.eps} and {self.norm_eps}."
            )
        if self.res == "permutations" and self.n_streams > _MOST_PERMUTED:
            raise ValueError(
                f"HyperConnections: {self.n_streams} streams have {factorial(self.n_streams)} permutations; "
                f"res 'permutations' takes at most {_MOST_PERMUTED} streams."
            )
        if self.res == "permutations" and self.coefficients != "static" and self.norm_over == "stream":
            raise ValueError(
                "HyperConnections: logits of permutations belong to no single stream; "
                "res 'permutations' needs norm_over 'all' (or static coefficients)."
            )

    @property
    def n_res(self) -> int:
        """Logits of res per token."""
        if self.res == "identity":
            return 0
        return factorial(self.n_streams) if self.res == "permutations" else self.n_streams**2

    @property
    def dynamic_parts(self) -> tuple[str, ...]:
        """Which of pre, post, res have a projection."""
        if self.coefficients == "static":
            return ()
        return ("pre", "post") if self.res in ("static", "identity") else ("pre", "post", "res")

    def describe(self) -> str:
        name = {"sinkhorn": "Hyper-Connections, Sinkhorn (mHC)", "permutations": "Hyper-Connections, permutations"}
        kind = "static" if self.coefficients == "static" else "dynamic"
        head = name.get(self.res, f"{kind} Hyper-Connections")
        return f"{head}, {self.n_streams} streams"


def _constrained(own: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """What all descendants of mHC share, and on top what is their own and what the caller changes."""
    squashed = {"coefficients": "linear", "pre": "sigmoid", "post": "2sigmoid"}
    flat = {"norm": "rms", "norm_over": "all", "gains": "separate"}
    return squashed | flat | own | changes


class HyperConnected(ResidualSystem):
    """State [..., B, T, n, D]. Depth weights run over the n streams: `pre` of a read, and the readout's own.

    Hook points: depth weights (and scores, where pre is squashed from logits) as everywhere; per site
    `blocks.3.hc_attn.hook_post` [batch pos stream] and `.hook_res` [batch pos to from], both with `_scores` where they
    are squashed; the streams themselves as `blocks.3.hook_streams_pre`, `_mid`, `_post`.
    """

    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        super().__init__(cfg, sites)
        assert isinstance(cfg.residual, HyperConnections)
        self.cfg = c = cfg.residual
        n, writes, d = c.n_streams, len(sites) - 1, cfg.d_model
        self.static_pre, self.static_post = (nn.Parameter(torch.zeros(writes, n)) for _ in range(2))
        if c.n_res:
            shape = (c.n_res,) if c.res == "permutations" else (n, n)
            self.static_res = nn.Parameter(torch.zeros(writes, *shape))
        self.table: Tensor | None = None  # [n!, n, n], made when it is first needed, where the streams are
        # columns: pre, post, res. One stream at a time they are its own pre, post and res[to] for every `to`
        by_stream, n_dynamic = c.norm_over == "stream", len(c.dynamic_parts)
        self.widths = ([1, 1, n] if by_stream else [n, n, c.n_res])[:n_dynamic]
        fan_in = d if by_stream else n * d
        if c.dynamic_parts:
            self.dynamic = nn.Parameter(torch.zeros(writes, fan_in, sum(self.widths)))
            which = [0, 1, 0 if c.gains == "shared" else 2][:n_dynamic]
            self.gain = nn.Parameter(torch.zeros(writes, max(which) + 1))
            self.which_gain = [
                k for k, width in zip(which, self.widths, strict=True) for _ in range(width)
            ]  # by column
        if c.readout == "head":
            self.head_static = nn.Parameter(torch.zeros(n))
            if c.dynamic_parts:
                self.head_dynamic = nn.Parameter(torch.zeros(fan_in, 1 if by_stream else n))
                self.head_gain = nn.Parameter(torch.zeros(1))
        self.squash: dict[str, str] = {"pre": c.pre, "post": c.post, "res": c.res}
        self._hooks()

    def reset_parameters(self, generator: torch.Generator) -> None:
        """As the module docstring says, drawn from `generator`."""
        c, near = self.cfg, self.cfg.init == "identity"
        for p in self.parameters():
            p.data.zero_()
        for name in ("gain", "head_gain"):
            if hasattr(self, name):
                getattr(self, name).data.fill_(0.01 if near else 1.0)
        if not near:
            for name in ("dynamic", "head_dynamic"):
                if hasattr(self, name):
                    getattr(self, name).data.normal_(0.0, 0.02, generator=generator)
            return
        streams = torch.eye(c.n_streams)
        for i in range(len(self.sites) - 1):
            own = streams[i % c.n_streams]
            self.static_pre.data[i] = own if c.pre == "none" else 2 * own - 1
            self.static_post.data[i] = 1.0 if c.post == "none" else 2 * own - 1
        if c.res == "permutations":
            self.static_res.data[:, 1:] = -8.0
        elif c.res == "sinkhorn":
            self.static_res.data[:] = 8 * (streams - 1)
        elif c.res != "identity":
            self.static_res.data[:] = streams

    # --- the state, its reads and writes: linear
    def begin(self, embed: Tensor, places: Places | None = None) -> Tensor:
        # real copies: a batched product over a tensor with an axis of stride 0 is slow
        return embed.unsqueeze(-2).repeat_interleave(self.cfg.n_streams, dim=-2)

    def read(self, state: Tensor, site: Site, gates: Gates) -> Tensor:
        mixture = (gates["weights"].unsqueeze(-2) @ state).squeeze(-2)
        if site.kind == "out" and self._centres:  # of every stream, which is that of their mixture
            mixture = mixture - mixture.mean(dim=-1, keepdim=True)
        return mixture

    def write(self, state: Tensor, site: Site, atom: Tensor, gates: Gates) -> Tensor:
        mix = torch.cat([gates["res"], gates["post"].unsqueeze(-1)], dim=-1)  # [B, T, n, n + 1]: one product for all
        return mix @ torch.cat([state, atom.unsqueeze(-2)], dim=-2)

    # --- nonlinear
    def read_gates(self, state: Tensor, site: Site) -> Gates:
        if site.kind == "out":
            return {"weights": self.hook_points[site.hook("depth_attn")](self._readout(state, site).to(state.dtype))}
        logits, gates = self._logits(state, site.index), {}
        for part, (scores, value) in self.names[site.index].items():
            x = logits[part]
            x = self.hook_points[scores](x) if scores in self.hook_points else x
            gates[part] = self.hook_points[value](self._squashed(part, x).to(state.dtype))
        return {"weights": gates["pre"], "post": gates["post"], "res": gates["res"]}

    def _logits(self, state: Tensor, i: int) -> dict[str, Tensor]:
        """pre and post [B, T, n], res [B, T, n, n] (or [B, T, n!]), before their squashing."""
        c, n, like = self.cfg, self.cfg.n_streams, wide(state[..., :1, :1])
        static = {"pre": self.static_pre[i], "post": self.static_post[i]}
        static["res"] = self.static_res[i] if c.n_res else torch.eye(n, device=like.device)
        static = {part: x.to(like.dtype) for part, x in static.items()}
        out = {
            part: x.repeat(*state.shape[:2], *(1 for _ in x.shape))
            for part, x in static.items()
            if part not in c.dynamic_parts
        }
        if not c.dynamic_parts:
            return out
        raw = self._project(state, self.dynamic[i])
        gain = self.gain[i][self.which_gain].to(raw.dtype)
        # all columns at once: an operation on a few columns of each row costs more than on whole rows
        if c.norm_over == "stream":  # [B, T, from, columns]
            columns = [static[part].T if part == "res" else static[part].unsqueeze(-1) for part in c.dynamic_parts]
            x = (torch.cat(columns, dim=-1) + gain * raw).split(self.widths, dim=-1)
            x = [*(part.squeeze(-1) for part in x[:2]), *(part.transpose(-1, -2) for part in x[2:])]
        else:
            x = torch.cat([static[part].flatten() for part in c.dynamic_parts]) + gain * raw
            x = x.split(self.widths, dim=-1)
            x = [*x[:2], *(part.unflatten(-1, static["res"].shape) for part in x[2:])]
        # a copy of each: a batched product with a column of something larger is slow, and hooks may write into it
        return out | {part: y.contiguous() for part, y in zip(c.dynamic_parts, x, strict=True)}

    def _project(self, state: Tensor, weight: Tensor) -> Tensor:
        """The normed streams times `weight`, bounded where the config says so."""
        x = wide(state) if self.cfg.norm_over == "stream" else wide(state).flatten(-2)
        eps = self.model_cfg.norm_eps if self.cfg.norm_eps is None else self.cfg.norm_eps
        if self.cfg.norm == "layer":
            x = F.layer_norm(x, x.shape[-1:], eps=eps) @ weight.to(x.dtype)
        else:
            x = (x @ weight.to(x.dtype)) / rms_scale(x, eps)  # one scale per row: no normed copy of the streams
        return x.tanh() if self.cfg.coefficients == "tanh" else x

    def _squashed(self, part: str, x: Tensor) -> Tensor:
        c, squash = self.cfg, self.squash[part]
        if squash == "sinkhorn":
            return sinkhorn(x, c.sinkhorn_iterations, c.sinkhorn_last, c.eps)
        if squash == "permutations":
            if self.table is None or (self.table.dtype, self.table.device) != (x.dtype, x.device):
                with torch.inference_mode(False):  # else a later pass with gradients could not use it
                    self.table = permutation_table(c.n_streams).to(x.device, x.dtype)
            return torch.tensordot(x.softmax(dim=-1), self.table, dims=1)
        if squash == "softmax":
            return x.softmax(dim=-1)
        if squash in ("sigmoid", "2sigmoid"):
            gate = x.sigmoid() if squash == "sigmoid" else 2 * x.sigmoid()
            return gate + c.eps if part == "pre" else gate
        return x

    def _readout(self, state: Tensor, site: Site) -> Tensor:
        """Weights of the streams in the last read, [B, T, n]."""
        readout, n = self.cfg.readout, self.cfg.n_streams
        if readout == "normed_sum":
            norm = self.model_cfg.norm
            x = wide(state)
            x = x - x.mean(dim=-1, keepdim=True) if self._centres else x
            return torch.ones_like(x[..., 0]) if norm.kind == "none" else 1 / rms_scale(x, norm.eps).squeeze(-1)
        if readout != "head":
            return state.new_full(state.shape[:3], 1.0 if readout == "sum" else 1 / n)
        x = self.head_static.to(wide(state[..., :1, :1]).dtype)
        if not self.cfg.dynamic_parts:
            x = x.repeat(*state.shape[:2], 1)
        else:
            raw = self._project(state, self.head_dynamic)
            x = x + self.head_gain.to(x.dtype) * (raw.squeeze(-1) if self.cfg.norm_over == "stream" else raw)
        scores = site.hook("depth_scores")
        return (self.hook_points[scores](x) if scores in self.hook_points else x).sigmoid() + self.cfg.eps

    @property
    def _centres(self) -> bool:
        """Whether the readout subtracts the mean of each stream."""
        return self.cfg.readout == "normed_sum" and self.model_cfg.norm.kind == "layer"

    # --- what the numbers mean
    def coefficients(self) -> Coefficients:
        return "operator" if self._centres else "scalar"

    def sources(self, site: Site) -> tuple[Source, ...]:
        return tuple(Source(f"stream{i}", self.atoms[: site.index + 1]) for i in range(self.cfg.n_streams))

    def depth_weights(self, site: Site, gates: Gates) -> Tensor:
        return gates["weights"]

    def weights_from(self, site: Site) -> WeightsFrom:
        if site.kind == "out" and self.cfg.readout != "head":
            normed = self.cfg.readout == "normed_sum" and self.model_cfg.norm.kind != "none"
            return "keys" if normed else "nothing"
        if not self.cfg.dynamic_parts:
            return "nothing"
        return "keys" if self.cfg.norm_over == "stream" else "state"

    def carry(self, state: Tensor, name: str) -> Tensor:
        """There is no single stream: all of them, [B, T, n, D], pass a hook point of their own."""
        point = self.hook_points[name.replace("hook_resid", "hook_streams")]
        return point(state.clone() if point.may_edit else state)

    def _hooks(self) -> None:
        n, shape = self.cfg.n_streams, "batch pos stream d_model"
        for layer in range(self.model_cfg.n_layers):
            for where, meaning in (("pre", "before the block"), ("mid", "before the MLP"), ("post", "after the block")):
                name = f"blocks.{layer}.hook_streams_{where}"
                self.hook_point(name, shape=shape, meaning=f"the {n} carried streams {meaning}", unit="stream")
        self.names: list[dict[str, tuple[str, str]]] = []  # per site and part: hook names of its scores and of itself
        for site in self.sites:
            squashed = self.cfg.readout == "head" if site.kind == "out" else self.cfg.pre != "none"
            self.depth_hooks(site, n, scores=squashed)
            if site.kind == "out":
                continue
            names = {"pre": (site.hook("depth_scores"), site.hook("depth_attn"))}
            res = "batch pos permutation" if self.cfg.res == "permutations" else "batch pos to from"
            for part, logits, axes, meaning in (
                ("post", "batch pos stream", "batch pos stream", "how much of the output goes to each stream"),
                ("res", res, "batch pos to from", "what multiplies the streams"),
            ):
                stem = f"blocks.{site.layer}.hc_{site.kind}.hook_{part}"
                names[part] = (f"{stem}_scores", stem)
                if self.squash[part] not in ("none", "free", "static", "identity"):
                    text = f"{part} of {site.name} before its squashing"
                    self.hook_point(f"{stem}_scores", shape=logits, meaning=text, unit="logit")
                self.hook_point(stem, shape=axes, meaning=f"{meaning} at {site.name}", unit="weight")
            self.names.append(names)


def composite(matrices: Sequence[Tensor]) -> Tensor:
    """What the exchange between streams does over many writes: the product of `res` matrices [..., to, from] in order
    of writing (the first acts first), [..., to, from]. The largest absolute row and column sums are mHC's gain
    (arXiv 2512.24880, figure 3): 1 where every matrix is doubly stochastic.

    Example:
        >>> import t2lens
        >>> from t2lens.residual.hyper_connections import HyperConnections, composite
        >>> hc = HyperConnections.mhc()
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=hc))
        >>> steps = model.record([[0, 7, 3]]).steps
        >>> composite([step.gates["res"] for step in steps[:-1]]).shape
        torch.Size([1, 3, 4, 4])
    """
    if not matrices:
        raise ValueError("composite needs the res matrix of at least one write; none was given.")
    return reduce(lambda product, after: after @ product, matrices)

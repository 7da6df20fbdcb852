"""Deep Delta Learning (arXiv 2601.00417): the shortcut itself is edited by a gated rank-1 step.

    c = RMSNorm(x)     F = sublayer(c)     k = F / sqrt(|F|^2 + k_eps^2)     beta = 2 sigmoid(w.c + b)
    X' = X + beta k (v^T - k^T X)          so that  k^T X' = (1 - beta) k^T X + beta v^T

X is the carried state, x what the sublayer reads of it. beta = 0 leaves X alone, 1 overwrites what X held along k with
v, 2 reflects it. Section 3 of the paper; scalar state: X is the stream [T, D] and x = X. Expanded state: X has V value
channels, X_0 repeats the embedding over them or a causal depthwise convolution over time fills them (embed_conv), and
one compressor per block (one more for the readout) reads them, x by one of

    channels (CC)  x_i[t] = sum_q r_q sum_tau W[i, tau] X[t, q + tau - pad, i]          over channels, same padding
    time (TC)      x_i[t] = sum_v r_v sum_tau W[i, v, tau] X[t - (K - 1) + tau, v, i]   sources come token-shifted

The write-only control, X' = X + beta k v^T, is `edit`: nothing is erased, everything else is equal. The paper asks for
it (its section 5: the gains of the expanded state are not isolated from it) and does not have it.

Paper and code: the paper's v is linear in c; the code's is 4 sigmoid(W x + b) of the raw x, or W x + b, or a constant
(`value_form`). The paper's CC has no read vector. The code's gate is w.c + b, or w.tanh(W c) + b (`beta_hidden`); its
config starts beta at 1. Gates are computed in at least float32. Init as in the code: matrices N(0, 0.5/sqrt(D)), read
vectors 1/V, embedding convolution at identity, biases 0 but for beta's.

Two exact linear forms, never mixed (they attribute erasure differently):
    additive   X' = X + F delta^T,  delta = beta (v - k^T X) / |F|      the atom is F, erasing hides in its coefficient
    operator   X' = (I - beta k k^T) X + k beta v^T                     the atom is k beta v^T, erasing is charged to X

(write-only: delta = beta v / |F| and I in place of I - beta k k^T.)

Inside, X is [..., B, T, V, D] (V = 1 for the scalar state drops to [..., B, T, D]).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from t2lens.config import ModelConfig, ResidualConfig, check_one_of, check_plain, check_positive
from t2lens.hooks import HookPoint
from t2lens.residual.base import Coefficients, Gates, ResidualSystem, Site, Source, WeightsFrom
from t2lens.sublayers.norms import wide
from t2lens.sublayers.positions import Places
from t2lens.sublayers.short_conv import causal_conv, with_past

__all__ = ["DeepDelta", "DeepDeltaLearning"]


@dataclass(frozen=True, kw_only=True)
class DeepDelta(ResidualConfig):
    """Deep Delta Learning (arXiv 2601.00417): X + beta k (v^T - k^T X), beta in (0, 2).

    edit: "delta", or "write_only" for the control X + beta k v^T. value_channels: d_v; 1 is the scalar (vector) state,
    more is the expanded state, which `compress` reads: over its "channels" (CC) or over "time" (TC), with kernels of
    compress_kernel. compress_pad: padding of the channels, "same", or "causal" (all on the left; the accelerated code
    has that option). embed_conv: kernel size of the causal embedding convolution that fills the expanded state, or None
    (repeat e). value_form: "sigmoid_of_raw" (the code: v = value_scale * sigmoid(W x + b), x the raw read),
    "linear_of_raw" (W x + b), "linear_of_normed" (the paper: W c + b, c the normed read), "constant" (value_constant).
    beta_hidden: neurons of a two-layer tanh gate, or None for the linear one. beta_init: gate value at zero input (the
    code's config default is 1, where the regime is projection; its module fallback is 0). k_eps: in the norm of k.
    """

    kind: ClassVar[str] = "ddl"
    edit: Literal["delta", "write_only"] = "delta"
    value_channels: int = 1
    embed_conv: int | None = None
    compress: Literal["channels", "time"] = "channels"
    compress_kernel: int = 4
    compress_pad: Literal["same", "causal"] = "same"
    value_form: Literal["sigmoid_of_raw", "linear_of_raw", "linear_of_normed", "constant"] = "sigmoid_of_raw"
    value_scale: float = 4.0
    value_constant: float = 2.0
    beta_hidden: int | None = None
    beta_init: float = 1.0
    k_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_plain(self)
        check_positive(self, "value_channels", "compress_kernel")
        check_one_of(self, "edit", ("delta", "write_only"))
        check_one_of(self, "compress", ("channels", "time"))
        check_one_of(self, "compress_pad", ("same", "causal"))
        check_one_of(self, "value_form", ("sigmoid_of_raw", "linear_of_raw", "linear_of_normed", "constant"))
        if self.beta_hidden is not None:
            check_positive(self, "beta_hidden")
        if self.embed_conv is not None:
            check_positive(self, "embed_conv")
            if self.value_channels == 1:
                raise ValueError("DeepDelta: embed_conv fills an expanded state, so it needs value_channels above 1.")
        if self.compress == "time" and self.value_channels == 1:
            raise ValueError("DeepDelta: compress='time' reads an expanded state, so it needs value_channels above 1.")
        if self.compress == "channels" and 1 < self.value_channels < self.compress_kernel:
            raise ValueError(
                f"DeepDelta: compress_kernel ({self.compress_kernel}) must not exceed "
                f"value_channels ({self.value_channels})."
            )
        if not 0.0 <= self.beta_init < 2.0:
            raise ValueError(f"DeepDelta: beta_init must lie in [0, 2), not {self.beta_init}.")
        if not self.k_eps > 0:
            raise ValueError(f"DeepDelta: k_eps must be positive, not {self.k_eps}.")

    def describe(self) -> str:
        state = "scalar state" if self.value_channels == 1 else f"expanded state, {self.value_channels} channels"
        if self.compress == "time":
            state += " compressed over time"
        system = "Deep Delta Learning" if self.edit == "delta" else "Write-only control of Deep Delta Learning"
        return f"{system}, {state}"


class _Timed(NamedTuple):
    """A state whose reads look back in time, with the places (and so the decoding cache) of its pass."""

    x: Tensor
    places: Places | None


_State = Tensor | _Timed


class DeepDeltaLearning(ResidualSystem):
    forms: ClassVar[tuple[str, ...]] = ("additive", "operator")
    stream_is_whole = True
    gate_label: ClassVar[str | None] = "beta"
    gate_name: ClassVar[str | None] = "beta"
    gate_range: ClassVar[tuple[float, float] | None] = (0.0, 2.0)
    gate_meaning: ClassVar[str | None] = (
        "Beta: 0 leaves the state alone, 1 overwrites along k, 2 reflects (write-only: the size of the write)."
    )

    def __init__(self, cfg: ModelConfig, sites: tuple[Site, ...]) -> None:
        super().__init__(cfg, sites)
        assert isinstance(cfg.residual, DeepDelta)
        self.cfg = cfg.residual
        d, channels, writes = cfg.d_model, self.cfg.value_channels, len(sites) - 1
        self.expanded = channels > 1
        timed = self.cfg.compress_kernel - 1 if self.cfg.compress == "time" else 0
        self.looks_back = timed + (self.cfg.embed_conv or 1) - 1
        start = min(max(self.cfg.beta_init / 2, 1e-6), 1 - 1e-6)
        hidden, kernel = self.cfg.beta_hidden, self.cfg.compress_kernel
        if hidden is not None:
            self.beta_in = nn.Parameter(torch.zeros(writes, hidden, d))
        self.beta_weight = nn.Parameter(torch.zeros(writes, hidden or d))
        self.beta_bias = nn.Parameter(torch.full((writes,), math.log(start / (1 - start))))
        if self.cfg.value_form != "constant":
            self.value_weight = nn.Parameter(torch.zeros(writes, channels, d))
            self.value_bias = nn.Parameter(torch.zeros(writes, channels))
        if self.expanded:  # one compressor per block, and one for the readout
            shape = (d, kernel) if self.cfg.compress == "channels" else (d, channels, kernel)
            self.compress = nn.Parameter(torch.zeros(cfg.n_layers + 1, *shape))
            self.compress_read = nn.Parameter(torch.full((cfg.n_layers + 1, channels), 1 / channels))
        if self.cfg.embed_conv is not None:
            self.embed_kernel = nn.Parameter(torch.zeros(d, channels, self.cfg.embed_conv))
        self._hooks()

    def reset_parameters(self, generator: torch.Generator) -> None:
        """The code's init, drawn from `generator`."""
        std = 0.5 / math.sqrt(self.model_cfg.d_model)
        for name in ("beta_in", "beta_weight", "value_weight", "compress"):
            if hasattr(self, name):
                getattr(self, name).data.normal_(0.0, std, generator=generator)
        if self.cfg.embed_conv is not None:
            self.embed_kernel.data.zero_()[..., -1] = 1.0

    # --- the state and its reads: linear
    def begin(self, embed: Tensor, places: Places | None = None) -> _State:
        if not self.expanded:
            return embed
        x = embed.unsqueeze(-2)
        if self.cfg.embed_conv is None:
            x = x.expand(*embed.shape[:-1], self.cfg.value_channels, embed.shape[-1])
        else:
            x = causal_conv(x, self.embed_kernel.transpose(0, 1), places, "embed")
        return _Timed(x, places) if self.cfg.compress == "time" else x

    def read(self, state: _State, site: Site, gates: Gates) -> Tensor:
        if isinstance(state, _Timed):
            kernel, read = self.compress[self._row(site)], self.compress_read[self._row(site)]
            taps = kernel.permute(2, 1, 0) * read[:, None]  # [K, V, D]
            line = with_past(state.x, len(taps) - 1, -3, state.places, f"{site.name}.state")
            n = state.x.shape[-3]
            return _over_channels([(line.narrow(-3, tau, n), weight) for tau, weight in enumerate(taps)])
        return _over_channels([(state, self.effective_read(site))]) if self.expanded else state

    def _row(self, site: Site) -> int:
        """Which compressor reads at `site`."""
        return self.model_cfg.n_layers if site.layer is None else site.layer

    def effective_read(self, site: Site) -> Tensor:
        """CC's w_eff [V, D]: w_eff[v, i] = sum_q read[q] W[i, v - q + pad], indices outside the kernel dropped."""
        kernel, read = self.compress[self._row(site)], self.compress_read[self._row(site)]  # [D, K], [V]
        channels, width = self.cfg.value_channels, kernel.shape[-1]
        pad = (width - 1) // 2 if self.cfg.compress_pad == "same" else width - 1
        rows = []
        for v in range(channels):
            taps = [(q, v - q + pad) for q in range(channels) if 0 <= v - q + pad < width]
            rows.append(kernel[:, [t for _, t in taps]] @ read[[q for q, _ in taps]])
        return torch.stack(rows)

    # --- the gates of a write: nonlinear
    def write_gates(self, state: _State, site: Site, read: Tensor, normed: Tensor, out: Tensor) -> Gates:
        hook, i = self.gate_points[site.index].__getitem__, site.index
        c, raw = wide(normed), wide(read)
        inner = c if self.cfg.beta_hidden is None else F.linear(c, self.beta_in[i].to(c.dtype)).tanh()
        logit = hook("hook_beta_logit")((inner @ self.beta_weight[i].to(c.dtype) + self.beta_bias[i]).unsqueeze(-1))
        beta = hook("hook_beta")(2 * logit.sigmoid())  # [B, T, 1]
        value = hook("hook_value")(self._value(i, raw, c))  # [B, T, V]
        size = (wide(out).square().sum(dim=-1, keepdim=True) + self.cfg.k_eps**2).sqrt()
        direction = hook("hook_dir")((wide(out) / size).to(out.dtype))
        gates = {"beta": beta, "value": value, "direction": direction, "size": size}
        if self.cfg.edit == "write_only":
            return gates | {"delta": beta * value / size}
        x = state.x if isinstance(state, _Timed) else state
        held = hook("hook_proj")(self._along(wide(direction), wide(x)))  # k^T X [B, T, V]
        return gates | {"proj": held, "delta": beta * (value - held) / size}

    def _value(self, i: int, raw: Tensor, normed: Tensor) -> Tensor:
        if self.cfg.value_form == "constant":
            return raw.new_full((*raw.shape[:-1], self.cfg.value_channels), self.cfg.value_constant)
        of = normed if self.cfg.value_form == "linear_of_normed" else raw
        value = F.linear(of, self.value_weight[i].to(of.dtype), self.value_bias[i].to(of.dtype))
        return self.cfg.value_scale * value.sigmoid() if self.cfg.value_form == "sigmoid_of_raw" else value

    def _along(self, direction: Tensor, state: Tensor) -> Tensor:
        """k^T X: [..., B, T, V]."""
        if self.expanded:
            return (state * direction.unsqueeze(-2)).sum(dim=-1)
        return (state * direction).sum(dim=-1, keepdim=True)

    def _outer(self, direction: Tensor, values: Tensor) -> Tensor:
        """k v^T in the layout of the state; values [..., B, T, V]."""
        return direction.unsqueeze(-2) * values.unsqueeze(-1) if self.expanded else direction * values

    # --- the write: linear in (state, atom). The additive form; _OperatorForm below is the other one
    def atom(self, out: Tensor, gates: Gates) -> Tensor:
        """F along the direction in use: out itself to rounding, and still right when an edit turned the direction."""
        return gates["direction"] * gates["size"].to(out.dtype)

    def write(self, state: _State, site: Site, atom: Tensor, gates: Gates) -> _State:
        # in float32 at least: delta is as large as 1 / |F|, which half precision cannot hold where F is (nearly) zero
        step = self._outer(wide(atom), gates["delta"])
        if isinstance(state, _Timed):
            return state._replace(x=state.x + step.to(state.x.dtype))
        return state + step.to(state.dtype)

    def linear_form(self, form: str) -> ResidualSystem:
        super().linear_form(form)
        return self if form == "additive" else _OperatorForm(self)

    # --- what the numbers mean
    def coefficients(self) -> Coefficients:
        if self.looks_back:
            return "operator"
        return "channel" if self.expanded else "scalar"

    def sources(self, site: Site) -> tuple[Source, ...]:
        return (Source("state", self.atoms[: site.index + 1]),)

    def weights_from(self, site: Site) -> WeightsFrom:
        return "state"  # beta, k and v

    def gate(self, gates: Gates) -> Tensor | None:
        return gates["beta"].squeeze(-1)

    def energies(self, gates: Gates) -> tuple[Tensor, Tensor] | None:
        beta, direction = gates["beta"], gates["direction"]
        written = edit_energy(beta, direction, gates["value"])
        return edit_energy(beta, direction, gates["proj"]) if "proj" in gates else 0 * written, written

    def _hooks(self) -> None:
        if not self.expanded:
            self.single_stream_hooks()
        self.gate_points: list[dict[str, HookPoint]] = []  # per site, by last name: found without building the full one
        for site in self.sites[:-1]:
            self.gate_points.append({})
            for name, shape, meaning, unit in (
                ("hook_beta_logit", "batch pos 1", "gate before the sigmoid", "logit"),
                ("hook_beta", "batch pos 1", "gate: 0 keep, 1 overwrite, 2 reflect", "0..2"),
                ("hook_dir", "batch pos d_model", "unit direction k of the write", ""),
                ("hook_value", "batch pos d_v", "value v that is written along k", "state"),
                (
                    "hook_proj",
                    "batch pos d_v",
                    "k^T X, what the state holds along k before the write",
                    "state",
                ),
            ):
                if name == "hook_proj" and self.cfg.edit == "write_only":
                    continue  # which does not ask what the state holds
                full = f"blocks.{site.layer}.ddl_{site.kind}.{name}"
                point = self.hook_point(full, shape=shape, meaning=f"{meaning} ({site.name})", unit=unit)
                self.gate_points[-1][name] = point


def _over_channels(terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """sum_v w[v] X[v], [..., D], over all terms: states X [..., V, D] (or of width 1) and weights w [V, D]."""
    if len(terms) == 1 and terms[0][0].shape[-1] == 1:
        return terms[0][0].squeeze(-1) @ terms[0][1]
    (first, *others) = ((x[..., v, :], w[v]) for x, w in terms for v in range(len(w)))
    total = first[0] * first[1]
    for x, weight in others:  # half the time, or less, of a product that is summed: nothing large is made
        total.addcmul_(x, weight)
    return total


def edit_energy(beta: Tensor, direction: Tensor, values: Tensor) -> Tensor:
    """|beta k a^T|^2 = beta^2 |k|^2 |a|^2 [...], in at least float32: of beta [..., 1], k [..., D] and values a
    [..., V], which a write erases (a = k^T X) or puts there (a = v)."""
    beta, direction, values = wide(beta), wide(direction), wide(values)
    return beta.squeeze(-1).square() * direction.square().sum(dim=-1) * values.square().sum(dim=-1)


class _OperatorForm(ResidualSystem):
    """The same state, reads and gates with the other linear write: X' = (I - beta k k^T) X + atom, or X + atom."""

    def __init__(self, system: DeepDeltaLearning) -> None:
        super().__init__(system.model_cfg, system.sites)
        self.system = system

    def begin(self, embed: Tensor, places: Places | None = None) -> _State:
        return self.system.begin(embed, places)

    def read(self, state: _State, site: Site, gates: Gates) -> Tensor:
        return self.system.read(state, site, gates)

    def atom(self, out: Tensor, gates: Gates) -> Tensor:
        return self.system._outer(gates["direction"], (gates["beta"] * gates["value"]).to(out.dtype))

    def share(self, part: Tensor, out: Tensor, gates: Gates) -> Tensor:
        direction = (wide(part) / gates["size"]).to(out.dtype)
        return self.system._outer(direction, (gates["beta"] * gates["value"]).to(out.dtype))

    def write(self, state: _State, site: Site, atom: Tensor, gates: Gates) -> _State:
        if isinstance(state, _Timed):
            return state._replace(x=self._written(state.x, atom, gates))
        return self._written(state, atom, gates)

    def _written(self, x: Tensor, atom: Tensor, gates: Gates) -> Tensor:
        if self.system.cfg.edit == "write_only":
            return x + atom
        erased = gates["beta"].to(x.dtype) * self.system._along(gates["direction"], x)
        return x - self.system._outer(gates["direction"], erased) + atom

    def coefficients(self) -> Coefficients:
        return "operator"

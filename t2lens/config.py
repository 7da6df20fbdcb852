"""What a model is made of, as data: one frozen dataclass per part, variants as values.

Every config validates itself on construction (a full sentence says what is wrong) and round-trips through JSON with
`ModelConfig.to_dict` / `ModelConfig.from_dict`; an unknown key is an error. No torch in here: reading one is cheap.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, Self

__all__ = [
    "Attention",
    "AttnRes",
    "DeepDelta",
    "DepthSWA",
    "ModelConfig",
    "ResidualConfig",
    "ShortSWA",
    "Standard",
    "SwiGLU",
]


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{type(owner).__name__}.{name} must be a whole number of at least 1, not {value!r}.")


def _one_of(owner: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in choices:
        raise ValueError(f"{type(owner).__name__}.{name} must be one of {', '.join(choices)}, not {value!r}.")


# --- the sequence axis -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal self-attention over positions: GQA, RoPE, optional QK norm (RMSNorm per head, before RoPE)."""

    n_heads: int = 4
    n_kv_heads: int = 4
    d_head: int = 32
    qk_norm: bool = False
    rope_base: float = 10_000.0
    window: int | None = None  # None: the whole past; an integer w: positions t-w+1 .. t

    def __post_init__(self) -> None:
        _positive(self, "n_heads", "n_kv_heads", "d_head")
        if self.window is not None:
            _positive(self, "window")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"{type(self).__name__}: n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})."
            )
        if self.d_head % 2:
            raise ValueError(f"{type(self).__name__}: RoPE needs an even d_head, not {self.d_head}.")
        if not self.rope_base > 0:
            raise ValueError(f"{type(self).__name__}: rope_base must be positive, not {self.rope_base}.")


@dataclass(frozen=True, kw_only=True)
class ShortSWA(Attention):
    """Sequence ShortSWA as the third sublayer of a block, before attention (arXiv 2603.16039, Algorithm 1).

    The source leaves heads, RoPE and init open; ours: the attention of the block in a short window, with an output
    projection that starts at zero, so that a fresh model equals its twin without the sublayer.
    """

    window: int | None = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is None:
            raise ValueError("ShortSWA needs a window of at least 1; for the whole past use Attention.")


@dataclass(frozen=True, kw_only=True)
class SwiGLU:
    """W_out (silu(W_gate x) * W_in x), bias-free."""

    d_mlp: int = 256

    def __post_init__(self) -> None:
        _positive(self, "d_mlp")


# --- the depth axis ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Standard:
    """Plain pre-norm residual: x + out."""

    kind: ClassVar[str] = "standard"


@dataclass(frozen=True, kw_only=True)
class AttnRes:
    """Attention Residuals (arXiv 2603.15031): softmax over earlier writes, one learned query per read.

    block_size counts sublayers, as the paper's pseudocode does; None is the full form (every write is a source).
    sources: "outputs" (the paper: raw sublayer outputs, summed per block) or "streams" (cumulative sums, as in the
    published open-attention-residuals checkpoints). recency_bias: initial value of a learned scalar added to the score
    of the newest source, or None for no such parameter (the paper).
    """

    kind: ClassVar[str] = "attnres"
    block_size: int | None = None
    sources: Literal["outputs", "streams"] = "outputs"
    normaliser: Literal["softmax", "sparsemax"] = "softmax"
    recency_bias: float | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None:
            _positive(self, "block_size")
        _one_of(self, "sources", ("outputs", "streams"))
        _one_of(self, "normaliser", ("softmax", "sparsemax"))


@dataclass(frozen=True, kw_only=True)
class DeepDelta:
    """Deep Delta Learning (arXiv 2601.00417): X + beta k (v^T - k^T X), beta in (0, 2).

    value_channels: d_v; 1 is the scalar (vector) state, more is the expanded state read through channel compression.
    embed_conv: kernel size of the causal embedding convolution that fills the expanded state, or None (repeat e).
    value_form: "sigmoid_of_raw" (the code: v = scale * sigmoid(W x + b), x the raw read) or "linear_of_normed" (the
    paper: v = W c + b, c the normed read). beta_init: gate value at zero input (the code's config default is 1, where
    the regime is projection; its module fallback is 0).
    """

    kind: ClassVar[str] = "ddl"
    value_channels: int = 1
    embed_conv: int | None = None
    compress_kernel: int = 4
    value_form: Literal["sigmoid_of_raw", "linear_of_normed"] = "sigmoid_of_raw"
    value_scale: float = 4.0
    beta_init: float = 1.0
    k_eps: float = 1e-5

    def __post_init__(self) -> None:
        _positive(self, "value_channels", "compress_kernel")
        _one_of(self, "value_form", ("sigmoid_of_raw", "linear_of_normed"))
        if self.embed_conv is not None:
            _positive(self, "embed_conv")
            if self.value_channels == 1:
                raise ValueError("DeepDelta: embed_conv fills an expanded state, so it needs value_channels above 1.")
        if self.value_channels > 1 and self.compress_kernel > self.value_channels:
            raise ValueError(
                f"DeepDelta: compress_kernel ({self.compress_kernel}) must not exceed "
                f"value_channels ({self.value_channels})."
            )
        if not 0.0 <= self.beta_init < 2.0:
            raise ValueError(f"DeepDelta: beta_init must lie in [0, 2), not {self.beta_init}.")
        if not self.k_eps > 0:
            raise ValueError(f"DeepDelta: k_eps must be positive, not {self.k_eps}.")


@dataclass(frozen=True, kw_only=True)
class DepthSWA:
    """Depth ShortSWA (arXiv 2603.16039, section 2): QKV attention of a token over its own last `window` states.

    placement "extra": the stream adds as usual and every block (and the readout) reads stream + z, z the attention
    over the states at block boundaries. placement "replace": no sum at all; every sublayer reads z, the attention
    over the embedding and the raw sublayer outputs. window None keeps every state.
    """

    kind: ClassVar[str] = "depth-swa"
    window: int | None = 4
    d_key: int = 16
    placement: Literal["extra", "replace"] = "extra"

    def __post_init__(self) -> None:
        _positive(self, "d_key")
        if self.window is not None:
            _positive(self, "window")
        _one_of(self, "placement", ("extra", "replace"))


ResidualConfig = Standard | AttnRes | DeepDelta | DepthSWA
RESIDUAL_KINDS: dict[str, type[ResidualConfig]] = {c.kind: c for c in (Standard, AttnRes, DeepDelta, DepthSWA)}


# --- the model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder: RMSNorm, attention, SwiGLU, an optional local mixer, and one residual system.

    The properties below the fields (n_heads, d_head, d_mlp, normalization_type, ...) are the names under which
    transformer-lens tools look these values up.
    """

    d_vocab: int
    n_ctx: int
    d_model: int
    n_layers: int
    attention: Attention = field(default_factory=Attention)
    local: ShortSWA | None = None
    mlp: SwiGLU = field(default_factory=SwiGLU)
    residual: ResidualConfig = field(default_factory=Standard)
    norm_eps: float = 1e-5
    tied: bool = True

    def __post_init__(self) -> None:
        _positive(self, "d_vocab", "n_ctx", "d_model", "n_layers")
        if not self.norm_eps > 0:
            raise ValueError(f"ModelConfig: norm_eps must be positive, not {self.norm_eps}.")

    @property
    def n_heads(self) -> int:
        return self.attention.n_heads

    @property
    def n_key_value_heads(self) -> int:
        return self.attention.n_kv_heads

    @property
    def d_head(self) -> int:
        return self.attention.d_head

    @property
    def d_mlp(self) -> int:
        return self.mlp.d_mlp

    @property
    def normalization_type(self) -> str:
        return "RMS"

    @property
    def act_fn(self) -> str:
        return "silu"

    @property
    def attn_only(self) -> bool:
        return False

    @property
    def positional_embedding_type(self) -> str:
        return "rotary"

    @property
    def device(self) -> None:
        """No part of a configuration; transformer-lens's patching asks for it and takes None for torch's default."""
        return

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; the residual system carries its kind."""
        out = asdict(self)
        out["residual"] = {"kind": self.residual.kind, **out["residual"]}
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The config that `to_dict` wrote. An unknown or missing key raises ValueError with the nearest valid name."""
        data = dict(data)
        residual = dict(data.get("residual") or {"kind": "standard"})
        kind = residual.pop("kind", None)
        if kind not in RESIDUAL_KINDS:
            raise ValueError(f"Unknown residual system {kind!r}; known systems are {', '.join(RESIDUAL_KINDS)}.")
        data["residual"] = _build(RESIDUAL_KINDS[kind], residual)
        for name, part in (("attention", Attention), ("local", ShortSWA), ("mlp", SwiGLU)):
            if isinstance(data.get(name), dict):
                data[name] = _build(part, data[name])
        return _build(cls, data)


def _build(cls: type, data: dict[str, Any]) -> Any:
    known = {f.name: f for f in fields(cls)}
    for key in data:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys are {', '.join(known) or 'none'}."
            raise ValueError(f"{cls.__name__} has no key {key!r}{hint}")
    missing = [n for n, f in known.items() if n not in data and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise ValueError(f"{cls.__name__} needs the keys {', '.join(missing)}, which are missing.")
    return cls(**data)

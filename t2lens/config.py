"""What a model is made of, as data: one frozen dataclass per part, variants as values.

Every config validates itself on construction (a full sentence says what is wrong) and round-trips through JSON with
`ModelConfig.to_dict` / `ModelConfig.from_dict`; an unknown key is an error. No torch in here: reading one is cheap.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Self

__all__ = [
    "Attention",
    "ModelConfig",
    "ResidualConfig",
    "ShortSWA",
    "SwiGLU",
]


def check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{type(owner).__name__}.{name} must be a whole number of at least 1, not {value!r}.")


def check_one_of(owner: object, name: str, choices: tuple[str, ...]) -> None:
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
        check_positive(self, "n_heads", "n_kv_heads", "d_head")
        if self.window is not None:
            check_positive(self, "window")
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
        check_positive(self, "d_mlp")


# --- the depth axis ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ResidualConfig:
    """Base of what describes a residual system; each stands in `t2lens.residual`, beside its equation and module."""

    kind: ClassVar[str]  # names the system in files

    def describe(self) -> str:
        """The system in a few words."""
        raise NotImplementedError


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
    residual: ResidualConfig = field(default_factory=lambda: residual_kinds()["standard"]())
    norm_eps: float = 1e-5
    tied: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "d_vocab", "n_ctx", "d_model", "n_layers")
        for name, part in (("attention", Attention), ("mlp", SwiGLU), ("residual", ResidualConfig)):
            if not isinstance(value := getattr(self, name), part):
                raise ValueError(f"ModelConfig.{name} must be a {part.__name__}, not {value!r}.")
        if not isinstance(self.local, ShortSWA | None):
            raise ValueError(f"ModelConfig.local must be a ShortSWA or None, not {self.local!r}.")
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

    def describe(self) -> str:
        """The residual system, and ShortSWA where it is on, in a few words."""
        text = self.residual.describe()
        return text if self.local is None else f"{text}, with sequence ShortSWA of {self.local.window} tokens"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; the residual system carries its kind."""
        out = asdict(self)
        out["residual"] = {"kind": self.residual.kind, **out["residual"]}
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The config that `to_dict` wrote. An unknown or missing key raises ValueError with the nearest valid name."""
        data = dict(data)
        residual = data.get("residual") or {"kind": "standard"}
        if not isinstance(residual, dict):
            raise ValueError(f"The residual system of a config must be an object with its kind, not {residual!r}.")
        residual = dict(residual)
        kind, known = residual.pop("kind", None), residual_kinds()
        if kind not in known:
            raise ValueError(f"Unknown residual system {kind!r}; known systems are {', '.join(known)}.")
        data["residual"] = _build(known[kind], residual)
        for name, part in (("attention", Attention), ("local", ShortSWA), ("mlp", SwiGLU)):
            if isinstance(data.get(name), dict):
                data[name] = _build(part, data[name])
        return _build(cls, data)


def residual_kinds() -> dict[str, type[ResidualConfig]]:
    """kind -> config class of every residual system there is."""
    from t2lens.residual import SYSTEMS  # on use: the systems bring torch with them, and a config alone needs none

    return {config.kind: config for config in SYSTEMS}


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

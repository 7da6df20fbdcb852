"""What a model is made of, as data: one frozen dataclass per part, variants as values.

Every config validates itself on construction (a full sentence says what is wrong) and round-trips through JSON with
`ModelConfig.to_dict` / `ModelConfig.from_dict`; an unknown key is an error. No torch in here: reading one is cheap.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, Self

__all__ = [
    "MLP",
    "Attention",
    "BucketAttention",
    "Canon",
    "KVShift",
    "ModelConfig",
    "Norm",
    "ResidualConfig",
    "Rope",
    "ShortConv",
    "ShortSWA",
    "ValueResidual",
]


_MOST = 2**31 - 1  # of a size: more is a mistake, and no tensor


def check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{type(owner).__name__}.{name} must be a whole number of at least 1, not {value!r}.")
        if value > _MOST:
            raise ValueError(f"{type(owner).__name__}.{name} must be at most {_MOST}, and is more.")


def check_plain(owner: Any) -> None:
    """Every field that is declared float (or float | None) holds a finite number, every bool True or False."""
    for field_ in fields(owner):
        name, kind = f"{type(owner).__name__}.{field_.name}", str(field_.type)
        value = getattr(owner, field_.name)
        if kind == "bool" and not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r}.")
        if kind == "float" or (kind == "float | None" and value is not None):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not abs(value) <= sys.float_info.max:
                raise ValueError(f"{name} must be a finite number, not {value!r}.")


def check_one_of(owner: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in choices:
        raise ValueError(f"{type(owner).__name__}.{name} must be one of {', '.join(choices)}, not {value!r}.")


def check_letters(owner: object, name: str, letters: str) -> None:
    """Some of the letters, each once, in any order."""
    value = getattr(owner, name)
    if not isinstance(value, str) or not value or len({*value} & {*letters}) != len(value):
        raise ValueError(f"{type(owner).__name__}.{name} must be some of the letters {letters}, not {value!r}.")


# --- the sequence axis -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Norm:
    """w * x / sqrt(mean(x^2) + eps) + b ("rms"), the same of x - mean(x) ("layer"), or w * x + b alone ("none")."""

    kind: Literal["rms", "layer", "none"] = "rms"
    weight: bool = True
    bias: bool = False
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_plain(self)
        check_one_of(self, "kind", ("rms", "layer", "none"))
        if not self.eps > 0:
            raise ValueError(f"Norm.eps must be positive, not {self.eps}.")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: pair i of the first n_dims entries of a head turns by position * base^(-2i / n_dims).

    layout: which entries make a pair, (i, i + n_dims/2) for "half" or (2i, 2i + 1) for "interleaved".
    table: precision to which cosines and sines are rounded; some published models need it. "exact": none.
    frequencies: "fixed", or "learned" in each layer, from the same start (as published files of DCA store them).
    """

    base: float = 10_000.0
    n_dims: int | None = None  # None: the whole head
    layout: Literal["half", "interleaved"] = "half"
    table: Literal["exact", "float32", "bfloat16", "float16"] = "exact"
    frequencies: Literal["fixed", "learned"] = "fixed"

    def __post_init__(self) -> None:
        check_plain(self)
        check_one_of(self, "layout", ("half", "interleaved"))
        check_one_of(self, "table", ("exact", "float32", "bfloat16", "float16"))
        check_one_of(self, "frequencies", ("fixed", "learned"))
        if self.n_dims is not None:
            check_positive(self, "n_dims")
            if self.n_dims % 2:
                raise ValueError(f"Rope.n_dims must be even, not {self.n_dims}.")
        if not self.base > 0:
            raise ValueError(f"Rope.base must be positive, not {self.base}.")


@dataclass(frozen=True, kw_only=True)
class Canon:
    """Canon layers (arXiv 2512.17351): h_t + sum_i w_i * h_(t-i) per channel, over the last `kernel` tokens.

    sites: A on the normed read of attention, B on its joined queries, keys and values (after QK norm, before RoPE), C
    on the normed read of the MLP, D on its joined branches before the activation. The other values are the paper's
    options: bias, act ("silu" of the sum), residual (whether h_t itself is added, which is inside the layer).
    """

    sites: str = "ABCD"
    kernel: int = 4
    bias: bool = False
    act: Literal["none", "silu"] = "none"
    residual: bool = True

    def __post_init__(self) -> None:
        check_plain(self)
        check_letters(self, "sites", "ABCD")
        check_positive(self, "kernel")
        check_one_of(self, "act", ("none", "silu"))


@dataclass(frozen=True, kw_only=True)
class ShortConv:
    """Causal depthwise convolution over the last `kernel` tokens on projected queries, keys and values, then `act`.

    on: which of them. shift_keys: keys see the tokens before theirs only (an option of Deep Delta Learning's code).
    """

    on: str = "qkv"
    kernel: int = 4
    act: Literal["none", "silu"] = "silu"
    bias: bool = False
    shift_keys: bool = False

    def __post_init__(self) -> None:
        check_plain(self)
        check_letters(self, "on", "qkv")
        check_positive(self, "kernel")
        check_one_of(self, "act", ("none", "silu"))
        if self.shift_keys and "k" not in self.on:
            raise ValueError(f"ShortConv.shift_keys needs a convolution on the keys, and on is {self.on!r}.")


@dataclass(frozen=True, kw_only=True)
class KVShift:
    """Keys and values (`on`) mixed with those of the previous token: scalars per head ("heads", arXiv 2411.19574), or
    a gate per token and head ("tokens", the code of Deep Delta Learning)."""

    kind: Literal["heads", "tokens"] = "heads"
    on: str = "kv"

    def __post_init__(self) -> None:
        check_one_of(self, "kind", ("heads", "tokens"))
        check_letters(self, "on", "kv")


@dataclass(frozen=True, kw_only=True)
class ValueResidual:
    """Values become first * (those of the first layer) + own * themselves (ResFormer, arXiv 2410.17897).

    learned: whether the two numbers of each later layer are weights that start there, or stay there.
    """

    first: float = 0.5
    own: float = 0.5
    learned: bool = True

    def __post_init__(self) -> None:
        check_plain(self)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Self-attention over positions: GQA, rotary positions, optional QK norm and biases.

    qk_norm: RMSNorm of queries and keys, per head before RoPE ("head") or after it ("head_after_rope"), or over all
    heads joined, before RoPE ("joined"). The order of all that acts on projected queries, keys and values: kv_shift,
    short_conv, QK norm, Canon B, value_residual, RoPE.
    """

    kind: ClassVar[str] = "softmax"  # names the class in files
    parts: ClassVar[dict[str, type]] = {
        "rope": Rope, "kv_shift": KVShift, "short_conv": ShortConv, "value_residual": ValueResidual,
    }  # fmt: skip
    n_heads: int = 4
    n_kv_heads: int = 4
    d_head: int = 32
    qk_norm: Literal["none", "head", "head_after_rope", "joined"] = "none"
    rope: Rope | None = Rope()
    window: int | None = None  # None: the whole past; an integer w: positions t-w+1 .. t
    bias: bool = False  # of all four projections
    causal: bool = True
    kv_shift: KVShift | None = None
    short_conv: ShortConv | None = None
    value_residual: ValueResidual | None = None

    def __post_init__(self) -> None:
        check_plain(self)
        check_positive(self, "n_heads", "n_kv_heads", "d_head")
        if not self.causal and (self.kv_shift or self.short_conv):
            raise ValueError(f"{type(self).__name__}: KV shift and ShortConv need causal attention.")
        check_one_of(self, "qk_norm", ("none", "head", "head_after_rope", "joined"))
        if self.window is not None:
            check_positive(self, "window")
            if not self.causal:
                raise ValueError(f"{type(self).__name__}: a window needs causal attention.")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"{type(self).__name__}: n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})."
            )
        if self.rope is None:
            return
        if self.rope.n_dims is None and self.d_head % 2:
            raise ValueError(f"{type(self).__name__}: RoPE needs an even d_head, not {self.d_head}.")
        if (self.rope.n_dims or 0) > self.d_head:
            raise ValueError(
                f"{type(self).__name__}: RoPE turns {self.rope.n_dims} entries of heads of {self.d_head}, "
                "which is more than there are."
            )


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
class BucketAttention(Attention):
    """LTG-BERT's attention (arXiv 2303.09859): scores of content and of relative positions, from one table per model.

    n_buckets: distances up to half of it have a row of the table each, farther ones share rows on a log scale.
    output: "post_norm" (LTG-BERT, ELC-BERT: a LayerNorm with affine after the output projection) or "gated" (GPT-BERT:
    the heads times gelu of a gate, and a LayerNorm without affine, before the output projection).
    """

    kind: ClassVar[str] = "buckets"
    rope: Rope | None = None
    bias: bool = True
    n_buckets: int = 32
    output: Literal["post_norm", "gated"] = "post_norm"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of(self, "output", ("post_norm", "gated"))
        check_positive(self, "n_buckets")
        if self.n_buckets < 4 or self.n_buckets % 2:
            raise ValueError(f"BucketAttention.n_buckets must be even and at least 4, not {self.n_buckets}.")
        if self.rope is not None or self.qk_norm != "none" or self.window is not None:
            raise ValueError("BucketAttention has relative positions of its own: no RoPE, QK norm or window besides.")
        if self.kv_shift or self.short_conv:
            raise ValueError("BucketAttention projects positions as it does tokens: no KV shift or ShortConv besides.")
        if self.n_kv_heads != self.n_heads:
            raise ValueError(
                f"BucketAttention: n_kv_heads ({self.n_kv_heads}) must equal n_heads ({self.n_heads}), because "
                "positions have a query and a key per head."
            )


@dataclass(frozen=True, kw_only=True)
class MLP:
    """W_out act(W_in x), or gated: W_out (act(W_gate x) * W_in x); SwiGLU unless another act is given.

    d_mlp: one width, or one per layer. mid_norm: a LayerNorm without affine on the neurons.
    """

    d_mlp: int | tuple[int, ...] = 256
    act: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"
    gated: bool = True
    bias: bool = False
    mid_norm: Norm | None = None
    parts: ClassVar[dict[str, type]] = {"mid_norm": Norm}

    def __post_init__(self) -> None:
        check_plain(self)
        if isinstance(self.d_mlp, list):  # as JSON has it
            object.__setattr__(self, "d_mlp", tuple(self.d_mlp))
        widths = self.d_mlp if isinstance(self.d_mlp, tuple) else (self.d_mlp,)
        for width in widths:
            if not isinstance(width, int) or isinstance(width, bool) or width < 1:
                raise ValueError(f"MLP.d_mlp must be a whole number of at least 1 (or one per layer), not {width!r}.")
        check_one_of(self, "act", ("silu", "gelu", "gelu_tanh", "relu2"))

    def width(self, layer: int) -> int:
        return self.d_mlp[layer] if isinstance(self.d_mlp, tuple) else self.d_mlp


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
    """A pre-norm transformer: norms, attention, MLP, an optional local mixer, and one residual system.

    block: "sequential", or "parallel" where all sublayers of a block read the same state, before any of them writes.
    positions: "none" (they are in the attention) or "learned" (a table of n_ctx rows, part of the atom embed).
    head: "linear", or "mlm" (dense, GELU, LayerNorm, then the linear head: not linear in the last read).

    The properties below the fields (n_heads, d_head, d_mlp, normalization_type, ...) are the names under which
    transformer-lens tools look these values up.
    """

    d_vocab: int
    n_ctx: int
    d_model: int
    n_layers: int
    attention: Attention = field(default_factory=Attention)
    local: ShortSWA | None = None
    mlp: MLP = field(default_factory=MLP)
    canon: Canon | None = None
    residual: ResidualConfig = field(default_factory=lambda: residual_kinds()["standard"]())
    norm: Norm = Norm()
    final_norm: Norm | None = None  # None: as norm
    embed_norm: Norm | None = None  # None: no norm
    positions: Literal["none", "learned"] = "none"
    block: Literal["sequential", "parallel"] = "sequential"
    head: Literal["linear", "mlm"] = "linear"
    head_bias: bool = False
    tied: bool = True
    parts: ClassVar[dict[str, type]] = {
        "attention": Attention, "local": ShortSWA, "mlp": MLP,
        "norm": Norm, "final_norm": Norm, "embed_norm": Norm,
        "canon": Canon,
    }  # fmt: skip

    def __post_init__(self) -> None:
        check_plain(self)
        check_positive(self, "d_vocab", "n_ctx", "d_model", "n_layers")
        for name, part in (("attention", Attention), ("mlp", MLP), ("residual", ResidualConfig), ("norm", Norm)):
            if not isinstance(value := getattr(self, name), part):
                raise ValueError(f"ModelConfig.{name} must be a {part.__name__}, not {value!r}.")
        for name, part in (("local", ShortSWA), ("canon", Canon), ("final_norm", Norm), ("embed_norm", Norm)):
            if not isinstance(value := getattr(self, name), part | None):
                raise ValueError(f"ModelConfig.{name} must be a {part.__name__} or None, not {value!r}.")
        check_one_of(self, "positions", ("none", "learned"))
        check_one_of(self, "block", ("sequential", "parallel"))
        check_one_of(self, "head", ("linear", "mlm"))
        if self.canon and (not self.attention.causal or isinstance(self.attention, BucketAttention)):
            raise ValueError("ModelConfig: Canon layers need causal attention without position buckets.")
        if isinstance(self.mlp.d_mlp, tuple) and len(self.mlp.d_mlp) != self.n_layers:
            raise ValueError(f"MLP.d_mlp has {len(self.mlp.d_mlp)} widths for {self.n_layers} layers.")

    @property
    def causal(self) -> bool:
        return self.attention.causal

    @property
    def norm_eps(self) -> float:
        return self.norm.eps

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
        """The MLP's width; the largest where it differs between layers."""
        return max(self.mlp.d_mlp) if isinstance(self.mlp.d_mlp, tuple) else self.mlp.d_mlp

    @property
    def normalization_type(self) -> str | None:
        """None only where no norm does anything: a norm of kind "none" has a recorded scale of 1, like the others."""
        norms = (self.norm, self.final_norm or self.norm)
        if all(n.kind == "none" and not n.weight and not n.bias for n in norms):
            return None
        return "LN" if norms[1].kind == "layer" else "RMS"

    @property
    def act_fn(self) -> str:
        return self.mlp.act

    @property
    def attn_only(self) -> bool:
        return False

    @property
    def positional_embedding_type(self) -> str:
        if isinstance(self.attention, BucketAttention):
            return "relative_positional_bias"
        return "standard" if self.positions == "learned" else "rotary"

    @property
    def parallel_attn_mlp(self) -> bool:
        return self.block == "parallel"

    # no parts of a configuration: transformer-lens's tools ask for them, and take None for torch's default
    device: ClassVar[None] = None
    dtype: ClassVar[None] = None
    use_attn_result: ClassVar[bool] = False
    use_split_qkv_input: ClassVar[bool] = False
    use_hook_mlp_in: ClassVar[bool] = False
    use_attn_in: ClassVar[bool] = False

    def describe(self) -> str:
        """The residual system, and the local mixers that are on, in a few words."""
        with_ = [f"sequence ShortSWA of {self.local.window} tokens"] if self.local else []
        with_ += [f"Canon layers {self.canon.sites}"] if self.canon else []
        with_ += [f"ShortConv on {', '.join(self.attention.short_conv.on)}"] if self.attention.short_conv else []
        with_ += ["KV shift"] if self.attention.kv_shift else []
        with_ += ["value residual"] if self.attention.value_residual else []
        return self.residual.describe() + (f", with {' and '.join(with_)}" if with_ else "")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; the residual system carries its kind."""
        out = asdict(self)
        out["residual"] = {"kind": self.residual.kind, **out["residual"]}
        out["attention"] = {"kind": self.attention.kind, **out["attention"]}
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
        if isinstance(attention := data.get("attention"), dict):
            attention = dict(attention)
            kind, known = attention.pop("kind", Attention.kind), {c.kind: c for c in (Attention, BucketAttention)}
            if kind not in known:
                raise ValueError(f"Unknown kind of attention {kind!r}; known kinds are {', '.join(known)}.")
            data["attention"] = _build(known[kind], attention)
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
    for name, part in getattr(cls, "parts", {}).items():
        if isinstance(data.get(name), dict):
            data = {**data, name: _build(part, data[name])}
    return cls(**data)

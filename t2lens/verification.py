"""`verify`: is this model what its pictures say? Every identity that the views rely on, tried on one prompt."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.checks import Check, Verification
from t2lens.mixing import ForwardRecord
from t2lens.residual.depth_swa import DepthShortSWA
from t2lens.sublayers import DecodingCache
from t2lens.tracing import LIMITS, depth_weights, trace
from t2lens.two_axis import duality

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["verify"]

_COPY_BELOW = 200_000_000  # parameters
_EFFECT = 1e-6  # an edit that changes no logit by this much has not reached them
_BIDIRECTIONAL = "causality and decode = full: a bidirectional model sees all tokens and has no decoding cache"
_PROMPT = "And the king said unto the queen, the king is here."


@torch.no_grad()
def verify(model: Transformer, input: Any = None) -> Verification:
    """Checks of a trace of `input`, and of the model around it: caching, editing, causality, decoding, padding.

    Args:
        input: a text or token ids [pos]; by default a sentence (or, without a tokenizer, 12 seeded random ids).

    Returns:
        Verification: named checks with numbers and limits; true when all passed. What concerns one and the same pass is
        measured in the dtype of the model, what compares two passes on a float64 copy.

    Example:
        >>> import t2lens
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.DeepDelta())
        >>> report = t2lens.verify(t2lens.build(cfg, seed=0))
        >>> report.passed, report["plain = cached"].value
        (True, 0.0)
    """
    if input is None:
        input = _PROMPT if model.tokenizer is not None else _random_ids(model)
    report = trace(model, input).verify()
    tokens = model.prepare(input)[0][:, : model.cfg.n_ctx]
    plain = model(tokens)
    checks = [*report, *_caching(model, tokens, plain), *_editing(model, tokens, plain)]
    # The rest compares passes that add in another order; a float64 copy tells a fault from rounding, which an unlucky
    # model can amplify. A model too large to copy is judged in its own dtype.
    if model.n_params < _COPY_BELOW:
        model = copy.deepcopy(model).double()
        plain = model(tokens)
    limit = LIMITS[plain.dtype] * float(plain.abs().max().clamp(min=1.0))
    checks += [*_sequence(model, tokens, plain, limit), *_depth_duality(model, tokens, limit)]
    return Verification(tuple(checks), () if model.cfg.causal else (_BIDIRECTIONAL,))


def _random_ids(model: Transformer) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.cfg.d_vocab, (min(12, model.cfg.n_ctx),), generator=generator).tolist()


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _caching(model: Transformer, tokens: Tensor, plain: Tensor) -> list[Check]:
    record = ForwardRecord()
    fired: Counter[str] = Counter()

    def count(_: Tensor, *, hook: Any) -> None:
        fired[hook.name] += 1

    cached, cache = model.run_with_cache(tokens, record=record)
    model.run_with_hooks(tokens, fwd_hooks=[(name, count) for name in model.hook_dict])
    off = max(abs(fired[name] - 1) for name in model.hook_dict)
    checks = [
        Check(
            "plain = cached",
            _distance(plain, cached),
            0.0,
            "a cached run gives the same logits to the last bit",
        ),
        Check("each hook fires once", float(off), 0.0, "firings of each hook point in one pass, less one"),
    ]
    seen = []
    used = depth_weights(model, record)
    for read in model.reads:
        name = read.site.hook("depth_attn", read.way)
        if read.name in used and name in model.hook_dict:
            seen.append(_distance(cache[name], used[read.name]))
    for step in record.steps:
        beta = f"blocks.{step.site.layer}.ddl_{step.site.kind}.hook_beta"
        if beta in model.hook_dict:
            seen.append(_distance(cache[beta], step.gates["beta"]))
    if seen:
        checks.append(
            Check("captured = used", max(seen), 0.0, "captured depth weights and gates are those the read used")
        )
    return checks


def _editing(model: Transformer, tokens: Tensor, plain: Tensor) -> list[Check]:
    """Every depth weight and gate is on the live path: changing it changes the logits."""
    names = [n for n in model.hook_dict if "hook_depth_attn" in n or n.endswith("hook_beta")]
    # a single source (or the same one twice) is only rescaled by its weights, and the norm takes the scale out again
    held = {r: {source.atoms for source in model.residual.sources(r.site)} for r in model.reads}
    lone = {r.site.hook("depth_attn", r.way) for r in model.reads if len(held[r]) == 1}
    names = [n for n in names if n not in lone]
    if not names:
        return []
    effects = {name: _effect(model, tokens, plain, name) for name in names}
    idle = [name for name, effect in effects.items() if effect < _EFFECT]
    if idle:
        awake, fill = _awake(model) or model, [(n, _filled) for n in names]
        base = awake.run_with_hooks(tokens, fwd_hooks=fill)
        effects |= {name: _effect(awake, tokens, base, name, fill) for name in idle}
    checks = [
        Check(
            "edits reach the logits",
            min(effects.values()),
            _EFFECT,
            "smallest change when a depth weight or gate is disturbed",
            at_least=True,
        )
    ]
    return [
        *checks,
        Check(
            "nothing left behind",
            _distance(model(tokens), plain),
            0.0,
            "a plain run after the edits is unchanged",
        ),
    ]


def _effect(
    model: Transformer, tokens: Tensor, plain: Tensor, name: str, before: Sequence[tuple[str, Any]] = ()
) -> float:
    """Largest change of a logit when what passes the hook point `name` is disturbed, after the hooks `before`."""
    generator = torch.Generator().manual_seed(0)

    def disturb(tensor: Tensor, *, hook: Any) -> Tensor:  # noqa: ARG001
        noise = torch.rand(tensor.shape, generator=generator).to(tensor)
        return tensor * (1 + noise)

    return _distance(model.run_with_hooks(tokens, fwd_hooks=[*before, (name, disturb)]), plain)


def _filled(weights: Tensor, *, hook: Any) -> Tensor:  # noqa: ARG001
    """Depth weights and gates without zeros. Where a sparse normaliser (or an untrained average) leaves one source, an
    edit only rescales the read, and what nobody reads has no effect: neither is a fault of the hook points."""
    return torch.where(weights.abs() < 1e-3, 0.1, weights)


def _awake(model: Transformer) -> Transformer | None:
    """A copy in which every parameter that is zero throughout has moved, or None where there is none (or no room).

    A fresh model may multiply by zero what it read (the output of ShortSWA, the values of a depth read), and a model in
    training leaves that state by itself; there an edit without effect is no fault.
    """
    asleep = [name for name, p in model.named_parameters() if not p.any()]
    if not asleep or model.n_params >= _COPY_BELOW:
        return None
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for name in asleep:
        p = model.get_parameter(name)
        p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p))
    return model


def _sequence(model: Transformer, tokens: Tensor, plain: Tensor, limit: float) -> list[Check]:
    n = tokens.shape[1]
    checks = []
    if n > 1 and model.cfg.causal:
        other = tokens.clone()
        other[:, -1] = (other[:, -1] + 1) % model.cfg.d_vocab
        checks.append(
            Check(
                "causality",
                _distance(model(other)[:, :-1], plain[:, :-1]),
                limit,
                "the last token changes no earlier logit",
            )
        )
        cache, parts = DecodingCache(), []
        for i in range(n):
            parts.append(model(tokens[:, i : i + 1], cache=cache))
        checks.append(
            Check(
                "decode = full",
                _distance(torch.cat(parts, dim=1), plain),
                limit,
                "token by token with a cache, and the full pass",
            )
        )
    n_pad = min(3, model.cfg.n_ctx - n)
    if n_pad > 0:
        padded = torch.cat([tokens[:, :1].expand(-1, n_pad), tokens], dim=1)
        mask = torch.arange(n + n_pad, device=tokens.device)[None] >= n_pad
        checks.append(
            Check(
                "padding",
                _distance(model(padded, mask)[:, n_pad:], plain),
                limit,
                "left padding changes nothing at real tokens",
            )
        )
    return checks


def _depth_duality(model: Transformer, tokens: Tensor, limit: float) -> list[Check]:
    if not isinstance(model.residual, DepthShortSWA):
        return []
    return [
        Check(
            "duality",
            duality(model, tokens).largest,
            limit,
            "depth reads equal ShortSWA on the transposed state stack",
        )
    ]

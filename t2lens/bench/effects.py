"""Every route of a model cut one at a time: batched passes against one forward pass for each.

Both compute the same numbers (change of the loss, KL divergence, change of the true token's logit), which must agree
before they are timed. A pass of the naive loop costs the same whatever it cuts, so every sixteenth cut stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from t2lens.analysis.inputs import Batch, read_batch
from t2lens.analysis.sweep import Cut, point_of, routes_of, sweep
from t2lens.bench.timing import Ratio, paired
from t2lens.config import MLP, Attention, ModelConfig, ResidualConfig
from t2lens.model import Transformer, build
from t2lens.residual import AttnRes, DenseFormer, HyperConnections, MUDDFormer

__all__ = ["bench_effects"]

_SYSTEMS: tuple[tuple[str, ResidualConfig, int], ...] = (
    ("attnres-full", AttnRes(), 128),
    ("attnres-full", AttnRes(), 256),
    ("denseformer", DenseFormer(), 128),
    ("muddformer", MUDDFormer(), 128),
    ("hyper-connections", HyperConnections(), 128),
)
_PART = 16  # one of so many cuts is timed in the naive loop
_TOKENS = 64
_AGREE = 1e-4  # nats, in float32


def bench_effects(pairs: int = 21, n_layers: int = 16) -> Iterator[Ratio]:
    """16 blocks of two sublayers on 64 tokens, d_vocab 1024; a third of the pairs, because each takes seconds."""
    for name, residual, d_model in _SYSTEMS:
        model = _model(residual, d_model, n_layers)
        tokens = torch.randint(1024, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
        batch = read_batch(model, tokens)
        cuts = [Cut(r, (i,)) for r, names in routes_of(model, "source").items() for i in range(len(names))]
        part = cuts[::_PART]
        _same(name, model, batch, cuts)
        yield paired(
            f"{name}, {len(model.sites) - 1} sublayers, d={d_model}: {len(cuts)} routes in a sweep / one pass each",
            lambda model=model, batch=batch, cuts=cuts: sweep(model, batch, cuts, "source"),
            lambda model=model, batch=batch, part=part: _naive(model, batch, part),
            pairs=max(2, pairs // 3),
            bound=0.25,
            warm_ups=1,
            times_b=len(cuts) / len(part),
        )


def _model(residual: ResidualConfig, d_model: int, n_layers: int) -> Transformer:
    attention = Attention(n_heads=d_model // 32, n_kv_heads=d_model // 32, d_head=32)
    cfg = ModelConfig(
        d_vocab=1024,
        n_ctx=_TOKENS,
        d_model=d_model,
        n_layers=n_layers,
        attention=attention,
        mlp=MLP(d_mlp=3 * d_model),
        residual=residual,
    )
    model = build(cfg, seed=0)
    generator = torch.Generator().manual_seed(0)
    for p in model.residual.parameters():  # away from their start, where many weights are zeros
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    return model


@torch.no_grad()
def _naive(model: Transformer, batch: Batch, cuts: Sequence[Cut]) -> Tensor:
    """[3, cut]: change of the loss, KL, change of the logit."""
    base, ids = model(batch.tokens)[0, :-1], batch.tokens[0, 1:, None]
    plain = base.log_softmax(dim=-1)
    out = []
    for cut in cuts:

        def drop(weights: Tensor, *, hook: Any, cut: Cut = cut) -> Tensor:  # noqa: ARG001
            weights = weights.clone()
            weights[..., cut.removed] = 0.0
            return weights

        logits = model.run_with_hooks(batch.tokens, fwd_hooks=[(point_of(cut.read, "source"), drop)])[0, :-1]
        other = logits.log_softmax(dim=-1)
        kl = (plain.exp() * (plain - other)).sum(dim=-1).mean()
        loss = (plain - other).gather(-1, ids).mean()
        out.append(torch.stack([loss, kl, (logits - base).gather(-1, ids).mean()]))
    return torch.stack(out, dim=-1)


def _same(name: str, model: Transformer, batch: Batch, cuts: Sequence[Cut]) -> None:
    part = cuts[:: max(1, len(cuts) // 8)]
    found = sweep(model, batch, part, "source")
    means = torch.stack([found.mean(x) for x in (found.loss, found.kl, found.logit)])
    off = float((means - _naive(model, batch, part)).abs().max())
    if not off < _AGREE:
        raise AssertionError(f"{name}: the two ways differ by {off:.2g}; timing them means nothing.")

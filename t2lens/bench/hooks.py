"""What hook points cost: idle, when everything is cached, and when only depth weights, gates and norms are.

A cache of everything keeps some 100 MB that a plain pass would reuse, so its ratio is mostly the price of fresh memory
pages, which differs tenfold between machines and allocators (`t2lens.hooks.capture.keep_freed_memory`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from fnmatch import fnmatch

import torch
from torch import nn

from t2lens.bench.timing import Ratio, paired
from t2lens.config import MLP, Attention, ModelConfig, ResidualConfig
from t2lens.hooks import HookPoint
from t2lens.model import Transformer, build
from t2lens.residual import AttnRes, DeepDelta, Standard

__all__ = ["bench_hooks"]

_SYSTEMS: dict[str, ResidualConfig] = {"standard": Standard(), "attnres-full": AttnRes(), "ddl": DeepDelta()}
_DEPTH = ("*hook_depth_attn*", "*hook_beta", "*hook_scale")


class _Bare(nn.Module):
    """Stands where a hook point stood. Its call is one Python function, the least a name in the code can cost."""

    active = may_edit = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _without_hook_points(model: Transformer) -> Transformer:
    twin = copy.deepcopy(model)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, HookPoint):
                setattr(parent, name, _Bare())
    for name in twin.residual.hook_points:
        twin.residual.hook_points[name] = _Bare()  # type: ignore[assignment]
    return twin


def _model(d_model: int, residual: ResidualConfig) -> Transformer:
    attention = Attention(n_heads=d_model // 32, n_kv_heads=d_model // 32, d_head=32)
    cfg = ModelConfig(
        d_vocab=512,
        n_ctx=256,
        d_model=d_model,
        n_layers=8,
        attention=attention,
        mlp=MLP(d_mlp=3 * d_model),
        residual=residual,
    )
    return build(cfg, seed=0)


def bench_hooks(pairs: int = 40) -> Iterator[Ratio]:
    """Ratios against a plain forward pass: idle hook points (d_model 64 on 1x16 tokens, 256 on 4x128), cached runs."""
    for system, residual in _SYSTEMS.items():
        for d_model, shape in ((64, (1, 16)), (256, (4, 128))):
            model = _model(d_model, residual)
            tokens = torch.randint(512, shape, generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                name = f"{system}, d={d_model}, {shape[0]}x{shape[1]} tokens: "
                yield _idle(name, model, tokens, pairs)
                if d_model == 256:
                    yield _cached(name + "cache everything / plain", model, tokens, None, 1.5, pairs)
                    names = [n for n in model.hook_dict if any(fnmatch(n, pattern) for pattern in _DEPTH)]
                    name += "cache depth weights, gates, norms / plain"
                    yield _cached(name, model, tokens, names, 1.10, pairs)


def _idle(name: str, model: Transformer, tokens: torch.Tensor, pairs: int) -> Ratio:
    bare = _without_hook_points(model)
    return paired(
        name + "idle hook points / none", lambda: model(tokens), lambda: bare(tokens), pairs=pairs, bound=1.05
    )


def _cached(
    name: str, model: Transformer, tokens: torch.Tensor, names: list[str] | None, bound: float, pairs: int
) -> Ratio:
    return paired(
        name,
        lambda: model.run_with_cache(tokens, names_filter=names),
        lambda: model(tokens),
        pairs=pairs,
        bound=bound,
    )

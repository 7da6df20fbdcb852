"""Depth reads against the straightforward way: stack every source, weigh it, sum it up, once per read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from t2lens.bench.timing import Ratio, paired
from t2lens.config import ModelConfig, ResidualConfig
from t2lens.residual import AttnRes, DepthSWA, Site, build_residual, make_sites

__all__ = ["bench_reads"]


def _ours(cfg: ModelConfig, sites: tuple[Site, ...], atoms: list[Tensor]) -> Tensor:
    system = build_residual(cfg, sites)
    state = system.begin(atoms[0])
    for site, atom in zip(sites[:-1], atoms[1:], strict=True):
        system.read(state, site, system.read_gates(state, site))
        state = system.write(state, site, atom, {})
    read = system.read(state, sites[-1], system.read_gates(state, sites[-1]))
    assert isinstance(read, Tensor)
    return read


def _stacked(atoms: list[Tensor], query: Tensor, eps: float = 1e-5) -> Tensor:
    """Full Attention Residuals as the equation stands: stack, normalise the keys, score, softmax, weigh, sum."""
    read = atoms[0]
    for n in range(1, len(atoms) + 1):
        sources = torch.stack(atoms[:n])
        keys = sources / (sources.square().mean(-1, keepdim=True) + eps).sqrt()
        weights = (keys @ query).softmax(dim=0)
        read = (weights.unsqueeze(-1) * sources).sum(dim=0)
    return read


def bench_reads(pairs: int = 15) -> Iterator[Ratio]:
    """All reads of one pass, sublayers left out: 16 blocks of d_model 256 on 4x256 tokens, 64 sublayers of 128."""
    generator = torch.Generator().manual_seed(0)
    for d_model, n_layers, shape in ((256, 16, (4, 256)), (128, 32, (4, 256))):
        sites = make_sites(n_layers, ("attn", "mlp"))
        atoms = [torch.randn(*shape, d_model, generator=generator) for _ in sites]
        systems: dict[str, ResidualConfig] = {"attnres-full": AttnRes(), "attnres-block": AttnRes(block_size=4)}
        for name, residual in (systems | {"depth-swa": DepthSWA(window=4)}).items():
            cfg = ModelConfig(d_vocab=8, n_ctx=8, d_model=d_model, n_layers=n_layers, residual=residual)
            with torch.inference_mode():
                yield paired(
                    f"{name}, {len(sites) - 1} sublayers, d={d_model}: all reads / stacking full AttnRes",
                    lambda cfg=cfg, sites=sites, atoms=atoms: _ours(cfg, sites, atoms),
                    lambda atoms=atoms, d=d_model: _stacked(atoms, torch.zeros(d)),
                    pairs=pairs,
                    bound=1.0,
                )

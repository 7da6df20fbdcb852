"""The depth axis of every residual system against its equation carried out as it stands.

Per system, on the same tensors and in one run: everything that the system does in one pass (gates, reads, writes; the
sublayers' outputs are given) over the same with its equation taken literally: every read stacks its sources, weighs
them and sums them up; streams are weighed and summed one by one; a convolution is a convolution. Gates are shared, so
a ratio below 1 is won in the reads and writes alone. The two must agree before they are timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from t2lens.bench.timing import Ratio, paired
from t2lens.config import ModelConfig, ResidualConfig
from t2lens.residual import (
    DCA,
    AttnRes,
    DeepDelta,
    DeltaAttnRes,
    DenseFormer,
    DepthSWA,
    ELCBert,
    Gates,
    HyperConnections,
    MUDDFormer,
    ResidualSystem,
    Site,
    VerticalAttention,
    build_residual,
    make_sites,
)
from t2lens.residual.deep_delta import DeepDeltaLearning
from t2lens.residual.hyper_connections import HyperConnected
from t2lens.residual.sources import Sources

__all__ = ["bench_systems"]

_SYSTEMS: dict[str, ResidualConfig] = {
    "elc-bert": ELCBert(variant="zero"),
    "denseformer": DenseFormer(),
    "denseformer 4x5": DenseFormer(dilation=4, period=5),
    "gpt-bert": DenseFormer(every="sublayer"),
    "vertical-attention": VerticalAttention(),
    "muddformer": MUDDFormer(),
    "dca v1": DCA(grn="v1"),
    "dca v3": DCA(),
    "2-dca": DCA(recent=2),
    "attnres-full": AttnRes(),
    "attnres-block": AttnRes(block_size=4),
    "attnres-delta": DeltaAttnRes(),
    "depth-swa": DepthSWA(window=4),
    "hyper-connections": HyperConnections(),
    "mhc": HyperConnections.mhc(),
    "ddl-cc": DeepDelta(value_channels=4),
    "ddl-tc": DeepDelta(value_channels=4, compress="time"),
}
_SHAPES = ((256, 16, (4, 256)), (128, 32, (4, 256)))  # d_model, blocks of two sublayers, batch and positions
_AGREE = 1e-3  # of the last read; two orders of adding up, over many reads


def bench_systems(pairs: int = 15) -> Iterator[Ratio]:
    """16 blocks of d_model 256 and 64 sublayers of 128, on 4x256 tokens."""
    generator = torch.Generator().manual_seed(0)
    for d_model, n_layers, shape in _SHAPES:
        sites = make_sites(n_layers, ("attn", "mlp"))
        atoms = [torch.randn(*shape, d_model, generator=generator) for _ in sites]
        for name, residual in _SYSTEMS.items():
            cfg = ModelConfig(d_vocab=8, n_ctx=8, d_model=d_model, n_layers=n_layers, residual=residual)
            system = _awake(build_residual(cfg, sites), generator)
            with torch.inference_mode():
                _same(name, system, atoms)
                yield paired(
                    f"{name}, {len(sites) - 1} sublayers, d={d_model}: depth axis / its equation as it stands",
                    lambda system=system, atoms=atoms: _pass(system, atoms),
                    lambda system=system, atoms=atoms: _literal_pass(system, atoms),
                    pairs=pairs,
                    bound=1.0,
                )


def _awake(system: ResidualSystem, generator: torch.Generator) -> ResidualSystem:
    """Away from its start, where many weights are zeros."""
    for p in system.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    return system


def _pass(system: ResidualSystem, atoms: list[Tensor]) -> Tensor:
    """One pass over the depth axis: `Transformer.forward` without its sublayers, whose outputs are given."""
    state, read = system.begin(atoms[0]), atoms[0]
    for site, out in zip(system.sites, [*atoms[1:], None], strict=True):
        gates = system.read_gates(state, site)
        state = system.enter(state, site, gates)
        reads = system.read(state, site, gates)
        read = reads if isinstance(reads, Tensor) else reads["v"]
        if out is not None:
            gates |= system.write_gates(state, site, read, read, out)
            state = system.write(state, site, system.atom(out, gates), gates)
    return read


def _literal_pass(system: ResidualSystem, atoms: list[Tensor]) -> Tensor:
    with _literally():
        return _pass(system, atoms)


def _same(name: str, system: ResidualSystem, atoms: list[Tensor]) -> None:
    ours, literal = _pass(system, atoms), _literal_pass(system, atoms)
    off = float((ours - literal).abs().max() / literal.abs().max())
    if not off < _AGREE:
        raise AssertionError(f"{name}: the two ways differ by {off:.2g} of the last read; timing them means nothing.")


# --- the equations as they stand, in place of what the systems do (and so with their arguments)


@contextmanager
def _literally() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(Sources, __init__=_init, dot=_dot, mix=_mix, mix_ways=_mix_ways))
        stack.enter_context(patch.object(Sources, "add_channels", _add_channels))
        stack.enter_context(patch.multiple(HyperConnected, read=_read_streams, write=_write_streams))
        stack.enter_context(patch.object(DeepDeltaLearning, "read", _read_channels))
        yield


def _init(self: Sources, capacity: int, first: Tensor) -> None:  # noqa: ARG001
    self._items, self._block = [first], None


def _dot(self: Sources, direction: Tensor, start: int = 0) -> Tensor:
    return (torch.stack(self._items[start:]) @ direction).movedim(0, -1)


def _mix(self: Sources, weights: Tensor, start: int = 0) -> Tensor:
    return (weights.movedim(-1, 0).unsqueeze(-1) * torch.stack(self._items[start:])).sum(dim=0)


def _mix_ways(self: Sources, weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(_mix(self, way) for way in weights.unbind(-2))


def _add_channels(self: Sources, total: Tensor, weights: Iterator[Tensor]) -> Tensor:
    return total + (torch.stack(list(weights))[:, None, None] * torch.stack(self._items)).sum(dim=0)


def _read_streams(self: HyperConnected, state: Tensor, site: Site, gates: Gates) -> Tensor:  # noqa: ARG001
    return (gates["weights"].unsqueeze(-1) * state).sum(dim=-2)


def _write_streams(self: HyperConnected, state: Tensor, site: Site, atom: Tensor, gates: Gates) -> Tensor:  # noqa: ARG001
    exchanged = torch.einsum("btij,btjd->btid", gates["res"], state)
    return exchanged + gates["post"].unsqueeze(-1) * atom.unsqueeze(-2)


def _read_channels(self: DeepDeltaLearning, state: Any, site: Site, gates: Gates) -> Tensor:  # noqa: ARG001
    over_time = not isinstance(state, Tensor)
    x = state.x if over_time else state  # [B, T, V, D]
    kernel, read = self.compress[self._row(site)], self.compress_read[self._row(site)]
    if over_time:  # depthwise, then over the channels
        batch, n, channels, d = x.shape
        line = F.pad(x.permute(0, 2, 3, 1).reshape(batch, channels * d, n), (kernel.shape[-1] - 1, 0))
        taps = kernel.transpose(0, 1).reshape(channels * d, 1, -1)
        mixed = F.conv1d(line, taps, groups=channels * d).unflatten(1, (channels, d))
        return (mixed * read[:, None, None]).sum(dim=1).transpose(1, 2)
    pad, width = (kernel.shape[-1] - 1) // 2, kernel.shape[-1]
    line = F.pad(x.permute(0, 1, 3, 2).flatten(0, 1), (pad, width - 1 - pad)).transpose(0, 1)  # [D, B T, V + K - 1]
    taps = torch.stack([line[..., q : q + width] for q in range(x.shape[-2])], dim=-2)  # [D, B T, V, K]
    return ((taps * kernel[:, None, None]).sum(dim=-1) * read).sum(dim=-1).T.unflatten(0, x.shape[:2])

"""Small models for the tests of the hook layer alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from t2lens.hooks import HookedRoot, HookPoint


class ToyBlock(nn.Module):
    def __init__(self, width: int, generator: torch.Generator):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator, dtype=torch.float64))
        self.hook_pattern = HookPoint(shape="batch head query_pos key_pos", meaning="where each head reads")
        self.hook_z = HookPoint(shape="batch pos head d_head", meaning="mixed values")
        self.hook_out = HookPoint(shape="batch pos width", meaning="what the block writes", unit="stream")

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1))  # [batch, pos, head, d_head]
        scores = torch.einsum("bqhd,bkhd->bhqk", heads, heads)
        pattern = self.hook_pattern(scores.softmax(dim=-1))
        z = self.hook_z(torch.einsum("bhqk,bkhd->bqhd", pattern, heads))
        return self.hook_out(torch.tanh(z.flatten(-2) @ self.weight))


class Toy(HookedRoot):
    """embed -> blocks -> sum, with weights and shapes from a seed. `tokens` [batch, pos] or [pos]."""

    stop: Any = None
    blocks: Any  # a ModuleList, whose items have no type

    def __init__(self, seed: int = 0, n_layers: int = 3):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        width = 4 + 2 * (seed % 3)
        self.embed = nn.Parameter(torch.randn(11, width, generator=generator, dtype=torch.float64))
        self.hook_embed = HookPoint(shape="batch pos width", meaning="embedding")
        self.blocks = nn.ModuleList([ToyBlock(width, generator) for _ in range(n_layers)])
        for layer in range(n_layers):
            self.mount(
                f"blocks.{layer}.depth.hook_gate", HookPoint(shape="batch pos source", meaning=f"gate of {layer}")
            )
        self.hook_last = HookPoint(shape="batch pos width", meaning="what is summed")
        self.build_more()
        self.setup()

    def build_more(self) -> None:
        """For subclasses: more parts, before setup()."""

    def forward(self, tokens: Tensor, return_type: str = "logits", stop_at_layer: int | None = None) -> Any:
        x = self.hook_embed(self.embed[tokens if tokens.dim() == 2 else tokens[None]])
        written = [x]
        for layer, block in enumerate(self.blocks[:stop_at_layer]):
            gate = block.depth.hook_gate(torch.stack([w.mean(-1) for w in written], dim=-1))
            x = x + gate.sum(-1, keepdim=True) * block(x)
            x = self.after_block(x, layer)
            written.append(x)
        if stop_at_layer is not None:
            return x
        x = self.hook_last(x)
        return x.sum() if return_type == "loss" else x.sum(-1)

    def after_block(self, x: Tensor, layer: int) -> Tensor:
        """For faults: `stop`, when set, is called after block 1."""
        if layer == 1 and self.stop is not None:
            self.stop(x, None)
        return x


class FinalToy(Toy):
    """Promises that hooked tensors are final, and keeps it."""

    hooked_tensors_are_final = True


class InPlace(Toy):
    """Writes into a tensor after its hook point."""

    def forward(self, tokens: Tensor, return_type: str = "logits", stop_at_layer: int | None = None) -> Any:
        x = self.hook_embed(self.embed[tokens].clone())
        x += 1.0
        return self.hook_last(x).sum(-1)


class LyingInPlace(InPlace):
    hooked_tensors_are_final = True


class FiresTwice(Toy):
    def after_block(self, x: Tensor, layer: int) -> Tensor:
        return self.hook_embed(x) if layer == 1 else x


def tokens_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    batch, pos = (int(n) for n in torch.randint(2, 6, (2,), generator=generator))
    return torch.randint(0, 11, (batch, pos), generator=generator)


def same(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and torch.equal(found, expected)

"""One pass of a model as a linear network: every nonlinearity is held at the value it has in this pass.

Held are norm scales, attention patterns, MLP gates (act(pre) beside a linear branch; without one act(pre) = s pre with
the secant s = act(pre) / pre held), gates of convolutions and of KV shift, and whatever the residual system computes
(its gates). What is left is linear, in two steps that take turns:

    read = sum_a C_a atom_a            the linear code of the residual system, over depth
    atom = sum_s L_s read_s + rest     the sublayer, over positions s; rest: biases, and what hooks put in by hand

So the number <g, atom> is the sum of <L_s^T g, read_s> and of <g, rest>, and <h, read> is that of <C_a^T h, atom_a>:
`Frozen.to_reads` and `Frozen.to_atoms` take g and h back by one step each. Both come from autograd on the model's own
code, run once with hooks that detach what is held, so no sublayer and no system is described a second time. Exact as
arithmetic on this input; no causal claim, since what is held depends on the same input.

Queries and keys are in the pattern, so nothing flows through them. A value residual (ResFormer) makes an atom depend on
what the first attention read, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.analysis.inputs import gradients
from t2lens.analysis.layout import columns_of
from t2lens.hooks import HookPoint
from t2lens.mixing import ForwardRecord, Step, walk
from t2lens.residual import Read, ResidualSystem, Site
from t2lens.sublayers import MLP, Attention, LocalConv, Norm
from t2lens.sublayers.short_conv import causal_conv
from t2lens.sublayers.values import KVShift, ValueResidual

if TYPE_CHECKING:
    from t2lens.analysis.inputs import Batch
    from t2lens.model import Transformer

__all__ = ["Frozen", "place", "value_read"]

Hook = Callable[..., Tensor | None]
_ALIKE = 0.01  # how far a linearised value may lie from the one that passes and still be that value, rounded


class Frozen:
    """A recorded pass of one batch, linear with everything else held (see the module docstring).

    Attributes:
        record: gates, reads and atoms of the pass, without a graph.
        atoms: what was written, embed first: [B, T, D] leaves of the depth graph.
        reads: read name -> [B, T, D], linear in `atoms`.
        leaves: read name -> [B, T, D], what a sublayer read; leaves of the graphs of `outs`.
        outs: site index -> [B, T, D] what that sublayer wrote, affine in `leaves`.
        seen: hook name -> tensor that passed there, for the hook points named in `watch`.
    """

    def __init__(
        self, model: Transformer, tokens: Tensor, mask: Tensor | None = None, *, form: str = "additive", watch: Any = ()
    ) -> None:
        self.model, self.form = model, form
        self.code = model.residual.linear_form(form)
        self.leaves: dict[str, Tensor] = {}
        self.outs: dict[int, Tensor] = {}
        self.seen: dict[str, Tensor] = {}
        record = ForwardRecord()
        with gradients(model):
            hooks = [*_holding(model), *self._cutting(), *((name, self._watch) for name in watch)]
            self.logits = model.run_with_hooks(tokens, mask, record=record, fwd_hooks=hooks).detach()
            self.record = record.detach()
            self._build_depth()
        self._inputs = {site.index: self._inputs_of(site) for site in model.sites if site.index in self.outs}

    # --- the pass
    def _cutting(self) -> list[tuple[str, Hook]]:
        """Every read becomes a leaf, and what is written goes on without its graph: each sublayer stands alone."""
        hooks: list[tuple[str, Hook]] = []
        for site in self.model.sites[:-1]:
            for way in self.model.residual.ways(site):
                if (name := site.hook("read", way)) in self.model.hook_dict:
                    hooks.append((name, self._leaf_of(Read(site, way).name)))
            hooks.append((f"blocks.{site.layer}.hook_{site.kind}_out", self._out_of(site)))
        return hooks

    def _leaf_of(self, read: str) -> Hook:
        def hook(x: Tensor, *, hook: HookPoint) -> Tensor:  # noqa: ARG001
            self.leaves[read] = x.detach().requires_grad_()
            return self.leaves[read]

        return hook

    def _out_of(self, site: Site) -> Hook:
        def hook(x: Tensor, *, hook: HookPoint) -> Tensor:  # noqa: ARG001
            self.outs[site.index] = x
            return x.detach()

        return hook

    def _watch(self, x: Tensor, *, hook: HookPoint) -> None:
        self.seen[hook.name or ""] = x

    # --- over depth
    def _build_depth(self) -> None:
        written = {step.site.index: step.out for step in self.record.steps if step.out is not None}
        assert self.record.embed is not None
        leaves = [self.record.embed, *(written[i] for i in sorted(written))]
        self.atoms = [x.detach().requires_grad_() for x in leaves]

        def atom(step: Step) -> Tensor:
            assert step.out is not None
            return self.code.share(self.atoms[step.site.index + 1], step.out, step.gates)

        self.reads = {read.name: x for read, x in walk(self.code, self.record, self.atoms[0], atom)}

    def to_atoms(self, grads: dict[str, Tensor]) -> list[Tensor | None]:
        """g [B, T, D] of reads -> C_a^T g of every atom, None where the atom is in none of them."""
        reads = [self.reads[name] for name in grads]
        return list(torch.autograd.grad(reads, self.atoms, list(grads.values()), retain_graph=True, allow_unused=True))

    # --- over positions
    def _inputs_of(self, site: Site) -> dict[str, Tensor]:
        sites = [site]
        if site.layer and site.kind in self.record.first_values:
            sites.append(next(first for first in self.model.sites if first.kind == site.kind))
        names = [value_read(self.model.residual, each).name for each in sites]  # others act through what is held
        return {name: self.leaves[name] for name in names if name in self.leaves}

    def to_reads(self, site: Site, g: Tensor) -> dict[str, Tensor]:
        """g [B, T, D] of what `site` wrote -> L^T g of every read that it is made of."""
        inputs, out = self._inputs[site.index], self.outs[site.index]
        if not out.requires_grad:
            return {}
        found = torch.autograd.grad(out, list(inputs.values()), g, retain_graph=True, allow_unused=True)
        return {name: x for name, x in zip(inputs, found, strict=True) if x is not None}

    def forget(self, site: Site) -> None:
        """Let go of what `site` made on the way to its write, which was pushed: its patterns are most of a pass."""
        self.outs.pop(site.index, None)
        for name in [name for name in self.seen if name.startswith(f"blocks.{site.layer}.{site.kind}.")]:
            del self.seen[name]

    def push(self, site: Site, out: Tensor, parts: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """For every read that `site` is made of: (name, L x [P, *out.shape]) of P parts x = parts(read) [P, B, T, D].

        out: what the site wrote, or a tensor on the way there. L comes from the transposed map, differentiated again.
        """
        inputs = self._inputs[site.index]
        if not out.requires_grad:
            return
        with torch.inference_mode(False), torch.enable_grad():  # the weights were looked at when the pass ran
            u = torch.zeros_like(out, requires_grad=True)
            back = torch.autograd.grad(
                out, list(inputs.values()), u, create_graph=True, retain_graph=True, allow_unused=True
            )
        for (name, leaf), g in zip(inputs.items(), back, strict=True):
            if g is not None and g.requires_grad:
                x = parts(leaf.detach())
                if len(x) == 1:
                    yield name, torch.autograd.grad(g, u, x[0], retain_graph=True)[0].unsqueeze(0)
                else:
                    yield name, torch.autograd.grad(g, u, x, retain_graph=True, is_grads_batched=True)[0]


def place(batch: Batch, pos: int) -> int:
    """Where token number `pos` of the one sequence of `batch` stands, counted over its real tokens.

    Raises:
        ValueError: several sequences, or no such token.
    """
    if len(batch.tokens) != 1:
        raise ValueError(f"This analysis follows one sequence, and {len(batch.tokens)} were given; run it on each.")
    return int(columns_of(batch, pos))


def value_read(residual: ResidualSystem, site: Site) -> Read:
    """The read of a site whose content goes into what it writes: the one there is, or that of the values."""
    return Read(site, "v" if "v" in residual.ways(site) else "")


# --- what is held ---------------------------------------------------------------------------------------------------


def _holding(model: Transformer) -> list[tuple[str, Hook]]:
    """Hooks under which every sublayer is affine in its reads, with the value that it has."""
    hooks: list[tuple[str, Hook]] = []
    for module in model.blocks.modules():
        if isinstance(module, Norm):
            hooks.append(_hold(module.hook_scale))
        elif isinstance(module, Attention):
            hooks.append(_hold(module.hook_pattern))
            if isinstance(gate := getattr(module, "hook_gate", None), HookPoint):
                hooks.append(_hold(gate))
        elif isinstance(module, KVShift | ValueResidual):
            hooks.append(_hold(module.hook_weights))
        elif isinstance(module, LocalConv) and module.act != "none":
            hooks += _hold_convolution(module)
        elif isinstance(module, MLP):
            hooks += _hold_ungated(module) if module.gate is None else [_hold(module.hook_pre)]
    return hooks


def _hold(point: HookPoint) -> tuple[str, Hook]:
    def hook(x: Tensor, *, hook: HookPoint) -> Tensor:  # noqa: ARG001
        return x.detach()

    return point.name or "", hook


def _hold_ungated(mlp: MLP) -> list[tuple[str, Hook]]:
    """act(pre) = (act(pre) / pre) pre with the quotient held, then the norm on the neurons with its scale held."""
    kept: dict[str, Tensor] = {}

    def pre(x: Tensor, *, hook: HookPoint) -> None:  # noqa: ARG001
        kept["pre"] = x

    def post(x: Tensor, *, hook: HookPoint) -> Tensor:  # noqa: ARG001
        neurons = _secant(mlp.act(kept["pre"]), kept["pre"])
        if (norm := mlp.mid_norm) is not None:
            neurons = norm.share(neurons, norm.scale(neurons).detach()).to(x.dtype)
            neurons = neurons if norm.b is None else neurons + norm.b
        return _in_place_of(x, neurons)

    return [(mlp.hook_pre.name or "", pre), (mlp.hook_post.name or "", post)]


def _hold_convolution(conv: LocalConv) -> list[tuple[str, Hook]]:
    kept: dict[str, Tensor] = {}

    def before(x: Tensor, *, hook: HookPoint) -> None:  # noqa: ARG001
        kept["in"] = x

    def after(x: Tensor, *, hook: HookPoint) -> Tensor:  # noqa: ARG001
        y = causal_conv(kept["in"], conv.weight[:, 0], shift=conv.shift)
        y = y if conv.bias is None else y + conv.bias
        y = _secant(torch.nn.functional.silu(y), y)
        return _in_place_of(x, kept["in"] + y if conv.residual else y)

    return [(conv.hook_in.name or "", before), (conv.hook_out.name or "", after)]


def _secant(y: Tensor, x: Tensor) -> Tensor:
    """y as (y / x) x with the quotient held, 0 where x is."""
    x0, y0 = x.detach(), y.detach()
    return torch.where(x0 == 0, 0, y0 / torch.where(x0 == 0, 1, x0)) * x


def _in_place_of(x: Tensor, linear: Tensor) -> Tensor:
    """The value of x to the last bit with the graph of `linear`; where a hook has put in something else, no graph."""
    fixed = linear.detach()
    alike = torch.isclose(x.detach(), fixed, rtol=_ALIKE, atol=1e-6)
    return x.detach() + torch.where(alike, linear - fixed, 0)

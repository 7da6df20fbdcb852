"""Deep Delta Learning: what its gate does to the state, and its state against the equations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import t2lens
from t2lens.residual import DeepDelta
from tests.systems import random_tokens, tiny, tiny_config

VECTOR = ["ddl", "ddl-linear"]
EVERY = [*VECTOR, "ddl-cc", "ddl-cc-ec"]


def run(model, tokens, **forced):
    """The state before and after the write of 1.mlp (as [B, T, V, D]), with gates forced through their hooks."""
    states = {}
    original = model.residual.write

    def write(state, site, atom, gates):
        after = original(state, site, atom, gates)
        if site.name == "1.mlp":
            states.update(before=state, after=after, gates=gates)
        return after

    def force(value):
        return lambda tensor, *, hook: torch.broadcast_to(
            torch.as_tensor(value, dtype=tensor.dtype), tensor.shape
        ).clone()

    hooks = [(f"blocks.1.ddl_mlp.hook_{name}", force(value)) for name, value in forced.items()]
    model.residual.write = write
    try:
        with torch.no_grad():
            model.run_with_hooks(tokens, fwd_hooks=hooks)
    finally:
        del model.residual.write
    if not model.residual.expanded:
        states["before"], states["after"] = (states[n].unsqueeze(-2) for n in ("before", "after"))
    return states["before"], states["after"], states["gates"]


def unit(seed: int, tokens: torch.Tensor, d: int = 16) -> torch.Tensor:
    k = torch.randn(*tokens.shape, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return k / k.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("system", EVERY)
def test_beta_zero_leaves_the_state_alone_to_the_last_bit(system):
    before, after, _ = run(tiny(system, 1), random_tokens(1), beta=0.0)
    assert torch.equal(before, after)


@pytest.mark.parametrize("system", EVERY)
def test_beta_one_projects_and_writes(system):
    tokens = random_tokens(2)
    k = unit(0, tokens)
    before, after, gates = run(tiny(system, 2), tokens, beta=1.0, dir=k)
    along = (after * k.unsqueeze(-2)).sum(-1)
    assert float((along - gates["value"]).abs().max()) < 1e-10
    off = [x - (x * k.unsqueeze(-2)).sum(-1, keepdim=True) * k.unsqueeze(-2) for x in (before, after)]
    assert float((off[0] - off[1]).abs().max()) < 1e-10


@pytest.mark.parametrize("system", EVERY)
def test_beta_two_with_zero_value_reflects(system):
    tokens = random_tokens(3)
    k = unit(1, tokens)
    before, after, _ = run(tiny(system, 3), tokens, beta=2.0, value=0.0, dir=k)
    assert float((after.norm(dim=-1) - before.norm(dim=-1)).abs().max()) < 1e-10
    flipped = (after * k.unsqueeze(-2)).sum(-1) + (before * k.unsqueeze(-2)).sum(-1)
    assert float(flipped.abs().max()) < 1e-10


@pytest.mark.parametrize("system", EVERY)
def test_post_write_readout(system):
    """k^T X' = (1 - beta) k^T X + beta v, with the gates the model computes itself."""
    tokens = random_tokens(4)
    before, after, gates = run(tiny(system, 4), tokens, dir=unit(2, tokens))
    k, beta = gates["direction"].unsqueeze(-2), gates["beta"]
    expected = (1 - beta) * (before * k).sum(-1) + beta * gates["value"]
    assert float(((after * k).sum(-1) - expected).abs().max()) < 1e-10


@pytest.mark.parametrize("system", EVERY)
def test_gates_follow_the_equations(system):
    model, tokens = tiny(system, 5), random_tokens(5)
    record, r, cfg = model.record(tokens), model.residual, model.residual.cfg
    for step in record.steps[:-1]:
        i, gates = step.site.index, step.gates
        read = record.reads[step.site.name]
        c = model.blocks[step.site.layer].get_submodule({"attn": "ln1", "mlp": "ln2"}[step.site.kind])(read)
        assert torch.allclose(
            gates["beta"].squeeze(-1), 2 * torch.sigmoid(c @ r.beta_weight[i] + r.beta_bias[i]), atol=1e-12
        )
        if cfg.value_form == "sigmoid_of_raw":
            value = cfg.value_scale * torch.sigmoid(read @ r.value_weight[i].T + r.value_bias[i])
        else:
            value = c @ r.value_weight[i].T + r.value_bias[i]
        assert torch.allclose(gates["value"], value, atol=1e-12)
        k = step.out / (step.out.square().sum(-1, keepdim=True) + cfg.k_eps**2).sqrt()
        assert torch.allclose(gates["direction"], k, atol=1e-12)


def test_channel_compression_equals_a_cross_correlation():
    """x_i = sum_q read[q] sum_t W[i, t] X[q + t - pad, i], same padding, pad = (K - 1) // 2 on the left."""
    for kernel in (1, 2, 3, 4):
        model = tiny("ddl-cc", 6, residual=DeepDelta(value_channels=4, compress_kernel=kernel))
        r, generator = model.residual, torch.Generator().manual_seed(kernel)
        state = torch.randn(2, 3, 4, 16, dtype=torch.float64, generator=generator)
        pad = (kernel - 1) // 2
        for site, row in ((model.sites[2], 1), (model.sites[-1], 3)):
            signal = torch.nn.functional.pad(state, (0, 0, pad, kernel - 1 - pad))
            expected = torch.zeros(2, 3, 16, dtype=torch.float64)
            for q in range(4):
                for t in range(kernel):
                    expected += r.compress_read[row, q].detach() * r.compress[row, :, t].detach() * signal[:, :, q + t]
            assert torch.allclose(r.read(state, site, {}).detach(), expected, atol=1e-12)


def test_embedding_convolution_is_causal_and_starts_as_identity():
    model: Any = t2lens.build(tiny_config("ddl-cc-ec"), seed=0).double()
    e = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.residual.begin(e), e.unsqueeze(-2).expand(2, 5, 3, 16))
    r = tiny("ddl-cc-ec", 1).residual.requires_grad_(False)
    for t, v, i in ((0, 0, 3), (4, 2, 7)):
        expected = sum(float(r.embed_kernel[i, v, tap] * e[1, t - 3 + tap, i]) for tap in range(4) if t - 3 + tap >= 0)
        assert math.isclose(float(r.begin(e)[1, t, v, i]), expected, abs_tol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 1.9])
def test_initial_gate_is_what_the_config_says(beta):
    model: Any = t2lens.build(tiny_config("ddl", residual=DeepDelta(beta_init=beta)), seed=0)
    model.residual.beta_weight.data.zero_()
    gates = t2lens.trace(model, [0, 7, 3]).dataset["gate"].values
    assert abs(gates - beta).max() < 1e-5


def test_the_two_forms_attribute_differently_and_both_exactly():
    model, tokens = tiny("ddl", 8), random_tokens(8)
    additive = t2lens.contributions(model, tokens, read="out")
    operator = t2lens.contributions(model, tokens, read="out", form="operator")
    assert float((additive.sum(-2) - operator.sum(-2)).abs().max()) < 1e-10
    assert float((additive - operator).abs().max()) > 1e-3
    with pytest.raises(ValueError, match="additive, operator"):
        t2lens.contributions(model, tokens, form="sum")
    with pytest.raises(ValueError, match="no form 'operator'"):
        t2lens.contributions(tiny("standard"), tokens, form="operator")


def test_operator_form_by_running_backwards():
    """Section 3.7 of the spec: g <- u; at each writer the share is beta (g.k) v, then g <- g - beta k (k.g)."""
    model, tokens = tiny("ddl", 9), random_tokens(9)
    record = model.record(tokens)
    shares = t2lens.contributions(model, tokens, read="out", form="operator")
    u = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    g = u.expand(*tokens.shape, 16).clone()
    for step in reversed(record.steps[:-1]):
        k, beta, v = (step.gates[n] for n in ("direction", "beta", "value"))
        along = (g * k).sum(-1, keepdim=True)
        share = (beta * along * v).squeeze(-1)
        assert float((share - shares[..., step.site.index + 1, :] @ u).abs().max()) < 1e-10
        g = g - beta * k * along
    assert float(((g * record.embed).sum(-1) - shares[..., 0, :] @ u).abs().max()) < 1e-10


def test_bad_configs_say_what_is_wrong():
    for arguments, words in (
        ({"beta_init": 2.5}, r"\[0, 2\)"),
        ({"embed_conv": 4}, "value_channels above 1"),
        ({"value_channels": 2, "compress_kernel": 4}, "must not exceed"),
        ({"value_form": "relu"}, "one of"),
    ):
        with pytest.raises(ValueError, match=words):
            DeepDelta(**arguments)  # type: ignore[arg-type]

"""Deep Delta Learning: what its gate does to the state, and its state against the equations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import t2lens
from t2lens.residual import DeepDelta
from t2lens.sublayers import DecodingCache
from tests.systems import random_tokens, tiny, tiny_config

VECTOR = ["ddl", "ddl-linear"]
EVERY = [*VECTOR, "ddl-cc", "ddl-cc-ec", "ddl-tc-ec"]


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
    if isinstance(states["before"], tuple):  # the state of the reads over time
        states |= {name: states[name].x for name in ("before", "after")}
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
        inner = c if cfg.beta_hidden is None else torch.tanh(c @ r.beta_in[i].T)
        assert torch.allclose(
            gates["beta"].squeeze(-1), 2 * torch.sigmoid(inner @ r.beta_weight[i] + r.beta_bias[i]), atol=1e-12
        )
        if cfg.value_form == "sigmoid_of_raw":
            value = cfg.value_scale * torch.sigmoid(read @ r.value_weight[i].T + r.value_bias[i])
        elif cfg.value_form == "linear_of_raw":
            value = read @ r.value_weight[i].T + r.value_bias[i]
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


@pytest.mark.parametrize("system", ["ddl", "ddl-cc"])
def test_a_turned_direction_is_accounted_for_in_both_forms(system):
    model, tokens = tiny(system, 5), random_tokens(5)
    with model.hooks([("blocks.1.ddl_attn.hook_dir", lambda k, hook: k.roll(1, dims=-1))]):
        record = model.record(tokens)
        for form in model.residual.forms:
            total = t2lens.contributions(model, tokens, read="out", form=form).sum(-2)
            assert float((total - record.reads["out"]).abs().max()) < 1e-10


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


# --- the expanded state's other reads, values and gates ------------------------------------------------------------


@pytest.mark.parametrize("channels, kernel, embed_conv", [(2, 1, None), (4, 4, 3), (3, 5, 1)])
def test_time_compression_equals_a_loop_over_tokens(channels, kernel, embed_conv):
    """x_i[t] = sum_v r_v sum_tau W[i, v, tau] X[t - (K - 1) + tau, v, i], nothing before the text."""
    cfg = DeepDelta(value_channels=channels, compress="time", compress_kernel=kernel, embed_conv=embed_conv)
    model, tokens = tiny("ddl", 1, residual=cfg), random_tokens(1)
    r, states = model.residual, {}
    original = r.read

    def read(state, site, gates):
        states[site.name] = state.x
        return original(state, site, gates)

    r.read = read
    reads = model.record(tokens).reads
    for name, row in (("0.attn", 0), ("0.mlp", 0), ("2.attn", 2), ("out", 3)):
        state, expected = states[name], torch.zeros_like(reads[name])
        for t in range(tokens.shape[1]):
            for v in range(channels):
                for tau in range(kernel):
                    if (s := t - (kernel - 1) + tau) >= 0:
                        expected[:, t] += r.compress_read[row, v] * r.compress[row, :, v, tau] * state[:, s, v]
        assert float((reads[name] - expected).detach().abs().max()) < 1e-12


def test_time_compression_accounts_for_token_shifted_sources_by_writer():
    """What atom j adds is w_eff delta_j F_j with the kernel over earlier tokens."""
    model, tokens = tiny("ddl-tc-ec", 2), random_tokens(2)
    record, r = model.record(tokens), model.residual
    shares = t2lens.contributions(model, tokens, read="out")
    weight = (r.compress[-1] * r.compress_read[-1][:, None]).detach()  # [D, V, K]
    for step in record.steps[:-1]:
        wrote = step.gates["delta"].unsqueeze(-1) * step.out.unsqueeze(-2)  # [B, T, V, D]
        expected, last = torch.zeros_like(step.out), weight.shape[-1] - 1
        for tau in range(last + 1):
            for t in range(last - tau, tokens.shape[1]):
                expected[:, t] += (wrote[:, t - last + tau] * weight[..., tau].T).sum(dim=-2)
        assert float((shares[..., step.site.index + 1, :] - expected).abs().max()) < 1e-10


def test_decoding_with_time_compression_from_the_first_token():
    """A prompt shorter than the kernel must not matter: what is missing is the nothing before the text."""
    model, tokens = tiny("ddl-tc-ec", 3), random_tokens(3)
    with torch.no_grad():
        cache = DecodingCache()
        steps = [model(tokens[:, i : i + 1], cache=cache) for i in range(tokens.shape[1])]
        assert float((torch.cat(steps, dim=1) - model(tokens)).abs().max()) < 1e-10


@pytest.mark.parametrize("system", ["ddl-cc", "ddl-tc-ec"])
def test_causal_channel_padding_and_same_padding_differ_only_in_the_shift(system):
    """Causal: w_eff[v] = sum_q read[q] W[v - q + K - 1]; over time there is no padding to choose."""
    cfg = replace(tiny_config(system).residual, compress_pad="causal")
    model = tiny(system, 4, residual=cfg)
    r, site = model.residual, model.sites[-1]
    if system == "ddl-tc-ec":
        same = tiny(system, 4)
        assert torch.equal(same(random_tokens(4)), model(random_tokens(4)))
        return
    expected = torch.zeros(4, 16, dtype=torch.float64)
    for v in range(4):
        for q in range(v, 4):
            expected[v] += r.compress_read[-1, q].detach() * r.compress[-1, :, v - q + 3].detach()
    assert float((r.effective_read(site) - expected).detach().abs().max()) < 1e-12


def test_constant_value_has_no_weights_and_is_written_whole_at_beta_one():
    model, tokens = tiny("ddl", 5, residual=DeepDelta(value_form="constant", value_constant=1.5)), random_tokens(5)
    assert not any("residual.value" in name for name, _ in model.named_parameters())
    _, after, gates = run(model, tokens, beta=1.0, dir=unit(3, tokens))
    along = (after * gates["direction"].unsqueeze(-2)).sum(-1)
    assert float((along - 1.5).abs().max()) < 1e-10


@pytest.mark.parametrize("expanded", [False, True])
def test_write_only_is_the_delta_rule_without_the_erasure(expanded):
    """At one write from the same state: X' = X + beta k v^T, which is the delta rule's X' plus beta k k^T X."""
    channels: Any = {"value_channels": 4} if expanded else {}
    tokens = random_tokens(6)
    before, after, gates = run(tiny("ddl", 6, residual=DeepDelta(edit="write_only", **channels)), tokens)
    k, beta = gates["direction"].unsqueeze(-2), gates["beta"].unsqueeze(-1)
    assert float((after - before - beta * k * gates["value"].unsqueeze(-1)).abs().max()) < 1e-10
    delta = tiny("ddl", 6, residual=DeepDelta(**channels))
    assert [*delta.state_dict()] == [*tiny("ddl", 6, residual=DeepDelta(edit="write_only", **channels)).state_dict()]
    site = next(s for s in delta.sites if s.name == "1.mlp")
    state = before if expanded else before.squeeze(-2)
    again = delta.residual.write_gates(
        state, site, *(torch.zeros_like(before[..., 0, :]) for _ in range(2)), k.squeeze(-2)
    )
    assert torch.allclose(again["proj"], (k * before).sum(-1), atol=1e-8)
    assert "proj" not in gates


def test_write_only_forms_agree_atom_by_atom():
    """Without an erasure there is nothing on which the two forms could differ."""
    model, tokens = tiny("ddl-write-only", 7), random_tokens(7)
    additive = t2lens.contributions(model, tokens, read="out")
    operator = t2lens.contributions(model, tokens, read="out", form="operator")
    assert float((additive - operator).abs().max()) < 1e-10
    assert not any(name.endswith("hook_proj") for name in model.hook_dict)


def test_gates_start_as_the_code_starts_them():
    model: Any = t2lens.build(tiny_config("ddl-tc-ec", residual=DeepDelta(
        value_channels=2, compress="time", embed_conv=3, beta_hidden=400)), seed=0)  # fmt: skip
    r = model.residual
    for weight in (r.beta_in, r.value_weight, r.compress):
        assert abs(float(weight.detach().std()) / (0.5 / 4) - 1) < 0.1
    assert torch.equal(r.compress_read, torch.full((4, 2), 0.5))
    assert not r.value_bias.any()


def test_existing_configs_keep_their_meaning():
    """Keys of models that are already out, without those that came later."""
    keys = {"value_channels": 4, "embed_conv": 4, "compress_kernel": 4, "value_form": "sigmoid_of_raw",
            "value_scale": 4.0, "beta_init": 1.0, "k_eps": 1e-5}  # fmt: skip
    data = tiny_config("ddl").to_dict() | {"residual": {"kind": "ddl", **keys}}
    assert t2lens.ModelConfig.from_dict(data).residual == DeepDelta(value_channels=4, embed_conv=4)


def test_bad_configs_say_what_is_wrong():
    for arguments, words in (
        ({"beta_init": 2.5}, r"\[0, 2\)"),
        ({"embed_conv": 4}, "value_channels above 1"),
        ({"value_channels": 2, "compress_kernel": 4}, "must not exceed"),
        ({"value_form": "relu"}, "one of"),
        ({"edit": "erase_only"}, "one of delta, write_only"),
        ({"compress": "time"}, "value_channels above 1"),
        ({"beta_hidden": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            DeepDelta(**arguments)  # type: ignore[arg-type]

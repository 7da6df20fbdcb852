"""DeepCrossAttention: its equation in a naive loop, the plain residual at the start, the gate that never trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import t2lens
from t2lens.model import Transformer
from t2lens.residual import DCA, Standard
from t2lens.sublayers import Places
from tests.systems import random_tokens, tiny, tiny_config

FORMS = [
    DCA(),
    DCA(grn="v1"),
    DCA(grn="v2", ways="one", skip_source="sum"),
    DCA(ways="one", recent=1),
    DCA(skip_source="own", recent=2),
    DCA(skip_source="sum", key_norm="rms"),
    DCA(gate_form="inner_bias", recent=1),
    DCA(gate_form="relu_sum", key_norm="rms", skip_source="own", recent=1, between="drop"),
    DCA(key_norm="rms", recent=2, between="drop"),
    DCA(key_norm="rms", recent=2),
]


def fresh(cfg, seed=0) -> Any:  # not Transformer: tests reach into parts that only some systems have
    return t2lens.build(cfg, seed=seed)


def made(residual, seed, n_layers=5):
    cfg = replace(tiny_config("dca", n_layers=n_layers), residual=residual)
    model = fresh(cfg, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator)
    return model.double()


def columns(cfg, writes):
    """What an aggregator sees of f_0, f_1, ...: section 4's k-DCA, or lucidrains' rule."""
    t, k = len(writes), cfg.recent
    if k is None or (cfg.between == "sum" and t <= k + 1) or (cfg.between == "drop" and t <= 2 * k):
        return writes
    if cfg.between == "sum":
        return [writes[0], sum(writes[1 : t - k]), *writes[t - k :]]
    return [*writes[:k], *writes[t - k :]]


def naive(model, tokens):
    res, cfg = model.residual, model.cfg.residual
    places = Places.of(tokens, None, None)
    writes = [model.embed(tokens)]

    def grn(at, c):
        total = 0
        for j, f in enumerate(columns(cfg, writes)):
            coefficient = res.bias[at][c, j]  # a number, or one per channel
            if cfg.grn == "v3":
                key = f
                if cfg.key_norm == "rms":
                    key = f / (f.square().mean(-1, keepdim=True) + 1e-5).sqrt() * res.key_scale[at]
                score = (key * res.gate_weight[at][c]).sum(-1, keepdim=True)
                if cfg.gate_form == "paper":
                    coefficient = coefficient + score.clamp(min=0)
                elif cfg.gate_form == "inner_bias":
                    coefficient = coefficient + (score + res.inner_bias[at][c, j]).clamp(min=0)
                else:
                    coefficient = (coefficient + score).clamp(min=0)
            total = total + coefficient * f
        return total

    for i, block in enumerate(model.blocks):
        if cfg.ways == "qkv":
            q, k, v = (grn(i, c) for c in range(3))
            normed = block.ln1_q(q), block.ln1_k(k), block.ln1_v(v)
        else:
            q = grn(i, 0)
            normed = (block.ln1(q),) * 3
        skip = {"q": lambda: q, "own": lambda i=i: grn(i, 3), "sum": lambda: sum(writes)}[cfg.skip_source]()  # noqa: B023
        att = block.attn(*normed, places)
        writes.append(att + block.mlp(block.ln2(att + skip)))
    return model.unembed(model.ln_final(grn(model.cfg.n_layers, 0)))


@pytest.mark.parametrize("residual", FORMS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_the_equation(residual, seed):
    model, tokens = made(residual, seed), random_tokens(seed)
    expected = naive(model, tokens)
    limit = 1e-10 * max(1.0, float(expected.detach().abs().max()))
    with torch.enable_grad():
        assert (model(tokens) - expected).abs().max() < limit
    with torch.no_grad():  # where the sources lie in one block
        assert (model(tokens) - expected).abs().max() < limit


@pytest.mark.parametrize("skip_source", ["q", "own", "sum"])
@pytest.mark.parametrize("gate_form", ["paper", "inner_bias", "relu_sum"])
@pytest.mark.parametrize("recent", [None, 1])
def test_a_model_with_the_papers_start_is_the_plain_residual(gate_form, skip_source, recent):
    residual = DCA(gate_form=gate_form, skip_source=skip_source, recent=recent, gate_std=0.0)
    cfg = replace(tiny_config("dca"), residual=residual)
    model, twin = fresh(cfg, seed=3).double(), Transformer(replace(cfg, residual=Standard())).double()
    weights = {n: p for n, p in model.state_dict().items() if not n.startswith("residual.")}
    for i in range(3):  # the three norms of attention start equal, and the twin has one
        weights[f"blocks.{i}.ln1.w"], *_ = (weights.pop(f"blocks.{i}.ln1_{way}.w") for way in "qkv")
    twin.load_state_dict(weights)
    tokens = random_tokens(5)
    assert (model(tokens) - twin.eval()(tokens)).abs().max() < 1e-12
    for row in t2lens.mixing_matrix(model, tokens)[0]:  # every read holds what is written once
        assert torch.allclose(row, (row != 0).double(), atol=1e-12)


def test_sources_that_are_dropped_are_no_residual_any_more():
    cfg = replace(tiny_config("dca"), residual=DCA(gate_std=0.0, recent=1, between="drop"))
    row = t2lens.mixing_matrix(fresh(cfg), random_tokens(1))[0, -1, 0]
    assert row.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("gate_form", ["paper", "inner_bias", "relu_sum"])
@pytest.mark.parametrize("gate_std", [0.0, 1e-2])
def test_a_gate_that_starts_at_zero_never_trains_and_the_system_says_which_parameters_that_are(gate_form, gate_std):
    residual = DCA(gate_form=gate_form, gate_std=gate_std, key_norm="rms")
    model = fresh(replace(tiny_config("dca", tied=False), residual=residual), seed=2)
    model(torch.arange(48).reshape(4, 12), return_type="loss").backward()
    still = {n for n, p in model.residual.named_parameters() if not (p.grad is not None and p.grad.any())}
    assert still >= set(model.residual.untrained)
    # at w = 0 the scale of the keys is multiplied by it, so its gradient comes with the second step
    late = {"key_scale"} if gate_form == "relu_sum" and gate_std == 0 else set()
    assert still == set(model.residual.untrained) | late
    assert bool(model.residual.untrained) == (gate_std == 0 and gate_form != "relu_sum")


@pytest.mark.parametrize("system", ["dca", "dca-inner", "dca-drop"])
def test_a_depth_weight_is_the_mean_of_its_coefficients_over_the_channels(system):
    model, tokens = tiny(system, 1), random_tokens(1)
    res, cfg = model.residual, model.cfg.residual
    step = next(s for s in model.record(tokens).steps if s.site.name == "2.attn")
    _, cache = model.run_with_cache(tokens)
    for c, way in enumerate("qkv"):
        weights = res.depth_weights(step.site, step.gates)[way]
        score = cache[f"blocks.2.hook_depth_scores_attn_{way}"].unsqueeze(-1)
        bias = res.bias[2][c]
        coefficient = {
            "paper": lambda s, b: b + s.relu(),
            "inner_bias": lambda s, b, c=c: b + (s + res.inner_bias[2][c]).relu(),
            "relu_sum": lambda s, b: (b + s).relu(),
        }[cfg.gate_form](score, bias)
        assert (weights - coefficient.mean(dim=-1)).abs().max() < 1e-12
        assert weights.shape[-1] == len(res.sources(step.site))


@pytest.mark.parametrize("local", [False, True], ids=["", "with ShortSWA"])
def test_zero_weights_leave_the_deviation_of_the_channels_alone(local):
    """The weight is the mean: taking it away leaves a mixture whose coefficients average to 0 over the channels."""
    model, tokens = tiny("dca", 1, local=local), random_tokens(1)
    for site in [f"blocks.{i}.hook_depth_attn_attn_{way}" for i in range(3) for way in "qkv"]:

        def nothing(w, *, hook):
            return torch.zeros_like(w)

        i, way = int(site.split(".")[1]), site[-1]
        with model.hooks(fwd_hooks=[(site, nothing)]):
            _, cache = model.run_with_cache(tokens)
            record = model.record(tokens)
        writes = [record.embed]
        width = 3 if local else 2
        for layer in range(i):
            steps = record.steps[layer * width : (layer + 1) * width]
            writes.append(sum(step.out for step in steps))
        bias = model.residual.bias[i]["qkv".index(way)]
        expected = sum((bias[j] - bias[j].mean()) * f for j, f in enumerate(writes))
        inside = cache[f"blocks.{i}.hook_local_out"] if local else 0
        assert (cache[f"blocks.{i}.hook_read_attn_{way}"] - expected - inside).abs().max() < 1e-10


def test_the_sources_of_k_dca_say_what_they_hold():
    model = made(DCA(recent=1), 0)
    atoms = model.atoms
    names = [[s.name for s in model.residual.sources(site)] for site in model.sites if site.kind in ("attn", "out")]
    assert names == [
        ["embed"],
        ["embed", "block1"],
        ["embed", "block1", "block2"],
        ["embed", "block1..2", "block3"],
        ["embed", "block1..3", "block4"],
        ["embed", "block1..4", "block5"],
    ]
    middle = model.residual.sources(model.sites[-1])[1]
    assert middle.atoms == atoms[1:9]
    dropped = made(DCA(recent=2, between="drop"), 0).residual.sources(model.sites[-1])
    assert [s.name for s in dropped] == ["embed", "block1", "block4", "block5"]


def test_memory_of_k_dca_does_not_grow_with_depth():
    model = made(DCA(recent=1), 0, n_layers=9)
    with torch.no_grad():
        state = model(random_tokens(0), stop_at_layer=9)
    assert len(state.done) == 3 and state.done._block.shape[0] == 4


def test_the_gates_start_is_drawn_as_it_is_asked_for():
    residual = replace(DCA(), gate_std=0.05)
    model = fresh(replace(tiny_config("dca"), d_model=256, residual=residual))
    drawn = torch.cat([w.flatten() for w in model.residual.gate_weight]).detach()
    assert abs(float(drawn.std()) - 0.05) < 0.003


@pytest.mark.parametrize(
    "wrong",
    [
        {"grn": "v4"},
        {"ways": "qkvr"},
        {"recent": 0},
        {"between": "keep"},
        {"gate_form": "relu"},
        {"skip_source": "v"},
        {"key_norm": "layer"},
        {"gate_std": -1.0},
        {"ways": "one", "skip_source": "own"},
        {"grn": "v2", "key_norm": "rms"},
    ],
)
def test_a_bad_value_is_told_what_is_allowed(wrong):
    with pytest.raises(ValueError, match=r"^DCA[.:].*\.$"):
        DCA(**wrong)

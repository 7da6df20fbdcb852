"""The routing advantage is the gradient at the scores, whatever makes the weights, on both axes."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import t2lens
from t2lens.analysis.advantage import TOWARD, advantage, routing_advantage
from t2lens.analysis.inputs import read_batch
from t2lens.analysis.route_gradients import RouteGradients, normaliser_of
from t2lens.cli import app
from t2lens.ordered_attention import ordered_attention
from t2lens.residual import AttnRes, HyperConnections, OpenAttnRes
from t2lens.residual.attnres import entmax, sparsemax, top_k_softmax
from tests.systems import SYSTEMS, random_tokens, tiny

TOLERANCE = 1e-10
COMPETING = {"softmax": lambda s: s.softmax(dim=-1), "sparsemax": sparsemax, "entmax": entmax}
COMPETING["top_k"] = lambda s: top_k_softmax(s, 3)
WEIGHTS = {**COMPETING, "sigmoid": torch.sigmoid}
# systems with scores over depth, and the reads that have them
WITH_SCORES = [
    *(name for name in SYSTEMS if name.startswith(("attnres", "elc", "vertical", "depth-swa"))),
    *("mhc", "mhc-lite", "deepseek-v4"),
]
OTHERS = {
    "attnres-sparsemax": AttnRes(normaliser="sparsemax", bias="newest"),
    "attnres-entmax": AttnRes(normaliser="entmax"),
    "attnres-top-k": AttnRes(normaliser="top_k", top_k=2, block_size=2),
    "attnres-sigmoid": AttnRes(normaliser="sigmoid"),
    "open-pre-gated": OpenAttnRes(dialect="B", mode="pre_gated"),
    "hyper-softmax": HyperConnections(n_streams=3, pre="softmax"),
    "hyper-2sigmoid": HyperConnections(n_streams=2, pre="2sigmoid"),
}


def padded(tokens: torch.Tensor, n: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    pad = tokens.new_zeros(len(tokens), n)
    mask = torch.ones_like(tokens)
    parts = [(pad, pad), (tokens, mask)]
    parts = parts if side == "left" else parts[::-1]
    return torch.cat([x for x, _ in parts], dim=1), torch.cat([m for _, m in parts], dim=1)


def by_autograd(model, tokens, mask):
    """name -> gradient of the summed loss at every score and weight of both axes."""
    kept = {}

    def keep(tensor, *, hook):
        kept[hook.name] = apart = tensor.clone()  # two ways may share one tensor
        return apart

    names = ("depth_scores", "depth_attn", "attn_scores", "pattern")
    hooks = [(n, keep) for n in model.hook_dict if any(f"hook_{part}" in n for part in names)]
    with torch.enable_grad(), model.hooks(fwd_hooks=hooks):
        logits = model(tokens, mask)
        batch = read_batch(model, tokens, mask)
        where = batch.predicts
        loss = F.cross_entropy(logits[where], batch.next_tokens[where], reduction="sum")
        names = [n for n, t in kept.items() if t.requires_grad]
        grads = torch.autograd.grad(loss, [kept[n] for n in names], allow_unused=True)
    return {n: torch.zeros_like(kept[n]) if g is None else g for n, g in zip(names, grads, strict=True)}


def close(a, b):
    assert a.shape == b.shape
    assert float((a - b).abs().max()) < TOLERANCE * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_advantage_is_the_gradient_of_the_normaliser(kind):
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (3, 2), (2, 4, 6)):
        scores = (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
        b = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights = WEIGHTS[kind](scores)
        (wanted,) = torch.autograd.grad((weights * b).sum(), scores)
        found = advantage(weights.detach(), b, kind)
        close(found, wanted)
        if kind in COMPETING:  # a constant b moves nothing: only what is better than the average gains
            close(advantage(weights.detach(), b + 3.0, kind), wanted)
            assert float(found.sum(dim=-1).abs().max()) < 1e-12


@pytest.mark.parametrize("window", [None, 2])
def test_advantage_holds_beside_a_sink_and_in_a_window(window):
    generator = torch.Generator().manual_seed(1)
    q, k, v, u = (torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    sink = torch.randn(3, generator=generator, dtype=torch.float64)
    kept = {}

    class Look:
        def scores(self, x):
            kept["scores"] = x.requires_grad_()
            return x

        def pattern(self, x):
            kept["pattern"] = x
            return x

    with torch.enable_grad():
        z = ordered_attention(q, k, v, window=window, sink=sink, observer=Look())
        (wanted,) = torch.autograd.grad((z * u).sum(), kept["scores"])
    pattern = kept["pattern"].detach()
    assert float(pattern.sum(dim=-1).max()) < 1
    close(advantage(pattern, u @ v.transpose(-1, -2)), wanted)


@pytest.mark.parametrize("name", [*SYSTEMS, *OTHERS])
def test_both_axes_equal_autograd(name):
    local = name in ("attnres-full", "elc-normalized", "mhc", "ddl", "attnres-c-delta-v")
    changes: dict[str, Any] = {"local": local, "residual": OTHERS[name]} if name in OTHERS else {"local": local}
    model = tiny("attnres-full" if name in OTHERS else name, 3, **changes)
    tokens, mask = padded(random_tokens(3), 2, "left" if local else "right")
    wanted = by_autograd(model, tokens, mask)
    run = RouteGradients(model, batch := read_batch(model, tokens, mask), batch.predicts, "both")
    n_depth = 0
    for route in run.depth_routes():
        read = next(r for r in model.reads if r.name == route.name)
        close(route.b, wanted[read.site.hook("depth_attn", read.way)])
        close(route.slope, wanted[read.site.hook("depth_scores", read.way)])
        n_depth += 1
    assert n_depth == len([n for n in wanted if "hook_depth_scores" in n]) or name.startswith("dca")
    assert (n_depth > 0) == (name in WITH_SCORES or name in OTHERS)
    sites = list(run.sequence_routes())
    assert len(sites) == model.cfg.n_layers * (1 + local)
    for route in sites:
        layer, kind = route.name.split(".")
        stem = f"blocks.{layer}.{kind}"
        close(torch.where(route.seen, route.slope, 0.0), wanted[f"{stem}.hook_attn_scores"])
        close(route.b, wanted[f"{stem}.hook_pattern"])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("system", ["elc-weighted", "vertical-attention", "attnres-static"])
def test_static_scores_sum_to_the_gradient_of_their_parameter(system):
    model, tokens = tiny(system, 4), random_tokens(4)[:1]
    with torch.enable_grad():
        loss = model(tokens, return_type="loss")
        parameter = model.residual.bias if system == "attnres-static" else model.residual.weights
        (grad,) = torch.autograd.grad(loss, parameter)
    found = routing_advantage(model, tokens, axis="depth")
    for read in found["read"].values:
        site = next(s for s in model.sites if s.name == read)
        names = [source.name for source in model.residual.sources(site)]
        row = found["route_advantage"].sel(read=read, source=names).values
        if system == "attnres-static":
            wanted = grad[site.index, : len(row)]
        else:
            start = len(row) * (len(row) - 1) // 2
            wanted = grad[start : start + len(row)]
        # the model's own loss is computed in float32
        np.testing.assert_allclose(row, wanted.numpy(), atol=1e-6)
    assert any("parameters" in note for note in found.notes)


def test_raising_a_score_moves_the_loss_as_the_map_says():
    model, tokens = tiny("attnres-full", 5), random_tokens(5)[:1]
    found = routing_advantage(model, tokens)
    where = read_batch(model, tokens).predicts

    def loss(name, index, by):
        def push(scores, *, hook):
            scores = scores.clone()
            scores[index] += by
            return scores

        logits = model.run_with_hooks(tokens, fwd_hooks=[(name, push)])
        batch = read_batch(model, tokens)
        return float(batch.losses(logits)[where].mean().detach())

    for name, index, value in (
        (
            "blocks.1.hook_depth_scores_mlp",
            (0, slice(None), 2),
            float(found["route_advantage"].sel(read="1.mlp", source="0.mlp")),
        ),
        (
            "blocks.2.attn.hook_attn_scores",
            (0, 1, 2, 1),
            float(found["sequence_advantage"].sel(site="2.attn", head=1, query=2, key=1)),
        ),
    ):
        step = 1e-5
        slope = (loss(name, index, step) - loss(name, index, -step)) / (2 * step)
        assert slope == pytest.approx(value, rel=1e-5, abs=1e-9)


def test_heads_are_summed_by_where_they_look():
    model, tokens = tiny("standard", 6, local=True), torch.tensor([[3, 7, 7, 9, 3]])
    found = routing_advantage(model, tokens, axis="sequence")
    grid = found["sequence_advantage"].sel(site="1.attn", head=0).values
    assert np.isnan(grid[0, 1]) and not np.isnan(grid[1, 0])
    per = dict(zip(TOWARD, found["head_advantage"].sel(site="1.attn", head=0).values, strict=True))
    assert per["itself"] == pytest.approx(np.trace(grid))
    assert per["first"] == pytest.approx(np.nansum(grid[1:, 0]))
    assert per["previous"] == pytest.approx(sum(grid[i, i - 1] for i in range(2, 5)))
    assert sum(per.values()) == pytest.approx(0, abs=1e-12)
    assert found["head_weight"].sel(site="1.attn", head=0).values.sum() == pytest.approx(1)
    assert found["head_pressure"].sel(site="1.attn", head=0) == pytest.approx(np.nansum(np.abs(grid)))
    assert np.isnan(found["sequence_advantage"].sel(site="0.local", head=1)).all()  # ShortSWA has one head here
    assert np.isnan(found["sequence_b"].sel(site="0.local", head=0).values[4, 0])  # outside its window
    assert "route_advantage" not in found.dataset


def test_the_loss_may_be_that_of_one_position():
    model, tokens = tiny("attnres-block", 7), torch.tensor([[3, 7, 7, 9, 3, 1]])
    found = routing_advantage(model, tokens, position=-4)
    assert float(np.nanmax(np.abs(found["depth_advantage"].values[:, 3:]))) == 0  # what comes later has no part in it
    assert float(np.nanmax(np.abs(found["depth_advantage"].values[:, :3]))) > 0
    every = sum(routing_advantage(model, tokens, position=i)["depth_advantage"] for i in range(5)) / 5
    np.testing.assert_allclose(every, routing_advantage(model, tokens)["depth_advantage"], atol=1e-14)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    model, tokens = tiny("depth-swa", 8, local=True), random_tokens(9)[:1]
    ids, mask = padded(tokens, 3, side)
    found = routing_advantage(model, ids, attention_mask=mask)
    plain = routing_advantage(model, tokens)
    real = mask[0].bool().numpy()
    for name in ("route_advantage", "route_weight", "head_advantage", "head_weight", "head_pressure"):
        np.testing.assert_allclose(found[name], plain[name], atol=1e-12)
    np.testing.assert_allclose(found["depth_advantage"].values[:, real], plain["depth_advantage"], atol=1e-12)
    grid = found["sequence_advantage"].values[:, :, real][:, :, :, real]
    np.testing.assert_allclose(grid, plain["sequence_advantage"], atol=1e-12)
    assert np.isnan(found["depth_advantage"].values[:, ~real]).all()


def test_several_sequences_have_sums_and_no_maps():
    model, tokens = tiny("attnres-full", 9), torch.tensor([[3, 7, 7, 9], [1, 2, 3, 1]])
    both = routing_advantage(model, tokens)
    apart = [routing_advantage(model, row) for row in tokens]
    for name in ("route_advantage", "head_advantage"):
        np.testing.assert_allclose(both[name], sum(one[name] for one in apart) / 2, atol=1e-14)
    assert "depth_advantage" not in both.dataset
    assert "sequence_b" not in both.dataset
    assert any("2 sequences" in note for note in both.notes)


def test_many_sequences_are_taken_a_few_at_a_time(monkeypatch):
    model = tiny("attnres-block", 9, local=True)
    tokens = torch.randint(50, (5, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 2:], mask[4, 1:] = 0, 0  # the last has no prediction at all
    wanted = routing_advantage(model, tokens, attention_mask=mask)
    monkeypatch.setattr("t2lens.analysis.advantage._AT_ONCE", 13)
    found = routing_advantage(model, tokens, attention_mask=mask)
    for name in wanted.dataset.data_vars:
        np.testing.assert_allclose(found[str(name)], wanted[str(name)], atol=1e-13)
    assert found.notes == wanted.notes


def test_frozen_parameters_and_no_grad_are_no_hindrance():
    model, tokens = tiny("elc-base", 1), random_tokens(1)
    wanted = routing_advantage(model, tokens)
    model = tiny("elc-base", 1).requires_grad_(False)
    with torch.inference_mode():
        found = routing_advantage(model, tokens)
    for name in ("route_advantage", "head_advantage"):
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-14)


def test_equal_scores_take_the_normaliser_that_the_system_declares():
    model = t2lens.build(
        t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=AttnRes(normaliser="sparsemax")),
        seed=0,
    ).double()
    tokens = torch.tensor([[3, 7, 7, 9]])
    wanted = by_autograd(model, tokens, None)
    run = RouteGradients(model, batch := read_batch(model, tokens), batch.predicts, "depth")
    routes = list(run.depth_routes())
    assert {route.normaliser for route in routes} == {"sparsemax"}
    for route in routes:
        read = next(r for r in model.reads if r.name == route.name)
        close(route.slope, wanted[read.site.hook("depth_scores")])
    scores = torch.zeros(1, 1, 2)
    assert normaliser_of(scores, torch.full((1, 1, 2), 0.5))[0] == "softmax"
    assert normaliser_of(scores, torch.full((1, 1, 2), 0.5), "sigmoid")[0] == "sigmoid"
    assert normaliser_of(scores, torch.tensor([[[0.4, 0.6]]]))[0] is None


def test_a_hook_that_edits_weights_or_patterns_leaves_them_out():
    model, tokens = tiny("attnres-full", 2), random_tokens(2)[:1]
    where = ["blocks.1.hook_depth_attn_attn", "blocks.0.attn.hook_pattern"]
    with model.hooks(fwd_hooks=[(name, lambda x, hook: x * 0.5) for name in where]):
        found = routing_advantage(model, tokens)
    assert "1.attn" not in found["read"].values
    assert any("1.attn" in note for note in found.notes)
    assert any("0.attn (a hook edits its pattern" in note for note in found.notes)
    assert np.isnan(found["head_advantage"].sel(site="0.attn")).all()
    assert not np.isnan(found["head_advantage"].sel(site="1.attn")).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_finite(dtype):
    for system in ("attnres-full", "attnres-delta", "mhc", "depth-swa"):
        model, tokens = tiny(system, 3, dtype=dtype), random_tokens(3)[:1]
        wide = routing_advantage(tiny(system, 3), tokens)
        found = routing_advantage(model, tokens)
        assert found["route_advantage"].sizes == wide["route_advantage"].sizes
        for name in ("route_advantage", "head_advantage"):
            there = ~np.isnan(wide[name].values)
            assert np.isfinite(found[name].values[there]).all()
            error = np.abs(found[name].values - wide[name].values)[there].max() / np.abs(wide[name].values[there]).max()
            assert error < {torch.float32: 1e-4}.get(dtype, 0.5)


def test_what_cannot_be_done_is_said():
    model, tokens = tiny("denseformer", 0), random_tokens(0)
    with pytest.raises(ValueError, match=r'No read of this model has attention scores over depth.*axis="sequence"'):
        routing_advantage(model, tokens, axis="depth")
    found = routing_advantage(model, tokens)
    assert any(note.startswith("Left out:") and "not made of scores" in note for note in found.notes)
    with pytest.raises(ValueError, match="axis must be both, sequence or depth, not 'width'"):
        routing_advantage(model, tokens, axis="width")  # type: ignore[arg-type]
    one = torch.tensor([3, 7, 7])
    with pytest.raises(ValueError, match=r"Position -1 has no next token.*0\.\.1"):
        routing_advantage(model, one, position=-1)
    with pytest.raises(ValueError, match=r"position must lie in 0\.\.2.*not 7"):
        routing_advantage(model, one, position=7)
    with pytest.raises(ValueError, match="position is of one sequence"):
        routing_advantage(model, torch.stack([one, one]), position=0)


def test_the_command_writes_every_number(tmp_path):
    out = tmp_path / "advantage.json"
    args = ["analyze", "advantage", "In the beginning God", "--model", "attnres-block", "--json", str(out)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "strengthen" in result.output
    data = json.loads(out.read_text())
    assert data["variables"]["depth_advantage"]["dims"] == ["read", "pos", "source"]
    found = routing_advantage(t2lens.load("attnres-block"), "In the beginning God")
    for chart in range(len(found.charts)):
        assert found.plot(chart).data

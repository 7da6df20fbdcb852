"""Hyper-Connections and their descendants against their equations, written out for one token at a time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import t2lens
from t2lens.config import Norm
from t2lens.residual import HyperConnections, Standard
from t2lens.residual.doubly_stochastic import permutation_table, sinkhorn
from t2lens.residual.hyper_connections import composite
from tests.systems import random_tokens, tiny, tiny_config

TIGHT = 1e-11


def close(a, b, limit=TIGHT):
    assert a.shape == b.shape and float((a - b).detach().abs().max()) < limit


# --- each form in its own orientation: X [n, D] -> pre [n], post [n], and the matrix that multiplies X
def hc(system, i, x, eps):
    """Algorithm 2: alpha has axes [from, 1 + to], and its transpose acts."""
    n = len(x)
    normed = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + eps).sqrt()
    alpha = torch.cat([system.static_pre[i][:, None], system.static_res[i].T], dim=1)
    beta = system.static_post[i]
    if system.cfg.dynamic_parts:
        weight, gain = system.dynamic[i], system.gain[i]
        alpha = alpha + gain[0] * (normed @ weight[:, [0, *range(2, 2 + n)]]).tanh()
        beta = beta + gain[1] * (normed @ weight[:, 1]).tanh()
    return alpha[:, 0], beta, alpha[:, 1:].T


def flat(system, i, x, eps):
    n = len(x)
    vec = x.flatten()
    logits = (vec / (vec.square().mean() + eps).sqrt()) @ system.dynamic[i]
    gain = system.gain[i]
    pre = gain[0] * logits[:n] + system.static_pre[i]
    post = gain[1] * logits[n : 2 * n] + system.static_post[i]
    return pre, post, gain[2] * logits[2 * n :]


def mhc(system, i, x, eps):
    n = len(x)
    pre, post, res = flat(system, i, x, eps)
    matrix = (res.view(n, n) + system.static_res[i]).exp()
    for _ in range(system.cfg.sinkhorn_iterations):
        matrix = matrix / matrix.sum(0, keepdim=True)  # columns
        matrix = matrix / matrix.sum(1, keepdim=True)  # rows
    return pre.sigmoid(), 2 * post.sigmoid(), matrix


def v4(system, i, x, eps):
    n, small = len(x), system.cfg.eps
    pre, post, res = flat(system, i, x, 1e-6)
    comb = (res.view(n, n) + system.static_res[i]).T.softmax(-1) + small  # [from, to]
    comb = comb / (comb.sum(0, keepdim=True) + small)
    for _ in range(system.cfg.sinkhorn_iterations - 1):
        comb = comb / (comb.sum(1, keepdim=True) + small)
        comb = comb / (comb.sum(0, keepdim=True) + small)
    return pre.sigmoid() + small, 2 * post.sigmoid(), comb.T


def repository_mhc(system, i, x, eps):
    n = len(x)
    pre, post, res = flat(system, i, x, eps)
    logs = (res.view(n, n) + system.static_res[i]).T  # [from, to]
    for _ in range(system.cfg.sinkhorn_iterations):
        logs = logs - logs.logsumexp(-2, keepdim=True)
        logs = logs - logs.logsumexp(-1, keepdim=True)
    return pre.sigmoid(), 2 * post.sigmoid(), logs.exp().T


def repository_lite(system, i, x, eps):
    n = len(x)
    pre, post, res = flat(system, i, x, eps)
    share = (res + system.static_res[i]).softmax(-1)
    eye = torch.eye(n, dtype=x.dtype)
    matrix = torch.stack([c * eye[list(p)] for c, p in zip(share, itertools.permutations(range(n)), strict=True)]).sum(
        0
    )
    return pre.sigmoid(), 2 * post.sigmoid(), matrix.T


FORMS = {
    "dynamic": (HyperConnections(n_streams=3), hc),
    "one stream": (HyperConnections(n_streams=1), hc),
    "static": (HyperConnections(n_streams=2, coefficients="static"), hc),
    "mhc": (HyperConnections.mhc(n_streams=3), mhc),
    "mhc, two iterations": (HyperConnections.mhc(n_streams=4, sinkhorn_iterations=2), mhc),
    "deepseek-v4": (HyperConnections.deepseek_v4(n_streams=3), v4),
    "deepseek-v4, one iteration": (HyperConnections.deepseek_v4(sinkhorn_iterations=1, eps=1e-2), v4),
    "repository mhc": (HyperConnections.mhc(n_streams=3, sinkhorn_last="columns", norm_eps=1e-26), repository_mhc),
    "repository mhc-lite": (HyperConnections.mhc_lite(n_streams=3), repository_lite),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_reads_and_writes_follow_the_paper(form, seed):
    residual, coefficients = FORMS[form]
    model = tiny("standard", seed, residual=residual)
    system, tokens = model.residual, random_tokens(seed + 10)
    eps = model.cfg.norm_eps if residual.norm_eps is None else residual.norm_eps
    record = model.record(tokens)
    for b, t in itertools.product((0, tokens.shape[0] - 1), (0, tokens.shape[1] - 1)):
        x = record.embed[b, t].repeat(residual.n_streams, 1)
        for step in record.steps[:-1]:
            pre, post, matrix = coefficients(system, step.site.index, x, eps)
            close(step.gates["weights"][b, t], pre)
            close(step.gates["post"][b, t], post)
            close(step.gates["res"][b, t], matrix)
            close(record.reads[step.site.name][b, t], pre @ x)
            x = matrix @ x + post[:, None] * step.out[b, t]
        weights = torch.ones(len(x), dtype=x.dtype)
        if residual.readout == "head":
            vec = x.flatten()
            raw = vec @ system.head_dynamic / (vec.square().mean() + eps).sqrt()
            weights = (system.head_gain * raw + system.head_static).sigmoid() + residual.eps
        elif residual.readout == "normed_sum":
            weights = 1 / (x.square().mean(-1) + model.cfg.norm_eps).sqrt()
        close(record.steps[-1].gates["weights"][b, t], weights)
        close(record.reads["out"][b, t], weights @ x, 1e-10)


def test_the_matrix_moves_streams_from_its_columns_to_its_rows():
    model = tiny("mhc", 2)
    tokens, seen = random_tokens(2), {}

    def send_stream_0_to_2(res, hook):
        res = torch.zeros_like(res)
        res[..., 2, 0] = 1.0  # [to, from]
        return res

    def look(streams, hook):
        seen[hook.name] = streams

    def silence(post, hook):
        return torch.zeros_like(post)

    name = "blocks.1.hc_attn.hook_"
    hooks = [(f"{name}res", send_stream_0_to_2), (f"{name}post", silence)]
    hooks += [(f"blocks.1.hook_streams_{where}", look) for where in ("pre", "mid")]
    model.run_with_hooks(tokens, fwd_hooks=hooks)
    before, after = seen["blocks.1.hook_streams_pre"], seen["blocks.1.hook_streams_mid"]
    close(after[..., 2, :], before[..., 0, :])
    assert not after[..., :2, :].any()


@pytest.mark.parametrize("system", ["hyper-connections", "hyper-static"])
def test_a_fresh_model_is_the_plain_pre_norm_residual(system):
    changes: Any = {"norm": Norm(eps=1e-30)}  # the readout is n times the stream; an eps would see that
    model = t2lens.build(tiny_config(system, **changes), seed=3).double()
    twin = t2lens.build(tiny_config("standard", **changes), seed=3).double()
    twin.load_state_dict({n: p for n, p in model.state_dict().items() if not n.startswith("residual.")})
    tokens = random_tokens(3)
    close(model(tokens), twin(tokens))
    for name, read in twin.record(tokens).reads.items():
        cfg: Any = model.cfg.residual
        times = cfg.n_streams if name == "out" and cfg.readout == "sum" else 1
        close(model.record(tokens).reads[name], times * read)


def test_constrained_forms_start_where_their_sources_say():
    tokens = random_tokens(4)
    for system in ("mhc", "mhc-lite"):
        for step in t2lens.build(tiny_config(system), seed=0).record(tokens).steps[:-1]:
            res, n = step.gates["res"], 3
            off = torch.eye(n).expand_as(res) - res
            assert 1e-5 < float(off.abs().max()) < 3e-3  # exp(-8), n of them
            own = torch.eye(n)[step.site.index % n]
            assert torch.allclose(step.gates["weights"], (2 * own - 1).sigmoid().expand_as(step.gates["weights"]))
            assert torch.allclose(step.gates["post"], 2 * (2 * own - 1).sigmoid().expand_as(step.gates["post"]))
    fresh: Any = t2lens.build(tiny_config("deepseek-v4"), seed=0).residual
    assert fresh.gain.eq(1).all() and not fresh.static_res.any()
    assert 0.015 < float(fresh.dynamic.detach().std()) < 0.025 and fresh.head_dynamic.any()


def swept(record):
    """Spec's backward sweep: coefficients of every atom in every read, from the gates."""
    steps, rows = record.steps, []
    for i, step in enumerate(steps):
        c, row = step.gates["weights"], []
        for before in reversed(steps[:i]):
            row.insert(0, (c * before.gates["post"]).sum(-1))
            c = torch.einsum("btij,bti->btj", before.gates["res"], c)
        row = [c.sum(-1), *row]
        rows.append(torch.stack([*row, *[torch.zeros_like(row[0])] * (len(steps) - len(row))], dim=-1))
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("form", FORMS)
def test_mixing_matrix_is_the_backward_sweep(form):
    model, tokens = tiny("standard", 5, residual=FORMS[form][0]), random_tokens(5)
    close(t2lens.mixing_matrix(model, tokens), swept(model.record(tokens)), 1e-10)


@pytest.mark.parametrize(
    ("residual", "limit"),
    [
        (HyperConnections.deepseek_v4(), 1e-4),  # off by eps at every write
        (HyperConnections.mhc(), 1e-12),
        (HyperConnections.mhc_lite(), 1e-12),
    ],
)
def test_rows_that_sum_to_one_keep_the_embedding_at_the_sum_of_the_read(residual, limit):
    model, tokens = tiny("standard", 6, residual=residual), random_tokens(6)
    record = model.record(tokens)
    matrix = t2lens.mixing_matrix(model, tokens)
    for i, step in enumerate(record.steps):
        close(matrix[:, i, :, 0], step.gates["weights"].sum(-1), limit)
    gaps = [float((step.gates["res"].sum(-1) - 1).abs().max()) for step in record.steps[:-1]]
    assert max(gaps) < limit


@pytest.mark.parametrize(
    "residual", [HyperConnections.mhc(sinkhorn_last="columns"), HyperConnections.mhc_lite(readout="sum")]
)
def test_columns_that_sum_to_one_conserve_the_sum_of_the_streams(residual):
    model, tokens = tiny("standard", 7, residual=residual), random_tokens(7)
    record = model.record(tokens)
    last = t2lens.mixing_matrix(model, tokens)[:, -1]
    close(last[..., 0], torch.full_like(last[..., 0], residual.n_streams))
    for i, step in enumerate(record.steps[:-1]):
        close(last[..., 1 + i], step.gates["post"].sum(-1))


def test_composite_multiplies_in_order_of_writing_and_its_gain_is_one_for_permutations():
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 3, 3, generator=generator)
    close(composite([first, second]), second @ first)
    record = tiny("mhc-lite", 8).record(random_tokens(8))
    product = composite([step.gates["res"] for step in record.steps[:-1]])
    for dim in (-1, -2):
        close(product.sum(dim), torch.ones_like(product.sum(dim)))
    with pytest.raises(ValueError, match="at least one write"):
        composite([])


@pytest.mark.parametrize("last", ["rows", "columns"])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_is_the_iteration_in_logarithms(last, iterations):
    logits = 4 * torch.randn(2, 5, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_()
    logs = logits
    for _ in range(iterations):
        for dim in (-2, -1) if last == "rows" else (-1, -2):
            logs = logs - logs.logsumexp(dim, keepdim=True)
    ours, probe = sinkhorn(logits, iterations, last), torch.randn_like(logits)
    close(ours, logs.exp())
    (mine,) = torch.autograd.grad((ours * probe).sum(), logits)
    (theirs,) = torch.autograd.grad((logs.exp() * probe).sum(), logits)
    close(mine, theirs)
    exact, other = (-1, -2) if last == "rows" else (-2, -1)
    ours = ours.detach()
    assert float((ours.sum(exact) - 1).abs().max()) < 1e-14 < float((ours.sum(other) - 1).abs().max())


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_sinkhorn_stays_finite_on_extreme_logits(eps):
    logits = torch.tensor([[-300.0, -300.0, -300.0], [0.0, 300.0, 0.0], [0.0, 0.0, -300.0]], requires_grad=True)
    out = sinkhorn(logits, 20, "rows", eps)
    out.square().sum().backward()
    assert out.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
    close(out.sum(-1), torch.ones(3), 1e-5)


def test_permutations_come_in_the_order_of_itertools():
    table = permutation_table(3)
    assert table.shape == (6, 3, 3) and torch.equal(table[0], torch.eye(3))
    x = torch.tensor([10.0, 11.0, 12.0])
    for matrix, perm in zip(table, itertools.permutations(range(3)), strict=True):
        moved = matrix @ x
        assert [float(moved[to]) for to in perm] == x.tolist()  # stream s goes to perm[s]


def test_the_normed_sum_is_the_norm_of_each_stream_and_not_of_their_sum():
    """The repository's readout: with the affine part after it (and n times the bias) it is ln_f of each, summed."""
    layer = Norm(kind="layer", bias=True)
    cfg: Any = {"norm": layer, "final_norm": Norm(kind="none", bias=True)}
    model, tokens = tiny("mhc-lite", 9, **cfg), random_tokens(9)
    logits, cache = model.run_with_cache(tokens)
    w, b = model.ln_final.w, model.ln_final.b
    normed = torch.nn.functional.layer_norm(cache["blocks.2.hook_streams_post"], (16,), w, b / 3, eps=1e-5)
    close(logits, normed.sum(-2) @ model.W_U + model.b_U)
    assert model.residual.coefficients() == "operator"
    record = model.record(tokens)
    close(t2lens.contributions(model, tokens).sum(-2), record.reads["out"])


def test_every_part_can_be_edited_and_streams_survive_an_edit_in_place():
    model, tokens = tiny("deepseek-v4", 10, local=True), random_tokens(10)
    plain = model(tokens)

    def scale(x, hook):
        x *= 1.5
        return x

    names = [n for n in model.hook_dict if any(k in n for k in ("hc_", "streams", "depth"))]
    assert {n.split(".")[2] for n in names if "hc_" in n} == {"hc_local", "hc_attn", "hc_mlp"}
    for name in names:
        effect = float((model.run_with_hooks(tokens, fwd_hooks=[(name, scale)]) - plain).detach().abs().max())
        assert effect > 1e-9, name
    with torch.no_grad():
        assert torch.equal(model(tokens), plain)


def test_identity_and_static_matrices_have_no_projection():
    tokens = random_tokens(11)
    still = tiny("standard", 11, residual=HyperConnections.mhc(res="identity", n_streams=3))
    assert not hasattr(still.residual, "static_res") and still.residual.gain.shape == (6, 2)
    for step in still.record(tokens).steps[:-1]:
        close(step.gates["res"], torch.eye(3).double().expand_as(step.gates["res"]))
    fixed = tiny("standard", 11, residual=HyperConnections(res="static", n_streams=3, pre="softmax"))
    for i, step in enumerate(fixed.record(tokens).steps[:-1]):
        close(step.gates["res"], fixed.residual.static_res[i].expand_as(step.gates["res"]))
        close(step.gates["weights"].sum(-1), torch.ones_like(step.gates["weights"][..., 0]))


def test_streams_are_sources_with_everything_written_so_far():
    model = tiny("mhc")
    assert model.sources()["0.mlp"] == ["stream0", "stream1", "stream2"]
    assert model.residual.sources(model.sites[1])[2].atoms == ("embed", "0.attn")
    weights = t2lens.trace(model, [0, 7, 3]).dataset["depth_weight"]
    assert weights.sel(read="1.mlp").shape == (3, 3) and weights.notnull().all()


def test_a_stopped_pass_returns_all_streams():
    model, tokens = tiny("hyper-connections", 12), random_tokens(12)
    _, cache = model.run_with_cache(tokens)
    streams = model(tokens, stop_at_layer=1)
    assert torch.equal(streams, cache["blocks.0.hook_streams_post"]) and streams.shape == (*tokens.shape, 3, 16)
    with pytest.raises(Exception, match="sum of"):
        cache.decompose_resid()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_streams": 0}, "n_streams must be a whole number"),
        ({"n_streams": 10**400}, "n_streams must be at most 2147483647"),
        ({"sinkhorn_iterations": 10**9}, "sinkhorn_iterations must be at most 1000"),
        ({"n_streams": 7, "res": "permutations", "norm_over": "all"}, "5040 permutations"),
        ({"res": "permutations"}, "needs norm_over 'all'"),
        ({"res": "softmax"}, "res must be one of"),
        ({"pre": "relu"}, "pre must be one of"),
        ({"readout": "max"}, "readout must be one of"),
        ({"eps": -1.0}, "eps must not be negative"),
        ({"norm_eps": 0.0}, "norm_eps must be positive"),
    ],
)
def test_bad_configs_say_what_is_wrong(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        HyperConnections(**changes)


def test_parallel_blocks_are_refused():
    cfg = replace(tiny_config("standard"), block="parallel")
    assert isinstance(cfg.residual, Standard)
    with pytest.raises(ValueError, match="parallel blocks"):
        t2lens.build(replace(cfg, residual=HyperConnections()), seed=0)

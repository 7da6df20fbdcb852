"""Attention Residuals against its equations, written out for one token at a time."""

from __future__ import annotations

import pytest
import torch

import t2lens
from t2lens.residual import AttnRes
from t2lens.residual.attnres import entmax, sparsemax, top_k_softmax
from tests.systems import random_tokens, tiny, tiny_config


def rms(x, w, eps):
    return w * x / (x.square().mean() + eps).sqrt()


@pytest.mark.parametrize("size", [None, 1, 2, 3, 4, 6, 50])
def test_reads_follow_the_paper(size):
    model = tiny("attnres-full", 1, residual=AttnRes(block_size=size))
    tokens = random_tokens(11)
    record = model.record(tokens)
    outs = [record.embed, *(s.out for s in record.steps if s.out is not None)]
    w, g, eps = model.residual.query, model.residual.key_norm, model.cfg.norm_eps
    step_size, n_sub = size or 1, len(outs) - 1
    for step in record.steps:
        index = step.site.index
        for b, t in ((0, 0), (0, tokens.shape[1] - 1)):
            atoms = [x[b, t] for x in outs]
            sources, start = [atoms[0]], 0
            while start < index:  # sums of completed blocks; inside a block, the partial sum
                end = min(start + step_size, n_sub)
                sources.append(sum(atoms[1 + start : 1 + min(end, index)]))
                start = end
            scores = torch.stack([w[index] @ rms(v, g[index], eps) for v in sources])
            weights = scores.softmax(0)
            assert torch.allclose(step.gates["weights"][b, t], weights, atol=1e-12, rtol=0)
            read = record.reads[step.site.name][b, t]
            assert torch.allclose(read, weights @ torch.stack(sources), atol=1e-12, rtol=0)


KINDS = [
    {"window": 1},
    {"window": 8, "block_size": 1},
    {"window": 2, "block_size": 2},
    {"window": 1, "block_size": 3},
    {"window": 2, "block_size": 4, "bias": "newest"},
    {"key_norm": "unweighted"},
    {"key_norm": "none", "block_size": 3},
    {"normaliser": "sigmoid"},
    {"normaliser": "top_k", "top_k": 2},
    {"normaliser": "sparsemax", "bias": "per_source"},
    {"normaliser": "entmax", "bias": "newest", "window": 3},
    {"query": "none", "key_norm": "none", "bias": "per_source", "window": 2},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_ablations_follow_their_definitions(kind):
    cfg = AttnRes(**kind)
    model = tiny("attnres-full", 3, n_layers=4, residual=cfg)
    record, p = model.record(random_tokens(4)), dict(model.residual.named_parameters())
    atoms, size = record.atoms, cfg.block_size or 1
    for step in record.steps:
        i = step.site.index
        sources = [atoms[0]]
        for start in range(0, i, size):
            sources.append(sum(atoms[1 + start : 1 + min(start + size, i)]))
        if cfg.window is not None:
            sources = [sources[0], *sources[1:][-cfg.window :]]
        assert len(sources) == len(model.residual.sources(step.site))
        scores = []
        for v in sources:
            key = v if cfg.key_norm == "none" else v / (v.square().mean(-1, keepdim=True) + model.cfg.norm_eps).sqrt()
            key = key * p["key_norm"][i] if cfg.key_norm == "learned" else key
            scores.append(key @ p["query"][i] if cfg.query == "learned" else torch.zeros_like(v[..., 0]))
        scores = torch.stack(scores, dim=-1)
        if cfg.bias == "newest":
            scores[..., -1] += p["bias"][i, 0]
        elif cfg.bias == "per_source":
            scores = scores + p["bias"][i, : len(sources)]
        if cfg.normaliser == "sigmoid":
            weights = scores.sigmoid()
        elif cfg.normaliser == "top_k":
            floor = scores.sort(dim=-1, descending=True).values[..., min(2, len(sources)) - 1 :][..., :1]
            weights = scores.masked_fill(scores < floor, -torch.inf).softmax(-1)
            assert ((weights == 0).sum(-1) == max(0, len(sources) - 2)).all()
        else:
            weights = {"softmax": torch.softmax, "sparsemax": sparsemax, "entmax": entmax}[cfg.normaliser](scores, -1)
        assert torch.allclose(step.gates["weights"], weights, atol=1e-11, rtol=0)
        expected = torch.einsum("bts,sbtd->btd", weights, torch.stack(sources))
        assert torch.allclose(record.read(step.site.name), expected, atol=1e-11, rtol=0)


def test_a_window_names_what_it_still_sees():
    model = tiny("attnres-full", n_layers=4, residual=AttnRes(block_size=2, window=2))
    assert model.sources()["3.attn"] == ["embed", "block2", "block3"]
    assert model.sources()["3.mlp"] == ["embed", "block3", "partial"]
    assert model.sources()["out"] == ["embed", "block3", "block4"]


@pytest.mark.parametrize(("n_layers", "layers_per_block"), [(7, 3), (4, 2), (5, 1), (3, 8)])
def test_the_order_of_kimi_k3_is_the_same_system(n_layers, layers_per_block):
    """K3 pushes a block after the first read behind it, and counts layers where block_size counts sublayers."""
    model = tiny("attnres-full", 5, n_layers=n_layers, residual=AttnRes(block_size=2 * layers_per_block))
    record, eps = model.record(random_tokens(5)), model.cfg.norm_eps
    folded = model.residual.query * model.residual.key_norm
    embed, *outs = record.atoms

    def attend(sources, i):
        scores = [(x / (x.square().mean(-1, keepdim=True) + eps).sqrt()) @ folded[i] for x in sources]
        return torch.einsum("sbt,sbtd->btd", torch.stack(scores).softmax(0), torch.stack(sources))

    blocks, current = [], embed
    for layer in range(n_layers):
        h = attend([*blocks, current], 2 * layer) if blocks else embed
        assert torch.allclose(record.read(f"{layer}.attn"), h, atol=1e-12, rtol=0)
        if layer % layers_per_block == 0:
            blocks, current = [*blocks, current], None
        current = outs[2 * layer] if current is None else current + outs[2 * layer]
        h = attend([*blocks, current], 2 * layer + 1)
        assert torch.allclose(record.read(f"{layer}.mlp"), h, atol=1e-12, rtol=0)
        current = current + outs[2 * layer + 1]
    assert torch.allclose(record.read("out"), attend([*blocks, current], 2 * n_layers), atol=1e-12, rtol=0)


def test_zero_queries_give_exactly_one_over_s():
    model = t2lens.build(tiny_config("attnres-full"), seed=0)
    for i, step in enumerate(model.record(random_tokens(3)).steps):
        weights = step.gates["weights"]
        assert weights.shape[-1] == i + 1
        assert torch.equal(weights, torch.ones_like(weights).softmax(-1))
    assert float(model.record([[0, 1]]).steps[0].gates["weights"].min()) == 1.0


def test_one_block_of_every_sublayer_is_a_two_way_choice_and_n_equals_s_is_full():
    tokens = random_tokens(5)
    full = tiny("attnres-full", 4)
    blocks = tiny("attnres-full", 4, residual=AttnRes(block_size=1))
    assert torch.equal(full(tokens), blocks(tokens))
    single = tiny("attnres-full", 4, residual=AttnRes(block_size=6))
    assert [len(s) for s in single.sources().values()] == [1, 2, 2, 2, 2, 2, 2]


def test_block_sources_have_identities():
    model = tiny("attnres-full", residual=AttnRes(block_size=4))
    assert model.sources() == {
        "0.attn": ["embed"],
        "0.mlp": ["embed", "partial"],
        "1.attn": ["embed", "partial"],
        "1.mlp": ["embed", "partial"],
        "2.attn": ["embed", "block1"],
        "2.mlp": ["embed", "block1", "partial"],
        "out": ["embed", "block1", "block2"],
    }
    held = {s.name: s.atoms for s in model.residual.sources(model.sites[5])}
    assert held == {
        "embed": ("embed",),
        "block1": ("0.attn", "0.mlp", "1.attn", "1.mlp"),
        "partial": ("2.attn",),
    }


@pytest.mark.parametrize("size", [None, 2])
def test_a_one_hot_edit_reads_that_source_to_the_last_bit(size):
    model = tiny("attnres-full", 9, residual=AttnRes(block_size=size))
    tokens = random_tokens(2)
    outs = {}
    for j in range(3):

        def one_hot(weights, *, hook, j=j):
            return torch.nn.functional.one_hot(torch.tensor(j), weights.shape[-1]).to(weights).expand_as(weights)

        name = "blocks.1.hook_depth_attn_mlp"
        with torch.no_grad(), model.hooks(fwd_hooks=[(name, one_hot)]):
            record = model.record(tokens)
            outs[j] = model(tokens)
        atoms = dict(zip(model.atoms, [record.embed, *(s.out for s in record.steps if s.out is not None)], strict=True))
        source = model.residual.sources(model.sites[3])[j]
        expected = atoms[source.atoms[0]]
        for a in source.atoms[1:]:
            expected = expected + atoms[a]
        assert torch.equal(record.read("1.mlp"), expected)
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("seed", range(10))
def test_sparsemax_is_the_projection_onto_the_simplex(seed):
    scores = torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    p = sparsemax(scores)
    assert torch.allclose(p.sum(-1), torch.ones(50, dtype=torch.float64), atol=1e-12, rtol=0)
    assert (p == 0).any() and (p >= 0).all()
    # optimality: no other point of the simplex (corners span it) lies in a descent direction
    gradient = p - scores
    assert ((gradient * p).sum(-1) <= gradient.min(-1).values + 1e-9).all()


@pytest.mark.parametrize("normalise", [sparsemax, entmax])
def test_where_scores_are_not_finite_no_weight_is_a_number(normalise):
    scores = torch.randn(3, 5, dtype=torch.float64)
    scores[0, 2], scores[1, 1] = torch.nan, torch.inf
    p = normalise(scores)
    assert p[:2].isnan().any(-1).all() and torch.equal(p[2], normalise(scores[2]))


@pytest.mark.parametrize("seed", range(5))
def test_entmax_solves_its_equation_and_has_exact_zeros(seed):
    scores = 3 * torch.randn(40, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    scores[0, 3] = scores[0, 2]  # equal scores get equal weights
    p = entmax(scores)
    low, high = (scores.amax(-1, keepdim=True) / 2 - 1), scores.amax(-1, keepdim=True) / 2
    for _ in range(80):  # the threshold by bisection
        tau = (low + high) / 2
        enough = (scores / 2 - tau).clamp(min=0).square().sum(-1, keepdim=True) >= 1
        low, high = torch.where(enough, tau, low), torch.where(enough, high, tau)
    assert torch.allclose(p, (scores / 2 - low).clamp(min=0).square(), atol=1e-10, rtol=0)
    assert torch.allclose(p.sum(-1), torch.ones(40).double(), atol=1e-12, rtol=0) and (p == 0).any()
    assert torch.autograd.gradcheck(entmax, scores[1:5].clone().requires_grad_())
    equal = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(entmax(equal)[:, 0].sum(), equal)
    assert torch.equal(entmax(equal), torch.full_like(equal, 0.25)) and gradient.isfinite().all()


def test_top_k_keeps_k_and_no_more_even_among_equals():
    p = top_k_softmax(torch.zeros(3, 5), 2)
    assert ((p > 0).sum(-1) == 2).all() and torch.equal(p.sum(-1), torch.ones(3))
    assert torch.equal(top_k_softmax(torch.zeros(3, 1), 2), torch.ones(3, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normaliser": "top_k"}, "needs top_k"),
        ({"top_k": 2}, "needs top_k"),
        ({"query": "none"}, "nothing scores the keys"),
        ({"window": 0}, "at least 1"),
        ({"bias": "oldest"}, "must be one of none, newest, per_source"),
        ({"key_norm": "layer"}, "must be one of learned, unweighted, none"),
    ],
)
def test_what_a_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        AttnRes(**options)


def test_memory_for_sources_is_linear_in_their_number():
    """Each source is stored once: what one forward pass keeps alive grows by one tensor per sublayer."""

    def kept(n_layers: int) -> int:
        model = tiny("attnres-full", n_layers=n_layers)
        with torch.no_grad():
            state = model(random_tokens(1), stop_at_layer=n_layers)
        return state.done._block.numel()

    assert kept(8) - kept(4) == kept(16) - kept(12) > 0
    graph, twice = (
        sum(t.numel() for t in saved_for_backward(tiny("attnres-full", n_layers=n), random_tokens(1))) for n in (4, 8)
    )
    assert twice < 2.6 * graph  # quadratic growth would give about four times


def saved_for_backward(model, tokens) -> list[torch.Tensor]:
    """Distinct storages that autograd keeps for one backward pass."""
    storages: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(tokens, return_type="loss")
    assert loss.requires_grad
    return list(storages.values())

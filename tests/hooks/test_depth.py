"""cache.decompose and cache.depth_stack: on every system, without a batch axis, in half precision, from a file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import t2lens
from t2lens.config import Attention, BucketAttention
from t2lens.hooks import load_cache
from t2lens.tracing import depth_weights, source_order
from tests.systems import SYSTEMS, random_tokens, tiny

LIMIT = 1e-10
SYSTEM = pytest.mark.parametrize("system", SYSTEMS)


def close(a: torch.Tensor, b: torch.Tensor, limit: float = LIMIT) -> None:
    assert a.shape == b.shape, (a.shape, b.shape)
    assert float((a - b).detach().abs().max()) < limit


def cached(system: str, seed: int = 0, tokens: torch.Tensor | None = None, **kwargs: Any) -> tuple[Any, Any]:
    changes = {key: kwargs.pop(key) for key in ("dtype", "local", "attention", "n_layers") if key in kwargs}
    model = tiny(system, seed, **changes)
    return model, model.run_with_cache(random_tokens(seed) if tokens is None else tokens, **kwargs)[1]


# ---- depth_stack


@SYSTEM
def test_the_stack_holds_every_weight_at_its_source_and_nothing_else(system):
    model, cache = cached(system, 1)
    stack = cache.depth_stack()
    own = depth_weights(model, cache.record)
    assert stack.reads == tuple(read.name for read in model.reads)
    assert list(stack.sources) == source_order(model)
    assert stack.weights.shape == (len(stack.reads), *cache.tokens.shape, len(stack.sources))
    for i, (read, sources) in enumerate(model.sources().items()):
        row = dict(zip(stack.sources, stack.weights[i].unbind(-1), strict=True))
        expected = own.get(read, torch.ones(*cache.tokens.shape, len(sources), dtype=torch.float64))
        for source, weight in zip(sources, expected.unbind(-1), strict=True):
            assert torch.equal(row.pop(source), weight)
        assert all(bool(rest.isnan().all()) for rest in row.values())
        assert bool(stack.fixed[i]) == (read not in own)
        assert int(stack.mask[i].sum()) == len(sources)
        assert stack.of(read).shape[-1] == len(sources)


@SYSTEM
def test_the_stack_follows_what_the_cache_holds(system, tmp_path):
    model, whole = cached(system, 2)
    tokens, full = whole.tokens, whole.depth_stack()
    if not bool(full.fixed.all()):
        _, few = model.run_with_cache(tokens, names_filter="*hook_depth_attn*")
        assert torch.equal(few.depth_stack().weights.nan_to_num(9), full.weights.nan_to_num(9))
        _, some = model.run_with_cache(tokens, names_filter=["hook_embed", "*hook_depth_attn*"], stop_at_layer=2)
        with pytest.raises(KeyError, match=r"The depth weights of .* are not in this cache; .*hook_depth_attn"):
            some.depth_stack()
        there = [name for name in model.sources() if name.startswith("1.")]
        part = some.depth_stack(there)
        assert part.reads == tuple(there)
        assert all(torch.equal(part.of(name), full.of(name)) for name in there)
    _, last = model.run_with_cache(tokens, pos_slice=-1)
    assert torch.equal(last.depth_stack().weights.nan_to_num(9), full.weights[:, :, -1:].nan_to_num(9))
    row = whole.apply_slice_to_batch_dim(0)
    assert torch.equal(row.depth_stack().weights.nan_to_num(9), full.weights[:, 0].nan_to_num(9))
    last.save(tmp_path / "c")
    loaded = load_cache(tmp_path / "c")
    again = loaded.depth_stack()
    assert torch.equal(again.weights.nan_to_num(9), full.weights[:, :, -1:].nan_to_num(9))
    assert (again.reads, again.sources) == (full.reads, full.sources)
    assert torch.equal(again.mask, full.mask) and torch.equal(again.fixed, full.fixed)


def test_what_cannot_be_stacked_says_why():
    model, cache = cached("attnres-full")
    with pytest.raises(KeyError, match=r"No read '2\.mpl'; did you mean '2\.mlp'"):
        cache.depth_stack(["2.mpl"])
    with pytest.raises(KeyError, match="did you mean"):
        cache.depth_stack().of("2.attn.q")
    assert cache.depth_stack("out").reads == ("out",)
    _, bare = tiny("standard").run_with_cache(random_tokens(0), names_filter="*hook_pattern")
    with pytest.raises(KeyError, match="cache hook_embed as well"):
        bare.depth_stack()
    cache.model = None
    with pytest.raises(ValueError, match=r"set cache\.model"):
        cache.depth_stack()
    cache.model = torch.nn.Identity()
    with pytest.raises(ValueError, match="Identity does not say what its reads weigh"):
        cache.depth_stack()
    assert model.depth_weight_hooks()["out"] == "hook_depth_attn_final"


# ---- decompose


@SYSTEM
@pytest.mark.parametrize("local", [False, True], ids=["", "with ShortSWA"])
def test_heads_and_atoms_sum_to_every_read(system, local):
    model, cache = cached(system, 1, local=local)
    for read in model.reads:
        wanted = cache.record.read(read.name)
        atoms, names = cache.decompose(read.name)
        heads, labels = cache.decompose(read.name, by="head")
        close(atoms.sum(0), wanted)
        close(heads.sum(0), wanted)
        assert len(labels) == len(set(labels)) == len(heads)
        for atom, part in zip(names, atoms, strict=True):
            own = [i for i, label in enumerate(labels) if label == atom or label.startswith(f"{atom}.")]
            assert len(own) == (model.cfg.n_heads if atom.endswith("attn") else 1)
            close(heads[own].sum(0), part)


def test_a_head_is_what_its_values_wrote():
    model, cache = cached("standard", 3)
    parts, labels = cache.decompose(by="head")
    z, w = cache[("z", 1)], model.blocks[1].attn.W_O
    for head in range(2):
        close(parts[labels.index(f"1.attn.h{head}")], z[:, :, head] @ w[head])


@pytest.mark.parametrize("output", ["post_norm", "gated"])
@pytest.mark.parametrize("system", ["standard", "elc-base"])
def test_heads_behind_a_norm_or_a_gate_sum_to_what_is_written(system, output):
    attention = BucketAttention(n_heads=2, n_kv_heads=2, d_head=8, output=output, n_buckets=6)
    model, cache = cached(system, 2, attention=attention)
    parts, labels = cache.decompose(by="head")
    close(parts.sum(0), cache["hook_read_final"])
    assert "2.attn.bias" in labels
    cache.compute_head_results()
    for layer in range(model.cfg.n_layers):
        heads = cache[("result", layer)]
        assert heads.shape == (*cache.tokens.shape, 2, 16)
        made = [cache[("z", layer)], *([cache[f"blocks.{layer}.attn.hook_gate"]] if output == "gated" else [])]
        constant = model.blocks[layer].attn.by_head(*made)[-1]
        close(heads.sum(-2) + constant, cache[("attn_out", layer)])
    if system == "standard":
        close(cache.stack_head_results(incl_remainder=True).sum(0), cache[("resid_post", 2)])
        close(cache.get_full_resid_decomposition().sum(0), cache[("resid_post", 2)])


@SYSTEM
def test_a_cache_without_its_batch_axis_has_parts_without_one(system):
    tokens = random_tokens(4)[:1]
    _, cache = cached(system, 4, tokens, remove_batch_dim=True)
    _, whole = cached(system, 4, tokens)
    assert torch.equal(cache.decompose()[0], whole.decompose()[0][:, 0])
    assert torch.equal(cache.decompose(by="head")[0], whole.decompose(by="head")[0][:, 0])
    assert cache.depth_stack().weights.shape == whole.depth_stack().weights[:, 0].shape
    assert torch.equal(whole.remove_batch_dim().decompose("2.mlp")[0], cache.decompose("2.mlp")[0])


@SYSTEM
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("remove", [False, True], ids=["", "without batch axis"])
def test_parts_survive_a_file_where_coefficients_are_scalars(system, dtype, remove, tmp_path):
    model, cache = cached(system, 5, random_tokens(5)[:1], dtype=dtype, remove_batch_dim=remove)
    cache.save(tmp_path / "c")
    loaded = load_cache(tmp_path / "c")
    assert set(loaded.keys()) == set(cache.keys()) and all(loaded[n].dtype == cache[n].dtype for n in cache)
    if model.residual.coefficients() != "scalar":
        with pytest.raises(ValueError, match=r"no model to compute it: load the model"):
            loaded.decompose()
        return
    loaded.save(tmp_path / "again")
    for read in model.reads:
        parts, labels = cache.decompose(read.name)
        for other in (loaded, load_cache(tmp_path / "again")):
            same, names = other.decompose(read.name)
            assert names == labels and same.dtype == parts.dtype
            assert same.shape == parts.shape
            size = float(parts.abs().max())
            assert float((same - parts).abs().max()) <= (LIMIT if dtype == torch.float64 else 0.02 * size)
    with pytest.raises(ValueError, match="by=\"atom\" in the additive form only, not by='head'"):
        loaded.decompose(by="head")
    with pytest.raises(KeyError, match="No read"):
        loaded.decompose("9.mlp")


def test_refusals_of_decompose():
    model, cache = cached("attnres-full")
    tokens = cache.tokens
    with pytest.raises(ValueError, match='by must be "atom" or "head"'):
        cache.decompose(by="neuron")
    with pytest.raises(ValueError, match="no form 'operator'"):
        cache.decompose(form="operator")
    with pytest.raises(KeyError, match="No read"):
        cache.decompose("7.mlp")
    for partial in (
        model.run_with_cache(tokens, pos_slice=-1)[1],
        model.run_with_cache(tokens, names_filter="*hook_depth_attn*")[1],
        model.run_with_cache(tokens, stop_at_layer=1)[1],
        cache.apply_slice_to_batch_dim((0, 1)),
    ):
        with pytest.raises(ValueError, match=r"no record of its pass; .*names_filter, stop_at_layer and pos_slice"):
            partial.decompose()
    with model.hooks([("blocks.0.hook_attn_out", lambda x, hook: x + 5)]):
        _, edited = model.run_with_cache(tokens)
    close(edited.decompose()[0].sum(0), edited["hook_read_final"])  # an atom is what was written
    with pytest.raises(ValueError, match=r'A hook edits what 0\.attn writes.*by="atom"'):
        edited.decompose(by="head")


def test_a_pass_whose_reads_were_edited_leaves_no_parts_in_its_file(tmp_path):
    model, tokens = tiny("standard"), random_tokens(1)
    with model.hooks([("blocks.1.hook_resid_pre", lambda x, hook: x * 3)]):
        _, cache = model.run_with_cache(tokens)
    with pytest.raises(ValueError, match="a hook edits the stream"):
        cache.decompose()
    cache.save(tmp_path / "c")
    with pytest.raises(ValueError, match="no model to compute it"):
        load_cache(tmp_path / "c").decompose()


def test_padded_positions_stay_out_of_the_parts_by_head():
    model = tiny("attnres-block", 2, attention=Attention(n_heads=2, n_kv_heads=1, d_head=8, bias=True))
    tokens = torch.tensor([[1, 1, 0, 7, 3], [0, 7, 3, 7, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    _, cache = model.run_with_cache(tokens, mask)
    parts, labels = cache.decompose("2.mlp", by="head")
    close(parts.sum(0), cache["blocks.2.hook_read_mlp"])
    assert "0.attn.bias" in labels
    close(parts.sum(0), t2lens.contributions(model, tokens, mask, read="2.mlp").sum(-2))


def test_a_file_with_parts_is_little_larger(tmp_path):
    _, cache = cached("attnres-full", tokens=torch.arange(30)[None])
    cache.save(tmp_path / "c")
    assert (tmp_path / "c").stat().st_size < 1.2 * sum(t.numel() * t.element_size() for t in cache.values())

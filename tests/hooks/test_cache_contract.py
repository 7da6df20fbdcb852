"""T18-T20: every public method of the activation cache, found by introspection, on every residual system."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformer_lens import ActivationCache as LensCache

import t2lens
from t2lens.hooks import ActivationCache, NotAdditiveError
from tests.hooks.toy import same
from tests.systems import SYSTEMS, random_tokens, tiny

LIMIT = 1e-10
SYSTEM = pytest.mark.parametrize("system", SYSTEMS)
LOCAL = pytest.mark.parametrize("local", [False, True], ids=["", "with ShortSWA"])
SEED = pytest.mark.parametrize("seed", [0, 1])
DRAWN = pytest.mark.parametrize(("seed", "local"), [(0, False), (1, True)], ids=["", "with ShortSWA"])
ADDITIVE = [name for name in SYSTEMS if tiny(name).stream_is_additive]

#: what each method is called with here; a method that transformer_lens adds must be added too
CALLS = {
    "accumulated_resid": lambda c: c.accumulated_resid(incl_mid=True, apply_ln=True),
    "apply_ln_to_stack": lambda c: c.apply_ln_to_stack(c["hook_embed"][None]),
    "apply_slice_to_batch_dim": lambda c: c.apply_slice_to_batch_dim(0),
    "compute_head_results": lambda c: c.compute_head_results(),
    "compute_ssm_effective_attention": lambda c: c.compute_ssm_effective_attention(),
    "compute_ssm_state": lambda c: c.compute_ssm_state(),
    "decompose": lambda c: c.decompose(),
    "decompose_resid": lambda c: c.decompose_resid(),
    "depth_stack": lambda c: c.depth_stack(),
    "get_full_resid_decomposition": lambda c: c.get_full_resid_decomposition(),
    "get_neuron_results": lambda c: c.get_neuron_results(1),
    "items": lambda c: c.items(),
    "keys": lambda c: c.keys(),
    "logit_attrs": lambda c: c.logit_attrs(c["hook_embed"][None], 7),
    "logit_lens": lambda c: c.logit_lens(),
    "remove_batch_dim": lambda c: c.apply_slice_to_batch_dim((0, 1)).remove_batch_dim(),
    "save": None,  # tests/hooks/test_files.py, and below
    "ssm_layers": lambda c: c.ssm_layers(),
    "stack_activation": lambda c: c.stack_activation("attn_out"),
    "stack_head_results": lambda c: c.stack_head_results(),
    "stack_neuron_results": lambda c: c.stack_neuron_results(2),
    "to": lambda c: c.to("cpu"),
    "toggle_autodiff": None,  # below: it changes the state of the process
    "values": lambda c: c.values(),
}
ANYWHERE = {
    *(
        "apply_slice_to_batch_dim",
        "compute_head_results",
        "decompose",
        "depth_stack",
        "get_neuron_results",
        "items",
        "keys",
    ),
    *("remove_batch_dim", "save", "ssm_layers", "stack_activation", "to", "toggle_autodiff", "values"),
}
NO_SSM = {"compute_ssm_effective_attention", "compute_ssm_state"}


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape, (a.shape, b.shape)
    assert float((a - b).detach().abs().max()) < LIMIT


def cached(system: str, seed: int = 0, **changes):
    model, tokens = tiny(system, seed, **changes), random_tokens(seed)
    logits, cache = model.run_with_cache(tokens)
    return model, tokens, logits.detach(), cache


def test_no_public_method_is_left_out():
    public = {name for name, _ in inspect.getmembers(ActivationCache, inspect.isfunction) if name[0] != "_"}
    optional = {"logit_lens"} - set(vars(LensCache))  # came with transformer_lens 4.3
    assert public == set(CALLS) - optional


@SYSTEM
@LOCAL
def test_every_method_works_or_says_why_not(system, local):
    model, _, _, cache = cached(system, local=local)
    for name, call in CALLS.items():
        if call is None or not hasattr(cache, name):
            continue
        if name in NO_SSM:
            with pytest.raises(RuntimeError, match="No SSM mixer layers"):
                call(cache)
        elif name in ANYWHERE or model.stream_is_additive:
            call(cache)
        else:
            with pytest.raises(NotAdditiveError, match=rf"{name} .*t2lens\.contributions.*decompose"):
                call(cache)


@SYSTEM
@DRAWN
def test_what_replaces_the_helpers_is_exact(system, seed, local):
    model, tokens, logits, cache = cached(system, seed, local=local)
    for read in model.reads:
        parts, labels = cache.decompose(read.name)
        name = read.site.hook("read", read.way)
        seen = cache.record.read(read.name) if read.way == "r" else cache[name]  # no sublayer reads what is carried on
        close(parts.sum(0), seen)
        close(t2lens.contributions(model, tokens, read=read.name).movedim(-2, 0).sum(0), seen)
        assert labels == list(model.atoms)
    normed = cache.decompose()[0] / cache["ln_final.hook_scale"]
    close((normed * model.ln_final.w @ model.W_U).sum(0), logits)


@SYSTEM
def test_heads_and_neurons_split_their_sublayer_on_every_system(system):
    model, _, _, cache = cached(system, 1, local=True)
    cache.compute_head_results()
    for layer in range(model.cfg.n_layers):
        close(cache[("result", layer)].sum(-2), cache[("attn_out", layer)])
        close(cache.get_neuron_results(layer).sum(-2), cache[("mlp_out", layer)])
        one = cache.get_neuron_results(layer, neuron_slice=[3], pos_slice=(0, 2))
        close(one[:, :, 0], cache.get_neuron_results(layer)[:, :2, 3])


@SYSTEM
def test_stacks_slices_and_keys(system):
    model, tokens, _, cache = cached(system, 2)
    n = model.cfg.n_layers
    stack = cache.stack_activation("pattern")
    assert torch.equal(stack[1], cache[("pattern", 1, "attn")]) and stack.shape[0] == n
    assert torch.equal(cache["pattern1"], cache[("attn", -2)]) and cache[("scale",)] is cache["ln_final.hook_scale"]
    assert cache[("depth_attn_mlp", -1)].ndim == 3 if "blocks.0.hook_depth_attn_mlp" in cache else True
    row = cache.apply_slice_to_batch_dim(0)
    assert type(row) is ActivationCache and not row.has_batch_dim and row.record is None
    assert all(torch.equal(row[name], cache[name][0]) for name in cache)
    assert same(row.tokens, tokens[:1])
    rows = cache.apply_slice_to_batch_dim((0, 1))
    assert rows.has_batch_dim and same(rows.tokens, tokens[:1])
    assert all(torch.equal(a, b) for a, b in zip(rows.remove_batch_dim().values(), row.values(), strict=True))
    with pytest.raises(ValueError, match="no batch axis"):
        row.apply_slice_to_batch_dim(0)
    with pytest.raises(ValueError, match="no record of its pass"):
        row.decompose()
    for wrong in ("blocks.0.hook_atn_out", ("atn_out", 0), ("pattern", 9), "", ("hook_embed", 3, "x")):
        with pytest.raises(KeyError, match="hook point"):
            cache[wrong]
    for wrong in (3, (1, 2), (), ("a", 1, "b", "c")):
        with pytest.raises(TypeError, match="cache key"):
            cache[wrong]


def test_ragged_stacks_and_large_batches_are_refused():
    _, _, _, cache = cached("attnres-full", 1)
    with pytest.raises(ValueError, match="cannot be stacked over 3 layers: shapes go from"):
        cache.stack_activation("depth_attn_mlp")
    model = tiny("standard")
    _, cache = model.run_with_cache(torch.tensor([[1, 2], [3, 4]]))
    with pytest.raises(ValueError, match="this one has 2"):
        cache.remove_batch_dim()
    with pytest.raises(ValueError, match="this one has 3"):
        cache.apply_slice_to_batch_dim((0, 1)).remove_batch_dim(3)


def test_the_global_switch_still_switches():
    _, _, _, cache = cached("ddl")
    cache.toggle_autodiff(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_a_cache_without_its_model_says_so(tmp_path):
    _, _, _, cache = cached("standard")
    cache.save(tmp_path / "c")
    loaded = t2lens.hooks.load_cache(tmp_path / "c")
    assert loaded.info["sources"]["0.mlp"] == ["embed", "0.attn"]
    with pytest.raises(NotAdditiveError, match=r"set cache\.model first"):
        loaded.decompose_resid()
    loaded.model = cache.model
    assert torch.equal(loaded.decompose_resid(), cache.decompose_resid())


# ---- the plain sum ----

PLAIN = pytest.mark.parametrize("system", ADDITIVE)


def test_only_the_standard_stream_is_a_plain_sum():
    assert ADDITIVE == ["standard"]


@PLAIN
@SEED
@LOCAL
def test_parts_of_the_stream_sum_to_it_at_every_layer(system, seed, local):
    model, _, _, cache = cached(system, seed, local=local)
    n = model.cfg.n_layers
    places = [(layer, mlp) for layer in range(n) for mlp in (False, True)] + [(n, False)]
    for layer, mlp in places:
        if layer == n:
            stream, norm = cache[("resid_post", n - 1)], "ln_final"
        else:
            first = f"blocks.{layer}.{'ln_local' if local else 'ln1'}"
            stream, norm = cache[("resid_mid" if mlp else "resid_pre", layer)], f"blocks.{layer}.ln2" if mlp else first
        for decompose in (
            cache.decompose_resid,
            cache.get_full_resid_decomposition,
            lambda *a, **k: cache.get_full_resid_decomposition(*a, expand_neurons=False, **k),
        ):
            parts, labels = decompose(layer, mlp_input=mlp, return_labels=True)
            close(parts.sum(0), stream)
            assert len(labels) == len(parts) == len(set(map(str, labels)))
            normed = decompose(layer, mlp_input=mlp, apply_ln=True)
            close(normed.sum(0), cache[f"{norm}.hook_normalized"])
            close(decompose(layer, mlp_input=mlp, pos_slice=-1).sum(0), stream[:, -1])
    labels = cache.decompose_resid(1, mlp_input=True, return_labels=True)[1]
    kinds = ["local_out", "attn_out", "mlp_out"] if local else ["attn_out", "mlp_out"]
    assert labels == ["embed", *(f"0_{kind}" for kind in kinds), *(f"1_{kind}" for kind in kinds[:-1])]
    attn = cache.decompose_resid(mode="attn", incl_embeds=False, return_labels=True)
    assert attn[1] == [f"{layer}_attn_out" for layer in range(n)]
    assert torch.equal(cache.decompose_resid(mode="mlp")[1], cache["blocks.0.hook_mlp_out"])


@PLAIN
@SEED
@LOCAL
def test_heads_neurons_and_remainders_sum_to_the_stream(system, seed, local):
    model, _, _, cache = cached(system, seed, local=local)
    n = model.cfg.n_layers
    for layer in (1, 2, n):
        end = cache[("resid_post", layer - 1)]
        heads, labels = cache.stack_head_results(layer, return_labels=True, incl_remainder=True)
        close(heads.sum(0), end)
        assert labels[0] == "L0H0" and labels[-1] == "remainder" and len(labels) == layer * model.cfg.n_heads + 1
        close(cache.stack_neuron_results(layer, incl_remainder=True).sum(0), end)
        norm = "ln_final" if layer == n else f"blocks.{layer}.{'ln_local' if local else 'ln1'}"
        close(
            cache.stack_head_results(layer, incl_remainder=True, apply_ln=True).sum(0),
            cache[f"{norm}.hook_normalized"],
        )
    projected = cache.get_full_resid_decomposition(project_output_onto=model.W_U[:, 7])
    close(projected.sum(0), cache[("resid_post", n - 1)] @ model.W_U[:, 7])
    both = cache.get_full_resid_decomposition(apply_ln=True, project_output_onto=model.W_U[:, :3])
    close(both.sum(0), cache["ln_final.hook_normalized"] @ model.W_U[:, :3])


@PLAIN
@SEED
@LOCAL
def test_accumulated_streams_are_the_streams(system, seed, local):
    model, _, _, cache = cached(system, seed, local=local)
    stack, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    for label, value in zip(labels, stack, strict=True):
        layer, _, where = label.partition("_")
        name = ("resid_post", model.cfg.n_layers - 1) if layer == "final" else (f"resid_{where}", int(layer))
        assert torch.equal(value, cache[name])
    normed = cache.accumulated_resid(apply_ln=True)
    close(normed[-1], model.ln_final(cache["hook_read_final"]))


@PLAIN
@SEED
@LOCAL
@pytest.mark.parametrize("tied", [True, False])
def test_logit_attributions_sum_to_the_logit(system, seed, local, tied):
    _, tokens, logits, cache = cached(system, seed, local=local, tied=tied)
    stack = cache.decompose_resid()
    batch, pos = tokens.shape
    close(cache.logit_attrs(stack, 7).sum(0), logits[..., 7])
    close(cache.logit_attrs(stack, torch.tensor(7), torch.tensor(9)).sum(0), logits[..., 7] - logits[..., 9])
    each = torch.randint(50, (batch, pos), generator=torch.Generator().manual_seed(seed))
    close(cache.logit_attrs(stack, each).sum(0), logits.gather(-1, each[..., None])[..., 0])
    one = each[:, 0]
    expected = logits.gather(-1, one[:, None, None].expand(batch, pos, 1))[..., 0]
    close(cache.logit_attrs(stack, one).sum(0), expected)
    last = cache.decompose_resid(pos_slice=-1)
    close(cache.logit_attrs(last, one, pos_slice=-1).sum(0), expected[:, -1])
    close(cache.logit_attrs(stack, 7, batch_slice=0).sum(0), logits[0, :, 7])
    close(cache.logit_attrs(cache.get_full_resid_decomposition(), 7).sum(0), logits[..., 7])
    with pytest.raises(ValueError, match="same shape"):
        cache.logit_attrs(stack, 7, one)
    row = cache.apply_slice_to_batch_dim(0)
    close(row.logit_attrs(row.decompose_resid(), 7, has_batch_dim=False).sum(0), logits[0, :, 7])


@PLAIN
@pytest.mark.skipif(not hasattr(LensCache, "logit_lens"), reason="came with transformer_lens 4.3")
@pytest.mark.parametrize("tied", [True, False])
def test_the_logit_lens_ends_in_the_logits(system, tied):
    _, _, logits, cache = cached(system, 1, tied=tied)
    result = cache.logit_lens(positions=None)
    close(result.values[-1], logits)
    assert result.labels[-1] == "final_post"


@PLAIN
def test_a_partial_cache_names_what_is_missing(system):
    model, tokens = tiny(system), random_tokens(0)
    _, cache = model.run_with_cache(tokens, names_filter=["hook_embed", "*hook_attn_out"])
    with pytest.raises(KeyError, match=r"blocks\.0\.hook_mlp_out"):
        cache.decompose_resid()
    with pytest.raises(ValueError, match="no record of its pass"):
        cache.decompose()

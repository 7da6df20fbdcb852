"""The engine cases T01-T28 that concern hooks, on every residual system of the reference model.

T04 (every hook point is on the live path) and the golden names: tests/test_model.py. T13: also test_files.py.
T15: test_compile.py. T18-T20: test_cache_contract.py.
"""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import transformer_lens
from transformer_lens import patching
from transformer_lens.hook_points import HookPoint as LensHookPoint

from t2lens.hooks import HookedRoot, HookPoint
from tests.hooks.toy import same
from tests.systems import SYSTEMS, random_tokens, tiny

SYSTEM = pytest.mark.parametrize("system", SYSTEMS)
TOKENS = torch.tensor([[0, 7, 3, 7, 9]])


def identity(x, hook):
    return x


@SYSTEM
@pytest.mark.parametrize(("seed", "mode"), [(0, "grad"), (1, "no_grad"), (2, "inference")])
def test_t01_plain_cached_and_hooked_runs_are_bit_equal(system, seed, mode):
    model, tokens = tiny(system, seed, local=True), random_tokens(seed)
    context = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with context():
        plain = model(tokens)
        cached, cache = model.run_with_cache(tokens)
        hooked = model.run_with_hooks(tokens, fwd_hooks=[(lambda n: True, identity)])
        watched = model.run_with_hooks(tokens, fwd_hooks=[("*", lambda x, hook: None)])
        again = model(tokens)
    for other in (cached, hooked, watched, again):
        assert torch.equal(plain, other)
    assert set(cache) == set(model.hook_dict)


@SYSTEM
def test_t02_a_filter_that_matches_nothing_raises(system):
    model = tiny(system)
    for asked in (
        "blocks.0.hook_attn_outt",
        ["hook_embed", "blocks.9.hook_attn_out"],
        "",
        "attn_out",
        [],
        "*hook_depth_atn*",
        lambda name: name == "x",
    ):
        with pytest.raises(KeyError) as error:
            model.run_with_cache(TOKENS, names_filter=asked)
        if isinstance(asked, str) and "attn_out" in asked:
            assert "blocks.0.hook_attn_out" in str(error.value)


@SYSTEM
def test_t03_filters_of_all_kinds_cache_the_same(system):
    model = tiny(system)
    names = [name for name in model.hook_dict if "hook_depth_attn" in name or name.endswith("hook_scale")]
    _, expected = model.run_with_cache(TOKENS, names_filter=names)
    for alike in (
        tuple(names),
        set(names),
        dict.fromkeys(names),
        iter(names),
        names.__contains__,
        re.compile("hook_depth_attn|hook_scale$"),
    ):
        _, cache = model.run_with_cache(TOKENS, names_filter=alike)
        assert set(cache) == set(names) and all(torch.equal(cache[n], expected[n]) for n in names)
    _, cache = model.run_with_cache(TOKENS, names_filter="*hook_scale")
    assert set(cache) == {name for name in names if name.endswith("hook_scale")}


@SYSTEM
@pytest.mark.parametrize("local", [False, True])
def test_t05_every_hook_point_fires_once(system, local):
    model, fired = tiny(system, local=local), []
    model.run_with_hooks(TOKENS, fwd_hooks=[("*", lambda x, hook: fired.append(hook.name))])
    assert sorted(fired) == sorted(model.hook_dict)


@SYSTEM
@pytest.mark.parametrize("grad", [True, False])
def test_t06_cached_values_are_those_of_hook_time(system, grad):
    model, tokens, copies = tiny(system, local=True), random_tokens(1), {}
    with torch.set_grad_enabled(grad):
        model.run_with_hooks(tokens, fwd_hooks=[("*", lambda x, hook: copies.update({hook.name: x.detach().clone()}))])
        _, cache = model.run_with_cache(tokens)
    assert model.hooked_tensors_are_final
    for name, value in copies.items():
        assert torch.equal(cache[name], value), name


@SYSTEM
@pytest.mark.parametrize("run", ["run_with_hooks", "hooks", "run_with_cache"])
def test_t07_after_an_error_in_a_hook_only_the_users_hooks_remain(system, run):
    model = tiny(system)
    plain = model(TOKENS)
    model.add_hook("hook_embed", identity)
    mine = model.list_hooks()

    def fail(x, hook):
        raise RuntimeError("a test")

    with pytest.raises(RuntimeError, match="a test"):
        if run == "run_with_hooks":
            model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_attn_out", fail)])
        elif run == "hooks":
            with model.hooks([("blocks.1.hook_attn_out", fail)]):
                model(TOKENS)
        else:
            with model.hooks([("blocks.1.hook_attn_out", fail)]):
                model.run_with_cache(TOKENS)
    assert model.list_hooks() == mine and model.context_level == 0
    assert [name for name, point in model.hook_dict.items() if point.active] == ["hook_embed"]
    assert torch.equal(model(TOKENS), plain)
    model.reset_hooks()


@SYSTEM
def test_t08_gradients(system):
    model, tokens = tiny(system, local=True), random_tokens(2)
    loss, cache = model.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    assert loss.ndim == 0
    without = []
    for name in model.hook_dict:
        if name + "_grad" in cache:
            assert cache[name + "_grad"].shape == cache[name].shape
        else:
            without.append(name)
    # Softmax over one source and weights that are a constant have no gradient; nothing else may lack one.
    for name in without:
        assert "depth_attn" in name and cache[name].eq(cache[name].flatten()[0]).all(), name
    with torch.no_grad(), pytest.raises(ValueError, match="gradients, but they are off"):
        model.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    with pytest.raises(ValueError, match="needs a scalar"):
        model.run_with_cache(tokens, incl_bwd=True)
    with pytest.raises(ValueError, match="needs a scalar"):
        model.run_with_cache(tokens, return_type="both", incl_bwd=True)


@SYSTEM
@pytest.mark.parametrize("pos_slice", [-1, (0, 2), [0, 2]])
def test_t09_slices_cut_the_position_axis(system, pos_slice):
    model = tiny(system)
    tokens = torch.tensor([[0, 7, 3], [0, 3, 7], [0, 9, 9]])  # batch 3, pos 3, and 3 sources at 1.attn
    _, full = model.run_with_cache(tokens)
    _, cut = model.run_with_cache(tokens, pos_slice=pos_slice)
    index = (
        [pos_slice] if isinstance(pos_slice, int) else slice(*pos_slice) if isinstance(pos_slice, tuple) else pos_slice
    )
    for name, value in full.items():
        axis = 2 if name.endswith(("hook_pattern", "hook_attn_scores")) else 1
        assert torch.equal(cut[name], value[(slice(None),) * axis + (index,)]), name
        assert cut[name].untyped_storage().nbytes() == cut[name].numel() * cut[name].element_size(), name


@SYSTEM
def test_t10_the_batch_axis(system):
    model = tiny(system)
    _, full = model.run_with_cache(TOKENS)
    _, cache = model.run_with_cache(TOKENS, remove_batch_dim=True)
    assert not cache.has_batch_dim and all(torch.equal(cache[n], full[n][0]) for n in full)
    assert all(value.ndim >= 2 for value in cache.values())
    with pytest.raises(ValueError, match="batch of 1"):
        model.run_with_cache(input=TOKENS.repeat(2, 1), remove_batch_dim=True)


@SYSTEM
def test_t11_stopping_early(system):
    model = tiny(system, local=True)
    _, full = model.run_with_cache(TOKENS)
    fired = []
    with model.hooks([("*", lambda x, hook: fired.append(hook.name))]):
        _, cache = model.run_with_cache(TOKENS, stop_at_layer=1)
    assert set(fired) == set(cache) and "hook_embed" in cache
    assert all(name.startswith(("blocks.0.", "hook_embed")) for name in cache)
    assert {n for n in full if n.startswith("blocks.0.")} <= set(cache)
    assert all(torch.equal(cache[name], full[name]) for name in cache)
    for beyond in ("blocks.1.hook_attn_out", "hook_read_final", ["hook_embed", "ln_final.hook_scale"]):
        with pytest.raises(KeyError, match="does not reach"):
            model.run_with_cache(TOKENS, names_filter=beyond, stop_at_layer=1)


@SYSTEM
def test_t12_device_and_dtype_leave_the_model_alone(system):
    model = tiny(system)
    _, cache = model.run_with_cache(TOKENS, device="meta", dtype=torch.float32)
    assert {(v.device.type, v.dtype) for v in cache.values()} == {("meta", torch.float32)}
    _, cache = model.run_with_cache(TOKENS)
    cache.to("meta")
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.float64)}
    assert model(TOKENS).device.type == "cpu"


@SYSTEM
def test_t13_a_saved_cache_holds_what_explains_it(system, tmp_path):
    from t2lens.hooks import load_cache

    model = tiny(system, dtype=torch.bfloat16)
    _, cache = model.run_with_cache(TOKENS.repeat(4, 3))
    cache.save(tmp_path / "c")
    loaded = load_cache(tmp_path / "c")
    assert all(torch.equal(loaded[n], cache[n]) and loaded[n].dtype == cache[n].dtype for n in cache)
    assert torch.bfloat16 in {value.dtype for value in loaded.values()}
    assert loaded.info["sources"] == model.sources() and same(loaded.tokens, TOKENS.repeat(4, 3))


@SYSTEM
def test_t16_wrong_hook_functions_are_named(system):
    model = tiny(system)
    name = next((n for n in model.hook_dict if "depth_attn" in n or "beta" in n), "blocks.0.hook_attn_out")
    with pytest.raises(TypeError, match=re.escape(name)):
        model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, h: x)])
    for wrong in (lambda x, hook: x[:, :1], lambda x, hook: x.float(), lambda x, hook: x.mean()):
        with pytest.raises(ValueError, match=re.escape(name)):
            model.run_with_hooks(TOKENS, fwd_hooks=[(name, wrong)])


@SYSTEM
def test_t17_points_outside_the_list_are_noticed(system):
    model = tiny(system)
    model.blocks[0].hook_late = HookPoint(shape="batch pos", meaning="too late")
    with pytest.raises(ValueError, match=r"blocks\.0\.hook_late"):
        model.run_with_cache(TOKENS)
    del model.blocks[0].hook_late
    with pytest.raises(ValueError, match="two names"):
        model.blocks[0].hook_again = model.hook_embed
        model.run_with_cache(TOKENS)
    with pytest.raises(ValueError, match=r"hook_embed' and as 'blocks\.0\.hook_again"):
        model.setup()
    del model.blocks[0].hook_again


@SYSTEM
def test_t25_heads_under_shared_keys(system):
    model, tokens = tiny(system), random_tokens(3)  # two heads share one key/value head
    _, plain = model.run_with_cache(tokens)
    n = tokens.shape[1]
    assert plain["blocks.1.attn.hook_pattern"].shape == (len(tokens), 2, n, n)
    assert plain["blocks.1.attn.hook_k"].shape[2] == 1
    torch.testing.assert_close(plain["blocks.1.attn.hook_pattern"].sum(-1), torch.ones(len(tokens), 2, n).double())

    def only_self(x, hook):
        x = x.clone()
        x[:, 1] = torch.eye(n).to(x)
        return x

    with model.hooks([("blocks.1.attn.hook_pattern", only_self)]):
        _, edited = model.run_with_cache(tokens)
    z, before = edited["blocks.1.attn.hook_z"], plain["blocks.1.attn.hook_z"]
    torch.testing.assert_close(z[:, :, 1], plain["blocks.1.attn.hook_v"][:, :, 0])
    torch.testing.assert_close(z[:, :, 0], before[:, :, 0], atol=1e-12, rtol=0)


@SYSTEM
def test_t27_one_sequence_is_a_batch_of_one(system):
    model = tiny(system)
    out, cache = model.run_with_cache(TOKENS[0])
    batched, expected = model.run_with_cache(TOKENS)
    assert torch.equal(out, batched) and same(cache.tokens, TOKENS)
    assert all(torch.equal(cache[n], expected[n]) for n in expected)
    single, cache = model.run_with_cache([7], remove_batch_dim=True)
    assert single.shape == (1, 1, 50) and cache["hook_embed"].shape == (1, 16)


def test_t28_the_classes_are_transformer_lens_classes():
    assert issubclass(HookedRoot, transformer_lens.HookedRootModule) and issubclass(HookPoint, LensHookPoint)
    for method in ("run_with_cache", "run_with_hooks", "hooks", "add_hook", "get_caching_hooks", "add_caching_hooks"):
        ours = inspect.signature(getattr(HookedRoot, method)).parameters
        theirs = inspect.signature(getattr(transformer_lens.HookedRootModule, method)).parameters
        assert set(theirs) <= set(ours), method
        names = [name for name in theirs if theirs[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert [name for name in ours if name in names] == names, method


@pytest.mark.filterwarnings("ignore")  # progress bars of transformer_lens
def test_transformer_lens_patching_works_on_the_plain_stream():
    model = tiny("standard")
    clean, corrupted = torch.tensor([[0, 7, 3]]), torch.tensor([[0, 9, 3]])
    _, cache = model.run_with_cache(clean)
    for patch in (patching.get_act_patch_resid_pre, patching.get_act_patch_attn_out, patching.get_act_patch_mlp_out):
        with torch.no_grad():
            effect = patch(model, corrupted, cache, lambda logits: logits[0, -1, 5])
        assert effect.shape == (3, 3) and effect.std() > 0
    with torch.no_grad():
        target = model(clean)[0, -1, 5]
        effect = patching.get_act_patch_resid_pre(model, corrupted, cache, lambda logits: logits[0, -1, 5])
    assert float(effect[0, 1]) == pytest.approx(float(target), abs=1e-5)  # the only token that differs, restored

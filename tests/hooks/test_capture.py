"""What a cached run keeps: values as they were, sliced on the right axis, without more memory than needed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformer_lens.utilities.slice import Slice

from t2lens.hooks import ActivationCache, HookPoint
from tests.hooks.toy import FinalToy, FiresTwice, InPlace, LyingInPlace, Toy, same, tokens_of

MODELS = pytest.mark.parametrize("model_class", [Toy, FinalToy])
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])


@MODELS
@SEEDS
def test_everything_is_cached_and_nothing_changes(model_class, seed):
    model, tokens = model_class(seed), tokens_of(seed)
    plain = model(tokens)
    out, cache = model.run_with_cache(tokens)
    assert torch.equal(out, plain) and set(cache) == set(model.hook_dict) and isinstance(cache, ActivationCache)
    assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[(lambda n: True, lambda x, hook: x)]), plain)
    assert all(not value.requires_grad for value in cache.values()) and same(cache.tokens, tokens)
    out, plain_dict = model.run_with_cache(tokens, return_cache_object=False)
    assert type(plain_dict) is dict and all(torch.equal(plain_dict[name], cache[name]) for name in cache)


@SEEDS
def test_aliased_and_copied_caches_are_equal(seed):
    copied = Toy(seed).run_with_cache(tokens_of(seed))[1]
    aliased = FinalToy(seed).run_with_cache(tokens_of(seed))[1]
    with torch.inference_mode():
        inference = FinalToy(seed).run_with_cache(tokens_of(seed))[1]
    for name in copied:
        assert torch.equal(copied[name], aliased[name]) and torch.equal(copied[name], inference[name])


def test_a_final_model_is_not_copied_and_another_is():
    seen = {}
    for model_class in (Toy, FinalToy):
        model = model_class()
        model.add_hook("hook_embed", lambda x, hook: seen.update(x=x))  # with a hook about, copies are made
        _, hooked = model.run_with_cache(tokens_of(0))
        model.reset_hooks()
        assert hooked["hook_embed"].data_ptr() != seen["x"].data_ptr()
    inside = {}
    model = FinalToy()
    model.after_block = lambda x, layer: inside.setdefault(layer, x)  # type: ignore[method-assign]
    _, cache = model.run_with_cache(tokens_of(0))
    assert cache["hook_last"].data_ptr() == inside[2].data_ptr()
    model = Toy()
    model.after_block = lambda x, layer: inside.setdefault(layer + 10, x)  # type: ignore[method-assign]
    _, cache = model.run_with_cache(tokens_of(0))
    assert cache["hook_last"].data_ptr() != inside[12].data_ptr()


def test_the_value_is_that_of_hook_time_even_if_written_to_later():
    tokens = tokens_of(0)
    model = InPlace()
    _, cache = model.run_with_cache(tokens)
    assert torch.equal(cache["hook_embed"], model.embed[tokens].detach())
    assert torch.equal(cache["hook_last"], cache["hook_embed"] + 1)


@pytest.mark.parametrize("grad", [True, False])
def test_a_broken_promise_raises_with_the_name(grad):
    model = LyingInPlace()
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="'hook_embed' was modified in place"):
        model.run_with_cache(tokens_of(0))
    with torch.inference_mode():  # nothing is counted there, so nothing is promised either
        _, cache = model.run_with_cache(tokens_of(0))
    assert torch.equal(cache["hook_embed"], model.embed[tokens_of(0)])


def test_hooks_that_edit_in_place_do_not_reach_into_the_cache_of_earlier_points():
    tokens = tokens_of(1)
    plain = FinalToy().run_with_cache(tokens)[1]
    model = FinalToy()

    def zero(x, hook):
        x.zero_()

    with torch.no_grad(), model.hooks([("blocks.1.hook_z", zero)]):
        _, cache = model.run_with_cache(tokens)
    assert torch.equal(cache["blocks.0.hook_out"], plain["blocks.0.hook_out"])
    assert not cache["blocks.1.hook_z"].any() and plain["blocks.1.hook_z"].any()


def test_the_cache_sees_what_the_model_used_whenever_the_edit_came():
    model, tokens = Toy(), tokens_of(0)
    model.add_hook("hook_last", lambda x, hook: x * 0 + 7)
    out, cache = model.run_with_cache(tokens)
    assert (cache["hook_last"] == 7).all() and torch.equal(out, cache["hook_last"].sum(-1))
    _, cache = model.run_with_cache(tokens, reset_hooks_end=False)
    model.add_hook("hook_last", lambda x, hook: x * 0 + 1)  # later than the capture, seen all the same
    model(tokens)
    assert (cache["hook_last"] == 1).all()
    model.reset_hooks()


# ---- slices, batch axis, device, dtype ----


@MODELS
@SEEDS
@pytest.mark.parametrize("pos_slice", [-1, 0, (0, 2), (None, None, 2), [0, 1], torch.tensor([1]), Slice((1, 9))])
def test_positions_are_cut_on_the_position_axis_and_copied(model_class, seed, pos_slice):
    model = model_class(seed)
    n = model.embed.shape[1] // 2 if seed else 3
    tokens = torch.randint(0, 11, (n, n), generator=torch.Generator().manual_seed(seed))  # batch = pos on purpose
    _, full = model.run_with_cache(tokens)
    _, cut = model.run_with_cache(tokens, pos_slice=pos_slice)
    index = pos_slice.slice if isinstance(pos_slice, Slice) else pos_slice
    if isinstance(index, tuple):
        index = slice(*index)
    for name, value in full.items():
        axis = {"hook_pattern": 2}.get(name.split(".")[-1], 1)
        kept = [index] if isinstance(index, int) else index
        expected = value[(slice(None),) * axis + (kept,)]
        assert torch.equal(cut[name], expected), name
        assert cut[name].untyped_storage().nbytes() == cut[name].numel() * cut[name].element_size(), name


def test_positions_outside_raise_with_the_hook():
    with pytest.raises(ValueError, match="outside the 3 positions at hook 'hook_embed'"):
        Toy().run_with_cache(torch.tensor([[1, 2, 3]]), pos_slice=7)


def test_a_shape_without_positions_is_kept_whole():
    class Static(Toy):
        def build_more(self):
            self.hook_static = HookPoint(shape="batch source", meaning="weights of no position")

        def after_block(self, x, layer):
            return x * self.hook_static(x.new_ones(x.shape[0], 3)).sum() if layer == 0 else x

    _, cache = Static().run_with_cache(torch.tensor([[1, 2], [3, 4]]), pos_slice=-1)
    assert cache["hook_static"].shape == (2, 3)


@MODELS
def test_the_batch_axis_goes_only_when_it_is_one(model_class):
    model = model_class()
    tokens = torch.tensor([[3, 4, 5]])
    _, full = model.run_with_cache(tokens)
    for given in ((tokens,), (tokens[0],)):
        _, cache = model.run_with_cache(*given, remove_batch_dim=True)
        assert not cache.has_batch_dim and same(cache.tokens, tokens)
        assert all(torch.equal(cache[name], full[name][0]) for name in full)
    assert cache["blocks.0.depth.hook_gate"].shape == (3, 1)  # one source at layer 0: never a scalar
    for call in (
        lambda: model.run_with_cache(torch.tensor([[1, 2], [3, 4]]), remove_batch_dim=True),
        lambda: model.run_with_cache(tokens=torch.tensor([[1, 2], [3, 4]]), remove_batch_dim=True),
    ):
        with pytest.raises(ValueError, match="batch of 1"):
            call()


@MODELS
def test_device_and_dtype_are_those_of_the_cache_only(model_class):
    class Counting(model_class):
        def build_more(self):
            self.hook_ids = HookPoint(shape="batch pos", meaning="token ids")

        def forward(self, tokens, **kwargs):
            return super().forward(self.hook_ids(tokens), **kwargs)

    model = Counting()
    out, cache = model.run_with_cache(tokens_of(0), device="meta")
    assert {value.device.type for value in cache.values()} == {"meta"} and out.device.type == "cpu"
    _, cache = model.run_with_cache(tokens_of(0), dtype=torch.bfloat16)
    dtypes = {name: value.dtype for name, value in cache.items()}
    assert dtypes.pop("hook_ids") == torch.int64 and set(dtypes.values()) == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert cache.to("cpu") is cache


def test_the_declared_shape_is_checked_against_what_comes():
    class Misdeclared(Toy):
        def build_more(self):
            self.hook_wrong = HookPoint(shape="batch pos head d_head", meaning="not so")

        def after_block(self, x, layer):
            return self.hook_wrong(x) if layer == 0 else x

    with pytest.raises(ValueError, match=r"'hook_wrong' is declared as 'batch pos head d_head'"):
        Misdeclared().run_with_cache(tokens_of(0))


# ---- stop_at_layer and filters ----


@MODELS
def test_stopping_early_keeps_what_was_run(model_class):
    model, tokens = model_class(), tokens_of(2)
    _, full = model.run_with_cache(tokens)
    for stop, count in ((0, 0), (1, 1), (2, 2), (-1, 2)):
        _, cache = model.run_with_cache(tokens, stop_at_layer=stop)
        layers = {int(name.split(".")[1]) for name in cache if name.startswith("blocks.")}
        assert layers == set(range(count)) and "hook_last" not in cache and "hook_embed" in cache
        assert all(torch.equal(cache[name], full[name]) for name in cache)


@pytest.mark.parametrize(
    "asked", ["blocks.1.hook_z", ["hook_embed", "blocks.2.hook_z"], "hook_last", ["*hook_z", "hook_last"]]
)
def test_asking_for_what_is_not_run_raises(asked):
    with pytest.raises(KeyError, match="stop_at_layer=1 does not reach"):
        Toy().run_with_cache(tokens_of(0), names_filter=asked, stop_at_layer=1)
    _, cache = Toy().run_with_cache(tokens_of(0), names_filter="*hook_z", stop_at_layer=1)
    assert list(cache) == ["blocks.0.hook_z"]
    with pytest.raises(KeyError, match="None of the hook points"):
        Toy().run_with_cache(tokens_of(0), names_filter="blocks.2.*", stop_at_layer=1)


def test_filtered_caches_are_parts_of_the_full_one():
    model, tokens = Toy(), tokens_of(0)
    _, full = model.run_with_cache(tokens)
    for names_filter in (
        "*hook_z",
        ("hook_embed",),
        {"hook_last", "hook_embed"},
        lambda name: "gate" in name,
        iter(["hook_last"]),
    ):
        _, cache = model.run_with_cache(tokens, names_filter=names_filter)
        assert 0 < len(cache) < len(full) and all(torch.equal(cache[name], full[name]) for name in cache)


# ---- gradients ----


@MODELS
@SEEDS
def test_gradients_are_those_of_autograd(model_class, seed):
    model, tokens = model_class(seed), tokens_of(seed)
    loss, cache = model.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    assert {name for name in cache if not name.endswith("_grad")} == set(model.hook_dict)
    leaves = {}

    def hold(x, hook):
        leaves[hook.name] = x = x.clone()
        return x

    again = model.run_with_hooks(tokens, fwd_hooks=[(lambda n: True, hold)], return_type="loss")
    expected = torch.autograd.grad(again, list(leaves.values()))
    for (name, value), grad in zip(leaves.items(), expected, strict=True):
        assert cache[name + "_grad"].shape == value.shape
        torch.testing.assert_close(cache[name + "_grad"], grad, atol=1e-12, rtol=1e-12)
    assert model.embed.grad is not None and torch.equal(loss, again)
    _, cut = model.run_with_cache(tokens, return_type="loss", incl_bwd=True, pos_slice=-1, names_filter="*hook_pattern")
    name = "blocks.1.hook_pattern_grad"
    assert torch.equal(cut[name], cache[name][:, :, -1:])


def test_gradients_that_cannot_be_are_refused_in_a_sentence():
    model, tokens = Toy(), tokens_of(0)
    for off in (torch.no_grad, torch.inference_mode):
        with off(), pytest.raises(ValueError, match="needs gradients, but they are off"):
            model.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    with pytest.raises(ValueError, match=r"needs a scalar.*shape \["):
        model.run_with_cache(tokens, incl_bwd=True)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing that the model used"):
        model.run_with_cache(tokens, return_type="loss", incl_bwd=True)


# ---- transformer_lens' own ways to cache ----


def test_caching_hooks_of_transformer_lens_give_the_same():
    model, tokens = FinalToy(1), tokens_of(1)
    _, full = model.run_with_cache(tokens)
    cache, fwd, bwd = model.get_caching_hooks("*hook_z", incl_bwd=True, pos_slice=(0, 2))
    with model.hooks(fwd, bwd):
        model(tokens, return_type="loss").backward()
    assert {name for name in cache if not name.endswith("_grad")} == {f"blocks.{i}.hook_z" for i in range(3)}
    assert all(torch.equal(cache[f"blocks.{i}.hook_z"], full[f"blocks.{i}.hook_z"][:, :2]) for i in range(3))
    _, grads = model.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    for i in range(3):
        torch.testing.assert_close(cache[f"blocks.{i}.hook_z_grad"], grads[f"blocks.{i}.hook_z_grad"][:, :2])
    kept = model.add_caching_hooks(["hook_last"], cache={"mine": torch.ones(1)})
    for seed in (1, 2):
        model(tokens_of(seed))
        assert torch.equal(kept["hook_last"], model.run_with_cache(tokens_of(seed))[1]["hook_last"])
    assert "mine" in kept
    model.reset_hooks()


def test_a_capture_that_stays_sees_every_pass_until_reset():
    model = Toy()
    _, cache = model.run_with_cache(tokens_of(0), names_filter="hook_last", reset_hooks_end=False)
    model(tokens_of(1))
    assert torch.equal(cache["hook_last"], model.run_with_cache(tokens_of(1))[1]["hook_last"])
    model.reset_hooks()
    model(tokens_of(0))
    assert cache["hook_last"].shape[:2] == tokens_of(1).shape


def test_contexts_of_hook_points_are_cleared_when_asked():
    model = Toy()
    model.hook_dict["hook_last"].ctx["x"] = 1
    model.run_with_cache(tokens_of(0))
    assert model.hook_dict["hook_last"].ctx == {"x": 1}
    model.run_with_cache(tokens_of(0), clear_contexts=True)
    assert model.hook_dict["hook_last"].ctx == {}


def test_a_deleted_cache_is_freed_at_once():
    model = FinalToy()
    gc.collect()
    gc.disable()
    try:
        _, cache = model.run_with_cache(tokens_of(0))
        watched = [weakref.ref(value) for value in cache.values()]
        del cache
        assert all(ref() is None for ref in watched)
        with pytest.raises(RuntimeError, match="fired twice"):
            FiresTwice().run_with_cache(tokens_of(0))
    finally:
        gc.enable()


def test_a_gradient_is_of_what_went_through_the_point_and_not_of_what_went_around_it():
    class Around(Toy):
        def forward(self, tokens, return_type="loss", stop_at_layer=None):
            x = self.embed[tokens]
            return (x + 2 * self.hook_embed(x)).sum()

    _, cache = Around().run_with_cache(tokens_of(0), incl_bwd=True)
    assert (cache["hook_embed_grad"] == 2).all()


@pytest.mark.parametrize("asked", [False, True])
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(monkeypatch, asked):
    from t2lens.hooks import capture

    calls = []

    class Libc:
        gnu_get_libc_version = staticmethod(str)
        mallopt = staticmethod(lambda *given: calls.append(given))

    monkeypatch.setattr(capture.ctypes, "CDLL", lambda _: Libc)
    monkeypatch.setattr(capture.sys, "platform", "linux")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    if asked:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    capture.keep_freed_memory.cache_clear()
    capture.keep_freed_memory()
    capture.keep_freed_memory()
    capture.keep_freed_memory.cache_clear()
    assert calls == ([] if asked else [(-1, 2**28)])

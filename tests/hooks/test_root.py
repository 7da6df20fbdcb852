"""The hooked root: names at construction, hooks that come and go, errors that leave nothing behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from transformer_lens.hook_points import HookPoint as LensHookPoint

from t2lens.hooks import HookedRoot, HookPoint
from tests.hooks.toy import FiresTwice, Toy, tokens_of


def a_point() -> HookPoint:
    return HookPoint(shape="batch pos d", meaning="a test")


class Bare(HookedRoot):
    def __init__(self, build):
        super().__init__()
        build(self)
        self.setup()

    def forward(self, x):
        return x


# ---- construction ----


def test_mount_makes_the_modules_on_the_way_and_uses_those_that_are_there():
    def build(root):
        root.blocks = nn.ModuleList([nn.Module(), nn.Module()])
        root.mount("blocks.1.ddl_attn.hook_beta", a_point())
        root.mount("blocks.1.ddl_attn.hook_dir", a_point())
        root.mount("hook_final", a_point())

    root: Any = Bare(build)
    assert set(root.hook_dict) == {"blocks.1.ddl_attn.hook_beta", "blocks.1.ddl_attn.hook_dir", "hook_final"}
    assert root.hook_dict["blocks.1.ddl_attn.hook_beta"].name == "blocks.1.ddl_attn.hook_beta"
    assert root.blocks[1].ddl_attn.hook_beta is root.hook_dict["blocks.1.ddl_attn.hook_beta"]


@pytest.mark.parametrize("path", ["hook_x", "blocks.7.hook_x", "forward.hook_x", "", "a..b", "a."])
def test_a_path_that_cannot_be_mounted_raises(path):
    def build(root):
        root.blocks = nn.ModuleList([nn.Module()])
        root.hook_x = a_point()
        root.mount(path, a_point())

    with pytest.raises(ValueError, match="cannot be mounted"):
        Bare(build)


def test_mounting_after_setup_raises():
    with pytest.raises(ValueError, match="after setup"):
        Toy().mount("blocks.0.hook_new", a_point())


def test_a_point_with_two_names_raises_with_both():
    def build(root):
        root.hook_a = root.hook_b = a_point()

    with pytest.raises(ValueError, match="'hook_a' and as 'hook_b'"):
        Bare(build)

    def share_module(root):
        root.first = root.second = nn.Module()
        root.first.hook_x = a_point()

    with pytest.raises(ValueError, match=r"'first\.hook_x' and as 'second\.hook_x'"):
        Bare(share_module)


@pytest.mark.parametrize("container", [lambda p: [p], lambda p: (p,), lambda p: {"x": p}])
def test_a_point_without_a_name_raises(container):
    def build(root):
        root.part = nn.Module()
        root.part.points = container(a_point())

    with pytest.raises(ValueError, match=r"part holds a HookPoint in 'points'"):
        Bare(build)


def test_a_plain_transformer_lens_point_raises():
    def build(root):
        root.hook_x = LensHookPoint()

    with pytest.raises(TypeError, match=r"'hook_x' must be a t2lens\.hooks\.HookPoint"):
        Bare(build)


def use_run_with_cache(model):
    model.run_with_cache(tokens_of(0))


def use_run_with_hooks(model):
    model.run_with_hooks(tokens_of(0), fwd_hooks=[])


def use_add_hook(model):
    model.add_hook("hook_embed", lambda x, hook: None)


def use_describe(model):
    model.describe_hooks()


@pytest.mark.parametrize("use", [use_run_with_cache, use_run_with_hooks, use_add_hook, use_describe])
def test_a_point_added_or_taken_after_setup_is_noticed_at_the_next_use(use):
    model = Toy()
    model.blocks[1].hook_late = a_point()
    with pytest.raises(ValueError, match=r"after setup\(\): blocks\.1\.hook_late"):
        use(model)
    model.setup()
    model.reset_hooks()
    model = Toy()
    del model._modules["hook_last"]
    with pytest.raises(ValueError, match=r"after setup\(\): hook_last"):
        use(model)


def test_a_root_without_setup_says_so():
    class Forgot(Bare):
        def __init__(self):
            HookedRoot.__init__(self)

    with pytest.raises(ValueError, match="call setup"):
        Forgot().run_with_cache(torch.ones(1))


def test_the_table_of_hooks_folds_layers_and_escapes():
    model = Toy(n_layers=3)
    table = model.describe_hooks()
    assert [row.name for row in table] == list(model.hook_dict) and len(table) == len(model.hook_dict)
    text = str(table)
    assert "blocks.{0-2}.hook_out" in text and "blocks.1.hook_out" not in text and "stream" in text
    assert repr(table) == text and len(text.splitlines()) < len(table)

    def build(root):
        root.hook_x = HookPoint(shape="batch <b>", meaning="a & b", unit="<i>")

    html = Bare(build).describe_hooks()._repr_html_()
    assert "batch &lt;b&gt;" in html and "a &amp; b" in html and "<i>" not in html


# ---- hooks that come and go ----


def double(x, hook):
    return x * 2


def test_unknown_names_are_refused_everywhere_and_nothing_is_attached():
    model, tokens = Toy(), tokens_of(1)
    near = r"blocks\.0\.hook_z"
    for attempt in (
        lambda: model.add_hook("blocks.0.hook_zz", double),
        lambda: model.add_hook(["hook_embed", "blocks.0.hook_zz"], double),
        lambda: model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", double), ("blocks.0.hook_zz", double)]),
        lambda: model.run_with_hooks(tokens, bwd_hooks=[("blocks.0.hook_zz", double)]),
        lambda: model.run_with_cache(tokens, names_filter="blocks.0.hook_zz"),
        lambda: model.get_caching_hooks(["blocks.0.hook_zz"]),
        lambda: model.add_caching_hooks("blocks.0.hook_zz"),
    ):
        with pytest.raises(KeyError, match=near):
            attempt()
    with pytest.raises(KeyError, match="accepts none"):
        model.add_hook(lambda name: False, double)
    with pytest.raises(KeyError, match=near), model.hooks([("blocks.0.hook_zz", double)]):
        raise AssertionError("never entered")


def test_the_hook_that_cannot_be_called_leaves_the_others_unattached():
    model = Toy()
    with pytest.raises(TypeError, match="hook_embed"), model.hooks([("*", double), ("hook_embed", lambda x, h: x)]):
        raise AssertionError("never entered")
    assert model.list_hooks() == {}


def test_filters_of_every_kind_attach():
    model = Toy(n_layers=2)
    for where in ("*hook_z", ["blocks.0.hook_z", "blocks.1.hook_z"], lambda name: name.endswith("hook_z")):
        handles = model.add_hook(where, double)
        assert len(handles) == 2 and set(model.list_hooks()) == {"blocks.0.hook_z", "blocks.1.hook_z"}
        model.reset_hooks()


def test_contexts_nest_and_each_removes_its_own():
    model, tokens = Toy(), tokens_of(2)
    plain = model(tokens)
    model.add_hook("hook_last", double)
    with model.hooks([("hook_last", double)]):
        assert model.context_level == 1
        with model.hooks([("hook_last", double)]):
            assert model.context_level == 2
            assert torch.equal(model(tokens), 8 * plain)
        assert torch.equal(model(tokens), 4 * plain)
        model.add_hook("hook_last", double)  # added inside by hand: it stays
        assert torch.equal(model(tokens), 8 * plain)
    assert torch.equal(model(tokens), 4 * plain) and model.context_level == 0
    model.reset_hooks()
    assert torch.equal(model(tokens), plain)


def test_permanent_hooks_survive_reset():
    model, tokens = Toy(), tokens_of(2)
    model.add_perma_hook("hook_last", double)
    model.add_hook("hook_last", double)
    model.reset_hooks()
    assert len(model.list_hooks()["hook_last"]) == 1 and model.list_hooks(including_permanent=False) == {}
    _, cache = model.run_with_cache(tokens)
    assert len(model.list_hooks()["hook_last"]) == 1
    model.reset_hooks(including_permanent=True)
    assert torch.equal(cache["hook_last"], 2 * model.run_with_cache(tokens)[1]["hook_last"])


def test_removal_through_the_torch_handle_is_seen_by_list_hooks():
    model = Toy()
    (handle,) = model.add_hook("hook_last", double)
    handle.hook.remove()
    assert model.list_hooks() == {} and not model.hook_dict["hook_last"].active
    model.reset_hooks()


def test_backward_hooks_stay_until_reset_when_asked(caplog):
    model, tokens, seen = Toy(), tokens_of(0), []
    loss = model.run_with_hooks(
        tokens,
        return_type="loss",
        bwd_hooks=[("hook_last", lambda grad, hook: seen.append(grad.shape))],
        reset_hooks_end=False,
    )
    assert set(model.list_hooks(dir="bwd")) == {"hook_last"} and not caplog.records
    loss.backward()
    assert seen == [(*tokens.shape, model.embed.shape[1])]
    model.reset_hooks()
    model.run_with_hooks(tokens, bwd_hooks=[("hook_last", double)])
    assert "reset_hooks_end=False" in caplog.text


@pytest.mark.parametrize("reset_hooks_end", [True, False])
@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("run", ["run_with_hooks", "run_with_cache"])
def test_after_an_error_only_the_users_own_hooks_remain(run, failure, reset_hooks_end):
    model, tokens = Toy(), tokens_of(3)
    plain = model(tokens)
    model.add_hook("blocks.0.hook_out", lambda x, hook: None)
    mine = model.list_hooks()

    def fail(x, hook):
        raise failure("a test")

    with pytest.raises(failure, match="a test"):
        if run == "run_with_hooks":
            hooks = [("hook_embed", double), ("blocks.1.hook_out", fail)]
            model.run_with_hooks(tokens, fwd_hooks=hooks, reset_hooks_end=reset_hooks_end)
        else:
            model.stop = fail  # type: ignore[assignment]
            model.run_with_cache(tokens, reset_hooks_end=reset_hooks_end)
    model.stop = None
    assert model.list_hooks() == mine and model.context_level == 0 and not model.is_caching
    assert [name for name, point in model.hook_dict.items() if point.active] == ["blocks.0.hook_out"]
    assert torch.equal(model(tokens), plain)
    model.reset_hooks()


def test_firing_twice_raises_in_every_kind_of_pass():
    model, tokens = FiresTwice(), tokens_of(0)
    assert model(tokens).shape == tokens.shape  # idle: nobody is misled
    for run in (
        lambda: model.run_with_cache(tokens),
        lambda: model.run_with_cache(tokens, names_filter="hook_embed"),
        lambda: model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", double)]),
    ):
        with pytest.raises(RuntimeError, match="'hook_embed' fired twice"):
            run()
    with model.hooks([("hook_embed", double)]), pytest.raises(RuntimeError, match="fired twice"):
        model(tokens)
    assert torch.equal(model(tokens, stop_at_layer=1), model.run_with_hooks(tokens, stop_at_layer=1))


def test_several_passes_inside_one_context_are_no_double_firing():
    model, tokens, seen = Toy(), tokens_of(1), []

    def look(x, hook):
        seen.append(hook.name)
        if len(seen) == 1:
            model(tokens)  # a pass inside a pass

    with model.hooks([("hook_embed", look)]):
        model(tokens)
        model(tokens)
    assert len(seen) == 3


def test_a_named_hook_that_does_not_fire_raises():
    model, tokens = Toy(), tokens_of(0)
    named: list[dict[str, Any]] = [
        {"fwd_hooks": [("blocks.2.hook_out", double)]},
        {"bwd_hooks": [("hook_last", double)]},
    ]
    for hooks in named:
        with pytest.raises(KeyError, match="did not fire"):
            model.run_with_hooks(tokens, stop_at_layer=1, **hooks)
    model.run_with_hooks(tokens, stop_at_layer=1, fwd_hooks=[(lambda name: True, double)])


def test_check_hooks_to_add_of_a_subclass_is_asked():
    class Choosy(Toy):
        def check_hooks_to_add(self, hook_point, hook_point_name, hook, **how):
            if hook_point_name.startswith("blocks.1."):
                raise ValueError(f"{hook_point_name} is closed")

    model = Choosy()
    for attempt in (
        lambda: model.add_hook("*hook_z", double),
        lambda: model.run_with_hooks(tokens_of(0), fwd_hooks=[("*", double)]),
    ):
        with pytest.raises(ValueError, match="is closed"):
            attempt()
        assert model.list_hooks() == {}


def test_two_threads_cache_the_same_model_without_mixing():
    model = Toy(n_layers=3)
    inputs = [tokens_of(seed) for seed in range(4)]
    alone = [dict(model.run_with_cache(tokens)[1].items()) for tokens in inputs]
    wrong: list[str] = []
    start = threading.Barrier(4)

    def work(index: int) -> None:
        start.wait()
        for _ in range(30):
            _, cache = model.run_with_cache(inputs[index])
            wrong.extend(n for n, value in alone[index].items() if n not in cache or not torch.equal(cache[n], value))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

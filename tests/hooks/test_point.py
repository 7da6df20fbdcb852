"""A hook point by itself: idle, seen, edited, refused."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from transformer_lens.hook_points import HookPoint as LensHookPoint

from t2lens.hooks import HookPoint
from tests.hooks.toy import Toy, tokens_of

ATTACH = {
    "hook": lambda p: p.add_hook(lambda x, hook: None),
    "permanent": lambda p: p.add_perma_hook(lambda x, hook: None),
    "backward": lambda p: p.add_hook(lambda x, hook: None, dir="bwd"),
    "tap": lambda p: p.add_tap(lambda x, hook: None),
    "torch forward": lambda p: p.register_forward_hook(lambda module, args, output: None),
    "torch forward pre": lambda p: p.register_forward_pre_hook(lambda module, args: None),
    "torch backward": lambda p: p.register_full_backward_hook(lambda module, grad_in, grad_out: None),
    "torch backward pre": lambda p: p.register_full_backward_pre_hook(lambda module, grad_out: None),
}


def point(**more) -> HookPoint:
    made = HookPoint(shape="batch pos d", meaning="a test", **more)
    made.name = "blocks.1.hook_x"
    return made


def test_an_idle_point_returns_the_tensor_itself():
    x = torch.randn(2, 3, 4)
    assert point()(x) is x and not point().active and isinstance(point(), LensHookPoint)


@pytest.mark.parametrize("how", ATTACH)
def test_active_says_when_anything_is_attached_and_when_nothing_is_any_more(how):
    p = point()
    assert not p.may_edit
    ATTACH[how](p)
    assert p.active and p.may_edit == (how != "tap")
    p.remove_hooks("both", including_permanent=True)
    if how.startswith("torch"):
        assert p.active, "transformer_lens' remove_hooks knows nothing of hooks set through torch"
    else:
        assert not p.active and not p.may_edit


@pytest.mark.parametrize("how", [how for how in ATTACH if how.startswith("torch")])
def test_a_torch_handle_makes_the_point_idle_again(how):
    p = point()
    with ATTACH[how](p):
        assert p.active
    assert not p.active and p(torch.ones(1, 1, 1)).sum() == 1


def test_a_hook_sees_and_edits_and_order_is_the_order_of_attachment():
    p, seen = point(), []
    p.add_hook(lambda x, hook: seen.append(hook.name) or x * 2)
    p.add_hook(lambda x, hook: x + 1)
    p.add_hook(lambda x, hook: x - 3, prepend=True)
    p.add_tap(lambda x, hook: seen.append(x.item()))
    assert p(torch.full((1, 1, 1), 5.0)).item() == 5 and seen == ["blocks.1.hook_x", 5.0]


def test_add_hook_returns_a_handle_that_knows_the_function():
    def mine(x, hook):
        return None

    handle = point().add_hook(mine)
    assert handle.hook is not None
    if hasattr(handle, "user_hook"):  # transformer_lens 4.3
        assert handle.user_hook is mine


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (lambda x: x[:1], r"\[1, 3, 4\]"),
        (lambda x: x.double(), "float64"),
        (lambda x: x.to("meta"), "meta"),
        (lambda x: x.sum(-1, keepdim=True), r"\[2, 3, 1\]"),
        (lambda x: "text", "str"),
        (lambda x: (x,), "tuple"),
    ],
)
@pytest.mark.parametrize("through", ["add_hook", "register_forward_hook"])
def test_a_result_that_cannot_stand_in_raises_and_names_the_hook(result, word, through):
    p = point()
    if through == "add_hook":
        p.add_hook(lambda x, hook: result(x))
    else:
        p.register_forward_hook(lambda module, args, output: result(output))
    with pytest.raises(ValueError, match=rf"blocks\.1\.hook_x.*{word}.*\[2, 3, 4\].*float32.*batch pos d"):
        p(torch.randn(2, 3, 4))


@pytest.mark.parametrize(
    "wrong", [lambda x, h: x, lambda x: x, lambda: None, lambda a, b, hook: a, partial(lambda x, y: x, y=1)]
)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_function_that_cannot_be_called_is_refused_at_once(wrong, direction):
    p = point()
    with pytest.raises(TypeError, match=r"blocks\.1\.hook_x.*fn\(tensor, hook=hook_point\)"):
        p.add_hook(wrong, dir=direction)
    assert not p.active
    with pytest.raises(TypeError, match="must be a function, got int"):
        p.add_hook(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="direction"):
        p.add_hook(lambda x, hook: None, dir="sideways")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "hook",
    [lambda x, hook: None, lambda *a, **k: None, lambda x, hook, more=3: None, partial(lambda x, y, hook: None, y=1)],
)
def test_functions_of_many_kinds_are_accepted(hook):
    p = point()
    p.add_hook(hook)
    assert p(torch.ones(1, 1, 1)).item() == 1


def test_a_failed_bwd_result_names_the_function_too():
    p = point()
    p.add_hook(lambda grad, hook: grad[..., :1], dir="bwd")
    x = torch.randn(2, 3, 4, requires_grad=True)
    with pytest.raises(ValueError, match="lambda"):
        p(x * 1).sum().backward()


@pytest.mark.parametrize("inference", [False, True])
def test_a_read_only_point_may_be_read_but_not_edited(inference):
    with torch.inference_mode(inference):
        x, seen = torch.tensor([[[1.0, float("nan"), float("-inf")]]]), []
        p = point(read_only=True)
        p.add_hook(lambda x, hook: seen.append(x.shape))
        p.add_hook(lambda x, hook: x)
        assert p(x) is x and seen
        for edit in (lambda x, hook: x + 1, lambda x, hook: x.add_(1)):
            p = point(read_only=True)
            p.add_hook(edit)
            with pytest.raises(ValueError, match=r"blocks\.1\.hook_x.*read-only"):
                p(x.clone())


def test_the_position_axis_is_read_from_the_shape():
    dims = {
        "batch pos d_model": 1,
        "batch pos head d_head": 1,
        "batch head query_pos key_pos": 2,
        "batch pos source": 1,
        "batch source": None,
    }
    for shape, dim in dims.items():
        assert HookPoint(shape=shape, meaning="x").pos_dim == dim
    for shape, meaning in (("", "x"), ("pos d", "x"), ("batch pos", "")):
        with pytest.raises(ValueError, match="starts with 'batch'"):
            HookPoint(shape=shape, meaning=meaning)


def test_a_point_of_a_subclass_stays_one():
    class Own(HookPoint):
        mine = True

    p = Own(shape="batch pos", meaning="a test")
    for _ in range(2):
        p.add_tap(p.check_result)
        assert isinstance(p, Own) and p.active and p.mine and type(p).__name__ == "Own"
        p.remove_tap(p._taps[0])
        assert type(p) is Own and not p.active


def test_a_copy_has_its_own_hooks():
    model, tokens = Toy(), tokens_of(0)
    seen = []
    model.add_hook("hook_embed", lambda x, hook: seen.append("first"))
    twin = copy.deepcopy(model)
    model.reset_hooks()
    assert twin.hook_dict["hook_embed"].active and not model.hook_dict["hook_embed"].active
    assert twin.hook_dict["hook_embed"] is twin.hook_embed is twin._modules["hook_embed"] is not model.hook_embed
    twin(tokens)
    assert seen == ["first"]
    twin.reset_hooks()
    assert not twin.hook_dict["hook_embed"].active and twin.list_hooks() == {}


def test_a_model_is_freed_without_the_garbage_collector_once_its_hooks_are_gone():
    gc.collect()
    gc.disable()
    try:
        p = point()
        p.add_hook(lambda x, hook: None)
        p.register_forward_hook(lambda module, args, output: None).remove()
        p.remove_hooks("both", including_permanent=True)
        gone = weakref.ref(p)
        del p
        assert gone() is None
    finally:
        gc.enable()

"""T15: a hook attached to a compiled model fires, or an error says why it cannot; it is never silent."""

from __future__ import annotations

import pytest
import torch

from tests.hooks.toy import Toy, tokens_of
from tests.systems import random_tokens, tiny

pytestmark = [
    pytest.mark.slow,
    # torch's own bookkeeping while it compiles
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model, how: str, fullgraph: bool):
    if how == "wrapped":
        return torch.compile(model, backend="eager", fullgraph=fullgraph)
    if how == "in place":
        model.compile(backend="eager", fullgraph=fullgraph)
    else:
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=fullgraph)
    return model


class Watch:
    def __init__(self):
        self.seen: list[str] = []

    def look(self, x, hook):
        self.seen.append(hook.name)

    def edit(self, x, hook):
        self.seen.append(hook.name)
        return x * 0 + 1

    def taken(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


HOW = pytest.mark.parametrize("how", ["wrapped", "in place", "blocks"])


@HOW
@pytest.mark.parametrize("early", [False, True])
def test_hooks_fire_whenever_they_are_attached(how, early):
    model, tokens, watch = Toy(), tokens_of(0), Watch()
    with torch.no_grad():
        plain = model(tokens)
        edited = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_out", watch.edit)])
        watch.taken()
        if early:
            model.add_hook("blocks.1.hook_out", watch.look)
        fast = compiled(model, how, fullgraph=False)
        for _ in range(2):
            torch.testing.assert_close(fast(tokens), plain)
            assert watch.taken() == ["blocks.1.hook_out"] * early
        model.reset_hooks()
        torch.testing.assert_close(fast(tokens), plain)
        assert watch.taken() == []
        for _ in range(3):  # again and again: what was compiled with one hook must not hide the next
            model.add_hook("blocks.1.hook_out", watch.look)
            fast(tokens)
            assert watch.taken() == ["blocks.1.hook_out"]
            model.add_hook("blocks.1.hook_out", watch.edit)
            torch.testing.assert_close(fast(tokens), edited)
            assert watch.taken() == ["blocks.1.hook_out"] * 2
            model.add_hook("blocks.*.hook_z", watch.look)
            fast(tokens)
            assert len(watch.taken()) == 5
            model.reset_hooks()
            torch.testing.assert_close(fast(tokens), plain)
            handle = model.blocks[0].hook_z.register_forward_hook(lambda *given: watch.seen.append("torch"))
            fast(tokens)
            assert watch.taken() == ["torch"]
            handle.remove()
            fast(tokens)
            assert watch.taken() == []


@HOW
def test_where_the_graph_must_be_whole_an_attached_hook_is_an_error_that_says_so(how):
    model, tokens, watch = Toy(), tokens_of(0), Watch()
    with torch.no_grad():
        plain = model(tokens)
        fast = compiled(model, how, fullgraph=True)
        torch.testing.assert_close(fast(tokens), plain)
        for attach in (
            lambda: model.add_hook("blocks.1.hook_out", watch.look),
            lambda: model.blocks[1].hook_out.register_forward_hook(lambda *given: None),
        ):
            attach()
            with pytest.raises(Exception, match="hook is attached to a HookPoint; detach it, or compile without"):
                fast(tokens)
            model.blocks[1].hook_out._forward_hooks.clear()
            model.reset_hooks()
            torch.testing.assert_close(fast(tokens), plain)
    assert watch.seen == []


@HOW
@pytest.mark.parametrize("fullgraph", [False, True])
def test_cached_and_hooked_passes_run_as_if_nothing_were_compiled(how, fullgraph):
    model, tokens, watch = Toy(), tokens_of(0), Watch()
    with torch.no_grad():
        _, expected = model.run_with_cache(tokens)
        fast = compiled(model, how, fullgraph)
        fast(tokens)
        for _ in range(2):
            _, cache = fast.run_with_cache(tokens)
            assert set(cache) == set(model.hook_dict)
            assert all(torch.equal(cache[name], expected[name]) for name in expected)
        fast.run_with_hooks(tokens, fwd_hooks=[("*hook_gate", watch.look)])
        assert len(watch.taken()) == 3


def test_a_hook_that_makes_the_model_take_another_path_does_so_when_compiled():
    """The real attention computes its pattern only when someone looks at it."""
    model, tokens, watch = tiny("attnres-full", dtype=torch.float32), random_tokens(3), Watch()
    names = ["blocks.1.attn.hook_pattern", "blocks.2.hook_depth_attn_mlp"]
    with torch.no_grad():
        plain = model(tokens)
        fast = torch.compile(model, backend="eager")
        torch.testing.assert_close(fast(tokens), plain)
        model.add_hook(names, watch.look)
        torch.testing.assert_close(fast(tokens), plain)
        assert watch.taken() == names
        model.add_hook(names[1], watch.edit)
        assert (fast(tokens) - plain).abs().max() > 1e-3
        assert watch.taken() == [names[0], names[1], names[1]]
        model.reset_hooks()
        torch.testing.assert_close(fast(tokens), plain)
        assert watch.taken() == []

"""Captures in memory: the right tensors, reduced as told, no more of the pass than needed, sizes known beforehand."""

import random

import pytest
import torch

import t2lens
from t2lens.store import capture_size
from t2lens.store.wants import read_wants
from tests.systems import SYSTEMS, random_tokens, tiny


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_kept_is_what_a_cached_run_holds(system: str) -> None:
    seed = random.randrange(1000)
    model, tokens = tiny(system, seed=seed), random_tokens(seed)
    mask = torch.ones_like(tokens)
    mask[0, -1] = 0
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    kept = t2lens.capture(model, tokens, ["*"], attention_mask=mask, batch_size=2)
    assert set(kept) == set(cache.keys())
    for name in kept:
        where = mask.bool() if "query_pos" not in model.hook_dict[name].shape else slice(None)
        assert torch.allclose(kept[name][where], cache[name][where], atol=1e-10), (seed, name)
    size = capture_size(model, ["*"], *tokens.shape)
    assert size.n_bytes == sum(kept[name].numel() * kept[name].itemsize for name in kept)


def test_roles_mean_the_systems_own_numbers() -> None:
    keys = [want.key for want in read_wants(tiny("ddl"), ["gates", "residual norms"])]
    assert "blocks.1.ddl_mlp.hook_beta" in keys
    assert "hook_read_final|norm" in keys
    assert not any("hook_dir" in key or "resid" in key for key in keys)
    with pytest.raises(KeyError, match="has no depth weights to capture"):
        read_wants(tiny("standard"), "depth weights")


def test_reducers_act_in_order_inside_the_hook() -> None:
    model, tokens = tiny("attnres-full", seed=3), torch.randint(50, (3, 9))
    names, way = "blocks.2.attn.hook_pattern", torch.randn(4, 16, dtype=torch.float64)
    what = [f"{names}|mean:head|top:2", "hook_read_final|norm", "hook_embed|pos:-2:", "hook_embed|project:two"]
    kept = t2lens.capture(model, tokens, what, directions={"two": way}, batch_size=1)
    _, cache = model.run_with_cache(tokens)
    mean = cache[names].mean(dim=1)
    assert torch.allclose(kept[f"{names}|mean:head|top:2"], mean.topk(2).values)
    assert torch.equal(kept[f"{names}|mean:head|top:2|index"], mean.topk(2).indices.int())
    assert torch.allclose(kept["hook_read_final|norm"], cache["hook_read_final"].norm(dim=-1))
    assert torch.equal(kept["hook_embed|pos:-2:"], cache["hook_embed"][:, -2:])
    assert torch.allclose(kept["hook_embed|project:two"], cache["hook_embed"] @ way.T)


def test_blocks_that_nothing_wanted_comes_from_do_not_run() -> None:
    model, ran = tiny("attnres-block", seed=1), []
    with model.hooks([(f"blocks.{i}.hook_mlp_out", lambda _, hook: ran.append(hook.name)) for i in range(3)]):
        t2lens.capture(model, [[1, 2, 3]], "blocks.0.hook_depth_attn_mlp")
    assert set(ran) == {"blocks.0.hook_mlp_out"}


def test_edits_are_seen_and_nothing_is_left_behind() -> None:
    model, tokens = tiny("attnres-full"), [[1, 2, 3]]
    with model.hooks([("hook_embed", lambda x, hook: x * 0)]):
        kept = t2lens.capture(model, tokens, "hook_embed")
    assert not kept["hook_embed"].any()
    with pytest.raises(RuntimeError), model.hooks([("hook_embed", lambda x, hook: 1 / 0)]):
        try:
            t2lens.capture(model, tokens, "hook_embed")
        except ZeroDivisionError as error:
            raise RuntimeError from error
    assert not any(point.active for point in model.hook_dict.values())


def test_a_small_part_does_not_keep_the_whole_in_memory() -> None:
    kept = t2lens.capture(tiny("standard"), torch.randint(50, (4, 12)), "hook_embed|pos:0:1", batch_size=4)
    one = kept["hook_embed|pos:0:1"]
    assert one.untyped_storage().nbytes() == one.numel() * one.itemsize


def test_what_cannot_fit_is_refused_with_its_size_before_anything_runs() -> None:
    model = tiny("attnres-full")
    with pytest.raises(MemoryError, match=r"would hold \d\.\d+ kB, and 10 bytes are allowed.*largest tensor is"):
        t2lens.capture(model, torch.randint(50, (2, 5)), "atoms", limit=10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kept_dtype_is_chosen(dtype: torch.dtype) -> None:
    kept = t2lens.capture(tiny("ddl", dtype=torch.float32), [[1, 2, 3]], ["gates", "residual norms"], dtype=dtype)
    assert {x.dtype for x in kept.values()} == {dtype}
    assert all(x.isfinite().all() for x in kept.values())


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ([], "Nothing to capture was named"),
        ("hook_embed|mean:haed", "needs one of the axes pos, d_model"),
        ("hook_embed|top:0", "whole number K above 0"),
        ("hook_embed|top:2|norm", "come last"),
        ("hook_embed|norm|norm", "needs an axis behind"),
        ("hook_embed|pos:1", "must be pos:START:STOP"),
        ("hook_embed|project:x", "directions that were not given"),
        ("hook_embed|median", "is not known"),
    ],
)
def test_bad_wants_are_one_sentence(what: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        t2lens.capture(tiny("standard"), [[1, 2]], what)  # type: ignore[arg-type]


def test_a_name_that_means_nothing_lists_the_nearest() -> None:
    with pytest.raises(KeyError, match="hook_embed"):
        t2lens.capture(tiny("standard"), [[1, 2]], "hook_embd")

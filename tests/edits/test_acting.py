"""What edits do: each against a computation of its own, and the invariants over all systems."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import t2lens
from t2lens.config import Attention
from t2lens.edits import Edit, edited
from t2lens.edits.places import gates_at
from t2lens.sublayers import DecodingCache
from tests.edits.make import edits_of
from tests.systems import SYSTEMS, random_tokens, tiny

WEIGHED = [s for s in SYSTEMS if any(name.endswith("hook_depth_attn_final") for name in tiny(s).hook_dict)]


def run(model: Any, edits: Any, tokens: Any, mask: Any = None) -> Tensor:
    with torch.no_grad(), edited(model, edits):
        return model(tokens, mask)


def cached(model: Any, edits: Any, tokens: Any, mask: Any = None) -> Any:
    with torch.no_grad(), edited(model, edits):
        return model.run_with_cache(tokens, mask)[1]


def edit(target: str, operation: str, site: str = "", **rest: Any) -> Edit:
    return Edit(target=target, operation=operation, site=site, **rest)


# --- on every system


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_number_of_the_residual_system_has_an_edit_that_reaches_it(system: str) -> None:
    model = tiny(system)
    found = {point.name for site in model.sites for point in gates_at(model, site).values()}
    own = ("hook_resid_", "hook_streams_", "hook_depth_attn_", "hook_depth_scores_")
    assert found == {name for name in model.residual.hook_points if not any(stem in name for stem in own)}


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_edits_are_the_plain_pass_bit_for_bit(system: str) -> None:
    model, tokens = tiny(system, 3), random_tokens(3)
    with torch.no_grad():
        plain = model(tokens)
    assert torch.equal(run(model, [], tokens), plain)
    edits = list(edits_of(model, random.Random(3)).values())
    assert not torch.equal(run(model, edits, tokens), plain)
    with torch.no_grad():
        assert torch.equal(model(tokens), plain)  # and afterwards nothing is left


@pytest.mark.parametrize("system", SYSTEMS)
def test_padding_changes_nothing_under_edits(system: str) -> None:
    seed = random.randrange(1000)
    dice, model = random.Random(seed), tiny(system, seed, local=True)
    tokens = random_tokens(seed)[:1]
    n = tokens.shape[1]
    wider = torch.cat([torch.full((1, 2), 7), tokens, torch.full((1, 3), 9)], dim=1)
    mask = torch.cat([torch.zeros(1, 2), torch.ones(1, n), torch.zeros(1, 3)], dim=1).bool()
    edits = list(edits_of(model, dice, positions=dice.sample(range(-n, n), 2)).values())
    for each in (dice.choice(edits), edits):
        difference = (run(model, each, wider, mask)[:, 2:-3] - run(model, each, tokens)).abs().max()
        assert difference < 1e-10, (seed, each)


@pytest.mark.parametrize("system", SYSTEMS)
def test_decoding_equals_the_whole_pass_under_edits(system: str) -> None:
    seed = random.randrange(1000)
    dice, model = random.Random(seed), tiny(system, seed, local=True)
    tokens = random_tokens(seed)
    n = tokens.shape[1]
    edits = list(edits_of(model, dice, positions=dice.sample(range(n), 2)).values())
    for each in (dice.choice(edits), edits):
        whole, cache = run(model, each, tokens), DecodingCache()
        with torch.no_grad(), edited(model, each):
            steps = [
                model(tokens[:, :2], cache=cache),
                *(model(tokens[:, i : i + 1], cache=cache) for i in range(2, n)),
            ]
        assert (torch.cat(steps, dim=1) - whole).abs().max() < 1e-10, (seed, each)


@pytest.mark.parametrize("system", SYSTEMS)
def test_only_the_positions_asked_for_are_edited(system: str) -> None:
    seed = random.randrange(1000)
    dice, model = random.Random(seed), tiny(system, seed)
    tokens = random_tokens(seed)
    at = dice.randrange(1, tokens.shape[1])
    with torch.no_grad():
        plain = model(tokens)
    edits = list(edits_of(model, dice, positions=[at]).values())
    difference = (run(model, edits, tokens) - plain)[:, :at]  # an edited pattern is computed in another order
    assert difference.abs().max() < 1e-10, (seed, edits)


@pytest.mark.parametrize("system", SYSTEMS)
def test_half_precision_stays_finite(system: str) -> None:
    dtype = random.choice([torch.bfloat16, torch.float16])
    model, tokens = tiny(system, 2, dtype=dtype), random_tokens(2)
    logits = run(model, edits_of(model, random.Random(2), positions=[0, -1]).values(), tokens)
    assert logits.dtype == dtype and bool(logits.isfinite().all())


# --- depth weights


@pytest.mark.parametrize("system", WEIGHED)
def test_one_weight_of_one_makes_the_read_that_source(system: str) -> None:
    dice, model, tokens = random.Random(4), tiny(system, 4), random_tokens(4)
    read = dice.choice([r for r in model.reads if r.site.hook("depth_attn", r.way) in model.hook_dict])
    names = model.sources()[read.name]
    site, way = read.site.name, read.way or None
    k = dice.randrange(len(names))
    cache = cached(model, edit("depth_weight", "one", site, way=way, sources=[names[k]]), tokens)
    weights = cache[read.site.hook("depth_attn", read.way)]
    assert torch.equal(weights, torch.eye(len(names)).double()[k].expand_as(weights))
    if system.startswith(("hyper", "mhc", "deepseek")) and read.site.kind != "out":
        where = "mid" if read.site.kind == "mlp" else "pre"
        streams = cache[f"blocks.{read.site.layer}.hook_streams_{where}"]
        assert torch.equal(cache[read.site.hook("read")], streams[..., k, :])
    if system in ("attnres-full", "attnres-window", "attnres-delta"):
        name = "hook_embed" if names[k] == "embed" else "blocks.{}.hook_{}_out".format(*names[k].split("."))
        assert torch.equal(cache[read.site.hook("read")], cache[name])


@pytest.mark.parametrize("seed", range(5))
def test_zero_and_renormalise_is_the_softmax_over_the_rest(seed: int) -> None:
    model, tokens = tiny("attnres-full", seed), random_tokens(seed)
    names = model.sources()["2.mlp"]
    gone = random.Random(seed).sample(range(len(names)), 2)

    def mask(scores: Tensor, *, hook: Any) -> Tensor:
        scores = scores.clone()
        scores[..., gone] = -torch.inf
        return scores

    with torch.no_grad():
        expected = model.run_with_hooks(tokens, fwd_hooks=[("blocks.2.hook_depth_scores_mlp", mask)])
    one = edit("depth_weight", "zero_renormalise", "2.mlp", sources=[names[i] for i in gone])
    assert (run(model, one, tokens) - expected).abs().max() < 1e-10


def test_rows_of_weights_can_be_forced_swapped_frozen_and_scaled() -> None:
    model, tokens = tiny("attnres-full", 6), random_tokens(6)
    mask = torch.ones_like(tokens).bool()
    mask[0, -2:] = False
    name, names = "blocks.1.hook_depth_attn_mlp", model.sources()["1.mlp"]
    plain = cached(model, [], tokens, mask)[name]

    def weights(operation: str, **rest: Any) -> Tensor:
        seen = cached(model, edit("depth_weight", operation, "1.mlp", **rest), tokens, mask)[name]
        assert torch.equal(seen[~mask], plain[~mask])
        return seen[mask]

    row = [0.1, 0.2, 0.3, 0.4]
    assert torch.equal(weights("set", value=row), torch.tensor(row, dtype=torch.float64).expand(int(mask.sum()), 4))
    assert torch.equal(
        weights("set", value=0.7, sources=[names[2]])[:, 2].unique(), torch.tensor([0.7], dtype=torch.float64)
    )
    assert torch.equal(weights("swap", sources=["embed", names[3]]), plain[mask][:, [3, 1, 2, 0]])
    assert torch.equal(weights("scale", value=[2, 3], sources=[names[1], "embed"])[:, 1], 2 * plain[mask][:, 1])
    mean = plain[mask].mean(dim=0)
    assert (weights("freeze_mean") - mean).abs().max() < 1e-12
    only = weights("freeze_mean", sources=["embed"])
    assert (only[:, 0] - mean[0]).abs().max() < 1e-12 and torch.equal(only[:, 1:], plain[mask][:, 1:])


def test_edits_act_in_the_order_of_the_list_at_one_place() -> None:
    model, tokens = tiny("attnres-full", 1), random_tokens(1)
    fixed = edit("depth_weight", "set", "out", value=0.5)
    double = edit("depth_weight", "scale", "out", value=2)
    name = "hook_depth_attn_final"
    assert cached(model, [fixed, double], tokens)[name].unique().tolist() == [1.0]
    assert cached(model, [double, fixed], tokens)[name].unique().tolist() == [0.5]
    with edited(model, fixed):
        assert cached(model, double, tokens)[name].unique().tolist() == [1.0]


def test_edits_at_different_places_do_not_depend_on_their_order() -> None:
    model, tokens = tiny("ddl", 1), random_tokens(1)
    edits = list(edits_of(model, random.Random(1)).values())
    assert torch.equal(run(model, edits, tokens), run(model, edits[::-1], tokens))


# --- gates, atoms, streams, reads


@pytest.mark.parametrize("system", [s for s in SYSTEMS if s.startswith("ddl")])
def test_beta_at_zero_everywhere_leaves_the_embedding(system: str) -> None:
    model, tokens = tiny(system, 2), random_tokens(2)
    off = edit("gate", "set", "*", name="beta", value=0)
    cache = cached(model, off, tokens)
    if not model.residual.expanded:
        assert torch.equal(cache["hook_read_final"], cache["hook_embed"])
    with torch.no_grad(), edited(model, off):
        mixing = t2lens.mixing_matrix(model, tokens)
    assert mixing[..., 1:].abs().max() == 0


def test_the_write_only_control_erases_nothing() -> None:
    model, tokens = tiny("ddl-cc", 3), random_tokens(3)
    control = tiny("standard", residual=replace(model.cfg.residual, edit="write_only"))
    control.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = control(tokens)
    assert (run(model, edit("gate", "zero", "*", name="proj"), tokens) - expected).abs().max() < 1e-10


def test_a_gate_of_channels_and_a_matrix_of_streams_take_values_of_their_shape() -> None:
    model, tokens = tiny("highway", 1), random_tokens(1)
    gate = [i / 20 for i in range(16)]
    seen = cached(model, edit("gate", "set", "1.mlp", value=gate), tokens)["blocks.1.hook_transform_mlp"]
    assert torch.equal(seen[0, 0], torch.tensor(gate, dtype=torch.float64))
    model = tiny("hyper-connections", 1)
    swap = [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    cache = cached(model, edit("gate", "set", "1.attn", name="res", value=swap), tokens)
    assert torch.equal(cache["blocks.1.hc_attn.hook_res"][0, 0], torch.tensor(swap).double())
    cache = cached(model, edit("gate", "zero", "1.attn", name="post", sources=["stream1"]), tokens)
    before, after = cache["blocks.1.hook_streams_pre"], cache["blocks.1.hook_streams_mid"]
    res = cache["blocks.1.hc_attn.hook_res"]
    assert (after - res @ before)[..., 1, :].abs().max() < 1e-12  # nothing was written there
    assert (after - res @ before)[..., 0, :].abs().max() > 1e-3


@pytest.mark.parametrize("site", ["0.attn", "1.attn", "1.mlp", "out"])
def test_a_stream_is_edited_before_anything_is_made_of_it(site: str) -> None:
    """A stream without content at a site is as if nothing had been written to it before."""
    model, tokens = tiny("hyper-connections", 4), random_tokens(4)
    cache = cached(model, edit("stream", "zero", site, sources=["stream0", "stream1", "stream2"]), tokens)
    assert cache[model.sites[[s.name for s in model.sites].index(site)].hook("read")].abs().max() == 0
    one = cached(model, edit("stream", "add", site, sources=["stream2"], value=1.5), tokens)
    name = {"0.attn": "blocks.0.hook_streams_pre", "1.attn": "blocks.0.hook_streams_post"}.get(site)
    name = name or {"1.mlp": "blocks.1.hook_streams_mid", "out": "blocks.2.hook_streams_post"}[site]
    plain = cached(model, [], tokens)[name]
    assert torch.equal(one[name][..., 2, :], plain[..., 2, :] + 1.5) and torch.equal(
        one[name][..., 0, :], plain[..., 0, :]
    )


def test_the_plain_sum_changes_nothing_where_that_is_what_is_read() -> None:
    model, tokens = tiny("standard", 5, local=True), random_tokens(5)
    with torch.no_grad():
        plain = model(tokens)
    assert torch.equal(run(model, edit("read", "plain_sum", "*"), tokens), plain)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_plain_sum_is_of_all_atoms_written_before(system: str) -> None:
    model, tokens = tiny(system, 6, local=random.random() < 0.5), random_tokens(6)
    site = random.choice(model.sites)
    with torch.no_grad(), edited(model, edit("read", "plain_sum", site.name)):
        record = model.record(tokens)
    total = torch.stack(record.atoms[: site.seen + 1]).sum(dim=0)
    told = " ".join(edit("read", "plain_sum", site.name).check(model))
    for way in model.residual.ways(site):
        name = f"{site.name}.{way}" if way else site.name
        assert (record.reads[name] - total).abs().max() < 1e-12 or f"{name} passes no hook point" in told, name


def test_atoms_are_steered_and_ablated() -> None:
    model, tokens = tiny("denseformer", 7), random_tokens(7)
    direction = torch.randn(16, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    with torch.no_grad():
        for value, hook in ((None, lambda x, hook: x * 0), (direction, lambda x, hook: x + direction)):
            operation = "zero" if value is None else "add"
            expected = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_mlp_out", hook)])
            assert torch.equal(run(model, edit("atom", operation, "1.mlp", value=value), tokens), expected)


# --- heads and patterns


def test_a_head_without_content_writes_what_the_others_write() -> None:
    model, tokens = tiny("standard", 8), random_tokens(8)
    cache = cached(model, edit("head", "zero", "1.attn", heads=[1]), tokens)
    attn = model.blocks[1].attn
    with torch.no_grad():
        rest = cache["blocks.1.attn.hook_z"][..., 0, :] @ attn.W_O[0] + attn.b_O
    assert (cache["blocks.1.hook_attn_out"] - rest).abs().max() < 1e-12
    assert cache["blocks.1.attn.hook_z"][..., 0, :].abs().max() > 0


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_narrower_window_is_that_of_a_model_made_with_it(k: int) -> None:
    model, tokens = tiny("attnres-full", 9, local=True), torch.randint(50, (2, 9))
    narrow = tiny("attnres-full", 9, local=True)
    for block in narrow.blocks:
        block.local.cfg = replace(block.local.cfg, window=k)
    mask = torch.ones_like(tokens).bool()
    mask[0, :3] = False
    with torch.no_grad():
        expected = narrow(tokens, mask)
    seen = run(model, edit("pattern", "window", "*.local", value=k), tokens, mask)
    assert (seen - expected)[mask].abs().max() < 1e-10


def test_keys_are_taken_from_queries() -> None:
    model, tokens = tiny("standard", 10), torch.randint(50, (2, 7))
    mask = torch.ones_like(tokens).bool()
    mask[1, :2] = False  # so that key 1 of the second row stands in column 3
    name = "blocks.1.attn.hook_pattern"
    plain = cached(model, [], tokens, mask)[name]

    def pattern(operation: str, **rest: Any) -> Tensor:
        return cached(model, edit("pattern", operation, "1.attn", heads=[0], **rest), tokens, mask)[name]

    gone = pattern("zero", keys=[1], positions=[4])
    expected = plain.clone()
    expected[0, 0, 4, 1] = 0
    expected[1, 0, 6, 3] = 0
    assert torch.equal(gone, expected)
    total = pattern("zero_renormalise", keys=[1])[:, 0].sum(dim=-1)
    assert (total[mask] - 1).abs().max() < 1e-12
    alone = pattern("one", keys=[1])
    assert torch.equal(alone[0, 0, 1:], torch.eye(7).double()[1].expand(6, 7)) and torch.equal(
        alone[0, 0, 0], plain[0, 0, 0]
    )
    assert torch.equal(alone[:, 1], plain[:, 1])
    halved = pattern("scale", value=0.5)
    assert torch.equal(halved[:, 0][mask], plain[:, 0][mask] * 0.5)


def test_a_window_of_a_bidirectional_model_looks_both_ways() -> None:
    attention = Attention(n_heads=2, n_kv_heads=1, d_head=8, causal=False)
    model, tokens = tiny("standard", 11, attention=attention), torch.randint(50, (1, 6))
    seen = cached(model, edit("pattern", "window", "1.attn", value=2), tokens)["blocks.1.attn.hook_pattern"]
    far = (torch.arange(6)[:, None] - torch.arange(6)).abs() >= 2
    assert seen[..., far].abs().max() == 0 and (seen.sum(-1) - 1).abs().max() < 1e-12 and seen[0, 0, 0, 1] > 0


# --- patches


@pytest.mark.parametrize("system", ["standard", "attnres-full", "ddl-cc", "muddformer", "mhc"])
def test_a_patch_of_everything_gives_the_other_prompt(system: str) -> None:
    model, dice = tiny(system, 12), random.Random(12)
    tokens = torch.randint(50, (1, 6), generator=torch.Generator().manual_seed(1))
    other = [dice.randrange(50) for _ in range(6)]
    with torch.no_grad():
        expected = model([other])
    assert (run(model, edit("atom", "patch", "embed", prompt=other), tokens) - expected).abs().max() < 1e-10
    both = run(model, edit("read", "patch", "out", prompt=other, positions=[1, -1], prompt_positions=[4, 0]), tokens)
    with torch.no_grad():
        plain = model(tokens)
    assert (both[0, [1, 5]] - expected[0, [4, 0]]).abs().max() < 1e-10
    assert torch.equal(both[0, [0, 2, 3, 4]], plain[0, [0, 2, 3, 4]])


def test_a_patch_takes_some_sources_and_the_mean_of_a_prompt_is_over_its_positions() -> None:
    model, tokens = tiny("attnres-full", 13), random_tokens(13)
    prompt = [3, 1, 4, 1, 5]
    name = "blocks.2.hook_depth_attn_attn"
    there, plain = cached(model, [], [prompt])[name][0], cached(model, [], tokens)[name]
    some = edit(
        "depth_weight", "patch", "2.attn", sources=["0.mlp"], positions=[1], prompt_positions=[-2], prompt=prompt
    )
    seen = cached(model, some, tokens)[name]
    k = model.sources()["2.attn"].index("0.mlp")
    expected = plain.clone()
    expected[:, 1, k] = there[-2, k]
    assert torch.equal(seen, expected)
    mean = cached(model, edit("depth_weight", "freeze_mean", "2.attn", prompt=prompt), tokens)[name]
    assert (mean - there.mean(dim=0)).abs().max() < 1e-12


def test_the_prompt_of_a_patch_runs_without_the_edits() -> None:
    model, tokens = tiny("standard", 14), random_tokens(14)[:1]
    ids = tokens[0].tolist()
    edits = [edit("atom", "zero", "0.mlp"), edit("atom", "patch", "0.mlp", prompt=ids)]
    with torch.no_grad():
        assert (run(model, edits, tokens) - model(tokens)).abs().max() < 1e-12


# --- the block


def test_gradients_pass_through_edits() -> None:
    model, tokens = tiny("attnres-full", 15), random_tokens(15)
    with edited(model, list(edits_of(model, random.Random(15)).values())):
        loss = model(tokens, return_type="loss")
    grads = torch.autograd.grad(loss, [model.embed.weight, model.residual.query])
    assert all(bool(grad.isfinite().all()) and grad.abs().max() > 0 for grad in grads)


def test_a_resumed_pass_is_edited_where_it_runs() -> None:
    model, tokens = tiny("attnres-full", 16), random_tokens(16)
    later = edit("depth_weight", "one", "2.mlp", sources=["embed"])
    with torch.no_grad():
        record = model.record(tokens)
        with edited(model, later):
            again = model.resume(record, 2)
        assert (again - run(model, later, tokens)).abs().max() < 1e-10
        with edited(model, edit("read", "plain_sum", "2.mlp")), pytest.raises(ValueError, match="resumed pass"):
            model.resume(record, 2)


def test_text_is_generated_under_edits() -> None:
    model = tiny("ddl", 17)
    edits = [edit("gate", "set", "1.mlp", name="beta", value=2), edit("atom", "zero", "0.attn", positions=[1])]
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with edited(model, edits):
        quick = model.generate(prompt, 6, temperature=0)
        slow = model.generate(prompt, 6, temperature=0, use_cache=False)
    assert torch.equal(quick, slow)


@pytest.mark.parametrize("where", ["inside", "in the pass", "before"])
def test_nothing_is_left_after_an_error(where: str) -> None:
    model, tokens = tiny("attnres-full", 18), random_tokens(18)
    with torch.no_grad():
        plain = model(tokens)
    edits = [edit("depth_weight", "one", "2.mlp", sources=["embed"]), edit("atom", "zero", "0.mlp", positions=[20])]
    with pytest.raises((ValueError, RuntimeError, KeyError)):  # noqa: SIM117
        with edited(model, [*edits[:1], edit("atom", "zero", "9.mlp")] if where == "before" else edits):
            if where == "inside":
                raise RuntimeError("inside")
            model(tokens)
    assert not [name for name, point in model.hook_dict.items() if point.active] and model._live is None
    with torch.no_grad():
        assert torch.equal(model(tokens), plain)


def test_hooks_that_were_there_stay() -> None:
    model, tokens, seen = tiny("standard", 19), random_tokens(19), []
    name = "blocks.1.hook_mlp_out"
    with model.hooks([(name, lambda x, hook: seen.append(x))]):
        run(model, edit("atom", "zero", "1.mlp"), tokens)
        with torch.no_grad():
            model(tokens)
    assert len(seen) == 2 and torch.equal(seen[0], seen[1])  # it saw the atom before the edit, and then without it

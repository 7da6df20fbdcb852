"""What the gallery says holds of plain forward passes: weights, logits, and runs with a tensor changed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from t2lens.zoo.known_truths import (
    GALLERY,
    KnownTruth,
    cancelling_paths,
    erasing_gate,
    idle_route,
    planted_path,
    quiet_route,
    selective_read,
    single_carrier,
    stream_copy,
    write_only_gate,
)

SEEDS = pytest.mark.parametrize("seed", range(5))
LIMIT = 1e-10


def is_one_of(tokens: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return torch.isin(tokens, torch.tensor(ids))


def site_of(truth: KnownTruth, name: str) -> Any:
    return next(site for site in truth.model.sites if site.name == name)


def index_of(truth: KnownTruth, read: str, source: str) -> int:
    return truth.model.sources()[read].index(source)


def without_route(truth: KnownTruth, read: str, source: str, *, renormalise: bool) -> torch.Tensor:
    def drop(weights: torch.Tensor, hook: Any) -> torch.Tensor:
        weights = weights.clone()
        weights[..., index_of(truth, read, source)] = 0
        return weights / weights.sum(-1, keepdim=True) if renormalise else weights

    where = site_of(truth, read).hook("depth_attn")
    return truth.model.run_with_hooks(truth.tokens, fwd_hooks=[(where, drop)])


def without_atom(truth: KnownTruth, name: str) -> torch.Tensor:
    layer, kind = name.split(".")
    where = f"blocks.{layer}.hook_{kind}_out"
    return truth.model.run_with_hooks(truth.tokens, fwd_hooks=[(where, lambda x, hook: x * 0)])


@pytest.mark.parametrize("name", GALLERY)
def test_sizes_and_parts_come_from_the_seed_and_prompts_can_be_drawn(name):
    made = [GALLERY[name](seed) for seed in range(5)]
    assert len({(k.model.cfg.d_model, k.model.cfg.n_layers, k.model.cfg.d_vocab) for k in made}) >= 4
    assert len({k.model.cfg.attention for k in made}) >= 3
    again = GALLERY[name](3)
    for p, q in zip(again.model.parameters(), made[3].model.parameters(), strict=True):
        assert torch.equal(p, q) and p.dtype == torch.float64
    assert torch.equal(again.tokens, made[3].tokens)
    assert torch.equal(again.draw(5), made[3].draw(5)) and again.draw(5).tolist() != again.draw(6).tolist()
    assert again.model(again.draw(5)).isfinite().all()
    written = again.model.record(again.tokens).atoms
    assert all(
        bool((atom != 0).any(dim=-1).all()) or ".attn" in site
        for atom, site in zip(written, again.model.atoms, strict=True)
    )


@SEEDS
@pytest.mark.parametrize("prompt", [None, 1])
def test_a_class_of_tokens_reads_exactly_one_sublayer(seed, prompt):
    k = selective_read(seed)
    tokens, t = k.tokens if prompt is None else k.draw(prompt), k.truth
    logits, cache = k.model.run_with_cache(tokens)
    weights = cache[site_of(k, t["read"]).hook("depth_attn")]
    for name, ids in t["classes"].items():
        here = is_one_of(tokens, ids)
        assert here.any()
        seen = weights[here][:, index_of(k, t["read"], t["sources"][name])]
        assert (seen > t["least_weight"]).all()
        assert (logits[here].argmax(-1) == t["answers"][name]).all()
    assert t["sources"]["A"] != t["sources"]["B"]


@SEEDS
def test_a_class_that_loses_its_route_loses_its_answer_and_the_other_does_not(seed):
    k = selective_read(seed)
    t = k.truth
    plain = k.model(k.tokens)
    for name, other in (("A", "B"), ("B", "A")):
        edited = without_route(k, t["read"], t["sources"][name], renormalise=True)
        own, rest = (is_one_of(k.tokens, t["classes"][c]) for c in (name, other))
        answer = t["answers"][name]
        assert (plain - edited)[own][:, answer].min() > 1.0
        assert (plain - edited)[rest].abs().max() < 1e-2


@SEEDS
def test_a_route_with_most_of_the_mass_changes_nothing(seed):
    k = idle_route(seed)
    t = k.truth
    logits, cache = k.model.run_with_cache(k.tokens)
    site = site_of(k, t["read"])
    weights = cache[site.hook("depth_attn")]
    assert (weights[..., index_of(k, t["read"], t["idle"])] - t["idle_mass"]).abs().max() < 1e-5
    assert (weights[..., index_of(k, t["read"], t["telling"])] - t["telling_mass"]).abs().max() < 1e-5
    assert t["idle_mass"] > 0.8 > 0.1 > t["telling_mass"]
    parts, labels = k.model.decompose(k.model.record(k.tokens), t["read"])
    size = dict(zip(labels, parts.norm(dim=-1).min(dim=-1).values.min(dim=-1).values, strict=True))
    assert size[t["idle"]] > 10 * size[t["telling"]]  # the vector is long as well
    for renormalise in (False, True):
        assert (without_route(k, t["read"], t["idle"], renormalise=renormalise) - logits).abs().max() < LIMIT
        lost = logits - without_route(k, t["read"], t["telling"], renormalise=renormalise)
        for name, ids in t["classes"].items():
            lost_here = lost[is_one_of(k.tokens, ids)][:, t["answers"][name]]
            assert (lost_here - t["effect"]).abs().max() < 1e-4
    for name, ids in t["classes"].items():
        assert (logits[is_one_of(k.tokens, ids)].argmax(-1) == t["answers"][name]).all()
    assert (without_atom(k, t["idle"]) - logits).abs().max() < LIMIT


@SEEDS
def test_a_quiet_route_carries_all_of_the_logit_and_its_gradient_says_so(seed):
    k = quiet_route(seed)
    t = k.truth
    plain = k.model(k.tokens)
    where = site_of(k, t["read"]).hook("depth_attn")
    kept: dict[str, torch.Tensor] = {}

    def watch(weights: torch.Tensor, hook: Any) -> torch.Tensor:
        kept["weights"] = weights.detach().requires_grad_()
        return kept["weights"]

    logits = k.model.run_with_hooks(k.tokens, fwd_hooks=[(where, watch)])
    way = torch.where(is_one_of(k.tokens, t["classes"]["plus"]), 1.0, -1.0)
    total = (logits[..., t["answers"]["plus"]] * way).sum()
    (grad,) = torch.autograd.grad(total, kept["weights"])
    product = (grad * kept["weights"]).detach()
    assert (product[..., index_of(k, t["read"], t["telling"])] - t["effect"]).abs().max() < LIMIT
    assert product[..., index_of(k, t["read"], t["idle"])].abs().max() < LIMIT
    lost = plain - without_route(k, t["read"], t["telling"], renormalise=False)
    assert ((lost[..., t["answers"]["plus"]] * way) - t["effect"]).abs().max() < LIMIT
    assert (without_route(k, t["read"], t["idle"], renormalise=False) - plain).abs().max() < LIMIT
    assert (without_route(k, t["read"], t["idle"], renormalise=True) - plain).abs().max() > 1.0


@SEEDS
def test_a_gate_erases_the_feature_and_its_write_only_twin_does_not(seed):
    delta, twin = erasing_gate(seed), write_only_gate(seed)
    for p, q in zip(delta.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(p, q)
    token = delta.truth["token"]
    for k in (delta, twin):
        t = k.truth
        logits, cache = k.model.run_with_cache(k.tokens)
        for site in k.model.sites[:-1]:
            gates = f"blocks.{site.layer}.ddl_{site.kind}.hook_"
            assert (cache[gates + "beta"] - t["beta"][site.name]).abs().max() < 1e-15
            assert (cache[gates + "value"] - t["value"][site.name]).abs().max() < 1e-12
        site = site_of(k, t["eraser"])
        along = cache[f"blocks.{site.layer}.ddl_{site.kind}.hook_dir"] @ t["direction"]
        assert (along.abs() - 1).abs().max() < 1e-9
        has = is_one_of(k.tokens, t["classes"]["with"])
        before = cache["hook_embed"] @ t["direction"]
        after = cache["hook_read_final"] @ t["direction"]
        assert before[has].min() > 0.9 and before[~has].abs().max() < LIMIT
        assert ((after - before).abs().max() < LIMIT) != t["erased"]
        if t["erased"]:
            assert after.abs().max() < 1e-8  # k_eps leaves 1e-10 of its length
            assert logits[..., token].abs().max() < 1e-8
            assert (cache["hook_read_final"] @ t["overwritten"] - t["value"][t["writer"]]).abs().max() < 1e-8
        else:
            assert (logits[has].argmax(-1) == token).all()
    assert (delta.truth["erased"], twin.truth["erased"]) == (True, False)


@SEEDS
def test_two_paths_cancel(seed):
    k = cancelling_paths(seed)
    t = k.truth
    logits = k.model(k.tokens)
    has = is_one_of(k.tokens, t["classes"]["with"])
    assert logits[..., t["token"]].abs().max() < LIMIT
    parts, labels = k.model.decompose(k.model.record(k.tokens))
    shares = dict(zip(labels, parts @ k.model.W_U[:, t["token"]], strict=True))
    for name, way in (("plus", 1), ("minus", -1)):
        assert (shares[t[name]][has] - way * t["share"]).abs().max() < LIMIT
        moved = without_atom(k, t[name]) - logits
        assert (moved[has][:, t["token"]] + way * t["share"]).abs().max() < LIMIT
        assert moved[~has].abs().max() < LIMIT
    assert all(share.abs().max() < LIMIT for name, share in shares.items() if name not in (t["plus"], t["minus"]))


def test_paths_cancel_in_several_systems():
    kinds = {cancelling_paths(seed).model.cfg.residual.kind for seed in range(12)}
    assert kinds == {"standard", "attnres", "denseformer", "hyper-connections"}
    assert {planted_path(seed).model.cfg.residual.kind for seed in range(12)} == kinds - {"hyper-connections"}


@SEEDS
@pytest.mark.parametrize("prompt", [None, 1])
def test_a_logit_comes_through_one_path_over_two_positions(seed, prompt):
    k = planted_path(seed)
    tokens, t = k.tokens if prompt is None else k.draw(prompt), k.truth
    logits, cache = k.model.run_with_cache(tokens)
    marked = is_one_of(tokens, t["markers"])
    after = marked.cumsum(1).bool()
    assert (marked.sum(1) == 1).all() and (after.sum(1) >= 3).all() and not after[:, 0].any()
    assert (logits[after][:, t["token"]] > t["least_logit"]).all()
    assert logits[~after][:, t["token"]].abs().max() < LIMIT
    pattern = cache[f"blocks.{t['path'][2].split('.')[0]}.attn.hook_pattern"]  # [B, H, T, S]
    for row in range(len(tokens)):
        at = int(marked[row].nonzero())
        assert (pattern[row, :, at:, at] - 1).abs().max() < LIMIT
    parts, labels = k.model.decompose(k.model.record(tokens))
    shares = k.model.logit_shares(parts, cache["hook_read_final"])[..., t["token"]]
    for name, share in zip(labels, shares, strict=True):
        expected = logits[..., t["token"]] if name == t["path"][-1] else 0
        assert (share - expected).abs().max() < LIMIT
    for name in t["path"][1:]:
        layer, kind = name.split(".")
        silent = [(f"blocks.{layer}.hook_{kind}_out", lambda x, hook: x * 0)]
        assert k.model.run_with_hooks(tokens, fwd_hooks=silent)[..., t["token"]].abs().max() < LIMIT
    others = [s.name for s in k.model.sites[:-1] if s.name not in t["path"] and s.kind == "attn"]
    for name in others:
        layer = name.split(".")[0]
        silent = [(f"blocks.{layer}.hook_attn_out", lambda x, hook: x * 0)]
        assert (k.model.run_with_hooks(tokens, fwd_hooks=silent)[after][:, t["token"]] > 1).all()


def with_streams(k: KnownTruth, change: Any) -> torch.Tensor:
    """Logits with `change` of the streams [B, T, n, D] wherever they pass a hook point."""

    def edit(streams: torch.Tensor, hook: Any) -> torch.Tensor:
        streams = streams.clone()
        change(streams)
        return streams

    return k.model.run_with_hooks(k.tokens, fwd_hooks=[("*hook_streams_*", edit)])


def silence(*streams: int) -> Any:
    def change(x: torch.Tensor) -> None:
        x[:, :, list(streams)] = 0

    return change


@SEEDS
@pytest.mark.parametrize("make", [stream_copy, single_carrier])
def test_streams_carry_copy_or_are_dead(seed, make):
    k = make(seed)
    t = k.truth
    carrier, copy, dead, token = t["carrier"], t["copy"], t["dead"], t["token"]
    logits, cache = k.model.run_with_cache(k.tokens)
    has = is_one_of(k.tokens, t["classes"]["with"])
    assert (logits[has].argmax(-1) == token).all() and logits[~has][:, token].abs().max() < LIMIT
    for layer in range(k.model.cfg.n_layers):
        streams = cache[f"blocks.{layer}.hook_streams_post"]
        assert torch.equal(streams[:, :, carrier], streams[:, :, copy])
        assert all(torch.equal(streams[:, :, i], cache["hook_embed"]) for i in dead)
    assert (with_streams(k, silence(*dead)) - logits).abs().max() < LIMIT
    assert (with_streams(k, silence(copy)) - logits).abs().max() < LIMIT
    assert with_streams(k, silence(carrier, copy))[..., token].abs().max() < LIMIT
    alone = with_streams(k, silence(carrier))
    if t["redundant"]:
        assert (alone - logits).abs().max() < LIMIT
    else:
        assert alone[..., token].abs().max() < LIMIT

    def replace(source: int) -> Any:
        def change(x: torch.Tensor) -> None:
            x[:, :, carrier] = x[:, :, source]

        return change

    assert (with_streams(k, replace(copy)) - logits).abs().max() < LIMIT
    if not t["redundant"]:  # the embedding alone says nothing of what was written
        last = f"blocks.{k.model.cfg.n_layers - 1}.hook_streams_post"
        swapped = k.model.run_with_hooks(
            k.tokens,
            fwd_hooks=[(last, lambda x, hook: x.index_copy(2, torch.tensor([carrier]), x[:, :, dead[:1]]))],
        )
        assert swapped[..., token].abs().max() < LIMIT

"""Every analysis on hand-wired models whose answer is known (`t2lens.zoo.known_truths`): it must find that answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.analysis import (
    ablate_families,
    ablate_streams,
    attribute_logits,
    attribute_loss,
    attribution_patching,
    audit_ddl,
    content_dependence,
    logit_lens,
    measure_effects,
    patch_activations,
    rollout,
    routing_advantage,
    top_paths,
)
from t2lens.analysis.families import family_of
from t2lens.zoo import known_truths
from t2lens.zoo.known_truths import KnownTruth

SEEDS = pytest.mark.parametrize("seed", range(3))
LIMIT = 1e-10


@cache
def made(name: str, seed: int) -> KnownTruth:
    return known_truths.GALLERY[name](seed)


def is_one_of(tokens: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return torch.isin(tokens, torch.tensor(ids))


def followed(k: KnownTruth, classes: dict[str, int], n: int = 4) -> torch.Tensor:
    """[2, pos]: tokens of each class in turn, each followed by the token that it predicts."""
    rows = []
    for start in range(2):
        row = []
        for i in range(n):
            for name, answer in classes.items():
                ids = k.truth["classes"][name]
                row += [ids[(i + start) % len(ids)], answer]
        rows.append(row)
    return torch.tensor(rows)


def row_with(k: KnownTruth, name: str) -> tuple[list[int], int]:
    """A sequence of the prompt that ends with a token of class `name`."""
    has = is_one_of(k.tokens[0], k.truth["classes"][name])
    last = int(has.nonzero()[-1])
    return k.tokens[0, : last + 1].tolist(), last


# ---- where a logit comes from


@SEEDS
def test_logit_shares_and_paths_are_those_that_were_planted(seed):
    k = made("planted_path", seed)
    path, token, row = k.truth["path"], k.truth["token"], k.tokens[0].tolist()
    source = next(i for i, token in enumerate(row) if token in k.truth["markers"])
    end = len(row) - 1
    shares = attribute_logits(k.model, row, token=token)
    logit = float(shares["logit"])
    assert logit > k.truth["least_logit"]
    for name in shares["part"].values:
        share = float(shares["share"].sel(part=name))
        assert share == pytest.approx(logit if name == path[-1] else 0, abs=LIMIT)
    heads = attribute_logits(k.model, row, token=token, by="head")
    assert float(abs(heads["share"].sum() - logit)) < LIMIT

    paths = top_paths(k.model, row, token=token, n=3)
    nodes = [f"{path[3]}@{end}", f"{path[2]}@{end}", f"{path[1]}@{source}", f"embed@{source}"]
    assert paths.rows[0][0] == " <- ".join(["logit", *nodes])
    assert float(paths["value"][0]) == pytest.approx(logit, abs=1e-8)
    assert abs(paths["value"].values[1:]).max(initial=0) < 1e-8
    merged = top_paths(k.model, row, token=token, n=1, by_position=False)
    assert merged.rows[0][0] == " <- ".join(["logit", *reversed(path)])


@SEEDS
def test_rollout_goes_to_the_marker_and_nowhere_else(seed):
    k = made("planted_path", seed)
    moved, row = k.truth["path"][2], k.tokens[0].tolist()
    source = next(i for i, token in enumerate(row) if token in k.truth["markers"])
    found = rollout(k.model, row, site=f"{moved.split('.')[0]}.mlp")  # what reads right after it
    through = float(found["atom_mass"].sel(atom=moved).isel(pos=-1))
    assert through > 0.01
    mass = found["mass"].sel(site=moved).values
    assert mass[source] == pytest.approx(through, abs=1e-9)
    assert abs(np.delete(mass, source)).max() < 1e-9
    total = float(found["absorbed"].sum() + found["stuck"].sum())
    assert total == pytest.approx(1, abs=LIMIT)


@SEEDS
def test_paths_that_cancel_are_both_seen(seed):
    k = made("cancelling_paths", seed)
    t = k.truth
    row, _ = row_with(k, "with")
    found = attribute_logits(k.model, row, token=t["token"])
    assert float(abs(found["logit"])) < LIMIT
    for name, way in (("plus", 1), ("minus", -1)):
        assert float(found["share"].sel(part=t[name])) == pytest.approx(way * t["share"], abs=LIMIT)
    others = [p for p in found["part"].values if p not in (t["plus"], t["minus"])]
    assert abs(found["share"].sel(part=others)).max() < LIMIT
    listed = [row[0] for row in found.rows if row[0] in found["part"].values]
    assert set(listed[:2]) == {t["plus"], t["minus"]}

    paths = top_paths(k.model, row, token=t["token"], n=2)
    assert sorted(paths["value"].values) == pytest.approx([-t["share"], t["share"]], abs=1e-9)
    assert {path[0].split(" <- ")[1].split("@")[0] for path in paths.rows} == {t["plus"], t["minus"]}

    loss = attribute_loss(k.model, k.tokens)
    part = loss["share"].sel(part=[t["plus"], t["minus"]])
    assert float(abs(part.sum("part")).max()) < LIMIT and float(abs(part).max()) > 0.1

    effects = measure_effects(k.model, k.tokens, over="atom", reads="out", token=t["token"])
    kl = effects["kl"].sel(read="out")
    least = float(kl.sel(atom=[t["plus"], t["minus"]]).min())
    rest = kl.drop_sel(atom=[t["plus"], t["minus"], "embed"])
    assert least > 0.05 and float(abs(rest).max()) < LIMIT
    lost = effects["logit"].sel(read="out")  # over all positions that have a next token
    has = is_one_of(k.tokens[:, :-1], t["classes"]["with"]).double().mean()
    assert float(lost.sel(atom=t["plus"])) == pytest.approx(float(-t["share"] * has), abs=1e-8)
    assert float(lost.sel(atom=t["minus"])) == pytest.approx(float(t["share"] * has), abs=1e-8)


@SEEDS
def test_the_lens_sees_the_answer_once_it_is_written(seed):
    k = made("planted_path", seed)
    t, row = k.truth, k.tokens[0].tolist()
    found = logit_lens(k.model, row, target=t["token"])
    reads = list(found["read"].values)
    written = reads.index(t["path"][-1])
    rank = found["rank"].isel(pos=-1).values
    probability = found["probability"].isel(pos=-1).values
    assert probability[-1] == probability.max() and rank[-1] == rank.min()
    assert probability[: written + 1].max() < 0.5 * probability[-1]


@SEEDS
@pytest.mark.parametrize("name", ["erasing_gate", "write_only_gate"])
def test_the_lens_sees_a_feature_until_it_is_erased(seed, name):
    k = made(name, seed)
    t = k.truth
    row, at = row_with(k, "with")
    probability = logit_lens(k.model, row, target=t["token"])["probability"].isel(pos=at)
    reads = list(probability["read"].values)
    gone = reads.index(t["eraser"]) + 1
    uniform = 1 / k.model.cfg.d_vocab
    assert (probability[:gone] > 1.5 * uniform).all()
    assert bool((probability[gone:] < 1.5 * uniform).all()) == t["erased"]


# ---- mass and effect


@SEEDS
def test_effect_is_told_from_mass(seed):
    for name in ("idle_route", "quiet_route"):
        k = made(name, seed)
        t = k.truth
        row = measure_effects(k.model, k.tokens, reads=t["read"]).dataset.sel(read=t["read"])
        own = k.model.sources()[t["read"]]
        assert str(row["mass"].sel(source=own).idxmax().values) == t["idle"]
        assert str(row["share"].sel(source=own).idxmax().values) == t["idle"]
        assert float(row["mass"].sel(source=t["idle"])) == pytest.approx(t["idle_mass"], abs=1e-6)
        quiet = row.sel(source=t["telling"])
        assert float(quiet["mass"]) == pytest.approx(t["telling_mass"], abs=1e-6)
        assert float(quiet["kl"]) > 0.5 and float(abs(quiet["loss"])) > 0.01
        assert float(quiet["rescue_kl"]) == pytest.approx(1, abs=1e-6)
        rest = row.sel(source=[s for s in own if s != t["telling"]])
        assert float(abs(rest["kl"]).max()) < LIMIT and float(abs(rest["loss"]).max()) < 1e-7
        saturated = name == "idle_route"
        assert (float(abs(rest["kl_renormalised"]).max()) < LIMIT) == saturated
        assert (float(abs(quiet["gradient"])) < 1e-6) == saturated  # a sign has no gradient
        assert float(abs(rest["gradient"]).max()) < 1e-8
        assert str(row["kl"].sel(source=own).idxmax().values) == t["telling"]
        assert float(row["disagreement"].sel(source=t["idle"])) < 0 < float(quiet["disagreement"])


@SEEDS
def test_only_the_two_sources_of_a_selective_read_matter(seed):
    k = made("selective_read", seed)
    t = k.truth
    prompt = followed(k, t["answers"])
    row = measure_effects(k.model, prompt, reads=t["read"]).dataset.sel(read=t["read"])
    for name in "AB":
        assert float(row["loss_renormalised"].sel(source=t["sources"][name])) > 0.05
    others = [s for s in k.model.sources()[t["read"]] if s not in t["sources"].values()]
    assert float(abs(row["kl_renormalised"].sel(source=others)).max()) < 0.05


@SEEDS
def test_the_family_of_the_telling_route_is_the_one_that_matters(seed):
    k = made("quiet_route", seed)
    t = k.truth
    site = next(site for site in k.model.sites if site.name == t["read"])
    families = dict(zip(k.model.sources()[t["read"]], family_of(k.model.residual.sources(site)), strict=True))
    prompt = followed(k, t["answers"])
    found = ablate_families(k.model, prompt, renormalise=False)
    layers, third = k.model.cfg.n_layers, ("early", "middle", "late")
    cells = [c for c in found["cell"].values if c.endswith(" mlp")]
    kl = found["kl"].sel(family=families[t["telling"]])
    hit = [c for c in cells if float(kl.sel(cell=c)) > 0.3]
    assert len(hit) >= 1
    spans = {c: third.index(c.split()[0]) for c in hit}
    assert site.layer is not None
    place = site.layer / layers
    assert any(abs(place - (i + 0.5) / 3) <= 0.5 for i in spans.values())
    if families[t["idle"]] not in (families[t["telling"]], "embedding") and not t["telling"].endswith("mlp"):
        for c in hit:
            assert float(abs(found["kl"].sel(cell=c, family=families[t["idle"]]))) < LIMIT


@SEEDS
def test_training_would_strengthen_the_telling_route(seed):
    k = made("quiet_route", seed)
    t = k.truth
    row = followed(k, t["answers"])[:1]
    found = routing_advantage(k.model, row, axis="depth", position=2)
    own = k.model.sources()[t["read"]]
    b = found["depth_b"].sel(read=t["read"], source=own).isel(pos=2)
    gained = found["depth_advantage"].sel(read=t["read"], source=own).isel(pos=2)
    others = [s for s in own if s != t["telling"]]
    assert float(b.sel(source=t["telling"])) < -1 and float(abs(b.sel(source=others)).max()) < 1e-9
    assert str(gained.idxmin().values) == t["telling"] and str(gained.idxmax().values) == t["idle"]
    assert float(gained.sel(source=others).min()) > 0


@SEEDS
def test_routes_are_static_or_follow_the_token(seed):
    static = made("quiet_route", seed)
    found = content_dependence(static.model, static.tokens, n_boot=0)
    assert str(found["label"].sel(read=static.truth["read"]).values) == "static"
    k = made("selective_read", seed)
    found = content_dependence(k.model, k.tokens, n_boot=0)
    share = found["share"].sel(read=k.truth["read"])
    assert str(found["label"].sel(read=k.truth["read"]).values) == "key-driven"
    assert float(share.sel(part="token")) > 0.3
    assert float(share.sel(part="site") + share.sel(part="token")) == pytest.approx(1, abs=1e-6)
    still = found["label"].drop_sel(read=k.truth["read"])
    assert "static" in set(still.values.tolist())


# ---- streams


@SEEDS
@pytest.mark.parametrize("name", ["stream_copy", "single_carrier"])
def test_streams_are_told_apart(seed, name):
    k = made(name, seed)
    t = k.truth
    carrier, copy, dead = (f"stream{i}" for i in (t["carrier"], t["copy"], t["dead"][0]))
    found = ablate_streams(k.model, followed(k, {"with": t["token"]}))
    ablated = found["ablated"]
    assert float(abs(ablated.sel(stream=dead)).max()) < LIMIT
    end = found.dataset.sel(boundary="readout")
    assert float(end["both"].sel(stream=carrier, other=copy)) > 0.3
    if t["redundant"]:
        assert abs(end["ablated"].values).max() < 1e-8
        for one, other in ((carrier, copy), (copy, carrier)):
            assert float(end["restored"].sel(stream=one, other=other)) == pytest.approx(1, abs=1e-8)
        assert float(end["interaction"].sel(stream=carrier, other=copy)) > 0.3
        return
    assert float(ablated.sel(stream=carrier).min()) > 0.3 and float(abs(ablated.sel(stream=copy)).max()) < LIMIT
    rescue = found["rescue"].sel(stream=carrier)
    assert abs(rescue.sel(other=copy).values - 1).max() < 1e-8
    assert float(rescue.sel(boundary="readout", other=dead)) < 0.5
    assert float(end["restored"].sel(stream=carrier, other=copy)) == pytest.approx(1, abs=1e-6)
    assert float(end["restored"].sel(stream=copy, other=carrier)) == pytest.approx(0, abs=1e-6)


# ---- patching


@SEEDS
def test_patching_recovers_along_the_planted_path_only(seed):
    k = made("planted_path", seed)
    t, clean = k.truth, k.tokens[0].tolist()
    source = next(i for i, token in enumerate(clean) if token in t["markers"])
    corrupted = [*clean]
    corrupted[source] = next(token for i, token in enumerate(clean) if i != source)
    silent = next(i for i in range(k.model.cfg.d_vocab) if not k.model.W_U[:, i].any())
    kwargs: dict[str, Any] = {"answer": t["token"], "wrong": silent}
    found = patch_activations(k.model, clean, corrupted, **kwargs)
    right = {("embed", source), (t["path"][1], source), (t["path"][2], len(clean) - 1), (t["path"][3], len(clean) - 1)}
    recovered = found["recovered"]
    for atom in recovered["atom"].values:
        for pos in range(len(clean)):
            value = float(recovered.sel(atom=atom, pos=pos))
            if atom == t["path"][1] and pos == source:
                # without the marker's own key, later positions look everywhere: what is left is a share of it
                assert value > 0.01
            elif (atom, pos) in right:
                assert value == pytest.approx(1, abs=0.35)
            else:
                assert abs(value) < 1e-6, (atom, pos, value)
    estimate = attribution_patching(k.model, clean, corrupted, **kwargs)["estimate"]
    assert float(estimate.sel(atom=t["path"][3], pos=len(clean) - 1)) == pytest.approx(1, abs=0.35)


# ---- the audit of gates


@SEEDS
@pytest.mark.parametrize("name", ["erasing_gate", "write_only_gate"])
def test_the_audit_finds_the_eraser(seed, name):
    k = made(name, seed)
    t = k.truth
    prompt = followed(k, {"with": t["token"]})
    found = audit_ddl(k.model, prompt)
    assert found.passed
    for site, beta in t["beta"].items():
        assert float(found["beta"].sel(site=site)) == pytest.approx(beta, abs=1e-12)
    plain = float(found["loss"])
    if not t["erased"]:
        assert "nothing is erased" in found["share"].attrs["meaning"]  # beta is the size of a write here
        return
    share = found["share"]
    for site in t["beta"]:
        wanted = "skip" if site in t["idle"] else "overwrite"
        assert float(share.sel(site=site, regime=wanted)) == 1.0
    erased = found["erased"]
    assert float(found["written"].sel(site=t["eraser"])) < LIMIT
    assert float(found["written"].sel(site=t["writer"])) == pytest.approx(t["value"][t["writer"]] ** 2, rel=1e-6)
    assert float(erased.sel(site=t["eraser"])) > 0.3
    assert float(erased.sel(site=t["idle"]).max()) < LIMIT
    assert float(found["error_after"].sel(site=t["eraser"])) < 1e-8 < float(found["error_before"].sel(site=t["eraser"]))
    assert float(found["change"].sel(site=t["idle"]).max()) < LIMIT
    lost = found["loss_effect"].sel(place=t["eraser"])  # without the eraser the model would predict the token
    kinds = [str(kind) for kind in found["kind"].values]
    skip = next(kind for kind in kinds if "0" in kind)
    assert float(lost.sel(kind=skip)) < -0.2 and plain > 0
    rest = found["loss_effect"].sel(place=t["idle"], kind=skip)
    assert abs(rest.values).max() < LIMIT
    assert float(found["transport_smallest"].sel(atom="embed").max()) < 1e-8  # the direction reaches no readout


# ---- edits


@SEEDS
def test_edits_undo_what_was_planted(seed):
    delta, twin = made("erasing_gate", seed), made("write_only_gate", seed)
    eraser, token = delta.truth["eraser"], delta.truth["token"]
    row, at = row_with(delta, "with")
    keep = t2lens.Edit(target="gate", name="beta", site=eraser, operation="set", value=0.0)
    with t2lens.edited(delta.model, [keep]):
        kept = delta.model([row])[0, at, token]
    assert float(kept) > 1 and float(delta.model([row])[0, at, token]) < 1e-8
    assert float(twin.model([row])[0, at, token]) > 1
    k = made("idle_route", seed)
    for operation in ("zero", "zero_renormalise"):
        for source, moves in ((k.truth["idle"], False), (k.truth["telling"], True)):
            edit = t2lens.Edit(target="depth_weight", site=k.truth["read"], sources=source, operation=operation)
            with t2lens.edited(k.model, [edit]):
                logits = k.model(k.tokens)
            assert (float((logits - k.model(k.tokens)).abs().max()) > LIMIT) == moves


def test_every_truth_of_the_gallery_is_used_here():
    source = Path(__file__).read_text(encoding="utf-8")
    functions: dict[str, Callable[[int], KnownTruth]] = known_truths.GALLERY
    assert all(f'"{name}"' in source for name in functions)

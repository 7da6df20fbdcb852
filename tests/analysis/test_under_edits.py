"""Analyses inside `t2lens.edited`: each is right about the edited pass, by numbers made another way, or is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from t2lens.analysis.catalog import ANALYSES, analysis
from t2lens.analysis.under_edits import NEEDS, check_needs, check_under_edits
from t2lens.edits import Edit, check, edited, marks
from t2lens.mixing import ForwardRecord, contributions_by_read
from tests.edits.make import edits_of
from tests.systems import SYSTEMS, tiny

IDS = [3, 7, 1, 9, 7, 4]
UNLIKE = ["standard", "attnres-full", "ddl-cc-ec", "muddformer", "dca", "hyper-connections", "denseformer"]
CLOSE = 1e-8


def hook_edits(model: Any, dice: random.Random, n: int) -> list[Edit]:
    """Edits of hook points drawn from all that there are, with operations that are not a residual system's own."""
    found: list[Edit] = []
    names = list(model.hook_dict)
    while len(found) < n:
        how: Any = dice.choice([{"operation": "scale", "value": 0.7}, {"operation": "freeze_mean"}])
        edit = Edit(target="hook", name=dice.choice(names), **how)
        try:
            check(model, [edit])
        except (ValueError, KeyError):  # a grid of keys, or what is only shown
            continue
        found.append(edit)
    return found


def drawn(system: str, seed: int) -> tuple[Any, list[Edit]]:
    """A model, and an edit of every target it has, on some positions or on all, and of any hook points."""
    model, dice = tiny(system, seed), random.Random(seed)
    own = edits_of(model, dice, positions=[1, -1])
    whole = {target: edit for target, edit in edits_of(model, dice).items() if edit.operation != "patch"}
    drawn = [dice.choice([edit, whole.get(target, edit)]) for target, edit in own.items()]
    return model, [*drawn, *hook_edits(model, dice, 3)]


def passed(model: Any, edits: Any, ids: Any = IDS, hooks: Any = ()) -> tuple[Tensor, ForwardRecord, dict[str, Tensor]]:
    """Logits [T, V], the record and all tensors of one whole edited pass, other hooks after the edits."""
    record = ForwardRecord()
    with torch.no_grad(), edited(model, edits), model.hooks(list(hooks)):
        logits, cache = model.run_with_cache([ids], record=record)
    return logits[0], record, dict(cache.items())


def loss_of(logits: Tensor, ids: Any = IDS) -> float:
    return float(F.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])))


def runs(model: Any, edits: Any, key: str, input: Any = IDS, **options: Any) -> Any:
    """The finding, or None where it is refused."""
    try:
        check_under_edits(model, edits, key, options)
    except ValueError:
        return None
    with edited(model, edits):
        return analysis(key).run(model, input, **options)


def test_what_needs_are_stated_for_is_in_the_catalog() -> None:
    assert set(NEEDS) <= {entry.key for entry in ANALYSES}


@pytest.mark.parametrize("system", SYSTEMS)
def test_needs_are_taken_away_by_exactly_the_edits_that_break_them(system: str) -> None:
    """Against the pass itself: sums of contributions, shares of logits, and passes taken up in the middle."""
    seed = random.randrange(1000)
    model, edits = drawn(system, seed)
    plain = passed(model, [])[0]
    for edit in random.Random(seed).sample(edits, 5):
        logits, record, _ = passed(model, [edit])
        holds = dict.fromkeys(("account", "last", "stream", "readout"), True)
        last: Any = None
        for read, last in contributions_by_read(model.residual, record):
            used = record.reads[read.name]
            near = bool((last.sum(dim=0) - used).abs().max() <= CLOSE * used.abs().max().clamp(min=1))
            holds["account"] &= near
            holds["last"] = near
        with torch.no_grad():
            out = record.reads["out"]
            holds["readout"] = torch.allclose(model.unembed(model.ln_final(out))[0], logits, atol=1e-7, rtol=1e-7)
            with edited(model, [edit]):
                for layer in range(model.cfg.n_layers + 1) if edit.operation != "plain_sum" else ():
                    again = model.resume(record, layer)[0]
                    holds["stream"] &= torch.allclose(again, logits, atol=1e-7, rtol=1e-7)
        for need, held in holds.items():
            refused = False
            try:
                check_needs(model, [edit], [need])
            except ValueError:
                refused = True
            idle = torch.allclose(plain, logits, atol=1e-9)  # an edit that changes nothing here
            assert held or refused, (seed, need, edit)
            assert not (held and refused) or idle or edit.positions or _cancels(model, edit), (seed, need, edit)


def _cancels(model: Any, edit: Edit) -> bool:
    """A norm takes a scale out again, and what is copied into every stream adds up: broken only to the eye."""
    return edit.operation in ("scale", "freeze_mean", "patch", "set", "add", "zero") and bool(marks(model, [edit]).lost)


@pytest.mark.parametrize("by", ["atom", "head"])
@pytest.mark.parametrize("system", UNLIKE)
def test_attributions_sum_to_the_edited_numbers(system: str, by: str) -> None:
    seed = random.randrange(1000)
    model, edits = drawn(system, seed)
    n = 0
    for edit in edits:
        found, loss = runs(model, [edit], "logits", by=by), runs(model, [edit], "loss", by=by)
        assert (found is None) == (loss is None)
        if found is None or loss is None:
            continue
        n += 1
        logits = passed(model, [edit])[0].double()
        assert float(found["logit"]) == pytest.approx(float(logits[-1].max()), rel=1e-9), (seed, edit)
        assert float(found["share"].sum()) == pytest.approx(float(logits[-1].max()), rel=1e-8, abs=1e-8), (seed, edit)
        assert float(loss["loss"].mean()) == pytest.approx(loss_of(logits), rel=1e-8), (seed, edit)
        assert float(abs(loss["error"]).max()) < 1e-7, (seed, edit)
    assert n >= 3


@pytest.mark.parametrize("system", UNLIKE)
def test_the_lens_reads_the_edited_reads_with_the_models_own_readout(system: str) -> None:
    seed = random.randrange(1000)
    model, edits = drawn(system, seed)
    for edit in edits:
        found = runs(model, [edit], "lens", top=1)
        logits, record, _ = passed(model, [edit])
        if found is None:
            assert marks(model, [edit]).readout
            continue
        with torch.no_grad():
            for read in model.reads:
                best = model.unembed(model.ln_final(record.reads[read.name]))[0].double().softmax(dim=-1).max(dim=-1)[0]
                assert np.allclose(found["top_probability"].sel(read=read.name)[:, 0], best, atol=1e-9), (seed, edit)
        assert np.allclose(found["top_probability"].sel(read="out")[:, 0], logits.softmax(dim=-1).max(dim=-1)[0])


@pytest.mark.parametrize("system", ["standard", "attnres-full", "muddformer", "ddl-cc-ec", "dca-drop"])
def test_paths_and_rollout_account_for_the_edited_pass(system: str) -> None:
    seed = random.randrange(1000)
    model, edits = drawn(system, seed)
    for edit in edits:
        logits = passed(model, [edit])[0]
        if (found := runs(model, [edit], "paths", n=3, max_expansions=4)) is not None:
            assert float(found["logit"]) == pytest.approx(float(logits[-1].max())), (seed, edit)
            assert float(found["total"]) == pytest.approx(float(logits[-1].max()), abs=1e-6), (seed, edit)
            assert float(found["edge"].sel(read="out").sum() + found["bias"]) == pytest.approx(
                float(logits[-1].max()), abs=1e-6
            ), (seed, edit)
        if (found := runs(model, [edit], "rollout")) is not None:
            assert float(found["absorbed"].sum() + found["stuck"].sum()) == pytest.approx(1.0, abs=1e-9), (seed, edit)
            record = passed(model, [edit])[1]
            *_, (_, share) = contributions_by_read(model.residual, record)
            size = share[:, 0, -1].norm(dim=-1)
            if not model.residual.looks_back and size.sum() > 0:  # the first step back from the readout, made by hand
                shown = found["atom_mass"][:, -1].values
                assert shown[-1] == pytest.approx(float(size[-1] / size.sum()), abs=1e-9), (seed, edit)


@pytest.mark.parametrize("system", ["attnres-full", "dca", "hyper-connections", "standard", "muddformer"])
def test_weights_over_texts_are_those_of_the_edited_passes(system: str) -> None:
    seed = random.randrange(1000)
    model, edits = drawn(system, seed)
    name = next(
        (read.name for read in reversed(model.reads) if read.site.hook("depth_attn", read.way) in model.hook_dict), None
    )
    for edit in edits:
        _, record, cache = passed(model, [edit])
        if (found := runs(model, [edit], "content", n_shuffles=1, n_boot=0)) is not None:
            if name is not None and name in found["read"].values:
                read = next(read for read in model.reads if read.name == name)
                own = cache[read.site.hook("depth_attn", read.way)][0].double().mean(dim=0)
                assert np.allclose(found["weight_mean"].sel(read=name).dropna("source"), own, atol=1e-9), (seed, edit)
            elif name is None:  # coefficients of atoms: they make the read
                mean, hand = found["weight_mean"].sel(read="out").values, _coefficients(model, record)
                written = np.array([bool((atom.norm(dim=-1) > 0).all()) for atom in record.atoms])
                assert np.allclose(mean[written], hand[written], atol=1e-8), (seed, edit)
        if (found := runs(model, [edit], "statistics")) is not None and "norm_mean" in found.dataset:
            here = record.reads["out"][0].norm(dim=-1).mean()
            assert float(found["norm_mean"].sel(read="out")) == pytest.approx(float(here)), (seed, edit)


def _coefficients(model: Any, record: ForwardRecord) -> np.ndarray:
    """[A] mean over positions of what each atom has in the last read, by projection."""
    *_, (_, share) = contributions_by_read(model.residual, record)
    atoms = torch.stack(record.atoms)
    return ((share * atoms).sum(-1) / atoms.square().sum(-1).clamp(min=1e-300))[:, 0].mean(dim=-1).numpy()


@pytest.mark.parametrize("system", ["attnres-full", "attnres-delta", "dca", "mhc", "standard"])
def test_the_routing_advantage_is_the_slope_of_the_edited_loss(system: str) -> None:
    seed = random.randrange(1000)
    model, edits = drawn(system, seed)
    for edit in edits:
        if (found := runs(model, [edit], "advantage")) is None:
            continue
        for kind in ("depth", "sequence"):
            if f"{kind}_advantage" not in found.dataset:
                continue
            at = found[f"{kind}_advantage"].stack(all=found[f"{kind}_advantage"].dims).dropna("all")
            for one in at[:: max(1, len(at) // 3)]:
                hook, where = _score(model, one.coords["all"].item(), kind)
                ends = []
                for step in (1e-5, -1e-5):

                    def push(x: Tensor, *, hook: Any, where: Any = where, step: float = step) -> Tensor:
                        x = x.clone()
                        x[where] += step
                        return x

                    ends.append(loss_of(passed(model, [edit], hooks=[(hook, push)])[0]))
                assert float(one) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3, abs=1e-7), (seed, edit, where)


def _score(model: Any, label: Any, kind: str) -> tuple[str, Any]:
    """(hook point, index) of one score."""
    if kind == "depth":
        name, pos, source = label
        read = next(read for read in model.reads if read.name == name)
        columns = [each.name for each in model.residual.sources(read.site)]
        return read.site.hook("depth_scores", read.way), (0, pos, columns.index(source))
    site, head, query, key = label
    layer, part = site.split(".")
    return f"blocks.{layer}.{part}.hook_attn_scores", (0, head, query, key)


@pytest.mark.parametrize("system", ["attnres-full", "muddformer", "ddl", "hyper-connections", "standard"])
def test_ablations_are_measured_against_the_edited_pass(system: str) -> None:
    seed = random.randrange(1000)
    model, edits = drawn(system, seed)
    dice = random.Random(seed)
    for edit in edits:
        base = loss_of(passed(model, [edit])[0])
        name = dice.choice([read.name for read in model.reads if read.way != "r"])
        read = next(read for read in model.reads if read.name == name)
        if (found := runs(model, [edit], "effects", over="atom", reads=name)) is not None:
            record = passed(model, [edit])[1]
            share = next(c for r, c in contributions_by_read(model.residual, record) if r.name == name)
            atom = dice.randrange(read.site.seen + 1)
            cut = [(read.site.hook("read", read.way), _less(share[atom]))]
            change = loss_of(passed(model, [edit], hooks=cut)[0]) - base
            assert float(found["loss"].sel(read=name)[atom]) == pytest.approx(change, abs=1e-8), (seed, edit, name)
        hook = read.site.hook("depth_attn", read.way)
        if hook in model.hook_dict and (found := runs(model, [edit], "effects", over="source", reads=name)) is not None:
            source = dice.randrange(len(model.residual.sources(read.site)))
            change = loss_of(passed(model, [edit], hooks=[(hook, _without(source))])[0]) - base
            assert float(found["loss"].sel(read=name).dropna("source")[source]) == pytest.approx(change, abs=1e-8), (
                seed,
                edit,
                name,
            )


def _less(share: Tensor) -> Any:
    return lambda x, *, hook: x - share


def _without(source: int) -> Any:
    def change(x: Tensor, *, hook: Any) -> Tensor:
        return x.index_fill(-1, torch.tensor([source]), 0.0)

    return change


@pytest.mark.parametrize("what", ["atom", "depth_weight", "stream"])
def test_patches_go_between_edited_runs(what: str) -> None:
    seed = random.randrange(1000)
    model, edits = drawn("hyper-connections", seed)
    other = [3, 7, 2, 9, 7, 4]
    hooks = {
        "atom": "blocks.1.hook_attn_out",
        "depth_weight": "blocks.1.hook_depth_attn_attn",
        "stream": "blocks.1.hook_streams_pre",
    }
    for edit in edits:
        found = runs(model, [edit], "patch", other=other, what=what, metric="loss", positions="all", answer=5)
        if found is None:
            continue
        kept = passed(model, [edit])[2][hooks[what]]
        logits = passed(model, [edit], other, [(hooks[what], lambda x, *, hook, kept=kept: kept)])[0]
        at = {"atom": {"atom": "1.attn"}, "depth_weight": {"read": "1.attn"}, "stream": {"boundary": "block 1"}}[what]
        value = -float(logits[-1].log_softmax(dim=-1)[5])
        metric = found["metric"].sel(at)
        if metric.ndim == 0:
            assert float(metric) == pytest.approx(value, abs=1e-8), (seed, edit)


def test_streams_families_and_the_audit_are_of_the_edited_pass() -> None:
    seed = random.randrange(1000)
    model, edits = drawn("hyper-connections", seed)
    for edit in edits:
        if (found := runs(model, [edit], "streams", [IDS, IDS[::-1]])) is not None:
            zero = [("blocks.1.hook_streams_pre", lambda x, *, hook: _zeroed(x))]
            change = [
                loss_of(passed(model, [edit], i, zero)[0], i) - loss_of(passed(model, [edit], i)[0], i)
                for i in (IDS, IDS[::-1])
            ]
            assert float(found["ablated"].sel(boundary="block 1", stream="stream1")) == pytest.approx(
                np.mean(change), abs=1e-8
            ), (seed, edit)
    model, edits = drawn("attnres-full", seed)
    for edit in edits:
        if (found := runs(model, [edit], "families", [IDS, IDS[::-1]], renormalise=False)) is not None:
            cut = [("hook_depth_attn_final", _without(0))]
            change = [
                loss_of(passed(model, [edit], i, cut)[0], i) - loss_of(passed(model, [edit], i)[0], i)
                for i in (IDS, IDS[::-1])
            ]
            shown = float(found["loss_change"].sel(cell="readout", family="embedding"))
            assert shown == pytest.approx(np.mean(change), abs=1e-8), (seed, edit)
    model, edits = drawn("ddl", seed)
    for edit in edits:
        if (found := runs(model, [edit], "ddl", [IDS, IDS[::-1]])) is not None:
            gates = [
                torch.cat([passed(model, [edit], i)[2]["blocks.1.ddl_mlp.hook_beta"][0] for i in (IDS, IDS[::-1])])
            ]
            assert float(found["beta"].sel(site="1.mlp")) == pytest.approx(float(gates[0].mean()), abs=1e-9)
            failed = [
                n
                for n, v, top in zip(
                    found["check"].values, found["check_value"].values, found["check_limit"].values, strict=True
                )
                if not v <= top
            ]
            assert set(failed) <= {"unit direction", "gate range"}, (seed, edit, failed)


def _zeroed(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :, 1] = 0
    return x


@pytest.mark.parametrize("system", ["standard", "attnres-full", "ddl", "muddformer", "dca"])
def test_a_continuation_is_written_by_whole_edited_passes(system: str) -> None:
    seed = random.randrange(1000)
    model, edits = drawn(system, seed)
    for edit in [*edits_of(model, random.Random(seed), positions=[1]).values(), *edits]:
        fixed = not (edit.positions and min(edit.positions) < 0)
        if not fixed or (edit.operation == "freeze_mean" and edit.prompt is None):
            why = "there is no mean over the pass" if fixed else "its end moves, so position -1 is not fixed"
            with pytest.raises(ValueError, match=why):
                runs(model, [edit], "continuation", n=3)
            found = runs(model, [edit], "continuation", n=3, top=2, use_cache=False)
        else:
            found = runs(model, [edit], "continuation", n=3, top=2)
        ids = list(IDS)
        assert found is not None
        for step in range(3):
            p = passed(model, [edit], ids)[0][-1].double().softmax(dim=-1)
            assert np.allclose(found["top_probability"][step], p.topk(2).values, atol=1e-9), (seed, edit, step)
            assert float(found["probability"][step]) == pytest.approx(float(p.max()), abs=1e-9), (seed, edit, step)
            ids.append(int(found["id"][step]))
            assert p[ids[-1]] == p.max(), (seed, edit, step)


@pytest.mark.parametrize("system", ["attnres-full", "attnres-block", "dca", "denseformer", "ddl-cc-ec", "standard"])
def test_the_profile_is_the_mean_over_the_edited_pass(system: str) -> None:
    seed = random.randrange(1000)
    model, edits = drawn(system, seed)
    n = 0
    for edit in edits:
        if (found := runs(model, [edit], "profile", start=True, n_boot=0)) is None:
            continue
        n += 1
        _, record, cache = passed(model, [edit])
        for read, share in contributions_by_read(model.residual, record):
            length = share[: read.site.seen + 1, 0].norm(dim=-1)  # [A, T]
            shown = found.dataset.sel(read=read.name).isel(atom=slice(len(length)))
            assert np.allclose(shown["contribution_mean"], length.mean(dim=-1), atol=1e-8), (seed, edit, read)
            total = length.sum(dim=0)
            part = length / torch.where(total > 0, total, 1.0)
            assert np.allclose(shown["share_std"], part.std(dim=-1, correction=0), atol=1e-8), (seed, edit, read)
            if (hook := read.site.hook("depth_attn", read.way)) in cache:
                own = [
                    found["weight_mean"].sel(read=read.name, source=s.name) for s in model.residual.sources(read.site)
                ]
                assert np.allclose(own, cache[hook][0].double().mean(dim=0), atol=1e-9), (seed, edit, read)
    assert n >= 3


@pytest.mark.parametrize("system", ["standard", "attnres-full", "ddl-cc-ec", "muddformer", "hyper-connections"])
def test_writes_are_taken_away_from_the_edited_pass(system: str) -> None:
    seed = random.randrange(1000)
    model, edits = drawn(system, seed)
    dice = random.Random(seed)
    for edit in edits:
        if (found := runs(model, [edit], "writes", token=5)) is None:
            continue
        atom = dice.choice(list(model.atoms))
        hook = "hook_embed" if atom == "embed" else "blocks.{}.hook_{}_out".format(*atom.split("."))
        plain, without = (
            passed(model, [edit], hooks=hooks)[0].double() for hooks in ((), [(hook, lambda x, *, hook: x * 0)])
        )
        p, q = plain[-1].log_softmax(dim=-1), without[-1].log_softmax(dim=-1)
        at = found.dataset.sel(write=atom)
        assert float(at["kl"]) == pytest.approx(float((p.exp() * (p - q)).sum()), abs=1e-8), (seed, edit, atom)
        assert float(at["logit"]) == pytest.approx(float(without[-1, 5] - plain[-1, 5]), abs=1e-8), (seed, edit, atom)
        *_, (_, share) = contributions_by_read(model.residual, passed(model, [edit])[1])
        with torch.no_grad():
            used = passed(model, [edit])[1].reads["out"][0, -1]
            assert model.ln_final.cfg.kind == "rms"
            own = share[list(model.atoms).index(atom), 0, -1] / model.ln_final.scale(used) * model.ln_final.w
            assert float(at["share"]) == pytest.approx(float(own @ model.W_U[:, 5]), abs=1e-8), (seed, edit, atom)


def test_the_estimate_of_a_patch_is_the_slope_of_the_edited_pass() -> None:
    seed = random.randrange(1000)
    model, edits = drawn("attnres-full", seed)
    other, hook, pos = [3, 7, 2, 9, 7, 4], "blocks.0.hook_mlp_out", random.Random(seed).randrange(2, 6)
    for edit in edits:
        found = runs(model, [edit], "attribution-patch", other=other, metric="loss", answer=5)
        assert found is not None
        (clean, _, kept), (corrupted, _, replaced) = passed(model, [edit]), passed(model, [edit], other)
        whole = float(clean[-1].log_softmax(dim=-1)[5] - corrupted[-1].log_softmax(dim=-1)[5])
        ends = []
        for step in (1e-5, -1e-5):

            def push(x: Tensor, *, hook: Any, step: float = step) -> Tensor:
                x = x.clone()
                x[:, pos] += step * (kept[hook.name] - replaced[hook.name])[:, pos]  # noqa: B023
                return x

            ends.append(float(passed(model, [edit], other, [(hook, push)])[0][-1].log_softmax(dim=-1)[5]))
        slope = (ends[0] - ends[1]) / 2e-5 / whole
        shown = float(found["estimate"].sel(atom="0.mlp")[pos])
        assert shown == pytest.approx(slope, rel=1e-3, abs=1e-5), (seed, edit, pos)


@pytest.mark.parametrize("system", ["ddl", "ddl-linear", "ddl-cc-ec", "ddl-write-only"])
def test_gates_are_those_of_the_edited_pass(system: str) -> None:
    seed = random.randrange(1000)
    model, edits = drawn(system, seed)
    erases, dice = model.cfg.residual.edit == "delta", random.Random(seed)
    for edit in edits:
        cache = passed(model, [edit])[2]
        sites = [site for site in model.sites if site.kind != "out"]
        beta, k, v, held = (
            torch.stack([cache[f"blocks.{s.layer}.ddl_{s.kind}.hook_{name}"][0] for s in sites])
            if name != "proj" or erases
            else None
            for name in ("beta", "dir", "value", "proj")
        )
        assert beta is not None and k is not None and v is not None
        if (found := runs(model, [edit], "gates-tokens")) is not None:
            size = k.square().sum(dim=-1)  # of k, which an edit may make other than 1
            assert np.allclose(found["beta"], beta[..., 0], atol=1e-9), (seed, edit)
            assert np.allclose(found["written"], beta[..., 0].square() * v.square().sum(-1) * size, rtol=1e-7), (
                seed,
                edit,
            )
            if held is not None:
                gone = beta[..., 0].square() * held.square().sum(dim=-1) * size
                assert np.allclose(found["erased"], gone, rtol=1e-7, atol=1e-12), (seed, edit)
        if (found := runs(model, [edit], "gates-spectrum")) is not None:
            steps = [
                torch.eye(k.shape[-1]) - b * torch.outer(x, x) * erases
                for b, x in zip(beta[:, -1], k[:, -1], strict=True)
            ]
            assert np.allclose(found["eigenvalue"], 1 - erases * beta[:, -1, 0] * k[:, -1].square().sum(-1), atol=1e-9)
            after = dice.randrange(len(steps))
            product = torch.eye(k.shape[-1]).double()
            for step in steps[after:]:
                product = step.double() @ product
            values = torch.linalg.svdvals(product).numpy()
            shown = found["transport"].values[after]
            whole = np.sort(np.concatenate([shown, np.ones(len(values) - len(shown))]))[::-1]
            assert np.allclose(whole, values, atol=1e-8), (seed, edit, after)
        site = dice.choice(sites)
        if (found := runs(model, [edit], "gates-curve", site=site.name, steps=2)) is not None:
            hook = f"blocks.{site.layer}.ddl_{site.kind}.hook_beta"
            p = passed(model, [edit])[0][-1].double().log_softmax(dim=-1)
            grid = str(found["kl"].dims[0])
            for i, value in enumerate(found[grid].values.tolist()):
                set_to = [(hook, lambda x, *, hook, value=value: torch.full_like(x, value))]
                q = passed(model, [edit], hooks=set_to)[0][-1].double().log_softmax(dim=-1)
                kl = float((p.exp() * (p - q)).sum())
                assert float(found["kl"][i]) == pytest.approx(kl, abs=1e-8), (seed, edit, site, value)

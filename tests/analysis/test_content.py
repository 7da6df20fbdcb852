"""Content dependence: numbers against naive loops, labels against what systems do when their content changes."""

import json
from typing import Any, cast

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import t2lens
from t2lens.analysis.content import content_dependence
from t2lens.cli import app
from t2lens.mixing import mixing_matrix
from t2lens.residual import AttnRes, HyperConnections, OpenAttnRes, by_way
from t2lens.residual.hyper_connections import HyperConnected
from tests.systems import SYSTEMS, tiny

TEXTS = torch.tensor([[0, 7, 3, 7, 9, 4, 1], [0, 9, 4, 4, 2, 7, 3], [0, 3, 3, 1, 7, 9, 9], [0, 2, 7, 3, 3, 1, 4]])
OTHERS: dict[str, Any] = {
    "open-pre-gated": OpenAttnRes(dialect="B", mode="pre_gated"),
    "open-streams": OpenAttnRes(dialect="C", mode="full_additive"),
    "hyper-static-normed": HyperConnections(coefficients="static", readout="normed_sum"),
    "mhc-by-stream": HyperConnections.mhc(norm_over="stream"),
}


def built(name: str, seed: int = 3, **changes: Any) -> Any:
    return tiny(
        "standard" if name in OTHERS else name,
        seed,
        **({"residual": OTHERS[name]} if name in OTHERS else {}),
        **changes,
    )


def weights_of(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """read -> its own weights [B, T, S]."""
    with torch.no_grad():
        record = model.record(tokens)
    found = {}
    for step in record.steps:
        own = model.residual.depth_weights(step.site, step.gates)
        for way, weights in by_way(own).items() if own is not None else ():
            found[f"{step.site.name}.{way}" if way else step.site.name] = weights.detach()
    return found


@pytest.mark.parametrize("name", [*SYSTEMS, *OTHERS])
def test_weights_come_from_what_the_equation_says(name):
    """ "nothing": the same for every token. "keys": another atom changes the weights (scores, where they compete) of
    the sources that hold it, and no others. "state": of others too."""
    model = built(name)
    residual = model.residual
    own = weights_of(model, TEXTS)
    if not own:
        return
    moved = {"nothing": False, "keys": False, "state": False}
    for read in model.reads:
        if read.name not in own:
            continue
        weights, kind = own[read.name], residual.weights_from(read.site)
        spread = float((weights - weights[:1, :1]).abs().max())
        if kind == "nothing":
            assert spread == 0 or len({s.atoms for s in residual.sources(read.site)}) == 1
        elif weights.shape[-1] > 1:
            assert spread > 1e-6
        moved[kind] = True
    with torch.no_grad():
        record = model.record(TEXTS)
        far, near = dict.fromkeys(moved, 0.0), dict.fromkeys(moved, 0.0)
        for read in model.reads:
            kind, sources = residual.weights_from(read.site), residual.sources(read.site)
            if read.name not in own or kind == "nothing" or len(sources) < 2:
                continue
            for which in range(len(sources)):
                changed, touched = _with_another(model, record, read, which)
                if changed is None:
                    continue
                near[kind] = max(near[kind], float(changed[..., sorted(touched)].abs().max()))
                others = [i for i in range(len(sources)) if i not in touched]
                if others:
                    far[kind] = max(far[kind], float(changed[..., others].abs().max()))
    assert far["keys"] < 1e-12
    assert (near["keys"] > 1e-6) == moved["keys"]
    if moved["state"]:
        assert far["state"] > 1e-6


def _with_another(model: Any, record: Any, read: Any, which: int) -> tuple[torch.Tensor | None, set[int]]:
    """(change of the scores at `read`, or of its weights where it has no scores; the sources that were changed) when
    what was written last into source `which` is something else, or stream `which` is."""
    residual, site = model.residual, read.site
    atom = residual.sources(site)[which].atoms[-1]
    streams = isinstance(residual, HyperConnected)

    def scores(change: bool) -> torch.Tensor:
        kept = {}
        name = site.hook("depth_scores", read.way)
        name = name if name in model.hook_dict else site.hook("depth_attn", read.way)
        push = change and not streams
        embed = record.embed * (-2.0 if push and atom == "embed" else 1.0) + 0.5 * (push and atom == "embed")
        state = residual.begin(embed)
        hooks = [(name, lambda x, hook: kept.update(found=x.clone()))]
        with model.hooks(fwd_hooks=hooks):
            for step in record.steps:
                if step.site is site:
                    if streams and change:
                        state = state.clone()
                        state[..., which, :] = -2.0 * state[..., which, :] + 0.5
                    residual.read_gates(state, site)
                    return kept["found"]
                state = residual.enter(state, step.site, step.gates)
                out = residual.atom(step.out, step.gates)
                out = -2.0 * out + 0.5 if push and step.site.name == atom else out
                state = residual.write(state, step.site, out, step.gates)
        raise AssertionError

    touched = {which} if streams else {i for i, s in enumerate(residual.sources(site)) if atom in s.atoms}
    if read.site.kind == "attn" and model.cfg.local is not None:
        return None, touched
    return scores(True) - scores(False), touched


@pytest.mark.parametrize("name", SYSTEMS)
def test_labels_of_every_system(name):
    model = built(name)
    found = content_dependence(model, TEXTS, n_boot=0)
    labels, seen = found["label"].values, found["weights_from"].values
    for label, kind, variation in zip(labels, seen, found["variation"].values, strict=True):
        if label == "static":
            assert variation < 0.01
        else:
            assert label == ("content-driven" if kind == "state" else "key-driven")
    over = "source" if "depth_attn" in " ".join(model.hook_dict) else "mixing"
    assert ("source" in found.dataset.dims) == (over == "source")
    if over == "source":
        assert all(label == "static" for label, kind in zip(labels, seen, strict=True) if kind == "nothing")
    if name in ("standard", "denseformer", "elc-base", "muddformer-static", "attnres-static"):
        assert set(labels) == {"static"}
        assert found["profile_change"].values.max() == 0
        shares = found["share"].values
        assert np.nanmin(shares[:, 0], initial=1) == 1
    if name in ("attnres-full", "attnres-b-block"):
        assert "key-driven" in labels and "content-driven" not in labels
    if name in ("muddformer", "depth-swa", "ddl", "mhc", "highway"):
        assert "content-driven" in labels and "key-driven" not in labels


def test_numbers_are_those_of_naive_loops():
    model = built("attnres-full")
    mask = torch.ones_like(TEXTS)
    mask[1, 5:], mask[2, :2] = 0, 0
    found = content_dependence(model, TEXTS, attention_mask=mask, n_boot=20, seed=5)
    rows = [TEXTS[b][mask[b].bool()] for b in range(len(TEXTS))]
    alone = [weights_of(model, row[None]) for row in rows]
    for read in ("1.attn", "2.mlp", "out"):
        w = torch.cat([one[read][0] for one in alone]).numpy()
        names = [s.name for s in model.residual.sources(next(r.site for r in model.reads if r.name == read))]
        at = {"read": read, "source": names}
        np.testing.assert_allclose(found["weight_mean"].sel(at), w.mean(axis=0), atol=1e-12)
        np.testing.assert_allclose(found["weight_std"].sel(at), w.std(axis=0), atol=1e-12)
        entropy = np.mean([-sum(x * np.log(x) for x in row) for row in w])
        assert found["entropy"].sel(read=read) == pytest.approx(entropy)
        assert found["n_effective"].sel(read=read) == pytest.approx(np.exp(entropy))
        change = np.sqrt(((w - w.mean(axis=0)) ** 2).sum() / (w**2).sum())
        assert found["variation"].sel(read=read) == pytest.approx(change)
        around = ((w - 1 / w.shape[1]) ** 2).sum()
        site = len(w) * ((w.mean(axis=0) - 1 / w.shape[1]) ** 2).sum() / around
        assert found["share_raw"].sel(read=read, part="site") == pytest.approx(site)
        assert float(found["share"].sel(read=read).sum()) == pytest.approx(1)
        low, high = found["weight_mean_interval"].sel(at).values.T
        assert (low <= w.mean(axis=0)).all() and (w.mean(axis=0) <= high).all() and (low < high).all()


def test_coefficients_of_atoms_are_the_mixing_matrix():
    model = built("ddl")
    found = content_dependence(model, TEXTS, n_boot=0)
    mixing = mixing_matrix(model, TEXTS)
    for i, read in enumerate(model.reads):
        if read.site.seen == 0:
            assert read.name not in found["read"].values
            continue
        row = found["weight_mean"].sel(read=read.name).values
        np.testing.assert_allclose(row[: read.site.seen + 1], mixing[:, i].mean(dim=(0, 1))[: read.site.seen + 1])
        assert np.isnan(row[read.site.seen + 1 :]).all()
    assert found["weights_from"].values.tolist() == ["state"] * len(found["read"])
    as_mixing = content_dependence(built("attnres-full"), TEXTS, over="mixing", n_boot=0)
    as_source = content_dependence(built("attnres-full"), TEXTS, n_boot=0)
    both = as_mixing["weight_mean"].sel(atom=as_source["source"].values).values
    np.testing.assert_allclose(both, as_source["weight_mean"].values, atol=1e-12)  # full: sources are atoms


def test_shuffling_keeps_the_first_token_and_changes_what_context_changes():
    model = built("attnres-full")
    same = torch.tensor([[0, 7, 7, 7, 7], [0, 3, 3, 3, 3]])
    found = content_dependence(model, same, n_boot=5, n_shuffles=2)  # any order is the same text
    assert found["profile_change"].values.max() == 0
    assert found["profile_change_interval"].values.max() == 0
    found = content_dependence(model, TEXTS, n_boot=5, n_shuffles=2)
    assert float(found["profile_change"].sel(read="2.attn")) > 1e-6
    assert float(found["token_change"].sel(read="0.mlp")) > 1e-6  # attention has read other tokens
    # the profile moves less than single tokens do
    assert (found["profile_change"].values <= found["token_change"].values + 1e-12).all()
    wanted = [np.nanmean(np.abs(found["weight_shuffled"] - found["weight_mean"])[i]) for i in range(len(found["read"]))]
    np.testing.assert_allclose(found["profile_change"], wanted)
    assert "profile_change" not in content_dependence(model, TEXTS, n_boot=0, n_shuffles=0).dataset


def test_padding_and_the_split_into_passes_change_nothing(monkeypatch):
    model = built("mhc")
    found = content_dependence(model, TEXTS, n_boot=10)
    ids, mask = torch.cat([torch.full_like(TEXTS[:, :3], 6), TEXTS], dim=1), torch.ones(4, 10)
    mask[:, :3] = 0
    monkeypatch.setattr("t2lens.analysis.token_weights._AT_ONCE", {"source": 10, "mixing": 10})
    padded = content_dependence(model, ids, attention_mask=mask, n_boot=10)
    for name in found.dataset.data_vars:
        a, b = found[str(name)].values, padded[str(name)].values
        if a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, atol=1e-9)
        else:
            assert (a == b).all()


def test_a_source_that_takes_far_more_than_its_share_is_a_depth_sink():
    residual = AttnRes(query="none", key_norm="none", bias="per_source")
    model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=3, residual=residual), seed=0)
    model.residual.get_parameter("bias").data[:, 1] = 2.0
    found = content_dependence(model, TEXTS, n_boot=0)
    assert found["sink_share"].sel(source="0.attn") == 1
    assert found["n_reads"].sel(source="0.attn") == 5  # of seven reads one has one source and one two
    assert found["sink_share"].sel(source="embed") == 0
    assert any("0.attn (5 of 5 reads)" in note for note in found.notes)
    assert found["n_effective"].sel(read="0.mlp") < 2
    assert [row[-4] for row in found.rows] == ["0.attn"] * 6  # most weight on


def test_intervals_are_of_sequences_and_repeat_with_their_seed():
    model = built("attnres-full")
    found, again = (content_dependence(model, TEXTS, n_boot=30, seed=1) for _ in range(2))
    assert found.to_json() == again.to_json()
    other = content_dependence(model, TEXTS, n_boot=30, seed=2)
    assert not np.allclose(found["share_interval"], other["share_interval"], equal_nan=True)
    low, high = found["share_interval"].values[..., 0], found["share_interval"].values[..., 1]
    assert (low[~np.isnan(low)] <= high[~np.isnan(high)]).all() and not np.isnan(low).all()
    # the same sequence four times: no draw is unlike another
    flat = content_dependence(model, TEXTS[:1].repeat(4, 1), n_boot=10, n_shuffles=0)
    bounds = flat["weight_mean_interval"].values
    np.testing.assert_allclose(bounds[..., 0], bounds[..., 1], atol=1e-12)
    one = content_dependence(model, TEXTS[:1], n_boot=10)
    assert np.isnan(one["share_interval"].values).all()
    assert np.isnan(one["share"].values).all() and any("give more texts" in note for note in one.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_finite(dtype):
    for name in ("attnres-full", "muddformer", "ddl"):
        wide = content_dependence(built(name), TEXTS, n_boot=0)
        found = content_dependence(built(name, dtype=dtype), TEXTS, n_boot=0)
        there = ~np.isnan(wide["weight_mean"].values)
        assert np.isfinite(found["weight_mean"].values[there]).all()
        scale = np.abs(wide["weight_mean"].values[there]).max()
        error = np.abs(found["weight_mean"].values - wide["weight_mean"].values)[there].max() / scale
        assert error < {torch.float32: 1e-4, torch.float16: 0.02}.get(dtype, 0.2)


def test_what_cannot_be_done_is_said():
    with pytest.raises(ValueError, match='has no depth weights of its own; over="mixing"'):
        content_dependence(built("ddl"), TEXTS, over="source")
    with pytest.raises(ValueError, match="over must be source or mixing, not 'depth'"):
        content_dependence(built("ddl"), TEXTS, over="depth")  # type: ignore[arg-type]
    for name in ("n_boot", "n_shuffles"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 0, not -1"):
            content_dependence(built("ddl"), TEXTS, **cast(Any, {name: -1}))


def test_the_command_writes_every_number(tmp_path):
    out = tmp_path / "content.json"
    args = ["analyze", "content", "In the beginning God", "--model", "attnres-block", "--n-boot", "5"]
    result = CliRunner().invoke(app, [*args, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "key-driven" in result.output
    assert json.loads(out.read_text())["variables"]["weight_mean"]["dims"] == ["read", "source"]


def test_bundled_systems_have_the_labels_of_their_equations():
    texts = ["In the beginning God created the heaven and the earth.", "And the earth was without form, and void."]
    for name, label in (("attnres-full", "key-driven"), ("elc-bert", "static"), ("muddformer", "content-driven")):
        found = content_dependence(t2lens.load(name), texts, n_boot=0)
        labels = found["label"].values.tolist()
        assert labels.count(label) > len(labels) / 2
        for chart in range(len(found.charts)):
            assert found.plot(chart).data

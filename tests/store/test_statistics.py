"""Streaming statistics are those of two passes over everything, however the tokens were divided."""

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import t2lens
from t2lens.analysis import content_dependence
from t2lens.analysis.variance import explain
from t2lens.cli import app
from t2lens.store import Store, collect, statistics
from t2lens.store.moments import Histogram, Moments
from t2lens.store.report import QUANTILES, report
from t2lens.store.statistics import tally
from t2lens.zoo.text import sample_texts
from tests.systems import SYSTEMS, random_tokens, tiny


def pieces(dice: np.random.Generator, n: int) -> list[np.ndarray]:
    return np.split(np.arange(n), np.sort(dice.integers(0, n, size=5)))


# --- the accumulators


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_moments_of_pieces_are_those_of_the_whole(offset: float) -> None:
    dice = np.random.default_rng()
    values = dice.normal(size=(500, 4)) * [1, 10, 0.1, 0] + offset
    groups = dice.integers(0, 7, size=500)
    found = [Moments(9, 4) for _ in range(2)]
    whole = Moments(1, 4)
    for i, rows in enumerate(pieces(dice, 500)):
        found[i % 2].add(values[rows], groups[rows])
        whole.add(values[rows])
    found[0].merge(found[1])
    assert found[0].n.tolist() == np.bincount(groups, minlength=9).tolist()
    for g in range(7):
        own = values[groups == g]
        np.testing.assert_allclose(found[0].means()[g], own.mean(axis=0), rtol=1e-13)
        np.testing.assert_allclose(found[0].std()[g], own.std(axis=0), rtol=1e-6 if offset else 1e-12, atol=1e-15)
    np.testing.assert_allclose(whole.std()[0], values.std(axis=0), rtol=1e-6 if offset else 1e-12, atol=1e-15)
    assert (found[0].m2[:, 3] == 0).all()  # a number that never changes has exactly no variance
    assert np.isnan(found[0].means()[8]).all()
    around, expected = found[0].sums_around(values.mean(axis=0))[2], values[groups == 2] - values.mean(axis=0)
    np.testing.assert_allclose(around, expected.sum(axis=0), rtol=1e-9, atol=1e-5 if offset else 1e-12)


def test_quantiles_are_within_the_stated_error() -> None:
    dice = np.random.default_rng()
    values = np.stack(
        [
            dice.normal(size=2000),
            np.exp(dice.normal(size=2000) * 4),
            dice.choice([0.0, 1.0, -3.0], size=2000),
            dice.random(2000) ** 20,
            -dice.random(2000),
        ],
        axis=1,
    )
    found = [Histogram(5), Histogram(5)]
    for i, rows in enumerate(pieces(dice, 2000)):
        found[i % 2].add(values[rows])
    found[0].merge(found[1])
    assert (found[0].counts.sum(axis=1) == 2000).all()
    for q in (0, 1e-4, *QUANTILES, 1):
        exact = np.quantile(values, q, axis=0, method="inverted_cdf")
        assert (np.abs(found[0].quantile(q) - exact) <= Histogram.error * np.abs(exact) + 2**-29).all(), q
    assert np.isnan(Histogram(2).quantile(0.5)).all()


# --- over a model


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_number_is_that_of_two_passes(system: str) -> None:
    seed = random.randrange(1000)
    model, tokens = tiny(system, seed=seed), random_tokens(seed)
    tokens = torch.cat([tokens, tokens.flip(0) % 7])
    mask = torch.ones_like(tokens)
    mask[0, -1] = 0
    found = statistics(model, tokens, attention_mask=mask, batch_size=2, n_tokens=50)
    seen = tally(model, tokens, attention_mask=mask)
    ids, places = tokens[mask.bool()].numpy(), (mask.cumsum(1) - 1)[mask.bool()].numpy()
    kept = t2lens.capture(model, tokens, [part.key for part in seen.parts], attention_mask=mask)
    for part in seen.parts:
        values = kept[part.key][mask.bool()].double().reshape(len(ids), -1).numpy()
        shares = explain(values, ids, places)
        read, family = part.about.get("read"), part.family

        def of(name: str, family: str = family, read: Any = read, part: Any = part) -> np.ndarray:
            x = found[f"{family}_{name}"]
            if family == "other":
                return x.sel(entry=[part.key + own for own in part.names]).values
            x = x.sel(read=read)
            return x.sel(source=part.about["labels"]["source"]).values if family == "weight" else x.values[None]

        np.testing.assert_allclose(of("mean"), values.mean(axis=0), rtol=0, atol=1e-12)
        np.testing.assert_allclose(of("std"), values.std(axis=0), rtol=0, atol=1e-10)
        np.testing.assert_allclose(of("min"), values.min(axis=0), atol=1e-12)
        np.testing.assert_allclose(of("max"), values.max(axis=0), atol=1e-12)
        exact = np.quantile(values, QUANTILES, axis=0, method="inverted_cdf").T
        assert (np.abs(of("quantile") - exact) <= Histogram.error * np.abs(exact) + 1e-8).all()
        for i in range(places.max() + 1):
            np.testing.assert_allclose(of("mean_by_pos")[..., i], values[places == i].mean(axis=0), rtol=0, atol=1e-12)
        for i, token in enumerate(found.dataset["token_id"].values):
            np.testing.assert_allclose(of("mean_by_token")[..., i], values[ids == token].mean(axis=0), atol=1e-12)
        with np.errstate(invalid="ignore", divide="ignore"):
            expected = np.where(shares.total[:, None] > 1e-20, shares.adjusted / shares.total[:, None], np.nan)
        there = ~np.isnan(expected)
        np.testing.assert_allclose(of("part_share")[there], expected[there], atol=1e-8)
    assert not any(point.active for point in model.hook_dict.values())


def test_shares_are_those_of_content_dependence() -> None:
    model, texts = t2lens.load("attnres-block").double(), sample_texts(6)
    found, content = statistics(model, texts), content_dependence(model, texts, n_shuffles=0, n_boot=0)
    reads, sources = content["read"].values, content["source"].values
    for name, own in (("share", "share"), ("weight_mean", "weight_mean"), ("weight_std", "weight_std")):
        mine = found[own].sel(read=reads)
        mine = mine.sel(source=sources) if "source" in mine.dims else mine
        np.testing.assert_allclose(mine.values, content[name].values, atol=1e-9)
    np.testing.assert_allclose(
        found["weight_part_share"].sel(read=reads, source=sources), content["route_share"], atol=1e-9
    )


def test_workers_together_find_what_one_finds() -> None:
    model, texts = tiny("attnres-full"), torch.randint(50, (11, 9))
    whole = tally(model, texts, batch_size=2)
    shares = [tally(model, texts, batch_size=2, rank=rank, world=3) for rank in range(3)]
    assert all(0 < share.n < whole.n for share in shares)
    merged = pickle.loads(pickle.dumps(shares[2])).merge(shares[0]).merge(shares[1])
    assert (merged.n, merged.n_sequences) == (whole.n, whole.n_sequences) == (99, 11)
    np.testing.assert_array_equal(merged.count, whole.count)
    for q in QUANTILES:
        np.testing.assert_array_equal(merged.histogram.quantile(q), whole.histogram.quantile(q))
    one, other = report(whole, model).dataset, report(merged, model).dataset
    for name in map(str, one):
        np.testing.assert_allclose(other[name].values, one[name].values, rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="of other models"):
        merged.merge(tally(tiny("attnres-full", seed=1), texts))
    with pytest.raises(ValueError, match="counts by token and the other"):
        merged.merge(tally(model, texts, by_token=False))


def test_a_store_gives_what_its_model_gives(tmp_path: Path) -> None:
    model = t2lens.load("attnres-block")
    what = ["depth weights", "residual norms", "hook_embed", "hook_embed|norm|mean:pos", "*pattern|mean:head|top:2"]
    store = Store(collect(model, sample_texts(8), tmp_path, what, n_pos=32, sequences_per_shard=5))
    asked = ["*hook_depth_attn*", "*hook_read*"]
    found = statistics(store, what=asked)
    direct = statistics(model, store["tokens"][:].long(), what=["depth weights", "residual norms"])
    assert found.title == direct.title
    assert found.dataset["token"].values.tolist() == direct.dataset["token"].values.tolist()
    for name in map(str, direct.dataset):
        ours = found[name].reindex_like(direct[name])
        np.testing.assert_allclose(ours.values, direct[name].values, atol=2e-5, rtol=2e-5)
    shares = [tally(store, what=asked, rank=rank, world=2) for rank in range(2)]
    np.testing.assert_allclose(
        report(shares[0].merge(shares[1]), store)["weight_mean"], found["weight_mean"], atol=1e-12
    )
    everything = statistics(store, by_token=False)
    assert "share" not in everything.dataset
    assert "hook_embed[127]" in everything["other_mean"].entry.values
    assert "blocks.2.attn.hook_pattern|mean:head|top:2[1]" in everything["other_mean"].entry.values


def test_a_corpus_is_packed_and_texts_may_come_one_by_one(tmp_path: Path) -> None:
    model, texts = t2lens.load("standard"), sample_texts(4)
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    found = statistics(model, tmp_path / "lines.jsonl", field="body", batch_size=2)
    flat = [i for text in texts for i in model.to_tokens(text)[0].tolist()]
    n_ctx = model.cfg.n_ctx
    rows = [flat[i : i + n_ctx] for i in range(0, len(flat), n_ctx)]
    mask = torch.tensor([[1] * len(row) + [0] * (n_ctx - len(row)) for row in rows])
    ids = torch.tensor([row + [0] * (n_ctx - len(row)) for row in rows])
    direct = statistics(model, ids, attention_mask=mask)
    assert found.title == direct.title == f"Statistics over {len(flat)} tokens of {len(rows)} sequence(s)"
    np.testing.assert_allclose(found["norm_mean"], direct["norm_mean"], rtol=1e-5)
    one_by_one = statistics(model, iter(texts), batch_size=3)
    np.testing.assert_allclose(one_by_one["norm_std"], statistics(model, texts)["norm_std"], rtol=1e-5)
    assert set(one_by_one["norm_mean"].dims) == {"read"}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("*hook_pattern", "has no row of fixed size"),
        ("hook_embed|pos:0:2", "has no row of fixed size"),
        ("hook_embed|mean:pos", "has no row of fixed size"),
    ],
)
def test_what_has_no_statistics_is_a_sentence(what: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        statistics(tiny("standard"), [[1, 2, 3]], what=what)


def test_bad_input_is_a_sentence(tmp_path: Path) -> None:
    model = tiny("attnres-full")
    with pytest.raises(ValueError, match="no text to make statistics of"):
        statistics(model, iter([]))
    with pytest.raises(ValueError, match="rank must lie"):
        tally(model, [[1, 2]], rank=1, world=1)
    run = collect(t2lens.load("standard"), sample_texts(2), tmp_path, "hook_embed|pos:1:2", n_pos=16)
    with pytest.raises(ValueError, match="take no input"):
        statistics(Store(run), ["text"])
    with pytest.raises(ValueError, match="has a number, or few, per token"):
        statistics(Store(run))
    broken = tiny("attnres-full")
    broken.W_E.data[3] = torch.nan
    with pytest.raises(ValueError, match=r"is not finite at \d of 3 tokens"):
        statistics(broken, [[1, 3, 2]])


def test_the_command_line_and_the_pictures(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = CliRunner().invoke(
        app, ["analyze", "statistics", "In the beginning", "--model", "attnres-full", "--json", str(file)]
    )
    assert done.exit_code == 0, done.output
    plain = json.loads(file.read_text())
    assert {"weight_mean", "weight_quantile", "share", "norm_mean_by_pos"} <= plain["variables"].keys()
    found = statistics(t2lens.load("ddl"), sample_texts(1))
    assert [found.plot(i) is not None for i in range(len(found.charts))] == [True] * 3
    assert any("hook_beta" in str(row[0]) for row in found.rows)
    assert "0.attn <- embed" in [row[0] for row in statistics(t2lens.load("elc-bert"), ["One line."]).rows]

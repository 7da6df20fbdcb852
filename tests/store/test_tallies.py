"""Statistics as a run: the same bytes and numbers for any number of workers, and those of counting at once."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import t2lens
from t2lens.analysis import load_finding
from t2lens.cli import app
from t2lens.store import Store, collect, corpus_statistics, make_run, make_statistics_run, read_plan, run_shards
from t2lens.store import read_statistics as read
from t2lens.store.bundled import STATISTICS, write_corpus_statistics
from t2lens.store.launch import ModelSource, StoreSource, launch
from t2lens.store.report import report
from t2lens.store.statistics import statistics, tally
from t2lens.store.upkeep import examine
from t2lens.store.worker import missing
from t2lens.zoo.text import sample_texts
from tests.store.conftest import files

WHAT = ["depth weights", "residual norms", "hook_embed", "*hook_pattern|mean:head|top:2"]
OPTIONS: dict[str, Any] = {"n_pos": 16, "sequences_per_shard": 5, "batch_size": 2, "statistics": True}


def same(one: Any, other: Any, exact: bool = True) -> None:
    assert list(one.dataset) == list(other.dataset)
    for name in one.dataset.variables:
        a, b = one.dataset[name].values, other.dataset[name].values
        if exact or a.dtype.kind not in "f":
            np.testing.assert_array_equal(a, b, err_msg=str(name))
        else:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=str(name))


@pytest.mark.parametrize("by_token", [True, False])
def test_shards_of_statistics_merge_to_what_is_counted_at_once(small_model, ids, tmp_path: Path, by_token) -> None:
    run = collect(small_model, ids(410), tmp_path, WHAT, **OPTIONS, by_token=by_token)
    tokens = torch.from_numpy(np.load(run / "tokens.npy").astype(np.int64))
    assert tokens.shape == (25, 16)
    at_once = statistics(small_model, tokens, what=WHAT, by_token=by_token, batch_size=2)
    found = read(run)
    assert found.title == at_once.title
    same(found, at_once.__class__(**{**vars(at_once), "dataset": at_once.dataset.sel(pos=slice(0, 15))}), exact=False)
    assert ("share" in found.dataset) == by_token


def test_any_number_of_workers_gives_the_same_bytes_and_so_the_same_numbers(small_model, ids, tmp_path) -> None:
    alone = collect(small_model, ids(410), tmp_path / "a", WHAT, **OPTIONS)
    shared = make_run(small_model, ids(410), tmp_path / "b", WHAT, **OPTIONS)
    for rank in (2, 0, 1):
        list(run_shards(small_model, shared, rank=rank, world=3))
    assert files(alone) == files(shared)
    same(read(alone), read(shared))


def test_a_store_is_counted_in_shards_too(small_model, small, ids, tmp_path: Path) -> None:
    options = {name: value for name, value in OPTIONS.items() if name != "statistics"}
    store = Store(collect(small_model, ids(410), tmp_path / "runs", [*WHAT, "hook_embed|pos:0:2"], **options))
    run = make_statistics_run(store, tmp_path / "runs", sequences_per_shard=4)
    assert list(launch(run, "local", StoreSource(store.path), model=store)) == list(range(7))
    same(read(run), statistics(store), exact=False)
    assert not any("index" in key or "pos:0:2" in key for key in read_plan(run).what)
    direct = collect(small_model, ids(410), tmp_path / "direct", WHAT, **OPTIONS)
    for name in ("weight_mean", "norm_std", "share"):
        np.testing.assert_allclose(read(run)[name], read(direct)[name], rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="counts over the store"):
        next(run_shards(small_model, run))
    with pytest.raises(ValueError, match="does not count over the store"):
        next(run_shards(store, direct))
    (Path(store.path) / "shards" / "000001.json").unlink()
    with pytest.raises(ValueError, match=r"1 of 5 shards of .* are not there yet"):
        make_statistics_run(Store(store.path), tmp_path)


def test_what_is_no_finished_run_of_statistics_is_a_sentence(small_model, ids, tmp_path: Path) -> None:
    run = make_run(small_model, ids(410), tmp_path, WHAT, **OPTIONS)
    with pytest.raises(ValueError, match=r"5 of 5 shards of .* are not there yet"):
        read(run)
    with pytest.raises(ValueError, match="holds statistics; t2lens store stats shows them"):
        Store(run)
    with pytest.raises(ValueError, match="has no row of fixed size"):
        make_run(small_model, ids(410), tmp_path, "*hook_pattern", **OPTIONS)
    with pytest.raises(ValueError, match="they take no dtype"):
        make_run(small_model, ids(410), tmp_path, WHAT, **OPTIONS, dtype="bfloat16")
    kept = collect(small_model, ids(410), tmp_path, "hook_embed", n_pos=16)
    with pytest.raises(ValueError, match="is a run of captures, not of statistics"):
        read(kept)
    list(run_shards(small_model, run))
    *_, state = examine(run)
    assert state.whole
    (run / "shards" / "000002.safetensors").write_bytes(b"short")
    assert missing(run) == [2]
    assert list(run_shards(small_model, run)) == [2]
    assert read(run).dataset["weight_mean"].dims == ("read", "source")


@pytest.mark.slow
def test_workers_that_are_killed_change_nothing(small_model, small, ids, tmp_path: Path) -> None:
    options = {**OPTIONS, "sequences_per_shard": 1, "n_pos": 8}
    whole = collect(small_model, ids(1600), tmp_path / "whole", WHAT, **options)
    run = make_run(small_model, ids(1600), tmp_path / "runs", WHAT, **options)
    for _ in range(3):
        pid = os.fork()
        if not pid:
            list(run_shards(small_model, run))
            os._exit(0)
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert missing(run)
    list(launch(run, "local", ModelSource(str(small)), workers=2))
    for leftover in (run / "shards").glob(".*"):
        leftover.unlink()
    assert files(run) == files(whole)


def test_the_command_line(small, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": text}) for text in sample_texts(6)))

    def run(*arguments: Any) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    options = ["--out", tmp_path / "runs", "--n-pos", "32", "--shard", "7"]
    made = run("capture", small, corpus, "--statistics", *options)
    assert made.exit_code == 0, made.output
    folder, file = Path(made.stdout.strip()), tmp_path / "found.json"
    assert "statistics of" in made.stderr
    shown = run("store", "stats", folder, "--rows", "3", "--tokens", "4", "--json", file)
    assert shown.exit_code == 0, shown.output
    assert "Statistics over" in shown.stdout
    assert load_finding(file).dataset.sizes["token"] == 4
    kept = Path(run("capture", small, corpus, *options).stdout.strip())
    again = run("store", "stats", kept, "--json", tmp_path / "again.json", "--what", "*hook_read*", "--no-by-token")
    assert again.exit_code == 0, again.output
    one, other = (load_finding(path)["norm_mean"] for path in (tmp_path / "again.json", file))
    np.testing.assert_allclose(one, other, rtol=1e-12)
    bad = run("store", "stats", folder, "--what", "x")
    assert (bad.exit_code, bad.stderr.count("\n")) == (2, 1)
    wrong = run("capture", "--resume", next(p for p in (tmp_path / "runs").iterdir() if p not in (folder, kept)))
    assert "t2lens store stats STORE goes on with it" in wrong.stderr


# --- beside the weights


def names() -> list[str]:
    return [info.name for info in t2lens.list_models()]


@pytest.mark.parametrize("name", names())
def test_every_bundled_model_has_statistics_of_the_held_out_text(name: str) -> None:
    found = corpus_statistics(name)
    assert int(found.dataset["pos_count"].sum()) > 150_000
    assert found["norm_mean_by_pos"].dims == ("read", "pos")
    assert found["pos"].values.tolist() == ["0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127", "128-255"]
    assert found.charts
    assert any("held-out text" in note for note in found.notes)


@pytest.mark.parametrize("name", ["attnres-full", "muddformer", "ddl"])
def test_the_part_that_can_be_counted_again_here_is_the_same(name: str) -> None:
    model, found = t2lens.load(name), corpus_statistics(name)
    again = statistics(model, sample_texts())
    for family in ("weight", "norm", "other"):
        if f"{family}_mean" in again.dataset:
            kept, now = found[f"{family}_passages"], again[f"{family}_mean"]
            assert kept.dims == now.dims
            np.testing.assert_allclose(kept, now.reindex_like(kept), rtol=6e-5, atol=1e-5)  # five digits
            # the passages are some 3% of the text that was counted: near, and not the same
            of_all = found[f"{family}_mean"].values.ravel()
            there = ~np.isnan(of_all)
            assert np.corrcoef(of_all[there], now.reindex_like(kept).values.ravel()[there])[0, 1] > 0.97
            assert not np.allclose(of_all[there], kept.values.ravel()[there], rtol=1e-3)


def test_all_of_them_together_are_small() -> None:
    sizes = [(Path(t2lens.__file__).parent / "zoo" / "models" / name / STATISTICS).stat().st_size for name in names()]
    assert max(sizes) < 150_000
    assert sum(sizes) < 1_500_000


def test_statistics_of_a_folder_and_of_other_weights(small, small_model, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small, tmp_path / "small"))
    with pytest.raises(ValueError, match=f"it has no {STATISTICS}"):
        corpus_statistics(folder)
    seen = tally(small_model, sample_texts(4))
    file = write_corpus_statistics(seen, folder, "four passages")
    found = corpus_statistics(folder)
    assert found.notes[0] == "Over four passages."
    exact = report(seen, small_model)["weight_mean"]
    np.testing.assert_allclose(found["weight_mean"], exact, rtol=1e-4)
    assert write_corpus_statistics(seen, folder, "four passages").read_bytes() == file.read_bytes()
    with pytest.raises(ValueError, match="are of other weights"):
        write_corpus_statistics(seen, "attnres-full", "x")
    plain = json.loads(gzip.decompress(file.read_bytes()))
    file.write_bytes(gzip.compress(json.dumps({**plain, "weights_sha256": "0"}).encode()))
    with pytest.raises(ValueError, match="statistics of other weights than those of small"):
        corpus_statistics(folder)
    file.write_bytes(b"no")
    with pytest.raises(ValueError, match="is damaged"):
        corpus_statistics(folder)
    with pytest.raises(ValueError, match="did you mean 'attnres-full'"):
        corpus_statistics("attnres-ful")

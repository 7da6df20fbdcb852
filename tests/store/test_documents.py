"""What is known of documents is kept beside them; directions too; a corpus is tokenised once per launch."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.numpy import save_file
from typer.testing import CliRunner

import t2lens
from t2lens.cli import app
from t2lens.store import Store, collect, make_run, read_plan, run_shards
from t2lens.store.launch import once
from t2lens.store.packing import read_directions
from t2lens.store.upkeep import examine
from tests.store.conftest import WORDS
from tests.store.servers import served

ROWS: list[dict[str, Any]] = [
    {"text": WORDS * 2, "author": "A", "year": 1611, "score": 0.5, "tags": ["x", "y"]},
    {"text": "  ", "author": "nobody"},
    {"text": WORDS, "author": "B <b>", "year": None},
    {"text": WORDS * 3, "author": "\u00e9", "score": float("nan"), "more": {"a": 1}},
    {"text": WORDS * 9},
    {"text": WORDS},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


def test_other_fields_of_a_row_are_kept_and_joined(small_model, corpus, tmp_path: Path) -> None:
    run = collect(small_model, corpus, tmp_path / "runs", "hook_embed|norm", n_pos=16, sequences_per_shard=2)
    store = Store(run)
    assert store.plan.metadata == ("author", "year", "score", "tags", "more")
    expected = [{k: v for k, v in row.items() if k != "text"} for row in ROWS if row["text"].strip()]
    expected[2]["score"] = None  # JSON has no NaN
    n = store.plan.n_documents
    assert store.metadata() == expected[:n]
    assert store.metadata(-1) == expected[n - 1]
    assert store.metadata(store.document_of(0, 0)) == expected[0]
    assert store.metadata([2, 0]) == [expected[2], expected[0]]
    assert store.metadata([]) == []
    with pytest.raises(IndexError):
        store.metadata(n)
    view = store.to_xarray()
    for (i, j), document in np.ndenumerate(store.document_of(np.arange(len(view["sequence"]))[:, None], np.arange(16))):
        assert view["document.author"].values[i, j] == expected[document].get("author")
    table = pyarrow.parquet.read_table(store.export(tmp_path / "all.parquet"))
    assert table["document.year"].to_pylist()[0] == "1611"
    assert table["document.tags"].to_pylist()[0] == '["x", "y"]'
    assert table["document.author"].to_pylist() == view["document.author"].values.ravel().tolist()
    with served(run) as (url, _):
        assert Store(url).metadata([1]) == [expected[1]]


def test_fields_are_chosen_and_none_leaves_no_file(small_model, corpus, tmp_path: Path) -> None:
    chosen = make_run(small_model, corpus, tmp_path, "hook_embed|norm", n_pos=16, metadata=["year", "nothing"])
    assert read_plan(chosen).metadata == ("year",)
    none = make_run(small_model, corpus, tmp_path, "hook_embed|norm", n_pos=16, metadata=())
    assert not list(none.glob("metadata*"))
    done = CliRunner().invoke(
        app, ["capture", "attnres-full", str(corpus), "--out", str(tmp_path), "--n-pos", "16", "--metadata", ""]
    )
    assert read_plan(done.stdout.strip()).metadata == ()


def test_parquet_datasets_and_folders_have_them_too(small_model, tmp_path: Path) -> None:
    import datasets

    rows = {"text": [WORDS] * 3, "day": [datetime.date(1611, 5, 2)] * 3, "n": [1, 2, 3]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "t.parquet")
    datasets.Dataset.from_dict({**rows, "day": ["1611-05-02"] * 3}).save_to_disk(tmp_path / "data")
    for name in ("t.parquet", "data"):
        run = collect(small_model, tmp_path / name, tmp_path / "runs", "hook_embed|norm", n_pos=8)
        assert Store(run).metadata(1) == {"day": "1611-05-02", "n": 2}
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text(WORDS)
    (folder / "b" / "c.txt").write_text(WORDS)
    run = collect(small_model, folder, tmp_path / "runs", "hook_embed|norm", n_pos=8)
    assert Store(run).metadata() == [{"file": "a.txt"}, {"file": "b/c.txt"}]
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"holds several splits \(train\); give the folder of one"):
        make_run(small_model, tmp_path / "splits", tmp_path / "runs", "hook_embed|norm")


def test_damage_of_what_is_known_is_found_and_put_back(small_model, corpus, tmp_path: Path) -> None:
    def again() -> Path:
        return collect(small_model, corpus, tmp_path / "runs", "hook_embed|norm", n_pos=16)

    run = again()
    (run / "metadata.jsonl").write_bytes(b"x" * 20)
    *_, state = examine(run)
    assert state.damaged == ["metadata.jsonl is damaged; the same capture, given the corpus again, puts it back"]
    with pytest.raises(ValueError, match=r"damaged|cut off"):
        Store(run).metadata(0)
    assert again() == run
    *_, state = examine(run)
    assert state.whole


# --- directions


def test_projections_of_a_run_are_inner_products_with_the_directions_that_it_keeps(small_model, ids, tmp_path) -> None:
    dice = np.random.default_rng()
    save_file({"probe": dice.normal(size=(3, 16)), "other": np.eye(2, 16, dtype="f4")}, tmp_path / "d.safetensors")
    directions = read_directions(tmp_path / "d.safetensors")
    what = ["blocks.1.hook_mlp_out|project:probe", "hook_embed|project:probe|norm"]
    run = collect(small_model, ids(200), tmp_path / "runs", what, n_pos=16, batch_size=4, directions=directions)
    store, key = Store(run), "blocks.1.hook_mlp_out|project:probe"
    exact = t2lens.capture(small_model, store["tokens"][:].long(), "blocks.1.hook_mlp_out", batch_size=4)
    expected = exact["blocks.1.hook_mlp_out"] @ directions["probe"].T
    assert torch.allclose(store[key][:], expected, atol=1e-6)
    assert store[key].axes == ("pos", "probe")
    assert store.about(key)["meaning"] == "inner products with the directions 'probe' of what 1.mlp writes (the atom)"
    assert set(store.plan.files) >= {"directions.safetensors", "tokens.npy"}
    (run / "shards" / "000000.json").unlink()
    assert list(run_shards(small_model, run)) == [0]  # the run has its directions
    changed = {**directions, "probe": directions["probe"] + 1}
    assert make_run(small_model, ids(200), tmp_path / "runs", what, n_pos=16, batch_size=4, directions=changed) != run
    (run / "shards" / "000000.json").unlink()
    (run / "directions.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"directions\.safetensors is damaged; the same capture"):
        next(run_shards(small_model, run))


def test_directions_on_the_command_line_and_what_is_wrong_with_them(small, small_model, ids, tmp_path: Path) -> None:
    np.save(tmp_path / "way.npy", np.eye(2, 16))

    def run(*arguments: Any) -> Any:
        start = ["capture", small, ids(200), "--out", tmp_path / "runs", "--n-pos", "16", "--what"]
        return CliRunner().invoke(app, [str(argument) for argument in (*start, *arguments)])

    done = run("hook_embed|project:way", "--directions", tmp_path / "way.npy")
    assert done.exit_code == 0, done.output
    found = Store(done.stdout.strip())["hook_embed|project:way"][:]
    ids_ = np.load(Path(done.stdout.strip()) / "tokens.npy").astype(np.int64)
    assert torch.equal(found, small_model.W_E[torch.from_numpy(ids_)][..., :2])
    np.save(tmp_path / "narrow.npy", np.eye(2, 15))
    np.save(tmp_path / "flat.npy", np.ones(16))
    for arguments, words in (
        (["hook_embed|project:way"], "names directions that were not given"),
        (["hook_embed|project:narrow", "--directions", tmp_path / "narrow.npy"], "have 15 numbers each"),
        (["hook_embed|project:flat", "--directions", tmp_path / "flat.npy"], "are finite floats [n, d]; 'flat' is"),
        (["hook_embed|project:x", "--directions", tmp_path / "none.safetensors"], "There is no file"),
        (["hook_embed|project:x", "--directions", tmp_path / "none.npy"], "is not a readable .npy file"),
    ):
        bad = run(*arguments)
        assert bad.exit_code == 2, bad.output
        assert bad.stderr.count("\n") == 1
        assert words in bad.stderr


# --- once


def _ask(out: Path, source: Path, log: Path) -> None:
    def make() -> Path:
        with log.open("a") as file:
            file.write("made\n")
        time.sleep(0.3)
        (out / "run").mkdir()
        (out / "run" / "plan.json").write_text("{}")
        return out / "run"

    assert once(out, ["same"], source, 3, make) == out / "run"


def test_of_processes_that_ask_for_the_same_one_makes_it(tmp_path: Path) -> None:
    source, out, log = tmp_path / "corpus.txt", tmp_path / "out", tmp_path / "log"
    source.write_text("text")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_ask, args=(out, source, log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text() == "made\n"
    assert [path.name for path in out.iterdir()] == ["run"]


def test_a_maker_that_fails_or_another_corpus_holds_nobody_up(tmp_path: Path) -> None:
    source, out = tmp_path / "corpus.txt", tmp_path / "out"
    source.write_text("text")
    with pytest.raises(ValueError, match="no"):
        once(out, ["same"], source, 2, lambda: (_ for _ in ()).throw(ValueError("no")))
    made = []

    def make() -> Path:
        made.append(1)
        (out / "run").mkdir(exist_ok=True)
        (out / "run" / "plan.json").write_text("{}")
        return out / "run"

    once(out, ["same"], source, 5, make)
    once(out, ["same"], source, 5, make)
    assert len(made) == 1
    source.write_text("another text")
    once(out, ["same"], source, 5, make)
    assert len(made) == 2

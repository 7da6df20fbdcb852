"""Runs on disk: what is read is what the model computed, whoever made it and however often it was killed."""

import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.store import Store, collect, make_run, read_plan, run_shards
from t2lens.store.upkeep import examine, repair_run
from t2lens.store.worker import missing
from t2lens.zoo.text import sample_texts

WHAT = ["depth weights", "gates", "residual norms", "blocks.3.hook_mlp_out", "*hook_pattern|mean:head|top:4"]


@pytest.fixture(scope="module")
def model() -> Any:
    return t2lens.load("attnres-block")


def files(run: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(run.rglob("*")) if p.is_file()}


def test_what_is_read_is_what_the_model_computed(model, tmp_path: Path) -> None:
    run = collect(model, sample_texts(6), tmp_path, WHAT, n_pos=24, sequences_per_shard=5, batch_size=2)
    store = Store(run)
    assert store.check() == []
    assert not store.missing
    tokens = store["tokens"][:]
    assert tokens.shape == (store.plan.n_sequences, 24)
    kept = t2lens.capture(model, tokens.long(), WHAT, batch_size=2)
    dice = random.Random(0)
    assert set(store) == set(kept)
    for key in store:
        whole = kept[key]
        assert store[key].shape == tuple(whole.shape)
        assert torch.equal(store[key][:], whole), key
        i, a = dice.randrange(len(whole)), dice.randrange(20)
        assert torch.equal(store[key][i, a : a + 3], whole[i, a : a + 3])
        assert torch.equal(store[key][-1, -2], whole[-1, -2])
        assert torch.equal(store[key][[0, i], :4], whole[[0, i], :4])
        if whole.ndim > 2:
            assert torch.equal(store[key][1:3, 2, 0], whole[1:3, 2, 0])
            assert torch.equal(store[key][i, :, -1], whole[i, :, -1])


def test_documents_are_packed_without_a_gap(model, tmp_path: Path) -> None:
    texts = sample_texts(5)
    store = Store(collect(model, texts, tmp_path, "hook_embed|norm", n_pos=32))
    flat = store["tokens"][:].flatten().tolist()
    expected = [i for text in texts for i in model.to_tokens(text)[0].tolist()]
    assert flat == expected[: len(flat)]
    assert len(expected) - len(flat) < 32
    for (start, length), text in zip(store.documents.tolist(), texts, strict=False):
        assert flat[start : start + length] == model.to_tokens(text)[0].tolist()[: len(flat) - start]


def test_workers_make_the_same_bytes_in_any_number(model, tmp_path: Path) -> None:
    alone = collect(model, sample_texts(8), tmp_path / "a", WHAT, n_pos=16, sequences_per_shard=3)
    shared = make_run(model, sample_texts(8), tmp_path / "b", WHAT, n_pos=16, sequences_per_shard=3)
    for rank in (2, 0, 1):
        list(run_shards(model, shared, rank=rank, world=3))
    assert files(alone) == files(shared)
    assert alone.name == shared.name


def test_a_run_goes_on_where_it_stopped_and_damage_is_found(model, tmp_path: Path) -> None:
    run = collect(model, sample_texts(8), tmp_path, WHAT, n_pos=16, sequences_per_shard=3)
    whole = files(run)
    (run / "shards" / "000001.json").unlink()
    (run / "shards" / "000002.safetensors").write_bytes(b"short")
    store = Store(run)
    assert store.missing == (1, 2)
    with pytest.raises(ValueError, match="lies in shard 1, which is not finished"):
        store["tokens"][3]
    assert list(run_shards(model, run)) == [1, 2]
    assert files(run) == whole
    file = run / "shards" / "000000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert Store(run).check() == ["shard 0 is damaged: its SHA-256 is not that of its record"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks workers that have the model")
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_twenty_times_while_it_writes_the_run_ends_with_the_same_bytes(model, tmp_path: Path, workers) -> None:
    options: dict[str, Any] = {"n_pos": 8, "sequences_per_shard": 2, "batch_size": 1}
    whole = collect(model, sample_texts(10), tmp_path / "whole", WHAT, **options)
    run = make_run(model, sample_texts(10), tmp_path / "killed", WHAT, **options)
    shards, dice = run / "shards", random.Random(workers)

    def start(rank: int) -> int:
        pid = os.fork()
        if not pid:
            list(run_shards(model, run, rank=rank, world=workers))
            os._exit(0)
        return pid

    def wait_for(pattern: str, more_than: int) -> None:
        deadline = time.monotonic() + 60
        while len(list(shards.glob(pattern))) <= more_than:
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    for kill in range(20):
        there, halves = len(list(shards.glob("*.json"))), len(list(shards.glob(".*")))
        pids = [start(rank) for rank in range(workers)]
        wait_for("*.json", there)  # at work: it has committed a shard
        if kill % 2:
            wait_for(".*", halves)  # in the middle of a file
        else:
            time.sleep(dice.uniform(0, 0.06))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [signal.SIGKILL] * workers
        *_, state = examine(run)
        assert not state.damaged
    assert len(missing(run)) > 0  # none of them came too late
    assert len(state.leftovers) >= 5
    list(run_shards(model, run))
    assert len(repair_run(run)) == len(state.leftovers)
    assert files(run) == files(whole)


def test_other_weights_under_an_old_plan_are_refused(model, tmp_path: Path) -> None:
    run = make_run(model, sample_texts(4), tmp_path, "hook_embed|norm", n_pos=16)
    with pytest.raises(ValueError, match="planned for other weights"):
        list(run_shards(t2lens.load("attnres-full"), run))


def test_the_stored_dtype_is_chosen(model, tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float8_e4m3fn"):
        store = Store(collect(model, sample_texts(3), tmp_path, "hook_read_final", n_pos=16, dtype=dtype))
        got = store["hook_read_final"][0, 2:5]
        assert got.dtype == getattr(torch, dtype)
        exact = t2lens.capture(model, store["tokens"][:1].long(), "hook_read_final")["hook_read_final"][0, 2:5]
        assert torch.equal(got.float(), exact.to(got.dtype).float())


def test_corpora_of_every_kind_give_the_same_tokens(model, tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    texts = sample_texts(4)
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "table.parquet")
    datasets.Dataset.from_dict({"body": texts}).save_to_disk(tmp_path / "data")
    folder = tmp_path / "folder"
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    ids = [i for text in texts for i in model.to_tokens(text)[0].tolist()]
    np.save(tmp_path / "ids.npy", np.array(ids, dtype=np.uint16))
    seen = set()
    for name in ("lines.jsonl", "table.parquet", "data", "folder", "ids.npy"):
        run = make_run(model, tmp_path / name, tmp_path / "runs", "hook_embed|norm", n_pos=16, field="body")
        seen.add(read_plan(run).files["tokens.npy"])
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"good \xff bad", r"a.txt is not UTF-8 \(byte 5 is 0xff\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \xfe}', "line 2 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\nno', "line 2 is not JSON"),
        ("a.jsonl", b'{"txt": "x"}', "line 1 has no text in the field 'text'; it has txt"),
        ("a.parquet", b"PAR1", "not a readable parquet file"),
        ("a.npy", b"x", "not a readable .npy file"),
        ("a.csv", b"x", "holds no .txt, .jsonl, .parquet file"),
        ("a.txt", b"short", "at least one sequence of 256 is needed"),
    ],
)
def test_a_bad_corpus_is_one_sentence_and_leaves_nothing(
    model, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        make_run(model, tmp_path / name, tmp_path / "runs", "hook_embed|norm")
    assert not list((tmp_path / "runs").iterdir())


def test_ids_of_another_tokenizer_are_refused(model, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.full((4, 256), 60_000))
    with pytest.raises(ValueError, match=r"token id 60000, outside the vocabulary 0\.\.2047"):
        make_run(model, tmp_path / "ids.npy", tmp_path / "runs", "hook_embed|norm")


def test_a_full_disk_loses_nothing(model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from t2lens.store import worker

    run = make_run(model, sample_texts(8), tmp_path, "depth weights", n_pos=16, sequences_per_shard=3)
    write, written = worker.write_file, []

    def full(path: Path, data: bytes) -> Path:
        if len(written) == 2:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)
        return write(path, data)

    monkeypatch.setattr(worker, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        list(run_shards(model, run))
    monkeypatch.undo()
    assert len(Store(run).missing) == read_plan(run).n_shards - 2
    list(run_shards(model, run))
    assert Store(run).check() == []

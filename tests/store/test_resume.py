"""Whatever happens to a run, nothing that is committed is lost, and it ends with the bytes of an undisturbed one."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.files import hold
from t2lens.store import Store, collect, make_run, read_plan, run_shards
from t2lens.store import worker as worker_module
from t2lens.store.upkeep import Health, examine, repair_run
from t2lens.store.worker import missing
from tests.store.conftest import WORDS, files

OPTIONS: dict[str, Any] = {"n_pos": 16, "sequences_per_shard": 4, "batch_size": 3}
WHAT = ["depth weights", "residual norms", "atoms"]


def state(run: Path) -> Health:
    *_, last = examine(run)
    return last


@pytest.fixture
def run(small_model, ids, tmp_path: Path) -> Path:
    return collect(small_model, ids(400), tmp_path / "runs", WHAT, **OPTIONS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=600k", "none", folder]).returncode:
        pytest.skip("a file system of a chosen size cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)  # tracebacks hold maps of its files


def test_a_full_disk_is_an_error_nothing_is_lost_and_there_is_a_way_on(small_model, ids, small_disk, tmp_path) -> None:
    whole = collect(small_model, ids(8000), tmp_path / "whole", WHAT, **OPTIONS)
    run = make_run(small_model, ids(8000), small_disk, WHAT, **OPTIONS)
    with pytest.raises(OSError, match=r"has 3\.\d+ MB to write \(404 bytes per token\), and \d+ kB are free"):
        worker_module.check_room(run)
    with pytest.raises(OSError, match="No space left on device; what is committed stays, and the same capture goes on"):
        list(run_shards(small_model, run))
    done = set(range(read_plan(run).n_shards)) - set(missing(run))
    assert 0 < len(done) < read_plan(run).n_shards
    assert state(run).damaged == []
    assert not list((run / "shards").glob(".*"))
    kept = {name: digest for name, digest in files(run).items() if name.endswith("safetensors")}
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    assert not done & set(run_shards(small_model, run))
    assert files(run) == files(whole)
    assert kept.items() <= files(run).items()


def test_a_file_that_may_not_grow_is_an_error_and_leaves_nothing_half(small_model, ids, tmp_path) -> None:
    run = make_run(small_model, ids(400), tmp_path, WHAT, **OPTIONS)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        try:
            list(run_shards(small_model, run))
        except OSError as error:
            os._exit(0 if "File too large; what is committed stays" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert list((run / "shards").iterdir()) == []
    list(run_shards(small_model, run))
    assert state(run).whole


@pytest.mark.parametrize("name", ["tokens.npy", "documents.npy", "vocabulary.json", "plan.json", "shards"])
@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_half_deleted_folder_is_put_back_by_the_same_capture(run, small_model, ids, name: str, how: str) -> None:
    whole = files(run)
    if name == "shards":
        shutil.rmtree(run / "shards")
    elif how == "gone":
        (run / name).unlink()
    else:
        data = bytearray((run / name).read_bytes())
        data[-3] ^= 1
        (run / name).write_bytes(data)
    if name == "plan.json":
        with pytest.raises(ValueError, match=r"it has no plan\.json" if how == "gone" else r"plan\.json is damaged"):
            list(run_shards(small_model, run))
    else:
        assert not state(run).whole
    if name == "tokens.npy":
        fault = "missing" if how == "gone" else "damaged"
        with pytest.raises(ValueError, match=rf"tokens\.npy is {fault}; the same capture, given the corpus again"):
            list(run_shards(small_model, run))
    assert collect(small_model, ids(400), run.parent, WHAT, **OPTIONS) == run
    assert files(run) == whole
    assert state(run).whole


def test_a_plan_that_was_changed_is_refused(run, small_model) -> None:
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps(plan | {"n_pos": 8}))
    with pytest.raises(
        ValueError, match=r"plan\.json is damaged: it is not the plan that the folder .* is named after"
    ):
        list(run_shards(small_model, run))
    with pytest.raises(ValueError, match="is damaged"):
        Store(run)


def test_a_run_of_an_earlier_version_is_refused_in_a_sentence_and_left_alone(run, small_model, ids) -> None:
    plain = json.loads((run / "plan.json").read_text())
    plain |= {"format": "t2lens store 1", "tokens": plain.pop("files")}
    (run / "plan.json").write_text(json.dumps(plain))
    old, before = run.rename(run.parent / "old"), files(run.parent / "old")
    words = r"has the format 't2lens store 1', and this version of t2lens reads 't2lens store 2': capture the corpus"
    for use in (Store, missing, state, repair_run, lambda run: list(run_shards(small_model, run))):
        with pytest.raises(ValueError, match=words):
            use(old)
    assert files(old) == before
    assert collect(small_model, ids(400), old.parent, WHAT, **OPTIONS).name != "old"


def test_a_run_may_be_renamed(run, small_model, tmp_path) -> None:
    other = run.rename(tmp_path / "my-run")
    (other / "shards" / "000001.json").unlink()
    assert list(run_shards(small_model, other)) == [1]
    assert state(other).whole


def test_other_weights_another_dtype_or_device_are_refused(run, small) -> None:
    (run / "shards" / "000000.json").unlink()
    changed = t2lens.load(small)
    changed.W_E.data[0, 0] += 1e-3
    for model in (changed, t2lens.load(small, dtype="float64")):
        with pytest.raises(ValueError, match=r"planned for other weights \(or another config\)"):
            list(run_shards(model, run))
    assert missing(run) == [0]


def test_a_shard_of_another_run_is_not_taken_for_ours_and_stays(run, small_model, ids) -> None:
    other = collect(small_model, ids(400, seed=1), run.parent, WHAT, **OPTIONS)
    for end in ("json", "safetensors"):
        shutil.copy(other / "shards" / f"000002.{end}", run / "shards" / f"000002.{end}")
    (run / "shards" / "notes.txt").write_text("mine")
    (run / "shards" / "000099.safetensors").write_bytes(b"beyond")
    found = state(run)
    assert found.damaged == [f"shard 2 belongs to another run ({other.name}); move it away"]
    assert [path.name for path in found.foreign] == ["000099.safetensors", "notes.txt"]
    before = files(run)
    with pytest.raises(ValueError, match=rf"000002\.json belongs to another run \({other.name}\); move it away"):
        list(run_shards(small_model, run))
    assert repair_run(run) == []
    assert files(run) == before


def test_repair_removes_leftovers_and_damaged_records_and_nothing_else(run, small_model) -> None:
    whole = files(run)
    shards = run / "shards"
    leftovers = [shards / ".000001.safetensors.abc_1.tmp", shards / ".000002.json.x9.tmp", run / ".plan.json.ab.tmp"]
    for path in leftovers:
        path.write_bytes(b"half")
    (run.parent / ".new.abcd.tmp").mkdir()
    at_work = shards / ".000003.safetensors.zz.tmp"
    handle = os.open(at_work, os.O_RDWR | os.O_CREAT)
    hold(handle)
    (shards / ".my.tmp").write_bytes(b"mine")
    data = bytearray((shards / "000000.safetensors").read_bytes())
    data[-1] ^= 1
    (shards / "000000.safetensors").write_bytes(data)
    (shards / "000001.safetensors").write_bytes(b"")
    (shards / "000002.json").write_text("torn")
    (shards / "000003.safetensors").unlink()
    found = state(run)
    assert len(found.damaged) == len(found.records) == 4
    assert repair_run(run)
    assert not any(path.exists() for path in (*leftovers, run.parent / ".new.abcd.tmp"))
    assert at_work.exists()
    assert (shards / ".my.tmp").read_bytes() == b"mine"
    assert state(run).missing == [0, 1, 2, 3]
    assert state(run).damaged == []
    os.close(handle)
    assert repair_run(run) == [f"removed {at_work.name}, which a killed writer left"]
    assert repair_run(run) == []
    assert sorted(run_shards(small_model, run)) == [0, 1, 2, 3]
    (shards / ".my.tmp").unlink()
    assert files(run) == whole


def test_what_a_killed_writer_leaves_is_recognised(small_model, ids, tmp_path) -> None:
    run = make_run(small_model, ids(400), tmp_path, WHAT, **OPTIONS)
    pid = os.fork()
    if not pid:

        def forever(*_: Any) -> Iterator[bytes]:
            yield b"begun"
            time.sleep(60)

        worker_module._safetensors = forever
        list(run_shards(small_model, run))
    deadline = time.monotonic() + 30
    while not list((run / "shards").glob(".*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    assert state(run).leftovers == []  # a writer at work
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (left,) = state(run).leftovers
    assert repair_run(run) == [f"removed {left.name}, which a killed writer left"]


def test_shards_are_read_by_safetensors_itself(run) -> None:
    from safetensors.torch import load_file

    tensors = load_file(run / "shards" / "000001.safetensors")
    store = Store(run)
    assert set(tensors) == {*store, "tokens"}
    for key, tensor in tensors.items():
        assert torch.equal(store[key][4:8], tensor)


def test_token_ids_below_zero_are_refused(small_model, tmp_path) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 2, -1] * 8))
    with pytest.raises(ValueError, match=r"token id -1, outside the vocabulary 0\.\.269"):
        make_run(small_model, tmp_path / "ids.npy", tmp_path, "atoms", n_pos=4)


def test_half_a_character_in_json_is_one_sentence_with_its_place(small_model, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "ab\\ud800"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not text: a lone surrogate stands at character 2"):
        make_run(small_model, tmp_path / "a.jsonl", tmp_path, "atoms", n_pos=4)


@pytest.mark.slow
def test_a_line_of_ten_megabytes_is_one_document(small_model, tmp_path) -> None:
    text = (WORDS * (10_000_000 // len(WORDS))).strip()
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": WORDS}))
    plan = read_plan(make_run(small_model, tmp_path / "a.jsonl", tmp_path, "hook_embed|norm", n_pos=64))
    assert plan.n_documents in (1, 2)  # the second may be left out with the end
    assert plan.n_sequences == sum(small_model.to_tokens(t).shape[1] for t in (text, WORDS)) // 64


_MEASURE = """
import os, pathlib, re, sys
from t2lens import load
from t2lens.store import collect
model = load(sys.argv[1])
for corpus in sys.argv[3:]:
    pid = os.fork()  # its peak begins at what the parent holds now
    if not pid:
        run = collect(model, corpus, sys.argv[2], ["depth weights", "residual norms", "atoms"], n_pos=64,
                      sequences_per_shard=64, batch_size=16, quiet=True)
        print(run)
        print(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1], flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_corpus(small, tmp_path) -> None:
    corpora = {n: tmp_path / f"{n}.jsonl" for n in (1, 10)}
    for n, corpus in corpora.items():
        corpus.write_text((json.dumps({"text": WORDS * 50}) + "\n") * (40 * n))
    command = [sys.executable, "-c", _MEASURE, str(small), str(tmp_path), *map(str, corpora.values())]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    peaks = {n: int(lines[2 * i + 1]) / 1024 for i, n in enumerate(corpora)}
    plan = read_plan(lines[-2])
    size = plan.n_sequences * plan.bytes_per_sequence / 2**20
    print(f"{size:.0f} MB captured; peak memory {peaks[1]:.0f} MB, and {peaks[10]:.0f} MB with ten times the corpus")
    assert size > 100
    assert peaks[10] < peaks[1] + 15

"""`t2lens capture` and `t2lens store`: what they print, and one sentence for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import t2lens
from t2lens.cli import app
from t2lens.store import Store, read_plan
from tests.store.conftest import WORDS


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def one_sentence(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("t2lens: ")
    assert "Traceback" not in result.output
    for word in words:
        assert word in lines[-1]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(json.dumps({"text": WORDS * n}) for n in range(1, 9)))
    return file


def test_a_corpus_is_captured_checked_and_read(small, corpus, tmp_path) -> None:
    options = ["--out", tmp_path / "runs", "--what", "depth weights", "--what", "atoms|norm", "--n-pos", "16"]
    options += ["--shard", "3", "--dtype", "bfloat16", "--batch-size", "2"]
    done = run("capture", small, corpus, *options)
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert done.stdout.strip() == str(folder)
    plan = read_plan(folder)
    size = sum(x.numel() * x.itemsize for key in Store(folder) for x in [Store(folder)[key][:]])
    assert f"{plan.n_sequences * 16:,} tokens (8 documents), {len(plan.tensors)} tensors, 44 bytes per" in done.stderr
    assert size + plan.n_sequences * 16 * 4 == plan.n_sequences * plan.bytes_per_sequence
    assert f"{plan.n_shards} of {plan.n_shards} shards made, 0 missing" in done.stderr
    store = Store(folder)
    exact = t2lens.capture(t2lens.load(small), store["tokens"][:].long(), "depth weights", batch_size=2)
    key = "blocks.1.hook_depth_attn_mlp"
    assert torch.equal(store[key][:], exact[key].bfloat16())
    again = run("capture", small, corpus, *options)
    assert f"0 of {plan.n_shards} shards made, 0 missing" in again.stderr
    assert "0 bytes to write" in again.stderr
    assert run("store", "check", folder).stdout == f"whole: {plan.n_shards} shards\n"
    shown = run("store", "info", folder).stdout
    assert "hook_depth_attn_final" in shown
    assert f"{plan.n_shards} shards; 0 bytes to write" in shown


def test_a_plan_first_then_the_run_and_its_repair(small, corpus, tmp_path) -> None:
    planned = run("capture", small, corpus, "--out", tmp_path, "--n-pos", "16", "--shard", "4", "--plan-only")
    folder = Path(planned.stdout.strip())
    n = read_plan(folder).n_shards
    unfinished = run("store", "check", folder)
    assert unfinished.exit_code == 1
    assert unfinished.stdout == f"{n} of {n} shards are not there yet; capture --resume makes them\n"
    assert run("capture", "--resume", folder).exit_code == 0  # the plan knows the model
    assert run("store", "check", folder).exit_code == 0
    (folder / "shards" / "000001.safetensors").write_bytes(b"x")
    (folder / "notes.txt").write_text("mine")
    bad = run("store", "check", folder)
    assert bad.exit_code == 1
    assert "shard 1 is damaged: its SHA-256 is not that of its record" in bad.stdout
    assert "notes.txt is not part of the run; it is left alone" in bad.stdout
    assert "removed the record 000001.json" in run("store", "repair", folder).stdout
    assert run("store", "repair", folder).stdout == "nothing to repair\n"
    assert f"1 of {n} shards made" in run("capture", small, "--resume", folder).stderr
    assert run("store", "check", folder).exit_code == 0
    assert (folder / "notes.txt").exists()


def test_a_disk_without_room_is_refused_with_the_numbers_before_anything_runs(
    small, corpus, tmp_path, monkeypatch
) -> None:
    from t2lens.store import worker

    monkeypatch.setattr(worker.shutil, "disk_usage", lambda path: type("", (), {"free": 1234})())
    result = run("capture", small, corpus, "--out", tmp_path / "runs", "--n-pos", "16")
    one_sentence(result, "to write (84 bytes per token), and 1.23 kB are free on the disk of", "make room")
    (folder,) = (tmp_path / "runs").iterdir()
    assert list((folder / "shards").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["MODEL"], "Give a MODEL and a SOURCE, or --resume RUN"),
        (["nowhere", "CORPUS"], "'nowhere'"),
        (["MODEL", "missing.txt"], "no file or folder 'missing.txt'"),
        (["MODEL", "CORPUS", "--what", "hook_embd"], "hook_embed"),
        (["MODEL", "CORPUS", "--dtype", "int3"], "dtype must be one of"),
        (["MODEL", "CORPUS", "--n-pos", "100"], "n_pos must lie in 1..64"),
        (["MODEL", "CORPUS", "--batch-size", "0"], "must be at least 1"),
        (["MODEL", "CORPUS", "--launcher", "spark"], "no launcher 'spark'"),
        (["MODEL", "CORPUS", "--workers", "0"], "at least 1 worker"),
        (["MODEL", "CORPUS", "--launcher", "torchrun"], "RANK and WORLD_SIZE are not in the environment"),
        (["MODEL", "CORPUS", "--device", "abacus"], "abacus"),
        (["MODEL", "--resume", "EMPTY"], "it has no plan.json"),
        (["MODEL", "CORPUS", "--resume", "EMPTY"], ""),
        (["MODEL", "CORPUS", "--field", "body"], "no text in the field 'body'; it has text"),
    ],
)
def test_bad_input_is_one_sentence(small, corpus, tmp_path, arguments: list[str], words: str) -> None:
    names = {"MODEL": small, "CORPUS": corpus, "EMPTY": tmp_path}
    result = run("capture", *(names.get(each, each) for each in arguments), "--out", tmp_path / "runs")
    one_sentence(result, words)


@pytest.mark.parametrize("command", ["check", "repair", "info"])
def test_what_is_no_run_is_one_sentence(tmp_path, command: str) -> None:
    one_sentence(run("store", command, tmp_path), "is no run of t2lens capture: it has no plan.json")
    (tmp_path / "abc").mkdir()
    (tmp_path / "abc" / "plan.json").touch()  # the folder that holds runs, in place of one of them
    one_sentence(run("store", command, tmp_path), "Folders in it that have one: abc.")
    (tmp_path / "plan.json").write_text("{")
    one_sentence(run("store", command, tmp_path), "plan.json is damaged")


def test_the_help_and_the_error_name_the_roles():
    from t2lens.store.wants import ROLES

    shown = " ".join(CliRunner().invoke(app, ["capture", "--help"], env={"COLUMNS": "400"}).output.split())
    assert f"roles ({', '.join(ROLES)})" in shown
    with pytest.raises(KeyError, match=r"'logitss' is not a hook point.* Roles are depth weights, gates"):
        t2lens.capture(t2lens.load("standard"), "the king", ["logitss"])

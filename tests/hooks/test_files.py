"""T13: caches on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from t2lens.hooks import ActivationCache, load_cache
from tests.hooks.toy import FinalToy, Toy, same, tokens_of


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Named(FinalToy):
    """A model with a tokenizer of sorts and with source names."""

    tokenizer = "anything"

    def to_str_tokens(self, row):
        return [f"<{int(i)}>\u00e9" for i in row]

    def sources(self):
        return {"0.gate": ["embed"], "1.gate": ["embed", "0.out"]}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_is_saved_is_what_is_loaded(tmp_path, seed, dtype):
    model, tokens = Named(seed), tokens_of(seed)
    _, cache = model.run_with_cache(tokens, dtype=dtype)
    cache.save(tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors")
    assert set(loaded) == set(cache) and loaded.has_batch_dim and same(loaded.tokens, tokens)
    assert all(loaded[n].dtype == dtype and torch.equal(loaded[n], cache[n]) for n in cache)
    assert loaded.info["labels"] == [model.to_str_tokens(row) for row in tokens]
    assert loaded.info["sources"] == model.sources()
    assert loaded.info["shapes"]["blocks.*.hook_z"] == "batch pos head d_head"
    assert loaded["hook_last"].shape == loaded[("out", -1)].shape and names_in(tmp_path) == ["cache.safetensors"]
    loaded.save(tmp_path / "again.safetensors")  # without a model, what was known is kept
    again = load_cache(tmp_path / "again.safetensors")
    assert again.info == loaded.info and same(again.tokens, tokens)


def test_views_slices_and_shared_memory_are_written_once_each(tmp_path):
    big = torch.arange(24.0).reshape(2, 3, 4)
    given = {
        "hook_a": big,
        "hook_same": big,
        "hook_turned": big.transpose(1, 2),
        "hook_part": big[:, :1],
        "hook_static": torch.ones(1, 1, 1).expand(2, 3, 5),
        "hook_ids": torch.tensor([[1, 2, 3]]),
        "hook_flags": torch.tensor([[True]]),
        "hook_none": torch.empty(2, 0, 4),
    }
    ActivationCache(given, None).save(tmp_path / "c")
    loaded = load_cache(tmp_path / "c")
    assert all(torch.equal(loaded[n], given[n]) and loaded[n].dtype == given[n].dtype for n in given)


def test_the_file_is_little_larger_than_the_tensors(tmp_path):
    model = Named(0, n_layers=6)
    _, cache = model.run_with_cache(torch.zeros(2, 40, dtype=torch.int64))
    cache.save(tmp_path / "c")
    assert (tmp_path / "c").stat().st_size < 1.2 * sum(t.numel() * t.element_size() for t in cache.values())


def test_a_cache_without_batch_axis_and_gradients_come_back(tmp_path):
    model = Toy()
    _, cache = model.run_with_cache(tokens_of(0)[:1], return_type="loss", incl_bwd=True, remove_batch_dim=True)
    cache.save(str(tmp_path / "c"))
    loaded = load_cache(str(tmp_path / "c"))
    assert not loaded.has_batch_dim and torch.equal(loaded["hook_last_grad"], cache["hook_last_grad"])


def test_another_process_reads_it_without_the_model(tmp_path):
    model, tokens = Named(), tokens_of(0)
    _, cache = model.run_with_cache(tokens)
    cache.save(tmp_path / "c")
    code = (
        "import sys; from t2lens.hooks import load_cache; c = load_cache(sys.argv[1]);"
        "print(float(c['hook_last'].sum()), c.tokens.tolist(), c.info['labels'][0][0]);"
        "assert 't2lens.model' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c")],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(float(cache["hook_last"].sum()))


def test_nothing_is_pickled(tmp_path):
    _, cache = Named().run_with_cache(tokens_of(0))
    cache.save(tmp_path / "c")
    with safe_open(tmp_path / "c", "pt") as file:
        assert json.loads(file.metadata()["t2lens"])["format"] == "t2lens.cache.1"


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    _, cache = Toy().run_with_cache(tokens_of(0))
    cache.save(tmp_path / "c")
    before = (tmp_path / "c").read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        Toy(1).run_with_cache(tokens_of(1))[1].save(tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == before and names_in(tmp_path) == ["c"]
    monkeypatch.undo()
    _, empty = Toy().run_with_cache(tokens_of(0), device="meta")
    with pytest.raises(ValueError, match="meta device"):
        empty.save(tmp_path / "d")
    assert names_in(tmp_path) == ["c"]
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "no" / "folder")


@pytest.mark.parametrize("damage", ["text", "empty", "cut", "header", "foreign", "other format"])
def test_a_file_that_is_no_cache_is_refused_in_a_sentence(tmp_path, damage):
    _, cache = Toy().run_with_cache(tokens_of(0))
    path = tmp_path / "c"
    cache.save(path)
    whole = path.read_bytes()
    if damage == "foreign":
        save_file({"x": torch.ones(1)}, path)
    elif damage == "other format":
        save_file({"x": torch.ones(1)}, path, metadata={"t2lens": '{"format": "t2lens.trace.1"}'})
    else:
        path.write_bytes({"text": b"not a tensor", "empty": b"", "cut": whole[:-9], "header": whole[:40]}[damage])
    with pytest.raises(ValueError, match=r"c is (not a whole safetensors file|a safetensors file, but not a cache)"):
        load_cache(path)
    with pytest.raises(FileNotFoundError):
        load_cache(tmp_path / "nothing")

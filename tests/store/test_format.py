"""A run read as FORMAT.md says, with json, struct and numpy alone, is what the model computed."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.store import Store, collect
from t2lens.zoo.text import sample_texts

FORMAT = (Path(t2lens.__file__).parent / "store" / "FORMAT.md").read_text()
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}


def numbers(data: bytes, dtype: str) -> np.ndarray:
    flat = np.frombuffer(data, NUMPY[dtype])
    return (flat.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else flat


def some_positions(run: Path, key: str, i: int, a: int, b: int) -> np.ndarray:
    """As in the section "To read some positions of one sequence"."""
    plan = json.loads((run / "plan.json").read_text())
    assert plan["format"] == "t2lens store 1"
    assert hashlib.sha256((run / "plan.json").read_bytes()).hexdigest()[:16] == run.name
    s, row = divmod(i, plan["sequences_per_shard"])
    record = json.loads((run / f"shards/{s:06d}.json").read_text())
    data = (run / f"shards/{s:06d}.safetensors").read_bytes()
    assert record["plan"] == run.name
    assert record["sequences"][0] <= i < record["sequences"][1]
    assert record["bytes"] == len(data)
    assert record["sha256"] == hashlib.sha256(data).hexdigest()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    assert header["__metadata__"] == {"plan": run.name, "shard": str(s)}
    about, shape = header[key], [plan["n_pos"]] if key == "tokens" else plan["tensors"][key]["shape"]
    assert about["shape"] == [record["sequences"][1] - record["sequences"][0], *shape]
    size, begin = np.dtype(NUMPY[about["dtype"]]).itemsize, about["data_offsets"][0]
    inner, outer = int(np.prod(shape[1:])), int(np.prod(shape))
    start, stop = (8 + n + begin + (row * outer + at * inner) * size for at in (a, b))
    return numbers(data[start:stop], about["dtype"]).reshape(b - a, *shape[1:])


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_a_run_is_read_by_the_text_of_format_md(tmp_path: Path, dtype: Any) -> None:
    model = t2lens.load("attnres-block")
    what = ["depth weights", "residual norms", "atoms", "blocks.1.attn.hook_pattern|mean:head|top:3"]
    texts = sample_texts(4)
    run = collect(model, texts, tmp_path, what, n_pos=24, dtype=dtype, sequences_per_shard=4)
    tokens = np.load(run / "tokens.npy")
    kept = t2lens.capture(model, torch.from_numpy(tokens.astype(np.int64)), what, batch_size=4)
    kind = getattr(torch, dtype or "float32")
    for key in kept:
        for i, a, b in ((0, 0, 24), (5, 3, 9), (len(tokens) - 1, 23, 24)):
            exact = kept[key][i, a:b].to(kind) if kept[key].is_floating_point() else kept[key][i, a:b]
            assert np.array_equal(some_positions(run, key, i, a, b), exact.to(torch.float64).numpy()), key
    assert np.array_equal(some_positions(run, "tokens", 5, 0, 24), tokens[5])
    assert (run / "tokens.npy").stat().st_size == 128 + tokens.size * 4
    words = json.loads((run / "vocabulary.json").read_text())
    start, n = np.load(run / "documents.npy")[1].tolist()
    document = "".join(words[i] for i in tokens.reshape(-1)[start : start + n][1:])
    assert document == texts[1]
    plan = json.loads((run / "plan.json").read_text())
    assert set(plan["files"]) == {"tokens.npy", "documents.npy", "vocabulary.json"}
    for name, digest in plan["files"].items():
        assert digest == hashlib.sha256((run / name).read_bytes()).hexdigest()
    assert np.load(run / "documents.npy").shape == (plan["n_documents"], 2)


def test_every_entry_that_is_written_is_described(tmp_path: Path) -> None:
    model = t2lens.load("attnres-block")
    run = collect(model, sample_texts(4), tmp_path, ["depth weights", "hook_embed|pos:0:2"], n_pos=24)
    plan = json.loads((run / "plan.json").read_text())
    entries = {*plan, *plan["model"], *plan["tokens"], *(e for about in plan["tensors"].values() for e in about)}
    entries |= set(json.loads((run / "shards" / "000000.json").read_text()))
    assert {"read", "labels"} <= entries
    assert entries <= set(re.findall(r"`(\w+)`", FORMAT))
    files = {path.name for path in run.rglob("*") if path.is_file()}
    assert {re.sub(r"\d{6}", "000042", name) for name in files} <= set(re.findall(r"[\w.]+", FORMAT))
    assert set(Store(run).plan.tensors) == set(plan["tensors"])

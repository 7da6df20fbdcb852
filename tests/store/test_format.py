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
NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
}


def numbers(data: bytes, dtype: str) -> np.ndarray:
    flat = np.frombuffer(data, NUMPY[dtype])
    if dtype == "F8_E5M2":
        return (flat.astype(np.uint16) << 8).view(np.float16)
    if dtype == "F8_E4M3":
        exponent, mantissa = (flat >> 3 & 15).astype(int), (flat & 7).astype(float)
        size = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
        return np.where(flat & 128, -size, size)
    return (flat.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else flat


def some_positions(run: Path, key: str, i: int, a: int, b: int) -> np.ndarray:
    """As in the section "To read some positions of one sequence"."""
    plan = json.loads((run / "plan.json").read_text())
    assert plan["format"] == "t2lens store 2"
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
    entries = {*plan, *plan["model"], *(e for about in plan["tensors"].values() for e in about)}
    entries |= set(json.loads((run / "shards" / "000000.json").read_text()))
    assert {"read", "labels"} <= entries
    assert entries <= set(re.findall(r"`(\w+)`", FORMAT))
    files = {path.name for path in run.rglob("*") if path.is_file()}
    assert {re.sub(r"\d{6}", "000042", name) for name in files} <= set(re.findall(r"[\w.]+", FORMAT))
    assert set(Store(run).plan.tensors) == set(plan["tensors"])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_a_run_of_odd_choices_that_is_not_finished_is_read_too(tmp_path: Path, dtype: str) -> None:
    model, n_pos = t2lens.load("muddformer"), 7
    lines = [{"text": text, "place": i, "who": ["KJV", "S"][i % 2]} for i, text in enumerate(sample_texts(4))]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)))
    onto = {"way": torch.randn(3, model.cfg.d_model)}
    what = [
        "blocks.3.*hook_depth*",
        "hook_read_final|project:way",
        "*.3.*hook_pattern|mean:head|top:2",
        "hook_embed|pos:-2:",
    ]
    options: dict[str, Any] = {"n_pos": n_pos, "dtype": dtype, "sequences_per_shard": 3, "directions": onto}
    run = collect(model, tmp_path / "c.jsonl", tmp_path / "runs", what, batch_size=2, **options)
    plan, tokens = json.loads((run / "plan.json").read_text()), np.load(run / "tokens.npy")
    assert tokens.shape == (plan["n_sequences"], n_pos)
    kept = t2lens.capture(model, torch.from_numpy(tokens.astype(np.int64)), what, batch_size=2, directions=onto)
    (run / "shards" / "000000.json").unlink()  # as if it were not finished
    last = len(tokens) - 1
    for key, about in plan["tensors"].items():
        for i in (3, 4, last):
            a, b = 0, about["shape"][0]
            exact = kept[key][i, a:b]
            exact = exact.to(getattr(torch, dtype)).double() if exact.is_floating_point() else exact
            np.testing.assert_array_equal(some_positions(run, key, i, a, b), exact.numpy(), err_msg=key)
    assert set(plan["tensors"]) == set(kept)
    assert plan["tensors"]["hook_embed|pos:-2:"]["labels"]["pos"] == [5, 6]
    data, places = (run / "metadata.jsonl").read_bytes(), np.load(run / "metadata.npy")
    for line, (start, size) in zip(lines, places.tolist(), strict=False):
        assert json.loads(data[start : start + size]) == {"place": line["place"], "who": line["who"]}
    assert len(places) == plan["n_documents"]
    assert plan["metadata"] == ["place", "who"]
    assert set(plan["files"]) == {path.name for path in run.iterdir()} - {"plan.json", "shards"}


def test_statistics_are_read_and_merged_by_the_text_of_format_md(tmp_path: Path) -> None:
    model = t2lens.load("attnres-block")
    what = ["depth weights", "blocks.1.attn.hook_pattern|mean:head|top:2"]
    options: dict[str, Any] = {"n_pos": 16, "sequences_per_shard": 9, "statistics": True}
    run = collect(model, sample_texts(6), tmp_path, what, **options)
    plan, tokens = json.loads((run / "plan.json").read_text()), np.load(run / "tokens.npy")
    kept = t2lens.capture(model, torch.from_numpy(tokens.astype(np.int64)), what)
    columns = np.concatenate([kept[key].double().flatten(0, 1).numpy() for key in plan["what"]], axis=1)
    n, mean, m2, buckets, seen = 0, 0.0, 0.0, {}, np.zeros((model.cfg.d_vocab, 16), int)
    for file in sorted((run / "shards").glob("*.safetensors")):
        data = file.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        about = {name: entry for name, entry in header.items() if name != "__metadata__"}

        def get(name: str, about: Any = about, data: bytes = data, size: int = size) -> np.ndarray:
            start, stop = (8 + size + at for at in about[name]["data_offsets"])
            return numbers(data[start:stop], about[name]["dtype"]).reshape(about[name]["shape"])

        new, d = int(get("total.n")[0]), get("total.mean")[0] - mean
        n += new
        mean, m2 = mean + d * new / n, m2 + get("total.m2")[0] + d**2 * (n - new) * new / n
        for bucket, counts in enumerate(get("histogram.counts")[0], start=int(get("histogram.first")[0])):
            buckets[bucket] = buckets.get(bucket, 0) + int(counts)
        seen[get("count.id"), get("count.pos")] += get("count.n")
        assert set(about) <= set(re.findall(r"`([\w.]+)`", FORMAT))
    assert n == len(columns) == tokens.size
    np.testing.assert_allclose(mean, columns.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(np.sqrt(m2 / n), columns.std(axis=0), atol=1e-6)
    bits = kept[plan["what"][0]].flatten().numpy().view(np.int32)
    own = np.maximum(0, ((bits & 0x7FFFFFFF) >> 17) - 6208) * np.where(bits < 0, -1, 1)
    assert {k: v for k, v in buckets.items() if v} == dict(zip(*np.unique(own, return_counts=True), strict=True))
    expected = np.zeros_like(seen)
    np.add.at(expected, (tokens, np.broadcast_to(np.arange(16), tokens.shape)), 1)
    assert np.array_equal(seen, expected)

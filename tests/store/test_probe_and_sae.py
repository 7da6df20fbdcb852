"""The script that trains a probe and an autoencoder from a store: its scores are those of its held-out rows."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from t2lens.store import Store, collect

FILE = Path(__file__).parents[2] / "notebooks" / "probe_and_sae.py"
KEY = "blocks.1.hook_read_mlp"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("probe_and_sae", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


@pytest.fixture
def data(script, small_model, tmp_path: Path) -> Any:
    corpus = script.write_corpus(tmp_path / "passages.jsonl")
    options: dict[str, Any] = {"n_pos": 32, "sequences_per_shard": 9, "quiet": True}
    return script.split(Store(collect(small_model, corpus, tmp_path, ["hook_embed", KEY], **options)))


def whole(data: Any, documents: np.ndarray) -> dict[str, torch.Tensor]:
    return next(iter(data.store.batches(KEY, 10**6, documents=documents)))


def test_documents_are_split_by_label(data) -> None:
    assert data.train.sum() + data.test.sum() == len(data.label)
    assert not (data.train & data.test).any()
    for label in (0, 1):
        assert data.test[data.label.numpy() == label].sum() == 4
    assert [more["label"] == "Shakespeare" for more in data.store.metadata()] == data.label.bool().tolist()


def test_the_scores_are_those_of_the_held_out_rows(script, data) -> None:
    rows = whole(data, data.test)
    label = data.label[rows["document"]]
    often = data.label[whole(data, data.train)["document"]].mean().round()
    assert script.baseline(data) == pytest.approx((label == often).float().mean().item())

    way = torch.randn(rows[KEY].shape[1], generator=torch.Generator().manual_seed(1))
    score, low, high = script.accuracy(data, KEY, lambda x: x @ way)
    assert score == pytest.approx(((rows[KEY] @ way > 0) == label.bool()).float().mean().item())
    assert low < score < high

    x = rows[KEY].double()
    spread = ((x - x.mean(dim=0)) ** 2).sum()
    assert script.explained(data, KEY, lambda x: x * 0.9, data.test) == pytest.approx(
        float(1 - ((0.1 * x) ** 2).sum() / spread), rel=1e-5
    )
    assert script.explained(data, KEY, lambda x: x, data.test) == 1
    mean = whole(data, data.test)[KEY].mean(dim=0)
    assert script.explained(data, KEY, lambda x: mean.expand_as(x), data.test) == pytest.approx(0, abs=1e-5)


def test_an_autoencoder_has_few_latents_on_and_learns(script, data) -> None:
    sae, losses = script.train_autoencoder(data, KEY, latents=40, k=3, epochs=6)
    codes = sae.latents(whole(data, data.test)[KEY])
    assert codes.shape[1] == 40
    assert int((codes != 0).sum(dim=1).max()) <= 3
    assert codes.min() >= 0
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    torch.testing.assert_close(sae.decoder.norm(dim=1), torch.ones(40))
    again, same = script.train_autoencoder(data, KEY, latents=40, k=3, epochs=6)
    assert same == losses
    assert torch.equal(again.decoder, sae.decoder)


def test_from_the_command_line(script, tmp_path: Path, capsys) -> None:
    few = ["--probe-epochs", "4", "--sae-epochs", "12", "--out", str(tmp_path / "runs")]
    scores = script.main(few)
    (run,) = (tmp_path / "runs").iterdir()
    shards = [path.stat().st_mtime_ns for path in sorted(run.rglob("*.safetensors"))]
    shown = capsys.readouterr().out
    assert f"held out (baseline {scores['baseline']:.3f})" in shown
    assert f"{scores['blocks.5.hook_read_mlp']:.3f}" in shown
    assert scores["blocks.5.hook_read_mlp"] > scores["baseline"] + 0.1
    assert scores["held out"] > scores["held out, PCA"] > 0.5
    assert script.main(few) == scores  # the same seed, from the store that is there
    assert [path.stat().st_mtime_ns for path in sorted(run.rglob("*.safetensors"))] == shards


def test_a_corpus_of_ones_own_needs_two_labels(script, small: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "mine.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": "the king " * 20, "label": str(i)}) for i in range(3)))
    with pytest.raises(SystemExit, match="tells two labels apart; the documents have 0, 1, 2"):
        script.main(["--model", str(small), "--corpus", str(corpus), "--n-pos", "16", "--key", KEY])

"""The models in the package: small, complete, trained alike, and better than a strong bigram model on unseen text."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

import t2lens
from t2lens.config import ModelConfig
from t2lens.zoo.recipes import RECIPES, Budget
from t2lens.zoo.registry import BUNDLED
from t2lens.zoo.tokenizer import Tokenizer
from t2lens.zoo.training import evaluate, n_steps
from tests.zoo import make_held_out

NAMES = sorted(RECIPES)
MARGIN = 0.3  # nats per token


def record(name: str) -> dict:
    return json.loads((BUNDLED / name / "record.json").read_text(encoding="utf-8"))


def test_every_recipe_is_bundled() -> None:
    assert [info.name for info in t2lens.list_models()] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_folder_is_complete_and_small(name: str) -> None:
    folder = BUNDLED / name
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "record.json",
        "statistics.json.gz",
        "tokenizer.json",
    ]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_000_000 + 250_000
    assert (folder / "model.safetensors").stat().st_size <= 3_000_000
    assert t2lens.load(name).cfg == RECIPES[name]


def test_all_were_trained_alike() -> None:
    records = [record(name) for name in NAMES]
    for key in ("corpus", "budget", "bigram_loss", "validation_tokens", "train_corpus_tokens", "precision", "threads"):
        assert all(r[key] == records[0][key] for r in records), key
    for name, r in zip(NAMES, records, strict=True):
        assert ModelConfig.from_dict(r["config"]) == RECIPES[name] and Budget(**r["budget"]) == Budget()
        assert r["tokens_seen"] == r["curve"][-1]["tokens"] == n_steps(Budget(), RECIPES[name]) * Budget().rows * 255
        assert r["validation_loss"] < r["bigram_loss"] - MARGIN
    tokenizers = {(BUNDLED / name / "tokenizer.json").read_bytes() for name in NAMES}
    assert len(tokenizers) == 1 and Tokenizer.load(BUNDLED / NAMES[0] / "tokenizer.json").n_vocab == 2048


@pytest.mark.parametrize("name", NAMES)
def test_beats_the_bigram_on_text_it_has_not_seen(name: str) -> None:
    rows, bigram, corpus = make_held_out.read()
    assert corpus == record(name)["corpus"]["sha256"]
    loss = evaluate(t2lens.load(name), rows)
    assert loss < bigram.loss(rows) - MARGIN
    # every eighth window says nearly the same as all of them, which the record speaks of
    assert loss == pytest.approx(record(name)["validation_loss"], abs=0.05)
    assert bigram.loss(rows) == pytest.approx(record(name)["bigram_loss"], abs=0.05)


def test_the_held_out_text_is_text_and_small() -> None:
    rows, _, _ = make_held_out.read()
    text = Tokenizer.load(BUNDLED / NAMES[0] / "tokenizer.json").decode(rows.ravel())
    assert "Christ" in text and "Enter" in text  # of both books
    assert make_held_out.FILE.stat().st_size < 200_000


def test_models_load_in_a_fresh_process_without_network() -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise OSError('no network')\n"
        "socket.socket.connect = socket.create_connection = refuse\n"
        "import t2lens\n"
        "for name in ('attnres-full', 'ddl-cc-ec'):\n"
        "    print(t2lens.load(name).generate('In the beginning', 8, temperature=0))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.count("In the beginning") == 2 and len(done.stdout) > 2 * len("In the beginning\n")


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_ones_that_the_config_names(name: str) -> None:
    config = json.loads((BUNDLED / name / "config.json").read_text(encoding="utf-8"))
    assert config["weights_sha256"] == hashlib.sha256((BUNDLED / name / "model.safetensors").read_bytes()).hexdigest()

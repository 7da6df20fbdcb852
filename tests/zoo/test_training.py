"""Training: it learns, it is exact about what it saw, and a kill at any moment changes nothing."""

import hashlib
import io
import json
import multiprocessing
import random
import signal
import time
from itertools import pairwise
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import t2lens
from t2lens.config import MLP, Attention, ModelConfig
from t2lens.residual import AttnRes
from t2lens.zoo.baseline import Bigram
from t2lens.zoo.progress import Progress
from t2lens.zoo.recipes import RECIPES, Budget, recipe
from t2lens.zoo.text import encode_split, read_corpus
from t2lens.zoo.tokenizer import Tokenizer
from t2lens.zoo.training import batch, evaluate, schedule, train, windows

CFG = ModelConfig(
    d_vocab=300,
    n_ctx=32,
    d_model=16,
    n_layers=2,
    attention=Attention(n_heads=2, n_kv_heads=1, d_head=8),
    mlp=MLP(d_mlp=24),
    residual=AttnRes(),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = [
        "king",
        "queen",
        "the",
        "of",
        "heaven",
        "earth",
        "said",
        "unto",
        "them",
        "lord",
        "people",
        "before",
        "water",
    ]
    for name in ("a", "b"):
        text = "".join(" ".join(rng.choice(words) for _ in range(8)) + "\n" for _ in range(400))
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_a_window_is_bos_and_consecutive_tokens() -> None:
    data = np.arange(10, 110, dtype=np.uint16)
    rows = windows(data, n_ctx=8, bos_id=0)
    assert rows.shape == (14, 8) and (rows[:, 0] == 0).all()
    assert (rows[:, 1:].ravel() == data[:98]).all()
    seen = set()
    for step in range(300):
        part = batch(data, step, rows=2, n_ctx=8, bos_id=0, seed=5)
        assert (part[:, 0] == 0).all() and (part[:, 2:] == part[:, 1:-1] + 1).all()
        seen |= set(part[:, 1:].ravel().tolist())
    assert seen == set(range(10, 110))  # the first and the last token too
    assert torch.equal(batch(data, 7, 2, 8, 0, 5), batch(data, 7, 2, 8, 0, 5))
    assert not torch.equal(batch(data, 7, 2, 8, 0, 5), batch(data, 8, 2, 8, 0, 5))
    assert not torch.equal(batch(data, 7, 2, 8, 0, 5), batch(data, 7, 2, 8, 0, 6))


def test_schedule_warms_up_and_decays() -> None:
    budget = Budget(warmup=0.1, final_lr=0.02)
    rates = [schedule(step, 200, budget) for step in range(200)]
    assert rates[0] == pytest.approx(1 / 20) and max(rates) == rates[19] == rates[20] == 1
    assert rates[-1] == pytest.approx(0.02) and all(a > b for a, b in pairwise(rates[20:]))
    assert rates[20 + 90] == pytest.approx(0.02 + 0.98 / 2, abs=0.01)


def test_validation_loss_is_the_mean_over_all_targets() -> None:
    model = t2lens.build(CFG)
    rows = np.random.default_rng(0).integers(0, 300, (11, 32))
    logits = model(torch.from_numpy(rows))
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, torch.from_numpy(rows)[:, 1:, None])
    assert evaluate(model, rows) == pytest.approx(-log_probs.mean().item(), abs=1e-5)


def test_training_learns_and_records_what_it_did(corpus, tmp_path) -> None:
    budget = Budget(tokens=40_000, rows=8)
    out = train(CFG, corpus, tmp_path / "m", budget=budget, threads=1)
    assert out == tmp_path / "m" and [path.name for path in tmp_path.iterdir()] == ["m"]
    record = json.loads((out / "record.json").read_text())
    steps = -(-40_000 // (8 * 31))
    assert record["tokens_seen"] == record["curve"][-1]["tokens"] == steps * 8 * 31
    assert record["budget"]["tokens"] == 40_000 and record["n_params"] == t2lens.build(CFG).n_params
    a, b = ((corpus / f"{name}.txt").read_bytes() for name in "ab")
    both = hashlib.sha256(hashlib.sha256(a).digest() + hashlib.sha256(b).digest()).hexdigest()
    assert record["corpus"] == {"sha256": both, "files": ["a.txt", "b.txt"], "bytes": len(a) + len(b)}
    losses = [point["validation_loss"] for point in record["curve"]]
    assert losses[-1] < losses[0] - 1 and all(np.isfinite(losses))
    model = t2lens.load(out)
    assert isinstance(model.tokenizer, Tokenizer)
    read = read_corpus(corpus)
    data, held_out = (encode_split(read, model.tokenizer, split) for split in ("train", "validation"))
    rows = windows(held_out, 32, 0)
    assert record["validation_loss"] == pytest.approx(evaluate(model, rows), abs=1e-9) and losses[-1] < 1.8
    assert record["bigram_loss"] == Bigram.fit(data, 300).loss(rows)
    assert record["validation_tokens"] == rows[:, 1:].size and record["train_corpus_tokens"] == len(data)
    assert model.cfg == CFG and model.to_string(model.to_tokens("the king")[0, 1:]) == "the king"
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.float32}
    assert json.loads((out / "config.json").read_text())["model"] == record["config"]


def test_bfloat16_arithmetic_trains_too(corpus, tmp_path) -> None:
    out = train(CFG, corpus, tmp_path / "m", budget=Budget(tokens=8_000, rows=8), precision="bfloat16", threads=1)
    losses = [point["validation_loss"] for point in json.loads((out / "record.json").read_text())["curve"]]
    assert losses[-1] < losses[0] - 0.5


def run(corpus: str, out: str) -> None:
    train(CFG, corpus, out, budget=Budget(tokens=10_000, rows=4), threads=1, checkpoint_every=1)


# A server that has imported torch once and forks a clean process for each run.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["t2lens.zoo.training"])


def start(corpus, out) -> BaseProcess:
    process = SERVER.Process(target=run, args=(str(corpus), str(out)))
    process.start()
    return process


def finish(process) -> int | None:
    process.join(timeout=200)
    return process.exitcode


def weights_hash(folder) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(corpus, tmp_path) -> None:
    assert finish(start(corpus, tmp_path / "whole")) == 0
    rng = random.Random(time.time_ns())
    out, state = tmp_path / "killed", tmp_path / "killed.run" / "state.json"
    reached, kills = 0, 0
    for _ in range(4):
        process = start(corpus, out)
        target = reached + rng.randrange(1, 25)
        while process.exitcode is None:
            try:
                reached = json.loads(state.read_text())["step"]  # always whole: it is renamed into place
            except FileNotFoundError:
                reached = 0
            if reached >= target:
                time.sleep(rng.uniform(0, 0.05))  # anywhere within a step or a checkpoint
                process.kill()
            time.sleep(0.002)
        kills += process.exitcode == -signal.SIGKILL
        if out.exists():
            break
    assert kills >= 2
    if not out.exists():
        assert finish(start(corpus, out)) == 0
    assert weights_hash(out) == weights_hash(tmp_path / "whole")
    records = [json.loads((tmp_path / name / "record.json").read_text()) for name in ("whole", "killed")]
    for record in records:
        record.update(wall_s=None, name=None)
    assert records[0] == records[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"]


def test_a_kill_after_the_last_rename_is_a_finished_run(corpus, tmp_path) -> None:
    budget = Budget(tokens=500, rows=2)
    out = train(CFG, corpus, tmp_path / "m", budget=budget, threads=1)
    (tmp_path / "m.run").mkdir()
    (tmp_path / "m.run" / "state.json").write_text("{}")
    assert train(CFG, corpus, out, budget=budget, threads=1) == out
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_unfinished_run_is_only_continued_as_it_was_begun(corpus, tmp_path, monkeypatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("t2lens.zoo.training.write_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        train(CFG, corpus, tmp_path / "m", budget=Budget(tokens=500, rows=2), threads=1, checkpoint_every=1)
    with pytest.raises(ValueError, match="holds a training run with another budget; finish it"):
        train(CFG, corpus, tmp_path / "m", budget=Budget(tokens=500, rows=2, seed=1), threads=1)
    (tmp_path / "x.run").mkdir()
    (tmp_path / "x.run" / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="not empty and holds no training run"):
        train(CFG, corpus, tmp_path / "x", budget=Budget(tokens=500, rows=2), threads=1)
    assert (tmp_path / "x.run" / "thesis.txt").read_text() == "precious"


def test_bad_input_is_refused_before_anything_is_written(corpus, tmp_path) -> None:
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("too short\nfor a window\n")
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))
    cases: tuple[tuple[tuple[Any, ...], dict[str, Any], str], ...] = (
        (("attnres-ful", corpus, tmp_path / "m"), {}, "no recipe 'attnres-ful'; did you mean 'attnres-full'"),
        ((CFG, tmp_path / "none", tmp_path / "m"), {}, "is not a folder"),
        ((CFG, tmp_path / "short", tmp_path / "m"), {}, "is too short: it gives a vocabulary"),
        (
            ("attnres-full", tmp_path / "short", tmp_path / "m"),
            {},
            r"is too short: .* 255 tokens, .* \d+ and \d+ tokens",
        ),
        ((CFG, corpus, tmp_path / "there"), {}, "exists already"),
        ((CFG, corpus, tmp_path / "m"), {"precision": "int8"}, "precision must be"),
        ((CFG, corpus, tmp_path / "m"), {"checkpoint_every": 0}, "checkpoint_every must be"),
    )
    for arguments, options, message in cases:
        with pytest.raises(ValueError, match=message):
            train(*arguments, **options)
    assert sorted(tmp_path.rglob("*")) == before
    budgets: tuple[dict[str, Any], ...] = ({"tokens": 0}, {"rows": -1}, {"lr": 0.0}, {"warmup": 2.0})
    for wrong in budgets:
        with pytest.raises(ValueError, match="Budget"):
            Budget(**wrong)


def test_a_training_that_diverges_says_so(corpus, tmp_path, monkeypatch) -> None:
    def broken(data, step, *rest):
        if step == 3:
            raise_nan()
        return batch(data, step, *rest)

    def raise_nan() -> None:
        with torch.no_grad():
            model.embed.weight.fill_(float("nan"))

    model = t2lens.build(CFG)
    monkeypatch.setattr("t2lens.zoo.training.build", lambda *_, **__: model)
    monkeypatch.setattr("t2lens.zoo.training.batch", broken)
    with pytest.raises(ValueError, match="loss is nan at step 3: the training diverged"):
        train(CFG, corpus, tmp_path / "m", budget=Budget(tokens=500, rows=2), threads=1)
    assert not (tmp_path / "m").exists()


def test_progress_is_a_bar_in_a_terminal_and_lines_in_a_file(monkeypatch) -> None:
    for terminal in (True, False):
        text = io.StringIO()
        with Progress(20, 10, 1000, Console(file=text, force_terminal=terminal, width=120)) as progress:
            for step in range(11, 21):
                progress.update(step, 4.5, 4.75)
        shown = text.getvalue()
        assert "loss 4.500, held out 4.750" in shown and "tokens/s" in shown and "20/20" in shown
        assert ("\x1b[" in shown) == terminal
    assert len(shown.splitlines()) == 1  # the log is sparse: one line in so short a time


def test_recipes_share_one_backbone() -> None:
    shared = [{**cfg.to_dict(), "residual": None, "local": None, "canon": None} for cfg in RECIPES.values()]
    assert all(parts == shared[0] for parts in shared)
    for name, cfg in RECIPES.items():
        assert recipe(name) is cfg and 2 * t2lens.build(cfg).n_params < 2_990_000

"""The command line: what it prints and writes, and one sentence with exit code 2 for whatever is wrong."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import t2lens
from t2lens.cli import app
from t2lens.config import MLP, Attention, ModelConfig
from t2lens.residual import AttnRes, DeepDelta
from t2lens.zoo import registry
from t2lens.zoo.tokenizer import Tokenizer

PROMPT = "the king <b>&</b> said to the king [red]x[/red]"
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two small models of the same tokenizer, as `t2lens train` writes them."""
    folder = tmp_path_factory.mktemp("shelf")
    tokenizer = Tokenizer.train(["the king said to the queen, the king is here\n"] * 9, n_vocab=270)
    for name, residual in (("tiny-attnres", AttnRes()), ("tiny-ddl", DeepDelta())):
        cfg = ModelConfig(
            d_vocab=270,
            n_ctx=64,
            d_model=16,
            n_layers=2,
            attention=Attention(n_heads=2, n_kv_heads=1, d_head=8),
            mlp=MLP(d_mlp=20),
            residual=residual,
        )
        model = t2lens.build(cfg, seed=1)
        model.tokenizer = tokenizer
        record = {
            "system": cfg.describe(),
            "n_params": model.n_params,
            "validation_loss": 2.5,
            "bigram_loss": 3.25,
            "tokens_seen": 1000,
            "budget": {"seed": 0},
        }
        registry.save(model, folder / name, record=record)
    return folder


@pytest.fixture
def bundled(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same models, bundled."""
    monkeypatch.setattr(registry, "BUNDLED", shelf)
    yield shelf


def run(*arguments: Any, input: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)


def one_sentence(result: Result, *words: str) -> None:
    """Exit code 2, and on stderr one line without a traceback; nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("t2lens: ")
    assert "Traceback" not in result.output
    for word in words:
        assert word in lines[0]


# --- what it does --------------------------------------------------------------------------------------------


def test_models_lists_what_is_bundled(bundled: Path):
    result = run("models")
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if "tiny-ddl" in line]
    assert "Deep Delta Learning, scalar state" in line
    assert "2.500" in line
    assert "3.250" in line


def test_trace_prints_the_numbers_of_the_position(bundled: Path):
    result = run("trace", PROMPT, "--model", "tiny-attnres", "--pos", 3)
    assert result.exit_code == 0, result.output
    trace = t2lens.trace(t2lens.load("tiny-attnres"), PROMPT)
    text = result.stdout
    assert "Trace of tiny-attnres" in text
    assert "verified" in text
    assert f"'{trace.tokens[3]}'".replace(" ", "\u00b7") in text
    (row,) = [line for line in text.splitlines() if line.startswith(" 1.mlp")]
    assert row.split()[1] == f"{trace.dataset['residual_norm'].sel(read='1.mlp', pos=3).item():.3g}"
    weights = trace.dataset["depth_weight"].sel(read="1.mlp", pos=3).dropna("source")
    top = weights.source.values[weights.values.argmax()]
    assert f"{top} {weights.values.max():.2g}" in row
    assert "[red]x[/red]" in text  # not a colour


def test_two_models_side_by_side_in_one_page(bundled: Path, tmp_path: Path):
    page = tmp_path / "out.html"
    result = run("trace", PROMPT, "--model", "tiny-attnres", "--model-b", "tiny-ddl", "--html", page)
    assert result.exit_code == 0, result.output
    assert f"wrote {page}" in result.stdout
    assert "Trace of tiny-attnres" in result.stdout
    assert "Trace of tiny-ddl" in result.stdout
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in html
    assert html.count("</script>") == 1


def test_files_read_back_to_the_same_numbers(bundled: Path, tmp_path: Path):
    names = {kind: tmp_path / f"out.{kind}" for kind in ("csv", "json", "save")}
    arguments = [part for kind, path in names.items() for part in (f"--{kind}", path)]
    assert run("trace", PROMPT, "--model", "tiny-ddl", *arguments).exit_code == 0
    trace = t2lens.trace(t2lens.load("tiny-ddl"), PROMPT, name="tiny-ddl")
    saved = t2lens.load_trace(names["save"])
    assert saved.dataset.identical(trace.dataset)
    read = json.loads(names["json"].read_text())["traces"][0]
    gate = np.array(read["variables"]["gate"]["values"], dtype="float32")
    np.testing.assert_array_equal(gate, trace.dataset["gate"].values)
    rows = csv.DictReader(io.StringIO(names["csv"].read_text(), newline=""))
    gates = {(r["write"], int(r["pos"])): np.float32(r["value"]) for r in rows if r["variable"] == "gate"}
    for (write, pos), value in gates.items():
        assert value == trace.dataset["gate"].sel(write=write, pos=pos).item()
    assert len(gates) == trace.dataset["gate"].size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.json", "out.save"]


def test_a_saved_trace_is_shown_without_its_model(bundled: Path, tmp_path: Path):
    file = tmp_path / "t.safetensors"
    first = run("trace", PROMPT, "--model", "tiny-attnres", "--save", file)
    assert first.exit_code == 0
    again = run("trace", "--load", file)
    assert again.exit_code == 0
    assert again.stdout == first.stdout.replace(f"wrote {file}\n", "")


def test_token_ids_and_standard_input(bundled: Path):
    spoken = run("trace", "-", "--model", "tiny-ddl", input="the king\n").stdout
    assert "the king" in spoken
    ids = t2lens.load("tiny-ddl").to_tokens("the king\n")[0].tolist()
    given = run("trace", "--ids", ",".join(map(str, ids)), "--model", "tiny-ddl").stdout
    assert given.splitlines()[2:] == spoken.splitlines()[2:]


def test_a_model_folder_is_a_model(shelf: Path):
    result = run("trace", "the king", "--model", shelf / "tiny-ddl", "--quantity", "residual_norm")
    assert result.exit_code == 0, result.output
    assert "Trace of tiny-ddl" in result.stdout
    assert "residual norm, low bar" in result.stdout


def test_a_long_prompt_is_cut_with_a_notice(bundled: Path):
    result = run("trace", "king " * 100, "--model", "tiny-ddl")
    assert result.exit_code == 0
    assert "context 64" in result.stdout


def test_verify_passes_on_a_sound_model_and_names_every_check(bundled: Path):
    result = run("verify", "tiny-attnres", "--text", "the king said")
    assert result.exit_code == 0, result.output
    expected = t2lens.verify(t2lens.load("tiny-attnres"), "the king said")
    assert f"tiny-attnres: all {len(expected)} checks passed." in result.stdout
    for check in expected:
        assert check.name in result.stdout
    assert run("verify").stdout.count("checks passed.") == 2  # without a name: every bundled model


def test_verify_fails_on_a_model_that_is_not_finite(shelf: Path, tmp_path: Path):
    model = t2lens.load(shelf / "tiny-attnres")
    model.get_parameter("blocks.1.mlp.output.weight").data[0, 0] = float("nan")
    registry.save(model, tmp_path / "broken")
    result = run("verify", tmp_path / "broken", shelf / "tiny-ddl")
    assert result.exit_code == 1
    assert "FAILED: " in result.stdout
    assert "finite" in result.stdout
    assert "FAIL" in result.stdout
    assert "Traceback" not in result.output


def test_train_writes_a_model_that_trace_reads(tmp_path: Path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("".join(f"the king number {i} said to queen {i * i}\n" for i in range(4000)))
    made = tmp_path / "made"
    arguments = ("train", text, "--out", made, "--system", "standard", "--tokens", 510, "--rows", 2, "--threads", 1)
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert f"--model {made}" in result.stdout
    assert json.loads((made / "record.json").read_text())["budget"]["rows"] == 2
    assert run("trace", "the king", "--model", made).exit_code == 0
    assert not (tmp_path / "made.run").exists()


# --- what can be wrong ---------------------------------------------------------------------------------------


def test_unknown_models_name_the_nearest(bundled: Path):
    one_sentence(run("trace", "x", "--model", "tiny-atnres"), "'tiny-atnres'", "did you mean 'tiny-attnres'")
    one_sentence(run("trace", "x", "--model", "tiny-ddl", "--model-b", "nothing"), "'nothing'")
    one_sentence(run("verify", "tiny-ddl", "tiny-dll"), "'tiny-dll'", "did you mean 'tiny-ddl'")


@pytest.mark.parametrize("prompt", ["", "   ", "\n\t"])
def test_empty_prompts(bundled: Path, prompt: str):
    one_sentence(run("trace", prompt, "--model", "tiny-ddl"), "prompt is empty")
    one_sentence(run("verify", "tiny-ddl", "--text", prompt), "prompt is empty")
    one_sentence(run("trace", "-", "--model", "tiny-ddl", input=prompt), "prompt is empty")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["a text, --ids, or --load"]),
        (("x", "--ids", "1"), ["Give one of"]),
        (("--ids", "0,270"), ["270", "0..269"]),
        (("--ids=-1"), ["-1", "0..269"]),
        (("--ids", "1,x"), ["whole numbers", "'1,x'"]),
        (("--ids", " "), ["empty"]),
        (("x", "--quantity", "gait"), ["did you mean 'gate'"]),
        (("x", "--pos", "99"), ["--pos", "99"]),
        (("x", "--csv", "nowhere/out.csv"), ["nowhere", "does not exist"]),
        (("x", "--csv", "."), ["is a folder"]),
        (("x", "--csv", "a", "--json", "a"), ["same file name"]),
        (("x", "--model-b", "tiny-ddl", "--save", "a"), ["--save keeps one trace"]),
        (("--load", "missing.safetensors"), ["no file missing.safetensors"]),
        (("--load", "a", "--model-b", "tiny-ddl"), ["--model-b"]),
    ],
)
def test_bad_choices(bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, words: list[str]):
    monkeypatch.chdir(tmp_path)
    arguments = (arguments,) if isinstance(arguments, str) else arguments
    one_sentence(run("trace", *arguments, "--model", "tiny-ddl"), *words)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_not_what_they_should_be(bundled: Path, tmp_path: Path):
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    one_sentence(run("trace", "--load", text), "notes.txt", "not a readable safetensors file")
    one_sentence(run("trace", "--load", bundled / "tiny-ddl" / "model.safetensors"), "not a t2lens trace")
    one_sentence(run("trace", "x", "--model", text), "notes.txt", "not a model")
    trace = tmp_path / "t.safetensors"
    assert run("trace", "x", "--model", "tiny-ddl", "--save", trace).exit_code == 0
    trace.write_bytes(trace.read_bytes()[:-100])
    one_sentence(run("trace", "--load", trace), "t.safetensors")


@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "config"])
def test_damaged_models(shelf: Path, tmp_path: Path, damage: str):
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in (shelf / "tiny-ddl").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "cut":
        weights.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[-50] ^= 0xFF
        weights.write_bytes(content)
    elif damage == "text":
        weights.write_text("hello")
    else:
        (folder / "config.json").write_text("{")
    page = tmp_path / "out.html"
    one_sentence(run("trace", "x", "--model", folder, "--html", page), "damaged")
    assert not page.exists()


def test_an_output_that_cannot_be_made_leaves_the_old_file(bundled: Path, tmp_path: Path):
    page = tmp_path / "out.html"
    page.write_text("old")
    one_sentence(run("trace", "x", "--model", "tiny-ddl", "--html", page, "--quantity", "nothing"), "nothing")
    one_sentence(run("trace", "x", "--model", "tiny-dll", "--html", page))
    assert page.read_text() == "old"
    assert run("trace", "x", "--model", "tiny-ddl", "--html", page).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


def test_training_says_what_is_wrong(tmp_path: Path):
    one_sentence(run("train", tmp_path / "none", "--out", tmp_path / "m"), "none")
    one_sentence(run("train", tmp_path, "--out", tmp_path / "m", "--system", "standrd"), "did you mean 'standard'")
    one_sentence(run("train", tmp_path, "--out", tmp_path / "m", "--tokens", 0), "tokens")
    assert list(tmp_path.iterdir()) == []


def test_the_dashboard_needs_a_port():
    one_sentence(run("app", "--port", 70000), "70000")


def test_without_bundled_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "BUNDLED", tmp_path)
    one_sentence(run("models"), "no bundled models")
    one_sentence(run("verify"), "no bundled models")


# --- as a program --------------------------------------------------------------------------------------------


def program(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "t2lens.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, env={**os.environ, **environment}, check=False)


def test_as_a_program_in_a_pipe(shelf: Path, tmp_path: Path):
    page = tmp_path / "out.html"
    arguments = ("trace", PROMPT, "--model", shelf / "tiny-attnres", "--html", page)
    done = program(*arguments, PYTHONIOENCODING="utf-8", COLUMNS="40")
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert "\x1b" not in text  # no colours in a pipe
    assert "look-back" in text
    assert page.is_file()
    narrow = program("trace", PROMPT, "--model", shelf / "tiny-attnres", PYTHONIOENCODING="ascii")
    assert narrow.returncode == 0, narrow.stderr
    assert narrow.stdout.isascii()
    wrong = program("trace", "x", "--model", shelf / "absent")
    assert wrong.returncode == 2
    assert wrong.stderr.decode().count("\n") == 1
    assert b"Traceback" not in wrong.stderr


def test_version_and_help():
    assert run("--version").stdout == f"t2lens {t2lens.__version__}\n"
    for command in ("models", "trace", "verify", "app", "train"):
        assert command in run("--help").stdout
        assert run(command, "--help").exit_code == 0


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from t2lens.cli import app;"
        "CliRunner().invoke(app, ['--help']);"
        "print([m for m in ('torch', 'numpy', 'xarray', 'plotly', 'streamlit', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_bench_prints_ratios_and_names_its_suites(monkeypatch):
    from t2lens import bench
    from t2lens.bench.timing import paired

    quick = lambda pairs: [paired("sum / sum", lambda: sum(()), lambda: sum(()), pairs=pairs)]  # noqa: E731
    monkeypatch.setitem(bench.SUITES, "reads", quick)
    result = CliRunner().invoke(app, ["bench", "reads", "--pairs", "3"])
    assert result.exit_code == 0 and "sum / sum" in result.output
    for words in (["bench", "nothing"], ["bench", "--pairs", "1"]):
        assert CliRunner().invoke(app, words).exit_code == 2

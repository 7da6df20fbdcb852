"""`t2lens.load` of what others published, from the disk and the hub, with their tokenizers; and on the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core
from typer.testing import CliRunner, Result

import t2lens
from t2lens.apps import loaders
from t2lens.checkpoints import FAMILIES
from t2lens.checkpoints.published import PUBLISHED
from t2lens.cli import app
from t2lens.residual import SYSTEMS
from t2lens.zoo import hub, registry
from t2lens.zoo.published_tokenizer import PublishedTokenizer, load_tokenizer
from t2lens.zoo.systems import list_systems
from t2lens.zoo.tokenizer import byte_of_char
from tests.checkpoints.golden import unpack

IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A published model without a tokenizer."""
    return unpack("gpt-bert", tmp_path / "gpt-bert")


def byte_level(n: int = 97) -> Core:
    """A byte-level tokenizer that fits the golden models: <s>, <pad>, and the printable ASCII bytes."""
    alphabet = sorted(byte_of_char(), key=byte_of_char().__getitem__)
    vocab = {"<s>": 0, "<pad>": 1} | {char: i + 2 for i, char in enumerate(alphabet[32 : 32 + n - 2])}
    core = Core(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "<pad>"])
    return core


def words() -> Core:
    """A WordPiece tokenizer with the special tokens of BERT."""
    names = ["[PAD]", "[CLS]", "[MASK]", "[UNK]", "the", "king", "##s", "said", "to", "queen"]
    core = Core(models.WordPiece(vocab={name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece()
    core.add_special_tokens(names[:4])
    return core


def give(folder: Path, core: Core, config: Any = None) -> Path:
    core.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# --- load ------------------------------------------------------------------------------------------------------


def test_what_was_assumed_is_said_once_on_stderr_and_kept(tmp_path, capsys):
    folder = unpack("elc-bert-weighted-output", tmp_path / "elc")
    config = json.loads((folder / "config.json").read_text())
    del config["elc_variant"]
    (folder / "config.json").write_text(json.dumps(config))
    model = t2lens.load(folder)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"Loaded {folder} as elc_bert" in err
    assert model.loaded_from.path == folder
    for sentence in model.loaded_from.assumed:
        assert err.count(sentence) == 1
    for reason in set(model.loaded_from.ignored.values()):
        assert reason in err
    assert "it takes token ids, not text" in err
    assert model.tokenizer is None
    t2lens.load("standard")
    assert capsys.readouterr() == ("", "")  # nothing is assumed of our own


def test_a_published_model_is_a_model_like_any_other(folder, tmp_path):
    model = t2lens.load(folder, dtype="float64")
    assert model.name == "gpt-bert"
    trace = t2lens.trace(model, IDS)
    assert len(trace.tokens) == 6
    with pytest.raises(ValueError, match="no tokenizer, so it takes token ids"):
        t2lens.trace(model, "text")
    with pytest.raises(ValueError, match="no option 'nonsense' for a gpt_bert checkpoint"):
        t2lens.load(folder, nonsense=1)
    with pytest.raises(ValueError, match="no option 'causal' for a model that t2lens itself wrote"):
        t2lens.load("standard", causal=False)
    again = t2lens.load(registry.save(model, tmp_path / "ours"), dtype="float64")
    assert torch.equal(again(IDS), model(IDS))
    assert again.cfg == model.cfg


def test_a_single_file_is_a_model_too(folder):
    expected = t2lens.load(folder)(IDS)
    assert torch.equal(t2lens.load(folder / "model.safetensors")(IDS), expected)
    moved = (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert torch.equal(t2lens.load(moved)(IDS), expected)


# --- tokenizers ------------------------------------------------------------------------------------------------


def test_a_byte_level_tokenizer(folder, tmp_path, capsys):
    give(folder, byte_level(), {"bos_token": {"content": "<s>"}, "pad_token": "<pad>"})
    model = t2lens.load(folder)
    assert "token ids, not text" not in capsys.readouterr().err
    assert isinstance(model.tokenizer, PublishedTokenizer)
    assert model.to_str_tokens("Hi-you") == ["<s>", "H", "i", "-", "y", "o", "u"]
    assert model.to_tokens("Hi").tolist()[0][0] == 0
    assert model.to_string(model.to_tokens("Hi!")[0]) == "Hi!"
    batch = model.to_tokens(["Hi", "Hello"])
    assert batch[0].tolist().count(1) == 3
    assert torch.allclose(model(["Hi", "Hello"])[1], model("Hello")[0], atol=1e-5)
    saved = t2lens.load(registry.save(model, tmp_path / "ours"))
    assert isinstance(saved.tokenizer, PublishedTokenizer)
    assert saved.to_tokens("Hi").tolist() == model.to_tokens("Hi").tolist()
    assert saved.tokenizer.pad_id == 1


def test_a_masked_language_model_has_its_words_for_special_tokens(folder):
    model = t2lens.load(give(folder, words(), {"cls_token": "[CLS]", "mask_token": "[MASK]"}))
    assert model.to_str_tokens("The kings said [MASK]") == ["[CLS]", "the", "king", "##s", "said", "[MASK]"]
    assert model.to_string([1, 4, 5, 6, 2]) == "the kings"


def test_a_tokenizer_says_whether_a_text_begins_with_bos(folder):
    for config, bos in (
        (None, None),
        ({"bos_token": None}, None),
        ({"bos_token": "<s>", "add_bos_token": False}, None),
        ({"bos_token": "<s>", "add_bos_token": True}, 0),
    ):
        give(folder, byte_level(), config)
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        assert tokenizer.bos_id == bos
        model = t2lens.load(folder)
        assert model.to_str_tokens("Hi") == [*(["<s>"] if bos == 0 else []), "H", "i"]
        (folder / "tokenizer_config.json").unlink(missing_ok=True)


def test_a_tokenizer_that_cannot_be_used_leaves_a_model_of_token_ids(folder, capsys):
    for text in ("{", '{"version": "1.0"}', "[]"):
        (folder / "tokenizer.json").write_text(text)
        assert t2lens.load(folder).tokenizer is None
        assert "tokenizer.json' cannot be used" in capsys.readouterr().err
    give(folder, byte_level(), {"bos_token": "<nowhere>"})
    assert t2lens.load(folder).tokenizer is None
    assert "has no token '<nowhere>'" in capsys.readouterr().err


def test_ids_and_texts_at_the_edge_of_a_tokenizer():
    tokenizer = PublishedTokenizer(byte_level(), bos="<s>")
    assert tokenizer.n_vocab == 97
    assert tokenizer.str_token(96) == "~"
    assert tokenizer.str_token(500) == "<500>"
    assert tokenizer.str_tokens([0, 35]) == ["<s>", "A"]
    with pytest.raises(ValueError, match="out of range"):
        tokenizer.str_token(-1)
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("a\ud800")


# --- the hub ---------------------------------------------------------------------------------------------------


@pytest.fixture
def snapshots(folder, monkeypatch):
    """The hub: one model, and a list of what was asked for."""
    asked: list[dict[str, Any]] = []

    def snapshot_download(id: str, **more: Any) -> str:
        asked.append({"id": id, **more})
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_hub_id_is_downloaded_without_pickles_or_code(folder, snapshots):
    model = t2lens.load("ltg/gpt-bert-babylm-small", revision="abc123")
    assert model.name == "gpt-bert-babylm-small"
    (asked,) = snapshots
    assert asked["id"] == "ltg/gpt-bert-babylm-small"
    assert asked["revision"] == "abc123"
    assert not any(name.endswith((".bin", ".py", ".pt", "*")) for name in asked["allow_patterns"])
    (folder / "golden.safetensors").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no safetensors.*hf download ltg/gpt-bert.*tensors alone"):
        t2lens.load("ltg/gpt-bert-babylm-small")


def test_a_local_folder_wins_over_a_hub_id(folder, snapshots, tmp_path, monkeypatch):
    (tmp_path / "owner").mkdir()
    folder.rename(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert t2lens.load("owner/name").name == "name"
    assert snapshots == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.LocalEntryNotFoundError("not here"), ("without a network", "hf download some/model", "path of that")),
        (errors.OfflineModeIsEnabled("offline"), ("without a network (OfflineModeIsEnabled)",)),
        (ConnectionError("down\nfor long"), ("without a network",)),
        (OSError(28, "No space left on device"), ("some/model",)),
    ],
)  # fmt: skip
def test_without_a_network_one_sentence_names_the_local_way(monkeypatch, error, words):
    def fails(id: str, **more: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(ValueError) as caught:
        t2lens.load("some/model")
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_what_is_a_hub_id_and_what_a_path():
    for name in ("ltg/gpt-bert-babylm-small", "Caiyun-AI/MUDDFormer-2.8B", "a/b"):
        assert hub.is_id(name)
    for name in (
        "standard",
        "./a/b",
        "/a/b",
        "a/b/c",
        "../b",
        "a/..",
        "a/",
        "/b",
        "a\\b",
        "a b/c",
        "~/b",
        "https://x/y",
    ):
        assert not hub.is_id(name), name


# --- the command line ------------------------------------------------------------------------------------------


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_trace_and_verify_take_a_checkpoint_and_token_ids(folder):
    result = run("trace", "--ids", "3,1,4,1,5", "--model", folder, "--pos", 2)
    assert result.exit_code == 0, result.output
    assert "Trace of gpt-bert: 5 tokens" in result.stdout
    assert "Loaded" in result.stderr
    assert "Loaded" not in result.stdout
    result = run("trace", "--ids", "3,1,4", "--model", folder, "--option", "causal=false")
    assert "bidirectional" in result.stdout.lower()
    result = run("verify", folder, "--ids", "3,1,4,1,5,9")
    assert result.exit_code == 0, result.output
    assert "checks passed" in result.stdout


def test_command_lines_that_cannot_be_met(folder):
    for arguments, word in (
        (("trace", "a text", "--model", folder), "no tokenizer"),
        (("trace", "--ids", "1", "--model", folder, "--option", "causal"), "NAME=VALUE"),
        (("trace", "--ids", "1", "--model", folder, "--option", "nonsense=1"), "no option 'nonsense'"),
        (("verify", folder, "--ids", "1,x"), "whole numbers"),
        (("verify", folder, "--ids", "1", "--text", "x"), "not both"),
        (("verify", folder / "config.json"), "weights end in"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert word in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.output


def test_the_dashboard_takes_checkpoints_that_read_text(folder, monkeypatch):
    monkeypatch.setattr(loaders, "_ADDED", {})
    with pytest.raises(ValueError, match="has no tokenizer, and the dashboard shows texts"):
        loaders.add(str(folder))
    assert loaders.added() == []
    give(folder, byte_level(), {"bos_token": "<s>"})
    assert loaders.add(str(folder)) == "gpt-bert"
    assert loaders.model_names()[-1] == "gpt-bert"
    assert loaders.trace(loaders.load("gpt-bert"), "Hi").tokens == ["<s>", "H", "i"]
    with pytest.raises(ValueError, match="a model 'gpt-bert' already"):
        loaders.add(os.path.relpath(folder))


def test_known_public_checkpoints_are_listed():
    result = run("models", "--published")
    assert result.exit_code == 0
    for one in PUBLISHED:
        assert one.id in result.stdout
        assert one.status, one.id
    assert "No file of these was opened" in result.stdout
    assert len({one.id for one in PUBLISHED}) == len(PUBLISHED)


def test_every_system_is_listed_in_one_line():
    names = [info.name for info in list_systems()]
    assert names[: len(SYSTEMS)] == [system.kind for system in SYSTEMS]
    assert len(set(names)) == len(names)
    assert {"rezero", "highway", "canon", "kv-shift", "short-swa"} <= set(names)
    for info in list_systems():
        assert info.what, info.name
        assert info.config.startswith(("residual.", "config."))
        made = eval(info.config, {"residual": t2lens.residual, "config": t2lens.config})
        assert made is not None
    assert next(info.paper for info in list_systems() if info.name == "attnres") == "arXiv 2603.15031"
    result = run("models", "--systems")
    assert result.exit_code == 0
    assert all(f" {name} " in result.stdout for name in names)


def test_every_family_has_a_name_of_its_own():
    names = [family.__name__.rpartition(".")[2] for family in FAMILIES]
    assert len(set(names)) == len(names)


def test_a_panic_of_the_library_is_a_sentence() -> None:
    core = Core(models.BPE({"a": 0, "b": 1}, []))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(ValueError, match="The tokenizer cannot read this text"):
        PublishedTokenizer(core).encode("a" * 40 + "b")
    assert PublishedTokenizer(core).encode("ab") == [0, 1]

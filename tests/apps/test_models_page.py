"""The page of models, uploads and badges: without a browser."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import t2lens
from t2lens.apps import loaders
from t2lens.apps.uploads import AT_ONCE, LIMITS, Folder, check_files, keep_files
from t2lens.checks import Check, Verification
from t2lens.zoo.registry import BUNDLED
from tests.apps.pages import open_page as open_on
from tests.apps.pages import texts

FILES = ("model.safetensors", "config.json", "tokenizer.json")


@dataclass(frozen=True)
class Brought:
    name: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def getvalue(self) -> bytes:
        return self.data


def good(name: str = "standard", **instead: Any) -> list[Brought]:
    """The files of a bundled model; `instead` replaces contents (None: left out) by their stem."""
    found = []
    for file in FILES:
        data = instead.get(file.partition(".")[0], (BUNDLED / name / file).read_bytes())
        found += [] if data is None else [Brought(file, data)]
    return found


def asks(**changes: Any) -> bytes:
    """The config of a bundled model, but for these values."""
    config = json.loads((BUNDLED / "standard" / "config.json").read_bytes())
    return json.dumps({**config, "model": {**config["model"], **changes}}).encode()


def _tokens(vocab: dict[str, int]) -> bytes:
    """A tokenizer.json that knows these alone."""
    return json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}}).encode()


def open_page(**params: str) -> AppTest:
    return open_on("models", **{"a": "ddl", "b": "none", **params})


# --- what is brought -------------------------------------------------------------------------------------------------


def _pickled() -> bytes:
    return pickle.dumps({"weight": [1.0]})


def _zipped() -> bytes:
    made = BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", _pickled())
    return made.getvalue()


def _safetensors(header: Any, data: bytes = b"") -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data


def _whole() -> bytes:
    return (BUNDLED / "standard" / "model.safetensors").read_bytes()


def _one(dtype: str, shape: Any, offsets: Any, n: int) -> bytes:
    return _safetensors({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, b"\0" * n)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (_pickled(), "pickle under another name"),
        (_zipped(), "pickle under another name"),
        (b"", "no safetensors file"),
        (b"\0" * 7, "no safetensors file"),
        (struct.pack("<Q", 2**63) + b"{}", "no safetensors file"),
        (struct.pack("<Q", 17 * 2**20) + b"{" * 100, "at most 16777216"),
        (_safetensors(b"[" * 5000), "header is not what such a file has"),
        (_safetensors({"w": 7}), "header is not what such a file has"),
        (_safetensors(b"\xff\xfe"), "header is not what such a file has"),
        (_whole()[:-1000], "truncated or damaged"),
        (_whole() + b"more", "do not fill"),
        (_one("F32", [4], [0, 16], 8), "does not lie within"),
        (_one("F32", [4], [-8, 8], 16), "does not lie within"),
        (_one("F32", [2**40, 2**40], [0, 16], 16), "does not lie within"),
        (_one("F32", [-4], [0, 16], 16), "does not lie within"),
        (_one("F32", [4], "here", 16), "does not lie within"),
    ],
)
def test_weights_that_are_not_what_they_say_are_refused(weights: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=r"\.$") as caught:
        check_files(good(model=weights))
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "x.PTH", "weights.ckpt", "a.pkl"])
def test_pickles_are_refused_by_name_before_they_are_read(name: str) -> None:
    with pytest.raises(ValueError, match="is a pickle, which can run any program"):
        check_files([*good(), Brought(name, b"")])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (good(tokenizer=None), "tokenizer.json is missing"),
        (good(model=None, tokenizer=None), "are missing"),
        ([*good(), Brought("other.json", b"{}")], "two files for config.json"),
        ([*good(), Brought("README.md", b"")], "no part of a model"),
        ([*good(), Brought("../../../etc/passwd", b"")], "'passwd' is no part of a model"),
        (good(config=b"{"), "config is not JSON"),
        (good(config=b"[]"), "config is no JSON object"),
        (good(config=b"[" * 5000), "config is not JSON"),
        (good(tokenizer=b"\xff"), "tokenizer is not JSON"),
        (good(config=b" " * (LIMITS["config.json"] + 1)), "at most 1,048,576"),
        (good(config=json.dumps({"text": {"num_hidden_layers": 10**9}}).encode()), "num_hidden_layers = 1000000000"),
    ],
)
def test_what_is_no_model_is_refused_in_a_sentence(files: list[Brought], words: str) -> None:
    with pytest.raises(ValueError, match=r"\.$") as caught:
        check_files(files)
    assert words in str(caught.value)


def test_files_lie_under_our_names_and_go_with_their_folder() -> None:
    before = Folder.count()
    files = [Brought(f"C:\\evil\\..\\{each.name}", each.data) for each in good()]
    folder = keep_files(files)
    assert sorted(each.name for each in folder.path.iterdir()) == sorted(FILES)
    path = folder.path
    assert Folder.count() == before + 1
    del folder  # the visit ends
    assert not path.exists() and Folder.count() == before
    others = [keep_files(good()) for _ in range(AT_ONCE - before)]
    with pytest.raises(ValueError, match="uploaded models at once"):
        keep_files(good())
    paths = [each.path for each in others]
    for each in others:
        each.remove()
    assert Folder.count() == before and not any(path.exists() for path in paths)


# --- the page --------------------------------------------------------------------------------------------------------


def bring(app: AppTest, files: list[Brought], turn: int = 0) -> AppTest:
    app.file_uploader(key=f"upload-{turn}").set_value([(each.name, each.data, "") for each in files]).run()
    return app.button(key="load-upload").click().run()


def test_an_uploaded_model_is_shown_checked_used_and_dropped() -> None:
    app = open_page()
    assert not app.exception and app.button(key="load-upload").disabled
    bring(app, good("standard"))
    assert not app.exception
    assert app.session_state["model_shown"] == "uploaded-1" and app.subheader[0].value == "uploaded-1"
    found = t2lens.verify(t2lens.load("standard"))
    assert any(f"verified {len(found)}/{len(found)}" in each.label for each in app.expander)
    (own,) = app.session_state["own_models"].values()
    path = Path(own.address)
    assert path.is_dir()
    app.button(key="use-a").click().run()
    assert app.session_state["model_a"] == "uploaded-1"
    assert [(app.button(key=key).label, app.button(key=key).disabled) for key in ("use-a", "use-b")] == [
        ("Is A", True),
        ("Use as B", False),
    ]
    # another visitor sees nothing of it
    other = open_page(a="uploaded-1")
    assert "uploaded-1" not in list(other.dataframe[0].value["model"])
    assert "The link asks for a = 'uploaded-1', which does not exist" in texts(other)
    app.button(key="drop-model").click().run()
    assert not app.exception and not path.exists()
    assert app.session_state["model_a"] != "uploaded-1" and "own_models" in app.session_state


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (good(model=_pickled()), "pickle"),
        (good(model=_whole()[:-7]), "truncated or damaged"),
        (good(config=(BUNDLED / "ddl" / "config.json").read_bytes()), "damaged"),  # another model's SHA-256
        (good(config=b'{"model_type": "llama"}'), "of no format that t2lens knows"),
        (good(tokenizer=b"{}"), ""),
        (good(config=asks(d_vocab=10**400)), "d_vocab must be at most 2147483647"),
        (good(config=asks(d_model=2**31 - 1, d_vocab=2**31 - 1, n_layers=1)), ""),
        (good(tokenizer=_tokens({"7": 0})), "makes no tokens of a text"),
    ],
)
def test_hostile_uploads_are_sentences_and_leave_nothing(files: list[Brought], words: str) -> None:
    before = Folder.count()
    app = bring(open_page(), files)
    assert not app.exception
    assert words in texts(app) and "/tmp" not in texts(app) and "t2lens-upload" not in texts(app)
    assert not app.session_state["own_models"] if "own_models" in app.session_state else True
    assert Folder.count() == before


def test_a_config_that_lies_about_its_weights_is_refused() -> None:
    config = json.loads((BUNDLED / "standard" / "config.json").read_bytes())
    for key, value in (("n_layers", 60), ("d_vocab", 10**8), ("d_model", 10**7), ("n_layers", 7)):
        lie = {**config, "model": {**config["model"], key: value}}
        app = bring(open_page(), good(config=json.dumps(lie).encode()))
        assert not app.exception and app.session_state["model_shown"] != "uploaded-1", (key, value)
        assert "fit the config" in texts(app) or "describes no model" in texts(app) or "layers" in texts(app), texts(
            app
        )


def test_a_folder_is_loaded_for_its_visitor_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import streamlit as st

    real = st.get_option
    monkeypatch.setattr(st, "get_option", lambda key: "127.0.0.1" if key == "server.address" else real(key))
    mine = tmp_path / "mine"
    shutil.copytree(BUNDLED / "ddl", mine)
    app = open_page()
    for given, words in (("/no/such/place", "no folder"), ("x\0y", "no folder"), (str(tmp_path), "is not a model")):
        app.text_input[0].set_value(given)
        next(each for each in app.button if each.label == "Load the folder").click().run()
        assert not app.exception and words in texts(app), (given, texts(app))
    app.text_input[0].set_value(str(mine))
    next(each for each in app.button if each.label == "Load the folder").click().run()
    assert not app.exception and app.session_state["model_shown"] == "mine"
    assert "mine" not in loaders.model_names()


@pytest.mark.parametrize("name", [info.name for info in t2lens.list_models()][::4])
def test_a_card_says_what_the_registry_says(name: str) -> None:
    app = open_page(a=name)
    info = next(each for each in t2lens.list_models() if each.name == name)
    said = texts(app)
    assert not app.exception and app.subheader[0].value == name
    assert f"{info.validation_loss:.4f}" in said and f"{info.bigram_loss - info.validation_loss:.4f}" in said
    assert f"{info.n_params:,} parameters" in said and f"{info.tokens:,}" in said
    assert any("$$" in each.value for each in app.markdown)
    config = json.loads((BUNDLED / name / "config.json").read_bytes())
    assert config["weights_sha256"][:16] in said


def test_the_badge_stands_beside_the_models_and_is_red_when_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    app = open_on("analyses", a="standard", b="ddl", prompt="the king", analysis="lens")
    labels = [each.value for each in app.markdown if each.value.startswith("Model ")]
    n = [len(t2lens.verify(t2lens.load(name))) for name in ("standard", "ddl")]
    assert labels == [f"Model {x} :green-badge[verified {k}/{k}]" for x, k in zip("AB", n, strict=True)]
    bad = Verification((Check("causality", 1.0, 1e-9, "no"), Check("finite", 0.0, 0.0, "yes")))
    monkeypatch.setattr(loaders, "_VERIFIED", {loaders.load("standard").weights_hash: bad})
    app = open_on("analyses", a="standard", b="none", prompt="the king", analysis="lens")
    label = next(each for each in app.markdown if each.value.startswith("Model A"))
    assert label.value == "Model A :red-badge[FAILS 1/2]" and "**FAIL** causality" in label.help

"""Models, prompts and edits that nobody expects, on every page: an answer or a sentence, never an exception."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import t2lens
from t2lens.apps import loaders
from t2lens.apps.views import PAGES
from t2lens.apps.views.analyses import _column
from t2lens.config import MLP, Attention, ModelConfig
from t2lens.viz.payload import alignment
from t2lens.zoo.registry import save
from t2lens.zoo.tokenizer import Tokenizer
from tests.apps.pages import open_page, texts
from tests.systems import SYSTEMS

PATHS = [page.path for page in PAGES if not page.bare]
ATTENTION = Attention(n_heads=2, n_kv_heads=1, d_head=8)


def other_words() -> Tokenizer:
    return Tokenizer.train(["abc abd the cat sat " * 50], 280)


ODD: dict[str, tuple[str, dict[str, Any], Any]] = {
    "both-ways": ("elc-normalized", {"attention": Attention(n_heads=2, n_kv_heads=2, d_head=8, causal=False)}, None),
    "one-head": ("attnres-full", {"attention": Attention(n_heads=1, n_kv_heads=1, d_head=16)}, None),
    "one-block": ("ddl-cc", {"n_layers": 1}, None),
    "half": ("ddl", {}, torch.float16),
    "brain": ("mhc", {}, torch.bfloat16),
    "short": ("muddformer", {"n_ctx": 3}, None),
    "more-ids": ("ddl", {"d_vocab": 2048}, None),
}
"""Name -> residual system, what is odd about the model, dtype of its weights."""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The odd models stand beside the bundled ones; "more-ids" has ids that its own tokenizer does not."""
    root, bundled = tmp_path_factory.mktemp("odd"), t2lens.load("standard").tokenizer
    for name, (system, changes, dtype) in ODD.items():
        given = {"d_vocab": 2048, "n_ctx": 64, "n_layers": 2, "attention": ATTENTION, **changes}
        cfg = ModelConfig(d_model=16, mlp=MLP(d_mlp=20), residual=SYSTEMS[system], **given)
        model = t2lens.build(cfg, seed=1)
        for i, weight in enumerate(model.parameters()):
            weight.data += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
        model.tokenizer = other_words() if name == "more-ids" else bundled
        loaders.add(str(save(model.to(dtype or torch.float32), root / name)))
    yield
    for name in ODD:
        del loaders._ADDED[name]  # nothing else takes them back


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize("path", PATHS)
def test_odd_models_are_shown_or_refused_in_a_sentence(path: str) -> None:
    names = [*ODD, "standard"]
    random.Random(path).shuffle(names)
    for a, b in zip(names[::2], names[1::2], strict=True):
        app = open_page(path, a=a, b=b, prompt="the king saw", prompt_b="the queen" if a < b else "")
        assert not app.exception, (a, b, [each.message for each in app.exception])
        assert len(app.main) > 2


@pytest.mark.usefixtures("odd")
def test_ids_without_text_are_shown_by_number() -> None:
    app = open_page("gates", a="more-ids", b="none", prompt="the cat")
    assert not app.exception and "out of range" not in texts(app)
    app = open_page("two-axes", a="more-ids", b="none", prompt="the cat")
    next(button for button in app.button if button.key == "write").click().run()
    assert not app.exception and "the tokenizer has ids" in texts(app)


OVERFLOW = json.dumps([{"target": "head", "operation": "add", "site": "3.attn", "value": 1e30, "heads": [0]}])


@pytest.mark.parametrize("path", PATHS)
def test_edits_under_which_nothing_is_finite(path: str) -> None:
    app = open_page(path, a="ddl", b="clean", prompt="the king saw", edits=OVERFLOW, node="A:3:out")
    assert not app.exception, [each.message for each in app.exception]
    for follow in ("likeliest", "next") if path == "lens" else ():
        app = open_page(path, a="ddl", b="clean", prompt="the king saw", edits=OVERFLOW, lens_follow=follow)
        assert not app.exception and "A has no likeliest token here" in texts(app)


def test_files_that_go_while_they_are_served_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    monkeypatch.setitem(loaders._ADDED, tmp_path.name, str(tmp_path))
    with pytest.raises(ValueError, match=r"files of the model .* cannot be read"):
        loaders.load(tmp_path.name)


def test_a_column_of_a_table_is_of_one_kind() -> None:
    assert _column([1, None, 0.5]) == [1, None, 0.5]
    assert _column([1, "", 0.5]) == ["1", "", "0.5"]
    assert _column([True, None]) == ["yes", ""]


@pytest.mark.parametrize("key", ["continuation", "content", "profile", "patch", "loss"])
def test_the_log_of_the_server_stays_empty(key: str, caplog: pytest.LogCaptureFixture) -> None:
    options = '{"other": "the queen saw"}' if key == "patch" else ""
    app = open_page(
        "analyses", a="attnres-full", b="none", prompt="the king saw", analysis=key, analysis_options=options
    )
    assert not app.exception and len(app.dataframe) == 1
    assert [each.getMessage()[:200] for each in caplog.records if "Arrow" in each.getMessage()] == []


def test_another_tokenizer_is_not_another_prompt() -> None:
    cut = alignment([["<|bos|>", "the", " king"], ["<|bos|>", "the", " ", "king"]], "left")
    assert cut is not None and cut["text"].startswith("A and B cut the prompt into other tokens (3 and 4): positions")
    other = alignment([["the", " king"], ["the", " queen"]], "left")
    assert other is not None and other["text"].startswith("The prompts differ (2 and 2 tokens): positions")

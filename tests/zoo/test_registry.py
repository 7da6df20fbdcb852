"""Model folders: the round trip, and one clear sentence for everything that is not a model folder."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import t2lens
from t2lens.config import MLP, ModelConfig, ResidualConfig, ShortSWA
from t2lens.residual import AttnRes, DeepDelta, DepthSWA, Standard
from t2lens.zoo import registry
from t2lens.zoo.registry import list_models, load, save
from t2lens.zoo.tokenizer import Tokenizer

RESIDUALS: tuple[ResidualConfig, ...] = (
    Standard(),
    AttnRes(),
    AttnRes(block_size=2),
    DepthSWA(window=2),
    DeepDelta(),
    DeepDelta(value_channels=4),
)


def small(residual: ResidualConfig = RESIDUALS[0], local: ShortSWA | None = None) -> ModelConfig:
    return ModelConfig(d_vocab=300, n_ctx=16, d_model=16, n_layers=2, mlp=MLP(d_mlp=24), residual=residual, local=local)


@pytest.fixture
def folder(tmp_path):
    model = t2lens.build(small(), seed=3)
    model.tokenizer = Tokenizer.train(["some words and other words\n"], n_vocab=300)
    return save(model, tmp_path / "model", record={"name": "x"})


@pytest.mark.parametrize("residual", RESIDUALS, ids=lambda residual: residual.describe())
@pytest.mark.parametrize("local", [None, ShortSWA(window=4)], ids=["", "swa"])
def test_what_is_saved_is_what_is_loaded(tmp_path, residual, local) -> None:
    model = t2lens.build(small(residual, local), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.1)
    tokens = torch.arange(2, 18)[None]
    loaded = load(save(model, tmp_path / "m"))
    assert loaded.cfg == model.cfg and loaded.tokenizer is None and not loaded.training
    assert all(p.requires_grad and p.device.type == "cpu" for p in loaded.parameters())
    assert torch.equal(loaded(tokens), model(tokens))
    small_file = load(save(model, tmp_path / "half", dtype="bfloat16") / "model.safetensors")
    for name, weight in model.state_dict().items():
        assert torch.equal(small_file.state_dict()[name], weight.bfloat16().float())
    assert load(tmp_path / "m", dtype=torch.float64)(tokens).dtype == torch.float64


def test_tokenizer_and_record_travel_with_the_weights(folder) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "record.json",
        "tokenizer.json",
    ]
    model = load(folder)
    assert model.to_string(model.to_tokens("other words", prepend_bos=False)[0]) == "other words"
    assert load(str(folder), dtype="bfloat16").embed.weight.dtype == torch.bfloat16


def test_saving_is_all_or_nothing(folder, tmp_path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="exists already"):
        save(load(folder), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(TypeError):  # a record that is not JSON, noticed after the weights were written
        save(load(folder), tmp_path / "new", record={"x": object()})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def refused(folder, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(folder)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and message[-1] in ".?" and str(folder) in message


def test_damaged_weight_files_are_refused(folder) -> None:
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    for n in (0, 4, 8, 100, len(good) // 2, len(good) - 1):
        weights.write_bytes(good[:n])
        refused(folder, "model.safetensors", f"{n} bytes")
    weights.write_bytes(good[: len(good) - 1])
    refused(folder, "truncated")
    for place in (0, 20, len(good) // 2, len(good) - 1):  # length, header, data
        weights.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        refused(folder, "model.safetensors", "damaged")
    torch.save({"a": torch.zeros(3)}, weights)
    refused(folder, "not safetensors")
    weights.write_text("hello, this is text")
    refused(folder, "not safetensors")
    weights.unlink()
    refused(folder, "it has no model.safetensors")
    weights.write_bytes(good)
    assert load(folder).cfg == small()


def rewrite(folder, change) -> None:
    """Change the weights and the recorded hash with them, so that only the fit to the config is wrong."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["weights_sha256"] = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    (folder / "config.json").write_text(json.dumps(config))


def test_weights_that_do_not_fit_the_config_are_refused(folder) -> None:
    rewrite(folder, lambda w: w.update({"stray": torch.zeros(1)}))
    refused(folder, "unexpected stray")
    rewrite(folder, lambda w: (w.pop("stray"), w.pop("ln_final.w")))
    refused(folder, "it lacks ln_final.w")
    rewrite(folder, lambda w: w.update({"ln_final.w": torch.ones(17)}))
    refused(folder, "ln_final.w has the shape [17] and not [16]")


def test_folders_and_files_that_are_no_model_are_refused(folder, tmp_path) -> None:
    config = folder / "config.json"
    good = config.read_text()
    for text, word in (
        ("{", "not JSON"),
        ("[]", "not of the format"),
        ('{"format": "t2lens-0"}', "not of the format"),
        ('{"model_type": "llama"}', "no format that t2lens knows: its config says model_type 'llama'"),
        (good.replace('"n_layers"', '"n_layer"'), "did you mean 'n_layers'"),
        (good.replace('"kind": "standard"', '"kind": "magic"'), "Unknown residual system 'magic'"),
        (good.replace('"n_layers": 2', '"n_layers": -2'), "n_layers"),
        (good.replace('"n_layers": 2', '"n_layers": 1000000000'), "weights for 1000000000 layers"),
        ('{"a":' * 100_000, "not JSON"),
    ):
        config.write_text(text)
        refused(folder, word)
    config.unlink()
    refused(folder, "it has no config.json")
    with pytest.raises(ValueError, match="no model folder '/no/such/folder'"):
        load("/no/such/folder")
    (tmp_path / "weights.pt").write_bytes(b"x")
    with pytest.raises(ValueError, match="is not a model"):
        load(tmp_path / "weights.pt")


def test_unknown_names_get_the_nearest_ones(folder, tmp_path, monkeypatch) -> None:
    for name in ("attnres-full", "attnres-block", "ddl"):
        shutil.copytree(folder, tmp_path / "models" / name)
    monkeypatch.setattr(registry, "BUNDLED", tmp_path / "models")
    assert load("ddl").cfg == small()
    with pytest.raises(ValueError, match="no model and no folder called 'attnres-ful'; did you mean 'attnres-full'"):
        load("attnres-ful")
    with pytest.raises(ValueError, match="bundled models are attnres-block, attnres-full, ddl"):
        load("zzz")
    with pytest.raises(ValueError, match="There is no model"):
        load("")


def test_dtypes_that_hold_no_weights_are_refused(folder) -> None:
    for dtype in ("int8", torch.int64, "load", "float8_e4m3fn"):
        with pytest.raises(ValueError, match="dtype must be float32"):
            load(folder, dtype=dtype)


def test_devices_names_and_revisions_that_cannot_be_are_refused(folder) -> None:
    for device in ("nowhere", "cpu:x", 1.5):
        with pytest.raises(ValueError, match=r"device .* cannot be used"):
            load(folder, device=device)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="There is no model"):
        load("a" * 5000)
    with pytest.raises(ValueError, match="revision is for models from the hub"):
        load(folder, revision="main")


def test_listing_the_bundled_models_does_not_import_torch() -> None:
    code = "import sys, t2lens; t2lens.list_models(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [info.name for info in list_models()] == sorted(info.name for info in list_models())


def test_what_is_no_name_is_refused_in_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"load takes a name or a path, not 3 \(int\)"):
        t2lens.load(3)  # type: ignore[arg-type]

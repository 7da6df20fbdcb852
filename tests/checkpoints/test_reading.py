"""The reading side, with a stand-in format: every kind of file, and one clear sentence for what cannot be read."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import t2lens
from t2lens.checkpoints import reading
from t2lens.checkpoints.archive import Archive
from t2lens.checkpoints.plan import Plan, rows
from t2lens.checkpoints.reading import read_checkpoint
from t2lens.config import MLP, Attention, ModelConfig
from t2lens.model import Transformer

CONFIG = {"model_type": "stand-in", "depth": 2}
TOKENS = torch.arange(3, 11)[None]


def config_of(theirs: dict[str, Any]) -> ModelConfig:
    attention = Attention(n_heads=2, n_kv_heads=1, d_head=8)
    return ModelConfig(
        d_vocab=29, n_ctx=16, d_model=16, n_layers=theirs["depth"], attention=attention, mlp=MLP(d_mlp=24)
    )


def recognises(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> bool:
    return config.get("model_type") == "stand-in" and "net.embed.weight" in shapes


def plan(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], *, flavour: str = "plain") -> Plan:
    made = Plan(config_of(config), assumed=[f"The flavour is {flavour}."])
    made.weights = {name: f"net.{name}" for name in t2lens.build(made.cfg).state_dict()}
    made.ignore([key for key in shapes if key.endswith(".mask")], "it is a mask, which we compute")
    if "head.weight" in shapes:
        made.equal = [("head.weight", "net.embed.weight")]
    return made


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    family = ModuleType("t2lens.checkpoints.stand_in")
    family.__dict__.update(recognises=recognises, plan=plan)
    monkeypatch.setattr(reading, "FAMILIES", (family,))
    return family


@pytest.fixture(scope="module")
def model() -> Any:
    return t2lens.build(config_of(CONFIG), seed=4)


@pytest.fixture
def weights(model: Any) -> dict[str, Tensor]:
    return {f"net.{name}": weight.clone() for name, weight in model.state_dict().items()}


def write(folder: Path, weights: dict[str, Tensor], config: dict[str, Any] | None = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_sharded(folder: Path, shards: dict[str, dict[str, Tensor]], index: dict[str, str] | None = None) -> Path:
    folder.mkdir()
    torch_files = any(name.endswith(".bin") for name in shards)
    for name, shard in shards.items():
        torch.save(shard, folder / name) if torch_files else save_file(shard, folder / name)
    index = index or {key: name for name, shard in shards.items() for key in shard}
    stem = "pytorch_model.bin" if torch_files else "model.safetensors"
    (folder / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def halves(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    keys = sorted(weights)
    return {k: weights[k] for k in keys[::2]}, {k: weights[k] for k in keys[1::2]}


def same(loaded: Any, model: Any) -> None:
    assert loaded.cfg == model.cfg
    assert not loaded.training
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    assert all(p.requires_grad and p.dtype == torch.float32 for p in loaded.parameters())


def refused(path: Path, *words: str, **options: Any) -> None:
    with pytest.raises(ValueError) as caught:
        read_checkpoint(path, **options)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 600


# --- every kind of file ----------------------------------------------------------------------------------------


def test_a_folder_of_safetensors(tmp_path, model, weights):
    loaded = read_checkpoint(write(tmp_path / "m", weights))
    same(loaded, model)
    assert loaded.loaded_from.family == "stand_in"
    assert loaded.loaded_from.path == tmp_path / "m"
    assert loaded.loaded_from.assumed == ("The flavour is plain.",)
    same(read_checkpoint(tmp_path / "m" / "model.safetensors"), model)


def test_sharded_safetensors_and_torch_shards(tmp_path, model, weights):
    a, b = halves(weights)
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    folder = write_sharded(tmp_path / "s", dict(zip(names, (a, b), strict=True)))
    same(read_checkpoint(folder), model)
    same(read_checkpoint(folder / "model.safetensors.index.json"), model)
    same(read_checkpoint(write_sharded(tmp_path / "t", {"x-1.bin": a, "x-2.bin": b})), model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth", "any.pt"])
def test_torch_files(tmp_path, model, weights, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(weights, tmp_path / name)
    same(read_checkpoint(tmp_path), model)
    same(read_checkpoint(tmp_path / name), model)


def test_the_torch_format_before_zip_files(tmp_path, model, weights):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    same(read_checkpoint(tmp_path), model)


@pytest.mark.parametrize("args", [{"model_args": CONFIG}, {"args": argparse.Namespace(**CONFIG), "config": {"lr": 1}}])
def test_a_training_checkpoint_brings_its_own_config(tmp_path, model, weights, args):
    moments = {"state": {0: {"exp_avg": torch.zeros(5)}}, "param_groups": [{"lr": 0.1}]}
    torch.save({"model": weights, "optimizer": moments, "iter_num": 7, **args}, tmp_path / "ckpt.pt")
    same(read_checkpoint(tmp_path / "ckpt.pt"), model)
    same(read_checkpoint(tmp_path), model)


def test_params_json_beside_consolidated_weights(tmp_path, model, weights):
    torch.save({"model": weights}, tmp_path / "consolidated.pth")
    (tmp_path / "params.json").write_text(json.dumps(CONFIG))
    same(read_checkpoint(tmp_path), model)
    assert Archive(tmp_path).config == CONFIG


def test_a_config_can_be_given(tmp_path, model, weights):
    folder = write(tmp_path / "m", weights, config=None)
    refused(folder, "it has no config.json", "net.blocks.0.attn.key.weight")
    same(read_checkpoint(folder, config=CONFIG), model)
    (tmp_path / "other.json").write_text(json.dumps(CONFIG))
    same(read_checkpoint(folder / "model.safetensors", config=tmp_path / "other.json"), model)


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_prefixes_of_wrappers_do_not_matter(tmp_path, model, weights, prefix):
    same(read_checkpoint(write(tmp_path / "m", {prefix + key: w for key, w in weights.items()})), model)


def test_a_compiled_part_has_its_prefix_inside_the_key(tmp_path, model, weights):
    inside = {key.replace("blocks.1.", "blocks.1._orig_mod."): weight for key, weight in weights.items()}
    assert inside.keys() != weights.keys()
    same(read_checkpoint(write(tmp_path / "m", inside)), model)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_files_of_any_precision_load_in_float32_or_what_is_asked_for(tmp_path, model, weights, kind):
    folder = write(tmp_path / "m", {key: weight.to(kind) for key, weight in weights.items()})
    for asked in (None, torch.float64, torch.bfloat16, torch.float16):
        loaded = read_checkpoint(folder, dtype=asked).state_dict()
        for name, weight in model.state_dict().items():
            wanted = weight.to(kind).to(asked or torch.float32)
            assert loaded[name].dtype == wanted.dtype
            assert torch.equal(loaded[name], wanted)


def test_what_is_loaded_does_not_hang_on_the_file(tmp_path, model, weights):
    folder = write(tmp_path / "m", weights)
    loaded = read_checkpoint(folder)
    with torch.no_grad():
        loaded.embed.weight.zero_()
    same(read_checkpoint(folder), model)
    (folder / "model.safetensors").write_bytes(b"\0" * (folder / "model.safetensors").stat().st_size)
    name = "blocks.0.attn.query.weight"
    assert torch.equal(loaded.state_dict()[name], model.state_dict()[name])


def test_a_tied_head_may_be_there_twice_once_or_wrong(tmp_path, model, weights):
    head = weights["net.embed.weight"].clone()
    same(read_checkpoint(write(tmp_path / "a", weights | {"head.weight": head})), model)
    head[3, 2] += 1e-3
    refused(write(tmp_path / "b", weights | {"head.weight": head}), "head.weight and net.embed.weight", "differ")


def test_what_is_not_used_is_named_with_its_reason(tmp_path, model, weights):
    loaded = read_checkpoint(write(tmp_path / "m", weights | {"net.0.mask": torch.ones(3, dtype=torch.int64)}))
    same(loaded, model)
    assert loaded.loaded_from.ignored == {"net.0.mask": "it is a mask, which we compute"}
    torch.save({**weights, "step": 3}, tmp_path / "m.pt")
    assert read_checkpoint(tmp_path / "m.pt", config=CONFIG).loaded_from.ignored == {"step": "it is no tensor"}


# --- what is refused -------------------------------------------------------------------------------------------


def test_keys_too_many_or_too_few_are_named(tmp_path, weights):
    extra = weights | {f"net.stray.{i}": torch.zeros(1) for i in range(9)}
    refused(write(tmp_path / "a", extra), "it has the unexpected net.stray.0, net.stray.1, net.stray.2 and 6 more")
    fewer = {key: weight for key, weight in weights.items() if "mlp" not in key}
    refused(write(tmp_path / "b", fewer), "it lacks net.blocks.0.mlp")
    refused(write(tmp_path / "c", weights, {**CONFIG, "depth": 3}), "it lacks net.blocks.2.attn")
    refused(write(tmp_path / "d", weights, {**CONFIG, "depth": 1}), "unexpected net.blocks.1.attn")
    refused(write(tmp_path / "e", weights, {"model_type": "stand-in"}), "lacks 'depth'")


def test_shapes_and_kinds_that_do_not_fit_are_named(tmp_path, weights):
    refused(
        write(tmp_path / "a", weights | {"net.ln_final.w": torch.ones(17)}),
        "net.ln_final.w gives ln_final.w the shape [17] and not [16]",
    )
    whole = weights | {"net.ln_final.w": torch.ones(16, dtype=torch.int8)}
    refused(write(tmp_path / "b", whole), "net.ln_final.w is int8", "quantised")


def test_a_weight_that_cannot_be_made_is_named(tmp_path, weights, family, monkeypatch):
    def cut(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Plan:
        made = plan(config, shapes)
        made.weights["ln_final.w"] = reading.Take(("net.ln_final.w",), lambda x: x.view(5, 7))
        return made

    monkeypatch.setattr(family, "plan", cut)
    refused(write(tmp_path / "a", weights), "net.ln_final.w of shape [16] cannot become ln_final.w")


def test_rows_of_a_packed_weight_must_all_be_used(tmp_path, model, weights, family, monkeypatch):
    def packed(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Plan:
        made = plan(config, shapes)
        for i, start in (("gate", 0), ("input", 24)):
            made.weights[f"blocks.1.mlp.{i}.weight"] = rows("net.packed", start, start + 24)
        return made

    monkeypatch.setattr(family, "plan", packed)
    both = torch.cat([weights.pop("net.blocks.1.mlp.gate.weight"), weights.pop("net.blocks.1.mlp.input.weight")])
    same(read_checkpoint(write(tmp_path / "a", weights | {"net.packed": both})), model)
    for wrong in (torch.cat([both, both[:1]]), both[:-1]):
        message = f"net.packed has {len(wrong)} rows, but by its config it should have 48"
        refused(write(tmp_path / "b", weights | {"net.packed": wrong}), message)


def test_a_plan_that_leaves_out_one_of_our_weights_is_refused(tmp_path, weights, family, monkeypatch):
    def forgetful(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Plan:
        made = plan(config, shapes)
        made.ignore([made.weights.pop("ln_final.w")], "forgotten")  # type: ignore[list-item]
        made.weights["ln_finale.w"] = "net.embed.weight"
        return made

    monkeypatch.setattr(family, "plan", forgetful)
    refused(write(tmp_path / "a", weights), "nothing in it gives our ln_final.w", "our model has no ln_finale.w")


def test_unknown_formats_and_options(tmp_path, weights, family, monkeypatch):
    folder = write(tmp_path / "a", weights, {"model_type": "llama"})
    refused(folder, "no format that t2lens knows", "model_type 'llama'", str(folder))
    refused(write(tmp_path / "b", weights), "no option 'flavor'", "has the options flavour", flavor="x")
    assert read_checkpoint(tmp_path / "b", flavour="x").loaded_from.assumed == ("The flavour is x.",)
    monkeypatch.setattr(reading, "FAMILIES", (family, family))
    refused(tmp_path / "b", "fits the formats stand_in and stand_in at once")


class Pickled:
    """Stands for code in a file."""

    def __reduce__(self):
        return (print, ("this must never run",))


def test_files_that_could_run_code_are_not_read(tmp_path, weights, capsys):
    for content in ({**weights, "x": Pickled()}, {"model": weights, "args": Pickled()}, Pickled()):
        torch.save(content, tmp_path / "m.pt")
        refused(tmp_path / "m.pt", "not a model that is safe to read", config=CONFIG)
    assert capsys.readouterr().out == ""


def test_files_that_are_no_weights(tmp_path, weights):
    for content in ([1, 2], {"a": 1}, torch.ones(3), {1: torch.ones(3)}):
        torch.save(content, tmp_path / "m.pt")
        refused(tmp_path / "m.pt", "is not a model", config=CONFIG)
    for content in (b"", b"x", b"PK\3\4 nothing", b"\x80\4."):
        (tmp_path / "m.pt").write_bytes(content)
        refused(tmp_path / "m.pt", "m.pt", "not a model", config=CONFIG)
    good = write(tmp_path / "a", weights) / "model.safetensors"
    data = good.read_bytes()
    for n in (0, 4, 100, len(data) // 2, len(data) - 1):
        good.write_bytes(data[:n])
        refused(tmp_path / "a", "model.safetensors", f"({n} bytes)")
    (tmp_path / "m.txt").write_text("hello")
    refused(tmp_path / "m.txt", "weights end in .safetensors")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "it has no model.safetensors, no pytorch_model.bin")
    (tmp_path / "a" / "config.json").write_text("{")
    good.write_bytes(data)
    refused(tmp_path / "a", "config.json", "not JSON")


def test_a_folder_in_which_the_weights_are_not_plain_to_see(tmp_path, weights):
    (tmp_path / "m").mkdir()
    write(tmp_path / "m" / "default", weights)
    refused(tmp_path / "m", "give the path of one of its folders default")
    for name in ("a.pt", "b.pt"):
        torch.save(weights, tmp_path / "m" / name)
    refused(tmp_path / "m", "several weight files (a.pt, b.pt)")


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "link.safetensors"])
def test_an_index_names_files_of_its_folder_only(tmp_path, weights, name: str):
    save_file(weights, tmp_path / "out.safetensors")
    folder = write_sharded(tmp_path / "m", {"a.safetensors": weights}, dict.fromkeys(weights, name))
    (folder / "sub").mkdir()
    save_file(weights, folder / "sub" / "x.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    refused(folder, "outside its folder")


def test_an_index_must_fit_its_files(tmp_path, weights):
    a, b = halves(weights)
    index = {key: "a.safetensors" if key in a else "b.safetensors" for key in weights}
    refused(write_sharded(tmp_path / "m", {"a.safetensors": a}, index), "'b.safetensors', which is not there")
    index = dict.fromkeys(weights, "a.safetensors")
    refused(write_sharded(tmp_path / "n", {"a.safetensors": a}, index), "names weights that its files lack")
    both = {"a.safetensors": weights, "b.safetensors": b}
    refused(write_sharded(tmp_path / "o", both), "holds the weight", "twice")
    (tmp_path / "o" / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    refused(tmp_path / "o", "no weight_map")


def test_the_links_of_the_hub_cache_are_followed(tmp_path, model, weights):
    cache = tmp_path / "models--some--one"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").mkdir()
    save_file(weights, cache / "blobs" / "0123abcd")
    folder = write_sharded(cache / "snapshots" / "rev", {}, dict.fromkeys(weights, "a.safetensors"))
    (folder / "a.safetensors").symlink_to(Path("../../blobs/0123abcd"))
    same(read_checkpoint(folder), model)


def test_paths_and_json_that_no_program_writes(tmp_path, weights):
    folder = write_sharded(tmp_path / "m", {"a.safetensors": weights}, dict.fromkeys(weights, "a\0b.safetensors"))
    refused(folder, "outside its folder")
    folder = write(tmp_path / "n", weights)
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    refused(folder, "is not JSON")
    refused(folder, "must be a dict or the path of a JSON file", config=[1])
    refused(folder, "cannot be read (No such file or directory)", config=tmp_path / "none.json")


def test_without_a_config_the_sentence_says_so(tmp_path, weights, family, monkeypatch):
    monkeypatch.setattr(family, "recognises", lambda config, shapes: True)
    refused(write(tmp_path / "m", weights, None), "no config.json", "give one with config=, which must say depth")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.to_sparse(), "no plain array"),
        (lambda w: w.to("meta"), "no plain array"),
        (lambda w: w.to(torch.float8_e4m3fn), "quantised"),
        (lambda w: w.to(torch.complex64), "quantised"),
    ],
    ids=["sparse", "meta", "float8", "complex"],
)
def test_tensors_that_are_no_plain_numbers_are_refused(tmp_path, weights, change, words, tied):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    odd = {**weights, "net.embed.weight": change(weights["net.embed.weight"])}
    torch.save(odd | ({"head.weight": weights["net.embed.weight"]} if tied else {}), tmp_path / "pytorch_model.bin")
    refused(tmp_path, "net.embed.weight", words)


# --- memory ----------------------------------------------------------------------------------------------------

MEASURE = """
import json, resource, sys
import torch
from types import ModuleType
from tests.checkpoints import test_reading as here
from t2lens.checkpoints import reading

family = ModuleType("stand_in")
family.__dict__.update(recognises=here.recognises, plan=here.big_plan)
reading.FAMILIES = (family,)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
model = reading.read_checkpoint(sys.argv[1], dtype=torch.bfloat16)
print(json.dumps([peak() - before, sum(p.numel() * 2 for p in model.parameters())]))
"""


def big_config(theirs: dict[str, Any]) -> ModelConfig:
    attention = Attention(n_heads=16, n_kv_heads=16, d_head=128)
    mlp = MLP(d_mlp=4 * theirs["width"])
    return ModelConfig(
        d_vocab=999, n_ctx=16, d_model=theirs["width"], n_layers=theirs["depth"], attention=attention, mlp=mlp
    )


def big_plan(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Plan:
    return Plan(big_config(config), weights={key.removeprefix("net."): key for key in shapes})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "depth", "expected"), [("safetensors", 7, 0.94e9), ("bin", 3, 0.4e9)])
def test_a_large_model_is_in_memory_once(tmp_path, kind, depth, expected):
    config = {"model_type": "stand-in", "depth": depth, "width": 2048}
    with torch.device("meta"):
        model = Transformer(big_config(config))
    shapes = {f"net.{name}": weight.shape for name, weight in model.state_dict().items()}
    index, size = {}, 0
    keys = list(shapes)
    for i in range(4):  # keys dealt out in turn, so that the files are read in turn
        name = f"model-{i}.{kind}"
        shard = {key: torch.full(shapes[key], 0.5, dtype=torch.bfloat16) for key in keys[i::4]}
        save_file(shard, tmp_path / name) if kind == "safetensors" else torch.save(shard, tmp_path / name)
        index |= dict.fromkeys(shard, name)
        size += (tmp_path / name).stat().st_size
    stem = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    (tmp_path / f"{stem}.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert size == pytest.approx(expected, rel=0.05)
    try:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, cwd=Path(__file__).parents[2]
        )
    finally:
        for file in tmp_path.glob("model-*"):
            file.unlink()
    assert done.returncode == 0, done.stderr
    grown, loaded = json.loads(done.stdout)
    assert loaded > 0.99 * size
    assert grown < 1.35 * size + (64 << 20), f"{grown / size:.2f} times the size of the files"

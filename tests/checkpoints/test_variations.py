"""Other files of the published formats: other weights, other containers, a key too many or too few, for every family.

What varies is made from the committed golden folders: their weights, multiplied by random factors, are saved in other
ways. Every way must give the same model, and every fault one sentence that names it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from t2lens.checkpoints import FAMILIES
from t2lens.checkpoints.plan import Plan
from t2lens.checkpoints.reading import read_checkpoint
from tests.checkpoints.golden import PACKED, unpack

NAMES = sorted(path.name for path in PACKED.iterdir())
HEADS = ("lm_head.weight", "classifier.nonlinearity.5.weight", "output.weight", "to_logits.weight")


@dataclass
class File:
    config: dict[str, Any]
    weights: dict[str, Tensor]
    plan: Plan
    ids: Tensor

    def used(self) -> list[str]:
        return sorted({key for take in self.plan.takes().values() for key in take.keys})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(weight.shape) for key, weight in self.weights.items()}

    def write(self, folder: Path, weights: dict[str, Tensor] | None = None) -> Path:
        folder.mkdir()
        whole = torch.contiguous_format  # and each in memory of its own, as safetensors wants it
        save_file(
            {k: w.clone(memory_format=whole) for k, w in (weights or self.weights).items()},
            folder / "model.safetensors",
        )
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.fixture(params=NAMES)
def file(request: pytest.FixtureRequest, shelf: Path) -> File:
    """A golden file with other weights: those that are used, each scaled by a factor of its own."""
    name = request.param
    folder = shelf / name if (shelf / name).is_dir() else unpack(name, shelf / name)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    shapes = {key: tuple(weight.shape) for key, weight in weights.items()}
    (family,) = (family for family in FAMILIES if family.recognises(config, shapes))
    plan = family.plan(config, shapes)
    file = File(config, weights, plan, load_file(folder / "golden.safetensors")["input_ids"])
    scale = random.Random(name)
    for key in file.used():
        if weights[key].is_floating_point():
            weights[key] *= scale.uniform(0.7, 1.3)
    for a, b in plan.equal:
        used, other = (a, b) if a in file.used() else (b, a)
        weights[other] = weights[used].clone()
    return file


def logits(path: Path, file: File, **options: Any) -> Tensor:
    with torch.no_grad():
        return read_checkpoint(path, **options)(file.ids)


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        read_checkpoint(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message[-1] == "."
    return message


def test_every_weight_of_the_file_counts(file, tmp_path):
    """No number comes from anywhere but the file: whatever is scaled changes the logits."""
    before = logits(file.write(tmp_path / "a"), file)
    assert torch.isfinite(before).all()
    pick = random.Random(0).sample([k for k in file.used() if file.weights[k].is_floating_point()], 5)
    for i, key in enumerate(pick):
        other = dict(file.weights)
        other[key] = other[key] + 0.5 * (1 + torch.rand(other[key].shape, generator=torch.Generator().manual_seed(i)))
        for a, b in file.plan.equal:
            if key in (a, b):
                other[a] = other[b] = other[key]
        after = logits(file.write(tmp_path / f"b{i}", other), file)
        assert not torch.equal(before, after), key


def test_every_container_gives_the_same_model(file, tmp_path):
    before = logits(file.write(tmp_path / "a"), file)
    keys = sorted(file.weights)

    sharded = tmp_path / "sharded"
    sharded.mkdir()
    index = {key: f"part-{i % 3}.safetensors" for i, key in enumerate(keys)}
    for part in set(index.values()):
        save_file({key: file.weights[key] for key in keys if index[key] == part}, sharded / part)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (sharded / "config.json").write_text(json.dumps(file.config))
    assert torch.equal(logits(sharded, file), before)

    torch.save({"model": file.weights, "model_args": file.config, "optimizer": {}}, tmp_path / "ckpt.pt")
    assert torch.equal(logits(tmp_path / "ckpt.pt", file), before)
    torch.save(file.weights, tmp_path / "bare.pth")
    assert torch.equal(logits(tmp_path / "bare.pth", file, config=file.config), before)
    for prefix in ("_orig_mod.", "module.", "module._orig_mod."):
        prefixed = {prefix + key: weight for key, weight in file.weights.items()}
        assert torch.equal(logits(file.write(tmp_path / prefix, prefixed), file), before)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_files_load_in_float32(file, tmp_path, kind):
    half = {k: w.to(kind) if w.is_floating_point() else w for k, w in file.weights.items()}
    back = {k: w.float() if w.is_floating_point() else w for k, w in half.items()}
    model = read_checkpoint(file.write(tmp_path / "a", half))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    expected = read_checkpoint(file.write(tmp_path / "b", back)).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    low = read_checkpoint(tmp_path / "a", dtype=kind)
    assert {p.dtype for p in low.parameters()} == {kind}
    if kind == torch.bfloat16:
        assert torch.isfinite(low(file.ids)).all()


def test_a_tied_head_may_be_there_or_not(file, tmp_path):
    before = logits(file.write(tmp_path / "a"), file)
    if not file.plan.cfg.tied:
        return
    pairs = [(a, b) for a, b in file.plan.equal if a in HEADS or b in HEADS]
    without = {k: w for k, w in file.weights.items() if not any(k in pair and k in HEADS for pair in pairs)}
    assert torch.equal(logits(file.write(tmp_path / "b", without), file), before)
    if pairs:
        ((a, b),) = pairs
        wrong = dict(file.weights)
        wrong[a] = wrong[a] * 1.01
        message = refused(file.write(tmp_path / "c", wrong))
        assert a in message
        assert b in message


ODD: tuple[Any, ...] = ("x", "", -1, 0, 2.5, 10**30, 1e308, float("nan"), float("inf"), True, [], [None], {}, {"a": 1})


def test_config_values_of_any_kind_give_a_plan_or_a_sentence(file):
    """A value of the wrong kind may be unused; what it must not be is another exception, or a wait without end."""
    (family,) = [f for f in FAMILIES if f.recognises(file.config, shapes := file.shapes())]
    refused = 0
    for key in sorted(file.config):
        for value in ODD:
            try:
                family.plan({**file.config, key: value}, shapes)
            except KeyError:  # which the reader turns into a sentence
                continue
            except ValueError as error:
                refused += 1
                message = str(error)
                assert message.endswith("."), message
                assert "\n" not in message
                assert type(error) is ValueError
    assert refused > len(file.config)


def test_null_in_a_config_is_as_good_as_not_said(file):
    (family,) = [f for f in FAMILIES if f.recognises(file.config, shapes := file.shapes())]
    for key in file.config:
        without = {k: v for k, v in file.config.items() if k != key}
        plans = []
        for config in (without, {**file.config, key: None}):
            try:
                made = family.plan(config, shapes)
                plans.append((made.cfg, made.takes().keys()))
            except (KeyError, ValueError) as error:
                plans.append(repr(error))
        assert plans[0] == plans[1], key


def test_keys_too_many_are_refused_by_name(file, tmp_path):
    extra = {**file.weights, "stray.weight": torch.zeros(2), "blocks.0.stray": torch.zeros(2)}
    message = refused(file.write(tmp_path / "a", extra))
    assert "unexpected blocks.0.stray, stray.weight" in message


def test_keys_too_few_are_refused_by_name(file, tmp_path):
    heads = {key for pair in file.plan.equal for key in pair}
    optional = heads | set(HEADS)
    pick = random.Random(1).sample([key for key in file.used() if key not in optional], 6)
    for i, key in enumerate(pick):
        fewer = {k: w for k, w in file.weights.items() if k != key}
        message = refused(file.write(tmp_path / str(i), fewer))
        counted = "no format that t2lens knows" in message or "blocks are not" in message  # without it, another file
        assert key in message or counted, f"{key}: {message}"


def test_copies_under_another_prefix_are_not_taken_for_something_known(file):
    (family,) = [f for f in FAMILIES if f.recognises(file.config, shapes := file.shapes())]
    strays = {f"stray.{key}": shapes[key] for key in file.used()}
    made = family.plan(file.config, {**shapes, **strays})
    assert not strays.keys() & (made.used() | made.ignored.keys())


def test_a_weight_without_axes_or_with_one_too_many_is_named(file):
    """Before any tensor is read, too: a plan reads sizes off the shapes."""
    (family,) = [f for f in FAMILIES if f.recognises(file.config, shapes := file.shapes())]
    for key, shape in shapes.items():
        for wrong in ((), (*shape, 1)):
            try:
                family.plan(file.config, {**shapes, key: wrong})
            except ValueError as error:
                message = str(error)
                assert message.endswith(".")
                assert "unpack" not in message


CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda w: torch.cat([w, w[:1]]),
    lambda w: w[: len(w) - 1],
    lambda w: w.unsqueeze(-1).expand(*w.shape, 2),
)


@pytest.mark.parametrize("change", CHANGES, ids=["longer", "shorter", "deeper"])
def test_wrong_shapes_are_refused_in_one_sentence(file, tmp_path, change):
    whole = [key for key in file.used() if file.weights[key].ndim]
    for i, key in enumerate(random.Random(2).sample(whole, 5)):
        wrong = {**file.weights, key: change(file.weights[key])}
        refused(file.write(tmp_path / str(i), wrong))

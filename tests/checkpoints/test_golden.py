"""Number for number: every golden folder loads, and agrees with what the published implementation computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from t2lens.checkpoints.reading import read_checkpoint
from t2lens.mixing import ForwardRecord
from t2lens.model import Transformer
from t2lens.residual.base import Site, by_way
from tests.checkpoints.golden import PACKED, more_folders, unpack

# Max abs difference in float32. The committed folders come closer than what is asked of any file of their format: a
# random deep model can amplify the rounding of its own implementation.
CLOSE, TOLERANCE = 2e-5, 1e-4
LOOSE = {"mudd": 1e-3, "hyper": 1e-3}
STATIC = 1e-6  # weights that depend on no token

MORE = more_folders()
COMMITTED = sorted(path.name for path in PACKED.iterdir())
FOUND = [] if MORE is None else sorted(path for path in MORE.iterdir() if (path / "golden.safetensors").is_file())
checked: list[str] = []


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


def committed(shelf: Path, name: str) -> Path:
    return shelf / name if (shelf / name).is_dir() else unpack(name, shelf / name)


def agree(folder: Path, tolerance: float) -> None:
    expected = load_file(folder / "golden.safetensors")
    meaning = json.loads((folder / "golden.json").read_text())
    model = read_checkpoint(folder)
    assert model.loaded_from is not None
    with torch.no_grad():
        logits = model(expected["input_ids"])
        record = model.record(expected["input_ids"])
    assert difference(logits, expected.pop("logits")) < tolerance, folder.name
    del expected["input_ids"]
    for name, ours in recorded(model, record, expected, meaning):
        theirs = expected.pop(name)
        limit = STATIC if theirs.ndim == 1 else tolerance
        assert ours.shape == theirs.shape, f"{folder.name}: {name}"
        assert difference(ours, theirs) < limit, f"{folder.name}: {name}"
    assert not expected, f"{folder.name}: nothing compares {', '.join(expected)}"
    checked.append(folder.name)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).abs().max())


def recorded(
    model: Transformer, record: ForwardRecord, expected: dict[str, Tensor], meaning: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """(name, our value in the shape of theirs) of all that the folder records beside the logits."""
    gates = {step.site.name: step.gates for step in record.steps}
    n = len([name for name in expected if name.startswith("depth.") and name.split(".")[1].isdigit()])
    for name, theirs in list(expected.items()):
        if name.startswith("depth."):
            site = _site(model, meaning["system"], name.split(".")[1], n)
            weights = model.residual.depth_weights(site, gates[site.name])
            assert weights is not None, f"{site.name} has no depth weights"
            ways = by_way(weights)
            if theirs.ndim == 1:  # static: the same for every token, in every way
                assert all(torch.equal(w, w[:1, :1].expand_as(w)) for w in ways.values())
                yield name, next(iter(ways.values()))[0, 0]
            elif theirs.shape[2] == 1:
                yield name, next(iter(ways.values())).unsqueeze(2)
            else:
                yield name, torch.stack([ways[way] for way in "qkvr"], dim=2)
    states = _states(model, record) if any("state" in name for name in expected) else {}
    for name in list(expected):
        if name.startswith("blocks."):
            _, layer, kind, what = name.split(".")
            if what == "beta":
                value = model.residual.gate(gates[f"{layer}.{kind}"])
                assert value is not None
                yield name, value.unsqueeze(-1)
            else:
                state = states[f"{layer}.{kind}"][what]
                yield name, state if state.ndim == 3 else state.transpose(-1, -2)


def _site(model: Transformer, system: str, where: str, n_modules: int) -> Site:
    """The site whose read a recorded mixture is."""
    opening = [site for site in model.sites if site.opens]
    if where == "out":
        return opening[-1]
    if system.startswith("ELC"):  # before block i
        return opening[int(where)]
    if system.startswith("GPT-BERT"):  # after sublayer i
        return model.sites[int(where) + 1]
    return opening[(int(where) + 1) * model.cfg.n_layers // n_modules]  # after block, or group of blocks, i


def _states(model: Transformer, record: ForwardRecord) -> dict[str, dict[str, Tensor]]:
    """Site -> the state as its read finds it and as its write leaves it."""
    residual = model.residual
    state = residual.begin(record.embed)  # type: ignore[arg-type]
    plain = lambda state: getattr(state, "x", state)  # noqa: E731
    states = {}
    for step in record.steps:
        if step.out is not None:
            before = plain(state)
            state = residual.write(state, step.site, residual.atom(step.out, step.gates), step.gates)
            states[step.site.name] = {"state_in": before, "state_out": plain(state)}
    return states


@pytest.mark.parametrize("name", COMMITTED)
def test_a_committed_golden_folder_agrees(shelf: Path, name: str):
    agree(committed(shelf, name), CLOSE)


@pytest.mark.parametrize("folder", FOUND, ids=lambda folder: folder.name)
def test_a_golden_folder_agrees(folder: Path):
    agree(folder, next((t for name, t in LOOSE.items() if folder.name.startswith(name)), TOLERANCE))


def test_folders_were_found_where_there_should_be_some(capsys: pytest.CaptureFixture[str]):
    assert len(COMMITTED) >= 10
    with capsys.disabled():
        print(f"\n{len(COMMITTED)} committed golden folders and {len(FOUND)} at {MORE}; {len(checked)} agreed.")
    assert MORE is None or FOUND, f"The golden folder {MORE} is there, but holds no model"

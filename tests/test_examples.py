"""Every example that a reader can copy runs: docstrings, README and CONTRIBUTING."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import t2lens
from t2lens import mixing, residual

ROOT = Path(__file__).parents[1]
FOLDERS = (("t2lens", "t2lens"), ("hooks", "t2lens.hooks"))


def modules_with_examples() -> list[str]:
    names = []
    for folder, package in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>> " in path.read_text():
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                names.append(".".join((package, *parts)).removesuffix(".__init__"))
    return names


def python_blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples(name: str):
    result = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_readme_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # what an example saves stays here
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in python_blocks("README.md"):
        exec(compile(block, "README.md", "exec", dont_inherit=True), namespace)


@pytest.fixture
def highway(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration class that CONTRIBUTING.md adds, registered for one test as it says."""
    namespace: dict[str, Any] = {"__name__": "contributing"}
    blocks = python_blocks("CONTRIBUTING.md")
    assert len(blocks) == 1
    for block in blocks:
        exec(compile(block, "CONTRIBUTING.md", "exec", dont_inherit=True), namespace)
    monkeypatch.setitem(residual.SYSTEMS, namespace["Highway"], namespace["HighwayResidual"])
    return namespace["Highway"]


def test_the_residual_system_of_the_contributing_guide_has_every_analysis(highway: Any):
    cfg = t2lens.ModelConfig(d_vocab=40, n_ctx=16, d_model=16, n_layers=3, residual=highway(bias=0.3))
    assert t2lens.ModelConfig.from_dict(cfg.to_dict()) == cfg
    model = t2lens.build(cfg, seed=1).double()
    tokens = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(0))

    record = model.record(tokens)
    for read, share in mixing.contributions_by_read(model.residual, record):
        torch.testing.assert_close(share.sum(dim=0), record.reads[read.name], rtol=0, atol=1e-12)

    # An atom's coefficient is its own gate times (1 - t) of every later write; the embedding's own gate is 1.
    gates = torch.stack([step.gates["t"].squeeze(-1) for step in record.steps[:-1]])
    keep = torch.cat([torch.ones_like(gates[:1]), 1 - gates])
    own = torch.cat([torch.ones_like(gates[:1]), gates])
    after = torch.stack([keep[i + 1 :].prod(dim=0) for i in range(len(keep))])
    torch.testing.assert_close(t2lens.mixing_matrix(model, tokens)[:, -1], (own * after).movedim(0, -1))

    logits, cache = model.run_with_cache(tokens)
    assert torch.equal(logits, model(tokens))
    assert cache["blocks.1.hook_transform_mlp"].shape == (2, 7, 1)

"""After every test of this folder: no analysis has changed a model or left anything at its hook points."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from t2lens.model import Transformer


def _parameters(model: Transformer) -> list[tuple[Any, ...]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, p.data_ptr(), p._version, p.dtype, p.requires_grad, p.grad is None) for name, p in named]


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every model that ran in the test has at its end the parameters it had at its first pass, and idle hook points.

    A test that changes a model on purpose between passes changes a copy.
    """
    seen: dict[int, tuple[Transformer, bool, list[tuple[Any, ...]]]] = {}
    forward = Transformer.forward

    def noting(self: Transformer, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in seen:
            seen[id(self)] = self, self.training, _parameters(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Transformer, "forward", noting)
    grad = torch.is_grad_enabled()
    yield
    assert torch.is_grad_enabled() == grad
    for model, training, before in seen.values():
        assert model.training == training
        assert _parameters(model) == before
        assert not [name for name, point in model.hook_dict.items() if point.active]
        assert not model.is_caching
        assert model.context_level == 0
        assert model._live is None

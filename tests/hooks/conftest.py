"""Every test of the hook layer leaves no hook behind, on any model that it made."""

from __future__ import annotations

import pytest
import torch

from t2lens.hooks import HookedRoot


@pytest.fixture(autouse=True)
def no_hook_remains(monkeypatch):
    models: list[HookedRoot] = []
    setup = HookedRoot.setup

    def noted(self: HookedRoot) -> None:
        setup(self)
        models.append(self)

    monkeypatch.setattr(HookedRoot, "setup", noted)
    grad = torch.is_grad_enabled()
    yield
    for model in models:
        left = [name for name, point in model.hook_dict.items() if point.active]
        assert not left, f"hooks remain at {left}"
        assert not model.list_hooks() and model.context_level == 0 and not model.is_caching
    assert torch.is_grad_enabled() == grad

"""Numbers and flags of every configuration: what is declared a float or a bool can hold nothing else."""

from __future__ import annotations

from dataclasses import fields

import pytest

from t2lens import config, residual
from t2lens.config import MLP, ModelConfig, Norm

CLASSES = [
    *residual.SYSTEMS,
    residual.Gain,
    *(getattr(config, name) for name in config.__all__ if name not in ("ResidualConfig", "ModelConfig")),
]
NEEDED = {"d_vocab": 9, "n_ctx": 8, "d_model": 4, "n_layers": 1}
ODD = {
    "float": ("x", None, True, float("nan"), float("inf"), 10**400),
    "float | None": ("x", False, float("-inf")),
    "bool": (0, 1, "no", None),
}


@pytest.mark.parametrize("cls", [*CLASSES, ModelConfig], ids=lambda cls: cls.__name__)
def test_a_number_or_a_flag_of_another_kind_is_named(cls):
    for field in fields(cls):
        for value in ODD.get(str(field.type), ()):
            given = NEEDED if cls is ModelConfig else {}
            with pytest.raises(ValueError, match=rf"^{cls.__name__}\.{field.name} must be ") as caught:
                cls(**{**given, field.name: value})
            assert str(caught.value).endswith(".")


def test_whole_numbers_do_for_numbers():
    assert Norm(eps=1).eps == 1
    assert MLP(d_mlp=[3, 4]).d_mlp == (3, 4)  # type: ignore[arg-type]

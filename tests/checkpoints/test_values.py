"""What a checkpoint's config may hold under each kind of key."""

from __future__ import annotations

import pytest

from t2lens.checkpoints.values import agree, checked, n_blocks


def test_values_of_the_right_kind_come_through():
    config = {"n": 4.0, "zero": 0, "x": 3, "on": False, "name": "a", "many": [1], "part": {"b": None}, "none": None}
    out = checked(
        {**config, "other": [1]},
        whole=["n", "missing"],
        natural=["zero"],
        number=["x"],
        flag=["on"],
        text=["name"],
        listed=["many"],
        nested=["part"],
    )
    del config["none"]  # null is as good as not said
    assert out == {**config, "other": [1]}
    assert isinstance(out["n"], int)
    assert isinstance(out["x"], float)


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (
            "whole",
            ["4", 0, -1, 2.5, True, float("nan"), float("inf"), 2**31, 10**400, []],
            "a whole number of at least 1",
        ),
        ("natural", ["4", -1, 0.5, False, {}], "a whole number of at least 0"),
        ("number", ["1e-5", True, float("nan"), float("-inf"), 10**400, [1.0]], "a finite number"),
        ("flag", ["true", 1, 0.0, []], "true or false"),
        ("text", [1, ["a"]], "a text"),
        ("listed", ["abc", {"a": 1}], "a list"),
        ("nested", ["abc", [1]], "an object with keys"),
    ],
)
def test_values_of_another_kind_are_named(kind, values, words):
    for value in values:
        with pytest.raises(ValueError, match="^The config has key .*must be " + words) as caught:
            checked({"key": value}, **{kind: ["key"]})
        assert len(str(caught.value)) < 150
        assert str(caught.value).endswith(".")


def test_numbers_of_config_and_weights_must_agree():
    agree({"depth": 2}, "depth", 2)
    agree({}, "depth", 2)
    with pytest.raises(ValueError, match="The config has depth 3, but the weights have 2"):
        agree({"depth": 3}, "depth", 2)


def test_blocks_are_counted_by_their_keys():
    keys = ["h.0.a", "h.0.b", "h.10.a", "h.x.a", "other.h.3.a", "h.2", "hx0.a"]
    assert n_blocks(keys, "h.") == 2

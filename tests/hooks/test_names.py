"""Which names a filter means, and what a wrong one is told."""

from __future__ import annotations

import re

import pytest

from t2lens.hooks import resolve_names
from t2lens.hooks.names import exact_names, layer_of, nearest_names, select_names

NAMES = [
    "hook_embed",
    *(
        f"blocks.{layer}.{part}"
        for layer in range(12)
        for part in ("hook_resid_pre", "attn.hook_pattern", "hook_depth_attn_mlp")
    ),
    "ln_final.hook_scale",
]


@pytest.mark.parametrize(
    "names_filter",
    [
        "*hook_depth_attn*",
        ["*hook_depth_attn*"],
        ("*depth_attn_ml?",),
        {"blocks.*.hook_depth_attn_mlp"},
        re.compile(r"depth_attn_mlp$"),
        lambda name: "depth_attn" in name,
        [name for name in NAMES if "depth_attn" in name],
        {name for name in NAMES if "depth_attn" in name},
        dict.fromkeys(name for name in NAMES if "depth_attn" in name),
        [re.compile("depth"), lambda name: name.endswith("attn_mlp"), "blocks.0.hook_depth_attn_mlp"],
    ],
)
def test_all_forms_of_one_filter_mean_the_same_names_in_hook_order(names_filter):
    assert resolve_names(names_filter, NAMES) == [name for name in NAMES if "depth_attn" in name]


def test_none_means_all_and_an_iterator_is_read_once():
    assert resolve_names(None, NAMES) == NAMES
    names, exact = select_names(iter(["ln_final.hook_scale", "hook_embed"]), NAMES)
    assert names == ["hook_embed", "ln_final.hook_scale"] and exact == ["ln_final.hook_scale", "hook_embed"]


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("blocks.0.hook_residpre", "blocks.0.hook_resid_pre"),
        ("blocks.3.attn.hook_patern", "blocks.3.attn.hook_pattern"),
        ("resid_pre", "blocks.0.hook_resid_pre"),
        ("*hook_depth_atn*", "hook_depth_attn_mlp"),
        ("scale", "ln_final.hook_scale"),
        ("embd", "hook_embed"),
        (["hook_embed", "blocks.99.hook_resid_pre"], "hook_resid_pre"),
    ],
)
def test_a_name_that_is_none_is_told_the_nearest(asked, near):
    with pytest.raises(KeyError, match=re.escape(near)):
        resolve_names(asked, NAMES)


@pytest.mark.parametrize("nothing", ["", [], (), set(), lambda name: False, re.compile("zzz"), "zzz*", [""]])
def test_a_filter_that_matches_nothing_raises(nothing):
    with pytest.raises(KeyError):
        resolve_names(nothing, NAMES)


@pytest.mark.parametrize("wrong", [3, 2.5, [3], [None], ["hook_embed", None]])
def test_a_filter_of_another_kind_is_a_type_error(wrong):
    with pytest.raises(TypeError):
        resolve_names(wrong, NAMES)


def test_only_full_names_are_exact():
    assert exact_names(["hook_embed", "blocks.*", re.compile("x"), str.isupper, ("a", {"b"})]) == [
        "hook_embed",
        "a",
        "b",
    ]
    assert exact_names(None) == []


def test_layers_are_read_from_names_and_suggestions_are_few():
    assert [layer_of(name) for name in ("blocks.11.attn.hook_q", "hook_embed", "blocks.x.y", "blocks.3")] == [
        11,
        None,
        None,
        None,
    ]
    assert len(nearest_names("hook_resid_pre", NAMES)) == 3

"""Every system has an explanation, and its equations can be set."""

from __future__ import annotations

import re

import pytest

import t2lens
from t2lens.residual import SYSTEMS as KINDS
from t2lens.zoo.explanations import SYSTEMS, VARIANTS, explain
from t2lens.zoo.systems import list_systems
from tests.systems import SYSTEMS as TESTED
from tests.systems import tiny_config

EVERY = [*SYSTEMS.values(), *VARIANTS.values()]


def test_every_system_is_explained_and_no_other() -> None:
    assert set(SYSTEMS) == {each.kind for each in KINDS}


@pytest.mark.parametrize("name", TESTED)
def test_every_config_is_explained(name: str) -> None:
    assert explain(tiny_config(name))[0] is SYSTEMS[tiny_config(name).residual.kind]


def test_papers_are_those_of_the_systems_own_docstrings() -> None:
    papers = {info.name: info.paper for info in list_systems()}
    for kind, each in SYSTEMS.items():
        assert not papers[kind] or each.paper == papers[kind], kind


def test_bundled_models_say_what_they_have_besides() -> None:
    titles = {info.name: [each.title for each in explain(t2lens.load(info.name).cfg)] for info in t2lens.list_models()}
    assert titles["attnres-block"][1:] == ["in blocks"] and titles["attnres-full"][1:] == []
    assert titles["ddl"][1:] == [] and titles["ddl-write-only"][1:] == [
        "an expanded state",
        "the control that only writes",
    ]
    assert titles["mhc"][1:] == ["kept on a manifold"] and titles["hyper-connections"][1:] == []
    assert titles["standard-swa"][1:] == ["ShortSWA in the sequence"] and titles["canon"][1:] == ["Canon layers"]


@pytest.mark.parametrize("each", EVERY, ids=lambda each: each.title)
def test_an_explanation_is_a_paragraph_with_an_equation_that_can_be_set(
    each: t2lens.zoo.explanations.Explanation,
) -> None:
    assert 100 <= len(each.words) <= 500 and each.words.endswith(".") and "\n" not in each.words
    assert each.equation.count("{") == each.equation.count("}") and "$" not in each.equation
    assert len(re.findall(r"\\left\b", each.equation)) == len(re.findall(r"\\right\b", each.equation))
    assert not each.paper or each.link.startswith("https://")
    assert each.words.isascii() and each.equation.isascii()

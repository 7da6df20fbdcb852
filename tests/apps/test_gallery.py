"""The views to start from: each link restores what it says, without a notice."""

from __future__ import annotations

import pytest

import t2lens
from t2lens.apps import loaders
from t2lens.apps.edits import active
from t2lens.apps.frame import first_view
from t2lens.apps.gallery import GALLERY, View
from t2lens.apps.state import fit_cell, parse_url
from t2lens.apps.views import PAGES


def test_there_are_six_of_different_kinds() -> None:
    assert len(GALLERY) == 6 == len({view.key for view in GALLERY}) == len({view.title for view in GALLERY})


@pytest.mark.parametrize("view", GALLERY, ids=lambda view: view.key)
def test_a_view_is_a_link_that_needs_no_fallback(view: View) -> None:
    names = loaders.model_names()
    page = next(page for page in PAGES if page.path == view.page)
    selection, _, notices = parse_url(view.params, first_view(names), models=names, parameters=page.parameters)
    known = {"a", "b", "prompt", "edits", "node", *(each.key for each in page.parameters)}
    assert notices == [] and set(view.params) <= known
    trace = t2lens.trace(t2lens.load(selection.model_a), selection.prompt, edits=active(selection.edits) or ())
    sites = ["embed", *map(str, trace.of_way().dataset["read"].values)]
    assert fit_cell(selection.cell, [len(trace.tokens)], [sites]) == (selection.cell, [])

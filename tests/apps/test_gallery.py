"""The views to start from: each link restores what it says, without a notice."""

from __future__ import annotations

import numpy as np
import pytest

import t2lens
from t2lens.apps import loaders
from t2lens.apps.edits import active
from t2lens.apps.frame import first_view
from t2lens.apps.gallery import GALLERY, View
from t2lens.apps.state import fit_cell, parse_url
from t2lens.apps.views import PAGES
from tests.apps.pages import open_page, texts, url


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


def test_what_a_view_says_of_a_number_is_so() -> None:
    view = next(view for view in GALLERY if view.key == "without")
    model, pos = t2lens.load(view.params["a"]), int(view.params["node"].split(":")[1])
    found = []
    for edits in ((), view.params["edits"]):
        data = t2lens.trace(model, view.params["prompt"], edits=edits, follow="next").of_way().dataset
        assert str(data["followed"].values[pos]) == " thou"
        found.append(f"{float(np.exp(data['lens_logprob'].sel(read='out').values[pos])):.2f}")
    assert "from {} to {}".format(*found) in view.look


def test_a_view_says_what_to_look_at_until_something_else_is_chosen() -> None:
    view = next(view for view in GALLERY if view.key == "mass")
    app = open_page(view.page, **view.params, view=view.key)
    assert not app.exception and "view" not in url(app)
    assert view.look in [each.value for each in app.caption]
    box = app.text_area(key="prompt")
    assert box.proto.max_chars > 25_000  # of a paste over it the browser keeps nothing, and says nothing
    box.set_value("king " * 5_000)
    next(each for each in app.button if each.label == "Run").click()
    app.run()
    assert not app.exception and view.look not in [each.value for each in app.caption]
    assert "The prompt has 25000 characters; only the first" in texts(app)

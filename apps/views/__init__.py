"""The pages, in the order in which the header lists them."""

from t2lens.apps.views import analyses, depth_routing, edits, gates, lens, models, two_axes

__all__ = ["PAGES"]

PAGES = tuple(view.PAGE for view in (two_axes, depth_routing, gates, lens, edits, models, analyses))

"""The pages, in the order in which the header lists them."""

from t2lens.apps.views.analyses import ANALYSES_PAGE
from t2lens.apps.views.depth_routing import DEPTH_ROUTING
from t2lens.apps.views.editing import EDITS_PAGE
from t2lens.apps.views.gates import GATES
from t2lens.apps.views.lens import LENS_PAGE
from t2lens.apps.views.models import MODELS_PAGE
from t2lens.apps.views.two_axes import TWO_AXES

__all__ = ["PAGES"]

PAGES = (TWO_AXES, DEPTH_ROUTING, GATES, LENS_PAGE, EDITS_PAGE, MODELS_PAGE, ANALYSES_PAGE)

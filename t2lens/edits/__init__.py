"""Edits: interventions as data, applied inside the one true forward pass."""

from t2lens.edits.acting import edited as edited
from t2lens.edits.edit import OPERATIONS as OPERATIONS
from t2lens.edits.edit import Edit as Edit
from t2lens.edits.files import edits_from_json as edits_from_json
from t2lens.edits.files import edits_to_json as edits_to_json
from t2lens.edits.files import edits_to_python as edits_to_python
from t2lens.edits.files import read_edits as read_edits
from t2lens.edits.marks import Marks as Marks
from t2lens.edits.marks import marks as marks
from t2lens.edits.places import check as check
from t2lens.edits.weights import without as without

__all__ = [
    "OPERATIONS",
    "Edit",
    "Marks",
    "check",
    "edited",
    "edits_from_json",
    "edits_to_json",
    "edits_to_python",
    "marks",
    "read_edits",
    "without",
]

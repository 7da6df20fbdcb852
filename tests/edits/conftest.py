"""No edit leaves anything behind: the guard of the analyses' tests stands around these tests too."""

from tests.analysis.conftest import untouched as untouched

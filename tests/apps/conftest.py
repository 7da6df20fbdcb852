"""Streamlit's AppTest puts the script that it runs in the place of `__main__`, and leaves it there; a later test that
starts a process would run that script again."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def the_main_module_stays() -> Iterator[None]:
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main

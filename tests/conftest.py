"""The tests and what they import are half a million objects that live to the end. The collector of cycles would walk
them again and again, for a tenth of the time of the suite: once all tests are collected, they are set aside."""

import gc
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()

"""A progress bar on the terminal, for what takes longer than a moment; nothing where no one watches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["progress"]

T = TypeVar("T")


def progress(iterable: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The entries of `iterable`, with a bar on stderr that goes away at the end.

    Example:
        >>> list(progress([1, 2], "Counting"))
        [1, 2]
    """
    if not sys.stderr.isatty():
        yield from iterable
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(iterable, what, total=total, transient=True, console=Console(stderr=True))

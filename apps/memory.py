"""What the server keeps for all sessions, within a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["Memory"]


class Memory:
    """Results by key, made once however many sessions ask at the same time; those not used for longest are dropped
    when all together are larger than `limit` bytes. The newest is always kept, however large.

    size: bytes of a result.

    Example:
        >>> memory = Memory(limit=10, size=len)
        >>> [memory.get(text, lambda text=text: text * 4) for text in ("a", "bb", "a")]
        ['aaaa', 'bbbbbbbb', 'aaaa']
        >>> memory.bytes  # "a" was dropped for "bb", then "bb" for "a"
        4
    """

    def __init__(self, limit: float, size: Callable[[Any], int]) -> None:
        self.limit, self.size = limit, size
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self._kept.values())

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result kept under `key`, or what `make` gives. What `make` raises is raised, and nothing is kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
            mine = self._making.setdefault(key, threading.Lock())
        with mine:  # others who ask for the same wait here, and find it kept
            with self._lock:
                if key in self._kept:
                    return self._kept[key][0]
            try:
                made = make()
                with self._lock:
                    self._kept[key] = (made, self.size(made))
                    while self.bytes > self.limit and len(self._kept) > 1:
                        self._kept.popitem(last=False)
            finally:
                with self._lock:
                    self._making.pop(key, None)
            return made

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

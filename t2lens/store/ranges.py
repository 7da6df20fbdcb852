"""Ranges of bytes of the files of a run: from a folder of this machine, or from a URL that fsspec opens.

Safe to read from many threads; a copy that a forked or spawned process gets opens its own files.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Files"]

_MOST_OPEN = 256
_BLOCK = 16 * 2**20
_BEYOND = 416  # the answer of an HTTP server to a range behind the end of a file
_PREADV = getattr(os, "preadv", None)  # not on Windows


class _Handle:
    """An open file that closes when nobody reads from it any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._lock = threading.Lock()  # used where a read moves the place in the file

    def read_into(self, view: memoryview, start: int) -> int:
        """How many bytes came: fewer than the view holds where the file ends."""
        done = self._some(view, start) if _PREADV is None else _PREADV(self.number, (view,), start)
        while 0 < done < len(view):
            n = self._some(view[done:], start + done)
            if not n:
                break
            done += n
        return done

    def _some(self, view: memoryview, start: int) -> int:
        if _PREADV is not None:
            return _PREADV(self.number, (view,), start)
        with self._lock:
            os.lseek(self.number, start, os.SEEK_SET)
            data = os.read(self.number, len(view))
        view[: len(data)] = data
        return len(data)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class Files:
    """Files below `root`. FileNotFoundError where there is none; other faults of a disk or a server are passed on."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.local = "://" not in root
        self._fresh()

    def _fresh(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._open: dict[str, _Handle] = {}
        self._remote: Any = None

    def __getstate__(self) -> str:
        return self.root

    def __setstate__(self, root: str) -> None:
        self.__init__(root)

    def _system(self) -> tuple[Any, str]:
        """The fsspec file system and the path on it."""
        if self._process != os.getpid():
            self._fresh()  # file systems with a thread of their own do not survive a fork
        if self._remote is None:
            import fsspec

            self._remote = fsspec.core.url_to_fs(self.root)
        system, path = self._remote
        return system, path.rstrip("/")

    def _handle(self, name: str) -> _Handle:
        if self._process != os.getpid():
            self._fresh()
        handle = self._open.get(name)
        if handle is None:
            with self._lock:
                handle = self._open[name] = _Handle(Path(self.root) / name)
                if len(self._open) > _MOST_OPEN:
                    self._open.pop(next(iter(self._open)))  # whoever reads from it keeps it open until done
        return handle

    def read(self, name: str) -> bytes:
        """A whole file."""
        if self.local:
            return (Path(self.root) / name).read_bytes()
        system, path = self._system()
        return system.cat_file(f"{path}/{name}")

    def read_all(self, names: Sequence[str]) -> dict[str, bytes]:
        """Whole files, those that exist; from a server several at once."""
        found: dict[str, bytes] = {}
        if self.local:
            for name in names:
                try:
                    found[name] = self.read(name)
                except FileNotFoundError:
                    continue
            return found
        system, path = self._system()
        paths = {f"{path}/{name}": name for name in names}
        for place, data in system.cat(list(paths), on_error="return").items():
            if isinstance(data, FileNotFoundError):
                continue
            if isinstance(data, BaseException):
                raise data  # a server that fails is not a shard that is missing
            found[paths[place]] = data
        return found

    def read_into(self, jobs: Sequence[tuple[str, int, memoryview]]) -> None:
        """Fill each view with the bytes of a file from a place on. EOFError(name) where the file ends before."""
        if self.local:
            for name, start, view in jobs:
                if self._handle(name).read_into(view, start) != len(view):
                    raise EOFError(name)
            return
        asked = [(name, start, start + len(view)) for name, start, view in jobs]
        for (name, _, view), data in zip(jobs, self._fetched(asked), strict=True):
            if len(data) < len(view):
                raise EOFError(name)
            view[:] = data

    def _fetched(self, asked: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Bytes start to stop of files behind the URL, all at once; fewer, or none, where a file ends before."""
        system, path = self._system()
        places = [f"{path}/{name}" for name, *_ in asked]
        if len(asked) == 1:
            try:
                parts = [system.cat_file(places[0], start=asked[0][1], end=asked[0][2])]
            except Exception as error:
                parts = [error]
        else:
            _, starts, ends = zip(*asked, strict=True)
            parts = system.cat_ranges(places, list(starts), list(ends), on_error="return")
        found = []
        for (_, start, stop), part in zip(asked, parts, strict=True):
            beyond = getattr(part, "status", None) == _BEYOND
            if isinstance(part, BaseException) and not beyond:
                raise part
            found.append(b"" if beyond else part)
            if len(found[-1]) > stop - start:
                raise OSError(f"The server of {self.root} sends whole files; it must know ranges of bytes.")
        return found

    def blocks(self, name: str, size: int) -> Iterator[bytearray]:
        """A file of `size` bytes, piece by piece. EOFError(name) where it ends before."""
        for start in range(0, size, _BLOCK):
            block = bytearray(min(_BLOCK, size - start))
            self.read_into([(name, start, memoryview(block))])
            yield block

    def ends_at(self, name: str, size: int) -> bool:
        """Whether a file has this size (above 0). Of a server its last byte and the next are asked for: there is no
        one word for sizes that all of them know."""
        if self.local:
            return (Path(self.root) / name).stat().st_size == size
        return len(self._fetched([(name, size - 1, size + 1)])[0]) == 1

    def sha256(self, name: str, size: int) -> str:
        """Of a file of `size` bytes. Raises as `blocks`."""
        total = hashlib.sha256()
        for block in self.blocks(name, size):
            total.update(block)
        return total.hexdigest()

    def close(self) -> None:
        """Close what is open; a later read opens it again."""
        if self._process != os.getpid():
            self._fresh()
        with self._lock:
            self._open.clear()
            self._remote = None

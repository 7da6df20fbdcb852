"""Files that appear complete or not at all: temporary file, fsync, rename."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Make a rename inside `path` durable. (Folders cannot be opened for this on Windows.)"""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def write_file(path: str | Path, data: bytes) -> None:
    """Replace `path` by `data`; a reader sees the old or the new content, never a part."""
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Fill a temporary folder that becomes `path` when the block ends well and vanishes when it does not.

    Errors: ValueError when `path` exists already.
    """
    path = Path(path).absolute()
    if path.exists():
        raise ValueError(f"The folder {str(path)!r} exists already; give a path that does not exist yet.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                file.chmod(0o644)
                sync_file(file)
        sync_folder(temporary)
        os.chmod(temporary, 0o755)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)

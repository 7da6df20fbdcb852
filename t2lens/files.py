"""Files and folders that appear complete or not at all: written beside the target, synced, renamed. No pickle."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed anyhow
    fcntl = None

__all__ = ["is_held", "new_folder", "read_arrays", "write_arrays", "write_file", "write_parts"]


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
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def hold(handle: int) -> None:
    """Lock an open file or folder until it is closed or its process ends, however that ends."""
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """Whether a process that is alive writes this temporary file or folder. True as well where nobody can tell."""
    if fcntl is None:
        return True
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def write_file(path: str | Path, data: bytes) -> Path:
    """Replace `path` by `data`: after a crash at any moment the old content or the new is there, never a part.

    Errors: ValueError when the folder does not exist, or when `path` is a folder itself.
    """
    return write_parts(path, [data])


def write_parts(path: str | Path, parts: Iterable[bytes | memoryview]) -> Path:
    """`write_file` of content that comes in parts."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; give the path of a file.")
    if not path.parent.is_dir():
        raise ValueError(f"The folder {path.parent} does not exist, so {path.name} cannot be written there.")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            hold(file.fileno())
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return path


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
        temporary.chmod(0o755)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def write_arrays(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> Path:
    """One safetensors file of numpy arrays with string metadata."""
    from safetensors.numpy import save

    return write_file(path, save(arrays, metadata=metadata))


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(arrays, metadata) of a safetensors file; ValueError in one sentence when it is not one, or is damaged."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise ValueError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}).") from None


def few(names: list[str], n: int = 3) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")

"""Files that are complete or not there: written beside the target, synced, renamed. Safetensors only, no pickle."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

__all__ = ["read_arrays", "write_arrays", "write_bytes"]


def write_bytes(path: Path, data: bytes) -> Path:
    """Write `data` to `path`: after a crash at any moment the old content or the new is there, never a part."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"The folder {path.parent} does not exist, so {path.name} cannot be written there.")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def write_arrays(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> Path:
    """One safetensors file of numpy arrays with string metadata."""
    from safetensors.numpy import save

    return write_bytes(path, save(arrays, metadata=metadata))


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

"""Models that a visitor brings: files checked before anything reads them, in a folder that goes when the visit ends.

Only safetensors and JSON: nothing is ever unpickled, and no name from outside becomes a path."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

__all__ = ["AT_ONCE", "LIMITS", "LIMIT_MB", "Folder", "check_files", "keep_files"]

LIMIT_MB = 100
"""Megabytes of one uploaded file. While it is loaded it is in memory about four times: as it came, as the bytes of a
file, as its tensors, and as float32 weights."""

AT_ONCE = 6
"""Uploaded models of all visitors together."""

LIMITS = {"model.safetensors": LIMIT_MB * 2**20, "config.json": 2**20, "tokenizer.json": 32 * 2**20}
_HEADER = 16 * 2**20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8,
          "I64": 8, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip


class Upload(Protocol):
    """What Streamlit gives for an uploaded file."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def getvalue(self) -> bytes: ...


class Folder:
    """A folder that is removed with the last reference to it, and when the server stops."""

    _there: ClassVar[weakref.WeakSet[Folder]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="t2lens-upload-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        Folder._there.add(self)

    def remove(self) -> None:
        self._remove()
        Folder._there.discard(self)

    @classmethod
    def count(cls) -> int:
        return len(cls._there)


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a safetensors file says of itself: tensor name -> dtype and shape."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]

    @classmethod
    def read(cls, data: bytes) -> Header:
        """ValueError in one sentence for what is no whole safetensors file. Its numbers are not touched."""
        if data[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            raise ValueError("The weights are a pickle under another name, which can run any program when it is read.")
        length = int.from_bytes(data[:8], "little")
        if len(data) < 10 or length > _HEADER or 8 + length > len(data):
            raise ValueError(
                f"The weights are no safetensors file: {len(data)} bytes, with a header that would have {length} "
                f"(at most {_HEADER} are read)."
            )
        try:
            header = json.loads(data[8 : 8 + length])
            tensors = {name: about for name, about in header.items() if name != "__metadata__"}
            found = {
                name: (str(t["dtype"]), tuple(map(int, t["shape"])), t["data_offsets"]) for name, t in tensors.items()
            }
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            raise ValueError("The weights are no safetensors file: the header is not what such a file has.") from None
        rest = len(data) - 8 - length
        for name, (dtype, shape, offsets) in found.items():
            if not _fits(dtype, shape, offsets, rest):
                raise ValueError(
                    f"The weights are truncated or damaged: the tensor {name[:60]!r} does not lie within them."
                )
        if sum(end - start for _, _, (start, end) in found.values()) != rest:
            raise ValueError(
                f"The weights are truncated or damaged: their tensors do not fill the {rest} bytes of data."
            )
        return cls(tensors={name: (dtype, shape) for name, (dtype, shape, _) in found.items()})


def _fits(dtype: str, shape: tuple[int, ...], offsets: Any, rest: int) -> bool:
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(each) is int for each in offsets):
        return False
    n = _BYTES.get(dtype, 0)
    for size in shape:
        if size < 0:
            return False
        n *= size
    start, end = offsets
    return 0 <= start <= end <= rest and (dtype not in _BYTES or end - start == n)


def check_files(files: Sequence[Upload]) -> dict[str, bytes]:
    """Our own names -> contents of uploaded files: the weights, a config, and a tokenizer.

    ValueError in one sentence: a file that is none of these, or two of one; one that is too large; a pickle, under
    whatever name; weights that are no whole safetensors file; JSON that is none; a config that says what cannot be.
    """
    found: dict[str, Upload] = {}
    for file in files:
        name = file.name.lower()
        if name.endswith(_PICKLES):
            raise ValueError(
                f"{_named(file)} is a pickle, which can run any program when it is read: convert it to safetensors."
            )
        ours = "model.safetensors" if name.endswith(".safetensors") else ""
        if name.endswith(".json"):
            ours = "tokenizer.json" if "tokenizer" in name else "config.json"
        if not ours:
            raise ValueError(f"{_named(file)} is no part of a model: bring {', '.join(LIMITS)}.")
        if ours in found:
            raise ValueError(f"There are two files for {ours}: {_named(found[ours])} and {_named(file)}.")
        if file.size > LIMITS[ours]:
            raise ValueError(f"{_named(file)} has {file.size:,} bytes; at most {LIMITS[ours]:,} are taken as {ours}.")
        found[ours] = file
    missing = [name for name in LIMITS if name not in found]
    if missing:
        raise ValueError(
            f"A model needs {', '.join(LIMITS)}; {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing."
        )
    data = {name: file.getvalue() for name, file in found.items()}
    header = Header.read(data["model.safetensors"])
    config = _read_json(data["config.json"], "config")
    _read_json(data["tokenizer.json"], "tokenizer")
    _check_config(config, len(header.tensors))
    return data


def _named(file: Upload) -> str:
    name = file.name.replace("\\", "/").rpartition("/")[2]
    return repr(name if len(name) <= 60 else name[:57] + "...")


def _read_json(data: bytes, what: str) -> Any:
    try:
        read = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"The {what} is not JSON.") from None
    if not isinstance(read, dict):
        raise ValueError(f"The {what} is no JSON object.")
    return read


def _check_config(config: dict[str, Any], n_tensors: int) -> None:
    """A config that names more layers than there are tensors would be built before it is found not to fit."""
    waiting: list[Any] = [config]
    while waiting:
        one = waiting.pop()
        for key, value in one.items() if isinstance(one, dict) else enumerate(one):
            if isinstance(value, dict | list):
                waiting.append(value)
            elif isinstance(value, int) and "layer" in str(key) and value > n_tensors:
                raise ValueError(
                    f"The config says {str(key)[:40]} = {value}, and the weights hold {n_tensors} tensors."
                )


def keep_files(files: Sequence[Upload]) -> Folder:
    """Check the files and write them, under names of our own, to a folder of their own.

    ValueError as `check_files`, and when the server keeps as many as it may.
    """
    data = check_files(files)
    if Folder.count() >= AT_ONCE:
        raise ValueError(f"The server keeps {AT_ONCE} uploaded models at once; one of them must be dropped first.")
    folder = Folder()
    for name, content in data.items():
        (folder.path / name).write_bytes(content)
    return folder

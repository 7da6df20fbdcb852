"""One safetensors file per cache, written whole or not at all and read without a model."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "t2lens.cache.1"


def write_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Write tensors (dtypes as they are) and `info`, which JSON must be able to hold."""
    plain: dict[str, Tensor] = {}
    seen: set[tuple[torch.device, int]] = set()
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values to save.")
        storage = tensor.untyped_storage()
        place = (tensor.device, storage.data_ptr())
        whole = tensor.is_contiguous() and storage.nbytes() == tensor.numel() * tensor.element_size()
        # safetensors writes neither views nor one piece of memory under two names.
        keep = whole and place not in seen
        plain[name] = tensor.detach() if keep else tensor.detach().clone(memory_format=torch.contiguous_format)
        seen.add(place)
    text = json.dumps({"format": FORMAT, **info}, separators=(",", ":"), ensure_ascii=True)
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        save_file(plain, temporary, metadata={"t2lens": text})
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, info) of a file that `write_tensors` wrote. ValueError when it is none, or not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("t2lens", "{}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
        info = json.loads(text)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}.") from None
    if not isinstance(info, dict) or info.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is a safetensors file, but not a cache that t2lens wrote ({FORMAT}).")
    return tensors, info

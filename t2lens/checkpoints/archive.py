"""The files of a published checkpoint, without a model: where they are, what they hold, one tensor at a time.

Nothing here unpickles objects: torch files go through `weights_only`, which takes tensors and plain values alone. A
tensor is read when it is asked for, so that a checkpoint is never in memory as a whole.
"""

from __future__ import annotations

import json
import re
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from t2lens.files import few

__all__ = ["Archive"]

SAFE, TORCH = (".safetensors",), (".bin", ".pt", ".pth", ".ckpt")
_WHOLE = ("model.safetensors", "pytorch_model.bin", "consolidated.pth", "model.pt", "ckpt.pt")  # in this order
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_CONFIGS = ("config.json", "params.json")
_INSIDE = ("model", "state_dict", "model_state_dict")  # where training checkpoints keep the weights
_CONFIGS_INSIDE = ("hparams", "args", "config", "model_args")  # and the config; the last one wins
#: what was read of a mapped file stays in memory as long as the mapping does, so all are dropped after so many bytes
_MAPPED = 128 << 20


class Archive:
    """One checkpoint: its config and its tensors by key.

    Attributes:
        folder: where it lies. config: its own, as a dict ({} where it has none).
        shapes: key -> shape, keys without the prefixes that torch.compile and DataParallel put in front.
        no_tensors: key -> what stands among the weights and is none.
    """

    def __init__(self, path: str | Path, config: Mapping[str, Any] | str | Path | None = None) -> None:
        """`config`: in place of the one beside or inside the weights, as a dict or a JSON file.

        Errors: ValueError in one sentence for what is no checkpoint, is damaged, or is not safe to read.
        """
        path = Path(path)
        self.folder = path if path.is_dir() else path.parent
        named, promised = _weight_files(path)
        self._files = [_open(file) for file in named]
        self._read = 0
        where: dict[str, tuple[_File, str]] = {}
        for file in self._files:
            for key in file.shapes:
                name = key.replace("_orig_mod.", "")
                if name in where:
                    raise ValueError(f"The checkpoint {str(path)!r} holds the weight {name!r} twice.")
                where[name] = (file, key)
        while where and all(name.startswith("module.") for name in where):
            where = {name.removeprefix("module."): place for name, place in where.items()}
        if lost := sorted(promised - {key for file in self._files for key in file.shapes}):
            raise ValueError(f"The index of {str(path)!r} names weights that its files lack: {few(lost)}.")
        self._where = where
        self.shapes: dict[str, tuple[int, ...]] = {name: file.shapes[key] for name, (file, key) in where.items()}
        self.config: dict[str, Any] = self._config(config)
        self.no_tensors = {key: "it is no tensor" for file in self._files for key in file.no_tensors}

    def get(self, name: str) -> Tensor:
        """The tensor under a key of `shapes`, as the file holds it. Not a copy: convert or clone it to keep it."""
        if self._read > _MAPPED:
            self._read = 0
            for each in self._files:
                each.close()
        file, key = self._where[name]
        tensor = file.tensor(key)
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(f"In {str(file.path)!r} {key} is no plain array of numbers, which alone can be read.")
        self._read += tensor.numel() * tensor.element_size()
        return tensor

    def _config(self, given: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
        if isinstance(given, Mapping):
            return dict(given)
        if given is not None:
            if not isinstance(given, str | Path):
                raise ValueError(f"The config must be a dict or the path of a JSON file, not {given!r}.")
            return read_json(Path(given))
        for name in _CONFIGS:
            if (self.folder / name).is_file():
                return read_json(self.folder / name)
        return next((file.config for file in self._files if file.config), {})


class _File:
    """One file of weights: shapes now, tensors when they are asked for. It is mapped, not read, until `close`."""

    shapes: dict[str, tuple[int, ...]]
    config: dict[str, Any]  # what training scripts keep beside the weights
    no_tensors: list[str]  # keys among the weights that hold something else

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.no_tensors = {}, []

    def tensor(self, key: str) -> Tensor:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class _Safetensors(_File):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file: Any = self._open()
        self.shapes = {key: tuple(self._file.get_slice(key).get_shape()) for key in self._file.keys()}  # noqa: SIM118

    def _open(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.path, framework="pt")
        except SafetensorError as error:
            kind = "truncated" if "not fully covered" in str(error) else "damaged, or not safetensors at all"
            size = self.path.stat().st_size
            raise ValueError(f"The weight file {str(self.path)!r} ({size} bytes) is {kind}: {error}.") from None

    def tensor(self, key: str) -> Tensor:
        self._file = self._file or self._open()
        return self._file.get_tensor(key)

    def close(self) -> None:
        self._file = None


class _Torch(_File):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._tensors: dict[str, Tensor] = self._open()
        self.shapes = {key: tuple(tensor.shape) for key, tensor in self._tensors.items()}

    def _open(self) -> dict[str, Tensor]:
        content, self._mapped = _load_torch(self.path)
        weights = content
        for name in _INSIDE:
            if isinstance(inner := weights.get(name), Mapping):
                weights = inner
                for key in _CONFIGS_INSIDE:
                    self.config |= _plain(content.get(key))
                break
        tensors = {key: value for key, value in weights.items() if isinstance(value, Tensor)}
        if not tensors or not all(isinstance(key, str) for key in tensors):
            raise ValueError(f"The file {str(self.path)!r} is not a model: it holds no named tensors.")
        self.no_tensors = [str(key) for key in weights if key not in tensors]
        return tensors

    def tensor(self, key: str) -> Tensor:
        self._tensors = self._tensors or self._open()
        return self._tensors[key]

    def close(self) -> None:
        if self._mapped:
            self._tensors = {}


def _open(path: Path) -> _File:
    return _Safetensors(path) if path.suffix in SAFE else _Torch(path)


def _load_torch(path: Path) -> tuple[Mapping[str, Any], bool]:
    """(what a torch file holds, whether its tensors are mapped and not read)."""
    from pickle import UnpicklingError

    mapped = True
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([Namespace]):  # arguments of training scripts
            warnings.simplefilter("ignore")  # on old pickle protocols; what cannot be read raises
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
                mapped = False  # the format before torch 1.6
                content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        name = re.search(r"GLOBAL `?([\w.]+)", str(error))
        hint = f" ({name[1]})" if name else ""
        raise ValueError(
            f"The file {str(path)!r} is not a model that is safe to read: it holds more than tensors and plain values"
            f"{hint}; save its weights alone, best as safetensors."
        ) from None
    except Exception as error:  # bytes that are no torch file lead it anywhere
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"The file {str(path)!r} is not a model: torch cannot read it ({reason}).") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"The file {str(path)!r} is not a model: it holds a {type(content).__name__}, no weights.")
    return content, mapped


def _plain(config: Any) -> dict[str, Any]:
    config = vars(config) if isinstance(config, Namespace) else config
    return {str(key): value for key, value in config.items()} if isinstance(config, Mapping) else {}


def _weight_files(path: Path) -> tuple[list[Path], set[str]]:
    """(files, keys that an index promises)."""
    if path.is_file() and not path.name.endswith(".index.json"):
        if path.suffix not in SAFE + TORCH:
            raise ValueError(f"The file {str(path)!r} is not a model: weights end in {', '.join(SAFE + TORCH)}.")
        return [path], set()
    if path.is_file():
        return _from_index(path)
    for name in _WHOLE[:1] + _INDEX + _WHOLE[1:]:
        if (path / name).is_file():
            return _from_index(path / name) if name in _INDEX else ([path / name], set())
    found = [file for suffix in SAFE + TORCH for file in sorted(path.glob(f"*{suffix}")) if file.is_file()]
    if len(found) == 1:
        return found, set()
    if found:
        names = few([file.name for file in found])
        raise ValueError(f"The folder {str(path)!r} holds several weight files ({names}): give the path of one.")
    below = sorted({file.parent.name for suffix in SAFE + TORCH for file in path.glob(f"*/*{suffix}")})
    hint = f"; give the path of one of its folders {few(below)}" if below else ""
    raise ValueError(f"The folder {str(path)!r} is not a model: it has no {', no '.join(_WHOLE[:2])}{hint}.")


def _from_index(path: Path) -> tuple[list[Path], set[str]]:
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"The index {str(path)!r} has no weight_map of keys and file names.")
    root = _root(path.parent)
    files = []
    for name in sorted(set(index.values())):
        file = path.parent / name
        if "\0" in name or Path(name).name != name or not file.resolve().is_relative_to(root):
            raise ValueError(f"The index {str(path)!r} names a file outside its folder, {name!r}; nothing was read.")
        if file.suffix not in SAFE + TORCH or not file.is_file():
            raise ValueError(f"The index {str(path)!r} names the weight file {name!r}, which is not there.")
        files.append(file)
    return files, set(index)


def _root(folder: Path) -> Path:
    """The folder, or that of the whole repository in the cache of huggingface_hub, whose files are links."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1]
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Errors: ValueError naming the file when it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"The file {str(path)!r} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, braces without end
        raise ValueError(f"The file {str(path)!r} is not JSON ({error}).") from None
    if not isinstance(data, dict):
        raise ValueError(f"The file {str(path)!r} is JSON, but no object with keys.")
    return data

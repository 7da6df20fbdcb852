"""`Store`: the captures of a run, read in slices. Only the bytes asked for are read, local or through fsspec."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from t2lens.store.plan import parse_plan, read_plan
from t2lens.store.worker import committed

__all__ = ["Store", "Stored"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
}


@dataclass
class _Files:
    """Bytes of the files below a root: a folder of this machine, or a URL that fsspec opens."""

    root: str
    _open: dict[str, int] = field(default_factory=dict)

    @cached_property
    def remote(self) -> Any:
        """The fsspec file system and the path on it, or None for a local folder."""
        if "://" not in self.root:
            return None
        import fsspec

        return fsspec.core.url_to_fs(self.root)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes start to stop of a file (None: to its end). FileNotFoundError where there is none."""
        if self.remote is not None:
            system, path = self.remote
            return system.cat_file(f"{path.rstrip('/')}/{name}", start=start, end=stop)
        if stop is None:
            return (Path(self.root) / name).read_bytes()[start:]
        if name not in self._open:
            self._open[name] = os.open(Path(self.root) / name, os.O_RDONLY)
        return os.pread(self._open[name], stop - start, start)

    def close(self) -> None:
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()


class Store(Mapping[str, "Stored"]):
    """The captures of one run: a read-only mapping from keys to tensors that are read when they are indexed.

    Args:
        path: the folder of a run, or a URL of one (http://, s3://, ... through fsspec).

    Attributes:
        plan: the `Plan` of the run. n_sequences: how many are there (a run need not be finished; see `missing`).

    Raises:
        ValueError: no run there, another format, or no shard that is committed.

    Example:
        >>> import tempfile, t2lens
        >>> from t2lens.store import Store, collect
        >>> model = t2lens.load("attnres-full")
        >>> run = collect(model, ["In the beginning God created the heaven and the earth."] * 4, tempfile.mkdtemp(),
        ...               ["depth weights", "reads|norm"], n_pos=16, quiet=True)
        >>> store = Store(run)
        >>> store["blocks.3.hook_depth_attn_mlp"].shape, store["blocks.3.hook_depth_attn_mlp"][0, 4:8].shape
        ((4, 16, 8), torch.Size([4, 8]))
    """

    def __init__(self, path: str | Path) -> None:
        self._files = _Files(str(path))
        if self._files.remote is None:
            self.plan = read_plan(path)
        else:
            self.plan = parse_plan(self._files.read("plan.json"), str(path))
        self._headers = lru_cache(maxsize=4096)(self._header)
        self._records: dict[int, dict[str, Any]] = {}
        self.missing = tuple(shard for shard in range(self.plan.n_shards) if not self._has(shard))
        if len(self.missing) == self.plan.n_shards:
            raise ValueError(f"The run {path} has no finished shard yet; t2lens capture makes them.")

    def _has(self, shard: int) -> bool:
        if self._files.remote is None:
            record = committed(Path(self._files.root), shard)
        else:
            try:
                record = json.loads(self._files.read(f"shards/{shard:06d}.json"))
            except FileNotFoundError:
                record = None
        if record is not None:
            self._records[shard] = record
        return record is not None

    @property
    def n_sequences(self) -> int:
        return sum(len(self.plan.rows(shard)) for shard in self._records)

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan.tensors)

    def __len__(self) -> int:
        return len(self.plan.tensors)

    def __getitem__(self, key: str) -> Stored:
        if key == "tokens":
            return Stored(self, key, (self.plan.n_sequences, self.plan.n_pos), torch.int32)
        if key not in self.plan.tensors:
            from t2lens.hooks.names import nearest_names

            near = nearest_names(key, self.plan.tensors)
            raise KeyError(
                f"{key!r} is not in this store; {f'did you mean {near[0]!r}?' if near else 'see list(store).'}"
            )
        about = self.plan.tensors[key]
        return Stored(self, key, (self.plan.n_sequences, *about["shape"]), getattr(torch, about["dtype"]))

    @cached_property
    def documents(self) -> np.ndarray:
        """[document, 2]: first token (counted over all sequences) and number of tokens."""
        import io

        return np.load(io.BytesIO(self._files.read("documents.npy")), allow_pickle=False)

    def _header(self, shard: int) -> tuple[dict[str, Any], int]:
        """(safetensors header, where the data begins) of a shard, read once."""
        name = f"shards/{shard:06d}.safetensors"
        size = int.from_bytes(self._files.read(name, 0, 8), "little")
        if not 0 < size <= self._records[shard]["bytes"]:
            raise ValueError(f"The shard {name} is damaged; t2lens store check says which are.")
        return json.loads(self._files.read(name, 8, 8 + size)), 8 + size

    def _bytes(self, shard: int, key: str, row: int, start: int, stop: int) -> tuple[bytes, torch.dtype]:
        """Elements start to stop, in the flat order of one sequence, of row `row` of a shard."""
        header, begin = self._headers(shard)
        about = header[key]
        dtype = _DTYPES[about["dtype"]]
        per_row = int(np.prod(about["shape"][1:], dtype=np.int64))
        at = begin + about["data_offsets"][0] + row * per_row * dtype.itemsize
        name = f"shards/{shard:06d}.safetensors"
        return self._files.read(name, at + start * dtype.itemsize, at + stop * dtype.itemsize), dtype

    def check(self) -> list[str]:
        """A sentence for each shard that is not whole: its record, size and SHA-256 are compared with the file."""
        faults = [f"shard {shard} is not there" for shard in self.missing]
        for shard, record in self._records.items():
            try:
                data = self._files.read(f"shards/{shard:06d}.safetensors")
            except FileNotFoundError:
                faults.append(f"shard {shard} has a record and no file")
                continue
            if hashlib.sha256(data).hexdigest() != record["sha256"]:
                faults.append(f"shard {shard} is damaged: its SHA-256 is not that of its record")
        return faults

    def close(self) -> None:
        """Close the files that slices were read from; a later read opens them again."""
        self._files.close()

    def __repr__(self) -> str:
        done = "" if not self.missing else f", {len(self.missing)} of {self.plan.n_shards} shards missing"
        name = self.plan.model["name"] or "a model"
        return f"Store of {name}: {self.n_sequences} sequences of {self.plan.n_pos} tokens, {len(self)} tensors{done}"


@dataclass(frozen=True)
class Stored:
    """One tensor of a store, [sequence, pos, ...]; indexing reads.

    `stored[7]`, `stored[7, 100:116]`, `stored[-1, 3]`, `stored[2:5]`, `stored[[4, 9], :10]`: sequences (an int, a slice
    or a list), then positions (an int, or a slice with step 1), then anything that torch indexes. One contiguous range
    of bytes is read per sequence. Returns a torch tensor in the stored dtype.
    """

    store: Store
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        sequence, pos, *rest = (*(index if isinstance(index, tuple) else (index,)), slice(None))[: self._most(index)]
        if isinstance(sequence, int | np.integer):
            whole = self._read(int(sequence), pos)
        else:
            rows = range(*sequence.indices(len(self))) if isinstance(sequence, slice) else [int(i) for i in sequence]
            parts = [self._read(row, pos) for row in rows]
            whole = torch.stack(parts) if parts else self._read(0, pos).new_empty(0, *self._read(0, pos).shape)
        if not rest:
            return whole
        kept = (slice(None),) * (whole.ndim - (len(self.shape) - 2))  # sequence and position axes that are left
        return whole[(*kept, *rest)]

    def _most(self, index: Any) -> int:
        """Entries of an index that say something: sequence and position, always, and what was given beyond."""
        given = len(index) if isinstance(index, tuple) else 1
        if not 1 <= given <= len(self.shape):
            raise IndexError(f"{self.key} has {len(self.shape)} axes; {given} were indexed.")
        return max(2, given)

    def _read(self, row: int, pos: Any) -> Tensor:
        n, n_pos, plan = self.shape[0], self.shape[1], self.store.plan
        if not -n <= row < n:
            raise IndexError(f"There is no sequence {row}; there are {n}.")
        row %= n
        shard = row // plan.sequences_per_shard
        if shard in self.store.missing:
            raise IndexError(f"Sequence {row} lies in shard {shard}, which is not finished; t2lens capture goes on.")
        one = isinstance(pos, int | np.integer)
        if one and not -n_pos <= pos < n_pos:
            raise IndexError(f"There is no position {pos}; there are {n_pos}.")
        if isinstance(pos, slice) and pos.step not in (None, 1):
            raise IndexError("Positions are read in one piece: use a slice with step 1, and torch for the rest.")
        start, stop = (int(pos) % n_pos, int(pos) % n_pos + 1) if one else pos.indices(n_pos)[:2]
        stop, inner = max(start, stop), self.shape[2:]
        size = int(np.prod(inner, dtype=np.int64))
        shape = (stop - start, *inner)
        if stop == start:
            return torch.empty(shape, dtype=self.dtype)
        raw, dtype = self.store._bytes(shard, self.key, row - plan.rows(shard).start, start * size, stop * size)
        if len(raw) != (stop - start) * size * dtype.itemsize:
            raise ValueError(f"Shard {shard} ends too early; t2lens store check says which shards are damaged.")
        tensor = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
        return tensor[0] if one else tensor

"""`Store`: the captures of a run, read in slices. Only the bytes asked for are read, local or through fsspec."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from t2lens.store.plan import SAFETENSORS, Plan, parse_plan, read_plan
from t2lens.store.ranges import Files
from t2lens.store.worker import committed, record_of

if TYPE_CHECKING:
    import xarray as xr

    from t2lens.store.batches import Batches

__all__ = ["Store", "Stored"]

_ALL = slice(None)
_NUMBER = (int, np.integer)


class Store(Mapping[str, "Stored"]):
    """The captures of one run: a read-only mapping from keys to tensors that are read when they are indexed.

    Safe to read from many threads, and to hand to other processes (`DataLoader` workers, forked or spawned), which see
    the shards that were finished when it was opened. A context manager: it closes its files at the end.

    Args:
        path: the folder of a run, or a URL of one (http://, s3://, ... through fsspec).
        verify: compare the SHA-256 of each shard with its record before its first slice is read (reads all of it).
            Without, only what tells at no cost is compared: sizes, and every header with the plan.

    Attributes:
        path: as it was given. plan: the `Plan` of the run. missing: shards that are not finished. "tokens" is a key
            too: [sequence, pos] ids.

    Raises:
        ValueError: no run there, another format, one of statistics, or no shard that is finished.

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

    def __init__(self, path: str | Path, *, verify: bool = False) -> None:
        self.path, self._files = str(path), Files(str(path))
        self._verify = verify
        self.plan: Plan = read_plan(path) if self._files.local else parse_plan(_plan_of(self._files), str(path))
        if self.plan.statistics is not None:
            raise ValueError(f"The run {path} holds statistics; t2lens store stats shows them (read_statistics).")
        self._records = dict(_committed(self._files, self.plan))
        self.missing = tuple(shard for shard in range(self.plan.n_shards) if shard not in self._records)
        if not self._records:
            raise ValueError(f"The run {path} has no finished shard yet; t2lens capture makes them.")
        in_order = [key for want in self.plan.what for key in (want, f"{want}|index") if key in self.plan.tensors]
        self._keys = list(
            dict.fromkeys((*in_order, *self.plan.tensors))
        )  # in the order of the model; plan.json is sorted by name
        self._offsets: dict[int, dict[str, int]] = {}
        self._stored: dict[str, Stored] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: open files."""
        return vars(self) | {"_offsets": {}, "_stored": {}}

    @property
    def n_sequences(self) -> int:
        """How many sequences are there (a run need not be finished)."""
        return sum(len(self.plan.rows(shard)) for shard in self._records)

    @property
    def sequences(self) -> np.ndarray:
        """The sequences that are there."""
        return np.concatenate([np.asarray(self.plan.rows(shard)) for shard in sorted(self._records)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self.plan.tensors)

    def __getitem__(self, key: str) -> Stored:
        found = self._stored.get(key)
        if found is None:
            found = self._stored[key] = Stored(self, key, self.about(key))
        return found

    def about(self, key: str) -> dict[str, Any]:
        """What the plan says of a tensor: shape of one sequence, dtype, axes, meaning, unit, read and labels."""
        if key == "tokens":
            return {"shape": [self.plan.n_pos], "dtype": "int32", "axes": ["pos"], "meaning": "token ids", "unit": ""}
        if key not in self.plan.tensors:
            from t2lens.hooks.names import nearest_names

            near = nearest_names(key, self.plan.tensors)
            raise KeyError(
                f"{key!r} is not in this store; {f'did you mean {near[0]!r}?' if near else 'see list(store).'}"
            )
        return self.plan.tensors[key]

    # --- what the tokens are
    @cached_property
    def documents(self) -> np.ndarray:
        """[document, 2]: first token (counted over all sequences) and number of tokens."""
        return np.load(io.BytesIO(self._files.read("documents.npy")), allow_pickle=False)

    def document_of(self, sequence: Any, pos: Any) -> np.ndarray:
        """The document (its place in the corpus) that holds the token at pos of a sequence; numbers or arrays."""
        at = np.asarray(sequence, dtype=np.int64) * self.plan.n_pos + np.asarray(pos, dtype=np.int64)
        return np.searchsorted(self.documents[:, 0].astype(np.int64), at, side="right") - 1

    @cached_property
    def vocabulary(self) -> list[str] | None:
        """The string of every token id; None where the model had no tokenizer."""
        wanted = self.plan.files.get("vocabulary.json")
        if not wanted:
            return None
        try:
            data = self._files.read("vocabulary.json")
        except FileNotFoundError:
            data = b""
        if hashlib.sha256(data).hexdigest() != wanted:
            raise ValueError(f"{self._files.root}/vocabulary.json is not there or damaged: it is not that of the plan.")
        return json.loads(data)

    @cached_property
    def _places(self) -> np.ndarray:
        """[document, 2]: first byte and number of bytes of what is known of it, in metadata.jsonl."""
        return np.load(io.BytesIO(self._files.read("metadata.npy")), allow_pickle=False)

    def metadata(self, documents: Any = _ALL) -> Any:
        """What is known of documents besides their text: the other fields of their rows (`plan.metadata` names all).

        Args:
            documents: a number (gives a dictionary), or a slice or numbers (gives a list of them; default: all).

        Raises IndexError: no such document. ValueError: the file is gone or damaged.

        Example: `store.metadata(store.document_of(3, 17))["author"]`
        """
        n = self.plan.n_documents
        one = np.ndim(documents) == 0 and not isinstance(documents, slice)
        which = np.atleast_1d(np.arange(n)[documents] if not isinstance(documents, list) else _picked(n, documents))
        if not self.plan.metadata:
            found: list[dict[str, Any]] = [{} for _ in which]
        else:
            parts = [(int(start), bytearray(int(size))) for start, size in self._places[which].tolist()]
            self.fill([("metadata.jsonl", start, memoryview(part)) for start, part in parts])
            try:
                found = [json.loads(part) for _, part in parts]
            except ValueError:
                raise ValueError(f"{self.path}/metadata.jsonl is damaged; t2lens store check says more.") from None
        return found[0] if one else found

    def token_strings(self, tokens: Any) -> np.ndarray:
        """The strings of token ids, in an array of the same shape (ids as text where there is no vocabulary)."""
        ids = np.asarray(tokens)
        if self.vocabulary is None:
            return ids.astype(str).astype(object)
        return np.array(self.vocabulary, dtype=object)[ids]

    # --- more than one slice
    def batches(self, keys: str | Sequence[str], batch_size: int, **options: Any) -> Batches:
        """Shuffled batches for training, every row once: see `t2lens.store.batches.Batches` for the options.

        Example: `for batch in store.batches("blocks.3.hook_mlp_out", 4096, seed=0): ...`
        """
        from t2lens.store.batches import Batches

        return Batches(self, [keys] if isinstance(keys, str) else list(keys), batch_size, **options)

    def to_xarray(self, keys: str | Sequence[str] | None = None, sequences: slice | Sequence[int] = _ALL) -> xr.Dataset:
        """An xarray.Dataset that reads what is computed with: see `t2lens.store.views.to_xarray`."""
        from t2lens.store.views import to_xarray

        return to_xarray(self, keys, sequences)

    def export(self, path: str | Path, keys: str | Sequence[str] | None = None, **options: Any) -> Path:
        """A .parquet file, or a folder that Hugging Face datasets opens: see `t2lens.store.views.export`."""
        from t2lens.store.views import export

        return export(self, path, keys, **options)

    # --- shards
    def offset(self, shard: int, key: str) -> int:
        """Where a tensor begins in the file of a shard; the header is read, and compared with the plan, once."""
        if shard not in self._offsets:
            self._offsets[shard] = self._layout(shard)
        return self._offsets[shard][key]

    def _layout(self, shard: int) -> dict[str, int]:
        name, size = _file(shard), self._records[shard]["bytes"]
        if self._verify and self._files.sha256(name, size) != self._records[shard]["sha256"]:
            raise ValueError(f"{name} is damaged: its SHA-256 is not that of its record; t2lens store check says more.")
        length = int.from_bytes(self.read_at(name, 0, 8), "little")
        plain = self.read_at(name, 8, min(length, size - 8)) if 0 < length <= size - 8 else b""
        try:
            header = json.loads(plain)
            found, ends = {}, [0]
            for key in (*self.plan.tensors, "tokens"):
                entry, about = header[key], self.about(key)
                shape = [len(self.plan.rows(shard)), *about["shape"]]
                dtype = getattr(torch, about["dtype"])
                start, end = entry["data_offsets"]
                fits = end - start == int(np.prod(shape, dtype=np.int64)) * dtype.itemsize and start >= 0
                if entry["shape"] != shape or entry["dtype"] != SAFETENSORS[dtype] or not fits:
                    raise ValueError(key)
                found[key] = 8 + length + start
                ends.append(end)
        except (ValueError, KeyError, TypeError):
            found, ends = {}, [-1]
        if 8 + length + max(ends) != size:
            raise ValueError(f"{name} is damaged: its header is not what the plan says; t2lens store check says more.")
        return found

    def read_at(self, name: str, start: int, size: int) -> bytearray:
        out = bytearray(size)
        self.fill([(name, start, memoryview(out))])
        return out

    def fill(self, jobs: Sequence[tuple[str, int, memoryview]]) -> None:
        """Read ranges of shards; a file that is gone or cut off is named."""
        try:
            self._files.read_into(jobs)
        except FileNotFoundError:
            raise ValueError(f"{jobs[0][0]} is gone from {self._files.root}; t2lens capture makes it again.") from None
        except EOFError as error:
            raise ValueError(f"{error.args[0]} is cut off; t2lens store check says which shards are damaged.") from None

    def shard_of(self, sequence: int) -> int:
        """The shard of a sequence. ValueError where it is not finished, which names it."""
        shard = sequence // self.plan.sequences_per_shard
        if shard not in self._records:
            raise ValueError(
                f"Sequence {sequence} lies in shard {shard}, which is not finished; t2lens capture goes on with it."
            )
        return shard

    def check(self) -> list[str]:
        """A sentence for each shard that is not whole now: its record, size and SHA-256 are compared with the file. (Of
        a folder of this machine `t2lens.store.examine` says more.)"""
        from t2lens.store.upkeep import shard_fault

        faults = (shard_fault(self._files, self.plan, shard) for shard in range(self.plan.n_shards))
        return [fault.sentence for fault in faults if fault is not None]

    def close(self) -> None:
        """Close the files that slices were read from; a later read opens them again."""
        self._files.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        done = "" if not self.missing else f", {len(self.missing)} of {self.plan.n_shards} shards missing"
        name = self.plan.model["name"] or "a model"
        return f"Store of {name}: {self.n_sequences} sequences of {self.plan.n_pos} tokens, {len(self)} tensors{done}"


class Stored:
    """One tensor of a store, [sequence, ...]; indexing reads. `axes` are the words of what follows the sequence, mostly
    "pos" first.

    `stored[7]`, `stored[7, 100:116]`, `stored[-1, 3]`, `stored[2:5]`, `stored[[4, 9], :10]`: sequences (a number, a
    slice, numbers, or a mask), then along the next axis a number or a slice with step 1, then anything that torch
    indexes. One range of bytes is read per sequence, or one per shard where whole sequences follow one another. Returns
    a torch tensor in the stored dtype.
    """

    def __init__(self, store: Store, key: str, about: dict[str, Any]) -> None:
        self.store, self.key = store, key
        self.shape: tuple[int, ...] = (store.plan.n_sequences, *about["shape"])
        self.dtype: torch.dtype = getattr(torch, about["dtype"])
        self.axes: tuple[str, ...] = tuple(about.get("axes", ()))
        self._inner = self.shape[2:]
        self._step = self.dtype.itemsize  # bytes along the axis behind the sequence
        for n in self._inner:
            self._step *= n
        self._length = self.shape[1] if len(self.shape) > 1 else 1
        self._per_shard = store.plan.sequences_per_shard

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"Stored {self.key}: {list(self.shape)} {self.dtype}"

    def __getitem__(self, index: Any) -> Tensor:
        if not isinstance(index, tuple):
            index = (index,)
        elif len(index) == 2 and type(index[0]) is int and type(index[1]) is slice and 0 <= index[0] < self.shape[0]:
            # some positions of one sequence, as they are read most often: every microsecond counts
            start, stop, step = index[1].indices(self._length)
            if step == 1 and start < stop and len(self.shape) > 1:
                return self._one(index[0], start, stop, (stop - start, *self._inner))
        if not 1 <= len(index) <= len(self.shape):
            raise IndexError(f"{self.key} has {len(self.shape)} axes; {len(index)} were indexed.")
        one = isinstance(index[0], _NUMBER)
        rows = [self._row(index[0])] if one else self._rows(index[0])
        along = index[1] if len(index) > 1 else _ALL
        start, stop = self._span(along)
        lead = () if one else (len(rows),)
        if len(self.shape) > 1 and isinstance(along, slice):
            lead = (*lead, stop - start)
        out = self._read(rows, start, stop, lead + self._inner)
        return out[(*(_ALL,) * len(lead), *index[2:])] if len(index) > 2 else out

    def _row(self, row: Any) -> int:
        n = self.shape[0]
        if not -n <= row < n:
            raise IndexError(f"There is no sequence {row}; there are {n}.")
        return int(row) % n

    def _rows(self, index: Any) -> Sequence[int]:
        if isinstance(index, slice):
            return range(*index.indices(len(self)))
        which = np.asarray(index)
        if which.dtype == bool and which.shape == (len(self),):
            return np.flatnonzero(which).tolist()
        if which.ndim != 1 or (which.size and which.dtype.kind not in "iu"):
            raise IndexError(f"Sequences are a number, a slice, a list of numbers or a mask of all {len(self)}.")
        return [self._row(row) for row in which.tolist()]

    def _span(self, along: Any) -> tuple[int, int]:
        n = self._length
        if isinstance(along, _NUMBER):
            if not -n <= along < n:
                raise IndexError(f"There is no {self.axes[0]} {along}; there are {n}.")
            return int(along) % n, int(along) % n + 1
        if not isinstance(along, slice) or along.step not in (None, 1):
            raise IndexError(f"Along {self.axes[0]} one piece is read: give a number or a slice with step 1.")
        start, stop, _ = along.indices(n)
        return start, max(start, stop)

    def _one(self, row: int, start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
        """`_read` of one sequence."""
        store, size = self.store, self._step
        shard = store.shard_of(row)
        at = store.offset(shard, self.key) + ((row - shard * self._per_shard) * self._length + start) * size
        buffer = np.empty((stop - start) * size, dtype=np.uint8)
        store.fill(((_file(shard), at, buffer.data),))
        return torch.frombuffer(buffer, dtype=self.dtype).view(shape)

    def _read(self, rows: Sequence[int], start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
        """Entries start to stop, along the axis behind the sequence, of these sequences, in a tensor of this shape."""
        store, per_shard = self.store, self._per_shard
        size, whole = (stop - start) * self._step, self._length * self._step
        if not size or not rows:
            return torch.empty(shape, dtype=self.dtype)
        if len(rows) == 1:
            return self._one(rows[0], start, stop, shape)
        buffer = np.empty(len(rows) * size, dtype=np.uint8)
        view, jobs, i = buffer.data, [], 0
        while i < len(rows):
            row = rows[i]
            shard, n = store.shard_of(row), 1
            if size == whole:  # whole sequences that follow one another lie in one range
                while i + n < len(rows) and rows[i + n] == row + n and (row + n) // per_shard == shard:
                    n += 1
            at = store.offset(shard, self.key) + (row - shard * per_shard) * whole + start * self._step
            jobs.append((_file(shard), at, view[i * size : (i + n) * size]))
            i += n
        store.fill(jobs)
        return torch.frombuffer(buffer, dtype=self.dtype).view(shape)


@lru_cache(maxsize=4096)
def _file(shard: int, suffix: str = "safetensors") -> str:
    return f"shards/{shard:06d}.{suffix}"


def _plan_of(files: Files) -> bytes:
    try:
        return files.read("plan.json")
    except FileNotFoundError:
        raise ValueError(f"{files.root!r} is no run of t2lens capture: it has no plan.json.") from None


def _committed(files: Files, plan: Plan) -> Iterator[tuple[int, dict[str, Any]]]:
    """(shard, its record) of all that are finished; of those of this machine, `worker.committed` says whether."""
    if files.local:
        found = {shard: committed(Path(files.root), shard) for shard in range(plan.n_shards)}
    else:
        names = {_file(shard, "json"): shard for shard in range(plan.n_shards)}
        found = {names[name]: record_of(data) for name, data in files.read_all(list(names)).items()}
    for shard, record in found.items():
        if record is None or not {"bytes", "sha256"} <= record.keys():
            continue
        if record.get("plan") != plan.name:
            raise ValueError(
                f"{_file(shard, 'json')} of {files.root} belongs to another run ({record.get('plan')}); move it away."
            )
        yield shard, record


def _picked(n: int, which: list[int]) -> np.ndarray:
    """An empty list too."""
    return np.arange(n)[np.asarray(which, dtype=None if which else np.int64)]

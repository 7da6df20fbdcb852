"""A store in other forms: an xarray.Dataset that reads on demand, parquet files and Hugging Face datasets."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from xarray.backends import BackendArray
from xarray.core import indexing

from t2lens.files import new_folder

if TYPE_CHECKING:
    from t2lens.store.reader import Store

__all__ = ["export", "to_xarray", "union"]

_READ = 64 * 2**20  # bytes of an export that are in memory at a time


# --- xarray


class _OnDemand(BackendArray):
    """Sequences of a store as an array that xarray indexes: `read(sequences, start, stop)` gives [n, stop - start, ...]
    along the sequences and the next axis."""

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, rows: np.ndarray, read: Callable[[list[int], int, int], np.ndarray]
    ) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._rows, self._from = rows, read

    def __getitem__(self, key: Any) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._outer)

    def _outer(self, key: tuple[Any, ...]) -> np.ndarray:
        first = key[0]
        rows = np.atleast_1d(self._rows[first])
        along = np.atleast_1d(np.arange(self.shape[1])[key[1]]) if len(self.shape) > 1 else np.arange(1)
        if not len(rows) or not len(along):
            values = np.empty((len(rows), len(along), *self.shape[2:]), self.dtype)
        else:
            start = int(along.min())
            values = self._from(rows.tolist(), start, int(along.max()) + 1)[:, along - start]
        for axis, index in enumerate(key[2:], start=2):
            values = values[(slice(None),) * axis + (np.atleast_1d(np.arange(self.shape[axis])[index]),)]
        if len(self.shape) == 1:
            values = values[:, 0]
        single = tuple(i for i, index in enumerate(key) if isinstance(index, int | np.integer))
        return values.squeeze(axis=single) if single else values


def to_xarray(store: Store, keys: str | Sequence[str] | None = None, sequences: Any = slice(None)) -> xr.Dataset:
    """An xarray.Dataset of a store: a variable per key over sequence, pos and the axes of the tensor, by their words.

    Nothing is read before values are asked for, and then only what they need: `view[key].isel(sequence=7,
    pos=slice(100, 116)).values` is one small range of bytes. Depth weights are over `source`, by name, NaN where a read
    has no such source. Coordinates: sequence, pos, and over both token (text), token_id, document and, for each NAME
    that is known of documents (`store.plan.metadata`), document.NAME. Tensors narrower than float16 are float32. Where
    two tensors have the same axis in different sizes, or a choice of positions, the axis is called "pos of KEY".

    Args:
        keys: of the store; default: all. sequences: a slice, numbers, or a mask; default: those that are there.

    Example:
        >>> import tempfile, t2lens
        >>> from t2lens.store import Store, collect
        >>> texts = ["In the beginning God created the heaven and the earth."] * 4
        >>> run = collect(t2lens.load("attnres-full"), texts, tempfile.mkdtemp(), "depth weights", n_pos=16, quiet=True)
        >>> weights = Store(run).to_xarray()["blocks.1.hook_depth_attn_attn"]
        >>> round(float(weights.isel(sequence=0, pos=5).sum("source")), 5), weights.attrs["read"]
        (1.0, '1.attn')
    """
    keys = [keys] if isinstance(keys, str) else list(store) if keys is None else list(keys)
    every = store.sequences if isinstance(sequences, slice) and sequences == slice(None) else None
    rows = np.arange(store.plan.n_sequences)[sequences] if every is None else every
    rows = np.atleast_1d(rows)
    sources = union([store.about(key).get("labels", {}).get("source", []) for key in keys])
    variables: dict[str, xr.Variable] = {}
    coords: dict[str, Any] = {"sequence": rows, "pos": np.arange(store.plan.n_pos)}
    sizes = {"sequence": len(rows), "pos": store.plan.n_pos}
    for key in keys:
        variables[key] = _variable(store, key, rows, sources, sizes, coords)
    if "source" in sizes:
        coords["source"] = np.array(sources, dtype=object)
    grid = (len(rows), store.plan.n_pos)
    for name, dtype, read in _labels(store):
        coords[name] = xr.Variable(("sequence", "pos"), indexing.LazilyIndexedArray(_OnDemand(grid, dtype, rows, read)))
    attrs = {"model": store.plan.model["name"], "run": store.plan.name}
    return xr.Dataset(variables, coords=coords, attrs=attrs)


def union(orders: list[list[str]]) -> list[str]:
    """Every name once; later reads add to what earlier ones see."""
    return list(dict.fromkeys(name for order in sorted(orders, key=len, reverse=True) for name in order))


def _variable(
    store: Store, key: str, rows: np.ndarray, sources: list[str], sizes: dict[str, int], coords: dict[str, Any]
) -> xr.Variable:
    stored, about = store[key], store.about(key)
    labels = about.get("labels", {})
    dims, shape, columns = ["sequence"], [len(rows)], None
    for word, n in zip(stored.axes, stored.shape[1:], strict=True):
        if word == "source" and len(labels.get("source", ())) == n and stored.dtype.is_floating_point:
            columns, n = [sources.index(name) for name in labels["source"]], len(sources)
        own = f"{word} of {key}"
        dim = own if ("pos" in labels and word == "pos") or sizes.get(word, n) != n or word in dims else word
        if dim == own and word == "pos" and "pos" in labels:
            coords[own] = np.asarray(labels["pos"])
        sizes[dim] = n
        dims.append(dim)
        shape.append(n)

    def read(which: list[int], start: int, stop: int) -> np.ndarray:
        values = _numpy(stored[which, start:stop] if len(stored.shape) > 1 else stored[which][:, None])
        if columns is None or dims[-1] != "source" or len(dims) < 3:
            return values
        wide = np.full((*values.shape[:-1], len(sources)), np.nan, values.dtype)
        wide[..., columns] = values
        return wide

    dtype = _numpy(torch.empty(0, dtype=stored.dtype)).dtype
    attrs = {name: about[name] for name in ("meaning", "unit", "read") if about.get(name)}
    array = indexing.LazilyIndexedArray(_OnDemand(tuple(shape), dtype, rows, read))
    variable = xr.Variable(dims, array, attrs)
    return variable.isel({"1": 0}) if "1" in dims else variable


def _labels(store: Store) -> Iterator[tuple[str, Any, Callable[[list[int], int, int], np.ndarray]]]:
    tokens = store["tokens"]

    def ids(rows: list[int], start: int, stop: int) -> np.ndarray:
        return tokens[rows, start:stop].numpy()

    yield "token_id", np.int32, ids
    yield "token", object, lambda rows, start, stop: store.token_strings(ids(rows, start, stop))
    yield (
        "document",
        np.int64,
        lambda rows, start, stop: store.document_of(np.asarray(rows)[:, None], np.arange(start, stop)),
    )
    for name in store.plan.metadata:
        yield f"document.{name}", object, partial(_known, store, name)


def _known(store: Store, name: str, rows: list[int], start: int, stop: int) -> np.ndarray:
    """What is known of the document of every token, under this name; None where nothing is."""
    which, places = np.unique(store.document_of(np.asarray(rows)[:, None], np.arange(start, stop)), return_inverse=True)
    values = np.empty(len(which), object)
    values[:] = [more.get(name) for more in store.metadata(which)]
    return values[places].reshape(len(rows), stop - start)


def _numpy(x: Tensor) -> np.ndarray:
    """numpy of a dtype that it has."""
    narrow = x.dtype == torch.bfloat16 or (x.is_floating_point() and x.itemsize == 1)
    return (x.float() if narrow else x).numpy()


# --- files of other programs


def export(
    store: Store,
    path: str | Path,
    keys: str | Sequence[str] | None = None,
    *,
    rows: Literal["tokens", "sequences"] = "tokens",
    **chosen: Any,
) -> Path:
    """Write a store as a table, a few rows at a time: a .parquet file, or (any other path) a folder that
    `datasets.load_from_disk` opens.

    A row is a token, with columns sequence, pos, document, token_id and token; or a sequence, with sequence, document,
    token_id and token as lists. Beside them a column per key: a number, or lists of a fixed length. Floats narrower
    than 32 bits become 32 bits wide. Where rows are tokens, what is known of documents is there as well, as text under
    document.NAME (what is no text, as JSON).

    Args:
        keys: default: all that rows can be made of. chosen: `sequences` or `documents`, as in `store.batches`.

    Raises:
        ValueError: the path exists already, or as `store.batches`.
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} exists already; give a path that does not exist yet.")
    keys = [keys] if isinstance(keys, str) else _fitting(store, rows) if keys is None else list(keys)
    size = max(1, _READ // max(1, store.plan.bytes_per_sequence))
    size *= store.plan.n_pos if rows == "tokens" else 1
    batches = store.batches(keys, size, rows=rows, seed=None, mixing=1, **chosen)
    tables = (_table(store, keys, batch) for batch in batches)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        return _parquet(path, tables)
    return _datasets(path, tables, f"{store.plan.name} {keys} {rows} {batches.n_rows}")


def _fitting(store: Store, rows: str) -> list[str]:
    """Keys that have the rows."""
    from t2lens.store.batches import row_axis

    return [key for key in store if rows == "sequences" or row_axis(store[key], store.plan.n_pos)]


def _table(store: Store, keys: Sequence[str], batch: dict[str, Tensor]) -> Any:
    import pyarrow

    columns = {name: _column(batch[name]) for name in ("sequence", "pos", "document") if name in batch}
    columns["token_id"] = _column(batch["token"])
    strings = pyarrow.array(store.token_strings(batch["token"]).ravel().tolist(), pyarrow.string())
    if batch["token"].ndim > 1:
        strings = pyarrow.FixedSizeListArray.from_arrays(strings, batch["token"].shape[1])
    columns["token"] = strings
    if batch["document"].ndim == 1 and store.plan.metadata:
        which, places = np.unique(batch["document"].numpy(), return_inverse=True)
        known = store.metadata(which)
        for name in store.plan.metadata:
            words = [_words(more.get(name)) for more in known]
            columns[f"document.{name}"] = pyarrow.array([words[i] for i in places], pyarrow.string())
    for key in keys:
        columns[key] = _column(batch[key])
    return pyarrow.table(columns)


def _words(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _column(x: Tensor) -> Any:
    """[row, ...] as numbers, or as lists of a fixed length, one in another."""
    import pyarrow

    if x.is_floating_point() and x.itemsize < 4:
        x = x.float()
    array = pyarrow.array(x.contiguous().view(-1).numpy())
    for n in reversed(x.shape[1:]):
        array = pyarrow.FixedSizeListArray.from_arrays(array, n)
    return array


def _parquet(path: Path, tables: Iterator[Any]) -> Path:
    import pyarrow.parquet

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary, writer = Path(name), None
    try:
        for table in tables:
            writer = writer or pyarrow.parquet.ParquetWriter(temporary, table.schema)
            writer.write_table(table)
        if writer is not None:
            writer.close()
        temporary.chmod(0o644)
        temporary.rename(path)
    except BaseException:
        if writer is not None:
            writer.close()
        temporary.unlink(missing_ok=True)
        raise
    return path


def _datasets(path: Path, tables: Iterator[Any], what: str) -> Path:
    """The layout of `Dataset.save_to_disk`: an Arrow stream, what its columns are, and a list of the files."""
    import pyarrow
    from datasets import DatasetInfo, Features

    with new_folder(path) as folder:
        file, first = folder / "data-00000-of-00001.arrow", next(tables)
        info = DatasetInfo(features=Features.from_arrow_schema(first.schema))
        schema = info.features.arrow_schema if info.features is not None else first.schema
        with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as stream:
            stream.write_table(first.cast(schema))
            for table in tables:
                stream.write_table(table.cast(schema))
        info.write_to_directory(str(folder))
        state = {
            "_data_files": [{"filename": file.name}],
            "_fingerprint": hashlib.sha256(what.encode()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1))
    return path

"""Documents of a corpus, one at a time, each with what else its row says: text, jsonl, parquet, a Hugging Face datasets
folder, or token ids.

Whatever is wrong is one sentence that names the file and the place in it. Nothing is held beyond a document (a text
file is one, so a file too large for memory should be jsonl or parquet).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["TOKEN_ID_FILES", "Row", "documents", "token_ids"]

TOKEN_ID_FILES = (".npy",)
_READERS = (".txt", ".jsonl", ".parquet")
Row = tuple[str, dict[str, Any]]  # a text, and what else is known of it


def documents(source: str | Path, field: str = "text", metadata: Sequence[str] | None = None) -> Iterator[Row]:
    """The documents of a file, or of every .txt, .jsonl and .parquet file of a folder in the order of their names, or
    of a folder that `datasets` saved. Empty ones are passed over.

    Args:
        field: the entry (jsonl) or column (parquet, datasets) that holds the text.
        metadata: names of other entries or columns that are given with it (of those that a row has); None: all. A text
            file of a folder has one, "file", its name in the folder.

    Raises:
        ValueError: no such file, nothing to read, a line or file that is not UTF-8 or not JSON, no such field.
    """
    source = Path(source)
    if not source.exists():
        raise ValueError(f"There is no file or folder {str(source)!r} to read a corpus from.")
    if (source / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in source.iterdir() if (path / "state.json").is_file())
        raise ValueError(f"{str(source)!r} holds several splits ({', '.join(splits)}); give the folder of one of them.")
    if source.is_dir() and (source / "state.json").is_file():
        files, read = [source], _of_datasets
    else:
        files = sorted(p for p in source.rglob("*") if p.suffix in _READERS) if source.is_dir() else [source]
        read = _of_file
    if not files or (files[0].suffix not in _READERS and read is _of_file):
        raise ValueError(f"{str(source)!r} holds no {', '.join(_READERS)} file, and is no datasets folder.")
    for file in files:
        of_file = {"file": file.relative_to(source).as_posix()} if file != source and file.suffix == ".txt" else {}
        for text, more in read(file, field, metadata):
            if text.strip():
                yield text, more | {k: v for k, v in of_file.items() if metadata is None or k in metadata}


def _of_file(file: Path, field: str, metadata: Sequence[str] | None) -> Iterator[Row]:
    if file.suffix == ".txt":
        yield _decoded(file.read_bytes(), str(file)), {}
    elif file.suffix == ".jsonl":
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{file}, line {number}"
                words = _decoded(line, where)
                if words.strip():
                    yield _row(_json(words, where), field, metadata, where)
    else:
        yield from _of_parquet(file, field, metadata)


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 (byte {error.start} is {data[error.start]:#04x}).") from None


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}).") from None


def _row(row: Any, field: str, metadata: Sequence[str] | None, where: str) -> Row:
    """ValueError where the row has no text, or it is none."""
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no text in the field {field!r}; it has {has or 'nothing'}.")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half of a character
            raise ValueError(f"{where} is not text: a lone surrogate stands at character {error.start}.") from None
    kept = {key: value for key, value in row.items() if key != field and (metadata is None or key in metadata)}
    return text, kept


def _of_parquet(file: Path, field: str, metadata: Sequence[str] | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file} is not a readable parquet file ({error}).") from None
    if field not in table.schema_arrow.names:
        raise ValueError(f"{file} has no column {field!r}; it has {', '.join(table.schema_arrow.names)}.")
    names = [name for name in table.schema_arrow.names if name == field or metadata is None or name in metadata]
    n = 0
    for batch in table.iter_batches(batch_size=64, columns=names):
        for row in batch.to_pylist():
            n += 1
            yield _row(row, field, metadata, f"{file}, row {n}")


def _of_datasets(folder: Path, field: str, metadata: Sequence[str] | None) -> Iterator[Row]:
    from datasets import load_from_disk

    data: Any = load_from_disk(str(folder))
    if field not in (data.column_names or ()):
        raise ValueError(f"The dataset {folder} has no column {field!r}; it has {data.column_names}.")
    names = [name for name in data.column_names if name == field or metadata is None or name in metadata]
    plain = data.select_columns(names).with_format("arrow")  # an image or sound is not decoded
    n = 0
    for batch in plain.iter(batch_size=64):
        for row in batch.to_pylist():
            n += 1
            yield _row(row, field, metadata, f"{folder}, row {n}")


def token_ids(file: str | Path) -> np.ndarray:
    """Token ids [sequence, pos] (or [token], one long document) of an .npy file, mapped, not read."""
    try:
        ids = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} is not a readable .npy file ({error}).") from None
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or not ids.size:
        raise ValueError(f"{file} must hold whole numbers [token] or [sequence, pos], not {ids.dtype} {ids.shape}.")
    return ids

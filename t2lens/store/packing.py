"""A corpus made into the folder of a run: tokenised, packed into sequences, with its plan."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from t2lens.analysis.progress import progress
from t2lens.files import hold, read_arrays, sync_folder, write_arrays, write_file
from t2lens.store.documents import TOKEN_ID_FILES, documents, token_ids
from t2lens.store.memory import capture_size
from t2lens.store.plan import BESIDE, DTYPES, Plan, fingerprint, sha256_of, tensor_about
from t2lens.store.wants import Want, read_wants

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["describe", "digests", "make_run", "new_run", "put", "read_directions", "statistics_per_shard", "token_rows"]

_SHARD_BYTES = 256 * 2**20
_NPY_HEADER = 128  # bytes: version 1.0, padded with spaces


def make_run(
    model: Transformer,
    source: str | Path | Sequence[str],
    out: str | Path,
    what: str | Sequence[str],
    *,
    field: str = "text",
    metadata: Sequence[str] | None = None,
    n_pos: int | None = None,
    dtype: str | None = None,
    directions: Mapping[str, torch.Tensor] | None = None,
    statistics: bool = False,
    by_token: bool = True,
    batch_size: int = 8,
    sequences_per_shard: int | None = None,
    threads: int = 1,
    name: str | None = None,
) -> Path:
    """Tokenise and pack a corpus, and write the folder of a run with its plan. The same inputs give the same folder,
    which is then found, not written again.

    Args:
        source: as in `documents`, an .npy file of token ids, or a list of texts.
        out: folder in which the run's folder is made.
        field, metadata: as in `documents`; what is known of documents is kept beside them.
        n_pos: tokens per sequence, the context by default; what does not fill the last sequence is left out.
        directions: name -> [n, d], for reducers project:NAME; kept in the run.
        statistics: keep only statistics of the tensors, in place of them (`t2lens.store.read_statistics` reads them);
            by_token: counted by token too.
        sequences_per_shard: default: as many as make a shard of some 256 MB (statistics: as make 256 shards, and at
            least some 65,000 tokens).

    Raises:
        ValueError: bad input (one sentence, nothing is left behind), or not one full sequence.
    """
    n_pos = model.cfg.n_ctx if n_pos is None else n_pos
    if not 1 <= n_pos <= model.cfg.n_ctx:
        raise ValueError(f"n_pos must lie in 1..{model.cfg.n_ctx} (the context), not {n_pos}.")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
    if min(batch_size, threads) < 1 or (sequences_per_shard is not None and sequences_per_shard < 1):
        raise ValueError("batch_size, sequences_per_shard and threads must be at least 1.")
    if statistics and dtype is not None:
        raise ValueError("Statistics are counted from what the model computes: they take no dtype.")
    wants = read_wants(model, what, directions)
    projected = {r[8:] for want in wants for r in want.reducers if r.startswith("project:")}
    onto = {key: torch.as_tensor(value) for key, value in (directions or {}).items() if key in projected}
    tensors = describe(model, wants, n_pos, None if dtype is None else DTYPES[dtype], onto)
    if statistics:
        from t2lens.store.tally import parts_of

        tensors = {key: about for key, about in tensors.items() if not key.endswith("|index")}
        parts_of(tensors, n_pos)  # or a sentence on what has none
    with new_run(out) as folder:
        n_sequences, n_documents, names = _pack(model, source, field, metadata, n_pos, folder)
        if onto:
            arrays = {key: value.detach().cpu().contiguous().float().numpy() for key, value in onto.items()}
            write_arrays(folder / "directions.safetensors", arrays, {})
        vocabulary = _vocabulary(model)
        if vocabulary:
            write_file(folder / "vocabulary.json", vocabulary)
        per_sequence = sum(math.prod(of["shape"]) * getattr(torch, of["dtype"]).itemsize for of in tensors.values())
        default = max(1, min(n_sequences, _SHARD_BYTES // max(per_sequence, 1)))
        kept = {"by_token": by_token, "n_vocab": model.cfg.d_vocab, "store": ""} if statistics else None
        plan = Plan(
            model={"name": name or getattr(model, "name", None) or "", "sha256": fingerprint(model)},
            files=digests(folder),
            n_sequences=n_sequences,
            n_pos=n_pos,
            n_documents=n_documents,
            what=tuple(want.key for want in wants),
            dtype=dtype,
            tensors=tensors,
            sequences_per_shard=sequences_per_shard
            or (statistics_per_shard(n_sequences, n_pos) if statistics else default),
            batch_size=batch_size,
            threads=threads,
            device=model.W_E.device.type,
            metadata=names,
            statistics=kept,
        )
        return put(folder, plan, Path(out))


def statistics_per_shard(n_sequences: int, n_pos: int) -> int:
    """Sequences of a shard of statistics: it takes megabytes, however few they are."""
    return max(-(-n_sequences // 256), min(n_sequences, -(-65_536 // n_pos)))


@contextmanager
def new_run(out: str | Path) -> Iterator[Path]:
    """A temporary folder in `out` that `put` gives its name; without it, nothing is left."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=out, prefix=".new.", suffix=".tmp"))
    handle = os.open(folder, os.O_RDONLY) if os.name != "nt" else None
    try:
        if handle is not None:
            hold(handle)
        yield folder
    finally:
        if handle is not None:
            os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)


def put(folder: Path, plan: Plan, out: Path) -> Path:
    """Write the plan and give the folder its name; where the run is there already, put back what it lacks."""
    write_file(folder / "plan.json", plan.to_json())
    (folder / "shards").mkdir()
    folder.chmod(0o755)
    run = out / plan.name
    try:
        folder.rename(run)
        sync_folder(out)
    except OSError:  # it is there already
        if not run.is_dir():
            raise
        for name in (*BESIDE, "plan.json"):
            new, old = folder / name, run / name
            if new.is_file() and (not old.is_file() or sha256_of(old) != sha256_of(new)):
                new.replace(old)
        sync_folder(run)
    return run


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files beside a plan, of those there are."""
    return {name: sha256_of(folder / name) for name in BESIDE if (folder / name).is_file()}


def describe(
    model: Transformer,
    wants: Sequence[Want],
    n_pos: int,
    dtype: torch.dtype | None = None,
    directions: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, dict[str, Any]]:
    """What is kept of wants in sequences of n_pos tokens: the entry `tensors` of a plan."""
    size = capture_size(model, [want.key for want in wants], 1, n_pos, directions=directions, dtype=dtype)
    tensors: dict[str, dict[str, Any]] = {
        key: {"shape": list(shape[1:]), "dtype": str(size.dtypes[key])[6:]} for key, shape in size.shapes.items()
    }
    for want in wants:
        about = tensor_about(model, want, n_pos)
        tensors[want.key] |= about
        if f"{want.key}|index" in tensors:
            tensors[f"{want.key}|index"] |= about | {"meaning": f"places of {about['meaning']}", "unit": "index"}
    return tensors


def read_directions(path: str | Path) -> dict[str, torch.Tensor]:
    """Directions [n, d] by name, of a .safetensors file, or of an .npy file (under the name of the file).

    Raises ValueError: another file, or what are no directions.
    """
    path = Path(path)
    if path.suffix == ".npy":
        try:
            arrays = {path.stem: np.load(path, allow_pickle=False)}
        except (ValueError, OSError) as error:
            raise ValueError(f"{path} is not a readable .npy file ({error}).") from None
    else:
        arrays = read_arrays(path)[0]
    for name, values in arrays.items():
        if values.ndim != 2 or values.dtype.kind != "f" or not np.isfinite(values).all():
            raise ValueError(f"{path}: directions are finite floats [n, d]; {name!r} is {values.dtype} {values.shape}.")
    return {name: torch.from_numpy(values.astype(np.float32)) for name, values in arrays.items()}


# --- tokens and documents


def _pack(
    model: Transformer, source: Any, field: str, metadata: Sequence[str] | None, n_pos: int, folder: Path
) -> tuple[int, int, tuple[str, ...]]:
    """Write tokens.npy, documents.npy and what is known of documents: (full sequences, documents that begin in them,
    names of what is known). None of it is ever in memory."""
    total = n_documents = at = 0
    names: dict[str, None] = {}
    tokens_file, documents_file, index_file = (folder / f"{n}.npy" for n in ("tokens", "documents", "metadata"))
    more_file = folder / "metadata.jsonl"
    with (
        tokens_file.open("wb") as tokens,
        documents_file.open("wb") as starts,
        index_file.open("wb") as index,
        more_file.open("wb") as lines,
    ):
        for file in (tokens, starts, index):
            file.write(bytes(_NPY_HEADER))
        for ids, more in progress(token_rows(model, source, field, metadata), "tokenising"):
            line = _json_line(more)
            starts.write(np.array([total, len(ids)], dtype=np.uint64).data)
            index.write(np.array([at, len(line)], dtype=np.uint64).data)
            tokens.write(np.ascontiguousarray(ids, dtype=np.uint32).data)
            lines.write(line)
            names |= dict.fromkeys(map(str, more))
            total, at, n_documents = total + len(ids), at + len(line), n_documents + 1
    n = total // n_pos
    if not n:
        raise ValueError(f"The corpus has {total} tokens; at least one sequence of {n_pos} is needed (n_pos).")
    n_documents = int(np.searchsorted(_pairs(documents_file, n_documents)[:, 0], n * n_pos))
    _finish_npy(tokens_file, np.dtype(np.uint32), (n, n_pos))
    _finish_npy(documents_file, np.dtype(np.uint64), (n_documents, 2))
    if not names:
        index_file.unlink()
        more_file.unlink()
        return n, n_documents, ()
    end = int(_pairs(index_file, n_documents)[-1].sum())
    _finish_npy(index_file, np.dtype(np.uint64), (n_documents, 2))
    with more_file.open("rb+") as data:
        data.truncate(end)
        os.fsync(data.fileno())
    return n, n_documents, tuple(names)


def _pairs(file: Path, n: int) -> np.ndarray:
    return np.memmap(file, np.uint64, "r", _NPY_HEADER, (n, 2))


def _finish_npy(file: Path, dtype: np.dtype, shape: tuple[int, int]) -> None:
    """Write the header of an .npy file whose numbers are there, and cut off what is beyond its shape."""
    words = repr({"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": shape}).encode()
    with file.open("rb+") as data:
        data.write(b"\x93NUMPY\x01\x00" + (_NPY_HEADER - 10).to_bytes(2, "little"))
        data.write(words.ljust(_NPY_HEADER - 11) + b"\n")
        data.truncate(_NPY_HEADER + math.prod(shape) * dtype.itemsize)
        os.fsync(data.fileno())


def _json_line(more: dict[str, Any]) -> bytes:
    """What is known of a document as one line; what JSON has no word for becomes text, NaN and infinities null."""
    try:
        text = json.dumps(more, default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(more), default=str, allow_nan=False)
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def token_rows(
    model: Transformer, source: Any, field: str, metadata: Sequence[str] | None = ()
) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
    """(token ids, what else is known) of one document after the other, BOS in front of each where the tokenizer has
    one."""
    if isinstance(source, str | Path) and Path(source).suffix in TOKEN_ID_FILES:
        ids = token_ids(source)
        parts = np.array_split(ids.reshape(-1), max(1, ids.size // 2**20))
        wrong = [i for part in parts for i in (int(part.min()), int(part.max())) if not 0 <= i < model.cfg.d_vocab]
        if wrong:
            raise ValueError(
                f"{source} holds the token id {wrong[0]}, outside the vocabulary 0..{model.cfg.d_vocab - 1} of this "
                "model; it was made with another tokenizer."
            )
        for row in ids if ids.ndim == 2 else ids[None]:
            yield row, {}
        return
    if model.tokenizer is None:
        raise ValueError("This model has no tokenizer, so it takes an .npy file of token ids, not text.")
    bos = np.array([] if model.tokenizer.bos_id is None else [model.tokenizer.bos_id], np.uint32)
    rows = documents(source, field, metadata) if isinstance(source, str | Path) else ((text, {}) for text in source)
    encode = model.tokenizer.encode
    in_parts = getattr(model.tokenizer, "encode_long", None) or (lambda text: [encode(text)])
    for text, more in rows:
        ids = np.concatenate([bos, *(np.asarray(part, np.uint32) for part in in_parts(text))])
        if len(ids) and int(ids.max()) >= model.cfg.d_vocab:
            raise ValueError(
                f"The tokenizer of this model gives the token id {int(ids.max())}, outside its vocabulary "
                f"0..{model.cfg.d_vocab - 1}; it belongs to another model."
            )
        yield ids, more


def _vocabulary(model: Transformer) -> bytes:
    """The string of every token, as JSON; nothing without a tokenizer."""
    if model.tokenizer is None:
        return b""
    return json.dumps([model.tokenizer.str_token(i) for i in range(model.cfg.d_vocab)]).encode()

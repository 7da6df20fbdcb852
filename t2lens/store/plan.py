"""The plan of a run: which model, which tokens, what is captured, and how it is cut into shards.

    RUN/plan.json             this plan; the folder is named after its SHA-256
    RUN/tokens.npy            [sequence, pos] uint32, documents packed one after the other, BOS in front of each
    RUN/documents.npy         [document, 2] uint64: first token and number of tokens, counted over all sequences
    RUN/vocabulary.json       the string of every token id; only where the model has a tokenizer
    RUN/shards/000042.safetensors       every captured tensor of its sequences, [sequence, pos, ...]
    RUN/shards/000042.json    the record of that shard, written last: without it the shard is not there

FORMAT.md says the same for readers of other programs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from t2lens.analysis.progress import progress
from t2lens.files import hold, sync_folder, write_file
from t2lens.store.documents import TOKEN_ID_FILES, documents, token_ids
from t2lens.store.memory import capture_size
from t2lens.store.wants import Want, read_wants

if TYPE_CHECKING:
    from t2lens.model import Transformer
    from t2lens.residual import Read

__all__ = [
    "BESIDE",
    "DTYPES",
    "FORMAT",
    "SAFETENSORS",
    "Plan",
    "fingerprint",
    "in_words",
    "make_run",
    "parse_plan",
    "read_plan",
    "sha256_of",
    "tensor_about",
    "token_rows",
]

FORMAT = "t2lens store 1"
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float64": torch.float64,
}
SAFETENSORS = {  # what safetensors calls the dtypes that a shard may hold
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
}
# The files beside the plan, by the entry of Plan.tokens that holds their SHA-256.
BESIDE = {"sha256": "tokens.npy", "documents": "documents.npy", "tokenizer": "vocabulary.json"}
_SHARD_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides the bytes of a run, and the name that the model was loaded by.

    model: name and fingerprint (SHA-256 over config and weights). tokens: SHA-256 of tokens.npy, of documents.npy and
    of vocabulary.json ("" without a tokenizer). what: wants, as they were resolved in the model. dtype: of floating
    point tensors. batch_size, threads, device ("cpu", "cuda"): of a pass (others would round differently). tensors:
    key -> shape (of one sequence), dtype, and for readers: axes (a word for each), meaning and unit; where they are
    known, read (the name of the read that it belongs to) and labels: word of an axis -> what its entries are (the names
    of the sources; the positions, where not all were kept).
    """

    model: dict[str, str]
    tokens: dict[str, str]
    n_sequences: int
    n_pos: int
    n_documents: int
    what: tuple[str, ...]
    dtype: str | None
    tensors: dict[str, dict[str, Any]]
    sequences_per_shard: int
    batch_size: int
    threads: int
    device: str = "cpu"
    format: str = FORMAT

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()

    @cached_property
    def name(self) -> str:
        """Of the run's folder."""
        return hashlib.sha256(self.to_json()).hexdigest()[:16]

    @property
    def n_shards(self) -> int:
        return -(-self.n_sequences // self.sequences_per_shard)

    @property
    def bytes_per_sequence(self) -> int:
        """Of all captured tensors and the tokens, without the headers of the files."""
        sizes = (math.prod(of["shape"]) * getattr(torch, of["dtype"]).itemsize for of in self.tensors.values())
        return sum(sizes) + 4 * self.n_pos

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_per_sequence / self.n_pos

    def rows(self, shard: int) -> range:
        """The sequences of a shard."""
        start = shard * self.sequences_per_shard
        return range(start, min(start + self.sequences_per_shard, self.n_sequences))


def in_words(n_bytes: float) -> str:
    """A number of bytes: "3.03 MB"."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while n_bytes >= 1000 and len(units) > 1:
        n_bytes /= 1000
        del units[0]
    return f"{n_bytes:,.3g} {units[0]}"


def read_plan(run: str | Path) -> Plan:
    """The plan of a run folder. ValueError where there is none, or one of another format, or one that was changed."""
    file = Path(run) / "plan.json"
    if not file.is_file():
        raise ValueError(f"{str(run)!r} is no run of t2lens capture: it has no plan.json.")
    plan, name = parse_plan(file.read_bytes(), str(file)), file.absolute().parent.name
    if name != plan.name and re.fullmatch("[0-9a-f]{16}", name):  # a folder may be given a name of one's own
        raise ValueError(f"{file} is damaged: it is not the plan that the folder {name} is named after.")
    return plan


def parse_plan(data: bytes, where: str) -> Plan:
    """The plan in the bytes of a plan.json. ValueError where they are none, or of another format."""
    try:
        plain = json.loads(data)
        found = plain.get("format")
        plan = Plan(**{**plain, "what": tuple(plain["what"])}) if found == FORMAT else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where} is damaged ({error}).") from None
    if plan is None:
        raise ValueError(f"{where} has the format {found!r}; this version reads {FORMAT!r}.")
    return plan


def fingerprint(model: Transformer) -> str:
    """SHA-256 over the config and every weight with its name and dtype."""
    total = hashlib.sha256(json.dumps(model.cfg.to_dict(), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def make_run(
    model: Transformer,
    source: str | Path | Sequence[str],
    out: str | Path,
    what: str | Sequence[str],
    *,
    field: str = "text",
    n_pos: int | None = None,
    dtype: str | None = None,
    directions: Mapping[str, torch.Tensor] | None = None,
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
        n_pos: tokens per sequence, the context by default; what does not fill the last sequence is left out.
        sequences_per_shard: default: as many as make a shard of some 256 MB.

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
    if directions:
        raise ValueError("A run on disk takes no directions: capture the tensor, or project it in memory (capture).")
    wants = read_wants(model, what)
    cast = None if dtype is None else DTYPES[dtype]
    size = capture_size(model, [want.key for want in wants], 1, n_pos, dtype=cast)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=out, prefix=".new.", suffix=".tmp"))
    handle = os.open(folder, os.O_RDONLY) if os.name != "nt" else None
    try:
        if handle is not None:
            hold(handle)
        n_sequences, n_documents = _pack(model, source, field, n_pos, folder)
        tensors = {
            key: {"shape": list(shape[1:]), "dtype": str(size.dtypes[key])[6:]} for key, shape in size.shapes.items()
        }
        for want in wants:
            for key in (want.key, f"{want.key}|index"):
                if key in tensors:
                    tensors[key] |= tensor_about(model, want, n_pos)
        vocabulary = _vocabulary(model)
        if vocabulary:
            write_file(folder / "vocabulary.json", vocabulary)
        plan = Plan(
            model={"name": name or getattr(model, "name", None) or "", "sha256": fingerprint(model)},
            tokens={key: sha256_of(folder / name) if (folder / name).is_file() else "" for key, name in BESIDE.items()},
            n_sequences=n_sequences,
            n_pos=n_pos,
            n_documents=n_documents,
            what=tuple(want.key for want in wants),
            dtype=dtype,
            tensors=tensors,
            sequences_per_shard=sequences_per_shard or max(1, min(n_sequences, _SHARD_BYTES // max(size.n_bytes, 1))),
            batch_size=batch_size,
            threads=threads,
            device=model.W_E.device.type,
        )
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
            _put_back(folder, run)
        return run
    finally:
        if handle is not None:
            os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)


def _put_back(folder: Path, run: Path) -> None:
    """Replace what is missing or damaged in the folder of a run, shards apart, by what was made of the same inputs."""
    for name in (*BESIDE.values(), "plan.json"):
        new, old = folder / name, run / name
        if new.is_file() and (not old.is_file() or sha256_of(old) != sha256_of(new)):
            new.replace(old)
    sync_folder(run)


def _pack(model: Transformer, source: Any, field: str, n_pos: int, folder: Path) -> tuple[int, int]:
    """Write tokens.npy and documents.npy: (full sequences, documents that begin in them). Neither is ever in memory."""
    total = n_documents = 0
    tokens_file, documents_file = folder / "tokens.npy", folder / "documents.npy"
    with tokens_file.open("wb") as tokens, documents_file.open("wb") as starts:
        for file in (tokens, starts):
            file.write(bytes(_NPY_HEADER))
        for ids in progress(token_rows(model, source, field), "tokenising"):
            starts.write(np.array([total, len(ids)], dtype=np.uint64).data)
            tokens.write(np.ascontiguousarray(ids, dtype=np.uint32).data)
            total += len(ids)
            n_documents += 1
    n = total // n_pos
    if not n:
        raise ValueError(f"The corpus has {total} tokens; at least one sequence of {n_pos} is needed (n_pos).")
    begins = np.memmap(documents_file, np.uint64, "r", _NPY_HEADER, (n_documents, 2))[:, 0]
    n_documents = int(np.searchsorted(begins, n * n_pos))
    del begins
    _finish_npy(tokens_file, np.dtype(np.uint32), (n, n_pos))
    _finish_npy(documents_file, np.dtype(np.uint64), (n_documents, 2))
    return n, n_documents


_NPY_HEADER = 128  # bytes: version 1.0, padded with spaces


def _finish_npy(file: Path, dtype: np.dtype, shape: tuple[int, int]) -> None:
    """Write the header of an .npy file whose numbers are there, and cut off what is beyond its shape."""
    words = repr({"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": shape}).encode()
    with file.open("rb+") as data:
        data.write(b"\x93NUMPY\x01\x00" + (_NPY_HEADER - 10).to_bytes(2, "little"))
        data.write(words.ljust(_NPY_HEADER - 11) + b"\n")
        data.truncate(_NPY_HEADER + math.prod(shape) * dtype.itemsize)
        os.fsync(data.fileno())


def token_rows(model: Transformer, source: Any, field: str) -> Iterator[Any]:
    """Token ids of one document after the other, BOS in front of each where the tokenizer has one."""
    if isinstance(source, str | Path) and Path(source).suffix in TOKEN_ID_FILES:
        ids = token_ids(source)
        parts = np.array_split(ids.reshape(-1), max(1, ids.size // 2**20))
        wrong = [i for part in parts for i in (int(part.min()), int(part.max())) if not 0 <= i < model.cfg.d_vocab]
        if wrong:
            raise ValueError(
                f"{source} holds the token id {wrong[0]}, outside the vocabulary 0..{model.cfg.d_vocab - 1} of this "
                "model; it was made with another tokenizer."
            )
        yield from ids if ids.ndim == 2 else ids[None]
        return
    if model.tokenizer is None:
        raise ValueError("This model has no tokenizer, so it takes an .npy file of token ids, not text.")
    bos = [] if model.tokenizer.bos_id is None else [model.tokenizer.bos_id]
    for text in documents(source, field) if isinstance(source, str | Path) else source:
        yield [*bos, *model.tokenizer.encode(text)]


def sha256_of(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _vocabulary(model: Transformer) -> bytes:
    """The string of every token, as JSON; nothing without a tokenizer."""
    if model.tokenizer is None:
        return b""
    return json.dumps([model.tokenizer.str_token(i) for i in range(model.cfg.d_vocab)]).encode()


def tensor_about(model: Transformer, want: Want, n_pos: int) -> dict[str, Any]:
    """What a reader needs to know of a tensor besides its shape; see `Plan`."""
    point = model.hook_dict[want.hook]
    about: dict[str, Any] = {"axes": list(want.axes(point.shape.split())[1:]), "meaning": point.meaning}
    about["unit"] = point.unit
    labels: dict[str, list[Any]] = {}
    read = _read_of(model, want.hook)
    if read is not None:
        about["read"] = read.name
        if "source" in point.shape.split():
            labels["source"] = [source.name for source in model.residual.sources(read.site)]
    kept = range(n_pos)
    for reducer in want.reducers:
        if reducer.startswith("pos:"):
            start, stop = (int(part) if part else None for part in reducer[4:].split(":"))
            kept = kept[start:stop]
    if len(kept) < n_pos:
        labels["pos"] = list(kept)
    return about | ({"labels": labels} if labels else {})


def _read_of(model: Transformer, hook: str) -> Read | None:
    """The read that a hook belongs to by its name ("blocks.3.hook_depth_attn_mlp_k": 3.mlp.k), or None."""
    folder, _, stem = hook.rpartition(".")
    for read in model.reads:
        of, _, end = read.site.hook("", read.way).rpartition(".")
        if folder == of and stem.endswith(end.removeprefix("hook_")):
            return read
    return None

"""The plan of a run: which model, which tokens, what is captured, and how it is cut into shards.

    RUN/plan.json             this plan; the folder is named after its SHA-256
    RUN/tokens.npy            [sequence, pos] uint32, documents packed one after the other, BOS in front of each
    RUN/documents.npy         [document, 2] uint64: first token and number of tokens, counted over all sequences
    RUN/vocabulary.json       the string of every token id; only where the model has a tokenizer
    RUN/metadata.jsonl, .npy  what else is known of every document; only where there is anything
    RUN/directions.safetensors          what reducers project onto; only where there are such
    RUN/shards/000042.safetensors       every captured tensor of its sequences, [sequence, pos, ...]
    RUN/shards/000042.json    the record of that shard, written last: without it the shard is not there

FORMAT.md says the same for readers of other programs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from t2lens.store.wants import Want

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
    "parse_plan",
    "read_plan",
    "sha256_of",
    "tensor_about",
]

FORMAT = "t2lens store 2"
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float64": torch.float64,
}
_HISTOGRAM = 8 * 2048  # bytes of the histogram of a column, about
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
# The files beside the plan, if they are there.
BESIDE = (
    "tokens.npy",
    "documents.npy",
    "vocabulary.json",
    "metadata.jsonl",
    "metadata.npy",
    "directions.safetensors",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides the bytes of a run, and the name that the model was loaded by.

    model: name and fingerprint (SHA-256 over config and weights). files: SHA-256 of each file beside the plan
    (`BESIDE`), of those there are. what: wants, as they were resolved in the model. dtype: of floating point tensors.
    batch_size, threads, device ("cpu", "cuda"): of a pass (others would round differently). tensors: key -> shape (of
    one sequence), dtype, and for readers: axes (a word for each), meaning and unit; where they are known, read (the
    name of the read that it belongs to) and labels: word of an axis -> what its entries are (the names of the sources;
    the positions, where not all were kept). metadata: names of what is known of documents. statistics: None, or in
    place of tensors their statistics are kept (`t2lens.store.tallies`): by_token (whether it counts by token), n_vocab,
    and store, the name of the run that they are of ("": the model runs).
    """

    model: dict[str, str]
    files: dict[str, str]
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
    metadata: tuple[str, ...] = ()
    statistics: dict[str, Any] | None = None
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
        return self.n_bytes / (self.n_sequences * self.n_pos)

    @property
    def n_bytes(self) -> int:
        """Of all shards together (statistics: at most), without the headers of the files."""
        last = self.n_shards - 1
        return last * self.bytes_of(0) + self.bytes_of(last)

    def bytes_of(self, shard: int) -> int:
        """Of what a shard holds (statistics: at most), without the header of the file."""
        n = len(self.rows(shard))
        if self.statistics is None:
            return n * self.bytes_per_sequence
        columns = sum(math.prod(of["shape"]) // self.n_pos for of in self.tensors.values())
        groups = 1 + self.n_pos
        if self.statistics["by_token"]:
            groups += min(self.statistics["n_vocab"], n * self.n_pos)
        return columns * (16 * groups + _HISTOGRAM) + 12 * n * self.n_pos

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
        inside = sorted(each.parent.name for each in Path(run).glob("*/plan.json"))[:3]
        hint = f" Folders in it that have one: {', '.join(inside)}." if inside else ""
        raise ValueError(f"{str(run)!r} is no run of t2lens capture: it has no plan.json.{hint}")
    plan, name = parse_plan(file.read_bytes(), str(file)), file.absolute().parent.name
    if name != plan.name and re.fullmatch("[0-9a-f]{16}", name):  # a folder may be given a name of one's own
        raise ValueError(f"{file} is damaged: it is not the plan that the folder {name} is named after.")
    return plan


def parse_plan(data: bytes, where: str) -> Plan:
    """The plan in the bytes of a plan.json. ValueError where they are none, or of another format."""
    try:
        plain = json.loads(data)
        found = plain.get("format")
        plan = None
        if found == FORMAT:
            plan = Plan(**{**plain, **{name: tuple(plain[name]) for name in ("what", "metadata")}})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where} is damaged ({error}).") from None
    if plan is None:
        raise ValueError(
            f"{where} has the format {found!r}, and this version of t2lens reads {FORMAT!r}: capture the corpus again, "
            "or read it with the version that wrote it."
        )
    return plan


def fingerprint(model: Transformer) -> str:
    """SHA-256 over the config and every weight with its name and dtype."""
    total = hashlib.sha256(json.dumps(model.cfg.to_dict(), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def sha256_of(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def tensor_about(model: Transformer, want: Want, n_pos: int) -> dict[str, Any]:
    """What a reader needs to know of a tensor besides its shape; see `Plan`."""
    point = model.hook_dict[want.hook]
    about: dict[str, Any] = {"axes": list(want.axes(point.shape.split())[1:])}
    about |= {"meaning": want.meaning(point.meaning), "unit": want.unit(point.unit)}
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

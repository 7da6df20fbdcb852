"""A folder of text files as training and validation tokens.

The last 5% of each file, cut at a line boundary, is held out: every model, tokenizer and baseline trained on a folder
sees the same training part and is judged on the same validation part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from t2lens.zoo.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

HELD_OUT = 0.05
Split = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A checked folder: file names in order, total bytes, and `sha256` over the contents (names do not matter)."""

    folder: Path
    names: tuple[str, ...]
    n_bytes: int
    sha256: str

    def texts(self, split: Split) -> Iterator[str]:
        """The split part of each file, one file in memory at a time."""
        for name in self.names:
            train, validation = split_text(_decode((self.folder / name).read_bytes()))
            yield train if split == "train" else validation


def split_text(text: str) -> tuple[str, str]:
    """Cut a text in front of the line that holds the character at 95%; in one long line, at that character."""
    at = int(len(text) * (1 - HELD_OUT))
    cut = text.rfind("\n", 0, at) + 1 or text.find("\n", at) + 1 or at
    return text[:cut], text[cut:]


def read_corpus(folder: str | Path) -> Corpus:
    """Check every .txt file below a folder. Empty files are passed over.

    Errors: ValueError that lists each file that is not UTF-8, cannot be read or points out of the folder, or says
    that there is no text at all.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"The corpus {str(folder)!r} is not a folder; expected a folder with .txt files.")
    total = hashlib.sha256()
    names, faults, n_bytes = [], [], 0
    for path in sorted(folder.rglob("*.txt")):
        name = path.relative_to(folder).as_posix()
        try:
            if not path.resolve().is_relative_to(folder.resolve()):
                raise ValueError("it is a link to a file outside the folder")
            data = path.read_bytes()
            text = _decode(data)
        except (OSError, ValueError) as error:
            faults.append(f"{name}: {error}")
            continue
        if text:
            names.append(name)
            n_bytes += len(data)
            total.update(hashlib.sha256(data).digest())
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise ValueError(
            f"{len(faults)} text file(s) in {str(folder)!r} cannot be used: {'; '.join(faults[:5])}{more}."
        )
    if not names:
        raise ValueError(f"The folder {str(folder)!r} holds no .txt file with text in it.")
    return Corpus(folder=folder, names=tuple(names), n_bytes=n_bytes, sha256=total.hexdigest())


def encode_split(corpus: Corpus, tokenizer: Tokenizer, split: Split) -> np.ndarray:
    """All tokens of a split in file order, [token], uint16 where the vocabulary fits, else uint32."""
    import numpy as np

    kind = np.uint16 if tokenizer.n_vocab <= 1 << 16 else np.uint32
    parts = (np.asarray(ids, kind) for text in corpus.texts(split) for ids in tokenizer.encode_long(text))
    return np.concatenate([np.zeros(0, kind), *parts])


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte 0x{data[error.start]:02X} at offset {error.start})") from None


def sample_texts(n: int | None = None) -> list[str]:
    """The first n (None: all 32) bundled passages of some 500 characters, half from the King James Bible and half from
    Shakespeare in turn, from the part that no bundled model was trained on: what analyses of text run on by default.
    ValueError unless 1 <= n <= 32.

    Example:
        >>> len(sample_texts(4))
        4
    """
    passages = (Path(__file__).parent / "sample.txt").read_text(encoding="utf-8").strip().split("\n\n%%\n\n")
    half = len(passages) // 2
    passages = [passage for pair in zip(passages[:half], passages[half:], strict=True) for passage in pair]
    if n is not None and not 1 <= n <= len(passages):
        raise ValueError(f"There are {len(passages)} bundled passages, so n must lie in 1..{len(passages)}, not {n}.")
    return passages[:n]

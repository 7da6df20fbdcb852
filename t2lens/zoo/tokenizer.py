"""Byte-level BPE tokenizer of the bundled models.

Every text is a sequence of UTF-8 bytes and every byte has a token, so encoding never fails and decoding gives the
text back exactly. Id 0 is "<|bos|>" and id 1 is "<|pad|>"; both only ever come from the program: the same characters
inside a user's text are ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from t2lens.files import write_file

if TYPE_CHECKING:
    import tokenizers

BOS, PAD = "<|bos|>", "<|pad|>"
N_VOCAB = 2048
_CHUNK = 1 << 16
_CUT = re.compile(r"(?<=\S)\n(?=\S)|(?<=\S)(?= \S)|(?<=[A-Za-z0-9])(?=[,.;:!?])")


def byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level BPE vocabulary stands for.

    Printable Latin-1 bytes stand for themselves; the others take the characters from 256 on, in order (the table
    that every byte-level BPE shares, so that a vocabulary can be written as printable text).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(other)}


def spelled(raw: bytes) -> str:
    """A token's bytes as text; those that are no whole character each as <0xF0>, as sentencepiece writes them.

    >>> spelled(" \u00e9".encode()), spelled("\u00e9".encode()[:1])
    (' \u00e9', '<0xC3>')
    """
    text = raw.decode("utf-8", errors="surrogateescape")
    return "".join(f"<0x{ord(char) - 0xDC00:02X}>" if "\udc80" <= char <= "\udcff" else char for char in text)


def chunks(text: str, size: int = _CHUNK) -> Iterator[str]:
    """Cut a text into pieces of about `size` characters that encode exactly like the whole.

    A cut is only made after a newline or in front of a space that stands alone between two other characters, or between
    a letter or digit and a mark: the pre-tokenizer ends a word there in any case, so no token crosses it. A text
    without such a place (ten million letters in a row) stays whole.
    """
    start = 0
    while start < len(text):
        found = _CUT.search(text, start + size)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end


class Tokenizer:
    """Encode text to ids and back.

    Example:
        >>> import t2lens
        >>> tokenizer = t2lens.load("standard").tokenizer
        >>> tokenizer.decode(tokenizer.encode("In the beginning"))
        'In the beginning'
    """

    bos_id = 0
    pad_id = 1

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        """`core` is a byte-level BPE of the `tokenizers` library with the two special tokens at ids 0 and 1.

        Errors: ValueError when it is not one.
        """
        byte_of = byte_of_char()
        vocab = core.get_vocab()
        self.n_vocab = len(vocab)
        names = sorted(vocab, key=vocab.__getitem__)
        if [vocab[name] for name in names] != list(range(self.n_vocab)) or names[:2] != [BOS, PAD]:
            raise ValueError(
                f"The tokenizer has {names[:2]} as its first two tokens, but the ids must run from 0 without a gap, "
                f"beginning with {BOS!r} and {PAD!r}."
            )
        if not set(byte_of) <= set(vocab) or not all(set(name) <= set(byte_of) for name in names):
            raise ValueError("The tokenizer is not a byte-level BPE that has a token for each of the 256 bytes.")
        # A special token inside a user's text is plain text: without this the library would turn it into id 0 or 1.
        core.encode_special_tokens = True
        self._core = core
        self._bytes = [bytes(byte_of[char] for char in name) for name in names]

    @classmethod
    def train(cls, texts: Iterable[str], n_vocab: int = N_VOCAB) -> Tokenizer:
        """Learn merges from texts. The same texts give the same tokenizer. Needs `n_vocab` >= 258."""
        from tokenizers import Tokenizer as Core
        from tokenizers import decoders, models, pre_tokenizers, trainers

        if n_vocab < 258:
            raise ValueError(f"A byte-level vocabulary needs at least 258 entries, but n_vocab is {n_vocab}.")
        core = Core(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=n_vocab,
            special_tokens=[BOS, PAD],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        core.train_from_iterator((piece for text in texts for piece in chunks(text)), trainer)
        return cls(core)

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """The tokenizer that `to_json` wrote. Errors: ValueError when the text is something else."""
        from tokenizers import Tokenizer as Core

        try:
            core = Core.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"The text is not a tokenizer.json of the tokenizers library ({error}).") from None
        return cls(core)

    def to_json(self) -> str:
        return json.dumps(json.loads(self._core.to_str()), ensure_ascii=True, separators=(",", ":"))

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json. Errors: ValueError naming the file when it is not one of ours."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"The tokenizer file {str(path)!r} cannot be used: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json atomically."""
        write_file(path, self.to_json().encode("ascii"))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without BOS. Errors: ValueError for a lone surrogate, which is not text."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"The text has a lone surrogate {text[error.start]!r} at character {error.start}, which UTF-8 cannot "
                "hold; expected valid Unicode text."
            ) from None
        if len(text) <= _CHUNK:
            return self._core.encode(text, add_special_tokens=False).ids
        return [token for ids in self.encode_long(text) for token in ids]

    def encode_long(self, text: str) -> Iterator[list[int]]:
        """The ids of a text of any length, some at a time: the library holds hundreds of bytes per token."""
        pieces = chunks(text)
        while some := list(islice(pieces, 16)):
            yield from self.encode_pieces(some)

    def encode_pieces(self, texts: list[str]) -> list[list[int]]:
        """Ids of several texts at once (faster than one by one)."""
        return [encoding.ids for encoding in self._core.encode_batch_fast(texts, add_special_tokens=False)]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of some ids, special tokens left out. Errors: ValueError for an id out of range."""
        checked = (self._check(token) for token in ids)
        return b"".join(self._bytes[token] for token in checked if token not in (self.bos_id, self.pad_id))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of some ids, special tokens left out. Bytes that are half a character become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def str_token(self, id: int) -> str:
        """Text of one id by itself, as `spelled`; a special token under its name, one that only a model has as <id>."""
        if (id := int(id)) >= self.n_vocab:
            return f"<{id}>"
        return spelled(self._bytes[self._check(id)])

    def str_tokens(self, ids: Iterable[int]) -> list[str]:
        return [self.str_token(token) for token in ids]

    def _check(self, token: int) -> int:
        token = int(token)
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"Token id {token} is out of range: the tokenizer has ids 0 to {self.n_vocab - 1}.")
        return token

"""Tokenizers of published models: any tokenizer.json, with the names of its special tokens from tokenizer_config.json.

Unlike our own (`t2lens.zoo.tokenizer`), a special token inside a text is that token: "[MASK]" is how one asks a masked
language model something.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t2lens.files import write_file
from t2lens.zoo.tokenizer import BOS, Tokenizer, byte_of_char, spelled

if TYPE_CHECKING:
    import tokenizers

__all__ = ["PublishedTokenizer", "load_tokenizer"]

CONFIG = "tokenizer_config.json"
_LONGEST = 1 << 25


class PublishedTokenizer:
    """Encode text to ids and back with a tokenizer.json of the `tokenizers` library.

    Attributes:
        n_vocab: ids run below it. bos_id: what a text begins with, or None where it begins with nothing.
        pad_id: fills batches; it is masked, so any id does where the tokenizer names none.
    """

    def __init__(self, core: tokenizers.Tokenizer, *, bos: str | None = None, pad: str | None = None) -> None:
        """bos, pad: names of tokens. Errors: ValueError when the vocabulary lacks one."""
        self._core, self._names = core, {"bos_token": bos, "pad_token": pad}
        vocab = core.get_vocab(with_added_tokens=True)
        for name in (bos, pad):
            if name is not None and name not in vocab:
                raise ValueError(f"The tokenizer has no token {name!r}, which {CONFIG} names.")
        self.n_vocab = max(vocab.values(), default=-1) + 1
        self.bos_id: int | None = None if bos is None else vocab[bos]
        self.pad_id: int = 0 if pad is None else vocab[pad]
        self._special = {id for id, token in core.get_added_tokens_decoder().items() if token.special}
        self._bytes = byte_of_char() if _mentions(json.loads(core.to_str()).get("decoder"), "ByteLevel") else None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without BOS. Errors: ValueError for a lone surrogate, which is not text."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"The text has a lone surrogate at character {error.start}; UTF-8 cannot hold it."
            ) from None
        with _no_panic():
            return self._core.encode(text, add_special_tokens=False).ids

    def encode_long(self, text: str) -> Iterator[list[int]]:
        """As of `Tokenizer`, but whole: nobody knows where an arbitrary tokenizer may be interrupted. Errors:
        ValueError for more than 2^25 characters, of which the library would hold gigabytes."""
        if len(text) > _LONGEST:
            raise ValueError(
                f"A document has {len(text):,} characters; this tokenizer takes a document whole, of at most "
                f"{_LONGEST:,}: cut it into several."
            )
        yield self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of some ids, special tokens left out."""
        with _no_panic():
            return self._core.decode([self._check(id) for id in ids], skip_special_tokens=True)

    def str_token(self, id: int) -> str:
        """Text of one id, by itself, as `spelled`; a special token under its name, an id without a token as <id>."""
        piece = self._core.id_to_token(self._check(id))
        if piece is None:
            return f"<{id}>"
        if id in self._special:
            return piece
        if self._bytes is None:
            return piece.replace("\u2581", " ")  # how sentencepiece writes a space
        if not all(char in self._bytes for char in piece):
            return piece  # an added token is written as it is
        return spelled(bytes(self._bytes[char] for char in piece))

    def str_tokens(self, ids: Iterable[int]) -> list[str]:
        return [self.str_token(id) for id in ids]

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json, and the names of the special tokens beside it."""
        names = {key: name for key, name in self._names.items() if name is not None}
        write_file(path, self._core.to_str().encode("utf-8"))
        write_file(Path(path).with_name(CONFIG), (json.dumps(names, indent=1) + "\n").encode())

    def _check(self, id: int) -> int:
        if int(id) < 0:
            raise ValueError(f"Token id {id} is out of range: ids count from 0.")
        return int(id)


@contextmanager
def _no_panic() -> Iterator[None]:
    """The library is Rust: what a strange tokenizer.json makes of a text may be a panic, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"The tokenizer cannot read this text ({str(error).splitlines()[0]}).") from None


def load_tokenizer(path: str | Path) -> Tokenizer | PublishedTokenizer:
    """Read a tokenizer.json: ours, or a published one with the tokenizer_config.json beside it.

    A text begins with the BOS token that the config names ([CLS] where it is that), unless it says `add_bos_token`
    false. Errors: ValueError naming the file when it cannot be used.
    """
    from tokenizers import Tokenizer as Core

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        try:
            with _no_panic():
                core = Core.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"it is not a tokenizer.json of the tokenizers library ({error}).") from None
        if core.id_to_token(0) == BOS:
            return Tokenizer(core)
        config = _config(path.with_name(CONFIG))
        bos = _name(config.get("bos_token")) or _name(config.get("cls_token"))
        bos = None if config.get("add_bos_token") is False else bos
        return PublishedTokenizer(core, bos=bos, pad=_name(config.get("pad_token")))
    except (OSError, ValueError) as error:
        raise ValueError(f"The tokenizer file {str(path)!r} cannot be used: {error}") from None


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else {}


def _name(token: Any) -> str | None:
    """A token as the config writes it: its name, or an object that holds it."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _mentions(part: Any, kind: str) -> bool:
    """Whether a part of a tokenizer.json is of a kind, or a sequence that holds one."""
    if isinstance(part, dict):
        return part.get("type") == kind or any(_mentions(value, kind) for value in part.values())
    return isinstance(part, list) and any(_mentions(value, kind) for value in part)

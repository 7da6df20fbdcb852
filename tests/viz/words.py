"""A tokenizer of whole words, and traces with awkward tokens, for tests of pictures."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import t2lens

from ..systems import tiny

__all__ = ["Words", "edited", "spoken"]


class Words:
    """One token per word; words keep their spelling, so that markup in them stays what was typed."""

    bos_id = 0
    pad_id = 1

    def __init__(self) -> None:
        self.words = ["<bos>", "<pad>"]

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in text.split(" "):
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.str_token(i) for i in ids if i > 1)

    def str_token(self, id: int) -> str:
        return self.words[id] if id < len(self.words) else f"<{id}>"


def spoken(system: str, text: str, *, name: str | None = None, bos: bool = True, **changes: Any) -> Any:
    """A trace of `text`, one token per word, on a tiny model of the system."""
    model = tiny(system, **changes)
    model.tokenizer = Words()
    if bos:
        return t2lens.trace(model, text, name=name or system)
    return t2lens.trace(model, model.to_tokens(text, prepend_bos=False)[0], name=name or system)


def edited(trace: Any, **values: Any) -> Any:
    """A copy of a trace with other numbers in some variables; its checks stay as they were."""
    data = trace.dataset.copy(deep=True)
    for name, array in values.items():
        data[name] = (data[name].dims, array, data[name].attrs)
    return t2lens.Trace(data, copy.deepcopy(trace._meta))

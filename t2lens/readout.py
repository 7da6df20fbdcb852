"""What the readout makes of a read, or of a part of the last one: the logit lens, and shares of one token's logit.

    lens = log softmax(unembed(ln_final(read)))      KL(final || lens) = sum over tokens of p_final (log p_final - lens)
    share = (w * part / scale) . W_U[:, token]       shares of all parts of the last read and the bias sum to the logit

The scale of a lens is that of its own read, the scale of a share that of the read in use. Everything that shows either,
traces and analyses alike, takes it from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = [
    "NEXT",
    "Followed",
    "chunks",
    "entropy",
    "lens",
    "lens_values",
    "likeliest",
    "logit_shares_of",
    "same_word",
    "token_id",
    "word",
]

NEXT = "next"
"""Follow the true next token at each position, and at the last one the likeliest."""

_ENTRIES = 2**22  # numbers of one float64 tensor [positions, vocab]


# --- tokens ----------------------------------------------------------------------------------------------------------


def token_id(model: Transformer, token: str | int) -> int:
    """The id of a token that is given as its text or its id; a model without tokenizer takes an id as text too.

    Raises:
        ValueError: a text that is not exactly one token (the message says which tokens it is), or no id of this model.
        TypeError: neither a text nor a whole number.
    """
    if isinstance(token, str) and model.tokenizer is None and token.strip().lstrip("-").isdecimal():
        token = int(token)
    if isinstance(token, str):
        pieces = model.to_str_tokens(token, prepend_bos=False)
        if len(pieces) != 1:
            said = f"the tokens {', '.join(map(repr, pieces))}; name one of them" if pieces else "no token"
            if pieces and len(model.to_str_tokens(f" {token}", prepend_bos=False)) == 1:
                said += f", or write {' ' + token!r}, as the word stands within a text"
            raise ValueError(f"{token!r} is not one token of this model but {said}.")
        return model.to_single_token(token)
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise TypeError(f"A token is its text or its id, not {type(token).__name__}.")
    if not 0 <= int(token) < model.cfg.d_vocab:
        raise ValueError(f"Token id {int(token)} is outside the vocabulary 0..{model.cfg.d_vocab - 1}.")
    return int(token)


def same_word(model: Transformer, text: str) -> int | None:
    """The id of a text that is one token of this model; None where it is none, or no text."""
    try:
        return token_id(model, text) if text else None
    except ValueError:
        return None


def word(model: Transformer, token: int) -> str:
    """A token as text; its id where the model has no tokenizer."""
    return str(token) if model.tokenizer is None else model.tokenizer.str_token(token)


def likeliest(logits: Tensor) -> Tensor:
    """[...] ids: the likeliest token by logits [..., V]; -1 where they are no prediction (NaN, or infinitely large)."""
    logprob = logits.double().log_softmax(dim=-1)
    return logits.argmax(dim=-1).masked_fill(logprob.isnan().any(dim=-1), -1)


@dataclass(frozen=True)
class Followed:
    """ids [T]: which token is followed at each position, -1 where there is none; text: the same in words."""

    ids: Tensor
    text: str

    @classmethod
    def of(cls, model: Transformer, tokens: Tensor, follow: str | int, last: str | int | None = None) -> Followed:
        """`follow` on one sequence [T]: "next", the text of a token or its id. In a bidirectional model, whose
        predictions are of the token that stands there, "next" is that one. Otherwise the last position has no true next
        token, and "next" is `last` there; None: the likeliest, once `ending` says which that is. ValueError, TypeError
        as `token_id`."""
        if follow == NEXT and isinstance(follow, str):
            if not model.cfg.causal:
                return cls(tokens, "the token at each position")
            end = -1 if last is None else token_id(model, last)
            told = "the likeliest" if last is None else repr(word(model, end))
            ids = torch.cat([tokens[1:], tokens.new_full((1,), end)])
            return cls(ids, f"the true next token; at the last position {told}")
        one = token_id(model, follow)
        return cls(torch.full_like(tokens, one), repr(word(model, one)))

    def ending(self, logits: Tensor) -> Followed:
        """With the likeliest token at the last position, by its logits [V], where none is followed there yet."""
        if self.ids[-1] >= 0:
            return self
        return replace(self, ids=torch.cat([self.ids[:-1], likeliest(logits).unsqueeze(0)]))


# --- the lens --------------------------------------------------------------------------------------------------------


def chunks(model: Transformer, n: int) -> Iterator[slice]:
    """0..n - 1 in slices of so many positions that one tensor [positions, vocab] stays small."""
    size = max(1, _ENTRIES // model.cfg.d_vocab)
    yield from (slice(first, first + size) for first in range(0, n, size))


def lens(model: Transformer, x: Tensor) -> Tensor:
    """[N, V] float64: log probabilities that the readout gives to reads x [N, D]."""
    return model.unembed(model.ln_final(x.unsqueeze(0)))[0].double().log_softmax(dim=-1)


def lens_values(own: Tensor, final: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Numbers [N] of predictions `own` [N, V], log probabilities: logprob and rank (1: the likeliest) of the targets
    [N], and kl from the model's own prediction `final` [N, V]. NaN where a prediction is."""
    of_target = own.gather(-1, target.unsqueeze(-1))
    rank = 1 + (own > of_target).count_nonzero(dim=-1).double()
    return {
        "logprob": of_target.squeeze(-1),
        "rank": rank.masked_fill(of_target.isnan().squeeze(-1), torch.nan),
        "kl": (final.exp() * (final - own)).sum(dim=-1).clamp(min=0.0),
    }


def entropy(own: Tensor) -> Tensor:
    """[N], nats, of log probabilities [N, V]."""
    return -(own.exp() * own).sum(dim=-1)


# --- shares of a logit -----------------------------------------------------------------------------------------------


def logit_shares_of(model: Transformer, parts: Tensor, read: Tensor, ids: Tensor) -> Tensor:
    """[P, ...] float64: what parts [P, ..., D] of the last read [..., D] add to the logits of the tokens ids [...], by
    the scale of that read. ValueError where the head is not linear."""
    normed = model.normed_shares(parts.double(), read.double())
    return (normed * model.W_U[:, ids].movedim(0, -1).to(normed.dtype)).sum(dim=-1)

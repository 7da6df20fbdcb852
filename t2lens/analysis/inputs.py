"""What every analysis is given: one or several sequences, with their padding, token strings and next tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.readout import token_id  # for callers of this module too
from t2lens.text import number_tensor

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["Batch", "check_finite", "gradients", "read_batch", "token_id"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Checked input of an analysis.

    Attributes:
        tokens: [B, T] ids.
        mask: [B, T] bool, False at padding, or None when nothing is padding.
        notices: sentences that the reader of a result must see (what was cut off, say).
        tokenizer: of the model, if it has one.
    """

    tokens: Tensor
    mask: Tensor | None
    notices: tuple[str, ...] = ()
    tokenizer: Any = None

    @cached_property
    def strings(self) -> tuple[tuple[str, ...], ...]:
        """Per sequence and position, the token as text (its id where the model has no tokenizer)."""
        word = str if self.tokenizer is None else self.tokenizer.str_token
        return tuple(tuple(map(word, row)) for row in self.tokens.tolist())

    @cached_property
    def valid(self) -> Tensor:
        """[B, T] bool: False at padding."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.mask is None else self.mask

    @cached_property
    def predicts(self) -> Tensor:
        """[B, T] bool: positions whose next token is there, so that a loss is known; never the last one."""
        known = torch.zeros_like(self.valid)
        known[:, :-1] = self.valid[:, :-1] & self.valid[:, 1:]
        return known

    @cached_property
    def next_tokens(self) -> Tensor:
        """[B, T] id of the token after each position; 0 where there is none (see `predicts`)."""
        return torch.cat([self.tokens[:, 1:], torch.zeros_like(self.tokens[:, :1])], dim=1)

    def count(self, column: int) -> int:
        """The position of a place of the first sequence, counted over its real tokens: padding does not move it."""
        return int(self.valid[0, :column].sum())

    def losses(self, logits: Tensor) -> Tensor:
        """Next-token losses [..., B, T] in nats, float64, of logits [..., B, T, V]; 0 where there is no next token."""
        logprob = logits.double().log_softmax(dim=-1)
        ids = self.next_tokens.expand(logits.shape[:-1]).unsqueeze(-1)
        return torch.where(self.predicts, -logprob.gather(-1, ids).squeeze(-1), 0.0)

    def mean(self, values: Tensor, where: Tensor | None = None) -> Tensor:
        """[...]: mean of values [..., B, T] over `where` (default: every position with a next token)."""
        where = self.predicts if where is None else where
        return (values * where).sum(dim=(-2, -1)) / where.sum().clamp(min=1)


@torch.inference_mode(False)  # tensors made under it could never meet a gradient
def read_batch(model: Transformer, input: Any, attention_mask: Any = None, *, losses: bool = False) -> Batch:
    """Check `input` for an analysis.

    Args:
        input: a text, a list of texts (padded on the right; a BOS token is prepended to each, as in training), or token
            ids [pos] or [batch, pos] with their `attention_mask`. What is longer than the context is cut off at its
            end, and `notices` says so.
        attention_mask: of token ids only, 1 at tokens and 0 at padding. Every sequence has a token.
        losses: whether the analysis needs next-token losses: at least two tokens, and a causal model.

    Raises:
        ValueError: an empty prompt, ids outside the vocabulary, a mask of another shape or that leaves nothing of a
            sequence, left padding in what is longer than the context, or (losses) a bidirectional model, or no position
            with a next token.
    """
    texts = _texts(input)
    if texts is not None:
        if attention_mask is not None:
            raise ValueError("Texts bring their own mask: give attention_mask with token ids only.")
        rows = [model.to_tokens(text)[0] for text in texts]
        width, pad = max(len(row) for row in rows), 0 if model.tokenizer is None else model.tokenizer.pad_id
        tokens = torch.stack([torch.cat([row, row.new_full((width - len(row),), pad)]) for row in rows])
        mask = torch.stack([torch.arange(width, device=row.device) < len(row) for row in rows])
    else:
        tokens = number_tensor(input, "Tokens")
        mask = None if attention_mask is None else number_tensor(attention_mask, "attention_mask")
        if tokens.ndim == 1:
            tokens, mask = tokens[None], mask[None] if mask is not None and mask.ndim == 1 else mask
    n_ctx, notices = model.cfg.n_ctx, []
    if tokens.ndim == 2 and tokens.shape[1] > n_ctx:
        n = tokens.shape[1]
        if mask is not None and mask.shape == tokens.shape and not bool(mask[:, 0].all()):
            raise ValueError(f"{n} places are more than the context of {n_ctx} holds; pad on the right, or give less.")
        notices.append(f"The longest prompt has {n} tokens; what is beyond the context of {n_ctx} is cut off.")
        tokens, mask = tokens[:, :n_ctx], None if mask is None else mask[:, :n_ctx]
    tokens, mask = model.prepare(tokens, mask)
    tokens = tokens.clone() if tokens.is_inference() else tokens
    if mask is not None:
        empty = [i for i, row in enumerate(mask) if not bool(row.any())]
        if empty:
            raise ValueError(f"Sequence {empty[0]} is padding throughout: its attention_mask has no 1.")
        real = mask.cumsum(dim=1)
        if bool(((real > 0) & (real < real[:, -1:]) & ~mask).any()):
            notices.append("A mask has padding between tokens: no next-token loss is counted across such a gap.")
        mask = mask.clone() if mask.is_inference() else mask
    batch = Batch(tokens=tokens, mask=mask, notices=tuple(notices), tokenizer=model.tokenizer)
    if losses:
        if not model.cfg.causal:
            raise ValueError("A bidirectional model sees the next token, so it has no next-token loss to analyse.")
        if not bool(batch.predicts.any()):
            raise ValueError("A next-token loss needs at least two tokens in a sequence.")
    return batch


@contextmanager
def gradients(model: Transformer) -> Iterator[None]:
    """A block in which gradients pass `model`, wherever it is called from; no parameter gets one.

    Raises:
        ValueError: weights that no gradient can pass.
    """
    if any(p.is_inference() for p in model.parameters()):
        raise ValueError(
            "The weights of this model were made or converted under torch.inference_mode, so that no gradient can pass "
            "them; load or convert it outside of that block."
        )
    with torch.inference_mode(False), torch.enable_grad():
        yield


def check_finite(values: Tensor, batch: Batch, what: str) -> None:
    """Raise ValueError where values [B, T, ...] are NaN or infinite at a real token: no sum gives them."""
    bad = ~values.isfinite().flatten(2).all(dim=-1) & batch.valid
    if bool(bad.any()):
        n, total = int(bad.sum()), int(batch.valid.sum())
        why = "; in float16 numbers end at 65504: use bfloat16 or float32" if values.dtype == torch.float16 else ""
        raise ValueError(
            f"{what} at {n} of {total} tokens are NaN or infinite, so no number made of them means anything{why}."
        )


def _texts(input: Any) -> list[str] | None:
    """The texts of the input, none of them empty, or None where it is token ids."""
    texts = [input] if isinstance(input, str) else input
    if not isinstance(texts, list | tuple):
        return None
    if not len(texts):
        raise ValueError("The prompt is empty: give a text or token ids.")
    if not isinstance(texts[0], str):
        return None
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"Prompt {i} is a {type(text).__name__}, while prompt 0 is a text.")
        if not text.strip():
            which = "The prompt" if len(texts) == 1 else f"Prompt {i}"
            raise ValueError(f"{which} is empty: type at least one word.")
    return list(texts)

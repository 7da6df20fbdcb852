"""Text in, text out: the one tokenisation path of plain, hooked and cached runs, and generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from t2lens.sublayers import DecodingCache

if TYPE_CHECKING:
    from t2lens.config import ModelConfig

__all__ = ["TextInterface", "TokenizerLike", "is_text", "number_tensor"]


def is_text(value: str) -> bool:
    """Whether a str can be written as UTF-8, as all text can: JSON can spell half a character, which cannot.

    Example:
        >>> is_text("a"), is_text(chr(0xD800))
        (True, False)
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class TokenizerLike(Protocol):
    """What a model needs of a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...  # None: a text begins with nothing
    @property
    def pad_id(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def str_token(self, id: int) -> str: ...


class TextInterface:
    """transformer-lens's text methods; mixed into `Transformer`. A BOS token is prepended unless asked otherwise."""

    cfg: ModelConfig
    tokenizer: TokenizerLike | None = None
    default_padding_side: Literal["left", "right"] = "left"

    def _tokenizer(self) -> TokenizerLike:
        if self.tokenizer is None:
            raise ValueError("This model has no tokenizer, so it takes token ids, not text.")
        return self.tokenizer

    def prepare(self, input: Any, attention_mask: Any = None, n_seen: int = 0) -> tuple[Tensor, Tensor | None]:
        """(tokens [batch, pos] int64, mask [batch, pos] bool or None) of ids, a text or a list of texts; all checks."""
        if isinstance(input, str) or (isinstance(input, Sequence) and len(input) and isinstance(input[0], str)):
            if attention_mask is not None:
                raise ValueError("Texts bring their own mask: give attention_mask with token ids only.")
            tokens, mask = self._pad([self._encode(t) for t in ([input] if isinstance(input, str) else input)])
        else:
            tokens = number_tensor(input, "Tokens", self._device())
            mask = None if attention_mask is None else number_tensor(attention_mask, "attention_mask", tokens.device)
        if tokens.ndim == 1:
            tokens, mask = tokens[None], mask[None] if mask is not None and mask.ndim == 1 else mask
        if tokens.ndim != 2 or tokens.numel() == 0:
            raise ValueError(f"Tokens must be [batch, pos] with at least one token, not of shape {list(tokens.shape)}.")
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(f"Tokens must be whole numbers, not {tokens.dtype}.")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.cfg.d_vocab:
            raise ValueError(
                f"Token id {low if low < 0 else high} is outside the vocabulary 0..{self.cfg.d_vocab - 1}."
            )
        if n_seen + tokens.shape[1] > self.cfg.n_ctx:
            raise ValueError(f"{n_seen + tokens.shape[1]} tokens are more than the context of {self.cfg.n_ctx} holds.")
        if mask is not None:
            if mask.shape != tokens.shape:
                raise ValueError(
                    f"attention_mask must have the shape {list(tokens.shape)} of the tokens, not {list(mask.shape)}."
                )
            if not bool(((mask == 0) | (mask == 1)).all()):
                odd = mask[(mask != 0) & (mask != 1)][0].item()
                raise ValueError(f"attention_mask holds 1 at tokens and 0 at padding, nothing else; it has {odd:g}.")
            mask = mask.bool()
            mask = None if bool(mask.all()) else mask
        return tokens.long(), mask

    def _device(self) -> torch.device:
        return self.embed.weight.device  # type: ignore[attr-defined]

    def _encode(self, text: str, prepend_bos: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise TypeError(f"Expected a text, got {type(text).__name__}.")
        tokenizer = self._tokenizer()
        return ([tokenizer.bos_id] if prepend_bos and tokenizer.bos_id is not None else []) + tokenizer.encode(text)

    def _pad(self, rows: list[list[int]], padding_side: str | None = None) -> tuple[Tensor, Tensor | None]:
        side = padding_side or self.default_padding_side
        if side not in ("left", "right"):
            raise ValueError(f"padding_side must be left or right, not {side!r}.")
        width = max(len(r) for r in rows)
        pad = self._tokenizer().pad_id
        gaps = [[pad] * (width - len(r)) for r in rows]
        tokens = torch.tensor([g + r if side == "left" else r + g for r, g in zip(rows, gaps, strict=True)])
        flags = [[False] * len(g) for g in gaps]
        real = [[True] * len(r) for r in rows]
        mask = torch.tensor(
            [g + r if side == "left" else r + g for r, g in zip(real, flags, strict=True)], dtype=torch.bool
        )
        return tokens.to(self._device()), None if bool(mask.all()) else mask.to(self._device())

    def to_tokens(
        self,
        text: str | list[str],
        prepend_bos: bool = True,
        padding_side: Literal["left", "right"] | None = None,
    ) -> Tensor:
        """Token ids [batch, pos] of a text or texts, padded on `padding_side` (with `pad_id`) where lengths differ.

        A padded batch needs its mask in the forward pass: pass the list of texts itself, or build
        `tokens != model.tokenizer.pad_id`. Texts over the context raise only when they are run.
        """
        return self._pad(
            [self._encode(t, prepend_bos) for t in ([text] if isinstance(text, str) else text)], padding_side
        )[0]

    def to_str_tokens(self, input: str | Tensor | Sequence[int], prepend_bos: bool = True) -> list[str]:
        """One string per token of a text or of ids [pos]."""
        ids = (
            self._encode(input, prepend_bos) if isinstance(input, str) else torch.as_tensor(input).reshape(-1).tolist()
        )
        return [self._tokenizer().str_token(i) for i in ids]

    def to_string(self, tokens: Tensor | Sequence[int]) -> str:
        """The text of ids [pos], special tokens left out."""
        return self._tokenizer().decode(torch.as_tensor(tokens).reshape(-1).tolist())

    def to_single_token(self, string: str) -> int:
        """The id of a string that is exactly one token; ValueError otherwise."""
        ids = self._encode(string, prepend_bos=False)
        if len(ids) != 1:
            raise ValueError(f"{string!r} is {len(ids)} tokens, not one.")
        return ids[0]

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """[..., d_model]: the unembedding column of each token."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        return self.W_U.T[torch.as_tensor(tokens)]  # type: ignore[attr-defined]

    @torch.no_grad()
    def generate(
        self,
        input: Any,
        max_new_tokens: int = 20,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        stop_at: int | None = None,
        seed: int = 0,
        use_cache: bool = True,
    ) -> Any:
        """Continue a text (returns the text) or token ids [batch, pos] (returns [batch, pos + new]).

        temperature 0 takes the likeliest token; otherwise samples from a generator seeded with `seed`. Rows of a batch
        of unequal lengths must be padded on the left (a list of texts is). Generation ends early at the context limit,
        or when every row has produced `stop_at`, which a row that has stopped repeats. `use_cache=False` runs a full
        pass per token: the same numbers.
        """
        tokens, mask = self.prepare(input, attention_mask)
        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "stop_at": stop_at, "seed": seed}
        steps = self.generate_steps(tokens, max_new_tokens, attention_mask=mask, use_cache=use_cache, **options)
        tokens = torch.cat([tokens, *(step for step, _ in steps)], dim=1)
        if mask is not None:
            mask = F.pad(mask, (0, tokens.shape[1] - mask.shape[1]), value=True)
        if isinstance(input, str):
            return self.to_string(tokens[0])
        if isinstance(input, Sequence) and len(input) and isinstance(input[0], str):
            keep = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
            return [self.to_string(row[real]) for row, real in zip(tokens, keep, strict=True)]
        return tokens

    @torch.no_grad()
    def generate_steps(
        self,
        input: Any,
        max_new_tokens: int = 20,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        stop_at: int | None = None,
        seed: int = 0,
        use_cache: bool = True,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`generate`, a token at a time: yields (next tokens [batch, 1], the logits [batch, vocab] behind them).

        Arguments and errors as there; nothing runs before the first step is asked for.

        Example:
            >>> import t2lens
            >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=1), seed=0)
            >>> steps = model.generate_steps([0, 7], 3, temperature=0)
            >>> all(int(step) == int(logits.argmax()) for step, logits in steps)
            True
        """
        if max_new_tokens < 0 or not temperature >= 0 or (top_k is not None and top_k < 1):
            raise ValueError("generate needs max_new_tokens >= 0, temperature >= 0 and top_k >= 1.")
        if not self.cfg.causal:
            raise ValueError("A bidirectional model reads the whole sequence at once; it cannot continue a text.")
        tokens, mask = self.prepare(input, attention_mask)
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("Generation continues after the last place, so padding must be on the left.")
        generator = torch.Generator(device=tokens.device).manual_seed(seed)
        cache = DecodingCache() if use_cache else None
        done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        step = tokens
        for _ in range(min(max_new_tokens, self.cfg.n_ctx - tokens.shape[1])):
            if cache is not None:
                logits = self.forward(step, mask if step is tokens else None, cache=cache)[:, -1]  # type: ignore[attr-defined]
            else:
                logits = self.forward(tokens, mask)[:, -1]  # type: ignore[attr-defined]
            step = _choose(logits.float(), temperature, top_k, generator)
            if stop_at is not None:
                step[done] = stop_at
            yield step, logits
            if cache is None:
                tokens = torch.cat([tokens, step], dim=1)
                mask = None if mask is None else F.pad(mask, (0, 1), value=True)
            if stop_at is not None:
                done |= step[:, 0] == stop_at
                if bool(done.all()):
                    break


def number_tensor(values: Any, what: str, device: torch.device | None = None) -> Tensor:
    """`values` as a tensor; ValueError in one sentence where they are not numbers in rows of one length."""
    try:
        return torch.as_tensor(values, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        given = type(values).__name__
        raise ValueError(f"{what} must be numbers in rows of one length, [batch, pos]; this {given} is not.") from None


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """[B, 1] next tokens from logits [B, vocab]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if not bool(logits.isfinite().all()):
        raise ValueError("The model's logits are NaN or infinite, so that no token can be drawn.")
    logits = logits / temperature
    if top_k is not None:
        floor = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)

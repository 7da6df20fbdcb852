"""A text continued a token at a time, with what the model said before each: probability, rank, entropy, alternatives.

    q(token) = softmax(logits / temperature) over the top_k likeliest      (temperature 0: the likeliest token)

Drawn from q; all numbers but `drawn_from` are of the model's own prediction p = softmax(logits).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.analysis.finding import Chart, Finding
from t2lens.analysis.inputs import Batch, check_finite, read_batch
from t2lens.analysis.layout import put, word
from t2lens.analysis.progress import progress
from t2lens.readout import entropy, lens_values

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["NewToken", "continue_text", "new_tokens"]


@dataclass(frozen=True, kw_only=True)
class NewToken:
    """A token that was added. probability, rank (1: the likeliest), entropy (nats): of the model's prediction before
    it. drawn_from: its probability in what it was drawn from. top_ids, top_probabilities: the likeliest ones there."""

    id: int
    probability: float
    rank: int
    entropy: float
    drawn_from: float
    top_ids: tuple[int, ...]
    top_probabilities: tuple[float, ...]


def new_tokens(
    model: Transformer,
    tokens: Any,
    n: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    top: int = 5,
    use_cache: bool = True,
) -> Iterator[NewToken]:
    """The next `n` tokens after ids [pos] or [1, pos], as `model.generate` makes them, each as soon as it is there.

    Ends early where the context is full. Arguments and errors as `continue_text`.
    """
    _check(n, top)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "seed": seed, "use_cache": use_cache}
    for step, logits in model.generate_steps(tokens, n, **options):
        yield _described(step[0], logits, temperature, top_k, min(top, model.cfg.d_vocab))


def continue_text(
    model: Transformer,
    input: Any,
    *,
    n: int = 20,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    top: int = 5,
    use_cache: bool = True,
) -> Finding:
    """Continue one text, and say for every new token how the model came to it.

    The tokens are those of `model.generate` with the same arguments.

    Args:
        input: one text, or token ids [pos] or [1, pos].
        n: how many tokens are added at most; it ends where the context is full.
        temperature: 0 takes the likeliest token; otherwise samples, from a generator seeded with `seed`.
        top_k: sample among so many of the likeliest tokens only.
        top: how many of the likeliest tokens are kept at each step.
        use_cache: False runs the whole text again for each token: the same numbers, and the only way under edits that
            need the whole sequence. A position counted from the end is then that of the text so far.

    Returns:
        A Finding. Its dataset, over the new tokens `new` (`token` is their text, `pos` where they stand):

            id, probability, rank, entropy(new)     of the model's prediction before the token; entropy in nats
            drawn_from(new)                         its probability in what it was drawn from
            top_id, top_token, top_probability(new, k)   the likeliest tokens there, likeliest first

    Raises:
        ValueError: n or top below 1, a temperature below 0, top_k below 1, several sequences, a bidirectional model, a
            prompt that fills the context, predictions that are not finite.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis import continue_text
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=8, d_model=16, n_layers=2), seed=0)
        >>> finding = continue_text(model, [0, 7, 3], n=20)
        >>> finding.dataset.sizes["new"], bool((finding["rank"] == 1).all())
        (5, True)
    """
    _check(n, top)
    batch = read_batch(model, input)
    if len(batch.tokens) != 1:
        raise ValueError(f"One text is continued at a time, not {len(batch.tokens)}.")
    room = model.cfg.n_ctx - batch.tokens.shape[1]
    if room < 1:
        raise ValueError(f"The prompt fills the context of {model.cfg.n_ctx} tokens: nothing can follow.")
    how = {"temperature": temperature, "top_k": top_k, "seed": seed}
    steps = new_tokens(model, batch.tokens, n, top=top, use_cache=use_cache, **how)  # type: ignore[arg-type]
    found = list(progress(steps, "Continuing the text", min(n, room)))
    return _finding(model, batch, found, n, temperature, top_k, seed)


def _check(n: int, top: int) -> None:
    for name, value in (("n", n), ("top", top)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on, not {value!r}.")


def _described(token: Tensor, logits: Tensor, temperature: float, top_k: int | None, top: int) -> NewToken:
    """token [1], logits [1, vocab]."""
    batch = Batch(tokens=token[None], mask=None)
    check_finite(logits[None], batch, "The logits")
    own = logits.double().log_softmax(dim=-1)
    values = lens_values(own, own, token)
    best = own[0].topk(top)
    drawn_from = torch.ones(())
    if temperature > 0:
        scaled = logits[0].double() / temperature
        if top_k is not None:
            scaled = scaled.masked_fill(scaled < scaled.topk(min(top_k, len(scaled))).values[-1], -torch.inf)
        drawn_from = scaled.softmax(dim=-1)[token[0]]
    return NewToken(
        id=int(token),
        probability=float(values["logprob"].exp()),
        rank=int(values["rank"]),
        entropy=float(entropy(own)),
        drawn_from=float(drawn_from),
        top_ids=tuple(best.indices.tolist()),
        top_probabilities=tuple(best.values.exp().tolist()),
    )


def _finding(
    model: Transformer,
    batch: Batch,
    found: list[NewToken],
    n: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> Finding:
    first = batch.tokens.shape[1]
    ids = [each.id for each in found]
    words = [word(model, i) for i in ids]
    top_words = [[word(model, i) for i in each.top_ids] for each in found]
    data = xr.Dataset(
        coords={
            "new": np.arange(len(found)),
            "k": np.arange(len(found[0].top_ids)),
            "token": ("new", np.array(words, dtype=str)),
            "pos": ("new", np.arange(first, first + len(found))),
        }
    )
    before = "of the model's prediction before the token"
    put(data, "id", ("new",), np.array(ids), "id of the token")
    put(data, "probability", ("new",), [x.probability for x in found], f"probability {before}", "probability")
    put(data, "rank", ("new",), [x.rank for x in found], "place among all tokens, 1 is the likeliest", "place")
    put(data, "entropy", ("new",), [x.entropy for x in found], f"entropy {before}", "nats")
    put(data, "drawn_from", ("new",), [x.drawn_from for x in found], "its probability in what it was drawn from")
    of_top, which = ("new", "k"), "the likeliest tokens, likeliest first"
    put(data, "top_id", of_top, np.array([x.top_ids for x in found]), f"ids of {which}")
    put(data, "top_token", of_top, np.array(top_words, dtype=str), which)
    put(data, "top_probability", of_top, np.array([x.top_probabilities for x in found]), f"probability of {which}")
    likeliest = [
        (words_[0], each.top_probabilities[0]) if each.rank > 1 else (None, None)
        for words_, each in zip(top_words, found, strict=True)
    ]
    # what is drawn is said in words that lead to the same text again
    drawn = (
        "the likeliest token each time" if temperature == 0 else f"drawn at temperature {temperature:g}, seed {seed}"
    )
    drawn += "" if temperature == 0 or top_k is None else f", among the {top_k} likeliest"
    full = f"It ends at the context of {model.cfg.n_ctx} tokens, {len(found)} of {n}." if len(found) < n else ""
    return Finding(
        title=f"{len(found)} token{'s' * (len(found) != 1)} more: {drawn}",
        dataset=data,
        columns=("position", "token", "probability", "rank", "entropy (nats)", "likeliest", "its probability"),
        rows=tuple(
            (first + i, word_, x.probability, x.rank, x.entropy, *best)
            for i, (word_, x, best) in enumerate(zip(words, found, likeliest, strict=True))
        ),
        notes=(
            "Probability, rank and entropy are those of the model's own prediction before the token"
            + (
                "."
                if temperature == 0
                else ", at temperature 1 and over all tokens; drawn_from is what was drawn from."
            ),
            "The likeliest token is named where another was drawn.",
            *([full] if full else []),
            *batch.notices,
        ),
        charts=(
            Chart(
                kind="bars",
                variable="probability",
                x="new",
                title="How likely each written token was",
                label="probability",
            ),
            Chart(
                kind="lines",
                variable="entropy",
                x="new",
                title="How open the choice of each token was",
                label="entropy of the prediction (nats)",
            ),
        ),
    )

"""The last read of one pass in parts: atoms, or the heads of attention atoms, each as it is unembedded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from t2lens.analysis.inputs import Batch, check_finite
from t2lens.mixing import ForwardRecord, contributions_of, contributions_of_parts
from t2lens.sublayers import Attention

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["Part", "PassInParts"]


@dataclass(frozen=True)
class Part:
    """An atom, or a piece of one: `head` is its index, -1 for what is constant in an attention atom, None: all of it.
    Without an atom it is the bias, what no part of the read accounts for."""

    atom: str = ""
    head: int | None = None

    @property
    def name(self) -> str:
        if not self.atom:
            return "bias"
        return self.atom + ("" if self.head is None else f".h{self.head}" if self.head >= 0 else ".bias")

    @classmethod
    def coords(cls, parts: list[Part]) -> dict[str, Any]:
        """Coordinates of the axis `part`."""
        heads = [float("nan") if part.head is None else float(part.head) for part in parts]
        names, atoms = [part.name for part in parts], [part.atom for part in parts]
        return {"part": names, "atom": ("part", atoms), "head": ("part", heads)}


@dataclass
class PassInParts:
    """A recorded pass of `batch`; `logits` [B, T, V].

    by: "atom", or "head" for attention atoms in heads. whole: attention atoms that are no sum of their heads, because a
    hook edits what they write; known after `parts` has run through.
    """

    model: Transformer
    batch: Batch
    by: str
    form: str
    whole: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        model, tokens, mask = self.model, self.batch.tokens, self.batch.mask
        if self.by not in ("atom", "head"):
            raise ValueError(f'by must be "atom" or "head", not {self.by!r}.')
        model.residual.linear_form(self.form)  # a form that it does not have is refused before anything runs
        self.record = ForwardRecord()
        self.tensors: Any = {}
        names = [name for each in model.head_hooks().values() for name in each] if self.by == "head" else []
        self.logits: Tensor
        if names:
            self.logits, self.tensors = model.run_with_cache(
                tokens, mask, names_filter=names, return_cache_object=False, record=self.record
            )
        else:
            self.logits = model(tokens, mask, record=self.record)
        check_finite(self.logits, self.batch, "The logits")

    def parts(self) -> Iterator[tuple[Part, Tensor]]:
        """(part, what it adds to what is unembedded [B, T, D], float64), in the order of atoms. Times W_U and with
        `model.logit_bias` they sum to the logits."""
        model, record = self.model, self.record
        last = record.read("out").double()
        wholes = contributions_of(model.residual, record, "out", self.form)  # [B, T, A, D]
        heads = model.heads_of(record, self.tensors) if self.by == "head" else ()
        pieces = contributions_of_parts(model.residual, record, "out", heads, self.form)
        for i, atom in enumerate(model.atoms):
            whole, attention = wholes[:, :, i].double(), self._attention(atom)
            split = next(pieces)[1].double() if attention is not None else None
            if split is not None and not self._sums_to(split, whole):
                self.whole.append(atom)
                split = None
            if split is None or attention is None:
                yield Part(atom), model.normed_shares(whole, last)
                continue
            for head, share in enumerate(split[:-1]):
                yield Part(atom, head), model.normed_shares(share, last)
            if bool(attention.b_O.any() or attention.output_bias.any()):
                yield Part(atom, -1), model.normed_shares(split[-1], last)

    @property
    def n_parts(self) -> int:
        """How many there will be, at most."""
        heads = [self._attention(atom) for atom in self.model.atoms]
        return sum(1 if each is None else each.cfg.n_heads + 1 for each in heads)

    def notes(self) -> list[str]:
        """What must be said about this split."""
        said = []
        if len(self.model.residual.forms) > 1:
            said.append(f"Contributions in the {self.form} form of {self.model.cfg.residual.describe()}.")
        if self.whole:
            said.append(f"Not split, because a hook edits what they write: {', '.join(self.whole)}.")
        return said

    def _attention(self, atom: str) -> Attention | None:
        """The module that wrote the atom, where it is to be split into heads."""
        if self.by != "head" or atom == "embed":
            return None
        layer, kind = atom.split(".")
        module = getattr(self.model.blocks[int(layer)], kind)
        return module if isinstance(module, Attention) else None

    def _sums_to(self, split: Tensor, whole: Tensor) -> bool:
        """Whether the pieces are the atom, to rounding."""
        valid = self.batch.valid.unsqueeze(-1)
        limit = min(0.1, 1e4 * torch.finfo(self.logits.dtype).eps) * float((whole * valid).abs().max())
        return float(((split.sum(dim=0) - whole) * valid).abs().max()) <= limit

"""How results are laid out: one sequence has no axis of its own, several have `sequence` in front of `pos`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from t2lens.analysis.inputs import Batch, token_id
from t2lens.readout import word

if TYPE_CHECKING:
    import xarray as xr

    from t2lens.model import Transformer

__all__ = ["chosen_tokens", "columns_of", "per_sequence", "per_token", "put", "token_axes", "token_coords", "word"]


def token_axes(batch: Batch) -> tuple[str, ...]:
    """The axes of a number per token: ("pos",), or ("sequence", "pos")."""
    return ("sequence", "pos") if len(batch.tokens) > 1 else ("pos",)


def token_coords(batch: Batch) -> dict[str, Any]:
    """Coordinates: pos, and the token string at each."""
    strings = np.array(batch.strings if len(batch.tokens) > 1 else batch.strings[0], dtype=str)
    return {"pos": np.arange(batch.tokens.shape[1]), "token": (token_axes(batch), strings)}


def per_token(values: Tensor, batch: Batch, axis: int = -2) -> np.ndarray:
    """numpy of [..., B, T]; the axis of sequences goes where there is one only."""
    return (values if len(batch.tokens) > 1 else values.squeeze(axis)).detach().cpu().numpy()


def per_sequence(values: Tensor, batch: Batch) -> np.ndarray:
    """numpy of [..., B], the same."""
    return per_token(values, batch, axis=-1)


def put(data: xr.Dataset, name: str, dims: Any, values: Any, meaning: str, unit: str = "") -> None:
    """Add a variable with its words."""
    data[name] = (tuple(dims), values, {"meaning": meaning, "unit": unit})


def columns_of(batch: Batch, pos: int) -> Tensor:
    """[B]: where token number `pos` of every sequence stands, counted over its real tokens (negative: from the end).

    Raises:
        ValueError: no whole number, or a sequence has no such token.
    """
    if isinstance(pos, bool) or not hasattr(pos, "__index__"):
        raise ValueError(f"pos must be a whole number, not {pos!r}.")
    pos, out = int(pos), []
    for i, valid in enumerate(batch.valid):
        real = valid.nonzero().squeeze(-1)
        if not -len(real) <= pos < len(real):
            which = f"sequence {i}" if len(batch.tokens) > 1 else "the sequence"
            raise ValueError(
                f"pos must lie in {-len(real)}..{len(real) - 1}, not {pos}: {which} has {len(real)} tokens."
            )
        out.append(real[pos])
    return torch.stack(out)


def chosen_tokens(model: Transformer, batch: Batch, given: Any, name: str) -> Tensor | None:
    """[B] ids of `given`: one token (text or id) for all sequences, or a list with one for each; None stays None."""
    if given is None:
        return None
    several = isinstance(given, list | tuple) or getattr(given, "ndim", 0) == 1
    tokens: list[Any] = list(given) if several else [given]
    each = [token_id(model, token) for token in tokens]
    if several and len(each) != len(batch.tokens):
        raise ValueError(f"{name} names {len(each)} tokens for {len(batch.tokens)} sequences; give one, or one each.")
    return torch.tensor(each if several else each * len(batch.tokens), device=batch.tokens.device)

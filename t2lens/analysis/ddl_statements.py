"""What a DDL audit found, in sentences with their numbers. They say what was measured on this model and this text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from t2lens.checks import Check

__all__ = ["statements"]

_CLEAR = 0.01  # of tokens or writes: a share that is worth a sentence


def statements(data: Any, refused: Sequence[Check], erases: bool, width: int) -> tuple[str, ...]:
    return tuple(_statements(data, refused, erases, width))


def _statements(data: Any, refused: Sequence[Check], erases: bool, width: int) -> Iterator[str]:
    for check in refused:
        yield (
            f"Regime names are refused, because a precondition fails: {check.name} ({check.meaning}) is "
            f"{check.value:.3g}, and must not exceed {check.limit:.3g}."
        )
    if not np.isfinite(data["beta"].values).all():
        return
    sites = data["site"].values.tolist()
    if not refused:
        yield from _regimes(data, sites, erases)
    yield from _gates(data, sites)
    yield from _errors(data, erases)
    yield from _reuse(data, sites, width)
    if erases:
        yield from _transport(data, width)
    else:
        yield "Nothing is erased, so the transport of the state to the readout is the identity."
    if "loss_effect" in data:
        yield from _effects(data, sites)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _regimes(data: Any, sites: list[str], erases: bool) -> Iterator[str]:
    shares = data["share"].mean("site").values
    named = ", ".join(f"{_percent(s)} {name}" for name, s in zip(data["regime"].values.tolist(), shares, strict=True))
    if not erases:
        yield f"Beta is the size of a write here and no regime, as nothing is erased: {named}."
        return
    negative = data["eigenvalue_negative"].values
    most = int(negative.argmax())
    yield (
        f"Writes by regime of beta: {named}. The eigenvalue 1 - beta is negative in {_percent(negative.mean())} of "
        f"writes, most at {sites[most]} ({_percent(negative[most])})."
    )


def _gates(data: Any, sites: list[str]) -> Iterator[str]:
    saturated, idle, std = (data[name].values for name in ("saturated", "idle", "beta_std"))
    found = [f"{site} ({_percent(x)})" for site, x in zip(sites, saturated, strict=True) if x > _CLEAR]
    yield (
        f"Saturated gates (logit beyond +-6, share of tokens): {', '.join(found)}."
        if found
        else f"No gate is saturated at more than {_CLEAR:.0%} of tokens (logit beyond +-6)."
    )
    constant = [site for site, x in zip(sites, std, strict=True) if x < 0.01]
    if constant:
        yield f"Gates that hardly look at the token (standard deviation of beta below 0.01): {', '.join(constant)}."
    still = [f"{site} ({_percent(x)})" for site, x in zip(sites, idle, strict=True) if x > _CLEAR]
    if still:
        yield f"Sublayers that write next to nothing, so that k is no direction (share of tokens): {', '.join(still)}."


def _errors(data: Any, erases: bool) -> Iterator[str]:
    before, after = data["error_before"].values, data["error_after"].values
    if erases:
        sites, left = data["site"].values, after / np.maximum(before, 1e-30)
        least, most = int(left.argmin()), int(left.argmax())
        yield (
            f"The error along k, |k^T X - v|, goes from {before.mean():.3g} to {after.mean():.3g} in the mean over "
            f"sublayers (to {_percent(left[least])} at {sites[least]}, to {_percent(left[most])} at {sites[most]}). "
            "That it shrinks follows from beta in (0, 2); by how much, |1 - beta|, is what the model has learned."
        )
    else:
        yield (
            f"The difference |k^T X - v| goes from {before.mean():.3g} to {after.mean():.3g} in the mean over "
            f"sublayers, and becomes smaller at {int((after < before).sum())} of {len(before)}: without erasing it is "
            "no error to shrink."
        )
    erased, written = data["erased"].values, data["written"].values
    energy = f"erased energy is {erased.sum() / max(written.sum(), 1e-30):.2f} of the written, and " if erases else ""
    yield (
        f"Summed over sublayers, {energy}a write changes the state by {_percent(data['change'].values.mean())} of its "
        f"length in the mean; the state lies along k with |k^T X| / |X| = {data['alignment'].values.mean():.3f}."
    )


def _reuse(data: Any, sites: list[str], width: int) -> Iterator[str]:
    cosine, overlap = data["cosine"].values, data["overlap"].values
    upper = np.triu_indices(len(sites), 1)
    pairs = cosine[upper]
    if not np.isfinite(pairs).any():
        return
    most = int(np.nanargmax(pairs))
    a, b = sites[upper[0][most]], sites[upper[1][most]]
    r = data.sizes["angle"]
    yield (
        f"Reuse of directions: mean |cos| of two sublayers at the same token is {np.nanmean(pairs):.3f} (random "
        f"directions in {width} dimensions: {np.sqrt(2 / (np.pi * width)):.3f}), largest {pairs[most]:.3f} between {a} "
        f"and {b}; their {r} leading directions over text overlap by {np.nanmean(overlap[upper]):.3f} (random: "
        f"{r / width:.3f})."
    )


def _transport(data: Any, width: int) -> Iterator[str]:
    small = data["transport_smallest"].sel(quantile=0.5).values
    last = data["survival"].sel(quantile=0.5).values
    if not np.isfinite(small[0]):
        return
    yield (
        f"Transport to the readout at one token: of the embedding's length {_percent(last[0])} is left (median), the "
        f"smallest singular value from there is {small[0]:.3g} and the effective rank "
        f"{float(data['transport_rank'].values[0]):.1f} of {width}; of a write along k, "
        f"{_percent(np.nanmean(last[1:]))} is left in the mean over sublayers, least {_percent(np.nanmin(last[1:]))}."
    )


def _effects(data: Any, sites: list[str]) -> Iterator[str]:
    loss, kl = data["loss_effect"].values, data["kl"].values
    by_loss = bool(np.isfinite(loss).all())
    effect = loss if by_loss else kl
    for i, kind in enumerate(data["kind"].values.tolist()):
        alone = effect[:-1, i]
        most = int(alone.argmax())
        low, high = (float(data[f"loss_{end}"].values[-1, i]) for end in ("low", "high"))
        interval = f" [{low:+.3f}, {high:+.3f}]" if by_loss and np.isfinite(low) else ""
        what = "loss" if by_loss else "KL"
        yield (
            f"Counterfactual {kind}: at all sublayers {what} {effect[-1, i]:+.3f}{interval} nats; alone, most at "
            f"{sites[most]} ({alone[most]:+.3f}), median {np.median(alone):+.4f}."
        )

"""Edits to try on a model: the ones that its residual system is asked about most, as far as it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from t2lens.edits.choices import operations_on, place_of, sites_of, sources_at, ways_at
from t2lens.edits.edit import Edit

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["presets"]


def presets(model: Transformer, site: str = "") -> dict[str, Edit]:
    """Words -> an edit at `site`, or at the site in the middle of those that have it.

    Example:
        >>> import t2lens
        >>> from t2lens.edits.presets import presets
        >>> found = presets(t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0))
        >>> {words: edit.describe() for words, edit in found.items()}["Silence an attention"]
        'Sets what 1.attn writes to zero.'
    """
    found: dict[str, Edit] = {}
    attending = [each for each in sites_of(model, "pattern") if each != "*"]
    if at := _near(attending, site):
        found["Silence an attention"] = Edit(target="atom", operation="zero", site=at)
    if at := _near([each for each in sites_of(model, "atom") if each.endswith(".mlp")], site):
        found["Silence an MLP"] = Edit(target="atom", operation="zero", site=at)
    weighed = [each for each in sites_of(model, "depth_weight") if each != "*" and len(_sources(model, each)) > 1]
    if at := _near(weighed, site):
        found |= _of_weights(model, at)
    if place_of(model, "gate", site=(at := _near(sites_of(model, "gate"), site)), name="beta"):
        found["A gate closed"] = Edit(target="gate", name="beta", operation="set", value=0, site=at)
        found["A gate that overwrites"] = Edit(target="gate", name="beta", operation="set", value=1, site=at)
    if at := _near(attending, site):
        found["An attention that sees only itself"] = Edit(target="pattern", operation="window", value=1, site=at)
    return found


def _of_weights(model: Transformer, site: str) -> dict[str, Edit]:
    way, names = _way(model, site), _sources(model, site)
    shares = model.residual.weights_sum_to_one
    found: dict[str, Edit] = {}
    if "embed" in names and shares:
        found["No embedding in a read"] = Edit(
            target="depth_weight", operation="zero_renormalise", site=site, way=way, sources=["embed"]
        )
    elif "embed" in names:
        found["No embedding in a read"] = Edit(
            target="depth_weight", operation="zero", site=site, way=way, sources=["embed"]
        )
    found["Even depth weights"] = Edit(
        target="depth_weight", operation="set", site=site, way=way, value=[1 / len(names)] * len(names)
    )
    if "swap" in operations_on(model, "depth_weight", site, None, way):
        found["Two sources swapped"] = Edit(
            target="depth_weight", operation="swap", site=site, way=way, sources=[names[0], names[-1]]
        )
    return found


def _way(model: Transformer, site: str) -> str | None:
    return (ways_at(model, "depth_weight", site) or [None])[0]


def _sources(model: Transformer, site: str) -> list[str]:
    return sources_at(model, "depth_weight", site, None, _way(model, site))


def _near(sites: list[str], site: str) -> str:
    """The site itself, else the one of the same block, else the one in the middle; "" where there is none."""
    single = [each for each in sites if each != "*"]
    of_block = [each for each in single if "." in site and each.split(".")[0] == site.split(".")[0]]
    return next(iter([each for each in single if each == site] or of_block), single[len(single) // 2] if single else "")

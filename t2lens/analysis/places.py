"""Where activations can be patched along the depth axis, and how the positions of two prompts are matched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from t2lens.analysis.variants import layer_of

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["PLACES", "Alignment", "Grid", "Place", "activation_places", "align", "grid_of"]

Alignment = str | Sequence[tuple[int, int]]
PLACES = ("atom", "read", "depth_weight", "head", "stream")


@dataclass(frozen=True)
class Place:
    """A tensor that can be patched: its hook point, and which entry of the axis behind the position (None: all)."""

    hook: str
    at: tuple[int, ...]  # where it stands in the grid of the result
    part: int | None = None

    def of(self, x: Tensor, pos: int) -> Tensor:
        """What stands at one position of x [pos, ...]."""
        return x[pos] if self.part is None else x[pos, self.part]


@dataclass(frozen=True)
class Grid:
    """The places of one kind: axes of the result before the position, their names, and what was left out and why."""

    axes: tuple[str, ...]
    names: dict[str, tuple[str, ...]]
    places: tuple[Place, ...]
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self.names[axis]) for axis in self.axes)

    @property
    def hooks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place.hook for place in self.places))


def activation_places(model: Transformer, what: str) -> dict[str, str]:
    """Label -> hook point of everything that `patch_activations(what=...)` patches in this model.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis.places import activation_places
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=1), seed=0)
        >>> activation_places(model, "atom")
        {'embed': 'hook_embed', '0.attn': 'blocks.0.hook_attn_out', '0.mlp': 'blocks.0.hook_mlp_out'}
    """
    grid = grid_of(model, what)
    return {grid.names[grid.axes[0]][place.at[0]]: place.hook for place in grid.places}


def grid_of(model: Transformer, what: str) -> Grid:
    if what not in PLACES:
        raise ValueError(f"what must be one of {', '.join(PLACES)}, not {what!r}.")
    if what == "head":
        return _heads(model)
    if what == "stream":
        return _streams(model)
    hooks: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    if what == "atom":
        writers = model.sites[:-1]
        hooks = {"embed": "hook_embed"} | {s.name: f"blocks.{s.layer}.hook_{s.kind}_out" for s in writers}
    else:
        stem = "read" if what == "read" else "depth_attn"
        hooks = {read.name: read.site.hook(stem, read.way) for read in model.reads}
        left = [name for name, hook in hooks.items() if hook not in model.hook_dict]
        hooks = {name: hook for name, hook in hooks.items() if hook not in left and name not in left}
        if what == "read" and left:
            notes = (f"Not read by any sublayer, so without a hook point of their own: {', '.join(left)}.",)
        if not hooks:
            raise ValueError(
                f'{_system(model)} has no depth weights to patch; what="read" or what="atom" patches what they '
                "would weigh."
            )
    places = tuple(Place(hook, (i,)) for i, hook in enumerate(hooks.values()))
    axis = "atom" if what == "atom" else "read"
    return Grid((axis,), {axis: tuple(hooks)}, places, notes)


def _heads(model: Transformer) -> Grid:
    """Every head of every attention sublayer (ShortSWA too), as what it mixed (hook_z)."""
    sites = [site for site in model.sites if f"blocks.{site.layer}.{site.kind}.hook_z" in model.hook_dict]
    counts = [getattr(model.blocks[site.layer or 0], site.kind).cfg.n_heads for site in sites]
    places = tuple(
        Place(f"blocks.{site.layer}.{site.kind}.hook_z", (i, head), head)
        for i, (site, count) in enumerate(zip(sites, counts, strict=True))
        for head in range(count)
    )
    names = {"site": tuple(site.name for site in sites), "head": tuple(map(str, range(max(counts))))}
    return Grid(("site", "head"), names, places)


def _streams(model: Transformer) -> Grid:
    """What is carried into every block and into the readout: one stream, or several."""
    n = model.cfg.n_layers
    for stem in ("streams", "resid"):
        hooks = [*(f"blocks.{layer}.hook_{stem}_pre" for layer in range(n)), f"blocks.{n - 1}.hook_{stem}_post"]
        hooks = [hook for hook in hooks if hook in model.hook_dict]
        if hooks:
            break
    else:
        raise ValueError(
            f'{_system(model)} carries no stream at a hook point of its own; what="read" patches what sublayers read.'
        )
    names = ["readout" if hook.endswith("_post") else f"block {layer_of(model, hook)}" for hook in hooks]
    if stem == "resid":
        notes = ()
        if any(len(model.residual.sources(site)) > 1 for site in model.sites):
            notes = ("Later reads take earlier sources beside the stream, so a patched stream is not all they see.",)
        places = tuple(Place(hook, (i,)) for i, hook in enumerate(hooks))
        return Grid(("boundary",), {"boundary": tuple(names)}, places, notes)
    count = len(model.residual.sources(model.sites[0]))
    places = tuple(Place(hook, (i, part), part) for i, hook in enumerate(hooks) for part in range(count))
    streams = tuple(f"stream{part}" for part in range(count))
    return Grid(("boundary", "stream"), {"boundary": tuple(names), "stream": streams}, places)


def _system(model: Transformer) -> str:
    what = model.cfg.residual.describe()
    return what[:1].upper() + what[1:]


def align(n_clean: int, n_corrupted: int, alignment: Alignment | None) -> tuple[tuple[int, int], ...]:
    """(clean position, corrupted position) pairs, in the order of the second.

    Args:
        alignment: None: position by position, for prompts of one length alone. "left": the same, counted from the
            start, as far as both go. "right": counted from the end. Or pairs [(clean, corrupted), ...], as text
            "0:0 2:3"; negative positions count from the end.

    Raises:
        ValueError: None for prompts of different lengths; a position that is not there; one corrupted position twice.

    Example:
        >>> align(3, 2, "right")
        ((1, 0), (2, 1))
        >>> align(3, 2, "2:0")
        ((2, 0),)
    """
    lengths = f"the prompts have {n_clean} and {n_corrupted} tokens"
    if alignment is None:
        if n_clean != n_corrupted:
            raise ValueError(
                f'Positions cannot be matched one by one: {lengths}; give alignment="left" (from the start), "right" '
                "(from the end), or pairs of positions [(clean, corrupted), ...]."
            )
        return tuple((i, i) for i in range(n_clean))
    if isinstance(alignment, str) and alignment in ("left", "right"):
        n = min(n_clean, n_corrupted)
        first = (0, 0) if alignment == "left" else (n_clean - n, n_corrupted - n)
        return tuple((first[0] + i, first[1] + i) for i in range(n))
    pairs = []
    for a, b in _pairs(alignment):
        for pos, n, which in ((a, n_clean, "clean"), (b, n_corrupted, "corrupted")):
            if not -n <= pos < n:
                raise ValueError(
                    f"The alignment names position {pos} of the {which} prompt, which has 0..{n - 1} (or from the end "
                    f"-{n}..-1); {lengths}."
                )
        pairs.append((a % n_clean, b % n_corrupted))
    targets = [b for _, b in pairs]
    twice = next((b for b in targets if targets.count(b) > 1), None)
    if twice is not None:
        raise ValueError(
            f"The alignment gives position {twice} of the corrupted prompt two partners; it can have one alone."
        )
    return tuple(sorted(pairs, key=lambda pair: pair[1]))


def _pairs(alignment: Any) -> list[tuple[int, int]]:
    words = alignment.replace(",", " ").split() if isinstance(alignment, str) else alignment
    found = []
    try:
        for word in words:
            a, b = word.split(":") if isinstance(word, str) else word
            found.append((int(a), int(b)))
    except (TypeError, ValueError):
        found = []
    if not found:
        raise ValueError(
            'alignment must be "left", "right" or pairs of positions, [(clean, corrupted), ...] or "0:0 2:3", '
            f"not {alignment!r}."
        )
    return found

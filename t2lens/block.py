"""One layer: its sublayers with what stands around them. `Transformer.forward` walks through it step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from t2lens.config import BucketAttention as BucketAttentionConfig
from t2lens.config import ModelConfig
from t2lens.hooks import HookPoint, NotAdditiveError
from t2lens.residual import Read, ResidualSystem, Site
from t2lens.residual.base import Reads
from t2lens.sublayers import MLP, Attention, BucketAttention, LocalConv, Norm, Places, RelativeTable

__all__ = ["Block", "through"]

_NORM_NAMES = {"local": "ln_local", "attn": "ln1", "mlp": "ln2"}
_CANON = {"attn": "A", "mlp": "C"}  # which of the Canon layers stands after the norm of a site
_CARRIED = "r"  # the way that no sublayer reads: what the block carries on


class Block(nn.Module):
    """The sublayers of one layer with their pre-norms and hook points; `Transformer.forward` walks through them.

    A site that reads in several ways has a hook point and a norm for each: hook_read_attn_q and ln1_q.
    """

    def __init__(
        self, cfg: ModelConfig, sites: tuple[Site, ...], residual: ResidualSystem, relative: RelativeTable | None
    ) -> None:
        super().__init__()
        self.sites = sites
        self.canon_sites = cfg.canon.sites if cfg.canon else ""
        self._additive = residual.is_additive
        for site in sites:
            for way in residual.ways(site):
                if way == _CARRIED:
                    continue
                what = Read(site, way).name
                meaning = f"what {what} reads, before its norm"
                read = HookPoint(shape="batch pos d_model", meaning=meaning, unit="stream")
                self.add_module(_with_way(f"hook_read_{site.kind}", way), read)
                self.add_module(_with_way(_NORM_NAMES[site.kind], way), Norm(cfg.norm, cfg.d_model))
                if cfg.canon is not None and site.kind in _CANON and _CANON[site.kind] in cfg.canon.sites:
                    name = _with_way(f"canon_{_CANON[site.kind].lower()}", way)
                    conv = LocalConv.canon(cfg.canon, cfg.d_model, f"{site.layer}.{name}", f"the normed read of {what}")
                    self.add_module(name, conv)
            out = HookPoint(shape="batch pos d_model", meaning=f"what {site.name} writes (the atom)", unit="stream")
            self.add_module(site.kind, self._sublayer(cfg, site, relative))
            self.add_module(f"hook_{site.kind}_out", out)

    @property
    def hook_out_is_single_residual_stream(self) -> bool:
        """transformer-lens's lenses ask for this before they read the carried stream as what will be unembedded. Where
        it is not, they would say so without naming what is right here: this error does."""
        if not self._additive:
            raise NotAdditiveError(
                "transformer_lens reads predictions off a stream that is a plain sum of what was written to it, which "
                "it is not in this model; use t2lens.analysis.logit_lens(model, tokens) instead, which is exact here."
            )
        return True

    @staticmethod
    def _sublayer(cfg: ModelConfig, site: Site, relative: RelativeTable | None) -> nn.Module:
        assert site.layer is not None
        if site.kind == "mlp":
            return MLP(cfg.mlp, cfg.d_model, site.layer, cfg.canon)
        attention = cfg.local if site.kind == "local" else cfg.attention
        assert attention is not None
        if isinstance(attention, BucketAttentionConfig):
            assert relative is not None
            return BucketAttention(attention, cfg.d_model, cfg.norm.eps, site.name, relative)
        canon = cfg.canon if site.kind == "attn" else None
        return Attention(attention, cfg.d_model, cfg.norm.eps, site.name, canon)

    def look(self, site: Site, reads: Reads) -> Any:
        """Every read through its hook point; what the block carries on has one of its own (hook_resid_pre)."""
        return _each(
            reads, lambda way, x: x if way == _CARRIED else through(self._part(f"hook_read_{site.kind}", way), x)
        )

    def norm(self, site: Site, reads: Reads) -> Any:
        """Every read that a sublayer takes through its norm."""
        if isinstance(reads, dict):
            reads = {way: x for way, x in reads.items() if way != _CARRIED}
        return _each(reads, lambda way, x: self._part(_NORM_NAMES[site.kind], way)(x))

    def run(self, site: Site, normed: Any, places: Places) -> Tensor:
        """The sublayer (after its Canon layer) and the hook point of what it writes; padding writes nothing."""
        sublayer = getattr(self, site.kind)
        if (letter := _CANON.get(site.kind)) and letter in self.canon_sites:
            normed = _each(normed, lambda way, x: self._part(f"canon_{letter.lower()}", way)(x, places))
        if site.kind == "mlp":
            out = sublayer(normed, places)
        elif isinstance(normed, dict):
            out = sublayer(normed["q"], normed["k"], normed["v"], places)
        else:
            out = sublayer(normed, normed, normed, places)
        return getattr(self, f"hook_{site.kind}_out")(places.without_padding(out))

    def _part(self, name: str, way: str) -> Any:
        return getattr(self, _with_way(name, way))


def _each(reads: Reads, do: Callable[[str, Tensor], Tensor]) -> Reads:
    """The same for every way of reading, or for the one read."""
    return {way: do(way, x) for way, x in reads.items()} if isinstance(reads, dict) else do("", reads)


def _with_way(name: str, way: str) -> str:
    return f"{name}_{way}" if way else name


def through(point: HookPoint, read: Tensor) -> Tensor:
    """A copy where a hook may write into the read, which can be the carried state itself: that must stay as it is."""
    return point(read.clone() if point.may_edit else read)

"""The reference transformer: embed -> (read, sublayer, write)* -> readout. Read `Transformer.forward` first.

A pre-norm decoder whose depth axis is a value: `cfg.residual` names the residual system, and the forward pass is the
same for all of them. B batch, T position, D d_model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from t2lens.block import Block, through
from t2lens.config import BucketAttention as BucketAttentionConfig
from t2lens.config import ModelConfig
from t2lens.hooks import ActivationCache, HookPoint
from t2lens.lens_surface import LensSurface
from t2lens.mixing import (
    TOLERANCE,
    ForwardRecord,
    Resume,
    account_by_read,
    contributions_of,
    contributions_of_parts,
)
from t2lens.residual import Gates, Read, ResidualSystem, Site, build_residual, make_sites
from t2lens.sublayers import Attention, DecodingCache, LocalMixer, Norm, Places, RelativeTable
from t2lens.text import TextInterface

__all__ = ["Transformer", "build"]


class Unembed(nn.Module):
    """The (normed) last read to logits: [B, T, D] @ W_U [D, vocab] + b_U. A tied head looks its weight up in the
    embedding. Head "mlm" puts dense, GELU and a LayerNorm before that, so its logits are not linear in the read."""

    def __init__(self, cfg: ModelConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self._tied_to = (embedding,) if cfg.tied else None  # in a tuple, so that the weight keeps one name
        if not cfg.tied:
            self.weight = nn.Parameter(torch.empty(cfg.d_vocab, cfg.d_model))
        self.bias = nn.Parameter(torch.zeros(cfg.d_vocab)) if cfg.head_bias else None
        self.is_linear = cfg.head == "linear"
        if cfg.head == "mlm":
            self.dense = nn.Linear(cfg.d_model, cfg.d_model)
            self.dense_norm = Norm(cfg.final_norm or cfg.norm, cfg.d_model)

    @property
    def W_U(self) -> Tensor:
        """[d_model, d_vocab]"""
        return (self._tied_to[0].weight if self._tied_to else self.weight).T

    @property
    def b_U(self) -> Tensor:
        """[d_vocab]"""
        return self.W_U.new_zeros(self.W_U.shape[1]) if self.bias is None else self.bias

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_linear:
            x = self.dense_norm(F.gelu(self.dense(x)))
        logits = x @ self.W_U
        return logits if self.bias is None else logits + self.bias


@dataclass
class _Live:
    """The record of the pass that runs, where one is kept of every pass."""

    record: ForwardRecord = field(default_factory=ForwardRecord)


class Transformer(TextInterface, LensSurface):
    """The reference model of one `ModelConfig`; hook names and shapes: `model.describe_hooks()`.

    Attributes:
        sites: every place in depth where something reads, `out` last.
        atoms: names of what is written, `embed` first.
        residual: the residual system.
    """

    residual: ResidualSystem
    loaded_from: Any = None  # `checkpoints.LoadedFrom` where the model was read from a published checkpoint
    _live: _Live | None = None
    hooked_tensors_are_final = True  # nothing that passed a hook point is ever written to

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        kinds: tuple[Literal["local", "attn", "mlp"], ...] = ("local", "attn", "mlp") if cfg.local else ("attn", "mlp")
        self.sites = make_sites(cfg.n_layers, kinds, parallel=cfg.block == "parallel")
        residual = build_residual(cfg, self.sites)
        self.atoms = residual.atoms
        self.embed = nn.Embedding(cfg.d_vocab, cfg.d_model)
        if cfg.positions == "learned":
            self.pos_embed = nn.Embedding(cfg.n_ctx, cfg.d_model)
        if cfg.embed_norm is not None:
            self.ln_embed = Norm(cfg.embed_norm, cfg.d_model)
        self.hook_embed = HookPoint(
            shape="batch pos d_model", meaning="token embedding (the atom embed)", unit="stream"
        )
        relative = None
        if isinstance(cfg.attention, BucketAttentionConfig):
            self.relative = relative = RelativeTable(cfg.attention, cfg.n_ctx, cfg.d_model, cfg.norm.eps)
        self.blocks = nn.ModuleList(
            Block(cfg, tuple(s for s in self.sites if s.layer == layer), residual, relative)
            for layer in range(cfg.n_layers)
        )
        self.hook_read_final = HookPoint(shape="batch pos d_model", meaning="what the readout reads", unit="stream")
        self.ln_final = Norm(cfg.final_norm or cfg.norm, cfg.d_model)
        self.unembed = Unembed(cfg, self.embed)
        self.residual = residual
        for name, point in residual.hook_points.items():
            self.mount(name, point)
        self.setup()

    def forward(
        self,
        input: Any,
        attention_mask: Tensor | None = None,
        *,
        return_type: Literal["logits", "loss", "both"] = "logits",
        stop_at_layer: int | None = None,
        cache: DecodingCache | None = None,
        record: ForwardRecord | None = None,
        resume: Resume | None = None,
    ) -> Any:
        """Logits [batch, pos, vocab], or the mean next-token loss in nats (padding excluded), or (logits, loss).

        Args:
            input: token ids [batch, pos] (or [pos], which becomes a batch of one), a text, or a list of texts.
            attention_mask: [batch, pos], 0 or False at padding; left and right padding change nothing at real tokens.
            stop_at_layer: stop before this block and return what the residual system carries there.
            cache: decoding cache; `input` then holds the tokens after those it has seen.
            record: filled with gates, reads and atoms (`t2lens.mixing`), step by step: at a hook point of a read it
                holds everything up to that read.
            resume: take the blocks before `resume.layer` from a recorded pass; `input` then has the rows that it asks
                for, and hook points of those blocks do not fire.

        Raises:
            ValueError: empty input, a token id outside the vocabulary, more than the context, a mask of another shape.
        """
        if return_type not in ("logits", "loss", "both"):
            raise ValueError(f"return_type must be logits, loss or both, not {return_type!r}.")
        tokens, mask = self.prepare(input, attention_mask, n_seen=cache.n_seen if cache else 0)
        if return_type != "logits" and not self.cfg.causal:
            raise ValueError("A bidirectional model sees the next token, so it has no next-token loss.")
        if return_type != "logits" and tokens.shape[1] < 2:
            raise ValueError("A next-token loss needs at least two tokens.")
        if cache is not None and not self.cfg.causal:
            raise ValueError("A bidirectional model reads the whole sequence at once; it has no decoding cache.")
        places = Places.of(tokens, mask, cache)
        record = self._recording(record)
        residual = self.residual
        if record is not None:
            record.tokens, record.valid = tokens, mask
            record.index, record.decoding = places.index, cache is not None
        if resume is None:
            embed, first = self._embed(tokens, places), 0
            state = residual.begin(embed, places)
        else:
            embed, first = resume.embed, resume.layer
            state = resume.state(residual, places)
        if record is not None:
            record.embed, record.first_values = embed, places.first_values
        for layer, block in enumerate(self.blocks[: self._depth(stop_at_layer)][first:], start=first):
            assert isinstance(block, Block)
            for sites in self._together(block.sites):
                seen = []
                for site in sites:
                    state, gates = self._reach(state, site)
                    reads = residual.read(state, site, gates)
                    if record is not None:
                        record.reaches(site, gates, reads)
                    seen.append((site, gates, block.look(site, reads)))
                for site, gates, reads in seen:
                    normed = block.norm(site, reads)
                    out = block.run(site, normed, places)
                    gates |= residual.write_gates(state, site, reads, normed, out)
                    state = residual.write(state, site, residual.atom(out, gates), gates)
                    if record is not None:
                        record.writes(site, reads, out)
            state = residual.carry(state, f"blocks.{layer}.hook_resid_post")
        if stop_at_layer is not None:
            return state
        site = self.sites[-1]
        gates = residual.read_gates(state, site)
        read = residual.read(residual.enter(state, site, gates), site, gates)
        assert isinstance(read, Tensor)
        if record is not None:
            record.reaches(site, gates, read)
        read = through(self.hook_read_final, read)
        if record is not None:
            record.writes(site, read)
        logits = self.unembed(self.ln_final(read))
        if return_type == "logits":
            return logits
        loss = next_token_loss(logits, tokens, mask)
        return loss if return_type == "loss" else (logits, loss)

    def _embed(self, tokens: Tensor, places: Places) -> Tensor:
        """The atom embed [B, T, D]: what enters the depth axis, zero at padding."""
        embed = self.embed(tokens)
        if self.cfg.positions == "learned":
            embed = embed + self.pos_embed(places.index)
        if self.cfg.embed_norm is not None:
            embed = self.ln_embed(embed)
        return self.hook_embed(places.without_padding(embed))

    def _together(self, sites: tuple[Site, ...]) -> Iterable[tuple[Site, ...]]:
        """Sites that read before any of them writes: one at a time, or the whole block where it is parallel."""
        return (sites,) if self.cfg.block == "parallel" else ((site,) for site in sites)

    def _reach(self, state: Any, site: Site) -> tuple[Any, Gates]:
        """The state as `site` reads it, and the gates of that read, which are made of the state that hooks have seen;
        but where the read replaces the state, hooks see what it was replaced with."""
        residual = self.residual
        replaces = type(residual).enter is not ResidualSystem.enter
        state = state if replaces else self._observe(state, site)
        gates = residual.read_gates(state, site)
        return (self._observe(residual.enter(state, site, gates), site) if replaces else state), gates

    def _observe(self, state: Any, site: Site) -> Any:
        """Where the system carries one single stream, it passes transformer-lens's names for it."""
        if site.opens:
            state = self.residual.carry(state, f"blocks.{site.layer}.hook_resid_pre")
        if site.kind == "mlp":
            state = self.residual.carry(state, f"blocks.{site.layer}.hook_resid_mid")
        return state

    def _depth(self, stop_at_layer: int | None) -> int:
        n = self.cfg.n_layers
        if stop_at_layer is None:
            return n
        if not -n <= stop_at_layer <= n:
            raise ValueError(f"stop_at_layer must lie in 0..{n} (or count from the end), not {stop_at_layer}.")
        return stop_at_layer % n if stop_at_layer < 0 else stop_at_layer

    # --- accounting
    @torch.no_grad()
    def record(self, input: Any, attention_mask: Tensor | None = None) -> ForwardRecord:
        """Gates, reads and atoms of one forward pass (hooks that are attached act)."""
        record = ForwardRecord()
        self.forward(input, attention_mask, record=record)
        return record

    @contextmanager
    def recording(self) -> Iterator[Callable[[], ForwardRecord]]:
        """Inside, every pass keeps a record. Yields a function that gives the record of the pass that runs (or ran
        last), for hooks that need the account of the pass they are in."""
        before = self._live
        self._live = live = before or _Live()
        try:
            yield lambda: live.record
        finally:
            self._live = before

    def _recording(self, record: ForwardRecord | None) -> ForwardRecord | None:
        """The record of the pass that begins: the caller's, or one that `recording` asks for."""
        if self._live is not None:
            record = self._live.record = ForwardRecord() if record is None else record
        return record

    def resume(self, record: ForwardRecord, layer: int, rows: Any = None, *, return_type: str = "logits") -> Any:
        """Run a recorded pass again from block `layer` on (n_layers: only the readout), with the hooks that are
        attached now: logits [R, pos, vocab], or as `return_type` says.

        Args:
            rows: [R] int64, the row of the recorded batch that each new row goes on from; by default all of them once.
                Hooks of a pass with more rows than the record can do something else in each.

        The result equals that of the whole pass where no hook acts before block `layer` (to rounding). Half of the
        work of an average intervention is what comes before it, which this saves.

        Raises:
            ValueError: no such layer or row, or a record that does not hold what comes before `layer`.
        """
        resume = Resume.of(record, layer, rows, self.sites)
        valid = None if record.valid is None else record.valid[resume.rows]
        kwargs: dict[str, Any] = {"return_type": return_type, "resume": resume}
        return self(resume.tokens, valid, **kwargs)

    @torch.no_grad()
    def decompose(
        self,
        record: ForwardRecord,
        read: str = "out",
        *,
        by: Literal["atom", "head"] = "atom",
        form: str = "additive",
        tensors: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, list[str]]:
        """Exact decomposition of one read of a recorded pass: (parts [part, batch, pos, d_model], names of the parts).

        Args:
            read: name of the read, one of `[r.name for r in model.reads]`.
            by: "atom", or "head": attention atoms in their heads (`2.attn.h0`) and what is constant (`2.attn.bias`,
                where the sublayer has biases). Needs `tensors`.
            form: as in `t2lens.mixing_matrix`.
            tensors: what passed `hook_z` of every attention sublayer (and hook_gate, where there is one), by name.

        Raises:
            KeyError: no such read. ValueError: no such form or `by`, or a hook edited the stream, the read or what an
                attention sublayer wrote, so that no sum of parts gives it.
        """
        if by not in ("atom", "head"):
            raise ValueError(f'by must be "atom" or "head", not {by!r}.')
        wholes = contributions_of(self.residual, record, read, form).movedim(-2, 0)
        names = list(self.atoms)
        if by == "atom":
            return wholes, names
        heads = _summing(record, self.heads_of(record, tensors or {}))
        split = dict(contributions_of_parts(self.residual, record, read, heads, form))
        parts, labels = [], []
        for name, whole in zip(names, wholes, strict=True):
            heads = split.get(name)
            if heads is None:
                parts.append(whole[None])
                labels.append(name)
                continue
            constant = bool(heads[-1].any())
            parts.append(heads if constant else heads[:-1])
            labels += [*(f"{name}.h{i}" for i in range(len(heads) - 1)), *([f"{name}.bias"] if constant else [])]
        return torch.cat(parts), labels

    def head_hooks(self) -> dict[str, tuple[str, ...]]:
        """Attention atom -> the hook points that tell what its heads wrote: z, and a gate where there is one."""
        found = {}
        for site in self.sites[:-1]:
            if isinstance(part := self._sublayer(site), Attention):
                stem = f"blocks.{site.layer}.{site.kind}.hook_"
                found[site.name] = (f"{stem}z", *([f"{stem}gate"] if hasattr(part, "hook_gate") else []))
        return found

    def heads_of(self, record: ForwardRecord, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(atom, what each of its heads wrote, the constant last [H + 1, B, T, D]) of attention atoms, from what passed
        `head_hooks`. Zero at padding. They sum to the atom unless a hook edits what the sublayer writes."""
        hooks = self.head_hooks()
        for step in record.steps:
            if step.out is None or (needed := hooks.get(step.site.name)) is None:
                continue
            if missing := [name for name in needed if name not in tensors]:
                raise KeyError(f'by="head" needs {" and ".join(missing)}, which this cache does not have.')
            part = self._sublayer(step.site)
            shape = (*step.out.shape[:2], -1, part.cfg.d_head)
            heads = part.by_head(*(tensors[name].reshape(shape) for name in needed)).to(step.out.dtype)
            yield step.site.name, heads if record.valid is None else heads * record.valid.unsqueeze(-1)

    @torch.no_grad()
    def mixing_of(self, record: ForwardRecord) -> Tensor | None:
        """[read, atom, batch, pos]: the mixing matrix of a recorded pass where it gives every read exactly, or None:
        coefficients are no scalars, or a hook edited the stream or a read."""
        if self.residual.coefficients() != "scalar":
            return None
        rows = []
        for account in account_by_read(self.residual, record):
            wanted = record.read(account.read.name)
            if float((account.total() - wanted).abs().max()) > TOLERANCE * float(wanted.abs().max()):
                return None
            rows.append(account.mixing())
        return torch.stack(rows)

    def run_with_cache(self, *args: Any, **kwargs: Any) -> tuple[Any, ActivationCache | dict[str, Tensor]]:
        """As in transformer-lens; a run that caches everything also keeps the record that `cache.decompose` needs."""
        everything = all(kwargs.get(name) is None for name in ("names_filter", "stop_at_layer", "pos_slice"))
        record = ForwardRecord() if everything and "record" not in kwargs else None
        if record is not None:
            kwargs["record"] = record
        out, cache = super().run_with_cache(*args, **kwargs)
        if isinstance(cache, ActivationCache) and record is not None:
            cache.record = record.detach()  # like the cached tensors, so that it holds no graph in memory
        return out, cache

    # --- facts about the model
    @property
    def n_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def reads(self) -> tuple[Read, ...]:
        """Every read in order: one per site, or one per way where a site reads in several."""
        return self.residual.reads

    def sources(self) -> dict[str, list[str]]:
        """read name -> names of the sources its depth weights run over."""
        return {read.name: [s.name for s in self.residual.sources(read.site)] for read in self.reads}

    def source_order(self) -> list[str]:
        """Every source of every read, in the order of writing; those whose content moves (a partial sum) come last."""
        held: dict[str, set[tuple[str, ...]]] = {}
        for read in self.reads:
            for source in self.residual.sources(read.site):
                held.setdefault(source.name, set()).add(source.atoms)
        return sorted(held, key=lambda name: len(held[name]) > 1)  # sorted is stable

    def depth_weight_hooks(self) -> dict[str, str | None]:
        """read name -> the hook point of its depth weights; None where it holds every source with weight 1."""
        names = {read.name: read.site.hook("depth_attn", read.way) for read in self.reads}
        return {read: name if name in self.hook_dict else None for read, name in names.items()}

    def logit_shares(self, parts: Tensor, read: Tensor) -> Tensor:
        """What parts [..., B, T, D] of the last read [B, T, D] add to the logits [..., B, T, vocab], by the recorded
        scale of the final norm; with `logit_bias` they sum to the logits. ValueError where the head is not linear."""
        shares = self.normed_shares(parts, read)
        return shares @ self.W_U.to(shares.dtype)

    def normed_shares(self, parts: Tensor, read: Tensor) -> Tensor:
        """The same before the unembedding: [..., B, T, D]; times W_U they are `logit_shares`."""
        if not self.unembed.is_linear:
            raise ValueError("The logits of a masked-language-model head are not a sum of shares of the last read.")
        return self.ln_final.share(parts, self.ln_final.scale(read))

    @property
    def logit_bias(self) -> Tensor:
        """[vocab]: the part of the logits that no read accounts for."""
        return self.b_U if self.ln_final.b is None else self.ln_final.b @ self.W_U + self.b_U

    @property
    def W_E(self) -> Tensor:
        """[d_vocab, d_model]"""
        return self.embed.weight

    @property
    def W_U(self) -> Tensor:
        """[d_model, d_vocab]"""
        return self.unembed.W_U

    @property
    def b_U(self) -> Tensor:
        """[d_vocab]"""
        return self.unembed.b_U

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fresh weights from `generator`: embeddings N(0, 0.02), matrices N(0, 0.5/sqrt(D)), output projections
        a further 1/sqrt(L) smaller, the output of ShortSWA and what the residual system says at their identity."""
        std = 0.5 / math.sqrt(self.cfg.d_model)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                scale = std / math.sqrt(self.cfg.n_layers) if name.endswith(".output") else std
                module.weight.data.normal_(0.0, scale, generator=generator)
                if module.bias is not None:
                    module.bias.data.zero_()
                if name.endswith(".local.output"):
                    module.weight.data.zero_()
            elif isinstance(module, LocalMixer):
                module.reset_parameters(generator)
        self.embed.weight.data.normal_(0.0, 0.02, generator=generator)
        if self.cfg.positions == "learned":
            self.pos_embed.weight.data.normal_(0.0, 0.02, generator=generator)
        if isinstance(self.cfg.attention, BucketAttentionConfig):
            self.relative.weight.data.normal_(0.0, 0.02, generator=generator)
        if not self.cfg.tied:
            self.unembed.weight.data.normal_(0.0, std, generator=generator)
        reset = getattr(self.residual, "reset_parameters", None)
        if reset is not None:
            reset(generator)


def _summing(record: ForwardRecord, heads: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same heads; ValueError where they do not sum to what was written."""
    written = {step.site.name: step.out for step in record.steps}
    for name, each in heads:
        out = written[name]
        assert out is not None
        if float((each.sum(dim=0) - out).abs().max()) > 0.1 * float(out.abs().max()):
            raise ValueError(f'A hook edits what {name} writes, so it is no sum of heads; use by="atom".')
        yield name, each


def next_token_loss(logits: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Mean cross entropy in nats of token t+1 under the logits at t, over pairs of real tokens."""
    flat = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    if mask is None:
        return flat.mean()
    both = (mask[:, :-1] & mask[:, 1:]).flatten().to(flat.dtype)
    return (flat * both).sum() / both.sum()


@torch.inference_mode(False)  # weights made under it could never have a gradient
def build(cfg: ModelConfig, seed: int = 0) -> Transformer:
    """A fresh reference model in float32 on the CPU, in eval mode. The same seed gives the same weights.

    Example:
        >>> import t2lens
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=3, residual=t2lens.residual.AttnRes())
        >>> t2lens.build(cfg, seed=0)([[0, 7, 3, 7, 9]]).shape
        torch.Size([1, 5, 50])
    """
    model = Transformer(cfg)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model.eval()

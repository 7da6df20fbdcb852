"""The variables of a trace: what `t2lens.trace` makes of the record of one pass, labelled, absent things NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from t2lens.edits import Marks
from t2lens.mixing import ForwardRecord, account_by_read
from t2lens.readout import Followed, chunks, lens, lens_values, logit_shares_of, word
from t2lens.residual import Read, by_way

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["ATTENTION", "Account", "account_of", "depth_weights", "edit_effect", "followed_variables", "variables_of"]

ATTENTION = (("sequence_attention", "attn"), ("local_attention", "local"))
"""Variables of attention over positions, and the kind of sublayer that each is of."""

_TOP = 5  # predicted tokens kept per position


def _array(x: Tensor) -> np.ndarray:
    """numpy of the trace's dtype, see `_kept`."""
    return x.detach().to(_kept(x)).cpu().numpy()


@dataclass(frozen=True, kw_only=True)
class Account:
    """What every read is made of: one walk over the record, from which the variables and their checks are taken.

    mixing, length: [read, pos, atom], NaN for atoms not written before the read, and where an edit replaced what is
    carried. off: name of a check -> the largest error of what is summed, relative to the read; without "mixing" where
    coefficients are not one number per token. last: contributions [A, 1, T, D] of the last read.
    """

    mixing: np.ndarray
    length: np.ndarray
    off: dict[str, float]
    last: Tensor


def account_of(model: Transformer, record: ForwardRecord, form: str, touched: Marks, dtype: Any) -> Account:
    n_pos = record.atoms[0].shape[1]
    mixing = np.full((len(model.reads), n_pos, len(model.atoms)), np.nan, dtype)
    length, worst, last = mixing.copy(), 0.0, torch.empty(0)
    for i, account in enumerate(account_by_read(model.residual, record, form)):
        read, there = account.read, account.read.site.seen + 1  # atoms written before this read
        if read.name not in touched.lost:
            mixing[i][:, :there] = _array(account.mixing()[:there, 0].T)
            length[i][:, :there] = _array(account.lengths()[:there, 0].T)
            # a read as its contributions must give it: before an edit of the read itself
            made = (record.made if read.name in touched.reads else record.reads)[read.name]
            error = float((account.total() - made).abs().max() / made.abs().max().clamp(min=1e-30))
            worst = error if not error <= worst else worst  # keeps NaN, which `max` may drop
        if read.site.kind == "out":
            last = account.contributions()
    off = {"recombination": worst}
    if model.residual.linear_form(form).coefficients() == "scalar":
        off["mixing"] = worst  # what is summed is the row of M times the atoms
    return Account(mixing=mixing, length=length, off=off, last=last)


def variables_of(
    model: Transformer,
    record: ForwardRecord,
    tokens: Tensor,
    logits: Tensor,
    patterns: dict[str, Tensor],
    account: Account,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(variables, coordinates)"""
    residual, n_pos = model.residual, tokens.shape[1]
    sources = model.source_order()
    reads = [read.name for read in model.reads]
    dtype = np.float64 if logits.dtype == torch.float64 else np.float32
    weight = np.full((len(reads), n_pos, len(sources)), np.nan, dtype)
    own = depth_weights(model, record)
    for i, read in enumerate(model.reads):
        columns = [sources.index(s.name) for s in residual.sources(read.site)]
        weight[i][:, columns] = _array(own[read.name][0]) if read.name in own else 1.0
    logprob = logits[0].double().log_softmax(dim=-1)
    top = logprob.topk(min(_TOP, logprob.shape[-1]), dim=-1)
    loss = np.full(n_pos, np.nan)
    if model.cfg.causal:
        loss[1:] = -logprob[:-1].gather(-1, tokens[0, 1:, None]).squeeze(-1).cpu().numpy()
    decode = str if model.tokenizer is None else model.tokenizer.str_token
    out: dict[str, Any] = {
        "depth_weight": (
            ("read", "pos", "source"),
            weight,
            {"meaning": "the system's own weights of a read"},
        ),
        "mixing": (
            ("read", "pos", "atom"),
            account.mixing,
            {"coefficients": "scalar" if "mixing" in account.off else "energy-weighted mean"},
        ),
        "contribution_norm": (("read", "pos", "atom"), account.length, {"unit": "stream"}),
        "residual_norm": (
            ("read", "pos"),
            np.stack([_array(record.reads[name][0].norm(dim=-1)) for name in reads]),
            {"unit": "stream"},
        ),
        "atom_norm": (
            ("atom", "pos"),
            np.stack([_array(atom[0].norm(dim=-1)) for atom in record.atoms]),
            {"unit": "stream"},
        ),
        "loss": ("pos", loss, {"unit": "nats"}),
        "next_token": (
            ("pos", "k"),
            np.array([[decode(i) for i in row] for row in top.indices.tolist()], dtype=object),
        ),
        "next_logprob": (("pos", "k"), top.values.cpu().numpy(), {"unit": "nats"}),
    }
    for variable, kind in ATTENTION:
        grids = [patterns[n] for n in patterns if n.split(".")[2] == kind]
        if grids:
            grid = _array(torch.stack(grids)[:, 0])  # [layer, head, query, key]
            if kind == "local" or model.cfg.causal:
                grid[..., ~np.tri(n_pos, dtype=bool)] = np.nan
            dims = ("layer", "head" if kind == "attn" else "local_head", "query", "key")
            out[variable] = (dims, grid, {"unit": "probability"})
    gates = [residual.gate(step.gates) for step in record.steps if step.out is not None]
    if all(g is not None for g in gates):
        out["gate"] = (
            ("write", "pos"),
            np.stack([_array(g[0]) for g in gates if g is not None]),
            _known(
                label=residual.gate_label,
                range=residual.gate_range and [*residual.gate_range],
                meaning=residual.gate_meaning,
            ),
        )
    energies = [residual.energies(step.gates) for step in record.steps if step.out is not None]
    if all(each is not None for each in energies):
        for name, each in zip(
            ("erased_energy", "written_energy"), zip(*filter(None, energies), strict=True), strict=True
        ):
            out[name] = (("write", "pos"), np.stack([_array(x[0]) for x in each]), {"unit": "stream squared"})
    coords: dict[str, Any] = {
        "read": np.array(reads, dtype=object),
        "site": ("read", np.array([read.site.name for read in model.reads], dtype=object)),
        "way": ("read", np.array([read.way for read in model.reads], dtype=object)),
        "seen": ("read", np.array([read.site.seen for read in model.reads])),
        "source": np.array(sources, dtype=object),
        "atom": np.array(model.atoms, dtype=object),
        "write": np.array(model.atoms[1:], dtype=object),
        "pos": np.arange(n_pos),
        "query": np.arange(n_pos),
        "key": np.arange(n_pos),
        "layer": np.arange(model.cfg.n_layers),
    }
    return out, coords


def edit_effect(edited: Tensor, clean: Tensor) -> np.ndarray:
    """[T]: how far an edited read [T, D] is from the clean one, relative to that; 0 where both are the same."""
    off, size = (edited.double() - clean.double()).norm(dim=-1), clean.double().norm(dim=-1)
    return _array(torch.where(off == 0, 0.0, off / size).to(edited.dtype))


def followed_variables(
    model: Transformer, record: ForwardRecord, logits: Tensor, followed: Followed, last: Tensor, touched: Marks
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(variables, coordinates); last: contributions [A, 1, T, D] of the last read."""
    parts = None
    if not touched.readout and "out" not in touched.lost and model.unembed.is_linear:
        used = record.reads["out"][0].double()
        put_in = used - record.made["out"][0].double() if "out" in touched.reads else torch.zeros_like(used)
        parts = torch.cat([last[:, 0].double(), put_in.unsqueeze(0)])
    reads = {read.name: record.reads[read.name][0] for read in model.reads}
    out, coords = _lens_variables(model, reads, logits[0], followed, plain=not touched.readout)
    if model.unembed.is_linear:
        out |= _share_variables(model, reads["out"], logits[0], followed, parts)
    return out, coords


@torch.no_grad()
def _lens_variables(
    model: Transformer, reads: dict[str, Tensor], logits: Tensor, followed: Followed, *, plain: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the lens makes of every read (name -> [T, D]), and the likeliest tokens, as words of a coordinate. plain:
    whether the logits [T, V] are the readout of "out" as it is (no edit of the readout itself)."""
    n_pos, top, dtype = len(logits), min(_TOP, model.cfg.d_vocab), _kept(logits)
    there, ids = followed.ids >= 0, followed.ids.clamp(min=0)
    found = {name: logits.new_full((len(reads), n_pos), torch.nan, dtype=dtype) for name in ("logprob", "rank", "kl")}
    best = logits.new_full((len(reads), n_pos, top), torch.nan, dtype=dtype)
    best_ids = torch.zeros(len(reads), n_pos, top, dtype=torch.int64, device=logits.device)
    for at in chunks(model, n_pos):
        final = logits[at].double().log_softmax(dim=-1)
        for i, (name, read) in enumerate(reads.items()):
            own = final if name == "out" and plain else lens(model, read[at])
            values = lens_values(own, final, ids[at])
            for key in ("logprob", "rank"):
                values[key] = values[key].masked_fill(~there[at], torch.nan)
            for key, table in found.items():
                table[i, at] = values[key].to(dtype)
            likeliest = own.topk(top, dim=-1)
            best[i, at], best_ids[i, at] = likeliest.values.to(dtype), likeliest.indices
    kept, index = best_ids.unique(return_inverse=True)
    of_read, spelled = ("read", "pos"), [word(model, i) for i in kept.tolist()]
    names = [word(model, i) if i >= 0 else "" for i in followed.ids.tolist()]
    out: dict[str, Any] = {
        "followed": ("pos", np.array(names, dtype=object), {"meaning": "the token that is followed; empty: none"}),
        "followed_id": ("pos", followed.ids.cpu().numpy(), {"meaning": "its id; -1: none"}),
        "lens_logprob": (of_read, _array(found["logprob"]), {"unit": "nats"}),
        "lens_rank": (of_read, _array(found["rank"]), {"unit": "place"}),
        "lens_kl": (of_read, _array(found["kl"]), {"unit": "nats"}),
        "lens_top": ((*of_read, "k"), index.to(torch.int32).cpu().numpy(), {"meaning": "index into word"}),
        "lens_top_logprob": ((*of_read, "k"), _array(best), {"unit": "nats"}),
    }
    return out, {"word": np.array(spelled, dtype=object)}


@torch.no_grad()
def _share_variables(
    model: Transformer, read: Tensor, logits: Tensor, followed: Followed, parts: Tensor | None
) -> dict[str, Any]:
    """Shares of the followed logits, and these. parts: [A + 1, T, D] of the last read [T, D], of every atom and of what
    an edit of the read put in; None where no sum of parts gives the logits [T, V]."""
    there, ids = followed.ids >= 0, followed.ids.clamp(min=0)
    shares = logits.new_full((len(model.atoms) + 1, len(logits)), torch.nan, dtype=torch.float64)
    if parts is not None:
        shares = logit_shares_of(model, parts, read, ids)
    rest, whole = model.logit_bias.double()[ids] + shares[-1], logits.double().gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    share, rest, whole = (
        _array(x.masked_fill(~there, torch.nan).to(_kept(logits))) for x in (shares[:-1], rest, whole)
    )
    what = "the bias, and what an edit of the last read put in"
    return {
        "logit_share": (("atom", "pos"), share, {"unit": "logit"}),
        "logit_bias": ("pos", rest, {"unit": "logit", "meaning": what}),
        "logit": ("pos", whole, {"unit": "logit"}),
    }


def _kept(logits: Tensor) -> torch.dtype:
    """The dtype of the trace: float64 stays, everything narrower becomes float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def depth_weights(model: Transformer, record: ForwardRecord) -> dict[str, Tensor]:
    """read name -> the system's own weights [B, T, S], for the reads that have any (the others hold all with 1)."""
    found = {}
    for step in record.steps:
        own = model.residual.depth_weights(step.site, step.gates)
        if own is not None:
            found |= {Read(step.site, way).name: weights for way, weights in by_way(own).items()}
    return found


def _known(**attrs: Any) -> dict[str, Any]:
    return {name: value for name, value in attrs.items() if value is not None}

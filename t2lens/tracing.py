"""The labelled record of one forward pass: `trace` makes it, `Trace` holds it, saves it and shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from t2lens.checks import Check, Verification
from t2lens.edits import Edit, Marks, check, edited, marks, read_edits
from t2lens.files import read_arrays, write_arrays
from t2lens.mixing import ForwardRecord
from t2lens.readout import Followed
from t2lens.trace_variables import (
    ATTENTION,
    Account,
    account_of,
    depth_weights,
    edit_effect,
    followed_variables,
    variables_of,
)

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["Trace", "depth_weights", "load_trace", "source_order", "trace"]

_FORMAT = "t2lens trace 1"
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class Trace:
    """One forward pass on one sequence, labelled.

    `dataset` is an xarray.Dataset; reads, atoms and sources are coordinates with names, and what does not exist is NaN:

        depth_weight(read, pos, source)        the system's own weights of each read over its sources
        mixing(read, pos, atom)                effective coefficient of each atom in each read, gates frozen
        contribution_norm(read, pos, atom)     length of what the atom adds to the read, in units of the stream
        residual_norm(read, pos)               length of the read;  atom_norm(atom, pos)  length of what was written
        sequence_attention(layer, head, query, key)   and local_attention where the model has ShortSWA
        gate(write, pos)                       where the system has gates (DDL: beta, 0..2)
        erased_energy, written_energy(write, pos)     squared lengths of what a write of Deep Delta Learning erases from
                                               the state, |beta k k^T X|^2, and puts there, |beta k v^T|^2
        edit_effect(read, pos)                 under edits: |edited - clean| / |clean| of the read
        loss(pos)                              nats, of the token at pos given those before it (NaN at the first, and in
                                               a bidirectional model, which sees that token)
        next_token(pos, k), next_logprob(pos, k)      the likeliest continuations

    and where the trace follows a token (`followed(pos)`):

        lens_logprob, lens_rank, lens_kl(read, pos)   logit lens of the read: log probability (nats) and place (1: the
                                               likeliest) of that token, KL from the model's own prediction
        lens_top, lens_top_logprob(read, pos, k)      its likeliest tokens, as indices into the coordinate `word`
        logit_share(atom, pos)                 what the write adds to the token's logit; with `logit_bias(pos)` the
                                               shares sum to `logit(pos)`. NaN where an edit left no sum of writes

    A read with several ways is several reads (`3.attn.q`, `3.attn.k`, ...); the coordinates site, way and seen (atoms
    written before it, less embed) of `read` say which. `of_way` gives the trace with one read per site.

    Other attributes: text, tokens, token_ids, model_name, config, source_atoms, ways, notices, edits, follow.
    """

    def __init__(self, dataset: xr.Dataset, meta: dict[str, Any]) -> None:
        self.dataset = dataset
        self._meta = meta

    @property
    def text(self) -> str | None:
        """The prompt, or None when token ids were given to a model without a tokenizer."""
        return self._meta["text"]

    @property
    def tokens(self) -> list[str]:
        return [str(t) for t in self.dataset["token"].values]

    @property
    def token_ids(self) -> list[int]:
        return [int(i) for i in self.dataset["token_id"].values]

    @property
    def model_name(self) -> str:
        return self._meta["model"]

    @property
    def config(self) -> dict[str, Any]:
        """`ModelConfig.to_dict()` of the model."""
        return self._meta["config"]

    @property
    def notices(self) -> list[str]:
        """Sentences the reader of this trace must see (a truncated prompt, say)."""
        return self._meta["notices"]

    @property
    def edits(self) -> tuple[Edit, ...]:
        """What the pass was edited with, in order. All numbers are those of the edited pass, depth weights and gates as
        the edits left them; the account of reads and streams that edits replaced is told in `notices`."""
        return tuple(map(Edit.from_dict, self._meta.get("edits", [])))  # older files have none

    @property
    def follow(self) -> str | None:
        """Which token the trace follows, in words ("' queen'"; "the true next token; at the last position the
        likeliest"), or None."""
        return self._meta.get("follow")

    @property
    def causal(self) -> bool:
        """Whether a position sees only those before it. Else its predictions are of the token that stands there."""
        return self.config["attention"].get("causal", True)

    @property
    def source_atoms(self) -> dict[str, dict[str, list[str]]]:
        """read -> source -> names of the atoms that the source holds at that read."""
        return self._meta["source_atoms"]

    @property
    def form(self) -> str:
        """The linear form under which mixing and contributions were accounted for."""
        return self._meta["form"]

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways in which some site reads ("q", "k", "v", "r"), or ("",) where every site has one read."""
        ways = [str(way) for way in self.dataset["way"].values]
        return tuple(dict.fromkeys(way for way in ways if way)) or ("",)

    def of_way(self, way: str | None = None) -> Trace:
        """The trace with one read per site, named as the site: the read of `way` (None: the first of `ways`) where the
        site has it, else its first. ValueError for a way that no site has."""
        if self.ways == ("",) and way in (None, ""):
            return self
        way = self.ways[0] if way is None else way
        if way not in self.ways:
            raise ValueError(f"No site of this trace reads in the way {way!r}; the ways are {', '.join(self.ways)}.")
        chosen: dict[str, int] = {}
        for i, (site, own) in enumerate(zip(*(self.dataset[c].values for c in ("site", "way")), strict=True)):
            if str(site) not in chosen or own == way:
                chosen[str(site)] = i
        names = self.dataset["read"].values[list(chosen.values())]
        dataset = self.dataset.isel(read=list(chosen.values()))
        dataset = dataset.assign_coords(read=np.array(list(chosen), dtype=object))
        held = {site: self.source_atoms[str(name)] for site, name in zip(chosen, names, strict=True)}
        return Trace(dataset, {**self._meta, "source_atoms": held})

    def verify(self) -> Verification:
        """The checks this trace was put through when it was made, each with its number and limit."""
        return Verification.from_list(self._meta["checks"])

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file (no pickle), complete or not at all; `t2lens.load_trace` reads it."""
        arrays, words = {}, {}
        for name, variable in self.dataset.variables.items():
            if variable.dtype.kind in "fiub":
                arrays[str(name)] = np.ascontiguousarray(variable.values)
            else:
                words[str(name)] = variable.values.astype(str).tolist()
        dims = {str(name): [str(d) for d in variable.dims] for name, variable in self.dataset.variables.items()}
        header = {
            "format": _FORMAT,
            "dims": json.dumps(dims),
            "coords": json.dumps([str(c) for c in self.dataset.coords]),
            "words": json.dumps(words),
            "variable_attrs": json.dumps({str(n): v.attrs for n, v in self.dataset.variables.items() if v.attrs}),
            "meta": json.dumps(self._meta),
        }
        return write_arrays(Path(path), arrays, header)

    def plot(self, quantity: str = "residual_norm", **kwargs: Any) -> Any:
        """A plotly figure of one quantity; see `t2lens.viz.figures.plot` for the quantities and options."""
        from t2lens.viz.figures import plot

        return plot(self, quantity, **kwargs)

    def save_figure(self, path: str | Path, trace_b: Trace | None = None, **view: Any) -> Path:
        """Write the two-axis maps, of this trace or of two side by side, as .svg, .png or .pdf.

        view: quantity, depth, cell, way, head, layer, rollouts, compare, align, theme and width, as
        `t2lens.viz.maps_picture.maps_picture` takes them; by default what shows most of this system. ValueError for
        another ending or a choice that does not exist.
        """
        from t2lens.viz.maps_picture import maps_picture
        from t2lens.viz.page import first_view
        from t2lens.viz.raster import save_figure

        traces = [self] if trace_b is None else [self, trace_b]
        return save_figure(path, maps_picture(traces, **{**first_view(traces), **view}))

    def _repr_html_(self) -> str:
        from t2lens.viz.page import fragment

        return fragment(self)

    def __repr__(self) -> str:
        from t2lens.viz.terminal import summary

        return summary(self)


def load_trace(path: str | Path) -> Trace:
    """The trace that `Trace.save` wrote. ValueError in one sentence when the file is something else or damaged."""
    arrays, header = read_arrays(Path(path))
    if header.get("format") != _FORMAT:
        raise ValueError(f"{path} is a safetensors file but not a t2lens trace (format {header.get('format')!r}).")
    try:
        dims, words, attrs, coords, meta = (
            json.loads(header[part]) for part in ("dims", "words", "variable_attrs", "coords", "meta")
        )
    except (KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is a damaged t2lens trace: its header cannot be read ({error}).") from None
    variables = {
        name: (
            dims[name],
            arrays[name] if name in arrays else np.array(words[name], dtype=object),
            attrs.get(name, {}),
        )
        for name in dims
    }
    dataset = xr.Dataset(
        {n: v for n, v in variables.items() if n not in coords},
        coords={n: v for n, v in variables.items() if n in coords},
    )
    return Trace(dataset, meta)


@torch.no_grad()
def trace(
    model: Transformer,
    input: str | Sequence[int] | Tensor,
    *,
    edits: Any = (),
    form: str = "additive",
    name: str | None = None,
    follow: str | int | None = None,
    last: str | int | None = None,
    heads: Literal["each", "mean"] = "each",
) -> Trace:
    """Run `model` once on one sequence and label everything that moved along both axes.

    Args:
        input: a text (a BOS token is prepended, as in training), or token ids [pos] or [1, pos], taken as they are.
            Longer than the context: the end is cut off and `Trace.notices` says so.
        edits: `t2lens.Edit` objects, their dictionaries or JSON: the trace is of the edited pass and says so. Where an
            edit replaces what is carried, mixing and contributions of the reads behind it are NaN: no sum of writes
            gives them. Where it replaces a read itself, they are of the read that was there to replace.
        form: linear form of the accounting, "additive", or "operator" for Deep Delta Learning.
        name: shown as the model's name; by default the name it was loaded under.
        follow: a token whose logit, lens probability and rank are followed through every read: "next" (the true next
            token of each position; in a bidirectional model the one that stands there), or the text or id of one token.
            None: nothing of that is computed. (A token whose text is "next" is named by its id.)
        last: what "next" follows at the last position, which has no true next token: the text or id of a token. None:
            the one that the model itself finds likeliest there, or none where its logits are NaN.
        heads: "mean" keeps the mean over attention heads alone, whose attribute `mean_of` says over how many: that of
            every head takes layers x heads x pos^2 numbers, 1.6 GB at 2,048 tokens in 24 layers of 4 heads.

    Raises:
        ValueError: an empty prompt, more than one sequence, token ids outside the vocabulary, an unknown form, an edit
            that this model cannot do (KeyError where it names what is not there).

    Example:
        >>> import t2lens
        >>> cfg = t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2, residual=t2lens.residual.AttnRes())
        >>> tr = t2lens.trace(t2lens.build(cfg, seed=0), [0, 7, 3, 7, 9])
        >>> tr.dataset["depth_weight"].sel(read="1.attn", pos=3).dropna("source").values.astype(float).round(3).tolist()
        [0.333, 0.333, 0.333]
        >>> bool(tr.verify())
        True
    """
    if isinstance(model, str):
        raise TypeError(f"trace takes a model, not its name: t2lens.trace(t2lens.load({model!r}), ...).")
    tokens, notices = _one_sequence(model, input)
    wanted = read_edits(edits)
    notices += _told(model, wanted)
    touched = marks(model, wanted)
    record, patterns = ForwardRecord(), {}
    if heads not in ("each", "mean"):
        raise ValueError(f"heads is 'each' or 'mean', not {heads!r}.")
    counts: dict[str, int] = {}
    capture = [(name_, _keep(patterns, heads, counts)) for name_ in model.hook_dict if name_.endswith(".hook_pattern")]
    followed = None if follow is None else Followed.of(model, tokens[0], follow, last)
    with edited(model, wanted), model.hooks(fwd_hooks=capture):
        logits = model.forward(tokens, record=record)
    account = account_of(model, record, form, touched, np.float64 if logits.dtype == torch.float64 else np.float32)
    variables, coords = variables_of(model, record, tokens, logits, patterns, account)
    for variable, kind in ATTENTION if heads == "mean" else ():
        if variable in variables:
            variables[variable][2]["mean_of"] = max(n for name_, n in counts.items() if name_.split(".")[2] == kind)
    if wanted:
        clean, reads = model.record(tokens).reads, [read.name for read in model.reads]
        effect = np.stack([edit_effect(record.reads[read][0], clean[read][0]) for read in reads])
        variables["edit_effect"] = (("read", "pos"), effect, {"meaning": "|edited - clean| / |clean| of the read"})
    if followed is not None:
        followed = followed.ending(logits[0, -1])
        found = followed_variables(model, record, logits, followed, account.last, touched)
        variables, coords = variables | found[0], coords | found[1]
    strings = [str(i) for i in tokens[0].tolist()] if model.tokenizer is None else model.to_str_tokens(tokens[0])
    coords["token"] = ("pos", np.array(strings, dtype=object))
    coords["token_id"] = ("pos", tokens[0].cpu().numpy())
    residual = model.residual
    meta = {
        "text": input if isinstance(input, str) else None if model.tokenizer is None else model.to_string(tokens[0]),
        "model": name or getattr(model, "name", None) or model.cfg.residual.kind,
        "config": model.cfg.to_dict(),
        "n_params": model.n_params,
        "form": form,
        "gate_label": residual.gate_label,
        "notices": notices,
        "edits": [edit.to_dict() for edit in wanted],
        "follow": None if followed is None else followed.text,
        "source_atoms": {r.name: {s.name: list(s.atoms) for s in residual.sources(r.site)} for r in model.reads},
        "checks": Verification(tuple(_checks(model, record, logits, account, touched))).to_list(),
    }
    return Trace(xr.Dataset(variables, coords=coords), meta)


def _one_sequence(model: Transformer, input: Any) -> tuple[Tensor, list[str]]:
    if isinstance(input, str):
        if not input.strip():
            raise ValueError("The prompt is empty: type at least one word.")
        ids = model.to_tokens(input)
    elif isinstance(input, list | tuple) and any(isinstance(each, str) for each in input):
        raise ValueError(f"A trace is of one sequence; {len(input)} texts were given: trace each by itself.")
    else:
        ids = torch.as_tensor(input)
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.ndim != 2 or ids.shape[0] != 1:
            raise ValueError(
                f"A trace is of one sequence, [pos] or [1, pos]; these ids have the shape {list(ids.shape)}."
            )
    notices = []
    if not model.cfg.causal:
        notices.append("A bidirectional model: every position sees all tokens, so there is no next-token loss.")
    if ids.shape[1] > model.cfg.n_ctx:
        n, n_ctx = ids.shape[1], model.cfg.n_ctx
        notices.append(f"The prompt has {n} tokens; the last {n - n_ctx} are cut off (context {n_ctx}).")
        ids = ids[:, : model.cfg.n_ctx]
    return model.prepare(ids)[0], notices


def _told(model: Transformer, edits: tuple[Edit, ...]) -> list[str]:
    """What the reader of an edited trace must see."""
    touched = marks(model, edits)
    told = [f"Edited: {edit.describe()}" for edit in edits] + check(model, edits)
    behind = [read.name for read in model.reads if read.name in touched.lost]
    replaced = [read.name for read in model.reads if read.name in touched.reads - touched.lost]
    if behind:
        told.append(f"The stream was edited, so from {behind[0]} on no sum of writes gives what is read.")
    if replaced:
        told.append(f"Mixing and contributions at {', '.join(replaced)} are of the read before it was edited.")
    return told


def _keep(into: dict[str, Tensor], heads: str, counts: dict[str, int]) -> Any:
    def hook(tensor: Tensor, *, hook: Any) -> None:
        counts[hook.name] = tensor.shape[1]
        into[hook.name] = tensor if heads == "each" else tensor.mean(dim=1, keepdim=True)

    return hook


def source_order(model: Transformer) -> list[str]:
    """`model.source_order()`."""
    return model.source_order()


def _checks(model: Transformer, record: ForwardRecord, logits: Tensor, account: Account, touched: Marks) -> list[Check]:
    residual = model.residual
    limit = LIMITS[logits.dtype]
    some = " before the edit of the stream" if touched.lost else ""
    words = {
        "recombination": f"contributions of every read{some} sum to the recorded read (relative)",
        "mixing": f"the mixing matrix applied to the atoms gives every read{some} (relative)",
    }
    checks = [Check(name, account.off[name], limit, what) for name, what in words.items() if name in account.off]
    # the final norm's scale is recorded, so logits are linear in the last contributions
    if model.unembed.is_linear and not touched.readout and "out" not in touched.lost:
        used = record.reads["out"].double()
        made = (record.made if "out" in touched.reads else record.reads)["out"].double()
        parts = torch.cat([account.last.double(), (used - made).unsqueeze(0)])  # last: what an edit added
        # the shares of every token at every position would be a large tensor, and their sum is linear
        whole = model.normed_shares(parts, used).sum(dim=0) @ model.W_U.double() + model.logit_bias.double()
        of = "per-atom shares, the edit's share" if "out" in touched.reads else "per-atom shares"
        what = f"logits are the sum of {of} and the bias (relative)"
        error = (whole - logits.double()).abs().max() / logits.double().abs().max().clamp(min=1e-30)
        checks.append(Check("logit shares", float(error), limit, what))
    if residual.weights_sum_to_one:
        own = {name: w for name, w in depth_weights(model, record).items() if name not in touched.weights}
        most = max([float((w.double().sum(-1) - 1).abs().max()) for w in own.values()], default=0.0)  # or none mixes
        what = f"every row of depth weights{' that was not edited' if touched.weights else ''} sums to 1"
        checks.append(Check("depth weights sum to 1", most, max(limit, 1e-6), what))
    gates = [residual.gate(s.gates) for s in record.steps if s.out is not None]
    if residual.gate_range is not None and gates[0] is not None:
        low, high = residual.gate_range
        off = [float(torch.maximum(low - g.min(), g.max() - high).clamp(min=0)) for g in gates if g is not None]
        checks.append(Check("gate range", max(off), 0.0, f"{residual.gate_label} lies in [{low:g}, {high:g}]"))
    finite = float(sum(int((~x.isfinite()).sum()) for x in (*record.reads.values(), logits)))
    checks.append(Check("finite", finite, 0.0, "number of NaN or infinite entries in reads and logits"))
    return checks

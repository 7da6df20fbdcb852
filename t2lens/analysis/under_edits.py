"""Which analyses are right about an edited pass: every analysis runs inside `t2lens.edited`, or is refused here.

An analysis assumes things of the pass that it looks at; an edit can take such a thing away, and then numbers would be
shown that mean nothing. What is assumed, and what takes it away:

    readout     the logits are the model's own readout of the last read    an edit of the final norm or the unembedding
    last        the last read is the sum of what atoms contribute to it    an edit of that read, or of the stream
    account     so is every read                                           an edit of a read, or of the stream
    stream      what a block begins with follows from what was written     an edit of the stream
    rows        what happens in one row of a pass stays there              a mean over the real positions of the pass
    whole       every pass begins at the first block                       the plain sum in place of a read
    heads       what a head mixed is its pattern times its values          an edit of what a head mixed
    written     what is put into the state is what a sublayer wrote        an edit of the gate dir
    erasure     what a write erases is k^T X, as the state holds it        an edit of the gate proj

`stream` and `whole` are needed where variants of a pass are taken up at a later block (`Transformer.resume`), `rows`
where several share a pass, as also the texts of a corpus do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from t2lens.edits import Edit, Marks, marks
from t2lens.edits.places import places_of

if TYPE_CHECKING:
    from t2lens.model import Transformer

__all__ = ["NEEDS", "VARIANTS", "check_needs", "check_under_edits"]

VARIANTS = ("stream", "rows", "whole")
"""What an analysis needs that takes many variants of a pass up where they begin to differ."""

_Needs = tuple[str, ...] | Callable[["Transformer", Mapping[str, Any]], tuple[str, ...]]


def _content(model: Transformer, options: Mapping[str, Any]) -> tuple[str, ...]:
    own = any("hook_depth_attn" in name for name in model.hook_dict)
    return () if own and options.get("over") != "mixing" else ("account",)


def _advantage(model: Transformer, options: Mapping[str, Any]) -> tuple[str, ...]:  # noqa: ARG001
    return ("stream",) if options.get("axis") == "depth" else ("stream", "heads")


NEEDS: dict[str, _Needs] = {
    "logits": ("readout", "last"),
    "loss": ("readout", "last"),
    "lens": ("readout",),
    "continuation": (),
    "content": _content,
    "profile": ("account",),
    "statistics": (),
    "paths": ("readout", "account", "written"),
    "rollout": ("account", "rows", "written"),
    "advantage": _advantage,
    "effects": ("account", *VARIANTS),
    "families": VARIANTS,
    "writes": ("readout", "last", *VARIANTS),
    "streams": VARIANTS,
    "patch": VARIANTS,
    "attribution-patch": lambda model, options: VARIANTS if options.get("compare") else (),  # noqa: ARG005
    "gates-curve": VARIANTS,
    "gates-spectrum": ("erasure", "stream"),
    "gates-writes": (),
    "gates-tokens": ("erasure", "stream"),
    "ddl": lambda model, options: ("erasure", *(VARIANTS if options.get("counterfactuals", True) else ("stream",))),  # noqa: ARG005
}
"""Key of the catalog -> what it needs, which may depend on the model and on the options."""


def check_under_edits(
    model: Transformer,
    edits: Iterable[Edit],
    key: str,
    options: Mapping[str, Any] | None = None,
    *,
    texts: bool = False,
) -> None:
    """See that an analysis of the catalog is right about passes under these edits.

    Args:
        key, options: as in `t2lens.analysis.catalog`. An analysis that is not in `NEEDS` is taken to need everything.
        texts: whether it runs on several texts, which share passes.

    Raises:
        ValueError: it is not; one sentence that says which edit takes away what.

    Example:
        >>> import t2lens
        >>> from t2lens.analysis.under_edits import check_under_edits
        >>> model = t2lens.build(t2lens.ModelConfig(d_vocab=50, n_ctx=32, d_model=16, n_layers=2), seed=0)
        >>> edits = t2lens.edits.read_edits({"target": "stream", "operation": "zero", "site": "1.attn"})
        >>> check_under_edits(model, edits, "lens")
        >>> check_under_edits(model, edits, "logits")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: This analysis is not right under the edit "Sets the stream as 1.attn is reached to zero.": it ...
    """
    needs = NEEDS.get(key, tuple(_LOST))
    needs = needs(model, options or {}) if callable(needs) else needs
    check_needs(model, edits, (*needs, "rows") if texts else needs)


def check_needs(model: Transformer, edits: Iterable[Edit], needs: Iterable[str]) -> None:
    """ValueError in one sentence where one of `edits` takes away one of `needs` (see the module)."""
    needs = tuple(needs)
    for edit in edits:
        touched = marks(model, [edit])
        for need in _LOST:
            if need in needs and (why := _LOST[need](model, edit, touched)):
                raise ValueError(f'This analysis is not right under the edit "{edit.describe()}": it {why}.')


# --- what takes it away, in words ------------------------------------------------------------------------------------


def _stream(model: Transformer, edit: Edit, touched: Marks) -> str:  # noqa: ARG001
    first = next((read.name for read in model.reads if read.name in touched.lost), None)
    return f"edits the stream, so that no sum of writes gives what is read from {first} on" if first else ""


def _account(model: Transformer, edit: Edit, touched: Marks) -> str:
    first = next((read.name for read in model.reads if read.name in touched.reads), None)
    why = f"replaces what is read at {first}, so that it is not what was written that is read there"
    return _stream(model, edit, touched) or (why if first else "")


def _last(model: Transformer, edit: Edit, touched: Marks) -> str:
    return _account(model, edit, touched) if "out" in touched.reads | touched.lost else ""


def _readout(model: Transformer, edit: Edit, touched: Marks) -> str:  # noqa: ARG001
    return "edits what lies between the last read and the logits" if touched.readout else ""


def _rows(model: Transformer, edit: Edit, touched: Marks) -> str:  # noqa: ARG001
    if edit.operation != "freeze_mean" or edit.prompt is not None:
        return ""
    return "takes a mean over all positions of a pass, which ties together what is told apart here (give it a prompt)"


def _plain(model: Transformer, edit: Edit, touched: Marks) -> str:  # noqa: ARG001
    return "needs whole passes, and here passes are taken up in the middle" if edit.operation == "plain_sum" else ""


def _at(model: Transformer, edit: Edit, end: str) -> bool:
    return any(place.name.endswith(end) for place in places_of(model, edit))


def _heads(model: Transformer, edit: Edit, touched: Marks) -> str:  # noqa: ARG001
    return "replaces what a head mixed, so that it is no mixture of values" if _at(model, edit, ".hook_z") else ""


def _written(model: Transformer, edit: Edit, touched: Marks) -> str:  # noqa: ARG001
    turned = _at(model, edit, ".hook_dir")
    return "turns what is put into the state away from what the sublayer wrote" if turned else ""


def _erasure(model: Transformer, edit: Edit, touched: Marks) -> str:  # noqa: ARG001
    replaced = _at(model, edit, ".hook_proj")
    return "replaces what a write erases, so that it is not what the state holds" if replaced else ""


_LOST: dict[str, Callable[[Any, Edit, Marks], str]] = {
    "stream": _stream,
    "last": _last,
    "account": _account,
    "readout": _readout,
    "rows": _rows,
    "whole": _plain,
    "heads": _heads,
    "written": _written,
    "erasure": _erasure,
}

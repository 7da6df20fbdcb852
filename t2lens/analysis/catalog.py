"""Every analysis by name, with its options: the command line and the dashboard are both made from this list.

Nothing is imported before an analysis runs, so that `t2lens --help` stays fast. To add one: a function
`(model, input, **options) -> Finding` in a file of this folder, and an entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal

__all__ = ["ANALYSES", "Analysis", "Option", "analysis"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """An argument of an analysis.

    kind: "position" (an index into the sequence, negative from the end), "read" (name of a read, "3.attn.q"), "site",
    "token" (the text of one token), "text" (a second prompt), "word" (any text), "count" (a whole number), "number",
    "flag", or "choice" of `choices`. default: what holds when it is left out; None: the function's own default.
    """

    name: str
    kind: Literal["position", "read", "site", "token", "text", "word", "count", "number", "flag", "choice"]
    help: str
    default: Any = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """An analysis: `t2lens analyze KEY TEXT`, and a page entry of the dashboard.

    group: the page of the dashboard it stands on. what: one sentence. function: "module:name". texts: whether it runs
    on many texts (then the bundled sample is its default input). systems: kinds of residual systems it is for (empty:
    all); what it cannot do on a model it refuses in a sentence when it runs.
    """

    key: str
    title: str
    group: Literal["attribution", "routes", "gates"]
    what: str
    function: str
    options: tuple[Option, ...] = ()
    texts: bool = False
    systems: tuple[str, ...] = ()

    def run(self, model: Any, input: Any, **options: Any) -> Any:
        """The Finding of this analysis of `input`; options that are None are left out."""
        module, name = self.function.split(":")
        given = {key: value for key, value in options.items() if value is not None}
        return getattr(import_module(module), name)(model, input, **given)


ANALYSES: tuple[Analysis, ...] = ()


def analysis(key: str) -> Analysis:
    """The analysis named `key`; KeyError names the nearest."""
    found = {entry.key: entry for entry in ANALYSES}
    if key not in found:
        near = get_close_matches(key, found, n=1)
        raise KeyError(f"No analysis {key!r}; {f'did you mean {near[0]!r}?' if near else f'there are {list(found)}.'}")
    return found[key]

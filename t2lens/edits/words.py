"""An edit as one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from t2lens.edits.edit import Edit

__all__ = ["joined", "sentence"]

_WRITTEN_OUT = 4  # so many numbers stand in a sentence


def sentence(edit: Edit) -> str:
    what, amount = _what(edit), _amount(edit.value)
    of = "the real positions of the pass" if edit.prompt is None else f"the prompt {_quoted(edit.prompt)}"
    body = {
        "set": f"Sets {what} to {amount}",
        "scale": f"Multiplies {what} by {amount}",
        "add": f"Adds {amount} to {what}",
        "zero": f"Sets {what} to zero",
        "zero_renormalise": f"Removes {what} and scales the rest of the row up to the same total",
        "swap": f"Swaps {what}",
        "one": f"Sets {what} to 1 and the others to 0",
        "freeze_mean": f"Replaces {what} by the mean over {of}",
        "patch": f"Replaces {what} by the value in {of}",
        "plain_sum": f"Replaces {what} by the plain sum of all atoms written before it",
        "window": f"Narrows {what} to the last {amount} place{'' if edit.value == 1 else 's'}",
    }[edit.operation]
    if edit.positions is not None:
        body += f" at {_places(edit.positions)}"
    if edit.prompt_positions is not None:
        body += f" (there {_places(edit.prompt_positions)})"
    return f"{body}."


def _what(edit: Edit) -> str:
    """What is edited."""
    site = "every site" if edit.site == "*" else edit.site
    if edit.way:
        site += f" (way {edit.way})" if edit.site == "*" else f".{edit.way}"
    names = joined(edit.sources)
    if edit.target in ("depth_weight", "depth_score"):
        word = edit.target.replace("_", " ")
        if edit.sources is None:
            return f"all {word}s in the read at {site}"
        return f"the {word}{'' if len(edit.sources) == 1 else 's'} of {names} in the read at {site}"
    if edit.target == "gate":
        gate = f"the gate {edit.name}" if edit.name else "the gate"
        return f"{gate} at {site}" + (f" for {names}" if names else "")
    if edit.target == "atom":
        return "the embedding" if edit.site == "embed" else f"what {site} writes"
    if edit.target == "stream":
        return f"{names or 'the stream'} as {site} is reached"
    if edit.target == "read":
        return f"the read at {site}"
    if edit.target == "hook":
        return f"the tensor at {edit.name}" + (f", {_heads(edit.heads)}" if edit.heads else "")
    if edit.target == "head":
        return f"{_heads(edit.heads)} at {site}"
    keys = "" if edit.keys is None else f" to {_places(edit.keys)}"
    return f"the attention of {_heads(edit.heads)} at {site}{keys}"


def joined(names: Any) -> str:
    """a, b and c"""
    names = [str(name) for name in names or ()]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _heads(heads: tuple[int, ...] | None) -> str:
    return "every head" if heads is None else f"head{'' if len(heads) == 1 else 's'} {joined(heads)}"


def _places(positions: tuple[int, ...]) -> str:
    return f"position{'' if len(positions) == 1 else 's'} {joined(positions)}"


def _amount(value: Any) -> str:
    if not isinstance(value, tuple):
        return "" if value is None else f"{value:g}"
    if len(value) <= _WRITTEN_OUT and not any(isinstance(each, tuple) for each in value):
        return f"({', '.join(f'{each:g}' for each in value)})"
    return f"{_size(value)} given numbers"


def _size(value: Any) -> int:
    return sum(map(_size, value)) if isinstance(value, tuple) else 1


def _quoted(prompt: str | tuple[int, ...]) -> str:
    text = prompt if isinstance(prompt, str) else "of ids " + " ".join(map(str, prompt))
    text = text if len(text) <= 40 else text[:37] + "..."
    return f"'{text}'" if isinstance(prompt, str) else text

"""Edits as the dashboard keeps them: the JSON of `t2lens.Edit`, in which an edit may be muted and stays in the list."""

from __future__ import annotations

import json

__all__ = ["active"]


def active(text: str) -> str:
    """The JSON of the edits that act: those that are not muted. Text that is no list is returned as it is: what it
    means, or lacks, is said where it is read."""
    try:
        listed = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return text.strip()
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        return text.strip()
    acting = [{key: value for key, value in each.items() if key != "muted"} for each in listed if not each.get("muted")]
    return json.dumps(acting) if acting else ""

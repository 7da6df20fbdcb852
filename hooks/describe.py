"""The table that `HookedRoot.describe_hooks()` returns."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from .names import layer_of


@dataclass(frozen=True, kw_only=True)
class HookRow:
    """One hook point: its full name, the words of its shape, what it holds, and the unit ("" for none)."""

    name: str
    shape: str
    meaning: str
    unit: str


def family(name: str) -> str:
    """`name` with each index replaced by a star: blocks.3.attn.hook_q -> blocks.*.attn.hook_q."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _spans(numbers: Iterable[int]) -> str:
    """0,1,2,5 -> '0-2,5'."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class HookTable(list[HookRow]):
    """A list of HookRow, one per hook point; it prints one line for names that differ only in the layer."""

    def folded(self) -> list[HookRow]:
        """Rows that differ only in the layer as one, `blocks.{0-7}.attn.hook_q`; `l` means the layer."""
        groups: dict[HookRow, list[int]] = {}
        for row in self:
            layer = layer_of(row.name)
            if layer is not None:
                name = row.name.replace(f"blocks.{layer}.", "blocks.*.", 1)
                meaning = re.sub(rf"\b{layer}\.(?=[a-z])", "l.", row.meaning)
                row = HookRow(name=name, shape=row.shape, meaning=meaning, unit=row.unit)
            groups.setdefault(row, []).append(-1 if layer is None else layer)
        return [
            HookRow(
                name=row.name.replace("blocks.*.", f"blocks.{{{_spans(layers)}}}."),
                shape=row.shape,
                meaning=row.meaning,
                unit=row.unit,
            )
            for row, layers in groups.items()
        ]

    def __str__(self) -> str:
        cells = [("name", "shape", "meaning", "unit"), *(astuple(row) for row in self.folded())]
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{title}</th>" for title in ("name", "shape", "meaning", "unit"))
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in astuple(row)) for row in self.folded())
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

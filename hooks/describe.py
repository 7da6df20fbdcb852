"""The table that `HookedRoot.describe_hooks()` returns."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(frozen=True, kw_only=True)
class HookRow:
    """One hook point: its full name, the words of its shape, what it holds, and the unit ("" when it has none)."""

    name: str
    shape: str
    meaning: str
    unit: str


def family(name: str) -> str:
    """`name` with each block or list index replaced by a star: blocks.3.attn.hook_q -> blocks.*.attn.hook_q."""
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
    """A list of HookRow, one per hook point, that prints one line for names that differ only in the layer."""

    def folded(self) -> list[HookRow]:
        """Rows with equal text and the same name up to the layer, as one: `blocks.{0-7}.attn.hook_q`."""
        groups: dict[tuple[str, str, str, str], list[str]] = {}
        for row in self:
            groups.setdefault((family(row.name), row.shape, row.meaning, row.unit), []).append(row.name)
        rows = []
        for (pattern, shape, meaning, unit), names in groups.items():
            name = names[0]
            if len(names) > 1 and pattern.count("*") == 1:
                head = pattern.index("*")
                numbers = (int(each[head:].split(".", 1)[0]) for each in names)
                name = pattern.replace("*", "{" + _spans(numbers) + "}")
                rows.append(HookRow(name=name, shape=shape, meaning=meaning, unit=unit))
            else:
                rows += [HookRow(name=each, shape=shape, meaning=meaning, unit=unit) for each in names]
        return rows

    def __str__(self) -> str:
        cells = [("name", "shape", "meaning", "unit"), *(astuple(row) for row in self.folded())]
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells
        ]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{title}</th>" for title in ("name", "shape", "meaning", "unit"))
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in astuple(row)) + "</tr>"
            for row in self.folded()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

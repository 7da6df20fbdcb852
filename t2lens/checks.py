"""Named checks with numbers: what a trace or a model was tested for, and how it came out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Check", "Verification"]


@dataclass(frozen=True)
class Check:
    """One identity: the largest error found (or the quantity named), and the limit it must stay within."""

    name: str
    value: float
    limit: float
    meaning: str
    at_least: bool = False  # the limit is a floor (an edit must change something), not a ceiling

    @property
    def passed(self) -> bool:
        """False for NaN, whatever the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "pass" if self.passed else "FAIL"
        return f"{verdict}  {self.name}: {self.value:.2e} ({sign} {self.limit:.0e})  {self.meaning}"


@dataclass(frozen=True)
class Verification:
    """All checks of one trace or model; true when every one passed. skipped: what was not checked, and why."""

    checks: tuple[Check, ...]
    skipped: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def __iter__(self) -> Iterator[Check]:
        return iter(self.checks)

    def __len__(self) -> int:
        return len(self.checks)

    def __getitem__(self, name: str) -> Check:
        """The check named `name`; KeyError lists the names."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"No check {name!r}; the checks are {', '.join(c.name for c in self.checks)}.")

    def __str__(self) -> str:
        return "\n".join([*(str(check) for check in self.checks), *(f"skip  {each}" for each in self.skipped)])

    def to_list(self) -> list[dict[str, Any]]:
        return [asdict(check) for check in self.checks]

    @classmethod
    def from_list(cls, rows: list[dict[str, Any]]) -> Verification:
        return cls(tuple(Check(**row) for row in rows))

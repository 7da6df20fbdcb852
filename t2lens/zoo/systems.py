"""Every residual system and sequence-side mixer there is, one line each, from the docstrings of their configs."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from t2lens import config
from t2lens.config import ResidualConfig
from t2lens.residual import RELATIVES, SYSTEMS

__all__ = ["SystemInfo", "list_systems"]

_PAPER = re.compile(r"arXiv \d{4}\.\d{5}|OpenReview \w+")
_ON_THE_SEQUENCE = (config.ShortSWA, config.ShortConv, config.Canon, config.KVShift, config.ValueResidual)


@dataclass(frozen=True, kw_only=True)
class SystemInfo:
    """name: as config files have it. config: how it is written. what: its docstring's first sentence. paper: or ""."""

    name: str
    config: str
    what: str
    paper: str


def list_systems() -> list[SystemInfo]:
    """The residual systems in the order of the registry, the small relatives, and what acts along the sequence."""
    systems = [_info(each.kind, f"residual.{each.__name__}()", each) for each in SYSTEMS]
    relatives = [_relative(name, value) for name, value in RELATIVES.items()]
    sequence = [_info(_dashed(each.__name__), f"config.{each.__name__}()", each) for each in _ON_THE_SEQUENCE]
    return [*systems, *relatives, *sequence]


def _info(name: str, config: str, cls: type) -> SystemInfo:
    text = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    papers = _PAPER.findall(text) or _PAPER.findall(_module_doc(cls).partition("\n")[0])
    what = re.sub(r" \((arXiv|OpenReview)[^)]*\)", "", text)
    return SystemInfo(name=name, config=config, what=what, paper=papers[0] if len(set(papers)) == 1 else "")


def _relative(name: str, value: ResidualConfig) -> SystemInfo:
    """The paper stands beside the name in the docstring of its module."""
    plain = name.removesuffix("-gemma").replace("-", " ")
    lines = [line for line in _module_doc(type(value)).splitlines() if line.strip().lower().startswith(f"{plain}  ")]
    papers = [_PAPER.search(line) for line in lines]
    paper = next((found[0] for found in papers if found), "")
    return SystemInfo(name=name, config=f"residual.RELATIVES[{name!r}]", what=value.describe(), paper=paper)


def _module_doc(cls: type) -> str:
    return sys.modules[cls.__module__].__doc__ or "" if issubclass(cls, ResidualConfig) else ""


def _dashed(name: str) -> str:
    """ShortConv -> short-conv, KVShift -> kv-shift, ShortSWA -> short-swa."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()

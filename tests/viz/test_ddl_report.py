"""The page of a DDL audit: one file, everything in it, nothing from outside."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from t2lens.analysis.ddl_audit import audit_ddl
from t2lens.viz.ddl_report import report
from t2lens.viz.svg import Plot, heat, row
from tests.systems import random_tokens, tiny


@pytest.mark.parametrize("system", ["ddl", "ddl-cc-ec", "ddl-tc-ec", "ddl-write-only"])
def test_the_page_stands_alone_and_shows_every_part(system: str) -> None:
    finding = audit_ddl(tiny(system), random_tokens(1), name="<b>mine</b>")
    page = report(finding)
    assert len(page.encode()) < 1_500_000
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=", page)
    assert re.findall(r"https?://[^\"\s<]*", page) == ["http://www.w3.org/2000/svg"] * page.count("<svg")
    assert "<b>mine" not in page
    assert "&lt;b&gt;mine" in page
    assert page.count("<figure>") == (5 if system == "ddl-write-only" else 6)
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", page)
    for name in finding["check"].values.tolist():
        assert name in page
    for site in ("0.attn", "2.mlp"):
        assert f">{site}<" in page


def test_a_refusal_is_drawn_as_words() -> None:
    model = tiny("ddl")
    hook = (lambda name: name.endswith("hook_beta"), lambda gate, *, hook: gate + 2.1)
    with model.hooks([hook]):
        page = report(audit_ddl(model, [[1, 2, 3]], counterfactuals=False))
    assert "regime names are refused: a precondition fails" in page
    assert "FAILED" in page
    with model.hooks([(hook[0], lambda gate, *, hook: gate * torch.nan)]):
        page = report(audit_ddl(model, [[1, 2, 3]]))
    assert "<figure>" not in page
    assert "FAILED" in page


def test_marks_stand_where_their_numbers_say_and_nan_is_not_drawn() -> None:
    plot = Plot(156, 156, (0, 10), (0, 100), bottom=34, left=46)  # 100 x 100 pixels inside
    plot.dots([0, 5, 10], [0.0, np.nan, 100.0], "red", ["a", "b", "<c>"])
    drawn = row(plot)
    assert re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn) == [("46.0", "122.0"), ("146.0", "22.0")]
    assert "&lt;c&gt;: 100" in drawn
    log = Plot(156, 156, (0, 1), (1, 100), log=True)
    assert log.y(10) == pytest.approx((log.y(1) + log.y(100)) / 2)


def test_a_map_leaves_its_diagonal_and_missing_pairs_blank() -> None:
    values = np.array([[9.0, 0.5, np.nan], [0.5, 9.0, 1.0], [np.nan, 1.0, 9.0]])
    drawn = row(heat(values, ["a", "b", "c"], "title"))
    assert re.findall(r"<title>(.*?)</title>", drawn) == ["a, b: 0.5", "b, a: 0.5", "b, c: 1", "c, b: 1"]

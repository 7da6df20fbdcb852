"""The text picture of a trace."""

from __future__ import annotations

import io
import re
import sys

import numpy as np
import pytest

from t2lens.analysis.quantities import grid
from t2lens.viz.labels import clip, fmt, glyphs
from t2lens.viz.terminal import summary, top_reads

from .words import edited, spoken

PROMPT = "the cat saw the dog"
BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def rows(text: str) -> dict[str, str]:
    found = [re.fullmatch(r" +(embed|out|\d\.\w+)  (.*)", line) for line in text.splitlines()]
    return {line[1]: line[2] for line in found if line}


def test_a_row_per_site_and_a_bar_per_position():
    trace = spoken("attnres-full", PROMPT)
    text = summary(trace)
    assert repr(trace) == text
    found = rows(text)
    entropy = grid(trace, "depth_entropy")
    assert [*found] == list(reversed(entropy.sites))
    top = entropy.values[1:].max()
    for site, row in zip(entropy.sites, entropy.values, strict=True):
        if site == "embed":
            assert found[site] == "(the embedding is written, not read)"
        else:
            assert found[site] == "".join(BARS[min(7, int(8 * v / top))] for v in row)


def test_header_checks_and_numbers():
    trace = spoken("attnres-full", PROMPT, name="mine")
    text = summary(trace)
    assert text.startswith("Trace of mine: 6 tokens, residual attnres, 3 blocks, d_model 16")
    assert f"verified: {len(trace.verify())} checks passed" in text
    label, reads = top_reads(trace, "out", 5)
    assert label == "own depth weights"
    weights = trace.dataset["depth_weight"].sel(read="out", pos=5)
    assert reads == sorted(
        ((str(s), float(v)) for s, v in zip(weights.source.values, weights.values, strict=True)), key=lambda p: -p[1]
    )
    assert f"{reads[0][0]} {reads[0][1]:.3g}" in text
    assert f"{np.nanmean(trace.dataset['loss']):.3f} nats per token over 5 tokens" in text


def test_a_system_without_depth_weights_shows_contributions():
    label, reads = top_reads(spoken("ddl", PROMPT), "out", 2)
    assert label == "contribution norm"
    assert len(reads) == 7
    with pytest.raises(KeyError, match=r"the reads are 0\.attn"):
        top_reads(spoken("ddl", PROMPT), "9.attn", 0)


def test_a_failed_check_comes_first_and_loud():
    trace = spoken("standard", PROMPT)
    trace._meta["checks"][0]["value"] = float("nan")
    text = summary(trace)
    assert "VERIFY FAILED" in text
    assert "verified:" not in text
    assert trace._meta["checks"][0]["name"] in text


def test_missing_and_not_finite_are_not_bars():
    trace = spoken("depth-swa", PROMPT)
    assert rows(summary(trace))["1.mlp"] == "(reads one carried stream: no weights over depth)"
    norms = trace.dataset["residual_norm"].values.copy()
    norms[2, 3] = np.inf
    assert rows(summary(edited(trace, residual_norm=norms), "residual_norm"))["1.attn"][3] == "?"
    assert "gate: none; this system has no gates" in summary(trace, "gate")


def test_a_wide_range_is_told_on_a_log_scale():
    trace = spoken("standard", PROMPT)
    norms = trace.dataset["residual_norm"].values.copy()
    norms[:], norms[2, 3], norms[1, 1] = 10.0, 1000.0, 0.1
    text = summary(edited(trace, residual_norm=norms), "residual_norm")
    assert "low bar 0.1 to full bar 1000, log scale" in text
    assert rows(text)["0.attn"] == BARS[4] * 6
    assert rows(text)["1.attn"][3] == BARS[7]
    assert rows(text)["0.mlp"][1] == BARS[0]


def test_long_prompts_and_notices():
    trace = spoken("standard", " ".join(["word"] * 90), n_ctx=80)
    text = summary(trace)
    assert "note: The prompt has 91 tokens" in text
    assert "positions 16 to 79" in text
    assert len(rows(text)["1.attn"]) == 64


def test_a_terminal_without_unicode_gets_digits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    text = summary(spoken("standard", "the cat saw the d\u00f6g"))
    assert text.isascii()
    assert set(rows(text)["2.attn"]) <= set("12345678")


def test_labels():
    assert glyphs(" a\n\t\x00\u202e") == "\u00b7a\u21b5\u21e5\\u0000\\u202e"
    assert glyphs("") == "\u2205"
    family = "\U0001f468\U0001f3fd\u200d\U0001f469\u200d\U0001f467"
    assert glyphs(family) == family
    assert glyphs("a\u200db\u2066") == "a\\u200db\\u2066"
    assert glyphs("\u0301") == "\u25cc\u0301"
    assert glyphs("e\u0301") == "e\u0301"
    assert clip("abcdef", 4) == "abc\u2026"
    assert fmt(float("inf")) == "inf"
    assert fmt(0.000123456, 3) == "0.000123"

"""The HTML of a trace: one piece, no network, tokens never as markup, small."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch

import t2lens
from t2lens.viz.page import classic_js, fragment, page
from t2lens.viz.payload import maps_payload
from t2lens.zoo.recipes import RECIPES

from .words import Words, edited, spoken

PROMPT = "the <b>cat</b> saw </script><script>alert(1)</script> &amp; the dog"


def unpack(html: str) -> dict[str, Any]:
    """The payload inside, as the script reads it."""
    (data,) = re.findall(r'atob\("([A-Za-z0-9+/=]+)"\)', html)
    raw = gzip.decompress(base64.b64decode(data))
    n = int.from_bytes(raw[:4], "little")

    def arrays(node: dict[str, Any]) -> Any:
        if "span" not in node:
            return node
        start, end = node["span"]
        return np.frombuffer(raw[4 + n + start : 4 + n + end], f"<{node['dtype']}").reshape(node["shape"])

    return json.loads(raw[4 : 4 + n], object_hook=arrays)


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs


def test_the_page_holds_the_numbers_of_the_trace():
    trace, other = spoken("attnres-full", PROMPT, dtype=torch.float32), spoken("ddl", PROMPT, dtype=torch.float32)
    payload = unpack(page(trace, other))
    assert payload["precision"] == "f4"
    assert [panel["name"] for panel in payload["panels"]] == ["attnres-full", "ddl"]
    for panel, one in zip(payload["panels"], (trace, other), strict=True):
        np.testing.assert_array_equal(
            panel["ways"][""]["grids"]["residual_norm"][1:], one.dataset["residual_norm"].values
        )
        assert panel["tokens"] == one.tokens
    values = trace.dataset["depth_weight"].values.swapaxes(1, 2)
    np.testing.assert_array_equal(
        payload["panels"][0]["ways"][""]["reads"]["weights"]["values"], values[~np.isnan(values[:, :, 0])]
    )


def test_tokens_and_titles_are_never_markup():
    trace = spoken("standard", PROMPT, name="<i>model</i>")
    html = page(trace)
    tags = Tags(html)
    assert "b" not in tags.seen
    assert "i" not in tags.seen
    assert tags.seen.count("script") == 1
    assert html.count("</script>") == 1
    assert "alert(1)" not in html.split("<script>")[1]  # numbers and tokens are compressed; the prompt is escaped text


def test_nothing_is_fetched():
    html = page(spoken("standard", PROMPT))
    assert not re.search(r"https?://|\bimport\s|\bfetch\(|XMLHttpRequest|url\((?!data:)", html)
    assert not [name for name, _ in Tags(html).attributes if name in ("src", "href", "onclick", "onerror")]
    assert "default-src 'none'" in html


def test_a_fragment_is_deterministic_and_named_after_its_numbers():
    a, b = spoken("standard", PROMPT), spoken("attnres-full", PROMPT)
    assert fragment(a) == fragment(a)
    names = {re.findall(r'<div data-t2lens="(\w+)">', fragment(trace))[0] for trace in (a, b)}
    assert len(names) == 2


def test_the_renderer_is_one_classic_script():
    code = classic_js()
    assert code.isascii()
    assert "renderMaps" in code
    assert not re.search(r"^\s*(export|import)\b", code, re.M)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_prompt_of_64_tokens_stays_small(name: str):
    model = t2lens.build(RECIPES[name], seed=0)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():  # zero queries and gates would compress to nothing
        p.data += 0.3 * p.data.abs().mean().clamp(min=0.1) * torch.randn(p.shape, generator=generator)
    model.tokenizer = Words()
    ids = torch.randint(2048, (64,), generator=generator)
    trace = t2lens.trace(model, ids, name=name)
    one, two = fragment(trace), page(trace, trace)
    assert len(one) < 380_000
    assert len(two) < 380_000
    assert unpack(one)["precision"] == "f4" or len(trace.ways) > 1  # several ways are several times the numbers


def test_over_the_budget_numbers_are_rounded_and_it_is_said(monkeypatch: pytest.MonkeyPatch):
    trace = spoken("attnres-full", PROMPT)
    tiny_weight = trace.dataset["sequence_attention"].values.copy()
    tiny_weight[1, :, 3, 1] = 1e-12
    norms = trace.dataset["residual_norm"].values.copy()
    norms[0, 0] = 1e6
    trace = edited(trace, sequence_attention=tiny_weight, residual_norm=norms)
    exact = unpack(fragment(trace))
    assert exact["precision"] == "f4"
    assert exact["notes"] == []
    monkeypatch.setattr("t2lens.viz.page.BUDGET", 1000)
    rounded = unpack(fragment(trace))
    assert rounded["precision"] == "f2"
    assert "rounded to 3 digits" in rounded["notes"][-1]
    small = rounded["panels"][0]["sequence"]["1.attn"][3 * 4 // 2 + 1]
    assert 0 < small < 1e-6  # not zero, which would look like an exact zero
    assert rounded["panels"][0]["ways"][""]["grids"]["residual_norm"][1, 0] == 1e6  # more than float16 can hold


def test_notices_and_failed_checks_reach_the_page():
    trace = spoken("standard", " ".join(["word"] * 40))
    payload = unpack(page(trace))
    assert "context 32" in payload["notes"][0]
    trace._meta["checks"][1]["value"] = 1.0
    assert "fails" in unpack(page(trace))["panels"][0]["badge"]["text"]


def test_without_scripts_the_text_summary_stands():
    html = fragment(spoken("ddl", PROMPT))
    text = html.split("<pre>")[1].split("</pre>")[0]
    assert "Trace of ddl" in text
    assert "gate beta" in text
    assert "&lt;b&gt;cat&lt;/b&gt;" in text


@pytest.mark.parametrize(
    ("systems", "quantity", "depth"),
    [
        (["attnres-full"], "depth_entropy", "weights"),
        (["ddl"], "gate", "mixing"),
        (["standard"], "residual_norm", "mixing"),
        (["attnres-full", "ddl"], "depth_lookback", "mixing"),
        (["attnres-full", "attnres-block"], "depth_entropy", "mixing"),
    ],
)
def test_the_first_view_shows_what_both_systems_have(systems: list[str], quantity: str, depth: str):
    view = unpack(page(*(spoken(system, PROMPT) for system in systems)))["view"]
    assert (view["quantity"], view["depth"]) == (quantity, depth)
    assert view["site"].endswith(".attn")


def test_the_first_view_can_be_chosen():
    trace = spoken("standard", PROMPT)
    view = unpack(fragment(trace, quantity="write_norm", depth="contribution", cell=(0, 2, "1.mlp")))["view"]
    assert (
        view.items()
        >= {"panel": 0, "pos": 2, "site": "1.mlp", "quantity": "write_norm", "depth": "contribution"}.items()
    )
    with pytest.raises(ValueError, match="not 'nothing'"):
        fragment(trace, quantity="nothing")


def test_repr_html_is_the_fragment():
    trace = spoken("standard", PROMPT)
    assert trace._repr_html_() == fragment(trace)
    assert unpack(fragment(trace)).keys() == maps_payload([trace]).keys()

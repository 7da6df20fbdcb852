"""The dashboard in a real browser: a typed prompt, a click, the same numbers as the API, a link that restores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

import t2lens
from t2lens.viz.payload import triangle

from .driver import Maps, new_page

pytestmark = pytest.mark.e2e

PROMPT = "the king saw the king <b>& said"
A, B = "attnres-full", "ddl-cc-ec"


@pytest.fixture(scope="module")
def traces() -> dict[str, t2lens.Trace]:
    return {name: t2lens.trace(t2lens.load(name), PROMPT) for name in (A, B)}


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page, errors = new_page(browser)
    yield page
    page.close()
    assert errors == []


def link(server: str, **params: str) -> str:
    return f"{server}/?{urlencode({'a': A, 'b': B, 'depth': 'mixing', **params})}"


def wait_idle(page: Any) -> None:
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=90_000)


def warm(color: tuple[int, int, int]) -> bool:
    return color[0] > color[2] + 30


def asked(page: Any) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(page.url).query).items()}


def test_a_typed_prompt_a_click_and_a_reload(page: Any, server: str, traces: dict[str, t2lens.Trace]) -> None:
    page.goto(link(server, quantity="residual_norm", node="A:1:1.mlp"))
    maps = Maps(page)
    wait_idle(page)
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_role("button", name="Run").click()
    n = len(traces[A].tokens)
    page.wait_for_function(
        "n => { const find = (root) => root.querySelector('[data-map=\"grid-A\"]') || [...root.querySelectorAll('*')]"
        ".filter((e) => e.shadowRoot).map((e) => find(e.shadowRoot)).find(Boolean);"
        " const c = find(document); return c && c.dataset.geom && JSON.parse(c.dataset.geom).cols === n; }",
        arg=n,
    )
    # tokens are text: no element came of <b>, and the repeated words are columns of their own
    assert page.locator(".t2l b").count() == 0
    assert "".join(traces[A].tokens[1:]) == PROMPT

    # a click in A: the node that reads most from one earlier word and from one earlier layer, by the API
    data = traces[A].dataset
    pos, site = n - 1, "5.attn"
    row = 1 + list(data["read"].values).index(site)
    strongest = {}
    for name, trace in traces.items():
        attention = trace.dataset["sequence_attention"].sel(layer=5).mean("head").values[pos, :pos]
        mixing = trace.dataset["mixing"].sel(read=site, pos=pos).values
        key, atom = int(attention.argmax()), int(mixing[:row].argmax())
        assert attention[key] > 0.05
        strongest[name] = (key, atom)
    before = {letter: maps.pixel(f"grid-{letter}", strongest[name][0], row) for letter, name in (("A", A), ("B", B))}
    maps.click("grid-A", pos, row)
    for letter, name in (("A", A), ("B", B)):
        key, atom = strongest[name]
        assert not warm(before[letter])  # the quantity is drawn in cool colours ...
        assert warm(maps.pixel(f"grid-{letter}", key, row))  # ... the arm along the sequence in warm ones
        assert warm(maps.pixel(f"grid-{letter}", pos, atom))  # and the arm down the depth

    # the same numbers as the API, in the panel and under the pointer
    assert maps.cell() == {"panel": 0, "pos": pos, "site": site}
    for letter, trace in (("A", traces[A]), ("B", traces[B])):
        check_tables(maps, letter, trace, site, pos)
    expected = [float(trace.dataset["residual_norm"].sel(read=site, pos=pos)) for trace in traces.values()]
    tip = maps.hover("grid-B", pos, row)
    shown = [float(line.split("residual norm:")[1]) for line in tip if "residual norm:" in line]
    assert shown == pytest.approx(expected, rel=1e-5)

    # everything is in the URL, and a reload brings it back
    page.wait_for_url(f"**node=A%3A{pos}%3A{site}**", timeout=60_000)
    wait_idle(page)
    assert asked(page) == {
        "a": A,
        "b": B,
        "prompt": PROMPT,
        "quantity": "residual_norm",
        "depth": "mixing",
        "head": "mean",
        "layer": "cross",
        "compare": "both",
        "node": f"A:{pos}:{site}",
    }
    page.reload()
    maps.wait()
    assert maps.cell() == {"panel": 0, "pos": pos, "site": site}
    assert page.get_by_label("Prompt").input_value() == PROMPT
    check_tables(maps, "A", traces[A], site, pos)


def test_a_new_prompt_keeps_the_node_and_forgets_old_clicks(page: Any, server: str) -> None:
    page.goto(link(server, prompt=PROMPT))
    maps = Maps(page)
    last = maps.geometry("grid-A")["cols"] - 1
    maps.click("grid-A", last, 12)
    site = maps.cell()["site"]
    page.wait_for_url(f"**node=A%3A{last}%3A{site}**", timeout=60_000)
    page.get_by_label("Prompt").fill("the king")
    page.get_by_role("button", name="Run").click()
    page.wait_for_url("**prompt=the+king&**", timeout=60_000)
    wait_idle(page)
    short = maps.geometry("grid-A")["cols"] - 1
    assert short < last and maps.cell() == {"panel": 0, "pos": short, "site": site}
    page.locator(".t2l select").first.select_option("write_norm")
    page.wait_for_url("**quantity=write_norm**", timeout=60_000)
    assert asked(page)["node"] == f"A:{short}:{site}"


def check_tables(maps: Maps, letter: str, trace: t2lens.Trace, site: str, pos: int) -> None:
    """Every number of the panel against the trace, to the digits shown."""
    data = trace.dataset

    def same(text: str, value: float) -> None:
        digits = len(text.split(".")[1]) if "." in text else 0
        assert float(text) == pytest.approx(value, abs=0.51 * 10.0**-digits + 1e-6 * abs(value))

    norms = data["contribution_norm"].sel(read=site, pos=pos)
    by_name = {
        "weight": ("source", data["depth_weight"].sel(read=site, pos=pos)),
        "mix": ("atom", data["mixing"].sel(read=site, pos=pos)),
        "norm": ("atom", norms),
        "share": ("atom", norms / norms.sum()),
    }
    tables = ["weights"] if set(data["source"].values) == set(data["atom"].values) else ["weights", "atoms"]
    for table in tables:
        _, *heads = maps.heads(letter, table)
        rows = maps.table(letter, table)
        ranked_by = maps.page.locator(f'[data-node="{letter}"] [data-table="{table}"] th[aria-sort]').text_content()
        assert rows and ranked_by in heads
        for name, *numbers in rows:
            for head, number in zip(heads, numbers, strict=True):
                if head != "holds":
                    dim, values = by_name[head]
                    same(number, float(values.sel({dim: name})))
        ranked = [abs(float(row[1 + heads.index(ranked_by)])) for row in rows]
        assert ranked == sorted(ranked, reverse=True)
    attention = data["sequence_attention"].sel(layer=int(site.split(".")[0])).mean("head").values[pos]
    rows = maps.table(letter, "sequence")
    assert len(rows) == 5
    for _, key, weight in rows:
        same(weight, float(attention[int(key)]))
    assert float(rows[0][2]) == pytest.approx(float(attention[: pos + 1].max()), abs=1e-4)
    for k, (_, probability) in enumerate(maps.table(letter, "next")):
        same(probability, math.exp(float(data["next_logprob"].values[pos, k])))


def test_hover_is_linked_across_panels_and_maps(page: Any, server: str, traces: dict[str, t2lens.Trace]) -> None:
    page.goto(link(server, prompt=PROMPT, node="A:5:4.attn"))
    maps = Maps(page)
    for name, trace in ((A, traces[A]), (B, traces[B])):
        letter = "A" if name == A else "B"
        reads = trace.dataset["mixing"].sel(read="4.attn", pos=5).values
        tip = maps.hover(f"depth-{letter}", 2, 8)  # column 2: 0.mlp; row 8: 4.attn
        assert tip[0] == "4.attn reads 0.mlp   at position 5"
        line = next(line for line in tip if line.startswith(letter))
        assert float(line.split()[1]) == pytest.approx(float(reads[2]), rel=1e-5)
        packed = triangle(trace.dataset["sequence_attention"].sel(layer=4).mean("head").values)
        tip = maps.hover(f"sequence-{letter}", 3, 5)
        assert float(next(line for line in tip if line.startswith(letter)).split()[-1]) == pytest.approx(
            float(packed[5 * 6 // 2 + 3]), rel=1e-5
        )
    assert "masked" in "".join(maps.hover("sequence-A", 5, 3))
    assert "no such source" in "".join(maps.hover("depth-A", 12, 3))
    tip = maps.hover("grid-A", 4, 0)
    assert "written, not read" in tip[1] and tip[0].startswith("embed")


def test_the_keyboard_moves_the_node(page: Any, server: str) -> None:
    page.goto(link(server, prompt=PROMPT, node="A:5:4.attn"))
    maps = Maps(page)
    maps.canvas("grid-A").focus()
    for key in ("ArrowRight", "ArrowUp", "ArrowUp", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    assert maps.cell() == {"panel": 0, "pos": 4, "site": "5.attn"}
    assert "5.attn" in maps.canvas("grid-A").get_attribute("aria-label")
    assert "position 4" in page.locator(".t2l .live").text_content()
    page.keyboard.press("PageUp")
    page.keyboard.press("End")
    last = maps.geometry("grid-A")["cols"] - 1
    assert maps.cell() == {"panel": 0, "pos": last, "site": "out"}
    assert "reads only its own position" in page.locator(".t2l .why").first.text_content()
    page.wait_for_url(f"**node=A%3A{last}%3Aout**", timeout=60_000)


def test_a_system_without_gates_says_so(page: Any, server: str) -> None:
    page.goto(link(server, prompt=PROMPT, quantity="gate"))
    maps = Maps(page)
    assert "no gates" in "".join(maps.hover("grid-A", 2, 3))
    g = maps.geometry("grid-A")
    empty = maps.pixel("grid-A", g["cols"] - 2, 2)
    assert empty == maps.pixel("grid-A", g["cols"] - 3, 3) and empty != maps.pixel("grid-B", g["cols"] - 2, 2)


def test_changing_the_quantity_needs_no_server_and_reaches_the_url(page: Any, server: str) -> None:
    page.goto(link(server, prompt=PROMPT, quantity="residual_norm", node="A:3:4.attn"))
    maps = Maps(page)
    wait_idle(page)
    before = maps.pixel("grid-A", 7, 12)
    page.locator(".t2l select").first.select_option("write_norm")
    assert maps.pixel("grid-A", 7, 12) != before
    page.wait_for_url("**quantity=write_norm**", timeout=60_000)


def test_one_head_at_a_time(page: Any, server: str, traces: dict[str, t2lens.Trace]) -> None:
    page.goto(link(server, prompt=PROMPT, node="A:8:4.attn"))
    maps = Maps(page)
    page.get_by_label("attention head").select_option("3")
    for letter, trace in (("A", traces[A]), ("B", traces[B])):
        pattern = trace.dataset["sequence_attention"].sel(layer=4).values[3, 8]
        for _, key, weight in maps.table(letter, "sequence"):
            assert float(weight) == pytest.approx(float(pattern[int(key)]), abs=6e-4)
    assert "head 3" in page.locator(".t2l .why").first.text_content()
    page.wait_for_url("**head=3**", timeout=60_000)
    page.reload()
    maps.wait()
    assert page.get_by_label("attention head").input_value() == "3"


def test_a_hostile_link_is_text_and_falls_back(page: Any, server: str) -> None:
    page.goto(
        link(
            server,
            a="<img src=x onerror=alert(1)>",
            prompt="</script><img src=x onerror=alert(1)>",
            node="C:x",
        )
    )
    Maps(page)
    assert page.locator("img[src=x]").count() == 0
    assert page.get_by_text("which does not exist").count() == 1
    assert page.get_by_text("a node reads like").count() == 1


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1024, 768)])
def test_it_fits_the_screen(browser: Any, server: str, screenshots: Path, width: int, height: int) -> None:
    page, errors = new_page(browser, width, height)
    page.goto(server)
    maps = Maps(page)
    wait_idle(page)
    page.wait_for_timeout(300)
    page.screenshot(path=screenshots / f"dashboard-{width}.png")
    box = maps.canvas("grid-B").bounding_box()
    assert box["x"] + box["width"] <= width and box["y"] + box["height"] <= height  # both grids without scrolling
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    page.close()
    assert errors == []

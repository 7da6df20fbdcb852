"""The maps as one moves in them: the walk to a node's origins, what is asked for and answered."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import t2lens
from t2lens.residual import AttnRes
from t2lens.viz.payload import exchange_js, maps_payload, renderer_js

from .driver import BASE, IDS, Show, same, trace

pytestmark = pytest.mark.e2e


def pack(values: Any) -> dict[str, Any]:
    array = np.ascontiguousarray(values, dtype="<f4")
    return {"dtype": "f4", "shape": list(array.shape), "b64": base64.b64encode(array.tobytes()).decode()}


def node(panel: int, pos: int, site: str) -> dict[str, Any]:
    return {"panel": panel, "pos": pos, "site": site}


# ---- the walk ------------------------------------------------------------------------------------------------------
def test_a_walk_from_a_logit_to_its_origins_and_back(show: Show) -> None:
    payload = maps_payload([trace(residual=AttnRes())], cell=(0, 7, "1.mlp"))
    payload["panels"][0]["next"] = [[["x", -1.0]]] * 8
    maps = show(payload)
    maps.page.locator('[data-table="next"] button').click()
    assert maps.crumbs() == "next token x \u2190 out@7"
    maps.click("grid-A", 7, 5)  # 2.attn, in the arm downwards
    assert maps.crumbs() == "next token x \u2190 out@7 \u2190 2.attn@7"
    maps.click("grid-A", 3, 5)  # its arm to the left
    assert maps.cell() == node(0, 3, "2.attn")
    maps.click("grid-A", 3, 2)  # its arm downwards
    assert maps.crumbs() == "next token x \u2190 out@7 \u2190 2.attn@7 \u2190 2.attn@3 \u2190 0.mlp@3"
    maps.page.locator(".walk button", has_text="2.attn@7").click()
    assert maps.crumbs() == "next token x \u2190 out@7 \u2190 2.attn@7" and maps.cell() == node(0, 7, "2.attn")
    for expected in (node(0, 3, "0.mlp"), node(0, 3, "2.attn"), node(0, 7, "2.attn"), node(0, 7, "out")):
        maps.page.keyboard.press("Backspace")
        assert maps.cell() == expected
    maps.page.keyboard.press("Alt+ArrowLeft")
    assert maps.cell() == node(0, 7, "1.mlp") and maps.crumbs() == "1.mlp@7"
    assert maps.page.get_by_role("button", name="Back").is_disabled()
    maps.page.wait_for_timeout(50)
    heard = [value for key, value in maps.page.evaluate("heard") if key == "cell"]
    assert len(heard) >= 8
    # the same breadcrumb from a link, and the same way back
    walk = max((value["trail"] for value in heard if "trail" in value), key=len)
    maps = show(maps_payload([trace(residual=AttnRes())], cell=(0, 3, "0.mlp"), trail=walk))
    assert maps.crumbs() == "next token x \u2190 out@7 \u2190 2.attn@7 \u2190 2.attn@3 \u2190 0.mlp@3"
    for expected in (node(0, 3, "2.attn"), node(0, 7, "2.attn"), node(0, 7, "out")):
        maps.page.get_by_role("button", name="Back").click()
        assert maps.cell() == expected
    assert maps.crumbs() == "next token x \u2190 out@7"
    assert maps.page.get_by_role("button", name="Back").is_disabled()


def test_a_cell_outside_the_cross_starts_another_walk(show: Show) -> None:
    maps = show(maps_payload([trace(residual=AttnRes())], cell=(0, 6, "1.mlp")))
    maps.click("grid-A", 6, 1)
    assert maps.crumbs() == "1.mlp@6 \u2190 0.attn@6"
    maps.click("grid-A", 2, 4)  # not what 0.attn reads
    assert maps.crumbs() == "1.mlp@2"
    maps.canvas("grid-A").press("ArrowUp")
    maps.canvas("grid-A").press("ArrowUp")
    maps.canvas("grid-A").press("Backspace")  # a run of arrow keys is one choice
    assert maps.crumbs() == "1.mlp@2"
    maps.canvas("grid-A").press("Backspace")
    assert maps.crumbs() == "1.mlp@6 \u2190 0.attn@6"


# ---- playback ------------------------------------------------------------------------------------------------------
def test_playback_goes_up_and_reports_where_it_stops_only(show: Show) -> None:
    maps = show(maps_payload([trace()], cell=(0, 4, "embed")))
    page = maps.page
    page.get_by_label("direction of playback").select_option("depth 16")
    page.get_by_role("button", name="play", exact=True).click()
    page.wait_for_function("view.view.site === 'out' && !view.player.timer")
    heard = page.evaluate("heard")
    assert [key for key, _ in heard] == ["cell"] and heard[0][1] == node(0, 4, "out")
    page.get_by_label("direction of playback").select_option("sequence 4")
    page.get_by_role("button", name="next node").click()
    assert maps.cell() == node(0, 5, "out")
    page.get_by_role("button", name="previous node").click()
    page.get_by_role("button", name="previous node").click()
    assert maps.cell() == node(0, 3, "out")
    page.wait_for_function("heard.at(-1)[1].pos === 3")  # steps that follow fast are reported as one
    assert [key for key, _ in page.evaluate("heard")] in [["cell"] * n for n in (2, 3, 4)]


def test_nothing_moves_by_itself_for_those_who_ask_for_less_motion(show: Show) -> None:
    maps = show(maps_payload([trace()], cell=(0, 4, "embed")), still=True)
    assert maps.page.get_by_role("button", name="play", exact=True).count() == 0
    maps.page.get_by_role("button", name="next node").click()
    assert maps.cell() == node(0, 4, "0.attn")


# ---- what is asked for ---------------------------------------------------------------------------------------------
def rollout(pos: int, site: str, rows: list[str], seed: int = 0, panel: int = 0) -> dict[str, Any]:
    values = np.full((len(rows), len(IDS)), np.nan)
    values[: rows.index(site) + 1, : pos + 1] = np.random.default_rng(seed).random((rows.index(site) + 1, pos + 1))
    values[1, 0] = 0.0
    answer = {"kind": "rollout", "way": "", "values": pack(values), "ends": ["The embeddings absorb 0.987 of it."]}
    return {**answer, **node(panel, pos, site)}


def test_the_rollout_is_asked_for_shown_and_kept(show: Show) -> None:
    payload = maps_payload([trace()], quantity="residual_norm", cell=(0, 5, "1.mlp"))
    rows = payload["panels"][0]["rows"]
    maps = show(payload)
    outside = maps.pixel("grid-A", 7, 6)
    maps.page.get_by_label("of the node, show").select_option("rollout")
    assert maps.wants() == [{"kind": "rollout", **node(0, 5, "1.mlp"), "way": ""}]
    assert "computing" in maps.said("grid-A")
    first = rollout(5, "1.mlp", rows)
    maps.answer(first)
    assert "absorb 0.987" in maps.said("grid-A")
    values = np.frombuffer(base64.b64decode(first["values"]["b64"]), "<f4").reshape(len(rows), -1)
    line = next(line for line in maps.hover("grid-A", 2, 1) if "share of 1.mlp@5" in line)
    assert same(line, values[1, 2])
    row, column = divmod(int(values[:4, :6].argmax()), 6)
    red, _, blue = maps.pixel("grid-A", column, row, down=0.45)  # above its number
    assert red > blue + 30  # warm
    assert maps.pixel("grid-A", 7, 6) != outside  # the rest steps back
    assert not any("share" in line for line in maps.hover("grid-A", 7, 3))
    maps.click("grid-A", 3, 6)  # another node: asked again
    maps.page.wait_for_function("heard.filter(([k]) => k === 'ask').length === 2")
    assert maps.wants()[0]["pos"] == 3
    maps.answer(rollout(3, "2.mlp", rows, seed=1))
    maps.page.evaluate("p => again(p)", payload)  # the same numbers once more: nothing is lost
    assert "absorb 0.987" in maps.said("grid-A")
    maps.page.get_by_role("button", name="Back").click()
    maps.page.wait_for_timeout(60)
    assert "absorb 0.987" in maps.said("grid-A")
    assert maps.page.evaluate("heard.filter(([k]) => k === 'ask').length") == 2  # was there
    maps.answer({"kind": "rollout", **node(0, 3, "0.attn"), "way": "", "why": "It is too long for that."})
    maps.click("grid-A", 3, 1)
    assert "too long for that" in maps.said("grid-A")


def test_without_a_server_a_rollout_is_shown_where_the_page_has_it(show: Show) -> None:
    payload = maps_payload([trace()], cell=(0, 5, "1.mlp"))
    assert show(payload, served=False).page.get_by_label("of the node, show").count() == 0
    maps = show({**payload, "answers": [rollout(5, "1.mlp", payload["panels"][0]["rows"])]}, served=False)
    maps.page.get_by_label("of the node, show").select_option("rollout")
    assert "absorb 0.987" in maps.said("grid-A")
    maps.click("grid-A", 2, 2)
    assert "not in this page" in maps.said("grid-A")
    assert maps.page.get_by_role("button", name="measure effects").count() == 0


def test_answers_arrive_in_a_mount_of_their_own_before_or_after_the_maps(show: Show) -> None:
    payload = maps_payload([trace()], cell=(0, 5, "1.mlp"))
    payload["view"] |= {"layer": "rollout"}
    other = {**payload, "rev": "other"}
    maps = show(payload)
    maps.page.evaluate(
        """async ([code, small, payload, other, answer]) => {
            const file = (text) => URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
            const mount = (await import(file(code))).default, hand = (await import(file(small))).default;
            const root = (id) => Object.assign(document.body.appendChild(document.createElement("div")), { id })
                .attachShadow({ mode: "open" });
            const set = () => {};
            hand({ data: { of: "other", answers: [answer] } });
            const bytes = new TextEncoder().encode(JSON.stringify(other));
            window.leave = mount({ parentElement: root("late"), data: bytes, setStateValue: set });
            hand({ data: { of: payload.rev, answers: [answer, null, { kind: "x" }] } });
            for (let k = 0; k < 9; k++) hand({ data: { of: `r${k}`, answers: [] } });
            for (const each of exchange.views) each.settle();
        }""",
        [renderer_js(), exchange_js(), payload, other, rollout(5, "1.mlp", payload["panels"][0]["rows"])],
    )
    said = maps.page.locator("section .why", has_text="absorb 0.987")
    assert said.count() == 2
    assert maps.page.evaluate("[exchange.views.size, exchange.waiting.size]") == [2, 4]
    maps.page.evaluate("leave(); stop()")
    assert maps.page.evaluate("exchange.views.size") == 0 and maps.page.locator(".t2l").count() == 0


def test_answers_are_bounded(show: Show) -> None:
    payload = maps_payload([trace()], cell=(0, 5, "1.mlp"))
    rows = payload["panels"][0]["rows"]
    maps = show(payload)
    maps.answer(*[rollout(5, "1.mlp", rows, panel=panel) for panel in range(100)])
    assert maps.page.evaluate("view.answers.kept.size") == 64


@pytest.mark.parametrize(
    ("mode", "head"), [("weights", "weight"), ("mixing", "mix"), ("contribution", "norm"), ("share", "share")]
)
def test_sources_go_by_what_the_maps_show_and_all_of_them_can_be_shown(show: Show, mode: str, head: str) -> None:
    one = trace(seed=8, residual=AttnRes(block_size=2)) if mode != "weights" else trace(seed=8, residual=AttnRes())
    maps = show(maps_payload([one], depth=mode, cell=(0, 5, "out")))
    table = "weights" if mode == "weights" else "atoms"
    variable, dim = {"weights": ("depth_weight", "source"), "mixing": ("mixing", "atom")}.get(
        mode, ("contribution_norm", "atom")
    )
    here = one.dataset[variable].sel(read="out").isel(pos=5).dropna(dim)
    wanted = [str(name) for name in here[dim].values[np.argsort(-np.abs(here.values), kind="stable")]]
    assert maps.page.locator(f'[data-table="{table}"] th[aria-sort]').text_content() == head
    assert [row[0] for row in maps.table("A", table)] == wanted[:5]
    assert f"5 of {len(wanted)}" in maps.heads("A", table)[0]
    button = maps.page.get_by_role("button", name=f"show all {len(wanted)}").first
    button.focus()
    maps.page.keyboard.press("Enter")
    assert [row[0] for row in maps.table("A", table)] == wanted
    assert maps.page.evaluate("document.activeElement.dataset.part") == f"more {table}"  # still there, to fold it again
    maps.page.keyboard.press("Enter")
    assert len(maps.table("A", table)) == 5


def test_effects_stand_beside_mass(show: Show) -> None:
    one = trace(residual=AttnRes())
    maps = show(maps_payload([one], cell=(0, 5, "out")))
    names = [str(name) for name in one.dataset["source"].values]
    effect = dict(zip(names, np.random.default_rng(2).random(len(names)).tolist(), strict=True))
    effect[names[3]] = 1e-9
    maps.page.get_by_role("button", name="measure effects").click()
    assert maps.wants() == [{"kind": "effects", **node(0, 5, "out"), "way": ""}]
    assert maps.page.get_by_text("measuring effects").is_visible()
    found = {"kind": "effects", **node(0, 5, "out"), "way": "", "over": "source", "unit": "nats", "values": effect}
    maps.answer({**found, "floor": 1e-6, "note": "KL at out of this position."})
    assert maps.heads("A", "weights")[-1] == "effect"
    assert "Effect in nats. KL at out" in maps.page.locator('[data-note="effects"]').text_content()
    maps.page.get_by_role("button", name="effect", exact=True).click()
    table = maps.table("A", "weights")
    best = sorted(effect, key=lambda name: -effect[name])[:5]
    assert [row[0] for row in table] == best
    assert [float(row[-1]) for row in table] == pytest.approx([effect[name] for name in best], abs=5.1e-4)
    maps.click("grid-A", 3, 3)
    assert maps.page.get_by_role("button", name="measure effects").is_visible()


def test_the_lens_and_the_followed_token_are_those_of_the_trace(show: Show) -> None:
    one = t2lens.trace(t2lens.build(replace(BASE, residual=AttnRes()), seed=7), IDS, follow="next")
    maps = show(maps_payload([one], cell=(0, 4, "1.attn")))
    data = one.dataset.sel(read="1.attn").isel(pos=4)
    lens = maps.table("A", "lens")
    assert [row[0] for row in lens] == [
        str(one.dataset["word"].values[k]) for k in data["lens_top"].values[: len(lens)]
    ]
    expected = np.exp(data["lens_top_logprob"].values[: len(lens)])
    assert [float(row[1]) for row in lens] == pytest.approx(expected, abs=2e-5)
    assert maps.heads("A", "follow")[0] == f"followed at out: {IDS[5]}"
    shown = {name: float(value) for name, value in maps.table("A", "follow")}
    assert shown["logit"] == pytest.approx(float(data["logit"]), rel=1e-3)
    assert shown.get("of it from no write", 0) == pytest.approx(float(data["logit_bias"]), rel=1e-3, abs=1e-6)
    maps.click("grid-A", 7, 3)  # where the prompt ends the likeliest token is followed
    assert maps.heads("A", "follow")[0] == f"followed at out: {one.dataset['followed'].values[7]}"


def test_a_long_prompt_comes_in_pieces(show: Show) -> None:
    one = trace(IDS * 32, seed=6)
    data, n = one.dataset, len(IDS) * 32
    payload = maps_payload([one], quantity="residual_norm", depth="mixing", sequence=False, cell=(0, 200, "1.attn"))
    whole = maps_payload([one])["panels"][0]
    (panel,) = payload["panels"]
    way = panel["ways"][""]
    full, grids = dict(way["reads"]), dict(way["grids"])
    way |= {"reads": {}, "grids": {"residual_norm": grids["residual_norm"]}}
    for quantity in payload["quantities"][1:]:
        quantity["later"] = True
    panel |= {"next": None, "heads": whole["heads"], "windows": {}, "patterns": {}}
    maps = show({**payload, "lean": True})
    wants = [{"kind": "column", "panel": 0, "pos": 200}, {"kind": "row", **node(0, 200, "1.attn")}]
    assert maps.wants() == wants
    assert "computing" in maps.said("depth-A") and "computing" in maps.said("sequence-A")

    def column(key: str) -> dict[str, Any]:
        sent = full[key]
        values = np.frombuffer(base64.b64decode(sent["values"]["b64"]), "<f4").reshape(-1, n)
        return {**sent, "values": pack(values[:, 200:201])}

    rows = len(panel["rows"]) - 1
    lens = {
        "words": ["x", "y"],
        "top": pack(np.ones((rows, 1, 1))),
        "logprob": pack(np.full((rows, 1, 1), np.log(0.25))),
    }
    pattern = data["sequence_attention"].sel(layer=1).values[:, 200, :201]
    reads = {key: column(key) for key in full}
    maps.answer(
        {"kind": "column", "panel": 0, "pos": 200, "ways": {"": {"reads": reads, "lens": lens}}, "next": [["z", -1.0]]},
        {**wants[1], "mean": pack(pattern.mean(0)), "max": pack(pattern.max(0)), "heads": pack(pattern)},
    )
    mixing = data["mixing"].transpose("read", "pos", "atom").values[:, 200]
    assert same(maps.hover("depth-A", 2, 4)[1].split("(")[0].strip(), mixing[4, 2])
    assert same(maps.hover("sequence-A", 40, 0)[1], pattern.mean(0)[40])
    assert "row of position 200 alone" in maps.said("sequence-A")
    assert maps.table("A", "lens") == [["y", "0.2500"]] and maps.table("A", "next")[0][0] == "z"
    best = int(pattern.mean(0).argmax())
    assert maps.table("A", "sequence")[0][1] == str(best)
    maps.page.get_by_label("attention head").select_option("1")
    assert same(maps.hover("sequence-A", 40, 0)[1], pattern[1, 40])
    maps.page.get_by_label("colour of the grid").select_option("write_norm")
    assert maps.wants() == [{"kind": "grid", "panel": 0, "way": "", "quantity": "write_norm"}]
    assert "not here yet" in "".join(maps.hover("grid-A", 5, 3))
    maps.answer({**maps.wants()[0], "values": grids["write_norm"], "missing": {}})
    written = np.frombuffer(base64.b64decode(grids["write_norm"]["b64"]), "<f4").reshape(-1, n)
    shown = re.search(r": (\S+)", maps.hover("grid-A", 5, 3)[1])
    assert shown and float(shown[1]) == pytest.approx(written[3, 5], rel=2e-6)
    # at 256 positions no label is cut: nothing is drawn in the last pixels of the strip
    g = maps.geometry("grid-A")
    edge = maps.canvas("grid-A").evaluate(
        """(c, y) => { const w = c.width, d = c.getContext("2d").getImageData(w - 1, y, 1, c.height - y).data;
            return d.some((v, k) => k % 4 === 3 && v > 0); }""",
        round(g["y"] + g["rows"] * g["ch"]) + 3,
    )
    assert not edge


def test_maps_finer_than_the_screen_average_and_say_so(show: Show) -> None:
    one = trace(IDS * 37, seed=6)
    maps = show(maps_payload([one, one], quantity="residual_norm", cell=(0, 200, "1.attn")), width=700)
    assert "Downsampled: a pixel shows the mean of" in maps.said("sequence-A")
    shown = re.search(r"residual norm: (\S+)", maps.hover("grid-A", 251, 3)[1])
    assert shown and float(shown[1]) == pytest.approx(one.dataset["residual_norm"].values[2, 251], rel=2e-6)


# ---- keys, words ---------------------------------------------------------------------------------------------------
def test_every_map_has_a_cursor_for_keys(show: Show) -> None:
    maps = show(maps_payload([trace(residual=AttnRes())], cell=(0, 5, "1.mlp")))
    depth = maps.canvas("depth-A")
    depth.focus()
    depth.press("ArrowRight")
    first = maps.page.locator(".tip").text_content()
    assert first.startswith("1.mlp reads embed")
    depth.press("ArrowUp")
    depth.press("ArrowRight")
    assert maps.page.locator(".tip").text_content().startswith("2.attn reads 0.attn")
    assert "2.attn reads 0.attn" in maps.page.locator("[aria-live]").text_content()
    depth.press("Enter")
    assert maps.cell() == node(0, 5, "2.attn")
    depth.press("Enter")  # the cursor stands on a source of the chosen read now
    assert maps.cell() == node(0, 5, "0.attn")
    depth.press("Escape")
    assert not maps.page.locator(".tip").is_visible()
    sequence = maps.canvas("sequence-A")
    sequence.focus()
    for key in ("ArrowUp", "ArrowUp", "ArrowLeft"):
        sequence.press(key)
    assert maps.page.locator(".tip").text_content().startswith("query 4")
    sequence.press("Enter")
    assert maps.cell() == node(0, 4, "0.attn")
    grid, data = maps.canvas("grid-A"), trace(residual=AttnRes()).dataset
    maps.click("grid-A", 6, 7)
    grid.press("Enter")  # down, to what it reads most of
    best = data["depth_weight"].sel(read="out").isel(pos=6)
    site = str(best["source"].values[int(best.argmax("source"))])
    assert maps.cell() == node(0, 6, site) and maps.crumbs() == f"out@6 \u2190 {site}@6"
    maps.click("grid-A", 6, 5)
    grid.press("Shift+Enter")  # to where it looks most
    looks = data["sequence_attention"].sel(layer=2).mean("head").values[6, :6]
    assert maps.cell() == node(0, int(looks.argmax()), "2.attn")
    grid.press("Backspace")
    assert maps.cell() == node(0, 6, "2.attn")
    names = [maps.canvas(name).get_attribute("aria-label") for name in ("grid-A", "depth-A", "sequence-A")]
    assert all(names) and maps.page.locator("select:not([aria-label])").count() == 0


def test_tokens_of_every_script_stay_legible(show: Show) -> None:
    words = [
        "<bos>",
        "\u05e9\u05dc\u05d5\u05dd",
        "\u0301",
        "e\u0301",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "a\u200db",
    ]
    words += ["\u2066x", "\U0001f1e9\U0001f1ea" * 12]
    payload = maps_payload([trace()], cell=(0, 1, "1.attn"))
    payload["panels"][0]["tokens"] = words
    maps = show(payload)
    seen = [maps.hover("grid-A", c, 3)[0].split("   ")[2] for c in range(8)]
    assert seen[1] == "\u2068\u05e9\u05dc\u05d5\u05dd\u2069"  # fenced: it does not turn the line around
    assert seen[2] == "\u25cc\u0301" and seen[3] == "e\u0301"
    assert seen[4] == words[4] and seen[5] == "a\\u200db" and seen[6] == "\\u2066x"
    clipped = maps.page.evaluate("view.panels[0].strips[9].words[7]")
    assert clipped.endswith("\u2026") and len(clipped) % 4 == 1  # whole flags: four code units each, and the dots


def test_many_quantities_fold_and_the_chosen_one_stays(show: Show) -> None:
    payload = maps_payload([trace()], quantity="residual_norm", cell=(0, 1, "1.attn"))
    first = payload["quantities"][0]
    way = payload["panels"][0]["ways"][""]
    payload["quantities"] = [{**first, "key": f"q{k}", "label": f"quantity {k}"} for k in range(18)]
    way["grids"] = {f"q{k}": way["grids"]["residual_norm"] for k in range(18)}
    way |= {"missing": {}, "absent": {}}
    payload["view"]["quantity"] = "q15"
    maps = show(payload)
    assert maps.page.locator('[data-node="A"] .coloured').text_content().startswith("quantity 15  ")
    assert [row[0] for row in maps.table("A", "node")] == [f"quantity {k}" for k in range(4)]
    assert not maps.page.locator('[data-table="more"]').is_visible()
    maps.page.locator("summary").click()
    assert len(maps.table("A", "more")) == 13
    maps.canvas("grid-A").press("ArrowUp")
    assert maps.page.locator('[data-table="more"]').is_visible()

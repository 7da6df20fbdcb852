"""The dashboard in a real browser, against what it promises: seconds, bytes and memory as shares of their limits.

Two random models of 16 blocks on 128 tokens and two of 24 blocks on 2,048 tokens, served as `t2lens app` serves them.
Needs Chromium and playwright (`pip install "t2lens[test]"`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from t2lens.bench.timing import Ratio
from t2lens.config import MLP, Attention, ModelConfig, ResidualConfig
from t2lens.model import build
from t2lens.residual import AttnRes, DeepDelta
from t2lens.zoo.registry import list_models, load, save
from t2lens.zoo.text import sample_texts

__all__ = ["bench_app"]

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
FIRST_MAPS, CLICK, SENT, GROWTH = 6.0, 0.3, 3e6, 1.05  # seconds, seconds, bytes, times
SESSIONS, WARM_UP, INTERACTIONS = 10, 100, 500
# counts tasks that keep the page from answering
WATCH = """() => { window.long = []; new PerformanceObserver((seen) => {
  for (const task of seen.getEntries()) window.long.push(task.duration); }).observe({ type: "longtask" }); }"""


def bench_app(pairs: int = 12) -> Iterator[Ratio]:
    """Opening, clicking, hovering, ten sessions at once, and memory over 500 interactions."""
    with tempfile.TemporaryDirectory() as folder, _chromium() as browser:
        small = [_model(Path(folder) / name, system, 16, 160) for name, system in _SYSTEMS]
        large = [_model(Path(folder) / f"{name}-long", system, 24, 2048) for name, system in _SYSTEMS]
        with _server([*small, *large]) as (address, pid):
            _Visit(browser, address).page.close()  # limits are those of a warm start: somebody has been here before
            yield from _page(browser, address, small, _text(128), pairs, "128 tokens x 16 blocks, two models")
            yield from _page(browser, address, large, _text(2040), 4, "2,048 tokens x 48 sublayers, two models")
            yield _sessions(address)
            yield _memory(browser, address, pid)


_SYSTEMS: tuple[tuple[str, ResidualConfig], ...] = (("one", AttnRes()), ("two", DeepDelta(value_channels=4)))


def _model(folder: Path, residual: ResidualConfig, n_layers: int, n_ctx: int) -> Path:
    """A random model with the tokenizer of the bundled ones."""
    bundled = load(list_models()[0].name)
    cfg = ModelConfig(
        d_vocab=bundled.cfg.d_vocab,
        n_ctx=n_ctx,
        d_model=128,
        n_layers=n_layers,
        attention=Attention(n_heads=4, n_kv_heads=4, d_head=32),
        mlp=MLP(d_mlp=256),
        residual=residual,
    )
    model = build(cfg, seed=0)
    model.tokenizer = bundled.tokenizer
    save(model, folder)
    return folder


def _text(n_tokens: int) -> str:
    """Bundled text of about so many tokens."""
    model, words = load(list_models()[0].name), " ".join(sample_texts(32))
    return model.to_string(model.to_tokens(words)[0, 1:n_tokens])


@contextlib.contextmanager
def _chromium() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise ValueError('This suite drives a browser: pip install "t2lens[test]".') from None
    if path is None:
        raise ValueError("This suite drives Chromium, which is not installed (on Debian: apt-get install chromium).")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@contextlib.contextmanager
def _server(models: Sequence[Path]) -> Iterator[tuple[str, int]]:
    """(address, process id) of a dashboard with these models beside the bundled ones."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"from t2lens.apps.launch import run; run(port={port}, models={[str(each) for each in models]!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/_stcore/health", timeout=1):
                break
            if process.poll() is not None:
                raise ValueError("The dashboard could not be started; `t2lens app` says why.")
            time.sleep(0.25)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(timeout=20)


class _Visit:
    """An open page, what it received, and what went wrong in it."""

    def __init__(self, browser: Any, url: str) -> None:
        self.page = browser.new_page(viewport={"width": 1440, "height": 900})
        self.errors: list[str] = []
        self.received = 0
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("websocket", lambda socket: socket.on("framereceived", self._count))
        self.page.goto(url)
        self.page.wait_for_selector('[data-map="grid-A"][data-geom]', timeout=180_000)

    def _count(self, frame: Any) -> None:
        self.received += len(frame)

    def settle(self) -> None:
        self.page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=180_000)

    def click(self, across: float, up: float) -> float:
        """Seconds until the node at this fraction of the grid is chosen and drawn, with what the server is asked of it.
        Where the browser has all of it, the server hears of the choice later."""
        canvas = self.page.locator('[data-map="grid-A"]')
        g = canvas.evaluate("(canvas) => JSON.parse(canvas.dataset.geom)")
        x, y = g["x"] + across * g["cols"] * g["cw"], g["y"] + (1 - up) * g["rows"] * g["ch"]
        before = self.page.locator(".t2l").first.get_attribute("data-cell")
        start = time.perf_counter()
        canvas.click(position={"x": x, "y": y})
        maps = self.page.locator(".t2l").first
        while maps.get_attribute("data-cell") == before or maps.get_attribute("aria-busy") == "true":
            if time.perf_counter() - start > 30:
                raise ValueError("A click on the maps chose nothing within 30 seconds.")
            time.sleep(0.005)
        return time.perf_counter() - start

    def hover(self) -> float:
        """Milliseconds of the longest task while the pointer crosses the grid."""
        self.page.evaluate(WATCH)
        box = self.page.locator('[data-map="grid-A"]').bounding_box()
        for i in range(60):
            self.page.mouse.move(box["x"] + 60 + (box["width"] - 80) * i / 60, box["y"] + 10 + 3 * i)
        self.page.wait_for_timeout(300)
        return max(self.page.evaluate("() => window.long"), default=0.0)


def _page(browser: Any, address: str, models: Sequence[Path], prompt: str, clicks: int, what: str) -> Iterator[Ratio]:
    url = f"{address}/?{urlencode({'a': models[0].name, 'b': models[1].name, 'prompt': prompt})}"
    start = time.perf_counter()
    visit = _Visit(browser, url)
    yield _share(f"{what}: first maps / {FIRST_MAPS:g} s", [time.perf_counter() - start], FIRST_MAPS)
    visit.settle()
    yield _share(f"{what}: bytes sent / {SENT / 1e6:g} MB", [visit.received], SENT, f"{visit.received / 1e6:.2f} MB")
    spots = [(0.2 + 0.7 * ((7 * i) % clicks) / clicks, 0.1 + 0.8 * ((5 * i) % clicks) / clicks) for i in range(clicks)]
    yield _share(f"{what}: click to maps / {CLICK:g} s", [visit.click(*spot) for spot in spots], CLICK)
    longest = visit.hover()
    yield _share(f"{what}: longest task while hovering / 50 ms", [longest / 1000], 0.05)
    if visit.errors:
        raise ValueError(f"The page reported an error: {visit.errors[0]}")
    visit.page.close()


def _sessions(address: str) -> Ratio:
    """Ten visitors, each with a prompt and models of its own, in threads of their own; every one must see its own."""
    names = [info.name for info in list_models()]

    def visit(i: int) -> float:
        prompt, model = f"the king saw {i} men and {2 * i} women", names[i % len(names)]
        with _chromium() as browser:
            start = time.perf_counter()
            page = _Visit(browser, f"{address}/?{urlencode({'a': model, 'b': 'none', 'prompt': prompt})}")
            spent = time.perf_counter() - start
            for k in range(5):
                page.click(0.3 + 0.1 * k, 0.2 + 0.12 * k)
            page.settle()
            shown = page.page.get_by_label("Prompt", exact=True).input_value()
            title = page.page.locator(".t2l section h3").first.text_content() or ""
            if page.errors or shown != prompt or model not in title:
                raise ValueError(f"Session {i} shows {title!r} on {shown!r}: {page.errors[:1]}")
            return spent

    with ThreadPoolExecutor(SESSIONS) as pool:
        spent = list(pool.map(visit, range(SESSIONS)))
    return _share(f"{SESSIONS} sessions at once, each in a browser of its own: first maps / 60 s", spent, 60.0)


def _memory(browser: Any, address: str, pid: int) -> Ratio:
    """Resident memory of the server after many clicks, prompts and edits, over the same after a warm-up."""
    visit = _Visit(browser, address)
    sizes = []
    for i in range(WARM_UP + INTERACTIONS):
        if i % 5 == 4:
            box = visit.page.get_by_label("Prompt", exact=True)
            box.fill(f"the king said number {i} to the queen")
            visit.page.get_by_role("button", name="Run", exact=True).click()
            visit.page.wait_for_timeout(50)
            visit.settle()
        else:
            visit.click(0.1 + 0.8 * ((7 * i) % 31) / 31, 0.1 + 0.8 * ((5 * i) % 29) / 29)
        if i + 1 in (WARM_UP, WARM_UP + INTERACTIONS):
            visit.settle()
            sizes.append(_resident(pid))
    grown = sizes[1] / sizes[0]
    name = f"memory after {INTERACTIONS} interactions / after {WARM_UP}"
    return Ratio(name, grown, grown, grown, GROWTH, 0.0, f"{sizes[1] / 2**20:.0f} MiB")


def _resident(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1]) * 1024
    raise ValueError(f"The memory of process {pid} cannot be read on {os.uname().sysname}.")


def _share(name: str, values: Sequence[float], limit: float, shown: str = "") -> Ratio:
    shares = sorted(value / limit for value in values)
    low, median, high = statistics.quantiles(shares, n=4, method="inclusive") if len(shares) > 1 else shares * 3
    return Ratio(name, median, low, high, 1.0, statistics.median(values), shown)

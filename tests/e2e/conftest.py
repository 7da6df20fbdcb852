"""A headless Chromium and the dashboard's server, one of each per worker."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from t2lens.viz.payload import renderer_js

from .driver import Maps, new_page

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "these tests need Chromium (on Debian: apt-get install chromium)"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the dashboard, started as `t2lens app` starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    code = f"from t2lens.apps.launch import run; run(port={port})"
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=out, stderr=out)
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 240  # a few seconds on a quiet machine
        while time.monotonic() < until:
            assert process.poll() is None, log.read_text()
            try:
                with urllib.request.urlopen(f"{address}/_stcore/health", timeout=1):
                    break
            except OSError:
                time.sleep(0.25)
        else:
            raise AssertionError(f"the server did not answer:\n{log.read_text()}")
        assert address in log.read_text()
        yield address
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture
def screenshots() -> Path:
    folder = ROOT / "screenshots"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Maps]]:
    """Draw a payload in a page of its own; at the end no page had an error or asked the network for anything.

    served: whether somebody hears the choices (the list `heard`) and answers questions (the function `answer`).
    """
    pages, trouble = [], []

    def draw(
        payload: dict[str, Any], dark: bool = False, width: int = 1440, served: bool = True, still: bool = False
    ) -> Maps:
        page, errors = new_page(browser, width)
        page.emulate_media(
            color_scheme="dark" if dark else "light", reduced_motion="reduce" if still else "no-preference"
        )
        page.on("request", lambda request: trouble.append(request.url) if request.url.startswith("http") else None)
        body = json.dumps(payload).replace("</", "<\\/")
        hear = "(k, v) => heard.push([k, v])" if served else "null"
        script = f"""{renderer_js()}
            const root = document.getElementById("root"), heard = window.heard = [];
            window.again = (p) => renderMaps(root, p, {hear});
            window.stop = again({body});
            window.view = root.t2lens;
            window.answer = (answers, of = view.rev) => (deliver({{ of, answers }}), view.settle());
            window.exchange = EXCHANGE;"""
        style = ":root{color-scheme:light dark}.t2l{--st-background-color:Canvas;--st-text-color:CanvasText}"
        html = f"<!doctype html><meta charset='utf-8'><style>{style}</style><div id='root'></div>"
        file = tmp_path / f"{len(pages)}.html"
        file.write_text(f"{html}<script type='module'>{script}</script>", encoding="utf-8")
        page.goto(file.as_uri())
        pages.append(page)
        trouble.append(errors)
        return Maps(page)

    yield draw
    for page in pages:
        page.close()
    assert [item for item in trouble if item] == []

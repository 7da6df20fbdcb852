"""A headless Chromium and the dashboard's server, one of each per worker."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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

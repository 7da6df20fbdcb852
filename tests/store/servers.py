"""A small HTTP server of a folder that knows ranges of bytes and counts what it sends."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Traffic:
    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []  # path, bytes of the body
        self.ranges = True  # whether ranges are honoured
        self.failing = ""  # paths with this in them give 500

    @property
    def n_bytes(self) -> int:
        return sum(n for _, n in self.sent)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, Traffic]]:
    """(URL, traffic) of a server of the folder, in a thread, until the block ends."""
    traffic = Traffic()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            file = folder / self.path.lstrip("/")
            if traffic.failing and traffic.failing in self.path:
                self.send_error(500)
                return
            if not file.is_file():
                self.send_error(404)
                return
            data = file.read_bytes()
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            status = 200
            if asked and traffic.ranges:
                if int(asked[1]) >= len(data):
                    self.send_error(416)
                    return
                end = int(asked[2]) + 1 if asked[2] else len(data)
                data, status = data[int(asked[1]) : end], 206
            traffic.sent.append((self.path, len(data)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", traffic
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""Start the dashboard: one local server, no telemetry, no watcher, the first page made beforehand."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Sequence

from t2lens.apps import dashboard_file
from t2lens.apps.uploads import LIMIT_MB

__all__ = ["run"]

HOST = "127.0.0.1"
OPTIONS = {
    "server_address": HOST,
    "server_fileWatcherType": "none",  # watching torch's lazy modules raises, and there is nothing to watch
    "server_maxUploadSize": LIMIT_MB,
    "browser_gatherUsageStats": False,
    "browser_serverAddress": HOST,
    "client_toolbarMode": "minimal",
    "client_showErrorDetails": "none",
    "logger_hideWelcomeMessage": True,
    "logger_level": "error",
    "theme_light_primaryColor": "#2f4f9e",  # per theme, so that light and dark follow the reader's system
    "theme_dark_primaryColor": "#8aa8f0",
    "theme_baseFontSize": 14,
    "theme_baseRadius": "small",
}


def run(port: int = 8501, open_browser: bool = False, models: Sequence[str] = ()) -> None:
    """Serve the dashboard on this machine only, until interrupted. Prints the address.

    `models`, whatever `t2lens.load` takes, stand beside the bundled ones, and the first of them is shown first.
    Raises ValueError when the port is not a port or is taken, or a model cannot be loaded.
    """
    if type(port) is not int or not 1 <= port <= 65535:
        raise ValueError(f"A port is a whole number from 1 to 65535, not {port!r}.")
    with socket.socket() as probe:
        if os.name != "nt":  # as the server itself: what was open when one stopped holds the port for a minute
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            raise ValueError(f"Port {port} is in use; choose another with --port.") from None
    sys.stdout.write("loading the models ...\n")
    sys.stdout.flush()
    from streamlit.web import bootstrap

    options = {**OPTIONS, "server_port": port, "server_headless": not open_browser}
    bootstrap.load_config_options(options)
    from t2lens.apps import loaders, views  # noqa: F401 - the pages too are imported before what is here is frozen

    for model in models:
        loaders.add(model)
    _warm()
    gc.collect()
    gc.freeze()  # Streamlit collects garbage after every run: not among half a million objects that stay, 0.2 s a click
    sys.stdout.write(f"t2lens dashboard: http://{HOST}:{port}  (Ctrl-C stops it)\n")
    sys.stdout.flush()
    bootstrap.run(str(dashboard_file()), False, [], options)


def _warm() -> None:
    """Import, load and run what the first visitor sees; the caches are the server's own."""
    from t2lens.apps import loaders
    from t2lens.apps.frame import first_view

    if not (names := loaders.model_names()):
        return
    chosen = first_view(names)
    for name in {chosen.model_a, chosen.model_b}:
        try:
            loaded = loaders.load(name)
            loaders.trace(loaded, chosen.prompt)
            loaders.verification(loaded)
        except ValueError as error:  # the page will say so too, and other models may work
            sys.stderr.write(f"{error}\n")

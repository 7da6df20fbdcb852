"""What a page gives to take home: figures, numbers, one file that works offline, and the Python that makes the same.

Nothing is made before it is asked for: a page pays for its own view alone.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import streamlit as st

from t2lens.analysis.catalog import Analysis
from t2lens.analysis.export import to_csv, to_json
from t2lens.apps import loaders

__all__ = [
    "Download",
    "analysis_code",
    "export_menu",
    "finding_downloads",
    "maps_code",
    "maps_downloads",
    "maps_export",
    "stem",
    "theme",
]


@dataclass(frozen=True, kw_only=True)
class Download:
    """One file of the menu, made when its button is pressed."""

    label: str
    file: str
    mime: str
    make: Callable[[], bytes]


def theme() -> Any:
    """ "light" or "dark", as the reader's page is."""
    return st.context.theme.type or "light"


def export_menu(downloads: Sequence[Download], *, code: str = "", key: str, label: str = "Export") -> None:
    """A popover with a button for each file, and the Python that makes the same."""
    with st.popover(label, icon=":material/download:"):
        if find_spec("vl_convert") is None:
            st.text("PNG needs vl-convert-python (pip install vl-convert-python).")
        places = st.columns(2)
        for i, each in enumerate(downloads):
            if each.mime == "image/png" and find_spec("vl_convert") is None:
                continue
            places[i % 2].download_button(
                each.label,
                each.make,
                each.file,
                each.mime,
                key=f"{key}-{each.file}",
                on_click="ignore",
                width="stretch",
            )
        if code:
            st.caption("The same in Python")
            st.code(code, language="python", wrap_lines=True)


def finding_downloads(
    findings: Sequence[Any], names: Sequence[str], *, stem: str, code: str = "", look: Any = "light"
) -> list[Download]:
    """Figures of every chart, tables and arrays, and one page, of one or two findings; stem: how files begin."""
    from t2lens.viz.finding_page import finding_page
    from t2lens.viz.pictures import picture_of
    from t2lens.viz.raster import to_png
    from t2lens.viz.series import series

    found: list[Download] = []
    for i in range(max((len(each.charts) for each in findings), default=0)):
        title = next(series(each, i).title for each in findings if i < len(each.charts))

        def svg(i: int = i) -> str:
            return picture_of(findings, i, names, difference=True, theme=look)

        short, part = title if len(title) <= 28 else title[:27] + "\u2026", f"{stem}-{i + 1}"
        found.append(_download(f"SVG: {short}", f"{part}.svg", "image/svg+xml", lambda svg=svg: svg().encode()))
        found.append(_download(f"PNG: {short}", f"{part}.png", "image/png", lambda svg=svg: to_png(svg())))
    for letter, each in zip("AB" if len(findings) > 1 else ("",), findings, strict=True):
        own, of = f"{stem}{f'-{letter.lower()}' if letter else ''}", f", {letter}" if letter else ""
        found.append(_download(f"Numbers (CSV){of}", f"{own}.csv", "text/csv", each.to_csv))
        found.append(_download(f"Numbers (JSON){of}", f"{own}.json", "application/json", each.to_json))
    page = lambda: finding_page(findings, names, theme=look, code=code).encode()  # noqa: E731
    return [*found, _download("One page (HTML)", f"{stem}.html", "text/html", page)]


def maps_downloads(traces: Sequence[Any], view: Mapping[str, Any], *, stem: str, look: Any = "light") -> list[Download]:
    """The figure, numbers, a page and the trace files of the two-axis maps. view: quantity, depth, cell, head, way."""
    from t2lens.viz.maps_picture import maps_picture
    from t2lens.viz.page import page
    from t2lens.viz.raster import to_png

    def svg() -> str:
        return maps_picture(traces, theme=look, **view)

    found = [
        _download("Figure (SVG)", f"{stem}.svg", "image/svg+xml", lambda: svg().encode()),
        _download("Figure (PNG)", f"{stem}.png", "image/png", lambda: to_png(svg())),
        _download("Numbers (CSV)", f"{stem}.csv", "text/csv", lambda: to_csv(traces)),
        _download("Numbers (JSON)", f"{stem}.json", "application/json", lambda: to_json(traces)),
        _download("One page (HTML)", f"{stem}.html", "text/html", lambda: page(*traces, **view).encode()),
    ]
    for letter, trace in zip("AB", traces, strict=False):
        of = f" {letter}" if len(traces) > 1 else ""
        name = f"{stem}{f'-{letter.lower()}' if of else ''}.safetensors"
        found.append(
            _download(f"Trace{of} (safetensors)", name, "application/octet-stream", lambda trace=trace: _saved(trace))
        )
    return found


def analysis_code(
    entry: Analysis, model: str, prompt: str, options: Mapping[str, Any], *, passages: int, edits: str
) -> str:
    """Python that runs an analysis as the page did."""
    module, function = entry.function.split(":")
    given = f"sample_texts({passages})" if passages else repr(prompt)
    chosen = "".join(f", {name}={value!r}" for name, value in options.items())
    call = f"finding = {function}(model, {given}{chosen})"
    lines = ["import t2lens", f"from {module} import {function}"]
    lines += ["from t2lens.edits import edited, read_edits"] if edits else []
    lines += ["from t2lens.zoo.text import sample_texts"] if passages else []
    lines += ["", f"model = t2lens.load({model!r})"]
    lines += [f"with edited(model, read_edits({edits!r})):", f"    {call}"] if edits else [call]
    return "\n".join([*lines, f'finding.save_figure("{entry.key}.svg")', "finding.dataset  # every number"])


def maps_code(sides: Sequence[Any], view: Mapping[str, Any], follow: Sequence[Any] = ()) -> str:
    """Python that makes the traces and the figure of the maps. sides: A and B (`t2lens.apps.frame.Side`); follow: the
    token that each trace follows."""
    lines = ["import t2lens", ""]
    for i, side in enumerate(sides):
        more = f", edits={side.edits!r}" if side.edits else ""
        more += f", follow={follow[i]!r}" if i < len(follow) and follow[i] not in (None, "") else ""
        model = f"t2lens.load({loaders.address(side.loaded.name)!r})"
        lines.append(f"{'ab'[i]} = t2lens.trace({model}, {side.prompt!r}, name={side.name!r}{more})")
    chosen = "".join(f", {name}={value!r}" for name, value in view.items() if value not in ("", None))
    other = ", b" if len(sides) > 1 else ""
    return "\n".join([*lines, f'a.save_figure("maps.svg"{other}{chosen})', "a.dataset  # every number"])


def maps_export(place: Any, sides: Sequence[Any], traces: Sequence[Any], follow: Sequence[Any] = ()) -> None:
    """The export menu of the two-axis maps, of what the session shows, in `place`."""
    state = st.session_state
    cell = state["cell"]
    view = {name: state[name] for name in ("quantity", "depth", "head", "way")}
    view["cell"] = (cell.panel, cell.pos, cell.site)
    files = maps_downloads(traces, view, stem=stem("maps", *(side.name for side in sides)), look=theme())
    with place:
        export_menu(files, code=maps_code(sides, view, follow), key="export")


def stem(*words: str) -> str:
    """A file name of words, with nothing in it that a file name must not hold."""
    return (
        "-".join(re.sub(r"[^\w.]+", "-", word, flags=re.ASCII).strip("-.") for word in words if word)[:80] or "t2lens"
    )


def _download(label: str, file: str, mime: str, make: Callable[[], bytes]) -> Download:
    return Download(label=label, file=file, mime=mime, make=make)


def _saved(trace: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return trace.save(Path(folder) / "trace.safetensors").read_bytes()

"""What a page gives to take home: figures, numbers, and one file that works offline.

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

from t2lens.analysis.export import to_csv, to_json
from t2lens.apps.answers import LONG, way_of
from t2lens.apps.snippets import maps_code
from t2lens.apps.walk import parse_walk
from t2lens.viz.colors import ThemeName
from t2lens.viz.labels import clip
from t2lens.viz.maps_between import chosen

__all__ = [
    "Download",
    "export_menu",
    "figures",
    "finding_downloads",
    "maps_downloads",
    "maps_export",
    "stem",
    "theme",
]


MIME = {
    "svg": "image/svg+xml",
    "png": "image/png",
    "csv": "text/csv",
    "json": "application/json",
    "html": "text/html",
    "safetensors": "application/octet-stream",
}


@dataclass(frozen=True)
class Download:
    """One file of the menu, made when its button is pressed; its name ends as one of `MIME`."""

    label: str
    file: str
    make: Callable[[], bytes]

    @property
    def kind(self) -> str:
        return self.file.rpartition(".")[2]


def figures(label: str, name: str, svg: Callable[[], str]) -> list[Download]:
    """A picture as both kinds of files."""
    from t2lens.viz.raster import to_png

    return [
        Download(f"SVG: {label}", f"{name}.svg", lambda: svg().encode()),
        Download(f"PNG: {label}", f"{name}.png", lambda: to_png(svg())),
    ]


def theme() -> ThemeName:
    """ "light" or "dark", as the reader's page is."""
    return st.context.theme.type or "light"


def export_menu(downloads: Sequence[Download], *, code: str = "", key: str) -> None:
    """A popover with a button for each file, and the Python that makes the same."""
    with st.popover("Export", icon=":material/download:"):
        if find_spec("vl_convert") is None:
            st.text("PNG needs vl-convert-python (pip install vl-convert-python).")
        places = st.columns(2)
        for i, each in enumerate(downloads):
            if each.kind == "png" and find_spec("vl_convert") is None:
                continue
            places[i % 2].download_button(
                each.label,
                each.make,
                each.file,
                MIME[each.kind],
                key=f"{key}-{each.file}",
                on_click="ignore",
                width="stretch",
            )
        if code:
            st.caption("The same in Python")
            st.code(code, language="python", wrap_lines=True)


def finding_downloads(
    findings: Sequence[Any], names: Sequence[str], *, stem: str, code: str = "", look: ThemeName = "light"
) -> list[Download]:
    """Figures of every chart, tables and arrays, and one page, of one or two findings; stem: how files begin."""
    from t2lens.viz.finding_page import finding_page
    from t2lens.viz.pictures import picture_of
    from t2lens.viz.series import series

    found: list[Download] = []
    for i in range(max((len(each.charts) for each in findings), default=0)):
        title = next(series(each, i).title for each in findings if i < len(each.charts))

        def svg(i: int = i) -> str:
            return picture_of(findings, i, names, difference=True, theme=look)

        found += figures(clip(title, 28), f"{stem}-{i + 1}", svg)
    for letter, each in zip("AB" if len(findings) > 1 else ("",), findings, strict=True):
        own, of = f"{stem}{f'-{letter.lower()}' if letter else ''}", f", {letter}" if letter else ""
        found.append(Download(f"Numbers (CSV){of}", f"{own}.csv", each.to_csv))
        found.append(Download(f"Numbers (JSON){of}", f"{own}.json", each.to_json))
    page = lambda: finding_page(findings, names, theme=look, code=code).encode()  # noqa: E731
    return [*found, Download("One page (HTML)", f"{stem}.html", page)]


def maps_downloads(
    traces: Sequence[Any],
    view: Mapping[str, Any],
    *,
    stem: str,
    look: ThemeName = "light",
    rollouts: Callable[[], Sequence[Any]] = tuple,
    trail: Sequence[Mapping[str, Any]] = (),
) -> list[Download]:
    """The figure, numbers, a page and the trace files of the two-axis maps. view, rollouts: as `maps_picture` takes
    them; trail: how one came to the node, for the page."""
    from t2lens.viz.maps_picture import maps_picture
    from t2lens.viz.page import page

    found = [
        *figures("figure", stem, lambda: maps_picture(traces, theme=look, rollouts=rollouts(), **view)),
        Download("Numbers (CSV)", f"{stem}.csv", lambda: to_csv(traces)),
        Download("Numbers (JSON)", f"{stem}.json", lambda: to_json(traces)),
        Download(
            "One page (HTML)", f"{stem}.html", lambda: page(*traces, rollouts=rollouts(), trail=trail, **view).encode()
        ),
    ]
    for letter, trace in zip("AB", traces, strict=False):
        of = f" {letter}" if len(traces) > 1 else ""
        name = f"{stem}{f'-{letter.lower()}' if of else ''}.safetensors"
        found.append(Download(f"Trace{of} (safetensors)", name, lambda trace=trace: _saved(trace)))
    return found


def maps_export(place: Any, sides: Sequence[Any], traces: Sequence[Any], follow: Sequence[Any] = ()) -> None:
    """The export menu of the two-axis maps, of what the session shows, in `place`."""
    state = st.session_state
    cell = state["cell"]
    view = {name: state[name] for name in ("quantity", "depth", "head", "way")}
    view["cell"] = (cell.panel, cell.pos, cell.site)
    usual = {"layer": "cross", "compare": "both", "align": "left"}
    view |= {key: state[key] for key in usual if state[key] not in (None, usual[key])}
    starts = _starts(sides, traces, view) if "layer" in view else []
    files = maps_downloads(
        traces,
        view,
        stem=stem("maps", *(side.name for side in sides)),
        look=theme(),
        rollouts=lambda: [None if at is None else _rollout(side, at) for side, at in zip(sides, starts, strict=False)],
        trail=parse_walk(state["walk"]),
    )
    with place:
        export_menu(files, code=maps_code(sides, view, follow, starts), key="export")


def _starts(sides: Sequence[Any], traces: Sequence[Any], view: Mapping[str, Any]) -> list[dict[str, Any] | None]:
    """What the rollout of each side starts from, as `t2lens.analysis.rollout` takes it; None where the page shows
    none."""
    places, sites = chosen(traces, view["cell"], view.get("align", "left"))
    found: list[dict[str, Any] | None] = []
    for side, trace, pos, site in zip(sides, traces, places, sites, strict=True):
        if pos is None or site == "embed" or len(trace.tokens) > LONG:
            found.append(None)
            continue
        way = way_of(side.loaded.model, site, view["way"])
        found.append({"pos": pos, "site": site, **({"way": way} if way else {})})
    return found


def _rollout(side: Any, start: Mapping[str, Any]) -> Any:
    try:
        return side.analyse("rollout", dict(start))
    except ValueError:  # the page says why: edits under which it would not be right
        return None


def stem(*words: str) -> str:
    """A file name of words, with nothing in it that a file name must not hold."""
    return (
        "-".join(re.sub(r"[^\w.]+", "-", word, flags=re.ASCII).strip("-.") for word in words if word)[:80] or "t2lens"
    )


def _saved(trace: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return trace.save(Path(folder) / "trace.safetensors").read_bytes()

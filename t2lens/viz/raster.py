"""Pixels: a map of many cells as a small PNG inside an SVG, and an SVG as a PNG or PDF without a browser."""

from __future__ import annotations

import base64
import functools
import struct
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from t2lens.files import write_file
from t2lens.viz.colors import FONT

__all__ = ["FIGURE_KINDS", "encode_png", "figure_bytes", "image", "save_figure", "to_pdf", "to_png"]

FIGURE_KINDS = ("svg", "png", "pdf")


def encode_png(pixels: np.ndarray) -> bytes:
    """A PNG of uint8 [row, column, 3 or 4] (red, green, blue, alpha)."""
    height, width, channels = pixels.shape
    assert pixels.dtype == np.uint8 and channels in (3, 4), (pixels.dtype, pixels.shape)
    rows = np.concatenate(
        [np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1
    )  # filter 0 for each row

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 6, 0, 0, 0)
    data = zlib.compress(rows.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def image(pixels: np.ndarray, x: float, y: float, width: float, height: float, data: str = "") -> str:
    """An SVG image whose pixels stay squares however large it is drawn. data: further attributes, already escaped."""
    coded = base64.b64encode(encode_png(pixels)).decode()
    return (
        f'<image x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" preserveAspectRatio="none" '
        f'image-rendering="optimizeSpeed" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{coded}"{data}/>'
    )


def to_png(svg: str, scale: float = 2.0) -> bytes:
    """An SVG of t2lens as PNG bytes, `scale` pixels for each of its own.

    Text is drawn with the fonts of this machine, and with fonts that the library brings where there are none.
    ValueError in one sentence where the library vl-convert-python is missing.
    """
    return _library().svg_to_png(_drawable(svg), scale=scale)


def to_pdf(svg: str) -> bytes:
    """The same as a PDF, for papers: lines and text stay lines and text."""
    return _library().svg_to_pdf(_drawable(svg))


def figure_bytes(svg: str, kind: str) -> bytes:
    """An SVG in one of `FIGURE_KINDS`. ValueError for another one."""
    if kind not in FIGURE_KINDS:
        raise ValueError(f"A figure is written as .svg, .png or .pdf, not as .{kind}.")
    return {"svg": str.encode, "png": to_png, "pdf": to_pdf}[kind](svg)


def save_figure(path: str | Path, svg: str) -> Path:
    """Write an SVG as the ending of the file says: .svg, .png or .pdf. ValueError for another one."""
    path = Path(path)
    return write_file(path, figure_bytes(svg, path.suffix[1:].lower()))


def _library() -> Any:
    try:
        return import_module("vl_convert")
    except ImportError:
        raise ValueError(
            "PNG and PDF need vl-convert-python: pip install vl-convert-python; SVG needs nothing more."
        ) from None


# signs of unseen characters that few fonts have, and what stands for them where none does
_INSTEAD = {"\u21b5": "\u00b6", "\u21e5": "\u2192", "\u2205": "\u00d8"}


def _drawable(svg: str) -> str:
    return svg.translate(str.maketrans({sign: _INSTEAD[sign] for sign in _missing()}))


@functools.cache
def _missing() -> tuple[str, ...]:
    """Those of the signs for which there is no font here: they look like a character that does not exist."""

    def drawn(sign: str) -> bytes:
        text = f'<text x="4" y="22" font-size="16" font-family="{FONT}">x{sign}</text>'
        size = 'width="40" height="30"'
        return _library().svg_to_png(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{text}</svg>', scale=1)

    return tuple(sign for sign in _INSTEAD if drawn(sign) == drawn("\u0378"))

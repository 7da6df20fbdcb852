"""A finding, or two side by side, as one HTML file: pictures, tables, notes and every number; no network."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from t2lens.viz.colors import FONT, THEMES, ThemeName
from t2lens.viz.findings import cell
from t2lens.viz.pictures import picture_of

__all__ = ["finding_page"]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data:">
<title>%(title)s</title>
<style>
:root{color-scheme:%(theme)s}
body{margin:0 auto;max-width:1180px;padding:24px 24px 60px;background:%(paper)s;color:%(ink)s;font:13.5px/1.5 %(font)s}
h1{font-size:19px;font-weight:600;margin:0 0 2px}h2{font-size:14px;font-weight:600;margin:26px 0 6px}
figure{margin:18px 0}svg{display:block;max-width:100%%;height:auto}
.scroll{overflow:auto;max-height:560px}
table{border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums}
th{position:sticky;top:0;background:%(paper)s;text-align:left;border-bottom:1px solid %(ink)s;padding:3px 14px 3px 0}
td{padding:2px 14px 2px 0;white-space:nowrap}td.n{text-align:right}
ul{padding-left:1.2em;color:%(mute)s;font-size:12.5px}pre{background:%(blank)s;padding:10px 12px;overflow:auto}
</style>
</head>
<body>
%(body)s
<script>
%(script)s
for (const figure of document.querySelectorAll("figure")) pictureTips(figure, figure.querySelector("svg"), null);
</script>
</body>
</html>
"""


def finding_page(
    findings: Sequence[Any], names: Sequence[str] = ("", ""), *, theme: ThemeName = "light", code: str = ""
) -> str:
    """A complete HTML file. Its numbers lie in it as JSON, the text of `<script type="application/json">` elements:
    saved as files, `t2lens.analysis.load_finding` reads them. code: the Python that makes them."""
    look, body = THEMES[theme], []
    title = " | ".join(dict.fromkeys(each.title for each in findings))
    body.append(f"<h1>{html.escape(title)}</h1>")
    for chart in range(max(len(each.charts) for each in findings)):
        svg = picture_of(findings, chart, names, difference=True, theme=theme)
        body.append(f"<figure>{svg}</figure>")
    for each, name in zip(findings, names, strict=False):
        verdict = "" if each.passed is None else ": passed" if each.passed else ": FAILED"
        body.append(f"<h2>{html.escape(f'{name} {each.title}{verdict}'.strip())}</h2>{_table(each)}")
        body.append(f"<ul>{''.join(f'<li>{html.escape(note)}</li>' for note in each.notes)}</ul>")
    body += [f"<h2>In Python</h2><pre>{html.escape(code)}</pre>"] if code else []
    for letter, each in zip("AB", findings, strict=False):
        data = each.to_json().decode().replace("<", "\\u003c")
        body.append(f'<script type="application/json" id="finding-{letter}">{data}</script>')
    words = {name: getattr(look, name) for name in ("paper", "ink", "mute", "blank")}
    text = resources.files("t2lens.viz").joinpath("tips.js").read_text("utf-8")
    script = re.sub(r"^export default ", "const entry = ", text, flags=re.M).replace("</", "<\\/")
    return _PAGE % {
        **words,
        "theme": theme,
        "font": FONT,
        "title": html.escape(title),
        "body": "\n".join(body),
        "script": script,
    }


def _table(finding: Any) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in finding.columns)
    rows = "".join(f"<tr>{''.join(map(_entry, row))}</tr>" for row in finding.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _entry(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"<td{' class=n' if number else ''}>{html.escape(cell(value))}</td>"

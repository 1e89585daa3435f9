"""HTML of report pages: the page around them, sections, tiles and tables, in the style of the live page.

The reports of a simulation, of the paper's evaluation and of the usage of a pool are made of these parts. Each page is
one file without external resources. Text is escaped here, except `Markup`.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from typing import Any

from bftrainer.dashboard import files

_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127), "�")


class Markup(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def escape(text: object) -> str:
    """Return text escaped for a page, also in attributes."""
    return text if isinstance(text, Markup) else html.escape(str(text).translate(_CONTROLS))


def page(title: str, lead: str, sections: Iterable[str], data: Any = None) -> str:
    """Return a whole page: its title, HTML that leads into it, and its sections.

    With `data`, the page has the live page's drawing code, which draws the canvases named in `report.js`.
    """
    script = button = only = ""
    if data is not None:
        code = files.script()
        only = f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
        button = '<span class="push"></span><button type="button" class="plain" id="theme">Colours</button>'
        script = f'<script type="application/json" id="data">{files.as_data(data)}</script>\n<script>{code}</script>\n'
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n'
        '<meta http-equiv="Content-Security-Policy" '
        f"content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:{only}\"/>\n"
        f"<title>{escape(title)}</title>\n<style>{files.style()}</style>\n</head>\n<body>\n"
        f'<header class="bar"><h1>{escape(title)}</h1>{button}</header>\n'
        f'<main class="report">\n<div class="lead">{lead}</div>\n{"".join(sections)}</main>\n{script}</body>\n</html>\n'
    )


def section(name: str, heading: str, body: str) -> str:
    """Return a part of the page with a heading; `name` is its anchor."""
    return f'<section class="card" id="{escape(name)}">\n<h2>{escape(heading)}</h2>\n{body}</section>\n'


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return the key figures: name, value and remark of each."""
    items = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>\n"
        for name, value, remark in figures
    )
    return f'<dl class="tiles">\n{"".join(items)}</dl>\n'


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = (), total: Sequence[str] = ()
) -> str:
    """Return a table. The columns `numbers` are aligned to the right; `total` is the last line."""
    right = set(numbers)

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="n">{escape(cell)}</{tag}>' if i in right else f"<{tag}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        )

    top = f"<thead><tr>{line(head, 'th')}</tr></thead>\n" if any(head) else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>\n" for row in rows)
    foot = f"<tfoot><tr>{line(total, 'td')}</tr></tfoot>\n" if total else ""
    return f'<div class="wide"><table>\n{top}<tbody>\n{body}</tbody>\n{foot}</table></div>\n'


def fold(summary: str, body: str) -> str:
    """Return HTML that a click on `summary` shows."""
    return f"<details>\n<summary>{escape(summary)}</summary>\n{body}</details>\n"


def amount(number: float | None) -> str:
    """Return a large number in readable form; nothing for None."""
    if number is None:
        return ""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if abs(number) >= size:
            return f"{number / size:,.2f} {name}"
    return f"{number:,.0f}"

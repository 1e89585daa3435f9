"""File functions deliver the page's files, single or combined into one script.

`cluster/http/dashboard.py` serves the files as they are; `simulate/report.py` includes `script` and `style` in its
page.
"""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

STATIC = {
    "style.css": "text/css; charset=utf-8",
    "format.js": "text/javascript; charset=utf-8",
    "draw.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "tables.js": "text/javascript; charset=utf-8",
    "plots.js": "text/javascript; charset=utf-8",
    "finished.js": "text/javascript; charset=utf-8",
    "past.js": "text/javascript; charset=utf-8",
    "detail.js": "text/javascript; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "theme.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""Files that may be requested, and their media types."""

_REPORT = ("format.js", "draw.js", "theme.js", "report.js")
_IMPORT = re.compile(r'^import [^;]*?from "\./[a-z]+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let)\b)", re.MULTILINE)


@cache
def read(name: str) -> bytes:
    """Return the content of one of the files."""
    return resources.files(__package__).joinpath(name).read_bytes()


@cache
def plotly() -> Path | None:
    """Return the drawing library of the plotly package, without importing the package: that would take a second."""
    try:
        found = importlib.util.find_spec("plotly")
    except (ImportError, ValueError):
        return None
    for folder in found.submodule_search_locations or () if found is not None else ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    return None


def style() -> str:
    """Return the style sheet."""
    return read("style.css").decode()


@cache
def script() -> str:
    """Return the modules that a report needs as one script. Their names do not collide, so imports are removed."""
    parts = (_EXPORT.sub("", _IMPORT.sub("", read(name).decode())) for name in _REPORT)
    return "(() => {\n" + "\n".join(parts) + "})();\n"


def as_data(value: Any) -> str:
    """Return a value as JSON that is safe inside a page's script element, whatever text it holds."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

"""Writes tests/durations.json from a report of pytest: how long those tests took that took two seconds or more.

    python scripts/durations.py REPORT.xml

Tests are started in the order of that file, the longest first (`tests/support/order.py`). `make durations` runs all
tests and then this.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LEAST_S = 2.0


def durations(report: Path) -> dict[str, int]:
    """The long tests of a report by their ids, the longest first."""
    seconds = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - our own file
        path = case.attrib["classname"].replace(".", "/") + ".py"
        name = case.attrib["name"].partition("@")[0] if "[" not in case.attrib["name"] else case.attrib["name"]
        if "]@" in name:
            name = name[: name.rindex("]@") + 1]
        if float(case.attrib["time"]) >= LEAST_S:
            seconds[f"{path}::{name}"] = round(float(case.attrib["time"]))
    return dict(sorted(seconds.items(), key=lambda entry: (-entry[1], entry[0])))


if __name__ == "__main__":
    (ROOT / "tests" / "durations.json").write_text(json.dumps(durations(Path(sys.argv[1])), indent=1) + "\n")

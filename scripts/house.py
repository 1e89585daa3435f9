"""Checks the layout of the source: folders stay small, modules short, and a class name means one thing.

    python scripts/house.py

Prints how many modules and lines each package has. Fails on a folder with more than 18 modules, a module of more than
400 lines, or a class name that is defined twice, unless it is listed here with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "bftrainer"
MOST_MODULES = 18
MOST_LINES = 400

ANY_NUMBER = {"paper": "one module per experiment"}
"""Folders that may have more modules, and why."""
TWICE = {"Pool": "the idle nodes of a machine (core), and a source of nodes (cluster.pools): both are documented names"}
"""Class names that mean two things, and why."""


def problems() -> list[str]:
    """What is against the rules, one sentence each."""
    found: list[str] = []
    folders: dict[str, int] = defaultdict(int)
    lines_of: dict[str, int] = defaultdict(int)
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        name, text = path.relative_to(SOURCE).as_posix(), path.read_text()
        folder, lines = path.parent.relative_to(SOURCE).as_posix(), len(text.splitlines())
        folders[folder] += path.name != "__init__.py"
        lines_of[folder] += lines
        if lines > MOST_LINES:
            found.append(f"{name} has {lines} lines; at most {MOST_LINES} are allowed: split it")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
    for folder, modules in sorted(folders.items()):
        print(f"{modules:3d} modules {lines_of[folder]:6d} lines  {'bftrainer' if folder == '.' else folder}")
        if modules > MOST_MODULES and folder not in ANY_NUMBER:
            found.append(f"{folder} has {modules} modules; at most {MOST_MODULES} are allowed: make sub-packages")
    for name, homes in sorted(classes.items()):
        if len(homes) > 1 and name not in TWICE:
            found.append(f"the class name {name} is defined in {' and '.join(homes)}: rename all but one")
    found += [f"{name} is defined once by now: take it out of TWICE" for name in TWICE if len(classes[name]) < 2]
    return found


def main() -> int:
    """Check, and say what is wrong."""
    found = problems()
    for problem in found:
        print(f"house: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Explanations of scripts in tests: made from text or from a file, with their changes applied."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from bftrainer.explain import Explanation, explain
from bftrainer.explain.edits import apply_changes
from bftrainer.explain.report import Notice

SCRIPTS = Path(__file__).resolve().parents[1] / "explain" / "scripts"


def explain_text(folder: Path, text: str, **others: str) -> Explanation:
    """Write a script, and other modules beside it, to a folder and explain the script."""
    for name, body in {"train": text, **others}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(body))
    return explain(["train.py"], folder)


def explain_script(name: str) -> Explanation:
    """Explain one of the scripts that tests share."""
    return explain([name], SCRIPTS)


def after(explanation: Explanation, folder: Path) -> dict[str, list[str]]:
    """The lines of each changed file after its changes, which must be valid Python."""
    found = {}
    for name in dict.fromkeys(change.file for change in explanation.changes):
        lines = (folder / name).read_text().split("\n")
        changes = [change for change in explanation.changes if change.file == name]
        for change in changes:
            assert change.before is None or lines[change.line - 1] == change.before
        found[name] = apply_changes(lines, changes)
        ast.parse("\n".join(found[name]))
    return found


def changed(explanation: Explanation) -> list[tuple[int, str | None]]:
    """The changes as (line, new text without indentation); None for a line that is removed."""
    return [(one.line, None if one.after is None else one.after.strip()) for one in explanation.changes]


def noticed(notices: tuple[Notice, ...]) -> dict[int, str]:
    """What is said about each line."""
    return {one.line: f"{one.what}; {one.remedy}" for one in notices}

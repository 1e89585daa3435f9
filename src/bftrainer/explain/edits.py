"""Edits of source files: changes of parts of lines, inserted and removed lines, and the diff they make.

Columns are those of the syntax tree: they count the bytes of a line in UTF-8.
"""

from __future__ import annotations

import ast
import difflib
from collections import defaultdict
from collections.abc import Iterable, Sequence

from bftrainer.explain.reading.source import SourceFile, parse
from bftrainer.explain.report import LineChange


class Edits:
    """Edits of the files of a program."""

    def __init__(self) -> None:
        self._files: dict[str, SourceFile] = {}
        self._parts: dict[tuple[str, int], list[tuple[int, int, str]]] = defaultdict(list)
        self._inserted: dict[tuple[str, int], list[str]] = defaultdict(list)
        self._removed: set[tuple[str, int]] = set()

    def replace(self, file: SourceFile, line: int, start: int, end: int, text: str) -> None:
        """Replace the columns from `start` up to `end` of a line."""
        self._files[file.name] = file
        parts = self._parts[file.name, line]
        if (start, end, text) not in parts:
            parts.append((start, end, text))

    def insert(self, file: SourceFile, line: int, text: str) -> None:
        """Insert a line before another one. Inserting the same line twice has no effect."""
        self._files[file.name] = file
        lines = self._inserted[file.name, line]
        if text not in lines:
            lines.append(text)

    def remove(self, file: SourceFile, first: int, last: int) -> None:
        """Remove lines."""
        self._files[file.name] = file
        self._removed |= {(file.name, line) for line in range(first, last + 1)}

    def changes(self) -> tuple[LineChange, ...]:
        """Return the changed lines of all files. A file that would not be valid Python after them is left as it is."""
        return tuple(change for file in self._files.values() for change in self._changes_of(file))

    def left_out(self) -> list[str]:
        """Return the names of the files that would not be valid Python after their changes."""
        return [file.name for file in self._files.values() if not self._changes_of(file)]

    def diff(self) -> str:
        """Return the changes as a unified diff."""
        parts: list[str] = []
        for file in self._files.values():
            changed = apply_changes(file.lines, self._changes_of(file))
            parts += difflib.unified_diff(list(file.lines), changed, file.name, file.name, n=2, lineterm="")
        return "\n".join(parts)

    def _changes_of(self, file: SourceFile) -> list[LineChange]:
        places = {line for name, line in (*self._parts, *self._inserted, *self._removed) if name == file.name}
        changes: list[LineChange] = []
        for line in sorted(places):
            inserted = self._inserted.get((file.name, line), ())
            changes += [LineChange(file.name, line, None, text) for text in inserted]
            if (file.name, line) in self._removed:
                changes.append(LineChange(file.name, line, file.line(line), None))
            elif (file.name, line) in self._parts:
                changes.append(LineChange(file.name, line, file.line(line), self._edited(file, line)))
        return changes if _is_python(apply_changes(file.lines, changes)) else []

    def _edited(self, file: SourceFile, line: int) -> str:
        data = file.line(line).encode()
        for start, end, text in sorted(self._parts[file.name, line], reverse=True):
            data = data[:start] + text.encode() + data[end:]
        return data.decode()


def apply_changes(lines: Sequence[str], changes: Iterable[LineChange]) -> list[str]:
    """Return the lines of a file after its changes."""
    by_line: dict[int, list[LineChange]] = defaultdict(list)
    for change in changes:
        by_line[change.line].append(change)
    result: list[str] = []
    for number in range(1, max([len(lines), *by_line]) + 1):
        kept = [lines[number - 1]] if number <= len(lines) else []
        for change in by_line[number]:
            if change.before is None:
                result.append(change.after or "")
            else:
                kept = [] if change.after is None else [change.after]
        result += kept
    return result


def _is_python(lines: Sequence[str]) -> bool:
    try:
        parse("\n".join(lines))
    except (SyntaxError, ValueError):
        return False
    return True


def indentation(file: SourceFile, line: int) -> str:
    """Return the white space that a line begins with."""
    text = file.line(line)
    return text[: len(text) - len(text.lstrip())]


def add_import(edits: Edits, file: SourceFile, text: str) -> None:
    """Add an import after the imports at the top of a file."""
    body = file.tree.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    last = None
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            last = statement
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.For | ast.While):
            break
    if last is not None:
        edits.insert(file, (last.end_lineno or last.lineno) + 1, text)
    elif body:
        first = body[0]
        decorators = getattr(first, "decorator_list", [])
        edits.insert(file, min([first.lineno, *(one.lineno for one in decorators)]), text)
    else:
        edits.insert(file, len(file.lines) + 1, text)

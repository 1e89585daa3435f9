"""Source files: a Python file is read and parsed, never imported or run. What cannot be read is an `InputError`."""

from __future__ import annotations

import ast
import tokenize
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from bftrainer.errors import InputError

LARGEST = 4_000_000
"""Bytes of the largest file that is read."""


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A parsed file. `name` is how a person knows it; `imports` has the full name of each imported name."""

    path: Path
    name: str
    lines: tuple[str, ...]
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)

    def line(self, number: int) -> str:
        """Return a line by its number; empty if there is none."""
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""


def read_source(path: Path, name: str) -> SourceFile:
    """Read and parse a file."""
    text = _read_text(path, name)
    tree = _parsed(text, name)
    return SourceFile(path, name, tuple(text.split("\n")), tree, _imported_names(tree))


def _read_text(path: Path, name: str) -> str:
    try:
        if not path.exists():
            raise InputError(f"{name}: there is no such file: give the path of a script, or -m MODULE")
        if not path.is_file():
            raise InputError(f"{name}: must be a Python file, but it is none")
        if path.stat().st_size > LARGEST:
            raise InputError(f"{name}: must be a script, but has more than {LARGEST:,} bytes")
        with tokenize.open(path) as file:
            return file.read()
    except OSError as problem:
        raise InputError(f"{name}: {problem.strerror or problem}") from None
    except (SyntaxError, UnicodeDecodeError, LookupError) as problem:
        raise InputError(f"{name}: is not a Python text file: {problem}") from None


def parse(text: str) -> ast.Module:
    """Parse Python, without the warnings that Python has about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _parsed(text: str, name: str) -> ast.Module:
    try:
        return parse(text)
    except SyntaxError as problem:
        raise InputError(f"{name}:{problem.lineno or 1}: {problem.msg}: Python cannot run this, correct it") from None
    except ValueError as problem:
        raise InputError(f"{name}: is not a Python text file: {problem}") from None
    except (RecursionError, MemoryError):
        raise InputError(f"{name}: is nested too deeply to be read") from None


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """The full name of every name that an import binds, anywhere in the file."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}" if node.module else alias.name
    return names


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` of a name with attributes; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def qualified(node: ast.AST, file: SourceFile) -> str:
    """Return the full name of an imported name with attributes, or the name as it is written."""
    first, dot, rest = dotted(node).partition(".")
    return file.imports.get(first, first) + dot + rest

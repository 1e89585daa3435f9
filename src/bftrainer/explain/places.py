"""Notices and evidence of places in a program: they name the file and the line of a node."""

from __future__ import annotations

import ast

from bftrainer.explain.reading.program import Program
from bftrainer.explain.report import Evidence, Notice


def evidence(program: Program, node: ast.AST, what: str) -> Evidence:
    """Make evidence of the line of a node."""
    file, line = program.file(node), _line(node)
    return Evidence(file.name, line, file.line(line).strip(), what)


def notice(program: Program, node: ast.AST, what: str, remedy: str, *, refused: bool = False) -> Notice:
    """Make a notice of the line of a node."""
    return Notice(program.file(node).name, _line(node), what, remedy, refused)


def source_text(program: Program, node: ast.expr) -> str:
    """Return an expression as the script writes it, if it is on one line."""
    text = program.file(node).line(_line(node)).encode()[node.col_offset : node.end_col_offset].decode()
    return text if node.lineno == node.end_lineno else ast.unparse(node)


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))

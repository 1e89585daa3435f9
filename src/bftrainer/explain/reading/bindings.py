"""Bindings: the values that the names of a script are given, and where."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Binding:
    """A value that a name is given. `index`: the item of the value; `element`: any item of it."""

    value: ast.expr
    statement: ast.AST
    index: int | None = None
    element: bool = False


def item_of(binding: Binding) -> Binding:
    """Return the item itself, if a tuple is written out: `best, waited = 0.0, 0`."""
    value, index = binding.value, binding.index
    if isinstance(value, ast.Tuple | ast.List) and index is not None and index < len(value.elts):
        return Binding(value.elts[index], binding.statement)
    return binding

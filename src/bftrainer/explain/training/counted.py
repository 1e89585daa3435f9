"""Counted loops: turns `while` with a counter of its own into `for n in elastic.steps(…):`, or `elastic.epochs`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from bftrainer.explain import lines
from bftrainer.explain.edits import Edits, add_import
from bftrainer.explain.reading.bindings import item_of
from bftrainer.explain.reading.program import Loop, Program
from bftrainer.explain.reading.source import SourceFile


@dataclass(frozen=True, eq=False)
class _Limit:
    """A comparison of a counter with the number of steps. `inclusive`: the counter reaches the limit."""

    counter: str
    limit: ast.expr
    inclusive: bool
    test: ast.If | None = None


def step_counter(program: Program, loop: ast.While) -> str:
    """Return the variable that counts the passes of a loop; empty if none was found."""
    found = _counting(program, loop)
    return "" if found is None else found[0].counter


def own_counters(program: Program, loop: Loop | None) -> set[str]:
    """Return the variables that count the passes of a `while` loop, whether or not it can be written in another way."""
    if not isinstance(loop, ast.While):
        return set()
    counted = {
        node.target.id for node in loop.body if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }
    compared = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
    found = (compared & counted) | ({step_counter(program, loop)} - {""})
    return found or set(_counters_of_an_endless_loop(loop, counted)[:1])


def _counters_of_an_endless_loop(loop: ast.While, counted: set[str]) -> list[str]:
    """Return those of the `counted` variables that end a `while True` and that nothing else in it sets."""
    if not isinstance(loop.test, ast.Constant):
        return []
    ends = [one.test for one in loop.body if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Break)]
    tested = [node.id for test in ends for node in ast.walk(test) if isinstance(node, ast.Name)]
    set_once = [name for name in tested if sum(isinstance(one.ctx, ast.Store) for one in _names(loop.body, name)) == 1]
    return [name for name in set_once if name in counted]


def count_passes(program: Program, loop: ast.While, edits: Edits, counts: str) -> bool:
    """Put the new header of a loop into `edits`, and remove its counting. Returns whether the loop counts its passes.

    `counts` is the function to loop over: `elastic.steps` or `elastic.epochs`.
    """
    found = _counting(program, loop)
    if found is None or loop.test.end_lineno != loop.lineno:
        return False
    limit, counting = found
    file = program.file(loop)
    count = ast.unparse(limit.limit) + (" + 1" if limit.inclusive else "")
    header = f"for {limit.counter} in {counts}({count})"
    edits.replace(file, loop.lineno, loop.col_offset, loop.test.end_col_offset or 0, header)
    for one in counting:
        edits.remove(file, one.lineno, one.end_lineno or one.lineno)
    add_import(edits, file, lines.IMPORT_ELASTIC)
    return True


def _counting(program: Program, loop: ast.While) -> tuple[_Limit, list[ast.stmt]] | None:
    """What ends a loop, and the statements that count and test, which can be removed."""
    counters = {
        node.target.id: node
        for node in loop.body
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and _is_plus_one(node)
    }
    limit = next((one for one in _limits(loop) if one.counter in counters), None)
    if limit is None or not _begins_at_zero(program, loop, limit.counter):
        return None
    increment = counters[limit.counter]
    counting: list[ast.stmt] = [increment] if limit.test is None else [increment, limit.test]
    removable = len(loop.body) > len(counting) and all(_has_own_lines(program.file(loop), one) for one in counting)
    return (limit, counting) if removable and _counts_exactly(loop, limit, increment) else None


def _is_plus_one(node: ast.AugAssign) -> bool:
    return isinstance(node.op, ast.Add) and isinstance(node.value, ast.Constant) and node.value.value == 1


def _limits(loop: ast.While) -> list[_Limit]:
    """The tests that end a loop: its own, and those that `break` in its body."""
    found = [_compared(loop.test, stays=True)]
    for node in loop.body:
        if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Break) and not node.orelse:
            found.append(_compared(node.test, stays=False, test=node))
    return [one for one in found if one is not None]


def _compared(node: ast.expr, *, stays: bool, test: ast.If | None = None) -> _Limit | None:
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.left, ast.Name):
        return None
    op, limit = node.ops[0], node.comparators[0]
    if isinstance(op, ast.Lt | ast.LtE) and stays:
        return _Limit(node.left.id, limit, isinstance(op, ast.LtE), test)
    if isinstance(op, ast.Gt | ast.GtE | ast.Eq) and not stays:
        return _Limit(node.left.id, limit, isinstance(op, ast.Gt), test)
    return None


def _counts_exactly(loop: ast.While, limit: _Limit, increment: ast.stmt) -> bool:
    """Whether a loop over the numbers below the limit makes as many passes, and its body sees the same numbers."""
    counted = loop.body.index(increment)
    tested = counted if limit.test is None else loop.body.index(limit.test)
    if 0 < tested < counted or counted < tested < len(loop.body) - 1:
        return False  # the last pass ends in the middle of the work
    kept = [one for one in loop.body if one is not increment and one is not limit.test]
    if any(isinstance(name.ctx, ast.Store) for name in _names(kept, limit.counter)):
        return False
    if _names([one for one in loop.body[counted + 1 :] if one is not limit.test], limit.counter):
        return False  # the number of the next pass is used
    return not any(map(_continues, loop.body[: max(counted, tested)]))


def _names(statements: Sequence[ast.stmt], name: str) -> list[ast.Name]:
    nodes = (node for one in statements for node in ast.walk(one))
    return [node for node in nodes if isinstance(node, ast.Name) and node.id == name]


def _continues(node: ast.AST) -> bool:
    """Whether a statement may go on with the next pass of the loop that it is in."""
    if isinstance(node, ast.Continue):
        return True
    inner = node.orelse if isinstance(node, Loop) else list(ast.iter_child_nodes(node))
    own = not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
    return own and any(map(_continues, inner))


def _begins_at_zero(program: Program, loop: ast.While, counter: str) -> bool:
    bindings = program.local_bindings(program.scopes[loop], counter)
    values = [item_of(one).value for one in bindings if not isinstance(one.statement, ast.AugAssign)]
    return any(isinstance(value, ast.Constant) and value.value == 0 for value in values)


def _has_own_lines(file: SourceFile, node: ast.stmt) -> bool:
    """Whether a statement shares its lines with no other one."""
    first = file.line(node.lineno).encode()[: node.col_offset]
    last = file.line(node.end_lineno or node.lineno).encode()[node.end_col_offset or 0 :].strip()
    return not first.strip() and (not last or last.startswith(b"#"))

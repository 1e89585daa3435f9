"""Reach of a loop: all that runs in it, also in the functions of the program that it calls.

A `CallFrame` remembers by which calls a node was reached. So an expression inside a function can be named as the
function of the loop names it.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bftrainer.explain.reading.program import Function, Program, argument, is_function, parameters


@dataclass(frozen=True, eq=False)
class CallFrame:
    """A call by which a function was reached; none for the loop itself."""

    call: ast.Call | None = None
    function: Function | None = None
    outer: CallFrame | None = None


@dataclass(frozen=True, eq=False)
class Reached:
    """A node that runs in a loop."""

    node: ast.AST
    frame: CallFrame


def reach(program: Program, roots: Iterable[ast.AST]) -> Iterator[Reached]:
    """Yield all nodes that run when `roots` run. Each function is entered once."""
    entered: set[Function] = set()
    waiting = deque([(root, CallFrame()) for root in roots])
    while waiting:
        root, frame = waiting.popleft()
        for node in _without_definitions(root):
            yield Reached(node, frame)
            if not isinstance(node, ast.Call):
                continue
            for function in [*program.functions(node), *_given_functions(program, node)]:
                if function not in entered:
                    entered.add(function)
                    waiting += [(statement, CallFrame(node, function, frame)) for statement in function.body]


def _without_definitions(root: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, in the order of the source, without the bodies of functions and classes."""
    stack = [root]
    while stack:
        node = stack.pop()
        if is_function(node) or isinstance(node, ast.ClassDef):
            continue
        yield node
        stack += reversed(list(ast.iter_child_nodes(node)))


def _given_functions(program: Program, call: ast.Call) -> list[Function]:
    """Functions defined beside a call and given to it, such as the closure of `optimizer.step(closure)`."""
    names = [one.id for one in call.args if isinstance(one, ast.Name)]
    named = [function for name in names for function in program.functions_named(name)]
    return [function for function in named if program.scopes[function] is program.scopes[call]]


def outer_expression(program: Program, node: ast.expr, frame: CallFrame) -> ast.expr | None:
    """Return the expression that names the same object where the loop is; None if there is none."""
    found: ast.expr | None = node
    while found is not None and frame.call is not None and frame.outer is not None:
        found = _one_up(program, found, frame, 0)
        frame = frame.outer
    return found


def _one_up(program: Program, node: ast.expr, frame: CallFrame, depth: int) -> ast.expr | None:
    """Name an object of a function as the caller of the function does."""
    call, function = frame.call, frame.function
    assert call is not None
    assert function is not None
    if depth > 8:
        return None
    if isinstance(node, ast.Attribute):
        base = _one_up(program, node.value, frame, depth + 1)
        return None if base is None else _made(program, ast.Attribute(base, node.attr, ast.Load()), call)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        base = _one_up(program, node.value, frame, depth + 1)
        return None if base is None else _made(program, ast.Subscript(base, node.slice, ast.Load()), call)
    if not isinstance(node, ast.Name):
        return None
    if node.id in ("self", "cls") and isinstance(call.func, ast.Attribute):
        return call.func.value
    if node.id in parameters(function):
        return argument(call, function, node.id)
    local = program.local_bindings(function, node.id)
    if not local:  # of an enclosing function or the module
        return node
    values = [binding.value for binding in local if binding.index is None and not binding.element]
    aliases = [value for value in values if isinstance(value, ast.Name | ast.Attribute)]
    return _one_up(program, aliases[0], frame, depth + 1) if len(local) == len(aliases) == 1 else None


def _made(program: Program, node: ast.expr, where: ast.Call) -> ast.expr:
    """Give an expression that is not in the source a place there."""
    program.scopes[node] = program.scopes[where]
    return node

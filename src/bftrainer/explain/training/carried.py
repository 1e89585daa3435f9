"""Carried values: plain variables that a training loop takes from one epoch to the next, such as the best accuracy.

A node that joins later runs the script from its top and does not know them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass

from bftrainer.explain.reading.flow import flow_of, mentioned
from bftrainer.explain.reading.program import Binding, Loop, Program, is_function
from bftrainer.explain.reading.source import dotted

_EMPTY = frozenset(
    ["list", "dict", "set", "tuple", "int", "float", "str", "bool", "defaultdict", "deque", "Counter", "OrderedDict"]
)
_SPECIAL = frozenset(["set", "defaultdict", "deque", "Counter", "OrderedDict"])
CLOCKS = frozenset(["time", "perf_counter", "monotonic", "now", "process_time"])


@dataclass(frozen=True, eq=False)
class CarriedValue:
    """A variable, where it gets its first value, and the lines of the loop that use it."""

    name: str
    first: ast.AST
    initial: ast.expr
    lines: tuple[int, ...]
    holds_weights: bool
    """It is given the state of a module, which is too large for a value."""
    module: ast.AST | None = None
    """The module that it is a variable of, if it can be carried by its name."""


def carried_values(program: Program, loop: Loop, known: Collection[str]) -> list[CarriedValue]:
    """Return the carried values of a loop, apart from names that are `known` to all nodes."""
    flow = flow_of(loop.body)
    later = {name for name in _read_later(program, loop) if name not in flow.always}
    found = []
    for name in sorted((flow.early | later) & set(flow.changed)):
        if name in known or name in _targets(loop):
            continue
        first = _first_value(program, loop, name)
        changes = flow.changed[name]
        if first is None or all(_is_clock(change) for change in changes):
            continue
        weights = any(_has_weights(one) for one in [first.value, *changes])
        if not (weights or _is_simple(first.value)):
            continue
        lines = sorted({node.lineno for node in _uses(loop, name)})
        module = _module_of(program, loop, name, first)
        found.append(CarriedValue(name, first.statement, first.value, tuple(lines), weights, module))
    return sorted(found, key=lambda value: value.lines)


def _module_of(program: Program, loop: Loop, name: str, first: Binding) -> ast.AST | None:
    """Return the module of the loop if the loop changes a variable of it, of a type that can be carried."""
    scope = program.scopes[loop]
    module = program.file(loop).tree
    is_global = scope is module or any(isinstance(node, ast.Global) and name in node.names for node in ast.walk(scope))
    fits = program.scopes[first.statement] is module and not _is_special(first.value)
    return module if is_global and fits and name.isidentifier() else None


def _is_special(value: ast.expr) -> bool:
    """Whether a value is a set, or a container of another type than those of Python's literals."""
    if isinstance(value, ast.Call):
        return dotted(value.func).rpartition(".")[2] in _SPECIAL
    return isinstance(value, ast.Set)


def _read_later(program: Program, loop: Loop) -> set[str]:
    """The names that the function or module of a loop reads after it."""
    scope = program.scopes[loop]
    end = loop.end_lineno or loop.lineno
    nodes = (node for node in ast.walk(scope) if isinstance(node, ast.Name | ast.Attribute) and node.lineno > end)
    return {mentioned(node) for node in nodes if isinstance(node.ctx, ast.Load)}


def _targets(loop: Loop) -> set[str]:
    if isinstance(loop, ast.While):
        return set()
    return {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}


def _first_value(program: Program, loop: Loop, name: str) -> Binding | None:
    """A value that a name is given before the loop: a number or container, if there is one."""
    inside = set(ast.walk(loop))
    scope = program.scopes[loop]
    if name.startswith("self."):
        place = next(node for node in ast.walk(loop) if mentioned(node) == name)
        assert isinstance(place, ast.Attribute)
        bindings = program.bindings(place)
        before = [one for one in bindings if one.statement not in inside]
        return before[-1] if before else None
    found: list[Binding] = []
    while True:
        bindings = [one for one in program.local_bindings(scope, name) if one.statement not in inside]
        if scope is program.scopes[loop]:
            bindings = [one for one in bindings if _line(one.statement) < loop.lineno]
        found += [_item(one) for one in bindings if not one.element]
        if not is_function(scope):
            break
        scope = program.scopes[scope]
    return next((one for one in found if _is_simple(one.value)), found[-1] if found else None)


def _item(binding: Binding) -> Binding:
    """The item itself, if a tuple is written out: `best, waited = 0.0, 0`."""
    value, index = binding.value, binding.index
    if isinstance(value, ast.Tuple | ast.List) and index is not None and index < len(value.elts):
        return Binding(value.elts[index], binding.statement)
    return binding


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def _is_simple(value: ast.expr) -> bool:
    """Whether a value is a number, a text, or a container: what scripts count and collect in."""
    if isinstance(value, ast.UnaryOp):
        return _is_simple(value.operand)
    if isinstance(value, ast.Call):
        return dotted(value.func).rpartition(".")[2] in _EMPTY
    if isinstance(value, ast.Attribute):
        return value.attr.lower() in ("inf", "infinity", "maxsize")
    return isinstance(value, ast.Constant | ast.List | ast.Dict | ast.Set | ast.Tuple | ast.ListComp | ast.DictComp)


def _is_clock(change: ast.AST) -> bool:
    value = getattr(change, "value", None)
    if isinstance(value, ast.Name):  # t0 = t1
        return re.fullmatch(r"t\d*|t_\w+|tic|toc|now|\w*time\w*", value.id) is not None
    return isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in CLOCKS


def _has_weights(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) else node
    if not isinstance(value, ast.expr):
        return False
    return any(isinstance(one, ast.Attribute) and one.attr == "state_dict" for one in ast.walk(value))


def _uses(loop: Loop, name: str) -> list[ast.expr]:
    nodes = [node for statement in loop.body for node in ast.walk(statement)]
    return [node for node in nodes if isinstance(node, ast.expr) and mentioned(node) == name]

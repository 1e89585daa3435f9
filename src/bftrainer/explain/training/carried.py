"""Carried values: plain variables that a training loop takes from one epoch to the next, such as the best accuracy.

A node that joins later runs the script from its top and does not know them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from bftrainer.explain.reading.bindings import Binding, item_of
from bftrainer.explain.reading.flow import flow_of, mentioned
from bftrainer.explain.reading.program import Function, Loop, Program, is_function, parameters
from bftrainer.explain.reading.reach import reach
from bftrainer.explain.reading.source import dotted

_EMPTY = frozenset(
    ["list", "dict", "set", "tuple", "int", "float", "str", "bool", "defaultdict", "deque", "Counter", "OrderedDict"]
)
_SPECIAL = frozenset(["set", "defaultdict", "deque", "Counter", "OrderedDict"])
_ARRAYS = frozenset(["detach", "clone", "numpy", "cpu"])
_OF_TORCH = frozenset(["grad", "data", "requires_grad", "training"])
_MADE_ARRAYS = frozenset(
    ["array", "asarray", "zeros", "ones", "empty", "full", "arange", "stack", "concatenate", "append"]
)
_NUMBERS = frozenset(["item", "tolist", "float", "int"])
WEIGHTS, ARRAY, SPECIAL = "weights", "an array", "a special container"
CLOCKS = frozenset(["time", "perf_counter", "monotonic", "now", "process_time"])


@dataclass(frozen=True, eq=False)
class CarriedValue:
    """A variable, where it gets its first value, and the lines of the loop that use it."""

    name: str
    first: ast.AST
    initial: ast.expr
    lines: tuple[int, ...]
    holds: str = ""
    """What it holds that a node which joins cannot receive: `WEIGHTS`, `ARRAY` or `SPECIAL`."""
    module: ast.AST | None = None
    """The module that it is a variable of, if it can be carried by its name."""
    elsewhere: str = ""
    """The function that changes it, if the loop itself does not."""


def carried_values(program: Program, loop: Loop, known: Collection[str]) -> list[CarriedValue]:
    """Return the carried values of a loop, apart from names that are `known` to all nodes."""
    flow = flow_of(loop.body)
    later = {name for name in read_after(program, loop) if name not in flow.always}
    found = []
    for name in sorted((flow.early | later) & set(flow.changed)):
        if name in known or name in _targets(loop):
            continue
        first = _first_value(program, loop, name)
        changes = flow.changed[name]
        if first is None or all(_is_clock(change) for change in changes):
            continue
        holds = _holds(first.value, changes)
        if not holds and not _is_simple(first.value):
            continue
        lines = sorted({node.lineno for node in _uses(loop.body, name)})
        module = _module_of(program, loop, name, first)
        found.append(CarriedValue(name, first.statement, first.value, tuple(lines), holds, module))
    names = {value.name for value in found}
    found += [value for value in _changed_in_functions(program, loop) if value.name not in names | {*known}]
    return sorted(found, key=lambda value: value.lines)


def _changed_in_functions(program: Program, loop: Loop) -> Iterator[CarriedValue]:
    """Yield the variables outside of functions that functions change, which the loop calls."""
    functions = dict.fromkeys(one.frame.function for one in reach(program, loop.body) if one.frame.function is not None)
    seen = set[str]()
    for function in functions:
        flow, tree = flow_of(function.body), program.file(function).tree
        for name, changes in flow.changed.items():
            scope = _scope_of(program, function, name)
            if scope is None or name in seen or all(_is_clock(change) for change in changes):
                continue
            values = [item_of(one) for one in program.local_bindings(scope, name) if not one.element]
            first = next((one for one in values if one.statement not in set(ast.walk(loop))), None)
            read = name in flow.early or _is_read(scope, name, besides=function)
            if first is None or not read:
                continue
            holds = _holds(first.value, changes)
            if not holds and not _is_simple(first.value):
                continue
            seen.add(name)
            lines = tuple(sorted({node.lineno for node in _uses(function.body, name)}))
            module = tree if scope is tree and tree is program.file(loop).tree else None
            yield CarriedValue(name, first.statement, first.value, lines, holds, module, function.name)


def _scope_of(program: Program, function: Function, name: str) -> ast.AST | None:
    """Return the function or module around a function whose variable it changes; None if the variable is its own."""
    if not name.isidentifier() or name in parameters(function):
        return None
    inside = list(ast.walk(function))
    if any(isinstance(node, ast.Global) and name in node.names for node in inside):
        return program.file(function).tree
    declared = any(isinstance(node, ast.Nonlocal) and name in node.names for node in inside)
    if not declared and program.local_bindings(function, name):
        return None
    scope = program.scopes[function]
    while is_function(scope) and not program.local_bindings(scope, name):
        scope = program.scopes[scope]
    return scope


def _is_read(scope: ast.AST, name: str, *, besides: ast.AST) -> bool:
    inside = set(ast.walk(besides))
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(scope)
        if node not in inside
    )


def unset_values(program: Program, loop: Loop) -> Iterator[tuple[str, ast.AST]]:
    """Yield the variables that only some passes of a loop set, each with where, and that others read before that."""
    flow = flow_of(loop.body)
    scope, inside = program.scopes[loop], set(ast.walk(loop))
    for name in sorted(flow.early & set(flow.changed)):
        changes = flow.changed[name]
        bindings = [*program.local_bindings(scope, name), *program.local_bindings(program.file(loop).tree, name)]
        assigned = all(isinstance(change, ast.Assign | ast.AnnAssign) for change in changes)
        if not assigned or not name.isidentifier() or any(one.statement not in inside for one in bindings):
            continue
        if name in dict(imported_values(program, loop)):
            continue
        if name not in _targets(loop) and all(_is_conditional(program, loop, change) for change in changes):
            yield name, changes[0]


def kept_in_objects(program: Program, loop: Loop) -> Iterator[tuple[str, ast.AST]]:
    """Yield the attributes of objects outside of a loop that the loop changes and reads, each with where it does."""
    own = set(flow_of(loop.body).changed) | _targets(loop)
    nodes = [node for statement in loop.body for node in ast.walk(statement)]
    read = {_dotted(node) for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    seen = set[str]()
    for statement in nodes:
        targets = list(statement.targets) if isinstance(statement, ast.Assign) else []
        targets += [statement.target] if isinstance(statement, ast.AugAssign) else []
        for target in targets:
            if not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Name):
                continue
            name, holder = _dotted(target), target.value
            if name in seen or _is_clock(statement) or target.attr in _OF_TORCH:
                continue
            if any(_is_value(item_of(one).value) for one in program.bindings(holder)):
                continue
            is_outside = holder.id not in own and holder.id != "self" and program.kind(holder) is None
            if is_outside and (isinstance(statement, ast.AugAssign) or name in read):
                seen.add(name)
                yield name, statement


def imported_values(program: Program, loop: Loop) -> Iterator[tuple[str, ast.AST]]:
    """Yield the variables that a loop keeps and that the script has imported by name, each with where it changes."""
    flow, file = flow_of(loop.body), program.file(loop)
    if program.scopes[loop] is not file.tree:
        return
    imports = [node for node in file.tree.body if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    inside = set(ast.walk(loop))
    for name in sorted(flow.early & set(flow.changed) & names):
        if all(one.statement in inside for one in program.local_bindings(file.tree, name)):
            yield name, flow.changed[name][0]


def _is_value(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "Value"


def _dotted(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""


def _is_conditional(program: Program, loop: Loop, statement: ast.AST) -> bool:
    """Whether a statement of a loop is under a condition, and in no loop within it."""
    around: list[ast.AST] = []
    for node in program.ancestors(statement):
        if node is loop:
            break
        around.append(node)
    return any(isinstance(node, ast.If) for node in around) and all(isinstance(node, ast.If) for node in around)


def _holds(first: ast.expr, changes: Sequence[ast.AST]) -> str:
    """Return what a value holds that a node which joins cannot receive; nothing if it is plain."""
    values = [first, *(value for change in changes if (value := _given(change)) is not None)]
    if any(_has_weights(value) for value in values):
        return WEIGHTS
    if any(_is_array(value) for value in values):
        return ARRAY
    return SPECIAL if _is_special(first) else ""


def _given(change: ast.AST) -> ast.expr | None:
    return change.value if isinstance(change, ast.Assign | ast.AnnAssign | ast.AugAssign) else None


def _is_array(value: ast.expr) -> bool:
    """Whether a value is a tensor or an array, as far as its expression shows."""
    if not isinstance(value, ast.Call):
        return False
    called = dotted(value.func) or (value.func.attr if isinstance(value.func, ast.Attribute) else "")
    library, last = called.partition(".")[0], called.rpartition(".")[2]
    if library in ("np", "numpy"):
        return last in _MADE_ARRAYS
    return last not in _NUMBERS and (library == "torch" or last in _ARRAYS)


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


def read_after(program: Program, loop: Loop) -> set[str]:
    """Return the names that the function or module of a loop reads after it."""
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
        found += [item_of(one) for one in bindings if not one.element]
        if not is_function(scope):
            break
        scope = program.scopes[scope]
    return next((one for one in found if _is_simple(one.value)), found[-1] if found else None)


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


def _has_weights(value: ast.expr) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "state_dict" for one in ast.walk(value))


def _uses(block: Sequence[ast.stmt], name: str) -> list[ast.expr]:
    nodes = [node for statement in block for node in ast.walk(statement)]
    return [node for node in nodes if isinstance(node, ast.expr) and mentioned(node) == name]

"""Program: the files of a script as one, with answers to "where does this value come from?".

Every question takes a node of a syntax tree. Answers are approximate: the order of statements and the conditions they
are under are ignored, so a name may have several origins.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from bftrainer.explain.reading.bindings import Binding
from bftrainer.explain.reading.kinds import THROUGH, WRAPS, Kind, kind_by_hint, kind_of_base, kind_of_name
from bftrainer.explain.reading.source import SourceFile, dotted, qualified

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
MOST_LOOKED_AT = 120
"""Expressions that are followed for one answer."""
DEEPEST = 12
"""Calls that are followed within each other."""


class Program:
    """The files of a script."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self.files = tuple(files)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: dict[ast.AST, ast.AST] = {}  # the function or module that a node belongs to
        self.calls: list[ast.Call] = []
        self.loops: list[Loop] = []
        self._file_of: dict[ast.AST, SourceFile] = {file.tree: file for file in files}
        self._functions: dict[str, list[Function]] = defaultdict(list)
        self._classes: dict[str, list[ast.ClassDef]] = defaultdict(list)
        self._calls_of: dict[str, list[ast.Call]] = defaultdict(list)
        self._names: dict[tuple[ast.AST, str], list[Binding]] = defaultdict(list)
        self._attributes: dict[str, list[Binding]] = defaultdict(list)
        self._callees: dict[ast.Call, list[Function]] = {}
        self._depth = 0  # of calls that are looked at to know what another call runs
        for file in files:
            self._take_in(file.tree)

    def _take_in(self, tree: ast.Module) -> None:
        stack: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
        while stack:
            node, scope = stack.pop()
            self.scopes[node] = scope
            self._note(node, scope)
            inner = node if is_function(node) else scope
            for child in reversed(list(ast.iter_child_nodes(node))):
                self.parents[child] = node
                stack.append((child, inner))

    def _note(self, node: ast.AST, scope: ast.AST) -> None:
        if is_function(node):
            self._functions[node.name].append(node)
        elif isinstance(node, ast.ClassDef):
            self._classes[node.name].append(node)
        elif isinstance(node, ast.Call):
            self.calls.append(node)
            called = dotted(node.func) or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
            self._calls_of[called.rpartition(".")[2]].append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, Binding(node.value, node), scope)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign) and node.value is not None:
            self._bind(node.target, Binding(node.value, node), scope)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self.loops.append(node)
            self._bind(node.target, Binding(node.iter, node, element=True), scope)
        elif isinstance(node, ast.While):
            self.loops.append(node)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, Binding(node.context_expr, node), scope)

    def _bind(self, target: ast.expr, binding: Binding, scope: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self._names[scope, target.id].append(binding)
        elif isinstance(target, ast.Attribute):
            self._attributes[target.attr].append(binding)
        elif isinstance(target, ast.Tuple | ast.List) and not binding.element:
            for index, item in enumerate(target.elts):
                self._bind(item, Binding(binding.value, binding.statement, index), scope)

    # Where a node is.

    def file(self, node: ast.AST) -> SourceFile:
        """Return the file of a node."""
        scope = self.scopes[node]
        while scope not in self._file_of:
            scope = self.scopes[scope]
        return self._file_of[scope]

    def name(self, node: ast.AST) -> str:
        """Return the full name of a name with attributes; empty for any other expression."""
        return qualified(node, self.file(node))

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node is in, up to the function or module around it."""
        scope = self.scopes[node]
        while node is not scope and node in self.parents:
            node = self.parents[node]
            yield node

    def owner(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class of the method that a node is in or is."""
        function = node if is_function(node) else self.scopes.get(node)
        while function is not None and is_function(function):
            parent = self.parents[function]
            if isinstance(parent, ast.ClassDef):
                return parent
            function = self.scopes[parent]
        return None

    # What a name means.

    def bindings(self, node: ast.expr, search: _Search | None = None) -> list[Binding]:
        """Return the values that a name, or an attribute of an object of the program, is given anywhere."""
        if isinstance(node, ast.Name):
            return self._bindings_of_name(node.id, self.scopes[node])
        if isinstance(node, ast.Attribute):
            return self._bindings_of_attribute(node, search or _Search(self))
        return []

    def local_bindings(self, scope: ast.AST, name: str) -> list[Binding]:
        """Return the values that a name is given in one function or module."""
        return self._names.get((scope, name), [])

    def _bindings_of_name(self, name: str, scope: ast.AST) -> list[Binding]:
        while True:
            found = list(self._names.get((scope, name), ()))
            if is_function(scope) and name in parameters(scope):
                return found + [Binding(value, value) for value in self._arguments(scope, name)]
            if found:
                return found
            if not is_function(scope):
                return self._bindings_elsewhere(name, scope)
            scope = self.scopes[self.parents[scope]]

    def _bindings_elsewhere(self, name: str, module: ast.AST) -> list[Binding]:
        """The values of a name that is imported from another file of the program."""
        source, dot, last = self._file_of[module].imports.get(name, "").rpartition(".")
        if not dot:
            return []
        files = [file for file in self.files if file.path.stem == source.rpartition(".")[2]]
        return [binding for file in files for binding in self._names.get((file.tree, last), ())]

    def _bindings_of_attribute(self, node: ast.Attribute, search: _Search) -> list[Binding]:
        bindings = self._attributes.get(node.attr, [])
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            owners = {self.owner(node)}
        else:
            made = search.follow(node.value, None) if bindings else []
            owners = {cls for call in made if isinstance(call, ast.Call) for cls in self.classes(call.func)}
        return [binding for binding in bindings if self.owner(binding.statement) in owners - {None}]

    def _arguments(self, function: Function, name: str) -> list[ast.expr]:
        """What callers of a function give for a parameter."""
        constructor = function.name == "__init__"
        cls = self.owner(function)
        called = cls.name if constructor and cls is not None else function.name
        values = [argument(call, function, name) for call in self._calls_of[called]]
        return [value for value in values if value is not None]

    def classes(self, callee: ast.expr) -> list[ast.ClassDef]:
        """Return the classes of the program that an expression names."""
        return self._classes.get(self.name(callee).rpartition(".")[2], []) if dotted(callee) else []

    def functions_named(self, name: str) -> list[Function]:
        """Return the functions and methods of the program with a name."""
        return self._functions.get(name, [])

    def functions(self, call: ast.Call) -> list[Function]:
        """Return the functions of the program that a call may run."""
        if call not in self._callees:
            self._callees[call] = []  # what a call finds while it is looked at itself
            self._depth += 1
            try:
                if self._depth <= DEEPEST:
                    self._callees[call] = self._functions_of(call)
            finally:
                self._depth -= 1
        return self._callees[call]

    def _functions_of(self, call: ast.Call) -> list[Function]:
        func = call.func
        if isinstance(func, ast.Name):
            named = self._functions.get(self.name(func).rpartition(".")[2], [])
            return [function for function in named if not self._is_method(function)]
        if not isinstance(func, ast.Attribute):
            return []
        named = self._functions.get(func.attr, [])
        if not named:
            return []
        methods = [function for function in named if self._is_method(function)]
        if isinstance(func.value, ast.Name) and func.value.id in ("self", "cls"):
            own = [method for method in methods if self.owner(method) is self.owner(call)]
            return own or methods
        if dotted(func.value) and any(
            self.name(func.value).rpartition(".")[2] == file.path.stem for file in self.files
        ):
            return [function for function in named if not self._is_method(function)]
        made = [origin for origin in self.origins(func.value) if isinstance(origin, ast.Call)]
        owners = {cls for origin in made for cls in self.classes(origin.func)}
        if made:
            return [method for method in methods if self.owner(method) in owners]
        return methods if len(methods) == 1 and len(func.attr) > 4 else []

    def _is_method(self, function: Function) -> bool:
        return isinstance(self.parents[function], ast.ClassDef)

    # Where a value comes from.

    def origins(self, node: ast.expr) -> list[ast.expr]:
        """Return the expressions, mostly calls, that make the value of an expression."""
        try:
            return _Search(self).follow(node, None)
        except RecursionError:
            return []

    def kind(self, node: ast.expr) -> Kind | None:
        """Return what the value of an expression is, by where it comes from, or else by its name."""
        for origin in self.origins(node):
            found = self.kind_of_origin(origin)
            if found is not None:
                return found
        return kind_by_hint(dotted(node)) if dotted(node) else None

    def kind_of_origin(self, origin: ast.expr) -> Kind | None:
        """Return what a call makes."""
        if not isinstance(origin, ast.Call):
            return None
        for cls in self.classes(origin.func):
            found = self._kind_of_class(cls, 0)
            if found is not None:
                return found
        func = origin.func
        if isinstance(func, ast.Attribute) and func.attr == "batches" and self.kind(func.value) is Kind.RUN:
            return Kind.LOADER
        name = self.name(func)
        if not name and isinstance(func, ast.Attribute):
            name = func.attr
        found = kind_of_name(name)
        if found is None and name.rpartition(".")[2][:1].isupper() and origin.args and _is_parameters(origin.args[0]):
            return Kind.OPTIMIZER
        return found

    def _kind_of_class(self, cls: ast.ClassDef, depth: int) -> Kind | None:
        for base in cls.bases:
            found = kind_of_base(self.name(base))
            if found is not None:
                return None if cls.name.endswith("Loss") else found
            for inner in self.classes(base):
                found = self._kind_of_class(inner, depth + 1) if depth < 8 and inner is not cls else None
                if found is not None:
                    return found
        return None


class _Search:
    """One search for the origins of a value."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._seen: set[tuple[ast.expr, int | None]] = set()

    def follow(self, node: ast.expr, index: int | None) -> list[ast.expr]:
        """Return where item `index` of a value, or the value itself, comes from."""
        if (node, index) in self._seen or len(self._seen) > MOST_LOOKED_AT:
            return []
        self._seen.add((node, index))
        if isinstance(node, ast.Name | ast.Attribute):
            return self._all(self._bound(binding) for binding in self._program.bindings(node, self))
        if isinstance(node, ast.Call):
            return self._of_call(node, index)
        if isinstance(node, ast.Tuple | ast.List) and index is not None:
            return self.follow(node.elts[index], None) if index < len(node.elts) else []
        if isinstance(node, ast.Subscript):
            at = node.slice.value if isinstance(node.slice, ast.Constant) else None
            return self._elements(self.follow(node.value, None), at)
        if isinstance(node, ast.IfExp):
            return self.follow(node.body, index) + self.follow(node.orelse, index)
        if isinstance(node, ast.BoolOp):
            return self._all(self.follow(value, index) for value in node.values)
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Starred):
            return self.follow(node.value, index)
        return [node]

    def _all(self, parts: Iterator[list[ast.expr]]) -> list[ast.expr]:
        return [origin for part in parts for origin in part]

    def _bound(self, binding: Binding) -> list[ast.expr]:
        found = self.follow(binding.value, binding.index)
        return self._elements(found, None) if binding.element else found

    def _elements(self, containers: list[ast.expr], at: object) -> list[ast.expr]:
        """Where the items of lists, tuples and dicts come from."""
        found: list[ast.expr] = []
        for container in containers:
            if isinstance(container, ast.List | ast.Tuple | ast.Set):
                chosen = container.elts
                if isinstance(at, int) and -len(chosen) <= at < len(chosen):
                    chosen = [chosen[at]]
            elif isinstance(container, ast.Dict):
                pairs = [
                    (key, value) for key, value in zip(container.keys, container.values, strict=True) if key is not None
                ]
                named = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == at]
                chosen = named or [value for _, value in pairs]
            elif isinstance(container, ast.DictComp):
                chosen = [container.value]
            elif isinstance(container, ast.ListComp | ast.GeneratorExp | ast.SetComp):
                chosen = [container.elt]
            else:
                continue
            found += self._all(self.follow(one, None) for one in chosen)
        return found

    def _of_call(self, call: ast.Call, index: int | None) -> list[ast.expr]:
        func, program = call.func, self._program
        if isinstance(func, ast.Attribute) and func.attr in THROUGH:
            return self.follow(func.value, index)
        last = func.attr if isinstance(func, ast.Attribute) else dotted(func).rpartition(".")[2]
        if last in WRAPS and call.args:
            return self.follow(call.args[0], index)
        if last in ("prepare", "setup") and call.args:
            if index is not None and index < len(call.args):
                return self.follow(call.args[index], None)
            return self.follow(call.args[0], None) if len(call.args) == 1 else []
        if program.classes(func):
            return [call]
        returned = [value for function in program.functions(call) for value in returns(program, function)]
        return self._all(self.follow(value, index) for value in returned) or [call]


def is_function(node: object) -> TypeGuard[Function]:
    """Return whether a node defines a function."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def is_loop(node: object) -> TypeGuard[Loop]:
    """Return whether a node is a loop statement."""
    return isinstance(node, ast.For | ast.AsyncFor | ast.While)


def parameters(function: Function) -> list[str]:
    """Return the names of a function's parameters, the positional ones first."""
    args = function.args
    return [one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def argument(call: ast.Call, function: Function, name: str) -> ast.expr | None:
    """Return what a call gives for a parameter of the function it calls."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    args = function.args
    positional = [one.arg for one in (*args.posonlyargs, *args.args)]
    if positional[:1] in (["self"], ["cls"]):
        positional = positional[1:]
    if name not in positional:
        return None
    place = positional.index(name)
    given = call.args[: place + 1]
    if place >= len(call.args) or any(isinstance(one, ast.Starred) for one in given):
        return None
    return call.args[place]


def returns(program: Program, function: Function) -> list[ast.expr]:
    """Return the expressions that a function returns."""
    return [
        node.value
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Return) and node.value is not None and program.scopes[node] is function
    ]


def _is_parameters(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parameters"

"""Flow of names through a block of statements: which it may read before it has set them, and which it changes.

An attribute of `self` counts as a name, such as `self.best`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

CHANGING = frozenset(["append", "extend", "insert", "add", "update", "appendleft", "setdefault"])
"""Methods that change a list, dict or set."""

_Block = Sequence[ast.stmt]
_Known = frozenset[str] | None
"""Names that are set for sure; None after a statement that leaves the block."""


@dataclass
class Flow:
    """What a block does with names."""

    early: set[str] = field(default_factory=set)
    """Names that it may read before it has set them."""
    changed: dict[str, list[ast.AST]] = field(default_factory=dict)
    """Names that it sets or changes, with the statements that do."""
    always: frozenset[str] = frozenset()
    """Names that it sets whenever it runs to its end."""


def flow_of(block: _Block) -> Flow:
    """Return what a block of statements does with names."""
    walk = _Walk()
    walk.flow.always = walk.block(block, frozenset()) or frozenset()
    return walk.flow


def mentioned(node: ast.AST) -> str:
    """Return the name that a node mentions: a variable or an attribute of `self`; empty for any other node."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return f"self.{node.attr}"
    return ""


class _Walk:
    def __init__(self) -> None:
        self.flow = Flow()

    def block(self, statements: _Block, known: _Known) -> _Known:
        for statement in statements:
            known = self._statement(statement, known)
        return known

    def _statement(self, node: ast.stmt, known: _Known) -> _Known:
        if isinstance(node, ast.If):
            self._read(node.test, known)
            return _both(self.block(node.body, known), self.block(node.orelse, known))
        if isinstance(node, ast.For | ast.AsyncFor):
            self._read(node.iter, known)
            inside = self._set(node.target, known, node)
            self.block(node.body, inside)
            return self.block(node.orelse, known)
        if isinstance(node, ast.While):
            self._read(node.test, known)
            self.block(node.body, known)
            return self.block(node.orelse, known)
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._read(item.context_expr, known)
                if item.optional_vars is not None:
                    known = self._set(item.optional_vars, known, node)
            return self.block(node.body, known)
        if isinstance(node, ast.Try | ast.TryStar):
            return self._try(node, known)
        if isinstance(node, ast.Match):
            self._read(node.subject, known)
            for case in node.cases:
                self.block(case.body, known)
            return known
        return self._simple(node, known)

    def _try(self, node: ast.Try | ast.TryStar, known: _Known) -> _Known:
        done = self.block(node.orelse, self.block(node.body, known))
        for handler in node.handlers:
            done = _both(done, self.block(handler.body, known))
        self.block(node.finalbody, known)
        return done

    def _simple(self, node: ast.stmt, known: _Known) -> _Known:
        if isinstance(node, ast.Assign):
            self._read(node.value, known)
            for target in node.targets:
                known = self._set(target, known, node)
        elif isinstance(node, ast.AugAssign):
            self._read(node.value, known)
            self._read(node.target, known)
            known = self._set(node.target, known, node)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._read(node.value, known)
                known = self._set(node.target, known, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return None if known is None else known | {node.name}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            return None if known is None else known | names
        else:
            self._read(node, known)
            if isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break):
                return None
        return known

    def _set(self, target: ast.expr, known: _Known, statement: ast.AST) -> _Known:
        name = mentioned(target)
        if name:
            self.flow.changed.setdefault(name, []).append(statement)
            return None if known is None else known | {name}
        if isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                known = self._set(item, known, statement)
        elif isinstance(target, ast.Starred):
            known = self._set(target.value, known, statement)
        elif isinstance(target, ast.Subscript | ast.Attribute):
            self._read(target.value, known)
            if isinstance(target, ast.Subscript) and container(target):
                self.flow.changed.setdefault(container(target), []).append(statement)
        return known

    def _read(self, node: ast.AST, known: _Known) -> None:
        for name in read_names(node):
            if known is not None and name not in known:
                self.flow.early.add(name)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in CHANGING:
                name = container(inner.func.value)
                if name:
                    self.flow.changed.setdefault(name, []).append(inner)
            elif isinstance(inner, ast.NamedExpr):
                self.flow.changed.setdefault(inner.target.id, []).append(inner)


def container(node: ast.expr) -> str:
    """Return the name whose value an expression such as `history["loss"]` is a part of."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return mentioned(node)


def _both(one: _Known, other: _Known) -> _Known:
    """Names that are set after either of two branches; a branch that leaves the block does not count."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def read_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that an expression reads, without the variables of its comprehensions and lambdas."""
    own: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.comprehension):
            own |= {one.id for one in ast.walk(inner.target) if isinstance(one, ast.Name)}
        elif isinstance(inner, ast.Lambda):
            own |= {one.arg for one in (*inner.args.args, *inner.args.kwonlyargs)}
    for inner in ast.walk(node):
        name = mentioned(inner)
        if name and name not in own:
            yield name

"""Values by rank: the names that a training loop gives values which may differ from rank to rank.

Each rank computes its own part of a batch. So what comes from the loop over the batches, such as a sum of its losses,
differs by rank, and so does what comes from a clock. All ranks evaluate on the same data.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from bftrainer.explain.reading.flow import CHANGING, container, mentioned, read_names
from bftrainer.explain.reading.program import Program, is_loop
from bftrainer.explain.reading.source import dotted
from bftrainer.explain.training.carried import CLOCKS
from bftrainer.explain.training.loops import Training


def names_by_rank(program: Program, training: Training) -> set[str]:
    """Return the names that the training's outermost loop gives values which may differ by rank."""
    walk = _RankWalk(program, training)
    known: set[str] = set()
    while True:  # a value of one pass may come from the pass before
        after = known | walk.block(training.anchor.body, known, differs=training.anchor is training.batch)
        if after == known:
            return walk.found
        known = after


class _RankWalk:
    def __init__(self, program: Program, training: Training) -> None:
        self.found: set[str] = set()
        """All names that were given such a value anywhere."""
        self._program = program
        self._batch = training.batch
        self._backwards = set(training.backwards)
        self._training: set[ast.AST] = set()  # functions of the script that compute gradients
        for one in training.reached:
            frame = one.frame if one.node in self._backwards else None
            while frame is not None and frame.function is not None:
                self._training.add(frame.function)
                frame = frame.outer

    def block(self, statements: Sequence[ast.stmt], known: set[str], *, differs: bool) -> set[str]:
        """Return the names whose values differ after statements, if those of `known` do before them.

        `differs`: whether the statements run at all, or how often, differs by rank.
        """
        for statement in statements:
            known = self._statement(statement, known, differs)
        return known

    def _statement(self, node: ast.stmt, known: set[str], differs: bool) -> set[str]:
        if isinstance(node, ast.If):
            differs = differs or self._is_by_rank(node.test, known)
            return self.block(node.body, known, differs=differs) | self.block(node.orelse, known, differs=differs)
        if is_loop(node):
            return self._loop(node, known, differs)
        if isinstance(node, ast.Try | ast.TryStar):
            for block in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                known = known | self.block(block, known, differs=differs)
            return known
        if isinstance(node, ast.Match):
            differs = differs or self._is_by_rank(node.subject, known)
            return known.union(*(self.block(case.body, known, differs=differs) for case in node.cases))
        if isinstance(node, ast.With | ast.AsyncWith):
            return self.block(node.body, known, differs=differs)
        return self._simple(node, known, differs)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, known: set[str], differs: bool) -> set[str]:
        differs = differs or node is self._batch or any(inner in self._backwards for inner in ast.walk(node))
        if isinstance(node, ast.While):
            differs = differs or self._is_by_rank(node.test, known)
        else:
            known = self._given(node.target, known, differs or self._is_by_rank(node.iter, known))
        for _ in range(2):  # a value of one pass may come from the pass before
            known = known | self.block(node.body, known, differs=differs)
        return self.block(node.orelse, known, differs=differs)

    def _simple(self, node: ast.stmt, known: set[str], differs: bool) -> set[str]:
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                known = self._given(inner.target, known, differs or self._is_by_rank(inner.value, known))
            elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
                if inner.func.attr in CHANGING and (differs or self._is_by_rank(inner, known)):
                    known = self._given(inner.func.value, known, True)
                elif inner in self._backwards:
                    known = self._given(_loss(inner.func.value), known, True)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                known = self._given(target, known, differs or self._is_by_rank(node.value, known))
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            own = isinstance(node, ast.AugAssign) and self._is_by_rank(node.target, known)
            known = self._given(node.target, known, differs or own or self._is_by_rank(node.value, known))
        return known

    def _given(self, target: ast.expr, known: set[str], by_rank: bool) -> set[str]:
        """Return the names whose values differ after an assignment to a target."""
        if isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                known = self._given(item, known, by_rank)
            return known
        name = container(target.value if isinstance(target, ast.Starred) else target)
        if by_rank and name:
            self.found.add(name)
            return known | {name}
        return known - {name} if mentioned(target) else known

    def _is_by_rank(self, node: ast.expr, known: set[str]) -> bool:
        if any(name in known for name in read_names(node)):
            return True
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                last = dotted(inner.func).rpartition(".")[2]
                if last in CLOCKS or any(one in self._training for one in self._program.functions(inner)):
                    return True
        return False


def _loss(node: ast.expr) -> ast.expr:
    """The loss in `loss.backward()` and in `scaler.scale(loss).backward()`."""
    if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute) and node.func.attr == "scale":
        return node.args[0]
    return node

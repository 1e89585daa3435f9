"""Checks of gradient accumulation: an epoch must end with a step, and few ranks must know how many batches make one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from bftrainer.explain import lines
from bftrainer.explain.places import notice
from bftrainer.explain.reading.program import Loop, Program
from bftrainer.explain.reading.source import dotted
from bftrainer.explain.report import Notice
from bftrainer.explain.training.loops import Training, loader_of


@dataclass(frozen=True, eq=False)
class Accumulation:
    """A test that decides whether a batch is followed by a step."""

    test: ast.If
    continues: bool
    """The test skips the step with `continue`."""
    has_tail: bool
    """The last batches of an epoch may go without a step."""
    condition: str
    """What is missing in the test then; empty if it is not known."""

    @property
    def addition(self) -> str:
        """What to add to the test."""
        if not self.condition:
            return ""
        return f" and {self.condition.replace('==', '!=')}" if self.continues else f" or {self.condition}"


def find_accumulation(program: Program, training: Training) -> list[Accumulation]:
    """Find the tests of a loop over a DataLoader that add up the gradients of several batches."""
    batch = training.batch
    if batch is None:
        return []
    found: dict[ast.If, Accumulation] = {}
    for step in training.steps:
        for node in program.ancestors(step.call):
            if node is batch:
                break
            if isinstance(node, ast.If) and _counts(node.test) and not _has_backward(node):
                found[node] = _accumulation(program, batch, node, continues=False)
    for one in training.reached:
        node = one.node
        if not isinstance(node, ast.If) or program.parents[node] is not batch or not _counts(node.test):
            continue
        computed = any(call.lineno < node.lineno for call in training.backwards)
        if computed and isinstance(node.body[-1], ast.Continue):
            found[node] = _accumulation(program, batch, node, continues=True)
    return list(found.values())


def tail_notices(program: Program, found: list[Accumulation]) -> Iterator[Notice]:
    """Yield the tests that let the last batches of an epoch go without a step."""
    for one in found:
        if one.has_tail:
            remedy = "make a step after the last batch of an epoch, too"
            if one.addition:
                remedy += f": `if {ast.unparse(one.test.test)}{one.addition}:`"
            what = "the last batches of an epoch are accumulated without a step if their number does not divide"
            yield notice(program, one.test, what, remedy, refused=True)


def count_notices(program: Program, found: list[Accumulation]) -> Iterator[Notice]:
    """Yield the tests by which gradients are added up over a number of batches that few ranks must know."""
    for one in found:
        count = _divisor(one.test.test)
        yield notice(
            program,
            one.test,
            "gradients of several batches are added up. If there are fewer ranks than the script was submitted for, it "
            "must say how many",
            f"if that may happen, write {lines.PREPARE}(…, {lines.ACCUMULATE}={count})",
        )


def _accumulation(program: Program, batch: Loop, test: ast.If, *, continues: bool) -> Accumulation:
    tail = not _looks_for_last(test.test)
    return Accumulation(test, continues, tail, _last_batch(program, batch, test) if tail else "")


def _divisor(test: ast.expr) -> str:
    found = [node.right for node in ast.walk(test) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)]
    return ast.unparse(found[0])


def _counts(test: ast.expr) -> bool:
    """Whether a test counts batches."""
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(test))


def _looks_for_last(test: ast.expr) -> bool:
    """Whether a test is true for the last batch, too."""
    nodes = list(ast.walk(test))
    names = " ".join(dotted(node).lower() for node in nodes if isinstance(node, ast.Name | ast.Attribute))
    asks = any(isinstance(node, ast.Call) and dotted(node.func) == "len" for node in nodes)
    return asks or "last" in names or any(isinstance(node, ast.Or) for node in nodes)


def _has_backward(node: ast.If) -> bool:
    nodes = [inner for statement in node.body for inner in ast.walk(statement)]
    return any(isinstance(inner, ast.Attribute) and inner.attr == "backward" for inner in nodes)


def _last_batch(program: Program, batch: Loop, test: ast.If) -> str:
    """The condition for the last batch; empty if the loop does not number its batches."""
    if isinstance(batch, ast.While) or program.scopes[batch] is not program.scopes[test]:
        return ""
    numbered = [
        node for node in ast.walk(batch.iter) if isinstance(node, ast.Call) and dotted(node.func) == "enumerate"
    ]
    loader = loader_of(program, batch)
    first = batch.target.elts[0] if isinstance(batch.target, ast.Tuple) else None
    if not numbered or loader is None or not isinstance(first, ast.Name) or not dotted(loader):
        return ""
    call = numbered[0]
    starts = [*call.args[1:], *(one.value for one in call.keywords)]
    if not starts or _is_constant(starts[0], 0):
        return f"{first.id} + 1 == len({dotted(loader)})"
    return f"{first.id} == len({dotted(loader)})" if _is_constant(starts[0], 1) else ""


def _is_constant(node: ast.expr, value: int) -> bool:
    return isinstance(node, ast.Constant) and node.value == value

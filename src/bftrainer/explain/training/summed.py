"""Summed losses: finds the parts of a loss that are sums over the batch, or other means than over its samples.

The gradients of all ranks are averaged by their samples, which is right for a mean over the samples only.
"""

from __future__ import annotations

import ast
import re
from typing import TypeGuard

from bftrainer.explain.reading.bindings import Binding
from bftrainer.explain.reading.program import Program, returns
from bftrainer.explain.reading.source import dotted

DEEPEST = 12


def loss_of(call: ast.Call) -> ast.expr | None:
    """Return the loss that a call of `backward` starts from."""
    func = call.func
    assert isinstance(func, ast.Attribute)
    if call.args and dotted(func.value).rpartition(".")[2] in ("accelerator", "fabric", "self", "autograd"):
        return call.args[0]
    loss = func.value
    if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale" and loss.args:
        return loss.args[0]
    return loss


def sums_in(program: Program, loss: ast.expr) -> list[ast.Call]:
    """Return the calls that sum over the batch and whose result is part of a loss."""
    search = _SumSearch(program)
    search.look(loss, None, 0)
    return search.found


def other_means_in(program: Program, loss: ast.expr) -> list[ast.expr]:
    """Return the parts of a loss that average over something else than the samples of the batch.

    These are sums that are divided by another sum of the batch, class weights and ignored targets.
    """
    search = _SumSearch(program)
    search.look(loss, None, 0)
    return search.other_means


class _SumSearch:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._seen: set[tuple[ast.expr, int | None]] = set()
        self.found: list[ast.Call] = []
        self.other_means: list[ast.expr] = []

    def look(self, node: ast.expr, index: int | None, depth: int) -> None:
        if (node, index) in self._seen or depth > DEEPEST:
            return
        self._seen.add((node, index))
        if isinstance(node, ast.BinOp):
            self._operation(node, depth)
        elif isinstance(node, ast.UnaryOp):
            self.look(node.operand, None, depth + 1)
        elif isinstance(node, ast.IfExp):
            self.look(node.body, index, depth + 1)
            self.look(node.orelse, index, depth + 1)
        elif isinstance(node, ast.Tuple | ast.List):
            for item in node.elts if index is None else node.elts[index : index + 1]:
                self.look(item, None, depth + 1)
        elif isinstance(node, ast.Name | ast.Attribute):
            self._name(node, depth)
        elif isinstance(node, ast.Call):
            self._call(node, index, depth)

    def _operation(self, node: ast.BinOp, depth: int) -> None:
        if isinstance(node.op, ast.Div):
            if _is_accumulation(node.right):
                self.look(node.left, None, depth + 1)
            elif self._is_sum_of_batch(node.right) and self._is_sum_of_batch(node.left):
                self.other_means.append(node)
            return
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            self.look(node.left, None, depth + 1)
            self.look(node.right, None, depth + 1)

    def _name(self, node: ast.Name | ast.Attribute, depth: int) -> None:
        bindings = self._program.bindings(node)
        if any(_divides(binding, dotted(node)) for binding in bindings):
            return
        for binding in bindings:
            if not binding.element:
                self.look(binding.value, binding.index, depth + 1)

    def _is_sum_of_batch(self, node: ast.expr) -> bool:
        """Whether a value is, or contains, the sum of a tensor."""
        values = [node, *(binding.value for binding in self._program.bindings(node))] if _is_name(node) else [node]
        return any(
            isinstance(part, ast.Call) and (_sums(self._program, part) or _is_count(part))
            for value in values
            for part in ast.walk(value)
        )

    def _call(self, call: ast.Call, index: int | None, depth: int) -> None:
        if _sums(self._program, call):
            if not _is_of_weights(call):
                self.found.append(call)
            return
        if _leaves_samples_out(call):
            self.other_means.append(call)
        func = call.func
        if isinstance(func, ast.Attribute) and func.attr in ("item", "float", "to", "sqrt", "squeeze", "double"):
            self.look(func.value, index, depth + 1)
            return
        for function in self._program.functions(call):
            for value in returns(self._program, function):
                self.look(value, index, depth + 1)
        if isinstance(func, ast.Name | ast.Attribute | ast.Call):
            for origin in self._program.origins(func):
                self._module(origin, index, depth)

    def _module(self, origin: ast.expr, index: int | None, depth: int) -> None:
        """A module that computes the loss: PyTorch's own, or a class of the program."""
        if not isinstance(origin, ast.Call):
            return
        if _has_sum_keyword(origin):
            self.found.append(origin)
        elif _leaves_samples_out(origin):
            self.other_means.append(origin)
        for cls in self._program.classes(origin.func):
            for method in cls.body:
                if isinstance(method, ast.FunctionDef) and method.name in ("forward", "__call__"):
                    for value in returns(self._program, method):
                        self.look(value, index, depth + 1)


def _sums(program: Program, call: ast.Call) -> bool:
    """Whether a call adds up all of a tensor."""
    if _has_sum_keyword(call):
        return True
    func = call.func
    if not isinstance(func, ast.Attribute) or func.attr != "sum" or call.keywords:
        return False
    if isinstance(func.value, ast.Name) and program.name(func.value) == "torch":
        return len(call.args) == 1
    return not call.args


def _is_name(node: ast.expr) -> TypeGuard[ast.Name | ast.Attribute]:
    return isinstance(node, ast.Name | ast.Attribute)


def _is_count(call: ast.Call) -> bool:
    return dotted(call.func).rpartition(".")[2] == "count_nonzero"


def _is_of_weights(call: ast.Call) -> bool:
    """Whether a sum is one of a model's weights, such as a penalty: it is the same on all ranks."""
    return any(
        isinstance(part, ast.Attribute) and part.attr in ("weight", "bias", "parameters", "named_parameters")
        for part in ast.walk(call)
    )


def _leaves_samples_out(call: ast.Call) -> bool:
    """Whether a loss function divides by the sum of class weights, or by the number of targets that are not ignored."""
    name = dotted(call.func).rpartition(".")[2].lower().replace("_", "")
    if name not in ("crossentropy", "crossentropyloss", "nllloss"):
        return False
    given = {keyword.arg for keyword in call.keywords}
    means = all(
        keyword.arg != "reduction" or (isinstance(keyword.value, ast.Constant) and keyword.value.value == "mean")
        for keyword in call.keywords
    )
    return means and bool(given & {"weight", "ignore_index"})


def _has_sum_keyword(call: ast.Call) -> bool:
    for keyword in call.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if (keyword.arg == "reduction" and value == "sum") or (keyword.arg == "size_average" and value is False):
            return True
    return False


def _divides(binding: Binding, name: str) -> bool:
    """Whether a statement divides a value, as `loss /= n` and `loss = loss / n` do, to make a mean of it."""
    statement, value = binding.statement, binding.value
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.op, ast.Div) and not _is_accumulation(value)
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Div):
        return False
    return dotted(value.left) == name and not _is_accumulation(value.right)


def _is_accumulation(node: ast.expr) -> bool:
    """Whether a divisor is the number of batches that are accumulated for a step."""
    return re.search(r"accum|micro|grad_acc", ast.unparse(node).lower()) is not None

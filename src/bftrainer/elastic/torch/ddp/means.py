"""Sums and means: decides from the script's text what it does with the result of a reduction.

With `all_reduce(x)` a script adds up counts, or it computes a mean: it then divides by the number of ranks. Both look
the same to the call. They are not the same here, because the number of ranks that compute differs from the number that
the script sees. A division that cannot be assigned to a reduction is refused.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

from bftrainer.elastic.torch.ddp.refused import is_of_script, refuse, script_folder

_WORLD = re.compile(r"world|num_replicas|nprocs|num_processes|n_?gpus?$|num_gpus?$", re.IGNORECASE)
_OTHER = re.compile(r"batch|lr$|learning|rate|worker|epoch|step|len$|size|sampl|num|iter|thread|gb$", re.IGNORECASE)
_COUNTS = re.compile(r"count|total|len|sampl|batch|epoch|step|iter|size|dataset|loader", re.IGNORECASE)
"""Names of divisors that count samples or batches, not ranks."""
_REDUCTIONS = frozenset(["all_reduce", "reduce"])
_DIVISIONS = frozenset(["div", "div_", "divide", "divide_", "true_divide", "true_divide_"])
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


@dataclass(frozen=True, slots=True)
class _Division:
    line: int
    numerator: frozenset[str]
    divisor: ast.expr
    within: _Function


def is_mean(frame: FrameType) -> bool:
    """Return whether the script divides the result of the reduction at a frame's line by the number of ranks."""
    files = _files(frame.f_code.co_filename)
    module = _module(frame.f_code.co_filename, files)
    if module is None:
        refuse("a reduction in code without a file: it is not known whether it is a sum or a mean")
    within = module.function_at(frame.f_lineno)
    reduced = module.reduced_in(within, frame.f_lineno)
    means = [one for one in module.divisions if one.within is within and reduced & one.numerator]
    mean = bool(means)
    for one in means:
        if unclear := _names(one.divisor) & _unclear(files):
            refuse(
                f"line {one.line} divides what is reduced here by `{min(unclear)}`, which is the number of ranks in "
                "some lines of the script and something else in others",
                "give it a name of its own, or submit it with --launcher torchrun",
            )
    if not mean:
        _refuse_other_divisors(module, within, reduced)
        _refuse_unknown_divisions(files)
    return mean


def _files(file: str) -> tuple[str, ...]:
    """Return the files of the script: those that are imported, and one that has been run."""
    folder = script_folder()
    found = [getattr(one, "__file__", None) for one in list(sys.modules.values()) if is_of_script(vars(one), folder)]
    return tuple(sorted({file, *(one for one in found if one)}))


def _refuse_other_divisors(module: _Module, within: _Function, reduced: frozenset[str]) -> None:
    """Refuse a division of what is reduced by a name that may or may not be the number of ranks."""
    for one in module.all_divisions:
        names = _names(one.divisor) - {"len", "max", "min", "int"}
        if one.within is within and reduced & one.numerator and names and not names & module.reduced_in(within):
            if all(map(_COUNTS.search, names)):
                continue
            refuse(
                f"line {one.line} divides what is reduced here by `{ast.unparse(one.divisor)}`, and it is not known "
                "whether that is the number of ranks",
                "divide by torch.distributed.get_world_size() itself, or submit it with --launcher torchrun",
            )


def _refuse_unknown_divisions(files: tuple[str, ...]) -> None:
    for file in files:
        module = _module(file, files)
        if module is None:
            continue
        for one in module.divisions:
            if not one.numerator & module.reduced_in(one.within) and not any(map(_OTHER.search, one.numerator)):
                refuse(
                    f"{Path(file).name}:{one.line} divides by the number of ranks, and it is not known whether that "
                    "makes a mean of what is reduced here",
                    "divide in the function that reduces, or submit it with --launcher torchrun",
                )


class _Module:
    """The reductions and divisions of one file."""

    def __init__(self, tree: ast.Module, worlds: frozenset[str]) -> None:
        self._tree = tree
        self._owners = dict(_owners(tree))
        self.all_divisions = list(self._found())
        self.divisions = [one for one in self.all_divisions if _mentions_world(one.divisor, worlds)]

    def function_at(self, line: int) -> _Function:
        """Return the innermost function that has a line."""
        found: _Function = self._tree
        for node, owner in self._owners.items():
            if isinstance(node, _Function) and node.lineno <= line <= (node.end_lineno or node.lineno):  # type: ignore[union-attr]
                found = node if owner is found or isinstance(found, ast.Module) else found
        return found

    def reduced_in(self, function: _Function, line: int | None = None) -> frozenset[str]:
        """Return the names that a function reduces, in a line or anywhere."""
        found: set[str] = set()
        for node, owner in self._owners.items():
            if owner is not function or not isinstance(node, ast.Call) or _last(node.func) not in _REDUCTIONS:
                continue
            if node.args and (line is None or node.lineno <= line <= (node.end_lineno or node.lineno)):
                found |= _names(node.args[0])
        return frozenset(found)

    def _found(self) -> Iterator[_Division]:
        for node, owner in self._owners.items():
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                yield _Division(node.lineno, _names(node.left), node.right, owner)
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
                yield _Division(node.lineno, _names(node.target), node.value, owner)
            elif isinstance(node, ast.Call) and _last(node.func) in _DIVISIONS and node.args:
                on_torch = isinstance(node.func, ast.Attribute) and _last(node.func.value) == "torch"
                left = node.args[0] if on_torch else getattr(node.func, "value", node.func)
                yield _Division(node.lineno, _names(left), node.args[-1], owner)


@cache
def _module(file: str, files: tuple[str, ...]) -> _Module | None:
    """Return the reductions and divisions of a file. `files` are all files of the script: names come from there."""
    tree = _tree(file)
    return None if tree is None else _Module(tree, _worlds(files))


@cache
def _worlds(files: tuple[str, ...]) -> frozenset[str]:
    return _world_names([tree for tree in map(_tree, files) if tree is not None])


@cache
def _unclear(files: tuple[str, ...]) -> frozenset[str]:
    """Return names that are the number of ranks in some lines, and something else in others."""
    worlds = set(_worlds(files))
    pairs = [
        pair for tree in map(_tree, files) if tree is not None for node in ast.walk(tree) for pair in _assigned(node)
    ]
    others = {_last(target) for target, value in pairs if not _is_world(value, worlds) and not _is_one(value)}
    return frozenset(worlds & others)


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (1, None)


@cache
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _owners(tree: ast.Module) -> Iterator[tuple[ast.AST, _Function]]:
    """Yield each node with the function that has it; functions with the one around them."""
    stack: list[tuple[ast.AST, _Function]] = [(node, tree) for node in ast.iter_child_nodes(tree)]
    while stack:
        node, owner = stack.pop(0)
        yield node, owner
        inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else owner
        stack += [(child, inner) for child in ast.iter_child_nodes(node)]


def _world_names(trees: Sequence[ast.Module]) -> frozenset[str]:
    """Return names for the number of ranks: assigned from it, functions that return it, parameters that get it."""
    names: set[str] = set()
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    for _ in range(3):
        for name, function in functions.items():
            if any(
                isinstance(one, ast.Return) and one.value and _is_world(one.value, names) for one in ast.walk(function)
            ):
                names.add(name)
        for node in nodes:
            names |= {_last(target) for target, value in _assigned(node) if _is_world(value, names)}
            if isinstance(node, ast.Call) and _last(node.func) in functions:
                params = [one.arg for one in functions[_last(node.func)].args.args]
                params = params[1:] if params[:1] == ["self"] else params
                names |= {param for param, given in zip(params, node.args, strict=False) if _is_world(given, names)}
                names |= {one.arg for one in node.keywords if one.arg and _is_world(one.value, names)}
    return frozenset(names - {""})


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what is assigned to what, also by pairs in tuples."""
    if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    for target in node.targets if isinstance(node, ast.Assign) else ():
        assert isinstance(node, ast.Assign)
        if isinstance(target, ast.Tuple | ast.List) and isinstance(node.value, ast.Tuple | ast.List):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _is_world(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is the number of ranks itself."""
    if isinstance(node, ast.IfExp):
        return _is_world(node.body, names) or _is_world(node.orelse, names)
    if isinstance(node, ast.Call):
        if _last(node.func) in ("int", "float") and node.args:
            return _is_world(node.args[0], names)
        if _last(node.func) in ("getenv", "get") and node.args:
            return _is_world(node.args[0], names)
        return _last(node.func) == "get_world_size" or _last(node.func) in names
    if isinstance(node, ast.Subscript):
        return _is_world(node.slice, names)
    if isinstance(node, ast.Constant):
        return node.value == "WORLD_SIZE"
    last = _last(node)
    return bool(last) and (last in names or _WORLD.search(last) is not None)


def _mentions_world(node: ast.expr, names: frozenset[str]) -> bool:
    return any(_is_world(one, set(names)) for one in ast.walk(node) if isinstance(one, ast.expr))


def _names(node: ast.expr) -> frozenset[str]:
    """Return the names of an expression: of variables, and the last ones of attributes."""
    found = {_last(one) for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)}
    return frozenset(found - {"self", "item", "torch", "dist", "float", ""})


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

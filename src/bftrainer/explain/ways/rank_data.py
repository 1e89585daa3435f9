"""Data that a script chooses by its rank, without a sampler: what keeps it from training in place.

With `--launcher ddp` each script sees rank 0. So code that takes every n-th sample from its rank on, or makes a dataset
by its rank, would take the part of rank 0 on all ranks, and the other parts would be missing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bftrainer.explain.places import notice
from bftrainer.explain.reading.program import Program
from bftrainer.explain.report import Notice

_REMEDY = "use a DistributedSampler, or submit it with --launcher torchrun: it restarts at each change"
_RANK_CALLS = frozenset(["get_rank", "get_node_local_rank"])
_RANK_KEYS = frozenset(["RANK", "LOCAL_RANK"])
_CHOOSING = frozenset(["range", "arange", "islice", "Subset", "linspace", "select", "narrow", "shard", "chunk"])
_PLACES = frozenset(["device", "cuda", "gpu"])
_DEVICES = frozenset(["device_count", "n_gpus", "num_gpus", "ngpus", "n_gpu"])


def data_by_rank(program: Program) -> Iterator[Notice]:
    """Yield the lines in which a rank is part of an index, of a range, of a remainder or of what makes a dataset."""
    for file in program.files:
        names = _rank_names(file.tree)
        for node in ast.walk(file.tree):
            parts = _choosing(node) or _making(program, node)
            if any(_is_rank(part, names) for part in parts) and not any(_is_device(part) for part in parts):
                what = "chooses data by the rank, but each script sees rank 0, so that the other parts would be missing"
                yield notice(program, node, what, _REMEDY, refused=True)


def _choosing(node: ast.AST) -> list[ast.AST]:
    """Return the expressions within a node that choose a part of something."""
    if isinstance(node, ast.Subscript) and not (isinstance(node.slice, ast.Constant)):
        return list(ast.walk(node.slice))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant):
        return list(ast.walk(node))
    if isinstance(node, ast.Call) and _last(node.func) in _CHOOSING:
        return [part for argument in [*node.args, *node.keywords] for part in ast.walk(argument)]
    return []


def _making(program: Program, node: ast.AST) -> list[ast.AST]:
    """Return the expressions that a dataset of the script is made with, apart from the device that it is put on."""
    if not isinstance(node, ast.Call):
        return []
    bases = [_last(base) for cls in program.classes(node.func) for base in cls.bases]
    if not any(base.endswith("Dataset") for base in bases):
        return []
    arguments = [*node.args, *(keyword for keyword in node.keywords if keyword.arg not in _PLACES)]
    return [part for argument in arguments if not _is_place(argument) for part in ast.walk(argument)]


def _is_place(argument: ast.AST) -> bool:
    return any(
        _last(part) in _PLACES or (isinstance(part, ast.Constant) and part.value in _PLACES | {"cuda:"})
        for part in ast.walk(argument)
    )


def _rank_names(tree: ast.Module) -> frozenset[str]:
    """Return the names that a file gives to its rank."""
    names = set[str]()
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr, ast.expr]]
        if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            pairs = [
                pair
                for target in node.targets
                for pair in (
                    zip(target.elts, node.value.elts, strict=False)
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    else [(target, node.value)]
                )
            ]
        else:
            continue
        names |= {_last(target) for target, value in pairs if any(_reads_rank(part) for part in ast.walk(value))}
    return frozenset(names - {""})


def _reads_rank(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _last(node.func) in _RANK_CALLS
    return isinstance(node, ast.Constant) and node.value in _RANK_KEYS


def _is_rank(node: ast.AST, names: frozenset[str]) -> bool:
    last = _last(node)
    return last in names or last in ("rank", "local_rank", "global_rank") or _is_rank_call(node)


def _is_rank_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _last(node.func) in _RANK_CALLS


def _is_device(node: ast.AST) -> bool:
    return _last(node) in _DEVICES


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

"""Lightning: the changes for a script with a Lightning Trainer, which gets another strategy."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bftrainer.explain import lines
from bftrainer.explain.edits import Edits, add_import
from bftrainer.explain.places import notice
from bftrainer.explain.reading.program import Program
from bftrainer.explain.reading.source import SourceFile
from bftrainer.explain.report import Notice
from bftrainer.explain.ways.frameworks import TORCHRUN, made_of

_PACKAGES = ("lightning.", "pytorch_lightning.")
_SHARDING = ("fsdp", "deepspeed", "modelparallel", "xla")
"""Parts of the names of strategies that split the model over the ranks, or are for other devices."""
_ONE_DEVICE = (1, "auto", "1")
"""Values of `devices` and `num_nodes` that an elastic Trainer can have."""


def lightning_calls(program: Program) -> list[ast.Call]:
    """Return the calls that make a Lightning Trainer."""
    return [call for call in program.calls if made_of(program, call, _PACKAGES, ".Trainer")]


def explain_lightning(program: Program, calls: list[ast.Call], edits: Edits) -> Iterator[Notice]:
    """Put the changes of a script with a Lightning Trainer into `edits`, and yield its notices."""
    for call in calls:
        yield from _sharding(program, call)
        if _change(program, call, edits):
            add_import(edits, program.file(call), lines.IMPORT_LIGHTNING)
        else:
            yield notice(
                program, call, "this Trainer needs another strategy", f"give it strategy={lines.ELASTIC_STRATEGY}"
            )
    for call in program.calls:
        if made_of(program, call, _PACKAGES, ".Tuner"):
            yield notice(
                program,
                call,
                "the tuner trains several times in one process",
                "set the batch size and the learning rate, or submit one trainer per value by `submit --array`",
                refused=True,
            )


def _sharding(program: Program, call: ast.Call) -> Iterator[Notice]:
    for keyword in call.keywords:
        if keyword.arg != "strategy":
            continue
        name = ast.unparse(keyword.value).lower().replace("_", "")
        if any(part in name for part in _SHARDING):
            yield notice(
                program,
                keyword.value,
                f"{ast.unparse(keyword.value)} splits the model over the ranks, and a part is lost with its node",
                TORCHRUN,
                refused=True,
            )


def _change(program: Program, call: ast.Call, edits: Edits) -> bool:
    """Give a Trainer the elastic strategy, and take away how many devices it uses. Return False if that is too hard."""
    file, given = program.file(call), f"strategy={lines.ELASTIC_STRATEGY}"
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    arguments.sort(key=lambda one: (one.lineno, one.col_offset))
    extra = [one for one in call.keywords if one.arg in ("devices", "num_nodes") and not _is_one(one.value)]
    present = next((one for one in call.keywords if one.arg == "strategy"), None)
    if any(one.lineno != one.end_lineno for one in (*extra, *([present] if present is not None else ()))):
        return False
    if present is not None:
        value = present.value
        edits.replace(file, value.lineno, value.col_offset, value.end_col_offset or 0, lines.ELASTIC_STRATEGY)
    elif extra:
        first = extra.pop(0)
        edits.replace(file, first.lineno, first.col_offset, first.end_col_offset or 0, given)
    elif arguments:
        first_argument = arguments[0]
        edits.replace(file, first_argument.lineno, first_argument.col_offset, first_argument.col_offset, f"{given}, ")
    elif call.end_lineno is not None and call.end_col_offset is not None:
        edits.replace(file, call.end_lineno, call.end_col_offset - 1, call.end_col_offset - 1, given)
    for keyword in extra:
        _take_away(file, keyword, arguments, edits)
    return True


def _take_away(file: SourceFile, keyword: ast.keyword, arguments: list[ast.expr | ast.keyword], edits: Edits) -> None:
    """Remove an argument with the comma before it or after it, or with its line if it has one of its own."""
    place = arguments.index(keyword)
    before = arguments[place - 1] if place else None
    after = arguments[place + 1] if place + 1 < len(arguments) else None
    if before is not None and before.end_lineno == keyword.lineno:
        edits.replace(file, keyword.lineno, before.end_col_offset or 0, keyword.end_col_offset or 0, "")
    elif after is not None and after.lineno == keyword.lineno:
        edits.replace(file, keyword.lineno, keyword.col_offset, after.col_offset, "")
    else:
        edits.remove(file, keyword.lineno, keyword.lineno)


def _is_one(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value in _ONE_DEVICE

"""Frameworks of Hugging Face: the changes for a Trainer and for an Accelerator."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bftrainer.explain import lines
from bftrainer.explain.checks.data import is_stream
from bftrainer.explain.edits import Edits, add_import, indentation
from bftrainer.explain.places import notice
from bftrainer.explain.reading.program import Program
from bftrainer.explain.report import Notice
from bftrainer.explain.training.loops import Training
from bftrainer.explain.training.objects import TrainedObjects
from bftrainer.explain.ways.plain import carried_notices, early_end_notice, replace_range, training_notices

TORCHRUN = "submit it with --launcher torchrun: it restarts from its checkpoint at each change"
_HUGGING_FACE = ("transformers.", "trl.", "sentence_transformers.")
_SHARDING_OPTIONS = frozenset(
    ["fsdp", "fsdp_config", "deepspeed", "fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin"]
)


def made_of(program: Program, call: ast.Call, packages: tuple[str, ...], ending: str) -> bool:
    """Whether a call makes an object of a class of these packages, or of a class of the program based on one."""
    return _is_of(program, call.func, packages, ending, 0)


def _is_of(program: Program, node: ast.expr, packages: tuple[str, ...], ending: str, depth: int) -> bool:
    name = program.name(node)
    if name.startswith(packages) and name.endswith(ending):
        return True
    if depth > 6:
        return False
    return any(
        _is_of(program, base, packages, ending, depth + 1) for cls in program.classes(node) for base in cls.bases
    )


# Hugging Face.


def trainer_calls(program: Program) -> list[ast.Call]:
    """Return the calls that make a Hugging Face Trainer."""
    return [call for call in program.calls if made_of(program, call, _HUGGING_FACE, "Trainer")]


def explain_transformers(program: Program, edits: Edits) -> Iterator[Notice]:
    """Put the changes of a script with a Hugging Face Trainer into `edits`, and yield its notices."""
    for call in trainer_calls(program):
        file, func = program.file(call), call.func
        if func.lineno == func.end_lineno:
            wrapped = lines.ELASTIC_TRAINER.format(trainer=ast.unparse(func))
            edits.replace(file, func.lineno, func.col_offset, func.end_col_offset or 0, wrapped)
            add_import(edits, file, lines.IMPORT_TRANSFORMERS)
        datasets = [one.value for one in call.keywords if one.arg == "train_dataset"]
        for dataset in datasets:
            if is_stream(program, dataset):
                yield notice(
                    program,
                    dataset,
                    "the training data is a stream: it has no length and no index, so samples cannot be given to ranks",
                    "load it without streaming",
                    refused=True,
                )
    arguments = [call for call in program.calls if made_of(program, call, _HUGGING_FACE, "TrainingArguments")]
    configs = [call for call in program.calls if made_of(program, call, ("trl.",), "Config")]
    yield from _sharding(program, [*arguments, *configs])


def _sharding(program: Program, calls: list[ast.Call]) -> Iterator[Notice]:
    for call in calls:
        for keyword in call.keywords:
            given = not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
            if keyword.arg in _SHARDING_OPTIONS and given:
                yield notice(
                    program,
                    keyword.value,
                    f"{keyword.arg} splits the model over the ranks, and a part is lost with its node",
                    TORCHRUN,
                    refused=True,
                )


# Accelerate.


def accelerator_calls(program: Program) -> list[ast.Call]:
    """Return the calls that make an Accelerator."""
    return [call for call in program.calls if made_of(program, call, ("accelerate.",), "Accelerator")]


def explain_accelerate(program: Program, training: Training | None, edits: Edits) -> Iterator[Notice]:
    """Put the changes of a script with an Accelerator into `edits`, and yield its notices."""
    for call in accelerator_calls(program):
        if isinstance(call.func, ast.Name):
            _change_import(program, call.func, edits)
        else:
            file, func = program.file(call), call.func
            edits.replace(file, func.lineno, func.col_offset, func.end_col_offset or 0, "Accelerator")
            add_import(edits, file, lines.IMPORT_ACCELERATOR.format(name="Accelerator"))
    yield from _sharding(program, accelerator_calls(program))
    for call in program.calls:
        if program.name(call.func).endswith(("accelerate.notebook_launcher", "accelerate.debug_launcher")):
            yield notice(
                program,
                call,
                "the script starts its processes itself, but BFTrainer starts one per GPU",
                "call the training function directly",
                refused=True,
            )
    if training is not None:
        kept = list(carried_notices(program, training, TrainedObjects(), lines.REGISTER_IN_ACCELERATE))
        yield from kept
        if kept and training.epoch is not None and not replace_range(program, training.epoch, lines.EPOCHS, edits):
            yield early_end_notice(program, training.epoch)
        yield from training_notices(program, training)


def _change_import(program: Program, func: ast.Name, edits: Edits) -> None:
    """Import the elastic Accelerator under the name that the script uses."""
    file = program.file(func)
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "accelerate":
            continue
        others = [alias for alias in node.names if (alias.asname or alias.name) != func.id]
        if len(others) == len(node.names):
            continue
        indent = indentation(file, node.lineno)
        edits.remove(file, node.lineno, node.end_lineno or node.lineno)
        if others:
            names = ", ".join(one.name + (f" as {one.asname}" if one.asname else "") for one in others)
            edits.insert(file, node.lineno, f"{indent}from {node.module} import {names}")
        edits.insert(file, node.lineno, indent + lines.IMPORT_ACCELERATOR.format(name=func.id))

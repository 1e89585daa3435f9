"""Checks of a training loop: losses, optimizers, gradients, and loops around or beside the training."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bftrainer.explain import lines
from bftrainer.explain.places import notice
from bftrainer.explain.reading.kinds import Kind
from bftrainer.explain.reading.program import Program
from bftrainer.explain.reading.source import dotted
from bftrainer.explain.report import Notice
from bftrainer.explain.training.loops import Training
from bftrainer.explain.training.summed import loss_of, other_means_in, sums_in


def loop_notices(program: Program, training: Training) -> Iterator[Notice]:
    """Yield what is to be known about the loop of a training."""
    yield from _summed_losses(program, training)
    yield from _optimizers(program, training)
    yield from _other_loops(program, training)


def _summed_losses(program: Program, training: Training) -> Iterator[Notice]:
    losses = [loss for loss in map(loss_of, training.backwards) if loss is not None]
    for call in dict.fromkeys(call for loss in losses for call in sums_in(program, loss)):
        yield notice(
            program,
            call,
            f"the loss is a sum over the batch ({_shortened(call)}), but it must be a mean",
            "use a mean, or divide the sum by the number of samples in the batch, such as len(data)",
            refused=True,
        )
    for part in dict.fromkeys(part for loss in losses for part in other_means_in(program, loss)):
        yield notice(
            program,
            part,
            f"the loss is not a mean over the samples of the batch ({_shortened(part)}), so it depends a little on how "
            "the batch is divided among the nodes",
            "divide by the number of samples, such as len(data), if the result must be that of one node",
        )


def _optimizers(program: Program, training: Training) -> Iterator[Notice]:
    told: set[int] = set()
    for step in training.steps:
        for origin in program.origins(step.optimizer):
            if isinstance(origin, ast.Call) and dotted(origin.func).rpartition(".")[2] == "LBFGS":
                if id(origin) not in told:
                    told.add(id(origin))
                    yield notice(
                        program,
                        origin,
                        "LBFGS computes its closure several times within one step",
                        "use an optimizer that steps once per gradient, such as AdamW",
                        refused=True,
                    )
                break


def gradient_notices(program: Program, training: Training) -> Iterator[Notice]:
    """Yield the lines that change gradients between a backward pass and a step."""
    nodes = [one.node for one in training.reached]
    if any(isinstance(node, ast.Attribute) and node.attr == lines.SYNCHRONIZE.rstrip("()") for node in nodes):
        return
    by_run = any(program.kind(step.optimizer) is Kind.RUN for step in training.steps)
    remedy = (
        f"call {ast.unparse(training.steps[0].optimizer)}.{lines.SYNCHRONIZE} before: then they are those of all ranks"
    )
    if by_run:
        remedy = "change them in a hook (param.register_hook) instead"
    for node in nodes:
        if _changes_gradient(node):
            what = "gradients are changed by hand, when a rank may have only its own part of them"
            yield notice(program, node, what, remedy, refused=by_run)


def _changes_gradient(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        cleared = isinstance(node.value, ast.Constant) and node.value.value is None
        return not cleared and any(_is_gradient(target) for target in node.targets)
    if isinstance(node, ast.AugAssign):
        return _is_gradient(node.target)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func.attr
        in_place = method.endswith("_") and not method.endswith("__") and method not in ("zero_", "detach_")
        return in_place and _is_gradient(node.func.value)
    return False


def _is_gradient(node: ast.expr) -> bool:
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
        node = node.value
    return isinstance(node, ast.Attribute) and node.attr == "grad"


def _other_loops(program: Program, training: Training) -> Iterator[Notice]:
    for loop in training.around:
        yield notice(
            program,
            loop,
            f"this loop trains several times (the training begins in line {training.anchor.lineno})",
            "train once per script, and submit it once per value with `bftrainer submit --array`",
            refused=True,
        )
    for loop in training.others:
        yield notice(
            program,
            loop,
            f"a second loop trains, beside the one in line {training.anchor.lineno}",
            "use the prepared objects in both loops, or make it a script of its own",
        )


def _shortened(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:57]}…"

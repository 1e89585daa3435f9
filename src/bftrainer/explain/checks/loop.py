"""Checks of a training loop: losses, closures, accumulation, gradients, and loops around or beside the training."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from bftrainer.explain import lines
from bftrainer.explain.training.loops import Training, loader_of
from bftrainer.explain.places import notice
from bftrainer.explain.reading.kinds import Kind
from bftrainer.explain.reading.program import Loop, Program
from bftrainer.explain.report import Notice
from bftrainer.explain.reading.source import dotted
from bftrainer.explain.training.summed import loss_of, sums_in


def loop_notices(program: Program, training: Training) -> Iterator[Notice]:
    """Yield what is to be known about the loop of a training."""
    yield from _summed_losses(program, training)
    yield from _closures(program, training)
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


def _closures(program: Program, training: Training) -> Iterator[Notice]:
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
        else:
            if step.call.args and step.optimizer is not step.call.args[0]:
                yield notice(
                    program,
                    step.call,
                    "the optimizer computes the loss itself, in a closure",
                    f"call backward() first, then {ast.unparse(step.optimizer)}.step() without a closure",
                    refused=True,
                )


def gradient_notices(program: Program, training: Training) -> Iterator[Notice]:
    """Yield the lines that change gradients between a backward pass and a step."""
    nodes = [one.node for one in training.reached]
    if any(isinstance(node, ast.Attribute) and node.attr == lines.SYNCHRONIZE.rstrip("()") for node in nodes):
        return
    by_run = any(program.kind(step.optimizer) is Kind.RUN for step in training.steps)
    remedy = f"call {ast.unparse(training.steps[0].optimizer)}.{lines.SYNCHRONIZE} before: then they are those of all ranks"
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


# Accumulation that leaves batches without a step at the end of an epoch.


@dataclass(frozen=True, eq=False)
class Tail:
    """A test that decides whether a batch is followed by a step. `condition` is what is missing in it, if known."""

    test: ast.If
    condition: str
    continues: bool
    """The test skips the step with `continue`."""


def tails(program: Program, training: Training) -> list[Tail]:
    """Return the tests that let the last batches of an epoch go without a step."""
    if training.batch is None:
        return []
    found: dict[ast.If, Tail] = {}
    for step in training.steps:
        for node in program.ancestors(step.call):
            if node is training.batch:
                break
            if isinstance(node, ast.If) and _counts(node.test) and not _has_backward(node):
                found[node] = Tail(node, _last_batch(program, training.batch, node), False)
    for one in training.reached:
        node = one.node
        if isinstance(node, ast.If) and _counts(node.test) and isinstance(node.body[-1], ast.Continue):
            if program.parents[node] is training.batch and any(call.lineno < node.lineno for call in training.backwards):
                found[node] = Tail(node, _last_batch(program, training.batch, node), True)
    return list(found.values())


def tail_notice(program: Program, tail: Tail) -> Notice:
    """Say what is wrong with a test."""
    remedy = "make a step after the last batch of an epoch, too"
    if tail.condition:
        joined = "and" if tail.continues else "or"
        test = ast.unparse(tail.test.test)
        wanted = _negated(tail.condition) if tail.continues else tail.condition
        remedy += f": `if {test} {joined} {wanted}:`"
    return notice(
        program,
        tail.test,
        "the last batches of an epoch are accumulated without a step if their number does not divide",
        remedy,
        refused=True,
    )


def _negated(condition: str) -> str:
    return condition.replace("==", "!=")


def _counts(test: ast.expr) -> bool:
    """Whether a test counts batches and does not look for the last one."""
    nodes = list(ast.walk(test))
    has_modulo = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in nodes)
    looks = any(isinstance(node, ast.Call) and dotted(node.func) == "len" for node in nodes)
    names = " ".join(dotted(node).lower() for node in nodes if isinstance(node, ast.Name | ast.Attribute))
    return has_modulo and not looks and "last" not in names and not any(isinstance(node, ast.Or) for node in nodes)


def _has_backward(node: ast.If) -> bool:
    nodes = [inner for statement in node.body for inner in ast.walk(statement)]
    return any(isinstance(inner, ast.Attribute) and inner.attr == "backward" for inner in nodes)


def _last_batch(program: Program, batch: Loop, test: ast.If) -> str:
    """The condition for the last batch; empty if the loop does not number its batches from 0."""
    if isinstance(batch, ast.While) or program.scopes[batch] is not program.scopes[test]:
        return ""
    numbered = [node for node in ast.walk(batch.iter) if isinstance(node, ast.Call) and dotted(node.func) == "enumerate"]
    loader = loader_of(program, batch)
    first = batch.target.elts[0] if isinstance(batch.target, ast.Tuple) else None
    if not numbered or loader is None or not isinstance(first, ast.Name) or not dotted(loader):
        return ""
    call = numbered[0]
    if len(call.args) == 1 and not call.keywords:
        return f"{first.id} + 1 == len({ast.unparse(loader)})"
    start = call.args[1] if len(call.args) > 1 else call.keywords[0].value
    from_one = isinstance(start, ast.Constant) and start.value == 1
    return f"{first.id} == len({ast.unparse(loader)})" if from_one else ""


def _shortened(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:57]}…"

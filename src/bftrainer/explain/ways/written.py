"""Scripts that use bftrainer already: what shows them, and known mistakes in them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bftrainer.explain import lines
from bftrainer.explain.checks.accumulation import count_notices, find_accumulation, tail_notices
from bftrainer.explain.checks.loop import gradient_notices
from bftrainer.explain.places import evidence, notice
from bftrainer.explain.reading.kinds import Kind
from bftrainer.explain.reading.program import Program
from bftrainer.explain.reading.source import dotted
from bftrainer.explain.report import Evidence, Notice
from bftrainer.explain.training.loops import Training, range_of, step_calls
from bftrainer.explain.training.objects import TrainedObjects, find_objects
from bftrainer.explain.ways.plain import carried_notices, early_end_notice, epoch_notice, training_notices

_GRADIENT_CALLS = frozenset({"clip_grad_norm_", "clip_grad_value_", "unscale_"})


def elastic_evidence(program: Program) -> list[Evidence]:
    """Return the lines that use bftrainer; none if the script does not."""
    found = [evidence(program, call, "begins an elastic training") for call in _init_calls(program)]
    found += [evidence(program, call, "prepares the objects of the training") for call in _prepare_calls(program)]
    for file in program.files:
        for node in ast.walk(file.tree):
            modules = _imported(node)
            if any(one.startswith(lines.INTEGRATIONS) for one in modules):
                found.append(evidence(program, node, "imports an integration of bftrainer"))
            if any(one.startswith(lines.MEMBERSHIP) for one in modules):
                found.append(evidence(program, node, "speaks the protocol of workers itself"))
    return found


def _imported(node: ast.AST) -> list[str]:
    """The modules and names that an import statement imports, by their full names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _uses_accelerate(node: ast.AST) -> bool:
    return any(name.startswith(f"{lines.INTEGRATIONS}.accelerate") for name in _imported(node))


def _init_calls(program: Program) -> list[ast.Call]:
    return [call for call in program.calls if program.name(call.func) in lines.INIT_NAMES]


def _prepare_calls(program: Program) -> list[ast.Call]:
    return [call for call in program.calls if _is_prepare(program, call)]


def _is_prepare(program: Program, call: ast.Call) -> bool:
    """Whether a call is `elastic.prepare` or `run.prepare`."""
    func = call.func
    if isinstance(func, ast.Attribute) and func.attr == "prepare" and program.kind(func.value) is Kind.RUN:
        return True
    return program.name(func) in lines.PREPARE_NAMES


def _carried(program: Program) -> list[str]:
    """The names of variables that the script gives to `prepare`."""
    given = [word.value for call in _prepare_calls(program) for word in call.keywords if word.arg == lines.CARRY]
    texts = [one.value for value in given for one in ast.walk(value) if isinstance(one, ast.Constant)]
    return [text for text in texts if isinstance(text, str)]


def explain_written(program: Program, training: Training | None) -> Iterator[Notice]:
    """Yield the mistakes in a script that uses bftrainer."""
    yield from _unused_integrations(program)
    for call in program.calls:
        if program.name(call.func).rpartition(".")[2] in ("init_process_group", "DistributedDataParallel"):
            yield notice(
                program,
                call,
                f"{ast.unparse(call.func)} has no place in an elastic script: BFTrainer connects the ranks itself",
                "remove it",
                refused=True,
            )
    prepared = bool(_prepare_calls(program))
    if _init_calls(program) and not prepared:
        yield from _mistakes_with_run(program)
    if training is None:
        return
    objects = find_objects(program, training)
    yield from gradient_notices(program, training)
    if prepared:
        yield from _mistakes_with_prepare(program, training, objects)
        accumulation = find_accumulation(program, training)
        yield from tail_notices(program, accumulation)
        if not any(word.arg == lines.ACCUMULATE for call in _prepare_calls(program) for word in call.keywords):
            yield from count_notices(program, accumulation)
    given_to = lines.PREPARE if prepared else "run.register"
    if any(_uses_accelerate(node) for file in program.files for node in ast.walk(file.tree)):
        given_to = lines.REGISTER_IN_ACCELERATE
        keeps_values = any(program.name(call.func).endswith(lines.VALUE) for call in program.calls)
        if keeps_values and training.epoch is not None and range_of(training.epoch) is not None:
            yield early_end_notice(program, training.epoch)
    yield from carried_notices(program, training, objects, given_to, _carried(program))
    yield from training_notices(program, training)


def _unused_integrations(program: Program) -> Iterator[Notice]:
    for file in program.files:
        used = {node.id for node in ast.walk(file.tree) if isinstance(node, ast.Name)}
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(lines.INTEGRATIONS):
                continue
            for alias in node.names:
                if (alias.asname or alias.name) not in used:
                    yield notice(
                        program,
                        node,
                        f"{alias.asname or alias.name} is imported, but not used, so the training is not elastic",
                        "use it where the object of the framework is made",
                    )


# Scripts with `run = elastic.init()`.


def _mistakes_with_run(program: Program) -> Iterator[Notice]:
    steps = step_calls(program)
    for call, optimizer in steps.items():
        if program.kind(optimizer) is not Kind.RUN:
            yield notice(
                program,
                call,
                f"{ast.unparse(optimizer)} is stepped by the script, beside run.step()",
                "remove it: run.step() steps the registered optimizers",
                refused=True,
            )
    for call in program.calls:
        last = call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)
        if last in _GRADIENT_CALLS:
            yield notice(
                program,
                call,
                f"{last} changes gradients before run.step(), when each rank has only its own part of them",
                "remove it, and register clip_norm=… or scaler=… with run.register()",
                refused=True,
            )
    methods = {call.func.attr for call in program.calls if isinstance(call.func, ast.Attribute)}
    if "batches" in methods and "epochs" not in methods:
        for loop in program.loops:
            inside = [node for node in ast.walk(loop) if isinstance(node, ast.Attribute) and node.attr == "batches"]
            if range_of(loop) is not None and inside:
                yield notice(
                    program,
                    loop,
                    "the epochs of run.batches are counted by run.epochs, but this loop counts them itself",
                    "loop over run.epochs(n)",
                    refused=True,
                )


# Scripts with `elastic.prepare`.


def _mistakes_with_prepare(program: Program, training: Training, objects: TrainedObjects) -> Iterator[Notice]:
    calls = _prepare_calls(program)
    given = {ast.unparse(argument) for call in calls for argument in call.args}
    for call in calls:
        loaders = [one for one in call.args if program.kind(one) is Kind.LOADER]
        if loaders and isinstance(program.parents[call], ast.Expr):
            yield notice(
                program,
                call,
                "the prepared loader is the one that is returned, and it is not used",
                f"assign them: {', '.join(map(ast.unparse, call.args))} = {ast.unparse(call)}",
                refused=True,
            )
    local = any(program.scopes[call] is program.scopes[training.anchor] for call in calls)
    local = local and not any(isinstance(one, ast.Starred) for call in calls for one in call.args)
    for one in objects.named if local else ():
        if one.kind in (Kind.OPTIMIZER, Kind.LOADER, Kind.SCHEDULER, Kind.SCALER) and one.text not in given:
            yield notice(
                program,
                one.seen,
                f"the {one.kind} {one.text} is not prepared, so it is not the same on all ranks",
                f"give {one.text} to {lines.PREPARE}",
                refused=True,
            )
    if training.epoch is not None and range_of(training.epoch) is not None:
        yield epoch_notice(program, training.epoch)

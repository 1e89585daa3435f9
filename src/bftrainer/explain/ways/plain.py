"""Plain loops: the changes and notices for a script that keeps its own training loop and uses `elastic.prepare`."""

from __future__ import annotations

import ast
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass

from bftrainer.explain import lines
from bftrainer.explain.checks.accumulation import count_notices, find_accumulation, tail_notices
from bftrainer.explain.checks.data import data_notices
from bftrainer.explain.checks.loop import gradient_notices, loop_notices
from bftrainer.explain.checks.script import file_notices, script_notices
from bftrainer.explain.edits import Edits, add_import, indentation
from bftrainer.explain.places import evidence, notice, source_text
from bftrainer.explain.reading.kinds import Kind
from bftrainer.explain.reading.program import Loop, Program, is_function, parameters
from bftrainer.explain.reading.reach import reach
from bftrainer.explain.report import Evidence, Notice
from bftrainer.explain.training.by_rank import names_by_rank
from bftrainer.explain.training.carried import (
    ARRAY,
    SPECIAL,
    WEIGHTS,
    CarriedValue,
    carried_values,
    imported_values,
    kept_in_objects,
    read_after,
    unset_values,
)
from bftrainer.explain.training.counted import count_passes, own_counters
from bftrainer.explain.training.loops import Training, range_of
from bftrainer.explain.training.objects import TrainedObject, TrainedObjects, find_objects


def plain_evidence(program: Program, training: Training) -> Iterator[Evidence]:
    """Yield the lines that show a training loop."""
    for call in training.backwards[:2]:
        yield evidence(program, call, "computes gradients")
    for step in training.steps[:4]:
        yield evidence(program, step.call, "steps an optimizer")
    if training.batch is not None:
        yield evidence(program, training.batch, "the loop over the batches of a DataLoader")
    if training.iteration is not None:
        yield evidence(program, training.iteration, "a loop of steps, with data that the script gets itself")
    if training.epoch is not None:
        yield evidence(program, training.epoch, "the loop over epochs")


def training_notices(program: Program, training: Training) -> Iterator[Notice]:
    """Yield what is to be known about any script with a training loop of its own."""
    yield from loop_notices(program, training)
    yield from data_notices(program, training)
    yield from script_notices(program)
    yield from file_notices(program, training)


def explain_plain(program: Program, training: Training, edits: Edits) -> Iterator[Notice]:
    """Put the changes of a plain loop into `edits`, and yield its notices."""
    objects = find_objects(program, training)
    differing = names_by_rank(program, training)
    values = [value for value in _kept(program, training, objects) if value.name not in differing]
    plain = [value for value in values if value.module is not None and not value.elsewhere and not value.holds]
    carried = yield from _prepare(program, training, objects, plain, edits)
    yield from _loops(program, training, edits)
    accumulation = find_accumulation(program, training)
    for one in accumulation:
        test = one.test.test
        if one.addition and not isinstance(test, ast.BoolOp):
            end = test.end_col_offset or 0
            edits.replace(program.file(test), test.end_lineno or test.lineno, end, end, one.addition)
    yield from tail_notices(program, accumulation)
    yield from count_notices(program, accumulation)
    yield from gradient_notices(program, training)
    yield from carried_notices(program, training, objects, carried=carried)
    yield from training_notices(program, training)


# The line with elastic.prepare.


@dataclass(frozen=True)
class _Spot:
    """Where the line with `prepare` goes: before this line, with this indentation."""

    line: int
    indent: str


def _prepare(
    program: Program, training: Training, objects: TrainedObjects, values: list[CarriedValue], edits: Edits
) -> Generator[Notice, None, list[str]]:
    """Insert the line with `prepare`. Returns the names of the values that it carries."""
    file = program.file(training.anchor)
    fitting: list[TrainedObject] = []
    for one in objects.named:
        made = _made_inside(program, training, one)
        if made is None:
            fitting.append(one)
        else:
            yield notice(
                program,
                made,
                f"the {one.kind} is made again within the loop that begins in line {training.anchor.lineno}",
                f"make it once, before that loop, and give it to {lines.PREPARE}",
                refused=True,
            )
    spot, values = _spot(program, training, fitting, values)
    add_import(edits, file, lines.IMPORT_ELASTIC)
    names = [one.text for one in fitting]
    for one in objects.unnamed:
        inline = _inline_loader(program, training, one, names, edits, spot)
        if inline:
            place = sum(other.kind in (Kind.MODEL, Kind.OPTIMIZER) for other in fitting)
            names.insert(place, inline)
        else:
            yield notice(
                program,
                one.seen,
                f"this {one.kind} has no name in line {training.anchor.lineno}, where the training begins",
                f"make it available there, and give it to {lines.PREPARE}",
            )
    if spot is None:
        yield notice(
            program,
            training.anchor,
            f"the objects of the training are made in different functions: {', '.join(names)}",
            f"give all of them to {lines.PREPARE} in one place, before this loop",
        )
    elif names:
        carried = [value.name for value in values]
        given = [*names, carry_argument(carried)] if carried else names
        edits.insert(file, spot.line, f"{spot.indent}{', '.join(names)} = {lines.PREPARE}({', '.join(given)})")
        return carried
    return []


def _made_inside(program: Program, training: Training, one: TrainedObject) -> ast.AST | None:
    """The statement within the training's loop that makes an object anew."""
    inside = set(ast.walk(training.anchor))
    bindings = [] if one.expression is None else program.bindings(one.expression)
    found = [one.statement for one in bindings if one.statement in inside and not one.element]
    before = [one.statement for one in bindings if one.statement not in inside]
    return found[0] if found and not before else None


def _spot(
    program: Program, training: Training, objects: list[TrainedObject], values: list[CarriedValue]
) -> tuple[_Spot | None, list[CarriedValue]]:
    """Before the loop; or at the end of the definitions, if they are outside of the loop's function.

    Also returns the carried values that are set there.
    """
    file, anchor = program.file(training.anchor), training.anchor
    scope = program.scopes[anchor]
    before_loop = _Spot(anchor.lineno, indentation(file, anchor.lineno))
    if not is_function(scope):
        return before_loop, values
    plain = [one.expression for one in objects if isinstance(one.expression, ast.Name)]
    outside = [one for one in plain if not program.local_bindings(scope, one.id) and one.id not in parameters(scope)]
    if not outside:
        return before_loop, values
    if len(outside) < len(objects):
        return None, []
    made = [binding.statement for one in outside for binding in program.local_bindings(file.tree, one.id)]
    last = [one for one in file.tree.body if one in made]
    if len({one.id for one in outside}) > len({*_bound_at_top(last)} & {one.id for one in outside}):
        return None, []
    values = [value for value in values if value.first in file.tree.body]
    last += [one for one in file.tree.body if any(one is value.first for value in values)]
    end = max(one.end_lineno or one.lineno for one in last)
    return _Spot(end + 1, ""), values


def _bound_at_top(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _inline_loader(
    program: Program, training: Training, one: TrainedObject, names: list[str], edits: Edits, spot: _Spot | None
) -> str:
    """Give a DataLoader that is made in the header of the loop a name. Returns it, or nothing if it cannot have one."""
    node, batch = one.seen, training.batch
    if one.kind is not Kind.LOADER or spot is None or batch is None or not isinstance(node, ast.Call):
        return ""
    file = program.file(node)
    here = program.scopes[batch] is program.scopes[training.anchor] and node.lineno == node.end_lineno
    if not here or not isinstance(training.anchor, ast.For):
        return ""
    changing = {inner.id for inner in ast.walk(training.anchor.target) if isinstance(inner, ast.Name)}
    if changing & {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}:
        return ""
    used = {inner.id for inner in ast.walk(file.tree) if isinstance(inner, ast.Name)}
    name = next(word for word in ("train_loader", "loader", "bft_loader") if word not in used | set(names))
    edits.insert(file, spot.line, f"{spot.indent}{name} = {ast.unparse(node)}")
    edits.replace(file, node.lineno, node.col_offset, node.end_col_offset or 0, name)
    return name


# The loops.


def _loops(program: Program, training: Training, edits: Edits) -> Iterator[Notice]:
    epoch = training.epoch
    if isinstance(epoch, ast.While) and (counters := own_counters(program, epoch)):
        if counters & read_after(program, epoch) or not count_passes(program, epoch, edits, lines.EPOCHS):
            yield notice(
                program,
                epoch,
                "a node that joins later counts the epochs of this loop from its beginning",
                f"write it as `for epoch in {lines.EPOCHS}(n):`, which begins in the current epoch, without a counter "
                "of your own",
                refused=True,
            )
    elif epoch is not None and not replace_range(program, epoch, lines.EPOCHS, edits):
        yield epoch_notice(program, epoch)
    loop = training.iteration
    if loop is None:
        return
    if isinstance(loop, ast.While):
        is_read = own_counters(program, loop) & read_after(program, loop)
        counted = not is_read and count_passes(program, loop, edits, lines.STEPS)
    else:
        counted = replace_range(program, loop, lines.STEPS, edits)
    if not counted:
        yield notice(
            program,
            loop,
            "the number of steps of this loop was not found",
            f"write it as `for step in {lines.STEPS}(n):`, which counts from 0, without a counter of your own",
            refused=True,
        )
    for inner in _micro_loops(program, training):
        replace_range(program, inner, lines.MICRO_STEPS, edits)
        add_import(edits, program.file(inner), lines.IMPORT_ELASTIC)


def epoch_notice(program: Program, loop: Loop) -> Notice:
    """Advise `elastic.epochs` for a loop over epochs."""
    return notice(
        program,
        loop,
        "on a node that joins later this loop runs from its beginning: in epochs that are over the loader is empty, "
        "but the rest of the loop runs",
        f"loop over {lines.EPOCHS}(…) in place of range(…): it begins in the current epoch (advised, not needed)",
    )


def early_end_notice(program: Program, loop: Loop) -> Notice:
    """Advise `elastic.epochs` for a loop that decides by values of its own."""
    return notice(
        program,
        loop,
        "on a node that joins later this loop runs from its beginning, and its code decides by values of the current "
        "epoch: one that ends early ends there, before that node has trained",
        f"write it as `for epoch in {lines.EPOCHS}(n):`, which begins in the current epoch",
    )


def replace_range(program: Program, loop: Loop, name: str, edits: Edits) -> bool:
    """Have a loop go over `name(n)` instead of `range(n)`. Returns whether it could be done.

    Only epochs may have a number to begin with.
    """
    call = range_of(loop)
    if call is None or call.keywords or call.lineno != call.end_lineno:
        return False
    zero = len(call.args) == 2 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
    if len(call.args) != 1 and not zero and (len(call.args) != 2 or name != lines.EPOCHS):
        return False
    count = ", ".join(source_text(program, given) for given in (call.args[-1:] if zero else call.args))
    edits.replace(program.file(loop), call.lineno, call.col_offset, call.end_col_offset or 0, f"{name}({count})")
    add_import(edits, program.file(loop), lines.IMPORT_ELASTIC)
    return True


def _micro_loops(program: Program, training: Training) -> Iterator[Loop]:
    """Loops within a step that only compute gradients."""
    stepping = {step.call for step in training.steps}
    backwards = set(training.backwards)
    for one in training.reached:
        loop = one.node
        if isinstance(loop, ast.For) and range_of(loop) is not None:
            nodes = {inner.node for inner in reach(program, loop.body)}
            if nodes & backwards and not nodes & stepping:
                yield loop


# Values that the loop carries.


def _kept(program: Program, training: Training, objects: TrainedObjects) -> list[CarriedValue]:
    known = {one.text for one in objects.named}
    known |= own_counters(program, training.iteration) | own_counters(program, training.epoch)
    return carried_values(program, training.anchor, known)


def carried_notices(
    program: Program,
    training: Training,
    objects: TrainedObjects,
    given_to: str = lines.PREPARE,
    carried: Collection[str] = (),
) -> Iterator[Notice]:
    """Yield the variables that a node that joins later does not know, apart from those that are `carried`."""
    passes = "steps" if training.iteration is not None else "epochs"
    differing = names_by_rank(program, training)
    for value in _kept(program, training, objects):
        if value.name in carried:
            continue
        places = f"{'line' if len(value.lines) == 1 else 'lines'} {', '.join(map(str, value.lines))}"
        what = f"`{value.name}` is kept for later {passes} ({places}), but a node that joins later does not know it"
        yield notice(program, value.first, what, _remedy(program, value, given_to, places, value.name in differing))
    for name, statement in unset_values(program, training.anchor):
        yield notice(
            program,
            statement,
            f"`{name}` has its first value from an early pass of the loop, but a node that joins later has none",
            f"set it before the loop, for example to None, and then ask `bftrainer submit --explain` again: a value "
            f"that is kept for later {passes} has to be known to such a node",
        )
    unknown = f"is kept for later {passes}, but a node that joins later does not know it"
    for name, statement in kept_in_objects(program, training.anchor):
        if name not in carried:
            remedy = f"set it to {lines.VALUE}(…) of its first value, give it to {given_to}, and use `{name}.value`"
            yield notice(program, statement, f"`{name}` {unknown}", f"{remedy}; or keep it in a variable of its own")
    for name, statement in imported_values(program, training.anchor):
        if name not in carried:
            remedy = (
                f"give `{carry_argument([name])}` to {given_to}" if given_to == lines.PREPARE else "do not import it"
            )
            yield notice(program, statement, f"`{name}` {unknown}", f"{remedy}, if it is the same on all ranks")


def _remedy(program: Program, value: CarriedValue, given_to: str, places: str, differs: bool) -> str:
    if value.holds == WEIGHTS:
        return "write it to a file with torch.save and read it from there: such a value holds no tensors"
    if value.holds == ARRAY:
        return "keep a plain number (`.item()`, `float(…)`) or a list of them: such a value holds no tensors and arrays"
    if value.holds == SPECIAL:
        return "use a list or a dict in its place: a node that joins receives no sets and no containers of other types"
    if value.module is None or given_to != lines.PREPARE:
        return (
            f"write `{value.name} = {lines.VALUE}({source_text(program, value.initial)})`, give it to {given_to}, "
            f"and use `{value.name}.value` in {places}, and wherever else the script uses it"
        )
    argument = f"`{carry_argument([value.name])}`"
    if differs:
        return (
            "it seems to differ by rank, as the loss of a batch does, so each rank keeps its own. If it is the same "
            f"on all ranks, give {argument} to {given_to}"
        )
    if value.elsewhere:
        return (
            f"it is changed in {value.elsewhere}(). If it is the same on all ranks, give {argument} to {given_to}: the "
            "variable stays as it is"
        )
    return f"give {argument} to {given_to}: the variable stays as it is"


def carry_argument(names: list[str]) -> str:
    """Return the argument of `prepare` that names variables."""
    quoted = [f'"{name}"' for name in names]
    return f"{lines.CARRY}={quoted[0]}" if len(names) == 1 else f"{lines.CARRY}=({', '.join(quoted)})"

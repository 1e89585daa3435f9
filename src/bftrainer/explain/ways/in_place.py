"""Scripts for several processes that train in place with `--launcher ddp`, and what keeps a script from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bftrainer.explain.checks.accumulation import find_accumulation, tail_notices
from bftrainer.explain.checks.data import data_notices
from bftrainer.explain.checks.loop import loop_notices
from bftrainer.explain.places import notice
from bftrainer.explain.reading.kinds import Kind
from bftrainer.explain.reading.program import Program
from bftrainer.explain.report import Notice
from bftrainer.explain.training.carried import CarriedValue, carried_values
from bftrainer.explain.training.loops import Training
from bftrainer.explain.ways.rank_data import data_by_rank

_REMEDY = "submit it with --launcher torchrun: it restarts from its checkpoint at each change"
_NEEDED = {
    "DistributedDataParallel": "the model is not wrapped in DistributedDataParallel",
    "DistributedSampler": "the DataLoader of the training has no DistributedSampler, so each rank takes all samples",
}
_TRACKERS = frozenset(["SummaryWriter", "wandb.init", "mlflow.start_run"])


def in_place_refusals(program: Program, training: Training | None) -> list[Notice]:
    """Return what the ddp launcher would refuse, besides calls that no launcher but torchrun can run."""
    return list(_refusals(program, training))


def _refusals(program: Program, training: Training | None) -> Iterator[Notice]:
    if training is None or training.batch is None:
        where = program.calls[0] if training is None else training.anchor
        yield notice(program, where, "the loop over the batches of a DataLoader was not found", _REMEDY, refused=True)
        return
    names = {program.name(call.func).rpartition(".")[2] for call in program.calls}
    for name, what in _NEEDED.items():
        if name not in names:
            yield notice(program, training.batch, what, _REMEDY, refused=True)
    for call in program.calls:
        name = program.name(call.func)
        if name in _TRACKERS or name.rpartition(".")[2] in _TRACKERS:
            what = f"{ast.unparse(call.func)} would log on every rank, because each of them does what rank 0 does"
            yield notice(program, call, what, _REMEDY, refused=True)
        elif name.rpartition(".")[2] == "register_comm_hook":
            yield notice(program, call, "BFTrainer sums the gradients itself", _REMEDY, refused=True)
    yield from data_by_rank(program)
    inside = set(ast.walk(training.batch))
    for node in inside:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _keeps_tensors(program, node):
            what = (
                f"`{ast.unparse(node.func.value)}` is updated from the model in each batch, and it is no nn.Module: a "
                "node that joins later could not have what it keeps"
            )
            yield notice(program, node, what, _REMEDY, refused=True)
    for value in kept_in_epochs(program, training):
        changes = [
            node for node in inside if isinstance(node, ast.AugAssign | ast.Assign) and _changes(node, value.name)
        ]
        if changes:
            what = f"`{value.name}` counts batches over epochs, but a node that joins later has not seen all of them"
            yield notice(program, min(changes, key=lambda node: node.lineno), what, _REMEDY, refused=True)
    found = [*loop_notices(program, training), *data_notices(program, training)]
    found += tail_notices(program, find_accumulation(program, training))
    yield from (one for one in found if one.refused)


def kept_in_epochs(program: Program, training: Training) -> list[CarriedValue]:
    """Return the plain values that the script keeps from epoch to epoch."""
    return carried_values(program, training.anchor, ())


def _keeps_tensors(program: Program, call: ast.Call) -> bool:
    """Return whether an object of a class of the script's own, which is no module, is given the model."""
    assert isinstance(call.func, ast.Attribute)
    origins = [origin for origin in program.origins(call.func.value) if isinstance(origin, ast.Call)]
    own = [cls for origin in origins for cls in program.classes(origin.func) if not cls.bases]
    given = [
        part for argument in call.args for part in ast.walk(argument) if isinstance(part, ast.Name | ast.Attribute)
    ]
    return bool(own) and any(program.kind(part) is Kind.MODEL for part in given)


def _changes(node: ast.AugAssign | ast.Assign, name: str) -> bool:
    targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
    return any(ast.unparse(target) == name for target in targets)


def accumulation_in_parts(program: Program, training: Training) -> list[Notice]:
    """Tests that count the batches of a step, which cannot be right where batches come in parts."""
    what = "gradients of several batches are added up, and there may be fewer ranks than the script sees"
    remedy = "give --ranks at most the number of ranks on the fewest nodes, or submit it with --launcher torchrun"
    return [notice(program, one.test, what, remedy, refused=True) for one in find_accumulation(program, training)]

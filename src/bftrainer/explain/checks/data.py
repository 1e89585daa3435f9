"""Checks of a training's data: samplers, streams, and batches that do not come from a DataLoader."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from bftrainer.explain import lines
from bftrainer.explain.reading.kinds import SAMPLERS, STREAMS, Kind
from bftrainer.explain.places import notice
from bftrainer.explain.training.loops import Training, is_assumed, loader_of
from bftrainer.explain.reading.program import Program
from bftrainer.explain.report import Notice
from bftrainer.explain.reading.source import dotted

_DRAWS = re.compile(r"batch|sample|next|draw|rand|generate|fetch|perm")


def data_notices(program: Program, training: Training) -> Iterator[Notice]:
    """Yield what is to be known about the data of a training."""
    if training.batch is not None:
        loader = loader_of(program, training.batch)
        assert loader is not None
        for origin in program.origins(loader):
            if isinstance(origin, ast.Call) and program.kind_of_origin(origin) is Kind.LOADER:
                yield from loader_notices(program, origin)
        if is_assumed(program, loader):
            yield notice(
                program,
                training.batch,
                f"`{dotted(loader)}` is assumed to be a DataLoader; its definition was not found",
                "if it is none, make one: DataLoader(dataset, batch_size=…, shuffle=True)",
            )
        yield from _several_loaders(program, training)
    elif training.cut is not None:
        yield notice(
            program,
            training.cut,
            "the batches of this loop do not come from a DataLoader, so BFTrainer cannot split them over the ranks",
            "loop over DataLoader(TensorDataset(…), batch_size=…, shuffle=True), and give it to "
            f"{lines.PREPARE}; or make one loop `for step in {lines.STEPS}(n)` in which each rank draws its own batch",
            refused=True,
        )
    elif training.iteration is not None:
        yield from _iteration(program, training)


def loader_notices(program: Program, loader: ast.Call) -> Iterator[Notice]:
    """Yield what is to be known about a call of DataLoader."""
    given = {keyword.arg: keyword.value for keyword in loader.keywords if keyword.arg}
    for name in ("sampler", "batch_sampler"):
        value = given.get(name)
        if value is None or (isinstance(value, ast.Constant) and value.value is None):
            continue
        made = [_last(origin) for origin in program.origins(value)]
        others = [one for one in made if one and one not in SAMPLERS]
        if name == "batch_sampler" or others or not made:
            shown = others[0] if others else dotted(value) or name
            yield notice(
                program,
                value,
                f"the {name.replace('_', ' ')} {shown} decides the order of samples, which BFTrainer must decide itself",
                "use shuffle=True and weight the loss instead, or choose samples with torch.utils.data.Subset",
                refused=True,
            )
    dataset = loader.args[0] if loader.args else given.get("dataset")
    if dataset is not None and is_stream(program, dataset):
        yield notice(
            program,
            loader,
            "the dataset is a stream: it has no length and no index, so samples cannot be given to ranks once each",
            f"use a map-style dataset, or a loop `for step in {lines.STEPS}(n)` in which each rank reads its own part",
            refused=True,
        )


def is_stream(program: Program, dataset: ast.expr) -> bool:
    """Return whether a dataset can only be read from its beginning to its end."""
    for origin in program.origins(dataset):
        if not isinstance(origin, ast.Call):
            continue
        if _last(origin) in STREAMS:
            return True
        streaming = [keyword.value for keyword in origin.keywords if keyword.arg == "streaming"]
        if any(isinstance(value, ast.Constant) and value.value is True for value in streaming):
            return True
        for cls in program.classes(origin.func):
            bases = [program.name(base).rpartition(".")[2] for base in cls.bases]
            if any(base in STREAMS for base in bases):
                return True
    return False


def _last(origin: ast.expr) -> str:
    """The last part of the name that an origin calls."""
    if not isinstance(origin, ast.Call):
        return ""
    return origin.func.attr if isinstance(origin.func, ast.Attribute) else dotted(origin.func)


def _several_loaders(program: Program, training: Training) -> Iterator[Notice]:
    batch = training.batch
    assert isinstance(batch, ast.For | ast.AsyncFor)
    for node in ast.walk(batch.iter):
        if isinstance(node, ast.Call) and dotted(node.func) == "zip" and len(node.args) > 1:
            if all(program.kind(one) is Kind.LOADER for one in node.args):
                yield notice(
                    program,
                    node,
                    "the loop goes over several loaders at once; only one of them can be prepared",
                    "use one DataLoader of a dataset that gives the samples of all of them (StackDataset)",
                    refused=True,
                )


def _iteration(program: Program, training: Training) -> Iterator[Notice]:
    loop = training.iteration
    assert loop is not None
    calls = [one.node for one in training.reached if isinstance(one.node, ast.Call)]
    names = [_last(call).lower() for call in calls]
    from_loader = [
        call
        for call in calls
        if dotted(call.func) == "next" and call.args and program.kind(call.args[0]) is Kind.LOADER
    ]
    if from_loader:
        yield notice(
            program,
            from_loader[0],
            "batches are taken from a loader by next(): each rank goes through all samples by itself",
            "loop over the loader itself, so that each sample goes to one rank only",
        )
    elif not any(_DRAWS.search(name) for name in names):
        yield notice(
            program,
            loop,
            "every step uses all data, so all ranks compute the same and more nodes do not make it faster",
            "loop over a DataLoader with batches",
        )

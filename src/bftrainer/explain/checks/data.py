"""Checks of a training's data: samplers, streams, and batches that do not come from a DataLoader."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from bftrainer.explain import lines
from bftrainer.explain.places import notice
from bftrainer.explain.reading.flow import flow_of
from bftrainer.explain.reading.kinds import SAMPLERS, STREAMS, Kind
from bftrainer.explain.reading.program import Program
from bftrainer.explain.reading.source import dotted
from bftrainer.explain.report import Notice
from bftrainer.explain.training.loops import Training, is_assumed, loader_of

_DRAWS = re.compile(r"batch|sample|next|draw|rand|generate|fetch|perm")


def data_notices(program: Program, training: Training) -> Iterator[Notice]:
    """Yield what is to be known about the data of a training."""
    if training.batch is not None:
        loader = loader_of(program, training.batch)
        assert loader is not None
        for origin in program.origins(loader):
            if isinstance(origin, ast.Call) and program.kind_of_origin(origin) is Kind.LOADER:
                yield from _loader_or_batches(program, origin)
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
        yield from _ahead(program, training)


def _loader_or_batches(program: Program, call: ast.Call) -> Iterator[Notice]:
    """Notices of a DataLoader, also of one that is given to `run.batches`."""
    loaders = [] if _last(call) != "batches" or not call.args else program.origins(call.args[0])
    given = [one for one in loaders if isinstance(one, ast.Call) and program.kind_of_origin(one) is Kind.LOADER]
    for loader in given:
        yield from _loader_notices(program, loader, by_run=True)
    if not given:
        yield from _loader_notices(program, call, by_run=False)


def _loader_notices(program: Program, loader: ast.Call, *, by_run: bool) -> Iterator[Notice]:
    given = {keyword.arg: keyword.value for keyword in loader.keywords if keyword.arg}
    sampler, batch_sampler = given.get("sampler"), given.get("batch_sampler")
    if batch_sampler is not None and not _is_none(batch_sampler):
        yield notice(
            program,
            batch_sampler,
            f"the batch sampler {_maker(program, batch_sampler)} makes the batches, which BFTrainer must make itself",
            "use batch_size and a sampler",
            refused=True,
        )
    if sampler is not None and not _is_none(sampler) and not _is_usual(program, sampler):
        shown = _maker(program, sampler)
        if by_run:
            what = f"the sampler {shown} decides the order of samples, which run.batches must decide itself"
            remedy = "use shuffle=True and weight the loss, or choose samples with torch.utils.data.Subset"
        else:
            what = f"the sampler {shown} must draw the same samples on all ranks, and as many in each epoch"
            remedy = "nothing to do if it draws random numbers of torch, numpy or Python: they are seeded by the epoch"
        yield notice(program, sampler, what, remedy, refused=by_run)
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


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_usual(program: Program, sampler: ast.expr) -> bool:
    """Whether a sampler gives each sample once, in order or shuffled."""
    made = [_last(origin) for origin in program.origins(sampler) if not _is_none(origin)]
    return bool(made) and all(one in SAMPLERS for one in made)


def _maker(program: Program, node: ast.expr) -> str:
    """The class of an object, or else its name."""
    made = [_last(origin) for origin in program.origins(node)]
    return next((one for one in made if one and one not in SAMPLERS), "") or dotted(node) or "of its own"


def _last(origin: ast.expr) -> str:
    """The last part of the name that an origin calls."""
    if not isinstance(origin, ast.Call):
        return ""
    return origin.func.attr if isinstance(origin.func, ast.Attribute) else dotted(origin.func)


def _several_loaders(program: Program, training: Training) -> Iterator[Notice]:
    batch = training.batch
    assert isinstance(batch, ast.For | ast.AsyncFor)
    for node in ast.walk(batch.iter):
        zipped = node.args if isinstance(node, ast.Call) and dotted(node.func) == "zip" else []
        if len(zipped) > 1 and all(program.kind(one) is Kind.LOADER for one in zipped):
            yield notice(
                program,
                node,
                "the loop goes over several loaders at once, but only one is prepared; every rank draws all samples of "
                "the others",
                "use one DataLoader of a dataset that gives the samples of all of them (torch.utils.data.StackDataset)",
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


def _ahead(program: Program, training: Training) -> Iterator[Notice]:
    """The batches that a loop with data of its own draws for its next pass, not for the present one."""
    loops = [one.node for one in training.reached if isinstance(one.node, ast.For | ast.While)]
    for loop in [training.iteration, *loops]:
        if loop is None:
            continue
        flow = flow_of(loop.body)
        for name in sorted(flow.early & set(flow.changed)):
            drawn = [one for one in flow.changed[name] if isinstance(one, ast.Assign) and _draws(one.value)]
            if drawn:
                yield notice(
                    program,
                    drawn[0],
                    f"`{name}` is drawn here for the next pass of the loop, perhaps on a node that is gone by then",
                    "draw each batch in the pass that computes it",
                )
                break


def _draws(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and _DRAWS.search(_last(value).lower()) is not None

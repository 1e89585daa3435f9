"""Checks of a whole script: seeds, files, resume code, and wrappers that have no place in an elastic script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from bftrainer.explain import lines
from bftrainer.explain.places import notice
from bftrainer.explain.reading.program import Program
from bftrainer.explain.reading.reach import Reached
from bftrainer.explain.reading.source import dotted
from bftrainer.explain.report import Notice
from bftrainer.explain.training.loops import Training

_SEEDERS = frozenset(
    ["manual_seed", "manual_seed_all", "seed", "set_seed", "seed_everything", "seed_all", "RandomState", "default_rng"]
)
_WRITERS = frozenset(
    ["savefig", "save_image", "to_csv", "to_json", "to_parquet", "savetxt", "savez", "write_text", "write_bytes"]
)
_FILE_CALLS = frozenset(
    [
        "numpy.save",
        "np.save",
        "shutil.copy",
        "shutil.copy2",
        "shutil.copyfile",
        "shutil.move",
        "os.rename",
        "os.replace",
    ]
)
_RANK = re.compile(r"(^|_)rank($|_)|^(ddp|world|global|local|node)_?rank$|\brank\b", re.IGNORECASE)
_GUARD = re.compile(r"rank|main|master|zero|primary", re.IGNORECASE)


def script_notices(program: Program) -> Iterator[Notice]:
    """Yield what is to be known about the calls of a script, wherever they are."""
    loads = [call for call in program.calls if program.name(call.func) == "torch.load"]
    for call in program.calls:
        name = program.name(call.func)
        last = name.rpartition(".")[2] or (call.func.attr if isinstance(call.func, ast.Attribute) else "")
        if last == "DataParallel":
            yield notice(
                program,
                call,
                "DataParallel splits batches over the GPUs of one process, but there is one process per GPU",
                "remove it and use the module itself",
            )
        elif last in ("convert_sync_batchnorm", "SyncBatchNorm"):
            yield notice(
                program,
                call,
                "SyncBatchNorm is refused on CPUs, where PyTorch has none",
                "leave it out when the script trains on CPUs; running statistics are averaged over the ranks anyway",
            )
        elif last in _SEEDERS and _by_rank(program, call):
            yield notice(
                program,
                call,
                "the seed depends on the rank, but ranks are numbered anew whenever nodes come or go",
                "use one seed for all; each rank gets its own samples anyway. To draw data yourself, do not seed",
            )
    if loads and any(_restores(call) for call in program.calls):
        yield notice(
            program,
            loads[0],
            "the script resumes from its own checkpoint. This is harmless: a node that joins later reads it, too, and "
            "then takes over the state of the others",
            "keep it to start from a model of your own; epochs and steps then count from 0. After a loss of nodes it "
            "is not needed",
        )


def _restores(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "load_state_dict"


def _by_rank(program: Program, call: ast.Call) -> bool:
    return any(_mentions_rank(program, given, 0) for given in [*call.args, *(one.value for one in call.keywords)])


def _mentions_rank(program: Program, node: ast.expr, depth: int) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name | ast.Attribute):
            last = dotted(inner).rpartition(".")[2]
            if last and _RANK.search(last):
                return True
            if isinstance(inner, ast.Name) and depth < 2:
                values = [one.value for one in program.bindings(inner) if not one.element]
                if any(_mentions_rank(program, value, depth + 1) for value in values[:4]):
                    return True
        elif isinstance(inner, ast.Constant) and inner.value in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
            return True
    return False


def file_notices(program: Program, training: Training) -> Iterator[Notice]:
    """Yield the lines of a training that write files on every rank."""
    told: set[tuple[str, int]] = set()
    for one in training.reached:
        call = one.node
        if not isinstance(call, ast.Call) or not _writes(program, call) or _is_guarded(program, one):
            continue
        place = (program.file(call).name, call.lineno)
        if place not in told:
            told.add(place)
            yield notice(
                program,
                call,
                "this file is written by all ranks at once",
                f"write it under `if {lines.IS_MAIN}:`; torch.save to a path needs no test",
            )


def _writes(program: Program, call: ast.Call) -> bool:
    func = call.func
    name = program.name(func)
    last = func.attr if isinstance(func, ast.Attribute) else name.rpartition(".")[2]
    if last == "open" and name in ("open", "io.open", "gzip.open", "codecs.open"):
        modes = [*call.args[1:2], *(one.value for one in call.keywords if one.arg == "mode")]
    elif last == "open" and isinstance(func, ast.Attribute):  # of a path
        modes = [*call.args[:1], *(one.value for one in call.keywords if one.arg == "mode")]
    else:
        return last in _WRITERS or name in _FILE_CALLS
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
    return any(isinstance(text, str) and re.search("[wax+]", text) for text in texts)


def _is_guarded(program: Program, one: Reached) -> bool:
    """Whether a line, or a call that leads to it, is under a test of the rank."""
    node: ast.AST | None = one.node
    frame = one.frame
    while node is not None:
        for outer in program.ancestors(node):
            test = ast.unparse(outer.test) if isinstance(outer, ast.If | ast.IfExp) else ""
            if _GUARD.search(test) and "__name__" not in test:
                return True
        if frame.call is None or frame.outer is None:
            return False
        node, frame = frame.call, frame.outer
    return False

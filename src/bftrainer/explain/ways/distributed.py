"""Scripts for torchrun: what shows them, and what keeps them from training in place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bftrainer.explain.places import evidence, notice
from bftrainer.explain.reading.program import Program
from bftrainer.explain.report import Evidence, Notice
from bftrainer.explain.training.loops import Training

_DISTRIBUTED = {
    "init_process_group": "makes a process group",
    "DistributedDataParallel": "wraps the model for several processes",
    "DistributedSampler": "splits the samples over the processes",
}
_SHARDED = "each process holds only a part of the state, which is lost with its node"
_SPLIT = "each process computes another part of the model, so none of them can be missing"
_FIXED = "it names ranks that are fixed while the script runs"
_STARTS = "the script starts its processes itself, but BFTrainer starts one per GPU"
_CANNOT = {
    "FullyShardedDataParallel": _SHARDED,
    "FSDP": _SHARDED,
    "fully_shard": _SHARDED,
    "ZeroRedundancyOptimizer": _SHARDED,
    "deepspeed.initialize": _SHARDED,
    "parallelize_module": _SPLIT,
    "distribute_tensor": _SPLIT,
    "distribute_module": _SPLIT,
    "init_device_mesh": _SPLIT,
    "DeviceMesh": _SPLIT,
    "PipelineStage": _SPLIT,
    "SplitPoint": _SPLIT,
    "torch.distributed.pipeline.sync.Pipe": _SPLIT,
    "torch.distributed.new_group": _FIXED,
    "torch.distributed.new_subgroups": _FIXED,
    "torch.distributed.send": _FIXED,
    "torch.distributed.recv": _FIXED,
    "torch.distributed.isend": _FIXED,
    "torch.distributed.irecv": _FIXED,
    "torch.distributed.batch_isend_irecv": _FIXED,
    "torch.multiprocessing.spawn": _STARTS,
    "torch.multiprocessing.start_processes": _STARTS,
}
"""Calls that need ranks which do not change, by their last or their full name."""
_ENVIRONMENT = ("LOCAL_RANK", "WORLD_SIZE", "RANK")
_REMEDY = "submit it with --launcher torchrun: it restarts from its checkpoint at each change"
_SPAWN_REMEDY = "call the function once in each process, with the rank in LOCAL_RANK, as torchrun scripts do"


def distributed_evidence(program: Program) -> list[Evidence]:
    """Return the lines that show a script for several processes; none if it is not one."""
    found = [
        evidence(program, call, _DISTRIBUTED[last])
        for call in program.calls
        if (last := program.name(call.func).rpartition(".")[2]) in _DISTRIBUTED
    ]
    found += [
        evidence(program, call, "splits the model or its state over the processes")
        for call in program.calls
        if _reason(program, call) in (_SHARDED, _SPLIT)
    ]
    if found:
        found += _environment(program)
    unique = {(one.file, one.line): one for one in reversed(found)}
    return sorted(unique.values(), key=lambda one: (one.file != program.files[0].name, one.file, one.line))


def _environment(program: Program) -> Iterator[Evidence]:
    for file in program.files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Constant) and node.value in _ENVIRONMENT:
                yield evidence(program, node, f"reads {node.value}, which torchrun sets")


def is_optional(program: Program) -> bool:
    """Return whether all of a script's process groups are made under a condition, so that it also trains without."""
    groups = [call for call in program.calls if program.name(call.func).endswith("init_process_group")]
    return bool(groups) and all(any(isinstance(one, ast.If) for one in program.ancestors(call)) for call in groups)


def _reason(program: Program, call: ast.Call) -> str:
    name = program.name(call.func)
    if name.startswith("torch.distributed.rpc."):
        return "remote calls go to a process that may be gone"
    return _CANNOT.get(name) or _CANNOT.get(name.rpartition(".")[2], "")


def refusals(program: Program) -> list[Notice]:
    """Return the calls that no change of the script can make elastic."""
    found = []
    for call in program.calls:
        reason = _reason(program, call)
        if reason:
            remedy = _SPAWN_REMEDY if reason == _STARTS else _REMEDY
            found.append(notice(program, call, f"{ast.unparse(call.func)}: {reason}", remedy, refused=True))
    return found


def own_batches(program: Program, training: Training) -> Notice:
    """Say why a script without a DataLoader needs more than a launcher."""
    return notice(
        program,
        training.iteration or training.cut or training.anchor,
        "this loop has no DataLoader, so a process that joins later would begin with step 0",
        _REMEDY,
        refused=True,
    )


def restart_notices(program: Program, shown: Evidence) -> Iterator[Notice]:
    """Yield what is to be known about a script that restarts at each change of its nodes."""
    if not any(
        program.name(call.func).endswith(("torch.load", "load_checkpoint", "dcp.load")) for call in program.calls
    ):
        yield Notice(
            shown.file,
            shown.line,
            "the script restarts at each change of its nodes, and no line was found that reads a checkpoint",
            "save a checkpoint regularly, and load it at the beginning if there is one",
        )

"""Refusals of the ddp launcher: what a script does that cannot be stood in for, with its line and what to do.

Under a controller such a trainer goes on with the launcher `torchrun`, because its error begins with
`protocol.CANNOT_STAND_IN`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from bftrainer.elastic import protocol
from bftrainer.errors import InputError

_RANKS = "it names single ranks, and ranks come and go"
_SHARDS = "each rank holds only a part of the state, which is lost with its node"
_OWN = "the script starts its processes itself, but BFTrainer starts one per GPU"
_OTHER = "no stand-in for this call exists"
_CALLS: Mapping[str, tuple[str, ...]] = {
    _RANKS: (
        *("torch.distributed.new_group", "torch.distributed.new_subgroups"),
        *("torch.distributed.new_subgroups_by_enumeration", "torch.distributed.split_group"),
        *("torch.distributed.send", "torch.distributed.recv", "torch.distributed.isend", "torch.distributed.irecv"),
        *("torch.distributed.batch_isend_irecv", "torch.distributed.send_object_list"),
        *("torch.distributed.recv_object_list", "torch.distributed.scatter"),
        *("torch.distributed.scatter_object_list", "torch.distributed.gather", "torch.distributed.gather_object"),
        *("torch.distributed.rpc.init_rpc", "torch.distributed.init_device_mesh"),
        "torch.distributed.device_mesh.init_device_mesh",
    ),
    _SHARDS: (
        *("torch.distributed.fsdp.FullyShardedDataParallel.__init__", "torch.distributed.fsdp.fully_shard"),
        "torch.distributed.optim.ZeroRedundancyOptimizer.__init__",
        "torch.distributed.tensor.parallel.parallelize_module",
    ),
    _OWN: ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"),
    _OTHER: (
        *("torch.distributed.reduce_scatter", "torch.distributed.reduce_scatter_tensor"),
        *("torch.distributed.all_gather_into_tensor", "torch.distributed.all_gather_coalesced"),
        *("torch.distributed.all_reduce_coalesced", "torch.distributed.all_to_all"),
        "torch.distributed.all_to_all_single",
    ),
}
"""Calls without a stand-in, by the reason."""
_STANDS_IN = "_bftrainer_stands_in"
"""Attribute of functions that are replaced already."""


class CannotStandInError(InputError):
    """A script cannot train in place without changes."""


def refuse(what: str, remedy: str = "submit it with --launcher torchrun: it restarts from its checkpoint") -> NoReturn:
    """Refuse what the script does at its present line."""
    place = script_line()
    raise CannotStandInError(f"{protocol.CANNOT_STAND_IN}: {f'{place}: ' if place else ''}{what}; {remedy}")


def script_line() -> str:
    """Return the file and line of the script's own code that is running."""
    frame: FrameType | None = sys._getframe(1)
    folder = script_folder()
    while frame is not None and not is_of_script(frame.f_globals, folder):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""


def script_folder() -> str:
    """Return the folder of the script; empty if it is not known."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(Path(file).resolve().parent) if file else ""


def is_of_script(names: Mapping[str, Any], folder: str) -> bool:
    """Return whether code with these global names is the script, or a module in its folder."""
    if names.get("__name__") == "__main__":
        return True
    file = names.get("__file__")
    return bool(folder) and isinstance(file, str) and file.startswith(f"{folder}/") and "/site-packages/" not in file


def refuse_calls() -> None:
    """Replace the calls that have no stand-in by functions that say why. Calls of torch itself are not refused.

    Only modules that are imported already are changed, because importing all of them takes seconds.
    """
    for reason, names in _CALLS.items():
        for name in names:
            _replace(name, reason)


def _replace(name: str, reason: str) -> None:
    path, _, last = name.rpartition(".")
    module, _, kind = path.rpartition(".")
    owner: Any = sys.modules.get(path) or getattr(sys.modules.get(module), kind, None)
    real = getattr(owner, last, None)
    if owner is not None and real is not None and not hasattr(real, _STANDS_IN):
        shown = name.removesuffix(".__init__")
        setattr(owner, last, unless_internal(real, lambda *_, **__: refuse(f"{shown}: {reason}")))


def unless_internal(real: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does `stand_in` for scripts and libraries, and `real` for torch and BFTrainer."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        return (real if caller.startswith(("torch.", "bftrainer.")) else stand_in)(*args, **kwargs)

    setattr(chosen, _STANDS_IN, True)
    return chosen

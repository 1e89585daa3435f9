"""Process state of Accelerate: has it say which rank this process is at the moment.

Accelerate and Transformers ask `PartialState` whether this is the main process, before they print, log or save. Ranks
change when nodes come and go. Everything else in that state stays as for a single process: BFTrainer sums gradients
and shares out the batches itself, so Accelerate must do neither.
"""

from __future__ import annotations

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from bftrainer.elastic import Run
from bftrainer.errors import InputError


def refuse_launcher() -> None:
    """Refuse a script that Accelerate or torchrun has started as one of several processes."""
    kind = PartialState().distributed_type
    if kind != DistributedType.NO:
        raise InputError(
            f"Accelerate runs this script as {kind.value}, but BFTrainer starts and connects the processes itself: "
            "start the script by `bftrainer submit`, without `accelerate launch` or `torchrun`"
        )


def follow_rank(run: Run) -> bool:
    """Tell Accelerate this rank's present number. Return whether it has become the main process, or is it no more."""
    was_main = bool(PartialState().is_main_process)
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        if state:
            state["process_index"], state["local_process_index"] = run.rank, run.local_rank
    return was_main != run.is_main

"""What a training script imports: training that grows and shrinks in place while nodes come and go.

`init` needs PyTorch and imports it when called. `bftrainer.elastic.membership` needs nothing but Python: any iterative
program can be a trainer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bftrainer.elastic.adapter import Run
    from bftrainer.elastic.batches import Batches
    from bftrainer.elastic.loading import LoadedSnapshot
    from bftrainer.elastic.value import Value

__all__ = ["Batches", "Run", "Value", "init", "load_snapshot"]


def init(
    *,
    snapshots: str | Path | None = None,
    snapshot_every_s: float | None = None,
    snapshots_kept: int = 3,
    backend: str | None = None,
    device: Any = None,
    seed: int = 0,
) -> Run:
    """Begin an elastic training. Outside BFTrainer it works too: one process that trains alone.

    `snapshots`: the folder in which state is kept for the case that all nodes go; on a file system that all nodes see.
    The environment variable BFTRAINER_SNAPSHOTS names it where the script does not. One is taken every
    `snapshot_every_s` seconds; where the script does not say, by BFTRAINER_SNAPSHOT_EVERY_S, or every minute. Snapshots
    that cost more than 1 % of the time are taken less often.
    `backend` is gloo or nccl, `device` the torch device to train on (the GPU where there is one), `seed` that of the
    order of samples.
    """
    try:
        import torch  # noqa: F401 - only to say what to install
    except ImportError:
        from bftrainer.errors import InputError

        raise InputError("elastic training needs PyTorch: pip install 'bftrainer[torch]'") from None
    from bftrainer.elastic import arguments
    from bftrainer.elastic.adapter import Run
    from bftrainer.elastic.refusals import refuse_second_run, refuse_what_run_does
    from bftrainer.elastic.sampler import whole_number

    chosen = arguments.existing_device(device)
    refuse_second_run()
    run = Run(
        snapshots=arguments.snapshot_folder(snapshots),
        snapshot_every_s=arguments.snapshot_interval(snapshot_every_s),
        snapshots_kept=whole_number("snapshots_kept", snapshots_kept, 1),
        backend=arguments.known_backend(backend, chosen),
        device=chosen,
        seed=whole_number("seed", seed, 0),
    )
    refuse_what_run_does()
    return run


def load_snapshot(path: str | os.PathLike[str]) -> LoadedSnapshot:
    """Open a snapshot: a `.bft` file, or the newest whole one in a folder. Works without `init`.

    `load_snapshot(path)["model"]` is what the `state_dict()` of the object registered as `model` gave; `.step`,
    `.epoch`, `.samples`, `.metrics` and `.path` say what it is of. Nothing in the file can run code.
    """
    from bftrainer.elastic import loading

    return loading.load_snapshot(path)


def __getattr__(name: str) -> Any:
    if name == "Run":
        from bftrainer.elastic.adapter import Run

        return Run
    if name == "Batches":
        from bftrainer.elastic.batches import Batches

        return Batches
    if name == "Value":
        from bftrainer.elastic.value import Value

        return Value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

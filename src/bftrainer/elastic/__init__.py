"""Elastic training package: `init` makes a PyTorch training script elastic.

A training script imports this package. Training then grows and shrinks in place while nodes come and go. `init` needs
PyTorch and imports it when called. `bftrainer.elastic.membership` needs only Python, so any iterative program can be a
trainer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bftrainer.elastic.torch.data.batches import Batches
    from bftrainer.elastic.torch.run import Run
    from bftrainer.elastic.torch.snapshots.loading import LoadedSnapshot
    from bftrainer.elastic.torch.value import Value

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
    """Start an elastic training and return its `Run`.

    Call it once, at the top of the training script. The script runs once per rank: one process per GPU of each node, or
    as many as `--ranks-per-node` says. It also works without BFTrainer: the script then trains alone, in one process.

    - `snapshots`: the folder for snapshots of the training state, from which training resumes after all nodes were
      lost. It must be on a file system that all nodes see. Default: the environment variable BFTRAINER_SNAPSHOTS.
    - `snapshot_every_s`: seconds between two snapshots. Default: the environment variable BFTRAINER_SNAPSHOT_EVERY_S,
      else 60. Snapshots that cost more than 1 % of the time are taken less often.
    - `snapshots_kept`: how many snapshots are kept.
    - `backend`: the communication backend, "gloo" or "nccl". Default: the environment variable BFTRAINER_BACKEND, else
      the one that fits the device.
    - `device`: the torch device to train on. Default: the GPU if there is one, else the CPU. On a node with several
      GPUs there is one rank per GPU, and each rank has its own.
    - `seed`: the seed for the order of the samples.
    """
    try:
        import torch  # noqa: F401 - only to say what to install
    except ImportError:
        from bftrainer.errors import InputError

        raise InputError("elastic training needs PyTorch: pip install 'bftrainer[torch]'") from None
    from bftrainer.elastic.torch import arguments
    from bftrainer.elastic.torch.data.batch_plan import whole_number
    from bftrainer.elastic.torch.refusals import refuse_second_run, refuse_what_run_does
    from bftrainer.elastic.torch.run import Run

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
    """Open a snapshot: a `.bft` file, or the newest complete one in a folder. It works without `init`.

    `load_snapshot(path)["model"]` is what `state_dict()` of the object registered as `model` returned. The attributes
    `.step`, `.epoch`, `.samples` and `.metrics` say at which point of the training the snapshot was taken, `.path`
    names its file. Nothing in the file can run code.
    """
    from bftrainer.elastic.torch.snapshots import loading

    return loading.load_snapshot(path)


def __getattr__(name: str) -> Any:
    if name == "Run":
        from bftrainer.elastic.torch.run import Run

        return Run
    if name == "Batches":
        from bftrainer.elastic.torch.data.batches import Batches

        return Batches
    if name == "Value":
        from bftrainer.elastic.torch.value import Value

        return Value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

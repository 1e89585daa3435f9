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

__all__ = ["Run", "init"]


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
    `snapshot_every_s` seconds; where the script does not say, by BFTRAINER_SNAPSHOT_EVERY_S, or every minute.
    `backend` is gloo or nccl, `device` the torch device to train on (the GPU where there is one), `seed` that of the
    order of samples.
    """
    try:
        import torch
    except ImportError:
        from bftrainer.errors import InputError

        raise InputError("elastic training needs PyTorch: pip install 'bftrainer[torch]'") from None
    from bftrainer.elastic import protocol
    from bftrainer.elastic.adapter import Run

    folder = snapshots if snapshots is not None else os.environ.get(protocol.SNAPSHOTS)
    chosen = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    return Run(
        snapshots=Path(folder) if folder else None,
        snapshot_every_s=_interval(snapshot_every_s, os.environ.get(protocol.SNAPSHOT_EVERY)),
        snapshots_kept=snapshots_kept,
        backend=backend,
        device=torch.device(chosen),
        seed=seed,
    )


def _interval(said: float | None, environment: str | None) -> float:
    if said is not None:
        return said
    try:
        every_s = float(environment) if environment else 60.0
    except ValueError:
        every_s = -1.0
    if not every_s >= 0:
        from bftrainer.errors import InputError

        raise InputError(f"BFTRAINER_SNAPSHOT_EVERY_S must be a number of seconds, 0 or more, but got {environment!r}")
    return every_s


def __getattr__(name: str) -> Any:
    if name == "Run":
        from bftrainer.elastic.adapter import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Elastic training package: `init` makes a PyTorch training script elastic.

A training script imports this package. Training then grows and shrinks in place while nodes come and go. `init` needs
PyTorch and imports it when called. `bftrainer.elastic.membership` needs only Python, so any iterative program can be a
trainer.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bftrainer.elastic.torch.data.batches import Batches
    from bftrainer.elastic.torch.run import Run
    from bftrainer.elastic.torch.snapshots.loading import LoadedSnapshot
    from bftrainer.elastic.torch.value import Value

__all__ = ["Batches", "Run", "Value", "epochs", "init", "is_main", "load_snapshot", "micro_steps", "prepare", "steps"]

_INIT = ("snapshots", "snapshot_every_s", "snapshots_kept", "backend", "device", "seed")
_run: Run | None = None


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
    from bftrainer.elastic.torch.refusals import refuse_second_run, refuse_torchrun, refuse_what_run_does
    from bftrainer.elastic.torch.run import Run

    refuse_torchrun()
    chosen = arguments.device_in_use(device)
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
    global _run
    _run = run
    return run


def prepare(
    *objects: Any,
    carry: str | Collection[str] = (),
    accumulate: int | None = None,
    per_rank_batch: bool = False,
    **options: Any,
) -> Any:
    """Make a training script elastic as it is. Call it once, before the training loop:

        model, optimizer, loader, scheduler = elastic.prepare(model, optimizer, loader, scheduler)
        for epoch in elastic.epochs(10):
            for inputs, targets in loader:
                loss = loss_function(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()

    Give it all that changes in training: models, optimizers, the DataLoader, schedulers, the GradScaler, and any other
    object with `state_dict` and `load_state_dict`. They come back in the same order. The loop stays as it is: several
    backward passes before a step, clipping, evaluation and `break` work. Samples are shuffled by `seed`, not by torch.
    It may be called several times, each time with other objects.

    Each rank gets its share of every batch. The batch of the whole step is that of the DataLoader times the number of
    ranks it was chosen for (the environment variable BFTRAINER_RANKS, 1 unless set). It stays the same while nodes come
    and go.

    - `carry`: the names of variables of the script's module that training changes, such as `carry=("best", "patience")`
      or `carry="best"`. They stay plain variables. A node that joins later and a resumed run receive their values with
      the state, and a step that was lost undoes its changes. Each holds a number, string, bool or None, or a list,
      tuple or dict of these, and is the same on all ranks. Lists and dicts are changed in place. A local variable of a
      function becomes an `elastic.Value` instead.
    - `accumulate`: the number of batches per step, if the script adds up gradients. It is needed only if there may be
      fewer ranks than the batch was chosen for.
    - `per_rank_batch`: the DataLoader's batch is that of each rank, so the batch of a step grows with the ranks.
    - `options`: those of `init` if it was not called before, and `lr_scaling`, `lr_warmup_steps` and `lr_base_batch`
      of `Run.register`.
    """
    starts = {name: options.pop(name) for name in _INIT if name in options}
    if _run is None or (objects and _run.is_done_alone):  # in a notebook one trains again and again
        starts.setdefault("device", _device_of(objects))
        init(**starts)
    elif starts:
        from bftrainer.errors import InputError

        raise InputError(f"give {', '.join(starts)} to elastic.init(), which was called before elastic.prepare()")
    return _current().prepare(*objects, carry=carry, accumulate=accumulate, per_rank_batch=per_rank_batch, **options)


def run_of_framework(**options: Any) -> Run:
    """Return the script's run, for the integration of a framework. `init(**options)` makes it if there is none yet."""
    return _run if _run is not None else init(**options)


def epochs(start: int, stop: int | None = None) -> Iterator[int]:
    """Iterate over the epochs that are still to be trained, after `prepare`.

    Use it in place of `range`, with the same numbers: `epochs(10)` counts from 0 to 9, `epochs(1, 11)` from 1 to 10. A
    node that joins later begins in the epoch that is in progress.
    """
    return _current().preparation.epochs(*((0, start) if stop is None else (start, stop)))


def steps(count: int) -> Iterator[int]:
    """Iterate over the numbers of the steps still to be made, out of `count`, after `prepare`.

    It is for a script with its own data, without a DataLoader.
    """
    return _current().steps(count)


def micro_steps(count: int) -> Iterator[int]:
    """Iterate over this rank's share of the `count` micro-steps of a step, in a loop over `steps`.

    Use it in place of `range(count)` in a script that adds up the gradients of `count` batches of its own and divides
    each loss by `count`. The ranks share the micro-steps. Random numbers are seeded anew for each micro-step, by its
    number: it draws the same data on whichever rank it is computed.
    """
    return _current().micro_steps(count)


def is_main() -> bool:
    """Return whether this rank prints and writes files, after `prepare` or `init`. Exactly one does while they train.

    It is rank 0; when that is lost, another rank becomes rank 0. Before the first epoch ranks do not know each other
    yet, and each one is rank 0.
    """
    return _current().is_main


def _current() -> Run:
    if _run is None:
        from bftrainer.errors import InputError

        raise InputError("call elastic.prepare(model, optimizer, …) before the training loop")
    return _run


def _device_of(objects: tuple[Any, ...]) -> Any:
    """Return the device of the first model's parameters; None if there is none."""
    for thing in objects:
        for param in thing.parameters() if hasattr(thing, "parameters") else ():
            return param.device
    return None


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

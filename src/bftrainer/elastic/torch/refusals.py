"""Refusals of torch calls that conflict with elastic training, in effect once a training begins.

`elastic.init` calls `refuse_what_run_does`. DistributedDataParallel would sum gradients a second time and hang when
nodes change. A process group of the script's own conflicts with the one that BFTrainer forms. torch's own errors for
both, if there are any, do not say what to do instead.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bftrainer.elastic import protocol
from bftrainer.errors import InputError

_real_init = dist.init_process_group
_has_run = False
_stood_in = False


def refuse_second_run() -> None:
    """Refuse a second `elastic.init` in one worker: the other workers would wait for the training of the first one."""
    if _has_run:
        raise InputError(
            "elastic.init() was already called in this script: use the run that it returned; there is one per job"
        )


def refuse_what_run_does() -> None:
    """Replace the constructor of DistributedDataParallel and `init_process_group` by functions that say what to do.

    This applies only in a worker. A script that trains alone may use both.
    """
    global _has_run
    if protocol.CHANNEL not in os.environ:
        return
    _has_run = True
    if _stood_in:
        return
    DistributedDataParallel.__init__ = _no_wrapper  # type: ignore[method-assign]
    dist.init_process_group = _no_group


def allow_stand_ins() -> None:
    """Refuse none of these calls: the stand-ins of `elastic.torch.ddp` take their place."""
    global _stood_in
    _stood_in = True


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Call torch's own `init_process_group`, for the group that BFTrainer forms."""
    _real_init(*args, **kwargs)


def _no_wrapper(self: object, *args: object, **kwargs: object) -> NoReturn:
    raise InputError(
        "do not wrap the model in DistributedDataParallel: run.step() sums the gradients over all ranks. Register and "
        "call the plain module"
    )


def _no_group(*args: object, **kwargs: object) -> NoReturn:
    raise InputError(
        "do not call init_process_group(): BFTrainer forms the process group, and a new one whenever nodes come or go. "
        "Remove the call (and destroy_process_group()); run.rank and run.world replace RANK and WORLD_SIZE"
    )

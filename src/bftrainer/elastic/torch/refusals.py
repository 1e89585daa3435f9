"""Refusals of torch calls that conflict with elastic training, in effect once a training begins.

`elastic.init` calls `refuse_what_run_does`. DistributedDataParallel would sum gradients a second time and hang when
nodes change. A process group of the script's own conflicts with the one that BFTrainer forms. torch's own errors for
both, if there are any, do not say what to do instead.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bftrainer.elastic import protocol
from bftrainer.errors import InputError

DDP_RUN_ID = "bftrainer"
"""The id of the job that a script sees under the ddp launcher, in place of torchrun's."""
_real_init = dist.init_process_group
_has_run = False
_stood_in = False


def refuse_second_run() -> None:
    """Refuse a second `elastic.init` in one worker: the other workers would wait for the training of the first one."""
    if _has_run:
        raise InputError(
            "elastic.init() was already called in this script: use the run that it returned; there is one per job"
        )


def refuse_torchrun() -> None:
    """Refuse a script that torchrun has started as one of several processes: each would train a model of its own."""
    by_torchrun = os.environ.get("TORCHELASTIC_RUN_ID", DDP_RUN_ID) != DDP_RUN_ID
    several = by_torchrun and int(os.environ.get("WORLD_SIZE") or 1) > 1
    if several and protocol.CHANNEL not in os.environ:
        raise InputError(
            "torchrun has started this script, but BFTrainer starts and connects the processes itself: start the "
            "script by `bftrainer submit` without `--launcher`, and not by `torchrun`"
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


def refuse_unknown_schedulers(known: Iterable[object], optimizers: Iterable[Optimizer], call: str) -> None:
    """Refuse LR schedulers of these optimizers that are not among the objects whose state newcomers receive.

    A newcomer's own scheduler is at its start, so its learning rate would be another one. `call` is what the script
    gives its objects to. Schedulers within a known object are known.
    """
    names = {id(scheduler) for thing in known for scheduler in _schedulers_in(thing, 3)}
    steered = {id(optimizer) for optimizer in optimizers}
    if not _unknown_schedulers(names, steered):
        return
    gc.collect()  # one that the script has dropped is no problem
    for scheduler in _unknown_schedulers(names, steered):
        raise InputError(
            f"the {type(scheduler).__name__} was not given to {call}: a node that joins later would train with another "
            "learning rate. Give it there, beside the optimizer"
        )


def _unknown_schedulers(known: set[int], optimizers: set[int]) -> list[Any]:
    made = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
    steering = [thing for thing in made if id(getattr(thing, "optimizer", None)) in optimizers]
    return [thing for thing in steering if id(thing) not in known]


def _schedulers_in(thing: object, depth: int) -> Iterator[LRScheduler]:
    if isinstance(thing, LRScheduler):
        yield thing
    inner = thing if isinstance(thing, list | tuple) else list(getattr(thing, "__dict__", {}).values())
    for part in inner if depth else ():
        if isinstance(part, LRScheduler | list | tuple) or (hasattr(part, "step") and not isinstance(part, Optimizer)):
            yield from _schedulers_in(part, depth - 1)


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Call torch's own `init_process_group`, for the group that BFTrainer forms."""
    _real_init(*args, **kwargs)


def _no_wrapper(self: object, *args: object, **kwargs: object) -> NoReturn:
    raise InputError(
        "do not wrap the model in DistributedDataParallel: BFTrainer sums the gradients over all ranks. Use the plain "
        "module, or submit the script without elastic calls and with --launcher ddp"
    )


def _no_group(*args: object, **kwargs: object) -> NoReturn:
    raise InputError(
        "do not call init_process_group(): BFTrainer forms the process group, and a new one whenever nodes come or go. "
        "Remove the call (and destroy_process_group()); run.rank and run.world of `run = elastic.init()` replace RANK "
        "and WORLD_SIZE. Or submit the script without elastic calls and with --launcher ddp"
    )

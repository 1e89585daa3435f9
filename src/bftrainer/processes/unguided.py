"""Guard against unguided scripts: refuses a worker script that never calls `elastic.init`.

A script that was started as one of several workers would then train a whole copy of the model on every node, unnoticed.
In a forked worker `watch` refuses its first optimizer step. Where that is not possible, the manager fails the job when
the script ends, with `NEVER_CALLED`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from bftrainer.errors import InputError
from bftrainer.processes import variables

_EXPLAIN = "`bftrainer submit --explain SCRIPT` says which way fits your script"
_WHAT_TO_DO = (
    f"{_EXPLAIN}: `elastic.prepare` in a training loop of your own (docs/prepare.md), `--launcher ddp` for an "
    "unchanged script with DistributedDataParallel, `--launcher torchrun` for one that saves and resumes by itself "
    "(docs/launchers.md)"
)
NEVER_CALLED = (
    "the script ended with status 0 but never called `bftrainer.elastic.init` or `prepare`, so nothing was trained "
    f"together. {_WHAT_TO_DO}"
)
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_stop_watching: Callable[[], None] | None = None


def watch() -> None:
    """Raise an `InputError` at the first optimizer step, unless this process connects to its manager before."""
    global _stop_watching
    optimizers = sys.modules.get("torch.optim.optimizer")
    if optimizers is None or variables.CHANNEL not in os.environ:
        return

    def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
        raise InputError(
            "this script trains on several nodes at once, but makes an optimizer step without having called "
            f"`bftrainer.elastic.init` or `prepare`: each node would train a model of its own. {_WHAT_TO_DO}"
        )

    _stop_watching = optimizers.register_optimizer_step_pre_hook(refuse).remove


def connected() -> None:
    """Stop watching: this process has connected to its manager, so its steps are allowed."""
    global _stop_watching
    stop, _stop_watching = _stop_watching, None
    if stop is not None:
        stop()


def with_advice(error: str) -> str:
    """Return the last line of a failed script; with what to do if it expects what only torchrun gives."""
    missing = next((name for name in _OF_TORCHRUN if error in (f"KeyError: '{name}'", f'KeyError: "{name}"')), None)
    if missing is None and "env:// rendezvous" not in error:
        return error
    return f"{error}. The script expects to be started by torchrun: submit it with `--launcher ddp`. {_EXPLAIN}"

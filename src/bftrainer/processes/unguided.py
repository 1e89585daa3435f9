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

_WHAT_TO_DO = (
    "call it at the start (docs/elastic.md), or run a script that saves and resumes by itself with "
    "`--launcher torchrun` (docs/launchers.md)"
)
NEVER_CALLED = (
    f"the script ended with status 0 but never called `bftrainer.elastic.init`, so nothing was trained together: "
    f"{_WHAT_TO_DO}"
)

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
            f"`bftrainer.elastic.init`: each node would train a model of its own. {_WHAT_TO_DO.capitalize()}"
        )

    _stop_watching = optimizers.register_optimizer_step_pre_hook(refuse).remove


def connected() -> None:
    """Stop watching: this process has connected to its manager, so its steps are allowed."""
    global _stop_watching
    stop, _stop_watching = _stop_watching, None
    if stop is not None:
        stop()

"""Stopping of a search through `Study.stop()`, which grid and brute-force samplers and Optuna's callbacks call.

Optuna allows the call only within `Study.optimize`, and keeps the state for that under private names. If a version of
Optuna uses other names, a search works without this: it ends by `n_trials`, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import optuna

_log = logging.getLogger("optuna.bftrainer")


@contextmanager
def stoppable(study: optuna.Study) -> Iterator[Callable[[], bool]]:
    """Allow `study.stop()` within the block; yields a function that says whether it was called."""
    local = getattr(study, "_thread_local", None)
    if not (hasattr(local, "in_optimize_loop") and hasattr(study, "_stop_flag")):
        _log.warning("with Optuna %s study.stop() cannot end this search: only n_trials can", optuna.__version__)
        yield lambda: False
        return
    assert local is not None
    before = local.in_optimize_loop, study._stop_flag
    local.in_optimize_loop, study._stop_flag = True, False
    try:
        yield lambda: bool(study._stop_flag)
    finally:
        local.in_optimize_loop, study._stop_flag = before

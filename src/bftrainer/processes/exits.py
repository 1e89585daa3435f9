"""Exit of a script: tells whether it ended well, and ends it when a thread cannot be waited for."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

_status: object = None
"""Status that the script last gave to `sys.exit`, or to the SystemExit that ended it."""
_abruptly = False


def watch() -> None:
    """From now on remember the status given to `sys.exit`. The interpreter does not pass it to exit handlers."""
    leave = sys.exit

    def remember(status: object = None, /) -> NoReturn:
        global _status
        _status = status
        leave(status)  # type: ignore[arg-type]

    sys.exit = remember


def left_with(status: object) -> None:
    """Record that the script raised SystemExit with this status.

    Only the process that runs the script as a function sees it.
    """
    global _status
    _status = status


def ended_well() -> bool:
    """Return whether the script ended without an error, as far as an exit handler can see."""
    return _status in (None, 0) and not hasattr(sys, "last_type")


def end_abruptly() -> None:
    """End the process with status 0 as soon as all exit handlers have run.

    Otherwise the interpreter would shut down without waiting for threads, and a thread that returned from C++ meanwhile
    would abort the process.
    """
    global _abruptly
    _abruptly = True


def _end() -> None:
    if _abruptly:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


atexit.register(_end)  # registered at import, so that it runs after the handlers of the script

"""The end of a script: whether it ended well, and how to end it when a thread cannot be waited for."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

_status: object = None
"""What the script last gave to `sys.exit`, or to the SystemExit that ended it."""
_abruptly = False


def watch() -> None:
    """From now on remember what is given to `sys.exit`. The interpreter tells its exit handlers nothing of it."""
    leave = sys.exit

    def remember(status: object = None, /) -> NoReturn:
        global _status
        _status = status
        leave(status)  # type: ignore[arg-type]

    sys.exit = remember


def left_with(status: object) -> None:
    """The script raised SystemExit with this status. Only the process that runs it as a function sees that."""
    global _status
    _status = status


def ended_well() -> bool:
    """Whether the script ended without an error, as far as can be seen in an exit handler."""
    return _status in (None, 0) and not hasattr(sys, "last_type")


def end_abruptly() -> None:
    """Have the process end with status 0 as soon as all exit handlers have run.

    The interpreter would wait for nobody and take itself apart: a thread that came back from C++ meanwhile would abort
    the process.
    """
    global _abruptly
    _abruptly = True


def _end() -> None:
    if _abruptly:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


atexit.register(_end)  # when this module is imported, so that it is called after the handlers of the script

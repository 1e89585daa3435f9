"""Tells a script that ended well from one that did not, while its exit handlers run."""

from __future__ import annotations

import sys
from typing import NoReturn

_status: object = None
"""What the script last gave to `sys.exit`, or to the SystemExit that ended it."""


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

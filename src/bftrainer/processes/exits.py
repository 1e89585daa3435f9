"""Exit of a script: tells whether it ended well, and ends its process soon after it.

A process that was forked from a warm parent ends with `end_forked`: the interpreter would take apart the half million
objects that it shares with its parent, which takes a third of a second, while the node waits for its next worker.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
import threading
from collections.abc import Collection
from typing import NoReturn, TextIO

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


def end_forked(status: int, inherited: Collection[str]) -> NoReturn:
    """End a forked process with a status, as the interpreter does after a script, but leave its parent's objects alone.

    Threads are waited for and exit handlers run. Then the objects of the script are freed, so that its finalizers run
    and its files are written: those of `__main__` and of all modules that are not in `inherited`.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _write_files()  # before anything is freed: in a ring of objects a file may be closed before its buffer is
    for name in [name for name in sys.modules if name == "__main__" or name not in inherited]:
        del sys.modules[name]
    gc.collect()
    _write_files()  # finalizers may have written more
    os._exit(status)


def _write_files() -> None:
    """Write what is still in the buffers of open files: of Python, and of C libraries."""
    for thing in gc.get_objects():
        if issubclass(type(thing), (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)) and not thing.closed:
            _flush(thing)
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    ctypes.CDLL(None).fflush(None)


def _flush(stream: io.IOBase | TextIO) -> None:
    try:
        stream.flush()
    except (OSError, ValueError) as problem:  # a full disk, or the other end of a pipe is gone
        os.write(2, f"bftrainer: the end of a file was not written: {problem}\n".encode())


def _end() -> None:
    if _abruptly:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


atexit.register(_end)  # registered at import, so that it runs after the handlers of the script

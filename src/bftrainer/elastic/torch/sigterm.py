"""SIGTERM handling: the training script hears the signal, the processes it forks do not.

SIGTERM says that the node is wanted for other work.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


def on_sigterm(handler: Handler) -> None:
    """Install a SIGTERM handler, unless the script has its own or this is not the main thread."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) in (
        signal.SIG_DFL,
        None,
    ):
        signal.signal(signal.SIGTERM, handler)
        _keep_from_children(handler)


def _keep_from_children(handler: Handler) -> None:
    """Make forked processes end on SIGTERM as if there were no handler, even right after the fork."""
    kept = threading.local()

    def before() -> None:
        kept.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept.mask)

    def in_child() -> None:
        if signal.getsignal(signal.SIGTERM) == handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)

"""How an agent is told to go, and how it makes sure that it does: within a second or two, however busy it is.

Signals are read by a thread of their own, so that neither a long computation nor a system call that hangs keeps the
node from being handed back. Whatever is not in order by then is left to the kernel and the warm parents: they end the
workers of an agent that is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

EXIT_S = 0.8
"""How long an agent may take to end, beyond the time that its workers have to save what only they have."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Listens from now on. The first signal asks the agent to leave, the second one ends this process."""

    def __init__(self) -> None:
        self._leave: Callable[[str], None] | None = None
        self._saving_s: Callable[[], float] = lambda: 0.0
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for signum in SIGNALS:
            # Who started it under `nohup` wants it to go on.
            if signum == signal.SIGTERM or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, lambda *_: None)  # Python writes to the socket before it calls this
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def ask(self, leave: Callable[[str], None], saving_s: Callable[[], float] = lambda: 0.0) -> None:
        """Whom to ask, from the listening thread. Before that, a signal ends this process at once.

        `saving_s` says how long workers may take to save what only they have.
        """
        self._leave, self._saving_s = leave, saving_s

    def _listen(self) -> None:
        name = self._wait()
        if self._leave is None:
            os._exit(0)
        exit_soon(self._saving_s())
        with suppress(RuntimeError):  # its loop is closed already
            self._leave(name)
        self._wait()
        os._exit(0)

    def _wait(self) -> str:
        while True:
            for number in self._woken.recv(1):
                if number in SIGNALS:
                    return signal.Signals(number).name


def exit_soon(saving_s: float = 0.0) -> None:
    """End this process in a moment, if it has not ended by then."""
    timer = threading.Timer(saving_s + EXIT_S, os._exit, (0,))
    timer.daemon = True
    timer.start()

"""Signal handling ends an agent within a second or two, even if it is busy.

A separate thread reads the signals, so neither a long computation nor a system call that hangs delays returning the
node. Cleanup that is not finished by then is left to the kernel and the warm parents, which end the workers of an agent
that is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

EXIT_S = 0.8
"""How long an agent may take to end, in addition to the time its workers have to save state that only they have."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Listens for signals once it is made. The first signal asks the agent to leave, the second ends this process."""

    def __init__(self) -> None:
        self._leave: Callable[[str], None] | None = None
        self._saving_s: Callable[[], float] = lambda: 0.0
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for signum in SIGNALS:
            # A user who started the agent under `nohup` wants it to continue.
            if signum == signal.SIGTERM or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, lambda *_: None)  # Python writes to the socket before it calls this
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def ask(self, leave: Callable[[str], None], saving_s: Callable[[], float] = lambda: 0.0) -> None:
        """Set `leave`, which the listening thread calls. Before this call, a signal ends this process at once.

        `saving_s` returns how long workers may take to save state that only they have.
        """
        self._leave, self._saving_s = leave, saving_s

    def _listen(self) -> None:
        name = self._wait()
        if self._leave is None:
            os._exit(0)
        exit_soon(self._saving_s())
        with suppress(RuntimeError):  # the agent's event loop is closed already
            self._leave(name)
        self._wait()
        os._exit(0)

    def _wait(self) -> str:
        while True:
            for number in self._woken.recv(1):
                if number in SIGNALS:
                    return signal.Signals(number).name


def exit_soon(saving_s: float = 0.0) -> None:
    """End this process after `saving_s` + `EXIT_S` seconds, if it has not ended by then."""
    timer = threading.Timer(saving_s + EXIT_S, os._exit, (0,))
    timer.daemon = True
    timer.start()

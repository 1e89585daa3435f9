"""Saves a training's state when its node is taken at once, with a second or so to go.

The manager says `Taken` on the channel. A worker whose state another one keeps ends at once, so that the node is free:
that is every rank but 0 of a working group. Rank 0, or a worker between two groups, saves the state first. It cannot
know whether the other nodes stay; most often they are taken for the same job, in the same moment. The state is that of
the last committed step: while a batch is computed nothing of it changes but the statistics of layers, which are taken
back. `adapter.py` tells when that is so (`at_rest`) and calls `end_if_taken` at every point between two steps.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from bftrainer.elastic.protocol import Broken, Leaving, Message

TAKEN = 128 + signal.SIGTERM
"""The exit status of a worker whose node was taken."""


class LastSave:
    """What one worker does when its node is taken.

    `save` writes the state within the seconds it is given; `needed` says whether there is anything to write that would
    fit into so many seconds; `someone_else_has_it` whether this worker may end without it.
    """

    def __init__(
        self,
        save: Callable[[float], None],
        *,
        needed: Callable[[float], bool],
        someone_else_has_it: Callable[[], bool],
        send: Callable[[Message], None],
        generation: Callable[[], int],
        exit_: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.at_rest = False
        """Whether the state is that of the last committed step, wherever the main thread is."""
        self._save = save
        self._needed = needed
        self._someone_else_has_it = someone_else_has_it
        self._send = send
        self._generation = generation
        self._exit = exit_
        self._clock = clock
        self._end_by: float | None = None

    def taken(self, within_s: float) -> None:
        """The node is taken in so many seconds. Called in the thread that listens to the manager."""
        if self._end_by is not None:
            return
        if self._someone_else_has_it() or not self._needed(within_s):
            self._exit(TAKEN)
            return
        self._end_by = self._clock() + within_s
        # The others must not wait for this worker; it will not come to the next step.
        self._send(Broken(self._generation(), "its node is taken"))
        self._send(Leaving())
        main = threading.main_thread().ident
        if main is not None and callable(signal.getsignal(signal.SIGTERM)):
            signal.pthread_kill(main, signal.SIGTERM)  # wakes it: see `interrupt`

    def interrupt(self) -> bool:
        """SIGTERM has come, in the main thread. If the node is taken, save as soon as possible; whether it is."""
        if self._end_by is None:
            return False
        if self.at_rest:
            self.end_if_taken()
        return True

    def end_if_taken(self) -> None:
        """The state is at rest: if the node is taken, save it and end this process."""
        if self._end_by is None:
            return
        self.at_rest = False  # a further signal must not begin again
        try:
            self._save(max(0.0, self._end_by - self._clock()))
        finally:
            self._exit(TAKEN)

"""Last save: writes a training's state when its node is taken, within about a second.

The manager sends `Taken` to each rank of the node. A rank whose state another rank keeps ends at once, so that the node
is free: that is every rank but 0 of a working group. Rank 0 saves the state first. Between two groups, the first rank
of each node that is taken does. It cannot know whether the other nodes stay; most often they are taken for the same job
at the same moment. The saved state is that of the last committed step: while a batch is computed only the statistics of
layers change, and these are taken back. `Run` sets `at_rest` while that is possible, and calls `end_if_taken` at every
point between two steps.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from bftrainer.elastic.protocol import Broken, Leaving, Message

TAKEN = 128 + signal.SIGTERM
"""Exit status of a rank whose node was taken."""


class LastSave:
    """Saves the state and ends the process when its node is taken.

    `save` writes the state within the given seconds. `needed` returns whether there is state to write that fits into
    the given seconds. `someone_else_has_it` returns whether this rank may end without saving.
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
        """Whether the state is that of the last committed step, at whatever point the main thread is."""
        self._save = save
        self._needed = needed
        self._someone_else_has_it = someone_else_has_it
        self._send = send
        self._generation = generation
        self._exit = exit_
        self._clock = clock
        self._end_by: float | None = None

    def taken(self, within_s: float) -> None:
        """Handle the news that the node is taken in `within_s` seconds.

        Called in the thread that listens to the manager.
        """
        if self._end_by is not None:
            return
        if self._someone_else_has_it() or not self._needed(within_s):
            self._exit(TAKEN)
            return
        self._end_by = self._clock() + within_s
        # The others must not wait for this rank: it will not reach the next step.
        self._send(Broken(self._generation(), "its node is taken"))
        self._send(Leaving())
        main = threading.main_thread().ident
        if main is not None and callable(signal.getsignal(signal.SIGTERM)):
            signal.pthread_kill(main, signal.SIGTERM)  # wakes the main thread: see `interrupt`

    def interrupt(self) -> bool:
        """Handle SIGTERM in the main thread: save as soon as possible if the node is taken.

        Return whether it is taken.
        """
        if self._end_by is None:
            return False
        if self.at_rest:
            self.end_if_taken()
        return True

    def end_if_taken(self, *, saves: bool = True) -> None:
        """Save the state, which is at rest, and end this process if the node is taken.

        Without `saves` it only ends: the script's code after the last step has run in part, so the state is neither
        that of the step nor a later one.
        """
        if self._end_by is None:
            return
        self.at_rest = False  # another signal must not start a second save
        try:
            if saves:
                self._save(max(0.0, self._end_by - self._clock()))
        finally:
            self._exit(TAKEN)

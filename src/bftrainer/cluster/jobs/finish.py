"""The finish of a trainer begins when training is complete and lasts until the script has ended.

The script may still save the model, on any of its workers. `ElasticJob` reports the ends of workers and asks whether
the trainer is done.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from bftrainer.cluster.jobs.worker import Worker
from bftrainer.util.text import last_line


class Finish:
    """Whether training is complete, and how the workers that said so have ended."""

    def __init__(self, grace_s: float) -> None:
        """`grace_s` is how long the script may take to end."""
        self.begun = False
        self._grace_s = grace_s
        self._ended = self._lost = False
        """Whether a worker that had said `Done` has ended by itself, and whether one was lost before its end."""

    def begin(self) -> None:
        """Record that training is complete."""
        self.begun = True

    def stop(self) -> None:
        """Record that the trainer has ended."""
        self.begun = False

    def ended(self, worker: Worker, status: int, tail: str) -> str:
        """Record the end of a worker that had said `Done`. Returns the error by which the trainer fails, if any."""
        if status > 0:
            return f"training was complete, but then the script ended with status {status}: {last_line(tail)}"
        if status < 0 and worker.killed:
            return f"training was complete, but the script did not end within {self._grace_s:g} s after it"
        self._ended |= status == 0
        self._lost |= status < 0
        return ""

    def lost(self, worker: Worker) -> None:
        """Record the loss of a worker's node."""
        self._lost |= worker.said_done

    def result(self, workers: Collection[Worker]) -> Literal["done", "again"] | None:
        """Return `done` if the script has ended well, `again` if training must continue; None if that is open.

        If workers were lost after they had said `Done`, perhaps rank 0, which saves the model, then the remaining or
        new workers continue from the last snapshot and say `Done` again.
        """
        if not self.begun:
            return None
        whole = self._ended and not self._lost
        if whole and all(worker.killed for worker in workers):
            return "done"
        if whole or any(worker.said_done for worker in workers):
            return None
        self.begun = self._ended = self._lost = False
        return "again"

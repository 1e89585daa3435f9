"""The event runner stores the changes of an event, then carries out its effects.

The reconciler handles each event within one transaction of the store. The resulting messages are sent only after the
transaction. So a kill at any instant leaves a store from which a new controller can continue: everything that was sent
had been stored before.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bftrainer.cluster.controller.connection import Connections
from bftrainer.cluster.controller.decision_timer import DecisionTimer
from bftrainer.cluster.controller.effects import Effects
from bftrainer.cluster.controller.file_gate import FileGate
from bftrainer.cluster.controller.output.logbook import Logbooks
from bftrainer.cluster.controller.reconciler import Reconciler
from bftrainer.elastic.leftovers import sweep_after
from bftrainer.elastic.protocol import ProtocolError
from bftrainer.errors import BFTrainerError


class EventRunner:
    """Runs the controller's events, one transaction each."""

    def __init__(self, cluster: Reconciler, connections: Connections, logbooks: Logbooks) -> None:
        self.cluster = cluster
        self.decisions = DecisionTimer()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when the controller cannot continue."""
        self.files = FileGate(connections, self._files_failed)
        self._logbooks = logbooks
        self.hand_over: Callable[[str, str], None] = lambda node, owner: None
        """Tells the pool to start an agent of another owner on a node."""
        self.left: Callable[[str, str], None] = lambda node, agent: None
        """Told, within the transaction, of a node that has left for good and of its agent."""

    @contextlib.contextmanager
    def event(self) -> Iterator[Effects]:
        """Run the body in one transaction of the store, then carry out the effects that it added."""
        if self.failed.done():
            raise BFTrainerError("the controller is ending")
        effects = Effects()
        try:
            with self.cluster.store.transaction():
                yield effects
                for node, agent in effects.left:
                    self.left(node, agent)
        except ProtocolError:  # an invalid message; it changed nothing
            raise
        except BFTrainerError as problem:
            # A refused request (exit code 2) changes nothing. After any other error memory and store would differ.
            if problem.exit_code != 2:
                self.fail(problem)
            raise
        except BaseException as problem:
            self.fail(problem)
            raise
        for trainer, work in effects.files:
            self.files.write(trainer, work)
        for node, message in effects.messages:
            self.files.send(node, message)
        for trainer in effects.over:
            # In a thread, not on the event loop: the folder may be on a file system that hangs.
            folder = self._logbooks.of(trainer).path.parent / "snapshots"
            threading.Thread(target=self._tidy, args=(trainer, folder), name=f"sweep {trainer}", daemon=True).start()
        for node, owner in effects.hand_over:
            self.hand_over(node, owner)
        self.decisions.request(effects.decide)

    def _files_failed(self, trainer: str, problem: BaseException) -> None:
        if self.failed.done():
            return
        if not isinstance(problem, OSError):
            self.fail(problem)
            return
        with self.event() as effects:
            error = f"cannot write {problem.filename}: {problem.strerror}"
            effects.add(self.cluster.fail(trainer, error, time.time()))

    def _tidy(self, trainer: str, snapshots: Path) -> None:
        """Remove what a trainer that has ended does not need any more."""
        with contextlib.suppress(OSError):  # the next controller removes them
            self.cluster.store.environments.remove(trainer)
        sweep_after(snapshots)

    def fail(self, problem: BaseException) -> None:
        """End the controller, because actions that were not stored must not be carried out.

        The next controller continues from the store.
        """
        if not self.failed.done():
            self.failed.set_exception(problem)
            self.failed.exception()  # mark it as retrieved: there may be no waiter, and asyncio would complain

"""Membership of a worker: its connection to the manager, with a progress report once a second.

A thread listens to the manager; another one reports. A program without PyTorch needs only this module. It calls
`Membership.connect()` and `ready()`. Between its iterations it checks `changed`; when that is true it calls `arrive()`,
which returns the new generation's rank, size and addresses. `examples/power_iteration.py` is such a program;
`torch/run.py` does the same for PyTorch.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from bftrainer.elastic import protocol, refusal_line
from bftrainer.elastic.protocol import (
    Arrived,
    Donate,
    Donors,
    Failed,
    Follow,
    Generation,
    Go,
    Hello,
    Left,
    Message,
    Ready,
    Report,
    Taken,
)
from bftrainer.errors import BFTrainerError
from bftrainer.processes import start_up, unguided
from bftrainer.processes.launch import foreground

REPORT_EVERY_S = 1.0
_SHOWING_S = 10.0
"""Seconds that a failed script has to show its error, by a hook of its own perhaps, before the manager is told."""
_HANGING_UP_S = 2.0
"""Seconds that a worker waits, after its last message, for the manager to close the connection."""


class Leave(Exception):  # noqa: N818 - an instruction, not an error
    """Raised in a worker that is no longer a member: it must end."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(f"left out of generation {generation.id}")
        self.generation = generation


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker's rank and peers in a generation that is being formed."""

    generation: int
    members: tuple[str, ...]
    """The workers, one per node. The ranks of one worker follow each other."""
    rank: int
    """This process's number among all ranks, from 0."""
    addresses: tuple[str, ...]
    """Where each rank can be reached."""
    secret: str = ""
    """Secret that only the members of the generation know."""
    ranks: tuple[int, ...] = ()
    """Number of ranks of each member; empty: one each."""

    @property
    def world(self) -> int:
        """Number of ranks that train in the generation."""
        return sum(self.ranks) or len(self.members)

    @property
    def nodes(self) -> int:
        """Number of nodes, that is of members, that train in the generation."""
        return len(self.members)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each node."""
        return tuple(itertools.accumulate(self.ranks, initial=0))[:-1] or tuple(range(self.world))

    @property
    def node_rank(self) -> int:
        """Number of this process's node among all nodes, from 0."""
        return bisect.bisect_right(self.first_ranks, self.rank) - 1

    @property
    def local_rank(self) -> int:
        """Number of this process among those on its node, from 0."""
        return self.rank - self.first_ranks[self.node_rank]

    @property
    def local_world(self) -> int:
        """Number of ranks on this process's node."""
        return self.ranks_of(self.node_rank)

    def ranks_of(self, node_rank: int) -> int:
        """Return the number of ranks on a node."""
        return self.ranks[node_rank] if self.ranks else 1


Place = Assignment
"""The former name of `Assignment`."""


class Membership:
    """The connection of a worker's process to its manager.

    A worker may have several processes on its node, one per rank. `local_rank` is the number of this one. When the
    manager ends, so does the process: no other one would end it.
    """

    def __init__(self, path: str, worker: str, local_rank: int = 0) -> None:
        self.worker = worker
        self.local_rank = local_rank
        self.formed = 0
        """The generation the worker trains in; 0 before the first."""
        self.newest = 0
        """The newest generation announced. A plain attribute, so that reading it at every step costs nothing."""
        self._cut = 0
        """The newest generation that was announced because a group had lost a member."""
        self.is_fresh: Callable[[], bool] = lambda: False
        """Returns whether the worker has received the state from its peers but not yet made a step with them."""
        self.on_cut: Callable[[], None] = lambda: None
        """Called from the listening thread when the present group is cut."""
        self.report: Callable[[], Report] = lambda: Report(self.formed)
        """Builds the report that is sent once a second."""
        self.on_taken: Callable[[float], None] = lambda within_s: os._exit(protocol.RESTART)
        """Called from the listening thread when the node is taken at once, with the seconds until the worker is killed.

        By default the worker ends immediately, so that the node is free: it has nothing to save.
        """
        self.on_donate: Callable[[Donate], None] = lambda request: None
        """Called from the listening thread when a newcomer asks for the state. By default it gets none before it joins.
        """
        self._generation = Generation(0, ())
        self._go: Go | None = None
        self._answers: list[Donors] = []
        self._closing = False
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as problem:
            self._socket.close()
            raise BFTrainerError(
                f"cannot reach the manager at {protocol.CHANNEL}={path!r}: {problem}. "
                f"Unset {protocol.CHANNEL} to train alone."
            ) from None
        unguided.connected()
        start_up.connected(self._send_line)
        self.send(Hello(worker, os.getpid(), local_rank=local_rank))
        self._listener = threading.Thread(target=self._listen, name="bftrainer-channel", daemon=True)
        self._reporter = threading.Thread(target=self._keep_reporting, name="bftrainer-report", daemon=True)
        self._stop_reporting = threading.Event()
        self._listener.start()
        self._reporter.start()

    @classmethod
    def connect(cls, environment: Mapping[str, str] = os.environ) -> Membership | None:
        """Connect to the manager that the environment names. Return None if the script was started by hand."""
        path = environment.get(protocol.CHANNEL)
        if not path:
            return None
        worker = environment.get(protocol.WORKER, f"pid-{os.getpid()}")
        return cls(path, worker, int(environment.get(protocol.LOCAL_RANK) or 0))

    @property
    def changed(self) -> bool:
        """Whether a newer generation than the worker's own was announced."""
        return self.newest > self.formed

    @property
    def cut(self) -> bool:
        """Whether the present group has lost a member: do not wait for that member."""
        return self._cut > self.formed

    @property
    def address(self) -> str:
        """Address under which the other workers reach this node."""
        return os.environ.get(protocol.HOST) or socket.gethostname()

    def send(self, message: Message) -> None:
        """Send a message. If the manager is gone, the listening thread notices it."""
        self._send_line(protocol.encode(message))

    def _send_line(self, line: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(line)

    def follow(self, address: str, secret: str, timeout_s: float) -> int | None:
        """Ask for the state before joining. Return how many workers will send it to `address`; None without answer."""
        with self._changed:
            self._answers.clear()
        self.send(Follow(address, secret))
        with self._changed:
            self._changed.wait_for(lambda: self._answers, timeout_s)
            return self.donors

    @property
    def donors(self) -> int | None:
        """How many of those that were asked by `follow` are still there. 0 also if they wait for this worker."""
        return self._answers[-1].count if self._answers else None

    def ready(self) -> None:
        """Tell the manager that this worker can join a generation."""
        self.send(Ready())

    def arrive(self, address: Callable[[int], str]) -> Assignment:
        """Wait until all members of the newest generation have arrived. Call it after leaving the former generation.

        `address` is called once per generation and returns where this process can be reached. Its argument is 0 for
        rank 0, which hosts the rendezvous, and above 0 for all other ranks: their numbers are not known yet.
        Raises `Leave` when the worker is not a member of the newest generation.
        """
        generation = Generation(0, ())
        while True:
            word = self._next_word(generation.id)
            if isinstance(word, Go):
                foreground()  # newcomers may have started at low priority
                ranks = word.ranks or (1,) * len(generation.members)
                rank = sum(ranks[: generation.members.index(self.worker)]) + self.local_rank
                return Assignment(generation.id, generation.members, rank, word.addresses, word.secret, word.ranks)
            if self.worker not in word.members:
                raise Leave(word)
            generation = word
            self.send(Arrived(word.id, address(word.members.index(self.worker) + self.local_rank)))

    def _next_word(self, arrived: int) -> Generation | Go:
        """Wait for the order to form the generation in which this worker has arrived, or for a newer generation.

        The order takes precedence: the other members form that generation, whatever was announced since, unless it was
        cut.
        """

        def may_go() -> bool:
            return self._go is not None and self._go.generation == arrived and not self.lost_one(arrived)

        with self._changed:
            self._changed.wait_for(lambda: may_go() or self._generation.id > max(arrived, self.formed))
            return self._go if self._go is not None and may_go() else self._generation

    def entered(self, generation: int) -> bool:
        """Record that the worker has formed this generation. Return False if it was cut meanwhile: arrive again."""
        with self._changed:
            if self.lost_one(generation):
                return False
            self.formed = generation
            return True

    def lost_one(self, generation: int) -> bool:
        """Return whether a generation has lost a member since it was announced."""
        return self._cut > generation

    def gave_up(self, generation: int) -> None:
        """Record that forming this generation failed: the worker waits for another one."""
        with self._changed:
            self.formed = max(self.formed, generation)

    def wait_for_newer(self, timeout_s: float) -> bool:
        """Wait until there is a newer generation than the present one. Return False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._generation.id > self.formed, timeout_s)

    def wait_for_cut(self, timeout_s: float) -> bool:
        """Wait until the present group is known to have lost a member. Return False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self.cut, timeout_s)

    def leave(self, step: int) -> None:
        """Tell the manager that this worker leaves at a step boundary, and close the connection."""
        self.send(Left(step))
        self.close()

    def report_failures(self, collateral: Callable[[BaseException], bool] = lambda error: False) -> None:
        """From now on report an uncaught exception of the script to the manager: the job has failed.

        An exception that is `collateral`, the effect of a lost peer on the script's own communication, is no failure:
        the worker then asks to be started again.
        """
        before = sys.excepthook

        def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            import traceback

            if issubclass(kind, KeyboardInterrupt):  # the node is taken, which is no failure
                before(kind, error, trace)
                return
            if collateral(error):
                print(f"bftrainer: a peer was lost ({error}); starting again", file=sys.stderr, flush=True)
                os._exit(protocol.RESTART)
            lines = "".join(traceback.format_exception(kind, error, trace))
            unsent = [Failed(f"{kind.__name__}: {error}".rstrip(": "), lines, self.is_fresh())]

            def send() -> None:
                with contextlib.suppress(IndexError):  # it is sent
                    self.send(unsent.pop())

            # Shown first: once the manager knows, it ends the job, and this process with it.
            late = threading.Timer(_SHOWING_S, send)
            late.daemon = True
            late.start()
            try:
                refusal = refusal_line.as_line(error, trace)
                if refusal is None:
                    before(kind, error, trace)
                else:
                    print(refusal, file=sys.stderr, flush=True)
            finally:
                late.cancel()
                send()

        sys.excepthook = tell

    def close(self) -> None:
        """Close the connection; the worker may continue alone.

        The manager closes its end once it has read all messages. If the worker closed first while the manager was
        writing, the manager would lose the messages it had not read yet.
        """
        self._closing = True
        self._stop_reporting.set()
        threads = [thread for thread in (self._listener, self._reporter) if thread is not threading.current_thread()]
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        if self._listener in threads:
            self._listener.join(_HANGING_UP_S)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(timeout=5)
        self._socket.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._hear(protocol.decode(line))
        if not self._closing:
            print("bftrainer: the manager of this worker is gone: the worker ends", file=sys.stderr, flush=True)
            os._exit(protocol.RESTART)

    def _hear(self, message: Message | None) -> None:
        if isinstance(message, Taken):
            self.on_taken(message.within_s)
            return
        if isinstance(message, Donate):
            self.on_donate(message)
            return
        if isinstance(message, Generation) and message.cut:
            # The order matters: a thread that is forming a group sees that it is cut, and the next group is not formed
            # before the sockets of this one are shut.
            self._cut = message.id
            self.on_cut()
        with self._changed:
            if isinstance(message, Generation) and message.id > self._generation.id:
                self._generation = message
                self.newest = message.id
            elif isinstance(message, Go):
                self._go = message
            elif isinstance(message, Donors):
                self._answers.append(message)
            self._changed.notify_all()

    def _keep_reporting(self) -> None:
        due = time.monotonic()
        while not self._stop_reporting.wait(max(0.0, due - time.monotonic())):
            self.send(self.report())
            due = max(due + REPORT_EVERY_S, time.monotonic())

"""The controller connects agents, pools and the API to the `Reconciler`, using asyncio.

Each event is passed to the reconciler within one transaction of the store. The resulting messages are sent only after
the transaction. So a kill at any instant leaves a store from which a new controller can continue: everything that was
sent had been stored before. Events that arrive close together lead to one decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bftrainer.cluster.config.keys import Config
from bftrainer.cluster.controller.connection import Connection
from bftrainer.cluster.controller.head_agent import HeadAgent
from bftrainer.cluster.controller.logbook import Logbook
from bftrainer.cluster.controller.reconciler import Reconciler
from bftrainer.cluster.controller.restore import restore
from bftrainer.cluster.launchers import HEAD
from bftrainer.cluster.pools.base import Pool
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.wire import codec, messages
from bftrainer.cluster.wire.messages import Beat, Bye, Ended, Going, Heard, Join, Log, Logged, Started, Welcome
from bftrainer.elastic.leftovers import sweep_after
from bftrainer.elastic.protocol import ProtocolError
from bftrainer.errors import BFTrainerError

COALESCE_S = 0.02
"""Events within this time lead to one decision."""
TICK_S = 0.25
LEARN_S = 1.0
"""The least time between decisions that follow only from learned rates. Node changes do not wait for it."""
COLLECT_S = 600.0
"""How often all objects are garbage-collected. With a thousand connections that takes 0.3 s, too much every few
seconds.
"""
SLICE = 40
"""How many agent messages are handled before other tasks get a turn. After an event a thousand may come at once."""

TRIM_S = 3600.0
"""How often the event log is cut to the configured length."""

_TRAINER = re.compile(r"t[1-9][0-9]{0,17}")
_log = logging.getLogger(__name__)


class Controller:
    """The live system. Call its methods only in the thread of the running event loop."""

    def __init__(
        self,
        cluster: Reconciler,
        pool: Pool,
        config: Config,
        logbook: Callable[[str], Logbook],
        agents: Mapping[str, str],
    ) -> None:
        self.cluster = cluster
        self.pool = pool
        self.config = config
        self.began = time.time()
        self.draining = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when the controller cannot continue."""
        self._agent_environment = dict(agents)
        self._head = HeadAgent(config.state, agents)
        self._make_logbook = logbook
        self._logbooks: dict[str, Logbook] = {}
        self._connections: dict[str, Connection] = {}
        self._inbox: deque[tuple[Connection, messages.Message]] = deque()
        """Messages from agents that are not handled yet."""
        self._filled = asyncio.Event()
        self._reports: dict[str, dict[str, Mapping[str, Any]]] = {}
        """Reports since the last tick, by node and worker, so that a thousand heartbeats need few transactions."""
        self.on_decision: Callable[[float], None] = lambda waited_s: None
        """Called after every decision with the seconds since the first event that led to it."""
        self._asked_at: float | None = None
        self._curious, self._learned_at = False, 0.0
        """Whether something was learned that may change the decision, and when such a decision was last made."""
        self._collector = gc.get_threshold()
        self._closing = False
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # Life cycle.

    async def start(self) -> None:
        """Restore the state from the store, start the tasks, and open the pool."""
        gc.set_threshold(*self._collector[:2], 1 << 30)  # no automatic collection of all objects: see `COLLECT_S`
        with self._happening():
            restore(self.cluster, time.time())
            self.cluster.store.log(time.time(), "serve.started", data={"pool": self.config.pool.kind})
        loops = (self._keep_listening, self._keep_deciding, self._keep_ticking)
        self._tasks = [asyncio.create_task(self._guarded(loop)) for loop in loops]
        await self.pool.open(self)
        if self.cluster.paused:
            await self.pool.pause()

    async def stop(self, *, drain: bool) -> None:
        """Stop. With `drain` all nodes are given back; without, agents keep running and wait for a new controller."""
        self.draining = drain
        if drain:
            for connection in list(self._connections.values()):
                connection.send(Bye("the controller ends"))
        await self.pool.close(drain=drain)
        if drain:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    while self._connections:
                        await asyncio.sleep(0.02)
            await self._head.end()
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        gc.set_threshold(*self._collector)
        for connection in list(self._connections.values()):
            connection.close()
        with contextlib.suppress(BFTrainerError):
            self._attend(list(self._inbox))
            self._take_reports(list(self._reports))
            self.cluster.store.log(time.time(), "serve.stopped", data={"drained": drain})

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()  # called here: a task cancelled before it starts would leave the coroutine unawaited
        except asyncio.CancelledError:
            raise
        except BaseException as problem:
            self._fail(problem)

    def _fail(self, problem: BaseException) -> None:
        """End the controller, because actions that were not stored must not be carried out.

        The next controller continues from the store.
        """
        if not self.failed.done():
            self.failed.set_exception(problem)
            self.failed.exception()  # mark it as retrieved: there may be no waiter, and asyncio would complain

    @contextlib.contextmanager
    def _happening(self) -> Iterator[Reconciler]:
        """Handle an event: run the body in one transaction of the store, then send the resulting messages."""
        if self.failed.done():
            raise BFTrainerError("the controller is ending")
        try:
            with self.cluster.store.transaction():
                yield self.cluster
        except ProtocolError:  # an invalid message; it changed nothing
            self.cluster.outbox.clear()
            raise
        except BFTrainerError as problem:
            # A refused request (exit code 2) changes nothing. After any other error memory and store would differ.
            if problem.exit_code != 2:
                self._fail(problem)
            self.cluster.outbox.clear()
            raise
        except BaseException as problem:
            self._fail(problem)
            raise
        orders, self.cluster.outbox = self.cluster.outbox, []
        for node, message in orders:
            connection = self._connections.get(node)
            if connection is not None:
                connection.send(message)
        for trainer in self.cluster.over:
            # In a thread, not on the event loop: the folder may be on a file system that hangs.
            folder = self.logbook(trainer).path.parent / "snapshots"
            threading.Thread(target=sweep_after, args=(folder,), name=f"sweep {trainer}", daemon=True).start()
        self.cluster.over.clear()
        if self.cluster.undecided:
            self._asked_at = self._asked_at or time.monotonic()
            self._wake.set()

    async def _keep_listening(self) -> None:
        while True:
            await self._filled.wait()
            self._attend([self._inbox.popleft() for _ in range(min(SLICE, len(self._inbox)))])
            if not self._inbox:
                self._filled.clear()
            await asyncio.sleep(0)

    async def _keep_deciding(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(COALESCE_S)
            self._wake.clear()
            with self._happening() as cluster:
                cluster.decide(time.time())
            asked, self._asked_at = self._asked_at, time.monotonic() if self.cluster.undecided else None
            if asked is not None:
                self.on_decision(time.monotonic() - asked)

    async def _keep_ticking(self) -> None:
        collected = trimmed = time.monotonic()
        wall = time.time()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - collected > COLLECT_S:
                collected = now
                gc.collect()
            if now - trimmed > TRIM_S:
                trimmed = now
                self.cluster.store.trim_events(self.config.trainers.keep_events)
            names = iter(list(self._reports))
            while some := list(itertools.islice(names, SLICE)):
                self._take_reports(some)
                await asyncio.sleep(0)
            with self._happening() as cluster:
                if self._curious and now - self._learned_at >= LEARN_S:
                    self._curious, self._learned_at, cluster.undecided = False, now, True
                stepped, wall = time.time() - wall, time.time()
                if abs(stepped) > 4 * TICK_S:
                    # This process or the machine stood still, or the clock was set: the agents were not silent.
                    cluster.was_away(stepped)
                before = set(cluster.nodes)
                cluster.tick(wall)
            for name in before - self.cluster.nodes.keys():
                if (silent := self._connections.get(name)) is not None:
                    silent.close()  # if the agent is alive after all, it reconnects
            for trainer in self._logbooks.keys() - self.cluster.trainers.keys():
                del self._logbooks[trainer]
            wanted = self.cluster.head_wanted and not self.draining
            self._head.keep(wanted=wanted, here=HEAD in self._connections)

    # Agents.

    async def serve_agent(self, frames: AsyncIterator[str], send: Callable[[str], Awaitable[None]]) -> None:
        """Serve one agent's connection, from its first frame to its end."""
        connection: Connection | None = None
        sending: asyncio.Task[None] | None = None
        reason = "connection closed"
        try:
            async for frame in frames:
                message = codec.decode(frame)
                if connection is None:
                    if not isinstance(message, Join):
                        raise ProtocolError("the first frame must be a join")
                    connection = self._joined(message)
                    sending = asyncio.create_task(connection.pump(send))
                elif isinstance(message, Going):
                    reason = message.reason or "taken"
                    break
                elif message is not None:
                    self._heard(connection, message)
                if sending is not None and sending.done():
                    break
        except ProtocolError as problem:
            reason = f"nonsense: {problem}"
            _log.warning("agent of %s: %s", connection.node if connection else "?", problem)
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            if connection is not None:
                self._parted(connection, reason)

    def _joined(self, join: Join) -> Connection:
        connection = Connection(join.node, join.agent)
        agents = self.config.agents
        logged = {}
        for status in join.workers:
            book = self.logbook(status.worker.rpartition("-")[0])
            logged[status.worker] = book.place(status.worker)
        connection.send(Welcome(agents.beat_s, agents.worker_silence_s, agents.give_up_s, logged, agents.last_save_s))
        self._attend_to(join.node)
        former = self._connections.get(join.node)
        if former is not None:
            former.close()
        self._connections[join.node] = connection
        with self._happening() as cluster:
            cluster.joined(join, time.time())
        return connection

    def _parted(self, connection: Connection, reason: str) -> None:
        if self._closing or self.failed.done():
            if self._is_current(connection):
                del self._connections[connection.node]
        else:
            self._inbox.append((connection, Going(reason)))
            self._filled.set()

    def _heard(self, connection: Connection, message: messages.Message) -> None:
        if not self._is_current(connection):
            return
        now, node = time.time(), connection.node
        self.cluster.beat(node, now)
        match message:
            case Beat(reports):
                if reports:
                    self._reports.setdefault(node, {}).update(_checked(reports))
            case Log(worker, offset, text, size):
                book = self.logbook(worker.rpartition("-")[0])
                try:
                    offset = book.append(now, worker, node, offset, text, size)
                except OSError as problem:
                    _log.error("%s: %s; output of %s is lost", book.path, problem.strerror, worker)
                    offset += size
                connection.send(Logged(worker, offset))
            case Heard() | Started() | Ended():
                self._inbox.append((connection, message))
                self._filled.set()
            case _:
                pass

    def _attend(self, said: Sequence[tuple[Connection, messages.Message]]) -> None:
        """Pass messages of agents to the reconciler, in one transaction."""
        self._take_reports({connection.node for connection, _ in said})  # reports came before the messages
        now = time.time()
        with self._happening() as cluster, cluster.together(now):
            for connection, message in said:
                if not self._is_current(connection):
                    continue  # another connection replaced it
                match message:
                    case Heard(worker, words):
                        cluster.heard(connection.node, worker, words, now)
                    case Started(worker, pid, warning):
                        cluster.started(worker, pid, now, warning)
                    case Ended():
                        cluster.ended(connection.node, message, now)
                    case Going(reason):
                        del self._connections[connection.node]
                        cluster.lost(connection.node, reason, now)

    def _attend_to(self, node: str) -> None:
        """Handle all messages and reports that came from a node so far."""
        mine = [entry for entry in self._inbox if entry[0].node == node]
        if mine:
            self._inbox = deque(entry for entry in self._inbox if entry[0].node != node)
            self._attend(mine)
        self._take_reports([node])

    def _is_current(self, connection: Connection) -> bool:
        return self._connections.get(connection.node) is connection

    def _take_reports(self, nodes: Iterable[str]) -> None:
        """Pass workers' reports to the reconciler: at every tick, and before any other message of a node is handled."""
        taken = {name: self._reports.pop(name) for name in nodes if name in self._reports}
        if not taken:
            return
        with self._happening() as cluster:
            calm = not cluster.undecided
            for name, reports in taken.items():
                try:
                    cluster.reports(name, reports, time.time())
                except ProtocolError as problem:
                    _log.warning("agent of %s: %s", name, problem)
                    if name in self._connections:
                        self._connections[name].close()
            if calm and cluster.undecided:
                cluster.undecided, self._curious = False, True

    # Requests of the API.

    def logbook(self, trainer: str) -> Logbook:
        """Return the log of a trainer."""
        if not _TRAINER.fullmatch(trainer):  # the id becomes part of a path
            raise ProtocolError(f"there cannot be a trainer {trainer[:64]!r}")
        if trainer not in self._logbooks:
            self._logbooks[trainer] = self._make_logbook(trainer)
        return self._logbooks[trainer]

    def submit(self, spec: TrainerSpec, owner: str) -> str:
        """Queue a trainer and return its id."""
        with self._happening() as cluster:
            return cluster.submit(spec, owner, time.time())

    def cancel(self, trainer: str, by: str) -> None:
        """End a trainer."""
        with self._happening() as cluster:
            cluster.cancel(trainer, f"cancelled by {by}", time.time())

    async def pause(self) -> None:
        """Stop harvesting and give all nodes back, after a short grace period."""
        with self._happening() as cluster:
            cluster.pause(self.config.agents.pause_grace_s, time.time())
        await self.pool.pause()

    async def resume(self) -> None:
        """Resume harvesting."""
        with self._happening() as cluster:
            cluster.resume(time.time())
        await self.pool.resume()

    # The interface for the pool, `PoolHost`.

    @property
    def agent_environment(self) -> Mapping[str, str]:
        """See `PoolHost`."""
        return self._agent_environment

    @property
    def observing(self) -> bool:
        """See `PoolHost`."""
        return self.cluster.settings.dry_run

    @property
    def nodes(self) -> frozenset[str]:
        """See `PoolHost`."""
        return frozenset(self._connections) - {HEAD}

    def available(self, node: str) -> None:
        """See `PoolHost`."""
        with self._happening() as cluster:
            cluster.available(node, time.time())

    def leaving(self, node: str, grace_s: float) -> None:
        """See `PoolHost`."""
        with self._happening() as cluster:
            cluster.leaving(node, grace_s, time.time())

    def gone(self, node: str, reason: str) -> None:
        """See `PoolHost`."""
        if self._closing or self.failed.done():
            return
        self._attend_to(node)
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.close()
        with self._happening() as cluster:
            cluster.lost(node, reason, time.time())

    def dismiss(self, node: str, reason: str) -> None:
        """See `PoolHost`."""
        connection = self._connections.get(node)
        if connection is not None:
            connection.send(Bye(reason))

    def remember(self, key: str, value: Any) -> None:
        """See `PoolHost`."""
        with self._happening() as cluster:
            cluster.store.keep(f"pool.{key}", value)

    def recall(self, key: str) -> Any:
        """See `PoolHost`."""
        return self.cluster.store.kept(f"pool.{key}")

    def note(self, what: str, **facts: Any) -> None:
        """See `PoolHost`."""
        with self._happening() as cluster:
            cluster.store.log(time.time(), f"pool.{what}", data=facts)


def _checked(reports: Any) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(reports, Mapping) or not all(isinstance(report, Mapping) for report in reports.values()):
        raise ProtocolError(f"a beat must have reports by worker, but got {str(reports)[:200]}")
    return reports

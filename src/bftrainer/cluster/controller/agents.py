"""The agent hub serves the connections of all agents.

It passes what agents say to the reconciler: messages in batches, reports of workers once per tick. Output of workers
goes to the `OutputWriter`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from bftrainer.cluster.config.keys import AgentSettings, TrainerSettings
from bftrainer.cluster.controller.active import Disconnected
from bftrainer.cluster.controller.connection import Connection, Connections
from bftrainer.cluster.controller.event_runner import EventRunner
from bftrainer.cluster.controller.nodes.invitations import Invitations
from bftrainer.cluster.controller.nodes.read_budget import ReadBudget
from bftrainer.cluster.controller.output.budget import OutputBudget
from bftrainer.cluster.controller.output.logbook import Logbooks
from bftrainer.cluster.controller.output.writer import OutputWriter
from bftrainer.cluster.launchers import HEAD
from bftrainer.cluster.owners.join_secrets import JoinRight
from bftrainer.cluster.wire import codec
from bftrainer.cluster.wire.messages import (
    MOST_WORKERS,
    Beat,
    Bye,
    Ended,
    FromAgent,
    Going,
    Heard,
    Join,
    Log,
    Logged,
    Message,
    Started,
    Welcome,
)
from bftrainer.elastic.protocol import ProtocolError
from bftrainer.util import ids

SLICE = 40
"""How many agent messages are handled before other tasks get a turn. After an event a thousand may come at once."""

JOIN_S = 60.0
"""How long a connection may wait before its first message, a join."""
EXCESS_S = 1.0
"""An agent that sends output without waiting for acknowledgements is not read for this long."""

_log = logging.getLogger(__name__)


class AgentHub:
    """The connections of all agents, and what they said that is not handled yet."""

    def __init__(
        self,
        runner: EventRunner,
        connections: Connections,
        logbooks: Logbooks,
        settings: AgentSettings,
        trainers: TrainerSettings,
    ) -> None:
        self._runner = runner
        self._connections = connections
        self._logbooks = logbooks
        self._settings = settings
        self.invitations: Invitations | None = None
        """Where agents have owners: which of them may join."""
        budget = OutputBudget(trainers.max_log_kb_per_s * 1000, trainers.max_log_lines_per_s)
        self.output = OutputWriter(budget, self._logged)
        self._inbox: deque[tuple[Connection, FromAgent | Disconnected]] = deque()
        self._filled = asyncio.Event()
        self._reports: dict[str, dict[str, Mapping[str, Any]]] = {}
        """Reports since the last tick, by node and worker, so that a thousand heartbeats need few transactions."""
        self._read = ReadBudget()
        self._closing = False

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes whose agents are connected, or will connect again soon after their connection broke."""
        known = self._runner.cluster.nodes
        return frozenset(name for name, node in known.items() if node.cut or name in self._connections) - {HEAD}

    @property
    def has_head(self) -> bool:
        """Whether the head agent is connected."""
        return HEAD in self._connections

    @property
    def busy(self) -> bool:
        """Whether something that agents said is not handled yet."""
        return bool(self._inbox or self._reports)

    # Connections.

    async def serve(
        self, frames: AsyncIterator[str], send: Callable[[str], Awaitable[None]], right: JoinRight | None = None
    ) -> None:
        """Serve one agent's connection, from its first frame to its end. `right`: what its secret is good for."""
        connection: Connection | None = None
        sending: asyncio.Task[None] | None = None
        end: Going | Disconnected = Disconnected("connection closed")
        try:
            async with asyncio.timeout(JOIN_S) as opened:  # no time limit once it has joined: `_end_reading` ends it
                async for frame in frames:
                    node = right.node if right is not None else connection.node if connection is not None else ""
                    if node and (wait_s := self._read.spend(node, frame, time.monotonic())):
                        await asyncio.sleep(wait_s)
                    message = codec.decode_from_agent(frame)
                    if connection is None:
                        if not isinstance(message, Join):
                            raise ProtocolError("the first frame must be a join")
                        if refusal := self._refusal(message, right):
                            _log.warning("agent %s of %s is refused: %s", message.agent, message.node, refusal)
                            await send(codec.encode(Bye(refusal)))
                            return
                        connection = self._joined(message, right)
                        opened.reschedule(None)
                        connection.on_close = partial(_end_reading, opened)
                        sending = asyncio.create_task(connection.pump(send))
                    elif isinstance(message, Going):
                        end = Going(message.reason or "taken")
                        break
                    elif isinstance(message, Log):
                        if not self._printed(connection, message):
                            await asyncio.sleep(EXCESS_S)
                    elif message is not None:
                        self._heard(connection, message)
                    if sending is not None and sending.done():
                        break
        except ProtocolError as problem:
            end = Going(f"invalid message: {problem}")
            _log.warning("agent of %s: %s", connection.node if connection else "?", problem)
        except TimeoutError:
            if not opened.expired():
                raise
        finally:
            if connection is not None:
                connection.on_close = None
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            if connection is not None:
                self._parted(connection, end)

    def dismiss(self, node: str, reason: str) -> None:
        """End a node's agent at once."""
        self._connections.send(node, Bye(reason))

    def dismiss_all(self, reason: str) -> None:
        """End all agents."""
        for connection in list(self._connections.values()):
            connection.send(Bye(reason))

    async def all_gone(self) -> None:
        """Wait until no agent is connected."""
        while self._connections:
            await asyncio.sleep(0.02)

    def cut_off(self, nodes: Iterable[str]) -> None:
        """Close the connections of nodes that are lost. An agent that is alive after all reconnects.

        They do not count as connected from now on: an agent that is stopped would never end its connection itself.
        """
        for node in nodes:
            if (connection := self._connections.pop(node, None)) is not None:
                connection.close()

    def gone(self, node: str, reason: str) -> None:
        """Handle the loss of a node that a pool reported."""
        if self._closing or self._runner.failed.done():
            return
        self._handle_node(node)
        if self._runner.cluster.hand_overs.vacated(node):
            if node in self._connections:
                self._shut_out(self._connections[node])
            return
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.close()
        with self._runner.event() as effects:
            effects.add(self._runner.cluster.lost(node, reason, time.time(), for_good=True))

    def left(self, node: str, agent: str) -> None:
        """Shut out the agent of a node that has left, where agents have owners."""
        if self.invitations is not None:
            self.invitations.left(node, agent)
        connection = self._connections.get(node)
        if connection is not None and connection.agent == agent:
            self._shut_out(connection)

    def keep_nodes(self) -> None:
        """Count no node as lost from now on: agents that are not dismissed wait for the next controller."""
        self._closing = True

    def close(self) -> None:
        """Close all connections. Agents keep running."""
        for connection in list(self._connections.values()):
            connection.close()

    def _refusal(self, join: Join, right: JoinRight | None) -> str:
        """Return why an agent may not join; empty if it may. Where agents have no owners, its secret was enough."""
        if self.invitations is None:
            return ""
        if refusal := "it has no right to join" if right is None else self.invitations.refusal(right, join):
            return refusal
        node = self._runner.cluster.nodes.get(join.node)
        if not self._runner.cluster.paused or (node is not None and node.agent == join.agent):
            return ""
        with self._runner.event():
            self.invitations.withdraw(join.node)  # it may not come back after the pause either
        return "harvesting is paused"

    def _joined(self, join: Join, right: JoinRight | None) -> Connection:
        connection = Connection(join.node, join.agent)
        agents = self._settings
        # How much of the workers' output is stored is not looked up here: a file system could keep the agent waiting.
        times = (agents.beat_s, agents.worker_silence_s, agents.give_up_s)
        secret, owner = "", ""
        if self.invitations is not None and right is not None:
            with self._runner.event():
                secret, owner = self.invitations.joined(right, join, time.time()), right.owner
        connection.send(Welcome(*times, last_save_s=agents.last_save_s, secret=secret))
        self._handle_node(join.node)
        former = self._connections.get(join.node)
        if former is not None:
            former.close()
        self._connections[join.node] = connection
        with self._runner.event() as effects:
            effects.add(self._runner.cluster.joined(join, time.time(), owner))
        return connection

    def _is_heard(self, connection: Connection) -> bool:
        """Whether what comes over a connection counts.

        It does not if the node's agent has another connection. Where agents have owners, it does not either if the node
        is not known, or is known with another agent; the connection is then closed.
        """
        if not self._connections.is_current(connection):
            return False
        node = self._runner.cluster.nodes.get(connection.node)
        if self.invitations is None or (node is not None and node.agent == connection.agent):
            return True
        self._shut_out(connection)
        return False

    def _shut_out(self, connection: Connection) -> None:
        del self._connections[connection.node]
        connection.close()

    def _parted(self, connection: Connection, end: Going | Disconnected) -> None:
        if not self._closing and not self._runner.failed.done():
            self._queue(connection, end)
        elif self._connections.is_current(connection):
            del self._connections[connection.node]

    def _heard(self, connection: Connection, message: Message) -> None:
        if not self._is_heard(connection):
            return
        now, node = time.time(), connection.node
        self._runner.cluster.beat(node, now, message.gpus if isinstance(message, Beat) else ())
        match message:
            case Beat(reports):
                if reports:
                    mine = self._reports.setdefault(node, {})
                    mine.update(_checked(reports))
                    if len(mine) > MOST_WORKERS:
                        del self._reports[node]
                        raise ProtocolError(f"a node has at most {MOST_WORKERS} workers, but more have reported")
            case Heard() | Started() | Ended():
                self._queue(connection, message)
            case _:
                pass

    def _printed(self, connection: Connection, log: Log) -> bool:
        """Handle a piece of a worker's output. Returns False if it came before the last one was acknowledged."""
        if not self._is_heard(connection):
            return True
        now, node = time.time(), connection.node
        self._runner.cluster.beat(node, now)
        if not self._may_print(log.worker, node):
            self._logged(node, log.worker, log.offset + log.size)  # dropped
            return True
        return self.output.take(node, log, self._logbooks.of(ids.trainer_of(log.worker)), now)

    def _may_print(self, worker: str, name: str) -> bool:
        """Whether output that a node sends can be a worker's.

        Where agents have owners, it is only if the worker is or was on the node, for a trainer of the owner.
        """
        if self.invitations is None:
            return True
        cluster, trainer = self._runner.cluster, ids.trainer_of(worker)
        node, known = cluster.nodes.get(name), cluster.trainers.get(trainer) or cluster.store.trainer(trainer)
        if node is None or known is None or known.owner != node.owner:
            return False
        return [row.node for row in cluster.store.workers(worker=worker)] == [name]

    def _logged(self, node: str, worker: str, offset: int) -> None:
        self._connections.send(node, Logged(worker, offset))

    # Messages and reports.

    def _queue(self, connection: Connection, message: FromAgent | Disconnected) -> None:
        self._inbox.append((connection, message))
        self._filled.set()

    async def keep_handling(self) -> None:
        """Handle messages as they come."""
        while True:
            await self._filled.wait()
            self._handle([self._inbox.popleft() for _ in range(min(SLICE, len(self._inbox)))])
            if not self._inbox:
                self._filled.clear()
            await asyncio.sleep(0)

    async def handle_reports(self) -> None:
        """Handle the reports since the last call."""
        self._read.forget_paid(time.monotonic())
        names = iter(list(self._reports))
        while some := list(itertools.islice(names, SLICE)):
            self._handle_reports(some)
            await asyncio.sleep(0)

    def handle_rest(self) -> None:
        """Handle all that agents said so far."""
        self._handle(list(self._inbox))
        self._handle_reports(list(self._reports))

    def _handle(self, said: Sequence[tuple[Connection, FromAgent | Disconnected]]) -> None:
        """Pass messages of agents to the reconciler, in one transaction."""
        self._handle_reports({connection.node for connection, _ in said})  # reports came before the messages
        with self._runner.event() as effects:
            current = []
            for connection, message in said:
                if self._is_heard(connection):
                    current.append((connection.node, message))
                    if isinstance(message, Going | Disconnected):
                        del self._connections[connection.node]
            effects.add(self._runner.cluster.agents_said(current, time.time()))

    def _handle_node(self, node: str) -> None:
        """Handle all messages and reports that came from a node so far."""
        mine = [entry for entry in self._inbox if entry[0].node == node]
        if mine:
            self._inbox = deque(entry for entry in self._inbox if entry[0].node != node)
            self._handle(mine)
        self._handle_reports([node])

    def _handle_reports(self, nodes: Iterable[str]) -> None:
        """Pass workers' reports to the reconciler: at every tick, and before any other message of a node is handled."""
        taken = {name: self._reports.pop(name) for name in nodes if name in self._reports}
        if not taken:
            return
        with self._runner.event() as effects:
            for name, reports in taken.items():
                try:
                    effects.add(self._runner.cluster.reports(reports, time.time(), name))
                except ProtocolError as problem:
                    _log.warning("agent of %s: %s", name, problem)
                    if name in self._connections:
                        self._connections[name].close()


def _end_reading(opened: asyncio.Timeout) -> None:
    """Have the task that reads a connection go on at its end, even if no further frame comes."""
    opened.reschedule(asyncio.get_running_loop().time())


def _checked(reports: Any) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(reports, Mapping) or not all(isinstance(report, Mapping) for report in reports.values()):
        raise ProtocolError(f"a beat must have reports by worker, but got {str(reports)[:200]}")
    return reports

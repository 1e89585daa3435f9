"""Coordinator of one local elastic job: runs virtual nodes, which can be added, removed and killed.

It is used stand-alone (`main.py`), in tests and in benchmarks. Each node is one worker process. The coordinator starts
the workers, listens to them on a Unix socket, and carries out what the `Roster` decides. The agents of a cluster do the
same over a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from bftrainer.elastic import protocol
from bftrainer.elastic.breaks import Breaks
from bftrainer.elastic.protocol import Broken, Done, Failed, Formed, FromWorker, Hello, Leaving, Left, Report
from bftrainer.elastic.roster import Roster
from bftrainer.errors import InputError
from bftrainer.processes.launch import Command, Process, ProcessLauncher
from bftrainer.processes.unguided import NEVER_CALLED
from bftrainer.util.text import last_line

_KILLED = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that mean that the node was taken away; any other signal is the script's own fault."""
_LOG_TAIL = 4000
_LAST_WORDS_S = 0.1
FAILED_ALONE = "failed before it joined: "
"""Start of `Happening.what` for a newcomer's failure while others train."""

Status = Literal["done", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the job: its status, and the error if it failed."""

    status: Status
    error: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Happening:
    """An event of the job, for observers."""

    at: float
    """Seconds since the job began."""
    node: str
    what: str
    message: FromWorker | None = None


@dataclass(slots=True)
class _Node:
    name: str
    process: Process
    log: Path
    writer: asyncio.StreamWriter | None = None
    heard_at: float = 0.0
    leave_by: float | None = None
    finish_by: float | None = None
    joined: bool = False
    failed: bool = False  # it reported an exception before it joined
    over: bool = False  # it reported that it left or is done
    report: Report | None = None
    watcher: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Time limits of the coordinator, and settings for its workers."""

    silence_s: float = 10.0
    """Seconds without a message after which a worker counts as lost: stopped, or its network is gone."""
    grace_s: float = 10.0
    """Seconds that a leaving worker has to reach a step boundary."""
    finish_grace_s: float = 600.0
    """Seconds that the script may still run on any node after training is complete: a final evaluation, a save."""
    most_breaks: int = 3
    """The job fails when its group breaks this many times in a row with no node lost."""
    speaks: bool = True
    """Whether workers speak `protocol`. Those of torchrun do not: only their exit status is known."""
    background_start: bool = True
    """Start newcomers at low CPU priority, so that they do not slow the workers that train."""
    threads: int | None = 1
    """Threads of each worker: virtual nodes share the machine's cores. None: the library's default."""
    environment: Mapping[str, str] = field(default_factory=dict)


class Coordinator:
    """One job with its nodes and workers. Call all methods from the thread of the running event loop."""

    def __init__(
        self,
        script: Sequence[str],
        launcher: ProcessLauncher,
        *,
        nodes: tuple[int, int] = (1, 8),
        folder: Path | None = None,
        settings: CoordinatorSettings | None = None,
        watch: Callable[[Happening], None] = lambda happening: None,
    ) -> None:
        least, most = nodes
        if not 1 <= least <= most:
            raise InputError(f"`nodes` must be MIN-MAX with 1 ≤ MIN ≤ MAX, but got {least}-{most}")
        if not script:
            raise InputError("there is no script to run")
        self.roster = Roster(least, partial(secrets.token_hex, 16))
        self.most = most
        self.settings = settings or CoordinatorSettings()
        self.folder = folder or Path(tempfile.mkdtemp(prefix="bftrainer-"))
        self._own_folder = folder is None
        self._script = tuple(script)
        self._launcher = launcher
        self._watch = watch
        self._nodes: dict[str, _Node] = {}
        self._gone_logs: dict[str, Path] = {}
        self._started = 0
        self._began = time.monotonic()
        self._server: asyncio.Server | None = None
        self._patrol: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._done = False
        self._breaks = Breaks(self.settings.most_breaks)

    async def __aenter__(self) -> Coordinator:
        self.folder.mkdir(parents=True, exist_ok=True)
        # A separate short path: that of a socket may have only about a hundred characters.
        self._channel = Path(tempfile.mkdtemp(prefix="bft-")) / "channel"
        self._server = await asyncio.start_unix_server(self._connected, self._channel)
        self._patrol = asyncio.create_task(self._keep_watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Interface.

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the job, by age."""
        return tuple(self._nodes)

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes that train together, by rank."""
        return self.roster.going.members

    def trains(self, node: str) -> bool:
        """Return whether a node's worker has joined the others."""
        return node in self._nodes and self._nodes[node].joined

    def report(self, node: str) -> Report | None:
        """Return a worker's last report."""
        return self._nodes[node].report if node in self._nodes else None

    def pid(self, node: str) -> int:
        """Return the process id of a worker."""
        return self._find(node).process.pid

    def log(self, node: str) -> str:
        """Return what a worker has printed, even if the worker is gone."""
        path = self._nodes[node].log if node in self._nodes else self._gone_logs.get(node)
        return path.read_text(errors="replace") if path is not None and path.exists() else ""

    @property
    def logs(self) -> Mapping[str, Path]:
        """The log files of the workers, by node."""
        return {**self._gone_logs, **{name: node.log for name, node in self._nodes.items()}}

    async def add(self, count: int = 1) -> tuple[str, ...]:
        """Add nodes; their workers join when they are ready."""
        if self._done or self._outcome.done():
            raise InputError("the job is over")
        if len(self._nodes) + count > self.most:
            raise InputError(f"the job may have {self.most} nodes at most, and has {len(self._nodes)}")
        return tuple([await self._start() for _ in range(count)])

    def remove(self, node: str) -> None:
        """Remove a node with notice: its worker leaves at a step boundary."""
        found = self._find(node)
        if not self.roster.is_ready(node):
            found.process.kill_group()
            return
        found.leave_by = time.monotonic() + self.settings.grace_s
        self.roster.remove(node)
        self._settle()

    def signal(self, node: str, signum: int) -> None:
        """Send a signal to a node's worker: SIGKILL removes the node without notice, SIGSTOP makes it hang."""
        found = self._find(node)
        if signum == signal.SIGKILL:
            found.process.kill_group(signum)
        else:
            found.process.signal(signum)

    async def wait(self) -> Outcome:
        """Wait for the end of the job."""
        return await asyncio.shield(self._outcome)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0, what: str = "") -> None:
        """Wait until a condition is true. It is checked after each event."""
        deadline = time.monotonic() + timeout_s
        await asyncio.sleep(0)  # a caller that polls in a loop must not block incoming events
        async with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{what or 'it'} did not happen within {timeout_s:g} s")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, 0.2))

    async def stop(self) -> None:
        """End the job in good order: all workers leave at a step boundary, and the last one takes a snapshot."""
        for name in list(self._nodes):
            if not self.roster.is_leaving(name):
                node = self._nodes[name]
                if self.roster.is_ready(name):
                    node.leave_by = time.monotonic() + self.settings.grace_s
                    self.roster.remove(name)
                else:
                    node.process.kill_group()
        self._settle()
        await self.until(lambda: not self._nodes, self.settings.grace_s + 30.0, "the end of all workers")
        self._end(Outcome("stopped"))

    async def close(self) -> None:
        """End all workers at once."""
        watchers = [node.watcher for node in self._nodes.values() if node.watcher is not None]
        for node in list(self._nodes.values()):
            node.process.kill_group()
        await asyncio.gather(*watchers, return_exceptions=True)
        if self._patrol is not None:
            self._patrol.cancel()
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._end(Outcome("stopped"))
        shutil.rmtree(self._channel.parent, ignore_errors=True)
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    # Workers.

    def _find(self, node: str) -> _Node:
        if node not in self._nodes:
            raise InputError(f"there is no node {node!r}; there are {', '.join(self._nodes) or 'none'}")
        return self._nodes[node]

    async def _start(self, name: str | None = None) -> str:
        if name is None:
            self._started += 1
            name = f"node-{self._started}"
        log = self.folder / f"{name}.log"
        environment = {**os.environ, **self.settings.environment}
        environment |= {
            protocol.CHANNEL: str(self._channel),
            protocol.WORKER: name,
            protocol.HOST: "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
        }
        # Keep torch from printing a stack trace when a peer is lost.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if self.settings.threads is not None:
            environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(self.settings.threads)
        background = self.settings.background_start and bool(self.members)
        command = Command(self._script, environment, os.getcwd(), str(log), background=background)  # noqa: PTH109
        self.roster.start(name)
        try:
            process = await self._launcher.start(command)
        except BaseException:
            self.roster.lost(name)
            raise
        node = self._nodes[name] = _Node(name, process, log)
        node.watcher = asyncio.create_task(self._watch_process(node))
        self._tell(name, "started")
        return name

    async def _watch_process(self, node: _Node) -> None:
        status = await node.process.wait()
        if status == 0 and self.settings.speaks and not node.heard_at:
            await asyncio.sleep(_LAST_WORDS_S)  # its connection may be waiting to be accepted
        self._nodes.pop(node.name, None)
        self._gone_logs[node.name] = node.log
        expected = node.over or node.failed or node.leave_by is not None or self._outcome.done()
        expected = expected or self.roster.is_leaving(node.name)
        if node.over:
            self.roster.left(node.name)
        else:
            self._lost(node)
        self._tell(node.name, f"ended with status {status}")
        if not expected:
            await self._judge(node, status)
        self._settle()
        if self._done and not self._nodes:
            self._end(Outcome("done"))

    async def _judge(self, node: _Node, status: int) -> None:
        """Decide what the unexpected end of a worker means for the job."""
        if status == protocol.RESTART:
            if not self._done:
                await self._start(node.name)
        elif status == 0 and self.settings.speaks and not node.heard_at and not self._done:
            self._failed(node, NEVER_CALLED, "")
        elif status == 0 and self._trains_without(node):
            self._failed(node, f"{node.name} ended with status 0", "")
        elif status == 0:
            self._finish()
        elif status > 0 and status - 128 not in _KILLED:
            tail = _tail(node.log)
            last = last_line(tail)
            self._failed(node, f"{node.name} ended with status {status}{': ' + last if last else ''}", tail)
        elif status < 0 and -status not in _KILLED:
            self._failed(node, f"{node.name} was ended by {signal.Signals(-status).name}", _tail(node.log))

    def _trains_without(self, node: _Node) -> bool:
        """Return whether a node is a newcomer while others train."""
        return not node.joined and any(other.joined for other in self._nodes.values() if other is not node)

    def _failed(self, node: _Node, error: str, traceback: str) -> None:
        """Handle the failure of a worker. If it has not joined and others train, its node failed, not the job."""
        if self._trains_without(node):
            self._tell(node.name, f"{FAILED_ALONE}{error}")
        else:
            self._fail(error, traceback)

    def _lost(self, node: _Node) -> None:
        self._breaks.lost()
        self.roster.lost(node.name)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        node: _Node | None = None
        try:
            while line := await reader.readline():
                message = protocol.decode(line)
                if isinstance(message, Hello):
                    while message.worker in self.roster and message.worker not in self._nodes:
                        await asyncio.sleep(0.002)  # the worker was faster than its launcher's answer
                    node = self._nodes.get(message.worker)
                    if node is None:
                        break
                    node.writer = writer
                if node is None or self._nodes.get(node.name) is not node:
                    break
                node.heard_at = time.monotonic()
                if message is not None:
                    self._hear(node, message)
        except (ConnectionError, protocol.ProtocolError) as problem:
            if node is not None:
                self._tell(node.name, f"channel: {problem}")
        finally:
            self._connections.discard(task)
            if node is not None and node.writer is writer:
                node.writer = None
            writer.close()

    def _hear(self, node: _Node, message: object) -> None:
        if isinstance(message, Broken) and self.roster.in_use(message.generation):
            self._breaks.broke(message.generation, message.reason, time.monotonic())
            if verdict := self._breaks.verdict(time.monotonic()):
                self._fail(verdict, "")
        self.roster.heard(node.name, message)
        match message:
            case Formed():
                node.joined = True
            case Leaving():
                node.leave_by = time.monotonic() + self.settings.grace_s
            case Left():
                node.over = True
            case Done():
                node.over = True
                self._finish()
            case Failed(error, traceback, fresh):
                node.joined = node.joined and not fresh
                node.failed = self._trains_without(node)
                node.leave_by = time.monotonic() + self.settings.grace_s  # a thread may keep it from ending
                self._failed(node, f"{node.name}: {error}", traceback)
            case Report():
                node.report = message
                self._breaks.reported(message.step, message.samples)
        self._settle()
        self._tell(node.name, type(message).__name__.lower(), message)

    def _settle(self) -> None:
        for saying in self.roster.settle():
            node = self._nodes.get(saying.worker)
            if node is not None and node.writer is not None:
                node.writer.write(protocol.encode(saying.message))

    async def _keep_watch(self) -> None:
        """Treat silent workers as lost, and end those that do not leave in time."""
        while True:
            await asyncio.sleep(min(0.25, self.settings.silence_s / 4))
            now = time.monotonic()
            for node in list(self._nodes.values()):
                silent = node.heard_at and not node.over and now - node.heard_at > self.settings.silence_s
                late = node.leave_by is not None and now > node.leave_by
                if silent or late:
                    node.process.kill_group()
                if node.finish_by is not None and now > node.finish_by:
                    limit_s = self.settings.finish_grace_s
                    how = f"training was complete, but the script did not end within {limit_s:g} s after it"
                    self._fail(f"{node.name}: {how}", _tail(node.log))
                if silent and node.name in self.roster:
                    # The worker is being killed; its peers need not wait for it.
                    self._lost(node)
                    self._settle()
                    self._tell(node.name, "silent")

    def _finish(self) -> None:
        """Complete the training.

        Workers that have not joined are ended; the others reach the same end by themselves.
        """
        if self._done:
            return
        self._done = True
        for node in self._nodes.values():
            if node.name not in self.members:
                node.process.kill_group()
            elif node.leave_by is None:
                node.finish_by = time.monotonic() + self.settings.finish_grace_s

    def _fail(self, error: str, traceback: str) -> None:
        self._end(Outcome("failed", error, traceback))
        for node in self._nodes.values():
            node.process.kill_group()

    def _end(self, outcome: Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    def _tell(self, node: str, what: str, message: object = None) -> None:
        self._watch(Happening(time.monotonic() - self._began, node, what, message))  # type: ignore[arg-type]

        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.ensure_future(notify())
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)


def _tail(log: Path) -> str:
    """Return the last lines of a worker's output."""
    try:
        text = log.read_text(errors="replace")
    except OSError as problem:
        print(f"bftrainer: {problem}", file=sys.stderr)
        return ""
    return text[-_LOG_TAIL:]

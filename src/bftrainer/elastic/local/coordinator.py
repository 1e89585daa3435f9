"""Coordinator of one local elastic job: runs virtual nodes, which can be added, removed and killed.

It is used stand-alone (`main.py`), in tests and in benchmarks. Each node is one worker, with one process per rank.
`WorkerProcesses` runs the workers, as on each node of a cluster. The coordinator carries out what the `Roster` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bftrainer.elastic import defaults, protocol
from bftrainer.elastic.breaks import Breaks
from bftrainer.elastic.local.node import VirtualNode
from bftrainer.elastic.manager import processes
from bftrainer.elastic.manager.processes import WorkerProcesses
from bftrainer.elastic.manager.worker_process import WorkerProcess
from bftrainer.elastic.manager.workers import ManagedWorkers, was_killed
from bftrainer.elastic.protocol import Done, Failed, Formed, FromWorker, Report
from bftrainer.elastic.roster import Roster
from bftrainer.errors import InputError
from bftrainer.processes.cpu_cores import node_cores
from bftrainer.processes.launch import Command, ProcessLauncher
from bftrainer.processes.log_tail import LogTail
from bftrainer.processes.rank_places import rank_places
from bftrainer.processes.unguided import NEVER_CALLED, with_advice
from bftrainer.util.text import last_line

_LOG_TAIL = 4000
"""How many characters of a worker's last output are shown with its failure."""
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


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Time limits of the coordinator, and settings for its workers."""

    silence_s: float = defaults.SILENCE_S
    """Seconds without a message after which a worker counts as lost: stopped, or its network is gone."""
    grace_s: float = defaults.LEAVE_GRACE_S
    """Seconds that a leaving worker has to reach a step boundary."""
    finish_grace_s: float = defaults.FINISH_GRACE_S
    """Seconds that the script may still run on any node after training is complete: a final evaluation, a save."""
    most_breaks: int = defaults.MOST_BROKEN_GROUPS
    """The job fails when its group breaks this many times in a row with no node lost."""
    speaks: bool = True
    """Whether workers speak `protocol`. Those of torchrun do not: only their exit status is known."""
    background_start: bool = True
    """Start newcomers at low CPU priority, so that they do not slow the workers that train."""
    threads: int | None = 1
    """Threads of each process: virtual nodes share the machine's cores. None: the library's default."""
    ranks_per_node: int = 1
    """Processes of each node."""
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
        self._nodes: dict[str, VirtualNode] = {}
        self._logs: dict[str, tuple[Path, ...]] = {}  # of the ranks of each node
        self._began = time.monotonic()
        self._workers: WorkerProcesses
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._done = False
        self._managed = ManagedWorkers(self._nodes, self.roster, Breaks(self.settings.most_breaks))

    async def __aenter__(self) -> Coordinator:
        self.folder.mkdir(parents=True, exist_ok=True)
        # A separate short path: that of a socket may have only about a hundred characters.
        self._channel = Path(tempfile.mkdtemp(prefix="bft-")) / "channel"
        self._workers = WorkerProcesses(self._channel, self._happened, silence_s=self.settings.silence_s)
        await self._workers.open()
        self._in_background(self._workers.keep_watch())
        self._in_background(self._keep_deadlines())
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

    def pid(self, node: str, rank: int = 0) -> int:
        """Return the id of one of a worker's processes."""
        return self._find(node).process(rank).pid

    def log(self, node: str, rank: int = 0) -> str:
        """Return what one of a worker's processes has printed, even if the worker is gone."""
        paths = self._logs.get(node, ())
        return paths[rank].read_text(errors="replace") if paths and paths[rank].exists() else ""

    @property
    def logs(self) -> Mapping[str, Path]:
        """The log files of the nodes' first processes, by node."""
        return {node: paths[0] for node, paths in self._logs.items()}

    async def add(self, count: int = 1) -> tuple[str, ...]:
        """Add nodes; their workers join when they are ready."""
        if self._done or self._outcome.done():
            raise InputError("the job is over")
        if len(self._nodes) + count > self.most:
            raise InputError(f"the job may have at most {self.most} nodes, and has {len(self._nodes)}")
        return tuple([await self._add() for _ in range(count)])

    def remove(self, node: str) -> None:
        """Remove a node with notice: its worker leaves at a step boundary."""
        self._let_leave(self._find(node))
        self._settle()

    def signal(self, node: str, signum: int, rank: int | None = None) -> None:
        """Send a signal to a node's worker: SIGKILL removes the node without notice, SIGSTOP makes it hang.

        With `rank` only that one of its processes gets the signal.
        """
        self._find(node).signal(signum, rank)

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
                    raise TimeoutError(f"timed out after {timeout_s:g} s waiting for {what or 'a condition'}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, 0.2))

    async def stop(self) -> None:
        """End the job in good order: all workers leave at a step boundary, and the last one takes a snapshot."""
        for name, node in self._nodes.items():
            if not self.roster.is_leaving(name):
                self._let_leave(node)
        self._settle()
        await self.until(lambda: not self._nodes, self.settings.grace_s + 30.0, "the end of all workers")
        self._end(Outcome("stopped"))

    async def close(self) -> None:
        """End all workers at once."""
        await self._workers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(Outcome("stopped"))
        shutil.rmtree(self._channel.parent, ignore_errors=True)
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _let_leave(self, node: VirtualNode) -> None:
        """Let a worker leave at a step boundary. One that is not ready has nothing to hand over and is killed."""
        if self.roster.is_ready(node.id):
            node.leave_by = time.monotonic() + self.settings.grace_s
            self.roster.remove(node.id)
        else:
            node.kill()

    # Workers.

    def _find(self, node: str) -> VirtualNode:
        if node not in self._nodes:
            raise InputError(f"there is no node {node!r}; there are {', '.join(self._nodes) or 'none'}")
        return self._nodes[node]

    async def _add(self) -> str:
        worker = self._start(f"node-{len(self._logs) + 1}")
        try:
            await worker.is_up.wait()
        except asyncio.CancelledError:
            self._workers.stop(worker.name)
            raise
        for rank in worker.ranks:
            if rank.starting.cancelled():
                raise InputError("the job is over")
            rank.starting.result()  # raises the error of one that could not be started
        return worker.name

    def _start(self, name: str) -> WorkerProcess:
        given = {protocol.HOST: "127.0.0.1", **processes.LOOPBACK, **self._workers.channel_of(name)}
        answers = {protocol.FOLLOW: "1"}
        environment = processes.worker_environment(answers, os.environ, self.settings.environment, given)
        if self.settings.threads is not None:
            environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(self.settings.threads)
        background = self.settings.background_start and bool(self.members)
        ranks = self.settings.ranks_per_node
        self._logs[name] = tuple(self.folder / f"{name}{f'.{rank}' if rank else ''}.log" for rank in range(ranks))
        self.roster.start(name)
        places = rank_places(ranks, (), node_cores(), environment)  # virtual nodes share the cores and GPUs
        commands = [
            Command(self._script, {**environment, **place.environment}, os.getcwd(), str(log), background=background)  # noqa: PTH109
            for place, log in zip(places, self._logs[name], strict=True)
        ]
        return self._workers.start(name, *map(self._launcher.start, commands), speaks=self.settings.speaks)

    def _happened(self, event: processes.WorkerEvent) -> None:
        match event:
            case processes.ProcessStarted(worker):
                self._nodes[worker.name] = VirtualNode(worker.name, worker)
                self._tell(worker.name, "started")
            case processes.ProcessNotStarted(worker):
                self.roster.lost(worker.name)
            case processes.WorkerSaid(worker, message):
                self._hear(self._nodes[worker.name], message)
            case processes.WorkerSilent(worker):
                if worker.name in self.roster:  # it is being killed; its peers need not wait for it
                    self._managed.lost(worker.name)
                    self._settle()
                    self._tell(worker.name, "silent")
            case processes.ChannelFailed(WorkerProcess(name=name), problem):
                self._tell(name, f"channel: {problem}")
            case processes.ProcessEnded(worker, status):
                self._ended(self._nodes.pop(worker.name), status, spoke=worker.spoke)

    def _ended(self, node: VirtualNode, status: int, *, spoke: bool) -> None:
        expected = self._managed.gone(node, left=node.over)
        self._tell(node.id, f"ended with status {status}")
        if not expected and not self._outcome.done():
            self._judge(node, status, spoke=spoke)
        self._settle()
        if self._done and not self._nodes:
            self._end(Outcome("done"))

    def _judge(self, node: VirtualNode, status: int, *, spoke: bool) -> None:
        """Decide what the unexpected end of a worker means for the job."""
        if status == protocol.RESTART:
            if not self._done:
                self._start(node.id)
        elif status == 0 and not spoke and not self._done:
            self._failed(node, NEVER_CALLED, "")
        elif status == 0 and self._managed.train_without(node):
            self._failed(node, f"{node.id} ended with status 0", "")
        elif status == 0:
            self._finish()
        elif not was_killed(status):
            tail = self._tail(node)
            ended = f"ended with status {status}" if status > 0 else f"was ended by {signal.Signals(-status).name}"
            last = with_advice(last_line(tail)) if status > 0 else ""
            self._failed(node, f"{node.id} {ended}{': ' + last if last else ''}", tail)

    def _tail(self, node: VirtualNode) -> str:
        """Return the end of the output of the process that ended a worker, or of its first one."""
        return LogTail(self._logs[node.id][node.worker.culprit_rank]).end(_LOG_TAIL)

    def _failed(self, node: VirtualNode, error: str, traceback: str) -> None:
        """Handle the failure of a worker. If it has not joined and others train, its node failed, not the job."""
        if self._managed.train_without(node):
            self._tell(node.id, f"{FAILED_ALONE}{error}")
        else:
            self._fail(error, traceback)

    def _hear(self, node: VirtualNode, message: object) -> None:
        now, grace_s = time.monotonic(), self.settings.grace_s
        if verdict := self._managed.heard(node, message, now, grace_s):
            self._fail(verdict, "")
        match message:
            case Formed():
                node.joined = True
            case Done():
                node.over = True
                self._finish()
            case Failed(error, traceback, fresh):
                node.joined = node.joined and not fresh
                node.failed = self._managed.train_without(node)
                node.leave_by = now + grace_s  # a thread may keep it from ending
                self._failed(node, f"{node.id}: {error}", traceback)
            case Report():
                node.report = message
        self._settle()
        self._tell(node.id, type(message).__name__.lower(), message)

    def _settle(self) -> None:
        for saying in self.roster.settle():
            self._workers.say(saying.worker, protocol.as_json(saying.message))

    async def _keep_deadlines(self) -> None:
        """End workers that do not leave in time. The job fails if its script does not end after training."""
        while True:
            await asyncio.sleep(min(0.25, self.settings.silence_s / 4))
            now = time.monotonic()
            for node in self._managed.overdue(now):
                node.kill()
            for node in self._nodes.values():
                if node.finish_by is not None and now > node.finish_by:
                    limit = f"within {self.settings.finish_grace_s:g} s after it"
                    error = f"{node.id}: training was complete, but the script did not end {limit}"
                    self._fail(error, self._tail(node))

    def _finish(self) -> None:
        """Complete the training. Workers that have not joined are ended; the others end by themselves."""
        if self._done:
            return
        self._done = True
        for node in self._nodes.values():
            if node.id not in self.members:
                node.kill()
            elif node.leave_by is None:
                node.finish_by = time.monotonic() + self.settings.finish_grace_s

    def _fail(self, error: str, traceback: str) -> None:
        self._end(Outcome("failed", error, traceback))
        for node in self._nodes.values():
            node.kill()

    def _end(self, outcome: Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    def _tell(self, node: str, what: str, message: object = None) -> None:
        self._watch(Happening(time.monotonic() - self._began, node, what, message))  # type: ignore[arg-type]

        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._in_background(notify())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

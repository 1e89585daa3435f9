"""Worker processes of one manager: starts them, holds their channels, notices silence, and ends them.

The coordinator of a local job and the agent of each cluster node use it. The manager calls `start`, `stop` and `say`.
A worker has one process per rank; they start and end together and speak with one voice (`ranks.py`). Each connects to a
Unix socket and speaks `elastic.protocol`. Everything that happens to a worker goes out as a `WorkerEvent`. All messages
of a worker go out before the event that it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bftrainer.elastic import defaults, protocol
from bftrainer.elastic.manager.ranks import MergedVoice
from bftrainer.elastic.manager.worker_process import RankProcess, WorkerProcess
from bftrainer.elastic.protocol import (
    Done,
    Failed,
    FromManager,
    FromWorker,
    Generation,
    Hello,
    Left,
    ProtocolError,
    Taken,
)
from bftrainer.processes import variables
from bftrainer.processes.launch import Process

MOST_MESSAGE_BYTES = 4 << 20
"""The longest message of a worker."""
STALLED_S = 1.0
"""If the manager itself did not run for this long, the silence of workers means nothing."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of workers that reach each other by a loopback address."""
_NO_RANKS = (
    "two processes of one node say that they have the same rank: the BFTrainer of the script's own environment may be "
    "older than that of the node, and know only one rank per node. Upgrade it, or submit with --ranks-per-node 1"
)
_ACCEPT_S = 0.1
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """All processes of a worker run."""

    worker: WorkerProcess


@dataclass(frozen=True, slots=True)
class ProcessNotStarted:
    """A worker could not be started because of `problem`, or was stopped before it had started (None)."""

    worker: WorkerProcess
    problem: Exception | None


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    """A worker has sent a message."""

    worker: WorkerProcess
    message: FromWorker
    line: bytes
    """The message as it came, with fields that this version does not know."""


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A process of a worker has been silent for too long: it is stopped, or stuck. The worker is being killed."""

    worker: WorkerProcess
    silent_s: float


@dataclass(frozen=True, slots=True)
class ChannelFailed:
    """A channel was closed because of `problem`. The worker is None if it has not said its name."""

    worker: WorkerProcess | None
    problem: Exception


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """All processes of a worker, and all that they started, have ended. `status` is negative for a signal."""

    worker: WorkerProcess
    status: int


WorkerEvent = ProcessStarted | ProcessNotStarted | WorkerSaid | WorkerSilent | ChannelFailed | ProcessEnded


def worker_environment(*layers: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker: later layers override earlier ones."""
    environment: dict[str, str] = {}
    for layer in layers:
        environment |= layer
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault(*variables.TORCH_LOG_LEVEL)
    return environment


class WorkerProcesses:
    """The workers of one manager. Call all methods in the thread of the running event loop.

    Workers connect to the socket `channel`. `tell` is called with each event.
    """

    def __init__(
        self, channel: Path, tell: Callable[[WorkerEvent], None], *, silence_s: float = defaults.SILENCE_S
    ) -> None:
        self.silence_s = silence_s
        """Seconds without a message after which a worker that had connected is killed."""
        self._channel = channel
        self._tell = tell
        self._workers: dict[str, WorkerProcess] = {}
        self._runs: set[asyncio.Task[None]] = set()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen to workers."""
        self._server = await asyncio.start_unix_server(self._connected, self._channel, limit=MOST_MESSAGE_BYTES)

    async def close(self) -> None:
        """End all workers now, and wait until their ends are told."""
        while self._workers and self._runs:  # a manager may start a worker again when it ends
            self.kill_all()
            await asyncio.wait(self._runs)
        if self._server is not None:
            self._server.close()
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def __contains__(self, name: object) -> bool:
        return name in self._workers

    def __getitem__(self, name: str) -> WorkerProcess:
        return self._workers[name]

    @property
    def running(self) -> tuple[WorkerProcess, ...]:
        """All workers that are being started or have not ended."""
        return tuple(self._workers.values())

    def channel_of(self, name: str) -> dict[str, str]:
        """Return the variables by which a worker finds its channel."""
        return {protocol.CHANNEL: str(self._channel), protocol.WORKER: name}

    def start(self, name: str, *launching: Coroutine[Any, Any, Process], speaks: bool = True) -> WorkerProcess:
        """Start a worker. Each `launching` returns the process of one rank; the events tell how it went."""
        ranks = tuple(RankProcess(asyncio.create_task(each)) for each in launching)
        worker = self._workers[name] = WorkerProcess(name, speaks, ranks, MergedVoice(len(ranks)))
        run = asyncio.create_task(self._run(worker))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        return worker

    def stop(self, name: str, grace_s: float = 0.0) -> None:
        """End a worker: at once, or at the latest after `grace_s` seconds, in which it may end by itself."""
        worker = self._workers.get(name)
        if worker is None:
            return
        if not worker.is_up.is_set():
            worker.unwanted = True
            for rank in worker.ranks:
                rank.starting.cancel()
        elif grace_s <= 0:
            worker.kill()
        else:
            loop = asyncio.get_running_loop()
            if worker.killing is None:
                worker.signal(signal.SIGTERM)
            elif worker.killing.when() > loop.time() + grace_s:
                worker.killing.cancel()
            else:
                return
            worker.killing = loop.call_later(grace_s, worker.kill)

    def kill_all(self) -> None:
        """End all workers now."""
        for name in self._workers:
            self.stop(name)

    def say(self, name: str, message: Mapping[str, Any]) -> None:
        """Send a message to all processes of a worker. One that connects later gets the newest generation only."""
        line = json.dumps(dict(message)).encode() + b"\n"
        decoded = protocol.decode(line)
        worker = self._workers.get(name)
        if worker is None or not isinstance(decoded, FromManager):
            return
        if isinstance(decoded, Generation) and decoded.id >= worker.generation:
            worker.generation, worker.generation_line = decoded.id, line
        worker.taken = worker.taken or isinstance(decoded, Taken)
        for rank in worker.ranks:
            if rank.writer is not None and not rank.writer.is_closing():
                rank.writer.write(line)

    async def keep_watch(self) -> None:
        """Kill workers of which a process connected and has then been silent."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(min(0.25, self.silence_s / 4))
            now = time.monotonic()
            stalled = now - before > STALLED_S
            for worker in self.running:
                if not worker.is_up.is_set():
                    continue
                heard = [rank for rank in worker.ranks if rank.heard_at is not None and not rank.over]
                silent_s = max((now - rank.heard_at for rank in heard if rank.heard_at is not None), default=0.0)
                late = silent_s > self.silence_s and not stalled
                if late:
                    worker.kill()
                    self._tell(WorkerSilent(worker, silent_s))
                for rank in heard if late or stalled else ():
                    rank.heard_at = now  # after a stall the messages since then are still to be read

    async def _run(self, worker: WorkerProcess) -> None:
        problem = await self._started(worker)
        if len(worker.processes) < len(worker.ranks):
            worker.kill()
            await asyncio.gather(*(process.wait() for process in worker.processes))
            del self._workers[worker.name]
            self._tell(ProcessNotStarted(worker, problem))
            worker.is_up.set()
            return
        if worker.unwanted:  # it had started before it could be cancelled
            worker.kill()
        self._tell(ProcessStarted(worker))
        worker.is_up.set()
        await asyncio.gather(*(self._ended(worker, rank) for rank in worker.ranks))
        if worker.killing is not None:
            worker.killing.cancel()
        del self._workers[worker.name]
        self._tell(ProcessEnded(worker, worker.status))

    async def _started(self, worker: WorkerProcess) -> Exception | None:
        """Wait until all processes of a worker are started, or could not be. Return the first problem."""
        problem: Exception | None = None
        await asyncio.wait([rank.starting for rank in worker.ranks])
        for rank in worker.ranks:
            try:
                rank.process = rank.starting.result()
            except asyncio.CancelledError:
                pass  # it was stopped before it had started
            except Exception as error:  # the manager must be told of any problem
                problem = problem or error
        return problem

    async def _ended(self, worker: WorkerProcess, rank: RankProcess) -> None:
        """Wait for the end of a process. If it ends too early, its siblings are of no use and are ended.

        A worker that was stopped, or whose node is taken, is different: its processes have a certain time to end.
        """
        assert rank.process is not None
        rank.status = await rank.process.wait()
        await self._hear_out(worker, rank)
        has_time = worker.taken or worker.killing is not None
        if not rank.ended_well and worker.culprit is None and not has_time:
            worker.culprit = rank
            for sibling in worker.ranks:
                if sibling.status is None and sibling.process is not None:
                    sibling.process.kill_group()

    async def _hear_out(self, worker: WorkerProcess, rank: RankProcess) -> None:
        """Wait for the last messages of a process that has ended."""
        if worker.speaks and rank.channel is None:
            await asyncio.sleep(_ACCEPT_S)  # its connection may be waiting to be accepted
        if rank.channel is not None:
            await asyncio.wait([rank.channel], timeout=_LAST_WORDS_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        worker: WorkerProcess | None = None
        rank: RankProcess | None = None
        number = 0
        try:
            while line := await reader.readline():
                message = protocol.decode(line)
                if isinstance(message, Hello):
                    worker, number = self._workers.get(message.worker), message.local_rank
                    if worker is None or not 0 <= number < len(worker.ranks):
                        break
                    rank = worker.ranks[number]
                    if rank.channel is not None and not rank.channel.done():
                        self._refuse(worker, _NO_RANKS)
                        break
                    rank.channel = task
                    await worker.is_up.wait()  # the worker may be faster than its launcher's answer
                    rank.writer = writer
                    writer.write(worker.generation_line)
                if worker is None or rank is None or self._workers.get(worker.name) is not worker:
                    break
                rank.heard_at = time.monotonic()
                rank.over = rank.over or isinstance(message, Left | Done | Failed)
                rank.failed = rank.failed or isinstance(message, Failed)
                if message is not None and not isinstance(message, FromManager):
                    self._pass_on(worker, number, message, line)
        except (OSError, ValueError, TypeError, ProtocolError) as problem:  # ValueError: the line is too long
            self._tell(ChannelFailed(worker, problem))
        finally:
            del self._connections[task]
            if rank is not None and rank.writer is writer:
                rank.writer = None
            with contextlib.suppress(OSError):
                writer.close()

    def _refuse(self, worker: WorkerProcess, error: str) -> None:
        """End a worker that cannot train, and say why in its name."""
        failed = Failed(error, "")
        self._tell(WorkerSaid(worker, failed, protocol.encode(failed)))
        worker.kill()

    def _pass_on(self, worker: WorkerProcess, rank: int, message: FromWorker, line: bytes) -> None:
        merged = worker.voice.merge(rank, message)
        if merged is not None:
            self._tell(WorkerSaid(worker, merged, line if merged is message else protocol.encode(merged)))

"""Worker processes of one manager: starts them, holds their channels, notices silence, and ends them.

The coordinator of a local job and the agent of each cluster node use it. The manager calls `start`, `stop` and `say`.
Workers connect to a Unix socket and speak `elastic.protocol`. Everything that happens to a worker goes out as a
`WorkerEvent`. All messages of a worker go out before the event that it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bftrainer.elastic import defaults, protocol
from bftrainer.elastic.protocol import (
    Done,
    Failed,
    FromWorker,
    Generation,
    Go,
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
_ACCEPT_S = 0.1
_LAST_WORDS_S = 1.0


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One worker, from the order to start it to its end."""

    name: str
    speaks: bool
    """It connects to the channel; otherwise only its exit status is known."""
    starting: asyncio.Task[Process]
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it runs, or could not be started. No message of the worker goes out before."""
    process: Process | None = None
    writer: asyncio.StreamWriter | None = None
    heard_at: float | None = None
    """When its last message came; None before the first one."""
    over: bool = False
    """It has sent its last message: left, done or failed."""
    channel: asyncio.Task[None] | None = None
    generation: int = 0
    generation_line: bytes = b""  # the newest, sent again to a worker that connects late
    killing: asyncio.TimerHandle | None = None
    unwanted: bool = False  # the order to stop it came before it had started

    @property
    def spoke(self) -> bool:
        """Whether it has connected to the channel, or does not need to."""
        return self.heard_at is not None or not self.speaks


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """The process of a worker runs."""

    worker: WorkerProcess
    process: Process


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
    """A worker has been silent for too long: it is stopped, or stuck. It is being killed."""

    worker: WorkerProcess
    silent_s: float


@dataclass(frozen=True, slots=True)
class ChannelFailed:
    """A channel was closed because of `problem`. The worker is None if it has not said its name."""

    worker: WorkerProcess | None
    problem: Exception


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A worker and all processes that it started have ended. `status` is negative for a signal."""

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

    def start(self, name: str, launching: Coroutine[Any, Any, Process], *, speaks: bool = True) -> WorkerProcess:
        """Start a worker. `launching` returns its process; the events tell how it went."""
        worker = self._workers[name] = WorkerProcess(name, speaks, asyncio.create_task(launching))
        run = asyncio.create_task(self._run(worker))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        return worker

    def stop(self, name: str, grace_s: float = 0.0) -> None:
        """End a worker: at once, or at the latest after `grace_s` seconds, in which it may end by itself."""
        worker = self._workers.get(name)
        if worker is None:
            return
        if worker.process is None:
            worker.unwanted = True
            worker.starting.cancel()
        elif grace_s <= 0:
            worker.process.kill_group()
        else:
            loop = asyncio.get_running_loop()
            if worker.killing is None:
                worker.process.signal(signal.SIGTERM)
            elif worker.killing.when() > loop.time() + grace_s:
                worker.killing.cancel()
            else:
                return
            worker.killing = loop.call_later(grace_s, worker.process.kill_group)

    def kill_all(self) -> None:
        """End all workers now."""
        for name in self._workers:
            self.stop(name)

    def say(self, name: str, message: Mapping[str, Any]) -> None:
        """Send a message to a worker. A worker that is not connected yet later gets the newest generation only."""
        line = json.dumps(dict(message)).encode() + b"\n"
        decoded = protocol.decode(line)
        worker = self._workers.get(name)
        if worker is None or not isinstance(decoded, Generation | Go | Taken):
            return
        if isinstance(decoded, Generation) and decoded.id >= worker.generation:
            worker.generation, worker.generation_line = decoded.id, line
        if worker.writer is not None and not worker.writer.is_closing():
            worker.writer.write(line)

    async def keep_watch(self) -> None:
        """Kill workers that connected and have then been silent."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(min(0.25, self.silence_s / 4))
            now = time.monotonic()
            stalled = now - before > STALLED_S
            for worker in self.running:
                if worker.process is None or worker.heard_at is None or worker.over:
                    continue
                silent_s = now - worker.heard_at
                if stalled:
                    worker.heard_at = now  # its messages since then are still to be read
                elif silent_s > self.silence_s:
                    worker.process.kill_group()
                    worker.heard_at = now
                    self._tell(WorkerSilent(worker, silent_s))

    async def _run(self, worker: WorkerProcess) -> None:
        problem: Exception | None = None
        try:
            await asyncio.wait([worker.starting])
            worker.process = worker.starting.result()
        except asyncio.CancelledError:
            if not worker.starting.cancelled():
                raise
        except Exception as error:  # the manager must be told of any problem
            problem = error
        if worker.process is None:
            del self._workers[worker.name]
            self._tell(ProcessNotStarted(worker, problem))
            worker.is_up.set()
            return
        if worker.unwanted:  # it had started before it could be cancelled
            worker.process.kill_group()
        self._tell(ProcessStarted(worker, worker.process))
        worker.is_up.set()
        status = await worker.process.wait()
        await self._hear_out(worker)
        if worker.killing is not None:
            worker.killing.cancel()
        del self._workers[worker.name]
        self._tell(ProcessEnded(worker, status))

    async def _hear_out(self, worker: WorkerProcess) -> None:
        """Wait for the last messages of a worker whose process has ended."""
        if worker.speaks and worker.channel is None:
            await asyncio.sleep(_ACCEPT_S)  # its connection may be waiting to be accepted
        if worker.channel is not None:
            await asyncio.wait([worker.channel], timeout=_LAST_WORDS_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        worker: WorkerProcess | None = None
        try:
            while line := await reader.readline():
                message = protocol.decode(line)
                if isinstance(message, Hello):
                    worker = self._workers.get(message.worker)
                    if worker is None:
                        break
                    worker.channel = task
                    await worker.is_up.wait()  # the worker may be faster than its launcher's answer
                    worker.writer = writer
                    writer.write(worker.generation_line)
                if worker is None or self._workers.get(worker.name) is not worker:
                    break
                worker.heard_at = time.monotonic()
                worker.over = worker.over or isinstance(message, Left | Done | Failed)
                if message is not None and not isinstance(message, Generation | Go | Taken):
                    self._tell(WorkerSaid(worker, message, line))
        except (OSError, ValueError, TypeError, ProtocolError) as problem:  # ValueError: the line is too long
            self._tell(ChannelFailed(worker, problem))
        finally:
            del self._connections[task]
            if worker is not None and worker.writer is writer:
                worker.writer = None
            with contextlib.suppress(OSError):
                writer.close()

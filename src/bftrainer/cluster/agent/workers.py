"""Agent workers are the worker processes of one node, which this module starts and ends.

The agent calls `start`, `stop` and `say` with the controller's orders. Workers send their messages over a Unix socket.
Everything that happens is recorded in the `WorkerTable` and reported to the controller through `tell`. Nothing here
waits for the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bftrainer.cluster.agent.log_tail import LogTails
from bftrainer.cluster.agent.worker_table import MOST_TRACEBACK, WorkerTable
from bftrainer.cluster.wire.messages import FromAgent, Heard, Start
from bftrainer.elastic import protocol
from bftrainer.elastic.protocol import (
    Done,
    Failed,
    FromWorker,
    Generation,
    Go,
    Hello,
    Left,
    ProtocolError,
    Report,
    Taken,
)
from bftrainer.errors import InputError
from bftrainer.processes.launch import Command, Process
from bftrainer.processes.warm import WarmLauncher
from bftrainer.util.text import one_line

TAIL = 4000
"""How many characters of a worker's last output are sent with the message that it has ended."""
MOST_MESSAGE_BYTES = 4 << 20
"""The longest message of a worker."""
STALLED_S = 1.0
"""If the agent itself did not run for this long, the silence of workers means nothing."""
_LAST_WORDS_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _AgentWorker:
    name: str
    speaks: bool
    starting: asyncio.Task[Process] | None = None
    process: Process | None = None
    channel: asyncio.Task[None] | None = None
    writer: asyncio.StreamWriter | None = None
    heard_at: float | None = None
    generation: bytes = b""  # the newest, sent again to a worker that connects late
    killing: asyncio.TimerHandle | None = None
    warning: str = ""
    unwanted: bool = False  # the order to stop it came before it had started


class AgentWorkers:
    """All workers of a node. Call its methods only in the thread of the running event loop.

    Workers connect to the socket `channel` and print to files in `folder`. A worker's environment is `environment`,
    overridden by the variables of its start order, overridden by `always`. `inherited` is the warm parent that this
    process has forked, if there is one.
    """

    def __init__(
        self,
        channel: Path,
        folder: Path,
        environment: Mapping[str, str],
        always: Mapping[str, str],
        tell: Callable[[FromAgent], None],
        *,
        preload: tuple[str, ...],
        inherited: tuple[int, socket.socket] | None = None,
    ) -> None:
        self.book = WorkerTable()
        self.logs = LogTails()
        self.silence_s = 10.0
        self._folder = folder
        self._environment = dict(environment)
        self._environment.pop(protocol.CHANNEL, None)
        self._always = always
        self._tell = tell
        self._preload = preload
        self._inherited = inherited
        self._running: dict[str, _AgentWorker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel = channel
        self._server: asyncio.Server | None = None
        self._programs = WarmLauncher(preload=())  # it also ends processes that programs have started: see `exec.py`
        self._scripts: dict[str, WarmLauncher] = {}

    async def __aenter__(self) -> AgentWorkers:
        self._server = await asyncio.start_unix_server(self._connected, self._channel, limit=MOST_MESSAGE_BYTES)
        # The imports take longest, so a joining node starts them before it gets any work.
        self._scripts[sys.executable] = WarmLauncher(preload=self._preload)
        self._scripts[sys.executable].prepare(self._whole({}), self._inherited)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill_all()
        await asyncio.gather(self._programs.close(), *(launcher.close() for launcher in self._scripts.values()))
        if self._server is not None:
            self._server.close()
        for worker in self._running.values():
            if worker.writer is not None:
                worker.writer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Orders.

    def start(self, message: Start) -> None:
        """Start a worker. If the same order comes again, report its result again."""
        if message.worker in self.book:
            self._tell_again(message.worker)
            return
        self.book.begin(message.worker, message.trainer, message.speaks)
        worker = self._running[message.worker] = _AgentWorker(message.worker, message.speaks)
        worker.starting = asyncio.create_task(self._launch(message))
        self._in_background(self._run(worker, worker.starting))

    def stop(self, name: str, grace_s: float) -> None:
        """End a worker: at once, or at the latest after `grace_s` seconds, in which it may end by itself."""
        worker = self._running.get(name)
        if worker is None:
            self._tell_again(name)
        elif worker.process is None:
            assert worker.starting is not None
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

    def say(self, name: str, message: Mapping[str, Any]) -> None:
        """Send a message to a worker. A worker that is not connected yet later gets the newest generation only."""
        line = json.dumps(dict(message)).encode() + b"\n"
        meant = protocol.decode(line)
        worker = self._running.get(name)
        if worker is None or not isinstance(meant, Generation | Go):
            return
        if isinstance(meant, Generation):
            if meant.id >= self.book[name].newest:
                worker.generation = line
            self.book.told(name, meant.id)
        if worker.writer is not None and not worker.writer.is_closing():
            worker.writer.write(line)

    def forget(self, name: str) -> None:
        """Forget a worker whose end the controller has stored."""
        if self.book.forget(name):
            self.logs.forget(name)

    async def taken(self, within_s: float) -> None:
        """End all workers within `within_s` seconds, because the node is taken.

        Workers that are connected to the channel may save until then.
        """
        saving = set[asyncio.Task[int]]()
        for worker in list(self._running.values()):
            if within_s > 0 and worker.process is not None and worker.writer is not None:
                worker.writer.write(protocol.encode(Taken(within_s)))
                saving.add(asyncio.create_task(worker.process.wait()))
            else:
                self.stop(worker.name, 0.0)
        if saving:
            await asyncio.wait(saving, timeout=within_s)
        self.kill_all()

    def kill_all(self) -> None:
        """End all workers now."""
        for name in list(self._running):
            self.stop(name, 0.0)

    async def keep_watch(self) -> None:
        """Kill workers that connected and have then been silent: they are stopped, or stuck."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(min(0.25, self.silence_s / 4))
            now = time.monotonic()
            stalled = now - before > STALLED_S
            for worker in list(self._running.values()):
                if worker.process is None or worker.heard_at is None or self.book[worker.name].over:
                    continue
                if stalled:
                    worker.heard_at = now  # its messages since then are still to be read
                elif now - worker.heard_at > self.silence_s:
                    _log.warning("%s has been silent for %.1f s and is killed", worker.name, now - worker.heard_at)
                    worker.process.kill_group()
                    worker.heard_at = now

    # Processes.

    async def _launch(self, message: Start) -> Process:
        if not _NAME.fullmatch(message.worker):
            raise InputError(f"the name of a worker must match {_NAME.pattern}, but got {message.worker!r}")
        command = self._command(message)
        self.logs.follow(message.worker, self._folder / f"{message.worker}.log")
        if message.program:
            return await self._programs.start(command)
        python = message.python or self._submitted(message) or sys.executable
        if python not in self._scripts:
            if shutil.which(python) is None:
                raise InputError(f"cannot start {' '.join(message.argv)}: there is no interpreter {python}")
            self._scripts[python] = WarmLauncher(python, self._preload)
        return await self._scripts[python].start(command)

    def _submitted(self, message: Start) -> str:
        """Return the interpreter that a worker was submitted from, if it can be run here. Otherwise warn its user.

        Returns an empty text for the agent's own interpreter.
        """
        wanted, own = message.submitted_python, sys.executable
        is_own = os.path.realpath(wanted) == os.path.realpath(own) and Path(wanted).parent == Path(own).parent
        if not wanted or is_own:  # also if one is called python and the other python3
            return ""
        if os.access(wanted, os.X_OK) and Path(wanted).is_file():
            return wanted
        self._running[message.worker].warning = (
            f"{wanted}, the interpreter of the environment it was submitted from, cannot be run here: it runs under "
            f"{own}, the agent's own. Choose one that the nodes have with `submit --python`"
        )
        return ""

    def _command(self, message: Start) -> Command:
        argv, cwd = message.argv, message.cwd or os.getcwd()  # noqa: PTH109
        texts: tuple[object, ...] = (*argv, *message.env, *message.env.values(), cwd)  # JSON values can have any type
        for text in texts:
            if not isinstance(text, str) or "\0" in text:
                raise InputError(f"arguments and variables must be text without NUL, but got {text!r}")
            os.fsencode(text)  # otherwise the process would fail without a visible reason
        if not argv or any("=" in name or not name for name in message.env):
            raise InputError(f"cannot start {message.worker}: its command or a variable's name is empty or has a `=`")
        if not Path(cwd).is_dir():
            raise InputError(f"cannot start {' '.join(argv)}: there is no folder {cwd}")
        environment = self._whole(message.env)
        if message.speaks:
            environment |= {protocol.CHANNEL: str(self._channel), protocol.WORKER: message.worker}
        if message.program:
            if shutil.which(Path(cwd, argv[0]) if os.sep in argv[0] else argv[0], path=environment.get("PATH")) is None:
                raise InputError(f"cannot start {' '.join(argv)}: there is no program {argv[0]}")
            argv = ("-m", "bftrainer.cluster.agent.exec", *argv)
        log = self._folder / f"{message.worker}.log"
        return Command(argv, environment, cwd, str(log), background=message.background)

    def _whole(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return a worker's environment: the node's, overridden by its `own`, overridden by what every worker gets."""
        environment = {**self._environment, **own, **self._always, "PYTHONUNBUFFERED": "1"}
        # Torch would print a stack trace for every lost peer.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        return environment

    async def _run(self, worker: _AgentWorker, starting: asyncio.Task[Process]) -> None:
        status, error = -1, ""
        try:
            await asyncio.wait([starting])
            worker.process = starting.result()
            if worker.unwanted:  # it had started before it could be cancelled
                worker.process.kill_group()
            self._tell(self.book.started(worker.name, worker.process.pid, worker.warning))
            status = await worker.process.wait()
            await self._hear_out(worker)
        except asyncio.CancelledError:
            if not starting.cancelled():
                raise
            status = -signal.SIGKILL  # stopped before it had started
        except Exception as problem:  # the controller must be told of any problem
            error = one_line(problem)
            _log.warning("%s could not be started: %s", worker.name, error)
        if worker.killing is not None:
            worker.killing.cancel()
        del self._running[worker.name]
        spoke = worker.heard_at is not None or not worker.speaks
        self._tell(self.book.ended(worker.name, status, self.logs.ended(worker.name, TAIL), error, spoke=spoke))

    async def _hear_out(self, worker: _AgentWorker) -> None:
        """Wait for the last messages of a worker whose process has ended: they go out before the news of its end."""
        if worker.speaks and worker.channel is None:
            await asyncio.sleep(0.05)  # its connection may be waiting to be accepted
        if worker.channel is not None:
            await asyncio.wait([worker.channel], timeout=_LAST_WORDS_S)

    # The workers' channel.

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        worker: _AgentWorker | None = None
        try:
            while line := await reader.readline():
                message = protocol.decode(line)
                if isinstance(message, Hello):
                    worker = self._running.get(message.worker)
                    if worker is None:
                        break
                    worker.writer, worker.channel = writer, task
                    writer.write(worker.generation)
                if worker is None or self._running.get(worker.name) is not worker:
                    break
                worker.heard_at = time.monotonic()
                if message is not None and not isinstance(message, Hello | Generation | Go | Taken):
                    self._hear(worker.name, message, json.loads(line))
        except (OSError, ValueError, TypeError, ProtocolError) as problem:  # ValueError: the line is too long
            _log.warning("channel of %s: %s", worker.name if worker else "a worker", problem)
        finally:
            if worker is not None and worker.writer is writer:
                worker.writer = None
            with contextlib.suppress(OSError):
                writer.close()

    def _hear(self, name: str, message: FromWorker, row: dict[str, Any]) -> None:
        if isinstance(message, Report):
            self.book.reported(name, row)
            return
        if isinstance(message, Failed):
            row["traceback"] = message.traceback[-MOST_TRACEBACK:]
        self.book.heard(name, message)
        if isinstance(message, Done | Left | Failed):
            self._tell(self.book.beat())  # the last progress, before the controller finishes with this worker
        self._tell(Heard(name, row))

    def _tell_again(self, name: str) -> None:
        answer = self.book.answer(name) if name in self.book else None
        if answer is not None:
            self._tell(answer)

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

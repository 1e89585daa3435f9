"""Agent workers are the worker processes of one node, started and ended by the controller's orders.

The agent calls `start`, `stop` and `say` with those orders. `WorkerProcesses` carries them out and tells what happens.
Every event is recorded in the `WorkerTable` and reported to the controller through `tell`. Nothing here waits for the
network.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from bftrainer.cluster.agent.compile_caches import add_caches, machine_kind
from bftrainer.cluster.agent.hardware import NodeHardware
from bftrainer.cluster.agent.log_tails import LogTails
from bftrainer.cluster.agent.worker_table import MOST_TRACEBACK, WorkerTable
from bftrainer.cluster.wire.messages import FromAgent, Heard, Prepare, RankStatus, Start
from bftrainer.elastic import protocol
from bftrainer.elastic.manager.processes import (
    ChannelFailed,
    ProcessEnded,
    ProcessNotStarted,
    ProcessStarted,
    WorkerEvent,
    WorkerProcesses,
    WorkerSaid,
    WorkerSilent,
    worker_environment,
)
from bftrainer.elastic.manager.worker_process import WorkerProcess
from bftrainer.elastic.protocol import Done, Failed, FromWorker, Hello, Left, Report, Taken
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes import start_up, variables
from bftrainer.processes.gpus import DEVICE_VARIABLES
from bftrainer.processes.launch import Command, Process
from bftrainer.processes.rank_places import RankPlace
from bftrainer.processes.warm import WarmLauncher
from bftrainer.util.text import one_line

if TYPE_CHECKING:
    from bftrainer.cluster.agent.own_starts import OwnStarts

TAIL = 4000
"""How many characters of a worker's last output are sent with the message that it has ended."""
_OF_RANKS = frozenset({protocol.LOCAL_RANK, protocol.LOCAL_WORLD})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def log_name(worker: str, rank: int) -> str:
    """Return the name of the output of one of a worker's processes: the worker's own name for the first."""
    return f"{worker}.{rank}" if rank else worker


def _unless_own(python: str) -> str:
    """Return an interpreter, or an empty text if it is the agent's own under any name, as python is for python3."""
    own = sys.executable
    is_own = os.path.realpath(python) == os.path.realpath(own) and Path(python).parent == Path(own).parent
    return "" if is_own else python


_log = logging.getLogger(__name__)


class AgentWorkers:
    """All workers of a node. Call its methods only in the thread of the running event loop.

    Workers connect to the socket `channel` and print to files in `folder`. The environment of a worker's process is
    `environment`, overridden by the variables of its rank and of its start order, overridden by `always`. `inherited`
    is the warm parent that this process has forked, if there is one. `own`: the rules of the agent's owner.
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
        own: OwnStarts | None = None,
    ) -> None:
        self._own_starts = own
        self.table = WorkerTable()
        self.logs = LogTails()
        self.processes = WorkerProcesses(channel, self._happened)
        self._folder = folder
        self._sockets = channel.parent
        self._environment = dict(environment)
        self._environment.pop(protocol.CHANNEL, None)
        self._always = always
        self._tell = tell
        self._preload = preload
        self._inherited = inherited
        self._hardware = NodeHardware()
        self._machine_kind = ""
        self._places: dict[str, tuple[RankPlace, ...]] = {}  # of the ranks of each worker
        self._warnings: dict[str, str] = {}  # for the users of workers that are being started
        self._programs = WarmLauncher(preload=())  # it also ends processes that programs have started: see `exec.py`
        self._scripts: dict[str, WarmLauncher] = {}

    async def __aenter__(self) -> AgentWorkers:
        await self.processes.open()
        self._scripts[sys.executable] = WarmLauncher(preload=self._preload, folder=self._sockets)
        return self

    def prepare(self, hardware: NodeHardware) -> None:
        """Get ready for workers on this node's hardware.

        The imports take longest, so a joining node starts them before it gets any work.
        """
        self._hardware = hardware
        self._machine_kind = machine_kind(hardware.gpus)
        threads = {} if self._inherited else hardware.threads(self._environment)  # the inherited parent has imported
        self._scripts[sys.executable].prepare(self._whole({}, threads), self._inherited)

    async def __aexit__(self, *_: object) -> None:
        self.processes.kill_all()
        await asyncio.gather(self._programs.close(), *(launcher.close() for launcher in self._scripts.values()))
        await self.processes.close()

    # Orders.

    def start(self, message: Start) -> None:
        """Start a worker. If the same order comes again, report its result again."""
        if message.worker in self.table:
            self._tell_again(message.worker)
            return
        self.table.begin(message.worker, message.trainer, message.speaks)
        # A program that does not speak has no ranks that we know: it may start them itself, as torchrun does.
        ranks = max(1, message.ranks) if message.speaks else 1
        places = self._places[message.worker] = self._hardware.places(ranks, self._environment)
        starting = (self._launch(message, rank, place) for rank, place in enumerate(places))
        self.processes.start(message.worker, *starting, speaks=message.speaks)

    def import_ahead(self, message: Prepare) -> None:
        """Import what a script imports that may be started here later. The start itself does not depend on it."""
        try:
            message = message if self._own_starts is None else self._own_starts.checked(message)
        except (BFTrainerError, ValidationError) as problem:  # its start would be refused, too
            _log.info("nothing is imported ahead: %s", one_line(problem))
            return
        place = self._hardware.places(max(1, message.ranks), self._environment)[0]
        start = Start("ahead", "", message.argv, message.env, message.cwd, ranks=message.ranks, preload=message.preload)
        start = replace(start, background=bool(self.processes.running))  # whoever trains here comes first
        try:
            self._launcher(message).import_ahead(self._command(start, place, None))
        except (InputError, UnicodeError) as problem:  # whoever starts the script is told
            _log.info("nothing is imported ahead: %s", one_line(problem))

    def stop(self, name: str, grace_s: float) -> None:
        """End a worker: at once, or at the latest after `grace_s` seconds, in which it may end by itself."""
        if name in self.processes:
            self.processes.stop(name, grace_s)
        else:
            self._tell_again(name)

    def say(self, name: str, message: Mapping[str, Any]) -> None:
        """Send a message to a worker. A worker that is not connected yet later gets the newest generation only."""
        self.processes.say(name, message)
        if name in self.processes:
            self.table.told(name, self.processes[name].generation)

    def forget(self, name: str) -> None:
        """Forget a worker whose end the controller has stored."""
        if self.table.forget(name):
            for rank in range(len(self._places.pop(name, ()))):
                self.logs.forget(log_name(name, rank))

    async def taken(self, within_s: float) -> None:
        """End all workers within `within_s` seconds, because the node is taken.

        Workers that are connected to the channel may save until then.
        """
        saving = set[asyncio.Task[int]]()
        for worker in self.processes.running:
            if within_s > 0 and worker.connected:
                self.processes.say(worker.name, protocol.as_json(Taken(within_s)))
                saving.update(asyncio.create_task(process.wait()) for process in worker.processes)
            else:
                self.processes.stop(worker.name)
        if saving:
            await asyncio.wait(saving, timeout=within_s)
        self.processes.kill_all()

    # Processes.

    async def _launch(self, message: Start, rank: int, place: RankPlace) -> Process:
        if not _NAME.fullmatch(message.worker):
            raise InputError(f"the name of a worker must match {_NAME.pattern}, but got {message.worker!r}")
        if self._own_starts is not None:
            message = self._own_starts.checked(message)
        name = log_name(message.worker, rank)
        log = self._folder / f"{name}.log"
        command = self._command(message, place, log)
        self.logs.follow(name, log, sent=rank == 0 or message.log_all_ranks)
        if message.program:
            return await self._programs.start(command)
        return await self._launcher(message).start(command)

    def _launcher(self, message: Start | Prepare) -> WarmLauncher:
        python = message.python or _unless_own(message.submitted_python) or sys.executable
        if python not in self._scripts:
            if shutil.which(python) is None:
                raise InputError(
                    f"cannot start {' '.join(message.argv)}: there is no interpreter {python} on this node that can be "
                    "run. Put its environment where all nodes see it, or choose another one with `submit --python` "
                    "(`--python agent`: that of the agents)"
                )
            self._scripts[python] = WarmLauncher(python, self._preload, folder=self._sockets)
        return self._scripts[python]

    def _command(self, message: Start, place: RankPlace, log: Path | None) -> Command:
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
        environment = self._whole(self._own(message, place), place.environment)
        if message.speaks:
            environment |= self.processes.channel_of(message.worker)
            environment[variables.ORDERED] = f"{start_up.now():.3f}"
        else:  # it may start ranks itself, as torchrun does, and only it knows their numbers
            environment = {name: value for name, value in environment.items() if name not in _OF_RANKS}
        add_caches(environment, self._machine_kind)
        if message.program:
            if shutil.which(Path(cwd, argv[0]) if os.sep in argv[0] else argv[0], path=environment.get("PATH")) is None:
                raise InputError(f"cannot start {' '.join(argv)}: there is no program {argv[0]}")
            argv = ("-m", "bftrainer.cluster.agent.exec", *argv)
        output = None if log is None else str(log)
        command = Command(argv, environment, cwd, output, background=message.background, cores=place.cores)
        return replace(command, preload=message.preload) if message.speaks else command

    def _own(self, message: Start, place: RankPlace) -> dict[str, str]:
        """Return the variables of a start order for one rank: devices that they name for all ranks are its own only.

        A variable that hides all GPUs is kept: the user wants the CPU.
        """
        own = dict(message.env)
        if message.ranks > 1:
            for name in DEVICE_VARIABLES:
                if name in place.environment and own.get(name, "").strip() not in ("", "-1"):
                    self._warnings[message.worker] = (
                        f"its variable {name}={own[name]} is not used: each of its {message.ranks} ranks on this node "
                        "sees the GPU that it was given"
                    )
                    del own[name]
        return own

    def _whole(self, own: Mapping[str, str], of_rank: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process: the node's, then that of its rank, its `own`, and what all get."""
        return worker_environment(self._environment, of_rank, own, self._always)

    # Events.

    def _happened(self, event: WorkerEvent) -> None:
        match event:
            case ProcessStarted(worker):
                places = zip(worker.processes, self._places[worker.name], strict=True)
                ranks = tuple(RankStatus(process.pid, place.device) for process, place in places)
                self._tell(self.table.started(worker.name, ranks, self._warnings.pop(worker.name, "")))
            case WorkerSaid(worker, message, line):
                self._hear(worker.name, message, line)
            case WorkerSilent(worker, silent_s):
                _log.warning("%s has been silent for %.1f s and is killed", worker.name, silent_s)
            case ChannelFailed(unnamed, problem):
                _log.warning("channel of %s: %s", unnamed.name if unnamed else "a worker", problem)
            case ProcessNotStarted(worker, None):
                self._ended(worker, -signal.SIGKILL)
            case ProcessNotStarted(worker, problem):
                error = one_line(problem)
                _log.warning("%s could not be started: %s", worker.name, error)
                self._ended(worker, -1, error)
            case ProcessEnded(worker, status):
                self._ended(worker, status)

    def _ended(self, worker: WorkerProcess, status: int, error: str = "") -> None:
        name = worker.name
        self._warnings.pop(name, None)
        tails = [self.logs.ended(log_name(name, rank), TAIL) for rank in range(len(worker.ranks))]
        tail = tails[worker.culprit_rank]
        self._tell(self.table.ended(name, status, tail, error, spoke=worker.spoke))

    def _hear(self, name: str, message: FromWorker, line: bytes) -> None:
        if isinstance(message, Hello):
            return
        row = json.loads(line)
        if isinstance(message, Report):
            self.table.reported(name, row)
            return
        if isinstance(message, Failed):
            row["traceback"] = message.traceback[-MOST_TRACEBACK:]
        self.table.heard(name, message)
        if isinstance(message, Done | Left | Failed):
            self._tell(self.table.beat())  # the last progress, before the controller finishes with this worker
        self._tell(Heard(name, row))

    def _tell_again(self, name: str) -> None:
        answer = self.table.answer(name) if name in self.table else None
        if answer is not None:
            self._tell(answer)

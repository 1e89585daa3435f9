"""The agent carries out the controller's orders on one node.

It joins with a secret, sends a heartbeat once a second, starts and ends workers (`workers.py`), and forwards their
messages and output. It reconnects when the controller was away; workers keep running meanwhile. When its node is taken,
the agent and its workers end at once, except that a worker that may hold the only copy of the training state gets a
moment to save it. Started by `bftrainer agent`, or by a pool as `python -m bftrainer.cluster.agent`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bftrainer.cluster.agent.call_back import CallBack, call_back_of
from bftrainer.cluster.agent.folder import print_to, private_folder
from bftrainer.cluster.agent.hardware import NodeHardware, find_hardware
from bftrainer.cluster.agent.link import ControllerLink
from bftrainer.cluster.agent.options import AgentOptions, ResolvedAgent, read_environment, resolve
from bftrainer.cluster.agent.signals import Signals, exit_soon
from bftrainer.cluster.agent.workers import AgentWorkers
from bftrainer.cluster.owners.folders import own_home
from bftrainer.cluster.wire.messages import (
    BEAT_S,
    Bye,
    Ended,
    Forget,
    FromAgent,
    FromController,
    Going,
    GpuUse,
    Heard,
    Join,
    Logged,
    Prepare,
    Say,
    Start,
    Stop,
    Welcome,
)
from bftrainer.elastic import protocol
from bftrainer.elastic.manager.processes import LOOPBACK
from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables
from bftrainer.processes.forker import fork_forker
from bftrainer.processes.gpu_use import GpuUseReader
from bftrainer.processes.warm import PRELOAD

if TYPE_CHECKING:
    from bftrainer.cluster.agent.own_starts import OwnStarts

LOOK_AT_LOGS_S = 0.2
READ_GPUS_S = 10.0
GOODBYE_S = 0.2
"""How long the agent waits for the network to send its last messages to the controller."""

_log = logging.getLogger(__name__)

Inherited = tuple[int, socket.socket]
"""The pid and socket of a warm parent that was forked from this process: see `forker.fork_forker`."""


class Agent:
    """The agent of one node. It serves from `run` until the controller or a signal tells it to leave.

    `dismissed` is called when it is told to leave. `gone` is called when the agent is no longer needed; `gone` may end
    this process.
    """

    def __init__(
        self,
        settings: ResolvedAgent,
        environment: Mapping[str, str],
        *,
        preload: tuple[str, ...] = PRELOAD,
        inherited: Inherited | None = None,
        dismissed: Callable[[], None] = lambda: None,
        gone: Callable[[], None] = lambda: None,
        call_back: CallBack | None = None,
    ) -> None:
        self.name = uuid.uuid4().hex
        self._settings = settings
        self._environment = environment
        self._preload = preload
        self._inherited = inherited
        self._dismissed = dismissed
        self._gone = gone
        self._link = ControllerLink(
            settings.url, settings.secret, self._joining, self._obey, settings.authority, call_back
        )
        self._leaving = asyncio.Event()
        self._reason = ""
        self._beat_s = BEAT_S
        self._workers: AgentWorkers
        self._hardware = NodeHardware()
        self._gpu_use: tuple[GpuUse, ...] = ()  # since the last heartbeat
        self.saving_s = 0.0
        """When this agent leaves, how long workers may take to save state that only they have."""

    def leave(self, reason: str) -> None:
        """End all workers, then this agent."""
        if not self._leaving.is_set():
            _log.info("leaving: %s", reason)
            self._reason = reason
            self._leaving.set()
            self._dismissed()

    async def run(self) -> None:
        """Serve until told to leave. Raises the errors of `ControllerLink.keep`, after everything has ended."""
        with private_folder() as private:
            self._workers = AgentWorkers(
                private / "channel",
                self._settings.folder or private,
                self._environment,
                self._given_to_all(),
                self._tell,
                preload=self._preload,
                inherited=self._inherited,
                own=self._own_starts(),
            )
            async with self._workers:
                self._hardware = await asyncio.to_thread(find_hardware, self._environment, self._settings.slots)
                self._workers.prepare(self._hardware)
                work = (self._link.keep(), self._keep_beating(), self._keep_sending_logs(), self._keep_reading_gpus())
                watch = self._workers.processes.keep_watch()
                tasks = [asyncio.create_task(each) for each in (*work, watch, self._leaving.wait())]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    failures = [task.exception() for task in tasks if task.done()]
                    if self._leaving.is_set():
                        await self._workers.taken(self.saving_s)
                    # Sent after saving: the controller then starts the trainer elsewhere, from the saved state.
                    self._link.send(Going(self._reason))
                    self._workers.processes.kill_all()
                    await self._link.flush(GOODBYE_S)
                    if self._leaving.is_set():
                        # The node is wanted elsewhere. Any remaining worker processes end with this process.
                        shutil.rmtree(private, ignore_errors=True)
                        self._gone()
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        for failure in failures:
            if failure is not None:
                raise failure

    def _own_starts(self) -> OwnStarts | None:
        """Return the rules of the owner of this agent; None if it has none."""
        owner, state_id = self._settings.owner, self._environment.get(variables.STATE_ID, "")
        if not owner:
            return None
        from bftrainer.cluster.agent.own_starts import OwnStarts  # what it imports is a third of an agent's start

        return OwnStarts(owner, own_home(), state_id)

    def _given_to_all(self) -> Mapping[str, str]:
        given = {variables.NODE: self._settings.node, protocol.HOST: self._settings.host}
        if self._settings.on_loopback:
            given |= LOOPBACK
        if self._settings.owner:
            given[variables.OWNER] = self._settings.owner  # warm parents keep torch's folders at the owner's home
        return given

    # Messages to the controller.

    def _tell(self, message: FromAgent) -> None:
        # When the node is taken, a worker's end is not reported: the controller would start it here again, or count it
        # as failed.
        failed = isinstance(message, Heard) and message.message.get("type") == "failed"
        if not (self._leaving.is_set() and (failed or isinstance(message, Ended))):
            if isinstance(message, Ended):
                self._send_logs()  # its last output first: whoever waits for a trainer's end reads its log then
            self._link.send(message)

    def _joining(self) -> Join:
        workers = self._workers.table.workers
        node, hardware = self._settings, self._hardware
        join = Join(node.node, node.host, self.name, workers, os.getpid(), knows_ranks=True)
        return replace(join, gpus=hardware.as_message(), slots=hardware.slots)

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            if self._link.welcome and not self._link.crowded:
                use, self._gpu_use = self._gpu_use, ()
                self._link.send(replace(self._workers.table.beat(), gpus=use))

    async def _keep_reading_gpus(self) -> None:
        """Read the use of the node's GPUs now and then; the next heartbeat has it."""
        reader = GpuUseReader(self._hardware.gpus)
        while self._hardware.gpus:
            await asyncio.sleep(READ_GPUS_S)
            readings = await asyncio.to_thread(reader.read)
            self._gpu_use = tuple(GpuUse(each.id, each.percent, each.memory_mb) for each in readings)
        await asyncio.Event().wait()  # a node without GPUs has nothing to read

    async def _keep_sending_logs(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AT_LOGS_S)
            self._workers.logs.cut()
            self._send_logs()

    def _send_logs(self, only: str | None = None) -> None:
        if self._link.welcome:
            for message in self._workers.logs.due(time.monotonic(), only):
                self._link.send(message)

    # Messages from the controller.

    def _obey(self, message: FromController) -> None:
        workers = self._workers
        if self._leaving.is_set():
            return
        match message:
            case Welcome():
                self._welcomed(message)
            case Start():
                workers.start(message)
            case Prepare():
                workers.import_ahead(message)
            case Stop(worker, grace_s):
                workers.stop(worker, grace_s)
            case Say(worker, what):
                workers.say(worker, what)
            case Forget(worker):
                workers.forget(worker)
            case Logged(worker, offset):
                workers.logs.logged(worker, offset)
                self._send_logs(worker)
            case Bye(reason):
                self.leave(f"dismissed: {reason}" if reason else "dismissed")

    def _welcomed(self, welcome: Welcome) -> None:
        _log.info("joined as %s", self._settings.node)
        self._beat_s = max(0.05, welcome.beat_s)
        self._workers.processes.silence_s = max(0.1, welcome.silence_s)
        self.saving_s = welcome.last_save_s
        self._workers.logs.connected(welcome.logged)
        for worker in self._workers.table.workers:
            answer = self._workers.table.answer(worker.worker)
            if isinstance(answer, Ended):  # a `Join` cannot say why a worker could not be started
                self._link.send(answer)


def run_agent(
    settings: ResolvedAgent,
    preload: tuple[str, ...] = PRELOAD,
    inherited: Inherited | None = None,
    call_back: CallBack | None = None,
) -> None:
    """Run the agent in this process until it is told to leave. Raises `BFTrainerError` if it cannot continue."""
    signals = Signals()
    logging.basicConfig(format=f"%(asctime)s {settings.node}: %(message)s", level=logging.WARNING)
    logging.getLogger("bftrainer").setLevel(logging.INFO)
    logging.getLogger("websockets").setLevel(logging.ERROR)  # it would log headers, one of which has the secret

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        agent = Agent(
            settings,
            os.environ,
            preload=preload,
            inherited=inherited,
            dismissed=lambda: exit_soon(agent.saving_s),
            gone=partial(os._exit, 0),
            call_back=call_back,
        )

        def leave(name: str) -> None:
            loop.call_soon_threadsafe(agent.leave, name)

        signals.ask(leave, lambda: agent.saving_s)
        await agent.run()

    asyncio.run(whole())


def main(argv: Sequence[str] | None = None, preload: tuple[str, ...] = PRELOAD) -> None:
    """Run an agent and exit.

    If this process has already imported the modules to preload, workers are forked from a copy of it.
    """
    status = 0
    call_back = call_back_of(os.environ)
    if path := os.environ.pop(variables.AGENT_LOG, ""):
        with suppress(OSError):  # its work does not depend on it
            print_to(Path(path))
    try:
        settings = _settings(argv)
    except BFTrainerError as problem:
        print(f"bftrainer: {problem}", file=sys.stderr)
        if call_back is not None:
            call_back.ended(problem)
        sys.exit(problem.exit_code)
    # No code around this call may catch the exception that ends a worker. Nothing may have been started before it.
    inherited = fork_forker(preload) if preload and preload[0] in sys.modules else None
    try:
        run_agent(settings, preload, inherited, call_back)
    except BFTrainerError as problem:
        print(f"bftrainer: {problem}", file=sys.stderr)
        if call_back is not None:
            call_back.ended(problem)
        status = problem.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is cleaned up, and unloading the imported modules can take long


def _settings(argv: Sequence[str] | None) -> ResolvedAgent:
    parser = argparse.ArgumentParser(prog="python -m bftrainer.cluster.agent", description="The agent of one node.")
    for name in ("url", "node", "host", "slots"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--secret-file", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--ca", type=Path)
    parser.add_argument("--environment-from-stdin", action="store_true")
    options = vars(parser.parse_args(argv))
    if options.pop("environment_from_stdin"):
        read_environment(sys.stdin, os.environ)
    return resolve(AgentOptions(**options), os.environ)

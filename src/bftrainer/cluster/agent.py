"""The agent of a node: does for the controller whatever is to be done there.

It joins by a secret, beats once a second, starts and ends workers (`agent_workers.py`), hands on what they say and
print, and reconnects when the controller was away; workers go on meanwhile. When its node is taken it goes at once, and
its workers with it; one that may be the only one with a training's state has a moment to save it. Run by
`bftrainer agent`, or by a pool as `python -m bftrainer.cluster.agent`.
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
from functools import partial
from pathlib import Path

from bftrainer.cluster import wire
from bftrainer.cluster.agent_folder import private_folder
from bftrainer.cluster.agent_link import Link
from bftrainer.cluster.agent_options import Options, Settings, read_environment, resolve
from bftrainer.cluster.agent_signals import Signals, exit_soon
from bftrainer.cluster.agent_workers import Workers
from bftrainer.cluster.wire import (
    Bye,
    Ended,
    Forget,
    FromAgent,
    FromController,
    Going,
    Heard,
    Join,
    Logged,
    Say,
    Start,
    Stop,
    Welcome,
)
from bftrainer.elastic import protocol
from bftrainer.elastic.forker import fork_forker
from bftrainer.elastic.warm import PRELOAD
from bftrainer.errors import BFTrainerError

LOOK_AT_LOGS_S = 0.2
GOODBYE_S = 0.2
"""How long the network may take to tell the controller that this agent goes."""

_log = logging.getLogger("bftrainer.cluster.agent")  # also when this module is the main program

Inherited = tuple[int, socket.socket]
"""A warm parent forked off this process: see `forker.fork_forker`."""


class Agent:
    """One node's agent, from `run` until somebody tells it to leave.

    `dismissed` is called when that happens, and `gone` when nobody needs it any more: it may end this process.
    """

    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str],
        *,
        preload: tuple[str, ...] = PRELOAD,
        inherited: Inherited | None = None,
        dismissed: Callable[[], None] = lambda: None,
        gone: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = uuid.uuid4().hex
        self._settings = settings
        self._environment = environment
        self._preload = preload
        self._inherited = inherited
        self._dismissed = dismissed
        self._gone = gone
        self._link = Link(settings.url, settings.secret, self._joining, self._obey, settings.authority)
        self._leaving = asyncio.Event()
        self._reason = ""
        self._beat_s = 1.0
        self._workers: Workers
        self.saving_s = 0.0
        """How long workers may take to save what only they have, when this agent leaves."""

    def leave(self, reason: str) -> None:
        """End all workers, and then this agent."""
        if not self._leaving.is_set():
            _log.info("leaving: %s", reason)
            self._reason = reason
            self._leaving.set()
            self._dismissed()

    async def run(self) -> None:
        """Serve until told to leave. Raises what `Link.keep` does, after everything has ended."""
        with private_folder() as private:
            self._workers = Workers(
                private / "channel",
                self._settings.folder or private,
                self._environment,
                self._given_to_all(),
                self._tell,
                preload=self._preload,
                inherited=self._inherited,
            )
            async with self._workers:
                work = (self._link.keep(), self._keep_beating(), self._keep_sending_logs(), self._workers.keep_watch())
                tasks = [asyncio.create_task(each) for each in (*work, self._leaving.wait())]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    failures = [task.exception() for task in tasks if task.done()]
                    if self._leaving.is_set():
                        await self._workers.taken(self.saving_s)
                    # After that: the controller then starts the trainer elsewhere, from what was saved.
                    self._link.send(Going(self._reason))
                    self._workers.kill_all()
                    await self._link.flush(GOODBYE_S)
                    if self._leaving.is_set():
                        # Somebody waits for the node. What is left of the workers ends with this process.
                        shutil.rmtree(private, ignore_errors=True)
                        self._gone()
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        for failure in failures:
            if failure is not None:
                raise failure

    def _given_to_all(self) -> Mapping[str, str]:
        given = {wire.NODE: self._settings.node, protocol.HOST: self._settings.host}
        if self._settings.on_loopback:
            given |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        return given

    # What goes out.

    def _tell(self, message: FromAgent) -> None:
        # When the node is taken, how a worker ends means nothing: it would be started here again, or count as failed.
        failed = isinstance(message, Heard) and message.message.get("type") == "failed"
        if not (self._leaving.is_set() and (failed or isinstance(message, Ended))):
            self._link.send(message)

    def _joining(self) -> Join:
        workers = self._workers.book.workers
        return Join(self._settings.node, self._settings.host, self.name, workers, os.getpid())

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            if self._link.welcome and not self._link.crowded:
                self._link.send(self._workers.book.beat())

    async def _keep_sending_logs(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AT_LOGS_S)
            self._workers.logs.cut()
            self._send_logs()

    def _send_logs(self, only: str | None = None) -> None:
        if self._link.welcome:
            for message in self._workers.logs.due(time.monotonic(), only):
                self._link.send(message)

    # What comes in.

    def _obey(self, message: FromController) -> None:
        workers = self._workers
        if self._leaving.is_set():
            return
        match message:
            case Welcome():
                self._welcomed(message)
            case Start():
                workers.start(message)
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
        self._workers.silence_s = max(0.1, welcome.silence_s)
        self.saving_s = welcome.last_save_s
        self._workers.logs.connected(welcome.logged)
        for worker in self._workers.book.workers:
            answer = self._workers.book.answer(worker.worker)
            if isinstance(answer, Ended):  # a `Join` has no room for why one could not be started
                self._link.send(answer)


def run_agent(settings: Settings, preload: tuple[str, ...] = PRELOAD, inherited: Inherited | None = None) -> None:
    """Be the agent of this process until it is told to leave; what goes wrong for good is a `BFTrainerError`."""
    signals = Signals()
    logging.basicConfig(format=f"%(asctime)s {settings.node}: %(message)s", level=logging.WARNING)
    logging.getLogger("bftrainer").setLevel(logging.INFO)
    logging.getLogger("websockets").setLevel(logging.ERROR)  # it would write down headers, and the secret is in one

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        agent = Agent(
            settings,
            os.environ,
            preload=preload,
            inherited=inherited,
            dismissed=lambda: exit_soon(agent.saving_s),
            gone=partial(os._exit, 0),
        )

        def leave(name: str) -> None:
            loop.call_soon_threadsafe(agent.leave, name)

        signals.ask(leave, lambda: agent.saving_s)
        await agent.run()

    asyncio.run(whole())


def main(argv: Sequence[str] | None = None, preload: tuple[str, ...] = PRELOAD) -> None:
    """Run an agent and exit. If this process has imported what is to be preloaded, workers are forked from its like."""
    status = 0
    try:
        settings = _settings(argv)
    except BFTrainerError as problem:
        print(f"bftrainer: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)
    # Nothing may be around this call that catches what ends a worker, and nothing may have been started before it.
    inherited = fork_forker(preload) if preload and preload[0] in sys.modules else None
    try:
        run_agent(settings, preload, inherited)
    except BFTrainerError as problem:
        print(f"bftrainer: {problem}", file=sys.stderr)
        status = problem.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is in order, and taking down what was imported can take long


def _settings(argv: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(prog="python -m bftrainer.cluster.agent", description="The agent of one node.")
    for name in ("url", "node", "host"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--secret-file", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--environment-from-stdin", action="store_true")
    options = vars(parser.parse_args(argv))
    if options.pop("environment_from_stdin"):
        read_environment(sys.stdin, os.environ)
    return resolve(Options(**options), os.environ)


if __name__ == "__main__":
    main()

"""The host process is the parent of the virtual nodes' agents, so that they outlive the controller.

`LocalPool` starts it (`python -m bftrainer.cluster.pools.local.host`), or finds the running one, and talks to it
through a `HostLink`: JSON lines over a Unix socket. The host forks agents from a parent that has imported torch
already. It ends, with all agents, on request or after a time without a controller.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables
from bftrainer.processes.launch import Command, Process, RunAs
from bftrainer.processes.warm import PRELOAD as WORKERS_PRELOAD
from bftrainer.processes.warm import WarmLauncher
from bftrainer.util.files import replace_file
from bftrainer.util.locks import take_lock
from bftrainer.util.text import last_line

PRELOAD = (
    # What the agents' warm parents need. They are forked from the agents: an import happens once, not on each node.
    *WORKERS_PRELOAD,
    # Modules that the agent imports. Not the agent itself: it runs as the main module, and would be loaded twice.
    *("bftrainer.cluster.agent.link", "bftrainer.cluster.agent.options", "bftrainer.cluster.agent.workers"),
)
END_S = 2.0
"""Seconds that agents have to end after SIGTERM."""
KILL_S = 10.0
"""Seconds that an owner's agent has to end after SIGKILL. That passes through a process of the owner's, which the owner
can stop: if the agent lives on, that process is killed, and all of the owner's agents with it."""
LOCK_S = 15.0
"""Seconds that a new host waits for an old one that is ending."""
LONGEST_LINE = 1 << 24
MOST_LOG = 1 << 22

_log = logging.getLogger(__name__)


def address_file(folder: Path) -> Path:
    """Return the file that holds the path of the socket.

    The socket may lie elsewhere, because its own path can have only about a hundred characters.
    """
    return folder / "host.json"


@dataclass(slots=True)
class _HostedAgent:
    run_as: RunAs | None
    running: asyncio.Task[None] | None = None
    process: Process | None = None
    signum: int = 0
    """Signal to send as soon as there is a process."""
    killing: asyncio.TimerHandle | None = None
    """Since the first SIGKILL, for an agent of another account."""


class _Host:
    """Holds the agents, and the connection to one controller."""

    def __init__(self, folder: Path, orphan_s: float, preload: tuple[str, ...]) -> None:
        self._folder = folder
        self._orphan_s = orphan_s
        self._preload = preload
        self._launchers: dict[RunAs | None, WarmLauncher] = {}
        """One per account: what one has forked for an owner stays in its memory, and is no other owner's to see."""
        self._agents: dict[str, _HostedAgent] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._orphaned: asyncio.TimerHandle | None = None
        self._over = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Serve until the host must end, then end the agents."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._over.set)
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        self._wait_for_controller()
        server = await asyncio.start_unix_server(self._serve, sock=listener, limit=LONGEST_LINE)
        await self._over.wait()
        server.close()
        _remove_address(self._folder)
        await self._end_all()
        await asyncio.gather(*(launcher.close(END_S) for launcher in self._launchers.values()))

    def _wait_for_controller(self) -> None:
        self._orphaned = asyncio.get_running_loop().call_later(self._orphan_s, self._over.set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._orphaned is not None:
            self._orphaned.cancel()
        self._writer = writer
        try:
            while self._writer is writer and (line := await reader.readline()):
                self._obey(json.loads(line))
        except (OSError, ValueError) as problem:
            _log.warning("invalid message from the controller: %s", problem)
        finally:
            if self._writer is writer:
                self._writer = None
                self._wait_for_controller()
            if not self._over.is_set():  # else the end of this process closes it, and so tells the controller
                writer.close()

    def _obey(self, message: Any) -> None:
        match message:
            case {"start": str(node), "argv": list(argv), "env": dict(env)}:
                if node not in self._agents:
                    run_as, home = _account(message.get("account"))
                    agent = self._agents[node] = _HostedAgent(run_as)
                    command = Command(tuple(argv), env, home or str(self._folder), None)
                    agent.running = asyncio.create_task(self._run(node, agent, command))
            case {"stop": str(node)}:
                self._signal(node, signal.SIGTERM)
            case {"kill": str(node)}:
                self._signal(node, signal.SIGKILL)
            case {"list": _}:
                pids = {node: agent.process.pid if agent.process else 0 for node, agent in self._agents.items()}
                self._tell(nodes=pids, pid=os.getpid())
            case {"close": _}:
                self._over.set()

    def _tell(self, **message: Any) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _signal(self, node: str, signum: int) -> None:
        agent = self._agents.get(node)
        if agent is not None and agent.run_as is not None and agent.killing is None and signum == signal.SIGKILL:
            agent.killing = asyncio.get_running_loop().call_later(KILL_S, self._end_warm_parents, agent.run_as)
        if agent is not None and agent.process is None:
            agent.signum = signum
        elif agent is not None and agent.process is not None:
            agent.process.signal(signum)

    def _end_warm_parents(self, run_as: RunAs) -> None:
        if run_as in self._launchers:
            _log.warning("an agent of the account %d does not end: all of the account's are killed", run_as.uid)
            self._launchers[run_as].kill_parents()

    async def _run(self, node: str, agent: _HostedAgent, command: Command) -> None:
        status, error, run_as = 127, "", agent.run_as
        try:
            if run_as not in self._launchers:
                self._launchers[run_as] = WarmLauncher(preload=self._preload, run_as=run_as)
            agent.process = await self._launchers[run_as].start(command)
            self._tell(started=node, pid=agent.process.pid)
            if agent.signum:
                agent.process.signal(agent.signum)
            status = await agent.process.wait()
        except (BFTrainerError, OSError) as problem:
            error = str(problem)
        finally:
            if agent.killing is not None:
                agent.killing.cancel()
            del self._agents[node]
            self._tell(ended=node, status=status, error=error)

    async def _end_all(self) -> None:
        for agent in self._agents.values():
            if agent.process is not None:
                agent.process.signal(signal.SIGTERM)
            elif agent.running is not None:
                agent.running.cancel()
        running = [agent.running for agent in self._agents.values() if agent.running is not None]
        if running:
            await asyncio.wait(running, timeout=END_S)
        for agent in self._agents.values():
            if agent.process is not None:
                agent.process.kill_group()
        if running:
            await asyncio.wait(running, timeout=END_S)


def _account(given: Any) -> tuple[RunAs | None, str]:
    """Return the account that an agent is to run under, and its home; none for this process's own."""
    match given:
        case {"uid": int(uid), "gid": int(gid), "groups": list(groups), "home": str(home)}:
            return RunAs(uid, gid, tuple(groups)), home
    return None, ""


def main() -> None:
    """Start a host and return when it listens; the host itself goes on in the background."""
    _, where, orphan_s, *preload = sys.argv
    folder = Path(where)
    try:
        lock = _lock(folder)
        _remove_address(folder)  # of a host that was killed
        listener = _listen(folder)
        log = _open_log(folder)
    except BlockingIOError:
        pid = (folder / "host.lock").read_text() or "unknown"
        sys.exit(f"the one of {folder} lives, but does not answer: end the process {pid}")
    except OSError as problem:
        sys.exit(str(problem))
    if os.fork():
        os._exit(0)
    os.setsid()
    os.pwrite(lock, f"{os.getpid():<10}".encode(), 0)
    os.umask(0o022)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, onto in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, onto)
    os.close(nothing)
    os.close(log)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    _serve_forever(folder, float(orphan_s), tuple(preload), listener)


def _serve_forever(folder: Path, orphan_s: float, preload: tuple[str, ...], listener: socket.socket) -> NoReturn:
    async def serve() -> None:
        await _Host(folder, orphan_s, preload).run(listener)
        os._exit(0)  # the process gives up the connection and the lock last

    asyncio.run(serve())
    raise AssertionError("the host has ended already")


def _lock(folder: Path) -> int:
    """Become the only host, or raise `BlockingIOError`.

    The descriptor stays open as long as this process or its fork.
    """
    os.umask(0o077)
    folder.mkdir(parents=True, exist_ok=True)
    lock = take_lock(folder / "host.lock", wait_s=LOCK_S)
    if lock is None:
        raise BlockingIOError
    return lock


def _listen(folder: Path) -> socket.socket:
    room = Path(tempfile.mkdtemp(prefix="bftrainer-host-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(room / "socket"))
    listener.listen()
    listener.setblocking(False)
    replace_file(address_file(folder), json.dumps({"socket": str(room / "socket")}))
    return listener


def _remove_address(folder: Path) -> None:
    path = _address(folder)
    address_file(folder).unlink(missing_ok=True)
    if path is not None and path.name == "socket" and path.parent.name.startswith("bftrainer-host-"):
        with suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()


def _address(folder: Path) -> Path | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Path(json.loads(address_file(folder).read_text())["socket"])
    return None


def _open_log(folder: Path) -> int:
    path = folder / "host.log"
    with suppress(FileNotFoundError):
        if path.stat().st_size > MOST_LOG:
            path.replace(folder / "host.log.1")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class HostLink:
    """The controller's end of the socket. `nodes` holds the agents that ran at first: process ids by node name."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.nodes: Mapping[str, int] = {}
        self.pid = 0

    @classmethod
    async def find(cls, folder: Path, patience_s: float = 10.0) -> HostLink | None:
        """Return a link to the running host, or None."""
        path = _address(folder)
        if path is None:
            return None
        try:
            link = cls(*await asyncio.open_unix_connection(path, limit=LONGEST_LINE))
        except OSError:
            return None
        try:
            async with asyncio.timeout(patience_s):
                link.send(list=True)
                while (message := await link.receive()) is not None:
                    if "nodes" in message:
                        link.nodes, link.pid = message["nodes"], message["pid"]
                        return link
        except TimeoutError:
            pass
        except BaseException:
            await link.close()
            raise
        await link.close()
        return None

    @classmethod
    async def make(cls, folder: Path, orphan_s: float, preload: tuple[str, ...] = PRELOAD) -> HostLink:
        """Return a link to the running host, or to a new one."""
        found = await cls.find(folder)
        if found is not None:
            return found
        argv = (sys.executable, "-P", "-m", "bftrainer.cluster.pools.local.host", str(folder), str(orphan_s), *preload)
        starter = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=variables.inherited(os.environ),
        )
        _, said = await starter.communicate()
        found = await cls.find(folder)
        if found is None:
            why = last_line(said.decode(errors="replace")) or "it does not answer"
            raise BFTrainerError(f"cannot start the host of virtual nodes: {why}; see {folder / 'host.log'}")
        return found

    def send(self, **message: Any) -> None:
        """Send a message. If the host is gone, `receive` tells."""
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message of the host; None if it is gone, or has another controller."""
        with suppress(OSError, ValueError):
            if line := await self._reader.readline():
                message: dict[str, Any] = json.loads(line)
                return message
        return None

    async def end_host(self, patience_s: float = 10.0) -> None:
        """Tell the host to end with all its agents, and wait for that."""
        self.send(close=True)
        try:
            async with asyncio.timeout(patience_s):
                while await self.receive() is not None:
                    pass
        except TimeoutError:
            with suppress(ProcessLookupError):  # while the host is connected, no other process can have its id
                os.kill(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Close the connection; the host goes on."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


if __name__ == "__main__":
    main()

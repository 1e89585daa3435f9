"""Commands for a job on virtual nodes: their syntax, the control socket, and the client.

`main.py` serves the socket; `python -m bftrainer.elastic.control FOLDER COMMAND…` is the client. A request is one line
of JSON, `{"command": ["add", "2"]}`, and so is the answer, `{"text": …}` or `{"error": …}`. The socket is in the job's
folder, and only the folder's owner may use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bftrainer.elastic.local.coordinator import Coordinator
from bftrainer.errors import BFTrainerError, InputError

SOCKET = "control.sock"
ELSEWHERE = "control.path"
"""File that holds the socket's path, if the folder's own path is too long for a socket."""
LONGEST_PATH = 100
"""Maximum length of a socket's path in bytes. The kernel's limit is 108 on Linux and 104 elsewhere."""
ANSWER_S = 120.0
"""Seconds that the client waits for an answer. The first node starts only after torch is imported."""

USAGE = "add [N], remove NODE|N, kill NODE|random, stop NODE, continue NODE, status, quit"


@dataclass(frozen=True, slots=True)
class Order:
    """One command: a verb with a node or a number of nodes."""

    verb: str
    node: str = ""
    count: int = 0


def parse(words: Sequence[str]) -> Order:
    """Return the order that the words of a command stand for."""
    match list(words):
        case ["add"]:
            return Order("add", count=1)
        case ["add", count]:
            return Order("add", count=_count(count))
        case ["remove", count] if count.lstrip("-").isdecimal():
            return Order("remove", count=_count(count))
        case [("remove" | "kill" | "stop" | "continue") as verb, node]:
            return Order(verb, node)
        case [("status" | "quit") as verb]:
            return Order(verb)
    raise InputError(f"a command must be one of {USAGE}, but got {' '.join(words) or 'nothing'!r}")


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise InputError(f"a number of nodes must be 1 or more, but got {word!r}")
    return int(word)


@dataclass(frozen=True, slots=True)
class StatusRow:
    """One node's row in the output of `status`. None means not known."""

    node: str
    state: str
    rank: int | None = None
    step: int | None = None
    loss: float | None = None


def render(rows: Sequence[StatusRow]) -> str:
    """Return the rows as a table."""
    training = sum(row.rank is not None for row in rows)
    cells = [("node", "state", "rank", "step", "loss")]
    cells += [
        (row.node, row.state, _cell(row.rank), _cell(row.step), "-" if row.loss is None else f"{row.loss:.4g}")
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left, right = str.ljust, str.rjust
    align = (left, left, right, right, right)
    lines = [
        "  ".join(put(text, width) for put, text, width in zip(align, line, widths, strict=True)) for line in cells
    ]
    nodes = f"{len(rows)} node{'s' if len(rows) != 1 else ''}"
    return "\n".join([f"{nodes}, {training} training", *lines])


def _cell(value: int | None) -> str:
    return "-" if value is None else str(value)


# Carrying out commands.


class CommandRunner:
    """Carries out orders on a job. `expect_end` is called for nodes that end because they were told to."""

    def __init__(self, job: Coordinator, expect_end: Callable[[str], None], *, torchrun: bool = False) -> None:
        self.quitting: asyncio.Task[None] | None = None
        self._job = job
        self._expect_end = expect_end
        self._torchrun = torchrun
        self._one_at_a_time = asyncio.Lock()
        self._adding: asyncio.Task[tuple[str, ...]] | None = None

    async def obey(self, order: Order) -> str:
        """Carry out an order and return a sentence about the result."""
        job = self._job
        match order:
            case Order("add", _, count):
                return f"{', '.join(await self._add(count))} added"
            case Order("remove", node, count):
                leavers = [node] if node else self._youngest(count)
                for leaver in leavers:
                    self._remove(leaver)
                return f"{', '.join(leavers)} must leave"
            case Order("status"):
                return render([self._row(node) for node in job.nodes])
            case Order("quit"):
                self.quit()
                return "all nodes must leave"
            case Order("kill", "random") if job.nodes:
                return self._signal("kill", random.choice(job.nodes))  # noqa: S311 - nothing secret
        return self._signal(order.verb, order.node)

    def quit(self) -> bool:
        """Make all nodes leave at a step boundary. Return False if that was requested before."""
        if self.quitting is not None:
            return False
        self.quitting = asyncio.create_task(self._end())
        return True

    async def _add(self, count: int) -> tuple[str, ...]:
        async with self._one_at_a_time:  # the limit is checked before the first node starts
            if self.quitting is not None:
                raise InputError("the job is ending")
            self._adding = asyncio.create_task(self._job.add(count))
            try:
                return await self._adding
            except asyncio.CancelledError:
                self._adding.cancel()
                if self.quitting is None:
                    raise
                raise InputError("the job is ending") from None

    def _row(self, node: str) -> StatusRow:
        job, report = self._job, self._job.report(node)
        rank = job.members.index(node) if node in job.members else None
        if job.roster.is_leaving(node):
            state = "leaving"
        elif rank is not None:
            state = "training"
        elif self._torchrun:
            state = "running"  # the node's agent knows more, but tells only other agents
        else:
            state = "ready" if job.roster.is_ready(node) else "starting"
        if report is None:
            return StatusRow(node, state, rank)
        return StatusRow(node, state, rank, report.step, report.metrics.get("loss"))

    def _signal(self, verb: str, node: str) -> str:
        signum = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}[verb]
        self._job.signal(node, signum)
        return f"{node} got {signum.name}"

    def _youngest(self, count: int) -> list[str]:
        staying = [node for node in self._job.nodes if not self._job.roster.is_leaving(node)]
        if count > len(staying):
            raise InputError(f"at most {len(staying)} nodes can leave, but got {count}")
        return staying[::-1][:count]

    def _remove(self, node: str) -> None:
        job = self._job
        if job.roster.is_leaving(node):
            raise InputError(f"{node} is leaving already")
        pid = job.pid(node)
        self._expect_end(node)
        if not self._torchrun:
            job.remove(node)
            return
        # A torchrun agent knows no step boundaries. It forwards the signal to its worker, which may save its state.
        job.roster.remove(node)
        job.signal(node, signal.SIGTERM)

        def end() -> None:
            if node in job.nodes and job.pid(node) == pid:
                job.signal(node, signal.SIGKILL)

        asyncio.get_running_loop().call_later(job.settings.grace_s, end)

    async def _end(self) -> None:
        job = self._job
        if self._adding is not None:
            self._adding.cancel()
        staying = [node for node in job.nodes if not job.roster.is_leaving(node)]
        for node in staying:
            if self._torchrun:
                self._remove(node)
            else:
                self._expect_end(node)
        with contextlib.suppress(TimeoutError):
            if self._torchrun:
                await job.until(lambda: not job.nodes, job.settings.grace_s + 5.0)
            # All leave in one generation: each leaver then knows that no node stays, and rank 0 saves the state.
            await job.stop()
            return
        for node in job.nodes:
            job.signal(node, signal.SIGKILL)
        await job.stop()


# Server, in the job.


@contextlib.asynccontextmanager
async def serving(folder: Path, obey: Callable[[Order], Awaitable[str]]) -> AsyncIterator[Path]:
    """Accept commands for the job in a folder, and yield the path of the socket.

    `obey` returns the answer to a command or raises a `BFTrainerError`.
    """
    path, aside = folder / SOCKET, None
    if _listens(folder):
        raise InputError(f"a job already runs in {folder}: choose another folder, or end the job with `quit`")
    if len(os.fsencode(path.absolute())) > LONGEST_PATH:
        aside = Path(tempfile.mkdtemp(prefix="bft-"))
        path = aside / SOCKET
        (folder / ELSEWHERE).write_text(str(path))
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)  # before the socket listens
    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        try:
            while line := await reader.readline():
                writer.write(json.dumps(await _answer(line, obey)).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            pass  # the client disconnected, or its line is too long
        finally:
            talks.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(talk, sock=listener)
    try:
        yield path
    finally:
        server.close()
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
        path.unlink(missing_ok=True)
        if aside is not None:
            (folder / ELSEWHERE).unlink(missing_ok=True)
            shutil.rmtree(aside, ignore_errors=True)


async def _answer(line: bytes, obey: Callable[[Order], Awaitable[str]]) -> dict[str, str]:
    try:
        words = json.loads(line)["command"]
        if not isinstance(words, list):
            raise TypeError("`command` is not a list of words")
    except (ValueError, KeyError, TypeError) as problem:
        return {"error": f'a request must be {{"command": [WORD, …]}}, but got {line[:200]!r}: {problem}'}
    try:
        return {"text": await obey(parse([str(word) for word in words]))}
    except BFTrainerError as problem:
        return {"error": str(problem)}


def _listens(folder: Path) -> bool:
    try:
        _connect(folder).close()
    except BFTrainerError:
        return False
    return True


# Client.


def ask(folder: Path, words: Sequence[str], timeout_s: float = ANSWER_S) -> str:
    """Send a command to the job in a folder and return the answer."""
    parse(words)
    with _connect(folder) as channel, channel.makefile("rwb") as stream:
        channel.settimeout(timeout_s)
        try:
            stream.write(json.dumps({"command": list(words)}).encode() + b"\n")
            stream.flush()
            line = stream.readline()
        except TimeoutError:
            raise BFTrainerError(f"the job in {folder} has not answered within {timeout_s:g} s") from None
        except OSError as problem:
            raise BFTrainerError(f"the job in {folder} has ended: {problem}") from None
    if not line:
        raise BFTrainerError(f"the job in {folder} has ended")
    answer = json.loads(line)
    if "error" in answer:
        raise InputError(answer["error"])
    return str(answer["text"])


def _connect(folder: Path) -> socket.socket:
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}; give the one that bftrainer.elastic.run was started with or printed"
        )
    path = folder / SOCKET
    if (folder / ELSEWHERE).is_file():
        path = Path((folder / ELSEWHERE).read_text())
    elif len(os.fsencode(path)) > LONGEST_PATH:
        path = Path(os.path.relpath(path))
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.connect(str(path))
    except OSError:  # no such file, no listener, or no valid path for a socket
        channel.close()
        raise InputError(f"no job listens in {folder}: it has ended, or it runs in another folder") from None
    return channel


def main(argv: Sequence[str] | None = None) -> int:
    """Run the client and return the exit status."""
    folder, *words = list(sys.argv[1:] if argv is None else argv) or ["-h"]
    if folder in ("-h", "--help"):
        print(f"usage: python -m bftrainer.elastic.control FOLDER COMMAND…\ncommands: {USAGE}")
        return 0
    try:
        print(ask(Path(folder), words))
    except BFTrainerError as problem:
        print(f"bftrainer: {problem}", file=sys.stderr)
        return problem.exit_code
    return 0

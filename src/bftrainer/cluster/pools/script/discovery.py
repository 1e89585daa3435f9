"""Node discovery runs a user's executable, with limits, and reads the names that it prints.

The `script` pool calls `ask`. The format is that of Elastic Horovod's host discovery: one `name` or `name:slots` per
line. Every problem is a `DiscoveryError` that says what is wrong.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from bftrainer.cluster.pools.keeper import NODE_NAME
from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables
from bftrainer.processes.launch import dying_with

MOST_LINES = 100_000
MOST_BYTES = 1 << 24
_MOST_ERRORS = 4000
_LINE = re.compile(rf"({NODE_NAME.pattern})(?::([0-9]{{1,9}}))?")


class DiscoveryError(BFTrainerError):
    """The executable could not be run, or its output is no list of nodes."""


async def ask(argv: Sequence[str], timeout_s: float) -> tuple[str, ...]:
    """Return the nodes that the executable prints, in order."""
    return read_nodes(await run(argv, timeout_s))


async def run(argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> bytes:
    """Return the output of a program. It and its children are gone when this returns or raises."""
    if shutil.which(argv[0]) is None:
        raise DiscoveryError(f"there is no program {argv[0]}")
    async with _Taken(MOST_BYTES, whole=True) as printed, _Taken(_MOST_ERRORS, whole=False) as said:
        try:
            process = await asyncio.create_subprocess_exec(
                *dying_with(os.getpid(), argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=printed.descriptor,
                stderr=said.descriptor,
                start_new_session=True,
                env=variables.inherited(os.environ) if env is None else env,
            )
        except (OSError, ValueError) as problem:
            raise DiscoveryError(f"cannot run {argv[0]}: {problem}") from None
        errors = asyncio.create_task(said.read())
        try:
            async with asyncio.timeout(timeout_s):
                await printed.read()
                status = await process.wait()
                if status != 0:
                    await errors
        except BaseException as failure:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            if isinstance(failure, TimeoutError):
                raise DiscoveryError(f"it did not end within {timeout_s:g} s") from None
            raise
        finally:
            errors.cancel()
            await asyncio.wait((errors,))
    if status != 0:
        lines = [line.strip() for line in said.kept.decode(errors="replace").splitlines() if line.strip()]
        how = f"it failed with exit status {status}" if status > 0 else f"signal {-status} ended it"
        raise DiscoveryError(f"{how}: {lines[-1][:200] if lines else 'it said nothing on stderr'}")
    return bytes(printed.kept)


class _Taken:
    """A pipe for the output of a program; it keeps only the first `most` bytes."""

    def __init__(self, most: int, whole: bool) -> None:
        self.kept = bytearray()
        self.descriptor = -1
        self._most = most
        self._whole = whole
        self._reader = asyncio.StreamReader()
        self._transport: asyncio.ReadTransport | None = None

    async def __aenter__(self) -> _Taken:
        reading, self.descriptor = os.pipe()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), os.fdopen(reading, "rb", 0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        # Closed here and not at the end of the output: a process that escaped may hold the other end for ever.
        self._let_go()
        if self._transport is not None:
            self._transport.close()
            await asyncio.sleep(0)  # the transport closes the descriptor in a callback

    def _let_go(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    async def read(self) -> None:
        """Read until the output ends. With `whole`, more than `most` bytes are an error."""
        self._let_go()
        while block := await self._reader.read(1 << 16):
            room = self._most - len(self.kept)
            if len(block) > room and self._whole:
                raise DiscoveryError(f"it prints more than {self._most >> 20} MiB")
            self.kept += block[:room]


def read_nodes(output: bytes) -> tuple[str, ...]:
    """Return the nodes in the output of a host discovery script.

    Nodes without a slot are left out; one bad line makes the whole output invalid.
    """
    try:
        lines = output.decode().split("\n")
    except UnicodeDecodeError:
        raise DiscoveryError("what it prints is not text") from None
    if len(lines) > MOST_LINES:
        raise DiscoveryError(f"it prints more than {MOST_LINES} lines")
    nodes: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            raise DiscoveryError(f"line {number} must be NAME or NAME:SLOTS, but got {text[:60]!r}")
        if found[2] is None or int(found[2]) >= 1:
            nodes[found[1]] = None
    return tuple(nodes)

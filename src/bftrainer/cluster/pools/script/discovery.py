"""Node discovery runs a user's executable, with limits, and reads the names that it prints.

The `script` pool calls `ask`. The format is that of Elastic Horovod's host discovery: one `name` or `name:slots` per
line. The slots of a node are its default number of ranks. Every problem is a `DiscoveryError` that says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bftrainer.cluster.pools.keeper import NODE_NAME
from bftrainer.elastic.defaults import MOST_RANKS
from bftrainer.errors import BFTrainerError
from bftrainer.processes.run import CommandError, run_async

MOST_LINES = 100_000
_LINE = re.compile(rf"({NODE_NAME.pattern})(?::([0-9]{{1,9}}))?")


class DiscoveryError(BFTrainerError):
    """The executable could not be run, or its output is no list of nodes."""


async def ask(argv: Sequence[str], timeout_s: float) -> dict[str, int]:
    """Return the nodes that the executable prints, in order, with their slots (see `read_nodes`)."""
    return read_nodes(await run(argv, timeout_s))


async def run(
    argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None, *, stdin: bytes = b""
) -> bytes:
    """Return the output of a program, which is killed if it does not end in time."""
    try:
        result = await run_async(argv, timeout_s, env=env, stdin=stdin)
    except CommandError as problem:
        raise DiscoveryError(str(problem)) from None
    if result.status != 0:
        lines = result.complaints
        raise DiscoveryError(f"{result.failure}: {lines[-1] if lines else 'it printed nothing on stderr'}")
    return result.out


def read_nodes(output: bytes) -> dict[str, int]:
    """Return the nodes in the output of a host discovery script, with their slots; 0: none were printed.

    Nodes printed with 0 slots are left out; one bad line makes the whole output invalid.
    """
    try:
        lines = output.decode().split("\n")
    except UnicodeDecodeError:
        raise DiscoveryError("what it prints is not text") from None
    if len(lines) > MOST_LINES:
        raise DiscoveryError(f"it prints more than {MOST_LINES} lines")
    nodes: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise DiscoveryError(f"line {number} must be NAME or NAME:SLOTS, but got {text[:60]!r}")
        slots = int(match[2] or 0)
        if slots > MOST_RANKS:
            raise DiscoveryError(f"line {number}: SLOTS must be a whole number from 1 to {MOST_RANKS}, but got {slots}")
        if match[2] is None or slots >= 1:
            nodes[match[1]] = slots
    return nodes

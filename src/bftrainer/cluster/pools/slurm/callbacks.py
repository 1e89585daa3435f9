"""Failed call backs of pilots: which nodes could not reach the controller, why, and when to try again.

A pilot that cannot reach the controller writes its reason to a file (`agent/call_back.py`). In each round the pool has
the files read and reported (`take`), and asks `CallBacks` where it may submit pilots. A node that failed gets no
pilot for `PAUSE_S`. If several nodes fail in the same way and none is connected, no node gets one for that time, and
then one node is tried. Of a pilot that ended before its agent could say anything, such as one without its Python, the
last line of its output is reported. `CallBacks` has no clock: the pool passes the time in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from bftrainer.cluster.pools.base import PoolHost
from bftrainer.cluster.pools.keeper import NODE_NAME
from bftrainer.cluster.pools.slurm.read import Pilot
from bftrainer.processes import variables
from bftrainer.util.text import last_line, natural, one_line

FOLDER = "call-backs"
PAUSE_S = 300.0
"""Seconds without a pilot on a node whose pilot could not reach the controller."""
SEVERAL = 2
"""If this many nodes fail in the same way, the cause is not the node."""
STORED = "slurm.call_back"
"""Key of the present problem in the pool's memory, for the doctor."""

_DIED = "died"
"""Kind of a failure that the pilot did not report itself. The pool's own back-off is enough for it."""
_JOINED = b": joined as "
"""What an agent writes to its output when the controller has accepted it."""
_MOST_BYTES = 10_000
_ADVICE: Mapping[str, str] = {
    "route": "set server.host to an address of this machine that the nodes can reach",
    "refused": "set server.host to an address of this machine that the nodes can reach, and open its port to them",
    "timeout": "open the controller's port to the nodes in the firewall (server.port), or set server.host to another "
    "address",
    "name": "set api.name or server.host to a name or an address that the nodes know",
    "tls": "compare the clocks of the nodes with this machine's; with a certificate of your own, see api.authority",
    "secret": "another controller may listen there: see server.host and server.port",
}
_OTHER_ADVICE = "see the NODE.log of one of them in the folder slurm of the state folder"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A pilot's own words on why it cannot reach the controller."""

    url: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Failure:
    call: FailedCall
    at: float

    def pauses(self, now: float) -> bool:
        """Return whether the node must not get a pilot."""
        return self.call.kind != _DIED and now < self.at + PAUSE_S


class CallBacks:
    """The nodes whose pilots could not reach the controller."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}
        self._connected = False
        """Whether a node was connected in the last round."""
        self._connected_at = -math.inf
        self._closed = False
        """Whether no node seems to reach the controller."""
        self._ended: frozenset[int] | None = None
        """Pilots that had ended by the last round."""
        self._joined: frozenset[int] = frozenset()
        """Pilots whose agents were connected at some time."""
        self._stored: str | None = None

    def failed(self, node: str, call: FailedCall, now: float) -> None:
        """Record that the pilot of a node could not reach the controller."""
        self._failures[node] = _Failure(call, now)
        alike = [other for other in self._failures.values() if other.call.kind == call.kind]
        if len(alike) >= SEVERAL and call.kind != _DIED and now - self._connected_at >= PAUSE_S:
            self._closed = True

    def update(self, connected: Collection[str], now: float) -> None:
        """Record which nodes are connected. If none seemed to reach the controller, all may be tried again."""
        self._connected = bool(connected)
        if connected:
            self._connected_at = now
            if self._closed:
                self.forget()
        over = {node for node, failure in self._failures.items() if now >= failure.at + 2 * PAUSE_S}
        for node in self._failures.keys() & (over.union(connected) if not self._closed else set(connected)):
            del self._failures[node]

    def forget(self) -> None:
        """Forget all failures, because their cause may be over."""
        self._failures.clear()
        self._closed = False

    def held(self, now: float) -> frozenset[str]:
        """Return the nodes that must not get a pilot now."""
        return frozenset(node for node, failure in self._failures.items() if failure.pauses(now))

    def room(self, room: int, pilots: int, now: float) -> int:
        """Return how many pilots may be submitted now, out of `room`, while there are this many `pilots`."""
        if not self._closed:
            return room
        return 0 if pilots or self.pausing(now) else min(room, 1)

    def pausing(self, now: float) -> bool:
        """Return whether no node seems to reach the controller and none is to be tried now: waiting pilots must go."""
        return self._closed and any(failure.pauses(now) for failure in self._failures.values())

    @property
    def warning(self) -> str:
        """One sentence on the last failure and all nodes that failed in this way; empty if there is none."""
        if not self._failures:
            return ""
        last = max(self._failures.values(), key=lambda failure: failure.at).call
        nodes = [node for node, failure in self._failures.items() if failure.call.kind == last.kind]
        nodes.sort(key=natural)
        named = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more nodes" if len(nodes) > 3 else "")
        if last.kind == _DIED:
            return f"pilots on {named} ended before they reached the controller: {last.reason}; {_OTHER_ADVICE}"
        next_try = "one node is tried again every" if self._closed else "a node is tried again after"
        return (
            f"pilots cannot reach the controller at {last.url} from {named}: {last.reason}; "
            f"{_ADVICE.get(last.kind, _OTHER_ADVICE)} ({next_try} {PAUSE_S / 60:.0f} min, all after `bftrainer resume`)"
        )

    @property
    def problem(self) -> str:
        """The same sentence if no node is connected; empty if the pool works with others."""
        return "" if self._connected else self.warning

    def news(self, pilots: Collection[Pilot], connected: Collection[str]) -> tuple[bool, list[Pilot]]:
        """Return whether pilots may have called back since the last round, and those that failed and never joined."""
        ended = {pilot.job: pilot for pilot in pilots if pilot.state == "ended"}
        joined = (pilot.job for pilot in pilots if pilot.state == "running" and pilot.node in connected)
        self._joined = self._joined.intersection(pilot.job for pilot in pilots).union(joined)
        before = ended.keys() if self._ended is None else self._ended
        fresh = [pilot for job, pilot in ended.items() if job not in before]
        silent = any(pilot.state in ("running", "ending") and pilot.node not in connected for pilot in pilots)
        self._ended = frozenset(ended)
        return silent or bool(fresh), [pilot for pilot in fresh if self._died(pilot)]

    def _died(self, pilot: Pilot) -> bool:
        return pilot.how == "FAILED" and pilot.job not in self._joined and pilot.node not in self._failures

    def store(self, host: PoolHost) -> None:
        """Store the present sentence, if it is another one, for the doctor."""
        if self.warning != self._stored:
            self._stored = self.warning
            host.remember(STORED, self.warning)


def prepare_folder(folder: Path) -> None:
    """Make the folder for call backs, without those that were meant for an earlier controller."""
    (folder / FOLDER).mkdir(mode=0o700, exist_ok=True)
    read_call_backs(folder / FOLDER, "")


async def take(calls: CallBacks, folder: Path, host: PoolHost, pilots: Collection[Pilot]) -> None:
    """Read what pilots said since the last round, and report it."""
    calls.update(host.nodes, time.monotonic())
    look, died = calls.news(pilots, host.nodes)
    if look:
        url = host.agent_environment.get(variables.URL, "")
        said = await asyncio.to_thread(read_call_backs, folder / FOLDER, url)
        last = await asyncio.to_thread(
            read_last_lines, folder, [pilot.node for pilot in died if pilot.node not in said]
        )
        for node, call in {**{node: FailedCall(url, _DIED, line) for node, line in last.items()}, **said}.items():
            if node not in host.nodes:  # else it was reached in the meantime
                calls.failed(node, call, time.monotonic())
                host.note("call_back_failed", node=node, reason=call.reason, url=call.url)
                _log.warning("the pilot on %s did not reach the controller at %s: %s", node, call.url, call.reason)
    calls.store(host)


def read_call_backs(folder: Path, url: str) -> dict[str, FailedCall]:
    """Return the call backs in a folder by node, and remove them. Those for other URLs are dropped.

    It waits for the file system: call it in a thread.
    """
    found: dict[str, FailedCall] = {}
    with contextlib.suppress(OSError):
        # A change of our own makes an NFS client ask the server which files there are now.
        fresh = folder / f".{secrets.token_hex(4)}"
        fresh.touch()
        fresh.unlink()
        for entry in os.scandir(folder):
            if NODE_NAME.fullmatch(entry.name) and (call := _read(Path(entry.path))) is not None and call.url == url:
                found[entry.name] = call
    return found


def read_last_lines(folder: Path, nodes: Collection[str]) -> dict[str, str]:
    """Return the last line in the logs of these nodes whose agent did not join. It waits for the file system."""
    lines: dict[str, str] = {}
    for node in nodes:
        with contextlib.suppress(OSError), (folder / f"{node}.log").open("rb") as file:
            output = file.read(_MOST_BYTES)
            if _JOINED not in output:
                lines[node] = one_line(last_line(output.decode(errors="replace")))[:300] or "it printed nothing"
    return lines


def _read(path: Path) -> FailedCall | None:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
        path.unlink()
        fields = json.loads(content)
        url, kind, reason = (one_line(fields[name])[:500] for name in ("url", "kind", "reason"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return FailedCall(url, kind, reason)

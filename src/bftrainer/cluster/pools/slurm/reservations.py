"""Reservations tell the `slurm` pool which nodes administrators want, and from when on.

Slurm refuses a reservation of nodes whose jobs end after its beginning, unless it is made with `IGNORE_JOBS`. Then jobs
run on into it. Pilots do not: the pool asks for reservations once a minute, and pilots leave reserved nodes before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bftrainer.cluster.pools.slurm.read import SlurmNode
from bftrainer.core.hostlist import expand

ASK_EVERY_S = 60.0
_NONE = "No reservations in the system"


@dataclass(frozen=True, slots=True)
class NodeReservation:
    """Nodes that are reserved, and the time, in Unix seconds."""

    nodes: frozenset[str]
    begin: float
    end: float
    name: str = ""


def read_reservations(text: str) -> tuple[NodeReservation, ...]:
    """Parse the output of `scontrol show reservation -o` with times in Unix seconds."""
    found = []
    for line in text.splitlines():
        keys = dict(word.partition("=")[::2] for word in line.split())
        if "ReservationName" not in keys:
            if line.strip() and _NONE not in line:
                raise ValueError(f"no reservation in {line[:80]!r}")
            continue
        names = keys.get("Nodes", "")
        nodes = frozenset(expand(names)) if names not in ("", "(null)") else frozenset()
        if nodes:  # else it reserves licences or burst buffers
            begin, end = float(keys.get("StartTime", "")), float(keys.get("EndTime", ""))
            found.append(NodeReservation(nodes, begin, end, keys["ReservationName"]))
    return tuple(found)


class ReservationWatch:
    """Remembers reservations between two questions."""

    def __init__(self, notice_s: float, clock: Callable[[], float] = time.time) -> None:
        """`notice_s`: how long before a reservation its nodes are left."""
        self._notice_s = notice_s
        self._clock = clock
        self._known: tuple[NodeReservation, ...] = ()
        self._asked_at = float("-inf")

    def ask_now(self) -> bool:
        """Return whether Slurm must be asked now; it then counts as asked."""
        now = self._clock()
        if 0 <= now - self._asked_at < ASK_EVERY_S:
            return False
        self._asked_at = now
        return True

    def learned(self, found: tuple[NodeReservation, ...]) -> None:
        """Take over the answer."""
        self._known = found

    def by_name(self) -> Mapping[str, frozenset[str]]:
        """Return the nodes of each reservation."""
        return {reservation.name: reservation.nodes for reservation in self._known}

    def marked(self, nodes: dict[str, SlurmNode]) -> dict[str, SlurmNode]:
        """Return the nodes, with the state MAINT added to those that must be left now."""
        now = self._clock()
        due = [one.nodes for one in self._known if one.begin - self._notice_s <= now < one.end]
        if not due:
            return nodes
        wanted = frozenset().union(*due)
        return {
            name: replace(node, words=(*node.words, "MAINT")) if name in wanted else node
            for name, node in nodes.items()
        }

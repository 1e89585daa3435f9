"""`FailingPilots` notices owners whose pilots end before their agents join, such as by a Python that they cannot run.

The controller cannot read what such a pilot printed: it is in a file of the owner. So it says where, and leaves the
owner's pilots alone for a while; the pause grows with every further failure. Other owners do not suffer from it. It has
no clock: times are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from bftrainer.cluster.pools.slurm.read import Pilot
from bftrainer.util.backoff import Backoff

SEVERAL = 3
"""If this many pilots of an owner end in this way, with no agent that joined in between, their cause is the same."""
PAUSES = Backoff(30.0, 600.0)
STORED = "slurm.failing_pilots"
"""Key of the present sentence in the pool's memory, for the doctor."""


@dataclass(slots=True)
class _Row:
    """The failures of one owner since an agent of theirs joined last."""

    failures: int = 0
    nodes: set[str] = field(default_factory=set)
    pauses: int = 0
    until: float = -math.inf
    """The end of the pause."""
    sentence: str = ""


class FailingPilots:
    """The owners whose pilots end before their agents join."""

    def __init__(self, log_of: Callable[[str, str], str]) -> None:
        """`log_of` says in which file the output of an owner's pilot on a node is."""
        self._log_of = log_of
        self._rows: dict[str, _Row] = {}
        self._joined: frozenset[int] = frozenset()
        """Pilots of the last list whose agents were connected at some time."""
        self._ended: frozenset[int] | None = None
        """Pilots that had ended by the last list; None: there was none, so it is not known whether they had joined."""

    def see(self, pilots: Collection[Pilot], owners: Mapping[str, str], here: Collection[str], now: float) -> list[str]:
        """Take a list of pilots. `owners` has the owners of the nodes in `here`, whose agents are connected.

        Returns the owners whose pilots are paused from now on.
        """
        joined = {
            pilot.job: pilot.owner
            for pilot in pilots
            if pilot.state == "running" and pilot.node in here and owners.get(pilot.node) == pilot.owner
        }
        for job, owner in joined.items():
            if job not in self._joined:
                self._rows.pop(owner, None)
        ended = {pilot.job: pilot for pilot in pilots if pilot.state == "ended"}
        fresh = [pilot for job, pilot in ended.items() if self._ended is not None and job not in self._ended]
        failed = [pilot for pilot in fresh if pilot.how == "FAILED" and pilot.job not in self._joined]
        connected = frozenset(joined.values())
        paused = [pilot.owner for pilot in failed if self._failed(pilot, now, pilot.owner in connected)]
        listed = {pilot.job for pilot in pilots}
        self._joined, self._ended = (self._joined & listed).union(joined), frozenset(ended)
        for owner, row in list(self._rows.items()):
            if row.pauses and now >= row.until + PAUSES.longest_s:  # nothing was tried since: no trainer needs it
                del self._rows[owner]
        return paused

    def _failed(self, pilot: Pilot, now: float, connected: bool) -> bool:
        """Count a failure. Returns whether a pause begins."""
        row = self._rows.setdefault(pilot.owner, _Row())
        row.failures += 1
        row.nodes.add(pilot.node)
        # Of an owner with agents elsewhere, one node alone may be the cause: the pool tries it less and less often.
        if row.failures < SEVERAL or now < row.until or (connected and len(row.nodes) == 1):
            return False
        row.pauses += 1
        row.until = now + PAUSES.wait_s(row.pauses)
        row.sentence = (
            f"pilots of {pilot.owner} end before their agents join: see {self._log_of(pilot.owner, pilot.node)}"
        )
        return True

    def why_not(self, owner: str, now: float) -> str:
        """Return why an owner gets no pilot now; empty if the owner may get some."""
        row = self._rows.get(owner)
        return row.sentence if row is not None and now < row.until else ""

    def room(self, owner: str, pilots: Collection[Pilot]) -> int | None:
        """Return how many more pilots an owner may get: one at a time after a pause; None: any number."""
        row = self._rows.get(owner)
        if row is None or not row.pauses:
            return None
        return 0 if any(pilot.owner == owner and pilot.job not in self._joined for pilot in pilots) else 1

    @property
    def warning(self) -> str:
        """The sentences of all such owners."""
        return "; ".join(row.sentence for row in self._rows.values() if row.sentence)

    def forget(self) -> None:
        """Forget all failures, because their causes may be over."""
        self._rows.clear()

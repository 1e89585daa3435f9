"""A pool's side of its office: the same for every pool that starts agents itself.

The pool opens it with the office that the controller is to it, and asks it for what would be written in each of them.
"""

from __future__ import annotations

from collections.abc import Collection

from bftrainer.cluster.pools.base import Office
from bftrainer.cluster.pools.keeping import fingerprint
from bftrainer.errors import BFTrainerError


class Desk:
    """Where a pool deals with its office, once it is open."""

    def __init__(self) -> None:
        self._office: Office | None = None
        self._offered: frozenset[str] = frozenset()

    def open(self, office: Office) -> None:
        """From now on there is one."""
        self._office = office

    @property
    def is_open(self) -> bool:
        """Whether there is an office."""
        return self._office is not None

    @property
    def office(self) -> Office:
        """The office."""
        if self._office is None:
            raise BFTrainerError("the pool is not open")
        return self._office

    @property
    def agents_mark(self) -> str:
        """A text that changes when agents must look for the controller at another place, or with another secret."""
        return fingerprint(sorted(self.office.agent_environment.items()))

    def offer(self, nodes: Collection[str], why: str) -> None:
        """In a dry run: these nodes could be had, and `why` those of before cannot any more."""
        now = frozenset(nodes)
        for node in sorted(now - self._offered):
            self.office.available(node)
        for node in sorted(self._offered - now):
            self.office.gone(node, why)
        self._offered = now

"""`Desk` holds the controller interface of a pool that starts agents itself.

Such a pool opens it with its `PoolHost`. The `Desk` also computes a fingerprint of the agents' environment and reports
the nodes on offer in a dry run.
"""

from __future__ import annotations

from collections.abc import Collection

from bftrainer.cluster.pools.base import PoolHost
from bftrainer.cluster.pools.keeper import fingerprint
from bftrainer.errors import BFTrainerError


class Desk:
    """Gives a pool access to its `PoolHost` while the pool is open."""

    def __init__(self) -> None:
        self._office: PoolHost | None = None
        self._offered: frozenset[str] = frozenset()

    def open(self, office: PoolHost) -> None:
        """Set the `PoolHost`."""
        self._office = office

    @property
    def is_open(self) -> bool:
        """Whether the `PoolHost` is set."""
        return self._office is not None

    @property
    def office(self) -> PoolHost:
        """The `PoolHost`; `BFTrainerError` if the pool is not open."""
        if self._office is None:
            raise BFTrainerError("the pool is not open")
        return self._office

    @property
    def agents_mark(self) -> str:
        """A text that changes when agents must connect to another address, or with another secret."""
        return fingerprint(sorted(self.office.agent_environment.items()))

    def offer(self, nodes: Collection[str], why: str) -> None:
        """In a dry run, report the nodes that could be used now. Earlier ones that cannot are gone, with `why`."""
        now = frozenset(nodes)
        for node in sorted(now - self._offered):
            self.office.available(node)
        for node in sorted(self._offered - now):
            self.office.gone(node, why)
        self._offered = now

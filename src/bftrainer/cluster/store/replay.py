"""`PoolReplay` reads events in order and follows which nodes are in the pool.

All readers of the log are built on it: reports, the history and the doctor. A node that announces its departure is lost
to the pool then; that it has left, later, is no second loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bftrainer.cluster.store.event_columns import event_of
from bftrainer.cluster.store.events import LogEvent, NodeJoined, NodeLeaving, NodeLeft
from bftrainer.cluster.store.rows import EventRow

POOL_EVENTS = (NodeJoined, NodeLeaving, NodeLeft)
"""The events that change the pool."""


class Replayed(NamedTuple):
    """An event of the log, and what it means for the pool.

    A tuple, because there may be a million and tuples are the fastest to create.
    """

    row: EventRow
    event: LogEvent
    lost: bool = False
    """Whether the pool loses a node with this event."""
    since: float | None = None
    """When the lost node had joined, if that is in the log."""

    @property
    def seq(self) -> int:
        """Number of the event."""
        return self.row.seq

    @property
    def time(self) -> float:
        """Time of the event."""
        return self.row.time


class PoolReplay:
    """The pool as the events so far tell it. A new one knows of no node."""

    def __init__(self) -> None:
        self.here: dict[str, float] = {}
        """When each node joined, of the nodes that joined and were not lost."""
        self.gone: set[str] = set()
        """Nodes that were lost and have not joined again."""

    def read(self, rows: Iterable[EventRow]) -> Iterator[Replayed]:
        """Yield the events of some rows."""
        for row in rows:
            event = event_of(row)
            if isinstance(event, NodeLeaving | NodeLeft):
                since = self.here.get(event.node)
                yield Replayed(row, event, self.depart(event.node), since)
                continue
            if isinstance(event, NodeJoined):
                self.join(event.node, row.time)
            yield Replayed(row, event)

    def join(self, node: str, time: float) -> None:
        """Add a node."""
        self.here[node] = time
        self.gone.discard(node)

    def depart(self, node: str) -> bool:
        """Remove a node that leaves or announces it. False if it was lost before."""
        self.here.pop(node, None)
        if node in self.gone:
            return False
        self.gone.add(node)
        return True

"""Pool of idle nodes, the events that change it, and fragments of idleness, as values.

Traces consist of fragments; the simulator and the live system turn them into events and keep a pool.
Times are seconds since 1970 in UTC.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Node = str
"""Name of a node."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """One uninterrupted idle period of one node."""

    node: Node
    start: float
    end: float
    open: bool = False
    """The node was still idle when the observation ended: `end` is a lower bound."""

    @property
    def length(self) -> float:
        """Seconds of idleness (so far, if the fragment is open)."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Event:
    """A change of the pool at one time. A node in both lists left and came back in the same instant."""

    time: float
    joined: tuple[Node, ...] = ()
    left: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Pool:
    """The nodes that are idle now, each with the time since which it is idle."""

    since: Mapping[Node, float] = field(default_factory=lambda: MappingProxyType({}))

    def __len__(self) -> int:
        return len(self.since)

    def __contains__(self, node: object) -> bool:
        return node in self.since

    def __iter__(self) -> Iterator[Node]:
        return iter(self.since)

    def after(self, event: Event) -> Pool:
        """The pool once `event` has happened. Nodes leave before others join."""
        since = dict(self.since)
        for node in event.left:
            if since.pop(node, None) is None:
                raise ValueError(f"node {node!r} leaves at {event.time} but is not in the pool")
        for node in event.joined:
            if node in since:
                raise ValueError(f"node {node!r} joins at {event.time} but is in the pool already")
            since[node] = event.time
        return Pool(MappingProxyType(since))

"""Bad nodes are nodes on which newcomers of one trainer failed.

The trainer ran on other nodes meanwhile. `ElasticJob` records each such failure here and asks whether a worker may be
started on a node. The wait before the next try doubles with each failure, up to `MOST_WAIT_S`. The node stays usable
for other trainers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bftrainer.util.backoff import Backoff

LEAST_WAIT_S, MOST_WAIT_S = 0.1, 600.0
"""The shortest and the longest wait before a node is tried again."""


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """The failure of a newcomer on a node. The trainer continues without it."""

    node: str
    worker: str
    reason: str
    failures: int
    """Failures in a row on this node."""
    retry_s: float
    """Seconds before the node is tried again."""


class BadNodes:
    """The nodes on which newcomers of one trainer failed."""

    def __init__(self, first_wait_s: float) -> None:
        self._first_wait_s = max(first_wait_s, LEAST_WAIT_S)
        self._failures: dict[str, NodeFailure] = {}
        self._not_before: dict[str, float] = {}
        self.broke_alone: set[str] = set()
        """Nodes that were the only newcomer when the group broke; without them it works."""

    def failed(self, node: str, worker: str, reason: str, now: float, *, turn: int = 1) -> NodeFailure:
        """Record that a newcomer failed on a node.

        If several failed together, each has its own `turn` (1, 2, …), so that they are tried again one by one.
        """
        before = self._failures.pop(node, None)
        failures = before.failures + 1 if before is not None else 1
        retry_s = Backoff(turn * self._first_wait_s, MOST_WAIT_S).wait_s(failures)
        self._not_before[node] = now + retry_s
        failure = self._failures[node] = NodeFailure(node, worker, reason, failures, retry_s)
        return failure

    @property
    def reason(self) -> str:
        """Why the trainer runs without its latest bad node; empty if there is none."""
        failure = next(reversed(self._failures.values()), None)
        return f"continues without {failure.node}: {failure.reason}" if failure is not None else ""

    def worked(self, node: str) -> None:
        """Record that a worker on the node has joined: the node is good."""
        self._failures.pop(node, None)
        self._not_before.pop(node, None)
        self.broke_alone.discard(node)

    def may_start(self, node: str, now: float) -> bool:
        """Whether a worker may be started on the node now."""
        return now >= self._not_before.get(node, -math.inf)

    def deadlines(self, nodes: Iterable[str]) -> list[float]:
        """Return the times at which the bad ones among `nodes` may be tried again."""
        return [self._not_before[node] for node in nodes if node in self._not_before]

    def shift(self, seconds: float) -> None:
        """Move all times by `seconds`: the clock was set, or stood still."""
        self._not_before = {node: time + seconds for node, time in self._not_before.items()}

"""The seam between the controller and whatever gives it nodes.

A pool finds nodes that nobody needs and has an agent started on each. From then on the agent speaks for its node: the
node is in the pool from the agent's `Join` until the agent goes. A pool that knows more, or sooner, says so to the
`Office`, its side of the controller. Every pool passes `tests/cluster/pool_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Office(Protocol):
    """What the controller does for a pool. All of it is for the thread of the running event loop."""

    @property
    def agent_environment(self) -> Mapping[str, str]:
        """What the environment of an agent must hold to join: `wire.URL` and `wire.SECRET`; never on a command line."""

    @property
    def observing(self) -> bool:
        """Nothing may be started (a dry run): say which nodes are `available`, no more."""

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes whose agents are here now."""

    def available(self, node: str) -> None:
        """A node could be had; in a dry run this is all that there will be of it."""

    def leaving(self, node: str, grace_s: float) -> None:
        """A node goes in `grace_s` seconds: its worker shall leave at a step boundary before.

        The agent is dismissed (`wire.Bye`) as soon as its worker has ended, at the latest when the time is up.
        """

    def gone(self, node: str, reason: str) -> None:
        """A node is gone for certain; do not wait for its silence. Unknown or gone already: nothing happens."""

    def dismiss(self, node: str, reason: str) -> None:
        """Have a node's agent end at once: its worker is killed."""

    def remember(self, key: str, value: Any) -> None:
        """Keep a JSON value over a restart of the controller."""

    def recall(self, key: str) -> Any:
        """What was kept, or None."""

    def note(self, what: str, **facts: Any) -> None:
        """Have something written to the event log, as `pool.WHAT`."""


class Pool(Protocol):
    """A source of nodes."""

    async def open(self, office: Office) -> None:
        """Begin. Agents of an earlier life that still run are found again, not started twice."""

    async def pause(self) -> None:
        """Start no more agents; those that run are dismissed by the controller."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def close(self, *, drain: bool) -> None:
        """End. With `drain` no agent of this pool is left anywhere; without, they go on and wait for a controller."""

    def describe(self) -> Mapping[str, Any]:
        """Facts for `status`: at least `kind`, and what a person would want to know of it."""

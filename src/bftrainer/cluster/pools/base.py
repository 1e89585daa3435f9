"""The base interface connects the controller with its sources of nodes, the pools.

A pool finds idle nodes and has an agent started on each. From then on the agent represents its node: the node is in the
pool from the agent's `Join` until the agent ends. A pool that learns of a departure otherwise, or earlier, reports it
to the `PoolHost`, the controller's interface for pools. Every pool passes `tests/support/cluster/pool_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class PoolHost(Protocol):
    """The controller's interface for a pool. Call it only from the thread of the running event loop."""

    @property
    def agent_environment(self) -> Mapping[str, str]:
        """Variables that an agent needs to join: `variables.URL` and `variables.SECRET`; never on a command line."""

    @property
    def observing(self) -> bool:
        """Whether this is a dry run: report nodes that are `available`, and start nothing."""

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes whose agents are connected now."""

    def available(self, node: str) -> None:
        """Report a node that could be used. In a dry run nothing else happens to it."""

    def leaving(self, node: str, grace_s: float) -> None:
        """Report that a node leaves in `grace_s` seconds; its worker leaves at a step boundary before.

        The agent is dismissed (`messages.Bye`) as soon as its worker has ended, at the latest when the time is up.
        """

    def gone(self, node: str, reason: str) -> None:
        """Report that a node is certainly gone, without waiting for its silence.

        No effect if it is unknown or already gone.
        """

    def dismiss(self, node: str, reason: str) -> None:
        """End a node's agent at once: its worker is killed."""

    def remember(self, key: str, value: Any) -> None:
        """Store a JSON value that survives a restart of the controller."""

    def recall(self, key: str) -> Any:
        """Return the stored value, or None."""

    def note(self, what: str, **facts: Any) -> None:
        """Write an event of kind `pool.WHAT` to the event log."""


Office = PoolHost
"""The former name of `PoolHost`."""


class Pool(Protocol):
    """A source of nodes."""

    async def open(self, office: PoolHost) -> None:
        """Begin. Agents started by an earlier controller that still run are found again, not started twice."""

    async def pause(self) -> None:
        """Start no more agents; the controller dismisses those that run."""

    async def resume(self) -> None:
        """Continue after `pause`."""

    async def close(self, *, drain: bool) -> None:
        """End. With `drain`, no agent of this pool is left anywhere; else agents go on and wait for a controller."""

    def describe(self) -> Mapping[str, Any]:
        """Return facts for `status`: at least `kind`, and what a person would want to know."""

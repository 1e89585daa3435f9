"""The base interface connects the controller with its sources of nodes, the pools.

A pool finds idle nodes and has an agent started on each. From then on the agent represents its node: the node is in the
pool from the agent's `Join` until the agent ends. A pool that learns of a departure otherwise, or earlier, reports it
to the `PoolHost`, the controller's interface for pools. Every pool passes `tests/support/cluster/pool_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from bftrainer.cluster.owners.accounts import Accounts
from bftrainer.cluster.pools.keeper import fingerprint
from bftrainer.errors import BFTrainerError


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

    @property
    def demand(self) -> int:
        """Number of nodes that all trainers could use now, including those they have. See `could_have`."""

    @property
    def used(self) -> frozenset[str]:
        """The nodes that trainers have."""

    @property
    def own_users(self) -> bool:
        """Whether agents belong to owners (`users.mode = "own"`).

        Each agent is then started for one owner, whom `owners_for` names, as the owner's account, with the variables of
        `invitation`. Otherwise there are no owners, and `agent_environment` is for all agents.
        """

    @property
    def accounts(self) -> Accounts:
        """The Unix accounts of owners."""

    @property
    def owners(self) -> Mapping[str, str]:
        """The owner of each node whose agent is connected or awaited."""

    def owners_for(self, nodes: Sequence[str]) -> Mapping[str, str]:
        """Return for which owners agents are to be started on nodes that have none.

        The scheduler is asked whose trainers would get the nodes if all of them joined, together with those invited
        already. A node that a decision gives to another owner (`Pool.hand_over`) stays theirs. A node that nobody could
        use is left out: ask again later.
        """

    def invitation(self, node: str, owner: str, *, within_s: float | None = None) -> Mapping[str, str]:
        """Return the variables with which one agent may join: for this owner, on this node, until `within_s` from now.

        They take the place of `agent_environment`. Invitations of the node that were made before are good no more,
        also for an agent that has joined with one and connects again: call it only when the agent is to be started.
        """

    def not_coming(self, node: str, reason: str) -> None:
        """Report that the agent of the last invitation of a node will not come: its start failed, or it was stopped."""

    def could_have(self, nodes: int) -> None:
        """Report how many nodes the pool has at most. Trainers that need more do not count in `demand`."""

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
    """A source of nodes.

    A pool may have an attribute `give_up_s`: the most seconds for which its agents may run without a controller.
    """

    async def open(self, host: PoolHost) -> None:
        """Begin. Agents started by an earlier controller that still run are found again, not started twice."""

    async def pause(self) -> None:
        """Start no more agents; the controller dismisses those that run."""

    async def resume(self) -> None:
        """Continue after `pause`."""

    async def close(self, *, drain: bool) -> None:
        """End. With `drain`, no agent of this pool is left anywhere; else agents go on and wait for a controller."""

    def describe(self) -> Mapping[str, Any]:
        """Return facts for `status`: at least `kind`, and what a person would want to know."""


@runtime_checkable
class HandsOver(Protocol):
    """What a pool has besides if nodes can go from one owner to another without leaving the pool.

    Without it such a node leaves the pool, and `PoolHost.owners_for` says for whom it is harvested again.
    """

    def hand_over(self, node: str, owner: str) -> None:
        """Start an agent of another owner on a node. Returns at once.

        The controller has dismissed the former owner's agent. Once that is gone, or was killed by the pool, the pool
        starts the new one, with an `invitation`. The node stays in the pool meanwhile; it is lost if the new agent has
        not joined in time.
        """


@runtime_checkable
class KnowsOwners(Protocol):
    """What a pool has besides if it cannot start agents for every owner at every time."""

    def why_not(self, owner: str) -> str:
        """Return why no agent can be started for an owner now, as a sentence for them; empty if one can be."""

    def most_nodes(self, owner: str) -> int | None:
        """Return how many nodes an owner can have at most, such as by the limits of their account; None: not known."""


class PoolHostLink:
    """Gives a pool that starts agents itself access to its `PoolHost` while the pool is open."""

    def __init__(self) -> None:
        self._host: PoolHost | None = None
        self._offered: frozenset[str] = frozenset()

    def open(self, host: PoolHost) -> None:
        """Set the `PoolHost`."""
        self._host = host

    @property
    def is_open(self) -> bool:
        """Whether the `PoolHost` is set."""
        return self._host is not None

    @property
    def host(self) -> PoolHost:
        """The `PoolHost`; `BFTrainerError` if the pool is not open."""
        if self._host is None:
            raise BFTrainerError("the pool is not open")
        return self._host

    @property
    def agents_mark(self) -> str:
        """A text that changes when agents must connect to another address, or with another secret."""
        return fingerprint(sorted(self.host.agent_environment.items()))

    def offer(self, nodes: Collection[str], reason: str) -> None:
        """In a dry run, report the nodes that could be used now. Earlier ones that cannot are gone, with `reason`."""
        now = frozenset(nodes)
        for node in sorted(now - self._offered):
            self.host.available(node)
        for node in sorted(self._offered - now):
            self.host.gone(node, reason)
        self._offered = now

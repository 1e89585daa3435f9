"""Node states: the nodes that are connected or awaited, as the reconciler knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from bftrainer.cluster.controller.node_ranks import default_ranks
from bftrainer.cluster.launchers.base import HEAD
from bftrainer.cluster.store import events
from bftrainer.cluster.store.rows import NodeRow
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.messages import Gpu, GpuUse, Join

RESTORED_GRACE_S = 2.0
"""The time that a leaving node still has after a restart of the controller, which may have taken long."""
GPU_USE_S = 120.0
"""How long, in seconds, the reading of a node's GPUs is shown after it was sent."""


@dataclass(slots=True)
class NodeState:
    """A node whose agent is connected, or is awaited: its connection broke, or the controller was restarted."""

    name: str
    host: str
    agent: str
    pid: int
    joined: float
    heard: float
    here: bool = True
    """Whether its agent is connected; otherwise it is awaited."""
    cut: bool = False
    """Whether its agent is awaited because its connection broke, and not because the controller was restarted."""
    leave_by: float | None = None
    trainer: str | None = None
    """The trainer that the node is assigned to, by the last decision."""
    worker: str | None = None
    """The worker that runs there. Always None on the head, where any number of workers may run."""
    gpus: tuple[Gpu, ...] = ()
    slots: int = 0
    """How many ranks its pool said that it has; 0: nothing."""
    knows_ranks: bool = False
    """Whether its agent's workers can be in a generation with workers that have several ranks."""
    gpu_count: int = 0
    """How many GPUs it has. After a restart of the controller this is known before its agent is back."""
    gpu_use: tuple[GpuUse, ...] = ()
    """The newest reading that its agent sent."""
    gpu_use_at: float = 0.0
    owner: str = ""
    """The owner of its agent, who may run trainers there; empty where agents have no owners."""
    heir: str = ""
    """The owner whose agent is to take the place of the present one; empty: nobody's."""
    heir_since: float = 0.0
    dismissed: float | None = None
    """When the present agent was dismissed for the heir's; None: it was not."""

    @classmethod
    def from_row(cls, row: NodeRow, now: float) -> Self:
        """Return a node that an earlier controller stored. Its agent is awaited."""
        leave_by = now + RESTORED_GRACE_S if row.leaving is not None else None
        node = cls(row.node, row.host, row.agent, row.pid, row.joined, now, here=False, leave_by=leave_by)
        node.gpu_count, node.slots, node.owner = row.gpus, row.slots, row.owner
        return node

    @classmethod
    def from_join(cls, join: Join, now: float, owner: str = "") -> Self:
        """Return a node whose agent connected for the first time."""
        node = cls(join.node, join.host, join.agent, join.pid, now, now, gpus=join.gpus, slots=join.slots, owner=owner)
        node.gpu_count, node.knows_ranks = len(join.gpus), join.knows_ranks
        return node

    def save_joined(self, store: Store) -> None:
        """Store the node, and log that it joined."""
        name, host, agent, gpus = self.name, self.host, self.agent, self.gpu_count
        self.save(store)
        is_head = name == HEAD
        event = events.HeadJoined(name, host, agent) if is_head else events.NodeJoined(name, host, agent, gpus)
        store.log(self.joined, event)
        if self.owner:
            store.log(self.joined, events.NodeOwned(name, self.owner))

    def save(self, store: Store) -> None:
        """Store the node, with the owner that it serves or will serve next."""
        store.put_node(
            self.name,
            host=self.host,
            agent=self.agent,
            pid=self.pid,
            joined=self.joined,
            gpus=self.gpu_count,
            slots=self.slots,
            owner=self.heir or self.owner,
        )

    def succeeded(self, join: Join, now: float) -> None:
        """Take up the agent of the heir in place of the one that was dismissed."""
        self.host, self.agent, self.pid, self.worker = join.host, join.agent, join.pid, None
        self.owner, self.heir, self.dismissed = self.heir, "", None
        self.rejoined(join, now)
        self.gpu_count = len(join.gpus)

    @property
    def ranks(self) -> int:
        """How many ranks a worker has there by default."""
        return default_ranks(self.gpus or range(self.gpu_count), self.slots)

    @property
    def is_free(self) -> bool:
        """Whether a worker can be started there."""
        return self.here and self.leave_by is None and self.worker is None and not self.heir

    def serves(self, owner: str) -> bool:
        """Whether its agent may start trainers of an owner."""
        return self.owner in ("", owner)

    @property
    def in_pool(self) -> bool:
        """Whether the node can be assigned to a trainer."""
        return self.leave_by is None and self.name != HEAD

    def beat(self, now: float, gpus: tuple[GpuUse, ...] = ()) -> None:
        """Record that its agent is alive. `gpus` is a new reading of its GPUs, if there is one."""
        self.heard = now
        if gpus:
            self.gpu_use, self.gpu_use_at = gpus, now

    def rejoined(self, join: Join, now: float) -> bool:
        """Record that its agent is back. Returns whether its number of ranks is another than was known."""
        before = self.ranks
        self.here, self.cut, self.heard, self.host = True, False, now, join.host
        self.gpus, self.slots, self.knows_ranks = join.gpus, join.slots, join.knows_ranks
        return self.ranks != before

    def gpu_uses(self, now: float) -> dict[str, GpuUse]:
        """Return how much of each GPU is in use, by its id. GPUs without a fresh reading are left out."""
        return {use.id: use for use in self.gpu_use} if now - self.gpu_use_at <= GPU_USE_S else {}

    def shift(self, seconds: float, now: float) -> None:
        """Move all times by `seconds`: the clock was set, or stood still."""
        if seconds > 0:
            self.heard = min(self.heard + seconds, now)
        elif self.heard > now:  # it was heard before the clock was set back
            self.heard += seconds
        self.leave_by = None if self.leave_by is None else self.leave_by + seconds
        self.dismissed = None if self.dismissed is None else self.dismissed + seconds

"""Wait reasons tell an owner why a trainer has no nodes.

They reveal nothing about other owners. The API (`app.py`) creates one `WaitReasons` for all trainers of a response. It
reads the current state of the scheduler, so that an answer is cheap and up to date.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bftrainer.cluster.controller.active import ActiveTrainer
    from bftrainer.cluster.controller.reconciler import Reconciler


class WaitReasons:
    """Wait reasons of all trainers at one moment."""

    def __init__(self, cluster: Reconciler) -> None:
        self._cluster = cluster
        self._state = cluster.planner.state
        self._scheduler = cluster.planner.scheduler

    def of(self, live: ActiveTrainer | None) -> str:
        """Return why a trainer has no nodes; an empty text if it has some, or is about to get some."""
        if live is None or live.job.state not in ("queued", "waiting"):
            return ""
        given, pool = self._state.assigned.get(live.id, ()), len(self._state.pool)
        if self._cluster.settings.dry_run and given:
            return f"a dry run starts nothing; it would have {_nodes(len(given))}"
        if given:
            return ""
        if self._cluster.paused:
            return "harvesting is paused"
        if (reach := self._cluster.planner.limits.reach.get(live.owner)) is not None and reach.why:
            return reach.why
        if not pool:
            return "the pool has no nodes"
        least = live.spec.min_nodes
        if least > pool:
            return f"needs at least {_nodes(least)}; the pool has {pool}"
        return self._capped(live.owner, least) or self._queued(live.id)

    def _capped(self, owner: str, least: int) -> str:
        cap = self._caps.get(owner)
        if cap is None:
            return ""
        held = self._held.get(owner, 0)
        if least > cap:
            return f"needs at least {_nodes(least)}; its owner may have {cap}"
        if held >= cap:
            return f"its owner's cap of {_nodes(cap)} is used up"
        if held + least > cap:
            return f"needs at least {_nodes(least)}; its owner has {held} of at most {cap}"
        return ""

    def _queued(self, trainer: str) -> str:
        if trainer in self._admitted:
            return "" if self._cluster.planner.undecided else "the nodes are worth more to other trainers now"
        if len(self._admitted) < self._parallel:
            return ""
        if self._scheduler.policy.max_parallel is None:
            return "waits for its turn: the nodes are used by earlier trainers"
        return f"waits for its turn: max parallel is {self._parallel}"

    @cached_property
    def _admitted(self) -> frozenset[str]:
        return frozenset(trainer.name for trainer in self._state.admitted)

    @cached_property
    def _parallel(self) -> int:
        return self._scheduler.max_parallel(self._state)

    @cached_property
    def _caps(self) -> dict[str, int]:
        return dict(self._scheduler.limits(self._state).owner_caps)

    @cached_property
    def _held(self) -> dict[str, int]:
        """Number of nodes by owner."""
        held: dict[str, int] = {}
        for trainer in self._state.admitted:
            held[trainer.owner] = held.get(trainer.owner, 0) + len(self._state.assigned.get(trainer.name, ()))
        return held


def _nodes(count: int) -> str:
    return f"{count:,} node" if count == 1 else f"{count:,} nodes"

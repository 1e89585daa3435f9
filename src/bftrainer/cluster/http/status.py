"""`StatusReader` builds the status of the controller: the pool, the policy, the trainers and sums over all trainers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from bftrainer import __version__
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.http import views
from bftrainer.cluster.http.wait_reason import WaitReasons
from bftrainer.cluster.store.rows import TokenRow, TrainerRow
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.api import DecisionView, EtaView, GroupEtaView, StatusView, TrainerView

RECENT_S = 3600.0
"""How long a finished trainer is listed."""

_OF_ADMINS = frozenset({"problem", "warning", "prefix", "command", "host_pid", "lenders"})
"""What the pool says of itself to admins only, where trainers run as their owners."""
_NOTHING = (0.0, 0.0, 0.0, 0.0)
"""Samples, node-seconds, rescales and GPU-seconds of no trainer."""


class StatusReader:
    """Reads the status and the rows of trainers as the API shows them."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._cluster = controller.cluster
        self._totals = Totals(controller.cluster.store)

    def trainer(self, row: TrainerRow) -> TrainerView:
        """Return one trainer in short."""
        live = self._cluster.trainers.get(row.id)
        waits, nodes = WaitReasons(self._cluster).of(live), self._cluster.nodes
        return views.trainer(row, live, time.time(), waits, nodes, self.eta(row))

    def eta(self, row: TrainerRow) -> EtaView | None:
        """Return when a trainer will be done; None if it is not computed yet."""
        return self._controller.eta.trainer(row.id, row.spec.get("deadline"))

    def trainers(self, owner: str | None, ended_after: float | None) -> list[TrainerView]:
        """Return the trainers of an owner, or of all if `owner` is None; those that ended before are left out."""
        reasons, live_trainers = WaitReasons(self._cluster), self._cluster.trainers
        return [
            views.trainer(
                *(row, live := live_trainers.get(row.id), time.time(), reasons.of(live), self._cluster.nodes),
                self.eta(row),
            )
            for row in self._cluster.store.trainers(ended_after=ended_after, brief=True, owner=owner)
        ]

    def groups(self, rows: Iterable[TrainerView]) -> list[GroupEtaView]:
        """Return when the groups of some trainers will be done."""
        found: list[GroupEtaView] = []
        for owner, group in sorted({(row["owner"], row["group"]) for row in rows if row["group"]}):
            eta = self._controller.eta.group(owner, group)
            if eta is not None:
                found.append({"group": group, "owner": owner, "eta": eta})
        return found

    def read(self, caller: TokenRow) -> StatusView:
        """Return the status as a caller may see it."""
        now = time.time()
        is_admin = caller.role == "admin"
        owner = None if is_admin else caller.owner
        rows = self.trainers(owner, now - RECENT_S)
        samples, node_seconds, rescales, gpu_seconds = self._totals.of(owner, now - RECENT_S, rows)
        cluster, policy = self._cluster, self._controller.config.policy
        last = cluster.planner.last_decision
        last_decision: DecisionView | None = None
        if last is not None:
            last_decision = {"time": last["time"], "reasons": last["reasons"] if is_admin else []}
        return {
            "version": __version__,
            "now": now,
            "started": self._controller.began,
            "paused": cluster.paused,
            "dry_run": cluster.settings.dry_run,
            "pool": {**self._pool(owner), **views.pool(cluster)},
            "policy": {
                "allocator": policy.allocator,
                "decided_by": (last or {}).get("allocator") or policy.allocator,
                "objective": policy.objective,
                "horizon_s": policy.horizon_s,
                "max_parallel": policy.max_parallel,
            },
            "trainers": rows,
            "groups": self.groups(rows),
            "totals": {
                "samples": samples,
                "node_seconds": cluster.planner.pool_time.node_seconds(now),
                "used_node_seconds": node_seconds,
                "gpu_seconds": cluster.planner.pool_time.gpu_seconds(now),
                "used_gpu_seconds": gpu_seconds,
                "rescales": rescales,
                "decisions": cluster.planner.decisions,
                "owner": owner,
            },
            "last_decision": last_decision,
        }

    def _pool(self, owner: str | None) -> Mapping[str, Any]:
        """Return what the pool says of itself, to admins or to one owner.

        Where trainers run as their owners, its problems and settings may name others, or their files.
        """
        said = self._controller.pool.describe()
        if owner is None or not self._cluster.settings.own_users:
            return said
        shown = {name: value for name, value in said.items() if name not in _OF_ADMINS}
        if isinstance(lenders := said.get("lenders"), Mapping):
            shown["lenders"] = {name: most for name, most in lenders.items() if name == owner}
        return shown


class Totals:
    """Sums by owner over all trainers since the beginning.

    They are the figures of the trainers that are shown, added to stored sums of those that ended earlier. Sums of ended
    trainers do not change any more, so each request reads only the trainers that ended since the last one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._upto = float("-inf")
        self._removed = 0
        self._ended: dict[str, list[float]] = {}

    def of(self, owner: str | None, ended_by: float, shown: Iterable[TrainerView]) -> tuple[int, float, int, float]:
        """Return samples, node-seconds, rescales and GPU-seconds of one owner's trainers; of all if `owner` is None.

        They cover the trainers that ended by `ended_by` and the rows in `shown`, each with its own figures.
        """
        self._read(ended_by)
        sums = list(_NOTHING)
        ended = self._ended.values() if owner is None else [self._ended.get(owner, sums)]
        fresh = ([row["samples"], row["node_seconds"], row["rescales"], row["gpu_seconds"]] for row in shown)
        for figures in (*ended, *fresh):
            sums = [total + figure for total, figure in zip(sums, figures, strict=True)]
        samples, node_seconds, rescales, gpu_seconds = sums
        return int(samples), node_seconds, int(rescales), gpu_seconds

    def _read(self, upto: float) -> None:
        removed = self._store.totals.removed()
        if upto < self._upto or removed != self._removed:  # the clock was set back, or rows were removed
            self._upto, self._ended, self._removed = float("-inf"), {}, removed
        for owner, *figures in self._store.totals.ended(self._upto, upto):
            sums = self._ended.get(owner, _NOTHING)
            self._ended[owner] = [total + figure for total, figure in zip(sums, figures, strict=True)]
        self._upto = upto

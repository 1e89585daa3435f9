"""Owner limits restrict the nodes and trainers that each owner may have.

`bftrainer owner` writes them to the store. The controller reads them (`OwnerLimits.read`), passes their quotas to the
scheduler, refuses trainers that exceed them (`OwnerLimits.check`), and shows limits and current use in the API.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bftrainer.allocate.quotas import Quota
from bftrainer.cluster.config.keys import MOST_WEIGHT
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.store.rows import OwnerRow
from bftrainer.errors import InputError
from bftrainer.util.text import size_as_text

if TYPE_CHECKING:
    from bftrainer.cluster.controller.reconciler import Reconciler
    from bftrainer.cluster.spec.trainer import TrainerSpec
    from bftrainer.cluster.store.store import Store

MOST_TRAINERS = 1_000_000
MOST_NAME = 200

_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%")


@dataclass(frozen=True, slots=True)
class OwnerReach:
    """On how many nodes agents can be started for an owner, and why on no more."""

    nodes: int
    why: str = ""
    """Empty: the limits of the owner's account."""


class QuotaError(InputError):
    """A trainer would exceed its owner's limits."""


def quota_of(row: OwnerRow) -> Quota:
    """Return the part of an owner's limits that the scheduler enforces."""
    return Quota(row.max_nodes, row.share_nodes, row.share_percent)


def check_row(row: OwnerRow) -> OwnerRow:
    """Return the row if it is valid. Raises `InputError` otherwise."""
    if not row.owner.strip() or not row.owner.isprintable() or len(row.owner) > MOST_NAME:
        raise InputError(
            f"an owner must be one line of 1 to {MOST_NAME} printable characters, but got {row.owner!r:.80}"
        )
    if row.max_weight is not None and not 0 < row.max_weight <= MOST_WEIGHT:
        raise InputError(f"max weight must be above 0, up to {MOST_WEIGHT:,}, but got {row.max_weight:g}")
    if row.max_disk_mb is not None and row.max_disk_mb < 0:
        raise InputError(f"max disk must be 0 MB or more, but got {row.max_disk_mb}")
    if row.max_trainers is not None and not 0 <= row.max_trainers <= MOST_TRAINERS:
        raise InputError(f"max trainers must be from 0 to {MOST_TRAINERS:,}, but got {row.max_trainers}")
    quota_of(row)
    return row


def read_share(text: str) -> tuple[int | None, float | None]:
    """Parse a share: `4` is four nodes, `25%` a quarter of the pool. Returns nodes and percent, one of them None.

    Raises `InputError`.
    """
    percent = _PERCENT.fullmatch(text.strip())
    if percent is not None:
        return None, float(percent[1])
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise InputError(
            f"a share must be a number of nodes such as 4, or a part of the pool such as 25%, not {text!r}"
        )
    return int(text), None


def share_as_text(row: OwnerRow) -> str | None:
    """Return a row's share as text: the inverse of `read_share`. None without a share."""
    if row.share_percent is not None:
        return f"{row.share_percent:g}%"
    return None if row.share_nodes is None else str(row.share_nodes)


class OwnerLimits:
    """The limits of all owners, as read last from the store."""

    def __init__(self, store: Store, max_weight: float) -> None:
        self._store = store
        self._usual_max_weight = max_weight
        self._rows: Mapping[str, OwnerRow] = MappingProxyType({})
        self._admins: frozenset[str] = frozenset()
        self.reach: Mapping[str, OwnerReach] = MappingProxyType({})
        """What the pool says of owners for whom it cannot start agents on any number of nodes."""
        self.disk_used: Mapping[str, int] = MappingProxyType({})
        """Bytes of all files of each owner's trainers, as the housekeeper measured them last."""
        self.default_disk: int | None = None
        """Disk quota in bytes of owners that have none of their own."""
        self.read()

    def read(self) -> None:
        """Read the limits again: a command may have changed them."""
        self._rows = MappingProxyType({row.owner: row for row in self._store.owners()})
        now = time.time()
        valid = (row for row in self._store.tokens.all() if row.revoked is None and (row.expires or math.inf) > now)
        self._admins = frozenset(row.owner for row in valid if row.role == "admin")

    def of(self, owner: str) -> OwnerRow:
        """Return the limits of one owner."""
        return self._rows.get(owner) or OwnerRow(owner)

    def max_weight(self, owner: str) -> float:
        """Return the largest weight of the owner's trainers. Admins, who set limits, have none unless it is set."""
        limit = self.of(owner).max_weight
        if limit is not None and limit > 0:  # a wrong row, edited by hand, must not stop training
            return limit
        return math.inf if owner in self._admins else self._usual_max_weight

    @property
    def max_weights(self) -> tuple[Mapping[str, float], frozenset[str]]:
        """All that `max_weight` depends on: the maxima that are set, and the admins."""
        limits = {owner: row.max_weight for owner, row in self._rows.items() if row.max_weight is not None}
        return limits, self._admins

    @property
    def rows(self) -> tuple[OwnerRow, ...]:
        """The limits of all owners that have any."""
        return tuple(self._rows.values())

    @property
    def quotas(self) -> Mapping[str, Quota]:
        """The quotas for the scheduler, by owner."""
        quotas = {}
        for owner, row in self._rows.items():
            with suppress(InputError):  # a wrong row, edited by hand, must not stop training
                if quota := quota_of(row):
                    quotas[owner] = quota
        for owner, reach in self.reach.items():
            quotas[owner] = quotas.get(owner, Quota()).at_most(reach.nodes)
        return MappingProxyType(quotas)

    def disk_allowed(self, owner: str) -> int | None:
        """Return the disk quota of an owner in bytes; None: no limit."""
        own = self.of(owner).max_disk_mb
        return self.default_disk if own is None else own * 10**6

    def check(self, owner: str, spec: TrainerSpec, unfinished: int) -> None:
        """Raise `QuotaError` if the owner has too many trainers or files, or if this trainer exceeds its limits."""
        row = self.of(owner)
        used, allowed = self.disk_used.get(owner, 0), self.disk_allowed(owner)
        if allowed is not None and used > allowed:
            raise QuotaError(
                f"the files of {owner}'s trainers use {size_as_text(used)} of {size_as_text(allowed)}: remove those of "
                "finished trainers with `bftrainer prune TRAINER` or `bftrainer prune --mine --older-than 7d`"
            )
        if spec.weight > (limit := self.max_weight(owner)):
            raise QuotaError(
                f"weight is {spec.weight:g}, but {owner} may use at most {limit:g}: choose a smaller weight, or ask an "
                "admin for a larger maximum (`bftrainer owner set --max-weight`)"
            )
        if row.max_trainers is not None and unfinished >= row.max_trainers:
            raise QuotaError(
                f"{owner} may have {row.max_trainers} unfinished trainers and has {unfinished}: "
                "wait for one to end, or cancel one"
            )
        if row.max_nodes is not None and spec.min_nodes > row.max_nodes:
            raise QuotaError(
                f"min_nodes is {spec.min_nodes}, but {owner} may have only {row.max_nodes} nodes: it could never run"
            )


def as_json(
    owner: str, cluster: Reconciler, past: Mapping[str, tuple[int, float, int, float]], now: float
) -> dict[str, Any]:
    """Return an owner's limits and current use.

    `past` has, by owner, the count, node-seconds, samples and GPU-seconds of finished trainers, from the store.
    """
    row = cluster.planner.limits.of(owner)
    finished, node_seconds, samples, gpu_seconds = past.get(owner, (0, 0.0, 0, 0.0))
    mine = [live for live in cluster.trainers.values() if live.owner == owner and live.state not in FINISHED]
    return {
        "owner": owner,
        "limits": {
            "max_nodes": row.max_nodes,
            "max_trainers": row.max_trainers,
            "share": share_as_text(row),
            "max_weight": None if math.isinf(limit := cluster.planner.limits.max_weight(owner)) else limit,
            "disk_bytes": cluster.planner.limits.disk_allowed(owner),
        },
        "use": {
            "nodes": sum(len(cluster.planner.state.assigned.get(live.id, ())) for live in mine),
            "trainers": len(mine),
            "trainers_finished": finished,
            "node_seconds": node_seconds + sum(live.held.node_seconds(now) for live in mine),
            "gpu_seconds": gpu_seconds + sum(live.held.gpu_seconds(now) for live in mine),
            "samples": samples + sum(live.job.progress.samples for live in mine),
            "disk_bytes": cluster.planner.limits.disk_used.get(owner, 0),
        },
    }

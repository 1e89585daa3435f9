"""Quotas of owners, and the limits in nodes that follow from them.

Quotas come in with the pool's size and the queue; `Limits` in nodes go to the allocator, which enforces them, and to
`admission.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bftrainer.allocate.problem import LARGEST_POOL, Limits
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError


@dataclass(frozen=True, slots=True)
class Quota:
    """Quota of one owner: the most they may have, and the share they are entitled to while they have work."""

    max_nodes: int | None = None
    share_nodes: int | None = None
    share_percent: float | None = None
    """Part of the pool's size at each decision. A share is either a number of nodes or a percentage."""

    def __post_init__(self) -> None:
        for what, nodes in (("max nodes", self.max_nodes), ("a share", self.share_nodes)):
            if nodes is not None and not 0 <= nodes <= LARGEST_POOL:
                raise InputError(f"{what} must be from 0 to {LARGEST_POOL:,} nodes, but got {nodes}")
        percent = self.share_percent
        if percent is not None and not (math.isfinite(percent) and 0 <= percent <= 100):
            raise InputError(f"a share must be from 0% to 100%, but got {percent:g}%")
        if self.share_nodes is not None and percent is not None:
            raise InputError("a share must be a number of nodes or a percentage, but got both")
        if self.share_nodes is not None and self.max_nodes is not None and self.share_nodes > self.max_nodes:
            raise InputError(f"a share of {self.share_nodes} nodes is more than max nodes ({self.max_nodes}) allow")

    def at_most(self, nodes: int) -> Quota:
        """Return the same quota for an owner who cannot have more nodes than this."""
        most = nodes if self.max_nodes is None else min(nodes, self.max_nodes)
        share = None if self.share_nodes is None else min(self.share_nodes, most)
        return Quota(most, share, self.share_percent)

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.max_nodes, self.share_nodes, self.share_percent))

    def share_of(self, pool: int) -> float:
        """The share in nodes, not yet rounded to whole nodes."""
        share = float(self.share_nodes or 0) if self.share_percent is None else self.share_percent * pool / 100
        return share if self.max_nodes is None else min(share, self.max_nodes)


def limits_in_force(quotas: Mapping[str, Quota], pool: int, queue: Iterable[Trainer]) -> Limits:
    """The limits that follow from quotas for a pool of this size and the trainers in the queue.

    Owners without a trainer get no limits. A share is no more than its owner's trainers can use; shares that exceed the
    pool in total are scaled down to it.
    """
    usable: dict[str, int] = {}
    for trainer in queue:
        if trainer.owner in quotas:
            fits = trainer.max_nodes if trainer.min_nodes <= pool else 0
            usable[trainer.owner] = usable.get(trainer.owner, 0) + fits
    caps: dict[str, int] = {}
    shares: dict[str, float] = {}
    for owner in sorted(usable):
        quota = quotas[owner]
        if quota.max_nodes is not None and (quota.max_nodes < pool or not quota.max_nodes):
            caps[owner] = quota.max_nodes
        share = min(quota.share_of(pool), usable[owner])
        if share > 0:
            shares[owner] = share
    return Limits(MappingProxyType(caps), MappingProxyType(_whole(shares, pool)))


def _whole(shares: Mapping[str, float], pool: int) -> dict[str, int]:
    """Shares in whole nodes, each within one node of its exact value, in total no more than the pool."""
    total = sum(shares.values())
    scale = min(1.0, pool / total) if total else 1.0
    exact = {owner: share * scale for owner, share in shares.items()}
    found = {owner: math.floor(share + 1e-9) for owner, share in exact.items()}
    left = min(pool, round(total * scale)) - sum(found.values())
    # Nodes lost to rounding go to the owners who lost most by it.
    for owner in sorted(exact, key=lambda owner: (found[owner] - exact[owner], owner))[: max(left, 0)]:
        found[owner] += 1
    return {owner: nodes for owner, nodes in found.items() if nodes}

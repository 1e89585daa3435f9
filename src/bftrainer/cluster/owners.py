"""Owners of trainers: what each may have, as it is stored, and what they have.

`bftrainer owner` writes rows of the store; the controller reads them (`Rules.read`) and passes their quotas to the
scheduler, refuses what is too much (`Rules.check`), and shows them by the API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bftrainer.allocate.problem import Limits
from bftrainer.allocate.quotas import Quota
from bftrainer.cluster.schema import FINISHED, OwnerRow
from bftrainer.errors import InputError

if TYPE_CHECKING:
    from bftrainer.cluster.cluster import Cluster
    from bftrainer.cluster.spec import TrainerSpec
    from bftrainer.cluster.store import Store

MOST_TRAINERS = 1_000_000
MOST_NAME = 200

_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%")


class QuotaError(InputError):
    """An owner asks for more than they may have."""


def quota_of(row: OwnerRow) -> Quota:
    """What of it the scheduler holds."""
    return Quota(row.max_nodes, row.share_nodes, row.share_percent)


def check_row(row: OwnerRow) -> OwnerRow:
    """The row, if it can be meant. Raises `InputError`."""
    if not row.owner.strip() or not row.owner.isprintable() or len(row.owner) > MOST_NAME:
        raise InputError(f"an owner must be a word in one line, but got {row.owner!r:.80}")
    if row.max_trainers is not None and not 0 <= row.max_trainers <= MOST_TRAINERS:
        raise InputError(f"max trainers must be from 0 to {MOST_TRAINERS:,}, but got {row.max_trainers}")
    quota_of(row)
    return row


def read_share(text: str) -> tuple[int | None, float | None]:
    """A share as it is written: `4` is four nodes, `25%` a quarter of the pool. Raises `InputError`."""
    found = _PERCENT.fullmatch(text.strip())
    if found is not None:
        return None, float(found[1])
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise InputError(
            f"a share must be a number of nodes such as 4, or a part of the pool such as 25%, not {text!r}"
        )
    return int(text), None


def share_as_text(row: OwnerRow) -> str | None:
    """A share as it is written."""
    if row.share_percent is not None:
        return f"{row.share_percent:g}%"
    return None if row.share_nodes is None else str(row.share_nodes)


def limits_as_json(limits: Limits) -> dict[str, Any]:
    """The limits in force, for the record of a decision."""
    return {"caps": dict(limits.owner_caps), "shares": dict(limits.owner_shares)}


def limits_from_json(found: Mapping[str, Any] | None) -> Limits:
    """What `limits_as_json` wrote; no limits where nothing was written."""
    return Limits(dict(found["caps"]), dict(found["shares"])) if found else Limits()


def limits_as_text(limits: Limits) -> str:
    """The limits in force in a few words."""
    caps = [f"{owner} at most {nodes}" for owner, nodes in limits.owner_caps.items()]
    shares = [f"{owner} at least {nodes}" for owner, nodes in limits.owner_shares.items()]
    return ", ".join([*caps, *shares]) + " nodes"


class Rules:
    """The rows of the store as they were read last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: Mapping[str, OwnerRow] = MappingProxyType({})
        self.read()

    def read(self) -> None:
        """Read them again: a command may have changed them."""
        self._rows = MappingProxyType({row.owner: row for row in self._store.owners()})

    def of(self, owner: str) -> OwnerRow:
        """What one owner may have."""
        return self._rows.get(owner) or OwnerRow(owner)

    @property
    def rows(self) -> tuple[OwnerRow, ...]:
        """Of all owners of whom something was said."""
        return tuple(self._rows.values())

    @property
    def quotas(self) -> Mapping[str, Quota]:
        """What the scheduler is told."""
        found = {}
        for owner, row in self._rows.items():
            with suppress(InputError):  # whatever somebody wrote into the database by hand, training goes on
                if quota := quota_of(row):
                    found[owner] = quota
        return MappingProxyType(found)

    def check(self, owner: str, spec: TrainerSpec, unfinished: int) -> None:
        """Raise `QuotaError` if this is one trainer too many, or one that could never run."""
        row = self.of(owner)
        if row.max_trainers is not None and unfinished >= row.max_trainers:
            raise QuotaError(
                f"{owner} may have {row.max_trainers} trainers that are not finished, and has {unfinished}: "
                "wait for one to end, or cancel one"
            )
        if row.max_nodes is not None and spec.min_nodes > row.max_nodes:
            raise QuotaError(
                f"min_nodes is {spec.min_nodes}, and {owner} may have {row.max_nodes} nodes: it could never run"
            )


def as_json(owner: str, cluster: Cluster, past: Mapping[str, tuple[int, float, int]], now: float) -> dict[str, Any]:
    """What an owner may have and what they have. `past` is what the store says of trainers that are finished."""
    row = cluster.rules.of(owner)
    finished, node_seconds, samples = past.get(owner, (0, 0.0, 0))
    mine = [live for live in cluster.trainers.values() if live.owner == owner and live.state not in FINISHED]
    return {
        "owner": owner,
        "limits": {"max_nodes": row.max_nodes, "max_trainers": row.max_trainers, "share": share_as_text(row)},
        "use": {
            "nodes": sum(len(cluster.state.assigned.get(live.id, ())) for live in mine),
            "trainers": len(mine),
            "trainers_finished": finished,
            "node_seconds": node_seconds + sum(live.held(now) for live in mine),
            "samples": samples + sum(live.job.progress.samples for live in mine),
        },
    }

"""Pilots of owners: whose pilot a job is, for whom nodes are harvested, and which nodes change their owner.

Used where trainers run as their owners (`users.mode = "own"`). Users can name and describe their jobs as they like, so
a job is a pilot only if it runs as the account of an owner and its id was made here, for this owner and node. An owner
without a way to submit pilots, or with as many pilots as allowed, gets no more nodes; others do not suffer from it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import secrets
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bftrainer.cluster.pools.base import PoolHost
from bftrainer.cluster.pools.slurm.naming import PilotComment
from bftrainer.cluster.pools.slurm.read import Pilot
from bftrainer.cluster.pools.slurm.submit import failing
from bftrainer.cluster.pools.slurm.submit.base import Submitters
from bftrainer.cluster.pools.slurm.submit.limits import OF_ACCOUNT, AccountLimits, LimitsReader
from bftrainer.errors import InputError

_KEY, _OWNERS = "slurm.pilot-key", "slurm.owners"
_NONCE = 16
"""Characters of an id before its proof."""
_MOST_RETIRED = 50_000
_LOOK_UP_S = 300.0
"""How often the accounts of owners are looked up again."""
REST_S = 30.0
"""How long no pilot is submitted for an owner after a failure that had nothing to do with a node."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HandOver:
    """A node that gets a pilot of another owner."""

    node: str
    owner: str


class PilotOwners:
    """The owners of pilots."""

    def __init__(self, host: PoolHost, submitters: Submitters, limits: LimitsReader) -> None:
        self.submitters = submitters
        self._limits = limits
        self.handing: deque[HandOver] = deque()
        """Nodes to be handed over by the next round."""
        self._host = host
        key = host.recall(_KEY)
        if not key:
            key = secrets.token_hex(32)
            host.remember(_KEY, key)
        self._key = bytes.fromhex(key)
        self._owners: dict[str, None] = dict.fromkeys(host.recall(_OWNERS) or ())
        self._by_uid: dict[str, tuple[str, ...]] = {}
        self._looked_up = -math.inf
        self._retired: dict[str, None] = {}
        self._resting: dict[str, tuple[float, str]] = {}
        self._failing = failing.FailingPilots(lambda owner, node: submitters.log_of(owner, node))
        self._stored = str(host.recall(failing.STORED) or "")

    def take_handing(self) -> list[HandOver]:
        """Return the nodes to be handed over, each once."""
        taken = list(self.handing)
        self.handing.clear()
        return taken

    # Whose pilot a job is.

    def new_id(self, owner: str, node: str) -> str:
        """Return the id of a new pilot."""
        if owner not in self._owners:
            self._owners[owner] = None
            self._host.remember(_OWNERS, list(self._owners))
            self._looked_up = -math.inf
        nonce = secrets.token_hex(_NONCE // 2)
        return nonce + self._proof(owner, node, nonce)

    def look_up(self, now: float) -> None:
        """Look the accounts of all owners up, if that was long ago. It may wait for the site's directory of users."""
        if now - self._looked_up < _LOOK_UP_S:
            return
        by_uid: dict[str, tuple[str, ...]] = {}
        for owner in self._owners:
            try:
                uid = str(self._host.accounts.of(owner).uid)
            except InputError:
                continue
            by_uid[uid] = (*by_uid.get(uid, ()), owner)
        self._by_uid, self._looked_up = by_uid, now

    def owner_of(self, uid: str, comment: PilotComment) -> str | None:
        """Return the owner of the pilot with this comment; None if the job of this user is no pilot of ours."""
        if comment.id in self._retired:
            return None
        nonce, proof = comment.id[:_NONCE], comment.id[_NONCE:]
        for owner in self._by_uid.get(uid, ()):
            if proof and hmac.compare_digest(proof.encode(), self._proof(owner, comment.node, nonce).encode()):
                return owner
        return None

    def retire(self, listed: Iterable[Pilot]) -> None:
        """Take jobs with the ids of pilots that have ended for what they are: jobs like any other.

        An id that a job has which has not ended stays: it may be that of the pilot.
        """
        pilots = tuple(listed)
        alive = {pilot.id for pilot in pilots if pilot.state != "ended"}
        self._retired.update(dict.fromkeys(pilot.id for pilot in pilots if pilot.id and pilot.id not in alive))
        while len(self._retired) > _MOST_RETIRED:
            del self._retired[next(iter(self._retired))]

    def _proof(self, owner: str, node: str, nonce: str) -> str:
        text = f"bftrainer pilot\0{owner}\0{node}\0{nonce}".encode(errors="surrogateescape")
        return hmac.digest(self._key, text, hashlib.sha256).hex()[:32]

    # For whom nodes are harvested.

    def why_not(self, owner: str, now: float) -> str:
        """Return why no pilot can be submitted for an owner now; empty if one can."""
        until, why = self._resting.get(owner, (-math.inf, ""))
        return self.submitters.why_not(owner) or (why if now < until else "") or self._failing.why_not(owner, now)

    def failed(self, owner: str, why: str, now: float) -> None:
        """Record that no pilot can be submitted for an owner, for whatever node."""
        self._resting[owner] = (now + REST_S, why)

    def most(self, owner: str) -> int | None:
        """Return how many pilots an owner may have at most; None if there is no limit."""
        allowed = (self.submitters.most(owner), self.limits_of(owner).pilots)
        return min((count for count in allowed if count is not None), default=None)

    def limits_of(self, owner: str) -> AccountLimits:
        """Return the limits of an owner's account."""
        return self._limits.of(self._host.accounts.name_of(owner))

    async def read_limits(self, now: float) -> None:
        """Read the limits of all owners' accounts, if that was long ago."""
        await self._limits.read([self._host.accounts.name_of(owner) for owner in self._owners], now)

    def see(self, pilots: Collection[Pilot], now: float) -> None:
        """Take Slurm's list of pilots: which owners cannot have more of them now, and which pilots have ended."""
        for pilot in pilots:
            if pilot.state == "waiting" and OF_ACCOUNT.search(pilot.reason):
                self.failed(pilot.owner, f"the limits of their account hold pilots back ({pilot.reason})", now)
        for owner in self._failing.see(pilots, self._host.owners, self._host.nodes, now):
            why = self._failing.why_not(owner, now)
            self._host.note("pilots_failed", owner=owner, error=why)
            _log.warning("%s", why)
        if self._failing.warning != self._stored:
            self._stored = self._failing.warning
            self._host.remember(failing.STORED, self._stored)
        self.retire(pilots)

    def describe(self) -> Mapping[str, Any]:
        """Return facts for `status`."""
        warning = {"warning": self._failing.warning} if self._failing.warning else {}
        return {**self.submitters.describe(), **warning}

    def choose(self, nodes: Sequence[str], pilots: Mapping[str, Pilot], now: float) -> dict[str, str]:
        """Return the owner of each node that is to be harvested now."""
        if not nodes:
            return {}
        has = Counter(pilot.owner for pilot in pilots.values())
        chosen: dict[str, str] = {}
        chosen_for = Counter[str]()
        for node, owner in self._host.owners_for(nodes).items():
            most = self.most(owner)
            room = self._failing.room(owner, pilots.values())
            if room is not None and chosen_for[owner] >= room:
                continue
            if not self.why_not(owner, now) and (most is None or has[owner] < most):
                chosen[node] = owner
                has[owner] += 1
                chosen_for[owner] += 1
        return chosen

    def forget(self) -> None:
        """Try all owners again."""
        self._resting.clear()
        self._failing.forget()
        self._looked_up = -math.inf

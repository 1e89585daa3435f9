"""Limits of Slurm's associations: how many pilots an owner's account may have, and how long they may run.

Where Slurm has accounting, `sacctmgr` tells the limits of all users in one answer; they are read again every few
minutes. Where it has none, or does not show them, limits are learned from refusals (`owned.py`).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bftrainer.cluster.pools.slurm.runner import SlurmCommandError, SlurmRunner
from bftrainer.slurm.site import seconds

ASK_EVERY_S = 300.0
_COUNTS = ("MaxJobs", "MaxSubmitJobs", "GrpJobs", "GrpSubmitJobs", "GrpTRES")
_FORMAT = ("User", "Account", *_COUNTS, "MaxWall")
_NODES = re.compile(r"(?:^|,)node=(\d+)")
OF_ACCOUNT = re.compile(r"accounting/QOS policy|Assoc[A-Z]|QOS[A-Z]|Invalid account|Invalid qos", re.IGNORECASE)
"""Reasons of Slurm that have to do with the account of a job, and not with its node."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """Limits of one user. None: there is none."""

    pilots: int | None = None
    minutes: int | None = None


NO_LIMITS = AccountLimits()


class LimitsReader:
    """The limits of users, as last read."""

    def __init__(self, runner: SlurmRunner, account: str = "") -> None:
        """`account` is the one that pilots name; empty: each user's default, so any association may apply."""
        self._runner = runner
        self._account = account
        self._limits: Mapping[str, AccountLimits] = {}
        self._asked: tuple[frozenset[str], float] = (frozenset(), -math.inf)

    def of(self, user: str) -> AccountLimits:
        """Return the limits of a user."""
        return self._limits.get(user, NO_LIMITS)

    async def read(self, users: Collection[str], now: float) -> None:
        """Read the limits of users again, if that was long ago. An answer that does not come changes nothing."""
        wanted, (known, at) = frozenset(users), self._asked
        if not wanted or (wanted <= known and now - at < ASK_EVERY_S):
            return
        self._asked = (wanted, now)
        words = ("sacctmgr", "-nP", "show", "assoc", f"format={','.join(_FORMAT)}")
        try:
            self._limits = await self._runner.ask(words, lambda text: read_limits(text, wanted, self._account))
        except SlurmCommandError as problem:
            _log.info("limits of accounts are not known, and will be learned: %s", problem)


def read_limits(text: str, users: Collection[str], account: str = "") -> Mapping[str, AccountLimits]:
    """Parse the limits of users from `sacctmgr -nP show assoc`.

    A row without a user is that of an account, and holds for each of its users. A user with several accounts has the
    largest of their limits, unless `account` names the one that counts.
    """
    rows = [dict(zip(_FORMAT, line.split("|"), strict=False)) for line in text.splitlines() if "|" in line]
    parents: dict[str, list[AccountLimits]] = {}
    for row in rows:
        if not row["User"]:
            parents.setdefault(row["Account"], []).append(_limits(row))
    found: dict[str, AccountLimits] = {}
    for row in rows:
        user = row["User"]
        if user in users and (not account or row["Account"] == account):
            own = _least([_limits(row), *parents.get(row["Account"], ())])
            found[user] = own if user not in found else _largest(found[user], own)
    return MappingProxyType(found)


def _limits(row: Mapping[str, str]) -> AccountLimits:
    counts = []
    for name in _COUNTS:
        value = row.get(name, "")
        nodes = _NODES.search(value) if "TRES" in name else None
        if nodes is not None:
            counts.append(int(nodes[1]))
        elif value.isdigit():
            counts.append(int(value))
    minutes = None
    if wall := row.get("MaxWall", ""):
        try:
            minutes = int(seconds(wall) // 60)
        except (ValueError, OverflowError):
            minutes = None
    return AccountLimits(min(counts, default=None), minutes)


def _least(all_limits: Collection[AccountLimits]) -> AccountLimits:
    pilots = [each.pilots for each in all_limits if each.pilots is not None]
    minutes = [each.minutes for each in all_limits if each.minutes is not None]
    return AccountLimits(min(pilots, default=None), min(minutes, default=None))


def _largest(one: AccountLimits, other: AccountLimits) -> AccountLimits:
    pilots = None if None in (one.pilots, other.pilots) else max(one.pilots or 0, other.pilots or 0)
    minutes = None if None in (one.minutes, other.minutes) else max(one.minutes or 0, other.minutes or 0)
    return AccountLimits(pilots, minutes)
